"""An operator that learns, jobs that run and are measured, and the calibration that it stores."""

import asyncio
from collections.abc import Callable
from typing import Any

from carpool_core.clock import rfc3339
from carpool_core.kube.api import CONFIG_MAPS, GPU_NODES, PODS
from carpool_core.resources.prediction import MemoryPrediction
from carpool_operator.work_queue import DEBOUNCE_S
from carpool_predictor.calibration.document import Calibration, RunRecord, StackState, read_calibration
from carpool_predictor.calibration.store import KEY
from carpool_predictor.models.memory import PLAIN_MIB, shipped
from msgspec.structs import replace
from operator_fixtures import FEATURES
from operator_world import World

NAMESPACE, NAME = "carpool-system", "learned"
OOM = "torch.OutOfMemoryError: CUDA out of memory"


def world(**settings: Any) -> World:
    return World(calibration=f"{NAMESPACE}/{NAME}", **settings)


def kept(of: World) -> Calibration:
    return read_calibration(of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"][KEY].encode())


def stack(of: World) -> StackState:
    (state,) = kept(of).stacks
    return state


def as_measured(rows: list[RunRecord]) -> list[RunRecord]:
    """Return rows with the measured memory, without the correction of steps outside the training data."""
    model = shipped()
    return [
        replace(
            row,
            value_mib=round(
                row.value_mib * (row.reserved_mib + PLAIN_MIB) / (model.slope * row.reserved_mib + model.intercept_mib)
            ),
        )
        for row in rows
    ]


def memory(of: World, name: str = "x") -> MemoryPrediction:
    prediction = of.job(name).status.prediction
    assert prediction is not None
    (product,) = prediction.products
    return product.memory


def writes(of: World) -> int:
    return sum(call.plural == "configmaps" and call.verb in ("create", "patch") for call in of.kube.calls)


def model(size: int) -> dict[str, Any]:
    """A model that no other one resembles."""
    steps = [FEATURES["steps"][0] | {"peakBytes": 500_000_000 * size, "activationBytes": 400_000_000 * size}]
    return {"features": FEATURES | {"steps": steps}}


def on_t4(of: World) -> None:
    home = of.kube.dump(GPU_NODES, "n1")
    for device in home["status"]["devices"]:
        device["product"], device["memoryMib"] = "Simulated Tesla T4", 15360
    of.kube.seed(GPU_NODES, home)


async def started(of: World, name: str = "x", **reserved_with: Any) -> None:
    """Let a job's pods run since a moment ago."""
    await of.settle()
    at = rfc3339(of.clock.now())
    of.run_pods(name=name, reservedAt=at, **reserved_with)
    for pod in of.pods(name):
        if pod["status"]["phase"] == "Running":
            pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = at
            of.kube.seed(PODS, pod)
    await of.settle()


async def running_world(**spec: Any) -> World:
    """An operator that learns, and a job whose pods run since a moment ago."""
    of = world()
    of.apply(**spec)
    await started(of)
    return of


async def measured(of: World, peak_mib: int, name: str = "x", **measures: Any) -> None:
    """Let the agent report measurements, and deliver them to the operator."""
    of.measure(peak_mib, name, **measures)
    of.deliver_events()
    of.clock.advance(DEBOUNCE_S + 1)  # a second, for jobs beside it on the node have their turns, too
    await of.settle()


async def measured_stable(of: World, peak_mib: int, for_s: float, name: str = "x") -> None:
    """Let the agent report, and the peak stand still for so long after."""
    await measured(of, peak_mib, name)
    await of.settle(after_s=for_s)


async def completed(of: World, peak_mib: int, name: str = "x", **spec: Any) -> None:
    """Let a job run to its end."""
    of.apply(name, **spec)
    await started(of, name)
    await measured(of, peak_mib, name)
    await of.finish_pod(f"{name}-worker-0-1")


class SeenEnoughError(Exception):
    """The test has seen enough."""


def _nothing(_naps: int) -> None:
    pass


async def run_until_on(of: World, mend: Callable[[int], None] = _nothing) -> tuple[asyncio.Task[None], list[float]]:
    """Let the learner run until it learns; return how long it slept before. Its next sleep raises `SeenEnoughError`.

    Args:
        of: Where it runs.
        mend: Receives the number of sleeps at each.
    """
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        mend(len(naps))
        if of.operator.calibrator.is_on:
            raise SeenEnoughError

    running = asyncio.create_task(of.operator.calibrator.run(sleep))
    for _ in range(20):
        await asyncio.sleep(0)
    assert of.operator.calibrator.is_on
    return running, naps
