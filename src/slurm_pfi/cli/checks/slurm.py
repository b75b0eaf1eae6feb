"""Slurm: its commands, its controller, its users, and whether both sides name the same nodes."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ClusterShell.NodeSet import NodeSet

from ...slurm.damage import SlurmTextError
from .commands import path_of, run
from .finding import Facts, Finding
from .risks import gpu_orders, site_risks
from .slurmconf import SlurmConf, gpu_count, parse_show_config

OLDEST_TRIED: Final = (22, 5)
_NODE: Final = re.compile(r"NodeName=(\S+) ")
_NODE_GRES: Final = re.compile(r" Gres=(\S+)")
_NOT_ASKED: Final = "not asked: without its slurm.conf a Slurm command waits a minute and then gives up"
_COMPARED: Final = ("Prolog", "Epilog", "PlugStackConfig", "SlurmUser", "GresTypes", "PrologEpilogTimeout")


def slurm_files(facts: Facts) -> Iterator[Finding]:
    """Whether slurm.conf and gres.conf can be read, and what is not in what was read."""
    if facts.slurm is None:
        yield Finding(
            "slurm.conf", "fail", facts.slurm_said, "set slurm.conf in the config to where the site's file is"
        )
        return
    if facts.slurm.unread:
        yield Finding(
            "slurm.conf",
            "warn",
            f"{facts.slurm_conf} includes {', '.join(facts.slurm.unread)}, which cannot be read; "
            "what stands there was not looked at",
            "let this user read it, or run doctor as root",
        )
    else:
        yield Finding("slurm.conf", "ok", f"{facts.slurm_conf}: {len(facts.slurm.nodes)} NodeName lines")


def commands(facts: Facts) -> Iterator[Finding]:
    """The commands that the controller calls, and their version."""
    missing = [name for name in ("squeue", "scontrol") if path_of(facts.config.slurm, name) is None]
    if missing:
        yield Finding(
            "slurm commands",
            "fail",
            f"{' and '.join(missing)} not found in {facts.config.slurm.bin_dir or 'PATH'}",
            "install Slurm's client commands, or set slurm.bin_dir in the config",
        )
        return
    if facts.slurm is None:
        yield Finding("slurm commands", "unseen", _NOT_ASKED)
        return
    ran = run(facts.config.slurm, "scontrol", "--version")
    if isinstance(ran, str):
        yield Finding("slurm commands", "fail", ran, "see whether Slurm is installed whole")
        return
    yield version_finding(ran.out.strip())


def version_finding(said: str) -> Finding:
    """Judge ``slurm 24.11.5``."""
    match = re.search(r"([0-9]{2})\.([0-9]{1,2})", said)
    if match is None:
        return Finding("slurm commands", "warn", f"scontrol --version says {said[:60]!r}", "")
    if (int(match[1]), int(match[2])) < OLDEST_TRIED:
        return Finding("slurm commands", "warn", f"{said} is older than what was tried (22.05)", "")
    return Finding("slurm commands", "ok", said)


def slurmctld(facts: Facts) -> Iterator[Finding]:
    """Whether slurmctld answers, and whether it runs with what the file says."""
    if facts.slurm is None and path_of(facts.config.slurm, "scontrol") is not None:
        yield Finding("slurmctld", "unseen", _NOT_ASKED)
        return
    ran = run(facts.config.slurm, "scontrol", "ping")
    todo = "start slurmctld, or look into its log; caps in force stay in force meanwhile"
    if isinstance(ran, str):
        yield Finding("slurmctld", "fail", ran, todo)
        return
    said = " ".join(ran.out.split()) or ran.error
    if " is UP" not in ran.out:
        yield Finding("slurmctld", "fail", said or f"scontrol ping exits {ran.exit_code}", todo)
        return
    yield Finding("slurmctld", "warn" if " is DOWN" in ran.out else "ok", said)
    shown = run(facts.config.slurm, "scontrol", "show", "config")
    if isinstance(shown, str) or shown.exit_code != 0:
        why = shown if isinstance(shown, str) else shown.error
        yield Finding("running config", "unseen", f"slurmctld's settings cannot be read: {why}")
        return
    running = parse_show_config(shown.out)
    if facts.slurm is not None:
        yield from compare_running(facts.slurm, running)
    yield accounting_finding(running)


def compare_running(file: SlurmConf, running: SlurmConf) -> Iterator[Finding]:
    """Settings that slurmctld runs with and the file does not have: an edit that was never put into force."""
    differ = []
    for key in _COMPARED:
        given, held = file.values.get(key.lower()), running.values.get(key.lower())
        if given is None or held is None:
            continue
        now = tuple(re.sub(r"\([0-9]+\)$|(?<=[0-9]) sec$", "", text) for text in held)
        if now != given and now[-1] != given[-1]:
            differ.append(f"{key}={','.join(now)} runs, {key}={','.join(given)} is written")
    if differ:
        todo = "run 'scontrol reconfigure', or restart slurmctld and the slurmds"
        yield Finding("running config", "warn", "; ".join(differ), todo)
    else:
        yield Finding("running config", "ok", "slurmctld runs with what slurm.conf says")


def accounting_finding(running: SlurmConf) -> Finding:
    """Whether tags outlive Slurm's memory of a job. slurmdbd always stores AdminComment; that needs no StoreFlags."""
    given = running.values.get("accountingstoragetype")
    if given is None:
        return Finding("accounting", "unseen", "slurmctld does not say its AccountingStorageType")
    if given[-1].removeprefix("accounting_storage/") not in ("", "none"):
        return Finding("accounting", "ok", f"{given[-1]} keeps each job's last tag: sacct -o admincomment")
    age = running.value("MinJobAge", "some time")
    return Finding(
        "accounting",
        "ok",
        f"no AccountingStorageType: a tag is gone {age} after its job's end; slurm-pfi's history has the figures",
    )


