"""What the benchmark of the node agent says."""

from carpool_e2e.bench.agent import DAEMONS, ROUNDS, SCRAPE_EVERY_S, SCRAPES, Cost
from carpool_e2e.bench.agentprocess import GPUS, TENANTS

HEADING = "## A node agent with eight GPUs and 64 tenants"


def rows(cost: Cost) -> list[tuple[str, float, float]]:
    """Return what was measured, in the words of the report, with the most that is allowed."""
    mig = cost.mig
    return [
        (f"processor time, in % of one core, at a scrape each {SCRAPE_EVERY_S} s", cost.core_percent, 0.5),
        ("resident memory, MiB", cost.resident_mib, 80),
        (f"scrape, p99 of {SCRAPES}, ms", cost.scrape_p99_ms, 50),
        (f"PreStartContainer, p99 of {GPUS * TENANTS * ROUNDS}, ms", cost.prestart_p99_ms, 20),
        (f"MPS daemon ready, the slowest of {DAEMONS}, s", cost.mps_ready_s, 1),
        (
            f"MIG planner, the slowest of {mig.pairs.plans:,}: each pair of multisets on A100 (40 and 80 GB) and H100, "
            "one layout each, some of it in use; ms",
            mig.pairs.ms,
            10,
        ),
        (
            f"MIG planner, the slowest of {mig.wholly_used.plans:,}: each layout, all of it in use, with each "
            "multiset; ms",
            mig.wholly_used.ms,
            10,
        ),
        (
            f"MIG planner, the slowest of {mig.first.plans:,} first plans of a process: each multiset on an empty "
            "GPU; ms",
            mig.first.ms,
            10,
        ),
        ("MIG division with seven instances in use and seven reservations too many, ms", mig.division.ms, 10),
    ]


def agent_section(cost: Cost) -> list[str]:
    """Write the section of the report."""
    return [
        HEADING,
        "",
        "Eight H100 of the stateful fake of NVML, eight MPS clients each; API server and MPS daemons in memory, the",
        "kubelet and Prometheus in another process. A real driver's own work is not in the figures, nor is the fakes',",
        f"which was {cost.fakes_percent:.2f}% of a core. The MPS daemon is a script in place of NVIDIA's program. The",
        f"machine's load was {cost.load:.1f} when the agent had been looked at. The planner's times are processor",
        "times.",
        "",
        "| what | found | at most | |",
        "|---|---|---|---|",
        *(
            f"| {what} | {found:.3g} | {most:g} | {'kept' if found <= most else 'missed'} |"
            for what, found, most in rows(cost)
        ),
        "",
    ]
