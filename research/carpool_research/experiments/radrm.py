"""RAD-RM (Yousefzadeh-Asl-Miandoab, ITU 2025, chapter 6): 90 and 60 tasks on a DGX Station with four A100."""

import csv
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from carpool_core.products import find_product
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode
from carpool_extender.framework.filters import AdmissionLimits
from carpool_simulator.philly import read_trace
from carpool_simulator.power import Power, Spent
from carpool_simulator.profiles import job_of, prediction_of
from carpool_simulator.strategy import Knowledge
from carpool_simulator.truth import Draw, Pool, SimJob, Truth, Workload, WorkloadError

from carpool_research.experiments.estimators import MEMORY, SHIPPED
from carpool_research.experiments.simulation import PublishedStrategy, PublishedWorkload, extended
from carpool_research.tables import DataError

HIDING = 1.5
"""How well a host's part of a step hides behind its GPU's: the exponent by which the card works out busy shares."""
ACTIVITY = 1.5
"""SM activity is about utilization to this power, says the card of GPUMemNet's trainings. A number of its own, as no
truth may move with the model that decides."""
MEASURED_ON = "v100"
"""The newest of Gavel's GPUs."""
ASSUMED = (
    "Slowdown by MPS is Gavel's, whose pairs ran behind it on a V100: each task is one of three of its jobs that keep "
    "the SMs nearly as busy; how busy was worked out from steps at several batch sizes."
)


_trace = cache(read_trace)


@cache
def read(data: Path) -> Pool:
    """Read the pairs of jobs on a V100 that were measured alone at several batch sizes, too.

    Args:
        data: Where `gavel/gavel_throughputs_flat.csv` lies.

    Raises:
        WorkloadError: The file is missing or unusable, or scipy is not installed.
    """
    try:
        from carpool_research.slowdown import gavel  # scipy: only these pairs need it
    except ImportError as error:
        raise WorkloadError(
            f"expected {error.name} for Gavel's pairs, found none; run: pip install '.[simulate]'"
        ) from error
    try:
        measured = gavel.read(data)
    except DataError as error:
        raise WorkloadError(str(error)) from error
    busy = gavel.busy_shares(measured, HIDING)
    each = [
        ((mine, other), slowdown)
        for pair in measured.pairs
        for mine, other, slowdown in zip((pair.one, pair.other), (pair.other, pair.one), pair.slowdowns, strict=True)
        if mine in busy and other in busy and mine[0] == MEASURED_ON
    ]
    shares = np.array([[busy[one] for one in jobs] for jobs, _ in each])
    return Pool(shares**ACTIVITY, np.array([slowdown for _, slowdown in each]), [jobs for jobs, _ in each])


PRODUCT = "NVIDIA A100-SXM4-40GB"
GPUS = 4
POWER = Power(63.2, 63.2, 253.6)
"""Of each GPU: what the energies tell that were published of three policies on MPS (`power.fitted`). NVIDIA's datasheet
gives 1.5 kW for the whole DGX Station A100, its processor of 225 W with it: at most 319 W for each of four GPUs."""
PUBLISHED_MJ = {"exclusive": 33.20, "round-robin": 29.60, "MAGM, 80%, 2 GB": 28.78}
"""Energy of 60 tasks. Time-slicing is no part of it: Carpool uses MPS there, and its makespan does not come out as
published either."""
STREAMS_MJ = {"round-robin, streams": 34.75}
"""Of time-slicing, for who asks what fitting to it, too, would change."""
MIXES = {90: (0.65, 0.27), 60: (0.0, 0.83)}
"""Shares of light and medium tasks; the rest is large."""

SM_ACTIVE = {
    "mobilenet_v2": 0.22,
    "efficientnet_b0": 0.30,
    "resnet50": 0.40,
    "inception": 0.45,
    "Xception": 0.50,
    "vgg16": 0.60,
    "BERT_base": 0.55,
    "BERT_large": 0.65,
    "xlnet_base": 0.50,
    "xlnet_large": 0.60,
    "gpt2_large": 0.65,
}
"""SM activity alone of the tasks on ImageNet and text; not published."""
LIGHT_SM_ACTIVE = {32: 0.10, 64: 0.14, 128: 0.18}
"""SM activity alone of the tasks on CIFAR-100 by batch size; not published."""
IMAGES = {"ImageNet": 1_281_167, "cifar100": 50_000}
"""Images that one epoch trains on, by dataset. How much text the others train on is not published."""

