"""Trainings of the demo, and their pod template: this machine's Python environment, mounted read-only.

PyTorch with what it needs is 5 GB; no image holds that here. The container sees the interpreter, the libraries and
this project at the paths where they are on the machine.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

IMAGE = "localhost/carpool/environment:dev"
"""An image with nothing in it but the directories that every container needs."""

_PROJECT = Path(__file__).resolve().parents[3]


def environment_paths() -> list[Path]:
    """Directories that a container needs to run this Python: none lies inside another."""
    wanted = [Path("/usr"), Path("/lib"), Path("/lib64"), Path(sys.base_prefix), Path(sys.prefix), _PROJECT]
    return list(outermost(path for path in wanted if path.is_dir()))


def outermost(paths: Iterable[Path]) -> Iterable[Path]:
    """Leave out every path that lies inside another one."""
    kept: list[Path] = []
    for path in sorted(paths, key=lambda p: len(p.parts)):
        if not any(path.is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept


def training_template(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the `spec.template` of a job that runs `carpool_e2e.workloads.train` with these arguments."""
    paths = environment_paths()
    return {
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "train",
                    "image": IMAGE,
                    "imagePullPolicy": "Never",
                    "command": [sys.executable, "-m", "carpool_e2e.workloads.train", *arguments],
                    "env": [{"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
                    "volumeMounts": [
                        {"name": f"environment-{i}", "mountPath": str(path), "readOnly": True}
                        for i, path in enumerate(paths)
                    ],
                }
            ],
            "volumes": [
                {"name": f"environment-{i}", "hostPath": {"path": str(path), "type": "Directory"}}
                for i, path in enumerate(paths)
            ],
        }
    }
