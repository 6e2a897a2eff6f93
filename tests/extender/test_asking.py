"""Explain and what-if: the decision about a live cluster, told to people."""

import msgspec
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid
from carpool_extender.asking import asked, explain_command, explained, what_if
from carpool_extender.policies import find_policy
from carpool_extender.rules import Rules
from carpool_extender.testing import gpu_node, prediction, seed_job, seed_node, tenant
from click.testing import CliRunner

RULES = Rules(find_policy("least-slowdown"), 8)


async def test_explain_tells_the_place_its_reason_and_every_gpu():
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    seed_node(kube, gpu_node("a", 2, [mine, tenant("full", ["GPU-a-1"], memory_limit_mib=40000)]))
    told = await explained(kube, "x", "default", RULES)
    assert told[0] == "x has a place on a: least-slowdown: alone"
    assert "fits by MPS, leaves 36,960 MiB" in told[1]
    assert told[2].endswith("needs 4,000 MiB, has 960 MiB free (3,040 MiB short)")


async def test_explain_of_a_waiting_job_without_nodes():
    kube = FakeKube()
    seed_job(kube, "x")
    told = await explained(kube, "x", "default", RULES)
    assert told == ["default/x has no place yet", "  no node reports GPUs; is the node agent running?"]


async def test_what_if_names_the_place_and_creates_nothing():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    body = {"metadata": {"name": "new", "namespace": "default"}, "spec": {"template": {}}}
    job = msgspec.convert(body, GpuTrainingJob)

    async def predictor(wanted, products):
        status = msgspec.structs.replace(wanted.status, prediction=prediction(products=products))
        return msgspec.structs.replace(wanted, status=status)

    told = await asked(kube, job, RULES, predictor)
    assert told[0].startswith("prediction: Predicted")
    assert told[1].startswith("would go to a: least-slowdown: MPS on GPU 0 of a beside default/y")
    assert len(await asked(FakeKube(), job, RULES, predictor)) == 3


def test_the_commands_refuse_with_a_sentence(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("spec: 3")
    result = CliRunner().invoke(what_if, [str(manifest)])
    assert result.exit_code == 1
    assert "expected a GpuTrainingJob" in result.output
    assert CliRunner().invoke(explain_command, ["x", "--policy", "fast"]).exit_code == 2
