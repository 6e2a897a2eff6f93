import msgspec
import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_predictor.evaluation.slowdown import gavel, holding, lucid
from carpool_predictor.evaluation.slowdown.gavel import Missed
from carpool_predictor.evaluation.slowdown.groups import exact_slowdowns
from carpool_predictor.evaluation.slowdown.train import train_slowdown
from carpool_predictor.evaluation.suites import DataError
from carpool_predictor.models.slowdown import DEPTH, SlowdownModel, Turns, shipped, slowdowns, upper_slowdowns
from hypothesis import given
from hypothesis import strategies as st

SHARED = [SharingMode.TIME_SLICING, SharingMode.MPS]
ratios = st.floats(0, 1, allow_nan=False, width=32)
tenants = st.lists(st.tuples(ratios, ratios, ratios), min_size=1, max_size=8)


def of(mode, profiles, present=None):
    """Slowdowns of one GPU's tenants, given as (util, sm, dram)."""
    columns = np.array(profiles, dtype=float).reshape(len(profiles), 3).T[:, None, :]
    mask = np.ones((1, len(profiles)), dtype=bool) if present is None else np.array([present])
    return slowdowns(mode, *columns, mask)[0]


@pytest.mark.parametrize(
    ("mode", "profiles", "expected"),
    [
        pytest.param(SharingMode.TIME_SLICING, [(1, 1, 1)] * 3, [3, 3, 3], id="full tenants share evenly"),
        pytest.param(SharingMode.TIME_SLICING, [(0.5, 0, 0)] * 2, [1.177, 1.177], id="two halves do not add"),
        pytest.param(SharingMode.TIME_SLICING, [(0.9, 0, 0), (0, 0, 0)], [1, 1], id="an idle neighbour costs nothing"),
        pytest.param(
            SharingMode.TIME_SLICING, [(1, 0, 0), (0.25, 0, 0)], [1.125, 1.25], id="the busier one loses less"
        ),
        pytest.param(SharingMode.MPS, [(1, 1, 0)] * 2, [2, 2], id="two full tenants halve each other"),
        pytest.param(SharingMode.MPS, [(0.9, 0.4, 0.2)] * 2, [1, 1], id="below saturation they do not meet"),
        pytest.param(SharingMode.MPS, [(1, 0.1, 0.7)] * 2, [1.6, 1.6], id="memory-bound tenants meet at the DRAM"),
        pytest.param(SharingMode.MPS, [(0.5, 0.2, 0), (1, 1, 0)], [1.2, 1.2], id="the host's part does not stretch"),
        pytest.param(SharingMode.EXCLUSIVE, [(1, 1, 1)] * 2, [1, 1], id="exclusive"),
        pytest.param(SharingMode.MIG, [(1, 1, 1)] * 2, [1, 1], id="instances"),
    ],
)
def test_known_cases(mode, profiles, expected):
    assert of(mode, profiles) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("mode", list(SharingMode))
@given(profile=st.tuples(ratios, ratios, ratios))
def test_a_single_tenant_is_not_slowed(mode, profile):
    assert of(mode, [profile]) == pytest.approx([1.0])


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants)
def test_never_below_one_and_never_worse_than_all_at_full_load(mode, profiles):
    result = of(mode, profiles)
    assert (result >= 1.0).all()
    assert (result <= len(profiles) + 1e-9).all()


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, newcomer=st.tuples(ratios, ratios, ratios))
def test_another_neighbour_never_speeds_anybody_up(mode, profiles, newcomer):
    assert (of(mode, [*profiles, newcomer])[:-1] >= of(mode, profiles) - 1e-9).all()


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, which=st.integers(0, 7), more=st.tuples(ratios, ratios, ratios))
def test_a_busier_tenant_slows_everybody_more(mode, profiles, which, more):
    which %= len(profiles)
    busier = list(profiles)
    busier[which] = tuple(max(a, b) for a, b in zip(profiles[which], more, strict=True))
    assert (of(mode, busier) >= of(mode, profiles) - 1e-9).all()


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, seed=st.randoms(use_true_random=False))
def test_the_order_of_tenants_does_not_matter(mode, profiles, seed):
    order = list(range(len(profiles)))
    seed.shuffle(order)
    assert of(mode, [profiles[i] for i in order]) == pytest.approx(of(mode, profiles)[order])


@given(busy=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4))
def test_who_is_in_the_way_whenever_busy_composes_as_the_markov_chain_does(busy):
    assert Turns(np.array([busy]), 1.0).slowdowns()[0] == pytest.approx(exact_slowdowns(busy), rel=1e-6)


