"""GPUs to plan for, and what hardware would refuse."""

from dataclasses import replace

from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_deviceplugin.gpu import GpuActual, Limits, SetLimits, SetMode, StartMps, Step, StopMps

EXCLUSIVE, TIME_SLICING, MPS, MIG = SharingMode
A, B = PodUid("uid-a"), PodUid("uid-b")
IDLE = GpuActual(GpuUuid("GPU-1"), 40_000, frozenset({EXCLUSIVE, TIME_SLICING, MPS}))
SLICED = replace(IDLE, mode=TIME_SLICING)
SHARED = replace(IDLE, mode=MPS, mps_daemon=True, limits={A: Limits(10_000, None)})


def apply(actual: GpuActual, step: Step) -> GpuActual:
    """A GPU as hardware would be: it refuses what would disturb who is there."""
    match step:
        case SetMode(mode):
            assert mode is actual.mode or not actual.tenants, "mode changed under a tenant"
            assert not actual.mps_daemon, "mode changed under an MPS daemon"
            assert not actual.mps_servers_left, "mode changed under an MPS server"
            assert not actual.mps_cleanup_pending, "what clients of MPS left stays for good"
            return replace(actual, mode=mode)
        case StartMps():
            assert actual.mode is MPS
            assert not actual.tenants, "a server of a dead daemon was ended under its clients"
            return replace(actual, mps_daemon=True, mps_servers_left=False)
        case StopMps():
            assert not actual.tenants, "MPS stopped under a tenant"
            return replace(
                actual, mps_daemon=False, mps_hung=False, mps_servers_left=False, mps_cleanup_pending=False, limits={}
            )
        case SetLimits(pod, limits):
            kept = {p: known for p, known in actual.limits.items() if p != pod}
            return replace(actual, limits=kept if limits is None else {**kept, pod: limits})
