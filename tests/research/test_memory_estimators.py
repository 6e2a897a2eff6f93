"""The contract of all memory estimators."""

import random

import numpy as np
import pytest
import torch
from carpool_research.memory import baselines
from carpool_research.memory.baselines import ESTIMATORS, Classifier, Estimator
from carpool_research.memory.fit import Sample
from memory_samples import sample

LARGEST_MIB = 10 * 40960


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    noise = random.Random(1)  # noqa: S311
    return [sample(number, batch, noise) for number in range(24) for batch in (8, 32, 64)]


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the training of networks, whose accuracy is not tested here."""
    monkeypatch.setattr(baselines, "EPOCHS", 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_every_estimator_keeps_the_contract(estimator: Estimator, samples: list[Sample]) -> None:
    learned, unseen = samples[:60], samples[60:]
    estimate = estimator(learned, 3)
    answers = estimate(unseen)
    assert answers.shape == (len(unseen),)
    assert np.isfinite(answers).all()
    assert (answers > 0).all()
    assert (answers < LARGEST_MIB).all()
    assert np.array_equal(estimator(learned, 3)(unseen), answers), "the same seed gives the same answers"
    backwards = estimate(unseen[::-1])[::-1]
    assert np.allclose(backwards, answers), "an estimate does not depend on other samples"
    changed = [Sample(s.model, "other", s.batch_size, 1.0, s.fake_tensor_mib, s.features, s.cost) for s in unseen]
    assert np.array_equal(estimate(changed), answers), "measurement and family are not read"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ours", "SchedTune-like boosting"])
def test_fitted_estimators_beat_a_constant(name: str, samples: list[Sample]) -> None:
    learned = [s for s in samples if s.family != "f0"]
    unseen = [s for s in samples if s.family == "f0"]
    measured = np.array([s.measured_mib for s in unseen])

    def error(which: str) -> float:
        return float(np.median(np.abs(ESTIMATORS[which](learned, 0)(unseen) / measured - 1)))

    assert error(name) < error("constant")


def test_networks_are_equal_for_any_number_of_threads(samples: list[Sample]) -> None:
    """Regression: the order of sums depended on threads, so that the model card differed between machines."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(Classifier(samples, 0, tokens=True))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, other = (network.state_dict() for classifier in found for network in classifier.members)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
