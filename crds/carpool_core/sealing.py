"""A prediction that travels on its job's pod, sealed: whoever may write pods may write their annotations.

The operator writes it there with the pod, so that kube-scheduler's extender need not wait until the job's status tells
it, a write that costs the API server as much as several pods. Only who has the key can seal one; it holds for one job
and one generation of its spec.
"""

import hashlib
import hmac
from pathlib import Path

import msgspec

from carpool_core.keys import ANNOTATION_PREDICTION
from carpool_core.resources.prediction import Prediction
from carpool_core.settings import SettingsError

LEAST_BYTES = 32
"""Shortest key, as long as the seal."""

_PURPOSE = ANNOTATION_PREDICTION.encode() + b"\n"
"""Stands before what is sealed, so that the key could seal other things, too."""


class Sealed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is sealed."""

    job: str
    """UID of the job."""
    generation: int
    """`metadata.generation` of the job that it was predicted from."""
    prediction: Prediction


class Sealer:
    """Seals predictions, and opens what was sealed with the same key.

    Args:
        key: At least 32 bytes that nobody else knows.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, sealed: Sealed) -> str:
        """Return the annotation's value."""
        text = msgspec.json.encode(sealed)
        return f"{self._seal(text)} {text.decode()}"

    def open(self, value: str, job: str, generation: int) -> Prediction | None:
        """Return the prediction; None where nobody with the key sealed it for this generation of this job.

        Args:
            value: The annotation's value.
            job: UID of the job.
            generation: Its `metadata.generation`.
        """
        seal, _, text = value.partition(" ")
        if not hmac.compare_digest(seal.encode(), self._seal(text.encode()).encode()):
            return None
        try:
            found = msgspec.json.decode(text, type=Sealed)
        except msgspec.DecodeError:
            return None  # of another version
        return found.prediction if (found.job, found.generation) == (job, generation) else None

    def _seal(self, text: bytes) -> str:
        return hmac.new(self._key, _PURPOSE + text, hashlib.sha256).hexdigest()


def sealer_of(path: Path | None) -> Sealer | None:
    """Return a sealer with the key that a file holds; None where no file is named.

    Raises:
        SettingsError: The file cannot be read, or is too short for a key.
    """
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(
            f"CARPOOL_PREDICTION_KEY: expected a file with a key, cannot read {path}: {error}"
        ) from error
    if len(key) < LEAST_BYTES:
        raise SettingsError(
            f"CARPOOL_PREDICTION_KEY: expected at least {LEAST_BYTES} bytes in {path}, found {len(key)}: "
            "write as many random ones, the same for operator and extender"
        )
    return Sealer(key)
