"""How long sharing a reduction takes: ``python -m bench.solve`` writes build/bench/solve.json.

Made-up runs whose curves all differ: measured at 24 caps with 0.6 % of noise, with knees and slopes spread as in the
curves that are published, so not convex. ``solve_ms`` is everything from these arrays to the reductions: checks,
convex hulls, merit order. HiGHS finds its own optimum in the same run: of the pieces of our hulls, and of a tenth of
the runs from raw points, of which it chooses mixtures and knows no hulls (for all of them it takes a minute or more).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, vstack

from slurm_pfi.allocation.solve import Shares, marginal, pieces_of_runs
from slurm_pfi.elasticity.curve import CurveStack, FloatArray

OUT = Path(__file__).resolve().parent.parent / "build/bench/solve.json"
POINTS = 24
SIZES = (1_000, 10_000, 100_000)
TARGETS_MS = {10_000: 50.0, 100_000: 800.0}
SHARE = 0.5
"""Of the greatest reductions, so much is needed."""


def instance(runs: int, points: int = POINTS, seed: int = 11) -> tuple[FloatArray, FloatArray, Shares, float]:
    """Reductions and losses of shape (runs, points), who shares, and the watts needed."""
    rng = np.random.default_rng(seed)
    reduction = np.linspace(0, 0.7, points) * rng.uniform(0.6, 1.2, (runs, 1))
    knee, slope, bend = (rng.uniform(low, high, (runs, 1)) for low, high in ((0, 0.5), (0.1, 0.6), (0.5, 3)))
    loss = slope * reduction + bend * np.maximum(0, reduction - knee) ** 2
    loss += rng.normal(0, 0.006, loss.shape)
    loss[:, 0] = 0
    loss = np.maximum.accumulate(np.clip(loss, 0, 1), axis=1)
    gpus = rng.choice([1, 2, 4, 8, 16, 64], runs)
    shares = Shares(
        watts=gpus * rng.uniform(300, 700, runs),
        value=gpus * rng.choice([1.0, 1.0, 1.0, 2.0], runs),
        start=np.zeros(runs),
        end=rng.choice([0.04, 0.185, 0.33], runs),
    )
    return reduction, loss, shares, SHARE * shares.most


def measure(runs: int, times: int, points: int = POINTS) -> dict[str, float]:
    """Milliseconds from raw arrays to reductions."""
    reduction, loss, shares, need = instance(runs, points)
    took: list[tuple[float, float]] = []
    for _ in range(times):
        began = time.perf_counter()
        stack = CurveStack.from_arrays(reduction, loss)
        stack.pieces()
        hulls = time.perf_counter()
        marginal(shares, stack, need)
        took.append((time.perf_counter() - began, hulls - began))
    return {
        "runs": runs,
        "points": points,
        "pieces": int(stack.pieces().owner.size),
        "solve_ms": round(1000 * statistics.median(total for total, _ in took), 2),
        "best_ms": round(1000 * min(total for total, _ in took), 2),
        "hulls_ms": round(1000 * statistics.median(hulls for _, hulls in took), 2),
    }


def against_highs(runs: int, solve_ms: float, *, raw: bool) -> dict[str, float]:
    """How far our loss is from the optimum of HiGHS, and how many times longer that takes."""
    reduction, loss, shares, need = instance(runs)
    stack = CurveStack.from_arrays(reduction, loss)
    answer = marginal(shares, stack, need)
    pieces = stack.pieces()
    length = np.clip(answer[pieces.owner], pieces.start, pieces.end) - pieces.start
    ours = float((shares.value[pieces.owner] * pieces.slope * length).sum())
    began = time.perf_counter()
    best = _from_points(reduction, loss, shares, need) if raw else _from_pieces(shares, stack, need)
    took_s = time.perf_counter() - began
    return {
        "runs": runs,
        "ours": ours,
        "highs": best,
        "relative_difference": abs(ours - best) / best,
        "highs_s": round(took_s, 3),
        "times_slower": round(1000 * took_s / solve_ms, 1),
    }


def _from_points(reduction: FloatArray, loss: FloatArray, shares: Shares, need: float) -> float:
    """The optimum where each run is a mixture of its points, at most at its greatest reduction."""
    runs, points = reduction.shape
    row, column = np.repeat(np.arange(runs), points), np.arange(runs * points)
    x = csr_matrix((reduction.ravel(), (row, column)))
    unit = shares.watts.mean()
    answer = linprog(
        (shares.value[:, None] * loss).ravel(),
        A_eq=csr_matrix((np.ones(column.size), (row, column))),
        b_eq=np.ones(runs),
        A_ub=vstack((x, csr_matrix(-shares.watts / unit) @ x), format="csr"),
        b_ub=np.append(shares.end, -need / unit),
        method="highs",
    )
    if answer.status:
        raise RuntimeError(f"HiGHS: {answer.message}")
    return float(answer.fun)


def _from_pieces(shares: Shares, stack: CurveStack, need: float) -> float:
    """The optimum where each piece of each hull is taken as far as one likes."""
    run, first, last, slope = pieces_of_runs(shares, stack)
    unit = shares.watts.mean()
    answer = linprog(
        shares.value[run] * slope,
        A_ub=csr_matrix(-shares.watts[run] / unit),
        b_ub=[-need / unit],
        bounds=np.column_stack((np.zeros(run.size), last - first)),
        method="highs",
    )
    if answer.status:
        raise RuntimeError(f"HiGHS: {answer.message}")
    return float(answer.fun)


def main() -> int:
    """Measure, print, write; 1 when a target was missed."""
    measure(1_000, 2)  # what is slow the first time is not what is asked
    sizes = [measure(runs, 15 if runs < 100_000 else 7) for runs in SIZES]
    finer = [measure(10_000, 15, points) for points in (12, 48)]
    time_ms = {int(size["runs"]): size["solve_ms"] for size in sizes}
    small, large = 10_000, 100_000
    highs = [
        against_highs(small, time_ms[small], raw=False),
        against_highs(1_000, time_ms[1_000], raw=True),
    ]
    growth = time_ms[large] / time_ms[small]
    expected = large * math.log(large) / (small * math.log(small))
    result = {
        "sizes": sizes,
        "other_points": finer,
        "highs": highs,
        "growth": {
            "measured": round(growth, 2),
            "n_log_n": round(expected, 2),
            "exponent": round(math.log10(growth), 3),
        },
        "targets": {
            str(runs): {"ms": limit, "met": time_ms[runs] <= limit} for runs, limit in TARGETS_MS.items()
        },
        "optimal": all(one["relative_difference"] <= 1e-6 for one in highs),
    }
    for size in sizes + finer:
        print(", ".join(f"{key} {value:g}" for key, value in size.items()))
    for one, given in zip(highs, ("our hulls", "raw points"), strict=True):
        print(
            f"HiGHS at {one['runs']} runs, given {given}: loss {one['highs']:.8g}, ours {one['ours']:.8g}, apart by"
            f" {one['relative_difference']:.1e}; {one['highs_s']:g} s, {one['times_slower']:g} times ours"
        )
    print(f"ten times the runs take {growth:.1f} times as long; n log n would be {expected:.1f}")
    for runs, limit in TARGETS_MS.items():
        met = "met" if time_ms[runs] <= limit else "MISSED"
        print(f"{runs} runs: {time_ms[runs]:g} ms, target {limit:g} ms: {met}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["optimal"] and all(time_ms[n] <= limit for n, limit in TARGETS_MS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
