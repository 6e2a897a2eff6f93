"""Kubernetes quantities of memory, converted at the border."""

import re
from decimal import Decimal

from carpool_core.values import MIB

_SUFFIXES = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?$")


def memory_mib(quantity: int | str) -> int:
    """Convert a quantity such as `12Gi` (or a number of bytes) to MiB, rounded down.

    Raises:
        ValueError: The text is no quantity of memory.
    """
    found = _QUANTITY.match(str(quantity))
    if not found:
        raise ValueError(f"expected an amount of memory such as 12Gi or 500Mi, found {quantity!r}")
    return int(Decimal(found[1]) * _SUFFIXES[found[2] or ""]) // MIB
