"""Every reader of Slurm's words under arbitrary text and bytes, and there and back with what Slurm could write.

A reader may raise its own error and nothing else, and what it returns must print back to what it was read from, or read
again to the same: so it never guesses.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Final

from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_pfi.slurm.backend import JobInfo, Special, Unavailable
from slurm_pfi.slurm.damage import SlurmTextError
from slurm_pfi.slurm.gres import Gres, GresError, parse_gres
from slurm_pfi.slurm.hosts import HostListError, count_list, expand_list
from slurm_pfi.slurm.jsonjobs import read_json_jobs
from slurm_pfi.slurm.numbers import read_minutes_s, read_number, read_time
from slurm_pfi.slurm.squeue import FIELDS, read_jobs, split_rows
from slurm_pfi.slurm.table import read_table
from slurm_pfi.slurm.tag import find_tag, format_tag, merge
from slurm_pfi.slurm.text import (
    expand_nodes,
    parse_count,
    parse_job_id,
    parse_limit_s,
    parse_unix_s,
    read_submission,
)
from slurm_pfi.slurm.tres import Tres, count_gpus, parse_tres
from slurm_pfi.slurm.version import Version, read_version

from .slurm_samples import BARE_TAG as TAG

FUZZ: Final = settings(deadline=None)  # a loaded machine is no fault

# Text near what Slurm writes breaks more than any text does.
# fmt: off
PIECES: Final = st.sampled_from([
    "gpu", "gres/", ":", "h200", "(IDX:", "(S:", ")", "(null)", "N/A", ",", "-", "[", "]", "0", "1", "23", "=", "/",
    "UNLIMITED", "NOT_SET", "cpu=", "mem=", "K", "G", ".", ";", "n", "set", "Submitted batch job ", "CLUSTER: ",
    "99999999999", " ", "\n", "\0", "\udcff", "\N{ARABIC-INDIC DIGIT ONE}",
])
# fmt: on
TEXTS: Final = st.text(max_size=40) | st.lists(PIECES, max_size=12).map("".join)
NUMBERS: Final = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
OBJECTS: Final = st.fixed_dictionaries({}, optional={"set": NUMBERS, "infinite": NUMBERS, "number": NUMBERS})
NAMES: Final = st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,7}", fullmatch=True)
TYPES: Final = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,9}", fullmatch=True)


# ------------------------------------------------------------------------------------------------- numbers and times


@FUZZ
@given(TEXTS)
def test_any_text_is_a_number_or_an_error(text: str) -> None:
    for read in (parse_count, parse_job_id):
        try:
            number = read(text)
        except SlurmTextError:
            continue
        assert text.lstrip("0") == str(number).lstrip("0")
        assert number > 0 or read is parse_count


def written(seconds: int, form: int) -> str:
    """The ways in which Slurm's tables write a duration."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    if days or form == 0:
        return f"{days}-{clock}"
    if rest >= 3600 or form == 1:
        return clock
    return f"{rest // 60}:{rest % 60:02}"


@FUZZ
@given(st.integers(0, 10**9), st.integers(0, 2), st.sampled_from(["", ".250"]))
def test_durations_there_and_back(seconds: int, form: int, fraction: str) -> None:
    assert parse_limit_s(written(seconds, form) + fraction) == seconds


@FUZZ
@given(TEXTS)
@example("1.5")
@example("1-2.5")
def test_any_text_is_a_duration_or_an_error(text: str) -> None:
    for read in (parse_limit_s, parse_unix_s):
        try:
            seconds = read(text)
        except SlurmTextError:
            continue
        assert isinstance(seconds, Special) or (text.isascii() and text[0].isdigit() and text[-1].isdigit())


@FUZZ
@given(NUMBERS | OBJECTS | st.lists(NUMBERS, max_size=2))
def test_any_json_value_is_a_number_or_an_error(value: object) -> None:
    for read in (read_number, read_minutes_s, read_time):
        try:
            number = read(value, "x")
        except SlurmTextError as error:
            assert str(error).startswith("x")
            continue
        assert isinstance(number, Special) or number >= 0


@FUZZ
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_number_objects_there_and_back(number: int, is_set: bool, infinite: bool) -> None:
    read = read_number({"set": is_set, "infinite": infinite, "number": number}, "x")
    assert read == (Special.UNLIMITED if infinite else number if is_set else Special.NOT_SET)


# ------------------------------------------------------------------------------------------------- ids and versions


