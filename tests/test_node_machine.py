"""The node agent's core in a world that does what it likes: hypothesis looks for a history that breaks a rule.

``World`` checks every set as it is asked for; here are the rules on the whole, and what must be true in the end.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slurm_pfi.gpu.device import DeadlineError, LibraryGoneError, LostError
from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.model import Plan, PlanId, PlanStep, Run
from slurm_pfi.node import messages as m
from slurm_pfi.node.state import ceiling_mw
from tests.node_world import MS, S, World, window_step

CAPS = st.sampled_from([None, 200_000, 250_000, 300_000, 450_000, 600_000, 700_000])
PARKS = st.sampled_from([None, 200_000, 200_000, 300_000])
UUIDS = st.sampled_from(["GPU-0", "GPU-1", "GPU-2"])
SECONDS = st.sampled_from([10 * MS, 60 * MS, 500 * MS, S, 3 * S, 7 * S, 40 * S])


class NodeMachine(RuleBasedStateMachine):
    @initialize(
        priors=st.lists(st.sampled_from([700_000, 650_000]), min_size=3, max_size=3),
        delay=st.sampled_from([0, 30 * MS, 300 * MS]),
        orphan=st.sampled_from(["hold", "release"]),
        instant=st.booleans(),
    )
    def begin(self, priors: list[int], delay: int, orphan: Any, instant: bool) -> None:
        self.world = World(instant=instant, on_orphan=orphan)
        self.world.devices.effect_delay_ns = delay
        self.priors = dict(zip(self.world.devices.gpus, priors, strict=True))
        for uuid, prior_mw in self.priors.items():
            self.world.devices.write_foreign(uuid, prior_mw)
        self.world.devices.advance(S)
        self.old_plans: list[Plan] = []
        self.epoch = 1
        self.foreign: dict[str, set[int]] = {}
        self.world.start()
        self.world.answer_all()

    # ------------------------------------------------------------------------------------------- time and IO

    @rule(nanoseconds=SECONDS)
    def time_passes(self, nanoseconds: int) -> None:
        self.world.advance(nanoseconds)

    @precondition(lambda self: self.world.open_questions)
    @rule(data=st.data())
    def a_device_answers(self, data: st.DataObject) -> None:
        self.world.answer(data.draw(st.integers(0, len(self.world.open_questions) - 1)))

    @rule(fails=st.booleans())
    def the_disk_fills_or_empties(self, fails: bool) -> None:
        self.world.journal_fails = fails

    @rule(uuid=UUIDS, kind=st.sampled_from(["lost", "deadline", "ignored", "applied_then_deadline", "none"]))
    def a_device_breaks_or_heals(self, uuid: str, kind: str) -> None:
        devices = self.world.devices
        if kind == "lost":
            devices.fail("set", LostError("gone", uuid=uuid))
        elif kind == "deadline":
            devices.fail("sample", DeadlineError("slow", uuid=uuid), times=3)
        elif kind == "ignored":
            devices.fail_set_quietly(uuid, "ignored")
        elif kind == "applied_then_deadline":
            devices.fail_set_quietly(uuid, "applied_then_deadline")
        else:
            devices.clear_faults()

    @rule(uuid=UUIDS, cap_mw=st.sampled_from([210_000, 333_000, 680_000, 700_000]))
    def somebody_else_writes(self, uuid: str, cap_mw: int) -> None:
        self.world.devices.write_foreign(uuid, cap_mw)
        self.foreign.setdefault(uuid, set()).add(cap_mw)

    @rule(uuid=UUIDS, nanoseconds=SECONDS)
    def a_gpu_is_lost_and_reset(self, uuid: str, nanoseconds: int) -> None:
        self.world.devices.gpus[uuid].lost = True
        self.world.advance(nanoseconds)
        self.world.devices.reset(uuid)
        self.foreign.setdefault(uuid, set()).add(self.world.devices.gpus[uuid].default_mw)

    @rule(uuid=UUIDS, operation=st.sampled_from(["list", "sample"]), gone=st.booleans())
    def a_device_does_not_answer(self, uuid: str, operation: Any, gone: bool) -> None:
        kind = LibraryGoneError if gone else DeadlineError
        self.world.devices.fail(operation, kind("no answer", uuid=uuid), times=2)

    # ---------------------------------------------------------------------------------------------------- jobs

    @rule(job_id=st.integers(1, 4), gpus=st.sets(st.integers(0, 3), max_size=2), restart=st.integers(0, 2))
    def a_job_begins(self, job_id: int, gpus: set[int], restart: int) -> None:
        self.world.begin_job(job_id, *sorted(gpus), restart=restart)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def a_job_ends(self, data: st.DataObject) -> None:
        file = self.world.jobs[data.draw(st.sampled_from(sorted(self.world.jobs)))]
        self.world.end_job(Run("c", file.job_id, file.restart))

    # --------------------------------------------------------------------------------------------------- plans

    def steps(self, data: st.DataObject) -> tuple[PlanStep, ...]:
        runs = [Run("c", file.job_id, file.restart) for file in self.world.jobs.values()]
        named = data.draw(st.lists(st.sampled_from(runs), unique=True)) if runs else []
        starts = data.draw(st.sampled_from([(0.0,), (0.0, 3.0), (0.0, 2.0, 8.0)]))
        made = [window_step(data.draw(PARKS), {run: data.draw(CAPS) for run in named}, at) for at in starts]
        if len(made) > 1 and data.draw(st.booleans()):
            made[-1] = window_step(None, {}, starts[-1], lease=data.draw(st.booleans()))
        return tuple(made)

    @precondition(lambda self: self.world.reports)
    @rule(data=st.data(), mode=st.sampled_from(["enforce", "enforce", "enforce", "observe"]))
    def a_plan_comes(self, data: st.DataObject, mode: Any) -> None:
        gone = tuple(run for run in self.world.state.runs if data.draw(st.integers(0, 9)) == 0)
        known = dict(self.priors) if data.draw(st.booleans()) else {}
        plan = self.world.make_plan(
            *self.steps(data), id=PlanId(self.epoch, self.world.seq + 1), mode=mode, gone=gone, priors=known
        )
        if self.world.send(plan):
            assert not self.world.state.released
        self.old_plans.append(plan)

    @precondition(lambda self: self.old_plans)
    @rule(data=st.data())
    def an_old_plan_comes_again(self, data: st.DataObject) -> None:
        held = self.world.state.held
        plan = data.draw(st.sampled_from(self.old_plans))
        accepted = self.world.send(plan)
        assert not accepted or held is None or plan.id > held.plan.id

    @precondition(lambda self: self.world.reports)
    @rule(
        data=st.data(),
        change=st.sampled_from(
            [
                {"node": "n2"},
                {"cluster": "other"},
                {"id": PlanId(-1, 10**6)},
                {"steps": ()},
                {"steps": (window_step(100_000),)},
            ]
        ),
    )
    def a_bad_plan_comes(self, data: st.DataObject, change: dict[str, Any]) -> None:
        held, asked = self.world.state.held, len(self.world.devices.sets)
        plan = self.world.make_plan(*self.steps(data), id=PlanId(self.epoch, self.world.seq + 1))
        assert not self.world.send(msgspec.structs.replace(plan, **change))
        assert self.world.state.held == held
        if self.world.instant is False:
            assert len(self.world.devices.sets) == asked

    @rule()
    def another_controller_leads(self) -> None:
        self.epoch += 1

    @rule(up=st.booleans())
    def the_bus_comes_and_goes(self, up: bool) -> None:
        self.world.event(m.Connected(up=up))

    # -------------------------------------------------------------------------------------------------- agents

    @rule(data=st.data())
    def the_agent_is_killed_and_restarted(self, data: st.DataObject) -> None:
        for question in list(self.world.open_questions):
            if isinstance(question, m.SetLimit) and data.draw(st.booleans()):
                self.world.result(question)  # it had reached the device
        self.world.start(connected=data.draw(st.booleans()))

    @precondition(lambda self: not self.world.exited)
    @rule()
    def the_agent_is_stopped(self) -> None:
        capped = any(gpu.current_mw is not None for gpu in self.world.state.gpus.values())
        held = self.world.state.held
        self.world.event(m.StopAsked())
        self.world.advance(4 * S)
        assert self.world.exited
        _, found = (
            held.in_force(self.world.now_ns, skip_lease=self.world.on_orphan == "hold") if held else (0, None)
        )
        if capped and found is not None and found.park_cap_mw is None:
            assert self.world.restore_at_ns is not None

    @rule()
    def an_admin_releases(self) -> None:
        self.world.event(m.ReleaseAsked())

    @rule()
    def an_admin_resumes(self) -> None:
        self.world.event(m.ResumeAsked())

    # --------------------------------------------------------------------------------------------------- rules

    @invariant()
    def what_is_reported_is_never_less_than_what_can_be(self) -> None:
        """The ceiling of a report just made covers the limit in force and every set that may still be done."""
        world = self.world
        for gpu in world.state.gpus.values():
            if gpu.requested_mw is None or gpu.uuid in self.foreign:
                continue
            asked = [
                q.cap_mw for q in world.open_questions if isinstance(q, m.SetLimit) and q.uuid == gpu.uuid
            ]
            most = max(gpu.requested_mw, gpu.pending.cap_mw if gpu.pending else 0, gpu.doubt_mw or 0)
            assert all(cap_mw <= most for cap_mw in asked)

    @invariant()
    def a_limit_on_its_way_up_is_counted(self) -> None:
        """What the device will yet bring into force is covered, but for what others wrote and lost answers."""
        world = self.world
        if world.exited or self.foreign or world.agents > 1 or world.state.released:
            return
        for uuid, gpu in world.state.gpus.items():
            coming = [mw for due_ns, mw in world.devices.gpus[uuid].pending if due_ns > world.now_ns]
            most = ceiling_mw(gpu)
            if most is not None and gpu.failures == 0 and not gpu.setting:
                assert max([0, *coming]) <= most + 1000

    @invariant()
    def no_record_holds_a_value_of_ours_as_prior(self) -> None:
        for uuid, entry in self.world.journal.items():
            assert isinstance(entry, JournalEntry)
            assert entry.prior_mw not in self.world.issued[uuid]

    @invariant()
    def a_conflict_tells_a_value_of_ours_and_one_of_somebody_else(self) -> None:
        for said in self.world.said("conflict"):
            uuid = said["uuid"]
            # A limit below the prior that a controller remembers counts as ours, for our record of it is lost.
            assert said["ours_mw"] in self.world.issued[uuid] | self.foreign[uuid]
            assert said["found_mw"] in self.foreign[uuid]

    @invariant()
    def what_stands_on_a_gpu_is_explained(self) -> None:
        """A limit that is neither the one before us nor somebody else's is in the journal."""
        for uuid, gpu in self.world.devices.gpus.items():
            if uuid in self.foreign or gpu.requested_mw == self.priors[uuid]:
                continue
            entry = self.world.journal[uuid]
            assert isinstance(entry, JournalEntry) and gpu.requested_mw in entry.issued_mw
            assert entry.current_mw is not None

    def teardown(self) -> None:
        """Once everything works again and the window is over, every GPU is where it was before us."""
        world = getattr(self, "world", None)
        if world is None:
            return
        world.devices.clear_faults()
        world.journal_fails = False
        world.instant = True
        world.start()
        world.advance(7 * S)
        assert world.send(world.make_plan(window_step(None), id=PlanId(self.epoch, world.seq + 1)))
        world.advance(60 * S)
        for uuid, gpu in world.devices.gpus.items():
            entry = world.journal.get(uuid)
            assert entry is None or (isinstance(entry, JournalEntry) and entry.current_mw is None)
            # Whoever else wrote: what stands there in the end was before us or is theirs, and never a cap of ours.
            assert gpu.enforced_mw in {self.priors[uuid], *self.foreign.get(uuid, ())}


# A failure is shown as found. To shrink a history this long takes minutes: add Phase.shrink for that.
NodeMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    report_multiple_bugs=False,
)
TestNodeMachine = NodeMachine.TestCase
