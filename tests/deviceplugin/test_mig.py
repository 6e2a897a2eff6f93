"""MIG plans, compared with an exhaustive search, and `carpool node plan`."""

import json
import os
import random
import re
import subprocess
from collections import Counter, defaultdict
from itertools import chain, combinations
from pathlib import Path

import pynvml
import pytest
from carpool_core.products import PRODUCTS
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.gpu import CreateInstance, DeviceError
from carpool_deviceplugin.mig import (
    Instance,
    MigPlan,
    MigRefusal,
    MigTable,
    Placement,
    UnknownProfileError,
    occupied,
    plan_mig,
)
from carpool_deviceplugin.mig_instances import apply_plan, read_instances, read_table
from carpool_deviceplugin.testing.gpus import A30, A100_40, A100_80, H100_80, H200, TABLES
from carpool_deviceplugin.testing.node import Node
from carpool_e2e.chart import PROJECT
from node_world import inspectable, run

Place = tuple[str, int]
Layout = frozenset[Place]


def at(table: MigTable, *places: Place) -> list[Instance]:
    return [Instance(i, Placement(table.find(name), start)) for i, (name, start) in enumerate(places, start=1)]


def wanted(table: MigTable, *names: str) -> list:
    return [table.find(name) for name in names]


def shown(plan: MigPlan) -> list[tuple[str, str, int]]:
    destroyed = [("destroy", i.placement.profile.name, i.placement.start) for i in plan.destroyed]
    return destroyed + [("create", p.profile.name, p.start) for p in plan.created]


@pytest.mark.parametrize(
    ("present", "in_use", "want", "steps"),
    [
        pytest.param([], [], [], [], id="nothing"),
        pytest.param([("1g.5gb", 2)], [], ["1g.5gb"], [], id="idle-is-kept-where-it-is"),
        pytest.param([("7g.40gb", 0)], [], [], [("destroy", "7g.40gb", 0)], id="returned"),
        pytest.param([], [], ["3g.20gb", "2g.10gb"], [("create", "3g.20gb", 4), ("create", "2g.10gb", 0)],
                     id="3g-where-no-4g-could-be"),
        pytest.param([("2g.10gb", 0)], [1], ["2g.10gb", "3g.20gb"], [("create", "3g.20gb", 4)], id="beside-in-use"),
        pytest.param([("1g.5gb", 0), ("1g.5gb", 4)], [1], ["1g.5gb", "3g.20gb"],
                     [("destroy", "1g.5gb", 4), ("create", "3g.20gb", 4)], id="idle-moves-away"),
        pytest.param([("1g.5gb", 3)], [1], ["3g.20gb"], [("create", "3g.20gb", 4)], id="not-wanted-but-in-use-stays"),
        pytest.param([], [], ["1g.5gb"], [("create", "1g.5gb", 6)], id="small-one-where-it-hurts-least"),
    ],
)  # fmt: skip
def test_plan_has_the_fewest_steps(present, in_use, want, steps) -> None:
    plan = plan_mig(A100_40, at(A100_40, *present), set(in_use), wanted(A100_40, *want))
    assert isinstance(plan, MigPlan)
    assert shown(plan) == steps


@pytest.mark.parametrize(
    ("present", "in_use", "want", "blocking", "message"),
    [
        pytest.param([("1g.5gb", 0), ("1g.5gb", 1)], [2], ["7g.40gb"], [2], r"instance 2 \(1g.5gb on memory slice 1\)",
                     id="one-in-use"),
        pytest.param([("1g.5gb", 0), ("1g.5gb", 4)], [1, 2], ["3g.20gb"], [1], "in use in the way", id="either"),
        pytest.param([("1g.5gb", 0), ("1g.5gb", 4)], [1, 2], ["3g.20gb"] * 2, [1, 2], "and instance 2", id="both"),
        pytest.param([], [], ["7g.40gb", "1g.5gb"], [], "expected profiles that fit on one GPU together", id="never"),
        pytest.param([("1g.5gb+me", 0)], [1], ["1g.5gb+me"] * 2, [], "fit on one GPU together", id="one-media-only"),
    ],
)  # fmt: skip
def test_refusal_names_blocking_instances(present, in_use, want, blocking, message) -> None:
    found = plan_mig(A100_40, at(A100_40, *present), set(in_use), wanted(A100_40, *want))
    assert isinstance(found, MigRefusal)
    assert [i.id for i in found.blocking] == blocking
    assert re.search(message, found.message)


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

    def check(self, used: Layout, idle: Layout, want: frozenset[tuple[str, int]]) -> None:
        """Plan, compare with the shortest plan there is, and apply the steps one after the other."""
        present = at(self.table, *sorted(used), *sorted(idle))
        in_use = {i.id for i in present[: len(used)]}
        found = plan_mig(self.table, present, in_use, [self.table.find(name) for name, n in want for _ in range(n)])
        fewest = self.fewest(used, idle, want)
        if isinstance(found, MigRefusal):
            assert fewest is None, f"refused {used} {idle} {want}: {found.message}"
            assert {i.id for i in found.blocking} <= in_use
            return
        assert len(found.destroyed) + len(found.created) == fewest, f"{used} {idle} {want}: {shown(found)}"
        assert in_use.isdisjoint(i.id for i in found.destroyed)
        occupied([*(i.placement for i in present if i not in found.destroyed), *found.created])  # raises on an overlap


