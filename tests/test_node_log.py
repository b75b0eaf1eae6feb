"""The agent's log: changes in full, repetitions counted, the last word never an old one (F7)."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from slurm_pfi.gpu.device import LostError, UnknownDeviceError
from slurm_pfi.node.faultlines import FaultLines
from slurm_pfi.node.log import Log
from tests import node_world
from tests.node_world import S, World

DAY_S = 86_400


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Written(io.StringIO):
    def lines(self, word: str = "") -> list[str]:
        return [line for line in self.getvalue().splitlines() if word in line]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written() -> Written:
    return Written()


@pytest.fixture
def log(clock: Clock, written: Written) -> Log:
    return Log(prefixed=False, stream=written, clock=clock)


def repeated(lines: list[str]) -> int:
    """How many lines they stand for."""
    counts = [re.search(r" repeated=([0-9]+) in_s=[0-9]+$", line) for line in lines]
    return sum(1 if count is None else int(count[1]) for count in counts)


def test_f7_eight_failures_every_ten_seconds_for_a_day(clock: Clock, written: Written, log: Log) -> None:
    for second in range(0, DAY_S, 10):
        for gpu in range(8):
            log.warning("set_failed", uuid=f"GPU-{gpu}", cap_mw=200_000, error=f"no answer in {second} ms")
        log.tell_repeated()
        clock.now_s += 10.0
    assert len(written.lines()) <= 100
    assert 'uuid=GPU-0 cap_mw=200000 error="no answer in 0 ms"' in written.lines()[0], "the first is logged"
    clock.now_s += 60.0
    log.tell_repeated()
    assert f'uuid=GPU-7 cap_mw=200000 error="no answer in {DAY_S - 10} ms"' in written.lines()[-1], (
        "so is the last"
    )
    assert repeated(written.lines()) == 8 * DAY_S // 10, "and each is counted"
    count = len(written.lines())
    clock.now_s += 3600.0
    log.tell_repeated()
    assert len(written.lines()) == count, "nothing more is said when it is over"


def test_f7_the_core_with_gpus_that_cannot_be_set_and_then_can(
    clock: Clock, written: Written, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real core with its back-off for twenty minutes, and what the shell writes of it."""
    slow = node_world.settings()
    slow = replace(slow, report_window_ns=10 * S, report_ns=10 * S)
    monkeypatch.setattr(node_world, "settings", lambda *_: slow)
    world = World(8).start()
    lines = FaultLines(log)
    told = 0

    def follow(seconds: int) -> None:
        nonlocal told
        world.advance(seconds * S)
        clock.now_s += seconds
        for event, fields in world.audit[told:]:
            log.audited(event, fields)
        told = len(world.audit)
        lines.say(world.state)
        log.tell_repeated()

    world.devices.fail("set", UnknownDeviceError("the driver says 4711", code=4711))
    follow(1)
    assert world.window(200_000)
    for _ in range(120):
        follow(10)
    failures = len(world.said("set_failed"))
    assert failures >= 8 * 30
    world.devices.clear_faults()
    follow(40)
    follow(100)
    assert repeated(written.lines("set_failed")) == failures
    assert len(written.lines()) <= 100
    assert len(written.lines("fault what")) == len(written.lines("fault over")) == 8, (
        "one for each GPU, both ways"
    )
    assert world.requested() == [200_000] * 8


def test_the_last_word_is_not_an_old_one(clock: Clock, written: Written, log: Log) -> None:
    for up in [True, False] * 5:
        log.info("controller reached" if up else "controller not reached", why="")
        clock.now_s += 1.0
    assert "controller not reached" in written.lines()[-1]
    log.info("controller reached", why="")
    clock.now_s += 61.0
    log.tell_repeated()
    assert "controller reached" in written.lines()[-1]


def counted_words(written: Written) -> list[str]:
    """Event and what it is about, in the order of the log."""
    return [" ".join(line.split()[1:]).partition(" repeated=")[0] for line in written.lines()]


@pytest.mark.parametrize(
    ("word", "opposite"),
    [("fault", "fault over"), ("released", "resumed"), ("controller not reached", "controller reached")],
)
def test_what_is_over_is_not_told_after_its_end(
    clock: Clock, written: Written, log: Log, word: str, opposite: str
) -> None:
    """Whether the end is written at once or counted itself."""
    for _ in range(5):
        log.warning(word, what="x")
        clock.now_s += 5.0
    log.info(opposite, what="x")
    count = len(written.lines())
    assert counted_words(written) == [f"{word} what=x", f"{word} what=x", f"{opposite} what=x"]
    clock.now_s += 61.0
    log.tell_repeated()
    assert len(written.lines()) == count, "nothing is left to say"
    log.warning(word, what="x")
    clock.now_s += 50.0
    log.info(opposite, what="x")
    clock.now_s += 15.0
    log.tell_repeated()  # the older one is due, the newer one is told with it
    assert counted_words(written)[count:] == [f"{word} what=x", f"{opposite} what=x"]


