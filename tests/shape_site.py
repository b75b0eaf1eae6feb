"""What tests of job shapes ask of a whole site: by run and by Slurm's own name of a job, never by job id alone."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from testbed.cluster import ClusterError, wait_until
from testbed.processes import become, submitter
from testbed.site import Site

from .site_fixture import DEFAULT_MW, PARK_MW, node_audit

TAG: Final = re.compile(r"pfi=[0-9.]+(\[[0-9.,]+\])?;src=\S+;flex=(?P<flex>[a-z0-9%]+);\S+")
_COLUMNS: Final = ("JobID", "ArrayJobID", "ArrayTaskID", "HetJobID", "HetJobOffset", "admin_comment")


def runs(site: Site) -> dict[str, Any]:
    """``slurm-pfi jobs --json`` by run, as ``12.0``: a requeued job has several."""
    return {run["run"].rpartition(":")[2]: run for run in site.ask("jobs")}


def wait_for(what: str, expected: object, found: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until what is found is what is expected; the error names both."""
    last: list[object] = []

    def same() -> bool:
        last[:] = [found()]
        return last[0] == expected

    try:
        wait_until(same, timeout_s, what)
    except ClusterError as error:
        raise ClusterError(f"{error}: {last[0]!r}, not {expected!r}") from error


def wait_states(site: Site, states: dict[str, str], timeout_s: float = 20.0) -> None:
    """Wait until exactly these runs are known, each in its state, and Slurm has told of all of them."""

    def found() -> dict[str, str]:
        return {name: run["state"] if run["user"] else "unread" for name, run in runs(site).items()}

    wait_for("runs", states, found, timeout_s)


def comments(site: Site) -> dict[str, str]:
    """AdminComment of every job in the queue, by Slurm's own name of it (``77_3``, ``77_[4-5%2]``, ``80+1``, ``9``)."""
    layout = ",".join(f"{name}:;" for name in _COLUMNS)
    found = {}
    for line in site.cluster.squeue("--all", "-O", layout):
        job, array, task, het, offset, text = line.removesuffix(";").split(";", len(_COLUMNS) - 1)
        name = job if task == "N/A" else f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"
        found[name if het in ("N/A", "0") else f"{het}+{offset}"] = "" if text == "(null)" else text
    return found


def wait_tagged(site: Site, flexes: dict[str, str], timeout_s: float = 20.0) -> None:
    """Wait until each of these jobs has its own tag, with its flex, and no other job has any."""

    def found() -> dict[str, str | None]:
        tags = {name: TAG.fullmatch(text) for name, text in comments(site).items() if "pfi=" in text}
        return {name: match and match["flex"] for name, match in tags.items()}

    wait_for("tags", flexes, found, timeout_s)


def gpus_of(site: Site, name: str) -> dict[str, set[str]]:
    """The GPUs of a run by node, as each agent said when it saw it last."""
    found: dict[str, set[str]] = {}
    for node in site.node_names:
        for record in node_audit(site, node, "run_seen"):
            if record["run"].endswith(f":{name}"):
                found[node] = set(record["gpus"])
    return found


def caps_of(site: Site, name: str) -> list[int]:
    """Limits in force on the GPUs of a run."""
    uuids = {uuid for each in gpus_of(site, name).values() for uuid in each}
    return [gpu["effective_mw"] for gpu in site.snapshot() if gpu["uuid"] in uuids]


def wait_capped(site: Site, *names: str, timeout_s: float = 15.0) -> None:
    """Wait until all GPUs of each of these runs stand at its one cap, which lies between park cap and default."""

    def found() -> dict[str, object]:
        shown = runs(site)
        made: dict[str, object] = {}
        for name in names:
            cap_mw = shown[name]["target_cap_mw"] if name in shown else None
            in_force = caps_of(site, name)
            good = PARK_MW < (cap_mw or 0) < DEFAULT_MW and set(in_force) == {cap_mw}
            made[name] = "capped" if good else (cap_mw, in_force)
        return made

    wait_for("caps", dict.fromkeys(names, "capped"), found, timeout_s)


def idle_caps(site: Site, *names: str) -> list[int]:
    """Limits in force on all GPUs that belong to none of these runs."""
    taken = {uuid for name in names for each in gpus_of(site, name).values() for uuid in each}
    return [gpu["effective_mw"] for gpu in site.snapshot() if gpu["uuid"] not in taken]


def open_limit(site: Site, watts: int) -> None:
    """An economic limit, without waiting for it to be kept: it may be less than floors need."""
    order = {"id": "manual", "class": "economic", "limit_mw": watts * 1000, "end_unix_s": None}
    site.ask("limit_set", order)


def wait_nothing_known(site: Site, timeout_s: float = 15.0) -> None:
    """Wait until no run is known to the controller, and no job file is left on any node."""

    def found() -> tuple[list[str], list[str]]:
        folders = [site.node_dir(node) / "jobs" for node in site.node_names]
        return [str(path) for folder in folders for path in folder.iterdir()], list(runs(site))

    wait_for("job files and runs", ([], []), found, timeout_s)


@contextmanager
def as_submitter(site: Site, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A command of an ordinary user that lives as long as its job (srun, salloc); it must have ended by itself."""
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=site.cluster.layout.out,
        env=site.cluster.client_env,
        **become(submitter(None)),
    ) as process:
        try:
            yield process
        finally:
            site.cluster.cancel_all()
            process.communicate(timeout=20)
