"""`carpool operator`: the process, with its API client and metrics server."""

import asyncio
import gc
import signal
from collections.abc import Sequence
from socket import gethostname
from uuid import uuid4

import click
import structlog
import uvloop
from carpool_core import logs
from carpool_core.clock import Clock, SystemClock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import KubeError, NotFound
from carpool_core.kube.leader import LeaderElector, LeadershipLostError
from carpool_core.metrics import ApiMetrics
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


def elector_of(settings: OperatorSettings, api: KubeApi, clock: Clock) -> LeaderElector | None:
    """Return the elector of this process; None if it is the only operator.

    Raises:
        SettingsError: The Lease is not NAMESPACE/NAME.
    """
    if not settings.lease:
        return None
    namespace, _, name = settings.lease.partition("/")
    if not namespace or not name or "/" in name:
        raise SettingsError(f"CARPOOL_OPERATOR_LEASE: expected NAMESPACE/NAME, found {settings.lease}")
    # Pods that use their node's network have its name, so the name alone may be that of two processes.
    identity = settings.identity or f"{gethostname()}_{uuid4()}"
    return LeaderElector(api, clock, namespace=namespace, name=name, identity=identity)


class ElectedOperator:
    """Runs the operator while this process leads. Losing the Lease ends the process, so that nothing of it goes on."""

    def __init__(self, operator: Operator, elector: LeaderElector | None) -> None:
        self._operator, self._elector = operator, elector
        self._leads = elector is None

    def unready(self) -> str | None:
        """Return why the operator does not reconcile yet. A standby is ready, so that a rollout goes on."""
        return self._operator.unready() if self._leads else None

    async def run(self) -> None:
        """Run until cancelled. Raises LeadershipLostError."""
        if self._elector is None:
            await self._operator.run()
            return
        await self._elector.acquire()
        self._leads = True
        tasks = {asyncio.create_task(self._operator.run()), asyncio.create_task(self._elector.renew())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            lost = [error for error in ended if isinstance(error, LeadershipLostError)]
            if not lost:
                await self._elector.release()
        for error in lost or ended:
            if isinstance(error, BaseException):
                raise error


async def serve(settings: OperatorSettings) -> None:
    """Run until SIGTERM, SIGINT or a permanent failure."""
    clock, log = SystemClock(), structlog.get_logger()
    async with connect(settings.kube) as api:
        await check_installed(api, settings.namespace_list)
        operator = Operator(settings, api, clock, SubprocessTracer(settings.trace_limits))
        api.metrics = ApiMetrics(operator.metrics.registry)
        elected = ElectedOperator(operator, elector_of(settings, api, clock))
        server = await serve_metrics(
            operator.metrics.registry, settings.metrics_port, settings.metrics_host, elected.unready
        )
        log.info("serving metrics", port=server.port)
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        running = asyncio.create_task(elected.run())
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
    except (NotInstalledError, LeadershipLostError, KubeError) as error:
        raise click.ClickException(str(error)) from error