def recursion(busy, exponent, away=()):
    """The arrival theorem as it is written down: slowdowns of those who are not away, by their place."""
    found = {}
    for i in (i for i in range(len(busy)) if i not in away):
        x = 1.0
        for j, s in recursion(busy, exponent, (*away, i)).items():
            waits = s - 1.0  # u_j * (x_j - 1)
            x += (busy[j] ** exponent + waits) / s
        found[i] = 1.0 + busy[i] * (x - 1.0)
    return found


@given(busy=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=DEPTH + 1), exponent=st.sampled_from([1.0, 1.5, 2.0]))
def test_groups_compose_by_the_arrival_theorem(busy, exponent):
    expected = list(recursion(busy, exponent).values())
    assert Turns(np.array([busy]), exponent).slowdowns()[0] == pytest.approx(expected, rel=1e-9)


@given(busy=st.lists(st.floats(0.01, 1.0), min_size=5, max_size=6))
def test_what_is_cut_off_of_larger_groups_is_little(busy):
    expected = list(Turns(np.array([busy]), shipped().holding, depth=len(busy)).slowdowns()[0])
    found = Turns(np.array([busy]), shipped().holding).slowdowns()[0]
    assert (found <= np.array(expected) + 1e-9).all()
    assert found == pytest.approx(expected, rel=0.05)


@given(busy=st.lists(ratios, min_size=1, max_size=4))
def test_taking_turns_nobody_holds_more_sms_than_there_are(busy):
    alone = np.array([busy], float)
    k = shipped().holding
    assert (alone**k / Turns(alone, k).slowdowns()).sum() <= 1 + 1e-9


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants)
def test_the_upper_quantile_lies_above_and_vanishes_without_neighbours(mode, profiles):
    columns = np.array(profiles, float).reshape(len(profiles), 3).T[:, None, :]
    here = np.ones((1, len(profiles)), bool)
    upper = upper_slowdowns(mode, *columns, here)[0]
    assert (upper >= of(mode, profiles)).all()
    if len(profiles) == 1:
        assert upper == pytest.approx([1.0])


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, others=st.lists(tenants, max_size=4))
def test_a_gpu_does_not_depend_on_the_rest_of_the_batch(mode, profiles, others):
    rows = [profiles, *others]
    width = max(len(row) for row in rows)
    columns = np.zeros((3, len(rows), width))
    present = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        columns[:, i, : len(row)] = np.array(row).T
        present[i, : len(row)] = True
    result = slowdowns(mode, *columns, present)
    assert result[0, : len(profiles)] == pytest.approx(of(mode, profiles))
    assert (result[~present] == 1).all()


@pytest.mark.parametrize("mode", SHARED)
def test_what_stands_in_absent_entries_is_ignored(mode):
    assert of(mode, [(1, 1, 1), (np.nan, 7, -3)], present=[True, False]) == pytest.approx([1, 1])
    pair = of(mode, [(1, 1, 1), (0.5, 0.9, 0)])
    assert of(mode, [(1, 1, 1), (np.nan, 7, -3), (0.5, 0.9, 0)], [True, False, True])[[0, 2]] == pytest.approx(pair)


@pytest.mark.parametrize("mode", SHARED)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_gpus_or_nobody_at_all(mode, shape):
    empty = np.zeros(shape)
    assert slowdowns(mode, empty, empty, empty).shape == shape
    assert slowdowns(mode, empty, empty, empty, empty.astype(bool)).shape == shape


def measured_by_gavel(tmp_path):
    """Three kinds of jobs, their steps a power mean with exponent 3, and pairs in which no kernels are longer."""
    step = {}
    for job, (host, each) in {"A": (1.0, 0.02), "B": (2.0, 0.01), "C": (0.5, 0.05)}.items():
        for batch in (8, 16, 32, 64, 128):
            gpu = each * batch + 0.1
            step[job, batch] = ((host**3 + gpu**3) ** (1 / 3), gpu)
    lines = [
        "file,gpu,job_a,bs_a,ngpu_a,job_b,bs_b,ngpu_b,iso_tput_a_steps_s,iso_tput_b_steps_s,coloc_tput_a,coloc_tput_b"
    ]
    for (one, size), (step_a, gpu_a) in step.items():
        for (other, its), (step_b, gpu_b) in step.items():
            slow = 1 + gpu_a / step_a * gpu_b / step_b
            speeds = f"{1 / step_a},{1 / step_b},{1 / step_a / slow},{1 / step_b / slow}"
            lines.append(f"oracle_throughputs.json,v100,{one},{size},1,{other},{its},1,{speeds}")
    lines.append("oracle_throughputs.json,v100,A,8,1,B,8,1,1,1,0,0")
    (tmp_path / "gavel").mkdir()
    (tmp_path / "gavel" / "gavel_throughputs_flat.csv").write_text("\n".join(lines))


