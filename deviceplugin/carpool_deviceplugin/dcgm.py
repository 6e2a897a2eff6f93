"""Counters that DCGM measures: from dcgm-exporter's page, or from DCGM's host engine through its library."""

import ctypes
import http.client
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char, c_char_p, c_double, c_int, c_int64, c_longlong, c_uint, c_ushort, sizeof
from typing import Protocol
from urllib.parse import urlsplit

import structlog
from carpool_core.values import GpuUuid
from prometheus_client.parser import text_string_to_metric_families

from carpool_deviceplugin.gpu import Counters

Place = tuple[GpuUuid, int | None]
"""A GPU, or the MIG instance of it with this GPU instance ID."""
Values = Mapping[Place, Mapping[str, float]]
"""Values by place and DCGM's field name, in DCGM's units."""

_MAX_AGE_S = 60.0
"""Older answers are not used. By default dcgm-exporter reads its GPUs every 30 s."""
_RETRY_S = 60.0
"""A source that failed is not asked again for this time; it may not run on this node at all."""


class SourceError(Exception):
    """A source gave no answer; `str()` states what was expected and what was found."""


class CounterSource(Protocol):
    """Another program on the node that measures its GPUs."""

    @property
    def name(self) -> str:
        """Name in metrics and messages, such as `dcgm-exporter`."""
        ...

    @property
    def is_scraped(self) -> bool:
        """Whether it exports its values to Prometheus itself."""
        ...

    def values(self) -> Values:
        """Return the latest values; raises SourceError. May block."""
        ...


class CounterFeed:
    """The latest answers of all sources, merged per field: a field comes from the first source that has it."""

    def __init__(self, sources: Sequence[CounterSource], monotonic: Callable[[], float]) -> None:
        self._sources, self._monotonic = sources, monotonic
        self._failed_at: dict[str, float] = {}
        self._answers: dict[str, tuple[float, Values]] = {}
        """Time and values of each source's last answer."""
        self.is_refreshed = not sources
        """Whether every source was asked."""
        self._log = structlog.get_logger()

    def refresh(self) -> None:
        """Ask the sources. One that fails is skipped for a minute, and logged once."""
        for source in self._sources:
            now = self._monotonic()
            if now - self._failed_at.get(source.name, -math.inf) < _RETRY_S:
                continue
            try:
                self._answers[source.name] = now, source.values()
            except SourceError as e:
                self._answers.pop(source.name, None)
                if source.name not in self._failed_at:
                    self._log.info("metrics source not used", source=source.name, reason=str(e))
                self._failed_at[source.name] = now
                continue
            if self._failed_at.pop(source.name, None) is not None:
                self._log.info("metrics source used again", source=source.name)
        self.is_refreshed = True

    def at(self, uuid: GpuUuid, instance: int | None = None) -> Counters:
        """Return the counters of a GPU or MIG instance; empty without a recent answer."""
        merged = Counters()
        for source in self._sources:
            at, values = self._answers.get(source.name, (-math.inf, {}))
            if self._monotonic() - at <= _MAX_AGE_S and (found := values.get((uuid, instance))):
                used = {name: value for name, value in found.items() if name in FIELD_NAMES}
                exported = frozenset(found) if source.is_scraped else frozenset[str]()
                merged = merged.completed_by(Counters(used, dict.fromkeys(used, source.name), exported))
        return merged


FIELDS: Mapping[int, str] = {
    100: "DCGM_FI_DEV_SM_CLOCK",
    101: "DCGM_FI_DEV_MEM_CLOCK",
    150: "DCGM_FI_DEV_GPU_TEMP",
    155: "DCGM_FI_DEV_POWER_USAGE",
    203: "DCGM_FI_DEV_GPU_UTIL",
    204: "DCGM_FI_DEV_MEM_COPY_UTIL",
    230: "DCGM_FI_DEV_XID_ERRORS",
    251: "DCGM_FI_DEV_FB_FREE",
    252: "DCGM_FI_DEV_FB_USED",
    393: "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    394: "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
    395: "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    1001: "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    1002: "DCGM_FI_PROF_SM_ACTIVE",
    1003: "DCGM_FI_PROF_SM_OCCUPANCY",
    1004: "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    1005: "DCGM_FI_PROF_DRAM_ACTIVE",
}
"""DCGM's field IDs (dcgm_fields.h). Energy comes from NVML only, because the energy of pods must add up to it."""
FIELD_NAMES = frozenset(FIELDS.values())

