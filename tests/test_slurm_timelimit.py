"""What bounds a time limit: scontrol's text, and the sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.slurm.backend import JobInfo, Special
from slurm_pfi.slurm.damage import SlurmTextError
from slurm_pfi.slurm.numbers import MINUTE_S
from slurm_pfi.slurm.timelimit import (
    Partition,
    Reservation,
    Room,
    raised,
    read_partition,
    read_qos_limits,
    read_reservations,
)

from .slurm_samples import slurm_job

START_S = 1_796_000_000
LIMIT_S = 60 * MINUTE_S
FREE = Room(partition_s=Special.UNLIMITED, reservations=(), own="")
# As scontrol 22.05.8 tells it.
PARTITION = (
    "PartitionName=short AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime={limit} "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[1-2] OverTimeLimit=NONE State=UP\n"
)
RESERVATION = (
    "ReservationName={name} StartTime={start} EndTime={end} Duration=00:10:00 Nodes={nodes} NodeCnt=1 CoreCnt=64 "
    "Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=64 Users=root Groups=(null) Accounts=(null) "
    "Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
)


def running(**changes: object) -> JobInfo:
    times = {"start_unix_s": START_S, "end_unix_s": START_S + LIMIT_S, "limit_s": LIMIT_S}
    return slurm_job(7, **{"nodes": ("n1", "n2"), **times, **changes})


def reserved(start_min: int, *nodes: str, name: str = "maint", minutes: int = 30) -> Reservation:
    """One that starts so many minutes after the job."""
    start_s = START_S + start_min * MINUTE_S
    return Reservation(name, start_s, start_s + minutes * MINUTE_S, frozenset(nodes))


# ------------------------------------------------------------------------------------------------------ the sum


@pytest.mark.parametrize(
    ("room", "minutes", "why"),
    [
        (FREE, 70, ""),
        (Room(65 * MINUTE_S, (), ""), 65, "partition main allows 65 min"),
        (Room(60 * MINUTE_S, (), ""), None, "partition main allows 60 min"),
        (Room(30 * MINUTE_S, (), ""), None, "partition main allows 30 min"),
        (Room(Special.NOT_SET, (), ""), None, "the MaxTime of partition main is not known"),
        (Room(Special.UNLIMITED, (reserved(64, "n2"),), ""), 64, "reservation maint has its nodes"),
        (Room(Special.UNLIMITED, (reserved(64, "n3"),), ""), 70, ""),
        (Room(Special.UNLIMITED, (reserved(64),), ""), 70, ""),
        (
            Room(Special.UNLIMITED, (reserved(90, "n1"), reserved(66, "n1", name="b")), ""),
            66,
            "reservation b has",
        ),
        (Room(Special.UNLIMITED, (reserved(10, "n1"),), ""), None, "reservation maint has its nodes"),
        (Room(Special.UNLIMITED, (reserved(-10, "n1", minutes=74),), "maint"), 64, "reservation maint has"),
        (Room(Special.UNLIMITED, (reserved(-10, "n1", minutes=600),), "maint"), 70, ""),
        (Room(Special.UNLIMITED, (), "maint"), None, "the end of its reservation maint is not known"),
        (
            Room(Special.UNLIMITED, (), "", (("a", 90 * MINUTE_S), ("b", 63 * MINUTE_S))),
            63,
            "QOS b allows 63 min",
        ),
        (Room(Special.UNLIMITED, (), "", (("a", 60 * MINUTE_S),)), None, "QOS a allows 60 min"),
        (Room(62 * MINUTE_S, (reserved(64, "n2"),), ""), 62, "partition main allows 62 min"),
    ],
)
def test_as_far_as_there_is_room(room: Room, minutes: int | None, why: str) -> None:
    found = raised(running(), 10 * MINUTE_S, room)
    assert (found.limit_s is None) == (minutes is None)
    if minutes is not None:
        assert found.limit_s == minutes * MINUTE_S
    assert found.why.startswith(why) and bool(found.why) == bool(why)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "SUSPENDED"},
        {"state": "COMPLETING"},
        {"limit_s": Special.UNLIMITED},
        {"limit_s": Special.NOT_SET},
        {"end_unix_s": Special.NOT_SET},
        {"nodes": ()},
    ],
)
def test_what_is_not_known_is_not_changed(changes: dict[str, object]) -> None:
    found = raised(running(**changes), 10 * MINUTE_S, FREE)
    assert found.limit_s is None and found.why


spans = st.sampled_from([Special.UNLIMITED, Special.NOT_SET]) | st.integers(0, 200 * MINUTE_S)
reservations = st.lists(
    st.builds(
        reserved,
        st.integers(-200, 200),
        st.sampled_from(["n1", "n2", "n9"]),
        name=st.sampled_from("abc"),
        minutes=st.integers(1, 90),
    ),
    max_size=4,
).map(tuple)


@given(
    limit=st.integers(1, 100),
    more=st.integers(0, 100),
    room=st.builds(Room, partition_s=spans, reservations=reservations, own=st.sampled_from(["", "a"])),
)
def test_never_lower_never_too_much_never_into_a_reservation(limit: int, more: int, room: Room) -> None:
    job = running(limit_s=limit * MINUTE_S, end_unix_s=START_S + limit * MINUTE_S)
    found = raised(job, more * MINUTE_S, room)
    if found.limit_s is None:
        return
    assert limit * MINUTE_S < found.limit_s <= (limit + more) * MINUTE_S and found.limit_s % MINUTE_S == 0
    assert not isinstance(room.partition_s, int) or found.limit_s <= room.partition_s
    end_s = START_S + found.limit_s
    for one in room.reservations:
        if one.name != room.own and not one.nodes.isdisjoint(job.nodes):
            assert end_s <= one.start_unix_s
        if one.name == room.own:
            assert end_s <= one.end_unix_s


# ----------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("00:10:00", 600), ("1-00:00:00", 86400), ("UNLIMITED", Special.UNLIMITED), ("30", 1800)],
)
def test_the_limit_of_a_partition(limit: str, seconds: object) -> None:
    text = PARTITION.format(limit=limit)
    assert read_partition(text, "short") == Partition(seconds, "")  # type: ignore[arg-type]
    assert read_partition(text.replace("QoS=N/A", "QoS=part"), "short").qos == "part"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Partition short not found",
        PARTITION.format(limit="x"),
        PARTITION.format(limit="(null)"),
        PARTITION[:40],
    ],
)
def test_a_partition_that_is_not_understood(text: str) -> None:
    with pytest.raises(SlurmTextError):
        read_partition(text, "short")


def test_a_partition_of_another_name_is_none() -> None:
    with pytest.raises(SlurmTextError):
        read_partition(PARTITION.format(limit="30"), "long")


def test_the_limits_of_qos() -> None:
    assert read_qos_limits("short|00:10:00\nany|\n", ("any", "short")) == (("short", 600),)
    assert read_qos_limits("long|2-00:00:00\n", ("long",)) == (("long", 172800),)


@pytest.mark.parametrize(
    "text", ["", "short\n", "short|x\n", "short|00:10:00\nlong|\n", "other|\n", "short|N/A\n"]
)
def test_qos_that_are_not_understood(text: str) -> None:
    with pytest.raises(SlurmTextError):
        read_qos_limits(text, ("short",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        (" Watts=n/a", ""),  # 24.11
        (" Watts=n/a", " AllowedPartitions=(null) QOS=(null)"),  # 26.05
        (" State=INACTIVE", " State=INACTIVE Comment=Nodes=n9 NodeCnt=3 of ops"),
    ],
)
def test_reservations_of_every_generation(before: str, after: str) -> None:
    text = RESERVATION.format(name="r1", start=5, end=9, nodes="n1").replace(
        before, after, 1 if before else 0
    )
    assert read_reservations(text) == (Reservation("r1", 5, 9, frozenset({"n1"})),)


def test_reservations() -> None:
    text = RESERVATION.format(name="r1", start=1796065130, end=1796065730, nodes="n[1-2],m7")
    text += RESERVATION.format(name="lic", start=1, end=2, nodes="(null)")
    assert read_reservations(text) == (
        Reservation("r1", 1796065130, 1796065730, frozenset({"n1", "n2", "m7"})),
        Reservation("lic", 1, 2, frozenset()),
    )
    assert read_reservations("No reservations in the system\n") == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing\n",
        RESERVATION.format(name="r1", start="2026-11-30T12:00:00", end=2, nodes="n1"),
        RESERVATION.format(name="r1", start="Unknown", end=2, nodes="n1"),
        RESERVATION.format(name="r1", start=1, end=2, nodes="n[1-"),
        RESERVATION.format(name="r1", start=1, end=2, nodes="n1")[:60],
        RESERVATION.format(name="r1", start=1, end=2, nodes="n1") + "and more\n",
    ],
)
def test_reservations_that_are_not_understood(text: str) -> None:
    with pytest.raises(SlurmTextError):
        read_reservations(text)
