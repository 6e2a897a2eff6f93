"""Only a reservation gives a pod the use of a GPU."""

from typing import Any

import pytest
from carpool_e2e.cluster import Cluster, KubectlError
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.nodes import BUSYBOX_IMAGE
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e


def bare_pod(name: str, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "c", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "600"],
        "resources": {"limits": {"carpool.dev/gpu": 1}},
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
    }


def test_two_jobs_admitted_at_the_same_moment_each_get_their_own_gpu(cluster: Cluster, watcher: Watcher) -> None:
    alone = {"sharing": {"mode": "Exclusive"}}
    cluster.apply(sleeper("twin-a", **alone), sleeper("twin-b", **alone))
    watcher.placed_once("twin-a")
    watcher.placed_once("twin-b")
    first, second = watcher.reserved("twin-a")[0], watcher.reserved("twin-b")[0]
    assert set(first["gpuUuids"]).isdisjoint(second["gpuUuids"])


def test_a_forged_annotation_changes_nothing(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("honest", sharing={"mode": "Exclusive"}))
    watcher.placed_once("honest")
    theirs = watcher.reserved("honest")[0]["gpuUuids"][0]
    job = sleeper("forger", sharing={"mode": "Exclusive"})
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "CARPOOL_VISIBLE_GPUS", "value": theirs}]
    cluster["agent-a100"].pause()  # the pod stays unbound until the agent reports its partition
    cluster.apply(job)
    pod = eventually("a reservation", lambda: watcher.reserved("forger"))[0]["podName"]
    for key, value in {"gpus": theirs, "mode": "MPS", "memory-limit-mib": "1"}.items():
        cluster.kubectl("annotate", "pod", pod, f"carpool.dev/{key}={value}", "--overwrite")
    cluster["agent-a100"].resume()
    watcher.placed_once("forger")
    assert watcher.gpus_in_container(pod) != theirs
    assert watcher.reserved("forger")[0]["mode"] == "Exclusive"


def test_a_template_cannot_write_our_annotations(cluster: Cluster, watcher: Watcher) -> None:
    job = sleeper("pretender")
    job["spec"]["template"]["metadata"] = {"annotations": {"carpool.dev/gpus": "GPU-0"}}
    with pytest.raises(KubectlError, match=r"carpool\.dev/"):
        cluster.apply(job)


def test_the_admission_policy_refuses_a_pod_that_chooses_its_node(cluster: Cluster, watcher: Watcher) -> None:
    with pytest.raises(KubectlError, match="nodeName"):
        cluster.apply(bare_pod("pushy", nodeName="a100", schedulerName="carpool-scheduler"))


def test_a_pod_on_a_node_without_a_reservation_never_starts(cluster: Cluster, watcher: Watcher) -> None:
    policies = cluster.kubectl("get", "validatingadmissionpolicybindings", "-o", "json")
    cluster.kubectl("delete", "validatingadmissionpolicybindings", "--all")
    try:
        eventually("the policy to be gone", lambda: _accepted(cluster, bare_pod("pushy", nodeName="a100")))
        waiting = eventually("the container refused", lambda: _waiting(watcher, "pushy"))
        assert "reservation" in waiting["message"]
        assert waiting["reason"] in ("CreateContainerConfigError", "PreStartHookError", "RunContainerError")
    finally:
        cluster.kubectl("delete", "pod", "pushy", "--ignore-not-found", "--force")
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=_bare(policies))


def _accepted(cluster: Cluster, manifest: dict[str, Any]) -> bool:
    try:
        cluster.apply(manifest)
    except KubectlError:
        return False
    return True


def _waiting(watcher: Watcher, pod: str) -> dict[str, Any] | None:
    statuses = (watcher.read("pod", pod) or {}).get("status", {}).get("containerStatuses", [])
    waiting: dict[str, Any] | None = next((s["state"]["waiting"] for s in statuses if "waiting" in s["state"]), None)
    return waiting if waiting and "message" in waiting else None


def _bare(listed: str) -> str:
    """Return the listed objects without the fields that the server added."""
    import json

    items = json.loads(listed)["items"]
    for item in items:
        item["metadata"] = {key: item["metadata"][key] for key in ("name", "labels") if key in item["metadata"]}
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def test_a_pod_without_a_job_is_refused_by_the_scheduler(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(bare_pod("orphan", schedulerName="carpool-scheduler"))
    condition = eventually("a refusal", lambda: _unschedulable(watcher, "orphan"))
    assert "GpuTrainingJob" in condition["message"]


def _unschedulable(watcher: Watcher, pod: str) -> dict[str, Any] | None:
    conditions = (watcher.read("pod", pod) or {}).get("status", {}).get("conditions", [])
    found: dict[str, Any] | None = next(
        (c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), None
    )
    return found


def test_the_agent_registers_again_after_the_kubelet_was_restarted(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("before"))
    watcher.placed_once("before")
    cluster["kubelet-a100"].restart()
    eventually(
        "the slots offered again",
        lambda: int(watcher.read("node", "a100")["status"]["allocatable"].get("carpool.dev/gpu", 0)) > 0,
    )
    cluster.apply(sleeper("after"))
    watcher.placed_once("after", timeout_s=90)
    watcher.placed_once("before")


def test_a_node_whose_agent_died_gets_no_job_until_it_runs_again(cluster: Cluster, watcher: Watcher) -> None:
    cluster["agent-a100"].kill()
    eventually("no slots", lambda: watcher.read("node", "a100")["status"]["allocatable"]["carpool.dev/gpu"] == "0")
    cluster.apply(sleeper("early"))
    eventually(
        "a reason", lambda: "offers no carpool.dev/gpu" in watcher.condition("early", "Placed").get("message", "")
    )
    assert not watcher.reserved("early")
    cluster["agent-a100"].start()
    watcher.placed_once("early", timeout_s=90)


def test_a_job_whose_container_fails_is_tried_again_and_then_has_failed(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("stubborn", "exit 3", runPolicy={"backoffLimit": 1}))
    eventually("Failed", lambda: watcher.state("stubborn") == "Failed", timeout_s=90)
    status = watcher.job("stubborn")["status"]
    assert status["restarts"] == 1
    assert len(status["attempts"]) == 2
    assert "3" in watcher.condition("stubborn", "Failed")["message"]
    eventually("no reservation left", lambda: not watcher.reserved("stubborn"))


def test_an_edit_of_what_was_placed_is_refused(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("settled"))
    watcher.placed_once("settled")
    with pytest.raises(KubectlError, match="placed"):
        cluster.kubectl("patch", "gtj", "settled", "--type=merge", "-p", '{"spec":{"gpusPerWorker":2}}')


def test_suspend_takes_the_pods_away_and_resume_brings_them_back(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("pausing"))
    watcher.placed_once("pausing")
    cluster.kubectl("patch", "gtj", "pausing", "--type=merge", "-p", '{"spec":{"runPolicy":{"suspend":true}}}')
    eventually("Suspended", lambda: watcher.state("pausing") == "Suspended" and not watcher.pods("pausing"))
    eventually("the reservation released", lambda: not watcher.reserved("pausing"))
    cluster.kubectl("patch", "gtj", "pausing", "--type=merge", "-p", '{"spec":{"runPolicy":{"suspend":false}}}')
    watcher.placed_once("pausing")
