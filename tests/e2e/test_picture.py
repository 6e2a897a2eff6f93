import re
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from carpool_core.resources.job import GpuTrainingJob, JobSpec, JobStatus, Observed, WorkerPlacement
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import Device, GpuNode, GpuNodeSpec, GpuNodeStatus, Reservation, Tenant, TenantProfile
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.values import GpuUuid, JobState, JobUid, NodeName, PodUid, SharingMode
from carpool_e2e.demo import show
from rich.console import Console, RenderableType

GPU = GpuUuid("GPU-0")


def rendered(drawn: RenderableType, width: int = 200) -> str:
    console = Console(width=width, file=StringIO())
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()


def reserved(name: str, gpu: GpuUuid, memory_mib: int, mode: SharingMode = SharingMode.MPS) -> Reservation:
    return Reservation(
        pod_uid=PodUid(name), pod_namespace="default", pod_name=name, job_uid=JobUid(name), job_name=name,
        gpu_uuids=[gpu], mode=mode, tenant=TenantProfile(memory_mib=memory_mib),
    )  # fmt: skip


def gpu_node(name: str, devices: list[Device], held: list[Reservation], tenants: list[Tenant]) -> GpuNode:
    status = GpuNodeStatus(devices=devices, tenants=tenants)
    return GpuNode(metadata=ObjectMeta(name=name), spec=GpuNodeSpec(reservations=held), status=status)


def node(name: str, *tenants: tuple[str, int, int], mode: SharingMode = SharingMode.MPS) -> GpuNode:
    """A node with one GPU of 40 GiB; each tenant is (name, reserved MiB, measured MiB)."""
    device = Device(uuid=GPU, index=0, product="Simulated NVIDIA A100-SXM4-40GB", memory_mib=40960)
    held = [reserved(job, GPU, memory_mib, mode) for job, memory_mib, _ in tenants]
    used = [Tenant(pod_uid=PodUid(job), gpu_uuid=GPU, memory_mib=mib) for job, _, mib in tenants]
    return gpu_node(name, [device], held, used)


def test_a_tenants_block_is_as_wide_as_its_reservation_and_dark_as_far_as_it_is_used() -> None:
    drawn = rendered(show.gpu_bars([node("n1", ("half", 20480, 10240))]))
    assert drawn.count("█") == show.BAR_WIDTH // 4
    assert drawn.count("▒") == show.BAR_WIDTH // 4
    assert "half" in drawn
    assert "20.0/40.0" in drawn


def test_a_block_is_what_decisions_count_where_a_peak_was_measured() -> None:
    crowded = node("a100", ("first", 30000, 8000), ("second", 25600, 100))
    held = crowded.spec.reservations
    settled = msgspec.structs.replace(held[0].tenant, measured_mib=10240)
    first = msgspec.structs.replace(held[0], tenant=settled)
    counted = msgspec.structs.replace(crowded, spec=GpuNodeSpec(reservations=[first, held[1]]))
    assert "54.3/40.0" in rendered(show.gpu_bars([crowded]))
    assert "35.0/40.0" in rendered(show.gpu_bars([counted]))


@pytest.mark.parametrize("width", [80, 200])
def test_bars_of_all_nodes_are_aligned(width: int) -> None:
    """Regression: the names of modes are not equally long, and each node's bars began elsewhere."""
    alone = node("n1", ("a", 20480, 20480), mode=SharingMode.EXCLUSIVE)
    drawn = rendered(show.gpu_bars([alone, node("n2", ("b", 2048, 2048))]), width)
    bars = [line for line in drawn.splitlines() if "█" in line]
    assert len({line.index("█") for line in bars}) == 1
    assert len({line.index("/40.0") for line in bars}) == 1


@pytest.mark.parametrize("width", range(60, 160, 7))
def test_at_no_width_do_tenants_draw_more_than_the_gpu(width: int) -> None:
    third = 40960 // 3
    drawn = rendered(show.gpu_bars([node("n1", ("a", third, third), ("b", third, 1), ("c", third + 1, 9))]), width)
    assert max(map(len, drawn.splitlines())) <= width
    assert sum(map(drawn.count, "█▒·")) <= show.BAR_WIDTH
    assert all(name in drawn for name in "abc")


