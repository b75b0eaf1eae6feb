"""A real cluster after a window: caps rise by the ramp, a job starts meanwhile, and the site makes no new peak."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.observer import load_samples, mean_site_draw_mw
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    TRAIN,
    caps_mw,
    clear_limits,
    controller_audit,
    hold,
    prove,
    set_limit,
    site_mw,
    small_site,
    wait_as,
    wait_jobs,
    wait_seen,
)

pytestmark = pytest.mark.cluster

HOLD_S = 12
RAMP_MW_PER_S = 100_000
LIMIT_MW = 6_400_000
SITE_OPTIONS = small_site(
    times={"rebound_s": HOLD_S},
    policy={"none_partitions": ["urgent"], "ramp_up_w_per_s": RAMP_MW_PER_S / 1000},
)


@contextlib.contextmanager
def observed(site: Site, out: Path) -> Iterator[None]:
    """Ten samples a second of what the site draws, by somebody who asks neither agents nor controller."""
    words = {
        "--sim-dir": str(site.root / "sim"),
        "--nodes": ",".join(site.node_names),
        "--overhead-w": str(site.options.overhead_w),
        "--out": str(out),
    }
    command = [sys.executable, "-m", "testbed.observer", *(word for pair in words.items() for word in pair)]
    with subprocess.Popen(command) as observer:
        try:
            wait_as("the observer writes", lambda: out.exists() and out.stat().st_size > 0)
            yield
        finally:
            observer.terminate()


def test_no_new_peak_after_a_window_though_a_job_starts(site: Site, tmp_path: Path) -> None:
    first = site.submit(TRAIN, gpus=4, flex="medium", where="n1")
    second = site.submit(TRAIN, gpus=3, flex="medium", where="n2")
    site.wait_training(first, second)
    wait_seen(site, first, second)
    samples_file = tmp_path / "samples.jsonl"
    with observed(site, samples_file):
        hold(site, HOLD_S)  # for as long the draw before is remembered
        limit_ns = time.monotonic_ns()
        set_limit(site, LIMIT_MW / 1000)
        hold(site, 5.0)
        clear_ns = time.monotonic_ns()
        clear_limits(site)
        wait_as("the rebound begins", lambda: bool(controller_audit(site, "rebound")))
        said = controller_audit(site, "rebound")[0]
        assert (said["open"], said["from_mw"], said["rise_mw_per_s"]) == (True, LIMIT_MW, RAMP_MW_PER_S)
        assert "after a window, caps rise slowly" in site.cli("status").stdout
        late = site.submit(TRAIN, gpus=1, flex="high", where="n2")
        wait_jobs(site, {late: "admitted"})
        wait_as("all is given out", lambda: site_mw(site) > said["limit_mw"] - 8_000, HOLD_S)
        site.wait_restored(timeout_s=2 * HOLD_S + 5)
    samples = load_samples(samples_file)
    before_mw = mean_site_draw_mw(samples, limit_ns - 5 * 10**9, limit_ns)
    assert abs(said["limit_mw"] - before_mw) < 0.01 * before_mw
    held_ns = said["mono_ns"] + HOLD_S * 10**9
    held = [sample for sample in samples.between(clear_ns, held_ns) if sample.site_draw_mw is not None]
    assert len(held) > 10 * (HOLD_S - 2)
    peak_mw = max(sample.site_draw_mw for sample in held if sample.site_draw_mw is not None)
    assert peak_mw <= before_mw * 1.01
    # The ramp: never ahead of it, and in many small steps.
    sums = []
    for sample in held:
        caps = [cap for node in sample.caps_mw.values() for cap in node or ()]
        sums.append(sum(caps) + samples.load_mw)
        assert sums[-1] <= LIMIT_MW + (sample.mono_ns - clear_ns) / 1e9 * RAMP_MW_PER_S
    assert len(set(sums)) > 5
    assert caps_mw(site) == [DEFAULT_MW] * 8
    prove(site, tmp_path / "run", "1", "3", "9", "rebound")
