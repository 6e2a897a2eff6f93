"""Explain and what-if: the decision about a live cluster, told to people."""

from datetime import timedelta

import msgspec
from carpool_core.clock import rfc3339
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid
from carpool_extender.asking import Asker, asked, explain_command, explained, what_if
from carpool_extender.conditions import Conditions
from carpool_extender.policies import find_policy
from carpool_extender.rules import Rules
from carpool_extender.standing import SILENCE_S
from carpool_extender.testing import T4, device, gpu_node, prediction, seed_job, seed_node, tenant
from click.testing import CliRunner

CLOCK = FakeClock()
RULES, ASKER = Rules(find_policy("least-slowdown"), 8), Asker(CLOCK)


async def test_explain_tells_the_place_its_reason_and_every_gpu():
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    seed_node(kube, gpu_node("a", 2, [mine, tenant("full", ["GPU-a-1"], memory_limit_mib=40000)]))
    told = await explained(kube, "x", "default", RULES, ASKER)
    assert told[0] == "x has a place on a: least-slowdown: alone"
    assert "fits by MPS, leaves 36,960 MiB" in told[1]
    assert told[2].endswith("needs 4,000 MiB, has 960 MiB free (3,040 MiB short)")


async def test_explain_of_a_waiting_job_without_nodes():
    kube = FakeKube()
    seed_job(kube, "x")
    told = await explained(kube, "x", "default", RULES, ASKER)
    assert told == ["default/x has no place yet", "  no node reports GPUs; is the node agent running?"]


async def test_what_if_names_the_place_and_creates_nothing():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    body = {"metadata": {"name": "new", "namespace": "default"}, "spec": {"template": {}}}
    job = msgspec.convert(body, GpuTrainingJob)

    async def predictor(wanted, products):
        status = msgspec.structs.replace(wanted.status, prediction=prediction(products=products))
        return msgspec.structs.replace(wanted, status=status)

    told = await asked(kube, job, RULES, predictor, ASKER)
    assert told[0].startswith("prediction: Predicted")
    assert told[1].startswith("would go to a: least-slowdown: MPS on GPU 0 of a beside default/y")
    assert len(await asked(FakeKube(), job, RULES, predictor, ASKER)) == 3


def test_the_commands_refuse_with_a_sentence(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("spec: 3")
    result = CliRunner().invoke(what_if, [str(manifest)])
    assert result.exit_code == 1
    assert "expected a GpuTrainingJob" in result.output
    refused = CliRunner().invoke(explain_command, ["x", "--policy", "fast"])
    assert refused.exit_code == 1
    assert "policy 'fast' is unknown; choose one of" in refused.output
    assert CliRunner().invoke(explain_command, ["x", "--most-jobs", "0"]).exit_code == 1


async def predicted(wanted, products):
    status = msgspec.structs.replace(wanted.status, prediction=prediction(products=products))
    return msgspec.structs.replace(wanted, status=status)


def job_of(spec=(), **annotations):
    meta = {"name": "new", "namespace": "default", "annotations": annotations}
    return msgspec.convert({"metadata": meta, "spec": {"template": {}, **dict(spec)}}, GpuTrainingJob)


async def test_the_sites_preconditions_hold():
    kube, rules = FakeKube(), Rules(find_policy("least-slowdown"), 8, Conditions(most_jobs=1))
    seed_node(kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    told = await asked(kube, job_of(), rules, predicted, ASKER)
    assert told[1] == "would have to wait now"
    assert told[2].endswith("1 tenant, the policy allows 1")


async def test_a_job_may_choose_its_policy_only_where_the_site_lets_it():
    kube, mine = FakeKube(), job_of(**{"carpool.dev/policy": "exclusive"})
    seed_node(kube, gpu_node("a", 1))
    assert (await asked(kube, mine, RULES, predicted, ASKER))[-1].startswith("PolicyNotAllowed: ")
    told = await asked(kube, mine, RULES, predicted, Asker(CLOCK, job_policies=True))
    assert told[1].startswith("would go to a: exclusive: Exclusive on GPU 0")


async def test_workers_for_which_there_is_no_room_together_wait():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    spec = {"workers": 2, "sharing": {"mode": "Exclusive"}}
    seed_job(kube, "x", spec=spec)
    for told in (
        await asked(kube, job_of(spec), RULES, predicted, ASKER),
        await explained(kube, "x", "default", RULES, ASKER),
    ):
        assert "needs places for 2 workers of 1 GPU at once, there is room for 1" in told[1]
        assert "fits by Exclusive" in told[2]


async def test_nothing_goes_where_the_agent_is_silent():
    kube = FakeKube()
    for name, ago_s in (("a", 20.0), ("b", SILENCE_S + 10), ("c", 0.0), ("d", 4 * SILENCE_S)):
        node = gpu_node(name, 1)
        heartbeat = rfc3339(CLOCK.now() - timedelta(seconds=ago_s))
        status = msgspec.structs.replace(node.status, heartbeat_time=heartbeat)
        seed_node(kube, msgspec.structs.replace(node, status=status))
    told = await asked(kube, job_of(), RULES, predicted, Asker(CLOCK, each_gpu=True))
    assert ["fits" in line for line in told[2:]] == [True, False, True, False]
    assert f"its agent has not reported for {SILENCE_S + 10:.0f} s" in told[3]


async def test_a_running_job_is_no_stranger_on_its_own_gpu():
    """Regression: what it uses counted as used without a reservation, on the very GPU that it has."""
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    node = gpu_node("a", 1, [mine])
    used = Tenant(pod_uid=mine.pod_uid, gpu_uuid=mine.gpu_uuids[0], memory_mib=3900)
    seed_node(kube, msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=[used])))
    told = await explained(kube, "x", "default", RULES, ASKER)
    assert not any("without a reservation" in line for line in told)
    assert "it is here" in told[1]
    assert "fits by MPS" in told[1]


def test_without_a_cluster_there_is_a_sentence_and_no_traceback(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("{kind: GpuTrainingJob, metadata: {name: x}, spec: {template: {}}}")
    nowhere = dict.fromkeys(("KUBECONFIG", "KUBERNETES_SERVICE_HOST"))
    for command, argument in ((explain_command, "x"), (what_if, str(manifest))):
        result = CliRunner(env=nowhere).invoke(command, [argument])
        assert result.exit_code == 1
        assert "Error: " in result.output
        assert "KUBECONFIG" in result.output


async def test_gpus_of_which_the_same_is_said_stand_on_one_line():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2, [tenant("y", ["GPU-a-0"], memory_limit_mib=40000)]))
    for name in ("b", "c"):
        seed_node(kube, gpu_node(name, [device(i, name, product=T4) for i in range(4)]))
    job = job_of({"gpu": {"product": "A100"}})
    told = await asked(kube, job, RULES, predicted, ASKER)
    assert [line.partition(":")[0].strip() for line in told[2:]] == [
        "GPU 0 of a (NVIDIA A100-SXM4-40GB)",
        "GPU 1 of a (NVIDIA A100-SXM4-40GB)",
        "8 GPUs of 2 nodes (Tesla T4)",
    ]
    assert len(await asked(kube, job, RULES, predicted, Asker(CLOCK, each_gpu=True))) == 2 + 10
