"""A made-up run for the tests of what is measured: its work, its counter, and the reports that come of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_pfi.config import TimesSection
from slurm_pfi.controller.measuring.measured import Record, observe
from slurm_pfi.controller.measuring.sample import Pace, Sample

NS = 1_000_000_000
W = 1000
PRIOR_MW = 700 * W
FREE_MW = 600 * W
FREE_RATE = 1000.0
GPUS = 4
CLOCK_MHZ = 1980.0
TIMES = TimesSection(baseline_s=30)


def rate_at(cap_mw: int | None) -> float:
    """Its true rate: half of what the draw gives up is lost."""
    cut = 0.0 if cap_mw is None else max(0.0, 1 - cap_mw / FREE_MW)
    return FREE_RATE * (1 - 0.5 * cut)


@dataclass
class MadeUpRun:
    """Works second by second; ``lie`` makes the counter it tells out of the true one, None: it tells nothing.

    With ``activity_s`` its GPUs tell so often what they do: of the cycles of full work a share of ``tensor`` is the
    tensor pipes' (None: they do not tell it), and the clock falls as the rate does to the power of 1 / ``clock_bound``.
    ``other_node_s``: half of its GPUs are on another node, which reads so much later.
    """

    seed: int = 0
    noise: float = 0.005
    jitter_s: float = 0.02
    report_s: float = 1.0
    tell_s: float = 0.5
    lie: Callable[[float], float | None] = field(default=lambda counter: counter)
    unit: str = "tokens"
    times: TimesSection = TIMES
    activity_s: float | None = None
    activity_noise: float = 0.01
    tensor: float | None = 0.4
    clock_bound: float = 1.0
    other_node_s: float | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.record = Record()
        self.now_s = 1000.0
        self.true = 0.0
        self.lost = 0.0
        self.energy_j = 0.0
        self.speed = 1.0
        self.told: tuple[float, float] | None = None
        self.cap_mw: int | None = None
        self._told_s = self._reported_s = -1e9
        self._noise = random.Random(-1 - self.seed)
        self._asked_s = self.now_s
        self._tensor_mhz_s = self._clock_mhz_s = 0.0
        self.pace: Pace | None = None
        self._paces: list[Pace] = []

    def run(
        self,
        seconds: float,
        cap_w: float | None = None,
        *,
        speed: float = 1.0,
        draw_w: float | None = None,
        silent: bool = False,
        busy: float | None = None,
        slowed: bool = False,
    ) -> Record:
        """Go on for so long under a cap, ``speed`` times as fast as the work of its beginning.

        ``busy``: the same of its tensor work, where that is not for the counter; ``slowed``: by heat.
        """
        cap_mw = None if cap_w is None else round(cap_w * W)
        step_s = 0.1
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            free, rate = FREE_RATE * speed, rate_at(cap_mw) * speed
            self.true += rate * step_s * (1 + self.noise * self.random.gauss(0, 1) * 3)
            self.lost += (free - rate) * step_s
            self._act(rate_at(cap_mw) / FREE_RATE, speed if busy is None else busy, step_s)
            draw_mw = min(FREE_MW, cap_mw or FREE_MW) if draw_w is None else round(draw_w * W)
            self.energy_j += draw_mw / 1000 * GPUS * step_s
            if self.now_s - self._told_s >= self.tell_s - 1e-6:
                self._told_s = self.now_s
                counter = self.lie(self.true)
                self.told = None if counter is None else (counter, self.now_s)
            if not silent and self.now_s - self._reported_s >= self.report_s - 1e-6:
                self._reported_s = self.now_s
                self.record = observe(self.record, self.sample(cap_mw, draw_mw, slowed=slowed), self.times)
        return self.record

    def _act(self, share: float, busy: float, seconds: float) -> None:
        """What its GPUs do meanwhile, and every ``activity_s`` a reading of it."""
        self._tensor_mhz_s += CLOCK_MHZ * (self.tensor or 0.0) * share * busy * seconds
        self._clock_mhz_s += CLOCK_MHZ * share ** (1 / self.clock_bound) * seconds
        asked_s = self.now_s - self._asked_s
        if self.activity_s is None or asked_s < self.activity_s - 1e-6:
            return
        error = self._noise.gauss(1, self.activity_noise)
        self.pace = Pace(
            from_ns=round(self._asked_s * NS),
            to_ns=round(self.now_s * NS),
            tensor_mhz=None if self.tensor is None else self._tensor_mhz_s / asked_s * error,
            clock_mhz=self._clock_mhz_s / asked_s * self._noise.gauss(1, self.activity_noise / 2),
        )
        self._paces.append(self.pace)
        self._asked_s, self._tensor_mhz_s, self._clock_mhz_s = self.now_s, 0.0, 0.0

    def _of_both_nodes(self) -> Pace | None:
        """The last reading of this node beside that of the other, which did the same at each moment."""
        if self.other_node_s is None or self.pace is None:
            return self.pace
        later_ns = round(self.other_node_s * NS)
        other = next((p for p in reversed(self._paces) if p.to_ns + later_ns <= self.now_s * NS), None)
        if other is None:
            return None
        tensors = [one for one in (self.pace.tensor_mhz, other.tensor_mhz) if one is not None]
        return Pace(
            from_ns=min(self.pace.from_ns, other.from_ns + later_ns),
            to_ns=max(self.pace.to_ns, other.to_ns + later_ns),
            tensor_mhz=sum(tensors) / len(tensors) if tensors else None,
            clock_mhz=min(self.pace.clock_mhz or 0.0, other.clock_mhz or 0.0) or None,
        )

    def sample(self, cap_mw: int | None, draw_mw: int, *, slowed: bool = False) -> Sample:
        late_s = self.random.uniform(0, self.jitter_s)
        now_ns = round((self.now_s + late_s) * NS)
        age_s = 0.0 if self.told is None else self.now_s - self.told[1]
        return Sample(
            now_ns=now_ns,
            gpus=GPUS,
            draw_mw=round(draw_mw * self.random.gauss(1, 0.002)),
            cap_mw=PRIOR_MW if cap_mw is None else cap_mw,
            prior_mw=PRIOR_MW,
            uncapped=cap_mw is None,
            counter=None if self.told is None else self.told[0],
            counter_ns=None if self.told is None else now_ns - round(age_s * NS),
            unit=self.unit,
            node="n1",
            pace=self._of_both_nodes(),
            slowed=slowed,
        )
