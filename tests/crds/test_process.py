"""Settings, logs, commands and the metrics server of a process."""

import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import click
import pytest
import structlog
from carpool_core import logs, metrics
from carpool_core.cli import SUBCOMMANDS, Subcommand, load_command, main
from carpool_core.settings import LogFormat, LogLevel, LogSettings, SettingsError, click_options, load, setting
from carpool_core.values import GpuUuid
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Inner:
    slots: int = setting(8, env="T_SLOTS", minimum=1, maximum=128, help="Slots of a GPU.")
    folder: Path = setting(Path("/var/lib"), env="T_FOLDER", help="Where state is kept.")


@dataclass(frozen=True)
class Settings:
    ratio: float = setting(0.5, env="T_RATIO", minimum=0, help="A share, 0..1.")
    kubelet: bool = setting(True, env="T_KUBELET", help="Whether there is a kubelet.")
    node: str | None = setting(None, env="T_NODE", help="Name of the node; the host's where empty.")
    inner: Inner = field(default_factory=Inner)
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True)
class Asked:
    address: str = setting("here:1", help="None where empty.", allow_empty=True)


@pytest.mark.parametrize(
    ("environ", "found"), [({}, "here:1"), ({"CARPOOL_ADDRESS": ""}, ""), ({"CARPOOL_ADDRESS": "x"}, "x")]
)
def test_empty_variable_counts_only_if_allowed(environ: dict[str, str], found: str) -> None:
    """Regression: neither a flag nor the chart could set the agent's address to empty."""

    @click.command()
    @click_options(Asked)
    def command(settings: Asked) -> None:
        click.echo(f"<{settings.address}>")

    assert load(Asked, environ) == Asked(found)
    assert CliRunner().invoke(command, [], env={"CARPOOL_ADDRESS": None, **environ}).output == f"<{found}>\n"


def test_settings_are_read_from_the_environment() -> None:
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
def test_invalid_value_names_the_variable(variable: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Settings, {variable: value})
    assert str(caught.value) == sentence


def _run(*arguments: str, env: dict[str, str] | None = None) -> tuple[str, list[Settings]]:
    seen: list[Settings] = []

    @click.command()
    @click_options(Settings)
    def command(settings: Settings) -> None:
        """Do it."""
        seen.append(settings)

    result = CliRunner().invoke(command, arguments, env=env or {})
    return result.output, seen


def test_flag_wins_over_environment_over_default() -> None:
    _, (settings,) = _run("--slots", "4", "--no-kubelet", "--log-format", "json", env={"T_SLOTS": "3", "T_RATIO": "1"})
    assert settings == Settings(1.0, False, None, Inner(4), LogSettings(format=LogFormat.JSON))


def test_help_shows_flag_variable_and_default() -> None:
    output, seen = _run("--help")
    assert seen == []
    for part in ("--slots", "T_SLOTS", "[env var: T_SLOTS; default: 8]", "--kubelet / --no-kubelet", "Do it."):
        assert part in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        (["--slots", "129"], {}, "'--slots' (env var: 'T_SLOTS'): expected a number from 1 to 128, found 129"),
        ([], {"T_SLOTS": "0"}, "'--slots' (env var: 'T_SLOTS'): expected a number from 1 to 128, found 0"),
        (["--ratio", "nan"], {}, "expected a number from 0 on, found nan"),
    ],
)
def test_flag_out_of_bounds_is_refused(arguments: list[str], env: dict[str, str], sentence: str) -> None:
    output, seen = _run(*arguments, env=env)
    assert seen == []
    assert sentence in output
    help_, _ = _run("--help")
    assert "Slots of a GPU. From 1 to 128." in " ".join(help_.split())
    assert "A share, 0..1. From 0 on." in " ".join(help_.split())


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    root.handlers[:] = before[1]
    root.setLevel(before[0])
    structlog.reset_defaults()


def _lines(settings: LogSettings) -> tuple[io.StringIO, object]:
    stream = io.StringIO()
    logs.configure(settings, "agent", stream=stream)
    return stream, structlog.get_logger()


def test_json_log_is_one_object_per_line() -> None:
    stream, log = _lines(LogSettings(format=LogFormat.JSON))
    log.info("gpu prepared", gpu=GpuUuid("GPU-1"), steps={"a": 1}, path=io)  # type: ignore[attr-defined]
    logging.getLogger("uvicorn").warning("reload %s", "off")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["event"] == "gpu prepared"
    assert first["process"] == second["process"] == "agent"
    assert (first["gpu"], first["steps"], first["level"]) == ("GPU-1", {"a": 1}, "info")
    assert (second["event"], second["level"]) == ("reload off", "warning")