_AS_LUCIDS = "Slowdown by MPS answers to joint SM activity as Lucid's pairs by time-slicing answer to joint busy time."
ASSUMPTIONS = (
    "Light tasks are those on CIFAR-100, medium ones the others on one GPU, large ones those on two; each is drawn "
    "evenly.",
    "Submission times are those of so many consecutive submissions in the Philly trace; the window is drawn by the "
    "seed.",
    "SM activity alone is not published. ImageNet epochs take 35 to 50 minutes for whichever CNN, so that the tasks "
    "wait for their input; 0.22 (MobileNetV2) to 0.60 (VGG16), transformers 0.50 to 0.65, CIFAR-100 0.10 to 0.18.",
    "The tasks on images say how many steps they have, by the size of their dataset; the others do not, and "
    "count as an hour where the queue goes by lengths.",
    "A task on two GPUs is two processes that start together on different GPUs and wait for the slower one.",
    _AS_LUCIDS,
    "A task that is too large dies a minute after its start; it runs again from the beginning, alone, before all "
    "others.",
    "A GPU takes no other job for 90 s after a placement: its monitor's mean must see the newcomer (not for Carpool).",
    "Kernels of MPS tenants run at once: SM activity adds up, over the slowdowns. A GPU rests (utilization) where all "
    "of its tenants rest, each as it would alone.",
    "Power is idle + (limit - idle) · SM activity. Neither is published of a DGX Station A100: 63.2 W and 253.6 W are "
    "what the published energies of exclusive, round-robin and MAGM (80%, 2 GB) on MPS tell, by least squares; "
    "Carpool's runs take no part in it. The results of other constants follow below.",
)

OPEN = (
    "How busy RAD-RM's tasks keep the SMs is the most open of all, and what speaks for one case speaks against "
    "another. An epoch of ResNet-50 in 35 minutes is 610 images a second: 65% of the 938 that NVIDIA gives of an "
    "A100 by TF32, 25% of the 2,470 in mixed precision (DeepLearningExamples, ResNet50 v1.5 for PyTorch, 80 GB); "
    "assumed is an SM activity of 0.40. The tasks take the memory of FP32 (15,120 MB; GPUMemNet measured 15,169 MiB "
    "of that model and batch), in which PyTorch's convolutions use TF32, so that it may be half as much again. So "
    "say the trace times that were published of LUG and the oracle. The published energies do not: they tell of "
    "larger gains, and fit what an A100 draws best at what is assumed, or less. What tasks lose to each other behind "
    "MPS is not published either; on older GPUs Gavel's pairs lost far more than is taken from Lucid's."
)
BEHIND_MPS = "slowdowns by MPS as of Gavel's pairs"
SCALES = (0.75, 1.25, 1.5)
"""Factors to the assumed SM activity that are tried."""
_FIVE_GB, _TWO_GB = 5120, 2048


def _blind(
    name: str, policy: str, published: str, mode: SharingMode = SharingMode.MPS, **conditions: float
) -> PublishedStrategy:
    asked = AdmissionLimits(
        max_sm_active=conditions.get("sm"), min_free_mib=int(conditions["mib"]) if "mib" in conditions else None
    )
    return PublishedStrategy(
        name, policy, mode=mode, conditions=asked, settle_s=90.0, in_order=True, measure=False, published=published
    )


