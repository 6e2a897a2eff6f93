"""explain and what-if go by the site's own settings where whoever asks may read them, and say by which."""

import dataclasses

import click
import pytest
from asking_world import CLOCK, HEAD, predicted
from carpool_core.kube.api import DEPLOYMENTS, GPU_TRAINING_JOBS
from carpool_core.kube.errors import Forbidden, Invalid, Unreachable
from carpool_core.settings import SettingsError, click_options
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain import commands
from carpool_extender.explain.commands import explain_command, what_if
from carpool_extender.explain.site import given, settled
from carpool_extender.framework.admission_limits import Quantile
from carpool_extender.settings import AskSettings, ConditionSettings
from carpool_extender.testing import gpu_node, seed_job, seed_node, tenant
from click.testing import CliRunner

SHIPPED = AskSettings()
SCHEDULER = "Deployment carpool-scheduler in carpool-system"
BOTH = "Deployments carpool-scheduler and carpool-operator in carpool-system"
CHARTS = {
    "CARPOOL_POLICY": "least-slowdown",
    "CARPOOL_JOB_POLICIES": "false",
    "CARPOOL_COUNT_PEAKS": "true",
    "CARPOOL_SLOWDOWN_QUANTILE": "median",
    "CARPOOL_BIND_TIMEOUT_SECONDS": "20",
    "CARPOOL_SLOTS_PER_GPU": "8",
    "KUBECONFIG": "/elsewhere",
}
"""What the chart tells the extender where nobody changed its values, and more that is nobody else's business."""
LEARNS = {"CARPOOL_CALIBRATION": "carpool-system/carpool-calibration", "CARPOOL_SHARE_UNMEASURED": "false"}


def install(kube, process, name=None, namespace="carpool-system", env=(), **others):
    """Put the Deployment of a process there, as the chart writes it, and fields of its container."""
    verb = {"scheduler": "extender"}.get(process, process)
    container = {"name": verb, "command": ["carpool"], "args": [verb], **others}
    variables = [{"name": key, **({"value": v} if isinstance(v, str) else v)} for key, v in dict(env).items()]
    pod = {"spec": {"containers": [{"name": "kube-scheduler"}, container | {"env": variables}]}}
    metadata = {"name": name or f"carpool-{process}", "namespace": namespace}
    kube.seed(DEPLOYMENTS, {"metadata": metadata, "spec": {"template": pod}})


def a_site(container=(), **env):
    """An installation of the chart; fields of the extender's container, and variables of it."""
    kube = FakeKube()
    install(kube, "scheduler", env=CHARTS | env, **dict(container))
    install(kube, "operator", env=LEARNS)
    return kube


async def test_the_sites_settings_hold_where_nobody_says_otherwise():
    kube = a_site(CARPOOL_POLICY="best-fit", CARPOOL_SLOTS_PER_GPU="4", CARPOOL_MOST_JOBS="2",
                  CARPOOL_SLOWDOWN_QUANTILE="upper", CARPOOL_COUNT_PEAKS="false")  # fmt: skip
    asked = dataclasses.replace(SHIPPED, policy="energy", conditions=ConditionSettings(max_jobs=1))
    found, note = await settled(kube, asked, frozenset({"--policy", "--most-jobs", "--namespace"}), predicts=False)
    conditions = ConditionSettings(max_jobs=1, slowdown_quantile=Quantile.UPPER)
    assert found == dataclasses.replace(
        SHIPPED, policy="energy", slots_per_gpu=4, count_peaks=False, conditions=conditions
    )
    assert note == (
        "settings: --policy energy --most-jobs 1 as given; "
        f"--no-count-peaks --slots-per-gpu 4 --slowdown-quantile upper, says {SCHEDULER}; the others as shipped"
    )


@pytest.mark.parametrize(
    ("flags", "predicts", "note"),
    [
        pytest.param((), False, f"settings: as shipped, says {SCHEDULER}", id="nothing given"),
        pytest.param((), True, f"settings: as shipped, says {BOTH}", id="to predict with, too"),
        pytest.param(
            ("--policy",),
            False,
            f"settings: --policy least-slowdown as given; the others as shipped, says {SCHEDULER}",
            id="given as shipped",
        ),
        pytest.param(("--calibration", "--all"), False, f"settings: as shipped, says {SCHEDULER}", id="no matter"),
    ],
)  # fmt: skip
async def test_a_site_as_shipped_is_said_to_be_that(flags, predicts, note):
    found = await settled(a_site(), SHIPPED, frozenset(flags), predicts=predicts)
    assert found == (SHIPPED, note)


