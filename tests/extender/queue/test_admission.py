"""Admission on the API server: gates, claims, leaders, faults, timeouts, reasons."""

import asyncio
import random
import re
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.keys import CONDITION_ADMITTED, GATE_ADMISSION
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.kube.errors import NotFound, Overloaded, Unreachable
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_extender.explain.explain import explain_job
from carpool_extender.explain.queue_forecast import Options
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.queue.order import QueueOrder
from carpool_extender.testing import gpu_node, node_of, pod_of, seed_job, seed_node, seed_pod, tenant, until
from carpool_extender.workloads import ANNOTATION_POLICY
from carpool_simulator.engine import Simulation
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import Workload
from extender_world import World, args, background, filtering, named, record
from simulated_world import A100, NoSlowdown
from simulated_world import job as sim_job

GATES = [{"name": GATE_ADMISSION}]


class Cluster(World):
    """A world whose extender leads, unless a test sets otherwise."""

    def __init__(self, *, leads=True, **chosen):
        super().__init__(leads=leads, candidates=1, queue_order=QueueOrder.ARRIVAL, **chosen)

    def queue(self, name, second=0, *, workers=1, gpus=1, gates=GATES, pod=None, **spec):
        created = f"2026-01-31T11:{second // 60:02}:{second % 60:02}Z"
        wants = {"sharing": {"mode": "Exclusive"}, "workers": workers, "gpusPerWorker": gpus} | spec
        seed_job(self.kube, name, spec=wants)
        for worker in range(workers):
            self.worker(name, worker, created, gpus=gpus, gates=gates, **(pod or {}))

    def worker(self, name, worker=0, created="2026-01-31T11:00:00Z", *, gpus=1, gates=GATES, uid="", **spec):
        pod = seed_pod(self.kube, name, worker=worker, gpus=gpus, schedulingGates=gates, uid=uid, **spec)
        pod["metadata"]["creationTimestamp"] = created
        if gates:  # as the API server sets it at creation
            gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            pod.setdefault("status", {})["conditions"] = [gated]
        self.kube.seed(PODS, pod)

    def gated(self):
        return sorted(pod["metadata"]["name"] for pod in self.kube.dump_all(PODS) if pod["spec"].get("schedulingGates"))

    def seen_by_autoscalers(self):
        """Pods that cluster-autoscaler and Karpenter count.

        Both read the condition, not the gates. Sources: ArrangePodsBySchedulability in pkg/utils/kubernetes/listers.go
        of kubernetes-sigs/cluster-autoscaler; IsProvisionable in pkg/utils/pod/scheduling.go of karpenter.
        """
        return sorted(
            pod["metadata"]["name"]
            for pod in self.kube.dump_all(PODS)
            if not pod["spec"].get("nodeName") and "nominatedNodeName" not in pod["status"]
            for one in pod["status"].get("conditions", [])
            if (one["type"], one["status"], one["reason"]) == ("PodScheduled", "False", "Unschedulable")
        )

    def condition(self, job, worker=0, attempt=1):
        pod = self.kube.dump(PODS, f"{job}-worker-{worker}-{attempt}", "default")
        found = [one for one in pod["status"].get("conditions", []) if one["type"] == CONDITION_ADMITTED]
        return (found[0]["reason"], found[0]["message"]) if found else None

    async def settle(self, seconds=1.0):
        for _ in range(int(10 * seconds)):
            self.clock.advance(0.1)
            for _ in range(20):
                await asyncio.sleep(0)


@pytest.fixture
def cluster():
    found = Cluster()
    seed_node(found.kube, gpu_node("a", 2))
    return found


async def test_a_job_is_admitted_claims_its_gpu_and_is_bound_there(cluster):
    cluster.queue("x")
    async with cluster.extender() as extender, background(cluster.agent.serve("a")):
        await cluster.settle()
        assert cluster.gated() == []
        claim = extender.admission.claim_of(PodUid("pod-x"))
        assert claim.node == "a"
        assert named(await extender.service.filter(filtering("x", ["b", "a"]))) == ["a"]
        binding = asyncio.create_task(extender.service.bind(args("x", "a")))
        await until(lambda: cluster.reservations("a") != [])
        assert (await binding).error == ""
        assert extender.admission.claim_of(PodUid("pod-x")) is None
        await cluster.settle()
        assert extender.informers.cluster.with_assumed("a") == extender.informers.cluster.node("a")


