"""``slurm-pfi node status`` for people: from what the agent answers, with JSON's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..units import format_duration, format_power


def status_lines(node: str, data: Mapping[str, Any]) -> list[str]:
    """The state of the node, one row for each GPU, what is wrong. A cap that is not wanted is ``-``, unknown ``?``."""
    held = data["held"]
    plan = f"plan {held['epoch']}/{held['seq']}, {data['mode']}" if held else "no plan"
    state = "released" if data["released"] else plan
    controller = "reached" if data["connected"] else "not reached"
    runs = counted(len(data["runs"]), "run")
    lines = [f"{node}: {data['summary']}", f"  {state}; controller {controller}; {runs}"]
    refused = data["last_refused"]
    if refused:
        age = format_duration(refused["age_s"])
        lines.append(f"  last refused: plan {refused['plan']}, {age} ago: {refused['reason']}")
    if data["settings"]["simulated"]:
        lines.append("  SIMULATED GPUs: these are figures of a simulation, not of hardware.")
    lines += [_gpu_line(gpu) for gpu in data["gpus"]]
    return lines + [f"  fault: {fault}" for fault in data["faults"]]


def _gpu_line(gpu: Mapping[str, Any]) -> str:
    place = "-" if gpu["position"] is None else str(gpu["position"])
    runs = ",".join(f"{run['job_id']}.{run['restart']}" for run in gpu["runs"]) or "-"
    cap = "-" if gpu["cap_mw"] is None else format_power(gpu["cap_mw"])
    return (
        f"  {place:>2}  {gpu['uuid']}  cap {cap:>6}  limit {format_power(gpu['enforced_mw']):>6}"
        f"  prior {format_power(gpu['prior_mw']):>6}  draw {format_power(gpu['draw_mw']):>6}  runs {runs}"
        + (f"  {gpu['fault']}" if gpu["fault"] else "")
    )


def counted(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
