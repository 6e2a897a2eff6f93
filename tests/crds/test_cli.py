from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from carpool_core.cli import GROUP, load_command, main
from click.testing import CliRunner


def test_every_package_brings_its_commands() -> None:
    assert {point.name for point in entry_points(group=GROUP)} >= {
        "agent", "crds", "extender", "graph", "operator", "predict",
    }  # fmt: skip


@pytest.mark.parametrize("point", entry_points(group=GROUP), ids=lambda point: point.name)
def test_every_command_explains_itself(point: EntryPoint) -> None:
    result = CliRunner().invoke(main, [point.name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output
    assert "Not installed" not in result.output


@pytest.mark.parametrize("group", [(), ("node",)], ids=["all", "node"])
def test_a_list_of_commands_breaks_no_sentence_off(group: tuple[str, ...]) -> None:
    listed = CliRunner().invoke(main, [*group, "--help"]).output.partition("Commands:\n")[2]
    assert all(line[:3].strip() for line in listed.splitlines()), "each stands on one line of 80 characters"
    assert "..." not in listed


def test_a_missing_dependency_names_the_extra() -> None:
    point = EntryPoint("brew", "no_such_module.commands:brew [operator]", GROUP)
    command = load_command(point)
    result = CliRunner().invoke(command, ["--strength", "9", "now"])
    assert result.exit_code == 1
    assert result.output == (
        "Error: `carpool brew` needs the Python module 'no_such_module'; "
        "install it with: pip install 'carpool[operator]'\n"
    )
    assert "carpool[operator]" in (command.short_help or "")


def test_an_entry_point_that_is_no_command_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="expected a click command"):
        load_command(EntryPoint("sep", "os:sep", GROUP))


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["fly"])
    assert result.exit_code == 2
    assert "No such command 'fly'" in result.output


def test_crds_are_printed_or_written(tmp_path: Path) -> None:
    printed = CliRunner().invoke(main, ["crds"])
    assert printed.output.count("kind: CustomResourceDefinition") == 2
    written = CliRunner().invoke(main, ["crds", "--out", str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    assert written.exit_code == 0
    files = sorted(p.name for p in (tmp_path / "b").iterdir())
    assert files == ["carpool.dev_gpunodes.yaml", "carpool.dev_gputrainingjobs.yaml"]
