"""The steps that change a real GPU, each taken only where it disturbs nobody."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from carpool_core.values import GpuUuid, SharingMode

from carpool_deviceplugin.devices.gpu import (
    CreateInstance,
    DestroyInstance,
    DeviceError,
    SetLimits,
    SetMode,
    StartMps,
    Step,
    StopMps,
)
from carpool_deviceplugin.mps.daemons import Mps
from carpool_deviceplugin.nvml.instances import Instances, foreign
from carpool_deviceplugin.nvml.modes import ModeFile
from carpool_deviceplugin.nvml.presence import Watcher, name_of

MPS, MIG = SharingMode.MPS, SharingMode.MIG


class Changes:
    """Takes steps.

    Args:
        instances: The MIG instances of the node's GPUs.
        watcher: Sees who is there.
        mps: The MPS daemons; None where the node cannot run any.
        on_switch: Called with a GPU whose MIG mode was switched.
        may_switch: Whether MIG may be switched on and off on a GPU that nobody uses.
    """

    def __init__(
        self,
        instances: Instances,
        watcher: Watcher,
        mps: Mps | None,
        on_switch: Callable[[GpuUuid], None],
        *,
        may_switch: bool,
    ) -> None:
        self._instances, self._watcher, self._mps = instances, watcher, mps
        self._on_switch, self._may_switch = on_switch, may_switch
        self.mig_manager = ""
        """Who else divides the node's GPUs; empty where nobody does."""

    def apply(self, uuid: GpuUuid, file: ModeFile, step: Step) -> None:
        """Take one step; raises DeviceError."""
        match step:
            case SetMode(mode):
                self._set_mode(uuid, file, mode)
            case StartMps():
                mode = file.read().mode
                if mode is not MPS:
                    raise DeviceError(f"GPU {uuid}: expected mode MPS, found {mode or 'Idle'}; set it first")
                if self._mps is None:
                    raise DeviceError(f"GPU {uuid}: expected nvidia-cuda-mps-control on this node, found none")
                if not self._mps.is_running(uuid):  # a dead daemon's server may serve them still, and would be ended
                    self._check_that_no_pod_is_there(uuid)
                self._mps.start(uuid)
            case StopMps():
                self._check_that_it_is_empty(uuid, file)
                if self._mps is not None:
                    with suppress(DeviceError):  # a full disk: to stop the daemon may be what frees it
                        file.write(replace(file.read(), is_untidied=True))
                    self._mps.stop(uuid)
                    self._watcher.forget(uuid)  # no daemon and no server any more
                file.write(replace(file.read(), limits={}, is_untidied=False))
            case SetLimits(pod_uid, limits):
                file.write(file.read().limiting(pod_uid, limits))
            case CreateInstance(placement, pod_uid):
                self._check_that_it_is_ours(uuid)
                self._instances.create(uuid, file, placement, pod_uid)
            case DestroyInstance(placement):
                self._check_that_it_is_ours(uuid)
                self._instances.destroy(uuid, file, placement)

    def _set_mode(self, uuid: GpuUuid, file: ModeFile, mode: SharingMode | None) -> None:
        setting = file.read()
        is_divided = self._instances.is_enabled(uuid)
        is_switching = mode is not None and (mode is MIG) != is_divided
        if mode is setting.mode and not is_switching:
            return
        self._check_that_it_is_empty(uuid, file)
        if is_switching:
            self._check_that_it_is_ours(uuid)
            if not self._may_switch:
                raise DeviceError(
                    f"GPU {uuid}: expected MIG to be switched {'on' if mode is MIG else 'off'}, found it not so, and "
                    "the agent may not switch it; do it (nvidia-smi -mig), or set CARPOOL_MIG_SWITCH"
                )
            self._instances.switch(uuid, on=mode is MIG)
            self._on_switch(uuid)
        file.write(replace(setting, mode=mode, limits={}))

    def _check_that_it_is_ours(self, uuid: GpuUuid) -> None:
        if self.mig_manager:
            raise DeviceError(f"GPU {uuid}: expected nobody else to divide it, found that {self.mig_manager}")

    def _check_that_no_pod_is_there(self, uuid: GpuUuid) -> None:
        self._watcher.forget(uuid)
        if whom := sorted(self._watcher.look(uuid)[0].pod_uids()):
            raise DeviceError(
                f"GPU {uuid}: expected no pod's process where an MPS daemon starts, found {', '.join(whom)}; wait "
                "until they end"
            )

    def _check_that_it_is_empty(self, uuid: GpuUuid, file: ModeFile) -> None:
        others = foreign(self._instances.find(uuid, file)) if self._instances.is_enabled(uuid) else set()
        self._watcher.forget(uuid)
        present = self._watcher.look(uuid, frozenset(others))[0].beyond(frozenset(others))
        whom = sorted(map(str, present.pod_uids())) + [name_of(s) for s in present.strangers]
        if whom:
            raise DeviceError(
                f"GPU {uuid}: expected no process on the GPU, found {', '.join(whom)}; wait until it ends"
            )
