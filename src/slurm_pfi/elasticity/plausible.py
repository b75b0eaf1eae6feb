"""Whether a measured loss can be: a counter that lies moves a curve by three standard deviations and no further."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

PLAUSIBLE_SDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Plausible:
    """The loss to believe, at most 1 and below 0 only within noise, and why it is not the measured one, else empty."""

    loss: float
    why: str = ""


def plausible(mean: float, sd: float, measured: float, measured_sd: float, baseline_sd: float) -> Plausible:
    """Clip a measured loss into what can be, by what was expected of the run before it had shown anything itself.

    ``mean`` and ``sd``: the expected loss at the reduction and how sure it is, discrepancies included, as from
    ``learned.loss_at`` of a run without measurements. A run's own earlier points must not be in it: a counter that
    always lies would vouch for itself. ``measured_sd``: noise of the measured mean; ``baseline_sd``: relative standard
    deviation of the run's T_max. Believed is what lies within three standard deviations of expectation, noise and
    baseline together, and no further below zero than noise and baseline reach. Raises ValueError on figures that are
    no finite numbers, and on negative deviations.
    """
    figures = {
        "mean": mean,
        "sd": sd,
        "measured": measured,
        "measured_sd": measured_sd,
        "baseline_sd": baseline_sd,
    }
    for name, figure in figures.items():
        if not math.isfinite(figure) or (name.endswith("sd") and figure < 0):
            raise ValueError(f"a measured loss cannot be judged with {name} = {figure}")
    expected = min(max(mean, 0.0), 1.0)
    # An error of the baseline scales with what is left: nothing of a run that lost all, at most the whole.
    noise = math.hypot(measured_sd, baseline_sd * (1.0 - expected))
    reach = PLAUSIBLE_SDS * math.hypot(sd, noise)
    lowest = max(expected - reach, -PLAUSIBLE_SDS * math.hypot(measured_sd, baseline_sd))
    highest = min(expected + reach, 1.0)
    if measured > highest:
        return Plausible(highest, _why(measured, highest, "more", expected, lowest, highest))
    if measured < lowest:
        return Plausible(lowest, _why(measured, lowest, "less", expected, lowest, highest))
    return Plausible(measured)


def _why(measured: float, taken: float, way: str, expected: float, lowest: float, highest: float) -> str:
    return (
        f"its counter shows {_percent(measured)} lost, {way} than can be: {_percent(expected)} was expected,"
        f" {_percent(lowest)} to {_percent(highest)} is possible; taken as {_percent(taken)}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