@FUZZ
@given(TEXTS)
def test_any_text_names_one_job_or_is_an_error(text: str) -> None:
    try:
        job = read_submission(text)
    except SlurmTextError:
        return
    assert str(job.job_id) in text
    assert 0 < job.job_id < 2**32
    assert job.cluster is None or job.cluster in text


@FUZZ
@given(
    st.integers(1, 2**32 - 1),
    NAMES | st.none(),
    st.booleans(),
    st.lists(NAMES.map("sbatch: {}".format), max_size=3),
)
def test_submissions_there_and_back(
    job_id: int, cluster: str | None, parsable: bool, chat: list[str]
) -> None:
    plain = f"{job_id}" if parsable else f"Submitted batch job {job_id}"
    on = "" if cluster is None else f";{cluster}" if parsable else f" on cluster {cluster}"
    job = read_submission("\n".join([*chat, plain + on, ""]))
    assert (job.job_id, job.cluster) == (job_id, cluster)


@FUZZ
@given(TEXTS)
def test_any_text_is_a_release_or_unknown(text: str) -> None:
    version = read_version(text)
    assert not isinstance(version, Version) or f"{version.major:02}." in text


# ----------------------------------------------------------------------------------------------------- node lists


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list in brackets and its names in order."""
    words, names = [], []
    for prefix in draw(
        st.lists(NAMES.filter(lambda name: not name[-1].isdigit()), min_size=1, max_size=4, unique=True)
    ):
        width = draw(st.integers(0, 3))
        numbers = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4, unique=True).map(sorted))
        parts, held = [], []
        for low, above in zip(numbers, [*numbers[1:], None], strict=True):
            most = low + 3 if above is None else above - 1
            high = draw(st.integers(low, min(most, low + 3)))
            if len(str(low).zfill(width)) != len(str(high).zfill(width)):
                high = low  # Slurm pads a range by its low end alone
            texts = [str(number).zfill(width) for number in range(low, high + 1)]
            parts.append(texts[0] if len(texts) == 1 else f"{texts[0]}-{texts[-1]}")
            held += texts
        words.append(f"{prefix}[{','.join(parts)}]")
        names += [prefix + text for text in held]
    return ",".join(words), names


@FUZZ
@given(host_lists())
def test_node_lists_there_and_back_by_both_readers(pair: tuple[str, list[str]]) -> None:
    text, names = pair
    assert list(expand_list(text, 1000)) == names
    assert sorted(expand_nodes(text)) == sorted(set(names))
    assert count_list(text) == len(names)


@FUZZ
@given(TEXTS)
@example("n[1-999999999]")
@example("[1-9][1-9999]x[1-9]")
def test_any_text_is_a_node_list_or_an_error(text: str) -> None:
    try:
        nodes = expand_nodes(text)
    except SlurmTextError:
        return
    assert len(set(nodes)) == len(nodes) <= 65_536
    if nodes:
        assert expand_nodes(",".join(nodes)) == nodes


@FUZZ
@given(TEXTS)
@example("(null)")
def test_both_readers_of_node_lists_agree(text: str) -> None:
    try:
        nodes = set(expand_nodes(text))
        strict = set(expand_list(text, 65_536))
    except (SlurmTextError, HostListError):
        return
    assert nodes == strict - {"(null)"}  # that is Slurm's word for none


# -------------------------------------------------------------------------------------------------- GRES and TRES


def gres_text(entry: Gres) -> str:
    text = (
        entry.name
        + (f":{entry.type}" if entry.type else "")
        + ("" if entry.count is None else f":{entry.count}")
    )
    if entry.indices is None:
        return text
    return f"{text}(IDX:{','.join(map(str, entry.indices)) or 'N/A'})"


@st.composite
def gres_entries(draw: st.DrawFn) -> Gres:
    indices = draw(st.none() | st.lists(st.integers(0, 63), unique=True, max_size=8).map(tuple))
    count = draw(st.none() | st.integers(0, 10**6)) if indices is None else len(indices)
    return Gres(name="gpu", type=draw(st.just("") | TYPES), count=count, indices=indices)


@FUZZ
@given(st.lists(gres_entries(), min_size=1, max_size=4))
def test_gres_there_and_back(entries: list[Gres]) -> None:
    assert parse_gres(",".join(map(gres_text, entries))) == tuple(entries)


@FUZZ
@given(st.lists(gres_entries(), min_size=1, max_size=3), st.data())
def test_gres_that_is_cut_off_is_never_read_as_more_than_it_says(
    entries: list[Gres], data: st.DataObject
) -> None:
    text = ",".join(map(gres_text, entries))
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    try:
        read = parse_gres(cut)
    except GresError:
        return
    assert ",".join(map(gres_text, read)) == cut


@FUZZ
@given(TEXTS)
def test_any_text_is_gres_or_an_error(text: str) -> None:
    try:
        entries = parse_gres(text)
    except GresError:
        return
    assert parse_gres(",".join(map(gres_text, entries))) == entries
    for entry in entries:
        assert entry.indices is None or entry.name != "gpu" or entry.count == len(entry.indices)


TRES: Final = st.builds(
    Tres,
    st.sampled_from(["cpu", "mem", "node", "billing", "gres/gpu", "gres/shard"]),
    st.just("") | TYPES,
    st.integers(0, 10**9).map(Fraction),
)


def tres_text(entry: Tres) -> str:
    unit = "M" if entry.name == "mem" else ""
    return f"{entry.name}{':' if entry.type else ''}{entry.type}={entry.amount}{unit}"


@FUZZ
@given(st.lists(TRES, unique_by=lambda entry: (entry.name, entry.type)))
def test_tres_there_and_back(entries: list[Tres]) -> None:
    assert parse_tres(",".join(map(tres_text, entries))) == tuple(entries)


@FUZZ
@given(TEXTS)
def test_any_text_is_tres_or_an_error(text: str) -> None:
    try:
        entries = parse_tres(text)
        gpus = count_gpus(text)
    except SlurmTextError:
        return
    assert gpus is None or gpus >= 0
    assert entries is None or text.count("=") == len(entries)


@FUZZ
@given(st.integers(0, 64), st.integers(0, 64), st.booleans(), st.booleans())
def test_gpus_by_type_and_in_all_are_the_same_gpus(first: int, second: int, total: bool, typed: bool) -> None:
    words = [f"gres/gpu={first + second}"] * total + [f"gres/gpu:a={first}", f"gres/gpu:b={second}"] * typed
    known = first + second if total or typed else None
    assert count_gpus(",".join(["cpu=1", *words])) == known


# ------------------------------------------------------------------------------------------ jobs, tables, comments

END: Final = b"<0123456789abcdef>"
CELLS: Final = st.binary(max_size=20).filter(lambda cell: END not in cell and b"<" not in cell)


@FUZZ
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5))
def test_whatever_a_field_holds_stays_in_it(rows: list[tuple[bytes, bytes, bytes]]) -> None:
    rows = [
        (first.lstrip(b"\n"), second, third) for first, second, third in rows
    ]  # the first is the job's id
    out = b"".join(b"".join(cell + END for cell in row) + b"\n" for row in rows)
    assert [tuple(row.values()) for row in split_rows(out, ("a", "b", "c"), END)] == rows


@FUZZ
@given(st.binary(max_size=200) | st.lists(CELLS, max_size=40).map(END.join))
def test_any_bytes_are_rows_or_an_error(out: bytes) -> None:
    try:
        rows = split_rows(out, FIELDS, END)
    except SlurmTextError:
        return
    jobs = read_jobs(rows)
    assert isinstance(jobs, Unavailable) or len(jobs) == len(rows)


@FUZZ
@given(st.binary(max_size=120), st.integers(1, 4))
def test_any_bytes_are_a_table_that_loses_no_line(out: bytes, width: int) -> None:
    table = read_table(out, width)
    lines = out.split(b"\n")
    assert len(table.rows) + len(table.unreadable) == len(lines) - (not lines[-1])


JSON_VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["jobs", "errors", "warnings", "job_id", "set", "number", "infinite"]), inner
        )
    ),
    max_leaves=12,
)


@FUZZ
@given(st.binary(max_size=60) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_jobs_or_unknown(out: bytes) -> None:
    jobs = read_json_jobs(out)
    assert isinstance(jobs, Unavailable) or all(isinstance(job, JobInfo) for job in jobs)


@FUZZ
@given(
    st.text(max_size=60).filter(lambda text: "\0" not in text) | TEXTS.filter(lambda text: "\0" not in text)
)
def test_a_tag_beside_any_text_is_found_and_the_text_stays(foreign: str) -> None:
    merged = merge(foreign, TAG)
    assert isinstance(merged, str)
    assert merged == (f"{foreign} {format_tag(TAG)}" if foreign else format_tag(TAG))
    assert find_tag(merged) == TAG
    assert find_tag(foreign) is None
