"""Writes docs/experiments.md: tables of results in a hand-written frame, `experiments.md.template`."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd
from carpool_core.products import find_product
from carpool_simulator.power import MEAN, Power, Spent
from carpool_simulator.sweep import ARRIVAL, DEFAULT
from matplotlib.figure import Figure

from carpool_research import published
from carpool_research.experiments import radrm
from carpool_research.experiments.runs import (
    AS_ASSUMED,
    CARPOOL,
    CASES,
    EAGER,
    ERRED,
    ESTIMATORS,
    EVERYTHING,
    EXPERIMENTS,
    FAILURES,
    KNOWLEDGE,
    ORACLE,
    ORDER,
    POLICY,
    PUBLISHED,
    QUEUE,
    SLOWDOWNS,
    UNLEARNED,
    Results,
)
from carpool_research.report import markdown, save

SMALL = ("hotcloud", "radrm-90", "radrm-60")
GOALS = (
    ("HotCloud, mean utilization", "hotcloud", "utilization_percent", 61.5, 75.0),
    ("HotCloud, makespan", "hotcloud", "makespan_min", -33.6, -40.0),
    ("RAD-RM 90, makespan", "radrm-90", "makespan_min", -30.0, -35.0),
    ("RAD-RM 60, makespan", "radrm-60", "makespan_min", -20.0, -25.0),
    ("RAD-RM 60, energy", "radrm-60", "energy_mj", -13.3, -18.0),
)
"""Name, experiment, figure, and the change in percent that is required and aimed at. Out of memory: none is allowed."""
NOISE = 2.0
"""Standard errors within which a goal is met or missed by chance."""
CHANGES = {"makespan_min": "makespan", "utilization_percent": "utilization", "completion_min": "completion"}
SLOWED, OOM = "slowed %", "OOM"
TRACE_COLUMNS = {
    "waiting_min": "waiting min",
    "completion_min": "completion min",
    "gpus_in_use": "GPUs in use",
    "unused_percent": "memory unused on these %",
    "utilization_percent": "utilization %",
    "slowed_percent": SLOWED,
    "oom": OOM,
    "unplaced": "never placed",
}


class Change:
    """Change of the mean of a figure against a baseline on the same seeds, in percent.

    The standard error is that of a ratio of means (Cochran, Sampling Techniques, 1977, chapter 6).

    Attributes:
        mean: The change.
        error: Its standard error; NaN for one seed.
    """

    def __init__(self, values: "pd.Series[float]", baseline: "pd.Series[float]") -> None:
        ratio = values.mean() / max(1e-9, baseline.mean())
        residuals = values.to_numpy() - ratio * baseline.to_numpy()
        self.mean = 100 * (ratio - 1)
        self.error = (
            100 * residuals.std(ddof=1) / np.sqrt(len(residuals)) / baseline.mean() if len(values) > 1 else np.nan
        )

    def __str__(self) -> str:
        return f"{self.mean:+.1f}%" if np.isnan(self.error) else f"{self.mean:+.1f}±{self.error:.1f}%"


class Table:
    """Results of an experiment, indexed by group, case and strategy; each entry has one row per seed."""

    def __init__(self, results: Results) -> None:
        self.about = results.about
        self._of = {
            key: rows.sort_values("seed")
            for key, rows in results.rows.groupby(["group", "case", "strategy"], sort=False)
        }

    def names(self, group: str, case: str = AS_ASSUMED) -> list[str]:
        """Return the strategies of a group in the order in which they ran."""
        return [name for of, at, name in self._of if (of, at) == (group, case)]

    def cases(self, group: str) -> list[str]:
        """Return the cases of a group."""
        return list(dict.fromkeys(case for of, case, _ in self._of if of == group))

    def figure(self, group: str, name: str, column: str, case: str = AS_ASSUMED) -> "pd.Series[float]":
        """Return a figure of a strategy, one entry per seed."""
        return self._of[group, case, name][column]

    def mean(self, group: str, name: str, column: str, case: str = AS_ASSUMED) -> float:
        """Return the mean of a figure."""
        return float(self.figure(group, name, column, case).mean())

    def change(self, group: str, name: str, column: str, case: str = AS_ASSUMED) -> Change:
        """Return the change of a figure against the baseline, one job per GPU, in the same case."""
        of = PUBLISHED if case == AS_ASSUMED else group
        baseline = next(iter(self.names(of, case)))
        return Change(self.figure(group, name, column, case), self.figure(of, baseline, column, case))

    def row(self, group: str, name: str) -> dict[str, str]:
        """Return the cells of a strategy: changes, share of slowed jobs, and out-of-memory deaths."""
        cells = {
            head: str(self.change(group, name, column)) for column, head in (CHANGES | {"energy_mj": "energy"}).items()
        }
        cells[SLOWED] = f"{self.mean(group, name, 'slowed_percent'):.1f}"
        return cells | {OOM: deaths(self.mean(group, name, "oom"))}


def deaths(mean: float) -> str:
    """Format a mean number of deaths, of which not even one is rounded to 0."""
    return f"{mean:.1f}" if not mean or mean >= 0.05 else f"{mean:.1g}"


def goals(of: Mapping[str, Table]) -> list[dict[str, str]]:
    """Return one row per goal: required, aimed at, and what Carpool reaches by default and in order of arrival."""
    rows = []
    for name, experiment, column, required, aim in GOALS:
        row = {"goal": name, "required": f"{required:+g}%", "aim": f"{aim:+g}%"}
        for head, strategy in (("default", DEFAULT), ("order of arrival", ARRIVAL)):
            change = of[experiment].change(CARPOOL, strategy, column)
            is_met = change.mean >= required if required > 0 else change.mean <= required
            noise = ", within noise" if abs(change.mean - required) <= NOISE * change.error else ""
            row |= {head: str(change), f"{head}: met": f"{'yes' if is_met else '**no**'}{noise}"}
        rows.append(row)
    for experiment in SMALL:
        row = {"goal": f"{experiment}, out of memory", "required": "0", "aim": "0"}
        for head, strategy in (("default", DEFAULT), ("order of arrival", ARRIVAL)):
            mean = of[experiment].mean(CARPOOL, strategy, "oom")
            row |= {head: deaths(mean), f"{head}: met": "**no**" if mean else "yes"}
        rows.append(row)
    return rows


def order_and_placement(table: Table) -> list[dict[str, str]]:
    """Return published strategies under their own queue discipline and under Carpool's, and Carpool under both."""
    rows = []
    for name in table.names(PUBLISHED):
        own, ours = (table.change(group, name, "makespan_min") for group in (PUBLISHED, QUEUE))
        cells = {
            "strategy": name,
            "makespan, own queue": str(own),
            "makespan, Carpool's queue": str(ours),
            "completion, own queue": str(table.change(PUBLISHED, name, "completion_min")),
            "completion, Carpool's queue": str(table.change(QUEUE, name, "completion_min")),
            "OOM, own / Carpool's queue": f"{deaths(table.mean(PUBLISHED, name, 'oom'))} / "
            f"{deaths(table.mean(QUEUE, name, 'oom'))}",
        }
        rows.append(cells)
    heads = list(rows[0])
    for name in (ARRIVAL, DEFAULT):
        makespan, completion = (str(table.change(CARPOOL, name, one)) for one in ("makespan_min", "completion_min"))
        cell = deaths(table.mean(CARPOOL, name, "oom"))
        rows.append(dict(zip(heads, (name, "", makespan, "", completion, f" / {cell}"), strict=True)))
    return rows


