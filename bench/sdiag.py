"""What slurmctld says of the calls it served: the totals of ``sdiag`` by message type and by user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from testbed.cluster import Cluster

_LINE: Final = re.compile(r"^\s*(\S+)\s+\(\s*\d+\)\s+count:(\d+)\s.*?total_time:(\d+)")
_TITLES: Final = {
    "Remote Procedure Call statistics by message type": "type",
    "Remote Procedure Call statistics by user": "user",
}


@dataclass(frozen=True, slots=True)
class Calls:
    """How many, and how long slurmctld worked on them in all, waiting for its locks included."""

    count: int = 0
    total_us: int = 0

    def __sub__(self, other: Calls) -> Calls:
        return Calls(self.count - other.count, self.total_us - other.total_us)


@dataclass(frozen=True, slots=True)
class Served:
    """All calls since the counters were reset (sdiag(1)). A name that is not there had none."""

    by_type: Mapping[str, Calls]
    by_user: Mapping[str, Calls]

    def of_type(self, name: str) -> Calls:
        return self.by_type.get(name, Calls())

    def of_user(self, name: str) -> Calls:
        return self.by_user.get(name, Calls())


def parse(text: str) -> Served:
    """The output of ``sdiag``. Raises ValueError when a table is missing."""
    tables: dict[str, dict[str, Calls]] = {}
    table: dict[str, Calls] = {}
    for line in text.splitlines():
        if line and not line[0].isspace():
            table = tables.setdefault(_TITLES.get(line.strip(), line), {})
        elif match := _LINE.match(line):
            table[match.group(1)] = Calls(int(match.group(2)), int(match.group(3)))
    if not {"type", "user"} <= tables.keys():
        raise ValueError(f"sdiag shows no calls by type and by user: {text[:200]!r}")
    return Served(by_type=tables["type"], by_user=tables["user"])


def reset(cluster: Cluster) -> None:
    """Count from here on."""
    cluster.run(["sdiag", "--reset"], user="root")


def read(cluster: Cluster) -> Served:
    """What was served since."""
    return parse(cluster.run(["sdiag"], user="root").stdout)
