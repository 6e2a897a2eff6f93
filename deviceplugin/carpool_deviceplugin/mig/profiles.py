"""MIG profiles and where their instances may stand, as a GPU says itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from carpool_deviceplugin.quoting import quoted


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of GPU instance."""

    name: str
    """Such as `3g.20gb` or `1g.5gb+me`."""
    id: int
    """NVML's GPU instance profile ID on these products, as `nvidia-smi mig -lgip` prints it."""
    compute_slices: int
    memory_slices: int
    """How many neighbouring memory slices an instance takes."""
    starts: tuple[int, ...]
    """First memory slice of each possible placement."""
    memory_mib: int
    """What tenants see of it, in MiB, to the nearest that NVIDIA prints."""
    sm_count: int
    has_media: bool = False
    """Whether it takes the GPU's one set of JPEG and optical-flow engines (`+me`)."""

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def mask(self, start: int) -> int:
        """Memory slices of an instance that stands at `start`, as bits."""
        return ((1 << self.memory_slices) - 1) << start


@dataclass(frozen=True, eq=False)
class MigTable:
    """What one kind of GPU can be divided into. Compared by identity, so that what is computed of it can be kept."""

    memory_slices: int
    profiles: tuple[Profile, ...]
    """Largest first, those with media extensions after those without."""

    @cached_property
    def by_name(self) -> Mapping[str, Profile]:
        """The profiles by their names."""
        return {p.name: p for p in self.profiles}

    def find(self, name: str) -> Profile:
        """Find a profile; raises UnknownProfileError with the choices."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownProfileError(
                f"expected a MIG profile out of {', '.join(self.by_name) or 'none'}, found {quoted(name)}; name one of "
                "those"
            ) from None


class UnknownProfileError(ValueError):
    """This GPU has no such MIG profile; the message lists those that it has."""
