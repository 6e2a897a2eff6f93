"""What the site has chosen, and what a job may choose for itself."""

from dataclasses import dataclass

from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.filters import NO_LIMITS
from carpool_extender.framework.scores import Policy, find_policy


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the site has chosen."""

    policy: Policy
    slots: int
    """Most tenants of one GPU."""
    conditions: AdmissionLimits = NO_LIMITS
    """What a GPU must be like before the policy looks at it."""

    def policy_for(self, pod_request: PodRequest) -> Policy:
        """Return the job's own policy, or the site's where it has none."""
        return self.policy if pod_request.policy is None else find_policy(pod_request.policy)

    def conditions_for(self, pod_request: PodRequest) -> AdmissionLimits:
        """Return what a GPU must be like for a job."""
        alone = self.policy_for(pod_request).alone
        return self.conditions.in_exclusive_use() if alone else self.conditions
