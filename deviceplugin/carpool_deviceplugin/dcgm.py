"""The first source that answers, asked anew each time; what it said counts for a while only."""

import ctypes
import http.client
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char, c_char_p, c_double, c_int, c_int64, c_longlong, c_uint, c_ushort, sizeof
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import structlog
from carpool_core.values import GpuUuid
from prometheus_client.parser import text_string_to_metric_families

Place = tuple[GpuUuid, int | None]
"""A GPU, or a MIG instance of it by NVML's ID."""
Counters = Mapping[str, float]
"""Values by DCGM's field names, in DCGM's units."""

_GOOD_FOR_S = 60.0
"""dcgm-exporter reads its GPUs each 30 s, unless it is told otherwise."""
_TRY_AGAIN_S = 60.0
"""A source that failed is left alone for so long: it may not run on this node at all."""


class SourceError(Exception):
    """A source gave no answer; `str()` says what was expected and what was found."""


class CounterSource(Protocol):
    """Somebody else on the node who measures its GPUs."""

    @property
    def name(self) -> str:
        """Such as `dcgm-exporter`."""
        ...

    @property
    def is_scraped(self) -> bool:
        """Whether it shows its values to Prometheus itself, so that nobody else must."""
        ...

    def values(self) -> Mapping[Place, Counters]:
        """Return what it says now; raises SourceError. May block."""
        ...


class CounterFeed:
    """What the first source that answers said at last.

    Args:
        sources: The best one first.
        monotonic: Seconds.
    """

    def __init__(self, sources: Sequence[CounterSource], monotonic: Callable[[], float]) -> None:
        self._sources, self._monotonic = sources, monotonic
        self._failed_at: dict[str, float] = {}
        self._said: tuple[float, CounterSource, Mapping[Place, Counters]] | None = None
        self._log = structlog.get_logger()

    def refresh(self) -> None:
        """Ask again; a source that fails is passed over, and said once."""
        for source in self._sources:
            now = self._monotonic()
            if now - self._failed_at.get(source.name, float("-inf")) < _TRY_AGAIN_S:
                continue
            try:
                values = source.values()
            except SourceError as e:
                if source.name not in self._failed_at:
                    self._log.info("metrics source not used", source=source.name, reason=str(e))
                self._failed_at[source.name] = now
                continue
            if self._failed_at.pop(source.name, None) is not None:
                self._log.info("metrics source used again", source=source.name)
            self._said = (now, source, values)
            return
        self._said = None

    def at(self, uuid: GpuUuid, instance: int | None = None) -> tuple[CounterSource, Counters] | None:
        """Return what is known of a GPU or MIG instance, and from whom; None where nobody said anything lately."""
        said = self._said
        if said is None or self._monotonic() - said[0] > _GOOD_FOR_S:
            return None
        counters = said[2].get((uuid, instance))
        return None if not counters else (said[1], counters)


GPU, INSTANCE = 1, 4
"""DCGM's kinds of entities."""
UUID_FIELD = 54
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
"""DCGM's field IDs (dcgm_fields.h). Without energy: that of pods adds up to NVML's counter."""
_EVERY_S = 1.0


class DcgmError(SourceError):
    """A call of DCGM failed."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A GPU or a MIG instance, as DCGM numbers them."""

    kind: int
    number: int


@dataclass(frozen=True, slots=True)
class EngineInstance:
    """A MIG instance as DCGM knows it."""

    entity: Entity
    gpu_uuid: str
    instance_id: int
    """NVML's GPU instance ID."""


class DcgmLibrary(Protocol):
    """The calls of libdcgm that are used. All raise DcgmError."""

    def connect(self, address: str) -> None:
        """Connect to a host engine: HOST:PORT, or unix:///PATH."""
        ...

    def disconnect(self) -> None:
        """End the connection, and with it the watches; errors are of no interest."""
        ...

    def gpus(self) -> Sequence[Entity]:
        """List the GPUs."""
        ...

    def instances(self) -> Sequence[EngineInstance]:
        """List the MIG instances."""
        ...

    def watch(self, fields: Sequence[int], every_s: float) -> None:
        """Let these fields be measured on all GPUs and MIG instances."""
        ...

    def latest(self, entities: Sequence[Entity], fields: Sequence[int]) -> Mapping[tuple[Entity, int], float | str]:
        """Return the latest values; what is not known is absent."""
        ...


