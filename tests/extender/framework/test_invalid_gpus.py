"""GpuNodes that contradict themselves: that GPU is left out, with the reason; nothing crashes."""

import msgspec
import pytest
from carpool_core.resources.node import Tenant
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_extender.framework.diagnosis import explain_gpus
from carpool_extender.framework.selection import CachedEvaluation, filter_nodes
from carpool_extender.testing import cluster, device, gpu_node, pod_request, tenant, unavailable_nodes
from evaluations import RULES, evaluate

GPU = "GPU-a-0"


def seen(pod, memory_mib, gpu=GPU):
    return Tenant(pod_uid=PodUid(pod), gpu_uuid=GpuUuid(gpu), memory_mib=memory_mib)


def a_node(*reservations, tenants=(), devices=2, **status):
    made = gpu_node("a", devices, reservations)
    return msgspec.structs.replace(made, status=msgspec.structs.replace(made.status, tenants=list(tenants), **status))


CASES = [
    pytest.param(a_node(tenants=[seen("stranger", 700)]), "700 MiB are used without a reservation, by pod stranger",
                 id="stranger"),
    pytest.param(
        a_node(tenant("x", ["GPU-a-1"]), tenants=[seen("pod-x", 9)]),
        "9 MiB are used without a reservation, by pod pod-x",
        id="a pod that strayed to another GPU than its own",
    ),
    pytest.param(a_node(tenant("x", [GPU]), tenant("y", [GPU], SharingMode.TIME_SLICING)),
                 "its reservations contradict each other: MPS, TimeSlicing", id="two modes at once"),
    pytest.param(a_node(tenant("x", [GPU], SharingMode.EXCLUSIVE), tenant("y", [GPU], SharingMode.EXCLUSIVE)),
                 "its reservations contradict each other: 2 are exclusive", id="alone twice"),
    pytest.param(a_node(devices=[device(0, health=DeviceHealth.UNHEALTHY, health_message="Xid 79"), device(1)]),
                 "unhealthy: Xid 79", id="sick, and why"),
    pytest.param(a_node(devices=[device(0, health=DeviceHealth.UNHEALTHY, health_message="x" * 121), device(1)]),
                 f"unhealthy: {'x' * 119}…", id="sick, and too long why"),
    pytest.param(a_node(tenants=[seen("q", 5), seen("p", 4)]),
                 "9 MiB are used without a reservation, by pods p and q", id="two strangers"),
    pytest.param(
        a_node(tenants=[seen(f"p{i}", 1) for i in range(1004)]),
        "1,004 MiB are used without a reservation, by pods p0, p1, p10 and 1,001 more",
        id="a crowd of strangers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("node", "reason"), CASES)
def test_the_gpu_is_left_out_and_its_neighbour_is_not(node, reason):
    snapshot = cluster(node).snapshot()
    texts = [str(one) for one in explain_gpus(CachedEvaluation(pod_request(), RULES, snapshot).evaluation, ["a"])]
    assert texts[0].partition("; besides, ")[0] == f"GPU 0 of a (NVIDIA A100-SXM4-40GB): {reason}"
    assert "fits by" in texts[1]
    only = msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, devices=node.status.devices[:1]))
    found = filter_nodes(evaluate(only), ["a"])
    assert found.refused["a"].endswith(f": {reason}")


X = tenant("x", ["GPU-a-1"])


@pytest.mark.parametrize(
    ("twins", "doubted", "shared"),
    [
        pytest.param([device(0), device(1), device(2, uuid=GpuUuid(GPU))], (0, 2), "UUID GPU-a-0", id="UUID"),
        pytest.param([device(0), device(1), device(0, uuid=GpuUuid("GPU-a-2"))], (0, 1), "index 0", id="index"),
    ],
)
def test_gpus_that_share_a_uuid_or_an_index_are_left_out_until_it_is_corrected(twins, doubted, shared):
    """Regression: a worker of two GPUs was sent to what was one; both were called GPU 0 in messages."""
    asked, known = pod_request(gpus=2), cluster(a_node(devices=twins))
    for node in (a_node(X, devices=twins), a_node(devices=twins)):  # also if only the reservations change
        known.apply(node)
        texts = [one.text for one in explain_gpus(evaluate(known).evaluation, ["a"])]
        assert [row for row, text in enumerate(texts) if "fits by" not in text] == [*doubted]
        assert {texts[row] for row in doubted} == {f"its node reports several GPUs with {shared}"}
        assert filter_nodes(evaluate(known, asked), ["a"]).fits == []
    known.apply(a_node(devices=3))
    assert all(one.fits for one in explain_gpus(evaluate(known).evaluation, ["a"]))
    assert filter_nodes(evaluate(known, asked), ["a"]).fits == ["a"]
    assert unavailable_nodes(known) == set()


@pytest.mark.parametrize(
    ("has", "reason"),
    [
        pytest.param((0, 512), "0 MiB of memory, of which 512 are reserved", id="none"),
        pytest.param((40960, 40960), "40,960 MiB of memory, of which 40,960 are reserved", id="all of it reserved"),
        pytest.param((255, 0), "255 MiB of memory", id="less than any job needs"),
    ],
)
def test_a_gpu_without_memory_is_no_place_for_a_job_of_unknown_memory_either(has, reason):
    """Regression: it would have gone there, and 0 of 0 MiB would have been left."""
    odd, unknown = device(1, memory_mib=has[0], reserved_mib=has[1]), pod_request(prediction=None)
    known = cluster(a_node(devices=[device(0), odd]))
    fits, left_out = explain_gpus(evaluate(known, unknown).evaluation, ["a"])
    assert (fits.fits, left_out.fits) == (True, False)
    assert left_out.text == f"reports {reason}: expected at least 256 MiB to give"
    found = filter_nodes(evaluate(a_node(devices=[odd]), unknown), ["a"])
    assert found.refused == {"a": f"NoGpuFits: 1 node: {left_out.text}"}
    known.apply(a_node(devices=2))
    assert [one.fits for one in explain_gpus(evaluate(known, unknown).evaluation, ["a"])] == [True, True]


def test_what_means_nothing_here_does_no_harm():
    strange = a_node(
        tenant("x", ["GPU-elsewhere"]),
        tenants=[seen("pod-x", 5, "GPU-elsewhere")],
        devices=1,
    )
    assert filter_nodes(evaluate(strange), ["a"]).fits == ["a"]
    nothing = a_node(devices=[device(0, memory_mib=0, reserved_mib=900)])
    assert filter_nodes(evaluate(nothing), ["a"]).unsuitable.keys() == {"a"}
