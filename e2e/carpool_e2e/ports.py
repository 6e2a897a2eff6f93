"""Ports of a cluster: a range for each slot, so that two clusters never choose the same one at the same moment."""

import socket
from dataclasses import dataclass, fields

_FIRST = 21000
_PER_SLOT = 100


@dataclass(frozen=True)
class Ports:
    """Ports on the loopback address."""

    etcd: int
    etcd_peer: int
    apiserver: int
    controller_manager: int
    scheduler: int
    extender: int
    extender_metrics: int
    operator_metrics: int


def is_free(port: int) -> bool:
    """Whether nothing listens on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def choose(slot: int) -> Ports:
    """Choose the free ports of a slot's range; below the ephemeral ports, which the kernel hands out to anybody."""
    first = _FIRST + slot * _PER_SLOT
    free = (port for port in range(first, first + _PER_SLOT) if is_free(port))
    return Ports(*(next(free) for _ in fields(Ports)))
