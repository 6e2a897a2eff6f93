"""Manifests that what-if is asked about: the API server checks them, and creates nothing."""

import pytest
from asking_world import HEAD
from carpool_core.kube.api import GPU_TRAINING_JOBS
from carpool_core.kube.errors import Forbidden, Invalid
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain.commands import ManifestError, check_manifest, read_manifest
from carpool_extender.testing import seed_job


def manifest_of(**spec):
    return {
        "kind": "GpuTrainingJob",
        "metadata": {"name": "new", "namespace": "default"},
        "spec": {"template": {}} | spec,
    }


async def test_the_api_server_checks_the_manifest_and_creates_nothing():
    kube = FakeKube()
    assert (await check_manifest(kube, manifest_of()))[1:] == ([], [])
    assert kube.dump_all(GPU_TRAINING_JOBS) == []
    assert [call.verb for call in kube.calls] == ["check"]
    noise = ", <nil>: Invalid value: null: some validation rules were not checked because of x"
    kube.fail_next(
        "check", GPU_TRAINING_JOBS, Invalid("no", status=422, server_message=f"spec.lables: unknown field{noise}")
    )
    with pytest.raises(ManifestError, match=r"^the API server would refuse it: spec.lables: unknown field$"):
        await check_manifest(kube, manifest_of())
    seed_job(kube, "new")
    assert "exists already" in (await check_manifest(kube, manifest_of())).notes[0]


async def test_without_the_right_to_create_it_is_said_and_the_manifest_read_all_the_same():
    kube = FakeKube()
    for _ in range(2):
        kube.fail_next("check", GPU_TRAINING_JOBS, Forbidden("no", status=403))
    found = await check_manifest(kube, manifest_of())
    assert found.notes == []
    assert "not checked: whether the API server" in found.unchecked[0]
    with pytest.raises(ManifestError, match=r"^spec.sharing.maxSlowdown: expected a number >= 1.0$"):
        await check_manifest(kube, manifest_of(sharing={"maxSlowdown": 0.5}))


@pytest.mark.parametrize(
    ("own", "flag", "found"),
    [
        pytest.param("", None, "", id="none"),
        pytest.param("", "a", "a", id="asked for"),
        pytest.param("b", None, "b", id="the manifest's"),
        pytest.param("b", "b", "b", id="both"),
        pytest.param("b", "a", None, id="another"),
        pytest.param("b", "default", None, id="another, which is the usual one"),
    ],
)
def test_a_manifest_of_one_namespace_is_not_asked_about_in_another(own, flag, found, tmp_path):
    """Regression: with -n A what-if silently told of namespace B."""
    path = tmp_path / "job.yaml"
    path.write_text(f"{{{HEAD}, metadata: {{name: x, namespace: '{own}'}}}}")
    if found is None:
        with pytest.raises(ManifestError, match=f"the namespace of the manifest, {own}, is not {flag}, which -n"):
            read_manifest(path, flag)
    else:
        assert read_manifest(path, flag)["metadata"]["namespace"] == found


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        pytest.param(
            "apiVersion: carpool.dev/v9\nkind: GpuTrainingJob",
            "expected apiVersion carpool.dev/v1alpha1, found carpool.dev/v9",
            id="another version",
        ),
        pytest.param(
            "apiVersion: kubeflow.org/v1\nkind: GpuTrainingJob",
            "expected apiVersion carpool.dev/v1alpha1, found kubeflow.org/v1",
            id="another group",
        ),
        pytest.param(
            "apiVersion:\nkind: GpuTrainingJob", "expected apiVersion carpool.dev/v1alpha1, found none", id="no version"
        ),
        pytest.param("apiVersion: batch/v1\nkind: Job", "expected a GpuTrainingJob, found a Job", id="another kind"),
        pytest.param("apiVersion: carpool.dev/v1alpha1", "expected a GpuTrainingJob, found no kind", id="no kind"),
    ],
)
def test_a_manifest_of_something_else_is_refused_by_what_it_is(head, sentence, tmp_path):
    """Regression: of another version it was said that the field spec is unknown."""
    path = tmp_path / "job.yaml"
    path.write_text(f"{head}\nmetadata: {{name: x}}\nspec: {{template: {{}}}}\n")
    with pytest.raises(ManifestError) as refused:
        read_manifest(path, "default")
    assert str(refused.value) == f"{path}: {sentence}"


def test_a_manifest_of_this_version_is_read(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("{" + HEAD + ", metadata: {name: x}}")
    assert read_manifest(path, "a")["metadata"] == {"name": "x", "namespace": "a"}