def own(of: Mapping[str, Table]) -> list[dict[str, str]]:
    """Return published strategies beside what was published of them, then Carpool's variants and oracles.

    Args:
        of: Experiments with the same published strategies; with several, each column names its experiment.
    """
    published = {one.name: getattr(one, "published", "") for one in EXPERIMENTS[next(iter(of))].published}
    rows = []
    for group in (PUBLISHED, CARPOOL):
        for strategy in dict.fromkeys(strategy for one in of.values() for strategy in one.names(group)):
            row = {"strategy": strategy, "published": published.get(strategy, "")}
            for experiment, one in of.items():
                prefix = f"{experiment.rpartition('-')[2]}: " if len(of) > 1 else ""
                if strategy in one.names(group):
                    row |= {prefix + head: cell for head, cell in one.row(group, strategy).items()}
            rows.append(row)
    return rows


def across(of: Mapping[str, Table], group: str, *figures: str) -> list[dict[str, str]]:
    """Return the strategies of a group as rows, and figures of each experiment as columns."""
    names = list(dict.fromkeys(name for table in of.values() for name in table.names(group)))
    if not names:
        return []
    heads = {**CHANGES, "oom": OOM, "slowed_percent": SLOWED}
    rows = []
    for name in (DEFAULT, *names):
        row = {"strategy": name}
        for experiment, table in of.items():
            at = CARPOOL if name == DEFAULT else group
            for figure in figures:
                has = name in table.names(at)
                text = str(table.change(at, name, figure)) if figure in CHANGES and has else ""
                cell = text or (deaths(table.mean(at, name, figure)) if has else "")
                row[f"{experiment}: {heads[figure]}"] = cell
        rows.append(row)
    return rows


