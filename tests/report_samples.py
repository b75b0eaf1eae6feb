"""A made-up window in a real history: figures as a small site might have them, all of them known beforehand."""

from __future__ import annotations

import math
from pathlib import Path

from slurm_pfi.controller.answers.outcome import WindowReport
from slurm_pfi.controller.answers.window_report import read_report
from slurm_pfi.store.history import History
from slurm_pfi.store.rows import EventRow, Phase, Row, RunFacts, RunSample, SiteSample, WindowRow

OPENED_S = 1_796_047_200.0  # 2026-11-30 14:00 UTC
BESIDE_MW = 4_000_000
BASE_MW = 690_000
GPUS = 4


def window(*, closed: bool = True, length_s: float = 1200.0, **changes: object) -> WindowRow:
    """Number 1: 20 minutes from 14:00 UTC."""
    fields: dict[str, object] = {
        "id": 1,
        "cluster": "demo",
        "opened_unix_s": OPENED_S,
        "closed_unix_s": OPENED_S + length_s if closed else None,
        "ended": "its limit ended" if closed else "",
        "policy": "marginal",
        "class_": "economic",
        "mode": "enforce",
        "limit_mw": 0,
        "limit_ids": ("grid-peak",),
        "draw_before_mw": None,
        "beside_mw": BESIDE_MW,
        "response_s": 10.0,
        "simulated": True,
    }
    return WindowRow(**{**fields, **changes})  # type: ignore[arg-type]


def cut(place: int) -> float:
    """The reduction of the run in this place: 8 to 38 % of its draw."""
    return 0.08 + 0.3 * ((place * 7) % 10) / 9


def facts(place: int, **changes: object) -> RunFacts:
    fields: dict[str, object] = {
        "window": 1,
        "run": f"demo:{1200 + place}.0",
        "user": ("alice", "bob", "carla", "dmitri")[place % 4],
        "account": "physics",
        "partition": "main",
        "name": f"train-{place}",
        "gpu_model": "NVIDIA H200",
        "gpus": GPUS,
        "nodes": (f"gpu{1 + place // 2:02d}",),
        "flex": ("15%", "5%", "30%")[place % 3],
        "max_loss": 0.15,
        "floor_mw": 400_000,
        "baseline": "seen",
        "baseline_draw_mw": BASE_MW,
        "baseline_sd": 0.005,
        "loss": cut(place) / 3,
    }
    return RunFacts(**{**fields, **changes})  # type: ignore[arg-type]


def run_samples(place: int, length_s: float, step_s: float = 5.0) -> list[Row]:
    """Uncapped, down within five seconds, up again at the end; the throughput wobbles by a percent."""
    rows: list[Row] = []
    for number in range(int((length_s + 240) / step_s)):
        at_s = -120 + number * step_s
        depth = cut(place) * min(1.0, max(0.0, at_s / 5)) if at_s < length_s else 0.0
        wobble = 0.01 * math.sin(number * (1 + place))
        rows.append(
            RunSample(
                unix_s=OPENED_S + at_s,
                run=f"demo:{1200 + place}.0",
                cap_mw=700_000 if depth == 0 else round(BASE_MW * (1 - depth)),
                draw_mw=round(BASE_MW * (1 - depth)),
                share=1 - depth / 3 + wobble,
                held_s=step_s,
            )
        )
    return rows


def site_samples(runs: int, length_s: float, gap: tuple[float, float] | None = None) -> list[SiteSample]:
    """The sum of the runs, once a second; no known draw within ``gap`` (seconds from the opening)."""
    full_mw = BESIDE_MW + runs * GPUS * BASE_MW
    low_mw = BESIDE_MW + sum(round(GPUS * BASE_MW * (1 - cut(place))) for place in range(runs))
    limit_mw = round(low_mw * 1.01)
    rows = []
    for second in range(-120, int(length_s) + 120):
        phase: Phase = "before" if second < 0 else "window" if second < length_s else "rebound"
        part = min(1.0, max(0.0, second / 5)) if second < length_s else max(0.0, 1 - (second - length_s) / 90)
        draw_mw = round(full_mw - (full_mw - low_mw) * part + 0.002 * full_mw * math.sin(second / 3))
        known = gap is None or not gap[0] <= second < gap[1]
        rows.append(
            SiteSample(
                unix_s=OPENED_S + second,
                phase=phase,
                limit_mw={"window": limit_mw, "rebound": round(full_mw * 1.01)}.get(phase),
                draw_mw=draw_mw if known else None,
                committed_mw=None if phase == "before" else round(draw_mw * 1.005),
            )
        )
    return rows


def events(runs: int) -> list[Row]:
    told = [
        EventRow(unix_s=OPENED_S - 30, kind="limit", text="limit grid-peak was set by uid 0"),
        EventRow(
            unix_s=OPENED_S,
            kind="limit",
            text="window 1 opens: limit 20.16 kW (grid-peak), 16.16 kW of it for GPU caps",
        ),
    ]
    for place in range(runs):
        cap_w = BASE_MW * (1 - cut(place)) / 1000
        text = f"capped to {cap_w:.0f} W a GPU (floor 400 W): limit grid-peak, policy marginal"
        told.append(EventRow(unix_s=OPENED_S + 0.2, run=f"demo:{1200 + place}.0", kind="capped", text=text))
    told.append(EventRow(unix_s=OPENED_S + 1200, kind="closed", text="window 1 is over: its limit ended"))
    return list(told)


def made_report(
    folder: Path,
    *,
    runs: int = 9,
    length_s: float = 1200.0,
    closed: bool = True,
    gap: tuple[float, float] | None = None,
    extra: tuple[Row, ...] = (),
) -> WindowReport:
    """Write the window into a history and read its report. ``extra`` rows replace or add to what is made."""
    history = History(folder / "history.db", days=36_500, most_bytes=10**10, on_fault=print)
    history.start()
    site = site_samples(runs, length_s, gap)
    before = [row.draw_mw for row in site[:120] if row.draw_mw is not None]
    row = window(
        closed=closed,
        length_s=length_s,
        limit_mw=max(s.limit_mw or 0 for s in site[120:140]),
        draw_before_mw=round(sum(before) / len(before)),
    )
    history.add([row, *site, *events(runs)])
    for place in range(runs):
        history.add([facts(place), *run_samples(place, length_s, 5.0 if runs < 100 else 60.0)])
    history.add(extra)
    assert history.flush(30), history.trouble
    found = history.window(1)
    assert found is not None
    report = read_report(history, found, OPENED_S + (length_s + 120 if closed else length_s))
    history.close()
    return report
