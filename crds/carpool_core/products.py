"""GPU products with NVIDIA's published figures, and the classes of GPUs that a cluster has."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.resources.node import NO_FIGURES, Device, NvmlFigures
from carpool_core.values import SharingMode


@dataclass(frozen=True, slots=True)
class GpuProduct:
    """One GPU product; all figures are for one GPU."""

    name: str
    """NVML's product name."""
    memory_mib: int
    """NVML's total memory, in MiB."""
    compute_capability: str
    sm_count: int
    memory_bandwidth_gb_s: float
    """Peak DRAM bandwidth, in GB/s."""
    fp32_tflops: float
    """Peak FP32 rate without tensor cores, in TFLOP/s."""
    tensor_tflops: float
    """Peak dense 16-bit tensor rate, in TFLOP/s."""
    power_limit_w: float
    """Default power limit, in W."""
    idle_power_w: float
    """Typical idle power, in W."""
    mig_profiles: tuple[str, ...] = ()
    """MIG profiles, smallest first; empty without MIG."""
    is_derived: bool = False
    """Whether the figures were computed from what NVML reports, because the name is not in the table."""


_A100_40_MIG = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
_80GB_MIG = ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")

PRODUCTS: tuple[GpuProduct, ...] = (
    GpuProduct("NVIDIA A100-SXM4-40GB", 40960, "8.0", 108, 1555, 19.5, 312, 400, 50, _A100_40_MIG),
    GpuProduct("NVIDIA A100-SXM4-80GB", 81920, "8.0", 108, 2039, 19.5, 312, 400, 55, _80GB_MIG),
    GpuProduct("NVIDIA A100 80GB PCIe", 81920, "8.0", 108, 1935, 19.5, 312, 300, 45, _80GB_MIG),
    GpuProduct("NVIDIA A30", 24576, "8.0", 56, 933, 10.3, 165, 165, 30, ("1g.6gb", "2g.12gb", "4g.24gb")),
    GpuProduct("NVIDIA A10", 23028, "8.6", 72, 600, 31.2, 125, 150, 20),
    GpuProduct("NVIDIA H100 80GB HBM3", 81559, "9.0", 132, 3352, 66.9, 989, 700, 70, _80GB_MIG),
    GpuProduct("NVIDIA H100 PCIe", 81559, "9.0", 114, 2039, 51.2, 756, 350, 50, _80GB_MIG),
    GpuProduct(
        "NVIDIA H200",
        143771,
        "9.0",
        132,
        4800,
        66.9,
        989,
        700,
        75,
        ("1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    ),
    GpuProduct("NVIDIA L4", 23034, "8.9", 58, 300, 30.3, 121, 72, 16),
    GpuProduct("NVIDIA L40S", 46068, "8.9", 142, 864, 91.6, 362, 350, 35),
    GpuProduct("NVIDIA RTX A6000", 49140, "8.6", 84, 768, 38.7, 155, 300, 20),
    GpuProduct("Tesla T4", 15360, "7.5", 40, 320, 8.1, 65, 70, 10),
    GpuProduct("Tesla V100-SXM2-16GB", 16384, "7.0", 80, 900, 15.7, 125, 300, 40),
    GpuProduct("NVIDIA GeForce RTX 2080", 8192, "7.5", 46, 448, 10.1, 40, 215, 10),
    GpuProduct("NVIDIA GeForce RTX 3090", 24576, "8.6", 82, 936, 35.6, 71, 350, 20),
    GpuProduct("NVIDIA GeForce RTX 4090", 24564, "8.9", 128, 1008, 82.6, 165, 450, 20),
)


class UnknownProductError(ValueError):
    """The name matches no product, or more than one."""


def hardware_name(product: str) -> str:
    """Return the product name without the prefix of simulated GPUs."""
    return product.removeprefix(SIMULATED_PREFIX)


_WORD = re.compile(r"[^\W_]+")


@lru_cache(maxsize=1024)
def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


@lru_cache(maxsize=1024)
def _parts(name: str) -> frozenset[str]:
    """Return every sequence of adjacent words of a name, joined."""
    words = _words(name)
    starts = range(len(words))
    return frozenset("".join(words[i : j + 1]) for i in starts for j in starts[i:])


def product_matches(product: str, wanted: str) -> bool:
    """Return whether `wanted` is the product's name or a part of it. Case, spaces and dashes are ignored.

    A part consists of whole words: `NVIDIA L40S` matches `L40S`, but neither `L4` nor `L40`, which are other products.
    """
    return "".join(_words(wanted)) in _parts(product)


def find_product(wanted: str) -> GpuProduct:
    """Return the product with a name or an unambiguous part of it.

    Raises:
        UnknownProductError: No product matches, or several do; the message lists them.
    """
    name = hardware_name(wanted)
    exact = [p for p in PRODUCTS if _words(p.name) == _words(name)]
    found = exact or [p for p in PRODUCTS if product_matches(p.name, name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownProductError(
            f"GPU product {wanted!r} is ambiguous: it matches {', '.join(p.name for p in found)}; "
            "write more of the name"
        )
    raise UnknownProductError(
        f"GPU product {wanted!r} is unknown; known products: {', '.join(p.name for p in PRODUCTS)}"
    )


@dataclass(frozen=True, slots=True, order=True)
class DeviceClass:
    """GPUs that fit the same demands when empty. Health and present mode do not matter."""

    product: str
    memory_mib: int
    reserved_mib: int
    compute_capability: str
    modes: tuple[SharingMode, ...]
    mig_profiles: tuple[str, ...] = ()
    figures: NvmlFigures = NO_FIGURES

    @property
    def usable_mib(self) -> int:
        """Memory for tenants, in MiB; never negative."""
        return max(0, self.memory_mib - self.reserved_mib)


def device_class(device: Device) -> DeviceClass:
    """Return the class of a device."""
    return DeviceClass(
        product=device.product,
        memory_mib=device.memory_mib,
        reserved_mib=device.reserved_mib,
        compute_capability=device.compute_capability,
        modes=tuple(device.modes),
        mig_profiles=tuple(device.mig_profiles),
        figures=device.figures,
    )


UNIFIED_MEMORY = frozenset({"5.3", "6.2", "7.2", "8.7", "10.1", "11.0", "12.1"})
"""Compute capabilities of GPUs that share the CPU's memory: Jetson, and GB10 of DGX Spark (NVIDIA, "CUDA GPUs")."""
_GENERATIONS = {
    (6, 0): (64, 0), (6, 1): (128, 0), (7, 0): (64, 1024), (7, 5): (64, 1024), (8, 0): (64, 2048), (8, 6): (128, 1024),
    (8, 9): (128, 1024), (9, 0): (128, 4096), (10, 0): (128, 8192), (10, 3): (128, 8192), (12, 0): (128, 1024),
}  # fmt: skip
"""FP32 cores per SM, and dense 16-bit tensor FLOPs per clock and SM with FP32 accumulation, by compute capability.

Of NVIDIA's white papers of Pascal to Blackwell. A newer capability counts as the last one before it."""
_HALVED = frozenset({(7, 5), (8, 6), (8, 9), (12, 0)})
"""Capabilities of which GeForce products have half the tensor rate with FP32 accumulation."""
_IDLE_SHARE = 0.1
"""Idle power over the power limit; 0.06 to 0.22 in the table."""


@lru_cache(maxsize=1024)
def product_of(kind: DeviceClass) -> GpuProduct | None:
    """Return the product with the GPU's name, or one derived from NVML's figures; None if a figure is missing.

    A transfer of DRAM takes half of the clock that NVML reports.
    """
    name, figures = hardware_name(kind.product), kind.figures
    named = next((product for product in PRODUCTS if product.name == name), None)
    generation = max((one for one in _GENERATIONS if one <= _version(kind.compute_capability)), default=None)
    if named is not None or generation is None or not figures.is_complete:
        return named
    cores_per_sm, tensor_flops = _GENERATIONS[generation]
    if generation in _HALVED and "GeForce" in name:
        tensor_flops //= 2
    sm_count = max(figures.cuda_cores // cores_per_sm, 1)
    return GpuProduct(
        name=name,
        memory_mib=kind.memory_mib,
        compute_capability=kind.compute_capability,
        sm_count=sm_count,
        memory_bandwidth_gb_s=2 * figures.memory_clock_mhz * figures.memory_bus_bits / 8 / 1e3,
        fp32_tflops=2 * figures.cuda_cores * figures.sm_clock_mhz / 1e6,
        tensor_tflops=sm_count * tensor_flops * figures.sm_clock_mhz / 1e6,
        power_limit_w=figures.power_limit_w,
        idle_power_w=_IDLE_SHARE * figures.power_limit_w,
        mig_profiles=kind.mig_profiles,
        is_derived=True,
    )


def _version(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split("."))) if capability else ()


def products_of(kinds: Iterable[DeviceClass]) -> list[GpuProduct]:
    """Return the products of GPUs that can be described, each once: those of the table, then others by name."""
    found = {product.name: product for kind in sorted(kinds, reverse=True) if (product := product_of(kind))}
    derived = [product for product in found.values() if product.is_derived]
    return [product for product in PRODUCTS if product.name in found] + sorted(derived, key=lambda one: one.name)
