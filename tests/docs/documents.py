"""The documents' commands, which tests execute, and why some are not executed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LAPTOP = ROOT / "docs" / "laptop.md"
"""Its commands are executed on the demo's cluster."""
PROGRAMS = r"carpool|cat|ctr|curl|docker|git|helm|kubectl|make|nvidia-smi|pip|python3?|skopeo"

DEVELOPMENT = ROOT / "docs" / "development.md"
NOT_EXECUTED = dict(
    re.findall(r"^\| `([^`]*)` \| (needs [^|]*) \|$", DEVELOPMENT.read_text(encoding="utf-8"), re.MULTILINE)
)
"""Reason why no test executes a command, by the command or its beginning, as the page on development lists them."""
ELSEWHERE = {
    r"make demo": "tests/e2e/test_demo.py::test_the_commands_of_the_page_on_a_laptop_work",
    r"make krew |kubectl krew |kubectl carpool --version": "tests/e2e/test_release.py::test_krew_installs_the_plugin",
    r"skopeo ": "tests/e2e/test_release.py::test_skopeo_copies_an_image_with_all_its_architectures",
    r"helm install ": "tests/helm/test_pods.py::test_a_running_job_outlives_what_is_done_to_the_release",
    r"carpool node .*--canary$": "tests/deviceplugin/test_canary.py::test_a_documented_canary_runs_in_nvidias_daemon",
    r"carpool node (?!.*--canary)": "tests/deviceplugin/test_nvlib.py::test_a_documented_command_uses_the_bindings",
    r"make (install|lint)$": ".ci/run::make lint",
    r"make test$": ".ci/run::make test",
}
"""Test that executes the commands that begin with the expression, with the files or the cluster that they need."""
OPTIONS = {
    r"kubectl drain ": "--dry-run=server",
    r"kubectl .* delete pod --selector '": "--dry-run=server",
    r"kubectl .* patch ": "--dry-run=server",
    r"helm upgrade .*(autoscaling|migSwitch)=": "--dry-run=server",
    r"pip install ": "--target packages",
}
"""Option for the commands that begin with the expression: later ones need pods, jobs and environment as they are."""
ENDLESS = {
    r"(kubectl )?carpool board": "the board is at",
    r"kubectl .*port-forward ": "Forwarding from",
    r"python tests/e2e/crashing.py ": "serving metrics",
}
"""Output by which a command that serves shows that it is ready."""


def commands(*documents: Path) -> Iterator[tuple[Path, str]]:
    """Yield each command in a block of code, without its comment, with its document."""
    for document in documents or DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for language, body in re.findall(r"^```(\S*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines = re.sub(r"\\\n +", "", body) if not language else ""
            line = rf"^(?:\$ )?((?:{PROGRAMS})(?: [^\n]*?)?(?:<<'EOF'\n[\s\S]*?^EOF)?)(?: *#[^\n]*)?$"
            for command in re.findall(line, lines, re.MULTILINE):
                yield document, command.strip()


def is_not_executed(command: str) -> bool:
    """Return whether the page on development says that no test executes the command."""
    return command.startswith(tuple(NOT_EXECUTED))


def executed() -> list[str]:
    """Return the commands that are executed on the chart's pods, each once, as they are executed."""
    found = dict.fromkeys(command for document, command in commands() if document != LAPTOP)
    chosen = [c for c in found if not (is_not_executed(c) or any(re.match(prefix, c) for prefix in ELSEWHERE))]
    return [" ".join([c, *(option for prefix, option in OPTIONS.items() if re.match(prefix, c))]) for c in chosen]


def life_of_a_release() -> list[tuple[str, int]]:
    """Return the commands in the table of docs/operations.md with their exit codes."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return [(command, int(code)) for command, code in re.findall(r"\| `(helm [^`]*)` \| (\d) \|", text)]


@dataclass
class Shell:
    """Runs lines in a checkout, with names of a cluster in place of the words in capitals."""

    folder: Path
    environment: dict[str, str]
    names: dict[str, str] = field(default_factory=dict)
    serving: "subprocess.Popen[str] | None" = None
    """The last command that serves until it is ended."""

    def __post_init__(self) -> None:
        """Make the checkout, in which everything is installed; what serves takes a free port."""
        self.environment = {**self.environment, "CARPOOL_BOARD_PORT": "0", "CARPOOL_METRICS_PORT": "0"}
        left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "dist", "out")
        shutil.copytree(ROOT, self.folder, symlinks=True, ignore=left_out, dirs_exist_ok=True)
        (self.folder / ".venv").mkdir()
        for entry in Path(sys.prefix).iterdir():
            (self.folder / ".venv" / entry.name).symlink_to(entry)
        (self.folder / ".venv" / ".installed").unlink(missing_ok=True)
        (self.folder / ".venv" / ".installed").touch()  # `make` does not install anew from this copy

    def __call__(self, command: str, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run a line to its end, or until it serves."""
        line = re.sub(r"\b[A-Z_]+\b", lambda found: self.names.get(found[0], found[0]), command)
        arguments = ["bash", "-o", "pipefail", "-c", " ".join([line, *options])]
        where: dict[str, Any] = {"text": True, "env": self.environment, "cwd": self.folder}
        sign = next((sign for prefix, sign in ENDLESS.items() if re.match(prefix, command)), None)
        if sign is None:
            return subprocess.run(arguments, capture_output=True, check=False, **where)
        self.stop()
        arguments[-1] = f"exec {line}"
        self.serving = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **where)
        printed = ""
        for row in self.serving.stdout or ():
            printed += row
            if sign in row:
                return subprocess.CompletedProcess(line, 0, printed, "")
        return subprocess.CompletedProcess(line, self.serving.wait() or 1, printed, "")

    def stop(self) -> None:
        """End what serves."""
        if self.serving is not None:
            self.serving.terminate()
            self.serving.communicate()
            self.serving = None