@pytest.mark.parametrize(
    ("env", "changes", "told"),
    [
        pytest.param({}, {"calibration": ""}, "--calibration ''", id="learns nothing"),
        pytest.param(
            LEARNS | {"CARPOOL_SHARE_UNMEASURED": "true", "CARPOOL_CALIBRATION": "a/b"},
            {"calibration": "a/b", "share_unmeasured": True},
            "--calibration a/b --share-unmeasured",
            id="elsewhere",
        ),
    ],
)
async def test_what_the_operator_is_told_counts_for_predictions(env, changes, told):
    kube = a_site()
    install(kube, "operator", env=env)
    found, note = await settled(kube, SHIPPED, frozenset(), predicts=True)
    assert found == dataclasses.replace(SHIPPED, **changes)
    assert note == f"settings: {told}, says {BOTH}; the others as shipped"
    assert (await settled(kube, SHIPPED, frozenset(), predicts=False)).settings == SHIPPED


@pytest.mark.parametrize(
    ("kube", "why"),
    [
        pytest.param(FakeKube(), "not found (--site names another installation)", id="not there"),
        pytest.param(Forbidden("no", status=403), "may not be read by you", id="no right"),
        pytest.param(Invalid("odd", status=422), "cannot be read: odd", id="unreadable"),
        pytest.param(
            a_site(CARPOOL_POLICY="fast"), "makes no sense to this version: policy 'fast' is unknown; choose one",
            id="a policy of another version",
        ),
        pytest.param(
            a_site(CARPOOL_SLOTS_PER_GPU="many"),
            "makes no sense to this version: CARPOOL_SLOTS_PER_GPU: expected an integer, found 'many'", id="no number",
        ),
        pytest.param(
            a_site(CARPOOL_MOST_JOBS="0"), "makes no sense to this version: expected 1 to 1,024 jobs", id="impossible"
        ),
        pytest.param(
            a_site(CARPOOL_POLICY={"valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}),
            "tells settings otherwise than by the value of a variable: CARPOOL_POLICY", id="from elsewhere",
        ),
        pytest.param(
            a_site(CARPOOL_CALIBRATION="elsewhere", CARPOOL_POLICY="$(WANTED)"),
            "tells settings otherwise than by the value of a variable: CARPOOL_POLICY", id="of another variable",
        ),
        pytest.param(
            a_site({"envFrom": [{"configMapRef": {"name": "x"}}]}),
            "tells settings otherwise than by the value of a variable: envFrom", id="a whole ConfigMap",
        ),
        pytest.param(
            a_site({"args": ["extender", "--policy=energy"]}),
            "tells settings otherwise than by the value of a variable: carpool extender --policy=energy",
            id="by a flag",
        ),
        pytest.param(
            a_site({"command": ["carpool", "extender", "--policy", "energy"], "args": []}),
            "tells settings otherwise than by the value of a variable: carpool extender --policy energy",
            id="by a flag of its command",
        ),
        pytest.param(
            a_site({"command": ["sh", "-c"], "args": [f"CARPOOL_POLICY=energy {'# ' * 100}"]}),
            "tells settings otherwise than by the value of a variable: sh -c CARPOOL_POLICY=energy # # ",
            id="by a shell",
        ),
    ],
)  # fmt: skip
async def test_where_the_sites_settings_cannot_be_known_it_is_said_and_defaults_hold(kube, why):
    if not isinstance(kube, FakeKube):
        error, kube = kube, a_site(CARPOOL_POLICY="energy")
        kube.fail_next("get", DEPLOYMENTS, error)
    asked = dataclasses.replace(SHIPPED, slots_per_gpu=3)
    found, note = await settled(kube, asked, frozenset({"--slots-per-gpu"}), predicts=False)
    assert found == asked
    assert note.startswith(
        f"settings: --slots-per-gpu 3 as given; the others as shipped; the site's may differ: {SCHEDULER} {why}"
    )


@pytest.mark.parametrize(
    "container",
    [
        pytest.param({"command": ["carpool", "extender"], "args": []}, id="all of it the command"),
        pytest.param({"command": [], "args": ["extender"]}, id="what the image begins with"),
        pytest.param({"command": [], "args": []}, id="what the image runs"),
        pytest.param({"envFrom": []}, id="nothing from elsewhere"),
    ],
)
async def test_however_the_process_itself_is_started_its_variables_tell(container):
    found, note = await settled(a_site(container, CARPOOL_POLICY="energy"), SHIPPED, frozenset(), predicts=False)
    assert found.policy == "energy"
    assert "may differ" not in note


async def test_of_another_workload_of_that_name_nothing_is_taken():
    kube = FakeKube()
    install(kube, "operator", name="carpool-scheduler")
    note = (await settled(kube, SHIPPED, frozenset(), predicts=False)).note
    assert note.endswith(f"{SCHEDULER} has no container extender")


async def test_where_only_one_of_the_two_may_be_read_the_other_is_named():
    kube = FakeKube()
    install(kube, "scheduler", env=CHARTS | {"CARPOOL_POLICY": "energy"})
    found, note = await settled(kube, SHIPPED, frozenset(), predicts=True)
    assert found.policy == "energy"
    assert note == (
        f"settings: --policy energy, says {SCHEDULER}; the others as shipped; the site's may differ: "
        "Deployment carpool-operator in carpool-system not found (--site names another installation)"
    )


async def test_what_both_lack_is_said_once():
    note = (await settled(FakeKube(), SHIPPED, frozenset(), predicts=True)).note
    assert note == (
        f"settings: as shipped; the site's may differ: {BOTH} not found (--site names another installation)"
    )


async def test_another_installation_is_asked_where_it_is_named_and_none_where_that_is_empty():
    kube = a_site()
    install(kube, "scheduler", "gpus-scheduler", "ml", env={"CARPOOL_POLICY": "energy"})
    found, note = await settled(kube, dataclasses.replace(SHIPPED, site="ml/gpus"), frozenset(), predicts=False)
    assert found.policy == "energy"
    assert "Deployment gpus-scheduler in ml" in note
    calls = len(kube.calls)
    found, note = await settled(kube, dataclasses.replace(SHIPPED, site=""), frozenset(), predicts=True)
    assert note == "settings: as shipped"
    assert len(kube.calls) == calls
    for odd in ("carpool", "a/", "/b", "a/b/c"):
        with pytest.raises(SettingsError, match=r"^--site .*: expected NAMESPACE/NAME, such as .*, found"):
            await settled(kube, dataclasses.replace(SHIPPED, site=odd), frozenset(), predicts=False)


async def test_a_server_that_does_not_answer_is_no_missing_right():
    kube = a_site()
    kube.fail_next("get", DEPLOYMENTS, Unreachable("connection refused"))
    with pytest.raises(Unreachable):
        await settled(kube, SHIPPED, frozenset(), predicts=False)


def test_given_is_what_stands_on_the_line_or_in_the_callers_variables():
    @click.command()
    @click_options(AskSettings)
    def command(settings: AskSettings) -> None:
        click.echo(" ".join(sorted(given(click.get_current_context()))))

    told = CliRunner().invoke(
        command, ["--policy", "least-slowdown", "--no-count-peaks"], env={"CARPOOL_MOST_JOBS": "2"}
    )
    assert told.output == "--count-peaks --most-jobs --policy\n"


class Connected:
    """A connection to a server in memory."""

    def __init__(self, kube):
        self._kube = kube

    async def __aenter__(self):
        return self._kube

    async def __aexit__(self, *_):
        return None


@pytest.fixture
def run(monkeypatch):
    """Run a command on a server in memory."""

    def call(kube, command, *arguments):
        monkeypatch.setattr(commands, "SystemClock", lambda: CLOCK)
        monkeypatch.setattr(commands, "connect", lambda *_, **__: Connected(kube))
        return CliRunner().invoke(command, [*map(str, arguments)])

    return call


def test_both_commands_decide_by_the_site_and_a_flag_wins(run, tmp_path, monkeypatch):
    kube = a_site(CARPOOL_POLICY="worst-fit")
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 2, [tenant("y", ["GPU-a-0"])]))
    manifest = tmp_path / "job.yaml"
    manifest.write_text("{" + HEAD + ", metadata: {name: new}, spec: {template: {}}}")

    async def traced(_, job, products):
        return await predicted(job, products)

    monkeypatch.setattr(commands.Forecast, "traced", traced)
    for command, argument, where in ((explain_command, "x", SCHEDULER), (what_if, manifest, BOTH)):
        told = run(kube, command, argument)
        assert told.exit_code == 0, told.output
        lines = told.output.splitlines()
        assert "places by worst-fit (most memory left over):" in lines
        assert lines[-1] == f"settings: --policy worst-fit, says {where}; the others as shipped"
        told = run(kube, command, argument, "--policy", "best-fit")
        assert "places by best-fit (least memory left over):" in told.output
        assert (
            told.output.splitlines()[-1] == f"settings: --policy best-fit as given; the others as shipped, says {where}"
        )
    assert not [call for call in kube.calls if call.verb not in ("get", "list", "check")]


def test_whether_a_job_may_choose_its_policy_the_site_says(run):
    """Regression: whoever did not repeat the site's settings was told of a refusal that nobody would get."""
    kube = a_site(CARPOOL_JOB_POLICIES="true")
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 1))
    body = kube.dump(GPU_TRAINING_JOBS, "x", "default")
    body["metadata"]["annotations"] = {"carpool.dev/policy": "energy"}
    kube.seed(GPU_TRAINING_JOBS, body)
    told = run(kube, explain_command, "x")
    assert "PolicyNotAllowed" not in told.output
    assert "places by energy" in told.output
    refused = run(kube, explain_command, "x", "--no-job-policies")
    assert "settings.jobPolicies: true in the chart's values" in refused.output
