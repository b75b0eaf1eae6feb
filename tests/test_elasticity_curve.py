"""Elasticity curves: reading measurements, repairs, and what is said beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.elasticity.curve import CurveError, CurveStack, ElasticityCurve
from slurm_pfi.elasticity.library import Library
from slurm_pfi.elasticity.sweep import curve_from_measurements

CAPS = [400.0, 300.0, 200.0]


def curve(*points: tuple[float, float]) -> ElasticityCurve:
    return ElasticityCurve(np.array([0.0, *(x for x, _ in points)]), np.array([0.0, *(y for _, y in points)]))


@st.composite
def curves(draw: st.DrawFn) -> ElasticityCurve:
    size = draw(st.integers(1, 6))
    x = draw(st.lists(st.integers(1, 95), min_size=size, max_size=size, unique=True))
    y = draw(st.lists(st.integers(0, 100), min_size=size, max_size=size))
    return curve(*zip((v / 100 for v in sorted(x)), (v / 100 for v in sorted(y)), strict=True))


def hull_at(given_curve: ElasticityCurve, x: float) -> float:
    """The convex minorant by its definition: the lowest chord over x."""
    xs, ys = given_curve.reduction, given_curve.loss
    return min(
        float(ys[i] if i == j else ys[i] + (ys[j] - ys[i]) * (x - xs[i]) / (xs[j] - xs[i]))
        for i in range(xs.size)
        for j in range(i, xs.size)
        if (xs[i] <= x <= xs[j])
    )


@pytest.mark.parametrize(
    ("cap_w", "power_w", "throughput", "says"),
    [
        (CAPS, [400, float("nan"), 200], [1, 0.9, 0.5], "draw nan at point 2"),
        (CAPS, [400, 300, 200], [1, 0.9, 0.0], "throughput 0 at point 3"),
        (CAPS, [400, -300, 200], [1, 0.9, 0.5], "draw -300 at point 2"),
        ([400, -300, 200], [400, 300, 200], [1, 0.9, 0.5], "cap -300"),
        (CAPS, [400, float("inf"), 200], [1, 0.9, 0.5], "draw inf"),
        ([400], [400], [1], "two or more different caps"),
        ([400, 400], [400, 390], [1, 1], "two or more different caps"),
        (CAPS, [400, 300], [1, 0.9, 0.5], "differ in shape"),
        (CAPS, [100, 100, 100], [1, 0.9, 0.5], "no cap lowered the draw"),
    ],
)
def test_what_makes_no_curve_is_refused(
    cap_w: list[float], power_w: list[float], throughput: list[float], says: str
) -> None:
    with pytest.raises(CurveError, match=says):
        curve_from_measurements(cap_w, power_w, throughput)


def test_no_uncapped_point_is_refused() -> None:
    with pytest.raises(
        CurveError, match="no uncapped point: the highest cap is 400 W, the default limit 700 W"
    ):
        curve_from_measurements(CAPS, [400, 300, 200], [1, 0.9, 0.5], uncapped_w=700)


@pytest.mark.parametrize(
    ("reduction", "loss"),
    [
        ([0.0], [0.0]),
        ([0.1, 0.2], [0.0, 0.1]),
        ([0.0, 0.2], [0.1, 0.1]),
        ([0.0, 0.2, 0.2], [0.0, 0.1, 0.2]),
        ([0.0, 0.2, 0.3], [0.0, 0.2, 0.1]),
        ([0.0, float("nan")], [0.0, 0.1]),
        ([0.0, 0.5], [0.0, 1.1]),
        ([0.0, 1.1], [0.0, 1.0]),
        ([0.0, 1.0], [0.0, 0.9]),
        ([0.0, 0.5], [0.0, 0.1, 0.2]),
    ],
)
def test_a_curve_checks_its_points(reduction: list[float], loss: list[float]) -> None:
    with pytest.raises(CurveError):
        ElasticityCurve(np.array(reduction), np.array(loss))


def test_clean_measurements_need_no_repair() -> None:
    for turn in (1, -1):
        made, repairs = curve_from_measurements(CAPS[::turn], [400, 300, 200][::turn], [2, 1.8, 1][::turn])
        assert made.reduction == pytest.approx([0, 0.25, 0.5])
        assert made.loss == pytest.approx([0, 0.1, 0.5])
        assert repairs.total == 0


def test_repairs_are_counted() -> None:
    made, repairs = curve_from_measurements(
        [300, 400, 200, 200, 500, 100, 350],
        [300, 400, 210, 190, 400, 100, 350],
        [0.9, 1.01, 0.95, 0.93, 1, 0.4, 1.02],
    )
    assert repairs.duplicates == 1  # 200 W twice
    assert repairs.unsorted == 2  # caps that turn back
    assert repairs.not_binding == 1  # 400 W draws what 500 W does
    assert repairs.below_zero == 1  # 350 W is faster than uncapped
    assert repairs.raised == 1  # 200 W loses less than 300 W
    assert made.reduction == pytest.approx([0, 0.125, 0.25, 0.5, 0.75])
    assert made.loss == pytest.approx([0, 0, 0.1, 0.1, 0.6])


@given(st.lists(st.tuples(*[st.floats(1e-3, 1e9)] * 3), min_size=2, max_size=6))
def test_any_finite_measurements_give_numbers_or_a_clear_error(
    points: list[tuple[float, float, float]],
) -> None:
    try:
        made, _ = curve_from_measurements(*zip(*points, strict=True))
    except CurveError:
        return
    assert np.isfinite(made.loss_at(np.linspace(0, 1, 11))).all()
    assert 0 <= made.greatest_reduction(0.5) <= 1
    assert made.convex_minorant().reduction.size <= made.reduction.size


def test_beyond_the_last_point_is_pessimistic() -> None:
    steep = curve((0.2, 0.01), (0.3, 0.31), (0.4, 0.35))  # steepest 3.0, last 0.4
    assert float(steep.loss_at(0.5)) == pytest.approx(0.65)
    assert float(steep.loss_at(0.7)) == 1.0
    flat = curve((0.2, 0.01), (0.4, 0.02))  # too flat: loses all in 0.45 of what is left of the draw
    assert float(flat.loss_at(0.4 + 0.27 / 2)) == pytest.approx(0.51)
    assert float(flat.loss_at(0.4 + 0.27)) == pytest.approx(1.0)
    assert float(flat.loss_at(-0.2)) == 0.0
    assert float(flat.expected_at(0.7)) == pytest.approx(
        0.51
    )  # as likely too high as too low: aims at (1, 1)
    assert float(flat.expected_at(0.3)) == float(flat.loss_at(0.3))


def test_what_was_measured_deeper_is_hardly_ever_worse_than_the_continuation() -> None:
    too_low: list[float] = []
    for one in Library.load_default(model_curves=True).curves:
        x, y = one.curve.reduction, one.curve.loss
        for known in range(2, x.size):
            cut_off = ElasticityCurve(x[:known], y[:known])
            too_low.extend(y[known:] - cut_off.loss_at(x[known:]))
    assert len(too_low) > 1000
    assert np.mean(np.array(too_low) > 0.005) < 0.01
    assert max(too_low) < 0.06


@given(curves())
def test_loss_never_falls_and_ends_at_one(some: ElasticityCurve) -> None:
    loss = some.loss_at(np.linspace(-0.1, 1.0, 111))
    assert np.isfinite(loss).all()
    assert (np.diff(loss) >= -1e-12).all()
    assert loss[0] == 0
    assert loss[-1] == pytest.approx(1)


@given(curves(), st.floats(0, 1))
def test_greatest_reduction_is_the_last_that_keeps_the_loss(some: ElasticityCurve, max_loss: float) -> None:
    x = some.greatest_reduction(max_loss)
    assert float(some.loss_at(x)) <= max_loss + 1e-9
    assert x == 1 or float(some.loss_at(min(1.0, x + 1e-6))) > max_loss


@pytest.mark.parametrize("max_loss", [-0.1, float("nan")])
def test_greatest_reduction_of_no_loss_at_all(max_loss: float) -> None:
    with pytest.raises(CurveError):
        curve((0.5, 0.5)).greatest_reduction(max_loss)


@given(curves())
def test_convex_minorant_is_the_lowest_chord(some: ElasticityCurve) -> None:
    hull = some.convex_minorant()
    assert hull.reduction[-1] == some.reduction[-1]
    assert (np.diff(np.diff(hull.loss) / np.diff(hull.reduction)) > 0).all()
    for x in np.linspace(0, some.reduction[-1], 23):
        assert float(np.interp(x, hull.reduction, hull.loss)) == pytest.approx(
            hull_at(some, float(x)), abs=1e-9
        )


@given(st.lists(curves(), min_size=1, max_size=5), st.data())
def test_a_stack_answers_as_its_curves_do(several: list[ElasticityCurve], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.sampled_from(several), min_size=1, max_size=8))
    x = data.draw(st.lists(st.floats(-0.5, 1), min_size=len(picked), max_size=len(picked)))
    stack = CurveStack(picked)
    expected = [float(some.loss_at(at)) for some, at in zip(picked, x, strict=True)]
    assert stack.loss_at(np.array(x)) == pytest.approx(expected, abs=1e-9)
    pieces = stack.pieces()
    for number, some in enumerate(stack.curves):
        mine = pieces.owner == number
        assert float((pieces.end - pieces.start)[mine].sum()) == pytest.approx(1)
        measured = mine & (pieces.end <= some.reduction[-1])
        height = float(((pieces.end - pieces.start) * pieces.slope)[measured].sum())
        assert height == pytest.approx(float(some.loss[-1]))
        assert (np.diff(pieces.slope[mine]) >= -1e-9).all()