_TIMEOUT_S = 2.0
_MAX_PAGE = 4 << 20
"""Bytes. Sixteen GPUs with seven MIG instances and all fields need a tenth of this."""
_PREFIX = "DCGM_FI_"


class Exporter:
    """dcgm-exporter, by the URL of its metrics on this node."""

    name = "dcgm-exporter"
    is_scraped = True

    def __init__(self, url: str) -> None:
        self._url = url

    def values(self) -> Values:
        """Read the page; raises SourceError."""
        try:
            if urlsplit(self._url).scheme not in ("http", "https"):
                raise SourceError(f"CARPOOL_DCGM_EXPORTER: expected http://HOST:PORT/metrics, found {self._url!r}")
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # checked above
                page = answer.read(_MAX_PAGE + 1)
        except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as e:
            raise SourceError(f"{self._url}: expected dcgm-exporter's metrics, found {e}") from e
        if len(page) > _MAX_PAGE:
            raise SourceError(f"{self._url}: expected at most {_MAX_PAGE:,} bytes, found more")
        return parse(page.decode(errors="replace"), self._url)


def parse(page: str, url: str) -> Values:
    """Parse a page in Prometheus' text format; raises SourceError if it contains no GPU."""
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


# Types and values of DCGM's C API: dcgm_structs.h, dcgm_fields.h.
LIBRARIES = ("libdcgm.so.4", "libdcgm.so.3")
_GPU, _GPU_INSTANCE = 1, 4
_ALL_GPUS, _ALL_INSTANCES = 0x7FFFFFFF, 0x7FFFFFFD
_UUID_FIELD = 54
_LIVE_DATA = 1
"""Flag: measure now, although the field was not watched yet."""
_MAX_GPUS, _MAX_INSTANCES = 32, 448
_BLANK_INT32, _BLANK_INT64, _BLANK_FLOAT = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 140737488355328.0
"""These values and larger ones mean that there is no value."""
_INTEGER, _DOUBLE, _STRING = ord("i"), ord("d"), ord("s")
_EVERY_US, _KEEP_S, _CONNECT_TIMEOUT_MS = 1_000_000, 30.0, 2000


class _Entity(ctypes.Structure):
    _fields_ = (("kind", c_uint), ("number", c_uint))


class _Value(ctypes.Union):
    _fields_ = (("i64", c_int64), ("dbl", c_double), ("str", c_char * 256), ("blob", c_char * 4096))


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("version", c_uint),
        ("kind", c_uint),
        ("number", c_uint),
        ("field", c_ushort),
        ("type", c_ushort),
        ("status", c_int),
        ("unused", c_uint),
        ("ts", c_int64),
        ("value", _Value),
    )


class _Connect(ctypes.Structure):
    _fields_ = (("version", c_uint), ("persist", c_uint), ("timeout_ms", c_uint), ("is_unix", c_uint))


class _Instance(ctypes.Structure):
    _fields_ = (
        ("entity", _Entity),
        ("parent", _Entity),
        ("gpu_uuid", c_char * 128),
        ("gpu_index", c_uint),
        ("instance", c_uint),
        ("compute_instance", c_uint),
        ("profile", c_uint),
        ("slices", c_uint),
    )


class _Hierarchy(ctypes.Structure):
    _fields_ = (("version", c_uint), ("count", c_uint), ("instances", _Instance * _MAX_INSTANCES))


def _version(type_: type[ctypes.Structure], number: int) -> int:
    return sizeof(type_) | number << 24


_Key = tuple[int, int]
"""Kind and number of a GPU or MIG instance in DCGM."""


