"""Planning MIG instances, against a search that knows nothing of the planner's.

`CARPOOL_EVERY_MIG_PLAN=1 pytest --timeout=0 tests/deviceplugin/test_mig.py` plans from every layout, whatever
of it is in use, to whatever may be wanted: 6,968,254 plans of a GPU of A100's and H100's geometry.
"""

import os
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pynvml
import pytest
from carpool_core.products import PRODUCTS
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.gpu import CreateInstance, DeviceError
from carpool_deviceplugin.mig import (
    Create,
    Destroy,
    Instance,
    MigPlan,
    MigRefusal,
    MigTable,
    OccupiedSlices,
    Placement,
    UnknownProfileError,
    fragmentation,
    free_counts,
    occupied,
    plan_mig,
)
from carpool_deviceplugin.mig_instances import apply_plan, read_instances, read_table
from carpool_deviceplugin.testing.gpus import A30, A100_40, A100_80, H100_80, H200, TABLES
from carpool_deviceplugin.testing.node import Node
from node_world import inspectable, run

Place = tuple[str, int]
Layout = frozenset[Place]


def at(table: MigTable, *places: Place) -> list[Instance]:
    return [Instance(i, Placement(table.find(name), start)) for i, (name, start) in enumerate(places, start=1)]


def wanted(table: MigTable, *names: str) -> list:
    return [table.find(name) for name in names]


def shown(steps) -> list[tuple[str, str, int]]:
    placements = [
        ("destroy", s.instance.placement) if isinstance(s, Destroy) else ("create", s.placement) for s in steps
    ]
    return [(what, p.profile.name, p.start) for what, p in placements]


@pytest.mark.parametrize(
    ("present", "in_use", "want", "steps"),
    [
        pytest.param([], [], [], [], id="nothing"),
        pytest.param([("1g.5gb", 2)], [], ["1g.5gb"], [], id="idle-is-kept-where-it-is"),
        pytest.param([("7g.40gb", 0)], [], [], [("destroy", "7g.40gb", 0)], id="returned"),
        pytest.param(
            [],
            [],
            ["3g.20gb", "2g.10gb"],
            [("create", "3g.20gb", 4), ("create", "2g.10gb", 0)],
            id="3g-where-no-4g-could-be",
        ),
        pytest.param([("2g.10gb", 0)], [1], ["2g.10gb", "3g.20gb"], [("create", "3g.20gb", 4)], id="beside-in-use"),
        pytest.param(
            [("1g.5gb", 0), ("1g.5gb", 4)],
            [1],
            ["1g.5gb", "3g.20gb"],
            [("destroy", "1g.5gb", 4), ("create", "3g.20gb", 4)],
            id="idle-moves-away",
        ),
        pytest.param([("1g.5gb", 3)], [1], ["3g.20gb"], [("create", "3g.20gb", 4)], id="not-wanted-but-in-use-stays"),
        pytest.param([], [], ["1g.5gb"], [("create", "1g.5gb", 6)], id="small-one-where-it-hurts-least"),
    ],
)
def test_plan_has_the_fewest_steps(present, in_use, want, steps) -> None:
    plan = plan_mig(A100_40, at(A100_40, *present), set(in_use), wanted(A100_40, *want))
    assert isinstance(plan, MigPlan)
    assert shown(plan.steps) == steps


