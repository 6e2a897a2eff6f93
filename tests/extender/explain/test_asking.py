"""Explain and what-if: the decision about a live cluster, told to people."""

from datetime import timedelta

import msgspec
import pytest
from asking_world import CLOCK, OPTIONS, RULES, explain_job, job_of, on_a_node, predicted, what_if
from carpool_core.clock import rfc3339
from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.kube.api import CONFIG_MAPS, GPU_NODES
from carpool_core.kube.errors import Forbidden
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.prediction import Prediction
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid, Precision, SharingMode
from carpool_extender.cache.health import SILENCE_S
from carpool_extender.explain.commands import JobPredictor, job_predictor
from carpool_extender.explain.explain import Options
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.diagnosis import broken
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.settings import AskSettings
from carpool_extender.testing import T4, device, gpu_node, seed_job, seed_node, tenant
from carpool_extender.workloads import JobOptions
from carpool_predictor.calibration.document import SIMULATED, Calibration, RunMeasurement, RunPrediction, Stack
from carpool_predictor.calibration.observe import observe
from carpool_predictor.calibration.store import KEY, CalibrationStore, StoredCalibration
from carpool_predictor.models.memory import shipped


async def test_explain_tells_the_place_its_reason_and_every_gpu():
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    seed_node(kube, gpu_node("a", 2, [mine, tenant("full", ["GPU-a-1"], memory_limit_mib=40000)]))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told[0] == "x has a place on a (a step takes about 100 ms there): least-slowdown: alone"
    assert told[1] == "it keeps its place; decided now with policy least-slowdown it would go there again"
    assert told[3] == "  1. GPU 0 of a: 0.00 of slowdown added"
    assert "it is here; without it: fits by MPS, leaves 36,960 MiB" in told[4]
    assert told[5].endswith("needs 4,000 MiB, has 960 MiB free (3,040 MiB short)")


async def test_explain_of_a_waiting_job_without_nodes():
    kube = FakeKube()
    seed_job(kube, "x")
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told == ["default/x has no place yet", "  no node reports GPUs; is the node agent running?"]


async def test_what_if_names_the_place_and_creates_nothing():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    told = (await what_if(kube, job_of(), RULES, predicted, OPTIONS)).lines
    assert told[0].startswith("prediction: Predicted")
    assert told[1].startswith(
        "would go to a (a step takes about 100 ms there): least-slowdown: MPS on GPU 0 of a beside default/y"
    )
    assert len((await what_if(FakeKube(), job_of(), RULES, predicted, OPTIONS)).lines) == 3


async def test_the_sites_preconditions_hold():
    kube, rules = FakeKube(), SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(max_jobs=1))
    seed_node(kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    told = (await what_if(kube, job_of(), rules, predicted, OPTIONS)).lines
    assert told[1] == "would have to wait now: 1 GPU: jobs on a GPU 2, the site's limit is 1"
    assert told[-1].endswith("jobs on a GPU 2, the site's limit is 1")


async def test_what_has_to_wait_for_gpus_of_one_node_is_told_how_many_there_are():
    """Regression: of three GPUs it was said that they fit, and of the job that it would have to wait."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 4, [tenant("y", ["GPU-a-0"], SharingMode.EXCLUSIVE)]))
    told = (await what_if(kube, job_of({"gpusPerWorker": 4}), RULES, predicted, OPTIONS)).lines
    best = "needs 4 GPUs on one node in one mode, the best node has 3; 1 GPU: used exclusively by default/y"
    assert told[1] == f"would have to wait now: {best}"


async def test_a_job_may_choose_its_policy_only_where_the_site_lets_it():
    kube, mine = FakeKube(), job_of(**{"carpool.dev/policy": "exclusive"})
    seed_node(kube, gpu_node("a", 1))
    assert ((await what_if(kube, mine, RULES, predicted, OPTIONS)).lines)[-1].startswith("PolicyNotAllowed: ")
    told = (await what_if(kube, mine, RULES, predicted, Options(CLOCK, JobOptions(policies=True)))).lines
    assert told[1].startswith("would go to a (a step takes about 100 ms there): exclusive: Exclusive on GPU 0")


async def test_workers_for_which_there_is_no_room_together_wait():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2, [tenant("y", ["GPU-a-1"], SharingMode.EXCLUSIVE)]))
    spec = {"workers": 2, "sharing": {"mode": "Exclusive"}}
    seed_job(kube, "x", spec=spec)
    for told in (
        (await what_if(kube, job_of(spec), RULES, predicted, OPTIONS)).lines,
        (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines,
    ):
        assert "needs places for 2 workers of 1 GPU at once, there is room for 1" in told[1]
        assert "fits by Exclusive" in told[-2]


async def test_workers_for_which_there_would_be_no_room_on_empty_gpus_could_never_run():
    """Regression: they were told to wait."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2))
    answer = await what_if(kube, job_of({"workers": 3, "memory": {"limit": "30Gi"}}), RULES, predicted, OPTIONS)
    assert answer.is_infeasible
    why = "needs places for 3 workers at once, and empty GPUs would have 2 at most"
    assert answer.lines[1] == f"could never run here: {why}"
    assert "with 1 worker less (spec.workers)" in answer.lines[2]
    seed_node(kube, gpu_node("b", 0))
    answer = await what_if(kube, job_of({"workers": 3, "memory": {"limit": "30Gi"}}), RULES, predicted, OPTIONS)
    assert not answer.is_infeasible, "nobody knows yet what b has"
    assert any("b reports no GPUs" in line for line in answer.lines)
    assert answer.lines[1] == f"could never run on the GPUs that are known: {why}"
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2))
    kube.seed(GPU_NODES, msgspec.to_builtins(gpu_node("b", 1)) | {"status": {"devices": 7}})
    answer = await what_if(kube, job_of({"workers": 3, "memory": {"limit": "30Gi"}}), RULES, predicted, OPTIONS)
    assert not answer.is_infeasible, "nor what a node has that cannot be read"


