"""Jobs, clusters and physics of simulations that are small enough to reckon by hand."""

from dataclasses import replace

from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode
from carpool_simulator import truth as truths
from carpool_simulator.information import exactly
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import SimJob, Truth, Workload

A100 = "NVIDIA A100-SXM4-40GB"


class NoSlowdown:
    def slowdowns(self, mode, tenants):
        return [1.0] * len(tenants)

    def utilization(self, mode, tenants, slowdowns):
        return truths.utilization(tenants, slowdowns)


class Halved(NoSlowdown):
    def slowdowns(self, mode, tenants):
        return [float(len(tenants))] * len(tenants)


def truth(memory_mib=1000, util=0.2, **changes):
    fields = {"kind": "k", "sm": util, "dram": 0.1, "product": A100}
    return Truth(memory_mib=memory_mib, util=util, **(fields | changes))


def job(name, work_s=100.0, arrival_s=0.0, of=None, **changes):
    of = of or truth(kind=name)
    return SimJob(name, arrival_s, work_s, 1, of, exactly(changes.pop("predicted", of), None), **changes)


def workload(*jobs, gpus=1, memory_mib=10_000):
    modes = [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS]
    devices = [
        Device(uuid=GpuUuid(f"GPU-{i}"), index=i, product=A100, memory_mib=memory_mib, modes=modes) for i in range(gpus)
    ]
    return Workload("test", "test", jobs, {"n": devices}, ())


CARPOOL = Strategy("carpool", "least-slowdown", Knowledge.PREDICTED, max_slowdown=1.5)
LEARNS = replace(CARPOOL, name="learns", learns=True)
ALONE = Strategy("alone", "exclusive", mode=SharingMode.EXCLUSIVE, in_order=True)


def ends(outcome):
    return {one.job.name: one.end_s for one in outcome.finished}