class HostEngine:
    """One connection to the host engine, opened anew where it was lost.

    Args:
        library: DCGM's.
        address: HOST:PORT, or unix:///PATH.
    """

    name = "dcgm"
    is_scraped = False

    def __init__(self, library: DcgmLibrary, address: str) -> None:
        self._library, self._address = library, address
        self._uuids: dict[Entity, GpuUuid] = {}

    def values(self) -> Mapping[Place, Counters]:
        """Return the latest values of all GPUs and MIG instances; raises SourceError."""
        try:
            if not self._uuids:
                self._begin()
            places: dict[Entity, Place] = {entity: (uuid, None) for entity, uuid in self._uuids.items()}
            for found in self._library.instances():
                places[found.entity] = (GpuUuid(found.gpu_uuid), found.instance_id)
            latest = self._library.latest([*places], [*FIELDS])
        except DcgmError:
            self._uuids = {}
            self._library.disconnect()
            raise
        values: dict[Place, dict[str, float]] = {}
        for (entity, field), value in latest.items():
            if isinstance(value, float | int) and math.isfinite(value):
                values.setdefault(places[entity], {})[FIELDS[field]] = float(value)
        return values

    def _begin(self) -> None:
        self._library.connect(self._address)
        self._library.watch([*FIELDS, UUID_FIELD], _EVERY_S)
        gpus = self._library.gpus()
        names = self._library.latest(gpus, [UUID_FIELD])
        self._uuids = {gpu: GpuUuid(str(names[gpu, UUID_FIELD])) for gpu in gpus if (gpu, UUID_FIELD) in names}
        if not self._uuids:
            raise DcgmError(f"{self._address}: expected a host engine with GPUs, found none")


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
    is_scraped = True

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


LIBRARIES = ("libdcgm.so.4", "libdcgm.so.3")
_ALL_GPUS, _ALL_INSTANCES = 0x7FFFFFFF, 0x7FFFFFFD
_LIVE = 1
"""Flag: read it now, though nobody watched it yet."""
_MOST_GPUS = 32
_MOST_PARTS = 448
_BLANK_INT, _BLANK_FLOAT = 0x7FFFFFFFFFFFFFF0, 140737488355328.0
"""Values from these up mean that there is none."""
_INT, _FLOAT, _TEXT = ord("i"), ord("d"), ord("s")
_KEEP_S = 30.0
_NAME = "carpool-{pid}"
"""A field group's name; the host engine knows each once, and another process of ours may be its client, too."""


class _Pair(ctypes.Structure):
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


class _Part(ctypes.Structure):
    _fields_ = (
        ("entity", _Pair),
        ("parent", _Pair),
        ("gpu_uuid", c_char * 128),
        ("gpu_index", c_uint),
        ("instance", c_uint),
        ("compute_instance", c_uint),
        ("profile", c_uint),
        ("slices", c_uint),
    )


class _Hierarchy(ctypes.Structure):
    _fields_ = (("version", c_uint), ("count", c_uint), ("parts", _Part * _MOST_PARTS))


def _version(type_: type[ctypes.Structure], number: int) -> int:
    return sizeof(type_) | number << 24


