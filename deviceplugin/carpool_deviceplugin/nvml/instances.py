"""MIG instances of the GPUs that the agent looks after: which are ours, and one step at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pynvml
from carpool_core.values import GpuUuid, PodUid

from carpool_deviceplugin.devices.gpu import DeviceError, Part
from carpool_deviceplugin.mig.layout import Instance, Placement
from carpool_deviceplugin.mig.planner import Create, Destroy
from carpool_deviceplugin.mig.profiles import MigTable
from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.mig import MigDevice, apply_step, read_instances, read_mig_devices, read_table
from carpool_deviceplugin.nvml.modes import ModeFile, OwnInstance
from carpool_deviceplugin.nvml.presence import Presence


@dataclass(frozen=True, slots=True)
class Found:
    """One instance as the driver shows it."""

    instance: Instance
    device: MigDevice | None
    """None where it has no compute instance (yet)."""
    own: OwnInstance | None
    """None where somebody else made it."""


class Instances:
    """The instances of a node's GPUs.

    Args:
        session: The open library.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tables: dict[GpuUuid, MigTable | None] = {}

    def learn(self, uuid: GpuUuid) -> MigTable | None:
        """Ask what a GPU can be divided into; raises NvmlError."""
        self._tables[uuid] = read_table(self._session, uuid)
        return self._tables[uuid]

    def table(self, uuid: GpuUuid) -> MigTable | None:
        """Return what a GPU can be divided into; None without MIG."""
        return self._tables.get(uuid)

    def is_enabled(self, uuid: GpuUuid) -> bool:
        """Whether MIG is switched on now; raises NvmlError."""
        if self.table(uuid) is None:
            return False
        session = self._session
        mode = session.ask(uuid, session.library.nvmlDeviceGetMigMode, session.handle(uuid))
        return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE

    def find(self, uuid: GpuUuid, file: ModeFile) -> list[Found]:
        """List a GPU's instances; raises NvmlError."""
        table = self.table(uuid)
        if table is None:
            return []
        owned = {(o.profile, o.start): o for o in file.read().instances}
        instances = read_instances(self._session, uuid, table)
        devices = {d.gpu_instance_id: d for d in read_mig_devices(self._session, uuid)} if instances else {}
        return [_whose(i, devices.get(i.id), owned) for i in instances]

    def create(self, uuid: GpuUuid, file: ModeFile, placement: Placement, pod_uid: PodUid | None) -> None:
        """Make an instance, or go on where an earlier agent died; it is written down before it is made."""
        own = OwnInstance(placement.profile.name, placement.start, pod_uid)
        there = next((f for f in self.find(uuid, file) if f.instance.placement == placement), None)
        if there is not None and there.device is not None:
            _write(file, replace(own, device=there.device.uuid))
            return
        _write(file, own)
        try:
            apply_step(self._session, uuid, Create(placement))
        except DeviceError:
            if there is None and not self._exists(uuid, placement):
                _forget(file, placement)
            raise
        made = next((f for f in self.find(uuid, file) if f.instance.placement == placement), None)
        if made is None or made.device is None:
            raise DeviceError(f"GPU {uuid}: expected {placement} to be there, read back it is not; look at dmesg")
        _write(file, replace(own, device=made.device.uuid))

    def destroy(self, uuid: GpuUuid, file: ModeFile, placement: Placement) -> None:
        """Destroy an instance of ours; one that is gone is only forgotten."""
        there = next((f for f in self.find(uuid, file) if f.instance.placement == placement), None)
        if there is not None and there.own is None:
            raise DeviceError(f"GPU {uuid}: expected {there.instance} to be Carpool's own, found somebody else's")
        if there is not None:
            apply_step(self._session, uuid, Destroy(there.instance))
            if self._exists(uuid, placement):
                raise DeviceError(f"GPU {uuid}: expected {placement} to be gone, read back it is still there")
        _forget(file, placement)

    def _exists(self, uuid: GpuUuid, placement: Placement) -> bool:
        table = self.table(uuid)
        return table is not None and placement in {i.placement for i in read_instances(self._session, uuid, table)}

    def switch(self, uuid: GpuUuid, *, on: bool) -> None:
        """Switch MIG on or off, where nobody is on the GPU; raises DeviceError where it takes more than that.

        Ampere resets the GPU for it, which virtual machines with a GPU passed through cannot; Hopper needs no reset.
        """
        session, library = self._session, self._session.library
        handle, word = session.handle(uuid), "on" if on else "off"
        status = session.call(uuid, library.nvmlDeviceSetMigMode, handle, int(on))
        session.forget(uuid)  # it may have been reset: handles and minor numbers are new
        if status == pynvml.NVML_SUCCESS and self.is_enabled(uuid) == on:
            return
        # Otherwise whoever resets the GPU next would switch it by surprise.
        session.ask(uuid, library.nvmlDeviceSetMigMode, session.handle(uuid), int(not on))
        if status == pynvml.NVML_ERROR_IN_USE:
            why = "something still uses it: end its processes, DCGM and nvidia-persistenced among them"
        elif status == pynvml.NVML_ERROR_RESET_REQUIRED:
            why = "it takes a reset that cannot be made from here (a virtual machine, say): restart the node for it"
        else:
            why = f"the driver said {pynvml.NVMLError(status)}" if status else "read back, it is as before"
        raise DeviceError(f"GPU {uuid}: expected to switch MIG {word}, found that {why}")


def parts_of(found: list[Found], present: Presence) -> tuple[Part, ...]:
    """Join the instances with who is there."""
    return tuple(
        Part(
            f.instance,
            is_ours=f.own is not None,
            pod_uid=f.own.pod_uid if f.own is not None else None,
            users=present.pod_uids(f.instance.id),
            is_used=f.instance.id in present.instances,
        )
        for f in found
    )


def foreign(found: list[Found]) -> frozenset[int]:
    """IDs of the instances that somebody else made."""
    return frozenset(f.instance.id for f in found if f.own is None)


def _whose(instance: Instance, device: MigDevice | None, owned: Mapping[tuple[str, int], OwnInstance]) -> Found:
    """An instance that stands where ours stood, under another UUID, is not ours."""
    own = owned.get((instance.placement.profile.name, instance.placement.start))
    if own is not None and own.device and device is not None and own.device != device.uuid:
        own = None
    return Found(instance, device, own)


def _write(file: ModeFile, own: OwnInstance) -> None:
    setting = file.read()
    others = tuple(o for o in setting.instances if (o.profile, o.start) != (own.profile, own.start))
    if setting.instances != (*others, own):
        file.write(replace(setting, instances=(*others, own)))


def _forget(file: ModeFile, placement: Placement) -> None:
    setting = file.read()
    others = tuple(o for o in setting.instances if (o.profile, o.start) != (placement.profile.name, placement.start))
    if others != setting.instances:
        file.write(replace(setting, instances=others))
