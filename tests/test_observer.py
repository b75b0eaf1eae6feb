"""The observer samples simulated GPUs on time, and its readers prove nothing from nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.gpus import GpuModel, Node, create_node
from testbed.observer import Sample, Samples, load_samples, mean_site_draw_mw, worst_excess, write_snapshot

REPOSITORY = Path(__file__).resolve().parent.parent
NODES = ("n1", "n2")
S = 1_000_000_000


def until(ready: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def start(sim_dir: Path, out: Path, hz: float) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "testbed.observer",
        "--sim-dir",
        str(sim_dir),
        "--nodes",
        ",".join(NODES),
    ]
    command += ["--overhead-w", "1000", "--unmanaged-w", "500", "--out", str(out), "--hz", str(hz)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_it_samples_on_schedule_sees_a_cap_and_ends_on_sigterm(tmp_path: Path) -> None:
    for node in NODES:
        create_node(tmp_path / node, gpus=2, model=GpuModel(effect_us=0))
    out = tmp_path / "samples.jsonl"
    process = start(tmp_path, out, hz=50)
    try:
        until(lambda: lines(out) > 3)
        with Node(tmp_path / "n2") as opened:
            uuid = opened.snapshot()[1].uuid
            opened.poke("requested_mw", 300_000, gpu=1)
        poked_at = lines(out)
        until(lambda: lines(out) > poked_at + 25)
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, b"")
    assert out.read_bytes().endswith(b"}\n")
    samples = load_samples(out)
    assert (samples.hz, samples.load_mw) == (50, 2_500_000)
    assert samples.gpus["n2"][1] == uuid
    first, last = samples.samples[0], samples.samples[-1]
    assert first.caps_mw == {"n1": (700_000, 700_000), "n2": (700_000, 700_000)}
    assert last.caps_mw == {"n1": (700_000, 700_000), "n2": (700_000, 300_000)}
    for sample in samples.samples:
        draws = [draw_mw for draw_mw in sample.draw_mw.values() if draw_mw is not None]
        assert sample.site_draw_mw == 2_500_000 + sum(draws)
        assert len(draws) == 2 and all(draw_mw > 0 for draw_mw in draws)
    # A late sample must not push the later ones: all are due at the start plus a multiple of 20 ms.
    instants = [sample.mono_ns for sample in samples.samples]
    assert all(earlier < later for earlier, later in pairwise(instants))
    phases = sorted((instant - instants[0]) % (S // 50) / 1e6 for instant in instants)
    assert min(phases[len(phases) // 2], 20 - phases[len(phases) // 2]) < 5


def test_a_node_that_cannot_be_read_is_unknown_until_it_can(tmp_path: Path) -> None:
    create_node(tmp_path / "n1", gpus=1)
    out = tmp_path / "samples.jsonl"
    process = start(tmp_path, out, hz=50)
    try:
        until(lambda: lines(out) > 2)
        create_node(tmp_path / "n2", gpus=1)
        made_at = lines(out)
        until(lambda: lines(out) > made_at + 3)
    finally:
        process.terminate()
        process.communicate(timeout=20)
    samples = load_samples(out).samples
    assert (samples[0].site_draw_mw, samples[0].draw_mw["n2"], samples[0].caps_mw["n2"]) == (None, None, None)
    assert samples[-1].site_draw_mw is not None


def test_a_snapshot_holds_all_gpus(tmp_path: Path) -> None:
    for node in NODES:
        create_node(tmp_path / node, gpus=2)
    write_snapshot(tmp_path, NODES, tmp_path / "before.json")
    entries = json.loads((tmp_path / "before.json").read_text())
    assert [entry["node"] for entry in entries] == ["n1", "n1", "n2", "n2"]
    assert {(entry["requested_mw"], entry["effective_mw"]) for entry in entries} == {(700_000, 700_000)}
    assert len({entry["uuid"] for entry in entries}) == 4


def made(*draws_mw: int | None) -> Samples:
    """One sample a second from 0 s on."""
    samples = [Sample(at * S, draw_mw, {"n1": draw_mw}, {"n1": (1,)}) for at, draw_mw in enumerate(draws_mw)]
    return Samples(1.0, 0, {"n1": ("GPU-a",)}, tuple(samples))


def test_the_worst_excess_follows_the_limit_in_force() -> None:
    samples = made(900, 400, 350, 390, 290, 900)
    limits = [(1 * S, 400), (4 * S, 300), (5 * S, None)]
    excess = worst_excess(samples, limits, 0, 6 * S)
    assert (excess.worst_mw, excess.at_ns, excess.limit_mw, excess.samples) == (0, S, 400, 4)
    assert excess.longest_gap_s == 1.0
    late = worst_excess(samples, limits, 2 * S, 6 * S)
    assert (late.worst_mw, late.at_ns) == (-10, 3 * S)
    assert worst_excess(samples, [(0, 400)], 0, 1 * S).worst_mw == 500


def test_nothing_and_the_unknown_prove_nothing() -> None:
    samples = made(100, None, 100)
    with pytest.raises(ValueError, match="n1 could not be read"):
        worst_excess(samples, [(0, 400)], 0, 3 * S)
    with pytest.raises(ValueError, match="no sample under a limit"):
        worst_excess(samples, [(0, 400), (S, None)], S, 3 * S)
    with pytest.raises(ValueError, match="no sample under a limit"):
        worst_excess(samples, [(0, 400)], 5 * S, 9 * S)
    with pytest.raises(ValueError, match="2 known of 3"):
        mean_site_draw_mw(samples, 0, 3 * S)
    assert mean_site_draw_mw(made(100, 300), 0, 2 * S) == 200


def test_a_gap_is_told_at_the_edges_too() -> None:
    assert worst_excess(made(1, 1, 1), [(0, 400)], 0, 9 * S).longest_gap_s == 7.0


def test_a_file_may_end_in_a_half_line_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    header = '{"hz":10,"load_mw":5,"gpus":{"n1":["GPU-a"]}}\n'
    line = '{"mono_ns":1,"site_draw_mw":7,"draw_mw":{"n1":2},"caps_mw":{"n1":[3]}}\n'
    path.write_text(header + line + line[:20])
    assert load_samples(path).samples == (Sample(1, 7, {"n1": 2}, {"n1": (3,)}),)
    for text in ("", line, header + "{}\n", header + line[:20] + line, header + line.replace("7", '"7"')):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a file of samples"):
            load_samples(path)
