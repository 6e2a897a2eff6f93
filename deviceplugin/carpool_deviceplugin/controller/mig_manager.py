"""Whether somebody else divides the node's GPUs: NVIDIA's MIG manager goes by a label of the Node."""

import msgspec
import structlog
from carpool_core.kube.api import NODES, KubeApi
from carpool_core.kube.errors import KubeError
from carpool_core.resources.meta import ObjectMeta
from carpool_core.values import NodeName

from carpool_deviceplugin.devices.port import Devices

LABEL = "nvidia.com/mig.config"
_UNKNOWN = "the Node's labels could not be read yet"


class _Labelled(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


class MigManager:
    """Tells the GPUs who else divides them. Until the label was read, the agent divides none.

    Args:
        node: Name of the Node.
        api: The API server.
        devices: The node's GPUs; simulated ones are not divided, so nobody is asked.
    """

    def __init__(self, node: NodeName, api: KubeApi, devices: Devices) -> None:
        self._node, self._api, self._devices = node, api, devices
        self._known = _UNKNOWN
        self._log = structlog.get_logger().bind(node=node)
        if not devices.simulated:
            devices.set_mig_manager(_UNKNOWN)

    async def confirm(self) -> bool:
        """Read the label; return whether it says something else than before. What cannot be read stays as it was."""
        if self._devices.simulated:
            return False
        try:
            found = await self._api.get(NODES, self._node, _Labelled)
        except KubeError as e:
            self._log.info("node not read", error=str(e))
            return False
        value = found.metadata.labels.get(LABEL, "")
        before = self._known
        self._known = f"the Node's label {LABEL} is {value}" if value else ""
        self._devices.set_mig_manager(self._known)
        return self._known != before
