"""The commands `explain` and `what-if`: their input, the settings that count, and how they refuse."""

import dataclasses
import json

import click
import pytest
from carpool_core.kube.api import CONFIG_MAPS, GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden, Invalid, NotFound, Unreachable
from carpool_core.kubectl.output import OTHER_JOBS
from carpool_core.settings import SettingsError, click_options
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain.commands import (
    ManifestError,
    check_manifest,
    explain_command,
    flags_given,
    queue,
    read_manifest,
    read_site_settings,
    what_if,
)
from carpool_extender.framework.diagnosis import broken
from carpool_extender.framework.filters import AdmissionLimits, Quantile
from carpool_extender.settings import AskSettings
from carpool_extender.testing import seed_job
from carpool_simulator.commands import simulate
from click.testing import CliRunner
from explain_world import HEAD, served


def test_invalid_input_is_refused_with_a_sentence(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("spec: 3")
    result = CliRunner().invoke(what_if, [str(manifest)])
    assert result.exit_code == 2
    assert "expected kind GpuTrainingJob, found none" in result.output
    manifest.write_text("{")
    result = CliRunner().invoke(what_if, [str(manifest)])
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
    refused = CliRunner().invoke(explain_command, ["x", "--policy", "fast"])
    assert refused.exit_code == 2
    assert "policy 'fast' is unknown; choose one of" in refused.output
    assert CliRunner().invoke(explain_command, ["x", "--most-jobs", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["default/small-a"], "expected the name of a job, of small letters, digits, - and ., found 'default/small-a'; "
        "did you mean small-a -n default?"),
        ([""], "expected the name of a job, of small letters, digits, - and ., found ''"),
        (["x", "-n", ""], "expected the name of a namespace, of small letters, digits, - and ., found ''"),
        (["x", "-n", "a/b"], "found 'a/b'"),
    ],
)  # fmt: skip
def test_invalid_name_is_refused_before_the_cluster_is_read(argv, expected):
    result = CliRunner().invoke(explain_command, argv)
    assert result.exit_code == 2
    assert result.output.strip().endswith(expected)


def test_queue_refuses_a_namespace_that_cannot_exist():
    """Regression: it answered that no job waits there."""
    result = CliRunner().invoke(queue, ["-n", "A_B"])
    assert (result.exit_code, result.output.strip()[-11:]) == (2, "found 'A_B'")


@pytest.mark.parametrize("name", ["x", "gtj/x", "gputrainingjob/x", "gputrainingjob.carpool.dev/x"])
def test_job_may_be_named_as_kubectl_prints_it(monkeypatch, name):
    with served(FakeKube(), monkeypatch):
        refused = CliRunner().invoke(explain_command, [name, "-n", "b"])
    assert (refused.exit_code, refused.output.strip()) == (2, f"Error: no GpuTrainingJob x in namespace b{OTHER_JOBS}")


@pytest.mark.parametrize("argv", [[], ["-", "-f", "-"]])
def test_exactly_one_manifest_is_expected(argv):
    refused = CliRunner().invoke(what_if, argv)
    assert (refused.exit_code, "expected one MANIFEST" in refused.output) == (2, True)


def test_manifest_may_come_from_standard_input(monkeypatch):
    manifest = "{" + HEAD + ", metadata: {name: x, namespace: b}, spec: {template: {}}}"
    with served(FakeKube(), monkeypatch):
        result = CliRunner().invoke(what_if, ["-"], input=manifest)
        assert "could never run here" in result.output
        assert result.exit_code == 1
        document = CliRunner().invoke(what_if, ["-f", "-", "-o", "json"], input=manifest)
        assert (document.exit_code, json.loads(document.output)["infeasible"]) == (1, True)
        refused = CliRunner().invoke(what_if, ["-", "-n", "default"], input=manifest)
    assert refused.exit_code == 2
    assert "the namespace of the manifest, b, is not default" in refused.output


@pytest.mark.parametrize("command", [[explain_command, "busy"], [simulate, "--trace", "t.csv"]])
def test_too_large_number_is_refused_with_a_sentence(command):
    """Regression: a number beyond 64 bits ended in a traceback, where GPUs were held against it."""
    called, *arguments = command
    result = CliRunner().invoke(called, [*arguments, "--least-free-mib", "9" * 23])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "expected a least free memory of 0 to 1,073,741,824 MiB, found 99,999,999,999,999" in result.output


