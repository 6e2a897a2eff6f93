"""`carpool what-if`: where a job would go that does not exist, by the prediction that the operator would write."""

import msgspec
import pytest
from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.kube.api import CONFIG_MAPS, GPU_NODES, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.products import device_class
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.prediction import Prediction
from carpool_core.testing.kube import FakeKube
from carpool_core.values import Precision, SharingMode
from carpool_extender.explain import commands, explain
from carpool_extender.explain.commands import JobPredictor, job_predictor
from carpool_extender.explain.dry_run import MAX_LISTED_WORKERS, UNCHECKED
from carpool_extender.explain.queue_forecast import Options
from carpool_extender.framework.filters import AdmissionLimits
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.settings import AskSettings
from carpool_extender.testing import T4, device, gpu_node, prediction, seed_node, tenant
from carpool_extender.workloads import JobOptions
from carpool_predictor.calibration.document import SIMULATED, Calibration, RunMeasurement, RunPrediction, Stack
from carpool_predictor.calibration.observe import observe
from carpool_predictor.calibration.store import KEY, CalibrationStore, StoredCalibration
from carpool_predictor.models.memory import shipped
from explain_world import CLOCK, OPTIONS, RULES, job_of, predicted

WAITS = "would have to wait now: "
GO = "would go to a (a step takes about 100 ms there): "


def nodes(*found):
    kube = FakeKube()
    for node in found:
        seed_node(kube, node)
    return kube


async def answer(kube, spec=(), config=RULES, options=OPTIONS, predictor=predicted, **annotations):
    return await explain.what_if(kube, job_of(spec, **annotations), config, predictor, options)


def one_line(lines, start):
    (found,) = [line for line in lines if line.startswith(start)]
    return found


async def test_place_is_named_with_its_reason_and_nothing_is_created():
    kube = nodes(gpu_node("a", 2, [tenant("y", ["GPU-a-0"])]))
    lines = (await answer(kube)).lines
    assert lines[0].startswith("prediction: Predicted")
    assert lines[1].startswith(f"{GO}least-slowdown: MPS on GPU 0 of a beside default/y")
    assert lines[2] == UNCHECKED
    assert lines[3].startswith("places by least-slowdown (")
    assert {call.verb for call in kube.calls} == {"list"}
    assert sum(call.plural == PODS.plural for call in kube.calls) == 1


def used(gpus, mode="Exclusive"):
    """A node on which job y has the first GPU."""
    return gpu_node("a", gpus, [tenant("y", ["GPU-a-0"], SharingMode(mode))])


FOUR = "needs 4 GPUs on one node in one mode, the best node has 3; 1 GPU: used exclusively by default/y"
GANG = "job default/new needs places for 2 workers of 1 GPU at once, there is room for 1; none starts before all can"


@pytest.mark.parametrize(
    ("node", "spec", "limits", "reason"),
    [
        pytest.param(used(1, "MPS"), {}, {"max_jobs": 1}, "1 GPU: jobs on a GPU 2, the site's limit is 1", id="limit"),
        pytest.param(used(4), {"gpusPerWorker": 4}, {}, FOUR, id="GPUs of one node"),
        pytest.param(used(2), {"workers": 2, "sharing": {"mode": "Exclusive"}}, {}, GANG, id="gang"),
    ],
)
async def test_reason_to_wait_is_the_refusal_of_the_extender(node, spec, limits, reason):
    config = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(**limits))
    lines = (await answer(nodes(node), spec, config)).lines
    assert one_line(lines, WAITS) == WAITS + reason
    assert one_line(lines, "it would have a place ")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        pytest.param({"gpu": {"product": "RTX-9090"}}, "no node has GPUs that would do", id="product"),
        pytest.param({"memory": {"limit": "200Gi"}}, "no node has GPUs that would do", id="memory"),
        pytest.param({"gpusPerWorker": 3}, "needs 3 suitable GPUs on one node, the best node has 2", id="GPUs"),
        pytest.param(
            {"workers": 3, "memory": {"limit": "30Gi"}},
            "needs places for 3 workers at once, and empty GPUs would have 2 at most",
            id="workers",
        ),
    ],
)
async def test_job_that_fits_on_no_empty_gpu_could_never_run(spec, reason):
    """Regression: a gang that empty GPUs could not hold had to wait."""
    kube = nodes(gpu_node("a", 2))
    found = await answer(kube, spec)
    assert found.is_infeasible
    assert found.lines[1].startswith(f"could never run here: {reason}")
    assert found.lines[2] == UNCHECKED
    assert not any(line.startswith(WAITS) for line in found.lines)
    for unknown in (gpu_node("b", 0), msgspec.to_builtins(gpu_node("b", 1)) | {"status": {"devices": 7}}):
        kube.seed(GPU_NODES, unknown)
        found = await answer(kube, spec)
        assert not found.is_infeasible, "the GPUs of b are unknown"
        assert found.lines[1].startswith(f"could never run on the GPUs that are known: {reason}")


