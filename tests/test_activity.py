"""A counter beside what the GPUs of its run did: lies that curves allow are found, honest runs are left alone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from slurm_pfi.controller.measuring.activity import judged, lost_by_activity, pace_of
from slurm_pfi.controller.measuring.measured import evidence
from slurm_pfi.controller.measuring.record import Record
from slurm_pfi.controller.runs import sample_of
from slurm_pfi.elasticity.proxy import MODEL_SD
from slurm_pfi.model import Activity, GpuReport, Run

from .measured_run import FREE_MW, FREE_RATE, MadeUpRun, rate_at
from .test_controller_core import Site
from .test_controller_core import gpu as site_gpu

CAP_W = 480.0
TRUE_LOSS = 1 - rate_at(480_000) / rate_at(None)
ACTIVITY_S = 5.0


class Lie:
    """Tells under a cap a share of what was done meanwhile."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.capped = False
        self.true = self.told = 0.0

    def __call__(self, counter: float) -> float:
        self.told += (counter - self.true) * (self.factor if self.capped else 1.0)
        self.true = counter
        return self.told


def lying(factor: float, seed: int = 0, seconds: float = 120, **made: object) -> MadeUpRun:
    """A run that was seen without a cap, and then under one."""
    lie = Lie(factor)
    run = MadeUpRun(seed=seed, lie=lie, activity_s=ACTIVITY_S, **made)  # type: ignore[arg-type]
    run.run(90)
    lie.capped = True
    run.run(seconds, CAP_W)
    return run


def losses(record: Record) -> list[float]:
    found = evidence(record, "H200", "", record.last_ns or 0)
    return [point.loss for point in found.measurements]


@pytest.mark.parametrize("clock_bound", [1.0, 0.5])
@pytest.mark.parametrize("factor", [1 / 1.05, 1.05])
def test_a_lie_of_5_percent_is_found_and_what_its_gpus_did_counts(factor: float, clock_bound: float) -> None:
    record = lying(factor, clock_bound=clock_bound).record
    assert "at a cap of 480 W it kept" in record.disputed
    assert losses(record) == [pytest.approx(TRUE_LOSS, abs=0.012)]
    assert record.loss is None
    assert record.totals.lost is None
    assert not record.measured
    shown = lost_by_activity(record)
    assert shown is not None
    assert abs(shown.loss - TRUE_LOSS) <= 2 * shown.sd


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_a_lie_within_the_tolerance_moves_what_is_learned_by_half_of_it(factor: float) -> None:
    run = lying(factor, activity_noise=0.001)
    assert not run.record.disputed
    (loss,) = losses(run.record)
    assert abs(loss - TRUE_LOSS) == pytest.approx(0.01 * (1 - TRUE_LOSS), abs=0.003)


def test_once_contradicted_a_counter_stays_so() -> None:
    lie = Lie(1 / 1.05)
    run = MadeUpRun(lie=lie, activity_s=ACTIVITY_S)
    run.run(90)
    lie.capped = True
    run.run(90, CAP_W)
    lie.capped = False
    run.run(60)
    assert run.run(200, CAP_W).disputed


def test_where_activity_is_no_longer_told_the_counter_is_followed_as_before() -> None:
    run = MadeUpRun(activity_s=ACTIVITY_S)
    run.run(90)
    run.activity_s = None
    assert losses(run.run(30, CAP_W)) == [], "it may be told any moment"
    assert losses(run.run(60, CAP_W)) == [pytest.approx(TRUE_LOSS, abs=0.01)]
    assert not run.record.disputed


def test_once_contradicted_activity_rules_at_every_cap_also_where_the_counter_is_near() -> None:
    run = lying(1 / 1.05, activity_noise=0.001)
    assert isinstance(run.lie, Lie)
    run.lie.factor = 0.985
    run.run(120, 520.0)
    points = evidence(run.record, "H200", "", run.record.last_ns or 0).measurements
    assert len(points) == 2
    for point in points:
        true_loss = 0.5 * point.reduction
        assert point.loss == pytest.approx(true_loss, abs=0.004)
        assert point.sd >= 0.9 * MODEL_SD * (1 - true_loss), "with the error of the model"