def users(facts: Facts) -> Iterator[Finding]:
    """Only SlurmUser or root may write AdminComment, and agents take orders from controller.user alone."""
    ours = facts.config.controller.user
    try:
        pwd.getpwnam(ours)
    except KeyError:
        yield Finding(
            "slurm user",
            "fail",
            f"controller.user = {ours!r} is no user of this host; agents here take plans from root only",
            "make the user known on this host, or correct the config",
        )
        return
    if facts.slurm is None:
        yield Finding("slurm user", "unseen", facts.slurm_said)
        return
    theirs = facts.slurm.value("SlurmUser", "root")
    if theirs != ours:
        yield Finding(
            "slurm user",
            "fail",
            f"SlurmUser is {theirs!r}, controller.user is {ours!r}: tags would be refused",
            f"set controller.user = {theirs!r} and run the controller as that user",
        )
    else:
        yield Finding("slurm user", "ok", f"SlurmUser and controller.user are both {ours!r}")


def risks(facts: Facts) -> Iterator[Finding]:
    """What slurm.conf and gres.conf mean for us."""
    if facts.slurm is None:
        yield Finding("slurm settings", "unseen", facts.slurm_said)
        return
    if "gpu" not in facts.slurm.words("GresTypes"):
        yield Finding(
            "GresTypes",
            "fail",
            "GresTypes in slurm.conf lacks gpu: jobs cannot ask for GPUs",
            "add gpu to it",
        )
    else:
        yield Finding("GresTypes", "ok", "has gpu")
    found = site_risks(facts.slurm, facts.gres_text or "")
    if not any(risk.name.startswith("prolog-late") for risk in found):
        yield Finding("prolog-flags", "ok", f"PrologFlags={facts.slurm.value('PrologFlags')}")
    for risk in found:
        yield Finding(risk.name, "fail" if risk.grave else "warn", risk.text, risk.todo)
    yield from positions_by_set(facts)


def positions_by_set(facts: Facts) -> Iterator[Finding]:
    """Nodes whose positions gres.conf does not lead to device files: their runs cannot be capped."""
    if facts.slurm is None or facts.gres_text is None:
        yield Finding("gres.conf", "unseen", facts.gres_said or facts.slurm_said)
        return
    lost = [order for order in gpu_orders(facts.slurm, facts.gres_text) if order.unknown]
    for order in lost:
        yield Finding(
            "gres.conf",
            "warn",
            f"on {order.nodes} no GPU can be told by its position: {order.unknown}",
            "give File= for each GPU in the order Slurm shall count them, with AutoDetect=off",
        )
    if not lost:
        yield Finding("gres.conf", "ok", "leads every position of every GPU node to a device file")


