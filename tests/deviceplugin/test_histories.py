"""Random histories of one real GPU, with faults and sudden deaths of the agent in any call.

They end as wanted, or with a named refusal; as wanted where an agent to which nothing ever happened would say so.
`CARPOOL_HISTORIES=10000 pytest tests/deviceplugin/test_histories.py`
runs ten thousand.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from agent_world import GpuAgent, reservation, states
from carpool_core.values import PartitionState, PodUid, SharingMode
from carpool_deviceplugin.partitions import plan
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from hypothesis import given, settings
from hypothesis import strategies as st
from nvml_history import MPS, READY, History, KilledError
from plan_world import EXCLUSIVE, IDLE, TIME_SLICING, apply
from structlog.testing import capture_logs

HISTORIES, EVENTS, PARTS = int(os.environ.get("CARPOOL_HISTORIES", "450")), 12, 3


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with capture_logs():
        yield


@pytest.mark.parametrize("part", range(PARTS))
async def test_every_history_ends_well(tmp_path: Path, part: int) -> None:
    for number in range(len(range(part, HISTORIES, PARTS))):
        seed = 1_000_000 * part + number
        history = History(seed, tmp_path / str(number))
        for _ in range(EVENTS):
            history.event()
            history.dangerous()
            await history.look()
            history.safe()
            history.check()
        await history.settle()
        for pod, partition in history.worker.partitions.items():
            assert partition.state is READY or partition.message, (seed, pod)
        for pod in list(history.running):
            history.end(pod)
        if history.takes_reset:
            history.restart_driver()
        is_possible = await history.is_ready_afresh(tmp_path / f"{number}-fresh")
        await history.settle()
        for pod in history.wanted:
            partition = history.worker.partitions[PodUid(uid(pod))]
            assert partition.state in (READY, PartitionState.FAILED), (seed, pod, "no pod waits at the end")
            assert partition.state is READY or not is_possible, (seed, pod, partition.message)
            if partition.state is READY and history.wanted[pod].mode is MPS:
                assert not any(d.is_wedged for d in history.mps.daemons.values()), (seed, pod, "cannot connect")
                assert history.mps.daemons, (seed, pod, "cannot connect")
        history.wanted.clear()
        for _ in range(2):
            await history.look()
        actual = history.devices.actual(history.devices.uuids[0])
        assert (actual.mode, actual.mps_daemon, actual.limits, actual.problem) == (None, False, {}, ""), seed
        left = [i for i in history.mig.instances.values() if i is not history.foreign_instances]
        assert left == [], (seed, "instances without a pod")
        assert not any(history.mps.servers_of.values()), (seed, "servers of no daemon")


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
def test_any_history_converges_without_disturbing_running_pods(history) -> None:
    actual, wanted, held, promises, behind = IDLE, {}, frozenset(), {}, set()
    for what, pod, args in history:
        uid = PodUid(f"uid-{pod}")
        if what == "replace":
            wanted.clear()
        if what in ("reserve", "replace") and uid not in wanted:
            mode, memory = args
            namespace, at = "one" if pod in "ab" else "another", f"{len(wanted)}"
            wanted[uid] = reservation(
                pod, IDLE.uuid, pod_namespace=namespace, mode=mode, memory_limit_mib=memory, reserved_at=at
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
            actual = replace(actual, mps_hung=actual.mps_daemon)
        elif what == "die" and actual.mps_daemon:
            actual, behind = replace(actual, mps_daemon=False, mps_hung=False, mps_servers_left=True), set()
        elif what == "stop half" and actual.mps_daemon and not actual.tenants:
            actual, behind = replace(actual, mps_daemon=False, mps_cleanup_pending=True, limits={}), set()
        planned = plan(actual, wanted.values(), held)
        for step in planned.steps:
            actual = apply(actual, step)
            behind = behind if actual.mps_daemon else set()
        answered = {*planned.ready, *planned.waiting, *planned.refused}
        assert answered == wanted.keys(), "every reservation gets one answer"
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
            assert actual.mps_daemon or actual.tenants, "clients need a daemon"
            assert actual.tenants or not actual.mps_hung
            behind |= {r.pod_namespace for r in promised}
            assert len(behind) == 1, "a daemon serves one namespace all its life"
            assert sum(r.memory_limit_mib or 0 for r in promised) <= actual.usable_mib
        held = frozenset(planned.ready)
        promises |= {uid: wanted[uid] for uid in planned.ready}
    actual = replace(actual, tenants=frozenset())
    for step in plan(actual, []).steps:
        actual = apply(actual, step)
    assert actual == IDLE, "everything is returned in the end"


class Deadly(FakeMpsCommands):
    """Programs in whose calls the agent may die: before they do anything, and after they did."""

    def __init__(self) -> None:
        super().__init__()
        self.left: Iterator[int] = count()

    def step(self) -> None:
        if next(self.left, None) is None:
            raise KilledError

    def start(self, daemon, shm) -> None:
        self.step()
        super().start(daemon, shm)
        self.step()

    def ask(self, daemon, command) -> str:
        self.step()
        answer = super().ask(daemon, command)
        self.step()
        return answer


KILLED = {
    "MPS": ("T4", [("a", MPS), ("b", MPS)], [("c", EXCLUSIVE)]),
    "MIG on Ampere": ("A100-40", [("a", "1g.5gb"), ("b", "4g.20gb")], [("c", EXCLUSIVE)]),
    "MIG on Hopper": ("H100", [("a", "1g.10gb"), ("b", "4g.40gb")], []),
}


@pytest.mark.parametrize(("kind", "first", "then"), KILLED.values(), ids=KILLED)
async def test_agent_killed_at_each_call_is_continued(tmp_path: Path, kind: str, first, then) -> None:
    """At every call of the driver and of MPS; the next agent prepares what is wanted, and leaves nothing behind."""
    for at in count():
        mps = Deadly()
        agent = GpuAgent(Node(FakeNvml([kind]), mps, tmp_path / str(at), may_switch_mig=True))
        mps.left = iter(range(at))
        agent.node.nvml.before_each(lambda _, mps=mps: mps.step())
        try:
            for wanted in (first, then, []):
                await agent.want(*wanted)
        except KilledError:
            mps.left = count()
        else:
            break
        agent.restart()
        for wanted in (first, then, []):
            found = await agent.want(*wanted)
            assert set(states(found).values()) <= {READY}, at
            actual, modes = agent.devices.actual(agent.gpu), {r.mode for r in agent.reservations(*wanted)}
            has_daemon = modes == {MPS}
            assert ({actual.mode} - {None}, actual.mps_daemon, bool(mps.daemons)) == (modes, has_daemon, has_daemon), at
            assert actual.limits.keys() == {uid(pod) for pod, _ in wanted if has_daemon}, at
            profiles = sorted(what for _, what in wanted if not isinstance(what, SharingMode))
            assert sorted(name.partition("@")[0] for name in agent.instances) == profiles, at
    assert at > 40


@pytest.mark.parametrize("where", ["state", "cdi"])
def test_half_written_files_of_a_killed_agent_are_no_files(tmp_path: Path, where: str) -> None:
    """Files are replaced atomically; the rest of an interrupted write is never read."""
    node = Node(FakeNvml(["T4"]), FakeMpsCommands(), tmp_path)
    gpu = node.devices().uuids[0]
    directory = tmp_path / ("state/gpus" if where == "state" else "cdi")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f".{gpu}.json.77.new").write_text('{"mode": "MP')
    assert node.devices().actual(gpu).mode is None
    assert node.devices().access(gpu).needs_runtime_env
