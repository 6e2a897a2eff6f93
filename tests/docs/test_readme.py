"""The README shows the answers that `carpool` gives."""

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_core.cli import main
from carpool_core.kubectl import output
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain import commands
from click.testing import CliRunner
from demo_world import after_the_demo, connected

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PROMPT = "$ carpool "
COMMANDS = {"predict", "explain", "what-if"}


def answers() -> Iterator[tuple[str, list[str]]]:
    """Yield each of these commands of a code block, and the lines below it."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for part in re.split(rf"^{re.escape(PROMPT)}", block, flags=re.MULTILINE)[1:]:
            command, *answer = part.splitlines()
            if command.split()[0] in COMMANDS:
                yield command, [line for line in answer if line]


def words(text: str) -> str:
    return " ".join(text.split())


def tells(answer: str, line: str) -> bool:
    """Whether an answer has a line of the README, in which an ellipsis stands for anything, line breaks included."""
    pieces = [re.escape(words(piece)) for piece in line.split("…")]
    return re.search(".*".join(pieces), words(answer)) is not None


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeKube, FakeClock]:
    clock = FakeClock()
    return asyncio.run(after_the_demo(clock, tmp_path_factory.mktemp("gpus"))), clock


@pytest.mark.parametrize(("command", "answer"), [pytest.param(*one, id=one[0]) for one in answers()])
def test_a_command_answers_as_the_readme_says(
    command: str, answer: list[str], demo: tuple[FakeKube, FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    kube, clock = demo
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(output, "connect", lambda *_, **__: connected(kube))
    monkeypatch.setattr(commands, "SystemClock", lambda: clock)
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert [line for line in answer if not tells(result.output, line)] == []


def test_there_is_an_example_of_each() -> None:
    assert {command.split()[0] for command, _ in answers()} == COMMANDS
