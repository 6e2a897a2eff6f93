import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from carpool_core import logs
from carpool_core.settings import LogFormat, LogLevel, LogSettings
from carpool_core.values import GpuUuid


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


def test_json_is_one_object_a_line_with_the_process() -> None:
    stream, log = _lines(LogSettings(format=LogFormat.JSON))
    log.info("gpu prepared", gpu=GpuUuid("GPU-1"), steps={"a": 1}, path=io)  # type: ignore[attr-defined]
    logging.getLogger("kopf").warning("peering %s", "off")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["event"] == "gpu prepared"
    assert first["process"] == second["process"] == "agent"
    assert (first["gpu"], first["steps"], first["level"]) == ("GPU-1", {"a": 1}, "info")
    assert (second["event"], second["level"]) == ("peering off", "warning")


def test_an_exception_is_told_in_one_json_line() -> None:
    stream, log = _lines(LogSettings(format=LogFormat.JSON))
    try:
        raise ValueError("no such GPU")
    except ValueError:
        log.exception("failed")  # type: ignore[attr-defined]
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: no such GPU" in json.loads(line)["exception"]


def test_console_is_for_people() -> None:
    stream, log = _lines(LogSettings(format=LogFormat.CONSOLE))
    log.warning("watch failed", retry_in_s=0.2)  # type: ignore[attr-defined]
    assert "watch failed" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "has_colours"),
    [(io.StringIO(), "", False), (Terminal(), "", True), (Terminal(), "1", False)],
    ids=["file", "terminal", "unwanted"],
)
def test_colours_are_for_terminals(
    stream: io.StringIO, no_color: str, has_colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: files and `kubectl logs` had them, too."""
    monkeypatch.setenv("NO_COLOR", no_color)
    logs.configure(LogSettings(format=LogFormat.CONSOLE), "agent", stream=stream)
    structlog.get_logger().warning("watch failed", retry_in_s=0.2)
    assert ("watch failed" in stream.getvalue(), "\x1b" in stream.getvalue()) == (True, has_colours)


def test_what_is_less_severe_is_left_out() -> None:
    stream, log = _lines(LogSettings(level=LogLevel.WARNING))
    log.info("ordinary")  # type: ignore[attr-defined]
    logging.getLogger("x").info("ordinary too")
    assert stream.getvalue() == ""
