"""explain and what-if use the site's settings where the caller may read them, and name their source."""

import dataclasses

import click
import pytest
from carpool_core.kube.api import CONFIG_MAPS
from carpool_core.kube.errors import Forbidden, Unreachable
from carpool_core.settings import SettingsError, click_options
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain.site_settings import given, read_site_settings
from carpool_extender.framework.admission_limits import Quantile
from carpool_extender.settings import AskSettings, ConditionSettings
from click.testing import CliRunner

SHIPPED = AskSettings()
WHERE = "ConfigMap carpool-settings in carpool-system"


def a_site(name="carpool-settings", namespace="carpool-system", **data):
    """A cluster with the ConfigMap that the chart writes."""
    kube = FakeKube()
    kube.seed(CONFIG_MAPS, {"metadata": {"name": name, "namespace": namespace}, "data": data})
    return kube


async def test_the_sites_settings_hold_unless_the_caller_sets_them():
    kube = a_site(CARPOOL_POLICY="best-fit", CARPOOL_SLOTS_PER_GPU="4", CARPOOL_MOST_JOBS="2",
                  CARPOOL_SLOWDOWN_QUANTILE="upper", CARPOOL_COUNT_PEAKS="false")  # fmt: skip
    asked = dataclasses.replace(SHIPPED, policy="energy", conditions=ConditionSettings(max_jobs=1))
    found, note = await read_site_settings(kube, asked, frozenset({"--policy", "--most-jobs", "--namespace"}))
    limits = ConditionSettings(max_jobs=1, slowdown_quantile=Quantile.UPPER)
    assert found == dataclasses.replace(asked, slots_per_gpu=4, count_peaks=False, conditions=limits)
    assert note == (
        "settings: --policy energy --most-jobs 1 as given; "
        f"--no-count-peaks --slots-per-gpu 4 --slowdown-quantile upper by {WHERE}; the others as shipped"
    )


async def test_a_site_with_defaults_is_as_shipped():
    found, note = await read_site_settings(a_site(CARPOOL_POLICY="least-slowdown"), SHIPPED, frozenset())
    assert (found, note) == (SHIPPED, f"settings: as shipped, by {WHERE}")


async def test_the_calibration_of_the_site_counts_for_predictions():
    kube = a_site(CARPOOL_CALIBRATION="", CARPOOL_SHARE_UNMEASURED="true")
    found, _ = await read_site_settings(kube, SHIPPED, frozenset())
    assert (found.calibration, found.share_unmeasured) == ("", True)


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
async def test_invalid_settings_of_a_site_leave_the_defaults_and_say_why(data, reason):
    found, note = await read_site_settings(a_site(**data), SHIPPED, frozenset())
    assert found == SHIPPED
    assert note.startswith(f"settings: as shipped; the site's may differ: {WHERE} {reason}")


async def test_unreadable_settings_of_a_site_leave_the_defaults_and_say_why():
    kube = FakeKube()
    found, note = await read_site_settings(kube, SHIPPED, frozenset())
    assert found == SHIPPED
    assert note.endswith(f"{WHERE} does not exist (--site names another installation)")
    kube.fail_next("get", CONFIG_MAPS, Forbidden("no", status=403))
    _, note = await read_site_settings(kube, SHIPPED, frozenset())
    assert note.endswith(f"you may not read {WHERE}")


async def test_another_installation_is_named_by_site():
    kube = a_site("gpus-settings", "ml", CARPOOL_POLICY="energy")
    found, note = await read_site_settings(kube, dataclasses.replace(SHIPPED, site="ml/gpus"), frozenset())
    assert found.policy == "energy"
    assert note.startswith("settings: --policy energy by ConfigMap gpus-settings in ml")
    asked = dataclasses.replace(SHIPPED, site="")
    assert (await read_site_settings(FakeKube(), asked, frozenset())).note == "settings: as shipped"
    with pytest.raises(SettingsError, match="expected NAMESPACE/NAME"):
        await read_site_settings(kube, dataclasses.replace(SHIPPED, site="gpus"), frozenset())


async def test_an_api_server_that_does_not_answer_is_an_error():
    kube = a_site()
    kube.fail_next("get", CONFIG_MAPS, Unreachable("no answer"))
    with pytest.raises(Unreachable):
        await read_site_settings(kube, SHIPPED, frozenset())


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, set()),
        (["--policy", "energy"], {}, {"--policy"}),
        ([], {"CARPOOL_POLICY": "energy"}, {"--policy"}),
    ],
)
def test_flags_and_environment_variables_count_as_given(arguments, environment, expected):
    seen = []

    @click.command()
    @click_options(AskSettings)
    def command(settings):
        seen.append(given(click.get_current_context()))

    assert CliRunner(env=environment).invoke(command, arguments).exit_code == 0
    assert seen == [expected]
