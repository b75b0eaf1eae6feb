"""etc/job_submit.lua, run by the Lua interpreters that Slurm's packages are linked with: what it reads and rules.

With Slurm itself it is tried in tests/cluster/test_incentive.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.flex import flex_in_comment, no_flex_in_comment
from testbed.cluster_files import REPO

from .test_flex_comment import TABLE, comments
from .test_flex_corpus import ROWS

SCRIPT: Final = REPO / "etc/job_submit.lua"
# Debian's Slurm is linked with 5.1, builds of one's own often with 5.4.
LUAS: Final = ("lua5.1", "lua5.4")

# What slurmctld gives the script, as far as it is used: job and partition records answer nil to what they do not have.
_SLURM: Final = """
said, logged = {}, {}
slurm = {
    SUCCESS = 0, ERROR = -1, ESLURM_ACCESS_DENIED = 2002,
    log_user = function(...) said[#said + 1] = string.format(...) end,
    log_error = function(...) logged[#logged + 1] = string.format(...) end,
}
local pfi = dofile(arg[1])
local function out(...)
    for _, text in ipairs({ ... }) do io.write(text, "\\0") end
end
"""


@pytest.fixture(params=LUAS)
def lua(request: pytest.FixtureRequest) -> str:
    """Each interpreter in turn."""
    name = str(request.param)
    assert shutil.which(name), f"{name} is not installed; make system installs it"
    return name


def run_lua(lua: str, body: str, given: bytes = b"") -> list[bytes]:
    """Run ``body`` after the script was loaded; what it hands to ``out``."""
    done = subprocess.run(
        [lua, "-", str(SCRIPT)] if not given else [lua, "-e", f"arg = {{{str(SCRIPT)!r}}} {_SLURM}{body}"],
        input=given or (_SLURM + body).encode("utf-8", "surrogateescape"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.split(b"\0")[:-1]


_LINES: Final = """
local given = io.read("*a")
local at = 1
while at <= #given do
    local stop = given:find("%z", at) or given:find("\\0", at, true)
    local text = given:sub(at, stop - 1)
    at = stop + 1
    EACH
end
"""


def of_each(lua: str, texts: Sequence[bytes], each: str) -> list[bytes]:
    """Run the statement ``each`` for every text; none of them may hold a zero byte, as none in C may."""
    return run_lua(lua, _LINES.replace("EACH", each), b"".join(text + b"\0" for text in texts))


def test_the_corpus_of_flex_values(lua: str) -> None:
    percents = of_each(lua, [row.value for row in ROWS], 'out(tostring(pfi.percent(text) or "-"))')
    read = [None if text == b"-" else float(text) / 100 for text in percents]
    assert read == [row.max_loss for row in ROWS]


_IN_COMMENT: Final = 'local found, wrong = pfi.in_comment(text); out(found or "-", wrong or "-")'


def in_comments(lua: str, texts: Sequence[str]) -> list[tuple[str | None, str | None]]:
    told = of_each(lua, [text.encode("utf-8", "surrogatepass") for text in texts], _IN_COMMENT)
    words = [None if text == b"-" else text.decode() for text in told]
    return list(zip(words[::2], words[1::2], strict=True))


def test_the_table_of_comments(lua: str) -> None:
    ascii_rows = [row for row in TABLE if row[0].isascii()]
    assert in_comments(lua, [row[0] for row in ascii_rows]) == [(row[1], row[2]) for row in ascii_rows]


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(comments(), min_size=20, max_size=40))
def test_any_comment_is_read_as_the_controller_reads_it(texts: list[str]) -> None:
    texts = [text.replace("\0", " ") for text in texts]
    found = in_comments(LUAS[0], texts)
    assert [flex for flex, _ in found] == [flex_in_comment(text) for text in texts]
    # What is shown of a wrong word counts bytes here and letters there.
    for text, (_, wrong) in zip(texts, found, strict=True):
        assert (wrong is None) == (no_flex_in_comment(text) is None)
        assert wrong is None or (wrong.isascii() and wrong.isprintable())


# ------------------------------------------------------------------------------------------------- what it rules

PARTITIONS: Final = """
local parts = { main = { flag_default = 1 }, urgent = {}, closed = { allow_qos = "normal,low" },
                shut = { deny_qos = "flexible" }, open = { allow_qos = "normal,Flexible" } }
"""


def quoted(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"[{quoted(key)}]={quoted(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ",".join(quoted(each) for each in value) + "}"
    if isinstance(value, str):
        return '"' + "".join(f"\\{byte:03d}" for byte in value.encode()) + '"'
    return str(value).lower()


def job(flex: str | None = None, **fields: object) -> dict[str, object]:
    """A job of one GPU with this flag."""
    env = (
        {}
        if flex is None
        else {"spank_job_env": {0: "OTHER=1", 1: f"PFI_FLEX={flex}"}, "spank_job_env_size": 2}
    )
    return {"tres_per_node": "gres:gpu:1", "user_id": 1000, **env, **fields}


def submit(
    lua: str, asked: Mapping[str, object], site: Mapping[str, object] | None = None
) -> tuple[int, str, list[str]]:
    """The answer, the QOS that the job then has, and what its user reads."""
    body = "".join(f"pfi.site[{quoted(key)}] = {quoted(value)}\n" for key, value in (site or {}).items())
    body += f"{PARTITIONS} local job = {quoted(dict(asked))}\n"
    body += 'out(tostring(slurm_job_submit(job, parts, 1000)), job.qos or ""); out((table.unpack or unpack)(said))'
    answer, qos, *told = (text.decode() for text in run_lua(lua, body))
    return int(answer), qos, told


def modify(
    lua: str, change: Mapping[str, object], record: Mapping[str, object], uid: int = 1000
) -> tuple[int, list[str]]:
    body = f"pfi.site.trusted_uids = {{64030}}; local change, job = {quoted(dict(change))}, {quoted(dict(record))}\n"
    body += f"out(tostring(slurm_job_modify(change, job, {{}}, {uid}))); out((table.unpack or unpack)(said))"
    answer, *told = (text.decode() for text in run_lua(lua, body))
    return int(answer), told


REFUSED: Final = 2002


@pytest.mark.parametrize(
    ("asked", "qos"),
    [
        (job("medium"), "flexible"),
        (job("15%"), "flexible"),
        (job("100%"), "flexible"),
        (job("auto"), "flexible"),
        (job(comment="x pfi:high"), "flexible"),
        (job("high", comment="pfi:low"), "flexible"),
        (job("low", comment="pfi:high"), ""),
        (job("14%"), ""),
        (job("low"), ""),
        (job("none", partition="urgent"), ""),
        (job(), ""),
        (job("nonsense"), ""),
        (job("invalid", comment="pfi:high"), ""),
        (job("high", qos="normal"), "normal"),
        (job("high", partition="closed"), ""),
        (job("high", partition="shut"), ""),
        (job("high", partition="open"), "flexible"),
        (job("high", partition="open,main"), "flexible"),
        (job("high", partition="main,closed"), ""),
        (job("high", partition="unknown"), ""),
        (job("high", tres_per_node=""), ""),
        (job("high", tres_per_node="gres:license:4"), ""),
        (job("high", tres_per_node="gres:gpu:0"), ""),
        (job("high", tres_per_node="gres:gpu:00"), ""),
        (job("high", tres_per_node="gres/gpu:h200:+0"), ""),
        (job("high", tres_per_node="", tres_per_job="gres/gpu=0k"), ""),
        (job("high", tres_per_node="gres:gpu:100"), "flexible"),
        (job("high", tres_per_node="gres:gpu:b0"), "flexible"),
        (job("high", tres_per_node="gres/gpu:h200:2"), "flexible"),
        (job("high", tres_per_node="", tres_per_job="gres:tape:1,gpu:10"), "flexible"),
        (job("high", tres_per_node="", tres_per_task="gres/gpu=2"), "flexible"),
        (job("high", tres_per_node="", tres_per_socket="gres:shard:1"), "flexible"),
    ],
    ids=str,
)
def test_who_is_moved(asked: dict[str, object], qos: str) -> None:
    answer, found, told = submit(LUAS[0], asked)
    assert (answer, found) == (0, qos)
    assert any("goes to QOS flexible" in text for text in told) == (qos == "flexible")


def test_a_move_is_told(lua: str) -> None:
    assert submit(lua, job("10%"), {"least_percent": 10}) == (
        0,
        "flexible",
        ["slurm-pfi: --power-flex=10%: the job goes to QOS flexible"],
    )


def test_a_job_that_says_nothing_is_moved_where_the_site_wants_it(lua: str) -> None:
    site: dict[str, object] = {"unasked": True}
    assert submit(lua, job(), site)[1] == "flexible"
    assert submit(lua, job(), {**site, "default_flex": "low"})[1] == ""
    assert submit(lua, job("nonsense"), site)[1] == ""


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (job("low"), "and this one allows 5%"),
        (job("none"), "and this one allows 0%"),
        (job(), "ask with --power-flex=medium"),
        (job("nonsense"), "no value of --power-flex"),
        (job("high", tres_per_node=""), "for jobs that ask for GPUs"),
        (job(comment="pfi:low pfi:high"), "and this one allows 5%"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["flexible", "FLEXIBLE", "normal,flexible"])
def test_the_qos_is_refused_to_who_does_not_deserve_it(asked: dict[str, object], why: str, name: str) -> None:
    answer, _, told = submit(LUAS[0], {**asked, "qos": name})
    assert answer == REFUSED
    assert why in told[-1]


def test_the_qos_is_had_for_the_asking_by_who_deserves_it(lua: str) -> None:
    assert submit(lua, job("high", qos="flexible")) == (0, "flexible", [])
    assert submit(lua, job("high", qos="normal,flexible"))[0] == REFUSED


def test_two_flags_that_differ_count_for_nothing(lua: str) -> None:
    for first, second in (("high", "low"), ("low", "high")):
        twice = {
            "spank_job_env": {0: f"PFI_FLEX={first}", 1: f"PFI_FLEX={second}"},
            "spank_job_env_size": 2,
        }
        assert submit(lua, job(None, **twice)) == (0, "", [])
        assert submit(lua, job(None, **twice, qos="flexible"))[0] == REFUSED
    same = {"spank_job_env": {0: "PFI_FLEX=high", 1: "PFI_FLEX=high"}, "spank_job_env_size": 2}
    assert submit(lua, job(None, **same))[1] == "flexible"


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        (job("none"), False),
        (job("none", partition="urgent"), True),
        (job("none", partition="urgent,main"), False),
        (job("none", account="clinic"), True),
        (job("none", default_account="clinic"), True),
        (job("none", account="other", default_account="clinic"), False),
        (job("none", qos="gold"), True),
        (job("none", default_qos="gold"), True),
        (job(comment="pfi:none"), False),
    ],
    ids=str,
)
def test_who_may_say_none(asked: dict[str, object], allowed: bool) -> None:
    site = {"none_partitions": ["urgent"], "none_accounts": ["clinic"], "none_qos": ["gold"]}
    answer, _, told = submit(LUAS[0], asked, site)
    assert answer == 0
    assert [text for text in told if "is not allowed here; it is read as low" in text] == (
        [] if allowed else told
    )
    assert bool(told) != allowed
    assert (submit(LUAS[0], asked, {**site, "none_elsewhere": "refuse"})[0] == 0) == allowed


def test_a_wrong_word_in_a_comment_is_told_and_cannot_hurt(lua: str) -> None:
    answer, qos, told = submit(lua, job(comment="pfi:%s%d\x1b[31m"))
    assert (answer, qos) == (0, "")
    assert told == ["slurm-pfi: pfi:%s%d??31m in the comment is not a flex; the site's default counts"]


FLEXIBLE: Final = job("high", qos="flexible")


@pytest.mark.parametrize(
    ("change", "record", "answer"),
    [
        ({"admin_comment": "pfi=1.00"}, job("low", qos="flexible"), 0),
        ({"time_limit": 5}, job("low", qos="flexible"), 0),
        ({"qos": "flexible"}, job("low", qos="normal"), REFUSED),
        ({"qos": "Flexible"}, job("low", qos="normal"), REFUSED),
        ({"qos": "normal,flexible"}, job("high", qos="normal"), REFUSED),
        ({"qos": "flexible"}, job(qos="normal"), REFUSED),
        ({"qos": "flexible"}, job("high", qos="normal"), 0),
        ({"qos": "flexible", "comment": "pfi:high"}, job(qos="normal"), 0),
        ({"qos": "normal"}, FLEXIBLE, 0),
        ({"comment": "pfi:low"}, FLEXIBLE, 0),  # the flag beats it
        ({"comment": "pfi:low"}, job(comment="pfi:high", qos="flexible"), REFUSED),
        ({"comment": ""}, job(comment="pfi:high", qos="flexible"), REFUSED),
        ({"comment": "pfi:low", "qos": "normal"}, job(comment="pfi:high", qos="flexible"), 0),
        ({"comment": "note pfi:20%"}, job(comment="pfi:high", qos="flexible"), 0),
        ({"comment": "pfi:low"}, job(comment="pfi:high", qos="normal"), 0),
        ({"tres_per_node": ""}, FLEXIBLE, REFUSED),
        ({"tres_per_node": "gres:gpu:2"}, FLEXIBLE, 0),
    ],
    ids=str,
)
def test_what_may_be_changed_later(change: dict[str, object], record: dict[str, object], answer: int) -> None:
    found, told = modify(LUAS[0], change, record)
    assert found == answer
    assert bool(told) == (answer != 0)
    assert modify(LUAS[0], change, record, uid=0) == (0, [])
    assert modify(LUAS[0], change, record, uid=64030) == (0, [])


@pytest.mark.parametrize("call", ["slurm_job_submit(bad, {}, 1)", "slurm_job_modify(bad, bad, {}, 1)"])
def test_a_fault_lets_the_job_pass_and_is_logged(lua: str, call: str) -> None:
    body = f'bad = setmetatable({{}}, {{ __index = function() error("100% broken") end }})\nout(tostring({call}))\n'
    answer, logged = run_lua(lua, f"{body}out((table.unpack or unpack)(logged))")
    assert answer == b"0"
    assert b"100% broken; the job is taken as it is" in logged
    # Not even a log that fails may refuse a job.
    assert run_lua(lua, f"slurm.log_error = nil\n{body}")[0] == b"0"


def test_without_a_qos_only_words_are_told(lua: str) -> None:
    site: dict[str, object] = {"qos": ""}
    assert submit(lua, job("high"), site) == (0, "", [])
    assert submit(lua, job("none"), site)[2] == [
        "slurm-pfi: --power-flex=none is not allowed here; it is read as low"
    ]


def test_the_table_says_what_the_config_says_by_default() -> None:
    text = SCRIPT.read_text()
    assert 'default_flex = "medium"' in text
    assert all(f"none_{kind} = {{}}" in text for kind in ("partitions", "accounts", "qos"))
    assert Path(SCRIPT).stat().st_size < 16_000
