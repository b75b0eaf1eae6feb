"""Faults of the agent as a daemon: stopping, reloading, a full disk, sockets, the log, metrics (field cases F)."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

MANNERS: Final = "tests/test_node_manners.py"
SOCKETS: Final = "tests/test_cases_sockets.py"
METRICS: Final = "tests/test_node_metrics.py"

MANNER_MUTANTS: Final = (
    Mutant(
        name="a-stop-does-not-say-whose-set-is-open",
        invariant="F1",
        file="node/core.py",
        old="    unanswered = sorted(gpu.uuid for gpu in state.gpus.values() if gpu.setting)\n",
        new="    unanswered: list[str] = []\n",
        tests=(f"{MANNERS}::test_f1_a_stop_after_three_of_eight_gpus_leaves_an_exact_record",),
    ),
    Mutant(
        name="a-stop-before-the-first-list-leaves-nobody",
        invariant="3",
        file="node/core.py",
        old="    restore_at_ns = _restore_at_ns(turn) if capped or not state.listed else None",
        new="    restore_at_ns = _restore_at_ns(turn) if capped else None",
        tests=(f"{MANNERS}::test_an_agent_stopped_before_it_knows_its_gpus_leaves_a_restorer_again",),
    ),
    Mutant(
        name="a-core-that-hangs-is-petted",
        invariant="watchdog",
        file="node/health.py",
        old="        if not why:\n",
        new="        if True:\n",
        tests=(f"{MANNERS}::test_a_core_that_hangs_is_not_petted",),
    ),
    Mutant(
        name="a-timer-to-the-minute",
        invariant="3",
        file="node/restorer.py",
        old='        "--timer-property=AccuracySec=100ms",  # its default is a minute\n',
        new="",
        tests=(f"{MANNERS}::test_the_timer_has_this_command_line_and_its_command_restores",),
    ),
    Mutant(
        name="the-timer-does-not-look-at-the-plan",
        invariant="3",
        file="node/restorer.py",
        old="    return True, held.window_end_ns(now_ns, skip_lease=skip_lease)\n",
        new="    return False, None\n",
        tests=(f"{MANNERS}::test_a_plan_saved_later_holds_the_timers_command_back",),
    ),
    Mutant(
        name="a-plan-without-room-is-forgotten",
        invariant="F3",
        file="node/runtime.py",
        old="            self._unsaved = action\n",
        new="",
        tests=("tests/test_cases_disk.py",),
    ),
    Mutant(
        name="a-lock-needs-room-for-its-pid",
        invariant="F3",
        file="node/lock.py",
        old="        with contextlib.suppress(OSError):  # on a full disk the lock is as good without its pid\n",
        new="        with contextlib.nullcontext():\n",
        tests=("tests/test_cases_disk.py",),
    ),
    Mutant(
        name="a-bad-config-takes-the-defaults",
        invariant="F4",
        file="node/agent.py",
        old="            self._take(load_config(self._config_file))\n",
        new="            self._take(msgspec.structs.replace(self._config, times=type(self._config.times)()))\n"
        "            self._take(load_config(self._config_file))\n",
        tests=("tests/test_config_reload.py::test_f4_the_agent_keeps_its_whole_config_when_a_file_is_bad",),
    ),
    Mutant(
        name="whatever-lies-in-the-place-of-a-socket-goes",
        invariant="F5",
        file="bus/unix.py",
        old="    if not stat.S_ISSOCK(found.st_mode):\n",
        new="    if stat.S_ISDIR(found.st_mode):\n",
        tests=(SOCKETS,),
    ),
    Mutant(
        name="a-live-socket-is-stolen",
        invariant="F5",
        file="bus/unix.py",
        old="    with probe:\n        raise SocketInUseError(path, peer_of(probe).pid or None)\n",
        new="    probe.close()\n    path.unlink()\n",
        tests=(SOCKETS,),
    ),
    Mutant(
        name="heard-before-the-mode-is-set",
        invariant="F5",
        file="bus/unix.py",
        old="            path.chmod(mode)\n            sock.listen(backlog)\n",
        new="            sock.listen(backlog)\n            path.chmod(mode)\n",
        tests=(SOCKETS,),
    ),
    Mutant(
        name="any-pid-in-a-held-file-is-believed",
        invariant="F5",
        file="node/lock.py",
        old="        if error.pid is not None and _has_open(error.pid, path):\n",
        new="        if error.pid is not None:\n",
        tests=(SOCKETS,),
    ),
    Mutant(
        name="each-repetition-is-a-line",
        invariant="F7",
        file="node/log.py",
        old="        if seen_s is not None and now_s - seen_s < _SAME_S:\n            return False\n",
        new="",
        tests=("tests/test_node_log.py",),
    ),
    Mutant(
        name="the-last-repetitions-are-never-told",
        invariant="F7",
        file="node/log.py",
        old=" or now_s - kind.last_s >= _QUIET_S)\n        ]",
        new=")\n        ]",
        tests=("tests/test_node_log.py",),
    ),
    Mutant(
        name="what-is-not-known-is-zero-watts",
        invariant="F9",
        file="node/metrics.py",
        old="        if value_mw is not None:\n            family.add_metric((uuid,), value_mw / 1000)\n",
        new="        family.add_metric((uuid,), (value_mw or 0) / 1000)\n",
        tests=(METRICS,),
    ),
    Mutant(
        name="slow-clients-keep-scrapes-out",
        invariant="F9",
        file="node/scrape.py",
        old="            next(iter(self._tasks)).cancel()  # the oldest; a scrape lasts milliseconds\n",
        new="            return\n",
        tests=(METRICS,),
    ),
)
