"""A run by nothing but its tag, on a host without a controller: as values like the controller's, and in words. Pure.

What a tag alone does not tell is None in the values, and in words not said or said as not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..flex import FlexError, parse_flex
from ..slurm.tag import Tag, capped_text, find_tag, format_tag
from ..slurm.tagged import TaggedRun
from .clock import local_text
from .common import SIMULATED, percent
from .jobs import job_text
from .status import folded
from .tables import Column, plain

ROW_UNKNOWN: Final = (
    *("user_flex", "flex_source", "max_loss", "cap_mw", "target_cap_mw", "floor_mw", "floor_passed"),
    *("draw_mw", "shares", "baseline_draw_mw", "baseline", "rate_per_s", "baseline_rate_per_s", "loss"),
    *("disputed", "expected_loss", "known_s", "tag_trouble"),
)
JOB_UNKNOWN: Final = (
    *("uid", "gpu_model", "prior_mw", "mode", "default_flex", "first_seen_unix_s"),
    *("baseline_rate", "baseline_sd", "reporting", "unit", "doubt", "measured", "shared_capped", "learned"),
    *("expected_loss_sd", "curve", "by_curves", "by_activity", "limit", "asked_unix_s", "events"),
    *("events_trouble", "other_runs", "deadline", "given_s", "raise_note"),
)
COST_UNKNOWN: Final = (
    *("known_s", "drawn_wh", "done", "lost", "lost_low", "lost_high", "loss_capped", "loss_capped_low"),
    *("loss_capped_high", "longer_s", "longer_low_s", "longer_high_s"),
)
NO_TAG: Final = (
    "it has no tag: a job is tagged some 30 s after it began on a GPU node, where the site tags jobs"
)
OLD_TAG: Final = "its tag is of another run, and tells nothing of this one"
TAG_TO_COME: Final = "its tag is not known here: the accounting has it only once the job has ended"
_MINUTE_S: Final = 60
_PFI: Final = {
    "measured": "measured on this run",
    "predicted": "predicted from its telemetry",
    "declared": "declared by the site for this partition, not measured",
    "default": "of curves of other jobs, not measured on this one",
}

_Told = Mapping[str, Any]


def tag_of(run: TaggedRun) -> tuple[Tag | None, str]:
    """The tag that was written for this very run, or None and why. AdminComment outlives a requeue."""
    tag = find_tag(run.admin_comment)
    if tag is None:
        return None, NO_TAG if run.has_ended or run.source == "squeue" else TAG_TO_COME
    if run.restart is not None and run.restart != tag.restart:
        return None, OLD_TAG
    started = run.start_unix_s if isinstance(run.start_unix_s, int) else None
    if run.state == "PENDING" or (started is not None and tag.at_unix_s + _MINUTE_S <= started):
        return None, OLD_TAG
    return tag, ""


def row_of(run: TaggedRun) -> dict[str, Any]:
    """The run as a row of ``jobs``."""
    tag, note = tag_of(run)
    over = run.has_ended
    return {
        **dict.fromkeys(ROW_UNKNOWN),
        "source": run.source,
        "run": f"{run.cluster}:{run.job_id}.{run.restart}"
        if run.cluster and run.restart is not None
        else None,
        "job_id": run.job_id,
        "restart": run.restart,
        "spec": run.spec,
        "user": run.user or None,
        "partition": run.partition or None,
        "state": "ended" if over else None,
        "slurm_state": run.state,
        "note": note,
        "nodes": list(run.nodes),
        "gpus": run.gpus,
        "flex": None if tag is None else tag.flex,
        "max_loss": None if tag is None else _max_loss(tag.flex),
        "tag": None if tag is None else format_tag(tag),
        "simulated": None if tag is None else tag.simulated,
        "tag_unix_s": None if tag is None else tag.at_unix_s,
        "start_unix_s": run.start_unix_s if isinstance(run.start_unix_s, int) else None,
        "ended_unix_s": run.end_unix_s if over and isinstance(run.end_unix_s, int) else None,
        "cost": _cost(tag),
    }


def view_of(run: TaggedRun) -> dict[str, Any]:
    """The run as ``job`` tells it."""
    tag, _ = tag_of(run)
    return {
        **dict.fromkeys(JOB_UNKNOWN),
        **row_of(run),
        "name": run.name or None,
        "account": run.account or None,
        "pfi": None
        if tag is None
        else {
            "value": tag.pfi,
            "low": tag.pfi_low,
            "high": tag.pfi_high,
            "source": tag.source,
            "grid_w": [float(w) for w in range(tag.grid_low_w, tag.grid_high_w + 1, max(1, tag.grid_step_w))],
        },
    }


def _max_loss(flex: str) -> float | None:
    """None for ``auto``: what the site made of it is not in the tag."""
    if flex == "auto":
        return None
    try:
        return parse_flex(flex).max_loss
    except FlexError:
        return None


def _cost(tag: Tag | None) -> dict[str, Any]:
    return {
        **dict.fromkeys(COST_UNKNOWN),
        "capped_s": None if tag is None else tag.capped_s,
        "saved_wh": None if tag is None or tag.energy_wh is None else -tag.energy_wh,
        "loss": None if tag is None else tag.loss,
    }


# ------------------------------------------------------------------------------------------------ in words


def head_lines(told: _Told) -> list[str]:
    """Who, where and since when."""
    gpus = {None: "GPUs not known", 1: "1 GPU"}.get(told["gpus"], f"{told['gpus']} GPUs")
    where = f"{gpus} on {folded(told['nodes'])}" if told["nodes"] else ""
    about = [where, *(f"{key} {told[key]}" for key in ("partition", "account") if told[key])]
    lines = [
        f"job {job_text(told)} of {told['user'] or 'a user not known'}: {_state(told)}",
        ", ".join(part for part in about if part),
        f"name {told['name']}" if told["name"] else "",
        "" if told["start_unix_s"] is None else f"began {local_text(told['start_unix_s'])}",
    ]
    if told["tag_unix_s"] is not None:
        lines.append(f"by its tag of {local_text(told['tag_unix_s'])}")
    if told["simulated"]:
        lines.append(SIMULATED)
    return [plain(line) for line in lines if line]


def _state(told: _Told) -> str:
    if told["ended_unix_s"] is None:
        return _slurm_state(told)
    return f"ended at {local_text(told['ended_unix_s'])}, {_slurm_state(told)}"


def _slurm_state(told: _Told) -> str:
    return str(told["slurm_state"]).lower().replace("_", " ")


def tag_sections(told: _Told) -> list[tuple[str, list[str]]]:
    """What the tag tells, under the headings of ``slurm-pfi job``."""
    pfi, cost = told["pfi"], told["cost"]
    if pfi is None:
        return [("Known", [f"nothing: {told['note']}"])]
    between = "" if pfi["low"] is None or pfi["high"] is None else f" ({pfi['low']:.2f} to {pfi['high']:.2f})"
    known = (
        f"PFI {pfi['value']:.2f}{between} on caps of {min(pfi['grid_w']):.0f} to {max(pfi['grid_w']):.0f} W, "
        f"{_PFI[pfi['source']]}: 1 % of its throughput gives about {pfi['value']:.1f} % of its power"
    )
    capped_s = cost["capped_s"]
    done = f"caps held it down for {capped_text(capped_s)}" if capped_s else "nothing: no cap has bound it"
    return [
        ("Asked", [f"granted {told['flex']}"]),
        ("Known", [known]),
        ("Done", [done]),
        ("Cost", [_loss_line(cost)]),
        ("Saved", [_saved_line(cost["saved_wh"])]),
    ]


def _loss_line(cost: _Told) -> str:
    if cost["loss"] is None:
        return "not known: the job reports no progress, or nothing of it is known without a cap"
    return f"{percent(cost['loss'])} of its throughput since its start, by its own counter"


def _saved_line(saved_wh: float | None) -> str:
    if saved_wh is None:
        return "not known"
    if saved_wh < 0:
        return f"nothing: {-saved_wh:,.0f} Wh more than without caps, all its GPUs"
    return f"{saved_wh:,.0f} Wh, all its GPUs"


def _saved(row: _Told) -> str:
    saved_wh = row["cost"]["saved_wh"]
    return "?" if saved_wh is None else f"{saved_wh:,.0f} Wh"


def _capped(row: _Told) -> str:
    capped_s = row["cost"]["capped_s"]
    return "?" if capped_s is None else f"{capped_s / 60:.0f} min" if capped_s else "-"


def _tagged(row: _Told) -> str:
    return "no tag" if row["tag_unix_s"] is None else local_text(row["tag_unix_s"])[:16]


COLUMNS: Final = (
    Column("JOB", job_text, side="right"),
    Column("USER", lambda row: row["user"] or "?", clip=5, drop=2),
    Column("STATE", _slurm_state, clip=7),
    Column("NODES", lambda row: folded(row["nodes"]) if row["nodes"] else "-", clip=6, drop=4),
    Column("GPUS", lambda row: "?" if row["gpus"] is None else str(row["gpus"]), side="right", drop=5),
    Column("FLEX", lambda row: row["flex"] or "?", side="right"),
    Column("LOSS", lambda row: percent(row["cost"]["loss"]), side="right"),
    Column("SAVED", _saved, side="right"),
    Column("CAPPED", _capped, side="right"),
    Column("TAGGED", _tagged, drop=3),
)