@pytest.mark.parametrize(
    ("present", "in_use", "want", "blocking", "says"),
    [
        pytest.param([("1g.5gb", 0), ("1g.5gb", 1)], [2], ["7g.40gb"], [2], r"instance 2 \(1g.5gb on memory slice 1\)",
                     id="one-in-use"),
        pytest.param([("1g.5gb", 0), ("1g.5gb", 4)], [1, 2], ["3g.20gb"], [1], "in use in the way", id="either"),
        pytest.param([("1g.5gb", 0), ("1g.5gb", 4)], [1, 2], ["3g.20gb"] * 2, [1, 2], "and instance 2", id="both"),
        pytest.param([], [], ["7g.40gb", "1g.5gb"], [], "expected profiles that fit on one GPU together", id="never"),
        pytest.param([("1g.5gb+me", 0)], [1], ["1g.5gb+me"] * 2, [], "fit on one GPU together", id="one-media-only"),
    ],
)  # fmt: skip
def test_refusal_names_blocking_instances(present, in_use, want, blocking, says) -> None:
    found = plan_mig(A100_40, at(A100_40, *present), set(in_use), wanted(A100_40, *want))
    assert isinstance(found, MigRefusal)
    assert [i.id for i in found.blocking] == blocking
    assert re.search(says, found.message)


def test_unknown_profile_lists_the_profiles() -> None:
    with pytest.raises(UnknownProfileError, match=r"out of 4g.24gb, 2g.12gb.*found '3g.20gb'"):
        A30.find("3g.20gb")


def test_tables_agree_with_the_products() -> None:
    for product in PRODUCTS:
        table = TABLES.get(product.name)
        assert set(product.mig_profiles) <= set(table.by_name if table else ())
        if table:
            for profile in table.profiles:
                assert profile.memory_mib < product.memory_mib
                assert profile.sm_count <= product.sm_count
    assert TABLES.keys() - {product.name for product in PRODUCTS} == {"NVIDIA A100-PCIE-40GB"}


def test_fragmentation_grows_with_scatter() -> None:
    assert fragmentation(A100_40, OccupiedSlices()) == 0
    full = occupied([Placement(A100_40.find("7g.40gb"), 0)])
    assert fragmentation(A100_40, full) == 0, "nothing is free, so nothing is scattered"
    packed = occupied([Placement(A100_40.find("1g.5gb"), 0), Placement(A100_40.find("1g.5gb"), 1)])
    scattered = occupied([Placement(A100_40.find("1g.5gb"), 1), Placement(A100_40.find("1g.5gb"), 5)])
    assert fragmentation(A100_40, packed) < fragmentation(A100_40, scattered) <= 1
    assert free_counts(A100_40, packed) > free_counts(A100_40, scattered)


def every_layout(table: MigTable, *, media: bool) -> list[Layout]:
    places = [
        ((p.name, start), frozenset(range(start, start + p.memory_slices)), p.has_media)
        for p in table.profiles
        if media or not p.has_media
        for start in p.starts
    ]
    found: list[Layout] = []

    def extend(index: int, slices: frozenset[int], has_media: bool, chosen: Layout) -> None:
        if index == len(places):
            found.append(chosen)
            return
        extend(index + 1, slices, has_media, chosen)
        place, takes, takes_media = places[index]
        if not slices & takes and not (has_media and takes_media):
            extend(index + 1, slices | takes, has_media or takes_media, chosen | {place})

    extend(0, frozenset(), False, frozenset())
    return found


def multiset(layout: Layout) -> frozenset[tuple[str, int]]:
    return frozenset(Counter(name for name, _ in layout).items())


