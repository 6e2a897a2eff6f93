"""What comes of experiments where what their texts leave open is otherwise than assumed."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_extender.simulation import document, gavel_pairs, goals, hotcloud, otherwise, radrm, results
from carpool_extender.simulation.command import simulate
from carpool_extender.simulation.contest import DEFAULT, EXPERIMENTS, LONGEST_FIRST, SMALL, ours
from carpool_extender.simulation.pairs import MeasuredPairs
from carpool_extender.simulation.workload import Pool, WorkloadError
from carpool_predictor.evaluation import slowdown
from click.testing import CliRunner
from results_world import THEN, line_of, minutes
from simulated_world import job, truth, workload

HOTCLOUD, RADRM = EXPERIMENTS["hotcloud"], EXPERIMENTS["radrm-90"]


def drawn(name, experiment, data):
    return {case: one.draw(data, 1) for case, one in named(name, experiment).items()}


def named(name, experiment):
    found = otherwise.cases(name, experiment)
    return dict(zip([re.search(r"\(([^()]*)\)$", one.published[0].name)[1] for one in found], found, strict=True))


def test_every_small_experiment_has_cases_and_the_first_is_as_assumed(published):
    assert set(otherwise.CASES) == set(SMALL)
    for name in SMALL:
        cases = named(name, EXPERIMENTS[name])
        assert next(iter(cases)) == otherwise.ASSUMED
        assert cases[otherwise.ASSUMED].draw(published, 1) == EXPERIMENTS[name].draw(published, 1)
    assert otherwise.cases("philly", EXPERIMENTS["philly"]) == []


def test_hotclouds_jobs_come_evenly_and_are_the_same(published):
    draws = drawn("hotcloud", HOTCLOUD, published)
    before, after = draws[otherwise.ASSUMED], draws["jobs come over 10 min"]
    assert [one.arrival_s for one in after.jobs] == pytest.approx([600.0 * i / 99 for i in range(100)])
    assert [replace(one, arrival_s=0.0) for one in after.jobs] == list(before.jobs)


def test_hotclouds_durations_may_be_uniform(published):
    jobs = [one for seed in range(5) for one in hotcloud.OTHERWISE["durations are uniform"](published, seed).jobs]
    durations = [one.work_s for one in jobs]
    assert 120.0 <= min(durations) < 240.0
    assert 7080.0 < max(durations) <= 7200.0
    assert sum(durations) / len(durations) == pytest.approx(3660.0, rel=0.1)


def test_rad_rms_tasks_keep_the_sms_more_or_less_busy_and_are_the_same_otherwise(published):
    draws = drawn("radrm-90", RADRM, published)
    before = draws[otherwise.ASSUMED].jobs
    for scale in (0.75, 1.25, 1.5):
        after = draws[f"SM activity × {scale:g}"].jobs
        assert [one.truth.sm for one in after] == pytest.approx([min(1.0, scale * one.truth.sm) for one in before])
        assert [(one.name, one.arrival_s, one.work_s, one.prediction) for one in after] == [
            (one.name, one.arrival_s, one.work_s, one.prediction) for one in before
        ]


def test_memory_is_lost_in_pieces_in_every_experiment_and_jobs_are_the_same(published):
    for name in SMALL:
        draws = drawn(name, EXPERIMENTS[name], published)
        before = draws[otherwise.ASSUMED]
        for share in (0.05, 0.1):
            after = draws[f"{share:.0%} of shared memory lost in pieces"]
            assert replace(after, fragmented=before.fragmented, assumptions=before.assumptions) == before
            assert after.fragmented == share


def test_rad_rms_tasks_may_lose_behind_mps_what_gavels_pairs_did(published):
    draws = drawn("radrm-60", EXPERIMENTS["radrm-60"], published)
    before, after = draws[otherwise.ASSUMED], draws[radrm.BEHIND_MPS]
    assert replace(after, behind_mps=None) == before
    pool = after.behind_mps
    assert pool.busy.shape == (1024, 2)
    assert pool.slowdowns.shape == (1024,)
    assert ((pool.busy > 0) & (pool.busy <= 1)).all()
    assert pool.slowdowns.min() >= 1.0
    assert pool.slowdowns.mean() - 1 == pytest.approx(0.813, abs=5e-4), "the card's error of no slowdown"


def test_tenants_of_mps_have_the_slowdowns_of_other_pairs_and_those_by_turns_do_not(published):
    pool = Pool(np.array([[0.2, 0.7]] * 8 + [[0.7, 0.2]] * 8), np.array([1.25] * 8 + [1.75] * 8))
    lucids = MeasuredPairs(published / "lucid")
    pairs = MeasuredPairs(published / "lucid", behind_mps=pool)
    tenants = [truth(kind="a", util=0.2), truth(kind="b", util=0.7)]
    assert pairs.slowdowns(SharingMode.MPS, tenants) == [1.25, 1.75]
    assert lucids.slowdowns(SharingMode.MPS, tenants) != [1.25, 1.75]
    by_turns = [one.slowdowns(SharingMode.TIME_SLICING, tenants) for one in (pairs, lucids)]
    assert by_turns[0] == by_turns[1]


def test_gavels_pairs_need_their_file_and_scipy(published, monkeypatch, tmp_path):
    with pytest.raises(WorkloadError, match=r"gavel_throughputs_flat\.csv"):
        gavel_pairs.read(tmp_path)
    monkeypatch.setitem(sys.modules, "carpool_predictor.evaluation.slowdown.gavel", None)
    monkeypatch.delattr(slowdown, "gavel", raising=False)
    with pytest.raises(WorkloadError, match=r'expected .* found none; run: pip install "carpool\[simulate\]"'):
        gavel_pairs.read(tmp_path / "else")


def test_lines_differ_from_the_experiments_own_in_their_names_alone():
    for name in SMALL:
        experiment = EXPERIMENTS[name]
        own = {replace(one, name="") for one in (*experiment.published, *ours(experiment.mode))}
        tried = otherwise.strategies(name, experiment)
        assert {replace(one, name="") for one in tried} <= own
        assert len({one.name for one in tried}) == len(tried)
        for case in otherwise.by_case([line_of(one) for one in tried]).values():
            assert list(case)[-2:] == [DEFAULT, LONGEST_FIRST]
            assert next(iter(case)) == experiment.published[0].name


def lines(name, experiment, makespans, **every):
    """Each case with the makespans of some strategies; all others need as long as whole GPUs."""
    found = []
    for case in otherwise.cases(name, experiment):
        called = re.search(r"\(([^()]*)\)$", case.published[0].name)[1]
        for one in case.published:
            known = makespans.get(called, {}).get(one.name.removesuffix(f" ({called})"), 100.0)
            found.append(line_of(one, *minutes(known, known), **every))
    return found


def test_changes_are_against_the_first_line_of_the_same_case():
    known = lines("hotcloud", HOTCLOUD, {"jobs come over 60 s": {"slot-based": 200.0, DEFAULT: 150.0}}, oom=1.0)
    told = "\n".join(otherwise.section({"hotcloud": known}))
    assert f"| jobs come over 60 s | {DEFAULT} |  | -25.0% |" in told
    assert f"| {otherwise.ASSUMED} | {DEFAULT} |  | +0.0% |" in told
    assert "slot-based" not in told
    assert otherwise.section({}) == []


def test_energies_are_fitted_anew_where_some_were_published():
    known = lines("radrm-60", EXPERIMENTS["radrm-60"], {}, energy_mj=30.0, gpus_in_use=3.0)
    assert "by constants that are fitted anew in each case" in "\n".join(otherwise.section({"radrm-60": known}))
    assert "fitted anew" not in "\n".join(otherwise.section({"radrm-90": lines("radrm-90", RADRM, {})}))


def test_the_goals_tell_what_comes_out_where_published_strategies_come_out_best():
    lug, oracle = "LUG, 80%, 5 GB", "oracle worst fit, 80%"
    known = lines(
        "radrm-90",
        RADRM,
        {
            otherwise.ASSUMED: {lug: 59.0, oracle: 54.0, DEFAULT: 56.0},
            "SM activity × 1.25": {lug: 66.0, oracle: 62.0, DEFAULT: 69.0},
            "SM activity × 1.5": {lug: 73.0, oracle: 72.0, DEFAULT: 74.0},
        },
    )
    told = " ".join(goals.section({}, others={"radrm-90": known}))
    assert f"{lug} -41.0% of trace time (-28%), {oracle} -46.0% of trace time (-30.13%)." in told
    assert "with SM activity × 1.5; there Carpool's default comes to -26.0% on radrm-90 (must -30%) (" in told
    assert f"(#{otherwise.TITLE.lower().replace(' ', '-')})" in told
    assert "RAD-RM" not in " ".join(goals.section({}))


def test_the_command_tries_them_and_the_document_tells(data, monkeypatch, tmp_path):
    few = replace(HOTCLOUD, draw=lambda _data, _seed: workload(job("a"), job("b"), gpus=2))
    monkeypatch.setitem(EXPERIMENTS, "hotcloud", few)
    monkeypatch.setitem(otherwise.CASES, "hotcloud", ({"one job": lambda _data, _seed: workload(job("a"))}, ()))
    arguments = ("--data", str(data), "--out", str(tmp_path), "--seeds", "1", "--no-pictures")
    result = CliRunner().invoke(simulate, [*arguments, "--workload", "hotcloud"])
    assert result.exit_code == 0, result.output
    assert f"| one job | {DEFAULT} |" in (tmp_path / "hotcloud.md").read_text()
    document.write(tmp_path, tmp_path / "experiments.md")
    assert f"| one job | {DEFAULT} |" in (tmp_path / "experiments.md").read_text()
    result = CliRunner().invoke(simulate, [*arguments, "--workload", "hotcloud", "--fragmentation", "0.1"])
    assert result.exit_code == 0, result.output
    assert "one job" not in (tmp_path / "hotcloud.md").read_text(), "its cases know of no fragmentation"


def test_results_are_read_with_their_strategies(tmp_path):
    known = lines("hotcloud", HOTCLOUD, {})
    results.write(tmp_path, "hotcloud" + results.OTHERWISE, workload(job("a")), known, THEN)
    found = results.read(tmp_path, "hotcloud" + results.OTHERWISE)
    assert [line.strategy for line in found.lines] == [line.strategy for line in known]
