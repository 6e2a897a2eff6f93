"""What `carpool explain` and `what-if` are asked in tests, and a predictor that knows one answer."""

import msgspec
from carpool_core.kube.api import NODES
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain import explain as explained
from carpool_extender.explain.dry_run import UNCHECKED
from carpool_extender.explain.explain import Options
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.testing import gpu_node, prediction, seed_node

HEAD = "apiVersion: carpool.dev/v1alpha1, kind: GpuTrainingJob"
"""Of a manifest in braces."""
CLOCK = FakeClock()
RULES, OPTIONS = SchedulerConfig(find_policy("least-slowdown"), 8), Options(CLOCK)


async def predicted(wanted, products):
    status = msgspec.structs.replace(wanted.status, prediction=prediction(products=products))
    return msgspec.structs.replace(wanted, status=status)


def job_of(spec=(), **annotations):
    meta = {"name": "new", "namespace": "default", "annotations": annotations}
    return msgspec.convert({"metadata": meta, "spec": {"template": {}, **dict(spec)}}, GpuTrainingJob)


def on_a_node(spec, **allocatable):
    """A server with one node of two GPUs, whose Node has a spec and so much room."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2))
    room = {"cpu": "8", "memory": "64Gi", "pods": "10"} | allocatable
    labels = {"pool": "training", "rank": "5"}
    kube.seed(NODES, {"metadata": {"name": "a", "labels": labels}, "spec": spec, "status": {"allocatable": room}})
    return kube


def job_with(template, **spec):
    return job_of({"template": {"spec": template}} | spec)


def asks(**requests):
    return {"containers": [{"resources": {"requests": requests}}]}


def _checked(answer):
    """An answer without the sentence on what Carpool never checks, which one test asks for."""
    return answer._replace(lines=[line for line in answer.lines if line != UNCHECKED])


async def what_if(*arguments):
    return _checked(await explained.what_if(*arguments))


async def explain_job(*arguments):
    return _checked(await explained.explain_job(*arguments))
