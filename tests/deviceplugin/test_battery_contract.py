"""What the agent relies on of NVML, and what came back of it: the fakes are held to both.

No GPU was ever tried. What `carpool node battery --out` writes on one belongs into `tests/deviceplugin/hardware/`.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import pynvml
import pytest
from battery_world import machine, of_first, recording, try_out
from carpool_deviceplugin.node.battery.contract import CONTRACT, processes_make_sense, utilization_makes_sense
from carpool_deviceplugin.node.battery.recording import Recording, differences
from carpool_deviceplugin.node.battery.report import read
from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.library import installed
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_hardware import HARDWARE

RECORDED = [
    *(pytest.param(path, id=path.stem) for path in sorted((Path(__file__).parent / "hardware").glob("*.json"))),
    pytest.param(None, id="installed", marks=pytest.mark.gpu),
]


def test_the_contract_finds_a_driver_that_breaks_it(tmp_path: Path) -> None:
    there = machine(tmp_path)
    gpu = there.node.nvml.gpus[0]
    gpu.temperature_c = 200
    gpu.hardware = replace(gpu.hardware, reserved_mib=60_000, power_limit_w=0)
    session = there.devices.session
    broken = {rule.__name__: list(rule(session)) for rule in CONTRACT}
    assert {name for name, found in broken.items() if found} == {"identity_makes_sense", "telemetry_makes_sense"}
    assert "expected less than a quarter of it reserved" in broken["identity_makes_sense"][0]
    assert "expected a power limit from 5 to 5,000 W" in broken["identity_makes_sense"][1]
    assert "expected a temperature from -20 to 130 C" in "".join(broken["telemetry_makes_sense"])
    assert "expected less than a quarter" in try_out(there, "contract")["contract"].said


def test_what_is_otherwise_of_thousands_is_counted(tmp_path: Path) -> None:
    """Regression: a sentence of 84,095 characters."""
    there = machine(tmp_path)
    for pid in range(2**23, 2**23 + 3000):
        there.node.nvml.start(0, pid, 1)
    said = try_out(there, "contract")["contract"].said
    assert said.startswith("expected a process ID, found RunningProcess(pid=8388608, ")
    assert said.endswith("; and 2,990 more")
    assert len(said) < 2000


NOW_S = 1_700_000_000.0


class Otherwise(FakeNvml):
    """What processes did is told in another way."""

    def __init__(self, samples: list[tuple[int, int, int]] | None) -> None:
        super().__init__(["T4"])
        self._samples = samples

    def nvmlDeviceGetProcessUtilization(self, handle: object, since_us: int) -> list:  # noqa: N802  # NVIDIA's name
        if self._samples is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [
            pynvml.c_nvmlProcessUtilizationSample_t(pid=pid, timeStamp=at_us, smUtil=sm)
            for pid, at_us, sm in self._samples
        ]


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([(42, 1_699_999_999_000_000, 50), (43, 1_699_999_999_000_000, 100)], ""),
        ([], ""),
        ([(0, 0, 65535)], ""),
        ([(2**31, 1_699_999_999_000_000, 50)], "expected a process ID, found (2147483648"),
        ([(42, 1_699_999_999_000_000, 150)], "expected 0 to 100% of the SMs, found (42, 1699999999000000, 150)"),
        ([(42, 1_700_000_003_000_000, 50)], "and none to come, found (42, 1700000003000000"),
        ([(42, 1_699_999_999_000, 50)], "expected microseconds since 1970"),
        ([(42, 1_699_999_999_000_000_000, 50)], "expected microseconds since 1970"),
        ([(42, 90_000_000, 50)], "expected microseconds since 1970"),
        ([(42, 1_699_999_999_000_000, 50)] * 2, "expected each process once at each moment"),
        (None, ""),
    ],
    ids=[
        "fine", "nobody", "unfilled", "pid", "beyond", "future", "milliseconds", "nanoseconds", "since-boot", "twice",
        "silent",
    ],
)  # fmt: skip
def test_the_contract_looks_at_what_processes_did(samples: list[tuple[int, int, int]] | None, says: str) -> None:
    session = Session(Otherwise(samples))
    session.open()
    found = list(utilization_makes_sense(session, lambda: NOW_S))
    assert [says in one for one in found] == [True] * bool(says), found


@pytest.mark.parametrize(
    ("pid", "memory_mib", "instance", "says"),
    [(2**23, 1, None, "a process ID"), (42, 20_000, None, "no more memory"), (42, 1, 3, "an instance only")],
)
def test_the_contract_looks_at_processes(pid: int, memory_mib: int, instance: int | None, says: str) -> None:
    fake = FakeNvml(["T4"])
    fake.start(0, pid, memory_mib, instance=instance)
    session = Session(fake)
    session.open()
    (found,) = processes_make_sense(session)
    assert f"expected {says}" in found


class Repeating(FakeNvml):
    """Each process is told twice."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list:  # noqa: N802  # NVIDIA's name
        return 2 * super().nvmlDeviceGetComputeRunningProcesses(handle)


def test_the_contract_finds_processes_that_are_told_twice() -> None:
    fake = Repeating(["T4"])
    session = Session(fake)
    session.open()
    fake.start(0, 42, 1)
    (found,) = processes_make_sense(session)
    assert "expected each process once, found 1 of 2 that were told before: RunningProcess(pid=42, " in found
    assert "…" not in found
    for pid in range(100, 3000):
        fake.start(0, pid, 1)
    (found,) = processes_make_sense(session)
    assert "found 2,901 of 5,802 that were told before: " in found
    assert ("pid=101," in found, "pid=102," in found, found.endswith(" …")) == (True, False, True)


@pytest.mark.parametrize("path", RECORDED)
def test_the_fake_answers_as_hardware_did(path: Path | None) -> None:
    """Nothing was recorded yet: until then only a machine with a GPU can say."""
    recorded = of_first(installed()) if path is None else read(path).nvml
    fakes = [kind for kind, hardware in HARDWARE.items() if hardware.product == recorded.product]
    assert fakes, f"there is no fake of {recorded.product}: add it to carpool_deviceplugin.testing.nvml_hardware"
    assert differences(recorded, recording(fakes[0])) == []


@pytest.mark.parametrize("kind", [*HARDWARE])
def test_recordings_outlive_their_file(kind: str) -> None:
    made = recording(kind)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Recording) == made
    assert differences(made, recording(kind)) == []
    assert made.codes["an unknown UUID"] == pynvml.NVML_ERROR_NOT_FOUND
    assert made.codes["XIDs where there are none"] == pynvml.NVML_ERROR_TIMEOUT


def test_what_a_fake_answers_otherwise_is_named() -> None:
    real = recording("A100-40")
    profile = msgspec.structs.replace(real.mig[2], starts=[0], sm_count=1)
    other = msgspec.structs.replace(
        real,
        memory_mib=1,
        reserved_mib=real.reserved_mib + 65,
        mig=[*real.mig[:2], profile, *real.mig[4:]],
        codes={**real.codes, "MIG mode": 3, "energy": 0},
    )
    found = "\n".join(differences(real, other))
    assert "memory_mib: recorded 40960, found 1" in found
    assert "reserved_mib: recorded 624, found 689" in found
    assert "MIG profile 3g.20gb: recorded" in found
    assert "MIG profile 2g.10gb: recorded" in found
    assert "MIG mode: recorded success, found Not Supported (3)" in found
    assert "energy" not in found
    near = msgspec.structs.replace(real, reserved_mib=real.reserved_mib + 64, driver="600.1", power_limit_w=275.0)
    assert differences(real, near) == [], "drivers and boards vary in these"
