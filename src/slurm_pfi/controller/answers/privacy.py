"""What one user may be told of another's jobs: what Slurm's own PrivateData allows, and no more.

PrivateData is a list of words in slurm.conf (slurm.conf(5)). ``jobs``: nothing of a single run of others. ``usage``:
of theirs neither cost nor anything that has ended. ``users``, ``accounts``: no name of a user, of an account. What is
summed over the site is told to everybody.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec

from ...config import Config
from ...store.rows import NODE_EVENT, EventRow
from .forecast_values import Standing, WhatIf
from .offers import Offer
from .outcome import Given, WindowReport

_NOT_SHOWN: Final = "admins are told why"
_UIDS_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, by the kernel's word, and what is kept from them: words of PrivateData; none from an admin."""

    uid: int
    private: frozenset[str]

    def may_see(self, owner: int | None) -> bool:
        """A run that is there: that it exists, where, and how it is capped. ``owner`` None: not known whose it is."""
        return owner == self.uid or "jobs" not in self.private

    def may_see_cost(self, owner: int | None) -> bool:
        """Its history: what it used, lost and gave; and runs that have ended."""
        return owner == self.uid or not {"jobs", "usage"} & self.private

    def shown(self, told: dict[str, Any], owner: int | None) -> dict[str, Any]:
        """A run that may be seen, without what is kept from this asker."""
        if owner == self.uid or not self.private:
            return told
        kept = dict(told)
        for word, names in (
            ("users", ("user", "uid")),
            ("accounts", ("account",)),
            ("usage", ("tag", "loss", "expected_loss")),
        ):
            if word in self.private:
                kept.update({name: None for name in names if name in told})
        return kept


def asker_of(uid: int, config: Config, private: frozenset[str]) -> Asker:
    """Root, the controller's own user and ``controller.admins`` see everything."""
    return Asker(uid, frozenset() if is_admin(uid, config) else private)


def is_admin(uid: int, config: Config) -> bool:
    """Whether this user may give orders."""
    if uid in (0, os.geteuid()):
        return True
    return uid in _uids(config.controller.admins, int(time.monotonic() // _UIDS_S))


@lru_cache(maxsize=4)
def _uids(names: tuple[str, ...], _minute: int) -> frozenset[int]:
    """The users of these names; a directory service is not asked for each question anew."""
    found = set()
    for name in names:
        with contextlib.suppress(KeyError):
            found.add(pwd.getpwnam(name).pw_uid)
    return frozenset(found)


# --------------------------------------------------------------------------------------- answers on the whole site


def private_what_if(found: WhatIf, asker: Asker, owners: dict[str, int | None]) -> WhatIf:
    """The same figures, with the runs that the asker may see. ``owners``: uid by run."""
    if not asker.private:
        return found

    def visible(run: str) -> bool:
        return asker.may_see(owners.get(run))

    runs = tuple(
        run
        if owners.get(run.run) == asker.uid or "users" not in asker.private
        else msgspec.structs.replace(run, user=None)
        for run in found.runs
        if visible(run.run)
    )
    return msgspec.structs.replace(
        found,
        runs=runs,
        runs_hidden=len(found.runs) - len(runs),
        waiting=tuple(run for run in found.waiting if visible(run)),
        waiting_hidden=sum(1 for run in found.waiting if not visible(run)),
        names={run: name for run, name in found.names.items() if visible(run)},
        standing=_private_standing(found.standing, asker, owners),
    )


def private_offer(found: Offer, asker: Asker, owners: dict[str, int | None]) -> Offer:
    """The same figures; a step of the supply curve does not say whose run it is where that is kept from the asker."""
    if not asker.private:
        return found
    names = tuple(run if asker.may_see(owners.get(run)) else "" for run in found.supply.run)
    return msgspec.structs.replace(
        found,
        supply=msgspec.structs.replace(found.supply, run=names),
        standing=_private_standing(found.standing, asker, owners),
    )


def private_report(found: WindowReport, asker: Asker) -> WindowReport:
    """A window with the asker's own runs; whole where history is open to all."""
    if not asker.private:
        return found
    runs = tuple(_private_given(run, asker) for run in found.runs if asker.may_see_cost(run.facts.uid))
    names = {run.facts.run for run in runs}

    def visible(event: EventRow) -> bool:
        if event.kind == NODE_EVENT and "jobs" in asker.private:
            return False  # words of single nodes, as in private_status
        return not event.run or event.run in names or asker.may_see_cost(None)

    return msgspec.structs.replace(
        found,
        runs=runs,
        runs_hidden=len(found.runs) - len(runs),
        fine=tuple(run for run in found.fine if run in names),
        series={run: rows for run, rows in found.series.items() if run in names},
        events=tuple(filter(visible, found.events)),
    )


def private_status(data: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """The site without the words of single nodes, which may name jobs: how many faults there are is told."""
    if "jobs" not in asker.private:
        return data
    nodes = [
        {**node, "faults": _count(node["faults"]), "refused": _NOT_SHOWN if node["refused"] else ""}
        for node in data["nodes"]
    ]
    tags = {**data["tags"], "trouble": _NOT_SHOWN if data["tags"]["trouble"] else ""}
    return {**data, "nodes": nodes, "tags": tags}


def _private_given(run: Given, asker: Asker) -> Given:
    facts = run.facts
    if facts.uid == asker.uid:
        return run
    facts = msgspec.structs.replace(
        facts,
        user=None if "users" in asker.private else facts.user,
        account=None if "accounts" in asker.private else facts.account,
    )
    return msgspec.structs.replace(run, facts=facts)


def _private_standing(standing: Standing, asker: Asker, owners: dict[str, int | None]) -> Standing:
    shown = tuple(run for run in standing.unreached if asker.may_see(owners.get(run)))
    return msgspec.structs.replace(
        standing,
        unreached=shown,
        unreached_hidden=len(standing.unreached) - len(shown),
        names={run: name for run, name in standing.names.items() if run in shown},
    )


def _count(faults: list[str]) -> list[str]:
    if not faults:
        return []
    return [f"{len(faults)} {'faults' if len(faults) > 1 else 'fault'}; admins are told which"]
