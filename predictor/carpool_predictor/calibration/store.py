"""Keeps the calibration in a ConfigMap, with optimistic concurrency by its resourceVersion."""

from dataclasses import dataclass, field

import msgspec
from carpool_core.kube.api import CONFIG_MAPS, KubeApi
from carpool_core.kube.errors import NotFound
from carpool_core.resources.meta import ObjectMeta
from carpool_core.settings import SettingsError

from carpool_predictor.calibration.document import Calibration, read_calibration, write_calibration
from carpool_predictor.features import MalformedError

KEY = "calibration.json"


class _ConfigMap(msgspec.Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    data: dict[str, str] = {}


_EXPECTED = "CARPOOL_CALIBRATION: expected NAMESPACE/NAME of a ConfigMap, or nothing"


def parse_config_map_name(text: str, expected: str = _EXPECTED) -> tuple[str, str] | None:
    """Return namespace and name from `NAMESPACE/NAME`, or None for an empty text.

    Another form raises SettingsError, whose message begins with `expected`.
    """
    if not text:
        return None
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise SettingsError(f"{expected}, found {text!r}")
    return namespace, name


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """The calibration and the version of its ConfigMap."""

    calibration: Calibration = field(default_factory=Calibration)
    version: str = ""
    """Its resourceVersion; empty if the ConfigMap does not exist yet."""
    uid: str = ""


class UnreadableCalibrationError(Exception):
    """The ConfigMap does not hold a calibration of this version; the message says what to do."""

    def __init__(self, message: str, uid: str) -> None:
        super().__init__(message)
        self.uid = uid


class CalibrationStore:
    """Reads and writes the calibration in one ConfigMap."""

    def __init__(self, api: KubeApi, namespace: str, name: str) -> None:
        self._api, self.namespace, self.name = api, namespace, name

    async def read(self) -> StoredCalibration:
        """Return the stored calibration; an empty one if the ConfigMap or its key does not exist.

        Raises:
            UnreadableCalibrationError: The content is truncated, changed, or of another version.
            KubeError: It cannot be read.
        """
        try:
            found = await self._api.get(CONFIG_MAPS, self.name, _ConfigMap, namespace=self.namespace)
        except NotFound:
            return StoredCalibration()
        text = found.data.get(KEY)
        if text is None:
            return StoredCalibration(version=found.metadata.resource_version, uid=found.metadata.uid)
        try:
            calibration = read_calibration(text.encode())
        except MalformedError as error:
            raise UnreadableCalibrationError(
                f"ConfigMap {self.namespace}/{self.name}: {error}; repair or remove {KEY} in it; until then no job "
                "is learned from, and predictions are uncalibrated",
                found.metadata.uid,
            ) from error
        return StoredCalibration(calibration, found.metadata.resource_version, found.metadata.uid)

    async def write(self, kept: StoredCalibration, calibration: Calibration) -> StoredCalibration:
        """Replace the calibration that was read.

        Raises:
            Conflict: The ConfigMap changed since it was read.
            NotFound: The ConfigMap is gone.
            KubeError: It cannot be written, or the outcome is unknown.
        """
        metadata: dict[str, object] = {"name": self.name, "labels": {"app.kubernetes.io/managed-by": "carpool"}}
        data = {KEY: write_calibration(calibration).decode()}
        if not kept.version:
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            written = await self._api.create(CONFIG_MAPS, body, namespace=self.namespace)
        else:
            patch = {"metadata": {"resourceVersion": kept.version}, "data": data}
            written = await self._api.patch(CONFIG_MAPS, self.name, patch, namespace=self.namespace)
        found = msgspec.convert(written, _ConfigMap)
        return StoredCalibration(calibration, found.metadata.resource_version, found.metadata.uid)
