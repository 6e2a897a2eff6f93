"""The `carpool` command as a user of the cluster types it."""

import os
import subprocess
from pathlib import Path

from carpool_e2e.cluster import carpool_command


def carpool(kubeconfig: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [carpool_command(), *arguments],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
