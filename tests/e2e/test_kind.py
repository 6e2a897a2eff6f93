"""The cluster of kind, over a fake that plays docker, kind, kubectl and helm; and once for real where Docker runs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from carpool_e2e import kind
from carpool_e2e.binaries import ensure
from carpool_e2e.chart import CHART
from carpool_e2e.demo import manifests
from carpool_e2e.errors import HarnessError, MissingError
from carpool_e2e.kind import Command, CommandError, Plan, Shell
from kind_machine import SCHEDULER, SOMEBODY_ELSES, VERSIONS, FakeMachine
from rich.console import Console

QUIET = Console(quiet=True)


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return kind.plan(tmp_path / "kind")


STEPS = (
    "docker build --target operator",
    "docker build --target extender",
    "docker build --target agent",
    "docker build --tag",
    "kind create",
    "kind load",
    "kubectl --kubeconfig",
    "helm install",
    "helm template",
)


def test_the_steps_come_in_order(machine: FakeMachine, plan: Plan) -> None:
    with kind.running(machine, plan, QUIET):
        assert machine.done == [
            *(f"build {image}" for image in plan.images),
            f"create {plan.name}",
            f"load {plan.name}",
            "install carpool",
            "apply carpool-node-agent-h100",
            "wait carpool-node-agent-h100",
        ]
        images = machine.clusters[plan.name].images
        assert images == {f"{plan.name}-worker": set(plan.images), f"{plan.name}-worker2": set(plan.images)}
    assert machine.done[-1] == f"delete {plan.name}"
    assert [*machine.clusters] == [SOMEBODY_ELSES]
    assert not plan.kubeconfig.exists()


def test_each_worker_has_the_agents_of_its_own_gpus(machine: FakeMachine, plan: Plan) -> None:
    with kind.running(machine, plan, QUIET):
        there = machine.clusters[plan.name]
        agents = [d["spec"]["agent"] for d in there.daemonsets.values()]
    for worker in there.config["nodes"][1:]:
        mine = [a["simulatedGpus"] for a in agents if a["nodeSelector"].items() <= worker["labels"].items()]
        assert mine == [plan.gpus[worker["labels"][kind.LABEL_GPUS]]]
    assert there.config["nodes"][0] == {"role": "control-plane"}
    selectors = [d["spec"]["selector"]["matchLabels"]["instance"] for d in there.daemonsets.values()]
    assert len({*selectors}) == len(plan.gpus) == 2


@pytest.mark.parametrize("step", STEPS)
def test_when_a_step_fails_no_cluster_is_left(machine: FakeMachine, plan: Plan, step: str) -> None:
    machine.fails = step
    with pytest.raises(CommandError, match="as told"), kind.running(machine, plan, QUIET):
        pytest.fail("it should not have come up")
    assert [*machine.clusters] == [SOMEBODY_ELSES]
    machine.fails = ""
    with kind.running(machine, plan, QUIET):
        assert plan.name in machine.clusters


def test_a_scene_that_fails_or_is_interrupted_leaves_no_cluster(machine: FakeMachine, plan: Plan) -> None:
    with pytest.raises(KeyboardInterrupt), kind.running(machine, plan, QUIET):
        raise KeyboardInterrupt
    assert [*machine.clusters] == [SOMEBODY_ELSES]


def test_a_kept_cluster_is_replaced_by_the_next_run_and_removed_by_clean(machine: FakeMachine, plan: Plan) -> None:
    for _ in range(2):
        with kind.running(machine, plan, QUIET) as running:
            running.kept = True
        assert plan.name in machine.clusters
    assert machine.done.count(f"create {plan.name}") == 2
    assert machine.done.count(f"delete {plan.name}") == 1
    assert str(plan.kubeconfig) in kind.how_to_reach(plan)
    assert kind.clean(machine, plan)
    assert not kind.clean(machine, plan)
    assert [*machine.clusters] == [SOMEBODY_ELSES]


def test_a_cluster_in_use_is_left_alone(machine: FakeMachine, plan: Plan) -> None:
    with kind.running(machine, plan, QUIET):
        assert not kind.clean(machine, plan)
        with pytest.raises(HarnessError, match="in use"), kind.running(machine, plan, QUIET):
            pytest.fail("two at the same time")
        assert plan.name in machine.clusters


@pytest.mark.parametrize("machine", [FakeMachine(engine=False), FakeMachine(versions={})], ids=["no engine", "no kind"])
def test_clean_needs_neither_docker_nor_kind_where_nothing_was_made(machine: FakeMachine, plan: Plan) -> None:
    assert not kind.clean(machine, plan)
    assert not plan.kubeconfig.parent.exists(), "cleaning creates nothing"


def test_clean_says_that_it_cannot_remove_what_was_made(machine: FakeMachine, plan: Plan) -> None:
    with kind.running(machine, plan, QUIET) as running:
        running.kept = True
    machine.engine = False
    with pytest.raises(CommandError, match="Docker daemon"):
        kind.clean(machine, plan)


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        (FakeMachine(engine=False), r"docker 20\.10 or later \(an engine that runs\); found: Cannot connect"),
        (FakeMachine(versions={k: v for k, v in VERSIONS.items() if k != "kind"}), "kind: expected on PATH"),
        (
            FakeMachine(versions={**VERSIONS, "kind": "kind v0.20.0 go1.20"}),
            r"kind 0\.27 or later .* found kind v0\.20",
        ),
        (FakeMachine(versions={**VERSIONS, "helm": "?"}), r"helm 3\.14 or later .* found \?"),
    ],
    ids=["no engine", "no kind", "an old kind", "a helm of no version"],
)
def test_it_says_what_is_missing_of_either_way(machine: FakeMachine, sentence: str) -> None:
    with pytest.raises(MissingError, match=r"etcd: expected on PATH.*Install Go") as caught:
        kind.require(machine, ["etcd"])
    assert re.search(sentence, str(caught.value))
    assert len(kind.lacking(machine)) == 1


def test_where_all_is_there_kind_stands_in(machine: FakeMachine) -> None:
    kind.require(machine, ["etcd"])
    assert machine.done == []


def test_kind_is_the_last_resort(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    assert {"etcd", "kubelet", "runc"} <= {*kind.out_of_reach(environ)}
    assets = {"KUBEBUILDER_ASSETS": str(tmp_path)}
    (tmp_path / "etcd").touch()
    assert "etcd" not in kind.out_of_reach(environ | assets)
    (tmp_path / "go").touch(mode=0o755)
    assert kind.out_of_reach(environ) == []


def test_the_name_is_one_checkouts_and_one_users() -> None:
    names = {kind.cluster_name(uid, Path(project)) for uid in (0, 1000) for project in ("/a", "/b")}
    assert len(names) == 4
    assert all(re.fullmatch(r"carpool-[a-z0-9-]+", name) for name in names), "kind takes [a-z0-9.-]+"
    assert kind.plan().name == kind.plan().name


def test_workers_hold_every_directory_that_a_job_mounts(plan: Plan) -> None:
    worker = plan.config()["nodes"][1]
    inside = {mount["containerPath"] for mount in worker["extraMounts"]}
    assert all(mount["readOnly"] for mount in worker["extraMounts"])
    job = manifests.small("small")
    moved = kind.below(job)["spec"]["template"]["spec"]
    assert {volume["hostPath"]["path"] for volume in moved["volumes"]} == inside
    assert moved["containers"] == job["spec"]["template"]["spec"]["containers"]
    assert job == manifests.small("small"), "the job itself is left alone"


def test_every_worker_program_stays_visible(plan: Plan) -> None:
    targets = [mount["containerPath"] for mount in plan.config()["nodes"][1]["extraMounts"]]
    assert targets
    assert all(target.startswith(f"{kind.PREFIX}/") for target in targets)


def test_a_program_that_is_not_there_or_fails_is_named() -> None:
    with pytest.raises(CommandError, match="no-such-program: expected on PATH"):
        Shell().capture(Command(("no-such-program",)))
    with pytest.raises(CommandError, match="`sh -c echo why >&2; exit 3` failed with status 3: why"):
        Shell().capture(Command(("sh", "-c", "echo why >&2; exit 3")))
    assert Shell().capture(Command(("cat",), "what it is given")) == "what it is given"
    with pytest.raises(CommandError, match="status 1"):
        Shell().run(Command(("false",)))


@pytest.mark.e2e
def test_the_chart_takes_the_values_and_renders_agents_that_do_not_meet(plan: Plan) -> None:
    helm = ensure(["helm"])["helm"]

    def rendered(command: Command, *more: str) -> list[dict[str, Any]]:
        printed = Shell().capture(Command((helm, *command.arguments[1:], *more), command.stdin))
        return [document for document in yaml.safe_load_all(printed) if document]

    install = plan.install(SCHEDULER)
    template = ("helm", "template", *install.arguments[2:4], "--namespace", "carpool-system", "--values", "-")
    everything = rendered(Command(template, install.stdin), "--kube-version=v1.33.1")
    first = next(o for o in everything if o["kind"] == "DaemonSet")
    second = json.loads(
        plan.apply_agents(yaml.safe_dump(rendered(plan.render_agents(SCHEDULER, "h100"))[0]), "h100").stdin
    )
    assert str(CHART) in template
    assert first["metadata"]["name"] == "carpool-node-agent"
    assert plan.wait_for_agents("h100").arguments[-2] == f"daemonset/{second['metadata']['name']}"
    assert first["spec"]["selector"] != second["spec"]["selector"]
    pods = [daemonset["spec"]["template"]["spec"] for daemonset in (first, second)]
    assert pods[0]["serviceAccountName"] == pods[1]["serviceAccountName"] == "carpool-node-agent"
    assert [pod["nodeSelector"][kind.LABEL_GPUS] for pod in pods] == ["a100", "h100"]
    used = {
        container["image"]
        for manifest in [*everything, second]
        if manifest["kind"] in ("Deployment", "DaemonSet")
        for container in manifest["spec"]["template"]["spec"]["containers"]
    }
    assert used == {*plan.images[:-1], SCHEDULER}


@pytest.mark.docker
@pytest.mark.timeout(2400)
def test_the_demo_on_kind(tmp_path: Path) -> None:
    if missing := kind.lacking(Shell()):
        pytest.skip("; ".join(missing))
    plan = kind.plan()
    kind.demo(Shell(), plan, Console(width=200), tmp_path, keep=False)
    assert (tmp_path / "gpus.svg").exists()
    assert plan.name not in Shell().capture(Command(("kind", "get", "clusters")))


def test_the_command_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from carpool_e2e.__main__ import main
    from click.testing import CliRunner

    for name in [name for name in os.environ if name.startswith("TEST_ASSET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == click.ClickException.exit_code
    assert "Install Go" in result.output
    assert "docker: expected on PATH" in result.output