def test_without_activity_the_same_lie_passes_as_a_measurement() -> None:
    lie = Lie(1 / 1.05)
    run = MadeUpRun(lie=lie)
    run.run(90)
    lie.capped = True
    record = run.run(120, CAP_W)
    assert not record.disputed
    assert losses(record) == [pytest.approx(1 - (1 - TRUE_LOSS) / 1.05, abs=0.01)]
    assert lost_by_activity(record) is None


def test_a_lie_is_not_followed_before_activity_can_say_what_it_is_worth() -> None:
    """A run that is judged late would by then have been spared for what it told first."""
    run = MadeUpRun(lie=(lie := Lie(1 / 1.05)), activity_s=ACTIVITY_S)
    run.run(90)
    lie.capped = True
    for _ in range(30):
        run.run(1, CAP_W)
        for loss in losses(run.record):
            assert abs(loss - TRUE_LOSS) < 0.03


def honest(seed: int, clock_bound: float, work: Callable[[MadeUpRun, float | None], None]) -> MadeUpRun:
    run = MadeUpRun(seed=seed, activity_s=ACTIVITY_S, clock_bound=clock_bound, noise=0.02)
    for cap_w in (None, CAP_W, 520.0, None, CAP_W):
        work(run, cap_w)
    return run


def steady(run: MadeUpRun, cap_w: float | None) -> None:
    run.run(90, cap_w)


def with_checkpoints(run: MadeUpRun, cap_w: float | None) -> None:
    for _ in range(3):
        run.run(run.random.uniform(20, 40), cap_w)
        run.run(run.random.uniform(2, 9), cap_w, speed=0.0, draw_w=150)


def with_evaluation(run: MadeUpRun, cap_w: float | None) -> None:
    """Tensor work that its counter does not count."""
    for _ in range(3):
        run.run(run.random.uniform(20, 40), cap_w)
        run.run(run.random.uniform(5, 15), cap_w, speed=0.0, busy=0.8)


@pytest.mark.parametrize("clock_bound", [1.0, 0.4], ids=["compute-bound", "memory-bound"])
@pytest.mark.parametrize("work", [steady, with_checkpoints, with_evaluation])
def test_no_honest_run_is_contradicted(
    work: Callable[[MadeUpRun, float | None], None], clock_bound: float
) -> None:
    runs = [honest(seed, clock_bound, work) for seed in range(8)]
    assert [run.record.disputed for run in runs] == [""] * len(runs)
    for run in runs:
        for found in losses(run.record):
            assert min(abs(found - TRUE_LOSS), abs(found - (1 - rate_at(520_000) / rate_at(None)))) < 0.02


def test_a_job_without_a_counter_is_estimated_by_what_its_gpus_did() -> None:
    run = MadeUpRun(lie=lambda _: None, activity_s=ACTIVITY_S)
    run.run(90)
    record = run.run(120, CAP_W)
    shown = lost_by_activity(record)
    assert shown is not None
    assert shown.loss == pytest.approx(TRUE_LOSS, abs=0.012)
    assert 0.005 < shown.sd < 0.015
    assert record.loss is None
    assert losses(record) == []
    assert not record.measured


def test_without_tensor_work_only_a_loss_beyond_the_clock_is_contradicted() -> None:
    for factor, tensor, found in ((0.95, 0.0, True), (0.95, None, True), (0.98, 0.0, False)):
        run = lying(factor, clock_bound=1.0, tensor=tensor, activity_noise=0.001)
        assert bool(run.record.disputed) is found, (factor, tensor)
        assert lost_by_activity(run.record) is None
    assert not lying(0.93, clock_bound=0.5, tensor=None).record.disputed, "its clock fell by more than that"


@pytest.mark.parametrize("speed", [0.95, 0.85])
def test_files_that_became_slow_under_a_cap_contradict_nobody_and_are_no_loss_by_it(speed: float) -> None:
    run = MadeUpRun(activity_s=ACTIVITY_S)
    run.run(90)
    record = run.run(180, CAP_W, speed=speed)
    assert not record.disputed
    assert losses(record) == [pytest.approx(TRUE_LOSS, abs=0.012)], "no more than the clock lost"


