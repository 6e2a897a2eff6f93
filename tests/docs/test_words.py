"""The repository names no registry and no path of a developer's machine."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Put together here, so that this file does not hold what it looks for.
_HOSTS = (
    ("pypi", "org"), ("pythonhosted", "org"), ("proxy.golang", "org"), ("sum.golang", "org"), ("docker", "io"),
    ("registry.k8s", "io"), ("gcr", "io"), ("quay", "io"), ("ghcr", "io"), ("nvcr", "io"), ("mcr.microsoft", "com"),
    ("public.ecr", "aws"), ("registry.npmjs", "org"), ("download.pytorch", "org"),
)  # fmt: skip
REGISTRIES = [".".join(parts) for parts in _HOSTS]
FOLDERS = [f"/{name}" for name in ("work", "root", "home", "mnt", "Users")]

FORBIDDEN = {
    **{host: re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])") for host in REGISTRIES},
    # At the beginning of a path only: `upper/work` is a folder somewhere.
    **{folder: re.compile(rf"(?<![\w.}})\]*/-]){folder}(?![\w-])") for folder in FOLDERS},
}

EXCUSED = {
    ("e2e/carpool_e2e/nodes.py", FOLDERS[1]): "the home that a container image gives to its user root",
    ("docs/kubectl.md", REGISTRIES[-1]): "the only public index of PyTorch's builds for CPUs",
}


def tracked() -> Iterator[Path]:
    # Messages of other programs are quoted as they were published, with the paths of other people's machines.
    command = ["git", "ls-files", "-z", ":!tests/data/oom"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in done.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            yield path


def found_in(text: str) -> set[str]:
    return {word for word, pattern in FORBIDDEN.items() if pattern.search(text)}


def occurrences() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), word)
        for path in tracked()
        for word in found_in(path.read_bytes().decode(errors="replace"))
    }


def test_no_registry_and_no_place_on_a_machine_is_named() -> None:
    assert sorted(occurrences() - EXCUSED.keys()) == []


def test_every_excuse_is_still_needed() -> None:
    assert EXCUSED.keys() - occurrences() == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"image: {REGISTRIES[4]}/library/busybox", {REGISTRIES[4]}),
        (f"see https://{REGISTRIES[0]}/simple", {REGISTRIES[0]}),
        (f"cd {FOLDERS[0]}/main", {FOLDERS[0]}),
        (f"HOME={FOLDERS[1]}", {FOLDERS[1]}),
        ("github.com/go-logr/logr, /workspace, upper/work, {folder}/work, rootfs", set()),
    ],
)
def test_the_words_are_found(text: str, words: set[str]) -> None:
    assert found_in(text) == words
