"""The chart's dashboards are what the generator writes, and their queries name metrics and labels that exist."""

import re

import pytest
from carpool_docs import dashboards, metrics

LABELS = {family.name: {*family.labels} for process in metrics.REGISTRIES for family in metrics.families(process)}
SERIES = re.compile(r"\b((?:carpool|DCGM|process)_\w+?)(?:_(?:bucket|sum|count))?\b(?:\{([^}]*)\})?")


def test_the_files_of_the_chart_are_current() -> None:
    files = dict(dashboards.documents())
    assert {file: file.read_text(encoding="utf-8") for file in dashboards.FOLDER.iterdir()} == files, "run `make docs`"


@pytest.mark.parametrize(("name", "dashboard"), dashboards.read().items())
def test_panels_are_described_and_name_metrics_and_labels_that_exist(
    name: str, dashboard: dashboards.Dashboard
) -> None:
    assert [panel.title for panel in dashboard.panels if not panel.description.endswith(".")] == []
    for panel in dashboard.panels:
        for query in panel.queries.values():
            found = SERIES.findall(query.replace('__name__=~"DCGM_FI_DEV_FB_(USED|FREE|RESERVED)"', ""))
            unknown = [metric for metric, given in found if not {*re.findall(r"(\w+)=", given)} <= LABELS[metric]]
            assert unknown == [], f"{name}, {panel.title}: no such label"


JOB = "carpool_job_restarts"
RENAME = '"namespace", "$1", "exported_namespace", "(.+)")'


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        pytest.param("sum(carpool_operator_jobs)", "sum(carpool_operator_jobs)", id="no namespace"),
        pytest.param(f"rate({JOB}[5m])", f"label_replace(rate({JOB}{{}}[5m]), {RENAME}", id="all namespaces"),
        pytest.param(
            f'{JOB}{{namespace=~"a"}}',
            f'(label_replace({JOB}{{exported_namespace=~"a",exported_namespace!=""}}, {RENAME} '
            f'or {JOB}{{namespace=~"a",exported_namespace=""}})',
            id="chosen namespace",
        ),
    ],
)
def test_a_query_holds_whether_labels_are_honored_or_not(query: str, expected: str) -> None:
    assert dashboards.portable(query) == expected
