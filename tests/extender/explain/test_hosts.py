"""What kube-scheduler asks of a node before it offers it, and so do explain and what-if."""

from dataclasses import replace

import msgspec
import pytest
from asking_world import ASKER, RULES, asks, job_with, on_a_node, predicted
from carpool_core.kube.api import NODES, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid
from carpool_extender.explain.enquiry import asked, explained
from carpool_extender.testing import gpu_node, pod_of, seed_job, seed_node, tenant

TAINTED = {"taints": [{"key": "team", "value": "b", "effect": "NoSchedule"}]}


def affinity(key, operator, *values):
    term = {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}


@pytest.mark.parametrize(
    ("spec", "template", "reason"),
    [
        pytest.param(TAINTED, {}, "taint team=b:NoSchedule", id="taint"),
        pytest.param(TAINTED, {"tolerations": [{"key": "team", "value": "b"}]}, None, id="tolerated"),
        pytest.param(TAINTED, {"tolerations": [{"key": "team", "value": "c"}]}, "taint team=b", id="another value"),
        pytest.param(TAINTED, {"tolerations": [{"operator": "Exists"}]}, None, id="everything tolerated"),
        pytest.param({"taints": [{"key": "x", "effect": "PreferNoSchedule"}]}, {}, None, id="a mere preference"),
        pytest.param({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, {}, None, id="the operator's"),
        pytest.param({"unschedulable": True}, {}, "taint node.kubernetes.io/unschedulable", id="cordoned"),
        pytest.param({}, {"nodeSelector": {"pool": "serving"}}, "does not match the nodeSelector", id="selector"),
        pytest.param({}, {"nodeSelector": {"pool": "training"}}, None, id="selected"),
        pytest.param({}, affinity("pool", "NotIn", "training"), "or node affinity", id="affinity"),
        pytest.param({}, affinity("pool", "In", "training"), None, id="affine"),
        pytest.param({}, affinity("rank", "Gt", "4"), None, id="greater"),
        pytest.param({}, affinity("rank", "Lt", "4"), "or node affinity", id="not less"),
        pytest.param({}, affinity("pool", "DoesNotExist"), "or node affinity", id="exists"),
        pytest.param({}, asks(cpu="9"), "not enough cpu: the pod requests 9, 8 are left", id="CPU"),
        pytest.param({}, asks(cpu="7500m", memory="64Gi"), None, id="just enough"),
        pytest.param({}, asks(memory="65Gi"), "requests 65.0Gi, 64.0Gi are left", id="memory"),
        pytest.param(
            {}, {"containers": [{"resources": {"limits": {"cpu": 9}}}]}, "not enough cpu", id="a limit is a request"
        ),
        pytest.param(
            {}, asks(cpu="1") | {"initContainers": [{"resources": {"requests": {"cpu": "9"}}}]}, "not enough cpu",
            id="init container",
        ),
    ],
)  # fmt: skip
async def test_nothing_goes_where_kube_scheduler_would_not_send_it(spec, template, reason):
    told = (await asked(on_a_node(spec), job_with(template), RULES, predicted, ASKER)).lines
    assert told[1].startswith("would go to a" if reason is None else "would have to wait now")
    if reason is not None:
        (gpus,) = (line for line in told if "2 GPUs of a" in line)
        assert reason in gpus


async def test_what_other_pods_take_is_not_there_and_a_jobs_own_pods_are_in_nobodys_way():
    kube = on_a_node({})
    seed_job(kube, "x", spec={"template": {"spec": asks(cpu="6")}})
    kube.seed(PODS, pod_of("x", nodeName="a", **asks(cpu="6")))
    told = (await asked(kube, job_with(asks(cpu="6")), RULES, predicted, ASKER)).lines
    assert any("2 GPUs of a" in line and "the pod requests 6, 2 are left" in line for line in told)
    assert "not enough" not in "".join((await explained(kube, "x", "default", RULES, ASKER)).lines)


async def test_several_workers_are_placed_together():
    kube = on_a_node({})
    template = asks(cpu="3")
    told = (await asked(kube, job_with(template, workers=2), RULES, predicted, ASKER)).lines
    assert told[1] == "all 2 workers would get places now"
    assert [line.partition(" (")[0] for line in told[2:4]] == ["  worker 0 would go to a", "  worker 1 would go to a"]
    told = (await asked(kube, job_with(template, workers=3), RULES, predicted, ASKER)).lines
    assert told[1] == "only 2 of 3 workers would get places now; 1 worker would have to wait for theirs"


async def test_what_may_not_be_read_is_said_not_to_be_checked():
    kube = on_a_node(TAINTED)
    kube.fail_next("list", NODES, Forbidden("no", status=403))
    told = (await asked(kube, job_with({}), RULES, predicted, ASKER)).lines
    assert told[1].startswith("would go to a")
    assert told[2].startswith("not checked: taints")
    assert told[3].startswith("places by least-slowdown")
    kube.fail_next("list", PODS, Forbidden("no", status=403))
    volumes = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "v"}}]}
    asker = replace(ASKER, unchecked=["not checked: the manifest"])
    told = (await asked(kube, job_with(volumes), RULES, predicted, asker)).lines
    assert told[1] == "would have to wait now: kube-scheduler would offer none of the nodes"
    assert told[2:5] == [
        "not checked: the manifest",
        "not checked: volumes",
        "not checked: what other pods take of CPU and memory (you may not list all pods)",
    ]


@pytest.mark.parametrize(
    ("held", "workers", "before"),
    [
        pytest.param(0, 1, "default/x has no place yet", id="no place"),
        pytest.param(0, 3, "needs places for 3 workers of 1 GPU at once", id="no room for all"),
        pytest.param(1, 1, "it keeps its place; decided now", id="a place"),
        pytest.param(1, 2, "would go to a", id="a place for one of two"),
    ],
)
async def test_explain_too_says_below_the_place_what_was_not_checked(held, workers, before):
    """Regression: that taints were not looked at stood below all GPUs, far from the place."""
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x", spec={"workers": workers, "sharing": {"mode": "Exclusive"}}))
    mine = [msgspec.structs.replace(tenant("x", [f"GPU-a-{i}"]), job_uid=uid) for i in range(held)]
    seed_node(kube, gpu_node("a", 2, mine))
    kube.fail_next("list", NODES, Forbidden("no", status=403))
    told = (await explained(kube, "x", "default", RULES, ASKER)).lines
    (place,) = (number for number, line in enumerate(told) if line.startswith("not checked: "))
    assert before in told[place - 1]


async def test_what_could_never_run_is_told_with_what_was_not_checked():
    kube = on_a_node({})
    kube.fail_next("list", NODES, Forbidden("no", status=403))
    answer = await asked(kube, job_with({}, gpu={"product": "T4"}), RULES, predicted, ASKER)
    assert answer.is_hopeless
    assert answer.lines[1].startswith("could never run here")
    assert answer.lines[2].startswith("not checked: taints")
