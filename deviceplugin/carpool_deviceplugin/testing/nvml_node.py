"""A node with GPUs that NVML knows: the fake, its processes, its MPS daemons, and the adapter over them."""

from dataclasses import dataclass
from pathlib import Path

from carpool_deviceplugin.cdi.nvidia import NvidiaCdi
from carpool_deviceplugin.devices.processes import ProcTree
from carpool_deviceplugin.mps.daemons import Mps
from carpool_deviceplugin.mps.host import HostedMps
from carpool_deviceplugin.nvml.devices import NvmlDevices
from carpool_deviceplugin.sources.feed import Source
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_gpus import FakeProcess


def uid(pod: str) -> str:
    """A pod's UID as Kubernetes writes them; the tests' short names would be no UIDs."""
    return f"00000000-0000-4000-8000-{int.from_bytes(pod.encode(), 'big'):012x}"


@dataclass
class Node:
    """Everything a test can put its hands on."""

    nvml: FakeNvml
    mps: FakeMpsCommands
    root: Path
    seconds: float = 1000.0
    may_switch_mig: bool = False
    sources: tuple[Source, ...] = ()
    mps_host: Path | None = None
    """Socket of the process that starts MPS daemons; the agent does where None."""

    def __post_init__(self) -> None:
        """Servers of MPS are processes of the node."""
        self.mps.ended = self.end_server

    def devices(self) -> NvmlDevices:
        """An adapter; each is an agent of its own on the same node."""
        directory, long_s = self.root / "mps", 60.0  # the machine may be busy, and nobody waits
        return NvmlDevices(
            self.nvml,
            mps=HostedMps(self.mps, directory, self.mps_host, within_s=long_s, tidy_within_s=long_s)
            if self.mps_host
            else Mps(self.mps, directory, tidy_within_s=long_s),
            cdi=NvidiaCdi([self.root / "etc-cdi", self.root / "cdi"]),
            state_dir=self.root / "state",
            processes=ProcTree(self.root / "proc"),
            may_switch_mig=self.may_switch_mig,
            sources=self.sources,
            mig_minors=self.root / "mig-minors",
            monotonic=lambda: self.seconds,
            wall=lambda: self.nvml.now_us / 1e6,
        )

    def advance(self, seconds: float) -> None:
        """Time passes everywhere."""
        self.seconds += seconds
        self.nvml.advance(seconds)

    def start(
        self,
        gpu: int,
        pid: int,
        pod: str | None,
        memory_mib: int = 1000,
        *,
        sm: float = 0.0,
        dram: float = 0.0,
        instance: int | None = None,
        user: int = 0,
    ) -> FakeProcess:
        """A pod's process opens a context; without a pod it is one of the host's."""
        directory = self.root / "proc" / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        slice_ = f"kubepods-burstable-pod{uid(pod).replace('-', '_')}.slice" if pod else "user.slice"
        (directory / "cgroup").write_text(
            f"0::/kubepods.slice/kubepods-burstable.slice/{slice_}/cri-containerd-1.scope\n"
        )
        (directory / "stat").write_text(f"{pid} (python (3)) S " + " ".join(["0"] * 18) + f" {pid * 100} 0 0\n")
        (directory / "status").write_text(f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\n")
        process = self.nvml.start(gpu, pid, memory_mib, instance=instance)
        process.sm, process.dram = sm, dram
        return process

    def end_server(self, pid: int) -> None:
        """A server ends, on whichever GPU it has a context; on none where it never had one."""
        for index, gpu in enumerate(self.nvml.gpus):
            if pid in gpu.processes:
                self.end(index, pid)

    def end(self, gpu: int, pid: int) -> None:
        """A process ends."""
        self.nvml.end(gpu, pid)
        for file in (self.root / "proc" / str(pid)).iterdir():
            file.unlink()
        (self.root / "proc" / str(pid)).rmdir()
