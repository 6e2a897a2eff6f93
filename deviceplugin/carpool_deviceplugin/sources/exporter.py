"""NVIDIA's dcgm-exporter, where it runs on the node: its page is read, and nothing of it is shown a second time."""

import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from carpool_core.values import GpuUuid
from prometheus_client.parser import text_string_to_metric_families

from carpool_deviceplugin.sources.feed import Counters, Place, SourceError

_WITHIN_S = 2.0
_LARGEST = 4 << 20
"""Sixteen GPUs with seven instances and all fields are a tenth of this."""
_PREFIX = "DCGM_FI_"


class Exporter:
    """Reads one page.

    Args:
        url: Of its metrics on this node.
    """

    name = "dcgm-exporter"
    is_public = True

    def __init__(self, url: str) -> None:
        self._url = url

    def values(self) -> Mapping[Place, Counters]:
        """Read the page; raises SourceError."""
        try:
            if urlsplit(self._url).scheme not in ("http", "https"):
                raise SourceError(f"CARPOOL_DCGM_EXPORTER: expected http://HOST:PORT/metrics, found {self._url!r}")
            with urllib.request.urlopen(self._url, timeout=_WITHIN_S) as answer:  # noqa: S310  # checked above
                page = answer.read(_LARGEST + 1)
        except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as e:
            raise SourceError(f"{self._url}: expected dcgm-exporter's metrics, found {e}") from e
        if len(page) > _LARGEST:
            raise SourceError(f"{self._url}: expected at most {_LARGEST:,} bytes, found more")
        return parse(page.decode(errors="replace"), self._url)


def parse(page: str, url: str) -> dict[Place, dict[str, float]]:
    """Read a page in Prometheus' text format; raises SourceError where it says nothing of any GPU."""
    found: dict[Place, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples if family.name.startswith(_PREFIX) else ():
                uuid, instance = sample.labels.get("UUID", ""), sample.labels.get("GPU_I_ID", "")
                if uuid.startswith("GPU-") and math.isfinite(sample.value):
                    place = (GpuUuid(uuid), int(instance) if instance.isdecimal() else None)
                    found.setdefault(place, {})[sample.name] = sample.value
    except (ValueError, KeyError, IndexError) as e:
        raise SourceError(f"{url}: expected Prometheus' text format, found {e}") from e
    if not found:
        raise SourceError(f"{url}: expected metrics {_PREFIX}… with a UUID, found none; is it dcgm-exporter?")
    return found
