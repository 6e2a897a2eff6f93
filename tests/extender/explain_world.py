"""Builders for the tests of `carpool explain` and `what-if`."""

import contextlib

import msgspec
from carpool_core.kubectl import output
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.testing.clock import FakeClock
from carpool_extender.explain import explain as explained
from carpool_extender.explain.dry_run import UNCHECKED
from carpool_extender.explain.queue_forecast import Options
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.testing import prediction

HEAD = "apiVersion: carpool.dev/v1alpha1, kind: GpuTrainingJob"
"""First fields of a manifest in braces."""
CLOCK = FakeClock()
RULES, OPTIONS = SchedulerConfig(find_policy("least-slowdown"), 8), Options(CLOCK)


async def predicted(wanted, kinds):
    products = sorted({kind.product for kind in kinds})
    status = msgspec.structs.replace(wanted.status, prediction=prediction(products=products))
    return msgspec.structs.replace(wanted, status=status)


def job_of(spec=(), **annotations):
    meta = {"name": "new", "namespace": "default", "annotations": annotations}
    return msgspec.convert({"metadata": meta, "spec": {"template": {}, **dict(spec)}}, GpuTrainingJob)


def _checked(answer):
    """An answer without the constant sentence on parts that Carpool never checks."""
    return answer._replace(lines=[line for line in answer.lines if line != UNCHECKED])


async def what_if(*arguments):
    return _checked(await explained.what_if(*arguments))


async def explain_job(*arguments):
    return _checked(await explained.explain_job(*arguments))


@contextlib.contextmanager
def served(kube, monkeypatch):
    """Connect the commands to a server in memory."""

    @contextlib.asynccontextmanager
    async def connected(*_, **__):
        yield kube

    with monkeypatch.context() as patched:
        patched.setattr(output, "connect", connected)
        yield
