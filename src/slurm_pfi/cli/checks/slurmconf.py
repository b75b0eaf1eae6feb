"""slurm.conf as far as the checks need it: single keys, and the GPUs that its NodeName lines give."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from ...slurm.damage import SlurmTextError
from ...slurm.gres import GresError, parse_gres
from ...slurm.text import expand_nodes

Read = Callable[[str], str | None]
"""Gives the text of an included file, or None when it cannot be read."""

_PAIR: Final = re.compile(r'([A-Za-z][A-Za-z0-9_]*)\s*=\s*("[^"]*"|\S+)', re.ASCII)
_COMMENT: Final = re.compile(r"(?<!\\)#.*")
_RECORDS: Final = frozenset(
    {"nodename", "partitionname", "nodeset", "downnodes", "frontendname", "switchname"}
)
_MOST_DEEP: Final = 8


@dataclass(frozen=True, slots=True)
class NodeLine:
    """One NodeName line: its list of nodes and its Gres=, empty when it gives none."""

    names: str
    gres: str

    @property
    def gpus(self) -> int | None:
        """GPUs of each of its nodes; None when the text is not understood."""
        return gpu_count(self.gres)


@dataclass(frozen=True, slots=True)
class SlurmConf:
    """``values``: by key in lower case, as often as it is given. ``unread``: includes that could not be read."""

    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nodes: tuple[NodeLine, ...] = ()
    unread: tuple[str, ...] = ()

    def value(self, key: str, default: str = "") -> str:
        """The last value of a key that counts once."""
        given = self.values.get(key.lower(), ())
        return given[-1] if given else default

    def words(self, key: str) -> frozenset[str]:
        """The words of a comma-separated value, in lower case."""
        return frozenset(word.strip().lower() for word in self.value(key).split(",") if word.strip())

    def gpus_by_node(self) -> dict[str, int | None]:
        """GPUs of every node. Raises SlurmTextError for a list of nodes that is not understood."""
        return {name: line.gpus for line in self.nodes for name in expand_nodes(line.names)}

    def names_node(self, node: str) -> bool:
        """Whether a NodeName line holds this node; an unreadable line holds nobody."""
        for line in self.nodes:
            try:
                if node in expand_nodes(line.names):
                    return True
            except SlurmTextError:
                continue
        return False


def gpu_count(gres: str) -> int | None:
    """GPUs in a text such as ``gpu:h200:8,shard:16``; None when it is not understood."""
    try:
        entries = parse_gres(gres)
    except GresError:
        return None
    return sum(1 if entry.count is None else entry.count for entry in entries if entry.name == "gpu")


def parse_slurm_conf(text: str, *, include: Read = lambda _path: None) -> SlurmConf:
    """Read the text of slurm.conf. What is not understood is left out: this judges a file that Slurm itself reads."""
    values: dict[str, list[str]] = {}
    nodes: list[NodeLine] = []
    unread: list[str] = []
    default_gres = ""
    for line in _lines(text, include, unread, 0):
        pairs = [(key.lower(), value.strip('"')) for key, value in _PAIR.findall(line)]
        if not pairs:
            continue
        if pairs[0][0] not in _RECORDS:
            for key, value in pairs:
                values.setdefault(key, []).append(value)
        elif pairs[0][0] == "nodename":
            record = dict(pairs)
            if record["nodename"].upper() == "DEFAULT":
                default_gres = record.get("gres", default_gres)
            else:
                nodes.append(NodeLine(names=record["nodename"], gres=record.get("gres", default_gres)))
    return SlurmConf({key: tuple(given) for key, given in values.items()}, tuple(nodes), tuple(unread))


def parse_show_config(text: str) -> SlurmConf:
    """The answer of ``scontrol show config``, which has one ``Key = value`` a line and knows no nodes."""
    values: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition(" = ")
        if not equals:
            continue
        name = re.sub(r"\[[0-9]+\]$", "", key.strip()).lower()
        shown = "" if value.strip() in ("(null)", "") else value.strip()
        values[name] = (*values.get(name, ()), shown)
    return SlurmConf(values)


def _lines(text: str, include: Read, unread: list[str], depth: int) -> Iterator[str]:
    """Logical lines, those of included files in their place."""
    held = ""
    for raw in text.splitlines():
        held += _COMMENT.sub("", raw)
        if held.endswith("\\"):
            held = held[:-1] + " "
            continue
        line, held = held.strip(), ""
        words = line.split(maxsplit=1)
        if len(words) == 2 and words[0].lower() == "include":
            inner = include(words[1]) if depth < _MOST_DEEP else None
            if inner is None:
                unread.append(words[1])
            else:
                yield from _lines(inner, include, unread, depth + 1)
        elif line:
            yield line
    if held.strip():
        yield held.strip()
