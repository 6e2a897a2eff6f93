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


def among(view: View, offered: bytes) -> Bools | None:
    """Return which GPUs are on nodes that were offered, shape (gpus,); None where all are.

    Nodes that came since were not offered. One that came in the place of one that went counts as that one.
    """
    if offered == EVERYWHERE:
        return None
    nodes = np.zeros(len(view.node_names), np.bool_)
    known = np.unpackbits(np.frombuffer(offered, np.uint8), count=None).astype(np.bool_)[: len(nodes)]
    nodes[: len(known)] = known
    found: Bools = nodes[view.columns.node]
    return found
