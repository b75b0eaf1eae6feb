"""The checker passes a correct run and finds each planted violation."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.checker import Verdict, check_run
from testbed.checker.__main__ import main
from testbed.checker.steps import UNBOUNDED, Steps

W = 1000
BASE_NS = 7_000_000_000_000
GPUS = {"n1": ("GPU-a", "GPU-b"), "n2": ("GPU-c", "GPU-d")}
PRIOR = {"GPU-a": 700, "GPU-b": 700, "GPU-c": 700, "GPU-d": 650}
AGENT_PID, USER_PID = 77, 99


def ns(at_s: float) -> int:
    return BASE_NS + round(at_s * 1e9)


@dataclass
class Scene:
    """A run as its files tell it. ``doing`` methods append what correct daemons would."""

    trace: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {node: [] for node in GPUS})
    audit: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {node: [] for node in GPUS})
    controller: list[dict[str, Any]] = field(default_factory=list)
    foreign: list[dict[str, Any]] = field(default_factory=list)
    after: dict[str, int] = field(default_factory=lambda: dict(PRIOR))
    seq: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GPUS, 0))
    tail: dict[str, str] = field(default_factory=dict)

    def say(self, at_s: float, event: str, **fields: Any) -> None:
        entry = {"mono_ns": ns(at_s), "unix_s": at_s, "actor": "controller", "event": event, **fields}
        self.controller.append(entry)

    def tell(self, at_s: float, node: str, event: str, **fields: Any) -> None:
        entry = {"mono_ns": ns(at_s), "unix_s": at_s, "actor": f"node:{node}", "event": event, **fields}
        self.audit[node].append(entry)

    def force(self, at_s: float, node: str, uuid: str, cap_w: int, pid: int = AGENT_PID) -> None:
        line = {"mono_ns": ns(at_s), "event": "limit", "uuid": uuid, "pid": pid}
        self.trace[node].append({**line, "effective_mw": cap_w * W, "requested_mw": cap_w * W})

    def kernel(self, at_s: float, node: str, uuid: str, cap_w: int, job: str) -> None:
        line = {"mono_ns": ns(at_s), "event": "kernel", "uuid": uuid, "pid": USER_PID, "job": job}
        self.trace[node].append({**line, "effective_mw": cap_w * W})

    def send(
        self,
        at_s: float,
        node: str,
        park_w: int | None,
        caps: dict[str, int | None],
        accepted: bool = True,
        later: tuple[float, int | None, dict[str, int | None]] | None = None,
    ) -> None:
        steps = [(0.0, park_w, caps), *([later] if later else [])]
        self.seq[node] += 1
        self.say(
            at_s,
            "plan_sent",
            node=node,
            epoch=1,
            seq=self.seq[node],
            answers_seq=1,
            mode="enforce",
            reason="test",
            steps=[
                {
                    "starts_in_s": starts_in_s,
                    "park_cap_mw": None if park is None else park * W,
                    "caps": {run: None if cap is None else cap * W for run, cap in step_caps.items()},
                }
                for starts_in_s, park, step_caps in steps
            ],
        )
        if accepted:
            self.tell(at_s + 0.01, node, "plan_accepted", epoch=1, seq=self.seq[node], reason="")

    def cap(self, at_s: float, node: str, uuid: str, cap_w: int, reason: str = "plan", run: str = "") -> None:
        self.tell(
            at_s, node, "set", uuid=uuid, cap_mw=cap_w * W, reason=reason, run=run, prior_mw=PRIOR[uuid] * W
        )
        self.force(at_s + 0.001, node, uuid, cap_w)
        self.read(at_s + 0.002, node, uuid, cap_w)

    def read(self, at_s: float, node: str, uuid: str, cap_w: int) -> None:
        values = dict.fromkeys(("requested_mw", "enforced_mw", "cap_mw"), cap_w * W)
        self.tell(at_s, node, "readback", uuid=uuid, **values)

    def limit(self, at_s: float, limit_w: int, start_s: float | None = None, name: str = "L") -> None:
        steps = [[ns(at_s if start_s is None else start_s), limit_w * W]]
        self.say(at_s, "limit", action="set", id=name, revision=1, source="test", uid=0, steps=steps)

    def write(self, folder: Path) -> Path:
        for node in GPUS:
            (folder / "nodes" / node).mkdir(parents=True)
            for name, lines in (("trace", self.trace[node]), ("audit", self.audit[node])):
                path = folder / "nodes" / node / f"{name}.jsonl"
                path.write_text("".join(json.dumps(line) + "\n" for line in lines) + self.tail.get(node, ""))
        (folder / "controller").mkdir()
        (folder / "controller" / "audit.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in self.controller)
        )
        for name, values in (("before", PRIOR), ("after", self.after)):
            entries = [
                {
                    "node": node,
                    "uuid": uuid,
                    "requested_mw": values[uuid] * W,
                    "effective_mw": values[uuid] * W,
                }
                for node, uuids in GPUS.items()
                for uuid in uuids
            ]
            (folder / f"{name}.json").write_text(json.dumps(entries))
        if self.foreign:
            (folder / "foreign.json").write_text(json.dumps(self.foreign))
        return folder


def opened() -> Scene:
    """Two runs; at 5 s a limit of 4200 W. GPUs get 1700 W: 2 x 400 for run 10, 600 for run 11, GPU-d parked at 200."""
    scene = Scene()
    nodes = {
        node: {"gpus": 2, "overhead_mw": 1000 * W, "gpu_max_mw": 700 * W, "mode": "enforce"} for node in GPUS
    }
    for node, uuids in GPUS.items():
        for uuid in uuids:
            scene.force(0.0, node, uuid, PRIOR[uuid], pid=1)
            scene.tell(0.1, node, "prior", uuid=uuid, prior_mw=PRIOR[uuid] * W, how="read")
    scene.say(0.2, "site", cluster="c", nodes=nodes, unmanaged_mw=500 * W, reserve_mw=0, response_s=2.0)
    scene.tell(1.0, "n1", "run_seen", run="c:10.0", gpus=["GPU-a", "GPU-b"], reason="")
    scene.tell(1.0, "n2", "run_seen", run="c:11.0", gpus=["GPU-c"], reason="")
    for run, node in (("c:10.0", "n1"), ("c:11.0", "n2")):
        scene.say(1.1, "admitted", run=run, nodes=[node], flex="medium", user_flex="medium")
    for node, uuid, job in (("n1", "GPU-a", "10.0"), ("n1", "GPU-b", "10.0"), ("n2", "GPU-c", "11.0")):
        scene.kernel(1.2, node, uuid, 700, job)
    scene.limit(5.0, 4200)
    scene.send(5.01, "n1", 200, {"c:10.0": 400})
    scene.send(5.02, "n2", 200, {"c:11.0": 600})
    scene.cap(5.03, "n1", "GPU-a", 400, run="c:10.0")
    scene.cap(5.04, "n1", "GPU-b", 400, run="c:10.0")
    scene.cap(5.05, "n2", "GPU-c", 600, run="c:11.0")
    scene.cap(5.06, "n2", "GPU-d", 200, "park")
    return scene


def in_window(scene: Scene) -> Scene:
    """Run 10 gets the 100 W left; run 12 starts on GPU-d, run 11 makes room for it, then ends."""
    scene.send(8.0, "n1", 200, {"c:10.0": 450})
    scene.cap(8.03, "n1", "GPU-a", 450, run="c:10.0")
    scene.cap(8.04, "n1", "GPU-b", 450, run="c:10.0")
    scene.kernel(9.0, "n2", "GPU-d", 200, "12.0")
    scene.tell(9.01, "n2", "run_seen", run="c:12.0", gpus=["GPU-d"], reason="")
    scene.send(9.1, "n2", 200, {"c:11.0": 500})
    scene.cap(9.13, "n2", "GPU-c", 500, run="c:11.0")
    scene.say(9.2, "admitted", run="c:12.0", nodes=["n2"], flex="low", user_flex="low")
    scene.send(9.21, "n2", 200, {"c:11.0": 500, "c:12.0": 300})
    scene.cap(9.24, "n2", "GPU-d", 300, run="c:12.0")
    scene.kernel(9.3, "n2", "GPU-d", 300, "12.0")
    scene.tell(10.0, "n2", "run_gone", run="c:11.0", gpus=["GPU-c"], reason="epilog")
    scene.cap(10.01, "n2", "GPU-c", 200, "park")
    return scene


def closed(scene: Scene) -> Scene:
    """At 12 s the limit is cleared and everything goes back."""
    scene.say(12.0, "limit", action="clear", id="L", revision=2, source="test", uid=0, steps=[])
    scene.send(12.01, "n1", None, {"c:10.0": None})
    scene.send(12.02, "n2", None, {"c:12.0": None})
    for at, (node, uuid) in enumerate((node, uuid) for node, uuids in GPUS.items() for uuid in uuids):
        scene.cap(12.1 + at / 100, node, uuid, PRIOR[uuid], "restore: window closed")
    scene.say(13.0, "window", open=False, limit_mw=None, budget_mw=None, committed_mw=None)
    return scene


def clean() -> Scene:
    return closed(in_window(opened()))


def broken(verdict: Verdict) -> set[str]:
    return {result.invariant for result in verdict.results if not result.holds}


def judge(scene: Scene, folder: Path) -> Verdict:
    return check_run(scene.write(folder))


def test_a_correct_run_passes_and_says_what_was_checked(tmp_path: Path) -> None:
    verdict = judge(clean(), tmp_path)
    assert verdict.holds, verdict.text()
    assert not verdict.unchecked(("files", "1", "2", "3", "7", "9", "placement"))
    # 2 x 450 + 600 + 200 and, for a moment at 9.24 s, 2 x 450 + 500 + 300: both exactly the 1700 W that there are.
    assert verdict.result("1").margin_mw == 0
    assert verdict.result("9").checked == 13
    assert "under 4200 W 0.061 s after it came into force" in verdict.result("1").notes
    assert "holds" in verdict.text() and "worst margin 0 W" in verdict.text()


def test_the_command_line_says_no_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = clean().write(tmp_path / "good")
    bad_scene = clean()
    bad_scene.after["GPU-a"] = 450
    bad = bad_scene.write(tmp_path / "bad")
    assert main([str(good), "--require", "1,3,9"]) == 0
    assert "all that was checked holds" in capsys.readouterr().out
    assert main([str(bad), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is False
    assert [result["invariant"] for result in report["results"] if not result["holds"]] == ["3"]


def test_a_required_check_with_nothing_to_check_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = opened()
    scene.controller = [entry for entry in scene.controller if entry["event"] in ("site", "admitted")]
    for node in GPUS:
        scene.audit[node] = [entry for entry in scene.audit[node] if entry["event"] in ("prior", "run_seen")]
        scene.trace[node] = [line for line in scene.trace[node] if line["mono_ns"] < ns(5)]
    folder = scene.write(tmp_path)
    assert main([str(folder)]) == 0
    assert "nothing to check: no instants under a limit" in capsys.readouterr().out
    assert main([str(folder), "--require", "1"]) == 1


# ------------------------------------------------------------------------------------------------ planted violations


def test_a_raise_before_the_lowering_it_needs(tmp_path: Path) -> None:
    scene = in_window(opened())
    # Run 12 gets its 100 W while run 11 has been told, but not been read back.
    plan = next(entry for entry in scene.controller if entry.get("seq") == 3 and entry["node"] == "n2")
    plan["mono_ns"] = ns(9.12)
    admitted = next(entry for entry in scene.controller if entry.get("run") == "c:12.0")
    admitted["mono_ns"] = ns(9.115)
    accepted = next(e for e in scene.audit["n2"] if e["event"] == "plan_accepted" and e["seq"] == 3)
    accepted["mono_ns"] = ns(9.125)
    verdict = judge(closed(scene), tmp_path)
    assert broken(verdict) == {"2"}, verdict.text()
    assert "raises by 100 W while the worst case is 100 W above 4200 W" in verdict.findings[0].text


def test_a_plan_above_a_prior_limit_asks_for_no_more_than_that(tmp_path: Path) -> None:
    """GPU-d goes no higher than its 650 W, and the limit has room for just that."""
    scene = in_window(opened())
    scene.limit(10.5, 2500 + 450 + 450 + 200 + 650, name="L")
    scene.send(11.0, "n2", 200, {"c:12.0": 700})
    scene.cap(11.03, "n2", "GPU-d", 650, run="c:12.0")
    verdict = judge(closed(scene), tmp_path)
    assert verdict.result("2").holds, verdict.text()


def test_a_raise_that_comes_into_force_too_early(tmp_path: Path) -> None:
    scene = in_window(opened())
    late = next(line for line in scene.trace["n2"] if line["mono_ns"] == ns(9.131))
    late["mono_ns"] = ns(9.26)  # the lowering of run 11: 20 ms after the raise of run 12
    verdict = judge(closed(scene), tmp_path)
    assert broken(verdict) == {"1"}, verdict.text()
    (finding,) = verdict.findings
    assert finding.mono_ns == ns(9.241)
    assert "exceed 4200 W by 100.000 W" in finding.text and "0.019 s" in finding.text
    assert verdict.result("1").margin_mw == -100 * W


def test_a_cap_lowered_a_moment_ago_may_come_again_somewhat_higher(tmp_path: Path) -> None:
    """The controller has not heard of the lowering yet, so the second plan raises nothing that it knows of."""
    for heard_s, holds in ((0.2, True), (4.0, False)):
        scene = opened()
        scene.limit(6.0, 3500)
        scene.send(6.01, "n1", 200, {"c:10.0": 200})
        scene.cap(6.03, "n1", "GPU-a", 200, run="c:10.0")
        scene.cap(6.04, "n1", "GPU-b", 200, run="c:10.0")
        scene.send(6.05 + heard_s, "n1", 200, {"c:10.0": 220})
        verdict = judge(closed(scene), tmp_path / str(heard_s))
        assert ("raises by 40 W" in verdict.text()) is not holds, verdict.text()


def test_a_forgotten_raise_that_was_never_acknowledged(tmp_path: Path) -> None:
    scene = opened()
    scene.send(8.0, "n1", 200, {"c:10.0": 450}, accepted=False)
    scene.send(8.5, "n2", 200, {"c:11.0": 700})
    scene.cap(8.6, "n2", "GPU-c", 700, run="c:11.0")
    scene.say(12.0, "limit", action="clear", id="L", revision=2, steps=[])
    scene.seq["n1"] += 1
    for at, (node, uuid) in enumerate((node, uuid) for node, uuids in GPUS.items() for uuid in uuids):
        scene.cap(12.1 + at / 100, node, uuid, PRIOR[uuid], "restore: window closed")
    verdict = judge(scene, tmp_path)
    assert broken(verdict) == {"2"}, verdict.text()
    assert verdict.findings[0].node == "n2"


def test_a_lowering_that_never_came(tmp_path: Path) -> None:
    scene = opened()
    scene.audit["n2"] = [entry for entry in scene.audit["n2"] if entry["mono_ns"] < ns(5.05)]
    scene.trace["n2"] = [line for line in scene.trace["n2"] if line["mono_ns"] < ns(5)]
    verdict = judge(closed(scene), tmp_path)
    assert broken(verdict) == {"1"}, verdict.text()
    assert verdict.findings[0].mono_ns == ns(7.0)  # the limit's start and response_s
    assert "by 450.000 W" in verdict.findings[0].text


@pytest.mark.parametrize(("said_w", "holds"), [(450, True), (449, False)])
def test_a_shortfall_that_was_said_covers_its_excess_and_no_more(
    tmp_path: Path, said_w: int, holds: bool
) -> None:
    scene = opened()
    scene.say(5.5, "infeasible", shortfall_mw=said_w * W, silent=["n2"])
    scene.audit["n2"] = [entry for entry in scene.audit["n2"] if entry["mono_ns"] < ns(5.05)]
    scene.trace["n2"] = [line for line in scene.trace["n2"] if line["mono_ns"] < ns(5)]
    verdict = judge(closed(scene), tmp_path)
    assert broken(verdict) == (set() if holds else {"1"}), verdict.text()


def test_a_shortfall_covers_nothing_once_all_that_is_committed_fits_again(tmp_path: Path) -> None:
    scene = opened()
    scene.say(5.5, "infeasible", shortfall_mw=600 * W, silent=[])
    scene.say(6.0, "window", open=True, limit_mw=4200 * W, budget_mw=1700 * W, committed_mw=1600 * W)
    scene.audit["n2"] = [entry for entry in scene.audit["n2"] if entry["mono_ns"] < ns(5.05)]
    scene.trace["n2"] = [line for line in scene.trace["n2"] if line["mono_ns"] < ns(5)]
    verdict = judge(closed(scene), tmp_path)
    assert verdict.result("1").findings[0].mono_ns == ns(
        8.0
    )  # what was owed until 6 s counts for response_s more


def test_a_restore_in_the_window(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.cap(10.5, "n2", "GPU-c", 700, "restore: run gone")
    verdict = judge(closed(scene), tmp_path)
    assert {"3"} <= broken(verdict) <= {"1", "3"}, verdict.text()
    (finding,) = verdict.result("3").findings
    assert (finding.uuid, finding.mono_ns) == ("GPU-c", ns(10.501))
    assert "plans in force allow 200 W, it has no admitted run" in finding.text


def test_a_restore_at_the_known_end_of_the_schedule_is_right(tmp_path: Path) -> None:
    scene = opened()
    scene.send(6.0, "n1", 200, {"c:10.0": 400}, later=(4.0, None, {"c:10.0": None}))
    scene.say(9.9, "limit", action="set", id="L", revision=2, steps=[[ns(5), 5400 * W]])  # extended, cut off
    scene.cap(10.05, "n1", "GPU-a", 700, "restore: schedule ended", run="c:10.0")
    assert judge(closed(scene), tmp_path / "after").result("3").holds
    early = opened()
    early.send(6.0, "n1", 200, {"c:10.0": 400}, later=(4.0, None, {"c:10.0": None}))
    early.cap(9.0, "n1", "GPU-a", 700, "restore: schedule ended", run="c:10.0")
    assert "3" in broken(judge(closed(early), tmp_path / "before"))


def test_a_raise_for_a_run_that_is_not_admitted(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.controller = [entry for entry in scene.controller if entry.get("run") != "c:12.0"]
    verdict = judge(closed(scene), tmp_path)
    assert broken(verdict) == {"3", "placement"}, verdict.text()
    assert "ran at 300 W, above the park cap of 200 W" in verdict.result("placement").findings[0].text


@pytest.mark.parametrize(("end_w", "says"), [(450, "left capped below its prior"), (720, "above its prior")])
def test_a_limit_that_does_not_go_back(tmp_path: Path, end_w: int, says: str) -> None:
    scene = clean()
    scene.cap(12.5, "n1", "GPU-a", end_w, "restore: wrong", run="c:10.0")
    scene.after["GPU-a"] = end_w
    verdict = judge(scene, tmp_path)
    assert broken(verdict) == {"3"}, verdict.text()
    assert says in verdict.findings[0].text


def test_a_prior_of_650_restored_to_the_default_is_found(tmp_path: Path) -> None:
    scene = clean()
    scene.cap(12.5, "n2", "GPU-d", 700, "restore: default")
    scene.after["GPU-d"] = 700
    assert broken(judge(scene, tmp_path)) == {"3"}


def test_a_snapshot_that_the_trace_contradicts(tmp_path: Path) -> None:
    scene = clean()
    scene.cap(12.5, "n1", "GPU-a", 450, "plan")  # the trace ends capped, the snapshot says restored
    verdict = judge(scene, tmp_path)
    assert broken(verdict) == {"3"}
    assert "the trace ends at 450 W" in verdict.findings[0].text


def test_a_run_cut_off_in_a_window_is_not_judged_on_what_it_leaves(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.after = {"GPU-a": 450, "GPU-b": 450, "GPU-c": 200, "GPU-d": 300}
    verdict = judge(scene, tmp_path)
    assert verdict.holds
    assert "still open" in verdict.result("3").notes[0]


def test_an_unaudited_set(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.audit["n1"] = [e for e in scene.audit["n1"] if e["event"] != "set" or e["mono_ns"] != ns(8.03)]
    verdict = judge(closed(scene), tmp_path)
    assert broken(verdict) == {"9"}, verdict.text()
    (finding,) = verdict.findings
    assert (finding.node, finding.uuid, finding.mono_ns) == ("n1", "GPU-a", ns(8.031))


@pytest.mark.parametrize("moved_s", [8.0315, 3.0])
def test_a_set_after_its_change_or_too_long_before_explains_nothing(tmp_path: Path, moved_s: float) -> None:
    scene = in_window(opened())
    entry = next(e for e in scene.audit["n1"] if e["event"] == "set" and e["mono_ns"] == ns(8.03))
    entry["mono_ns"] = ns(moved_s)
    assert "9" in broken(judge(closed(scene), tmp_path))


def test_one_set_explains_one_change_only(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.force(8.5, "n1", "GPU-a", 440)
    scene.foreign.append({"node": "n1", "uuid": "GPU-a", "mono_ns": ns(8.5), "mw": 440 * W})
    scene.force(8.6, "n1", "GPU-a", 450)
    verdict = judge(closed(scene), tmp_path)
    assert [finding.mono_ns for finding in verdict.result("9").findings] == [ns(8.6)]


def test_a_second_set_before_the_first_ones_effect_leaves_both_explained(tmp_path: Path) -> None:
    scene = in_window(opened())
    for at_s, cap_w in ((8.5, 430), (8.51, 440)):
        scene.tell(
            at_s, "n1", "set", uuid="GPU-a", cap_mw=cap_w * W, reason="plan", run="c:10.0", prior_mw=700 * W
        )
    scene.force(8.53, "n1", "GPU-a", 430)
    scene.trace["n1"][-1]["requested_mw"] = 440 * W
    scene.force(8.54, "n1", "GPU-a", 440)
    scene.read(8.55, "n1", "GPU-a", 440)
    verdict = judge(closed(scene), tmp_path)
    assert verdict.holds, verdict.text()


def test_a_set_without_reason_and_one_without_plan(tmp_path: Path) -> None:
    scene = in_window(opened())
    entry = next(e for e in scene.audit["n1"] if e["event"] == "set" and e["mono_ns"] == ns(8.04))
    entry["reason"] = " "
    verdict = judge(closed(scene), tmp_path / "reason")
    assert broken(verdict) == {"9"} and "without a reason" in verdict.findings[0].text
    scene = opened()
    scene.audit["n1"] = [e for e in scene.audit["n1"] if e["event"] != "plan_accepted"]
    verdict = judge(closed(scene), tmp_path / "plan")
    assert "accepted no plan" in verdict.result("9").findings[0].text


def test_a_foreign_write_must_be_declared_and_reported(tmp_path: Path) -> None:
    def poked() -> Scene:
        scene = in_window(opened())
        scene.force(8.5, "n1", "GPU-a", 300, pid=USER_PID)
        return scene

    assert broken(judge(closed(poked()), tmp_path / "undeclared")) == {"9"}
    scene = poked()
    scene.foreign.append({"node": "n1", "uuid": "GPU-a", "mono_ns": ns(8.4), "mw": 300 * W})
    scene.tell(25.0, "n1", "stopped", reason="SIGTERM")
    verdict = judge(closed(scene), tmp_path / "unreported")
    assert broken(verdict) == {"7"}, verdict.text()
    scene = poked()
    scene.foreign.append({"node": "n1", "uuid": "GPU-a", "mono_ns": ns(8.4), "mw": 300 * W})
    scene.tell(9.5, "n1", "conflict", uuid="GPU-a", ours_mw=450 * W, found_mw=300 * W)
    scene.tell(25.0, "n1", "stopped", reason="SIGTERM")
    verdict = judge(closed(scene), tmp_path / "reported")
    assert verdict.holds, verdict.text()
    assert "1 conflicts reported" in verdict.result("7").notes[0]


@pytest.mark.parametrize(
    ("at_s", "found_w", "holds"), [(8.45, 300, True), (8.35, 300, False), (8.45, 690, False)]
)
def test_a_conflict_counts_from_the_write_on_and_for_its_value(
    tmp_path: Path, at_s: float, found_w: int, holds: bool
) -> None:
    """The agent may see what was asked for before it comes into force."""
    scene = in_window(opened())
    scene.force(8.5, "n1", "GPU-a", 300, pid=USER_PID)
    scene.foreign.append({"node": "n1", "uuid": "GPU-a", "mono_ns": ns(8.4), "mw": 300 * W})
    scene.tell(at_s, "n1", "conflict", uuid="GPU-a", ours_mw=450 * W, found_mw=found_w * W)
    scene.tell(25.0, "n1", "stopped", reason="SIGTERM")
    verdict = judge(closed(scene), tmp_path)
    assert verdict.result("7").holds is holds, verdict.text()


def test_a_foreign_write_on_a_resting_gpu_becomes_its_prior_and_one_over_our_cap_does_not(
    tmp_path: Path,
) -> None:
    def poked(at_s: float, end_w: int) -> Scene:
        scene = opened()
        scene.force(at_s, "n1", "GPU-b", 380, pid=USER_PID)
        scene.foreign.append({"node": "n1", "uuid": "GPU-b", "mono_ns": ns(at_s), "mw": 380 * W})
        scene.tell(at_s + 0.5, "n1", "conflict", uuid="GPU-b", ours_mw=400 * W, found_mw=380 * W)
        if at_s > 5:
            scene.cap(at_s + 1, "n1", "GPU-b", 400, run="c:10.0")
        closed(scene)
        scene.cap(12.5, "n1", "GPU-b", end_w, "restore: window closed")
        scene.after["GPU-b"] = end_w
        return scene

    for at_s, end_w, holds in ((3.0, 380, True), (3.0, 700, False), (6.0, 700, True), (6.0, 380, False)):
        verdict = judge(poked(at_s, end_w), tmp_path / f"{at_s}-{end_w}")
        assert verdict.result("3").holds is holds, verdict.text()


def test_a_released_node_may_restore_in_the_window_and_only_until_it_is_resumed(tmp_path: Path) -> None:
    scene = opened()
    scene.tell(6.0, "n2", "released", reason="admin")
    scene.cap(6.1, "n2", "GPU-c", 700, "restore: released")
    scene.tell(6.2, "n2", "resumed", reason="admin")
    scene.cap(6.3, "n2", "GPU-d", 650, "restore: released")
    verdict = judge(closed(scene), tmp_path)
    assert [finding.uuid for finding in verdict.result("3").findings] == ["GPU-d"], verdict.text()


def test_nothing_is_owed_while_everything_is_off(tmp_path: Path) -> None:
    scene = opened()
    scene.say(6.0, "off", off=True)
    scene.send(6.01, "n1", None, {})
    scene.cap(6.1, "n1", "GPU-a", 700, "restore: off")
    scene.cap(6.2, "n1", "GPU-b", 700, "restore: off")
    scene.say(9.0, "off", off=False)
    scene.send(10.0, "n1", 200, {"c:10.0": 400})
    scene.cap(10.9, "n1", "GPU-a", 400, run="c:10.0")
    scene.cap(10.95, "n1", "GPU-b", 400, run="c:10.0")
    verdict = judge(closed(scene), tmp_path / "in time")
    assert verdict.holds, verdict.text()
    scene.say(6.0, "off", off=False)
    assert broken(judge(scene, tmp_path / "never off")) == {"1", "2"}


def test_a_gpu_that_no_plan_named(tmp_path: Path) -> None:
    scene = clean()
    scene.cap(3.0, "n1", "GPU-b", 690, "whim")
    scene.cap(3.1, "n1", "GPU-b", 700, "whim")
    verdict = judge(scene, tmp_path)
    assert broken(verdict) == {"7"}, verdict.text()
    assert verdict.findings[0].uuid == "GPU-b"


def test_a_job_on_another_gpu_than_the_map_says(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.kernel(9.5, "n1", "GPU-b", 450, "10.0")
    scene.kernel(9.6, "n2", "GPU-d", 300, "11.0")
    verdict = judge(closed(scene), tmp_path)
    assert broken(verdict) == {"placement"}, verdict.text()
    assert [finding.uuid for finding in verdict.findings] == ["GPU-d"]


def test_an_agent_that_names_no_gpus_again_forgets_none(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.tell(8.005, "n1", "run_seen", run="c:10.0", gpus=[], reason="job file")
    scene.audit["n1"].sort(key=lambda entry: entry["mono_ns"])
    assert judge(closed(scene), tmp_path).holds


def test_a_kernel_above_the_park_cap_before_it_was_admitted(tmp_path: Path) -> None:
    scene = in_window(opened())
    scene.kernel(9.05, "n2", "GPU-d", 300, "12.0")
    assert broken(judge(closed(scene), tmp_path)) == {"placement"}


# ------------------------------------------------------------------------------------------------------- what is read


def test_a_half_written_last_line_is_forgiven_and_noted(tmp_path: Path) -> None:
    scene = clean()
    scene.tail["n1"] = '{"mono_ns": 70000'
    verdict = judge(scene, tmp_path)
    assert verdict.holds
    assert len([note for note in verdict.result("files").notes if "half-written" in note]) == 2


def test_a_half_line_elsewhere_is_a_finding(tmp_path: Path) -> None:
    scene = clean()
    folder = scene.write(tmp_path)
    path = folder / "nodes" / "n1" / "audit.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0][:30] + "".join(lines[1:]))
    verdict = check_run(folder)
    assert broken(verdict) == {"files"}, verdict.text()


@pytest.mark.parametrize("damage", ["empty", "gone", "kernels only"])
def test_a_trace_without_limits_proves_nothing(tmp_path: Path, damage: str) -> None:
    folder = clean().write(tmp_path)
    path = folder / "nodes" / "n2" / "trace.jsonl"
    if damage == "gone":
        path.unlink()
    else:
        kept = [line for line in path.read_text().splitlines() if damage != "empty" and "kernel" in line]
        path.write_text("".join(f"{line}\n" for line in kept))
    verdict = check_run(folder)
    assert "files" in broken(verdict)
    # The node counts at its maximum instead of at nothing.
    assert "1" in broken(verdict)


def test_missing_files_and_wrong_fields_are_findings_and_never_tracebacks(tmp_path: Path) -> None:
    assert not check_run(tmp_path).holds
    folder = clean().write(tmp_path / "run")
    (folder / "before.json").write_text("{}")
    (folder / "foreign.json").write_text("[{}]")
    with (folder / "controller" / "audit.jsonl").open("a") as file:
        file.write(
            '{"mono_ns": 1, "event": "plan_sent", "node": "n1"}\n[]\n{"mono_ns": true, "event": "x"}\n'
        )
    with (folder / "nodes" / "n1" / "trace.jsonl").open("a") as file:
        file.write('{"mono_ns": 1, "event": "limit", "uuid": 3}\n')
    texts = [finding.text for finding in check_run(folder).result("files").findings]
    assert len(texts) == 6, texts


def test_a_layout_file_names_the_paths(tmp_path: Path) -> None:
    folder = clean().write(tmp_path / "run")
    moved = tmp_path / "elsewhere"
    (folder / "nodes").rename(moved)
    layout: dict[str, Any] = {
        node: {"trace": str(moved / node / "trace.jsonl"), "audit": f"../elsewhere/{node}/audit.jsonl"}
        for node in GPUS
    }
    layout["controller"] = "controller/audit.jsonl"
    assert not check_run(folder).holds
    (folder / "layout.json").write_text(json.dumps(layout))
    verdict = check_run(folder)
    assert verdict.holds, verdict.text()


def test_a_node_without_agent_or_in_observe_counts_at_device_maximum(tmp_path: Path) -> None:
    scene = clean()
    scene.audit["n2"] = []
    verdict = judge(scene, tmp_path / "agentless")
    assert "n2" in " ".join(verdict.result("1").notes)
    assert "exceed 4200 W by 600.000 W" in verdict.result("1").findings[0].text  # 2500 + 2 x 450 + 2 x 700
    scene = clean()
    scene.controller[0]["nodes"]["n1"]["mode"] = "observe"
    verdict = judge(scene, tmp_path / "observe")
    assert (
        "exceed 4200 W by 500.000 W" in verdict.result("1").findings[0].text
    )  # 2500 + 1400 + 600 + 200 at 7 s


def test_a_limit_extended_a_moment_before_its_end_has_its_response_time(tmp_path: Path) -> None:
    """A node that has not heard of it yet follows the old end; so much later it must be capped again."""
    for capped_again_s, holds in ((7.9, True), (8.2, False)):
        scene = opened()
        scene.controller[-3]["steps"].append([ns(6.1), None])
        assert scene.controller[-3]["event"] == "limit"
        scene.limit(6.0, 4200)
        scene.cap(6.11, "n2", "GPU-d", 650, "restore: window over")
        scene.cap(capped_again_s, "n2", "GPU-d", 200, "park")
        verdict = judge(closed(scene), tmp_path / str(holds))
        assert verdict.result("1").holds is holds, verdict.text()


def test_an_agent_that_takes_over_has_read_all_limits(tmp_path: Path) -> None:
    scene = opened()
    # The agent died before it read these two back; the next one found them done.
    scene.audit["n1"] = [e for e in scene.audit["n1"] if e["event"] != "readback"]
    scene.tell(6.5, "n1", "adopted", reason="2 GPUs hold limits of ours")
    assert judge(closed(in_window(scene)), tmp_path / "adopted").holds
    for entry in scene.audit["n1"]:
        if entry["event"] == "adopted":
            entry["event"] = "resumed"
    assert broken(judge(scene, tmp_path / "unread")) == {"2"}


def test_two_limits_bind_by_the_lowest_and_an_announced_start_gives_its_response(tmp_path: Path) -> None:
    scene = clean()
    scene.limit(6.0, 4100, start_s=8.5, name="M")
    verdict = judge(scene, tmp_path)
    (finding,) = verdict.result("1").findings
    assert (finding.mono_ns, "exceed 4100 W" in finding.text) == (ns(12.131), True), verdict.text()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1.0, 2.0, 3.0, UNBOUNDED])), max_size=12),
    st.integers(0, 20),
)
def test_the_highest_over_the_past_is_what_looking_at_every_instant_gives(
    points: list[tuple[int, float]], length: int
) -> None:
    steps = Steps(points)
    due = steps.highest_over_past(length)
    for instant in range(-1, 90):
        # Just after t - length a step function of whole instants still has its value at t - length.
        seen = [steps.value_at(past) for past in range(instant - length, instant + 1)]
        assert due.value_at(instant) == max(seen)


def test_eighty_thousand_lines_in_two_seconds(tmp_path: Path) -> None:
    scene = clean()
    folder = scene.write(tmp_path)
    with (
        (folder / "nodes" / "n1" / "trace.jsonl").open("a") as trace,
        (folder / "nodes" / "n1" / "audit.jsonl").open("a") as audit,
    ):
        for at in range(68_000):
            trace.write(
                f'{{"mono_ns":{ns(9.5) + at},"event":"kernel","uuid":"GPU-a","effective_mw":450000,'
                '"pid":1,"job":"10.0"}\n'
            )
        for at in range(12_000):
            at_ns, cap_mw = ns(11) + 2 * at, 440_000 + at % 10 * 1000
            audit.write(
                f'{{"mono_ns":{at_ns},"event":"set","uuid":"GPU-a","cap_mw":{cap_mw},"reason":"x"}}\n'
            )
            trace.write(
                f'{{"mono_ns":{at_ns + 1},"event":"limit","uuid":"GPU-a","effective_mw":{cap_mw},'
                f'"requested_mw":{cap_mw},"pid":1}}\n'
            )
    begun = time.process_time()
    verdict = check_run(folder)
    used_s = time.process_time() - begun
    assert verdict.holds, verdict.text()
    assert verdict.result("9").checked > 12_000
    assert used_s < 2.0
