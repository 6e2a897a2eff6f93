"""The fake's GPUs and their processes."""

from dataclasses import dataclass, field
from typing import Any

from carpool_deviceplugin.testing.nvml_hardware import Hardware
from carpool_deviceplugin.testing.nvml_mig import FakeMig


@dataclass
class FakeProcess:
    """A process with a context on a GPU, and what its kernels do."""

    pid: int
    memory_mib: int
    instance: int | None = None
    sm: float = 0.0
    """Share of the sampling period in which its kernels run."""
    dram: float = 0.0


@dataclass
class FakeGpu:
    """One GPU."""

    hardware: Hardware
    uuid: str
    index: int
    mig: FakeMig
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    energy_mj: float = 0.0
    is_lost: bool = False
    is_stuck: bool = False
    """It says that it computes, and draws idle power."""
    ecc_uncorrectable: int = 0
    remap: tuple[int, int, int, int] = (0, 0, 0, 0)
    clock_reasons: int = 0
    temperature_c: int = 40
    samples: list[Any] = field(default_factory=list)
    """NVML's own structures of what each process did in each sampling period."""
    integrals: dict[int | None, list[float]] = field(default_factory=dict)
    """Seconds of time, graphics, SM, occupancy, tensor and DRAM activity, of the GPU and of its instances."""

    @property
    def power_w(self) -> float:
        """Idle power and what the processes add."""
        busy = 0.0 if self.is_stuck else min(1.0, sum(p.sm for p in self.processes.values()))
        return self.hardware.idle_w + busy * (self.hardware.power_limit_w - self.hardware.idle_w)

    @property
    def used_mib(self) -> int:
        """Memory of all processes."""
        return sum(p.memory_mib for p in self.processes.values())
