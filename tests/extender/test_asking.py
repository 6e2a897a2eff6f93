"""Explain and what-if: the decision about a live cluster, told to people."""

from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.kube.api import CONFIG_MAPS, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.kube.errors import Forbidden, Invalid, NotFound
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import Tenant
from carpool_core.resources.prediction import Prediction
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid, Precision
from carpool_extender.asking import explain_command, forecast, what_if
from carpool_extender.conditions import Conditions
from carpool_extender.enquiry import Asker, NoSuchJobError, asked, explained
from carpool_extender.manifest import ManifestError, checked, in_words
from carpool_extender.measured import SETTLED_S
from carpool_extender.policies import find_policy
from carpool_extender.rules import Rules
from carpool_extender.settings import AskSettings
from carpool_extender.standing import SILENCE_S
from carpool_extender.testing import T4, device, gpu_node, pod_of, prediction, seed_job, seed_node, tenant
from carpool_predictor.calibration import Calibration, Expected, Measured, Stack
from carpool_predictor.calibration_map import CalibrationMap, Kept
from carpool_predictor.memory import shipped
from carpool_predictor.observe import observe
from click.testing import CliRunner

CLOCK = FakeClock()
RULES, ASKER = Rules(find_policy("least-slowdown"), 8), Asker(CLOCK)


async def test_explain_tells_the_place_its_reason_and_every_gpu():
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    seed_node(kube, gpu_node("a", 2, [mine, tenant("full", ["GPU-a-1"], memory_limit_mib=40000)]))
    told = (await explained(kube, "x", "default", RULES, ASKER)).lines
    assert told[0] == "x has a place on a: least-slowdown: alone"
    assert "fits by MPS, leaves 36,960 MiB" in told[1]
    assert told[2].endswith("needs 4,000 MiB, has 960 MiB free (3,040 MiB short)")


async def test_explain_of_a_waiting_job_without_nodes():
    kube = FakeKube()
    seed_job(kube, "x")
    told = (await explained(kube, "x", "default", RULES, ASKER)).lines
    assert told == ["default/x has no place yet", "  no node reports GPUs; is the node agent running?"]


async def test_what_if_names_the_place_and_creates_nothing():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    body = {"metadata": {"name": "new", "namespace": "default"}, "spec": {"template": {}}}
    job = msgspec.convert(body, GpuTrainingJob)

    async def predictor(wanted, products):
        status = msgspec.structs.replace(wanted.status, prediction=prediction(products=products))
        return msgspec.structs.replace(wanted, status=status)

    told = (await asked(kube, job, RULES, predictor, ASKER)).lines
    assert told[0].startswith("prediction: Predicted")
    assert told[1].startswith("would go to a: least-slowdown: MPS on GPU 0 of a beside default/y")
    assert len((await asked(FakeKube(), job, RULES, predictor, ASKER)).lines) == 3


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
    told = (await asked(kube, job_of(), rules, predicted, ASKER)).lines
    assert told[1] == "would have to wait now"
    assert told[2].endswith("1 tenant, the policy allows 1")


async def test_a_job_may_choose_its_policy_only_where_the_site_lets_it():
    kube, mine = FakeKube(), job_of(**{"carpool.dev/policy": "exclusive"})
    seed_node(kube, gpu_node("a", 1))
    assert ((await asked(kube, mine, RULES, predicted, ASKER)).lines)[-1].startswith("PolicyNotAllowed: ")
    told = (await asked(kube, mine, RULES, predicted, Asker(CLOCK, job_policies=True))).lines
    assert told[1].startswith("would go to a: exclusive: Exclusive on GPU 0")


async def test_workers_for_which_there_is_no_room_together_wait():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    spec = {"workers": 2, "sharing": {"mode": "Exclusive"}}
    seed_job(kube, "x", spec=spec)
    for told in (
        (await asked(kube, job_of(spec), RULES, predicted, ASKER)).lines,
        (await explained(kube, "x", "default", RULES, ASKER)).lines,
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
    told = (await asked(kube, job_of(), RULES, predicted, Asker(CLOCK, each_gpu=True))).lines
    assert ["fits" in line for line in told[2:]] == [True, False, True, False]
    assert f"its agent has not reported for more than {SILENCE_S:.0f} s" in told[3]


async def test_a_running_job_is_no_stranger_on_its_own_gpu():
    """Regression: what it uses counted as used without a reservation, on the very GPU that it has."""
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    node = gpu_node("a", 1, [mine])
    used = Tenant(pod_uid=mine.pod_uid, gpu_uuid=mine.gpu_uuids[0], memory_mib=3900)
    seed_node(kube, msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=[used])))
    told = (await explained(kube, "x", "default", RULES, ASKER)).lines
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
    told = (await asked(kube, job, RULES, predicted, ASKER)).lines
    assert [line.partition(":")[0].strip() for line in told[2:]] == [
        "GPU 0 of a (NVIDIA A100-SXM4-40GB)",
        "GPU 1 of a (NVIDIA A100-SXM4-40GB)",
        "8 GPUs of 2 nodes (Tesla T4)",
    ]
    assert len((await asked(kube, job, RULES, predicted, Asker(CLOCK, each_gpu=True))).lines) == 2 + 10


