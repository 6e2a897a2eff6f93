"""Kubernetes quantities, converted at the border."""

import re
from decimal import Decimal

from carpool_core.values import MIB

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(
    r"\+?(?P<number>[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]{1,2}))?",
    re.ASCII,
)
"""What Kubernetes' resource.ParseQuantity accepts, without negative amounts."""


def amount(quantity: int | str) -> Decimal:
    """Read a quantity such as `500m`, `4` or `12Gi` in the resource's own unit: cores, bytes, pieces.

    Raises:
        ValueError: The text is no quantity.
    """
    found = _QUANTITY.fullmatch(str(quantity))
    if not found:
        raise ValueError(f"expected an amount such as 12Gi, 4 or 500m, found {quantity!r}")
    scale = Decimal(f"1e{found['exponent']}") if found["exponent"] else _SUFFIXES[found["suffix"] or ""]
    return Decimal(found["number"]) * scale


def memory_mib(quantity: int | str) -> int:
    """Convert a quantity such as `12Gi` (or a number of bytes) to MiB, rounded down.

    Raises:
        ValueError: The text is no quantity of memory.
    """
    try:
        return int(amount(quantity) / MIB)
    except ValueError as error:
        raise ValueError(f"expected an amount of memory such as 12Gi or 500Mi, found {quantity!r}") from error