async def test_nothing_goes_where_the_agent_is_silent():
    def ago(seconds):
        return rfc3339(CLOCK.now() - timedelta(seconds=seconds))

    kube = FakeKube()
    for name, heard, made in (
        ("a", ago(20), None),
        ("b", ago(SILENCE_S + 10), None),
        ("c", ago(0), ago(10 * SILENCE_S)),
        ("d", ago(4 * SILENCE_S), None),
        ("e", None, ago(SILENCE_S + 1)),
        ("f", None, ago(SILENCE_S - 1)),
    ):
        node = gpu_node(name, 1, creation_timestamp=made)
        seed_node(
            kube, msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, heartbeat_time=heard))
        )
    told = (await what_if(kube, job_of(), RULES, predicted, Options(CLOCK, each_gpu=True))).lines
    gpus = [line for line in told if line.startswith("  GPU ")]
    assert ["fits" in line for line in gpus] == [True, False, True, False, False, True]
    for silent in (gpus[1], gpus[3], gpus[4]):
        assert f"its agent has not reported for more than {SILENCE_S:.0f} s" in silent


async def test_gpus_of_which_the_same_is_said_stand_on_one_line():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2, [tenant("y", ["GPU-a-0"], memory_limit_mib=40000)]))
    for name in ("b", "c"):
        seed_node(kube, gpu_node(name, [device(i, name, product=T4) for i in range(4)]))
    job = job_of({"gpu": {"product": "A100"}})
    told = (await what_if(kube, job, RULES, predicted, OPTIONS)).lines
    assert [line.partition(":")[0].strip() for line in told[4:]] == [
        "GPU 0 of a (NVIDIA A100-SXM4-40GB)",
        "GPU 1 of a (NVIDIA A100-SXM4-40GB)",
        "8 GPUs of 2 nodes (Tesla T4)",
    ]
    assert len((await what_if(kube, job, RULES, predicted, Options(CLOCK, each_gpu=True))).lines) == 4 + 10


def test_in_a_terminal_lines_break_between_words_and_go_on_further_in():
    line = "  GPU 0 of a (NVIDIA A100-SXM4-40GB): fits by MPS, leaves 36,960 MiB, expected slowdown 1.00; and more"
    first, *others = broken(line, 60).splitlines()
    assert first == "  GPU 0 of a (NVIDIA A100-SXM4-40GB): fits by MPS, leaves"
    assert all(part.startswith(6 * " ") and len(part) <= 60 for part in others)
    assert " ".join([first, *(part.strip() for part in others)]) == line
    assert broken("short", 60) == "short"


async def test_what_could_never_run_is_no_waiting_job():
    kube = on_a_node({})
    for spec in ({"gpu": {"product": "RTX-9090"}}, {"memory": {"limit": "200Gi"}}, {"gpusPerWorker": 3}):
        answer = await what_if(kube, job_of(spec), RULES, predicted, OPTIONS)
        assert answer.is_infeasible
        assert answer.lines[1].startswith("could never run here")
    assert not (await what_if(kube, job_of(), RULES, predicted, OPTIONS)).is_infeasible


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        pytest.param({}, "nothing is known of it; give spec.memory.limit to let it share", id="advice"),
        pytest.param({"memory": {"limit": "12Gi"}}, "so the job may share a GPU", id="its own limit"),
        pytest.param({"sharing": {"mode": "Exclusive"}}, "the job asks for a GPU of its own (Exclusive)", id="alone"),
        pytest.param(
            {"sharing": {"mode": "Exclusive"}, "memory": {"limit": "12Gi"}},
            "the job asks for a GPU of its own (Exclusive)",
            id="alone with a limit",
        ),
    ],
)
async def test_what_if_advises_nothing_that_the_job_did_already_or_does_not_want(spec, told):
    async def abstaining(wanted, products):
        message = "nothing is known of it; give spec.memory.limit to let it share"
        abstained = Prediction(outcome="Abstained", reason="NoModel", message=message)
        return msgspec.structs.replace(wanted, status=msgspec.structs.replace(wanted.status, prediction=abstained))

    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    first = (await what_if(kube, job_of(spec), RULES, abstaining, OPTIONS)).lines[0]
    assert first.startswith("prediction: Abstained (NoModel) nothing is known of it; ")
    assert told in first
    assert ("to let it share" in first) == (spec == {})


