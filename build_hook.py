"""Hatchling's build hook: writes the commit into the wheel, for `carpool --version`."""

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds `carpool_core/COMMIT`: the variable CARPOOL_COMMIT, or else the commit that is checked out."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file to wheels; an editable installation asks git at run time."""
        commit = os.environ.get("CARPOOL_COMMIT", "")
        if not commit and Path(self.root, ".git").exists():
            command = ["git", "-C", self.root, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if version == "editable" or not commit:
            return
        file = Path(self.directory, "COMMIT")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{commit}\n")
        build_data["force_include"][str(file)] = "carpool_core/COMMIT"