@pytest.mark.parametrize("command", ["explain", "what-if"])
def test_missing_right_is_named_with_its_remedy(command, tmp_path, monkeypatch):
    manifest, kube = tmp_path / "job.yaml", FakeKube()
    manifest.write_text("{" + HEAD + ", metadata: {name: x}, spec: {template: {}}}")
    seed_job(kube, "x")
    kube.fail_next("list", GPU_NODES, Forbidden("you may not list gpunodes", status=403))

    asked_for = (explain_command, ["x"]) if command == "explain" else (what_if, [str(manifest)])
    with served(kube, monkeypatch):
        result = CliRunner().invoke(*asked_for)
    assert result.exit_code == 2
    assert result.output.startswith(
        "Error: you may not list gpunodes; explain, what-if and queue read jobs, pods and GpuNodes"
    )
    assert "ClusterRole carpool-view by a ClusterRoleBinding" in result.output


def test_missing_cluster_is_a_sentence(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("{" + HEAD + ", metadata: {name: x}, spec: {template: {}}}")
    nowhere = {"KUBECONFIG": None, "KUBERNETES_SERVICE_HOST": None, "HOME": str(tmp_path)}
    for command, argument in ((explain_command, "x"), (what_if, str(manifest))):
        result = CliRunner(env=nowhere).invoke(command, [argument])
        assert result.exit_code == 2
        assert "Error: " in result.output
        assert "KUBECONFIG" in result.output


@pytest.mark.parametrize(("arguments", "namespace"), [([], "team"), (["-n", "other"], "other")])
def test_namespace_is_that_of_the_context_by_default(arguments, namespace, monkeypatch):
    class InTeam(FakeKube):
        namespace = "team"

    with served(InTeam(), monkeypatch):
        result = CliRunner().invoke(explain_command, ["gone", *arguments])
    assert result.exit_code == 2
    assert f"no GpuTrainingJob gone in namespace {namespace}" in result.output


def manifest_of(**spec):
    metadata = {"name": "new", "namespace": "default"}
    return {"kind": "GpuTrainingJob", "metadata": metadata, "spec": {"template": {}} | spec}


async def test_api_server_validates_the_manifest_and_creates_nothing():
    kube = FakeKube()
    assert (await check_manifest(kube, manifest_of()))[1:] == ([], [])
    assert kube.dump_all(GPU_TRAINING_JOBS) == []
    assert [(call.verb, call.plural) for call in kube.calls] == [("check", "gputrainingjobs"), ("check", "pods")]
    noise = ", <nil>: Invalid value: null: some validation rules were not checked because of x"
    kube.fail_next(
        "check", GPU_TRAINING_JOBS, Invalid("no", status=422, server_message=f"spec.lables: unknown field{noise}")
    )
    with pytest.raises(ManifestError, match=r"^the API server would refuse it: spec.lables: unknown field$"):
        await check_manifest(kube, manifest_of())
    seed_job(kube, "new")
    assert "exists already" in (await check_manifest(kube, manifest_of())).notes[0]


COMAND = (
    'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.containers[0].comand"'
)


@pytest.mark.parametrize(
    ("template", "answer", "sentence"),
    [
        pytest.param(
            {"spec": {"containers": [{"comand": ["x"]}]}},
            COMAND,
            "spec.template.spec.containers[0].comand: a pod has no such field; correct its spelling or remove it",
            id="of a pod",
        ),
        pytest.param(
            {"spce": {}},
            None,
            "spec.template.spce: a template has no such field; correct its spelling or remove it",
            id="of the template",
        ),
        pytest.param({}, "a webhook denied it", "a webhook denied it", id="webhook"),
    ],
)
async def test_misspelt_field_of_the_template_is_found(template, answer, sentence):
    kube = FakeKube()
    if answer is not None:
        kube.fail_next("check", PODS, Invalid("no", status=422, server_message=answer))
    with pytest.raises(ManifestError) as refused:
        await check_manifest(kube, manifest_of(template=template))
    assert str(refused.value) == f"the job would fail: {sentence}"


async def test_namespace_that_does_not_exist_is_named():
    """Regression: the cluster `could not be reached`."""
    kube = FakeKube()
    answer = 'namespaces "team" not found'
    kube.fail_next("check", GPU_TRAINING_JOBS, NotFound(f"POST: {answer}", status=404, server_message=answer))
    with pytest.raises(ManifestError, match=r"^namespace team does not exist: create it, or name another by -n or "):
        await check_manifest(kube, {**manifest_of(), "metadata": {"name": "x", "namespace": "team"}})
    kube.fail_next("check", GPU_TRAINING_JOBS, NotFound("POST: no such type", status=404))
    with pytest.raises(NotFound):
        await check_manifest(kube, manifest_of())


async def test_manifest_is_read_without_the_right_to_create():
    kube = FakeKube()
    for kind in (GPU_TRAINING_JOBS, PODS, GPU_TRAINING_JOBS):
        kube.fail_next("check", kind, Forbidden("no", status=403))
    found = await check_manifest(kube, manifest_of())
    assert found.notes == []
    assert [text.startswith("not checked: whether the API server") for text in found.unchecked] == [True, True]
    with pytest.raises(ManifestError, match=r"^spec.sharing.maxSlowdown: expected a number >= 1.0$"):
        await check_manifest(kube, manifest_of(sharing={"maxSlowdown": 0.5}))


@pytest.mark.parametrize(
    ("own", "flag", "found"),
    [
        pytest.param("", None, "", id="none"),
        pytest.param("", "a", "a", id="asked for"),
        pytest.param("b", None, "b", id="the manifest's"),
        pytest.param("b", "b", "b", id="both"),
        pytest.param("b", "a", None, id="another"),
        pytest.param("b", "default", None, id="another, which is the default"),
    ],
)
def test_namespace_of_the_manifest_must_match(own, flag, found, tmp_path):
    """Regression: with -n A what-if silently answered for namespace B."""
    path = tmp_path / "job.yaml"
    path.write_text(f"{{{HEAD}, metadata: {{name: x, namespace: '{own}'}}}}")
    if found is None:
        with pytest.raises(ManifestError, match=f"the namespace of the manifest, {own}, is not {flag}, which -n"):
            read_manifest(path, flag)
    else:
        assert read_manifest(path, flag)["metadata"]["namespace"] == found


KIND, EXPECTED = "kind: GpuTrainingJob", "expected apiVersion carpool.dev/v1alpha1"


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        pytest.param(f"apiVersion: carpool.dev/v9\n{KIND}", f"{EXPECTED}, found carpool.dev/v9", id="another version"),
        pytest.param(f"apiVersion:\n{KIND}", f"{EXPECTED}, found none", id="no version"),
        pytest.param("apiVersion: batch/v1\nkind: Job", "expected kind GpuTrainingJob, found Job", id="another kind"),
        pytest.param("apiVersion: carpool.dev/v1alpha1", "expected kind GpuTrainingJob, found none", id="no kind"),
    ],
)
def test_manifest_of_another_kind_is_refused(head, sentence, tmp_path):
    """Regression: the refusal of another version named the field spec."""
    path = tmp_path / "job.yaml"
    path.write_text(f"{head}\nmetadata: {{name: x}}\nspec: {{template: {{}}}}\n")
    with pytest.raises(ManifestError) as refused:
        read_manifest(path, "default")
    assert str(refused.value) == f"{path}: {sentence}"


