"""What the scenes stand on: kubectl as a user types it, and reads that wait until something is so."""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi, ResourceKind, Selector
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from rich.console import Console

T = TypeVar("T")

NAMESPACE = "default"
_LOOK_EVERY_S = 0.05


class SceneError(Exception):
    """A scene did not go as it should; the message says what was expected and what was found."""


class TooLateError(SceneError):
    """A scene went as it should, and slower than it should: what follows can still be shown."""


@dataclass(frozen=True)
class Stage:
    """One cluster, and the console on which the scenes are told."""

    api: KubeApi
    kubectl: Path
    kubeconfig: Path
    console: Console
    out: Path
    """Folder for manifests and pictures."""

    def run(self, *arguments: str, show: bool = True, lines: int = 40) -> str:
        """Run kubectl as a user would and show what it prints; return that.

        Args:
            arguments: kubectl's arguments.
            show: Whether command and output are shown.
            lines: How much of the output is shown, from its end.
        """
        if show:
            self._say(arguments)
        done = subprocess.run(
            [str(self.kubectl), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        output = (done.stdout + done.stderr).strip()
        if show:
            self._show(output, lines)
        return output

    def tell(self, arguments: Sequence[str], output: str, *, lines: int = 40) -> None:
        """Show what kubectl was asked and printed, where `run` was told to show nothing."""
        self._say(arguments)
        self._show(output, lines)

    def _say(self, arguments: Sequence[str]) -> None:
        # The terminal may break the line, so that what is copied from there is still one command.
        self.console.print(
            f"$ kubectl {' '.join(arguments)}", style="bold", highlight=False, markup=False, soft_wrap=True
        )

    def _show(self, output: str, lines: int) -> None:
        if output:
            self.console.print("\n".join(output.splitlines()[-lines:]), highlight=False, markup=False)

    def apply(self, *manifests: Mapping[str, Any], is_refused: bool = False) -> str:
        """Write manifests into files, apply them, show and return what was said of them.

        Raises:
            SceneError: They were refused and should not be, or the other way round.
        """
        folder = self.out / "manifests"
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for manifest in manifests:
            file = folder / f"{manifest['metadata']['name']}.yaml"
            file.write_bytes(msgspec.yaml.encode(manifest))
            files += ["-f", os.path.relpath(file)]
        answer = self.run("apply", *files)
        if is_refused == ("created" in answer or "unchanged" in answer or "configured" in answer):
            raise SceneError(f"expected the manifests {'refused' if is_refused else 'applied'}, found: {answer}")
        return answer

    async def job(self, name: str) -> GpuTrainingJob:
        """Read a job."""
        return await self.api.get(GPU_TRAINING_JOBS, name, GpuTrainingJob, namespace=NAMESPACE)

    async def jobs(self) -> list[GpuTrainingJob]:
        """Read all jobs."""
        return await self._all(GPU_TRAINING_JOBS, GpuTrainingJob)

    async def gpu_nodes(self) -> list[GpuNode]:
        """Read all GpuNodes."""
        return await self._all(GPU_NODES, GpuNode)

    async def _all(self, kind: ResourceKind, type_: type[T]) -> list[T]:
        page = await self.api.list_page(kind, Selector())
        return [msgspec.json.decode(item, type=type_) for item in page.items]

    async def until(
        self, what: str, name: str, true: Callable[[GpuTrainingJob], bool], *, within_s: float = 60
    ) -> tuple[GpuTrainingJob, float]:
        """Wait until something is true of a job.

        Returns:
            The job as it was then, and how long it took, in seconds.

        Raises:
            SceneError: It was not so in time.
        """
        started = time.monotonic()
        while True:
            job = await self.job(name)
            took = time.monotonic() - started
            if true(job):
                return job, took
            if took > within_s:
                conditions = "; ".join(f"{c.type}={c.status} {c.reason}: {c.message}" for c in job.status.conditions)
                raise SceneError(
                    f"expected job {name} to be {what} within {within_s:.0f} s, "
                    f"found state {job.status.state}: {conditions}"
                )
            await asyncio.sleep(_LOOK_EVERY_S)
