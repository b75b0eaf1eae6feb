"""``python -m bench.chaos``: 2,000 random SIGKILLs, and one at every fsync and rename, into build/bench/chaos.json.

Nothing may be left capped, nothing lifted early, no journal entry may still hold a cap. Two more rows are without
persistence mode, with and without another program that holds the GPUs. Exit code 1 when anything is found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from testbed.chaos import calls, run
from testbed.chaos.judge import Violation
from testbed.chaos.node import Persistence

TARGET: Final = Path(__file__).resolve().parent.parent / "build/bench/chaos.json"
KILLS: Final = 2000
KILLS_WITHOUT_PERSISTENCE: Final = 200
NODES: Final = 4
_KINDS: Final = (
    "lifted_early",
    "left_capped",
    "unasked",
    "above_prior",
    "false_promise",
    "journal",
    "ratchet",
)


def main() -> int:
    """Kill, judge, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--calls", type=int, help="kill at so many system calls only, spread evenly")
    given = parser.parse_args()
    found: list[Violation] = []
    with tempfile.TemporaryDirectory(prefix="pfi-chaos-") as name:
        folder = Path(name)
        main_run = _play(folder / "on", given.seed, given.kills, "on", found)
        print(_line("persistence on", main_run))
        at_calls = _at_calls(folder / "calls", given.calls, found)
        print(f"at system calls: {at_calls['kills']} kills: {', '.join(calls.by_call(at_calls['by_call']))}")
        few = max(1, given.kills * KILLS_WITHOUT_PERSISTENCE // KILLS)
        rows = {}
        without: dict[str, Persistence] = {"second_holder": "held", "no_holder": "off"}
        for label, persistence in without.items():
            rows[label] = _play(folder / persistence, given.seed + 1, few, persistence, found)
            print(_line(f"persistence off, {label}", rows[label]))
    result = {**main_run, "calls": at_calls, "persistence_off": rows}
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(result, indent=2) + "\n")
    for violation in found:
        print(violation)
    print(f"written to {TARGET}")
    return 1 if found else 0


def _play(
    folder: Path, seed: int, kills: int, persistence: Persistence, found: list[Violation]
) -> dict[str, Any]:
    folder.mkdir()
    outcome = run.run(folder, seed=seed, kills=kills, nodes=NODES, persistence=persistence)
    found += outcome.violations
    row: dict[str, Any] = {
        "kills": outcome.kills,
        **{kind: outcome.count(kind) for kind in ("left_capped", "lifted_early")},
        "journal_entries": outcome.journal_entries,
        **{kind: outcome.count(kind) for kind in _KINDS[2:]},
        "seed": seed,
        "took_s": round(outcome.took_s, 1),
        "nodes": NODES,
        "plans": outcome.plans,
        "reports": outcome.reports,
        "rises_judged": outcome.rises,
        "killed": outcome.what,
        "last_audited_before": outcome.after,
        "agents_ended_by_themselves": outcome.ended_by_themselves,
    }
    if persistence != "on":
        row |= {"fell_to_default": outcome.fallen, "doctor": outcome.doctor}
    return row


def _at_calls(folder: Path, most: int | None, found: list[Violation]) -> dict[str, Any]:
    folder.mkdir()
    killed = calls.run(folder, most=most)
    found += killed.violations
    return {
        "kills": sum(killed.kills.values()),
        **{kind: sum(violation.kind == kind for violation in killed.violations) for kind in _KINDS},
        "by_call": killed.kills,
        "missed": [" ".join(map(str, point)) for point in killed.missed],
        "took_s": round(killed.took_s, 1),
    }


def _line(what: str, row: dict[str, Any]) -> str:
    return (
        f"{what}: {row['kills']} kills in {row['took_s']} s, {row['rises_judged']} rises judged; left capped "
        f"{row['left_capped']}, lifted early {row['lifted_early']}, journal entries {row['journal_entries']}"
    )


if __name__ == "__main__":
    sys.exit(main())