async def test_a_gang_is_admitted_once_all_its_pods_exist_and_fit(cluster):
    cluster.queue("gang", workers=2)
    await cluster.kube.delete(PODS, "gang-worker-1-1", namespace="default")
    cluster.queue("small", 10)
    async with cluster.extender():
        await cluster.settle()
        assert cluster.gated() == ["gang-worker-0-1"]
        cluster.worker("gang", 1)
        await cluster.settle()
        assert cluster.gated() == ["gang-worker-0-1", "gang-worker-1-1"], "one GPU is left"
        await cluster.kube.delete(PODS, "small-worker-0-1", namespace="default")
        await cluster.settle()
        assert cluster.gated() == []


async def test_only_the_leader_admits_and_a_new_leader_rebuilds_claims():
    cluster = Cluster(leads=False)
    seed_node(cluster.kube, gpu_node("a", 1))
    cluster.queue("running", 0, gates=[])
    cluster.queue("next", 5)
    async with cluster.extender() as extender:
        await cluster.settle()
        assert cluster.gated() == ["next-worker-0-1"]
        assert extender.admission.claim_of(PodUid("pod-running")) is None
        cluster.hold("here_2")
        await cluster.settle()
        assert extender.admission.claim_of(PodUid("pod-running")).node == "a"
        assert cluster.gated() == ["next-worker-0-1"], "the GPU belongs to the pod that another leader admitted"
        assert extender.registry.get_sample_value("carpool_extender_pending_jobs") == 1
        waiting = "carpool_extender_waiting_jobs", {"reason": "NoGpuFits"}
        assert extender.registry.get_sample_value(*waiting) == 1
        cluster.hold("elsewhere_3")
        await cluster.settle()
        assert extender.admission.claim_of(PodUid("pod-running")) is None
        assert extender.registry.get_sample_value("carpool_extender_pending_jobs") == 0
        assert extender.registry.get_sample_value(*waiting) is None
        cluster.hold("here_4")
        await cluster.settle()
        assert extender.registry.get_sample_value(*waiting) == 1, "the next term gathers the jobs again"


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_patch_without_answer_is_repeated(cluster, is_lost):
    cluster.queue("x")
    cluster.kube.fail_next("patch", PODS, Unreachable("u") if is_lost else Overloaded("o", status=503))
    async with cluster.extender() as extender:
        await cluster.settle(3)
        assert cluster.gated() == []
        assert extender.admission.claim_of(PodUid("pod-x")) is not None


async def test_a_pod_that_is_deleted_while_its_gate_is_removed_holds_no_claim(cluster):
    cluster.queue("x")
    async with cluster.extender() as extender:
        await extender.informers.wait_synced()
        cluster.kube.lose(PODS, "x-worker-0-1", "default")
        await cluster.settle(3)
        assert extender.informers.cluster.pods_of_job("job-x") == set()


async def test_a_job_that_gets_no_node_returns_to_the_queue_with_the_scheduler_s_message(cluster):
    cluster.queue("x")
    async with cluster.extender() as extender:
        await cluster.settle()
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        refusal = "0/3 nodes are available: 3 Insufficient cpu. preemption: 0/3 nodes are available: 3 No victims."
        patch = {"status": {"conditions": [condition | {"message": refusal}]}}
        await cluster.kube.patch(PODS, "x-worker-0-1", patch, namespace="default", subresource="status")
        await cluster.settle(29)
        assert cluster.pod()["metadata"]["uid"] == "pod-x"
        await cluster.settle(4)
        assert not [pod for pod in cluster.kube.dump_all(PODS) if pod["metadata"]["uid"] == "pod-x"]
        assert extender.informers.cluster.pods_of_job("job-x") == set()
        cluster.worker("x", uid="pod-x-again")
        await record(cluster.kube, "x", 1, "pod-x-again")
        cluster.queue("other", 30)
        await cluster.settle(3)
        assert cluster.gated() == ["x-worker-0-1"], "it backs off, and another one passes"
        reason, message = cluster.condition("x")
        assert reason == "Unschedulable"
        sentence = "kube-scheduler found no node: 3 Insufficient cpu; admitted again after 2026-01-31T12:0"
        assert message.startswith(sentence)
        await cluster.settle(15)
        assert cluster.gated() == []
        waits = "carpool_extender_queue_wait_seconds_count"
        assert extender.registry.get_sample_value(waits, {"reason": "Backoff"}) == 1