def measured_by_gpumemnet(tmp_path):
    """Many MLPs that hold u^1.4 of the SMs, a few CNNs that hold u^1.6, and runs that do not count."""
    (tmp_path / "gpumemnet").mkdir()
    names = ",".join(holding.COLUMNS)
    mlps = [f"{percent},{(percent / 100) ** 1.4},{(percent / 100) ** 1.1}" for percent in range(100)]
    (tmp_path / "gpumemnet" / "mlp_a100_40gb.csv").write_text("\n".join([names, *mlps]))
    cnns = [f"{percent},{(percent / 100) ** 1.6},{percent / 100},SUCCESSFUL" for percent in range(30, 70, 4)]
    faulty = ["50,-1,0.5,SUCCESSFUL", "-1,0.5,0.5,SUCCESSFUL", "50,0.5,-1,SUCCESSFUL", "50,1,1,OOM_CRASH"]
    (tmp_path / "gpumemnet" / "cnn_a100_40gb.csv").write_text("\n".join([f"{names},Status", *cnns, *faulty]))


def test_training_finds_what_made_the_data(tmp_path):
    measured_by_gavel(tmp_path)
    measured_by_gpumemnet(tmp_path)
    model = msgspec.json.decode(train_slowdown(tmp_path, tmp_path / "out").read_bytes(), type=SlowdownModel)
    assert model.holding == 1.6  # the CNNs': fewer, but half busy, where it matters most, and both kinds count alike
    told = ("holding_runs", "step_exponent", "step_curves", "pairs")
    assert [model.provenance[name] for name in told] == [110, 3.0, 3, 15 * 16 / 2]


def test_a_factor_is_the_quantile_of_what_was_not_foretold_by_the_neighbours_busy_share():
    beside = np.tile([0.5, 1.0], (100, 1))
    beyond = np.repeat(np.arange(100) / 100, 2).reshape(100, 2)  # in parts of the neighbour's busy share
    foretold = np.full((100, 2), 1.2)
    known = gavel.Queueing(foretold + beyond * beside, foretold, np.full((100, 2), 1.1), beside)
    in_turns, side_by_side = gavel.factors(known, 0.9)
    assert in_turns == pytest.approx(0.9, abs=0.01)
    assert side_by_side == pytest.approx(np.quantile(beyond + 0.1 / beside, 0.9), abs=0.01)


def test_pairs_are_foretold_by_the_formulas_that_ship(tmp_path):
    measured_by_gavel(tmp_path)
    read = gavel.read(tmp_path)
    k = shipped().holding
    found = gavel.queueing(read, 3.0, k)
    beside = found.beside[:, ::-1]
    dram = np.zeros(beside.shape)
    assert found.side_by_side == pytest.approx(slowdowns(SharingMode.MPS, beside, beside**k, dram))
    assert found.weighted == pytest.approx(found.measured, rel=0.02)  # weights and corrections make up for the rest
    shares = np.array([0.3, 0.9])
    alike = gavel.Weights(shares, np.array([[0, 1]]), k).foretell(np.zeros(4))
    assert alike[0] == pytest.approx(of(SharingMode.TIME_SLICING, [(0.3, 0, 0), (0.9, 0, 0)]))


def test_each_kind_of_training_has_its_own_exponent(tmp_path):
    measured_by_gpumemnet(tmp_path)
    runs = holding.read(tmp_path)
    assert {kind: holding.best_exponent([of]) for kind, of in runs.items()} == {"mlp": 1.4, "cnn": 1.6}
    assert holding.best_exponent([runs["mlp"]], holding.engine_active) == 1.1


def test_how_much_worse_an_exponent_is_has_the_error_of_few_jobs():
    least = Missed({"A": 0.01, "B": 0.02})
    assert Missed({"A": 0.03, "B": 0.06}).beyond(least) == pytest.approx((0.03, 0.01))


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        pytest.param({1.0: (0.07, 0.02), 1.5: (0.02, 0.03), 3.0: (0.02, 0.02)}, 1.5, id="no worse than chance tells"),
        pytest.param({1.0: (0.04, 0.04), 1.5: (0.03, 0.03), 3.0: (0.02, 0.02)}, 3.0, id="worse on every job"),
        pytest.param({1.0: (0.02, 0.02), 1.5: (0.03, 0.03), 3.0: (0.04, 0.04)}, 1.0, id="the best is the smallest"),
    ],
)
def test_of_exponents_that_the_jobs_cannot_tell_apart_the_most_cautious_is_taken(errors, expected):
    of_jobs = {exponent: Missed(dict(zip("AB", one, strict=True))) for exponent, one in errors.items()}
    assert gavel.most_cautious(of_jobs) == expected


@pytest.mark.parametrize(("read", "name"), [(gavel.read, "gavel"), (lucid.read, "lucid"), (holding.read, "gpumemnet")])
def test_missing_measurements_are_named(tmp_path, read, name):
    with pytest.raises(DataError, match=f"expected .*{name}"):
        read(tmp_path)