class HostEngine:
    """DCGM's host engine at HOST:PORT or unix:///PATH. Each read after a failure connects again.

    The first of the libraries that can be loaded is used.
    """

    name = "dcgm"
    is_scraped = False

    def __init__(self, address: str, libraries: Sequence[str] = LIBRARIES) -> None:
        self._address, self._names = address, libraries
        self._library: ctypes.CDLL | None = None
        self._handle = c_longlong(0)
        self._gpus: dict[_Key, GpuUuid] = {}

    def values(self) -> Values:
        """Return the latest values of all GPUs and MIG instances; raises SourceError."""
        try:
            if not self._gpus:
                self._connect()
            places: dict[_Key, Place] = {key: (uuid, None) for key, uuid in self._gpus.items()}
            found = self._latest([*places, *self._instances(places)], [*FIELDS])
        except SourceError:
            self._disconnect()
            raise
        values: dict[Place, dict[str, float]] = {}
        for (key, field), value in found.items():
            if isinstance(value, float) and math.isfinite(value):
                values.setdefault(places[key], {})[FIELDS[field]] = value
        return values

    def _connect(self) -> None:
        if self._library is None:
            self._library = _load(self._names)
            self._call("dcgmInit")
        is_unix = self._address.startswith("unix://")
        params = _Connect(_version(_Connect, 2), 0, _CONNECT_TIMEOUT_MS, int(is_unix))
        address = c_char_p(self._address.removeprefix("unix://").encode())
        self._call("dcgmConnect_v2", address, byref(params), byref(self._handle))
        self._watch([*FIELDS, _UUID_FIELD])
        numbers, count = (c_uint * _MAX_GPUS)(), c_int(0)
        self._call("dcgmGetAllSupportedDevices", self._handle, numbers, byref(count))
        names = self._latest([(_GPU, numbers[i]) for i in range(count.value)], [_UUID_FIELD])
        self._gpus = {key: GpuUuid(str(name)) for (key, _), name in names.items()}
        if not self._gpus:
            raise SourceError(f"{self._address}: expected a host engine with GPUs, found none")

    def _disconnect(self) -> None:
        self._gpus = {}
        if self._library is not None and self._handle.value:
            self._library.dcgmDisconnect(self._handle)
            self._handle = c_longlong(0)

    def _instances(self, places: dict[_Key, Place]) -> list[_Key]:
        """Return the MIG instances, and add their places."""
        found = _Hierarchy(version=_version(_Hierarchy, 2))
        self._call("dcgmGetGpuInstanceHierarchy", self._handle, byref(found))
        instances = {
            (_GPU_INSTANCE, one.entity.number): (GpuUuid(one.gpu_uuid.decode()), one.instance)
            for one in found.instances[: found.count]
            if one.entity.kind == _GPU_INSTANCE
        }
        places.update(instances)
        return [*instances]

    def _watch(self, fields: Sequence[int]) -> None:
        """Let DCGM measure these fields on all GPUs and MIG instances."""
        group, name = c_longlong(0), f"carpool-{os.getpid()}"  # DCGM accepts each name once
        ids = (c_ushort * len(fields))(*fields)
        self._call("dcgmFieldGroupCreate", self._handle, c_int(len(fields)), ids, c_char_p(name.encode()), byref(group))
        for entities in (_ALL_GPUS, _ALL_INSTANCES):
            every, keep = c_longlong(_EVERY_US), c_double(_KEEP_S)
            self._call("dcgmWatchFields", self._handle, c_longlong(entities), group, every, keep, c_int(0))

    def _latest(self, keys: Sequence[_Key], fields: Sequence[int]) -> dict[tuple[_Key, int], float | str]:
        """Return the latest values; those that DCGM does not have are absent."""
        entities = (_Entity * len(keys))(*(_Entity(*key) for key in keys))
        values = (_FieldValue * (len(keys) * len(fields)))()
        for value in values:
            value.version = _version(_FieldValue, 2)
        self._call(
            "dcgmEntitiesGetLatestValues",
            self._handle,
            entities,
            c_uint(len(keys)),
            (c_ushort * len(fields))(*fields),
            c_uint(len(fields)),
            c_uint(_LIVE_DATA if len(fields) == 1 else 0),
            values,
        )
        found = {((v.kind, v.number), v.field): _read(v) for v in values if v.status == 0}
        return {key: value for key, value in found.items() if value is not None}

    def _call(self, name: str, *args: object) -> None:
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError:
            raise SourceError(f"{name}: expected it in DCGM's library, found none; update DCGM") from None
        if code := function(*args):
            text = self._library.errorString  # type: ignore[union-attr]  # the call above found the library
            text.argtypes, text.restype = (c_int,), c_char_p
            raise SourceError(f"{name} failed: {(text(code) or b'').decode()} ({code})")


def _load(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise SourceError(f"expected {' or '.join(names)}, found neither; install datacenter-gpu-manager or mount it")


def _read(value: _FieldValue) -> float | str | None:
    kind = value.type & 0xFF
    if kind == _INTEGER:
        number = value.value.i64
        return None if number >= _BLANK_INT64 or number == _BLANK_INT32 else float(number)
    if kind == _DOUBLE:
        return None if value.value.dbl >= _BLANK_FLOAT else float(value.value.dbl)
    return bytes(value.value.str).decode(errors="replace") if kind == _STRING else None
