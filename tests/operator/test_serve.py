"""What the process does before it begins."""

import pytest
from carpool_core.kube.api import GPU_TRAINING_JOBS, Page, ResourceKind, Selector
from carpool_core.kube.errors import Forbidden, NotFound
from carpool_core.testing.kube import FakeKube
from carpool_operator.commands import NotInstalledError, check_installed


class Confined(FakeKube):
    """Lets jobs be read in one namespace only."""

    async def list_page(
        self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
    ) -> Page:
        if kind is GPU_TRAINING_JOBS and selector.namespace != "team-a":
            raise Forbidden("cannot list resource gputrainingjobs at the cluster scope", status=403)
        return await super().list_page(kind, selector, limit=limit, continue_token=continue_token)


async def test_operator_with_rights_in_its_namespaces_only_begins() -> None:
    """Regression: it listed the jobs of the whole cluster once, whatever its namespaces."""
    await check_installed(Confined(), ("team-a", "team-b"))


async def test_cluster_without_our_types_is_told_of() -> None:
    kube = FakeKube()
    kube.fail_next("list", GPU_TRAINING_JOBS, NotFound("the server could not find the requested resource", status=404))
    with pytest.raises(NotInstalledError, match="install the chart"):
        await check_installed(kube, ())