def job_with_features() -> GpuTrainingJob:
    step = {"batchSize": 32, "peakBytes": 1_100_000_000, "activationBytes": 1_000_000_000}
    features = {"steps": [step | {"flops": 1e12, "bytesMoved": 1e10, "kernels": 300}]}
    sizes = {"parameters": 10**6, "trainableParameters": 10**6, "parameterBytes": 4 * 10**6}
    spec = {"template": {}, "model": {"features": features | sizes}}
    return msgspec.convert({"metadata": {"name": "new", "namespace": "default"}, "spec": spec}, GpuTrainingJob)


def calibrated() -> Calibration:
    """Three jobs were measured on a T4."""
    found = Calibration()
    for number in range(3):
        expected = RunPrediction(model=f"m{number}", reserved_mib=1000 + 500 * number, live_mib=500, upper_mib=9000)
        measured = RunMeasurement(peak_mib=4000 + 600 * number, capacity_mib=15360)
        found = observe(found, Stack(product=T4, precision=Precision.FP32), expected, measured, shipped())
    return found


@pytest.mark.parametrize(
    ("kept", "settings", "trusted", "note"),
    [
        pytest.param(None, AskSettings(), False, "nothing has been learned yet", id="nothing kept"),
        pytest.param(
            None, AskSettings(share_unmeasured=True), True, "calibration is not carpool-system/", id="none yet, shares"
        ),
        pytest.param(Calibration(), AskSettings(), False, "", id="nothing learned"),
        pytest.param(Calibration(), AskSettings(share_unmeasured=True), True, "", id="shares all the same"),
        pytest.param(calibrated(), AskSettings(), True, "", id="learned"),
        pytest.param(calibrated(), AskSettings(calibration=""), True, "", id="not asked for"),
        pytest.param(Forbidden("may not", status=403), AskSettings(), True, "cannot be read: may not", id="no right"),
        pytest.param(b"{", AskSettings(), False, "cannot be read: ", id="unreadable for the operator, too"),
    ],
)
async def test_what_if_predicts_with_what_the_operator_learned(kept, settings, trusted, note):
    kube = FakeKube()
    if isinstance(kept, Forbidden):
        kube.fail_next("get", CONFIG_MAPS, kept)
    elif isinstance(kept, bytes):
        metadata = {"name": "carpool-calibration", "namespace": "carpool-system"}
        kube.seed(CONFIG_MAPS, {"metadata": metadata, "data": {KEY: kept.decode()}})
    elif kept is not None:
        await CalibrationStore(kube, "carpool-system", "carpool-calibration").write(StoredCalibration(), kept)
    known = await job_predictor(kube, settings)
    assert note in " ".join(known.notes)
    assert bool(note) == bool(known.notes)
    told = (await known.predict(job_with_features(), [T4])).status.prediction
    assert told is not None
    assert told.products[0].memory.trusted is trusted
    assert told.products[0].memory.learned_jobs == (3 if known.calibration and known.calibration.stacks else 0)


@pytest.mark.parametrize(
    ("present", "taught"),
    [
        pytest.param([f"{SIMULATED_PREFIX}{T4}"], True, id="all simulated"),
        pytest.param([T4], False, id="hardware"),
        pytest.param([T4, f"{SIMULATED_PREFIX}{T4}"], False, id="both"),
    ],
)
async def test_what_simulated_gpus_taught_serves_simulated_ones_only(present, taught):
    """Regression: three simulated jobs made the prediction for real GPUs of that product one to rely on."""
    simulated = msgspec.structs.replace(calibrated().stacks[0].stack, driver=SIMULATED)
    state = msgspec.structs.replace(calibrated().stacks[0], stack=simulated)
    known = JobPredictor(Calibration(stacks=[state]), is_strict=True)
    told = (await known.predict(job_with_features(), present)).status.prediction
    assert told is not None
    assert (told.products[0].memory.trusted, told.products[0].memory.learned_jobs) == (taught, 3 if taught else 0)
