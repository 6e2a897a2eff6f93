"""What the site has chosen, and what a job may choose for itself."""

from dataclasses import dataclass

from carpool_extender.cache.pod_request import Applicant
from carpool_extender.framework.admission_limits import Conditions
from carpool_extender.framework.filters import NO_CONDITIONS
from carpool_extender.framework.scores import Policy, find_policy


@dataclass(frozen=True, slots=True)
class Rules:
    """What the site has chosen."""

    policy: Policy
    slots: int
    """Most tenants of one GPU."""
    conditions: Conditions = NO_CONDITIONS
    """What a GPU must be like before the policy looks at it."""

    def policy_for(self, applicant: Applicant) -> Policy:
        """Return the job's own policy, or the site's where it has none."""
        return self.policy if applicant.policy is None else find_policy(applicant.policy)

    def conditions_for(self, applicant: Applicant) -> Conditions:
        """Return what a GPU must be like for a job."""
        alone = self.policy_for(applicant).alone
        return self.conditions.in_exclusive_use() if alone else self.conditions