STRATEGIES = (
    PublishedStrategy(
        "exclusive",
        "exclusive",
        mode=SharingMode.EXCLUSIVE,
        in_order=True,
        measure=False,
        published="0 OOM; 60 tasks: 33.20 MJ",
    ),
    _blind("round-robin, streams", "round-robin", "60 tasks: 9 OOM, 34.75 MJ", SharingMode.TIME_SLICING),
    _blind("round-robin", "round-robin", "60 tasks: 6 OOM, 29.60 MJ; among the worst"),
    _blind("MAGM", "most-available-memory", "90 tasks: 5 OOM; among the worst"),
    _blind("MAGM, 80%, 5 GB", "most-available-memory", "90 tasks: 2 OOM", sm=0.8, mib=_FIVE_GB),
    _blind("MAGM, 80%, 2 GB", "most-available-memory", "60 tasks: 4 OOM, 28.78 MJ", sm=0.8, mib=_TWO_GB),
    _blind("LUG, 80%, 5 GB", "least-utilized", "90 tasks: -28% trace time, 2 OOM", sm=0.8, mib=_FIVE_GB),
    PublishedStrategy(
        "oracle worst fit, 80%",
        "worst-fit",
        Knowledge.TRUTH,
        conditions=AdmissionLimits(max_sm_active=0.8, min_free_mib=_TWO_GB),
        in_order=True,
        settle_s=90.0,
        measure=False,
        published="90 tasks: -30.13% trace time",
    ),
)


_PUBLISHED_WITH = {
    "Horus": "90 tasks: 0 OOM; 60 tasks: 2 OOM, 29.04 MJ",
    "FakeTensor": "90 tasks: 0 OOM; 60 tasks: 3 OOM, 30.31 MJ",
    "GPUMemNet": "90 tasks: 0 OOM; 60 tasks: 1 OOM, 28.50 MJ",
}
_MAGM = _blind("MAGM, 80%", "most-available-memory", "", sm=0.8)
ESTIMATING = tuple(
    replace(_MAGM, name=f"MAGM, 80%, {name or 'no estimate'}", published=_PUBLISHED_WITH.get(name, ""), estimator=name)
    for name in ("", SHIPPED, "shipped, median", *MEMORY, "true memory")
)
"""MAGM, which needs as much free memory as an estimator says; the first has no estimator."""


PUBLISHED_TIME = {"LUG, 80%, 5 GB": -28.0, "oracle worst fit, 80%": -30.13}
"""Trace time of 90 tasks against exclusive, in percent."""
BESIDE = ("round-robin", "MAGM, 80%, 2 GB", "LUG, 80%, 5 GB", "oracle worst fit, 80%")
"""Strategies with which to see how near to what was published an assumption comes."""


def radrm(data: Path, seed: int, tasks: int, scale: float = 1.0) -> Workload:
    """Draw the tasks of one run.

    Args:
        data: Where `radrm/tasks.csv` and `traces/philly_sia.csv` lie.
        seed: Draws tasks and window.
        tasks: 60 or 90.
        scale: Factor to the assumed SM activity.
    """
    draw = random.Random(f"radrm/{tasks}/{seed}")  # noqa: S311  # a simulation, no secret
    light, medium, large = _kinds(data, scale)
    shares = MIXES[tasks]
    amounts = (round(shares[0] * tasks), round(shares[1] * tasks))
    chosen = draw.choices(light, k=amounts[0]) + draw.choices(medium, k=amounts[1])
    chosen += draw.choices(large, k=tasks - sum(amounts))
    draw.shuffle(chosen)
    submissions = _trace(data / "traces" / "philly_sia.csv").jobs
    begin = draw.randrange(len(submissions) - tasks)
    window = submissions[begin : begin + tasks]
    jobs = []
    for number, ((truth, minutes, epochs, gpus), one) in enumerate(zip(chosen, window, strict=True)):
        passes = draw.choice(epochs)
        work_s = 60 * minutes * passes
        prediction = prediction_of(truth.kind, PRODUCT)
        at_s = one.at_s - window[0].at_s
        asked = job_of(truth.kind)
        steps = steps_of(truth.kind, passes)
        jobs.append(
            SimJob(
                f"task-{number:02}",
                at_s,
                work_s,
                1,
                truth,
                prediction,
                workers=gpus,
                asked=asked,
                steps=steps,
                step_s=work_s / steps if steps else 0.0,
            )
        )
    nodes = {"dgx": [gpu(index) for index in range(GPUS)]}
    title = f"RAD-RM: {tasks} tasks, four A100-40GB"
    return Workload(f"radrm-{tasks}", title, jobs, nodes, ASSUMPTIONS, POWER)


