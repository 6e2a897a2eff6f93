"""What is answered of a job on a GPU product, and the sentence that says what that was learned from."""

from collections.abc import Sequence
from dataclasses import dataclass

from carpool_core.products import find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.prediction import ProductPrediction

from carpool_predictor.calibration import recalling
from carpool_predictor.cost_models import activity
from carpool_predictor.cost_models.memory import MemoryModel


@dataclass(frozen=True, slots=True)
class OnProduct:
    """A job on one GPU product, and which of the answers were learned from such jobs."""

    prediction: ProductPrediction
    memory_calibrated: bool
    """Whether memory was measured on this product in this precision."""
    activity_inside: bool
    activity_measured: bool
    """Whether such steps were measured on this very product in this precision."""
    step_time_inside: bool
    is_first: bool = False
    """Whether its memory counts with more room, because no run of it was seen there."""


def message_of(features: ModelFeatures, model: MemoryModel, answers: Sequence[OnProduct], *, is_inside: bool) -> str:
    """Say what a prediction comes from, and how far it can be relied on.

    Args:
        features: Of the job's model.
        model: The memory model.
        answers: What was predicted, product by product.
        is_inside: Whether the job is like those whose memory was measured.
    """
    batches = ", ".join(str(step.batch_size) for step in features.steps)
    told = [f"from training steps traced at batch sizes {batches}"]
    told += [said for answer in answers if (said := recalling.taught_by(answer.prediction)) is not None]
    known = [a.prediction for a in answers if a.prediction.memory.learned_runs]
    if excluded := [p.product for p in known if recalling.is_excluded(p.memory, find_product(p.product))]:
        told.append(
            f"does not fit {', '.join(excluded)}, where a run of this model (maybe another job's) died of memory with "
            "all that such a GPU has"
        )
    untrusted = [a.prediction for a in answers if not a.prediction.memory.trusted]
    if lost := [p.product for p in untrusted if p.memory.is_lost]:
        told.append(
            f"runs alone on {', '.join(lost)}, because earlier runs of this model (other jobs' too) died of memory "
            "there, or took nearly all"
        )
    unproven = [p for p in untrusted if not p.memory.is_lost]
    rare = [p.product for p in unproven if recalling.is_beyond(p.memory, find_product(p.product))]
    if alone := [p.product for p in unproven if p.product not in rare]:
        told.append(f"runs alone on {', '.join(alone)} until enough like it was measured there")
    if rare:
        told.append(f"runs alone on {', '.join(rare)} until a run has shown its peak, which in rare cases does not fit")
    if first := [answer.prediction.product for answer in answers if answer.is_first]:
        told.append(
            f"its first run on {', '.join(first)} counts with {recalling.FIRST:g} times the bound, and with "
            f"{recalling.FIRST_UNENFORCED:g} times where jobs of one GPU take turns, because nothing limits them there"
        )
    if not is_inside:
        told.append("the model is unlike those that were measured, so the bound on memory is wider")
    if not all(answer.memory_calibrated for answer in answers):
        told.append(
            f"memory is calibrated on {model.product} in {model.precision} only, so the bound is wider on "
            "other GPU products and precisions"
        )
    outside = [a.prediction.product for a in answers if not a.activity_inside]
    if outside:
        where = "" if len(outside) == len(answers) else f" on {', '.join(outside)}"
        told.append(f"activity{where} is a roofline estimate, because no step like this was measured")
    if any(answer.activity_inside and not answer.activity_measured for answer in answers):
        measured = activity.shipped()
        told.append(
            f"activity was measured on {measured.product} in {measured.precision} only, so its interval elsewhere is "
            "assumed, and holds less often than its 90%"
        )
    if not all(answer.step_time_inside for answer in answers):
        told.append("step times with tensor cores were not measured, so their interval is wider")
    return "; ".join(told)
