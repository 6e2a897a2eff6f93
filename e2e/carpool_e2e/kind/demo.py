"""The six scenes on a cluster of kind."""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool_core.kube.client import connect
from carpool_core.settings import KubeSettings
from rich.console import Console

from carpool_e2e.demo.show import play
from carpool_e2e.demo.stage import Stage
from carpool_e2e.kind.cluster import running
from carpool_e2e.kind.commands import Commands
from carpool_e2e.kind.render import Plan, below


@dataclass(frozen=True)
class KindStage(Stage):
    """A stage whose nodes have this machine's Python under a prefix."""

    def apply(self, *manifests: Mapping[str, Any], is_refused: bool = False) -> str:
        """Write manifests into files and apply them, with their directories as the workers have them."""
        return super().apply(*(below(manifest) for manifest in manifests), is_refused=is_refused)


def demo(commands: Commands, plan: Plan, console: Console, out: Path, *, keep: bool) -> None:
    """Bring up a cluster of kind and play the scenes. None needs the nodes without a kubelet: they are left out.

    Raises:
        HarnessError: The cluster does not come up.
        SceneError: Something did not go as it should.
    """
    out.mkdir(parents=True, exist_ok=True)
    with running(commands, plan, console) as cluster:
        cluster.kept = keep
        try:
            asyncio.run(_on_stage(plan, console, out))
        finally:
            if keep:
                console.print(how_to_reach(plan), highlight=False, soft_wrap=True)


def how_to_reach(plan: Plan) -> str:
    """Return what to type to use a cluster that was kept."""
    return (
        f"The cluster {plan.name} stays up until `make demo-clean` or the next `make demo`. To use it:\n"
        f"  export KUBECONFIG={plan.kubeconfig}"
    )


async def _on_stage(plan: Plan, console: Console, out: Path) -> None:
    async with connect(KubeSettings(kubeconfig=str(plan.kubeconfig))) as api:
        await play(KindStage(api, Path(shutil.which("kubectl") or "kubectl"), plan.kubeconfig, console, out))
