"""Conditions of a job that behaves unusually: what the agents found for its workers, and stragglers among them. Pure.

All of it is computed from GpuNodes and the job's conditions, so that a restart of the operator loses nothing but the
time for which the same worker has been the likeliest.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low

from carpool_core import keys
from carpool_core.durations import MEASURED_STEPS
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Anomaly, GpuNode, Tenant

from carpool_operator import conditions
from carpool_operator.pods import worker_of
from carpool_operator.status import Draft

BEHIND, _CAUGHT_UP = 0.2, 0.1
"""Lag of a worker, as a share of the others' step, at which the anomaly begins and ends."""
_UNWRITTEN = 0.1
"""Agents write no smaller change of a step time, so that it counts for nothing."""
_LAG_S = 120.0
"""Seconds for which the same worker must lag, or be the likeliest before a condition names it instead of another."""
_CONSEQUENCES = frozenset({"Unknown", "BusyGpu"})
"""Reasons of workers that probably wait for another one."""

Workers = Mapping[int, Sequence[Tenant]]
"""Measurements of each worker, one for each of its GPUs."""


def report_anomalies(draft: Draft, pods: Sequence[Pod]) -> None:
    """Set the conditions of anomalies, with an event where one begins, changes its cause or ends.

    A worker without measurements keeps what is known: its agent may be starting. The named worker stays while it has
    the anomaly. See `Draft.set_condition` for the end with the job.
    """
    if not conditions.is_true(draft.status, keys.CONDITION_RUNNING):
        return
    workers = measurements(pods, draft.snapshot.nodes)
    is_complete = len(workers) == len(pods)
    for type_ in keys.ANOMALIES:
        before = conditions.find(draft.status, type_)
        was = before if before is not None and before.status == "True" else None
        kept, found = (candidates(workers, type_, is_new=is_new) for is_new in (False, True))
        if kept is None or (type_ == keys.CONDITION_STRAGGLER and not is_complete):
            continue
        if was is not None and (was.message.split(":")[0], was.reason) in [(f"worker {n}", a.reason) for n, a in kept]:
            continue  # the numbers of the begin stay
        if found:
            lags_s = draft.snapshot.lags_s.get(type_, 0.0)
            if lags_s < _LAG_S and (was is not None or type_ == keys.CONDITION_STRAGGLER):
                draft.requeue_after(_LAG_S - lags_s)
                continue
            worker, anomaly = found[0]
            message = f"worker {worker}: {anomaly.message}"
            draft.set_condition(type_, "True", anomaly.reason, message)
            draft.event("Warning", type_, f"{anomaly.reason}: {message}")
        elif was is not None and is_complete and not kept:
            draft.set_condition(type_, "False", "Recovered", f"over; it was: {was.reason}: {was.message}")
            draft.event("Normal", "Recovered", f"{type_} is over: {was.message}")


def measurements(pods: Sequence[Pod], nodes: Sequence[GpuNode]) -> Workers:
    """Return what the agents measured of each worker."""
    uids = {pod.metadata.uid: worker_of(pod) or 0 for pod in pods}
    workers: dict[int, list[Tenant]] = {}
    for tenant in (one for node in nodes for one in node.status.tenants if one.pod_uid in uids):
        workers.setdefault(uids[tenant.pod_uid], []).append(tenant)
    return workers


def candidates(workers: Workers, type_: str, *, is_new: bool) -> list[tuple[int, Anomaly]] | None:
    """Return the workers that may have caused an anomaly, with their anomalies, the likeliest first; None if unknown.

    A drift without a measured cause counts once all GPUs of the job show it: else the GPU that does not has an
    explanation, such as a new co-tenant, and the others wait for it. A known anomaly has other limits than a new one
    (`is_new`).
    """
    if type_ == keys.CONDITION_STRAGGLER:
        return _stragglers(workers, BEHIND if is_new else _CAUGHT_UP)
    found = [(n, one) for n, tenants in sorted(workers.items()) for t in tenants for one in t.anomalies]
    found = [(n, one) for n, one in found if one.type == type_]
    known = [(n, one) for n, one in found if one.reason not in _CONSEQUENCES]
    if not known and is_new and type_ == keys.CONDITION_STEP_TIME_DRIFT:
        found = found if len(found) == sum(map(len, workers.values())) else []
    return known or found


def _stragglers(workers: Workers, limit: float) -> list[tuple[int, Anomaly]] | None:
    """Return the workers that others wait for, the slowest first; None if not all workers are measured.

    Workers that synchronize have equal step times, but only the slow one waits for data or copies. Checkpoints count as
    steps here: one worker writes them for all. `limit` is the lag as a share of the others' step.
    """
    measured = {n: use for n, tenants in sorted(workers.items()) if (use := _step(tenants)) is not None}
    if len(measured) < max(2, len(workers)):  # a worker that is not measured may be the one
        return None
    lags = []
    usual_s, *waits = map(median_low, zip(*measured.values(), strict=True))  # of two workers, the better one
    for n, (step_s, data, copies) in measured.items():
        slow = step_s / usual_s - 1 - _UNWRITTEN if usual_s else 0.0
        lags += [(slow, "SlowWorker", n), (data - waits[0], "DataWait", n), (copies - waits[1], "Copies", n)]
    lags = sorted((one for one in lags if one[0] >= limit), reverse=True)
    return [(n, _lag(lag, reason, *measured[n])) for lag, reason, n in lags]


def _lag(lag: float, reason: str, step_s: float, data: float, copies: float) -> Anomaly:
    message = (
        f"a step takes {1000 * step_s:,.3g} ms, {1 + _UNWRITTEN + lag:.2f} times that of the other workers"
        if reason == "SlowWorker"
        else f"waits {data if reason == 'DataWait' else copies:.0%} of its time for "
        f"{'input data' if reason == 'DataWait' else 'copies to the GPU'}, {lag:.0%} more than the other workers, "
        "which wait for it"
    )
    return Anomaly(type=keys.CONDITION_STRAGGLER, reason=reason, message=message)


def _step(tenants: Sequence[Tenant]) -> tuple[float, float, float] | None:
    """Return step time with checkpoints, and the shares of waits for data and copies; None if not known yet."""
    uses = [
        (t.step_time_seconds / (1 - min(0.9, t.checkpoint_ratio or 0.0)), t.data_wait_ratio or 0.0, t.copy_ratio or 0.0)
        for t in tenants
        if t.settled and t.step_time_seconds is not None and (t.steps or 0) >= MEASURED_STEPS
    ]
    return max(uses, default=None)
