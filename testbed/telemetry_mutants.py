"""Mutants of what is read of GPUs and of how a counter is held against it."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

READINGS: Final = ("tests/test_telemetry.py",)
ACTIVITY: Final = ("tests/test_activity.py", "tests/test_proxy.py")

TELEMETRY_MUTANTS: Final = (
    Mutant(
        name="an-energy-counter-that-stands-still-is-no-draw",
        invariant="fault 32",
        file="node/telemetry.py",
        old="    if used_mj == 0:\n",
        new="    if used_mj is None:\n",
        tests=READINGS,
    ),
    Mutant(
        name="heat-teaches-what-a-cap-costs",
        invariant="fault 37",
        file="controller/measuring/measured.py",
        old="    uneven = uneven or sample.slowed\n",
        new="",
        tests=ACTIVITY,
    ),
    Mutant(
        name="a-counter-is-never-contradicted",
        invariant="progress is believed as far as telemetry agrees",
        file="controller/measuring/counting.py",
        old="        record = replace(record, disputed=dispute(record))\n",
        new="        pass\n",
        tests=ACTIVITY,
    ),
    Mutant(
        name="a-contradicted-counter-rules-where-it-is-near",
        invariant="progress is believed as far as telemetry agrees",
        file="controller/measuring/activity.py",
        old="    if disputed and (shown := estimate(tensor, clock)) is not None:\n",
        new="    if False and (shown := estimate(tensor, clock)) is not None:\n",
        tests=ACTIVITY,
    ),
    Mutant(
        name="a-lie-within-the-tolerance-pays",
        invariant="progress is believed as far as telemetry agrees",
        file="elasticity/proxy.py",
        old="            return Judged(near, told.sd)\n",
        new="            return Judged(told.value, told.sd)\n",
        tests=ACTIVITY,
    ),
    Mutant(
        name="a-counter-is-followed-before-it-can-be-judged",
        invariant="progress is believed as far as telemetry agrees",
        file="controller/measuring/measured.py",
        old="        if watched and unjudged(level, free):\n            continue\n",
        new="",
        tests=ACTIVITY,
    ),
    Mutant(
        name="who-keeps-activity-off-its-baseline-is-followed",
        invariant="progress is believed as far as telemetry agrees",
        file="controller/measuring/activity.py",
        old="        free.clock_mhz is None\n        or",
        new="        ",
        tests=ACTIVITY,
    ),
    Mutant(
        name="runs-on-several-nodes-are-never-judged",
        invariant="progress is believed as far as telemetry agrees",
        file="controller/measuring/measured.py",
        old=" or pace.from_ns < record.paced_ns - OVERLAP_NS:\n        return record\n",
        new=":\n        return record\n    if pace.from_ns < record.paced_ns - OVERLAP_NS:\n"
        "        return replace(record, paced_ns=pace.to_ns)\n",
        tests=ACTIVITY,
    ),
    Mutant(
        name="slow-files-make-a-liar",
        invariant="progress is believed as far as telemetry agrees",
        file="elasticity/proxy.py",
        old="        if tensor.value * (1 + _reach(tensor.sd)) < least:\n",
        new="        if False:\n",
        tests=ACTIVITY,
    ),
    Mutant(
        name="what-a-shared-gpu-does-is-one-runs-work",
        invariant="7",
        file="controller/measuring/activity.py",
        old=" and len(gpu.runs) < 2]\n",
        new="]\n",
        tests=ACTIVITY,
    ),
)
