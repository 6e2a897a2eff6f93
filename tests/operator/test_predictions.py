"""Predictions in the background."""

import msgspec
from carpool_core.testing.clock import FakeClock
from carpool_operator.predictions import Predictions, known_products
from operator_fixtures import A100, FEATURES, job
from operator_world import FakeTracer


def predictions(woken: list[str]) -> Predictions:
    return Predictions(FakeTracer(), FakeClock(), wake=woken.append, took=lambda _: None)


async def test_burst_of_different_jobs_is_computed_once_each() -> None:
    """Regression: more jobs at once than recent results are kept asked again and again for what was overwritten."""
    woken: list[str] = []
    service = predictions(woken)
    for number in range(600):
        service.request(f"default/{number}", job().spec, f"digest-{number}", (A100,))
    await service.idle()
    assert len(woken) == 600
    first = service.get("default/0", "digest-0", (A100,))
    assert first is not None
    assert first.input_digest == "digest-0"
    service.forget("default/0")
    assert service.get("default/0", "digest-0", (A100,)) is None
    await service.close()


async def test_jobs_alike_share_one_computation() -> None:
    woken: list[str] = []
    service = predictions(woken)
    for key in ("a", "b"):
        service.request(key, job().spec, "digest", (A100,))
    await service.idle()
    assert sorted(woken) == ["a", "b"]
    assert service.get("c", "digest", (A100,)) is not None
    await service.close()


async def test_prediction_of_an_older_input_is_not_taken_for_the_new_one() -> None:
    service = predictions([])
    service.request("a", job().spec, "old", (A100,))
    await service.idle()
    assert service.get("a", "new", (A100,)) is None
    assert service.get("a", "old", (A100, "Tesla T4")) is None
    await service.close()


def test_products_that_the_predictor_does_not_know_are_left_out() -> None:
    assert [p.name for p in known_products((A100, "Voodoo 2"))] == [A100]


def test_features_fixture_is_well_formed() -> None:
    assert msgspec.to_builtins(job().spec.model) == {"features": FEATURES}
