"""The chart's dashboards are what the generator writes, and their queries name metrics and labels that exist."""

import json
import re

import pytest
from carpool_docs import dashboards, metrics
from carpool_e2e.dashboards import DRAWN, PICTURES, digest, draw
from PIL import Image

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


def test_each_dashboard_has_a_picture() -> None:
    found = {}
    for file in PICTURES.iterdir():
        with Image.open(file) as picture:
            found[file.stem] = picture.info.get(DRAWN)
    assert found == {name: digest(name) for name in dashboards.read()}, "run `python -m carpool_e2e dashboards`"
    assert max(file.stat().st_size for file in PICTURES.iterdir()) < 150_000


def test_a_picture_has_each_panel_with_what_its_queries_find() -> None:
    def found(query: str) -> list[dict]:
        series = {"metric": {"state": "Running"}, "values": [[100, "1"], [104, "3"]]}
        return [series] if "carpool_operator_jobs" in query and "anomaly" not in query else []

    file = dashboards.FOLDER / "fleet.json"
    figure = draw(json.loads(file.read_text(encoding="utf-8")), {"start": 100, "end": 104, "step": 2}, found)
    axes = {one.get_title("left"): one for one in figure.axes}
    assert list(axes) == [panel.title for panel in dashboards.read()["fleet"].panels]
    texts = {title: [text.get_text() for text in one.texts] for title, one in axes.items()}
    assert {title for title, shown in texts.items() if shown != ["No data"]} == {"Running jobs", "Jobs by state"}
    assert texts["Running jobs"] == ["3"]
    legend = axes["Jobs by state"].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["Running"]


@pytest.mark.parametrize("title", ["Jobs by state", "Jobs that ended"])
def test_each_series_of_a_picture_has_a_colour_of_its_own_and_the_time_its_unit(title: str) -> None:
    """Regression: colours came again after the tenth series, and merged when the picture got smaller."""
    file = dashboards.FOLDER / "fleet.json"
    series = [{"metric": {"state": str(n), "end": str(n)}, "values": [[100, "1"], [104, "3"]]} for n in range(16)]
    figure = draw(json.loads(file.read_text(encoding="utf-8")), {"start": 100, "end": 104, "step": 2}, lambda _: series)
    axes = next(one for one in figure.axes if one.get_title("left") == title)
    handles, _ = axes.get_legend_handles_labels()
    colours = [one.get_color() if hasattr(one, "get_color") else one.get_facecolor()[0] for one in handles]
    assert len({tuple(colour) for colour in colours}) == 16
    assert axes.xaxis.get_major_formatter()(-0.5, 0) == "-0.5 min"


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