PRODUCTS = {"a100": "Simulated NVIDIA A100-SXM4-40GB", "h100": "Simulated NVIDIA H100 80GB HBM3"}
JOBS = {
    "impossible": ("a100", SharingMode.EXCLUSIVE),
    "small-a": ("a100", SharingMode.MPS),
    "small-b": ("a100", SharingMode.MPS),
    "large": ("h100", SharingMode.TIME_SLICING),
}
HEADERS = (
    "job state placed on mode slowdown restarts job memory MiB bound peak seen GPU util % seen step ms seen/ predicted "
    "GPU mode memory: reserved, and in use of GiB SM tenants"
)


def running(name: str) -> GpuTrainingJob:
    """A job of which everything is known, in figures as long as they come."""
    on, mode = JOBS[name]
    percent = Interval(median=100, lower=90, upper=100)
    predicted = ProductPrediction(
        product=PRODUCTS[on].removeprefix("Simulated NVIDIA "),
        memory=MemoryPrediction(median_mib=61_440, upper_mib=78_140, coverage=0.9),
        activity=ActivityPrediction(gpu_util_percent=percent, sm_active_ratio=percent, dram_active_ratio=percent),
        step_time_seconds=percent,
    )
    placed = WorkerPlacement(
        worker=0, pod=name, pod_uid=PodUid(name), node=NodeName(on), gpu_uuids=[GpuUuid(f"{on}-0")],
        product=PRODUCTS[on], mode=mode, expected_slowdown=1.25,
    )  # fmt: skip
    status = JobStatus(
        state=JobState.UNPLACEABLE,
        placement=[placed],
        prediction=Prediction(outcome="Predicted", reason="Calibrated", products=[predicted]),
        observed=Observed(peak_memory_mib=58_420, gpu_util_percent=99, step_time_seconds=1.2, step_time_ratio=1.31),
    )
    return GpuTrainingJob(metadata=ObjectMeta(name=name), spec=JobSpec(template={}), status=status)


def four_gpus(name: str) -> GpuNode:
    """A node with four GPUs, all its jobs on the first."""
    first = GpuUuid(f"{name}-0")
    held = [reserved(job, first, 9_000, mode) for job, (on, mode) in JOBS.items() if on == name]
    devices = [
        Device(uuid=GpuUuid(f"{name}-{index}"), index=index, product=PRODUCTS[name], memory_mib=81_559)
        for index in range(4)
    ]
    tenants = [Tenant(pod_uid=r.pod_uid, gpu_uuid=r.gpu_uuids[0], memory_mib=5_000, sm_active_ratio=0.9) for r in held]
    return gpu_node(name, devices, held, tenants)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_nothing_is_cut_in_a_terminal(width: int) -> None:
    """Regression: at 80 columns headers were `pl…` and `me…`, and the GPUs had no index."""
    table = rendered(show.job_table(map(running, JOBS)), width)
    bars = rendered(show.gpu_bars(map(four_gpus, PRODUCTS)), width)
    both = table + bars
    assert "…" not in both
    assert max(map(len, both.splitlines())) <= width
    words = both.replace("seen/predicted", "seen/ predicted").split()
    for word in {*HEADERS.split()}:
        assert words.count(word) >= HEADERS.split().count(word), word
    for name, (on, mode) in JOBS.items():
        assert re.search(rf"^ *{name} +Unplaceable +{on} .*{mode.value} ", table, re.MULTILINE), name
        assert name in bars
    for figure in ("61,440", "78,140", "58,420", "100", "99", "1.25", "1,200", "1.31"):
        assert table.split().count(figure) == len(JOBS), figure
    for index in range(4):
        assert len(re.findall(rf"^ *{index} .*[█▒·]{{12,}} ", bars, re.MULTILINE)) == len(PRODUCTS), index


def test_the_readmes_picture_is_legible_beside_its_text() -> None:
    """Regression: its letters were 8 pixels high on a page that is 960 wide. Rich draws them 20 high."""
    drawn = show.to_svg(show.gpu_bars(map(four_gpus, PRODUCTS)), title="x")
    for svg in (drawn, Path(__file__).parents[2].joinpath("docs/images/gpus.svg").read_text()):
        width = float(re.findall(r'viewBox="0 0 ([0-9.]+) ', svg)[0])
        assert 20 * 960 / width >= 14
