"""Settings of slurm.conf and gres.conf that change what may be assumed. Pure: two texts in, named risks out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from ...slurm.gres import GresError
from ...slurm.gresconf import gpu_files
from .slurmconf import SlurmConf, parse_slurm_conf

_GRES_NODES: Final = re.compile(r"^\s*NodeName\s*=\s*([^\s#]+)", re.ASCII | re.IGNORECASE | re.MULTILINE)
_MIG_TYPE: Final = re.compile(r"(?<![0-9])[0-9]+g\.[0-9]+gb", re.ASCII | re.IGNORECASE)
_SHARED_GRES: Final = re.compile(r"\b(shard|mps)\b", re.ASCII | re.IGNORECASE)
_SLICE_FILES: Final = re.compile(r"^[^#]*\bMultipleFiles\s*=", re.ASCII | re.IGNORECASE | re.MULTILINE)
_COMMENTS: Final = re.compile(r"#.*")
_LAST_NUMBER: Final = re.compile(r"([0-9]+)$", re.ASCII)
# slurm.conf(5): each of these sets Alloc by itself; RunInJob exists from 23.02 on.
_IMPLIES_ALLOC: Final = frozenset({"alloc", "contain", "x11", "runinjob"})


@dataclass(frozen=True, slots=True)
class Risk:
    """``name`` is stable and short; ``grave``: runs cannot be seen in time with this setting."""

    name: str
    text: str
    todo: str
    grave: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """Nodes with the same GPUs: the device file of each position, or why it is not known."""

    nodes: str
    files: dict[int, str]
    unknown: str = ""


def site_risks(slurm_conf: str | SlurmConf, gres_conf: str) -> tuple[Risk, ...]:
    """Every risk that these two files show, gravest first."""
    conf = parse_slurm_conf(slurm_conf) if isinstance(slurm_conf, str) else slurm_conf
    orders = gpu_orders(conf, gres_conf)
    found = [_late_prolog(conf), _serial_prolog(conf), _no_tres(conf), _shared(conf, gres_conf)]
    return tuple(risk for risk in [*found, *(_other_order(order) for order in orders)] if risk is not None)


def _late_prolog(conf: SlurmConf) -> Risk | None:
    if conf.words("PrologFlags") & _IMPLIES_ALLOC:
        return None
    perhaps = f" (perhaps it stands in {', '.join(conf.unread)}, which was not read)" if conf.unread else ""
    return Risk(
        "prolog-late",
        f"PrologFlags lacks Alloc: the prolog is late or missing on some nodes of a job{perhaps}",
        "set PrologFlags=Alloc or Contain in slurm.conf, then run 'scontrol reconfigure'",
        grave=True,
    )


def _serial_prolog(conf: SlurmConf) -> Risk | None:
    if "serial" not in conf.words("PrologFlags"):
        return None
    return Risk(
        "prolog-serial",
        "PrologFlags=Serial: one slow prolog delays all others on its node, ours too",
        "leave Serial out unless another hook needs it",
    )


def _no_tres(conf: SlurmConf) -> Risk | None:
    if any(
        word == "gres/gpu" or word.startswith("gres/gpu:") for word in conf.words("AccountingStorageTRES")
    ):
        return None
    return Risk(
        "gpu-not-in-tres",
        "gres/gpu is not in AccountingStorageTRES: TRES text and accounting have no count of GPUs",
        "add gres/gpu to AccountingStorageTRES",
    )


def _shared(conf: SlurmConf, gres_conf: str) -> Risk | None:
    """Parts of GPUs that jobs get: shards, MPS, MIG slices."""
    kinds: dict[str, list[str]] = {}
    for line in conf.nodes:
        words = {word.lower() for word in _SHARED_GRES.findall(line.gres)}
        for kind in sorted(words | ({"MIG"} if _MIG_TYPE.search(line.gres) else set())):
            kinds.setdefault(kind, []).append(line.names)
    gres_text = _COMMENTS.sub("", gres_conf)
    words = {word.lower() for word in _SHARED_GRES.findall(gres_text)}
    if _SLICE_FILES.search(gres_text) or _MIG_TYPE.search(gres_text):
        words.add("MIG")
    for kind in sorted(words):
        kinds.setdefault(kind, ["nodes of gres.conf"])
    if not kinds:
        return None
    named = "; ".join(f"{kind} on {','.join(where)}" for kind, where in sorted(kinds.items()))
    return Risk(
        "gpu-shared",
        f"shared GPUs ({named}): a cap touches several jobs",
        "such a GPU keeps the floor of the job on it that allows least, and nothing is measured of its jobs; "
        "put them in partitions of their own if others are to give more",
    )


def _other_order(order: Order) -> Risk | None:
    """Positions that are not the number in the device's name: whoever takes one for the other is wrong there."""
    other = []
    for position, file in order.files.items():
        number = _LAST_NUMBER.search(file)
        if number is not None and int(number[1]) != position:
            other.append((position, file))
    if not other:
        return None
    position, file = other[0]
    more = f" (and {len(other) - 1} more differ)" if len(other) > 1 else ""
    return Risk(
        "gpu-order",
        f"on {order.nodes} Slurm index {position} is {file}{more}",
        "slurm-pfi goes by the device file; scripts that take Slurm's index for NVML's are wrong on these nodes",
    )


def gpu_orders(conf: SlurmConf, gres_conf: str) -> tuple[Order, ...]:
    """The GPU nodes of slurm.conf, those alike together, with the device file of each position."""
    groups = [
        (nodes, line.gres) for line in conf.nodes if line.gpus != 0 and (nodes := _node_set(line.names))
    ]
    for text in dict.fromkeys(_GRES_NODES.findall(gres_conf)):
        named = _node_set(text)
        if named is not None:
            groups = [
                (part, gres) for nodes, gres in groups for part in (nodes & named, nodes - named) if part
            ]
    return tuple(_order(nodes, gres, gres_conf) for nodes, gres in groups)


def _order(nodes: NodeSet, gres: str, gres_conf: str) -> Order:
    try:
        return Order(str(nodes), gpu_files(gres_conf, nodes[0], gres=gres))
    except GresError as error:
        return Order(str(nodes), {}, str(error))


def _node_set(text: str) -> NodeSet | None:
    try:
        return NodeSet(text, resolver=RESOLVER_NOGROUP)
    except NodeSetException:
        return None
