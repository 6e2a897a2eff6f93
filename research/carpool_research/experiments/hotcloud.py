"""HotCloud '20, table 4: 100 jobs on 12 GPUs, all there at the start."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from carpool_core.durations import format_duration
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode
from carpool_extender.framework.filters import AdmissionLimits
from carpool_simulator.profiles import PRODUCT, job_of, measured_profiles, prediction_of, step_times
from carpool_simulator.strategy import Knowledge
from carpool_simulator.truth import Draw, SimJob, Workload

from carpool_research.experiments.estimators import FOREST
from carpool_research.experiments.simulation import PublishedStrategy

GPUS, JOBS = 12, 100
MEMORY_MIB = 8192
SHORTEST_S, LONGEST_S = 120.0, 7200.0

ASSUMPTIONS = (
    "The 13 architectures' measurements are not published. The jobs are drawn evenly from the 18 solo profiles that "
    "Lucid "
    "measured of ResNet-18, MobileNetV2 and EfficientNet on CIFAR-10 (three batch sizes, with and without AMP): "
    "utilization 21-99%, 52% on average; the published baseline implies 51%.",
    "Durations alone are log-uniform from 2 minutes to 2 hours: mean 29 minutes; published are 31.",
    "Each job says how many steps it has: its duration by the step time that Lucid measured. The queue goes by "
    "the predicted step times, which are up to 3.4 times shorter, because these jobs wait for their input: "
    "a job without steps counts as an hour, longer than nearly all predicted durations.",
    "All jobs are there at the start, so that of all of them the longest and the shortest take turns by default. "
    "Twelve nodes of one GPU each.",
    "Speed and utilization are an RTX 3090's, as measured; memory is the RTX 2080's 8 GiB.",
    "Slowdown and GPU utilization of a pair are Lucid's measurements of that pair. Three add their losses; they rest "
    "where all rest, each as it would alone, and keep the GPU no busier than with the work that is done.",
    "A GPU without a job draws an RTX 3090's idle power, one with a job what Zeus measured of an A40: 28% of the limit "
    "without activity, 86% with all SMs active. SM activity is measured nowhere; GPU utilization takes its place.",
    "Reactive: a job is alone for a minute on an idle GPU, that minute is lost, then it is known exactly.",
)

Lasts = Callable[[float], float]


def _log_uniform(share: float) -> float:
    low, high = math.log(SHORTEST_S), math.log(LONGEST_S)
    return math.exp(low + share * (high - low))


def _uniform(share: float) -> float:
    return SHORTEST_S + share * (LONGEST_S - SHORTEST_S)


_JOINT = AdmissionLimits(max_joint_sm_active=1.0, max_jobs=3)

STRATEGIES = (
    PublishedStrategy(
        "slot-based",
        "exclusive",
        mode=SharingMode.EXCLUSIVE,
        in_order=True,
        measure=False,
        published="utilization 43.1%, makespan 306.9 min, completion 1869 s",
    ),
    PublishedStrategy(
        "reactive",
        "first-fit-decreasing",
        Knowledge.TRUTH,
        SharingMode.TIME_SLICING,
        conditions=_JOINT,
        by_utilization=True,
        profile_s=60.0,
        measure=False,
        published="utilization 47.1% (+9.2%), makespan 277.6 min (-9.5%), completion 2193 s",
    ),
    PublishedStrategy(
        "proactive",
        "first-fit-decreasing",
        Knowledge.PREDICTED,
        SharingMode.TIME_SLICING,
        conditions=_JOINT,
        by_utilization=True,
        measure=False,
        published="utilization 69.6% (+61.5%), makespan 204.0 min (-33.6%), completion 2024 s",
    ),
)


ESTIMATING = (replace(STRATEGIES[-1], name=f"proactive, {FOREST}", estimator=FOREST),)
"""The authors' estimator, trained on other measurements than theirs."""


def hotcloud(data: Path, seed: int, *, over_s: float = 0.0, lasts_s: Lasts = _log_uniform) -> Workload:
    """Draw the jobs of one run.

    Args:
        data: Where Lucid's measurements lie.
        seed: Draws the jobs.
        over_s: When the last one comes, in seconds after the first; evenly between.
        lasts_s: Says how long a job runs alone, by a number from 0 to 1.
    """
    draw = random.Random(f"hotcloud/{seed}")  # noqa: S311  # a simulation, no secret
    kinds, steps_s = measured_profiles(data), step_times(data)
    jobs = []
    for number in range(JOBS):
        truth = draw.choice(kinds)
        work_s = lasts_s(draw.random())
        prediction, asked = prediction_of(truth.kind, PRODUCT), job_of(truth.kind)
        steps = round(work_s / steps_s[truth.kind])
        jobs.append(
            SimJob(
                f"job-{number:03}",
                number * over_s / (JOBS - 1),
                work_s,
                1,
                truth,
                prediction,
                asked=asked,
                steps=steps,
                step_s=steps_s[truth.kind],
            )
        )
    nodes = {f"node-{i:02}": [gpu(f"node-{i:02}", 0)] for i in range(GPUS)}
    return Workload("hotcloud", "HotCloud '20: 100 jobs, 12 GPUs", jobs, nodes, ASSUMPTIONS)


OTHERWISE: Mapping[str, Draw] = {
    **{f"jobs come over {format_duration(s)}": partial(hotcloud, over_s=s) for s in (60.0, 600.0, 3600.0)},
    "durations are uniform": partial(hotcloud, lasts_s=_uniform),
}
"""What is not published, otherwise than assumed."""


def gpu(node: str, index: int) -> Device:
    """Return a GPU with an RTX 2080's memory."""
    modes = [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS]
    return Device(
        uuid=GpuUuid(f"GPU-{node}-{index}"),
        index=index,
        product=PRODUCT,
        memory_mib=MEMORY_MIB,
        reserved_mib=256,
        compute_capability="7.5",
        modes=modes,
    )
