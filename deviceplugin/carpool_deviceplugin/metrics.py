"""Metrics of the agent: GPUs under DCGM's names, their tenants and the agent under Carpool's."""

from collections.abc import Iterable, Iterator, Mapping

from carpool_core.resources.node import Device, Reservation
from carpool_core.values import MIB, DeviceHealth, PartitionState, SharingMode
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample, UnknownMetricFamily
from prometheus_client.registry import Collector

from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.gpu import Counters, InstanceReading, Reading
from carpool_deviceplugin.metering import Meter, PodUsage, Rates

_DEVICE_LABELS = (
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname", "pod", "namespace",
    "container",
)  # fmt: skip
"""dcgm-exporter writes Hostname with a capital, and its dashboards select by it."""
SOURCE = "carpool_agent_gpu_metrics_source"
_ROOM_C, _C_PER_W = 30, 0.1
"""Temperature of a simulated GPU without load, and its rise with power."""
TENANT_ENERGY = "carpool_gpu_tenant_energy_joules"
TENANT_STEPS = "carpool_gpu_tenant_steps"
_TENANT_LABELS = ("UUID", "namespace", "pod", "training_job")

DEVICE_GAUGES = {
    "DCGM_FI_DEV_GPU_UTIL": "Share of time in which a kernel ran (in %).",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "Memory bandwidth in use (in %).",
    "DCGM_FI_DEV_FB_USED": "Memory in use by processes (in MiB).",
    "DCGM_FI_DEV_FB_FREE": "Free memory (in MiB).",
    "DCGM_FI_DEV_FB_RESERVED": "Memory reserved by the driver (in MiB).",
    "DCGM_FI_DEV_POWER_USAGE": "Power draw (in W).",
    "DCGM_FI_DEV_GPU_TEMP": "Temperature (in C).",
    "DCGM_FI_DEV_SM_CLOCK": "Clock of the SMs (in MHz).",
    "DCGM_FI_DEV_MEM_CLOCK": "Clock of the memory (in MHz).",
    "DCGM_FI_DEV_XID_ERRORS": "The last XID since the start of the agent; 0 if none.",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "Rows remapped for uncorrectable errors.",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "Rows remapped for correctable errors.",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "1 if a row could not be remapped.",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "Share of time in which the graphics or compute engine was active (0..1).",
    "DCGM_FI_PROF_SM_ACTIVE": "Share of SM-time with work (0..1).",
    "DCGM_FI_PROF_SM_OCCUPANCY": "Share of the SMs' warp slots in use (0..1).",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "Share of time in which the tensor cores were active (0..1).",
    "DCGM_FI_PROF_DRAM_ACTIVE": "Share of time in which the memory interface was active (0..1).",
}
ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
TENANT_GAUGES = {
    "carpool_gpu_tenant_memory_bytes": "GPU memory in use by a pod.",
    "carpool_gpu_tenant_memory_limit_bytes": "GPU memory limit of a pod; absent without a limit.",
    "carpool_gpu_tenant_utilization_ratio": "Share of time in which a pod's kernels ran (0..1).",
    "carpool_gpu_tenant_sm_active_ratio": "Share of SM-time with a pod's work (0..1).",
    "carpool_gpu_tenant_step_seconds": "Mean time of a pod's training step.",
    "carpool_gpu_tenant_solo_step_seconds": "Mean time of a pod's training step while no other pod worked on the GPU.",
    "carpool_gpu_tenant_samples_per_second": "Samples that a pod's processes train with.",
    "carpool_gpu_tenant_data_wait_ratio": "Share of time in which a pod waited for data (0..1).",
    "carpool_gpu_tenant_checkpoint_ratio": "Share of time in which a pod waited for checkpoints (0..1).",
    "carpool_gpu_tenant_copy_ratio": "Share of time in which a pod waited for copies to the GPU (0..1).",
}
RESERVATION_GAUGES = {
    "carpool_gpu_tenant_memory_reserved_bytes": "GPU memory that placement counts for a pod; without a bound, all.",
    "carpool_gpu_tenant_predicted_utilization_ratio": "Predicted share of time with kernels of a pod alone (0..1).",
    "carpool_gpu_tenant_predicted_sm_active_ratio": "Predicted share of SM-time with work of a pod alone (0..1).",
    "carpool_gpu_tenant_expected_slowdown_ratio": "Predicted step time of a pod beside its co-tenants over that alone.",
}
"""Facts of a pod's reservation, on each of its GPUs."""


