"""What a user is told of others: nothing that Slurm's PrivateData keeps from them."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from slurm_pfi.bus.asking import NO, Reply, Request
from slurm_pfi.bus.unix import Peer
from slurm_pfi.config import Config, SlurmSection, TimesSection
from slurm_pfi.controller.answers.orders import Orders
from slurm_pfi.controller.answers.outcome import WindowReport
from slurm_pfi.controller.answers.privacy import Asker, asker_of, private_report, private_status
from slurm_pfi.controller.shell import Controller
from slurm_pfi.controller.worker.private_data import ALL_PRIVATE, PrivateData
from slurm_pfi.slurm.backend import SlurmBackend, Unavailable
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.store.rows import NODE_EVENT, EventRow

from .report_samples import made_report
from .test_cli_answers import controller, ended

__all__ = ["controller", "ended"]

OTHERS_UID: Final = 4242
JOBS, USAGE, NAMES, NOTHING = (
    frozenset({"jobs"}),
    frozenset({"usage"}),
    frozenset({"users", "accounts"}),
    frozenset[str](),
)
STRANGER: Final = 31_337
COMMANDS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("jobs", {"ended": True}),
    ("job", {"job_id": 2}),
    ("job", {"job_id": 5}),
    ("what_if", {"share": 0.1}),
    ("offer", {}),
    ("status", {}),
)


def put(controller: Controller, uid: int, private: frozenset[str], command: str, args: Any) -> Reply:
    """The answer to this user."""
    controller.private_data.words = private
    return asyncio.run(
        Orders(controller).handle(Request(command=command, args=args), Peer(pid=1, uid=uid, gid=uid))
    )


def seen(controller: Controller, uid: int, private: frozenset[str]) -> str:
    """All that this user is told, as one text."""
    replies = [put(controller, uid, private, command, args) for command, args in COMMANDS]
    return msgspec.json.encode(replies).decode()


@pytest.mark.usefixtures("ended")
def test_nothing_of_a_job_of_others_where_jobs_are_private(controller: Controller) -> None:
    """Neither id nor name, user or account stand anywhere in any answer."""
    for private in (JOBS, ALL_PRIVATE):
        told = seen(controller, STRANGER, private)
        for word in ("c:1.", "c:2.", "c:78.", "c:5.", "anna", "bob"):
            assert word not in told, word
    own = seen(controller, OTHERS_UID, JOBS)
    assert "c:2.0" in own
    assert "c:5.0" in own
    assert "bob" in own
    assert "anna" not in own
    assert "c:1." not in own


@pytest.mark.usefixtures("ended")
def test_an_open_site_tells_all_to_all_and_admins_see_all(controller: Controller) -> None:
    for uid, private in ((STRANGER, NOTHING), (os.geteuid(), ALL_PRIVATE), (0, ALL_PRIVATE)):
        told = seen(controller, uid, private)
        for word in ("c:1.1", "c:2.0", "c:78.0", "c:5.0", "anna", "bob"):
            assert word in told, (uid, word)


def test_an_admin_of_the_config_sees_all(controller: Controller) -> None:
    admins = msgspec.structs.replace(controller.config.controller, admins=("no-such-user-here", "nobody"))
    controller.config = msgspec.structs.replace(controller.config, controller=admins)
    assert "c:2.0" in seen(controller, pwd.getpwnam("nobody").pw_uid, ALL_PRIVATE)


def test_sums_are_told_to_everybody(controller: Controller) -> None:
    mine, all_ = (
        put(controller, uid, JOBS, "what_if", {"share": 0.1}).data for uid in (STRANGER, os.geteuid())
    )
    assert mine.runs == ()
    assert mine.runs_hidden == len(all_.runs) == 5
    assert (mine.loss, mine.gpus, mine.uncapped_mw, mine.feasible) == (
        all_.loss,
        all_.gpus,
        all_.uncapped_mw,
        all_.feasible,
    )
    offered, whole = (put(controller, uid, JOBS, "offer", {}).data for uid in (STRANGER, os.geteuid()))
    assert offered.levels == whole.levels
    assert offered.supply.given_mw == whole.supply.given_mw
    assert set(offered.supply.run) == {""}
    assert "" not in whole.supply.run


@pytest.mark.usefixtures("ended")
def test_a_hidden_job_is_as_unknown_as_none(controller: Controller) -> None:
    """The refusal does not say whether there is such a job."""
    texts = set()
    for job_id in (2, 999_999):
        reply = put(controller, STRANGER, JOBS, "job", {"job_id": job_id})
        assert (reply.ok, reply.exit_code) == (False, NO)
        assert "PrivateData" in reply.message
        texts.add(reply.message.replace(str(job_id), "N"))
    assert len(texts) == 1


@pytest.mark.usefixtures("ended")
def test_private_usage_leaves_what_runs_but_neither_cost_nor_history(controller: Controller) -> None:
    rows = put(controller, STRANGER, USAGE, "jobs", {"ended": True}).data
    assert {row["run"] for row in rows} >= {"c:2.0", "c:1.1"}
    assert "c:5.0" not in {row["run"] for row in rows}
    assert all(row["tag"] is None for row in rows)
    shown = Asker(1, USAGE).shown({"tag": "t", "loss": 0.1, "expected_loss": 0.1, "cap_mw": 1}, 2)
    assert shown == {"tag": None, "loss": None, "expected_loss": None, "cap_mw": 1}
    assert put(controller, STRANGER, USAGE, "job", {"job_id": 2}).exit_code == NO
    assert put(controller, OTHERS_UID, USAGE, "job", {"job_id": 2}).ok


def test_private_names_leave_the_figures(controller: Controller) -> None:
    told = seen(controller, STRANGER, NAMES)
    assert "c:2.0" in told
    assert "anna" not in told
    assert "bob" not in told
    assert put(controller, STRANGER, NAMES, "job", {"job_id": 2}).data["account"] is None


def test_faults_of_nodes_may_name_jobs() -> None:
    node = {"name": "n1", "faults": ["run c:7.0: odd", "b"], "refused": "the run c:7.0"}
    nodes = [node, {"name": "n2", "faults": [], "refused": ""}]
    whole: dict[str, Any] = {"nodes": nodes, "tags": {"written": 3, "trouble": "job c:7: its tag"}}
    told = private_status(whole, Asker(1, JOBS))
    assert "c:7" not in json.dumps(told)
    assert told["nodes"][0]["faults"] == ["2 faults; admins are told which"]
    assert told["nodes"][0]["refused"] == told["tags"]["trouble"] == "admins are told why"
    assert told["nodes"][1] == whole["nodes"][1]
    assert told["tags"]["written"] == 3
    assert private_status(whole, Asker(1, NAMES)) is whole


def test_a_report_has_the_reader_s_own_runs_in_it_and_all_sums(tmp_path: Path) -> None:
    whole = made_report(tmp_path)
    first, *others = whole.runs
    uids = {first.facts.run: 7}
    whole = msgspec.structs.replace(
        whole,
        runs=tuple(
            msgspec.structs.replace(
                run, facts=msgspec.structs.replace(run.facts, uid=uids.get(run.facts.run, 8))
            )
            for run in whole.runs
        ),
    )
    assert others
    found = private_report(whole, Asker(7, JOBS))
    assert [run.facts.run for run in found.runs] == [first.facts.run]
    assert found.runs_hidden == len(others)
    text = msgspec.json.encode(found).decode()
    assert not [run.facts.run for run in others if f'"{run.facts.run}"' in text]
    same = ("window", "compliance", "delivered", "loss", "lost_gpu_h", "site", "limits")
    assert all(getattr(found, name) == getattr(whole, name) for name in same)
    assert private_report(whole, Asker(7, NOTHING)) is whole
    assert msgspec.convert(msgspec.to_builtins(found), WindowReport) == found
    faults = tuple(EventRow(unix_s=1.0, kind=kind, text="n1: run c:99.0") for kind in (NODE_EVENT, "limit"))
    faulty = msgspec.structs.replace(whole, events=faults)
    assert private_report(faulty, Asker(7, JOBS)).events == faults[1:], "as in status"
    assert private_report(faulty, Asker(7, USAGE)).events == faults
    nameless = private_report(whole, Asker(9, NAMES))
    assert {(run.facts.user, run.facts.account) for run in nameless.runs} == {(None, None)}


# ------------------------------------------------------------------------------------------------ what Slurm says


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("PrivateData             = none", NOTHING),
        ("PrivateData             = jobs,usage", frozenset({"jobs", "usage"})),
        ("PrivateData             = cloud", frozenset({"cloud"})),
        ("PrivateData             = (null)", None),
        ("PrivateData             = ", None),
        ("NoPrivateData           = none", None),
        ("PrivateData             = none\nPrivateData             = jobs", None),
    ],
)
def test_slurm_s_word_is_read_strictly(tmp_path: Path, printed: str, words: frozenset[str] | None) -> None:
    path = tmp_path / "scontrol"
    path.write_text(f"#!/bin/sh\ncat <<'.'\nConfiguration data\n{printed}\nPluginDir = /usr\n.\n")
    path.chmod(0o755)
    section = SlurmSection(bin_dir=str(tmp_path))
    answer = asyncio.run(SlurmCommands(section, timeout_s=10).private_data())
    if words is None:
        assert isinstance(answer, Unavailable)
    else:
        assert answer == words


class Says:
    """A backend that gives these answers one after the other."""

    def __init__(self, *answers: frozenset[str] | Unavailable) -> None:
        self._answers: Iterator[frozenset[str] | Unavailable] = iter(answers)

    async def private_data(self) -> frozenset[str] | Unavailable:
        return next(self._answers)


def test_unknown_is_private_and_a_failed_read_changes_nothing() -> None:
    down = Unavailable("slurmctld does not answer")
    says: Any = Says(down, frozenset({"cloud", "jobs"}), frozenset(), down)
    backend: SlurmBackend = says
    known = PrivateData(backend, TimesSection)

    async def read() -> tuple[bool, frozenset[str]]:
        return await known.read(), known.words

    assert known.words == ALL_PRIVATE
    assert asyncio.run(read()) == (False, ALL_PRIVATE)
    assert asyncio.run(read()) == (True, JOBS)
    assert asyncio.run(read()) == (True, NOTHING)
    assert asyncio.run(read()) == (False, NOTHING)


def test_who_asks_is_the_kernel_s_word() -> None:
    config = Config(cluster="c")
    assert asker_of(0, config, ALL_PRIVATE).private == NOTHING
    assert asker_of(STRANGER, config, JOBS) == Asker(STRANGER, JOBS)
    # An owner that nobody knows yet is nobody's, not everybody's.
    assert not Asker(STRANGER, JOBS).may_see(None)
    assert replace(Asker(STRANGER, JOBS), private=NOTHING).may_see(None)