async def test_job_may_choose_its_policy_only_if_the_site_allows_it():
    kube, mine = nodes(gpu_node("a", 1)), {"carpool.dev/policy": "exclusive"}
    refused = await answer(kube, **mine)
    assert refused.is_infeasible
    assert refused.lines[-1].startswith("PolicyNotAllowed: ")
    lines = (await answer(kube, options=Options(CLOCK, JobOptions(policies=True)), **mine)).lines
    assert lines[1].startswith(f"{GO}exclusive: Exclusive on GPU 0")


async def test_places_of_very_many_workers_are_not_all_listed():
    async def light(wanted, kinds):
        products = [kind.product for kind in kinds]
        found = prediction(memory_mib=100, util=1, sm=0.01, dram=0.01, products=products)
        return msgspec.structs.replace(wanted, status=msgspec.structs.replace(wanted.status, prediction=found))

    workers = MAX_LISTED_WORKERS + 2
    lines = (await answer(nodes(gpu_node("a", 80), gpu_node("b", 80)), {"workers": workers}, predictor=light)).lines
    assert lines[1] == f"all {workers} workers would get places now"
    assert "  the places of 2 more workers are not listed" in lines


async def test_gpus_with_equal_explanations_share_a_line():
    full = gpu_node("a", 2, [tenant("y", ["GPU-a-0"], memory_limit_mib=40000)])
    kube = nodes(full, *(gpu_node(name, [device(i, name, product=T4) for i in range(4)]) for name in "bc"))
    spec = {"gpu": {"product": "A100"}}
    heads = [line.partition(":")[0] for line in (await answer(kube, spec)).lines if " (" in line.partition(":")[0]]
    a100 = "NVIDIA A100-SXM4-40GB"
    assert heads[-3:] == [f"  GPU 0 of a ({a100})", f"  GPU 1 of a ({a100})", "  8 GPUs of 2 nodes (Tesla T4)"]
    each = (await answer(kube, spec, options=Options(CLOCK, each_gpu=True))).lines
    assert sum(line.startswith("  GPU ") for line in each) == 10


NO_MODEL = "nothing is known of it; give spec.memory.limit to let it share"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({}, NO_MODEL, id="advice"),
        pytest.param(
            {"memory": {"limit": "12Gi"}}, "so the job may share a GPU that has so much free", id="its own limit"
        ),
        pytest.param({"sharing": {"mode": "Exclusive"}}, "the job asks for a GPU of its own (Exclusive)", id="alone"),
    ],
)
async def test_message_of_the_prediction_fits_the_job(spec, expected):
    async def abstaining(wanted, kinds):
        abstained = Prediction(outcome="Abstained", reason="NoModel", message=NO_MODEL)
        return msgspec.structs.replace(wanted, status=msgspec.structs.replace(wanted.status, prediction=abstained))

    first = (await answer(nodes(gpu_node("a", 1)), spec, predictor=abstaining)).lines[0]
    assert first.startswith("prediction: Abstained (NoModel) nothing is known of it; ")
    assert expected in first
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


SHARES = AskSettings(share_unmeasured=True)


