"""One simulated device: admission, contention and counters over the claims of live processes."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from carpool_simulated import state
from carpool_simulated.state import (
    IDLE,
    Claim,
    DeviceStateError,
    DeviceUnavailableError,
    Facts,
    Limit,
    Mode,
    MpsError,
    is_held,
    locked,
    read_claim,
    write_text,
)

SWITCH_COST = 0.03
CACHE_COST = 0.12
SM_POWER_SHARE = 0.7
"""Share of the power between idle and limit that full SM activity draws; full DRAM activity draws the rest."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of a tenant that runs alone. Ratios from 0 to 1, averaged over a step."""

    gpu_util: float = 0.0
    """Share of the time in which a kernel runs."""
    sm_active: float = 0.0
    """Share of SM-time with work."""
    dram_active: float = 0.0
    """Share of the memory bandwidth in use."""


def contention(mode: str, mine: Activity, others: Sequence[Activity], threads: float = 1.0) -> float:
    """Return the slowdown of a step beside other tenants, at least 1.

    Args:
        mode: `Exclusive`, `TimeSlicing` or `MPS`.
        mine: Activity of the tenant.
        others: Activities of the other tenants with work on the GPU.
        threads: Share of the SMs that MPS lets this tenant use, 0..1.
    """
    if mode == "MPS":
        return _mps(mine, others, threads)
    return _time_slicing([mine, *others]) if others else 1.0


def _time_slicing(tenants: Sequence[Activity]) -> float:
    """Return the slowdown of `tenants[0]` by Schweitzer's fixed-point iteration."""
    stretch = [1.0] * len(tenants)
    for _ in range(50):
        there = [t.gpu_util * s / (t.gpu_util * s + 1 - t.gpu_util) for t, s in zip(tenants, stretch, strict=True)]
        stretch = [1 + (1 + SWITCH_COST) * (sum(there) - own) for own in there]
    return 1 + tenants[0].gpu_util * (stretch[0] - 1)


def _mps(mine: Activity, others: Sequence[Activity], threads: float) -> float:
    wanted_sm = mine.sm_active + sum(other.sm_active for other in others)
    wanted_dram = mine.dram_active + sum(other.dram_active for other in others)
    saturation = max(1.0, wanted_sm, wanted_dram)
    cache = 1 + CACHE_COST * (wanted_dram - mine.dram_active)
    filled = mine.sm_active / mine.gpu_util if mine.gpu_util else 0.0
    stretch = max(saturation * cache, filled / threads)
    return max(1 + mine.gpu_util * (stretch - 1), saturation if others else 1.0)


def dynamic_power_w(activity: Activity, *, idle_w: float, limit_w: float) -> float:
    """Return the power above idle, in W: linear in SM and DRAM activity, up to the limit."""
    drive = SM_POWER_SHARE * activity.sm_active + (1 - SM_POWER_SHARE) * activity.dram_active
    return (limit_w - idle_w) * min(1.0, drive)


_TIDY_S = 0.1
MPS_CONTROL = "control"
"""File in an MPS pipe directory with the UUID of the device whose daemon runs."""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim of a live process."""

    id: str
    claim: Claim


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of a device at one moment, as from NVML."""

    at: float
    """Monotonic time, in seconds."""
    claims: tuple[Held, ...]
    problems: tuple[str, ...]
    """A message for each unreadable claim of a live process and each file that is not a claim."""
    energy_j: float
    """Energy since the start of the agent; never falls."""
    power_w: float


@dataclass(frozen=True, slots=True)
class _Claims:
    """Content of the directory of claims."""

    held: list[Held] = field(default_factory=list)
    dead: list[Path] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """Errors of unreadable claims of live processes; they occupy an unknown part of the device."""
    invalid: dict[Path, str] = field(default_factory=dict)
    """Files that no process can hold as a claim, and the error of each; they are not counted."""

    def energy_of_dead_j(self) -> float:
        """Return the energy of ended processes; that of an unreadable claim is lost."""
        energy_j = 0.0
        for path in self.dead:
            with suppress(DeviceStateError):
                energy_j += read_claim(path).energy_j
        return energy_j