@pytest.mark.parametrize("activity_s", [None, ACTIVITY_S])
def test_no_counter_is_so_absurd_that_it_stops_the_controller(activity_s: float | None) -> None:
    """The greatest and the least that a job can tell, as a ratio, are no number."""
    lie = Lie(1e10)
    run = MadeUpRun(
        lie=lambda counter: lie(counter) if lie.capped else counter * 1e-320, activity_s=activity_s
    )
    run.run(90)
    lie.capped, lie.true = True, run.true
    record = run.run(60, CAP_W)
    assert losses(record) == []
    assert record.doubt
    assert len(record.doubt + record.disputed) < 200


@pytest.mark.parametrize("offset_s", [0.2, 2.5, 4.0])
def test_nodes_that_read_activity_at_different_times_are_judged_too(offset_s: float) -> None:
    """Each reading of one comes beside an older one of the other; together they cover all but gaps of none."""
    run = lying(1 / 1.05, other_node_s=offset_s)
    assert run.record.disputed
    levels = run.record.levels
    assert [level.tensor.seconds / level.seconds > 0.75 for level in levels] == [True] * len(levels)
    assert not lying(1.0, other_node_s=offset_s).record.disputed


def test_a_counter_that_keeps_activity_off_its_baseline_is_not_followed() -> None:
    """It stalls for a moment in each reading without a cap, so that nothing could be held against it later."""
    run = MadeUpRun(lie=(lie := Lie(1.0)), activity_s=ACTIVITY_S)
    lie.capped = True
    for _ in range(25):
        lie.factor = 1.0
        run.run(2)
        lie.factor = 0.1
        run.run(2)
    free = run.record.level(None)
    assert run.record.seen
    assert free is not None
    assert not free.tensor.count
    lie.factor = 1 / 1.05
    assert losses(run.run(60, CAP_W)) == []


def test_other_tensor_work_under_the_cap_contradicts_nobody() -> None:
    """It changed its work in the very moment of the cap: nothing is known of its loss, nothing held against it."""
    run = MadeUpRun(activity_s=ACTIVITY_S)
    run.run(90)
    record = run.run(120, CAP_W, busy=1.4)
    assert not record.disputed
    assert lost_by_activity(record) is None


def test_heat_teaches_nothing_of_caps_and_costs_nobody_a_baseline() -> None:
    run = MadeUpRun(activity_s=ACTIVITY_S)
    run.run(90)
    before = run.run(60, CAP_W)
    record = run.run(60, CAP_W, speed=0.8, draw_w=400, slowed=True)
    level, was = record.level(480_000), before.level(480_000)
    assert level is not None
    assert was is not None
    assert level.tensor == was.tensor
    assert level.draw_s <= was.draw_s + 2
    assert record.totals.lost == pytest.approx(TRUE_LOSS * FREE_RATE * 60, rel=0.15), (
        "what heat took is no cap's"
    )
    record = run.run(60, speed=0.8, draw_w=500, slowed=True)
    assert record.rate_per_s == pytest.approx(before.rate_per_s, rel=1e-6)
    assert record.top_mw == before.top_mw
    record = run.run(90, CAP_W)
    assert record.totals.lost == pytest.approx(TRUE_LOSS * FREE_RATE * 150, rel=0.15)
    assert not record.doubt
    assert not record.disputed


def test_a_level_is_judged_beside_the_baseline_of_its_own_segment() -> None:
    run = lying(1.0)
    level, free = run.record.level(480_000), run.record.level(None)
    assert level is not None
    assert judged(level, None) is None
    found = judged(level, free)
    assert found is not None
    assert found.share == pytest.approx(1 - TRUE_LOSS, abs=0.015)


# ------------------------------------------------------------------------------------------------ from reports

RUN = Run("c", 1)


def gpu(activity: Activity | None, uuid: str = "GPU-1", runs: tuple[Run, ...] = (RUN,)) -> GpuReport:
    return GpuReport(
        uuid=uuid,
        model="NVIDIA H200",
        position=0,
        min_mw=200_000,
        max_mw=700_000,
        default_mw=700_000,
        requested_mw=700_000,
        enforced_mw=700_000,
        ceiling_mw=700_000,
        prior_mw=700_000,
        draw_mw=FREE_MW,
        runs=runs,
        activity=activity,
    )