@pytest.mark.parametrize(
    ("pod", "labels", "node", "why"),
    [
        pytest.param({}, {}, {"taints": [{"key": "t", "effect": "NoSchedule"}]}, "the taint t:NoSchedule", id="taint"),
        pytest.param({}, {}, {"unschedulable": True}, "its node is cordoned", id="cordon"),
        pytest.param({"nodeSelector": {"zone": "b"}}, {"zone": "a"}, {}, "lacks the label zone=b", id="node selector"),
    ],
)
async def test_a_job_waits_while_no_node_that_it_accepts_has_free_gpus(cluster, pod, labels, node, why):
    """Regression: it was admitted, kube-scheduler refused the node, and it backed off while its GPU stayed idle."""
    cluster.kube.seed(NODES, node_of("a", labels={"zone": "b"}))
    seed_node(cluster.kube, gpu_node("b", 1))
    cluster.kube.seed(NODES, node_of("b", labels=labels, **node))
    cluster.queue("large", gpus=2, pod=pod)
    cluster.queue("x", 10, pod=pod)
    async with cluster.extender():
        await cluster.settle(12)
        assert cluster.gated() == ["x-worker-0-1"]
        reason, message = cluster.condition("x")
        assert reason == "NoGpuFits"
        assert why in message
        cluster.queue("accepts", 20, pod={"tolerations": [{"operator": "Exists"}], "nodeSelector": labels})
        await cluster.settle()
        assert cluster.gated() == ["x-worker-0-1"], "the next one passes"
        await cluster.kube.delete(PODS, "accepts-worker-0-1", namespace="default")
        cluster.kube.seed(NODES, node_of("b", labels={"zone": "b"}))
        await cluster.settle(6)
        assert cluster.gated() == []


