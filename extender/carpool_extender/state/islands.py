"""Which GPUs of a node reach each other by NVLink."""

from collections.abc import Sequence

from carpool_core.resources.node import Device


def islands(devices: Sequence[Device]) -> list[int]:
    """Number the islands: GPUs with equal numbers are linked, directly or by way of others.

    Args:
        devices: The GPUs of one node.

    Returns:
        The island of each, by its first member's place; a GPU without links is an island of its own.
    """
    place = {device.uuid: number for number, device in enumerate(devices)}
    found = list(range(len(devices)))
    for number, device in enumerate(devices):
        for peer in device.nvlink_peers:
            if peer in place:
                low, high = sorted((found[number], found[place[peer]]))
                found = [low if island == high else island for island in found]
    return found