def node_sets(facts: Facts) -> Iterator[Finding]:
    """The config's node sets against the nodes that Slurm has."""
    if facts.slurm is None:
        yield Finding("node sets", "unseen", _NOT_ASKED)
        return
    ran = run(facts.config.slurm, "scontrol", "--oneliner", "show", "node")
    if isinstance(ran, str) or ran.exit_code != 0:
        try:
            theirs = facts.slurm.gpus_by_node()
        except SlurmTextError as error:
            yield Finding("node sets", "unseen", f"{facts.slurm_conf}: {error}")
            return
    else:
        theirs = nodes_shown(ran.out)
    yield from compare_nodes(facts.declared, theirs)


def nodes_shown(text: str) -> dict[str, int | None]:
    """GPUs of each node in ``scontrol --oneliner show node``; Gres= comes before any free text of admins."""
    nodes: dict[str, int | None] = {}
    for line in text.splitlines():
        name = _NODE.match(line)
        if name is not None:
            gres = _NODE_GRES.search(line)
            nodes[name[1]] = None if gres is None else gpu_count(gres[1])
    return nodes


def compare_nodes(ours: Mapping[str, int], theirs: Mapping[str, int | None]) -> Iterator[Finding]:
    """Differences, each kind once. ``theirs``: None where Slurm's text is not understood."""
    findings = []
    if strangers := [name for name, gpus in theirs.items() if gpus != 0 and name not in ours]:
        findings.append(
            Finding(
                "node sets",
                "warn",
                f"Slurm has GPU nodes that no node set names, so no budget counts them: {_fold(strangers)}",
                'name them in a node set (mode = "observe" if unsure), or count them in policy.unmanaged_w',
            )
        )
    if missing := [name for name in ours if name not in theirs]:
        findings.append(
            Finding(
                "node sets",
                "warn",
                f"Slurm does not have {_fold(missing)}: counted at their worst for ever",
                "take them out of the node sets, or correct the names",
            )
        )
    counts: dict[tuple[int, int], list[str]] = {}
    for name, gpus in ours.items():
        slurm_gpus = theirs.get(name)
        if slurm_gpus is not None and slurm_gpus != gpus:
            counts.setdefault((gpus, slurm_gpus), []).append(name)
    for (gpus, slurm_gpus), names in counts.items():
        findings.append(
            Finding(
                "node sets",
                "fail" if slurm_gpus > gpus else "warn",
                f"{_fold(names)}: the node set says {gpus} GPUs, Slurm says {slurm_gpus}",
                f"set gpus = {slurm_gpus} for them; a count too low lets a silent node draw more than is counted",
            )
        )
    unread = [name for name in ours if name in theirs and theirs[name] is None]
    if unread:
        findings.append(
            Finding("node sets", "unseen", f"Slurm's count of GPUs on {_fold(unread)} is not understood")
        )
    if not ours:
        findings.append(
            Finding("node sets", "fail", "the config has no [[node_set]]: nothing is managed", "add one")
        )
    yield from findings or [Finding("node sets", "ok", f"{len(ours)} nodes, as in Slurm")]


def modes(facts: Facts) -> Iterator[Finding]:
    """Which nodes are observed, and which are capped."""
    for place, node_set in enumerate(facts.config.node_set, 1):
        mode = node_set.mode or facts.config.mode
        what = "writes no limit" if mode == "observe" else "sets limits"
        yield Finding(
            f"node set {place}", "ok", f"{node_set.names}: {node_set.gpus} GPUs a node, {mode}: {what}"
        )


def whoami() -> str:
    """The user that doctor runs as, for what it could not see."""
    uid = os.geteuid()
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _fold(names: Iterable[str]) -> str:
    return str(NodeSet.fromlist(sorted(names)))