def test_nothing_is_told_after_the_agent_has_stopped(clock: Clock, written: Written, log: Log) -> None:
    for _ in range(2):
        log.audited("released", {"reason": "admin"})
        clock.now_s += 5.0
        log.audited("resumed", {"reason": "admin"})
        clock.now_s += 5.0
    log.audited("set_failed", {"uuid": "GPU-0"})
    log.audited("set_failed", {"uuid": "GPU-0"})
    log.audited("stopped", {"reason": "no GPU holds a limit of ours"})
    log.tell_repeated(all_of_it=True)
    events = [words.split()[0] for words in counted_words(written)]
    assert events == ["released", "resumed", "set_failed", "released", "resumed", "set_failed", "stopped"]


def test_what_differs_is_written_but_not_without_end(clock: Clock, written: Written, log: Log) -> None:
    for number in range(5000):
        log.info("run_seen", run=f"c:{number}.0", gpus=[], reason="job file")
        clock.now_s += 10.0
    log.tell_repeated(all_of_it=True)
    assert 240 <= len(written.lines()) <= 240 + 5000 * 10 * 120 / 3600 + 20
    assert repeated(written.lines()) == 5000


def test_the_same_again_after_a_while_is_news(clock: Clock, written: Written, log: Log) -> None:
    for _ in range(3):
        log.info("set", uuid="GPU-0", cap_mw=200_000)
        clock.now_s += 601.0
    assert written.lines() == ["info set uuid=GPU-0 cap_mw=200000"] * 3


def test_a_fault_in_which_only_a_number_changes_is_said_once(written: Written, log: Log) -> None:
    world = World(1).start()
    lines = FaultLines(log)
    for left in ("3.2", "1.1", "0.4"):
        faults = {"nvml": f"GPUs cannot be listed (next try in {left} s)"}
        lines.say(node_world.replace(world.state, faults=faults))
    lines.say(world.state)
    assert [line.split(" what=")[0] for line in written.lines()] == ["warning fault", "info fault over"]


def test_a_lost_gpu_is_one_fault_until_it_is_back(written: Written, log: Log) -> None:
    """Whichever NVML function tells of it, and whether a reading or a list does."""
    world = World(3).start()
    lines = FaultLines(log)
    lost = [
        LostError(f"GPU-1: {function}: GPU is lost (code 15)", uuid="GPU-1", code=15)
        for function in (
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetHandleByIndex",
            "nvmlDeviceGetHandleByUUID",
        )
    ]
    lost.append(LostError("GPU-1: no such device", uuid="GPU-1", code=6))
    for error in lost:
        for what in ("sample", "list"):
            world.devices.fail(what, error)
            for _ in range(4):
                world.advance(10 * S)
                lines.say(world.state)
    (line,) = written.lines()
    assert line == (
        'warning fault what="GPU-1 (position 1): off the bus (NVML code 15); '
        'look for Xid in dmesg, reset it or drain the node"'
    )
    world.devices.clear_faults()
    world.advance(40 * S)
    lines.say(world.state)
    assert written.lines()[1:] == [line.replace("warning fault", "info fault over")]


def test_a_gpu_whose_fault_changes_its_kind_is_not_well_in_between(written: Written, log: Log) -> None:
    world = World(2).start()
    lines = FaultLines(log)

    def say(*faults: str) -> None:
        gpu = node_world.replace(world.state.gpus["GPU-1"], requested_mw=None)
        for fault in faults:
            gpus = {**world.state.gpus, "GPU-1": node_world.replace(gpu, read_fault=fault)}
            lines.say(node_world.replace(world.state, gpus=gpus))

    say("off the bus (NVML code 15)", "an NVML call hangs (5 s)", "off the bus (no such device)")
    assert len(written.lines("fault over")) == 0
    lines.say(world.state)
    assert len(written.lines("fault over")) == 1 and "off the bus" in written.lines()[-1]


def test_text_of_others_forges_no_line(written: Written, log: Log) -> None:
    log.info("job file ignored", name='x\n<0>error "forged" a=b', why="tab\tand\x1b[31m")
    (line,) = written.lines()
    assert line.isprintable() and line.startswith("info job file ignored name=")


def test_a_stream_that_is_gone_stops_nobody(log: Log, written: Written) -> None:
    written.close()
    log.error("audit", fault="x")


@pytest.mark.parametrize(
    ("event", "level"), [("set", "info"), ("set_failed", "warning"), ("conflict", "warning")]
)
def test_records_have_the_level_that_an_admin_looks_for(
    event: str, level: str, written: Written, log: Log
) -> None:
    log.audited(event, {"uuid": "GPU-0"})
    assert written.lines() == [f"{level} {event} uuid=GPU-0"]
