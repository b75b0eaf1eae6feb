"""What tests of a whole site share: short times, the proof of a run, and words for what is waited for."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testbed.checker import check_run
from testbed.checker.verdict import Verdict
from testbed.cluster import ClusterError, wait_until
from testbed.site import Site, SiteOptions, sleep_until

SHORT_TIMES: Mapping[str, float] = {
    "baseline_s": 1,
    "report_s": 1,
    "response_s": 4,
    "node_answer_s": 2.5,
    "node_silent_s": 4,
    "tag_after_s": 1,
    "rescan_s": 2,
    "activity_s": 1,  # no counter is followed before activity was read several times without a cap
    "start_settle_s": 3,
    "slurm_timeout_s": 3,
}
WATT_MW = 1000
PARK_MW = 200_000
DEFAULT_MW = 700_000
TRAIN = "L70 FT nc"  # draws 692 W uncapped: any cap binds


def small_site(*, nodes: int = 2, gpus: int = 4, **more: Any) -> SiteOptions:
    """Two nodes of four GPUs, the second one scrambled: 5.6 kW of caps and 2 kW beside them."""
    times = {**SHORT_TIMES, **more.pop("times", {})}
    in_time_s = times["response_s"] - 1  # cycle_window_s
    for name in ("node_answer_s", "device_deadline_s"):
        times[name] = min(times.get(name, in_time_s), in_time_s)
    return SiteOptions(nodes=nodes, gpus=gpus, scrambled=("n2",), times=times, **more)


def audit(path: Path) -> list[dict[str, Any]]:
    """All whole records of an audit file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def controller_audit(site: Site, event: str) -> list[dict[str, Any]]:
    """The controller's records of one event."""
    return [
        record for record in audit(site.root / "controller/state/audit.jsonl") if record["event"] == event
    ]


def node_audit(site: Site, node: str, event: str) -> list[dict[str, Any]]:
    """A node's records of one event."""
    return [record for record in audit(site.node_dir(node) / "audit.jsonl") if record["event"] == event]


def prove(site: Site, folder: Path, *required: str) -> Verdict:
    """Save the run so far and let the checker judge it; ``required`` invariants must have had something to check."""
    site.save_run(folder)
    verdict = check_run(folder)
    assert verdict.holds, verdict.text()
    assert not verdict.unchecked(required), verdict.text()
    return verdict


def caps_mw(site: Site, node: str | None = None) -> list[int]:
    """Limits in force, in the order of NVML."""
    return [gpu["effective_mw"] for gpu in site.snapshot() if node in (None, gpu["node"])]


def site_mw(site: Site) -> int:
    """What the site could draw under the limits in force, declared load included."""
    overhead_mw = round(site.options.overhead_w * 1000) * site.options.nodes
    return sum(caps_mw(site)) + overhead_mw


def wait_within(site: Site, limit_mw: int, timeout_s: float = 10.0) -> None:
    """Wait until the limits in force fit."""
    try:
        wait_until(lambda: site_mw(site) <= limit_mw, timeout_s, f"the site within {limit_mw} mW")
    except ClusterError as error:
        raise ClusterError(f"{error}; limits in force: {caps_mw(site)}; {site.status()['window']}") from error


def hold(site: Site, seconds: float) -> None:
    """Let a window last: what the checker proves, it proves from ``response_s`` after a limit on."""
    sleep_until(time.monotonic_ns() + round(seconds * 1e9))


def wait_seen(site: Site, *jobs: int, timeout_s: float = 15.0) -> None:
    """Wait until the controller has the uncapped baseline of these jobs and Slurm's word on them."""

    def seen() -> bool:
        shown = site.jobs()
        return all(j in shown and shown[j]["baseline"] == "seen" and shown[j]["user"] for j in jobs)

    wait_until(seen, timeout_s, f"baselines of {jobs}")


def wait_jobs(site: Site, states: Mapping[int, str], timeout_s: float = 15.0) -> None:
    """Wait for the states of jobs, as ``slurm-pfi jobs`` shows them."""

    def reached() -> bool:
        shown = site.jobs()
        return all(job in shown and shown[job]["state"] == state for job, state in states.items())

    wait_until(reached, timeout_s, f"jobs as {dict(states)}")


def set_limit(site: Site, watts: float, *, for_s: float | None = None, class_: str = "economic") -> None:
    """``slurm-pfi limit set`` without the cost of a command line, then wait until the limits in force fit."""
    end_s = None if for_s is None else time.time() + for_s
    order = {"id": "manual", "class": class_, "limit_mw": round(watts * 1000), "end_unix_s": end_s}
    site.ask("limit_set", order)
    wait_within(site, round(watts * 1000))


def clear_limits(site: Site) -> None:
    """``slurm-pfi limit clear --all``."""
    site.ask("limit_clear", {"id": None})


def wait_logged(site: Site, name: str, pattern: str, timeout_s: float = 15.0) -> str:
    """Wait for a line in a daemon's log; returns it."""
    found: list[str] = []

    def logged() -> bool:
        found[:] = [line for line in site.log_of(name).splitlines() if re.search(pattern, line)]
        return bool(found)

    wait_until(logged, timeout_s, f"{name} logs {pattern!r}")
    return found[0]


def wait_as(what: str, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """``wait_until`` with the words first."""
    wait_until(condition, timeout_s, what)


def hook_faults(site: Site) -> list[str]:
    """Lines of slurmd's and the hooks' logs that tell of a hook that did not end well."""
    lines = site.cluster.layout.hook_log.read_text().splitlines()
    for node in site.node_names:
        lines += [
            line
            for line in site.cluster.node_log(node).splitlines()
            if re.search(r"(prolog|epilog).*(fail|error|timeout|exit|status [^0])", line, re.IGNORECASE)
        ]
    return lines


def wait_registered(site: Site, timeout_s: float = 30.0) -> None:
    """Wait until a slurmctld that started anew has heard every slurmd: before that it gives jobs no GPUs (22.05)."""

    def registered() -> bool:
        shown = site.cluster.run(["scontrol", "show", "node"], check=False)
        return shown.returncode == 0 and "SlurmdStartTime=None" not in shown.stdout

    wait_until(registered, timeout_s, "slurmctld has heard every slurmd")


def as_user(site: Site, script: str, *, where: str = "n1", gpus: int = 1, name: str = "probe") -> str:
    """Run Python text in a real batch job of an ordinary user, and return what it printed."""
    path = site.root / "python" / f"{name}.py"
    path.write_text(script)
    text = f"#!/bin/sh\nexec python3 {path}\n"
    job = site.cluster.sbatch(text, f"--gres=gpu:{gpus}", f"--nodelist={where}")
    try:
        site.cluster.wait_job_state(job, "COMPLETED")
    except ClusterError as error:
        raise AssertionError(site.cluster.job_output(job)) from error
    return site.cluster.job_output(job)


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()


def children(pid: int) -> list[int]:
    """Child processes of a process."""
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in done.stdout.split()]
