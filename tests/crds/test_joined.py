"""Who came to a GPU after a reservation."""

import pytest
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import MAX_NAMED_JOBS, GpuNode, GpuNodeSpec, Reservation, describe_later_tenants
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode


def held(name: str, at: str, *gpus: str, job: str = "") -> Reservation:
    return Reservation(
        pod_uid=PodUid(f"pod-{name}"),
        pod_namespace="default",
        pod_name=name,
        job_uid=JobUid(job or f"job-{name}"),
        job_name=name,
        gpu_uuids=[GpuUuid(gpu) for gpu in gpus or ("GPU-0",)],
        mode=SharingMode.MPS,
        reserved_at=at,
    )


NOW, LATER = "2026-01-31T12:00:00Z", "2026-01-31T12:00:01Z"
OWN = held("own", NOW)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        pytest.param([], "", id="nobody"),
        pytest.param([held("before", "2026-01-31T11:59:59Z")], "", id="before"),
        pytest.param([held("elsewhere", LATER, "GPU-1")], "", id="on another GPU"),
        pytest.param([held("worker", LATER, job="job-own")], "", id="another worker of the job"),
        pytest.param(
            [held("z", LATER, "GPU-1", "GPU-0"), held("y", LATER)],
            "; joined since by default/y, default/z, not counted here",
            id="in order of their names",
        ),
        pytest.param(
            [held(f"j{number}", LATER) for number in range(MAX_NAMED_JOBS + 2)],
            "; joined since by default/j0, default/j1, default/j2, default/j3, default/j4, 2 more, not counted here",
            id="more than are named",
        ),
    ],
)
def test_who_came_later_to_the_same_gpus_is_named(others: list[Reservation], said: str) -> None:
    node = GpuNode(metadata=ObjectMeta(name="a"), spec=GpuNodeSpec(reservations=[OWN, *others]))
    assert describe_later_tenants(node, OWN) == said
