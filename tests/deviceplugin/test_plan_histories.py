"""Planning one GPU through any history: it converges, and disturbs nobody."""

from dataclasses import replace

from carpool_core.resources.node import Reservation
from carpool_core.values import JobUid, PodUid
from carpool_deviceplugin.partitions.plan import plan
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import EXCLUSIVE, IDLE, MPS, TIME_SLICING, apply

pods = st.sampled_from("abcd")
reservation_args = st.tuples(st.sampled_from([EXCLUSIVE, TIME_SLICING, MPS]), st.sampled_from([None, 10_000, 30_000]))
events = st.one_of(
    st.tuples(st.just("reserve"), pods, reservation_args),
    st.tuples(st.just("replace"), pods, reservation_args),
    st.tuples(st.just("release"), pods, st.none()),
    st.tuples(st.just("start"), pods, st.none()),
    st.tuples(st.just("end"), pods, st.none()),
    st.tuples(st.just("restart"), pods, st.none()),
    st.tuples(st.just("hang"), pods, st.none()),
    st.tuples(st.just("die"), pods, st.none()),
    st.tuples(st.just("stop half"), pods, st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=25))
def test_any_history_converges_and_disturbs_nobody(history) -> None:
    actual, wanted, held, promises, behind = IDLE, {}, frozenset(), {}, set()
    for what, pod, args in history:
        uid = PodUid(f"uid-{pod}")
        if what == "replace":
            wanted.clear()
        if what in ("reserve", "replace") and uid not in wanted:
            mode, memory = args
            wanted[uid] = Reservation(
                pod_uid=uid,
                pod_namespace="one" if pod in "ab" else "another",
                pod_name=pod,
                job_uid=JobUid(pod),
                job_name=pod,
                gpu_uuids=[IDLE.uuid],
                mode=mode,
                memory_limit_mib=memory,
                reserved_at=f"{len(wanted)}",
            )
        elif what == "release":
            wanted.pop(uid, None)
        elif what == "start" and uid in held:
            actual = replace(actual, tenants=actual.tenants | {uid})
        elif what == "end":
            actual = replace(actual, tenants=actual.tenants - {uid})
        elif what == "restart":
            held = frozenset()  # an agent that knows nothing any more still sees who is there
        elif what == "hang":
            actual = replace(actual, mps_hangs=actual.mps_daemon)
        elif what == "die" and actual.mps_daemon:
            actual, behind = replace(actual, mps_daemon=False, mps_hangs=False, mps_left=True), set()
        elif what == "stop half" and actual.mps_daemon and not actual.tenants:
            actual, behind = replace(actual, mps_daemon=False, mps_untidied=True, limits={}), set()
        planned = plan(actual, wanted.values(), held)
        for step in planned.steps:
            actual = apply(actual, step)
            behind = behind if actual.mps_daemon else set()
        told = {*planned.ready, *(planned.waiting or {}), *(planned.refused or {})}
        assert told == wanted.keys(), "every reservation gets one answer"
        in_use = {uid for uid in actual.tenants & wanted.keys() if promises.get(uid) == wanted[uid]}
        assert in_use <= set(planned.ready), "who runs on what it was promised keeps it"
        again = plan(actual, wanted.values(), frozenset(planned.ready))
        assert again.steps == (), "one pass is enough"
        assert set(again.ready) == set(planned.ready)
        promised = [wanted[uid] for uid in planned.ready]
        assert len({r.mode for r in promised}) <= 1
        assert all(actual.mode is r.mode for r in promised)
        if promised and promised[0].mode is EXCLUSIVE:
            assert len(promised) == 1
        if promised and promised[0].mode is MPS:
            assert actual.mps_daemon or actual.tenants, "who can connect, has somebody to connect to"
            assert actual.tenants or not actual.mps_hangs
            behind |= {r.pod_namespace for r in promised}
            assert len(behind) == 1, "a daemon serves one namespace all its life"
            assert sum(r.memory_limit_mib or 0 for r in promised) <= actual.usable_mib
        held = frozenset(planned.ready)
        promises |= {uid: wanted[uid] for uid in planned.ready}
    actual = replace(actual, tenants=frozenset())
    for step in plan(actual, []).steps:
        actual = apply(actual, step)
    assert actual == IDLE, "everything is returned in the end"
