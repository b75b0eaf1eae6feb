"""The checker judges what both real cores did in the made-up world: formats and rules of both sides agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm_pfi.controller import state as cs
from slurm_pfi.controller.dispatch import latest_release_s
from slurm_pfi.node import messages as nm
from testbed.checker import Verdict, check_run

from .world import NS, Device, Fate, SimNode, World

W = 1000


class TracedWorld(World):
    """A world that leaves a run folder: what its devices did, and what its cores said of themselves."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.trace: dict[str, list[dict[str, Any]]] = {}
        super().__init__(seed, **options)
        nodes = {}
        for name, node in self.nodes.items():
            self.trace[name] = [_line(1, device, device.enforced_mw) for device in node.devices.values()]
            facts = {
                "gpus": len(node.devices),
                "overhead_mw": 500 * W,
                "gpu_max_mw": 700 * W,
                "mode": "enforce",
            }
            nodes[name] = facts
        self.before = self.limits_now()
        site = {
            "nodes": nodes,
            "unmanaged_mw": 0,
            "reserve_mw": 0,
            "response_s": self.config.times.response_s,
            "rebound_s": self.config.times.rebound_s,
            "release_s": latest_release_s(self.config),
        }
        self.audit.insert(0, (self.now_ns, "controller", "site", site))

    def _effect(self, node: SimNode, device: Device, cap_mw: int) -> None:
        if device.requested_mw == cap_mw:
            self.trace[node.name].append(_line(self.now_ns, device, cap_mw))
        super()._effect(node, device, cap_mw)

    def set_limit(
        self, limit_mw: int | None, *, emergency: bool = False, ends_in_s: float | None = None
    ) -> None:
        steps: list[list[int | None]] = [] if limit_mw is None else [[self.now_ns, limit_mw]]
        if ends_in_s is not None:
            steps.append([self.now_ns + round(ends_in_s * NS), None])
        action = "clear" if limit_mw is None else "set"
        self.audit.append((self.now_ns, "controller", "limit", {"action": action, "id": "m", "steps": steps}))
        super().set_limit(limit_mw, emergency=emergency, ends_in_s=ends_in_s)

    def limits_now(self) -> list[dict[str, Any]]:
        return [
            {
                "node": name,
                "uuid": device.uuid,
                "requested_mw": device.requested_mw,
                "effective_mw": device.enforced_mw,
            }
            for name, node in self.nodes.items()
            for device in node.devices.values()
        ]

    def judged(self, folder: Path) -> Verdict:
        for name in (*self.nodes, "controller"):
            place = folder / name if name == "controller" else folder / "nodes" / name
            place.mkdir(parents=True)
            entries = [
                {"mono_ns": at_ns, "event": event, **fields}
                for at_ns, actor, event, fields in self.audit
                if actor == name
            ]
            _write(place / "audit.jsonl", entries)
            if name != "controller":
                _write(place / "trace.jsonl", self.trace[name])
        (folder / "before.json").write_text(json.dumps(self.before))
        (folder / "after.json").write_text(json.dumps(self.limits_now()))
        return check_run(folder)


def _line(at_ns: int, device: Device, cap_mw: int) -> dict[str, Any]:
    values = {"effective_mw": cap_mw, "requested_mw": cap_mw}
    return {"mono_ns": at_ns, "event": "limit", "uuid": device.uuid, "pid": 1, **values}


