"""libdcgm by ctypes: the few calls that are used. Layouts are those of dcgm_structs.h of DCGM 3 and 4."""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char, c_char_p, c_double, c_int, c_int64, c_longlong, c_uint, c_ushort, sizeof

from carpool_deviceplugin.sources.host_engine import GPU, INSTANCE, DcgmError, EngineInstance, Entity

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
