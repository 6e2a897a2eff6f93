"""Composition root of the node agent. Several agents, one for each node, may share an event loop."""

import asyncio
import errno
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from carpool_core.clock import Clock
from carpool_core.kube.api import PODS, KubeApi, Selector
from carpool_core.kube.errors import NotFound
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.values import NodeName, PodUid

from carpool_deviceplugin import cdi
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.check import check_node
from carpool_deviceplugin.dcgm import CounterSource, Exporter, HostEngine
from carpool_deviceplugin.gpu import Devices, NoDevicesError
from carpool_deviceplugin.mps import HostedMps, Mps, MpsProgram
from carpool_deviceplugin.nvlib import NvmlLibrary, load_nvml
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.plugin import AgentState, KubeletError, Plugin, PodResources, Registration, holders
from carpool_deviceplugin.preflight import Host, NodeInfo, Outcome
from carpool_deviceplugin.probe import ProbeFiles
from carpool_deviceplugin.processes import ProcTree
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.reconciler import Reconciler
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.simulated import SimulatedDevices, parse_inventory
from carpool_deviceplugin.timeouts import HARDWARE_INTERVALS, Intervals

_NAME, _LONGEST_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"), 253
"""Valid names of a Node."""
_STALE_S = 180.0
"""After this time without an answer from the API server the agent offers no GPUs. A watch ends after 150 s."""


def metrics_sources(settings: AgentSettings) -> list[CounterSource]:
    """Return the configured sources of counters besides NVML, the best one first."""
    found: list[CounterSource] = []
    if settings.dcgm_exporter:
        found.append(Exporter(settings.dcgm_exporter))
    if settings.dcgm_address:
        found.append(HostEngine(settings.dcgm_address))
    return found


def mps_daemons(settings: AgentSettings, *, may_write: bool = True) -> tuple[Mps | None, str]:
    """Return the node's MPS daemons; None and the reason if a requirement is missing."""
    program, directory = MpsProgram(may_write=may_write), settings.state_dir / "mps"
    problem = program.problem()
    if settings.mps_host and program.is_installed():
        return HostedMps(program, directory, Path(settings.mps_host)), ""
    return (None, problem) if problem else (Mps(program, directory), "")


def real_devices(settings: AgentSettings, nvml: NvmlLibrary, *, may_write: bool = True) -> NvmlDevices:
    """Open the node's GPUs, read-only unless `may_write`; raises NoDevicesError."""
    mps, mps_problem = mps_daemons(settings, may_write=may_write)
    if mps is not None and may_write:
        mps.sweep()
    return NvmlDevices(
        nvml,
        mps=mps,
        mps_problem=mps_problem,
        cdi=NvidiaCdi((settings.cdi_static_dir, settings.cdi_dir)),
        state_dir=settings.state_dir,
        processes=ProcTree(),
        may_switch_mig=settings.mig_switch,
        may_write=may_write,
        sources=metrics_sources(settings),
    )


def find_devices(settings: AgentSettings, nvml: NvmlLibrary | None = None) -> Devices:
    """Return the real or simulated GPUs of the settings; without `nvml` the installed library is loaded.

    Raises:
        NoDevicesError: There are none; the message names the setting to change.
    """
    if len(settings.node_name) > _LONGEST_NAME or not _NAME.fullmatch(settings.node_name):
        found = quoted(settings.node_name) if settings.node_name else "nothing"
        raise NoDevicesError(
            f"CARPOOL_NODE_NAME: expected the name of this Node, found {found}; set it (spec.nodeName)"
        )
    if not settings.simulated_gpus:
        try:
            devices = real_devices(settings, nvml or load_nvml())
        except NoDevicesError as e:
            hint = 'to try Carpool without hardware, set CARPOOL_SIMULATED_GPUS="NVIDIA A100-SXM4-40GB:4"'
            raise NoDevicesError(f"{e}; {hint}") from e
        _check_directory("CARPOOL_STATE_DIR", settings.state_dir, "another")
        return devices
    products = parse_inventory(settings.simulated_gpus)
    _check_directory("CARPOOL_STATE_DIR", settings.state_dir, "another")
    return SimulatedDevices(products, settings.node_name, settings.state_dir)