class Exhaustive:
    """Every layout of a GPU, and the fewest steps between two of them."""

    def __init__(self, table: MigTable, *, media: bool) -> None:
        self.table = table
        self.layouts = every_layout(table, media=media)
        self.by_multiset = defaultdict(list)
        for layout in self.layouts:
            self.by_multiset[multiset(layout)].append(layout)

    def fewest(self, used: Layout, idle: Layout, want: frozenset[tuple[str, int]]) -> int | None:
        target = frozenset((Counter(dict(multiset(used))) | Counter(dict(want))).items())
        ends = [end for end in self.by_multiset.get(target, ()) if used <= end]
        return min((len(idle - end) + len(end - used - idle) for end in ends), default=None)

    def check(self, used: Layout, idle: Layout, want: frozenset[tuple[str, int]]) -> float:
        present = at(self.table, *sorted(used), *sorted(idle))
        in_use = {i.id for i in present[: len(used)]}
        profiles = [self.table.find(name) for name, count in want for _ in range(count)]
        began = time.thread_time()  # what others do on the machine meanwhile is not the planner's
        found = plan_mig(self.table, present, in_use, profiles)
        took = time.thread_time() - began
        fewest = self.fewest(used, idle, want)
        if isinstance(found, MigRefusal):
            assert fewest is None, f"refused {used} {idle} {want}: {found.message}"
            assert {i.id for i in found.blocking} <= in_use
            return took
        assert len(found.steps) == fewest, f"{used} {idle} {want}: {[str(s) for s in found.steps]}"
        self.run(present, in_use, found)
        return took

    def run(self, present: list[Instance], in_use: set[int], plan: MigPlan) -> None:
        """Hardware: refuses what overlaps and what is in use."""
        there = {i.id: i.placement for i in present}
        for number, step in enumerate(plan.steps):
            if isinstance(step, Destroy):
                assert step.instance.id not in in_use
                del there[step.instance.id]
            else:
                assert isinstance(step, Create)
                assert occupied(there.values()).fits(step.placement)
                there[-1 - number] = step.placement
        occupied(there.values())


def shape(table: MigTable) -> list[tuple]:
    return [(p.compute_slices, p.memory_slices, p.starts, p.has_media) for p in table.profiles]


def test_a100_and_h100_have_one_geometry() -> None:
    """Exhaustive tests of one are exhaustive for all."""
    assert shape(A100_40) == shape(A100_80) == shape(H100_80) == shape(H200)


def test_plans_beside_any_layout_in_use() -> None:
    """Exhaustive: each layout that may be in use, with each multiset that may be wanted (without media extensions)."""
    search = Exhaustive(A100_40, media=False)
    assert (len(search.layouts), len(search.by_multiset)) == (723, 78)
    for used in search.layouts:
        for want in search.by_multiset:
            search.check(used, frozenset(), want)


@pytest.mark.parametrize("table", [A100_40, H100_80, A30], ids=["A100", "H100", "A30"])
def test_plans_between_all_pairs_of_profiles(table: MigTable) -> None:
    """Every pair of multisets, media extensions too; of the layouts and uses of each, one drawn by chance."""
    search, draw = Exhaustive(table, media=True), random.Random(7)  # noqa: S311  # reproducible, not secret
    slow: list[tuple[Layout, Layout, frozenset]] = []
    for have in search.by_multiset.values():
        for want in search.by_multiset:
            layout = draw.choice(have)
            used = frozenset(place for place in sorted(layout) if draw.random() < 0.4)
            if search.check(used, layout - used, want) > 0.01:
                slow.append((used, layout - used, want))
    for case in slow:  # the machine may have been busy: what is slow is slow again
        assert min(search.check(*case) for _ in range(5)) <= 0.01


def test_first_plan_of_a_process_is_fast() -> None:
    """Regression: with empty caches a plan took 8.5 ms."""
    search = Exhaustive(A100_40, media=True)

    def first(want: frozenset) -> float:
        free_counts.cache_clear()
        return search.check(frozenset(), frozenset(), want)

    for want in search.by_multiset:
        assert min(first(want) for _ in range(3)) <= 0.005, "half of what is allowed"


DRAWN = 2000


def cases(search: Exhaustive) -> Iterator[tuple[Layout, Layout, frozenset]]:
    """What is in use, idle and wanted: all there are where that was asked for, otherwise some by chance."""
    wishes = list(search.by_multiset)
    if os.environ.get("CARPOOL_EVERY_MIG_PLAN"):
        for layout in search.layouts:
            for count in range(len(layout) + 1):
                for used in map(frozenset, combinations(layout, count)):
                    yield from ((used, layout - used, want) for want in wishes)
        return
    draw = random.Random(11)  # noqa: S311  # reproducible, not secret
    for _ in range(DRAWN):
        layout = draw.choice(search.layouts)
        used = frozenset(place for place in sorted(layout) if draw.random() < 0.5)
        yield used, layout - used, draw.choice(wishes)


