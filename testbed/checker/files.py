"""Reading a run folder. Whatever cannot be read is a finding; only a half-written last line is forgiven."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from .verdict import Finding

FILES: Final = "files"

Record = dict[str, Any]
_T = TypeVar("_T")

# What must be there, and of which type, for a record to be judged. Other events are read past.
_NUMBER: Final = (int, float)
_REQUIRED: Final[Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    "site": {"nodes": dict, "unmanaged_mw": int, "response_s": _NUMBER},
    "limit": {"action": str, "id": str},
    "window": {"open": bool},
    "off": {"off": bool},
    "infeasible": {"shortfall_mw": int},
    "rebound": {"open": bool},
    "admitted": {"run": str},
    "plan_sent": {"node": str, "epoch": int, "seq": int, "mode": str, "steps": list},
    "plan_accepted": {"epoch": int, "seq": int},
    "plan_refused": {"epoch": int, "seq": int},
    "prior": {"uuid": str, "prior_mw": int},
    "set": {"uuid": str, "cap_mw": int, "reason": str},
    "readback": {"uuid": str, "requested_mw": int, "enforced_mw": int},
    "conflict": {"uuid": str, "found_mw": int},
    "run_seen": {"run": str, "gpus": list},
    "run_gone": {"run": str},
}


class LimitLine(NamedTuple):
    """A limit that came into force, from a trace."""

    mono_ns: int
    node: str
    uuid: str
    effective_mw: int
    requested_mw: int
    pid: int


class KernelLine(NamedTuple):
    """A kernel start, from a trace. ``job`` is ``<job id>.<restart>``, empty when the trace did not know."""

    mono_ns: int
    node: str
    uuid: str
    effective_mw: int
    job: str


class Snapshot(NamedTuple):
    requested_mw: int
    effective_mw: int


class Foreign(NamedTuple):
    """A write that the testbed made itself and declares."""

    node: str
    uuid: str
    mono_ns: int
    mw: int


@dataclass(slots=True)
class RunFolder:
    """All that was read, each list in the order of its instants."""

    path: Path
    nodes: tuple[str, ...]
    limits: list[LimitLine] = field(default_factory=list)
    kernels: list[KernelLine] = field(default_factory=list)
    node_audit: dict[str, list[Record]] = field(default_factory=dict)
    controller: list[Record] = field(default_factory=list)
    before: dict[tuple[str, str], Snapshot] = field(default_factory=dict)
    after: dict[tuple[str, str], Snapshot] = field(default_factory=dict)
    foreign: list[Foreign] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: int = 0

    def fault(self, text: str, node: str = "") -> None:
        self.findings.append(Finding(FILES, None, node, "", text))

    @property
    def first_ns(self) -> int:
        firsts = [
            records[0]["mono_ns"] for records in (*self.node_audit.values(), self.controller) if records
        ]
        firsts += [lines[0].mono_ns for lines in (self.limits, self.kernels) if lines]
        return min(firsts, default=0)

    @property
    def last_ns(self) -> int:
        lasts = [
            records[-1]["mono_ns"] for records in (*self.node_audit.values(), self.controller) if records
        ]
        lasts += [lines[-1].mono_ns for lines in (self.limits, self.kernels) if lines]
        return max(lasts, default=0)


def load_run(path: Path) -> RunFolder:
    """Read everything under ``path``. Never raises on what a file holds; ``findings`` says what is wrong."""
    layout, controller_path, problem = _layout(path)
    run = RunFolder(path=path, nodes=tuple(sorted(layout)))
    if problem:
        run.fault(problem)
    if not layout:
        run.fault(f"no node: neither {path}/nodes/<node>/ nor {path}/layout.json names one")
    for node in run.nodes:
        trace_path, audit_path = layout[node]
        _read_trace(run, node, trace_path)
        if audit_path.is_file():
            run.node_audit[node] = _read_audit(run, node, audit_path)
        else:
            run.node_audit[node] = []
            run.notes.append(f"{node} has no audit file: counted as a node without an agent")
    if controller_path.is_file():
        run.controller = _read_audit(run, "", controller_path)
        if not run.controller:
            run.fault(f"{controller_path}: the controller's audit is empty")
    else:
        run.fault(f"{controller_path}: the controller's audit is missing")
    run.limits.sort(key=lambda line: line.mono_ns)
    run.kernels.sort(key=lambda line: line.mono_ns)
    run.before = _read_snapshot(run, path / "before.json")
    run.after = _read_snapshot(run, path / "after.json")
    run.foreign = _read_foreign(run, path / "foreign.json")
    return run


def _layout(path: Path) -> tuple[dict[str, tuple[Path, Path]], Path, str]:
    """(node -> its trace and audit, the controller's audit, what is wrong with layout.json)."""
    controller = path / "controller" / "audit.jsonl"
    layout_file = path / "layout.json"
    if not layout_file.exists():
        folders = sorted((path / "nodes").glob("*")) if (path / "nodes").is_dir() else []
        return (
            {folder.name: (folder / "trace.jsonl", folder / "audit.jsonl") for folder in folders},
            controller,
            "",
        )
    try:
        raw = json.loads(layout_file.read_text())
        controller = path / raw.pop("controller", "controller/audit.jsonl")
        nodes = {node: (path / files["trace"], path / files["audit"]) for node, files in raw.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {}, controller, f"{layout_file}: not a layout: {error!r}"
    return nodes, controller, ""


def _read_lines(run: RunFolder, node: str, path: Path) -> list[Record]:
    """All JSON objects with an int ``mono_ns``; a last line without its newline is noted and left out."""
    try:
        data = path.read_bytes().decode(errors="replace")
    except OSError as error:
        run.fault(f"{path}: cannot be read: {error.strerror}", node)
        return []
    whole, _, half = data.rpartition("\n")
    if half:
        run.notes.append(f"{path}: a half-written last line of {len(half)} characters was left out")
    lines = whole.split("\n") if whole else []
    records: list[Record] = []
    for number, record in enumerate(_decode_all(lines), start=1):
        if isinstance(record, dict) and type(record.get("mono_ns")) is int:
            records.append(record)
        else:
            text = f"{path}:{number}: not a JSON object with an int mono_ns: {lines[number - 1][:80]!r}"
            run.fault(text, node)
    run.lines += len(records)
    return records


def _decode_all(lines: list[str]) -> list[Any]:
    """The value of each line, None where it is not JSON. All at once when all is well, which is far quicker."""
    try:
        values = json.loads(f"[{','.join(lines)}]")
    except ValueError:
        values = []
    if isinstance(values, list) and len(values) == len(lines):
        return values
    return [_decode(line) for line in lines]


def _decode(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _read_trace(run: RunFolder, node: str, path: Path) -> None:
    if not path.is_file():
        run.fault(f"{path}: the trace is missing", node)
        return
    limit_lines = 0
    for record in _read_lines(run, node, path):
        event = record.get("event")
        try:
            if event == "limit":
                limit_lines += 1
                numbers = (record["effective_mw"], record["requested_mw"], record["pid"])
                line = LimitLine(record["mono_ns"], node, record["uuid"], *numbers)
                if type(line.uuid) is not str or any(type(number) is not int for number in numbers):
                    raise TypeError(f"{record}")
                run.limits.append(line)
            elif event == "kernel":
                mono_ns, uuid, effective_mw = record["mono_ns"], record["uuid"], record["effective_mw"]
                job = record.get("job", "")
                if type(uuid) is not str or type(effective_mw) is not int or type(job) is not str:
                    raise TypeError(f"{record}")
                run.kernels.append(KernelLine(mono_ns, node, uuid, effective_mw, job))
        except (KeyError, TypeError) as error:
            run.fault(f"{path}: a {event} line lacks or misnames a field: {error}", node)
    if not limit_lines:
        run.fault(f"{path}: the trace has no limit line, so it proves nothing", node)


def _as(kind: type[_T], value: object) -> _T:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _read_audit(run: RunFolder, node: str, path: Path) -> list[Record]:
    records: list[Record] = []
    for record in _read_lines(run, node, path):
        wrong = _wrong_fields(record)
        if wrong:
            run.fault(f"{path}: {record.get('event')} at {record['mono_ns']}: {wrong}", node)
        else:
            records.append(record)
    records.sort(key=lambda record: record["mono_ns"])
    return records


def _wrong_fields(record: Record) -> str:
    event = record.get("event")
    if not isinstance(event, str):
        return "no event"
    for name, kind in _REQUIRED.get(event, {}).items():
        value = record.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"{name} is {value!r}"
    try:
        if event == "site":
            _check_nodes(record["nodes"])
        elif event == "limit" and record["action"] == "set":
            for start_ns, limit_mw in record["steps"]:
                _as(int, start_ns)
                _int_or_none(limit_mw)
        elif event == "rebound" and record["open"]:
            _check_rebound(record)
        elif event == "plan_sent":
            for step in record["steps"]:
                float(step["starts_in_s"])
                for cap_mw in (step["park_cap_mw"], *step["caps"].values()):
                    _int_or_none(cap_mw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"not as the format says: {error!r}"
    return ""


def _check_nodes(nodes: Mapping[str, Record]) -> None:
    for node in nodes.values():
        for name in ("gpus", "overhead_mw", "gpu_max_mw"):
            _as(int, node[name])
        _as(str, node["mode"])


def _check_rebound(record: Record) -> None:
    _int_or_none(record["limit_mw"])
    for name in ("from_mw", "rise_mw_per_s", "least_mw"):
        _as(int, record[name])
    for name in ("until_s", "ends_s"):
        float(record[name])


def _int_or_none(value: object) -> None:
    if value is not None:
        _as(int, value)


def _read_list(run: RunFolder, path: Path) -> list[Record]:
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        run.fault(f"{path}: cannot be read: {error.strerror}")
        return []
    except ValueError as error:
        run.fault(f"{path}: not JSON: {error}")
        return []
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        run.fault(f"{path}: not a list of objects")
        return []
    return raw


def _read_snapshot(run: RunFolder, path: Path) -> dict[tuple[str, str], Snapshot]:
    found: dict[tuple[str, str], Snapshot] = {}
    for item in _read_list(run, path):
        try:
            key = (_as(str, item["node"]), _as(str, item["uuid"]))
            found[key] = Snapshot(_as(int, item["requested_mw"]), _as(int, item["effective_mw"]))
        except (KeyError, TypeError) as error:
            run.fault(f"{path}: an entry is not as the format says: {error}")
    return found


def _read_foreign(run: RunFolder, path: Path) -> list[Foreign]:
    """A missing file means that nothing foreign is declared."""
    if not path.exists():
        return []
    found = []
    for item in _read_list(run, path):
        try:
            mono_ns, mw = _as(int, item["mono_ns"]), _as(int, item["mw"])
            found.append(Foreign(_as(str, item["node"]), _as(str, item["uuid"]), mono_ns, mw))
        except (KeyError, TypeError) as error:
            run.fault(f"{path}: an entry is not as the format says: {error}")
    return sorted(found, key=lambda write: write.mono_ns)