def _check_directory(variable: str, directory: Path, advice: str) -> None:
    """Raise NoDevicesError if the directory is not writable; a full disk is accepted, because it may be temporary."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise NoDevicesError(
                f"{variable}: expected a directory to write to at {quoted(directory)}, found {e.strerror}; set {advice}"
            ) from e


class KubeletPart:
    """The agent's services for the kubelet."""

    def __init__(
        self,
        settings: AgentSettings,
        plugin: Plugin,
        pods: Reflector[Pod],
        pod_resources: PodResources,
        intervals: Intervals,
        may_serve: Callable[[], bool],
    ) -> None:
        self._pod_resources = pod_resources
        self.containers: Mapping[str, str] = {}
        """Name of the container that holds GPUs, by `namespace/name` of its pod; the kubelet's last answer."""
        self._cdi_dir = settings.cdi_dir
        self._pods, self._every_s, self._sleep = pods, intervals.holders_s, intervals.sleep
        self.registration = Registration(
            settings.device_plugin_dir, plugin, intervals.kubelet_s, intervals.sleep, may_serve
        )
        self._log = structlog.get_logger().bind(node=settings.node_name)

    async def run(self) -> None:
        """Watch the node's pods and serve the kubelet until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pods.run())
                tasks.create_task(self.registration.run())
                await self._pods.wait_synced()
                tasks.create_task(self._maintain())
        finally:
            await self._pod_resources.close()

    async def _maintain(self) -> None:
        """Read who holds GPUs, and remove the CDI specifications of ended pods, including those of an earlier agent."""
        while True:
            try:
                self.containers = holders(await self._pod_resources.list())
            except KubeletError as e:
                self._log.debug("podresources not read", error=str(e))  # the plugin's refusals contain it
            living = {PodUid(p.metadata.uid) for p in self._pods.store.values() if not p.is_finished}
            if removed := cdi.remove_stale(self._cdi_dir, living):
                self._log.info("stale slots removed", files=removed)
            await self._sleep(self._every_s)


class Agent:
    """One node's agent."""

    def __init__(self, settings: AgentSettings, devices: Devices, reconciler: Reconciler, clock: Clock) -> None:
        self.settings, self.devices, self.reconciler = settings, devices, reconciler
        self.clock = clock
        self.kubelet: KubeletPart | None = None
        """None on a node without a kubelet."""

    async def run(self) -> None:
        """Manage the node until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.run())
            if self.kubelet is not None:
                tasks.create_task(self.kubelet.run())

    def disconnected(self) -> str | None:
        """Return why the agent does not know its reservations; None if it does."""
        store = self.reconciler.reflector.store
        if not store.synced:
            return "has not received its GpuNode from the API server yet"
        if store.age(self.clock.monotonic()) > _STALE_S:
            return f"has received no answer from the API server for {_STALE_S:g} s"
        return None

    def unready(self) -> str | None:
        """Return why the agent is not ready; None if it is ready."""
        if (reason := self.disconnected()) is not None:
            return reason
        if self.kubelet is not None and not self.kubelet.registration.is_registered:
            return f"is not registered with the kubelet in {self.settings.device_plugin_dir}"
        return None


def _install_probe(settings: AgentSettings, clock: Clock) -> ProbeFiles | None:
    """Return the step probe's files; None if they cannot be written: then containers start without the probe."""
    probe = ProbeFiles(settings.state_dir / "probe", clock.monotonic)
    try:
        probe.install()
    except OSError as e:
        structlog.get_logger().warning("step probe not installed", error=str(e))
        return None
    return probe


def build(
    settings: AgentSettings,
    api: KubeApi,
    clock: Clock,
    devices: Devices | None = None,
    intervals: Intervals | None = None,
) -> Agent:
    """Build an agent, by default with the GPUs of the settings; agents of several nodes may share the client.

    Raises:
        NoDevicesError: There are no GPUs, or the CDI directory is not writable.
    """
    devices = devices or find_devices(settings)
    intervals = intervals or (Intervals() if devices.simulated else HARDWARE_INTERVALS)
    node = NodeName(settings.node_name)

    def preflight(info: NodeInfo) -> list[Outcome]:
        return list(check_node(devices, settings, Host.find(info)))

    if not settings.kubelet:
        return Agent(settings, devices, Reconciler(node, api, clock, devices, intervals, preflight=preflight), clock)
    _check_directory(
        "CARPOOL_CDI_DIR", settings.cdi_dir, "the one from which the container runtime reads CDI specifications"
    )
    pods: Reflector[Pod] = Reflector(api, PODS, Pod, selector=Selector(fields=f"spec.nodeName={node}"), clock=clock)
    pod_resources = PodResources(settings.pod_resources_socket)

    async def read_pod(namespace: str, name: str) -> Pod | None:
        try:
            return await api.get(PODS, name, Pod, namespace=namespace)
        except NotFound:
            return None

    probe = _install_probe(settings, clock)
    state = AgentState(
        pod=pods.store.get,
        read_pod=read_pod,
        reservations=lambda: agent.reconciler.reservations,
        partitions=lambda: agent.reconciler.partitions,
        access=devices.access,
        held=pod_resources.list,
        probe=probe,
    )
    plugin = Plugin(
        state,
        settings.cdi_dir,
        also_read=(settings.cdi_static_dir,),
        gpus=devices.uuids,
        numa_nodes=devices.numa_nodes,
        slots_per_gpu=settings.slots_per_gpu,
        autoscaling=settings.autoscaling,
        clock=clock,
        reservation_wait_s=intervals.reservation_wait_s,
        sleep=intervals.sleep,
    )
    reconciler = Reconciler(
        node, api, clock, devices, intervals, plugin.set_healthy, plugin.look_again, probe, preflight
    )
    agent = Agent(settings, devices, reconciler, clock)
    agent.kubelet = KubeletPart(
        settings,
        plugin,
        pods,
        pod_resources,
        intervals,
        lambda: reconciler.reporter.has_reported and agent.disconnected() is None,
    )
    return agent