async def test_no_gpu_of_a_node_that_a_job_does_not_accept_is_reserved_for_it(cluster):
    began = "2026-01-31T11:59:00Z"
    held = [msgspec.structs.replace(tenant(f"t{n}", [f"GPU-b-{n}"]), reserved_at=began) for n in range(2)]
    seed_node(cluster.kube, gpu_node("b", 2, held))
    cluster.kube.seed(NODES, node_of("b", labels={"zone": "b"}, unschedulable=True))
    cluster.queue("running", gpus=1)
    cluster.queue("large", 10, gpus=2)
    accepts = {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": "b"}}
    cluster.queue("small", 20, pod=accepts, sharing={"mode": "MPS"})
    async with cluster.extender():
        await cluster.settle()
        assert cluster.gated() == ["large-worker-0-1"], "node a is reserved for it, and node b stays usable"


async def test_a_pod_that_is_bound_while_its_deletion_is_on_its_way_stays(cluster, monkeypatch):
    """Regression: the deletion tested the UID only, so that an extender with a stale watch deleted a bound pod."""
    cluster.queue("x")
    delete = cluster.kube.delete

    async def delete_late(kind, name, **preconditions):
        binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": "a"}}
        await cluster.kube.create(PODS, binding, namespace="default", name=name, subresource="binding")
        await delete(kind, name, **preconditions)

    monkeypatch.setattr(cluster.kube, "delete", delete_late)
    async with cluster.extender():
        await cluster.settle(35)
        assert [call.name for call in cluster.kube.calls if call.verb == "delete"] == ["x-worker-0-1"]
        assert cluster.bound_to() == "a"


async def test_a_job_waits_with_a_reason_written_at_most_once_in_ten_seconds(cluster):
    cluster.queue("wide", gpus=2, gates=[])
    cluster.queue("x", 5)
    async with cluster.extender():
        await cluster.settle(3)
        assert cluster.condition("x") == ("NoGpuFits", "2 GPUs: used exclusively")
        writes = len(cluster.writes("pods"))
        for _ in range(6):
            seed_node(cluster.kube, gpu_node("b", 0))
            await cluster.settle(1)
            await cluster.kube.delete(GPU_NODES, "b")
        assert len(cluster.writes("pods")) <= writes + 1


async def test_metrics_count_waits_reasons_and_refusals(cluster):
    for name in "xyz":
        cluster.queue(name)
    async with cluster.extender() as extender:
        await cluster.settle(3)
        value = extender.registry.get_sample_value
        waits = "carpool_extender_queue_wait_seconds"
        assert value(f"{waits}_count", {"reason": "AtOnce"}) == 2
        assert value(f"{waits}_sum", {"reason": "AtOnce"}) > 7000
        assert value("carpool_extender_waiting_jobs", {"reason": "NoGpuFits"}) == 1
        assert value("carpool_extender_refusals_total", {"check": "mode"}) == 2
        await cluster.kube.delete(PODS, "x-worker-0-1", namespace="default")
        await cluster.settle()
        assert value("carpool_extender_waiting_jobs", {"reason": "NoGpuFits"}) is None
        assert value(f"{waits}_count", {"reason": "NoGpuFits"}) == 1


class TestAutoscaling:
    async def test_jobs_that_lack_gpus_are_seen_until_they_start(self):
        cluster = Cluster(autoscaling=True)
        seed_node(cluster.kube, gpu_node("a", 2))
        cluster.queue("small", training={"steps": 10**7})
        cluster.queue("gang", 5, workers=2)
        cluster.queue("long", 10, training={"steps": 10**8})
        cluster.queue("never-here", 15, gpu={"product": "B200"})
        gang = ["gang-worker-0-1", "gang-worker-1-1"]
        async with cluster.extender():
            await cluster.settle(3)
            assert cluster.gated() == [*gang, "long-worker-0-1", "never-here-worker-0-1"]
            assert cluster.seen_by_autoscalers() == [*gang, "never-here-worker-0-1"], (
                "long waits only because a free GPU is reserved in time for the gang"
            )
            writes = len(cluster.writes("pods"))
            await cluster.settle(12)
            assert len(cluster.writes("pods")) == writes, "pods that are marked already are not written again"
            seed_node(cluster.kube, gpu_node("b", 1))
            await cluster.settle(3)
            assert cluster.gated() == ["long-worker-0-1", "never-here-worker-0-1"]

    async def test_a_job_that_backs_off_is_seen(self):
        """A pod may select nodes that do not exist yet: the queue does not read selectors, kube-scheduler does."""
        cluster = Cluster(autoscaling=True)
        seed_node(cluster.kube, gpu_node("a", 2))
        cluster.queue("x")
        async with cluster.extender():
            await cluster.settle(33)
            cluster.worker("x", uid="pod-x-again")
            await record(cluster.kube, "x", 1, "pod-x-again")
            await cluster.settle(3)
            assert cluster.gated() == cluster.seen_by_autoscalers() == ["x-worker-0-1"]

    async def test_nothing_is_seen_once_the_setting_is_off_again(self):
        cluster = Cluster(autoscaling=True)
        seed_node(cluster.kube, gpu_node("a", 1))
        cluster.queue("wide", 0, gpus=2)
        cluster.queue("x", 5)
        cluster.queue("running", 0, gates=[])
        async with cluster.extender():
            await cluster.settle(3)
            assert cluster.seen_by_autoscalers() == ["wide-worker-0-1", "x-worker-0-1"]
        cluster.settings = replace(cluster.settings, autoscaling=False)
        async with cluster.extender():
            await cluster.settle(3)
            assert cluster.gated() == ["wide-worker-0-1", "x-worker-0-1"]
            assert cluster.condition("wide") is not None
            assert cluster.seen_by_autoscalers() == []


async def test_the_pods_of_a_new_attempt_get_the_reason_too(cluster):
    cluster.queue("wide", gpus=2, gates=[])
    cluster.queue("x", 5)
    async with cluster.extender():
        await cluster.settle(3)
        await cluster.kube.delete(PODS, "x-worker-0-1", namespace="default")
        cluster.kube.seed(PODS, named_pod("x-worker-0-2"))
        await record(cluster.kube, "x", 2, "uid-x-worker-0-2")
        await cluster.settle(12)
        assert cluster.condition("x", attempt=2) == ("NoGpuFits", "2 GPUs: used exclusively")


async def test_a_reason_that_was_not_written_is_written_later(cluster):
    cluster.queue("wide", gpus=2, gates=[])
    cluster.queue("x", 5)
    cluster.kube.fail_next("patch", PODS, Unreachable("u"))
    async with cluster.extender():
        await cluster.settle(3)
        assert cluster.condition("x") is None
        await cluster.settle(12)
        assert cluster.condition("x") == ("NoGpuFits", "2 GPUs: used exclusively")


async def test_another_gate_keeps_a_job_out_of_the_queue(cluster):
    cluster.queue("x", gates=[{"name": "kueue.x-k8s.io/admission"}, *GATES])
    cluster.queue("y", 5, gates=[])
    async with cluster.extender():
        await cluster.settle()
        assert cluster.pod("x")["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}, *GATES]


async def test_a_new_attempt_is_admitted_while_its_lost_pod_still_has_a_reservation(cluster):
    """The node of the lost pod is dead: its reservation stays, because its container may still run."""
    cluster.queue("x", gates=[])
    async with cluster.extender() as extender, background(cluster.agent.serve("a")):
        await cluster.settle()
        assert (await extender.service.bind(args("x", "a"))).error == ""
        lost = cluster.pod()
        lost["metadata"] |= {"deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["test/dead-node"]}
        cluster.kube.seed(PODS, lost)
        again = pod_of("x", uid="pod-x-again", schedulingGates=GATES)
        again["metadata"]["name"] = "x-worker-0-2"
        cluster.kube.seed(PODS, again)
        await record(cluster.kube, "x", 2, "pod-x-again")
        await cluster.settle()
        assert cluster.gated() == []
        assert [one["podUid"] for one in cluster.reservations("a")] == ["pod-x"]


async def test_a_job_that_becomes_invalid_after_its_admission_gives_its_gpus_back(cluster):
    cluster.queue("x", gpus=2)
    async with cluster.extender() as extender:
        await cluster.settle()
        assert extender.admission.claim_of(PodUid("pod-x")) is not None
        invalid = {"metadata": {"annotations": {ANNOTATION_POLICY: "nonsense"}}}
        await cluster.kube.patch(GPU_TRAINING_JOBS, "x", invalid, namespace="default")
        cluster.queue("y", 5, gpus=2)
        await cluster.settle()
        assert cluster.gated() == []
        assert extender.admission.claim_of(PodUid("pod-x")) is None
        await cluster.settle(32)
        assert "x-worker-0-1" not in {pod["metadata"]["name"] for pod in cluster.kube.dump_all(PODS)}


async def test_an_admitted_pod_that_is_no_worker_any_more_holds_no_claim(cluster):
    """Regression: a user who removed the owners of admitted pods held all GPUs, and nothing bound them."""
    cluster.queue("x")
    async with cluster.extender() as extender:
        await cluster.settle()
        assert extender.admission.claim_of(PodUid("pod-x")) is not None
        await cluster.kube.patch(PODS, "x-worker-0-1", {"metadata": {"ownerReferences": None}}, namespace="default")
        await cluster.settle()
        assert extender.admission.claim_of(PodUid("pod-x")) is None
        assert len(extender.informers.cluster.with_assumed("a").spec.reservations) == 0


async def test_a_status_write_of_the_reserved_job_moves_no_reservation_in_time(cluster):
    """Regression: the job left the queue for a moment, and its reservation was computed again, on node b."""
    cluster.queue("p", training={"steps": 10**7})
    cluster.queue("wide", 5, gpus=2)
    cluster.queue("long", 10, training={"steps": 10**8})
    async with cluster.extender() as extender:
        await cluster.settle()
        assert cluster.gated() == ["long-worker-0-1", "wide-worker-0-1"]
        await cluster.kube.delete(PODS, "long-worker-0-1", namespace="default")
        seed_job(cluster.kube, "q")
        seed_pod(cluster.kube, "q", nodeName="b")
        seed_node(cluster.kube, gpu_node("b", 2, [tenant("q", ["GPU-b-0"], SharingMode.EXCLUSIVE)]))
        await cluster.settle()
        state = {"status": {"state": "Queued"}}
        await cluster.kube.patch(GPU_TRAINING_JOBS, "wide", state, namespace="default", subresource="status")
        await cluster.settle()
        cluster.queue("late", 15, training={"steps": 10**8})
        await cluster.settle()
        assert extender.admission.claim_of(PodUid("pod-late")).node == "b", "GPUs of node a are reserved in time"


async def test_backfill_uses_the_latest_measured_end(cluster):
    async def measure(seconds, latest_s=None):
        now, ends = cluster.clock.now(), {"expectedEnd": seconds, "latestEnd": latest_s}
        ends = {name: s and rfc3339(now + timedelta(seconds=s)) for name, s in ends.items()}
        observed = {"status": {"observed": ends}}
        await cluster.kube.patch(GPU_TRAINING_JOBS, "p", observed, namespace="default", subresource="status")

    seed_job(cluster.kube, "p", spec={"training": {"steps": 10**8}})
    seed_pod(cluster.kube, "p", nodeName="a")
    held = tenant("p", ["GPU-a-0"], SharingMode.EXCLUSIVE)
    held = msgspec.structs.replace(held, job_uid="job-p", reserved_at=rfc3339(cluster.clock.now()))
    seed_node(cluster.kube, gpu_node("a", 2, [held]))
    await measure(20)
    cluster.queue("wide", gpus=2)
    cluster.queue("long", 10, training={"steps": 10**6})
    async with cluster.extender():
        await cluster.settle()
        assert cluster.gated() == ["long-worker-0-1", "wide-worker-0-1"], "the predicted end of p is years away"
        await measure(30, latest_s=10**6)
        await cluster.settle(25)  # the reservation in time of `wide` is kept until its time
        cluster.queue("next", 20)
        await cluster.settle()
        assert cluster.gated() == ["next-worker-0-1", "wide-worker-0-1"]


def named_pod(name, job="x", namespace="default"):
    pod = pod_of(job, uid=f"uid-{name}", schedulingGates=GATES)
    pod["metadata"] |= {"name": name, "namespace": namespace}
    return pod


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        pytest.param("x-worker-0-999", "default", id="higher attempt"),
        pytest.param("x-worker-0-1", "other", id="other namespace"),
    ],
)
async def test_a_pod_that_a_user_created_in_a_job_s_name_blocks_nothing(cluster, name, namespace):
    cluster.queue("x")
    cluster.kube.seed(PODS, named_pod(name, namespace=namespace))
    await record(cluster.kube, "x", 1, "pod-x")
    async with cluster.extender():
        await cluster.settle()
        assert cluster.gated() == [name]
        assert not cluster.pod()["spec"].get("schedulingGates")


async def test_a_pod_waits_until_the_status_records_it(cluster):
    cluster.queue("x", workers=2)
    await record(cluster.kube, "x", 1, "pod-x")
    async with cluster.extender():
        await cluster.settle()
        assert cluster.gated() == ["x-worker-0-1", "x-worker-1-1"], "one of two pods is recorded"
        for worker in range(2):
            await cluster.kube.delete(PODS, f"x-worker-{worker}-1", namespace="default")
            cluster.kube.seed(PODS, named_pod(f"x-worker-{worker}-2"))
        await cluster.settle()
        assert cluster.gated() == ["x-worker-0-2", "x-worker-1-2"], "the status has attempt 1"
        await record(cluster.kube, "x", 2)
        await record(cluster.kube, "x", 2, "uid-x-worker-0-2", "uid-x-worker-1-2")
        await cluster.settle()
        assert cluster.gated() == []


async def test_nothing_of_a_deleted_pod_is_kept(cluster):
    """A reservation outlives its pod for a while, and a pod without a job gets a reason."""
    cluster.queue("x", training={"steps": 10**7})
    cluster.worker("ghost")
    async with cluster.extender() as extender, background(cluster.agent.serve("a")):
        await cluster.settle(3)
        assert cluster.condition("ghost")[0] == "NotAJob"
        assert (await extender.service.bind(args("x", "a"))).error == ""
        await cluster.kube.delete(PODS, "x-worker-0-1", namespace="default")
        cluster.queue("wide", 5, gpus=2)
        cluster.queue("small", 10)
        await cluster.settle(3)
        for name in ("x", "wide", "small"):
            await cluster.kube.delete(GPU_TRAINING_JOBS, name, namespace="default")
        for name in ("wide", "small", "ghost"):
            with suppress(NotFound):
                await cluster.kube.delete(PODS, f"{name}-worker-0-1", namespace="default")
        await cluster.settle(3)
        kept = extender.admission
        assert (kept._jobs, kept._admitted, kept._ends) == ({}, {}, {})


GPUS = {"a": 4, "b": 2}
LENGTHS_S = (2.3, 2.9, 4.1, 5.7, 6.2, 7.6, 8.9, 9.4, 11.3, 13.8, 15.2)


def recorded_history(seed):
    """Return the jobs of one history: name, GPUs of a worker, workers, and length in seconds, such that no ends tie."""
    draw = random.Random(seed)  # noqa: S311  # a test, no secret
    shapes = [(1, 1), (1, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 5)]
    return [(f"j{n}", *draw.choice(shapes), length_s) for n, length_s in enumerate(draw.sample(LENGTHS_S, 9))]


def replayed(jobs):
    """Return the cluster with the jobs of a history. The length of the last one is the site's default."""
    cluster = Cluster(default_duration_seconds=jobs[-1][3])
    for name, gpus in GPUS.items():
        seed_node(cluster.kube, gpu_node(name, gpus))
    for number, (name, gpus, workers, length_s) in enumerate(jobs):
        steps = {} if number == len(jobs) - 1 else {"steps": round(10 * length_s)}
        cluster.queue(name, number, gpus=gpus, workers=workers, training=steps)
    return cluster


async def forged(cluster, job):
    """Add a pod of a later attempt that a user created in the name of a job."""
    pods = [pod for pod in cluster.kube.dump_all(PODS) if pod["metadata"]["name"].startswith(f"{job}-")]
    attempt = {"number": 1, "outcome": "Creating", "podUids": [pod["metadata"]["uid"] for pod in pods]}
    status = {"status": {"attempts": [attempt]}}
    await cluster.kube.patch(GPU_TRAINING_JOBS, job, status, namespace="default", subresource="status")
    cluster.kube.seed(PODS, named_pod(f"{job}-worker-0-999", job) | {"spec": pods[0]["spec"] | {"schedulingGates": []}})


async def starts_by_explain(cluster, jobs, default_s):
    """Return in how many seconds `carpool explain` expects each job to start."""
    options = Options(cluster.clock, order=QueueOrder.ARRIVAL, default_duration_s=default_s)
    config, found = SchedulerConfig(find_policy("least-slowdown"), 8), {}
    for name in jobs:
        lines = (await explain_job(cluster.kube, name, "default", config, options)).lines
        (line,) = [line for line in lines if "place in the queue" in line] or [""]
        start = re.search(r"(?:expected start in|the queue assumes) about ([0-9.]+) (ms|s|min)", line)
        found[name] = float(start[1]) * {"ms": 1e-3, "s": 1, "min": 60}[start[2]] if start else 0.0
        assert start or "it can start now" in line or any("would go to" in one for one in lines), lines
    return found


async def starts_of_the_extender(jobs, midway_s):
    """Return when each job starts, and what explain expects at the begin and midway, in seconds from the begin."""
    cluster, ends, starts, default_s = replayed(jobs), {}, {}, jobs[-1][3]
    await forged(cluster, jobs[0][0])
    names = [name for name, *_ in jobs]
    expected, later, began_s = await starts_by_explain(cluster, names, default_s), {}, cluster.clock.monotonic()
    held = {node: {} for node in GPUS}
    async with cluster.extender() as extender:
        while len(starts) < len(jobs):
            await cluster.settle(0.1)
            now_s, gated = cluster.clock.monotonic() - began_s, {pod.partition("-")[0] for pod in cluster.gated()}
            for name, _, workers, length_s in jobs:
                if name not in starts and name not in gated:
                    starts[name], ends[name] = now_s, (now_s + length_s, workers)
                    for worker in range(workers):  # bind
                        pod = cluster.kube.dump(PODS, f"{name}-worker-{worker}-1", "default")
                        claim = extender.admission.claim_of(PodUid(pod["metadata"]["uid"]))
                        held[claim.node][pod["metadata"]["name"]] = claim.reservation
                        cluster.kube.seed(PODS, pod | {"spec": pod["spec"] | {"nodeName": claim.node}})
            for name in [name for name, (end_s, _) in ends.items() if end_s <= now_s]:
                for pod in [f"{name}-worker-{worker}-1" for worker in range(ends.pop(name)[1])]:
                    await cluster.kube.delete(PODS, pod, namespace="default")
                    for reservations in held.values():
                        reservations.pop(pod, None)
            for node, gpus in GPUS.items():
                if [*held[node].values()] != cluster.reservations(node):
                    seed_node(cluster.kube, gpu_node(node, gpus, held[node].values()))
            if not later and now_s >= midway_s:
                await cluster.settle(0.1)
                waiting = [name for name in names if name not in starts]
                later = {n: now_s + s for n, s in (await starts_by_explain(cluster, waiting, default_s)).items()}
    return starts, expected, later


def starts_of_the_simulator(jobs):
    whole = {"product": A100, "memory_mib": 40_960, "modes": [SharingMode.EXCLUSIVE]}
    devices = {
        name: [Device(uuid=GpuUuid(f"GPU-{name}-{index}"), index=index, **whole) for index in range(gpus)]
        for name, gpus in GPUS.items()
    }
    alone = Strategy("alone", "exclusive", Knowledge.TRUTH, SharingMode.EXCLUSIVE, measure=False)
    simulated = [
        replace(sim_job(name, float(length_s), workers=workers, steps=1), gpus=gpus)
        for name, gpus, workers, length_s in jobs
    ]
    outcome = Simulation(Workload("replay", "replay", simulated, devices, ()), alone, NoSlowdown()).run()
    return {one.job.name: one.start_s for one in outcome.finished}


@pytest.mark.parametrize("seed", range(6))
async def test_extender_simulator_and_explain_start_the_same_jobs_at_the_same_times(seed):
    """One recorded history, replayed by all three: they use one queue, one builder of entries, one gang placement."""
    jobs = recorded_history(seed)
    simulated = starts_of_the_simulator(jobs)
    assert max(simulated.values()) > 0.0
    # A pass of the extender takes a tenth of a second, and so does the end of a job; explain rounds to seconds.
    starts, expected, later = await starts_of_the_extender(jobs, midway_s=sorted(simulated.values())[5] + 0.5)
    assert starts == pytest.approx(simulated, abs=1.5)
    assert expected == pytest.approx(simulated, abs=0.6)
    assert later
    assert later == pytest.approx({name: starts[name] for name in later}, abs=1.5)


@pytest.mark.parametrize("seed", range(12))
async def test_random_faults_leave_no_claim_behind_and_gangs_start_whole(seed):
    """Deleted pods, failing patches and changing leaders: afterwards only live pods hold claims."""
    draw, cluster = random.Random(seed), Cluster()  # noqa: S311  # a test, no secret
    for name in ("a", "b"):
        seed_node(cluster.kube, gpu_node(name, 2))
    jobs = [(f"j{number}", draw.choice([1, 1, 2, 3])) for number in range(6)]
    async with cluster.extender() as extender:
        for number, (name, workers) in enumerate(jobs):
            cluster.queue(name, number, workers=workers)
            if draw.random() < 0.4:
                cluster.kube.fail_next("patch", PODS, draw.choice([Unreachable("u"), Overloaded("o", status=503)]))
            if draw.random() < 0.3:
                cluster.hold(draw.choice(["here_7", "elsewhere_8"]))
            await cluster.settle(draw.choice([0.1, 0.5]))
            if draw.random() < 0.4:
                victim = draw.choice(cluster.kube.dump_all(PODS))["metadata"]["name"]
                await cluster.kube.delete(PODS, victim, namespace="default")
        cluster.hold("here_9")
        await cluster.settle(6)
        state = extender.informers.cluster
        live = {pod["metadata"]["uid"] for pod in cluster.kube.dump_all(PODS)}
        for name, node in state.nodes.items():
            held = {one.pod_uid for one in state.with_assumed(name).spec.reservations}
            assert held <= live
            assert len(held) <= len(node.status.devices)
        for name, workers in jobs:
            pods = [pod for pod in cluster.kube.dump_all(PODS) if pod["metadata"]["name"].startswith(f"{name}-")]
            gates = {bool(pod["spec"].get("schedulingGates")) for pod in pods}
            assert len(gates) <= 1 or len(pods) < workers