SHIPPED = AskSettings()
WHERE = "ConfigMap carpool-settings in carpool-system"


def site_with(name="carpool-settings", namespace="carpool-system", **data):
    """A cluster with the ConfigMap that the chart writes."""
    kube = FakeKube()
    kube.seed(CONFIG_MAPS, {"metadata": {"name": name, "namespace": namespace}, "data": data})
    return kube


async def test_settings_of_the_site_hold_unless_the_caller_sets_them():
    kube = site_with(CARPOOL_POLICY="best-fit", CARPOOL_SLOTS_PER_GPU="4", CARPOOL_MOST_JOBS="2",
                  CARPOOL_SLOWDOWN_QUANTILE="upper", CARPOOL_COUNT_PEAKS="false", CARPOOL_CALIBRATION="",
                  CARPOOL_SHARE_UNMEASURED="true")  # fmt: skip
    asked = dataclasses.replace(SHIPPED, policy="energy", conditions=AdmissionLimits(max_jobs=1))
    found, note = await read_site_settings(kube, asked, frozenset({"--policy", "--most-jobs", "--namespace"}))
    limits = AdmissionLimits(max_jobs=1, quantile=Quantile.UPPER)
    learns = {"calibration": "", "share_unmeasured": True}
    assert found == dataclasses.replace(asked, slots_per_gpu=4, count_peaks=False, conditions=limits, **learns)
    assert note == (
        "settings: --policy energy --most-jobs 1 as given; "
        "--no-count-peaks --slots-per-gpu 4 --slowdown-quantile upper --calibration '' --share-unmeasured "
        f"by {WHERE}; the others as shipped"
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(
            {"CARPOOL_POLICY": "of-tomorrow"}, "is invalid for this version: policy 'of-tomorrow'", id="policy"
        ),
        pytest.param({"CARPOOL_SLOTS_PER_GPU": "many"}, "is invalid for this version: CARPOOL_SLOTS", id="no number"),
        pytest.param({"CARPOOL_MOST_JOBS": "0"}, "is invalid for this version: expected 1 to", id="out of range"),
    ],
)
async def test_invalid_settings_of_the_site_leave_the_defaults(data, reason):
    found, note = await read_site_settings(site_with(**data), SHIPPED, frozenset())
    assert found == SHIPPED
    assert note.startswith(f"settings: as shipped; the site's may differ: {WHERE} {reason}")


