"""How far a job's time limit may be raised: what bounds it, read from scontrol's text, and the sum itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from .backend import JobGone, JobInfo, Span, Special, Unavailable, Updated
from .damage import SlurmTextError
from .numbers import MINUTE_S
from .text import expand_nodes, named, parse_limit_s, parse_unix_s

NO_RESERVATIONS: Final = "No reservations in the system"
# The first fields of a record, in scontrol's order; none of them holds text that others than admins write.
_RESERVATION: Final = re.compile(
    r"ReservationName=(?P<name>\S+) StartTime=(?P<start>\S+) EndTime=(?P<end>\S+) Duration=\S+ Nodes=(?P<nodes>\S*) "
    r"NodeCnt=\d+ .*"
)
_PARTITION: Final = re.compile(
    r"PartitionName=(?P<name>\S+) (?:.* )?QoS=(?P<qos>\S+) (?:.* )?MaxTime=(?P<limit>\S+) .*"
)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation, or the next time of one that repeats. ``nodes`` is empty where it is of licences alone."""

    name: str
    start_unix_s: int
    end_unix_s: int
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Room:
    """What bounds the time limit of one job.

    ``partition_s``: its partition's MaxTime; ``reservations``: all that are known; ``own``: the reservation that the
    job runs in, empty if none; ``qos``: name and MaxWall (seconds) of its QOS and its partition's, where they have one.
    """

    partition_s: Span
    reservations: tuple[Reservation, ...]
    own: str
    qos: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Raise:
    """The limit that a job may get, in seconds, and why it is not all that was asked; None: it stays as it is."""

    limit_s: int | None
    why: str


class TimeLimitBackend(Protocol):
    """What raising a time limit asks of Slurm. Nothing here raises for what Slurm does or fails to do."""

    async def job(self, job_id: int) -> JobInfo | JobGone | Unavailable:
        """One job by its own id, as in ``SlurmBackend``."""

    async def room(self, job: JobInfo) -> Room | JobGone | Unavailable:
        """What bounds the time limit of this job; unknown unless all of it is known."""

    async def set_time_limit(self, job_spec: str, limit_s: int) -> Updated | JobGone | Unavailable:
        """Give the job that ``JobInfo.spec`` names this time limit, in whole minutes; only admins may raise one."""


def raised(job: JobInfo, more_s: int, room: Room) -> Raise:
    """The time limit of a running job with ``more_s`` (whole minutes) added, as far as there is room; never lower."""
    if job.state != "RUNNING":
        return Raise(None, f"it is {job.state}")
    if not isinstance(job.limit_s, int) or not isinstance(job.end_unix_s, int) or not job.nodes:
        return Raise(None, "its time limit, its end or its nodes are not known, or it has no limit")
    wanted_s, why = job.limit_s + more_s, ""
    if room.partition_s is Special.NOT_SET:
        return Raise(None, f"the MaxTime of partition {job.partition} is not known")
    if isinstance(room.partition_s, int) and room.partition_s < wanted_s:
        wanted_s, why = (
            room.partition_s,
            f"partition {job.partition} allows {room.partition_s // MINUTE_S} min",
        )
    for name, most_s in room.qos:
        if most_s < wanted_s:
            wanted_s, why = most_s, f"QOS {name} allows {most_s // MINUTE_S} min"
    for one in room.reservations:
        until_s = _free_until(job, one, room.own)
        if until_s is None:
            continue
        most_s = job.limit_s + max(0, until_s - job.end_unix_s)
        if most_s < wanted_s:
            wanted_s, why = most_s, f"reservation {one.name} has its nodes"
    if room.own and all(one.name != room.own for one in room.reservations):
        return Raise(None, f"the end of its reservation {room.own} is not known")
    wanted_s -= wanted_s % MINUTE_S
    return Raise(wanted_s, why) if wanted_s > job.limit_s else Raise(None, why or "nothing is to be added")


def _free_until(job: JobInfo, one: Reservation, own: str) -> int | None:
    """Until when this reservation lets the job have its nodes; None if it has none of them.

    One that goes on already and is not the job's own has taken nodes of a running job: nothing is added to that.
    """
    if one.name == own:
        return one.end_unix_s
    return None if one.nodes.isdisjoint(job.nodes) else one.start_unix_s


# --------------------------------------------------------------------------------------------------- scontrol's text


@dataclass(frozen=True, slots=True)
class Partition:
    """MaxTime of a partition, and the QOS whose limits hold in it, empty if none."""

    limit_s: Span
    qos: str


def read_partition(out: str, name: str) -> Partition:
    """``scontrol -o show partition NAME``. Raises SlurmTextError."""
    match = _PARTITION.fullmatch(out.strip())
    if match is None or match["name"] != name:
        raise SlurmTextError(f"{out[:64]!r} is not partition {name}")
    limit_s = parse_limit_s(match["limit"])
    if limit_s is Special.NOT_SET:
        raise SlurmTextError(f"MaxTime={match['limit']} of partition {name} is not understood")
    return Partition(limit_s, named(match["qos"]))


def read_qos_limits(out: str, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """MaxWall of each of these QOS that has one: ``sacctmgr -nP show qos format=name,maxwall``.

    Raises SlurmTextError, also where one of them is not told.
    """
    told = dict(line.rpartition("|")[::2] for line in out.splitlines())
    if told.keys() != set(names):
        raise SlurmTextError(f"sacctmgr told of QOS {sorted(told)}, asked for {sorted(names)}")
    limits = {name: parse_limit_s(text) for name, text in told.items() if text}
    if Special.NOT_SET in limits.values():
        raise SlurmTextError(f"MaxWall of QOS is not understood: {told}")
    return tuple((name, limit_s) for name, limit_s in limits.items() if isinstance(limit_s, int))


def read_reservations(out: str) -> tuple[Reservation, ...]:
    """All of ``scontrol -o show reservation``, with times in Unix seconds. Raises SlurmTextError: one left out is
    a reservation that is run into.
    """
    if out.strip() == NO_RESERVATIONS:
        return ()
    found = tuple(_read_reservation(line.strip()) for line in out.splitlines() if line.strip())
    if not found:
        raise SlurmTextError("scontrol told neither reservations nor that there are none")
    return found


def _read_reservation(line: str) -> Reservation:
    match = _RESERVATION.fullmatch(line)
    if match is None:
        raise SlurmTextError(f"{line[:64]!r} is not a reservation")
    start_s, end_s = parse_unix_s(match["start"]), parse_unix_s(match["end"])
    if not isinstance(start_s, int) or not isinstance(end_s, int):
        raise SlurmTextError(f"the times of reservation {match['name']} are not understood")
    return Reservation(match["name"], start_s, end_s, frozenset(expand_nodes(match["nodes"])))
