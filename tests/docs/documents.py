"""The documents' commands, and why some are not executed by tests/helm/test_pods.py."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = "carpool|curl|docker|git|helm|kubectl|make|pip|python"

NOT_EXECUTED = {
    r"make (install|lint|test)$": "runs before these tests, or runs them",
    r"make (demo|demo-clean|image)\b": "tests/e2e/test_demo.py and the images of these tests run what it runs",
    r"pip install ": "would change the environment of the tests; tests/e2e/test_release.py installs the wheel",
    r"python tests/e2e/crashing.py ": "does not end; tests/e2e/test_crashes.py runs it",
    r"helm (install|rollback|uninstall) ": "test_a_running_job_outlives_… runs it, with the values of these tests",
    r"helm upgrade gpu-operator ": "needs GPU Operator and its charts",
    r"carpool profile |.*carpool node |.* nvidia-smi ": "needs a real GPU, as the tests in tests/gpu do",
    r"carpool board( |$)": "does not end; tests/e2e/test_board.py runs it",
    r"kubectl .*port-forward ": "does not end",
    r"curl ": "needs the port-forward; tests/board/test_certificates.py makes the request",
    r"kubectl .*\btop pod ": "needs a metrics server",
}
"""Reason why a command that begins with the expression is not executed."""
DRY_RUN = ("kubectl drain ", "kubectl --namespace carpool-system delete pod --", "kubectl --namespace NAMESPACE patch ",
           "helm upgrade ")  # fmt: skip
"""These are executed with `--dry-run=server`, because later commands need the pods."""


def commands() -> Iterator[tuple[Path, str]]:
    """Yield each command in a block of code, without its comment, with its document."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for language, body in re.findall(r"^```(\S*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines = re.sub(r"\\\n +", "", body) if not language else ""
            for command in re.findall(rf"^(?:\$ )?((?:{PROGRAMS})(?: .*?)?)(?: *#.*)?$", lines, re.MULTILINE):
                yield document, command.strip()


def executed() -> list[str]:
    """Return the commands that are executed, each once, as they are executed."""
    found = dict.fromkeys(command for _, command in commands())
    chosen = [command for command in found if not any(re.match(prefix, command) for prefix in NOT_EXECUTED)]
    return [f"{command} --dry-run=server" if command.startswith(DRY_RUN) else command for command in chosen]
