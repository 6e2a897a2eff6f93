"""GPU products with NVIDIA's published figures, and the classes of GPUs that a cluster has."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import msgspec

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
    """Whether the figures were computed from what NVML reports, because none were published for the name."""


PRODUCTS = msgspec.json.decode(Path(__file__).with_name("products.json").read_bytes(), type=tuple[GpuProduct, ...])
"""The products with published figures."""


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
    """Return the product with a name or a part of it.

    Products with published figures come first, so that `V100` is the one of them; elsewhere a part must be unambiguous.

    Raises:
        UnknownProductError: No product matches, or several do; the message lists them. Or it shares the CPU's memory.
    """
    name = hardware_name(wanted)
    for known in (PRODUCTS, derived_products()):
        exact = [p for p in known if _words(p.name.removeprefix("NVIDIA ")) == _words(name.removeprefix("NVIDIA "))]
        found = exact or [p for p in known if product_matches(p.name, name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UnknownProductError(
                f"GPU product {wanted!r} is ambiguous: it matches {', '.join(p.name for p in found)}; "
                "write more of the name"
            )
    for unified in nvml_table().unified:
        if product_matches(unified, name):
            raise UnknownProductError(f"GPU product {wanted!r}: {unified_memory_problem(unified)}")
    names = ", ".join(p.name for p in (*PRODUCTS, *derived_products()))
    raise UnknownProductError(f"GPU product {wanted!r} is unknown; known products: {names}; name one of them")


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


def unified_memory_problem(product: str) -> str:
    """Return why a GPU of this product is refused."""
    return (
        f"expected a GPU with memory of its own, found {product}, which shares the CPU's; Carpool does not support "
        "such GPUs"
    )


class _NvmlGpu(msgspec.Struct, frozen=True, rename="camel"):
    """NVML's answers for one product, and its plain MIG profiles."""

    name: str
    capability: str
    memory_mib: int
    figures: NvmlFigures
    mig: tuple[str, ...] = ()


class NvmlTable(msgspec.Struct, frozen=True):
    """Products by what NVML reports of them."""

    gpus: tuple[_NvmlGpu, ...]
    unified: dict[str, str]
    """Products that share the CPU's memory, with their compute capabilities."""


@cache
def nvml_table() -> NvmlTable:
    """Read the table at the first call: few processes need it."""
    return msgspec.json.decode(Path(__file__).with_name("nvml_figures.json").read_bytes(), type=NvmlTable)


@cache
def derived_products() -> tuple[GpuProduct, ...]:
    """Return the products of NVML's table of which no figures were published."""
    named = {product.name for product in PRODUCTS}
    kinds = (
        DeviceClass(gpu.name, gpu.memory_mib, 0, gpu.capability, (), gpu.mig, gpu.figures)
        for gpu in nvml_table().gpus
        if gpu.name not in named
    )
    return tuple(product for kind in kinds if (product := _derive(kind)) is not None)


_GENERATIONS = {
    (6, 0): (64, 0), (6, 1): (128, 0), (7, 0): (64, 1024), (7, 5): (64, 1024), (8, 0): (64, 2048), (8, 6): (128, 1024),
    (8, 9): (128, 1024), (9, 0): (128, 4096), (10, 0): (128, 8192), (10, 3): (128, 8192), (12, 0): (128, 1024),
}  # fmt: skip
"""FP32 cores per SM, and dense 16-bit tensor FLOPs per clock and SM with FP32 accumulation, by compute capability.

Source: NVIDIA's white papers of Pascal to Blackwell. A newer capability counts as the last one before it."""
_HALVED = frozenset({(7, 5), (8, 6), (8, 9), (12, 0)})
"""Capabilities of which GeForce products have half the tensor rate with FP32 accumulation."""
_IDLE_SHARE = 0.1
"""Idle power over the power limit; 0.06 to 0.22 in the table."""


@lru_cache(maxsize=1024)
def product_of(kind: DeviceClass) -> GpuProduct | None:
    """Return the product with the GPU's name, or one derived from NVML's figures; None if neither is known.

    The figures of the GPU itself precede those of the table, which simulated GPUs and old drivers need.
    """
    name = hardware_name(kind.product)
    named = next((product for product in PRODUCTS if product.name == name), None)
    return named or _derive(kind) or next((product for product in derived_products() if product.name == name), None)


def _derive(kind: DeviceClass) -> GpuProduct | None:
    """Return the product that NVML's figures describe; None if one is missing.

    A transfer of DRAM takes half of the clock that NVML reports.
    """
    name, figures = hardware_name(kind.product), kind.figures
    generation = max((one for one in _GENERATIONS if one <= _version(kind.compute_capability)), default=None)
    if generation is None or not figures.is_complete:
        return None
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
