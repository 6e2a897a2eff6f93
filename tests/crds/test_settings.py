from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path

import click
import pytest
from carpool_core.settings import (
    KubeSettings,
    LogFormat,
    LogLevel,
    LogSettings,
    SettingsError,
    click_options,
    load,
    setting,
    settings_of,
)
from click.testing import CliRunner


@dataclass(frozen=True)
class Inner:
    slots: int = setting(8, flag="--slots", env="T_SLOTS", minimum=1, maximum=128, help="Slots of a GPU.")
    folder: Path = setting(Path("/var/lib"), flag="--folder", env="T_FOLDER", help="Where state is kept.")


@dataclass(frozen=True)
class Settings:
    ratio: float = setting(0.5, flag="--ratio", env="T_RATIO", minimum=0, help="A share, 0..1.")
    kubelet: bool = setting(True, flag="--kubelet", env="T_KUBELET", help="Whether there is a kubelet.")
    node: str | None = setting(None, flag="--node", env="T_NODE", help="Name of the node; the host's where empty.")
    inner: Inner = field(default_factory=Inner)
    log: LogSettings = field(default_factory=LogSettings)


def test_defaults_without_an_environment() -> None:
    assert load(Settings, {}) == Settings()
    assert load(KubeSettings, {"KUBECONFIG": ""}) == KubeSettings(None)


@dataclass(frozen=True)
class Asked:
    address: str = setting("here:1", flag="--address", env="T_ADDRESS", help="None where empty.", allow_empty=True)


@pytest.mark.parametrize(("environ", "found"), [({}, "here:1"), ({"T_ADDRESS": ""}, ""), ({"T_ADDRESS": "x"}, "x")])
def test_an_empty_variable_is_a_value_where_it_says_something(environ: dict[str, str], found: str) -> None:
    """Regression: `none where empty` could not be said, neither to the agent nor by its chart."""

    @click.command()
    @click_options(Asked)
    def command(settings: Asked) -> None:
        click.echo(f"<{settings.address}>")

    assert load(Asked, environ) == Asked(found)
    assert CliRunner().invoke(command, [], env={"T_ADDRESS": None, **environ}).output == f"<{found}>\n"


def test_every_kind_of_value_from_the_environment() -> None:
    environ = {
        "T_RATIO": "0.25", "T_KUBELET": "no", "T_NODE": "n1", "T_SLOTS": "3", "T_FOLDER": "/x", "UNRELATED": "1",
        "CARPOOL_LOG_LEVEL": "debug", "CARPOOL_LOG_FORMAT": "json",
    }  # fmt: skip
    expected = Settings(0.25, False, "n1", Inner(3, Path("/x")), LogSettings(LogLevel.DEBUG, LogFormat.JSON))
    assert load(Settings, environ) == expected


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("T_SLOTS", "many", "T_SLOTS: expected an integer, found 'many'"),
        ("T_RATIO", "half", "T_RATIO: expected a number, found 'half'"),
        ("T_SLOTS", "0", "T_SLOTS: expected a number from 1 to 128, found 0"),
        ("T_SLOTS", "129", "T_SLOTS: expected a number from 1 to 128, found 129"),
        ("T_RATIO", "-0.5", "T_RATIO: expected a number from 0 on, found -0.5"),
        ("T_RATIO", "nan", "T_RATIO: expected a number from 0 on, found nan"),
        ("T_KUBELET", "maybe", "T_KUBELET: expected true or false, found 'maybe'"),
        ("CARPOOL_LOG_LEVEL", "loud", "CARPOOL_LOG_LEVEL: expected debug or info or warning or error, found 'loud'"),
    ],
)
def test_a_wrong_value_names_the_variable(variable: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Settings, {variable: value})
    assert str(caught.value) == sentence


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().ratio = 1.0  # type: ignore[misc]


def test_a_field_that_is_no_setting_is_refused() -> None:
    @dataclass(frozen=True)
    class Broken:
        plain: int = 3

    with pytest.raises(TypeError, match="plain: expected a `setting"):
        list(settings_of(Broken))


def _run(*arguments: str, env: dict[str, str] | None = None) -> tuple[str, list[Settings]]:
    seen: list[Settings] = []

    @click.command()
    @click_options(Settings)
    def command(settings: Settings) -> None:
        """Do it."""
        seen.append(settings)

    result = CliRunner().invoke(command, arguments, env=env or {})
    return result.output, seen


def test_flags_win_over_the_environment_over_defaults() -> None:
    _, (settings,) = _run("--slots", "4", "--no-kubelet", "--log-format", "json", env={"T_SLOTS": "3", "T_RATIO": "1"})
    assert settings == Settings(1.0, False, None, Inner(4), LogSettings(format=LogFormat.JSON))


def test_a_false_variable_turns_a_switch_off() -> None:
    _, (settings,) = _run(env={"T_KUBELET": "false"})
    assert settings.kubelet is False


def test_help_shows_flag_variable_and_default() -> None:
    output, seen = _run("--help")
    assert seen == []
    for part in ("--slots", "T_SLOTS", "[env var: T_SLOTS; default: 8]", "--kubelet / --no-kubelet", "Do it."):
        assert part in " ".join(output.split())


def test_a_wrong_flag_is_refused() -> None:
    output, seen = _run("--log-format", "xml")
    assert seen == []
    assert "json" in output


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        (["--slots", "129"], {}, "'--slots' (env var: 'T_SLOTS'): expected a number from 1 to 128, found 129"),
        ([], {"T_SLOTS": "0"}, "'--slots' (env var: 'T_SLOTS'): expected a number from 1 to 128, found 0"),
        (["--ratio", "nan"], {}, "expected a number from 0 on, found nan"),
    ],
)
def test_a_number_out_of_bounds_is_refused_wherever_it_comes_from(
    arguments: list[str], env: dict[str, str], sentence: str
) -> None:
    output, seen = _run(*arguments, env=env)
    assert seen == []
    assert sentence in output
    help_, _ = _run("--help")
    assert "Slots of a GPU. From 1 to 128." in " ".join(help_.split())
    assert "A share, 0..1. From 0 on." in " ".join(help_.split())


def test_no_flag_and_no_variable_is_used_twice() -> None:
    known = list(settings_of(Settings))
    assert len({s.flag for s in known}) == len({s.env for s in known}) == len(known)
