"""gres.conf: which device file stands behind each position that Slurm counts GPUs of a node by.

The order was seen with slurmd 22.05.8 (``slurmd -G``): lines that begin with ``Name=`` come before lines that begin
with ``NodeName=``, each in the order of the file. Where GPUs have types, and the node's Gres= of slurm.conf names
them, the order of the types there comes first, and what goes beyond its counts is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ..model import Frozen
from .gres import Gres, GresError, parse_gres
from .hosts import HostListError, expand_list, host_in_list

MAX_FILES: Final = 64
_KEYS: Final = frozenset(
    {"autodetect", "cores", "count", "cpus", "file", "flags", "ignore", "link", "links", "multiplefiles"}
    | {"name", "nodename", "type", "uniqueid"}
)
_PAIR: Final = re.compile(r'\s*([A-Za-z]+)\s*=\s*("[^"]*"|[^\s"]+)(?=\s|$)', re.ASCII)
_COMMENT: Final = re.compile(r"(?<!\\)#.*")
_LAST_NUMBER: Final = re.compile(r"([0-9]+)$", re.ASCII)


class _Line(Frozen, frozen=True, kw_only=True):
    """A line about GPUs of this node; ``is_slice``: its files are those of one GPU slice."""

    number: int
    has_node_name: bool
    type: str
    files: tuple[str, ...]
    is_slice: bool


def gpu_files(text: str, node: str, *, gres: str | None = None, origin: str = "gres.conf") -> dict[int, str]:
    """Position -> device file of the GPUs of ``node``.

    ``gres`` is the node's Gres= of slurm.conf, if known. A GPU slice (MultipleFiles) gets all its files with
    commas between them. Raises GresError, naming ``origin`` and the line, whenever the order could be another
    one than Slurm's: then no position may be trusted.
    """
    lines: list[_Line] = []
    detect = ""
    for number, raw in _logical_lines(text):
        pairs = _pairs(raw, f"{origin}:{number}")
        if not pairs or not _is_for(pairs, node, f"{origin}:{number}"):
            continue
        detect = pairs.get("autodetect", detect).lower()
        if pairs.get("name", "").lower() == "gpu":
            lines.append(_gpu_line(pairs, number, f"{origin}:{number}"))
    lines.sort(key=lambda line: line.has_node_name)
    _check_detection(lines, detect, f"{origin}: AutoDetect={detect}")
    files = _in_slurm_order(lines, gres, origin)
    return dict(enumerate(files))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their number, without comments, and with continued ones joined."""
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start or number
        held += _COMMENT.sub("", line)
        if held.endswith("\\"):
            held = held[:-1] + " "
            continue
        if held.strip():
            yield start, held.strip()
        held, start = "", 0
    if held.strip():
        yield start, held.strip()


def _pairs(line: str, where: str) -> dict[str, str]:
    """The keys of a line in lower case, in order."""
    if line.split(maxsplit=1)[0].lower() == "include":
        raise GresError(f"{where}: not supported: include; write the lines into gres.conf itself")
    pairs: dict[str, str] = {}
    place = 0
    while place < len(line):
        match = _PAIR.match(line, place)
        if match is None:
            raise GresError(f"{where}: {line[place : place + 40]!r} is not key=value")
        key, value = match[1].lower(), match[2].strip('"')
        if key not in _KEYS:
            raise GresError(f"{where}: unknown key {match[1]!r}")
        if key in pairs:
            raise GresError(f"{where}: {match[1]} is given twice")
        pairs[key] = value
        place = match.end()
    if next(iter(pairs)) not in ("name", "nodename", "autodetect"):
        raise GresError(f"{where}: a line begins with Name=, NodeName= or AutoDetect=")
    if "nodename" in pairs and next(iter(pairs)) != "nodename":
        raise GresError(f"{where}: NodeName= must be the first of its line")
    return pairs


def _is_for(pairs: dict[str, str], node: str, where: str) -> bool:
    hosts = pairs.get("nodename")
    try:
        return hosts is None or host_in_list(node, hosts)
    except HostListError as error:
        raise GresError(f"{where}: NodeName: {error}") from error


def _gpu_line(pairs: dict[str, str], number: int, where: str) -> _Line:
    if ("file" in pairs) == ("multiplefiles" in pairs):
        raise GresError(f"{where}: a GPU without File= has no device file to know it by; give one")
    if "multiplefiles" in pairs:
        files: tuple[str, ...] = (pairs["multiplefiles"],)
    else:
        try:
            files = expand_list(pairs["file"], MAX_FILES)
        except HostListError as error:
            raise GresError(f"{where}: File: {error}") from error
        if pairs.get("count", str(len(files))) != str(len(files)):
            raise GresError(f"{where}: Count={pairs['count']} but File= names {len(files)}")
    return _Line(
        number=number,
        has_node_name="nodename" in pairs,
        type=pairs.get("type", ""),
        files=files,
        is_slice="multiplefiles" in pairs,
    )


def _check_detection(lines: list[_Line], detect: str, where: str) -> None:
    """Slurm sorts what it detects itself; only a file in ascending order is the same either way."""
    if detect in ("", "off"):
        return
    files = [file for line in lines for file in line.files]
    if not files:
        raise GresError(f"{where} gives no files; write Name=gpu File=... for this node")
    numbers = [int(match[1]) if (match := _LAST_NUMBER.search(file)) else -1 for file in files]
    if numbers != sorted(set(numbers)) or numbers[0] < 0 or len({line.type for line in lines}) > 1:
        raise GresError(
            f"{where} lets Slurm order GPUs itself; set AutoDetect=off or list them in ascending order"
        )


def _in_slurm_order(lines: list[_Line], gres: str | None, origin: str) -> list[str]:
    types = {line.type for line in lines}
    if "" in types and len(types) > 1:
        raise GresError(
            f"{origin}: some GPUs of this node have a Type= and some have none; slurmd refuses that too"
        )
    if gres is None:
        if len(types) > 1:
            raise GresError(
                f"{origin}: GPUs of several types are ordered by Gres= in slurm.conf, which is not known"
            )
        if any(line.is_slice for line in lines):
            # 22.05 makes each file a position of its own where GresTypes= has shard.
            raise GresError(
                f"{origin}: how MultipleFiles= counts goes by GresTypes= in slurm.conf, which is not known"
            )
        return [file for line in lines for file in line.files]
    wanted = [entry for entry in parse_gres(gres) if entry.name == "gpu"]
    return [file for entry in wanted for file in _of_type(lines, entry, f"{origin}: Gres={gres}")]


def _of_type(lines: list[_Line], wanted: Gres, where: str) -> list[str]:
    files = [file for line in lines if wanted.type in ("", line.type) for file in line.files]
    count = 1 if wanted.count is None else wanted.count
    if len(files) < count:
        raise GresError(f"{where}: {count} GPUs are wanted and gres.conf has files for {len(files)}")
    return files[:count]