class AgentCollector(Collector):
    """Exports the last reading. A scrape reads no GPU, because that would block the event loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering needs no reading."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the series of the GPUs, their tenants and the agent."""
        yield from self._devices()
        yield from self._reservations()
        yield from self._tenants()
        yield from self._job_energy()
        yield from self._own()

    def _devices(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {
            name: GaugeMetricFamily(name, text, labels=_DEVICE_LABELS) for name, text in DEVICE_GAUGES.items()
        }
        source = GaugeMetricFamily(SOURCE, "1 for each source of a GPU's counters.", labels=["UUID", "source"])
        # DCGM's counter does not end in _total, and must keep its name.
        energy = UnknownMetricFamily(ENERGY, "Energy since the GPU appeared (in mJ).", labels=_DEVICE_LABELS)
        for device in self._agent.reconciler.reporter.devices:
            meter = self._agent.reconciler.meters[device.uuid]
            reading = meter.reading
            if reading is None or not meter.is_current:
                continue  # the series carpool_agent_gpu_healthy reports it
            for name in reading.sources:
                source.add_metric([device.uuid, name], 1.0)
            counters = _counters(device, reading, meter)
            labels = self._labels(device, reading.pci_bus_id)
            _add(families, counters, labels)
            if reading.energy_j is not None and ENERGY not in counters.exported:
                energy.samples.append(Sample(ENERGY, labels, round(1000 * reading.energy_j)))
            for instance in reading.mig_instances:
                _add(families, instance.counters, labels | self._instance_labels(instance))
        yield source
        # Counters that no GPU here supports are absent; before the first reading all are listed.
        is_sampled = any(meter.reading is not None for meter in self._agent.reconciler.meters.values())
        yield from (family for family in (*families.values(), energy) if family.samples or not is_sampled)

    def _instance_labels(self, instance: InstanceReading) -> dict[str, str]:
        """Return the labels of a MIG instance; it belongs to the pod that it was created for."""
        owner = next((r for r in self._agent.reconciler.reservations if r.pod_uid == instance.pod_uid), None)
        return {"GPU_I_PROFILE": instance.profile, "GPU_I_ID": str(instance.instance_id), **self._owner(owner)}

    def _owner(self, owner: Reservation | None) -> dict[str, str]:
        """Return the labels of a pod, and of its container with the GPUs as far as the kubelet has reported it."""
        if owner is None:
            return {"pod": "", "namespace": "", "container": ""}
        kubelet = self._agent.kubelet
        container = kubelet.containers.get(f"{owner.pod_namespace}/{owner.pod_name}", "") if kubelet else ""
        return {"pod": owner.pod_name, "namespace": owner.pod_namespace, "container": container}

    def _labels(self, device: Device, pci_bus_id: str) -> dict[str, str]:
        """Return the labels of a GPU. A shared GPU belongs to no pod: its pods have series of their own."""
        there = [r for r in self._agent.reconciler.reservations if device.uuid in r.gpu_uuids]
        owner = there[0] if len(there) == 1 and there[0].mode is not SharingMode.MIG else None
        return dict.fromkeys(_DEVICE_LABELS, "") | {
            "gpu": str(device.index),
            "UUID": device.uuid,
            "pci_bus_id": pci_bus_id,
            "device": f"nvidia{device.index}",
            "modelName": device.product,
            "Hostname": self._agent.settings.node_name,
            **self._owner(owner),
        }

    def _reservations(self) -> Iterator[Metric]:
        families = [GaugeMetricFamily(name, text, labels=_TENANT_LABELS) for name, text in RESERVATION_GAUGES.items()]
        devices = {device.uuid: device for device in self._agent.reconciler.reporter.devices}
        for held in self._agent.reconciler.reservations:
            for uuid in held.gpu_uuids:
                if (device := devices.get(uuid)) is None:
                    continue
                use, tenant = self._agent.reconciler.meters[uuid].usage.get(held.pod_uid, PodUsage()), held.tenant
                counted_mib = tenant.counted_mib(use.peak_memory_mib)
                values = (
                    MIB * (device.memory_mib if counted_mib is None else counted_mib),
                    tenant.gpu_util_percent / 100,
                    tenant.sm_active_ratio,
                    held.expected_slowdown,
                )
                for family, value in zip(families, values, strict=True):
                    family.add_metric([uuid, held.pod_namespace, held.pod_name, held.job_name], value)
        yield from families

    def _tenants(self) -> Iterator[Metric]:
        families = [GaugeMetricFamily(name, text, labels=_TENANT_LABELS) for name, text in TENANT_GAUGES.items()]
        energy = CounterMetricFamily(TENANT_ENERGY, "Energy above idle that a pod has drawn.", labels=_TENANT_LABELS)
        progress = CounterMetricFamily(TENANT_STEPS, "Training steps of a pod.", labels=_TENANT_LABELS)
        reservations: dict[str, Reservation] = {r.pod_uid: r for r in self._agent.reconciler.reservations}
        for uuid, meter in self._agent.reconciler.meters.items():
            for pod_uid, use in meter.usage.items():
                reserved = reservations.get(pod_uid)
                if reserved is None:
                    continue
                named = (uuid, reserved.pod_namespace, reserved.pod_name, reserved.job_name)
                labels = dict(zip(_TENANT_LABELS, named, strict=True))
                rates = _now(use)
                limit = reserved.memory_limit_mib and reserved.memory_limit_mib * MIB
                steps, sums = use.step_means, use.step_means.sums
                values = [
                    *(use.memory_mib * MIB, limit, rates.busy, rates.sm, steps.step_time_s, use.solo_step_time_s),
                    *(steps.rate(sum_) for sum_ in (sums.samples, sums.data_s, sums.checkpoint_s, sums.copy_s)),
                ]
                if use.steps is not None:
                    progress.samples.append(Sample(f"{TENANT_STEPS}_total", labels, use.steps))
                if use.energy_j is not None:
                    energy.samples.append(Sample(f"{TENANT_ENERGY}_total", labels, use.energy_j))
                for family, value in zip(families, values, strict=True):
                    if value is not None:
                        family.samples.append(Sample(family.name, labels, value))
        yield from families
        yield energy
        yield progress

    def _job_energy(self) -> Iterator[Metric]:
        labels, grams = ["namespace", "training_job"], self._agent.settings.carbon_grams_per_kwh
        energy = CounterMetricFamily(
            "carpool_job_energy_joules",
            "Energy above idle that a job has drawn on a node since the agent's start; kept for an hour without pods.",
            labels=labels,
        )
        carbon = CounterMetricFamily(
            "carpool_job_carbon_grams", "Carbon dioxide of carpool_job_energy_joules_total (in g).", labels=labels
        )
        for job, joules in self._agent.reconciler.job_energy.joules.items():
            energy.add_metric(job, joules)
            carbon.add_metric(job, joules * (grams or 0.0) / 3.6e6)
        yield from (energy, carbon) if grams is not None else (energy,)

    def _own(self) -> Iterator[Metric]:
        agent = self._agent
        healthy = GaugeMetricFamily(
            "carpool_agent_gpu_healthy", "1 if a GPU gets new work.", labels=["UUID", "gpu", "Hostname"]
        )
        for device in agent.reconciler.reporter.devices:
            names = [device.uuid, str(device.index), agent.settings.node_name]
            healthy.add_metric(names, float(device.health is DeviceHealth.HEALTHY))
        yield healthy
        states = [p.state for p in agent.reconciler.partitions]
        partitions = GaugeMetricFamily("carpool_agent_partitions", "Reservations by progress.", labels=["state"])
        for state in PartitionState:
            partitions.add_metric([state.value], states.count(state))
        yield partitions
        yield CounterMetricFamily(
            "carpool_agent_status_writes", "Writes of GpuNode.status.", agent.reconciler.reporter.writes
        )
        yield CounterMetricFamily(
            "carpool_agent_saved_gpu_seconds",
            "GPU time that sharing saved on this node, against one tenant on each GPU, less the expected slowdown.",
            agent.reconciler.saved_time.seconds,
        )
        registered = agent.kubelet is not None and agent.kubelet.registration.is_registered
        yield GaugeMetricFamily(
            "carpool_agent_registered", "1 if the plugin is registered with the kubelet.", float(registered)
        )


def _now(use: PodUsage) -> Rates:
    """Return a pod's present rates: zero after its processes ended; values that were never measured stay unknown."""
    if use.rates is None or use.is_running:
        return use.rates or Rates()
    busy, sm, dram = (None if value is None else 0.0 for value in (use.rates.busy, use.rates.sm, use.rates.dram))
    return Rates(busy, sm, dram)


def _add(families: Mapping[str, GaugeMetricFamily], counters: Counters, labels: dict[str, str]) -> None:
    for name, value in counters.values.items():
        if name not in counters.exported:
            families[name].samples.append(Sample(name, labels, value))


def _counters(device: Device, reading: Reading, meter: Meter) -> Counters:
    """Return the GPU's counters; those of a simulated GPU are computed from its processes."""
    if reading.counters is not None:
        return reading.counters
    total = meter.total(is_concurrent=device.mode is SharingMode.MPS)
    used = sum(p.memory_mib for p in reading.processes)
    return Counters(
        {
            "DCGM_FI_DEV_GPU_UTIL": round(100 * (total.busy or 0.0)),
            "DCGM_FI_DEV_MEM_COPY_UTIL": round(100 * (total.dram or 0.0)),
            "DCGM_FI_DEV_FB_USED": used,
            "DCGM_FI_DEV_FB_FREE": max(0, device.memory_mib - device.reserved_mib - used),
            "DCGM_FI_DEV_FB_RESERVED": device.reserved_mib,
            "DCGM_FI_DEV_POWER_USAGE": round(reading.power_w or 0.0, 1),
            "DCGM_FI_DEV_GPU_TEMP": round(_ROOM_C + _C_PER_W * (reading.power_w or 0.0)),
            "DCGM_FI_DEV_XID_ERRORS": 0,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE": total.busy or 0.0,
            "DCGM_FI_PROF_SM_ACTIVE": total.sm or 0.0,
            "DCGM_FI_PROF_DRAM_ACTIVE": total.dram or 0.0,
        }
    )
