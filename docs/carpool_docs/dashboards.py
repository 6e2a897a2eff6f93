"""Grafana dashboards of the chart, built from `dashboards.yaml` with Grafana's own types."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphDrawStyle, StackingMode, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, DynamicConfigValue, VariableRefresh

FOLDER = Path(__file__).parents[2] / "helm" / "carpool" / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_LINE = [
    DynamicConfigValue("custom.drawStyle", "line"),
    DynamicConfigValue("custom.fillOpacity", 0),
    DynamicConfigValue("custom.stacking", {"mode": "none"}),
]
"""Properties of a line over a stack."""
_WIDTH = 24
"""Columns of a dashboard."""
_SERIES = re.compile(
    r"(?P<function>\b(?:rate|increase|last_over_time)\()?"
    r"\b(?P<metric>carpool_(?:gpu_tenant|job)_\w+)(?:\{(?P<selector>[^}]*)\})?(?P<window>\[[^\]]+\]\))?"
)
"""A series with a job's namespace, and the function that takes a window of it."""


class Panel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One panel."""

    title: str
    description: str
    unit: str
    """Unit by Grafana's name."""
    queries: dict[str, str]
    """PromQL by legend."""
    kind: Literal["lines", "stack", "stat"] = "lines"
    lines: list[str] = []
    """Legends of a stack's queries that are lines over it."""


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One selector at the top."""

    query: str
    regex: str = ""
    """Takes the value out of an answer; all of it if empty."""


class Dashboard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One dashboard."""

    title: str
    description: str
    variables: dict[str, Variable]
    panels: list[Panel]


def read() -> Mapping[str, Dashboard]:
    """Return the dashboards by name."""
    text = Path(__file__).with_name("dashboards.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, Dashboard])


def portable(query: str) -> str:
    """Return a query that also holds if Prometheus does not honor labels.

    The namespace of a series is then in the label `exported_namespace`, because the scrape has its own.
    """
    return _SERIES.sub(_portable, query)


def _portable(found: re.Match[str]) -> str:
    selector = found["selector"] or ""

    def series(conditions: str) -> str:
        return f"{found['function'] or ''}{found['metric']}{{{conditions}}}{found['window'] or ''}"

    def renamed(conditions: str) -> str:
        return f'label_replace({series(conditions)}, "namespace", "$1", "exported_namespace", "(.+)")'

    if "namespace=~" not in selector:
        return renamed(selector)
    exported = renamed(selector.replace("namespace=~", "exported_namespace=~") + ',exported_namespace!=""')
    own = series(selector + ',exported_namespace=""')
    return f"({exported} or {own})"


def _panel(panel: Panel, stat_span: int) -> stat.Panel | timeseries.Panel:
    drawn: stat.Panel | timeseries.Panel
    if panel.kind == "stat":
        drawn = stat.Panel().span(stat_span).height(4)
    else:
        tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
        legend = common.VizLegendOptions().show_legend(show_legend=True)
        drawn = timeseries.Panel().span(_WIDTH // 2).height(8).tooltip(tooltip).legend(legend)
        if panel.kind == "stack":
            drawn = drawn.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40).min(0)
            drawn = drawn.draw_style(GraphDrawStyle.BARS)
            for name in panel.lines:
                drawn = drawn.override_by_name(name, _LINE)
    drawn = drawn.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    for number, (name, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(portable(query)).legend_format(name or panel.title).datasource(_SOURCE)
        drawn = drawn.with_target(target.ref_id(chr(ord("A") + number)))
    return drawn


def document(name: str, dashboard: Dashboard) -> str:
    """Return the JSON of a dashboard."""
    drawn = builders.Dashboard(dashboard.title).uid(f"carpool-{name}").description(dashboard.description)
    drawn = drawn.tags(["carpool", "gpu"]).time("now-6h", "now").refresh("1m").readonly()
    drawn = drawn.with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    for variable_name, variable in dashboard.variables.items():
        chosen = builders.QueryVariable(variable_name).query(portable(variable.query)).regex(variable.regex)
        chosen = chosen.datasource(_SOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        drawn = drawn.with_variable(chosen.multi(multi=True).include_all(include_all=True).all_value(".*"))
    stats = sum(panel.kind == "stat" for panel in dashboard.panels)
    for panel in dashboard.panels:
        drawn = drawn.with_panel(_panel(panel, _WIDTH // max(1, stats)))
    return json.dumps(drawn.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def documents() -> Iterator[tuple[Path, str]]:
    """Yield file and content of each dashboard in the chart."""
    for name, dashboard in read().items():
        yield FOLDER / f"{name}.json", document(name, dashboard)