def _write(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def busy(seed: int, fate: Fate | None = None, rebound_s: float = 0.0) -> TracedWorld:
    world = TracedWorld(seed, fate=fate, rebound_s=rebound_s)
    world.run(2)
    world.start_job(1, {"n1": [0, 1]}, flex="10%")
    world.start_job(2, {"n1": [2, 3], "n2": [0, 1]}, flex="medium")
    world.start_job(3, {"n2": [2, 3]}, flex="high")
    world.start_job(4, {"n3": [0, 1]}, flex="medium")
    world.run(20)
    return world


def test_a_window_with_a_late_job_an_emergency_and_a_killed_agent(tmp_path: Path) -> None:
    world = busy(1)
    world.set_limit(round(world.site_mw() * 0.92))
    world.run(12)
    world.start_job(5, {"n3": [2]}, flex="medium")
    world.run(12)
    world.set_limit(round(world.site_mw() * 0.75), emergency=True)
    world.run(15)
    world.kill_agent(world.nodes["n2"])
    world.run(5)
    world.restart_agent(world.nodes["n2"])
    world.run(10)
    world.set_limit(None)
    world.run(5)
    verdict = world.judged(tmp_path)
    assert verdict.holds, verdict.text()
    assert not verdict.unchecked(("1", "2", "3", "7", "9"))


def test_a_bus_that_loses_and_a_controller_that_is_killed(tmp_path: Path) -> None:
    world = busy(2, Fate(loss=0.2, bus_delay_s=0.4, set_delay_s=0.3, effect_delay_s=1.0))
    world.set_limit(round(world.site_mw() * 0.8), ends_in_s=40)
    world.run(15)
    world.kill_controller()
    world.run(5)
    world.start_controller()
    world.run(40)
    verdict = world.judged(tmp_path)
    assert verdict.holds, verdict.text()
    assert not verdict.unchecked(("1", "2", "3", "7", "9"))


def test_a_node_agent_that_lifts_a_cap_by_itself_is_found(tmp_path: Path) -> None:
    world = busy(3)
    world.set_limit(round(world.site_mw() * 0.8))
    world.run(15)
    node = world.nodes["n1"]
    device = next(iter(node.devices.values()))
    assert device.enforced_mw < 700 * W
    world._agent_does(node, nm.Audit(event="set", fields=_set_fields(device)), set())
    world._set(node, device.uuid, 700 * W, node.life)
    world.run(0.2)
    world.set_limit(None)
    world.run(5)
    verdict = world.judged(tmp_path)
    assert [finding.uuid for finding in verdict.result("3").findings][:1] == [device.uuid], verdict.text()
    assert not verdict.result("1").holds


def _set_fields(device: Device) -> dict[str, object]:
    return {
        "uuid": device.uuid,
        "cap_mw": 700 * W,
        "reason": "restore: no reason",
        "run": "",
        "prior_mw": 700 * W,
    }


def test_raises_into_watts_that_nobody_gave_back_are_found(tmp_path: Path) -> None:
    world = busy(4)
    world.set_limit(round(world.site_mw() * 0.8))
    world.run(15)
    plan = [fields for _, _, event, fields in world.audit if event == "plan_sent" and fields["node"] == "n1"][
        -1
    ]
    step = plan["steps"][0]
    raised = {**step, "caps": {run: cap_mw + 40 * W for run, cap_mw in step["caps"].items()}}
    world._controller_does(
        cs.Audit(event="plan_sent", fields={**plan, "seq": plan["seq"] + 99, "steps": [raised]})
    )
    world.run(0.5)
    world.set_limit(None)
    world.run(5)
    verdict = world.judged(tmp_path)
    (finding,) = verdict.findings
    assert (finding.invariant, finding.node) == ("2", "n1"), verdict.text()
    assert "raises by 160 W" in finding.text


# --------------------------------------------------------------------------------------------------- the rebound


def rebounding(seed: int, fate: Fate | None = None) -> TracedWorld:
    """Eleven of twelve GPUs train; the world is one response time into the rebound after a window of 15 s."""
    world = busy(seed, fate, rebound_s=60.0)
    world.start_job(6, {"n3": [3]}, flex="high")
    world.run(70)
    world.set_limit(8_600 * W)
    world.run(15)
    world.set_limit(None)
    world.run(10)
    assert world.controller.rebound is not None
    return world


def test_a_rebound_with_a_late_job_a_silent_node_and_another_window(tmp_path: Path) -> None:
    world = rebounding(5, Fate(loss=0.1, bus_delay_s=0.2))
    world.start_job(5, {"n3": [2]}, flex="medium")
    world.run(5)
    world.kill_agent(world.nodes["n2"])
    world.run(8)
    world.restart_agent(world.nodes["n2"])
    world.run(8)
    world.set_limit(8_500 * W, ends_in_s=15)
    world.run(140)
    verdict = world.judged(tmp_path)
    assert verdict.holds, verdict.text()
    assert not verdict.unchecked(("1", "3", "7", "9", "rebound"))


def test_a_rebound_whose_controller_is_killed_is_no_cap_left_behind(tmp_path: Path) -> None:
    world = rebounding(6)
    world.kill_controller()
    world.run(60)
    verdict = world.judged(tmp_path / "held")
    assert verdict.holds, verdict.text()
    assert any("still open" in note for note in verdict.result("3").notes)
    world.run(60 + 60 + 20)
    world.start_controller()
    world.run(5)
    verdict = world.judged(tmp_path / "after")
    assert verdict.holds, verdict.text()
    assert not verdict.result("3").notes


def test_a_cap_that_outlives_the_rebound_is_found(tmp_path: Path) -> None:
    world = rebounding(7)
    world.nodes["n1"].frozen = True
    world.run(60 + 60 + 20 + 60)
    verdict = world.judged(tmp_path)
    assert {finding.node for finding in verdict.result("3").findings} == {"n1"}, verdict.text()


def test_a_node_that_gives_back_before_the_rebound_lets_it_is_found(tmp_path: Path) -> None:
    world = rebounding(8)
    node = world.nodes["n3"]
    device = next(iter(node.devices.values()))
    world._agent_does(node, nm.Audit(event="set", fields=_set_fields(device)), set())
    world._set(node, device.uuid, 700 * W, node.life)
    world.run(150)
    verdict = world.judged(tmp_path)
    assert {finding.uuid for finding in verdict.result("3").findings} == {device.uuid}, verdict.text()


def test_caps_above_what_the_rebound_allows_are_found(tmp_path: Path) -> None:
    world = rebounding(9)
    (began, said) = next((at, fields) for at, _, event, fields in world.audit if event == "rebound")
    assert said["limit_mw"] > said["from_mw"]
    place = next(i for i, (at, _, event, _) in enumerate(world.audit) if (at, event) == (began, "rebound"))
    told = {**said, "limit_mw": said["from_mw"]}
    world.audit[place] = (began, "controller", "rebound", told)
    world.run(150)
    verdict = world.judged(tmp_path)
    assert not verdict.result("rebound").holds, verdict.text()
