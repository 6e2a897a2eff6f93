"""Recording rules and alerts: promtool runs their cases, and each metric and runbook that they name exists."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_e2e.binaries import ensure
from carpool_extender.cache.cluster import KINDS

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "helm" / "carpool" / "rules" / f"{name}.yaml" for name in ("recording", "alerts")]
CASES = Path(__file__).parent / "rules" / "alerts.yaml"
GROUPS = [group for file in FILES for group in yaml.safe_load(file.read_text())["groups"]]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule["annotations"] for rule in RULES if "alert" in rule}
TESTS = yaml.safe_load(CASES.read_text())["tests"]


@pytest.mark.e2e
@pytest.mark.parametrize("command", [["check", "rules", "--lint-fatal", *FILES], ["test", "rules", CASES]], ids=str)
def test_promtool_accepts_the_rules_and_their_cases(command: list[Any]) -> None:
    done = subprocess.run([ensure(["promtool"])["promtool"], *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_and_resolves_in_a_case_and_has_a_runbook(alert: str) -> None:
    fires = [bool(c["exp_alerts"]) for test in TESTS for c in test["alert_rule_test"] if c["alertname"] == alert]
    assert fires[:3] == [False, True, False], "expected a case before it fires, while it fires, and after it resolved"
    assert ALERTS[alert]["runbook_url"] == f"docs/runbooks.md#{alert.lower()}"
    section = (ROOT / "docs" / "runbooks.md").read_text().split(f"\n## {alert}\n", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^\*\*(\w+)\.\*\*", section, re.MULTILINE) == ["Meaning", "Confirm", "Do"]


def test_each_reason_of_an_unavailable_gpu_is_explained_and_a_fault_or_excluded_from_that_alert() -> None:
    """Regression: a GPU whose tenant was slowed beyond its limit was reported as faulty."""
    alert = next(rule["expr"] for rule in RULES if rule.get("alert") == "CarpoolGpuUnhealthy")
    excluded = re.findall(r'reason!~"([\w|]+)"', alert)[0].split("|")
    before, section = (ROOT / "docs" / "runbooks.md").read_text().split("\n## CarpoolGpuUnhealthy\n", 1)
    section, _, after = section.partition("\n## ")
    faults = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted([*faults, *excluded]) == sorted(KINDS)
    assert [reason for reason in excluded if reason != "agent_down" and f"`{reason}`" not in before + after] == []


def test_each_metric_of_the_rules_and_cases_is_in_the_contract_with_its_labels() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    contract: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]* \| (.*?) \|", page, re.MULTILINE):
        for end in ("_bucket", "_count", "_sum") if kind == "histogram" else ("",):
            contract[name + end] = {*re.findall(r"`(\w+)`", labels), "le"}
    expressions = " ".join(rule["expr"] for rule in RULES)
    assert {*re.findall(r"(?<![\w:])(?:carpool|DCGM)_\w+\b(?!:)", expressions)} - contract.keys() == set()
    assert {*re.findall(r"\w+:\w+:\w+", expressions)} <= {rule.get("record") for rule in RULES}
    for series in (one["series"] for test in TESTS for one in test["input_series"]):
        name, _, labels = series.partition("{")
        added_by_prometheus = {"pod", "exported_namespace"}
        assert {*re.findall(r"(\w+)=", labels)} <= contract[name] | added_by_prometheus, series


@pytest.mark.e2e
@pytest.mark.parametrize(("rules", "exists", "count"), [("auto", 0, 0), ("auto", 1, 1), (True, 0, 1), (False, 1, 0)])
def test_the_chart_has_the_rules_where_their_kind_exists(render: Any, rules: Any, exists: bool, count: int) -> None:
    values = {"rules": rules, "labels": {"release": "prometheus"}, "runbookUrl": "https://example.org/runbooks"}
    kinds = "monitoring.coreos.com/v1/PrometheusRule" if exists else ""
    objects = render(apis=kinds, monitoring=values).all("PrometheusRule")
    assert len(objects) == count
    for one in objects:
        assert one["metadata"]["labels"]["release"] == "prometheus"
        text = yaml.safe_dump(GROUPS).replace("docs/runbooks.md", values["runbookUrl"])
        assert one["spec"]["groups"] == yaml.safe_load(text)