@pytest.mark.parametrize("media", [False, True], ids=["without-media", "with-media"])
def test_plans_from_any_layout_to_any_wish(media: bool) -> None:
    search = Exhaustive(A100_40, media=media)
    done = sum(search.check(*case) >= 0 for case in cases(search))
    everything = sum(2 ** len(layout) for layout in search.layouts) * len(search.by_multiset)
    assert done == (everything if os.environ.get("CARPOOL_EVERY_MIG_PLAN") else DRAWN)
    assert everything == (6_064_000 if media else 904_254)


def test_refusal_names_the_fewest_instances() -> None:
    search, draw = Exhaustive(A100_40, media=False), random.Random(3)  # noqa: S311  # reproducible, not secret
    for _ in range(300):
        used, want = draw.choice(search.layouts), draw.choice(list(search.by_multiset))
        present = at(A100_40, *sorted(used))
        profiles = [A100_40.find(name) for name, count in want for _ in range(count)]
        found = plan_mig(A100_40, present, {i.id for i in present}, profiles)
        if isinstance(found, MigRefusal):
            fewest = next(
                count
                for count in range(1, len(used) + 1)
                for leaving in combinations(used, count)
                if search.fewest(used - set(leaving), frozenset(), want) is not None
            )
            assert len(found.blocking) == fewest


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return inspectable(tmp_path)


def test_plan_prints_and_applies(node: Node) -> None:
    printed = run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb,2g.10gb")
    assert (printed.exit_code, len(printed.output.splitlines())) == (0, 3)
    assert printed.output.startswith("note: Carpool's agent creates its own instances and assigns none of these")
    assert [line.split()[:2] for line in printed.output.splitlines()[1:]] == [["would", "create"]] * 2
    assert node.nvml.gpus[0].mig.instances == {}
    applied = run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb,2g.10gb", "--apply")
    assert [line.split()[0] for line in applied.output.splitlines()[1:]] == ["create", "create", "done"]
    assert sorted(i.profile.name for i in node.nvml.gpus[0].mig.instances.values()) == ["2g.10gb", "3g.20gb"]
    assert "nothing to do" in run(node, "plan", "--gpu", "0", "--to", "mig:2g.10gb,3g.20gb").output
    assert "done" in run(node, "plan", "--gpu", "0", "--to", "mig:", "--apply", "--destroy-others").output
    assert node.nvml.gpus[0].mig.instances == {}


def test_foreign_instances_need_destroy_others(node: Node) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    dry = run(node, "plan", "--gpu", "0", "--to", "mig:")
    assert "(not created by the agent: takes --destroy-others)" in dry.output
    refused = run(node, "plan", "--gpu", "0", "--to", "mig:", "--apply")
    assert (refused.exit_code, len(node.nvml.gpus[0].mig.instances)) == (2, 1)
    assert "found instances of others: instance 1 (3g.20gb on memory slices 4-7)" in refused.output


def test_instances_of_the_agent_are_in_use_with_a_reservation_and_need_no_flag_without(node: Node) -> None:
    devices = node.devices()
    profile = node.nvml.gpus[0].mig.table.find("1g.5gb")
    for start, pod in ((6, PodUid("uid-a")), (5, None)):
        devices.apply(devices.uuids[0], CreateInstance(Placement(profile, start), pod))
    refused = run(node, "plan", "--gpu", "0", "--to", "mig:7g.40gb", "--apply")
    assert "(1g.5gb on memory slice 6) in use" in refused.output
    done = run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    assert (done.exit_code, [i.start for i in node.nvml.gpus[0].mig.instances.values()]) == (0, [6]), done.output


