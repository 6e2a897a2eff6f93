"""`carpool agent`."""

import asyncio
import gc
import signal
from importlib.metadata import version

import click
import structlog
from carpool_core import logs, metrics
from carpool_core.clock import SystemClock
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.settings import MisconfiguredError, SettingsError, click_options
from prometheus_client import CollectorRegistry

from carpool_deviceplugin.app import build, find_devices
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.settings import AgentSettings


async def serve(settings: AgentSettings) -> None:
    """Run one agent until SIGTERM or SIGINT."""
    clock, registry = SystemClock(), CollectorRegistry()
    devices = find_devices(settings)
    async with connect(settings.kube) as api:
        agent = build(settings, api, clock, devices)
        registry.register(AgentCollector(agent))
        metrics.build_info(registry, "agent", version("carpool"))
        server = await metrics.serve(registry, settings.metrics_port, readiness=agent.unready)
        structlog.get_logger().info(
            "agent started", gpus=len(devices.uuids), simulated=devices.simulated, metrics_port=server.port
        )
        gc.collect()
        gc.freeze()  # what is there stays for good: looking through it again and again costs more than the GPUs
        running = asyncio.ensure_future(agent.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            structlog.get_logger().info("agent stopped")
        finally:
            await server.close()


@click.command(short_help="Run the node agent, which looks after a node's GPUs.")
@click_options(AgentSettings)
def agent(settings: AgentSettings) -> None:
    """Run the node agent: GPUs, their partitions, the kubelet's device plugin, metrics."""
    logs.configure(settings.log, "agent")
    try:
        asyncio.run(serve(settings))
    except (NoDevicesError, KubeConfigError, SettingsError) as e:
        raise MisconfiguredError(str(e)) from e