def otherwise(tasks: int) -> dict[str, Draw]:
    """Return the workload with other SM activity and other losses than assumed, which decide how sharing pays."""
    busier = {_busier(scale): partial(radrm, tasks=tasks, scale=scale) for scale in SCALES}
    return {**busier, BEHIND_MPS: partial(_as_gavels, tasks=tasks)}


def _busier(scale: float) -> str:
    return f"SM activity × {scale:g}"


def _as_gavels(data: Path, seed: int, tasks: int) -> Workload:
    drawn = radrm(data, seed, tasks)
    assumptions = (ASSUMED if one == _AS_LUCIDS else one for one in drawn.assumptions)
    return extended(drawn, PublishedWorkload, behind_mps=read(data), assumptions=tuple(assumptions))


def steps_of(kind: str, epochs: int) -> int | None:
    """Return how many steps a task has; None where the size of its dataset is not known."""
    _, _, dataset, batch = kind.split("/")
    images = IMAGES.get(dataset)
    return None if images is None else epochs * math.ceil(images / int(batch))


OPEN_CASES = (*map(_busier, SCALES), BEHIND_MPS)
"""Names of what `otherwise` returns."""
_Kind = tuple[Truth, float, list[int], int]


def _kinds(data: Path, scale: float) -> tuple[list[_Kind], list[_Kind], list[_Kind]]:
    path = data / "radrm" / "tasks.csv"
    if not path.is_file():
        raise WorkloadError(f"expected the tasks at {path}, found no file; set CARPOOL_DATA")
    found: tuple[list[_Kind], list[_Kind], list[_Kind]] = ([], [], [])
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            batch, gpus = int(row["batch_size"]), int(row["gpus"])
            is_light = row["weight_class"] == "light"
            sm = min(1.0, scale * (LIGHT_SM_ACTIVE[batch] if is_light else SM_ACTIVE[row["model"]]))
            truth = Truth(
                kind=f"radrm/{row['model']}/{row['dataset']}/{batch}",
                memory_mib=round(float(row["gpu_memory_mb"])),
                util=min(1.0, sm * (3.5 if is_light else 1.6)),
                sm=sm,
                dram=sm / 2,
                product=PRODUCT,
                model=f"radrm/{row['model']}/{row['dataset']}",
            )
            epochs = [int(text) for text in row["epochs"].split("|")]
            found[0 if is_light else gpus].append((truth, float(row["epoch_time_min"]), epochs, gpus))
    return found


def gpu(index: int) -> Device:
    """Return one of the four A100."""
    product = find_product(PRODUCT)
    return Device(
        uuid=GpuUuid(f"GPU-dgx-{index}"),
        index=index,
        product=product.name,
        memory_mib=product.memory_mib,
        reserved_mib=512,
        compute_capability=product.compute_capability,
        modes=[SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS],
    )


def spent(energy_mj: float, gpu_s: float, in_use_s: float, power: Power) -> Spent:
    """Return the GPU time of a run, reconstructed from its energy in MJ.

    Args:
        energy_mj: Energy of the run, computed with `power`.
        gpu_s: Time of all GPUs of the cluster together, in seconds.
        in_use_s: Part of it in which the GPUs had jobs, in seconds.
        power: Power of each GPU.
    """
    still_j = Spent(gpu_s, in_use_s, 0.0).energy_j(power)
    return Spent(gpu_s, in_use_s, (1e6 * energy_mj - still_j) / (power.full_w - power.awake_w))


def fitted(runs: Mapping[str, Spent], published_mj: Mapping[str, float]) -> Power:
    """Return idle and full power of a GPU, fitted by least squares of relative errors of published energies.

    Args:
        runs: GPU time of each policy in the simulation.
        published_mj: Published energies of at least two of these policies, in MJ.
    """
    rows = [(runs[name].gpu_s, runs[name].active_s, 1e6 * mj) for name, mj in published_mj.items()]
    terms = np.array([[gpu_s / joules, active_s / joules] for gpu_s, active_s, joules in rows])
    (idle_w, more_w), *_ = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)
    idle_w, full_w = round(float(idle_w), 1), round(float(idle_w + more_w), 1)
    return Power(idle_w, idle_w, full_w)
