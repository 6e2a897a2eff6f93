"""The control plane has what the chart installs."""

import pytest
from carpool_e2e.cluster import Cluster

pytestmark = pytest.mark.e2e


def test_the_charts_accounts_and_policies_are_there(control_plane: Cluster) -> None:
    accounts = control_plane.kubectl("get", "serviceaccounts", "-n", "carpool-system", "-o", "name").split()
    policies = control_plane.kubectl("get", "validatingadmissionpolicies", "-o", "name")
    assert {f"serviceaccount/carpool-{name}" for name in ("operator", "scheduler", "node-agent")} <= set(accounts)
    assert "carpool-pods" in policies