def in_cases(table: Table, group: str = CASES) -> list[dict[str, str]]:
    """Return makespans in cases that differ from what was assumed, and the slowed jobs and deaths of the default."""
    rows = []
    for case in table.cases(group):
        _, *names = table.names(group, case)
        row = {"case": case} | {name: str(table.change(group, name, "makespan_min", case)) for name in names}
        row[f"default: {SLOWED}"] = f"{table.mean(group, DEFAULT, 'slowed_percent', case):.1f}"
        rows.append(row | {f"default: {OOM}": deaths(table.mean(group, DEFAULT, "oom", case))})
    return rows


def deaths_without(of: Mapping[str, Table]) -> list[dict[str, str]]:
    """Return out-of-memory deaths by default, without learning, and with sharing before anything was measured."""
    names = (DEFAULT, UNLEARNED, EAGER)
    return [
        {"strategy": name} | {e: deaths(table.mean(CARPOOL, name, "oom")) for e, table in of.items()} for name in names
    ]


def slowdowns(of: Mapping[str, Table]) -> list[dict[str, str]]:
    """Return Carpool by what it knows of slowdowns, in each experiment with each true source of them."""
    rows = []
    for experiment, table in of.items():
        for case in table.cases(SLOWDOWNS):
            names = table.names(SLOWDOWNS, case)[case != AS_ASSUMED :]  # the baseline is first in its own case
            makespans = {name: table.change(SLOWDOWNS, name, "makespan_min", case) for name in names}
            most = makespans[names[-1]].mean
            for name, makespan in makespans.items():
                row = {"experiment": experiment, "true slowdowns": "Lucid's" if case == AS_ASSUMED else "Gavel's"}
                row |= {"Carpool": name, "makespan": str(makespan)}
                row["of the oracle's gain"] = f"{100 * makespan.mean / most:.0f}%" if most else ""
                row["completion"] = str(table.change(SLOWDOWNS, name, "completion_min", case))
                row[SLOWED] = f"{table.mean(SLOWDOWNS, name, 'slowed_percent', case):.1f}"
                rows.append(row | {OOM: deaths(table.mean(SLOWDOWNS, name, "oom", case))})
    return rows


def estimators(of: Mapping[str, Table]) -> list[dict[str, str]]:
    """Return published strategies with each estimator, beside what was published."""
    rows = []
    for experiment, table in of.items():
        published = {one.name: one.published for one in EXPERIMENTS[experiment].estimating}
        for name in table.names(ESTIMATORS):
            cells = table.row(ESTIMATORS, name)
            mj = f"{table.mean(ESTIMATORS, name, 'energy_mj'):.2f}"
            picked = {OOM: cells[OOM], "makespan": cells["makespan"], "energy MJ": mj, "energy": cells["energy"]}
            row = {"experiment": experiment, "strategy and estimator": name, "published": published[name]}
            rows.append(row | picked)
    return rows


def distance_to_oracle(of: Mapping[str, Table]) -> list[dict[str, str]]:
    """Return how far Carpool's default is from the same decisions with more knowledge, on the same seeds."""
    rows = []
    for experiment, table in of.items():
        for what, group, name in (("memory, activity, speed", CARPOOL, ORACLE), ("everything", KNOWLEDGE, EVERYTHING)):
            if name in table.names(group):
                cells = {
                    head: str(Change(table.figure(CARPOOL, DEFAULT, one), table.figure(group, name, one)))
                    for one, head in {**CHANGES, "energy_mj": "energy"}.items()
                }
                rows.append({"experiment": experiment, "oracle of": what, **cells})
    return rows


def energies(table: Table) -> list[dict[str, str]]:
    """Return RAD-RM's energies with several constants of GPU power; the first strategy is the baseline."""

    def spent(name: str) -> Spent:
        group = PUBLISHED if name in table.names(PUBLISHED) else CARPOOL
        rows = pd.DataFrame({c: table.figure(group, name, c) for c in ("energy_mj", "makespan_min", "gpus_in_use")})
        each = [
            radrm.spent(mj, 60 * minutes * radrm.GPUS, 60 * minutes * in_use, radrm.POWER)
            for mj, minutes, in_use in rows.itertuples(index=False)
        ]
        return Spent(*(float(np.mean(values)) for values in zip(*each, strict=True)))

    published = {**radrm.PUBLISHED_MJ, **radrm.STREAMS_MJ}
    runs = {name: spent(name) for name in (*published, DEFAULT, ORACLE)}
    asleep_w = find_product(radrm.PRODUCT).idle_power_w
    powers = {
        f"{radrm.POWER} (used)": radrm.POWER,
        "fitted with streams, too": radrm.fitted(runs, published),
        "Zeus' shares of 319 W": MEAN.of(319, asleep_w),
        "50-400 W": Power(50, 50, 400),
    }

    def cell(mj: float, first_mj: float) -> str:
        return f"{mj:.2f} MJ" if mj == first_mj else f"{100 * (mj / first_mj - 1):+.1f}%"

    first = next(iter(runs))
    return [
        {
            "strategy": name,
            "published": cell(published[name], published[first]) if name in published else "",
            **{head: cell(run.energy_j(p) / 1e6, runs[first].energy_j(p) / 1e6) for head, p in powers.items()},
        }
        for name, run in runs.items()
    ]


