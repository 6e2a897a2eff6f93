"""The benchmarks: small runs of those that need no cluster, and the report."""

import random
import sys

import pytest
from carpool_e2e.bench import installation, placement
from carpool_e2e.bench.measure import Figure, Section, replaced
from carpool_e2e.bench.paper import GPUS, TENANTS, draw_load, paper_cluster
from carpool_e2e.errors import MissingError


def test_extender_is_measured_over_its_own_protocol() -> None:
    reported: list[str] = []
    section = placement.measure(reported.append, {40: 20})
    assert [figure.what.partition(",")[0] for figure in section.figures][:2] == ["filter and prioritize"] * 2
    assert len(reported) == len(section.figures)
    assert all(figure.value > 0 for figure in section.figures)


def test_paper_cluster_promises_no_memory_twice() -> None:
    cluster = paper_cluster(20, [draw_load(random.Random(1))] * 3)  # noqa: S311  # no secret
    assert sum(len(node.spec.reservations) for node in cluster.nodes) == 20 * TENANTS
    assert (len(cluster.jobs), len(cluster.pods), len(cluster.pending)) == (20 * TENANTS + 3, 20 * TENANTS, 3)
    for node in cluster.nodes:
        assert len(node.status.devices) == GPUS
        for gpu in node.status.devices:
            here = [held for held in node.spec.reservations if gpu.uuid in held.gpu_uuids]
            assert len({held.mode for held in here}) <= 1
            assert sum(held.tenant.memory_mib or 0 for held in here) <= gpu.memory_mib - gpu.reserved_mib


@pytest.mark.parametrize(
    ("figure", "row"),
    [
        pytest.param(Figure("time", 120.0, "s", at_most=120), "| time | 120 s | ≤ 120 s | met |", id="met"),
        pytest.param(Figure("time", 120.1, "s", at_most=120), "| time | 120 s | ≤ 120 s | missed |", id="missed"),
        pytest.param(Figure("rate", 49.9, "/s", at_least=50), "| rate | 49.9 /s | ≥ 50 /s | missed |", id="too slow"),
        pytest.param(Figure("rate", 9876.5, "/s"), "| rate | 9,876 /s |  |  |", id="without a target"),
    ],
)
def test_row_shows_the_target_and_whether_it_is_met(figure: Figure, row: str) -> None:
    assert figure.row() == row


def test_section_replaces_the_one_of_its_title_and_leaves_others() -> None:
    section = Section("Two", "How.", [Figure("time", 1.5, "s")]).lines("today")
    report = replaced("# Benchmarks\n\nintro\n\n## One\n\na\n\n## Two\n\nstale\n\n## Three\n\nb\n", section)
    assert "stale" not in report
    assert report.startswith("# Benchmarks\n\nintro\n\n## One\n\na\n\n## Two\n\nMeasured today, on ")
    assert report.endswith("| time | 1.5 s |  |  |\n\n## Three\n\nb\n")
    assert replaced("# Benchmarks\n", section).count("## Two") == 1


def test_without_a_package_index_the_section_on_installation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    expected = r"found: Could not find a version .* no-such-package.*\. It needs a package index"
    with pytest.raises(MissingError, match=expected):
        installation.pip(sys.executable, "download", "no-such-package")
