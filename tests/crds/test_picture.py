from io import StringIO

from carpool_core import picture
from carpool_core.resources.job import GpuTrainingJob, JobSpec, JobStatus, Observed, WorkerPlacement
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import (
    Device,
    GpuNode,
    GpuNodeSpec,
    GpuNodeStatus,
    Reservation,
    Tenant,
    TenantProfile,
)
from carpool_core.values import GpuUuid, JobState, JobUid, NodeName, PodUid, SharingMode
from rich.console import Console, RenderableType

GPU = GpuUuid("GPU-0")


def rendered(drawn: RenderableType) -> str:
    console = Console(width=160, file=StringIO())
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()


def node(name: str, *tenants: tuple[str, int, int]) -> GpuNode:
    """A node with one GPU of 40 GiB; each tenant is (name, reserved MiB, measured MiB)."""
    return GpuNode(
        metadata=ObjectMeta(name=name),
        spec=GpuNodeSpec(
            reservations=[
                Reservation(
                    pod_uid=PodUid(who),
                    pod_namespace="default",
                    pod_name=who,
                    job_uid=JobUid(who),
                    job_name=who,
                    gpu_uuids=[GPU],
                    mode=SharingMode.MPS,
                    tenant=TenantProfile(memory_mib=reserved),
                )
                for who, reserved, _ in tenants
            ]
        ),
        status=GpuNodeStatus(
            devices=[Device(uuid=GPU, index=0, product="Simulated NVIDIA A100-SXM4-40GB", memory_mib=40960)],
            tenants=[Tenant(pod_uid=PodUid(who), gpu_uuid=GPU, memory_mib=used) for who, _, used in tenants],
        ),
    )


def test_a_tenants_block_is_as_wide_as_its_reservation_and_dark_as_far_as_it_is_used() -> None:
    drawn = rendered(picture.gpus([node("n1", ("half", 20480, 10240))]))
    assert drawn.count("█") == picture.BAR_WIDTH // 4
    assert drawn.count("▒") == picture.BAR_WIDTH // 4
    assert "half" in drawn
    assert "20.0/40.0" in drawn


def test_two_tenants_never_draw_more_than_the_gpu() -> None:
    drawn = rendered(picture.gpus([node("n1", ("a", 20480, 20480), ("b", 20480, 0))]))
    assert drawn.count("█") + drawn.count("▒") == picture.BAR_WIDTH
    assert "·" not in drawn


def test_idle_nodes_of_one_kind_share_a_line() -> None:
    drawn = rendered(picture.gpus([node("n1"), node("n2"), node("n3")]))
    assert drawn.strip() == "3 idle nodes with 1 × Simulated NVIDIA A100-SXM4-40GB"


def test_a_job_shows_what_was_seen_beside_what_was_predicted() -> None:
    placed = WorkerPlacement(
        worker=0, pod="p", pod_uid=PodUid("u"), node=NodeName("n1"), gpu_uuids=[GPU],
        product="Simulated NVIDIA A100-SXM4-40GB", mode=SharingMode.MPS, expected_slowdown=1.25,
    )  # fmt: skip
    job = GpuTrainingJob(
        metadata=ObjectMeta(name="resnet"),
        spec=JobSpec(template={}),
        status=JobStatus(
            state=JobState.RUNNING,
            placement=[placed],
            observed=Observed(peak_memory_mib=9876, step_time_seconds=0.0524, step_time_ratio=1.31),
        ),
    )
    drawn = rendered(picture.jobs([job]))
    for expected in ("resnet", "Running", "n1", "MPS", "9,876", "1.25", "52", "1.31"):
        assert expected in drawn


def test_the_picture_is_an_svg_document() -> None:
    assert picture.to_svg(picture.gpus([node("n1", ("a", 1024, 512))]), title="GPUs").startswith("<svg")
