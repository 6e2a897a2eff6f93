"""Which nodes kube-scheduler offered a pod, in as few bytes as thousands of pods can remember."""

from collections.abc import Sequence

import numpy as np

from carpool_extender.state.view import Bools, View

EVERYWHERE = b""


def packed(view: View, offered: Sequence[str]) -> bytes:
    """Pack the nodes that were offered into bits, in the order of their numbers; EVERYWHERE where these are all."""
    ids = view.ids(offered)
    found = np.zeros(len(view.node_names), np.bool_)
    found[ids[ids >= 0]] = True
    return EVERYWHERE if int(found.sum()) == len(view.node_ids) else np.packbits(found).tobytes()


def names(view: View, offered: bytes) -> list[str] | None:
    """Return the names of the nodes that were offered; None where these are all."""
    if offered == EVERYWHERE:
        return None
    among_nodes = _unpacked(view, offered)
    return [name for name, number in view.node_ids.items() if among_nodes[number]]


def among(view: View, offered: bytes) -> Bools | None:
    """Return which GPUs are on nodes that were offered, shape (gpus,); None where all are.

    Nodes that came since were not offered. One that came in the place of one that went counts as that one.
    """
    if offered == EVERYWHERE:
        return None
    found: Bools = _unpacked(view, offered)[view.columns.node]
    return found


def _unpacked(view: View, offered: bytes) -> Bools:
    nodes = np.zeros(len(view.node_names), np.bool_)
    known = np.unpackbits(np.frombuffer(offered, np.uint8)).astype(np.bool_)[: len(nodes)]
    nodes[: len(known)] = known
    return nodes
