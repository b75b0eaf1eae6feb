"""Section 6 of the paper repeated: what must hold whatever the figures are."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from slurm_pfi.cli.study import figure
from slurm_pfi.cli.study import paper as paper_command
from slurm_pfi.cli.study.paper import paper
from slurm_pfi.cli.study.paper_print import panels
from slurm_pfi.elasticity.curve import FloatArray
from slurm_pfi.sim.gap import gap_closed
from slurm_pfi.sim.paper import (
    BASE,
    IN_SAMPLE_RMSE,
    LOWEST_CAP_W,
    PUBLISHED_SHARE,
    Assumptions,
    Objective,
    all_assumptions,
    caps_of,
    draw_kinds,
    known_pfi,
    pool,
)
from slurm_pfi.sim.paper_learned import learned_rounds, prior_of
from slurm_pfi.sim.paper_play import POLICIES, REDUCTIONS, Game, Row, make_sets, play
from slurm_pfi.sim.workers import run_all

SMALL = Game(BASE, "production", "tokens", sets=6, jobs=40, seed=5, reductions=(0.0, 0.1, 0.3))


def at(rows: Sequence[Row], policy: str, reduction: float, after: int = 0) -> Row:
    (found,) = [row for row in rows if (row.policy, row.reduction, row.round) == (policy, reduction, after)]
    return found


# ---------------------------------------------------------------------------------------------- the statistic


def test_the_share_is_that_of_sums_with_the_interval_of_a_ratio() -> None:
    equal, oracle = np.array([10.0, 20.0, 30.0, 20.0]), np.array([5.0, 10.0, 20.0, 10.0])
    gap = gap_closed(np.array([8.0, 14.0, 24.0, 15.0]), equal, oracle, np.full(4, 100.0))
    assert gap.closed == pytest.approx((2 + 6 + 6 + 5) / 35)
    residual = np.array([2.0, 6.0, 6.0, 5.0]) - 19 / 35 * np.array([5.0, 10.0, 10.0, 10.0])
    half = 1.96 * residual.std(ddof=1) / 2 / 8.75
    assert gap.low is not None and gap.high is not None
    assert (gap.low, gap.high) == pytest.approx((19 / 35 - half, 19 / 35 + half), abs=1e-4)
    assert gap.of_throughput == pytest.approx(35 / 400)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        gaps = rng.uniform(5, 15, 60)
        gain = 0.6 * gaps + rng.normal(0, 2, 60)
        made = gap_closed(50 - gain, np.full(60, 50.0), 50 - gaps, np.full(60, 100.0))
        assert made.low is not None and made.high is not None
        held += made.low <= 0.6 <= made.high
    assert 0.90 <= held / 400 <= 0.985


def test_what_lies_below_equal_is_counted_and_its_worst_shown() -> None:
    equal, oracle, total = np.full(4, 10.0), np.full(4, 6.0), np.full(4, 50.0)
    gap = gap_closed(np.array([9.0, 10.0, 12.0, 10.0 + 1e-12]), equal, oracle, total)
    assert gap.below_equal == 0.25
    assert gap.worst == pytest.approx(-2 / 50)


@pytest.mark.parametrize(("gap", "there"), [(0.0019, False), (0.0021, True)])
def test_a_gap_under_two_thousandths_of_the_throughput_is_none(gap: float, there: bool) -> None:
    made = gap_closed(np.full(3, 0.2), np.full(3, 0.2), np.full(3, 0.2 - gap), np.ones(3))
    assert (made.closed is not None) is there


@pytest.mark.parametrize("lost", [np.empty(0), np.ones(2), np.ones((2, 2))])
def test_losses_that_do_not_belong_together_are_an_error(lost: FloatArray) -> None:
    with pytest.raises(ValueError, match="shape"):
        gap_closed(lost, np.ones(3) if lost.size else lost, lost, lost)


# --------------------------------------------------------------------------------------------- the population


@pytest.mark.parametrize("share", [0.0, 0.1, 0.94, 1.0])
def test_the_production_mix_has_the_share_of_fine_tuning_asked_for(share: float) -> None:
    jobs = pool(BASE)
    kinds = draw_kinds(jobs, "production", share, sets=60, size=100, rng=np.random.default_rng(3))
    assert float(jobs.ft[kinds].mean()) == pytest.approx(share, abs=0.02)


def test_the_random_mix_draws_every_job_alike() -> None:
    jobs = pool(BASE)
    kinds = draw_kinds(jobs, "random", 0.94, sets=200, size=100, rng=np.random.default_rng(3))
    count = np.bincount(kinds.ravel(), minlength=25)
    assert count.min() > 700 and count.max() < 900


def test_a_predicted_index_has_the_published_error_and_no_signal_among_dense_jobs() -> None:
    jobs = pool(BASE)
    told = known_pfi(jobs, BASE, sets=4000, rng=np.random.default_rng(2))
    rmse = float(np.sqrt(((told - jobs.pfi) ** 2).mean()))
    assert rmse == pytest.approx(IN_SAMPLE_RMSE, abs=0.005)
    dense = np.array([job.job_class.startswith("D") for job in jobs.jobs])
    centre = told.mean(axis=0)
    assert np.ptp(centre[dense]) < 0.02
    assert np.corrcoef(centre[~dense], jobs.pfi[~dense])[0, 1] > 0.99


def test_the_true_index_is_told_as_published_and_the_class_index_only_by_class() -> None:
    jobs = pool(BASE)
    rng = np.random.default_rng(2)
    assert (known_pfi(jobs, replace(BASE, pfi="true"), sets=3, rng=rng) == jobs.pfi).all()
    by_class = known_pfi(jobs, replace(BASE, pfi="class"), sets=3, rng=rng)
    assert len(set(by_class.ravel().tolist())) == 4
    assert float(by_class[0].mean()) == pytest.approx(float(jobs.pfi.mean()))


def test_jobs_of_several_nodes_were_measured_at_four_caps() -> None:
    points = {job.name: len(caps_of(job)) for job in pool(BASE).jobs}
    assert sum(count == 4 for count in points.values()) == 9
    assert points["Q30A3 FT x16"] == 4 and points["Q30A3 FT"] == 6


def test_each_assumption_changes_what_it_says() -> None:
    base, eight = pool(BASE), pool(replace(BASE, gpus="eight"))
    assert set(eight.gpus.tolist()) == {8.0} and set(base.gpus.tolist()) == {8.0, 16.0, 32.0}
    assert eight.tokens_per_s / eight.gpus == pytest.approx(base.tokens_per_s / base.gpus)
    assert base.end == pytest.approx(1 - LOWEST_CAP_W * base.gpus / base.watts)
    assert (pool(replace(BASE, clamp=False)).end == 1).all()
    fine = pool(replace(BASE, caps="fine"))
    assert min(curve.reduction.size for curve in fine.curves) > 30
    # Throughput is concave in power: what is interpolated between few caps loses more than what there is.
    for coarse, true in zip(base.curves, fine.curves, strict=True):
        grid = np.linspace(0, float(coarse.reduction[-1]), 50)
        assert (coarse.loss_at(grid) >= true.loss_at(grid) - 1e-3).all()


def test_names_of_assumptions_are_unique_and_say_what_differs() -> None:
    made = all_assumptions()
    assert len({one.name for one in made}) == len(made) == 144
    assert made[0] == BASE and BASE.name == "base"
    assert Assumptions(clamp=False, gpus="eight").name == "clamp=no gpus=eight"
    assert "clamp=yes" not in {word for one in made for word in one.name.split()}


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_to_1_is_an_error(share: float) -> None:
    with pytest.raises(ValueError, match="share of fine-tuning"):
        Assumptions(ft_share=share)


# -------------------------------------------------------------------------------------------------- the games


@pytest.mark.parametrize("objective", ["tokens", "progress"])
def test_the_oracle_closes_all_of_the_gap_and_equal_nothing(objective: Objective) -> None:
    rows = play(replace(SMALL, objective=objective))
    for reduction in (0.1, 0.3):
        assert at(rows, "equal", reduction).gap_closed == 0
        assert at(rows, "oracle", reduction).gap_closed == 1
        best = at(rows, "oracle", reduction).lost
        assert all(best <= at(rows, policy, reduction).lost + 1e-12 for policy in POLICIES)


def test_nothing_is_lost_without_a_reduction() -> None:
    for policy in POLICIES:
        row = at(play(SMALL), policy, 0.0)
        assert (row.lost, row.gap_closed, row.below_equal) == (0.0, None, 0.0)


def test_the_same_seed_gives_the_same_results_and_another_one_others() -> None:
    assert play(SMALL) == play(SMALL)
    assert at(play(SMALL), "pfi", 0.3) != at(play(replace(SMALL, seed=6)), "pfi", 0.3)


def test_sets_do_not_depend_on_assumptions_that_do_not_draw() -> None:
    kinds = make_sets(SMALL).kinds
    other = make_sets(
        replace(SMALL, assumptions=Assumptions(clamp=False, gpus="eight", pfi="true", caps="fine"))
    )
    assert (other.kinds == kinds).all()
    assert (make_sets(replace(SMALL, assumptions=Assumptions(ft_share=0.1))).kinds != kinds).any()


def test_no_job_is_cut_below_the_lowest_cap_unless_that_is_assumed() -> None:
    deep = replace(SMALL, reductions=(0.7,))
    sets = make_sets(deep)
    shares = sets.shares(0)
    assert shares.most < 0.75 * shares.watts.sum()
    free = replace(deep, assumptions=Assumptions(clamp=False))
    assert make_sets(free).shares(0).most == shares.watts.sum()
    assert at(play(free), "pfi", 0.7).lost != at(play(deep), "pfi", 0.7).lost


@pytest.mark.parametrize(
    "other", [one for one in all_assumptions() if len(one.departures) == 1], ids=lambda one: one.name
)
def test_every_assumption_matters(other: Assumptions) -> None:
    """None of the choices that are varied is without effect on what Eq. 2 loses."""
    base, varied = (at(play(replace(SMALL, assumptions=one)), "pfi", 0.3) for one in (BASE, other))
    assert abs(base.lost - varied.lost) > 1e-4


def test_workers_change_nothing_but_the_order() -> None:
    tasks = [(play, SMALL), (play, replace(SMALL, mix="random"))]
    alone, together = (sorted(run_all(tasks, workers)) for workers in (1, 2))
    assert alone == together


# ------------------------------------------------------------------------------------------------- the learner


def test_nobody_is_told_its_own_curve() -> None:
    prior, weights = prior_of(BASE)
    names = [one.curve_id for one in prior.library.curves]
    jobs = pool(BASE).jobs
    per_curve = np.exp(weights).reshape(len(jobs), len(names), -1).sum(axis=2)
    assert per_curve.sum(axis=1) == pytest.approx(1.0)
    for kind, job in enumerate(jobs):
        assert per_curve[kind, names.index(job.name)] == 0


def test_the_learner_beats_eq_2_and_learns_from_what_its_plans_cost() -> None:
    game = replace(SMALL, sets=3, jobs=100, reductions=(0.3,))
    rows, told = learned_rounds(game), play(game)
    first, last = (at(rows, "marginal", 0.3, after).gap_closed for after in (0, 4))
    by_index = at(told, "pfi", 0.3).gap_closed
    assert first is not None and last is not None and by_index is not None
    assert first >= 0.75 and last >= 0.92 and last > first > by_index
    assert at(rows, "marginal", 0.3).gap_share_of_throughput == pytest.approx(
        at(told, "oracle", 0.3).gap_share_of_throughput
    )


def test_jobs_of_one_name_pool_what_they_measured_and_only_then_plan_otherwise() -> None:
    game = replace(SMALL, sets=2, jobs=50, reductions=(0.3,))
    pooled, alone = learned_rounds(game), learned_rounds(replace(game, names=False))
    assert pooled[0] == alone[0]
    assert pooled[4].lost < alone[4].lost


# ---------------------------------------------------------------------------------------------- the command line


def command(*options: str, columns: str = "") -> Result:
    return CliRunner(env={"COLUMNS": columns}).invoke(
        paper, ["--sets", "3", "--jobs", "20", "--workers", "1", *options]
    )


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    done = command("--json", "--learned-sets", "2")
    assert done.exit_code == 0, done.output
    made: dict[str, object] = json.loads(done.stdout)
    return made


def test_the_document_has_every_result_once(document: dict[str, object]) -> None:
    results = document["results"]
    assert isinstance(results, list)
    wanted = {
        "policy", "mix", "objective", "assumptions", "reduction", "round", "gap_closed", "ci_low", "ci_high",
        "gap_share_of_throughput", "below_equal", "worst_vs_equal",
    }  # fmt: skip
    assert all(wanted <= set(one) for one in results)
    keys = [
        tuple(one[k] for k in ("policy", "mix", "objective", "assumptions", "reduction", "round"))
        for one in results
    ]
    assert len(keys) == len(set(keys))
    base = {key for key in keys if key[3] == "base"}
    assert len([key for key in base if key[0] in POLICIES]) == 4 * len(POLICIES) * len(REDUCTIONS)
    learned = {
        (mix, objective, reduction, after)
        for p, mix, objective, _, reduction, after in base
        if p == "marginal"
    }
    cuts = {"production": (0.1, 0.2, 0.3, 0.4), "random": (0.3,)}
    assert learned == {
        (mix, objective, reduction, after)
        for mix, reductions in cuts.items()
        for objective in ("tokens", "progress")
        for reduction in reductions
        for after in range(5)
    }
    assert document["names"] is True
    assert {key[3] for key in keys} == {one.name for one in all_assumptions()}
    assert document["seed"] == 20260911
    assert document["paper"]["gap_closed"] == PUBLISHED_SHARE  # type: ignore[index]


def test_the_range_over_the_assumptions_is_that_of_the_results(document: dict[str, object]) -> None:
    found = document["pfi_range"]
    assert isinstance(found, dict)
    results = document["results"]
    assert isinstance(results, list)
    closed = {
        one["assumptions"]: one["gap_closed"]
        for one in results
        if (one["policy"], one["mix"], one["objective"], one["reduction"])
        == ("pfi", "production", "tokens", 0.3)
    }
    assert found["combinations"] == len(closed) == 144
    assert (found["low"], found["high"]) == (min(closed.values()), max(closed.values()))
    near = {name for name, share in closed.items() if abs(share - 0.63) <= 0.1}
    assert set(found["within_10_points"]) == near


def test_what_is_printed_names_seed_sets_model_and_the_paper() -> None:
    done = command("--learned-sets", "0", "--seed", "12")
    assert done.exit_code == 0, done.output
    for text in (
        "3 sets of 20 jobs, seed 12",
        "model data, not measurement",
        "token rates are assumptions",
        "pfi 63 at 30 %",
        "all 144 combinations",
    ):
        assert text in done.stdout
    assert "marginal" not in done.stdout
    assert done.stderr == ""


def test_what_is_printed_of_the_learner_says_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_command, "_LEARNED", {"production": (0.3,)})
    monkeypatch.setattr(paper_command, "all_assumptions", lambda: (BASE,))
    done = command("--learned-sets", "2", "--no-names", "--jobs", "5")
    assert done.exit_code == 0, done.output
    printed = " ".join(done.stdout.split())
    for text in (
        "marginal, ours, on 2 of the sets",
        "the curves of the other 24 jobs",
        "do not pool what they measure (--no-names)",
        "marginal, first plan",
        "marginal, round 4",
        "of 20 applied plans lost more than equal",
        "marginal may pass its trust limit here (10 % of a run's draw",
    ):
        assert text in printed
    assert "intervals not shown" not in printed


def test_on_80_columns_it_says_which_figures_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_command, "all_assumptions", lambda: (BASE,))
    done = command("--learned-sets", "0", columns="80")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines.count("intervals not shown on 80 columns (--json has all)") == 4
    assert "-: not played" in lines
    assert sum("BELOW, 30 %  WORST, 30 %" in line for line in lines) == 4
    printed = " ".join(done.stdout.split())
    assert "cut by twice the % of all others" in printed and "no: jobs can be cut to 0 W" in printed
    assert "tokens/s that a job keeps under pfi and loses under equal" in printed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sets", "1"], "sets"),
        (["--jobs", "0"], "jobs"),
        (["--seed", "-1"], "seed"),
        (["--plot", "x.pdf"], ".svg or .png"),
        (["--plot", "/nowhere/at/all/x.svg"], "no folder"),
    ],
)
def test_wrong_use_is_said_before_any_work(options: list[str], says: str) -> None:
    done = CliRunner().invoke(paper, options)
    assert done.exit_code == 2
    assert says in done.stderr


# ----------------------------------------------------------------------------------------------------- figures


def test_a_policy_played_on_fewer_sets_is_shown_on_the_scale_of_all() -> None:
    """Its share of the gap counts, of the gap of all sets: other sets, which lose less, put nobody above the oracle."""
    rows = play(SMALL)
    oracle, even = at(rows, "oracle", 0.3), at(rows, "equal", 0.3)
    learned = replace(
        oracle,
        policy="marginal",
        round=4,
        gap_closed=0.9,
        ci_low=0.8,
        ci_high=1.0,
        lost=oracle.lost / 2,
        sets=2,
    )
    lost, saved = panels([*rows, learned])[:2]
    assert list(saved.lines)[-1] == "oracle"
    line = saved.lines["marginal, round 4"]
    gap = 100 * oracle.gap_share_of_throughput
    assert (*line.x, *line.y, *line.low, *line.high) == pytest.approx((30.0, 0.9 * gap, 0.8 * gap, gap))
    assert saved.lines["equal"].y[-1] == 0
    line = lost.lines["marginal, round 4"]
    assert line.y[0] == pytest.approx(100 * even.lost - 0.9 * gap)
    assert line.low[0] < line.y[0] < line.high[0]


LINES = {
    "equal": figure.Line([0, 10], [0, 5], [0, 4], [0, 6]),
    "oracle": figure.Line([0, 10], [0, 3], [0, 2], [0, 4]),
}
PANELS = [figure.Panel(f"mix {place}", LINES, "reduction, %", "lost, %") for place in range(3)]


@pytest.mark.parametrize(("name", "start"), [("f.svg", b"<?xml"), ("f.png", b"\x89PNG")])
def test_a_figure_is_written_the_same_each_time(tmp_path: Path, name: str, start: bytes) -> None:
    made = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / name
        figure.draw(path, PANELS, title="a title", note="model data")
        made.append(path.read_bytes())
    assert made[0] == made[1]
    assert made[0].startswith(start)
    if name.endswith("svg"):
        assert all(text in made[0] for text in (b"model data", b"mix 2", b"oracle"))


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(figure.FigureError, match=r"pip install 'slurm-pfi\[plot\]'"):
        figure.draw(tmp_path / "f.svg", PANELS, title="", note="")
    done = CliRunner().invoke(paper, ["--plot", str(tmp_path / "f.svg")])
    assert done.exit_code == 2 and "slurm-pfi[plot]" in done.stderr


def test_a_figure_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f.svg").mkdir()
    with pytest.raises(figure.FigureError, match=r"f\.svg"):
        figure.draw(tmp_path / "f.svg", PANELS, title="", note="")
