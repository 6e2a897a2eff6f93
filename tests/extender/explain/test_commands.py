"""The commands `explain` and `what-if`: what they are given, and how they refuse it."""

import contextlib

import pytest
from asking_world import HEAD
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.errors import Forbidden
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain import commands
from carpool_extender.explain.commands import explain_command, what_if
from carpool_extender.testing import seed_job
from carpool_simulator.commands import simulate
from click.testing import CliRunner


def test_the_commands_refuse_with_a_sentence(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("spec: 3")
    result = CliRunner().invoke(what_if, [str(manifest)])
    assert result.exit_code == 2
    assert "expected a GpuTrainingJob" in result.output
    manifest.write_text("{")
    told = CliRunner().invoke(what_if, [str(manifest)])
    assert (told.exit_code, len(told.output.splitlines())) == (2, 1)
    refused = CliRunner().invoke(explain_command, ["x", "--policy", "fast"])
    assert refused.exit_code == 2
    assert "policy 'fast' is unknown; choose one of" in refused.output
    assert CliRunner().invoke(explain_command, ["x", "--most-jobs", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["default/small-a"], "expected the name of a job, of small letters, digits, - and ., found 'default/small-a'; "
        "did you mean small-a -n default?"),
        ([""], "expected the name of a job, of small letters, digits, - and ., found ''"),
        (["x", "-n", ""], "expected the name of a namespace, of small letters, digits, - and ., found ''"),
        (["x", "-n", "a/b"], "found 'a/b'"),
    ],
)  # fmt: skip
def test_what_can_be_no_name_is_refused_before_anybody_is_asked(argv, said):
    told = CliRunner().invoke(explain_command, argv)
    assert told.exit_code == 2
    assert told.output.strip().endswith(said)


@contextlib.contextmanager
def served(kube, monkeypatch):
    """Have commands ask a server in memory."""

    @contextlib.asynccontextmanager
    async def connected(*_, **__):
        yield kube

    with monkeypatch.context() as patched:
        patched.setattr(commands, "connect", connected)
        yield


def test_a_manifest_may_come_from_the_standard_input(monkeypatch):
    manifest = "{" + HEAD + ", metadata: {name: x, namespace: b}, spec: {template: {}}}"
    with served(FakeKube(), monkeypatch):
        told = CliRunner().invoke(what_if, ["-"], input=manifest)
        assert "could never run here" in told.output
        assert told.exit_code == 1
        refused = CliRunner().invoke(what_if, ["-", "-n", "default"], input=manifest)
    assert refused.exit_code == 2
    assert "the namespace of the manifest, b, is not default" in refused.output


def test_what_if_ends_with_1_where_the_site_does_not_let_a_job_choose_its_policy(monkeypatch):
    annotations = "annotations: {carpool.dev/policy: exclusive}"
    manifest = f"{{{HEAD}, metadata: {{name: x, {annotations}}}, spec: {{template: {{}}}}}}"
    with served(FakeKube(), monkeypatch):
        told = CliRunner().invoke(what_if, ["-"], input=manifest)
    assert "PolicyNotAllowed" in told.output
    assert told.exit_code == 1
    assert "policy that the job selects" in " ".join((what_if.help or "").split())


@pytest.mark.parametrize("command", [[explain_command, "busy"], [simulate, "--trace", "t.csv"]])
def test_more_free_memory_than_any_gpu_can_have_is_refused_with_a_sentence(command):
    """Regression: a number beyond 64 bits ended in a traceback, where GPUs were held against it."""
    called, *arguments = command
    result = CliRunner().invoke(called, [*arguments, "--least-free-mib", "9" * 23])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "expected a least free memory of 0 to 1,073,741,824 MiB, found 99,999,999,999,999" in result.output


@pytest.mark.parametrize("command", ["explain", "what-if"])
def test_who_may_not_read_gpu_nodes_is_told_what_right_is_missing(command, tmp_path, monkeypatch):
    manifest, kube = tmp_path / "job.yaml", FakeKube()
    manifest.write_text("{" + HEAD + ", metadata: {name: x}, spec: {template: {}}}")
    seed_job(kube, "x")
    kube.fail_next("list", GPU_NODES, Forbidden("you may not list gpunodes", status=403))

    asked_for = (explain_command, ["x"]) if command == "explain" else (what_if, [str(manifest)])
    with served(kube, monkeypatch):
        result = CliRunner().invoke(*asked_for)
    assert result.exit_code == 2
    assert result.output.startswith("Error: you may not list gpunodes; explain and what-if read jobs and GpuNodes")
    assert "ClusterRole carpool-view by a ClusterRoleBinding" in result.output


def test_without_a_cluster_there_is_a_sentence_and_no_traceback(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("{" + HEAD + ", metadata: {name: x}, spec: {template: {}}}")
    nowhere = {"KUBECONFIG": None, "KUBERNETES_SERVICE_HOST": None, "HOME": str(tmp_path)}
    for command, argument in ((explain_command, "x"), (what_if, str(manifest))):
        result = CliRunner(env=nowhere).invoke(command, [argument])
        assert result.exit_code == 2
        assert "Error: " in result.output
        assert "KUBECONFIG" in result.output


@pytest.mark.parametrize(("arguments", "namespace"), [([], "team"), (["-n", "other"], "other")])
def test_the_jobs_namespace_is_the_contexts_unless_one_is_named(arguments, namespace, monkeypatch):
    class InTeam(FakeKube):
        namespace = "team"

    with served(InTeam(), monkeypatch):
        result = CliRunner().invoke(explain_command, ["gone", *arguments])
    assert result.exit_code == 2
    assert f"no GpuTrainingJob gone in namespace {namespace}" in result.output