class Device:
    """A device's directory.

    Args:
        directory: `<root>/<uuid>`.
        clock: Monotonic seconds, the same for all processes of the machine.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self.claims_directory = directory / "claims"
        self._clock = clock
        self._created_at = clock()
        self._reaped_j = 0.0
        """Energy above idle of processes whose claims were removed."""

    def create(self, facts: Facts) -> None:
        """Write the properties of the device, and create the other files if they are missing."""
        self.claims_directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        self.claims_directory.chmod(0o777)  # containers run as any user
        if not (self.directory / "lock").exists():
            write_text(self.directory / "lock", "")
        if not (self.directory / "mode.json").exists():
            state.write(self.directory, Mode())
        state.write(self.directory, facts)

    def facts(self) -> Facts:
        """Return the properties of the device; raises DeviceStateError."""
        return state.read_facts(self.directory)

    def mode(self) -> Mode:
        """Return the sharing mode; an unreadable one counts as idle if no process uses the device.

        Raises:
            DeviceStateError: Processes use the device, and `mode.json` is invalid.
        """
        try:
            return state.read_mode(self.directory)
        except DeviceStateError:
            if any(self.held()):
                raise
            return Mode()

    def held(self) -> tuple[list[Held], list[str]]:
        """Return the claims of live processes, and the errors of unreadable ones."""
        claims = self._claims()
        return claims.held, claims.unreadable

    def _claims(self) -> _Claims:
        claims = _Claims()
        for path in sorted(self.claims_directory.glob("*.claim")):
            try:
                is_alive = is_held(path)
            except DeviceStateError as e:
                claims.invalid[path] = str(e)
                continue
            if not is_alive:
                claims.dead.append(path)
                continue
            try:
                claims.held.append(Held(path.stem, read_claim(path)))
            except DeviceStateError as e:
                if path.exists():
                    claims.unreadable.append(str(e))
        return claims

    def reap(self) -> None:
        """Remove claims of dead processes and invalid files. Only the agent calls this, with the lock held."""
        claims = self._claims()
        self._reaped_j += claims.energy_of_dead_j()
        for path in (*claims.dead, *claims.invalid, *self._unfinished()):
            with suppress(OSError):  # a directory
                path.unlink()

    def _unfinished(self) -> list[Path]:
        """Return claims whose process died before the rename: claims are made with the lock held."""
        return list(self.claims_directory.glob("*.new"))

    def tidy(self) -> None:
        """Remove claims of dead processes, unless the lock is taken. Only the agent calls this."""
        claims = self._claims()
        if claims.dead or claims.invalid or self._unfinished():
            with suppress(DeviceUnavailableError), locked(self.directory, timeout_s=_TIDY_S):
                self.reap()

    def reading(self) -> Reading:
        """Return the counters; takes no lock. Raises DeviceStateError if `device.json` is corrupt."""
        facts, now = self.facts(), self._clock()
        energy, dynamic = self._reaped_j, 0.0
        claims = self._claims()
        energy += claims.energy_of_dead_j()
        for claim in (h.claim for h in claims.held):
            energy += claim.energy_j
            if claim.busy_until > now:
                activity = Activity(claim.gpu_util, claim.sm_active, claim.dram_active)
                dynamic += dynamic_power_w(activity, idle_w=facts.idle_power_w, limit_w=facts.power_limit_w)
        return Reading(
            at=now,
            claims=tuple(claims.held),
            problems=(*claims.unreadable, *claims.invalid.values()),
            energy_j=energy + facts.idle_power_w * (now - self._created_at),
            power_w=min(facts.power_limit_w, facts.idle_power_w + dynamic),
        )

    def set_mode(self, mode: str) -> None:
        """Change the sharing mode.

        Raises:
            DeviceUnavailableError: Processes use the device, or the MPS daemon still runs.
        """
        with locked(self.directory):
            self.reap()
            now = self.mode()
            if now.mode == mode:
                return
            self._refuse_in_use(f"change its mode from {now.mode} to {mode}")
            if now.mps_daemon:
                raise DeviceUnavailableError(f"{self.directory.name}: expected no MPS daemon, found one; stop it first")
            state.write(self.directory, Mode(mode=mode))

    def _refuse_in_use(self, purpose: str) -> None:
        held, problems = self.held()
        if held or problems:
            pods = sorted({h.claim.pod_uid for h in held}) or ["processes whose claim cannot be read"]
            raise DeviceUnavailableError(
                f"{self.directory.name}: expected no process on the GPU, found {', '.join(pods)}; "
                f"wait for their end to {purpose}"
            )

    def start_mps(self, pipe_directory: Path) -> None:
        """Start the MPS daemon, which listens in `pipe_directory`."""
        with locked(self.directory):
            mode = self.mode()
            if mode.mode != "MPS":
                raise DeviceUnavailableError(f"{self.directory.name}: expected mode MPS, found {mode.mode}; change it")
            pipe_directory.mkdir(parents=True, exist_ok=True)
            pipe_directory.chmod(0o755)
            write_text(pipe_directory / MPS_CONTROL, self.directory.name + "\n")
            state.write(self.directory, replace(mode, mps_daemon=True))

    def stop_mps(self, pipe_directory: Path) -> None:
        """Stop the MPS daemon, unless processes use it (DeviceUnavailableError)."""
        with locked(self.directory):
            self.reap()
            self._refuse_in_use("stop its MPS daemon")
            mode = self.mode()
            state.write(self.directory, replace(mode, mps_daemon=False, limits={}))
            (pipe_directory / MPS_CONTROL).unlink(missing_ok=True)

    def set_limit(self, pod_uid: str, limit: Limit | None) -> None:
        """Record the limits of a pod, which CDI sets in its containers; None removes them."""
        with locked(self.directory):
            mode = self.mode()
            limits = {pod: kept for pod, kept in mode.limits.items() if pod != pod_uid}
            if limit is not None:
                limits[pod_uid] = limit
            state.write(self.directory, replace(mode, limits=limits))

    def admit(self, pod_uid: str, pipe_directory: Path | None) -> Mode:
        """Check that a new process of a pod may use the device now. The caller holds the lock.

        Returns:
            The mode that it will run in.

        Raises:
            DeviceUnavailableError: The GPU is idle, or another pod uses it in mode Exclusive.
            MpsError: The MPS daemon does not run or cannot be reached.
        """
        mode = self.mode()
        name = self.directory.name
        if mode.mode == IDLE:
            raise DeviceUnavailableError(
                "CUDA error: all CUDA-capable devices are busy or unavailable "
                f"({name}: expected to be prepared for this pod, found Idle; it has no reservation)"
            )
        held, problems = self.held()
        others = sorted({h.claim.pod_uid for h in held if h.claim.pod_uid != pod_uid})
        if mode.mode == "Exclusive" and (others or problems):
            raise DeviceUnavailableError(
                "CUDA error: all CUDA-capable devices are busy or unavailable "
                f"({name}: expected to be alone on an Exclusive GPU, found pod {', '.join(others) or problems[0]})"
            )
        if mode.mode == "MPS":
            self._reach_mps(mode, pipe_directory)
        return mode

    def _reach_mps(self, mode: Mode, pipe_directory: Path | None) -> None:
        start = "CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server"
        if not mode.mps_daemon:
            raise MpsError(f"{start} ({self.directory.name}: expected its daemon to run, found it stopped)")
        if pipe_directory is None:
            raise MpsError(f"{start} (expected CUDA_MPS_PIPE_DIRECTORY to be set, found nothing)")
        control = pipe_directory / MPS_CONTROL
        found = control.read_text().strip() if control.exists() else "nothing"
        if found != self.directory.name:
            raise MpsError(f"{start} ({control}: expected the daemon of {self.directory.name}, found {found})")