class Dcgm:
    """The library, loaded at the first connection.

    Args:
        names: Of the library, the best one first.
    """

    def __init__(self, names: Sequence[str] = LIBRARIES) -> None:
        self._names = names
        self._library: ctypes.CDLL | None = None
        self._handle = c_longlong(0)

    def connect(self, address: str) -> None:
        """Connect to a host engine."""
        if self._library is None:
            self._library = _loaded(self._names)
            self._call("dcgmInit")
        is_unix = address.startswith("unix://")
        params = _Connect(_version(_Connect, 2), 0, 2000, int(is_unix))
        where = address.removeprefix("unix://").encode()
        self._call("dcgmConnect_v2", c_char_p(where), byref(params), byref(self._handle))

    def disconnect(self) -> None:
        """End the connection."""
        if self._library is not None and self._handle.value:
            self._library.dcgmDisconnect(self._handle)
            self._handle = c_longlong(0)

    def gpus(self) -> Sequence[Entity]:
        """List the GPUs."""
        numbers, count = (c_uint * _MOST_GPUS)(), c_int(0)
        self._call("dcgmGetAllSupportedDevices", self._handle, numbers, byref(count))
        return [Entity(GPU, numbers[i]) for i in range(count.value)]

    def instances(self) -> Sequence[EngineInstance]:
        """List the MIG instances."""
        found = _Hierarchy(version=_version(_Hierarchy, 2))
        self._call("dcgmGetGpuInstanceHierarchy", self._handle, byref(found))
        return [
            EngineInstance(Entity(INSTANCE, part.entity.number), part.gpu_uuid.decode(), part.instance)
            for part in found.parts[: found.count]
            if part.entity.kind == INSTANCE
        ]

    def watch(self, fields: Sequence[int], every_s: float) -> None:
        """Let these fields be measured on all GPUs and MIG instances."""
        group = c_longlong(0)
        self._call(
            "dcgmFieldGroupCreate",
            self._handle,
            c_int(len(fields)),
            (c_ushort * len(fields))(*fields),
            c_char_p(_NAME.format(pid=os.getpid()).encode()),
            byref(group),
        )
        for whom in (_ALL_GPUS, _ALL_INSTANCES):
            self._call(
                "dcgmWatchFields",
                self._handle,
                c_longlong(whom),
                group,
                c_longlong(round(every_s * 1e6)),
                c_double(_KEEP_S),
                c_int(0),
            )

    def latest(self, entities: Sequence[Entity], fields: Sequence[int]) -> Mapping[tuple[Entity, int], float | str]:
        """Return the latest values."""
        pairs = (_Pair * len(entities))(*(_Pair(e.kind, e.number) for e in entities))
        values = (_FieldValue * (len(entities) * len(fields)))()
        for value in values:
            value.version = _version(_FieldValue, 2)
        self._call(
            "dcgmEntitiesGetLatestValues",
            self._handle,
            pairs,
            c_uint(len(entities)),
            (c_ushort * len(fields))(*fields),
            c_uint(len(fields)),
            c_uint(_LIVE if len(fields) == 1 else 0),
            values,
        )
        found = {(Entity(v.kind, v.number), v.field): _read(v) for v in values if v.status == 0}
        return {key: value for key, value in found.items() if value is not None}

    def _call(self, name: str, *args: object) -> None:
        if self._library is None:
            raise DcgmError(f"{name}: expected a connection to the host engine, found none")
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError:
            raise DcgmError(f"{name}: expected it in DCGM's library, found none; update DCGM") from None
        code = function(*args)
        if code:
            self._library.errorString.argtypes, self._library.errorString.restype = (c_int,), c_char_p
            raise DcgmError(f"{name} failed: {(self._library.errorString(code) or b'').decode()} ({code})")


def _loaded(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DcgmError(f"expected {' or '.join(names)}, found neither; install datacenter-gpu-manager or mount it")


def _read(value: _FieldValue) -> float | str | None:
    kind = value.type & 0xFF
    if kind == _INT:
        return None if value.value.i64 >= _BLANK_INT or value.value.i64 == 0x7FFFFFF0 else float(value.value.i64)
    if kind == _FLOAT:
        return None if value.value.dbl >= _BLANK_FLOAT else float(value.value.dbl)
    return bytes(value.value.str).decode(errors="replace") if kind == _TEXT else None