def act(**changes: object) -> Activity:
    return replace(Activity(over_s=5.0, age_s=1.0, tensor=0.4, sm_clock_mhz=1500.0), **changes)


def test_the_pace_of_a_run_is_the_mean_work_and_the_slowest_clock_of_its_gpus() -> None:
    now_ns = 100 * 10**9
    slow = gpu(act(tensor=0.5, sm_clock_mhz=1200.0, age_s=2.0), "GPU-2")
    pace = pace_of([(gpu(act()), now_ns), (slow, now_ns - 10**9)], 2)
    assert pace is not None
    assert (pace.tensor_mhz, pace.clock_mhz) == (600.0, 1200.0)
    assert (pace.from_ns, pace.to_ns) == (92 * 10**9, 99 * 10**9)


@pytest.mark.parametrize(
    "other",
    [
        None,
        act(sm_clock_mhz=None),
        act(sm_clock_mhz=1e9),
        act(sm_clock_mhz=float("nan")),
        act(tensor=1.5),
        act(over_s=0.0),
        act(age_s=-1.0),
        act(over_s=1e9),
    ],
)
def test_one_gpu_that_tells_nothing_or_nonsense_leaves_the_pace_unknown(other: Activity | None) -> None:
    assert pace_of([(gpu(act()), 0), (gpu(other, "GPU-2"), 0)], 2) is None
    assert pace_of([(gpu(act()), 0)], 2) is None
    assert pace_of([], 0) is None


def test_without_tensor_counters_the_clock_alone_is_known() -> None:
    pace = pace_of([(gpu(act(tensor=None)), 0)], 1)
    assert pace is not None
    assert (pace.tensor_mhz, pace.clock_mhz) == (None, 1500.0)


def test_what_a_shared_gpu_does_is_no_single_runs() -> None:
    assert pace_of([(gpu(act(), runs=(RUN, Run("c", 2))), 0)], 1) is None


def test_a_sample_of_two_nodes_has_the_mean_draw_by_energy_and_the_work_of_both() -> None:
    """The draw now is apart; it stands in where a GPU tells no mean. The other node's report is as old as it is."""
    site = Site(nodes=2)
    site.hear("n1", site_gpu("G1", RUN, draw_mw=100_000, mean_mw=500_000, activity=act()))
    other = site_gpu("G2", RUN, draw_mw=400_000, activity=act(tensor=0.2), slowed="power cap")
    site.hear("n2", other)
    site.identify(RUN, "n1", "n2")
    heard_ns = site.state.nodes["n2"].heard_ns
    site.wait(3)
    report = site.report("n1", site_gpu("G1", RUN, draw_mw=100_000, mean_mw=500_000, activity=act()))
    view = site.state.runs[RUN]
    sample = sample_of(view, report, site.state.nodes, site.now_ns, 60)
    assert sample is not None
    assert (sample.draw_mw, sample.mean_mw) == (250_000, 450_000)
    assert not sample.slowed, "by the cap, as it should be"
    pace = sample.pace
    assert pace is not None
    assert pace.tensor_mhz == pytest.approx(450.0)
    assert (pace.from_ns, pace.to_ns) == (heard_ns - 6 * 10**9, site.now_ns - 10**9)
    for word, hot in (("thermal", True), ("power brake", True), ("other", True), ("a new word", False)):
        report = site.report("n1", site_gpu("G1", RUN, slowed=word))
        found = sample_of(view, report, site.state.nodes, site.now_ns, 60)
        assert found is not None
        assert found.slowed is hot, word


def test_a_report_of_the_version_before_is_read_and_one_of_ours_by_it() -> None:
    ours = gpu(act())
    plain = msgspec.to_builtins(ours)
    for name in ("mean_mw", "activity", "slowed"):
        del plain[name]
    old = msgspec.convert(plain, GpuReport)
    assert (old.mean_mw, old.activity, old.slowed) == (None, None, "")

    class Before(msgspec.Struct):
        uuid: str

    assert msgspec.json.decode(msgspec.json.encode(ours), type=Before).uuid == ours.uuid