def test_json_log_holds_the_exception() -> None:
    stream, log = _lines(LogSettings(format=LogFormat.JSON))
    try:
        raise ValueError("no such GPU")
    except ValueError:
        log.exception("failed")  # type: ignore[attr-defined]
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: no such GPU" in json.loads(line)["exception"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "has_colours"),
    [(io.StringIO(), "", False), (Terminal(), "", True), (Terminal(), "1", False)],
    ids=["file", "terminal", "unwanted"],
)
def test_only_terminals_get_colours(
    stream: io.StringIO, no_color: str, has_colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: files and `kubectl logs` had them, too."""
    monkeypatch.setenv("NO_COLOR", no_color)
    logs.configure(LogSettings(format=LogFormat.CONSOLE), "agent", stream=stream)
    structlog.get_logger().warning("watch failed", retry_in_s=0.2)
    assert ("watch failed" in stream.getvalue(), "\x1b" in stream.getvalue()) == (True, has_colours)


def test_log_level_filters() -> None:
    stream, log = _lines(LogSettings(level=LogLevel.WARNING))
    log.info("ordinary")  # type: ignore[attr-defined]
    logging.getLogger("x").info("ordinary too")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output
    assert "Not installed" not in result.output


@pytest.mark.parametrize("group", [(), ("node",)], ids=["all", "node"])
def test_command_lists_have_whole_sentences(group: tuple[str, ...]) -> None:
    listed = CliRunner().invoke(main, [*group, "--help"]).output.partition("Commands:\n")[2]
    assert all(line[:3].strip() for line in listed.splitlines()), "each fits one line of 80 characters"
    assert "..." not in listed


def test_missing_dependency_names_the_extra() -> None:
    command = load_command("brew", Subcommand("no_such_module.commands", "brew", "operator"))
    result = CliRunner().invoke(command, ["--strength", "9", "now"])
    assert result.exit_code == 2
    assert result.output == (
        "Error: `carpool brew` needs the Python module 'no_such_module'; "
        "install it from a checkout of Carpool: pip install '.[operator]'\n"
    )
    assert "'.[operator]'" in (command.short_help or "")


def test_crds_command_prints_or_writes(tmp_path: Path) -> None:
    printed = CliRunner().invoke(main, ["crds"])
    assert printed.output.count("kind: CustomResourceDefinition") == 2
    written = CliRunner().invoke(main, ["crds", "--out", str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    assert written.exit_code == 0
    files = sorted(p.name for p in (tmp_path / "b").iterdir())
    assert files == ["carpool.dev_gpunodes.yaml", "carpool.dev_gputrainingjobs.yaml"]


async def _get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


@asynccontextmanager
async def _served(
    registry: CollectorRegistry, not_ready: Callable[[], str | None] = lambda: None
) -> AsyncIterator[int]:
    """Serve a registry; yield the port."""
    server = await metrics.serve(registry, 0, "127.0.0.1", not_ready)
    yield server.port
    await server.close()


async def test_metrics_are_read_at_scrape_time() -> None:
    registry = CollectorRegistry()
    metrics.build_info(registry, "agent", "1.2.3")
    gauge = Gauge("carpool_things_total", "Things.", registry=registry)
    async with _served(registry) as port:
        gauge.set(7)
        status, text = await _get(port, "/metrics")
        assert status == 200
        assert "carpool_things_total 7.0" in text
        assert 'carpool_build_info{process="agent",version="1.2.3"} 1.0' in text
        assert (await _get(port, "/healthz"))[0] == 200
        assert (await _get(port, "/readyz")) == (200, "ok\n")


async def test_a_client_that_asks_for_open_metrics_gets_it() -> None:
    registry = CollectorRegistry()
    metrics.ApiMetrics(registry).failed("get", 404)
    async with _served(registry) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/metrics"
        accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
        async with session.get(url, headers={"Accept": accept}) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            families = {family.name for family in text_string_to_metric_families(await response.text())}
        assert {"carpool_api_errors", "carpool_api_request_seconds"} <= families
        async with session.get(url) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert 'carpool_api_errors_total{status="404",verb="get"} 1.0' in await response.text()


async def test_readiness_names_its_reason() -> None:
    waiting_for: list[str] = ["the first list of GpuNodes"]
    async with _served(CollectorRegistry(), lambda: waiting_for[0] if waiting_for else None) as port:
        assert (await _get(port, "/readyz")) == (503, "the first list of GpuNodes\n")
        waiting_for.clear()
        assert (await _get(port, "/readyz"))[0] == 200


async def test_taken_port_is_a_settings_error() -> None:
    """Regression: operator and extender ended with a traceback."""
    async with _served(CollectorRegistry()) as port:
        with pytest.raises(SettingsError, match=r"expected a free port at 127.0.0.1, found \d+: .*; set another$"):
            await metrics.serve(CollectorRegistry(), port, "127.0.0.1")
