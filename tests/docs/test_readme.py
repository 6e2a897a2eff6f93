"""What the README says that `carpool predict` answers is what it answers."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_predictor.commands import predict
from click.testing import CliRunner

README = Path(__file__).parents[2] / "README.md"
COMMAND = "$ carpool predict "


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a code block and the lines that stand below it."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        command, *told = block.splitlines()
        if command.startswith(COMMAND):
            yield command.removeprefix(COMMAND), told


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("arguments", "told"), [pytest.param(*block, id=block[0]) for block in blocks()])
def test_predict_answers_as_the_readme_says(arguments: str, told: list[str]) -> None:
    result = CliRunner().invoke(predict, shlex.split(arguments))
    assert result.exit_code == 0
    answer = words(result.output)
    pieces = [words(piece) for line in told for piece in line.split("…")]
    assert [piece for piece in pieces if piece not in answer] == []


def test_there_is_such_an_example() -> None:
    assert list(blocks())