# What kube-scheduler asks of a node before it offers it


def on_a_node(spec, **allocatable):
    """A server with one node of two GPUs, whose Node has a spec and so much room."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2))
    room = {"cpu": "8", "memory": "64Gi", "pods": "10"} | allocatable
    labels = {"pool": "training", "rank": "5"}
    kube.seed(NODES, {"metadata": {"name": "a", "labels": labels}, "spec": spec, "status": {"allocatable": room}})
    return kube


def job_with(template, **spec):
    return job_of({"template": {"spec": template}} | spec)


TAINTED = {"taints": [{"key": "team", "value": "b", "effect": "NoSchedule"}]}


def affinity(key, operator, *values):
    term = {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}


def asks(**requests):
    return {"containers": [{"resources": {"requests": requests}}]}


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
        assert reason in told[2]
        assert "2 GPUs of a" in told[2]


async def test_what_other_pods_take_is_not_there_and_a_jobs_own_pods_are_in_nobodys_way():
    kube = on_a_node({})
    seed_job(kube, "x", spec={"template": {"spec": asks(cpu="6")}})
    kube.seed(PODS, pod_of("x", nodeName="a", **asks(cpu="6")))
    told = (await asked(kube, job_with(asks(cpu="6")), RULES, predicted, ASKER)).lines
    assert "the pod requests 6, 2 are left" in told[2]
    assert "not enough" not in "".join((await explained(kube, "x", "default", RULES, ASKER)).lines)


async def test_several_workers_are_placed_together():
    kube = on_a_node({})
    template = asks(cpu="3")
    told = (await asked(kube, job_with(template, workers=2), RULES, predicted, ASKER)).lines
    assert told[1] == "all 2 workers would get places now"
    assert [line.partition(":")[0] for line in told[2:4]] == ["  worker 0 would go to a", "  worker 1 would go to a"]
    told = (await asked(kube, job_with(template, workers=3), RULES, predicted, ASKER)).lines
    assert told[1] == "only 2 of 3 workers would get places now; 1 worker would have to wait for theirs"


async def test_what_may_not_be_read_is_said_not_to_be_checked():
    kube = on_a_node(TAINTED)
    kube.fail_next("list", NODES, Forbidden("no", status=403))
    told = (await asked(kube, job_with({}), RULES, predicted, ASKER)).lines
    assert told[1].startswith("would go to a")
    assert told[-1].startswith("not checked: taints")
    kube.fail_next("list", PODS, Forbidden("no", status=403))
    volumes = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "v"}}]}
    told = (await asked(kube, job_with(volumes), RULES, predicted, ASKER)).lines
    assert told[1] == "would have to wait now"
    assert told[-2:] == [
        "not checked: volumes",
        "not checked: what other pods take of CPU and memory (you may not list all pods)",
    ]


async def test_what_could_never_run_is_no_waiting_job():
    kube = on_a_node({})
    for spec in ({"gpu": {"product": "RTX-9090"}}, {"memory": {"limit": "200Gi"}}, {"gpusPerWorker": 3}):
        answer = await asked(kube, job_of(spec), RULES, predicted, ASKER)
        assert answer.is_hopeless
        assert answer.lines[1].startswith("could never run here")
    assert not (await asked(kube, job_of(), RULES, predicted, ASKER)).is_hopeless


# How a job stands


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        (
            [
                ("Predicted", "True", "Estimated", ""),
                ("Placed", "False", "Unschedulable", "0/2 nodes: 2 Insufficient cpu"),
            ],
            ["Queued: Placed is False (Unschedulable) 0/2 nodes: 2 Insufficient cpu"],
        ),
        (
            [("Placed", "False", "SchedulerError", "Post: connection refused")],
            ["Queued: Placed is False (SchedulerError) Post: connection refused", "kube-scheduler got no answer"],
        ),
        (
            [("Placed", "True", "Bound", ""), ("Running", "False", "Starting", "the image is pulled")],
            ["Queued: Running is False (Starting) the image is pulled"],
        ),
        (
            [("Placed", "True", "Bound", ""), ("Failed", "True", "BackoffLimit", "4 failures")],
            ["Queued: Failed is True (BackoffLimit) 4 failures"],
        ),
    ],
    ids=["unschedulable", "no answer", "starting", "failed"],
)
async def test_explain_says_first_how_the_job_stands(conditions, told):
    kube = FakeKube()
    seed_job(kube, "x")
    listed = [dict(zip(("type", "status", "reason", "message"), one, strict=True)) for one in conditions]
    await kube.patch(
        GPU_TRAINING_JOBS, "x", {"status": {"state": "Queued", "conditions": listed}}, namespace="default",
        subresource="status",
    )  # fmt: skip
    found = (await explained(kube, "x", "default", RULES, ASKER)).lines
    assert all(line.startswith(start) for line, start in zip(found, told, strict=False))
    has_ended = conditions[-1][0] == "Failed"
    assert found[len(told)] == ("default/x had no place when it ended" if has_ended else "default/x has no place yet")


async def test_of_a_job_that_has_ended_it_is_told_where_it_ran_and_nothing_is_rehearsed():
    """Regression: it had "no place yet", and every GPU of the cluster was gone through."""
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 2))
    place = {"worker": 0, "pod": "x-worker-0-1", "podUid": "u", "node": "a", "gpuUuids": ["GPU-a-0"], "product": T4}
    ran = place | {"mode": "MPS", "reason": "least-slowdown: MPS on GPU 0 of a alone"}
    done = {"type": "Complete", "status": "True", "reason": "Complete", "message": "1 of 1 workers succeeded"}
    status = {"state": "Complete", "conditions": [done], "placement": [ran]}
    await kube.patch(GPU_TRAINING_JOBS, "x", {"status": status}, namespace="default", subresource="status")
    assert (await explained(kube, "x", "default", RULES, ASKER)).lines == [
        "Complete: Complete is True (Complete) 1 of 1 workers succeeded",
        "x-worker-0-1 ran on a: least-slowdown: MPS on GPU 0 of a alone",
        "it has ended, so nothing is decided for it any more",
    ]


async def test_a_job_that_is_not_there_is_called_so_and_a_kind_that_is_not_there_is_not():
    kube = FakeKube()
    with pytest.raises(NoSuchJobError, match=r"^no GpuTrainingJob nosuch in namespace team-a$"):
        await explained(kube, "nosuch", "team-a", RULES, ASKER)
    kube.fail_next("get", GPU_TRAINING_JOBS, NotFound("404 page not found", status=404))
    with pytest.raises(NotFound, match="404 page not found"):
        await explained(kube, "nosuch", "team-a", RULES, ASKER)


async def test_what_was_measured_is_named_where_it_counts_in_place_of_what_was_predicted():
    """Regression: a decision changed after 90 s, and nobody said by what."""
    kube = FakeKube()
    busy = tenant("y", ["GPU-a-0"], prediction=prediction(util=90, sm=0.76))
    seen = Tenant(pod_uid=busy.pod_uid, gpu_uuid="GPU-a-0", memory_mib=100, gpu_util_percent=90.0, sm_active_ratio=0.68)
    for after_s, told in ((SETTLED_S - 1, False), (SETTLED_S + 1, True)):
        reserved_at = rfc3339(CLOCK.now() - timedelta(seconds=after_s))
        node = gpu_node("a", 2, [msgspec.structs.replace(busy, reserved_at=reserved_at)])
        status = msgspec.structs.replace(node.status, tenants=[seen], heartbeat_time=rfc3339(CLOCK.now()))
        seed_node(kube, msgspec.structs.replace(node, status=status))
        lines = (await asked(kube, job_of(), RULES, predicted, ASKER)).lines
        first = next(line for line in lines if line.startswith("  GPU 0 of a"))
        assert first.endswith("; counts as measured: default/y (measured SM 68%, predicted 76%)") is told
        assert sum("measured" in line for line in lines if line.startswith("  ")) == told
        wrong = (await asked(kube, job_of({"gpu": {"product": "T4"}}), RULES, predicted, ASKER)).lines
        assert not any("measured" in line for line in wrong[1:])


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        pytest.param({}, "nothing is known of it; give spec.memory.limit to let it share", id="advice"),
        pytest.param({"memory": {"limit": "12Gi"}}, "so the job may share a GPU all the same", id="its own limit"),
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
    first = (await asked(kube, job_of(spec), RULES, abstaining, ASKER)).lines[0]
    assert first.startswith("prediction: Abstained (NoModel) nothing is known of it; ")
    assert told in first
    assert ("to let it share" in first) == (spec == {})


# Manifests


def manifest_of(**spec):
    return {
        "kind": "GpuTrainingJob",
        "metadata": {"name": "new", "namespace": "default"},
        "spec": {"template": {}} | spec,
    }


async def test_the_api_server_checks_the_manifest_and_creates_nothing():
    kube = FakeKube()
    assert (await checked(kube, manifest_of())).notes == []
    assert kube.dump_all(GPU_TRAINING_JOBS) == []
    assert [call.verb for call in kube.calls] == ["check"]
    noise = ", <nil>: Invalid value: null: some validation rules were not checked because of x"
    kube.fail_next("check", GPU_TRAINING_JOBS, Invalid("no", status=422, said=f"spec.lables: unknown field{noise}"))
    with pytest.raises(ManifestError, match=r"^the API server would refuse it: spec.lables: unknown field$"):
        await checked(kube, manifest_of())
    seed_job(kube, "new")
    assert "exists already" in (await checked(kube, manifest_of())).notes[0]


async def test_without_the_right_to_create_it_is_said_and_the_manifest_read_all_the_same():
    kube = FakeKube()
    for _ in range(2):
        kube.fail_next("check", GPU_TRAINING_JOBS, Forbidden("no", status=403))
    assert "not checked: whether the API server" in (await checked(kube, manifest_of())).notes[0]
    with pytest.raises(ManifestError, match=r"^spec.sharing.maxSlowdown: expected a number >= 1.0$"):
        await checked(kube, manifest_of(sharing={"maxSlowdown": 0.5}))


def test_a_decoder_without_a_place():
    assert in_words("Expected `object`, got `int`") == "expected a mapping, got a whole number"


def calibrated() -> Calibration:
    """Three jobs were measured on a T4."""
    found = Calibration()
    for number in range(3):
        expected = Expected(model=f"m{number}", reserved_mib=1000 + 500 * number, live_mib=500, upper_mib=9000)
        measured = Measured(peak_mib=4000 + 600 * number, capacity_mib=15360)
        found = observe(found, Stack(product=T4, precision=Precision.FP32), expected, measured, shipped())
    return found


@pytest.mark.parametrize(
    ("kept", "settings", "trusted", "note"),
    [
        pytest.param(None, AskSettings(), False, "nothing has been learned yet", id="nothing kept"),
        pytest.param(
            None, AskSettings(share_unmeasured=True), True, "elsewhere than in carpool-system/", id="none yet, shares"
        ),
        pytest.param(Calibration(), AskSettings(), False, "", id="nothing learned"),
        pytest.param(Calibration(), AskSettings(share_unmeasured=True), True, "", id="shares all the same"),
        pytest.param(calibrated(), AskSettings(), True, "", id="learned"),
        pytest.param(calibrated(), AskSettings(calibration=""), True, "", id="not asked for"),
        pytest.param(Forbidden("may not", status=403), AskSettings(), True, "cannot be read: may not", id="no right"),
    ],
)
async def test_what_if_predicts_with_what_the_operator_learned(kept, settings, trusted, note):
    kube = FakeKube()
    if isinstance(kept, Forbidden):
        kube.fail_next("get", CONFIG_MAPS, kept)
    elif kept is not None:
        await CalibrationMap(kube, "carpool-system", "carpool-calibration").write(Kept(), kept)
    step = {"batchSize": 32, "peakBytes": 1_100_000_000, "activationBytes": 1_000_000_000}
    features = {"steps": [step | {"flops": 1e12, "bytesMoved": 1e10, "kernels": 300}]}
    sizes = {"parameters": 10**6, "trainableParameters": 10**6, "parameterBytes": 4 * 10**6}
    spec = {"template": {}, "model": {"features": features | sizes}}
    job = msgspec.convert({"metadata": {"name": "new", "namespace": "default"}, "spec": spec}, GpuTrainingJob)
    known = await forecast(kube, settings)
    assert note in " ".join(known.notes)
    assert bool(note) == bool(known.notes)
    told = (await known.traced(job, [T4])).status.prediction
    assert told is not None
    assert told.products[0].memory.trusted is trusted
    assert told.products[0].memory.learned_jobs == (3 if known.calibration and known.calibration.stacks else 0)
