"""What the documents point to is there: files, headings, make targets, modules, paths."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from carpool_core.cli import SUBCOMMANDS, load_command
from documents import ELSEWHERE, ENDLESS, NOT_EXECUTED, OPTIONS, commands, life_of_a_release

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
HAND_WRITTEN = [d for d in DOCUMENTS if d.parent.name != "reference"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WRITTEN_AT_RUN_TIME = ("out/",)
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(text: str, *, without: str = "") -> Iterator[str]:
    """Yield the blocks of code, except for those of one language."""
    yield from (body for language, body in _FENCE.findall(text) if not without or language != without)


def codes(text: str) -> Iterator[str]:
    """Yield the inline code of sentences and tables."""
    yield from _CODE.findall(_FENCE.sub("", text))


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_promised(target: Path) -> bool:
    """Whether `make` writes a file, and says so in its list of targets."""
    return f"write {name_of(target)}" in MAKEFILE


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        is_there = target.exists() or is_promised(target)
        if not is_there or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    code = [*fences(text), *codes(text)]
    named = {target for piece in code for target in re.findall(r"(?:^|[\s$])make ([a-z][a-z-]*)", piece, re.MULTILINE)}
    assert named - TARGETS == set()


CARPOOL = [
    command.removeprefix("kubectl ") for _, command in commands() if re.match("(kubectl )?carpool [a-z]", command)
]


@pytest.mark.parametrize("command", dict.fromkeys(CARPOOL))
def test_command_of_a_document_parses(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its subcommand, options and files exist, also if it is not executed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "job.yaml").touch()  # another command writes it
    _, name, *rest = shlex.split(re.split(r" [|>]", command)[0])
    found = load_command(name, SUBCOMMANDS[name])
    while isinstance(found, click.Group):
        _, inner, rest = found.resolve_command(click.Context(found), rest)
        assert inner is not None, rest
        found = inner
    found.make_context(name, rest)


def named_in_sentences() -> Iterator[str]:
    """Yield the commands of `carpool` in sentences and tables; many lack arguments, which a sentence leaves out."""
    for document in HAND_WRITTEN:
        text = re.sub(r"\s*\n\s*", " ", _FENCE.sub("\n", document.read_text(encoding="utf-8")))
        for code in _CODE.findall(text):
            yield from (part for part in re.split(r" \\?[|>] ", code) if re.match("(kubectl )?carpool [a-z]", part))


def unknown_in(command: str) -> list[str]:
    """Return the words of a command of `carpool` that are no subcommand or option of it."""
    name, *rest = shlex.split(command.removeprefix("kubectl "))[1:]
    if name not in SUBCOMMANDS:
        return [name]
    found = load_command(name, SUBCOMMANDS[name])
    while isinstance(found, click.Group) and rest:
        below, *rest = rest
        if (inner := found.get_command(click.Context(found), below)) is None:
            return [below]
        found = inner
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in rest if re.match("--?[a-zA-Z]", word) and word.partition("=")[0] not in known]


@pytest.mark.parametrize("command", dict.fromkeys(named_in_sentences()))
def test_command_in_a_sentence_has_a_subcommand_and_options_that_exist(command: str) -> None:
    assert unknown_in(command) == []


def test_what_no_command_has_is_found() -> None:
    wrong = {"carpool ask JOB": "ask", "kubectl carpool node chek": "chek", "carpool predict … --advise": "--advise"}
    assert {command: unknown_in(command) for command in wrong} == {key: [word] for key, word in wrong.items()}


def test_a_container_of_a_documented_manifest_runs_what_the_tests_put_there() -> None:
    """Regression: a manifest named a program of its reader, which no image of the tests' cluster has."""
    written = r"> \S+\.yaml <<'EOF'\n(.*?)^EOF$"
    bodies = [body for _, one in commands() for body in re.findall(written, one, re.MULTILINE | re.DOTALL)]
    specs = [job["spec"]["template"]["spec"] for body in bodies for job in yaml.safe_load_all(body)]
    containers = [one for spec in specs for one in [*spec.get("initContainers", []), *spec["containers"]]]
    assert containers
    for one in containers:
        assert (one["image"], one["command"], "args" in one) == ("IMAGE", "COMMAND", False)


@pytest.mark.parametrize("prefix", [*map(re.escape, NOT_EXECUTED), *ELSEWHERE, *ENDLESS, *OPTIONS])
def test_a_command_with_a_reason_not_to_be_executed_exists(prefix: str) -> None:
    assert [command for _, command in commands() if re.match(prefix, command)]
    file, _, test = ELSEWHERE.get(prefix, "tests/docs/test_links.py::test_a_command").partition("::")
    assert re.search(rf"^((async )?def )?{test}", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_commands_that_no_test_executes_need_a_gpu_or_another_service() -> None:
    assert NOT_EXECUTED
    assert all(reason.startswith(("needs a GPU", "needs the registry")) for reason in NOT_EXECUTED.values())


def test_installations_that_succeed_have_the_same_values() -> None:
    """Regression: the second one in the table had no registry of kube-scheduler."""
    succeed = [command for command, code in life_of_a_release() if "helm install " in command and not code]
    first, *others = [re.findall(r"--set \S+", command) for command in succeed]
    assert others == [first]


BUILDS = (
    r"ctr |docker |skopeo |make \S+ [A-Z]+=|helm (install|upgrade) .*--set|kubectl create |pip install .*--index-url"
)


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_what_installs_or_builds_stands_in_a_block(document: Path) -> None:
    """Regression: commands in sentences and tables were executed by no test."""
    if document.parent == ROOT / "docs" / "decisions":
        return
    text = re.sub(r"\s*\n\s*", " ", _FENCE.sub("\n", document.read_text(encoding="utf-8")))
    tested = {command for command, _ in life_of_a_release()} | {command for _, command in commands()}
    assert [code for code in re.findall(r"`([^`]+)`", text) if re.match(BUILDS, code) and code not in tested] == []


def test_documents_name_make_targets_at_all() -> None:
    assert {"demo", "test", "docs"} <= TARGETS


def paths_in(piece: str) -> Iterator[str]:
    """Words that look like a path of ours: Kubernetes names begin with a domain, placeholders are in capitals."""
    for word in re.findall(r"[^\s|`\"'()=,;:]+", piece):
        first = word.split("/", 1)[0]
        is_path = "/" in word and re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word) and "." not in first.lstrip(".")
        if is_path and not any(part.isupper() for part in word.split("/")):
            yield word


@pytest.mark.parametrize("name", ["architecture.md", "development.md"])
def test_every_path_that_is_named_exists(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    pieces = [*fences(text, without="mermaid"), *codes(text)]
    named = {path for piece in pieces for path in paths_in(piece) if not path.startswith(WRITTEN_AT_RUN_TIME)}
    assert len(named) > 2, "expected some paths"
    assert [path for path in sorted(named) if not exists(path)] == []


def exists(path: str) -> bool:
    """Whether a path, or what a pattern stands for, is in the repository or will be."""
    return any(ROOT.glob(path.rstrip("/"))) or is_promised(ROOT / path)


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or something inside one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_every_module_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = {m for piece in codes(text) for m in re.findall(r"\bcarpool_[a-z0-9_]+(?:\.\w+)+", piece)}
    assert [dotted for dotted in sorted(named) if not resolves(dotted.removesuffix(".py"))] == []
