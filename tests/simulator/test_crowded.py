"""A queue far longer than its GPUs: what crowded jobs leave to each other is not learned as all that they do."""

import random
from pathlib import Path

from carpool_simulator import philly
from carpool_simulator.sweep import DEFAULT, sweep
from carpool_simulator.truth import Workload

CLUSTER = "nodes: [{count: 1, product: NVIDIA A100-SXM4-40GB, gpus: 2}]"


def test_learning_from_co_located_jobs_does_not_increase_co_location(published: Path, tmp_path: Path) -> None:
    """Regression: of these jobs 94% came to take longer than they accept, on average 3 times as long as alone."""
    draw = random.Random(1)  # noqa: S311  # a simulation, no secret
    rows = [f"{60 * i},{draw.randint(300, 7200)},1" for i in range(80)]
    (tmp_path / "trace.csv").write_text("\n".join(["timestamp,duration,num_gpus", *rows]))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    nodes = philly.read_cluster(tmp_path / "cluster.yaml")
    (strategy,) = (one for one in philly.learning(philly.STRATEGIES) if one.name == DEFAULT)

    def workload(seed: int) -> Workload:
        return philly.from_trace(published, tmp_path / "trace.csv", nodes, seed, is_learned=True)

    (line,) = sweep(workload, [strategy], 2, published, lambda _: None)
    alone_s = sum(job.work_s for job in workload(0).jobs) / len(rows)
    assert line.mean("running_s") < 1.4 * alone_s
    assert line.mean("slowed_percent") < 25
