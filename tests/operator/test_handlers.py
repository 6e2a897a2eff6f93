"""What kopf hands over, and how it is configured."""

import asyncio

import kopf
from carpool_core.settings import KubeSettings
from carpool_operator.handlers import hear, kopf_settings, registry_for
from operator_fixtures import job_body
from operator_world import World


def event(kind: str | None, **metadata: str) -> kopf.RawEvent:
    body = job_body()
    body["metadata"] |= {"uid": "u1", "resourceVersion": "5", **metadata}
    return kopf.RawEvent(type=kind, object=body)  # type: ignore[typeddict-item]


def test_events_feed_the_jobs() -> None:
    operator = World().operator
    for kind in (None, "ADDED", "MODIFIED"):
        hear(operator, event(kind))
    assert len(operator.jobs) == 1
    hear(operator, event("DELETED", uid="of-a-namesake"))
    assert len(operator.jobs) == 1
    hear(operator, event("DELETED"))
    assert len(operator.jobs) == 0


def test_older_news_is_ignored() -> None:
    operator = World().operator
    hear(operator, event("MODIFIED", resourceVersion="9"))
    hear(operator, event("MODIFIED", resourceVersion="10"))
    hear(operator, event("MODIFIED", resourceVersion="8"))
    job = operator.jobs.get("default/x")
    assert job is not None
    assert job.metadata.resource_version == "10"


def test_list_in_mid_life_asks_for_a_sweep() -> None:
    operator = World().operator
    hear(operator, event(None))
    assert not operator.is_sweep_wanted, "the first list tells of everything"
    hear(operator, event(None))
    assert operator.is_sweep_wanted


def test_malformed_job_stops_nothing() -> None:
    operator = World().operator
    odd = event("ADDED")
    odd["object"]["spec"]["workers"] = "many"  # type: ignore[typeddict-item]
    hear(operator, odd)
    assert len(operator.jobs) == 0


def test_kopf_leaves_no_names_of_its_own_in_objects() -> None:
    settings = kopf_settings()
    assert settings.persistence.finalizer == "carpool.dev/operator"
    assert not settings.posting.enabled
    assert settings.peering.standalone
    registry = registry_for(World().operator, KubeSettings(), World().clock, asyncio.Event())
    assert not registry._changing.get_all_handlers(), "a handler of changes would write annotations"
    assert not registry._spawning.get_all_handlers(), "a daemon would add a finalizer"
