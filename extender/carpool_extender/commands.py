"""`carpool extender`."""

import asyncio
import gc

import click
import uvloop
from carpool_core import logs, metrics
from carpool_core.clock import SystemClock
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.settings import MisconfiguredError, SettingsError, click_options

from carpool_extender.app import build
from carpool_extender.framework.scores import UnknownPolicyError
from carpool_extender.informers import Informers
from carpool_extender.server import create_server
from carpool_extender.settings import ExtenderSettings

GC_THRESHOLDS = (700, 2, 1000)
"""Thresholds of the garbage collector after the first lists. Its default second one, 10, makes pauses of 7 ms."""


@click.command()
@click_options(ExtenderSettings)
def extender(settings: ExtenderSettings) -> None:
    """Run the scheduler extender beside kube-scheduler."""
    logs.configure(settings.log, "extender")
    try:
        uvloop.run(run(settings))
    except (SettingsError, UnknownPolicyError, KubeConfigError) as error:
        raise MisconfiguredError(str(error)) from error


async def run(settings: ExtenderSettings) -> None:
    """Serve until a signal stops the server, or a watch fails permanently."""
    clock = SystemClock()
    async with connect(settings.kube, clock=clock) as api:
        parts = build(settings, api, clock)
        api.metrics = metrics.ApiMetrics(parts.registry)
        server = create_server(parts.app(), settings, parts.certificates)
        scraped = await metrics.serve(parts.registry, settings.metrics_port, readiness=parts.not_ready)
        try:
            await server.serve_beside(parts.run(), parts.certificates.run(), _freeze_listed(parts.informers))
        finally:
            await scraped.close()


async def _freeze_listed(informers: Informers) -> None:
    """Exclude the listed objects from garbage collection: scanning them, most of the heap, takes seconds."""
    await informers.wait_synced()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    await asyncio.Event().wait()
