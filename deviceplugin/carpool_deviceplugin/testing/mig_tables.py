"""What the products in the fakes can be divided into, as `nvidia-smi mig -lgip` and `-lgipp` print it.

Source: NVIDIA Multi-Instance GPU User Guide, "Supported MIG Profiles". A GPU that is there says itself what it supports
(`nvmlDeviceGetGpuInstancePossiblePlacements`), and only that counts for the agent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from carpool_deviceplugin.mig.profiles import MigTable, Profile

_EVEN, _TWO, _SEVEN = (0, 2, 4, 6), (0, 2, 4), (0, 1, 2, 3, 4, 5, 6)


def _seven(names: Sequence[str], memory_mib: Sequence[int], sm: Sequence[int]) -> MigTable:
    """Eight memory slices and seven compute slices.

    Args:
        names: Of 1g, 1g with double memory, 2g, 3g, 4g, 7g.
        memory_mib: Of the same.
        sm: SMs of 1g, 2g, 3g, 4g, 7g.
    """
    one, one_double, two, three, four, seven = names
    m1, m1d, m2, m3, m4, m7 = memory_mib
    return MigTable(
        8,
        (
            Profile(seven, 0, 7, 8, (0,), m7, sm[4]),
            Profile(four, 5, 4, 4, (0,), m4, sm[3]),
            Profile(three, 9, 3, 4, (0, 4), m3, sm[2]),
            Profile(two, 14, 2, 2, _TWO, m2, sm[1]),
            Profile(one_double, 15, 1, 2, _EVEN, m1d, sm[0]),
            Profile(one, 19, 1, 1, _SEVEN, m1, sm[0]),
            Profile(f"{one}+me", 20, 1, 1, _SEVEN, m1, sm[0], has_media=True),
        ),
    )


_A100_SM, _H100_SM = (14, 28, 42, 56, 98), (16, 32, 60, 64, 132)

A100_40 = _seven(
    ("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    (4864, 9984, 9984, 20096, 20096, 40192),
    _A100_SM,
)
_80GB = ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
A100_80 = _seven(_80GB, (9728, 19968, 19968, 40192, 40192, 80640), _A100_SM)
H100_80 = _seven(_80GB, (9984, 20096, 20096, 40448, 40448, 81152), _H100_SM)
H100_PCIE = MigTable(
    8,
    # A GPU of 114 SMs: what takes all of it has no more than those.
    tuple(replace(profile, sm_count=min(profile.sm_count, 114)) for profile in H100_80.profiles),
)
H200 = _seven(
    ("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    (16384, 33280, 33280, 71424, 71424, 143104),
    _H100_SM,
)
A30 = MigTable(
    4,
    (
        Profile("4g.24gb", 0, 4, 4, (0,), 24000, 56),
        Profile("2g.12gb", 5, 2, 2, (0, 2), 11968, 28),
        Profile("2g.12gb+me", 6, 2, 2, (0, 2), 11968, 28, has_media=True),
        Profile("1g.6gb", 14, 1, 1, (0, 1, 2, 3), 5952, 14),
        Profile("1g.6gb+me", 21, 1, 1, (0, 1, 2, 3), 5952, 14, has_media=True),
    ),
)

TABLES: Mapping[str, MigTable] = {
    "NVIDIA A100-SXM4-40GB": A100_40,
    "NVIDIA A100-PCIE-40GB": A100_40,
    "NVIDIA A100-SXM4-80GB": A100_80,
    "NVIDIA A100 80GB PCIe": A100_80,
    "NVIDIA A30": A30,
    "NVIDIA H100 80GB HBM3": H100_80,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H200": H200,
}
"""By product, as NVML names it."""
