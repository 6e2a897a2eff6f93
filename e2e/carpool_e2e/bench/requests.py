"""How often the API server was asked what: read from its own counters."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

_COUNTER = "apiserver_request_total"


def counted(metrics: str) -> Counter[str]:
    """Count the requests that an API server has answered until now, by verb and resource: `PATCH gpunodes/status`.

    Args:
        metrics: What it tells of itself, in Prometheus' format. Watches count when they end.
    """
    # Of thousands of lines few matter, and the parser takes its time.
    lines = "".join(f"{line}\n" for line in metrics.splitlines() if line.startswith(f"{_COUNTER}{{"))
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            found[_name(sample.labels)] += int(sample.value)
    return found


def _name(labels: dict[str, str]) -> str:
    what = "/".join(part for part in (labels["resource"], labels["subresource"]) if part) or "other"
    return f"{labels['verb']} {what}{' (dry run)' if labels.get('dry_run') else ''}"
