"""The process that plays the kubelets of nodes that have none and runs their agents. Started by `fleet.start`."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog
from carpool_core.clock import SystemClock
from carpool_core.kube.api import LEASES, NODES, KubeApi
from carpool_core.kube.client import connect
from carpool_core.kube.errors import KubeError
from carpool_core.logs import configure
from carpool_core.settings import KubeSettings, LogSettings, load
from carpool_deviceplugin import app
from carpool_deviceplugin.settings import AgentSettings

from carpool_e2e.fleet import HEARTBEAT_S, FleetNode, FleetPlan, lease_patch, node_status


async def beat(api: KubeApi, node: FleetNode) -> None:
    """Report a node as ready, until cancelled."""
    log = structlog.get_logger().bind(node=node.name)
    while True:
        now = datetime.now(UTC)
        try:
            await api.patch(LEASES, node.name, lease_patch(node, now), namespace="kube-node-lease")
        except KubeError as error:
            log.warning("heartbeat missed", error=str(error))
        await asyncio.sleep(HEARTBEAT_S)


async def run_agents(environments: Sequence[Mapping[str, str]]) -> None:
    """Run the agents, each with the token of its own node."""
    clock = SystemClock()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for environment in environments:
            settings = load(AgentSettings, environment)
            api = await stack.enter_async_context(connect(settings.kube))
            tasks.create_task(app.build(settings, api, clock).run())


async def main(plan: FleetPlan, report_ready: Callable[[], None]) -> None:
    """Start the nodes, report that they are ready, and keep them running."""
    async with connect(KubeSettings(kubeconfig=os.environ["KUBECONFIG"])) as api, asyncio.TaskGroup() as tasks:
        for node in plan.nodes:
            await api.patch(NODES, node.name, node_status(node, datetime.now(UTC)), subresource="status")
            await api.create(LEASES, lease_patch(node, datetime.now(UTC)), namespace="kube-node-lease")
            tasks.create_task(beat(api, node))
        tasks.create_task(run_agents(list(plan.agents.values())))
        report_ready()


if __name__ == "__main__":
    configure(LogSettings(), "fleet")
    asyncio.run(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=FleetPlan), Path(sys.argv[2]).touch))