@pytest.mark.parametrize(
    ("kept", "settings", "trusted", "note"),
    [
        pytest.param(None, AskSettings(), False, "nothing has been learned yet", id="none"),
        pytest.param(None, SHARES, True, "calibration is not carpool-system/", id="none, shares"),
        pytest.param(Calibration(), AskSettings(), False, "", id="nothing learned"),
        pytest.param(Calibration(), SHARES, True, "", id="nothing learned, shares"),
        pytest.param(calibrated(), AskSettings(), True, "", id="learned"),
        pytest.param(calibrated(), AskSettings(calibration=""), True, "", id="not used"),
        pytest.param(Forbidden("may not", status=403), AskSettings(), True, "cannot be read: may not", id="no right"),
        pytest.param(b"{", AskSettings(), False, "cannot be read: ", id="invalid"),
    ],
)
async def test_prediction_uses_the_calibration_of_the_operator(kept, settings, trusted, note):
    kube = FakeKube()
    if isinstance(kept, Forbidden):
        kube.fail_next("get", CONFIG_MAPS, kept)
    elif isinstance(kept, bytes):
        metadata = {"name": "carpool-calibration", "namespace": "carpool-system"}
        kube.seed(CONFIG_MAPS, {"metadata": metadata, "data": {KEY: kept.decode()}})
    elif kept is not None:
        await CalibrationStore(kube, "carpool-system", "carpool-calibration").write(StoredCalibration(), kept)
    found = await job_predictor(kube, settings)
    assert note in " ".join(found.notes)
    assert bool(note) == bool(found.notes)
    job = await found.predict(job_with_features(), [device_class(device(product=T4))])
    (product,) = job.status.prediction.products
    assert product.memory.trusted is trusted
    assert product.memory.learned_jobs == (3 if found.calibration and found.calibration.stacks else 0)


@pytest.mark.parametrize(
    ("present", "learned"),
    [
        pytest.param([f"{SIMULATED_PREFIX}{T4}"], True, id="all simulated"),
        pytest.param([T4], False, id="hardware"),
        pytest.param([T4, f"{SIMULATED_PREFIX}{T4}"], False, id="both"),
    ],
)
async def test_observations_of_simulated_gpus_serve_only_simulated_ones(present, learned):
    """Regression: three simulated jobs made the prediction for real GPUs of that product a trusted one."""
    simulated = msgspec.structs.replace(calibrated().stacks[0].stack, driver=SIMULATED)
    state = msgspec.structs.replace(calibrated().stacks[0], stack=simulated)
    predictor = JobPredictor(Calibration(stacks=[state]), is_strict=True)
    kinds = [device_class(msgspec.structs.replace(device(product=T4), product=name)) for name in present]
    product = (await predictor.predict(job_with_features(), kinds)).status.prediction.products[0]
    assert (product.memory.trusted, product.memory.learned_jobs) == (learned, 3 if learned else 0)


async def test_a_job_that_never_fits_gets_advice():
    async def advice(job, kinds):
        assert job.status.prediction is not None
        return [f"advice for {len(kinds)} kind"]

    kube = nodes(gpu_node("a", 1))
    too_large = job_of({"memory": {"limit": "900Gi"}})
    found = await explain.what_if(kube, too_large, RULES, predicted, OPTIONS, advice)
    assert found.lines[1] == "advice for 1 kind"
    assert found.is_infeasible
    fitting = await explain.what_if(kube, job_of(), RULES, predicted, OPTIONS, advice)
    assert "advice" not in str(fitting.lines)


@pytest.mark.parametrize(("fitting_batch", "given"), [(12, ["advice"]), (0, ["advice"]), (None, [])])
async def test_advice_is_for_jobs_whose_batch_fits_no_gpu(monkeypatch, fitting_batch, given):
    async def advise(*_):
        return "advice"

    monkeypatch.setattr(commands, "advise", advise)
    found = msgspec.structs.replace(prediction(), fitting_batch=fitting_batch)
    job = job_of({"model": {"catalog": {"name": "timm/resnet50"}}})
    job = msgspec.structs.replace(job, status=msgspec.structs.replace(job.status, prediction=found))
    assert await JobPredictor().advice(job, [device_class(device(product=T4))]) == given
