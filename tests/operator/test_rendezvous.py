"""Several workers of one job find each other."""

import re
from typing import Any

import pytest
from carpool_core.kube.api import SERVICES
from carpool_core.kube.errors import Forbidden
from carpool_operator.conditions import find
from carpool_operator.pods import build_pod, build_service, service_name
from operator_fixtures import UID, job, template
from operator_world import World


def variables(pod: dict[str, Any], container: int = 0) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][container].get("env", [])}


def test_each_worker_knows_its_rank_and_where_worker_0_is() -> None:
    """Regression: a job of several workers had to invent its own rendezvous."""
    of = job(workers=3, gpusPerWorker=2)
    service = build_service(of)
    pods = [build_pod(of, worker, 1) for worker in range(3)]
    assert [variables(pod)["RANK"] for pod in pods] == ["0", "1", "2"]
    first, *_ = pods
    address = f"{first['spec']['hostname']}.{service['metadata']['name']}"
    for pod in pods:
        env = variables(pod)
        assert (env["MASTER_ADDR"], env["WORLD_SIZE"]) == (address, "3")
        assert (env["PET_MASTER_ADDR"], env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == (address, "3", "2")
        assert env["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
        assert pod["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert len({pod["spec"]["hostname"] for pod in pods}) == 3
    assert service["metadata"]["ownerReferences"][0]["uid"] == UID
    assert service["spec"]["publishNotReadyAddresses"], "they look each other up before they are ready"


def test_what_the_template_says_itself_stays() -> None:
    own = [{"name": "MASTER_ADDR", "value": "elsewhere"}, {"name": "RANK", "value": "7"}]
    containers = [{"name": "train", "image": "train:1", "env": own}]
    pod = build_pod(job(workers=2, template=template(containers=containers, subdomain="mine")), 1, 1)
    env = variables(pod)
    assert (env["MASTER_ADDR"], env["RANK"], env["WORLD_SIZE"]) == ("elsewhere", "7", "2")
    assert pod["spec"]["subdomain"] == "mine"
    assert env["PET_MASTER_ADDR"] == "worker-0.mine"


def test_job_of_one_worker_is_left_as_it_is() -> None:
    pod = build_pod(job(), 0, 1)
    assert variables(pod) == {}
    assert "hostname" not in pod["spec"]


@pytest.mark.parametrize("name", ["resnet", "7b", "a.b", "a-b", f"9{'.x' * 23}y", "a" * 48])
def test_name_of_the_service_is_one_that_kubernetes_takes(name: str) -> None:
    of = job()
    found = service_name(type(of)(metadata=type(of.metadata)(name=name), spec=of.spec))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(found) <= 63


async def test_service_is_there_before_the_workers_and_goes_with_the_job() -> None:
    world = World()
    world.apply(workers=2)
    await world.settle()
    made = [call.plural for call in world.kube.calls if call.verb == "create" and call.plural != "events"]
    assert made == ["services", "pods", "pods"]
    (owner,) = world.kube.dump(SERVICES, "x-workers", "default")["metadata"]["ownerReferences"]
    assert owner["uid"] == world.job().metadata.uid


async def test_second_attempt_uses_the_same_service() -> None:
    world = World(backoff_s=1.0)
    world.apply(workers=2)
    await world.settle()
    world.run_pods()
    await world.settle()
    world.end_pod("x-worker-1-1", exit_code=1)
    await world.settle()
    world.clock.advance(5)
    await world.settle()
    assert world.living() == ["x-worker-0-2", "x-worker-1-2"]
    assert len(world.kube.dump_all(SERVICES)) == 1


def reason(world: World) -> tuple[str, str]:
    placed = find(world.job().status, "Placed")
    assert placed is not None
    return placed.reason, placed.message


async def test_service_of_somebody_else_is_not_taken_over() -> None:
    world = World()
    world.kube.seed(SERVICES, {"metadata": {"name": "x-workers"}})
    world.apply(workers=2)
    await world.settle()
    assert reason(world)[0] == "ServiceNameTaken"
    assert "service x-workers exists already and has no controller" in reason(world)[1]
    assert world.pods() == []


async def test_missing_right_to_create_services_is_said() -> None:
    world = World()
    world.kube.fail_next("create", SERVICES, Forbidden("services is forbidden"))
    world.apply(workers=2)
    await world.settle()
    assert reason(world) == ("ServiceForbidden", "services is forbidden")