def test_instances_in_use_are_reported_and_kept(node: Node) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    node.nvml.start(0, 42, 100, instance=1)
    for_nothing = run(node, "plan", "--gpu", "0", "--to", "mig:", "--apply", "--destroy-others")
    assert for_nothing.exit_code == 1
    assert for_nothing.output.splitlines()[:2] == [
        "stays: instance 1 (3g.20gb on memory slices 4-7), in use",
        "nothing to do",
    ]
    assert "expected 'mig:', found more, in use: instance 1 (3g.20gb" in for_nothing.output
    assert "done" not in for_nothing.output
    wanted = run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    assert (wanted.exit_code, wanted.output.splitlines()[-1]) == (0, "done")


def test_mig_off_names_the_command(node: Node) -> None:
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = False
    printed = run(node, "plan", "--gpu", "0", "--to", "mig:7g.40gb").output.splitlines()
    assert [line.split()[0] for line in printed] == ["before:", "note:", "would"]
    refused = run(node, "plan", "--gpu", "0", "--to", "mig:7g.40gb", "--apply")
    assert refused.exit_code == 2
    assert ": expected MIG to be switched on, found: MIG is switched off. Switching it on needs" in refused.output
    assert run(node, "plan", "--gpu", "0", "--to", "mig:").output == "nothing to do: MIG is switched off\n"


def test_refusals_of_the_gpu_differ_from_invalid_input(node: Node) -> None:
    node.nvml.fail_next("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_NO_PERMISSION)
    result = run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    assert result.exit_code == 1
    assert "Insufficient Permissions; run the agent as root with the device nodes and, for MIG, CAP_SYS_ADMIN" in (
        result.output
    )
    assert "it was undone" in result.output
    assert result.output.count(node.nvml.gpus[0].uuid) == 1


FAILING = ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceGetInfo"]


@pytest.mark.parametrize("function", FAILING)
@pytest.mark.parametrize("at", range(6))
def test_failed_step_is_undone(node: Node, function: str, at: int) -> None:
    devices = node.devices()
    uuid: GpuUuid = devices.uuids[0]
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb,1g.5gb", "--apply")
    table = read_table(devices.session, uuid)
    before = read_instances(devices.session, uuid, table)
    plan = plan_mig(table, before, set(), [table.find("3g.20gb"), table.find("4g.20gb")])
    calls = iter(range(1000))

    def fail(name: str) -> None:
        if name == function and next(calls) == at:
            node.nvml.fail_next(function, pynvml.NVML_ERROR_UNKNOWN)

    node.nvml.before_each(fail)
    try:
        apply_plan(devices.session, uuid, plan, lambda: 0.0)
    except DeviceError as e:
        assert "it was undone" in str(e)  # noqa: PT017  # some calls are made fewer times than others
        assert {i.placement for i in read_instances(devices.session, uuid, table)} == {i.placement for i in before}
    else:
        assert len(read_instances(devices.session, uuid, table)) == 2


def test_processes_that_started_after_the_plan_keep_their_instance(node: Node) -> None:
    devices = node.devices()
    uuid = devices.uuids[0]
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    table = read_table(devices.session, uuid)
    (instance,) = read_instances(devices.session, uuid, table)
    plan = plan_mig(table, [instance], set(), [table.find("7g.40gb")])
    node.nvml.start(0, 42, 100, instance=instance.id)
    with pytest.raises(DeviceError, match=r": destroy instance 7 .* failed: .* make a new plan; it was undone"):
        apply_plan(devices.session, uuid, plan, lambda: 0.0)
    assert read_instances(devices.session, uuid, table) == [instance]


def test_plan_has_a_deadline(node: Node) -> None:
    devices = node.devices()
    uuid = devices.uuids[0]
    table = read_table(devices.session, uuid)
    plan = plan_mig(table, [], set(), [table.find("1g.5gb")] * 3)
    seconds = iter(range(0, 1000, 20))
    with pytest.raises(DeviceError, match=r"expected all steps within 30 s.*it was undone"):
        apply_plan(devices.session, uuid, plan, lambda: float(next(seconds)))
    assert read_instances(devices.session, uuid, table) == []
