"""The six scenes. Each applies manifests, waits for what should happen, shows it, and fails if it does not happen."""

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi, ResourceKind, Selector
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobState
from rich.console import Console

from carpool_e2e.demo import manifests

T = TypeVar("T")

NAMESPACE = "default"
_CHECK_EVERY_S = 0.1


class SceneError(Exception):
    """A scene did not go as it should; the message says what was expected and what was found."""


class TooLateError(SceneError):
    """A scene went as it should, and slower than it should: what follows can still be shown."""


@dataclass(frozen=True)
class Stage:
    """One cluster, and the console that shows the scenes."""

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
        if show:  # soft wrap, so that the copied command is one line
            command = f"$ kubectl {' '.join(arguments)}"
            self.console.print(command, style="bold", highlight=False, markup=False, soft_wrap=True)
        done = subprocess.run(
            [str(self.kubectl), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        output = (done.stdout + done.stderr).strip()
        if show and output:
            self.console.print("\n".join(output.splitlines()[-lines:]), highlight=False, markup=False)
        return output

    def apply(self, *manifests: Mapping[str, Any], is_refused: bool = False) -> str:
        """Write manifests into files, apply them, show and return what kubectl printed.

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
    ) -> GpuTrainingJob:
        """Wait until something is true of a job; return the job as it was then.

        Raises:
            SceneError: It was not so in time.
        """

        async def check() -> GpuTrainingJob:
            job = await self.job(name)
            conditions = "; ".join(f"{c.type}={c.status} {c.reason}: {c.message}" for c in job.status.conditions)
            _expect(true(job), f"job {name} to be {what}", f"state {job.status.state}: {conditions}")
            return job

        return await eventually(check, within_s)


async def eventually(check: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Repeat a check until it succeeds, and return its result.

    Raises:
        SceneError: It still fails when the time is over; this is its last error.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await check()
        except SceneError as error:
            if time.monotonic() > deadline:
                raise SceneError(f"within {within_s:.0f} s: {error}") from error
        await asyncio.sleep(_CHECK_EVERY_S)


START_WITHIN_S = 4.0
"""Limit from the deletion of a job to the start of the next one, in seconds. Found: 1 to 2.3 s. It is below
the queue's period, so that a start that waits for that period fails."""

Scene = Callable[[Stage], Awaitable[None]]


def condition(job: GpuTrainingJob, type_: str) -> str:
    """Return a condition as `True Reason: message`; empty where the job has none of that type."""
    found = next((c for c in job.status.conditions if c.type == type_), None)
    return f"{found.status} {found.reason}: {found.message}" if found else ""


def _gpus(job: GpuTrainingJob) -> set[str]:
    return {gpu for placed in job.status.placement for gpu in placed.gpu_uuids}


def _running(job: GpuTrainingJob) -> bool:
    return job.status.state is JobState.RUNNING


def _expect(true: bool, expected: str, found: object) -> None:
    if not true:
        raise SceneError(f"expected {expected}, found {found}")


async def sharing(stage: Stage) -> None:
    """1. Two small jobs share one GPU, because they are predicted to fit and to get along."""
    stage.apply(manifests.small("small-a"), manifests.small("small-b"))
    first = await stage.until("running", "small-a", _running)
    second = await stage.until("running", "small-b", _running)
    _expect(_gpus(first) == _gpus(second), "both jobs on one GPU", f"{_gpus(first)} and {_gpus(second)}")
    for job in (first, second):
        stage.console.print(f"{job.metadata.name}: {condition(job, 'Placed')}", highlight=False)
        await _shows_its_gpu_and_trains(stage, job)
        stage.run("logs", job.status.placement[0].pod, "--limit-bytes=600")
    stage.console.print(
        "“× alone” is measured on this machine's processors, which play the GPUs: when they are busy, it is more than "
        "the neighbour's doing and the expected slowdown.",
        style="dim",
    )


async def _shows_its_gpu_and_trains(stage: Stage, job: GpuTrainingJob) -> None:
    """Wait until the log of a job's container shows its GPU and limits as placed, and a falling loss."""
    placed = job.status.placement[0]
    given = f"{placed.product} {placed.gpu_uuids[0]}, {placed.mode}, memory limit {placed.memory_limit_mib} MiB"

    async def check() -> None:
        log = stage.run("logs", placed.pod, show=False)
        losses = [float(line.split("loss ")[1].split(",")[0]) for line in log.splitlines() if "loss " in line]
        _expect(len(losses) >= 3 and losses[-1] < losses[0], f"a falling loss in the log of {placed.pod}", log[-500:])
        _expect(given in log, f"a line with {given}", log[:500])

    # The first container of a machine waits for PyTorch to come from the disk.
    await eventually(check, within_s=300)


async def protection(stage: Stage) -> None:
    """2. A job that would fit by memory, but would slow its neighbour too much, goes elsewhere."""
    stage.apply(manifests.busy("busy", max_slowdown=1.1))
    first = await stage.until("running", "busy", _running, within_s=120)
    stage.apply(manifests.busy("eager", max_slowdown=3))
    second = await stage.until("running", "eager", _running, within_s=120)
    _expect(_gpus(first).isdisjoint(_gpus(second)), "two GPUs", f"both on {_gpus(first)}")
    stage.console.print(f"eager: {condition(second, 'Placed')}", highlight=False)
    reason = condition(second, "Placed")
    _expect("passed over" in reason and "would slow default/busy to" in reason, "the job it would have slowed", reason)


async def unknown(stage: Stage) -> None:
    """3. A job of unknown model has a GPU alone until its peak is measured, and its condition gives the reason."""
    stage.apply(manifests.mystery("mystery"))
    job = await stage.until("running", "mystery", _running)
    stage.console.print(f"Predicted: {condition(job, 'Predicted')}", highlight=False)
    stage.console.print(f"Placed: {condition(job, 'Placed')}", highlight=False)
    held = [one for node in await stage.gpu_nodes() for one in node.spec.reservations]
    own = next(one for one in held if one.job_uid == job.metadata.uid)
    _expect(own.tenant.memory_mib is None and own.tenant.provisional, "a reservation of the whole GPU", own.tenant)
    beside = [one.job_name for one in held if one is not own and set(one.gpu_uuids) & set(own.gpu_uuids)]
    _expect(own.tenant.measured_mib is not None or not beside, "no co-tenant before it was measured", beside)
    _expect("does not say what it trains" in condition(job, "Placed"), "why it is alone", condition(job, "Placed"))


async def waiting(stage: Stage) -> None:
    """4. A job larger than what is free now waits, shows what it needs, and starts when another job ends."""
    stage.apply(manifests.wide("wide", gpus=4))
    await stage.until("running", "wide", _running, within_s=90)
    stage.apply(manifests.large("large"))
    job = await stage.until(
        "refused for now", "large", lambda j: condition(j, "Placed").startswith("False NoGpuFits"), within_s=15
    )
    for product in sorted({device.product for node in await stage.gpu_nodes() for device in node.status.devices}):
        _expect(product in condition(job, "Placed"), f"what the freest {product} has", condition(job, "Placed"))
    await _has_event(stage, "large", "NoGpuFits")
    stage.run("describe", "gtj", "large", lines=8)
    stage.run("delete", "gtj", "wide", "--wait=false")
    # From here on: starting kubectl takes a machine under load longer than all that follows.
    deleted = time.monotonic()
    await _reserved(stage, "large")
    placed_s = time.monotonic() - deleted
    await stage.until("running", "large", _running, within_s=60)
    took_s = time.monotonic() - deleted
    took = f"{took_s:.2f} s after the deletion of wide"
    stage.console.print(
        f"large runs {took}: {placed_s:.2f} s until wide's containers had ended and large had its GPU, "
        "the rest until its own had started"
    )
    if took_s > START_WITHIN_S:
        raise TooLateError(f"expected large to run within {START_WITHIN_S:.0f} s, found that it ran {took}")


async def _reserved(stage: Stage, job: str) -> None:
    """Wait until a job has its GPU. Its status may show that later, together with its start."""

    async def check() -> None:
        held = {one.job_name for node in await stage.gpu_nodes() for one in node.spec.reservations}
        _expect(job in held, f"a reservation of job {job}", f"those of {', '.join(sorted(held))}")

    await eventually(check, within_s=60)


async def _has_event(stage: Stage, job: str, reason: str) -> None:
    """Wait until an event of a job has a reason: events come a moment after the status."""

    async def check() -> None:
        events = stage.run("get", "events", "--field-selector", f"involvedObject.name={job}", show=False)
        _expect(reason in events, f"an event {reason} of job {job}", events)

    await eventually(check, within_s=10)


async def impossible(stage: Stage) -> None:
    """5. A job that no GPU of the cluster can ever hold says so in its condition, and is not retried."""
    stage.apply(manifests.impossible("impossible"))
    job = await stage.until(
        "found infeasible", "impossible", lambda j: condition(j, "Placed").startswith("False ExceedsEveryGpu")
    )
    stage.console.print(f"impossible: {condition(job, 'Placed')}", highlight=False)
    pods = stage.run("get", "pods", "-l", "carpool.dev/job=impossible", show=False)
    _expect("No resources" in pods, "no pod", pods)


async def refusal(stage: Stage) -> None:
    """6. An invalid manifest is refused by the API server."""
    answer = stage.apply(manifests.nonsense("nonsense"), is_refused=True)
    _expect("exactly one of" in answer, "a sentence about the model's sources", answer)
    jobs = stage.run("get", "gtj", "-n", NAMESPACE, "-o", "name", show=False)
    _expect("nonsense" not in jobs, "no such job", jobs)


SCENES: tuple[Scene, ...] = (sharing, protection, unknown, waiting, impossible, refusal)