def trace(table: Table) -> list[dict[str, str]]:
    """Return the strategies of a whole trace with the means of several figures."""
    shown = {
        column: head
        for column, head in TRACE_COLUMNS.items()
        if any(table.mean(PUBLISHED, name, column) for name in table.names(PUBLISHED))
    }
    return [
        {"strategy": name} | {head: f"{table.mean(PUBLISHED, name, column):,.1f}" for column, head in shown.items()}
        for name in table.names(PUBLISHED)
    ]


def versions(of: Mapping[str, Table]) -> list[dict[str, str]]:
    """Return when and with which version each experiment ran."""
    return [
        {
            "experiment": name, "workload": table.about.title, "seeds": str(table.about.seeds),
            "s per run": f"{table.about.cpu_s:g}", "UTC": table.about.made.when, "version": table.about.made.version,
        }
        for name, table in of.items()
    ]  # fmt: skip


def makespans(of: Mapping[str, Table]) -> Figure:
    """Draw the change of makespan of published strategies, under both queues, and of Carpool."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (name, table) in zip(figure.subplots(1, len(of)), of.items(), strict=True):
        bars = [(one, table.change(PUBLISHED, one, "makespan_min"), "C0") for one in table.names(PUBLISHED)[1:]]
        bars += [(f"{n}, Carpool's queue", table.change(QUEUE, n, "makespan_min"), "C1") for n in table.names(QUEUE)]
        bars += [(one, table.change(CARPOOL, one, "makespan_min"), "C2") for one in (ARRIVAL, DEFAULT, ORACLE)]
        names, changes, colours = zip(*reversed(bars), strict=True)
        axes.barh(names, [c.mean for c in changes], xerr=[c.error for c in changes], color=colours)
        axes.set(title=name, xlabel="change of makespan, %")
        axes.tick_params(labelsize=6)
    return figure


def write(out: Path, path: Path) -> None:
    """Write the document and its figure.

    Args:
        out: Folder of results.
        path: The document; the figure goes to `images/` beside it.

    Raises:
        WorkloadError: Results are missing or incomplete.
    """
    of = {name: Table(Results.read(out, name)) for name in EXPERIMENTS}
    small = {name: of[name] for name in SMALL}
    tables: dict[str, Sequence[Mapping[str, str]]] = {
        "goals": goals(of),
        "deaths": deaths_without(small),
        "oracle": distance_to_oracle(small),
        "knowledge": across(small, KNOWLEDGE, "makespan_min"),
        "order": across(small, ORDER, "makespan_min"),
        "errors": across(small, ERRED, "makespan_min", "oom"),
        "policies": across(small, POLICY, "makespan_min"),
        "slowdowns": slowdowns(small),
        "estimators": estimators(small),
        "energies": energies(of["radrm-60"]),
        "versions": versions(of),
        "own_hotcloud": own({"hotcloud": of["hotcloud"]}),
        "own_radrm": own({name: of[name] for name in SMALL[1:]}),
    }
    for name, table in small.items():
        tables |= {f"queue_{name}": order_and_placement(table), f"cases_{name}": in_cases(table)}
        tables[f"failures_{name}"] = in_cases(table, FAILURES)
    tables |= {f"trace_{name}": trace(table) for name, table in of.items() if EXPERIMENTS[name].is_trace}
    texts = {key.replace("-", "_"): markdown(rows) if rows else "Not run." for key, rows in tables.items()}
    texts |= {f"assumed_{name}".replace("-", "_"): _bullets(of[name].about.assumptions) for name in EXPERIMENTS}
    texts |= published.texts()
    template = resources.files(__package__).joinpath("experiments.md.template").read_text(encoding="utf-8")
    path.write_text(Template(template).substitute(texts), encoding="utf-8")
    (path.parent / "images").mkdir(exist_ok=True)
    save(makespans(small), path.parent / "images" / "experiments.svg")


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {one}" for one in sentences)
