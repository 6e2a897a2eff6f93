"""`carpool operator`: the process, with its API client and metrics server."""

import asyncio
import gc
import signal
from collections.abc import Sequence

import click
import structlog
import uvloop
from carpool_core import logs
from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import KubeError, NotFound
from carpool_core.metrics import serve as serve_metrics
from carpool_core.settings import MisconfiguredError, SettingsError, click_options
from carpool_predictor.tracing.source import SubprocessTracer

from carpool_operator.app import Operator
from carpool_operator.settings import OperatorSettings

_GC_THRESHOLDS = (10_000, 10, 100)
"""With Python's defaults the collector scans all jobs and pods so often that it takes a seventh of the CPU time."""


class NotInstalledError(Exception):
    """The cluster lacks Carpool's CRDs."""


async def check_installed(api: KubeApi, namespaces: Sequence[str]) -> None:
    """Check that the cluster has our CRDs.

    Args:
        api: The cluster.
        namespaces: Namespaces in which jobs may be read; all if empty.

    Raises:
        NotInstalledError: A CRD is missing.
    """
    for kind in (GPU_TRAINING_JOBS, GPU_NODES):
        try:
            where = namespaces[0] if kind.namespaced and namespaces else ""
            await api.list_page(kind, Selector(namespace=where), limit=1)
        except NotFound as error:
            raise NotInstalledError(
                f"the cluster has no resource {kind.plural}.{kind.group}: install the chart, or apply its crds/ folder"
            ) from error


async def serve(settings: OperatorSettings) -> None:
    """Run until SIGTERM, SIGINT or a permanent failure."""
    clock, log = SystemClock(), structlog.get_logger()
    async with connect(settings.kube) as api:
        await check_installed(api, settings.namespace_list)
        operator = Operator(settings, api, clock, SubprocessTracer(settings.trace_limits))
        server = await serve_metrics(
            operator.metrics.registry, settings.metrics_port, settings.metrics_host, operator.unready
        )
        log.info("serving metrics", port=server.port)
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        running = asyncio.ensure_future(operator.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            log.info("operator stopped")
        finally:
            await operator.close()
            await server.close()


@click.command(short_help="Run the operator, which carries jobs from admission to their end.")
@click_options(OperatorSettings)
def operator(settings: OperatorSettings) -> None:
    """Run the operator: it predicts GpuTrainingJobs, creates and follows their pods, and writes their status."""
    logs.configure(settings.log, "operator")
    try:
        uvloop.run(serve(settings))
    except (KubeConfigError, SettingsError) as error:
        raise MisconfiguredError(str(error)) from error
    except (NotInstalledError, KubeError) as error:
        raise click.ClickException(str(error)) from error