async def test_unreadable_settings_of_the_site_leave_the_defaults():
    kube = FakeKube()
    found, note = await read_site_settings(kube, SHIPPED, frozenset())
    assert found == SHIPPED
    assert note.endswith(f"{WHERE} does not exist (--site names another installation)")
    kube.fail_next("get", CONFIG_MAPS, Forbidden("no", status=403))
    _, note = await read_site_settings(kube, SHIPPED, frozenset())
    assert note.endswith(f"you may not read {WHERE}")


async def test_site_names_another_installation():
    kube = site_with("gpus-settings", "ml", CARPOOL_POLICY="energy")
    found, note = await read_site_settings(kube, dataclasses.replace(SHIPPED, site="ml/gpus"), frozenset())
    assert found.policy == "energy"
    assert note.startswith("settings: --policy energy by ConfigMap gpus-settings in ml")
    asked = dataclasses.replace(SHIPPED, site="")
    assert (await read_site_settings(FakeKube(), asked, frozenset()))[1] == "settings: as shipped"
    with pytest.raises(SettingsError, match="expected NAMESPACE/NAME"):
        await read_site_settings(kube, dataclasses.replace(SHIPPED, site="gpus"), frozenset())


async def test_unreachable_api_server_is_an_error():
    kube = site_with()
    kube.fail_next("get", CONFIG_MAPS, Unreachable("no answer"))
    with pytest.raises(Unreachable):
        await read_site_settings(kube, SHIPPED, frozenset())


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [([], {}, set()), (["--policy", "energy"], {}, {"--policy"}), ([], {"CARPOOL_POLICY": "energy"}, {"--policy"})],
)
def test_flags_and_environment_variables_count_as_given(arguments, environment, expected):
    seen = []

    @click.command()
    @click_options(AskSettings)
    def command(settings):
        seen.append(flags_given(click.get_current_context()))

    assert CliRunner(env=environment).invoke(command, arguments).exit_code == 0
    assert seen == [expected]


def test_lines_break_between_words_in_a_terminal():
    line = "  GPU 0 of a (NVIDIA A100-SXM4-40GB): fits by MPS, leaves 36,960 MiB, expected slowdown 1.00; and more"
    first, *others = broken(line, 60).splitlines()
    assert first == "  GPU 0 of a (NVIDIA A100-SXM4-40GB): fits by MPS, leaves"
    assert all(part.startswith(6 * " ") and len(part) <= 60 for part in others)
    assert " ".join([first, *(part.strip() for part in others)]) == line
    assert broken("short", 60) == "short"