def shape(table: MigTable) -> list[tuple]:
    return [(p.compute_slices, p.memory_slices, p.starts, p.has_media) for p in table.profiles]


def test_a100_and_h100_have_one_geometry() -> None:
    """Tests of one are tests of all."""
    assert shape(A100_40) == shape(A100_80) == shape(H100_80) == shape(H200)


DIVIDED = [
    gpu for gpu in json.loads((PROJECT / "crds/carpool_core/nvml_figures.json").read_text())["gpus"] if "mig" in gpu
]


def test_the_page_on_mig_has_each_products_profiles() -> None:
    names: dict[tuple[str, ...], list[str]] = {}
    for gpu in DIVIDED:
        names.setdefault(tuple(gpu["mig"]), []).append(gpu["name"].removeprefix("NVIDIA "))
    rows = [f"| {', '.join(names[mig])} | {', '.join(f'`{profile}`' for profile in mig)} |\n" for mig in names]
    assert "|---|---|\n" + "".join(rows) + "\n" in (PROJECT / "docs/mig.md").read_text()


@pytest.fixture(scope="module")
def go_nvml() -> Path:
    """Its mocks of GPUs."""
    command = ["go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml"]
    found = subprocess.run(command, cwd=PROJECT / "e2e/tools/nvidia", capture_output=True, text=True, check=True)
    return Path(found.stdout.strip(), "pkg/nvml/mock/gpus")


@pytest.mark.vendor
def test_products_of_go_nvml_are_described(go_nvml: Path) -> None:
    """It rounds the memory, and its names are not those of the driver."""
    config = r'Name: +"(?:Mock )?NVIDIA (\w+).*?MemoryMB: +(\d+).*?CudaMajor: +(\d+).*?CudaMinor: +(\d+)'
    found = [one for file in go_nvml.glob("*.go") for one in re.findall(config, file.read_text(), re.DOTALL)]
    described = {
        one
        for one in found
        for gpu in DIVIDED
        if one[0] in gpu["name"].split("-")[0].split()
        if f"{one[2]}.{one[3]}" == gpu["capability"] and abs(gpu["memoryMib"] / int(one[1]) - 1) < 0.01
    }
    assert len(found) == 8
    assert described == {*found}


@pytest.mark.vendor
@pytest.mark.parametrize(("file", "table"), [("a30", A30), ("a100", A100_40)])
def test_placements_are_those_of_go_nvml(go_nvml: Path, file: str, table: MigTable) -> None:
    """Those of newer GPUs are not compared: go-nvml lists three memory slices for 3g, and NVIDIA's MIG guide four."""
    text = (go_nvml / f"{file}.go").read_text()
    part = text.partition("GpuInstancePlacements = map[int][]")[2].partition("ComputeInstancePlacements = map")[0]
    theirs = [re.findall(r"Start: (\d+), Size: (\d+)", one) for one in part.split("GPU_INSTANCE_PROFILE_")[1:]]
    ours = [[(str(start), str(p.memory_slices)) for start in p.starts] for p in table.profiles]
    assert sorted(theirs) == sorted(ours)


UNNAMED = {"0x20B110DE", "0x20B610DE", "0x233D10DE", "3g.95gb", "4g.95gb", "7g.189gb"}
"""PCI IDs and profiles of GPUs whose names are not published."""


@pytest.mark.vendor("CARPOOL_MIG_PARTED")
def test_mig_profiles_of_the_products_are_those_of_mig_parted() -> None:
    """Go's module proxy has no copy of it: the developer clones it."""
    folder = os.environ["CARPOOL_MIG_PARTED"]
    text = Path(folder, "deployments/systemd/config-default.yaml").read_text()
    listed = {*re.findall(r"0x[0-9A-F]{4}10DE", text), *re.findall(r'"(\dg\.\d+gb)": \d', text)}
    assert listed - UNNAMED == {f"0x{gpu['pci']}10DE" for gpu in DIVIDED if "pci" in gpu}.union(
        *(gpu["mig"] for gpu in DIVIDED)
    )


@pytest.mark.parametrize(("table", "layouts"), [(A30, 76), (A100_40, 3000)], ids=["A30-all", "A100-drawn"])
def test_plans_are_the_shortest_of_all(table: MigTable, layouts: int) -> None:
    """Every layout, use and wish of an A30; of the millions of an A100 some thousand that are drawn at random."""
    search, draw = Exhaustive(table, media=True), random.Random(7)  # noqa: S311  # reproducible, not secret
    wishes = [*search.by_multiset]
    if table is A30:
        assert len(search.layouts) == layouts
        for layout in search.layouts:
            for used in chain.from_iterable(combinations(sorted(layout), n) for n in range(len(layout) + 1)):
                for want in wishes:
                    search.check(frozenset(used), layout - set(used), want)
        return
    for _ in range(layouts):
        layout, share = draw.choice(search.layouts), draw.choice((0.0, 0.4, 1.0))
        used = frozenset(place for place in sorted(layout) if draw.random() < share)
        search.check(used, layout - used, draw.choice(wishes))


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
