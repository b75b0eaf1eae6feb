"""What every implementation of the GPU seam promises: the same tests for memory and for NVML in its process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from slurm_pfi.gpu.device import (
    DeadlineError,
    DeviceFailure,
    DeviceSample,
    LostError,
    PermissionDeniedError,
    RangeError,
    UnknownDeviceError,
    UnsupportedError,
)
from slurm_pfi.gpu.rights import may_set_limits
from tests.gpu_rigs import EFFECT_NS, Rig, open_rig

Run: TypeAlias = Callable[[Callable[[Rig], Awaitable[None]]], None]


@pytest.fixture(params=["memory", "remote"])
def with_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    def run(test: Callable[[Rig], Awaitable[None]]) -> None:
        async def inside() -> None:
            async with open_rig(request.param, tmp_path) as rig:
                await test(rig)

        asyncio.run(inside())

    return run


def test_devices_are_listed_with_limits(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        infos, failures = await rig.devices.list_devices()
        assert tuple(info.uuid for info in infos) == rig.uuids
        assert failures == ()
        assert len({info.minor for info in infos}) == len({info.pci for info in infos}) == 8
        for info in infos:
            limits = info.limits
            assert (limits.min_mw, limits.max_mw, limits.default_mw) == (200_000, 700_000, 700_000)
            assert limits.requested_mw == limits.enforced_mw == 700_000
            assert info.persistence is True

    with_rig(test)


def test_a_limit_is_requested_at_once_and_enforced_later(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        limits = await rig.devices.set_limit(rig.uuids[3], 400_000)
        assert (limits.requested_mw, limits.enforced_mw) == (400_000, 700_000)
        rig.advance(EFFECT_NS)
        samples = await rig.devices.sample(rig.uuids)
        caps = [sample.enforced_mw for sample in samples if isinstance(sample, DeviceSample)]
        assert caps == [400_000 if uuid == rig.uuids[3] else 700_000 for uuid in rig.uuids]

    with_rig(test)


def test_the_answer_to_a_set_says_what_it_replaced(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.devices.set_limit(rig.uuids[3], 400_000)).replaced_mw == 700_000
        assert (await rig.devices.set_limit(rig.uuids[3], 300_000)).replaced_mw == 400_000
        infos, _ = await rig.devices.list_devices()
        assert {info.limits.replaced_mw for info in infos} == {None}

    with_rig(test)


@pytest.mark.parametrize("cap_mw", [200_000, 700_000])
def test_the_ends_of_the_range_are_legal(with_rig: Run, cap_mw: int) -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.devices.set_limit(rig.uuids[0], cap_mw)).requested_mw == cap_mw

    with_rig(test)


@pytest.mark.parametrize("cap_mw", [199_999, 700_001, 1, 0, 300_000_000])
def test_a_limit_out_of_range_is_refused_and_changes_nothing(with_rig: Run, cap_mw: int) -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(RangeError, match=r"200000\.\.700000") as caught:
            await rig.devices.set_limit(rig.uuids[0], cap_mw)
        assert caught.value.uuid == rig.uuids[0]
        (sample,) = await rig.devices.sample(rig.uuids[:1])
        assert isinstance(sample, DeviceSample)
        assert sample.requested_mw == 700_000

    with_rig(test)


def test_samples_come_in_the_order_asked(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        asked = (rig.uuids[5], rig.uuids[0], rig.uuids[7])
        samples = await rig.devices.sample(asked)
        assert tuple(sample.uuid for sample in samples) == asked
        for sample in samples:
            assert isinstance(sample, DeviceSample)
            assert sample.draw_mw is not None
            assert 0 < sample.draw_mw <= 700_000
            assert sample.energy_mj is not None
            assert sample.monotonic_ns > 0

    with_rig(test)


def test_energy_grows_with_time(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        before = (await rig.devices.sample(rig.uuids[:1]))[0]
        rig.advance(10**9)
        after = (await rig.devices.sample(rig.uuids[:1]))[0]
        assert isinstance(before, DeviceSample)
        assert isinstance(after, DeviceSample)
        assert before.energy_mj is not None
        assert after.energy_mj is not None
        assert after.draw_mw is not None
        assert after.energy_mj - before.energy_mj == pytest.approx(after.draw_mw, rel=0.1)

    with_rig(test)


def test_a_quantity_that_is_not_given_is_none_and_never_zero(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.hide_draw(rig.uuids[1])
        hidden, shown = await rig.devices.sample(rig.uuids[1:3])
        assert isinstance(hidden, DeviceSample)
        assert isinstance(shown, DeviceSample)
        assert (hidden.draw_mw, hidden.enforced_mw) == (None, 700_000)
        assert shown.draw_mw is not None

    with_rig(test)


def test_a_lost_device_is_reported_beside_the_others(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.devices.list_devices()
        lost = rig.uuids[2]
        rig.lose(lost)
        infos, failures = await rig.devices.list_devices()
        assert tuple(info.uuid for info in infos) == tuple(uuid for uuid in rig.uuids if uuid != lost)
        assert [(failure.uuid, failure.kind) for failure in failures] == [(lost, "LostError")]
        samples = await rig.devices.sample(rig.uuids)
        failed = [sample for sample in samples if isinstance(sample, DeviceFailure)]
        assert [(sample.uuid, sample.kind) for sample in failed] == [(lost, "LostError")]
        with pytest.raises(LostError):
            await rig.devices.set_limit(lost, 400_000)
        assert (await rig.devices.set_limit(rig.uuids[3], 400_000)).requested_mw == 400_000

    with_rig(test)


def test_an_unknown_uuid_is_a_lost_device(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(LostError) as caught:
            await rig.devices.set_limit("GPU-none", 400_000)
        assert caught.value.uuid == "GPU-none"
        (sample,) = await rig.devices.sample(("GPU-none",))
        assert isinstance(sample, DeviceFailure)
        assert sample.kind == "LostError"

    with_rig(test)


def test_a_set_that_changes_nothing_is_an_error(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.ignore_sets(rig.uuids[0])
        with pytest.raises(UnknownDeviceError, match="700000 mW is read back"):
            await rig.devices.set_limit(rig.uuids[0], 400_000)

    with_rig(test)


def test_a_set_that_works_and_times_out_says_it_timed_out(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.apply_then_time_out(rig.uuids[0])
        with pytest.raises(DeadlineError) as caught:
            await rig.devices.set_limit(rig.uuids[0], 400_000)
        assert caught.value.uuid == rig.uuids[0]
        (sample,) = await rig.devices.sample(rig.uuids[:1])
        assert isinstance(sample, DeviceSample)
        assert sample.requested_mw == 400_000

    with_rig(test)


def test_without_permission_sets_fail_and_reading_goes_on(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.forbid_sets()
        for uuid in rig.uuids:
            with pytest.raises(PermissionDeniedError):
                await rig.devices.set_limit(uuid, 400_000)
        assert all(isinstance(sample, DeviceSample) for sample in await rig.devices.sample(rig.uuids))

    with_rig(test)


def test_one_board_without_limits_harms_no_other(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.support_no_sets(rig.uuids[0])
        with pytest.raises(UnsupportedError):
            await rig.devices.set_limit(rig.uuids[0], 400_000)
        assert (await rig.devices.set_limit(rig.uuids[1], 400_000)).requested_mw == 400_000

    with_rig(test)


def test_a_bmc_limit_shows_as_enforced_below_requested(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.limit_by_bmc(rig.uuids[0], 300_000)
        limits = await rig.devices.set_limit(rig.uuids[0], 400_000)
        assert limits.requested_mw == 400_000
        rig.advance(2 * EFFECT_NS)
        (sample,) = await rig.devices.sample(rig.uuids[:1])
        assert isinstance(sample, DeviceSample)
        assert (sample.requested_mw, sample.enforced_mw) == (400_000, 300_000)

    with_rig(test)


def test_what_somebody_else_sets_is_seen(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.write_foreign(rig.uuids[4], 650_000)
        rig.advance(EFFECT_NS)
        infos, _ = await rig.devices.list_devices()
        assert (infos[4].limits.requested_mw, infos[4].limits.enforced_mw) == (650_000, 650_000)

    with_rig(test)


def test_after_release_the_next_call_works(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.devices.set_limit(rig.uuids[0], 400_000)
        await rig.devices.release()
        infos, failures = await rig.devices.list_devices()
        assert (len(infos), failures) == (8, ())
        assert infos[0].limits.requested_mw == 400_000

    with_rig(test)


def test_a_device_that_hangs_costs_itself_and_holds_up_no_other(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.devices.list_devices()
        sick, *well = rig.uuids
        rig.hang(sick)
        hanging = asyncio.create_task(rig.devices.set_limit(sick, 400_000))
        limits = await asyncio.gather(*(rig.devices.set_limit(uuid, 400_000) for uuid in well))
        assert {limit.requested_mw for limit in limits} == {400_000}
        assert not hanging.done()
        with pytest.raises(DeadlineError) as caught:
            await hanging
        assert caught.value.uuid == sick
        samples = await rig.devices.sample(rig.uuids)
        assert [isinstance(sample, DeviceSample) for sample in samples] == [False] + [True] * 7

    with_rig(test)


def test_sets_of_all_devices_at_the_same_time_reach_their_own(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        caps = {uuid: 300_000 + 1000 * place for place, uuid in enumerate(rig.uuids)}
        limits = await asyncio.gather(*(rig.devices.set_limit(uuid, cap) for uuid, cap in caps.items()))
        assert [limit.requested_mw for limit in limits] == list(caps.values())
        samples = await rig.devices.sample(rig.uuids)
        assert [s.requested_mw for s in samples if isinstance(s, DeviceSample)] == list(caps.values())

    with_rig(test)


def test_capabilities_are_found_without_a_set(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.divide(rig.uuids[1])
        rig.hide_counters(rig.uuids[2])
        infos, failures = await rig.devices.list_devices()
        assert failures == ()
        assert [info.mig for info in infos[:3]] == [False, True, False]
        assert [info.capabilities.gpm for info in infos[:3]] == [True, True, False]
        assert {info.capabilities.module_scope for info in infos} == {False}
        assert {info.sm_clock_max_mhz for info in infos} == {1980}
        expected = True if may_set_limits() else infos[0].capabilities.settable
        assert {info.capabilities.settable for info in infos} == {expected}

    with_rig(test)


def test_activity_is_read_when_asked_for_and_covers_the_time_between(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.work()
        rig.advance(10**9)
        uuid = rig.uuids[0]
        (first,) = await rig.devices.sample((uuid,), activity=True)
        assert isinstance(first, DeviceSample)
        assert first.utilisation == 1.0
        assert first.copy_utilisation is not None
        assert 0 < first.copy_utilisation <= 1
        assert (first.sm_active, first.tensor_active, first.dram_active) == (None, None, None)
        async with asyncio.timeout(10):
            while True:  # two snapshots have to lie 100 ms apart
                await asyncio.sleep(0.02)
                rig.advance(10**9)
                (second,) = await rig.devices.sample((uuid,), activity=True)
                assert isinstance(second, DeviceSample)
                if second.sm_active is not None:
                    break
        for share in (second.sm_active, second.tensor_active, second.dram_active):
            assert share is not None
            assert 0 < share <= 1

    with_rig(test)


def test_without_activity_none_is_read(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.work()
        rig.advance(10**9)
        (sample,) = await rig.devices.sample(rig.uuids[:1])
        assert isinstance(sample, DeviceSample)
        assert sample.average_mw is not None
        assert sample.sm_clock_mhz is not None
        assert (sample.utilisation, sample.copy_utilisation, sample.sm_active) == (None, None, None)

    with_rig(test)


def test_a_quick_sample_reads_limits_and_draw_alone(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        (sample,) = await rig.devices.sample(rig.uuids[:1], quick=True)
        assert isinstance(sample, DeviceSample)
        assert (sample.requested_mw, sample.enforced_mw) == (700_000, 700_000)
        assert sample.draw_mw is not None
        assert (sample.average_mw, sample.energy_mj, sample.sm_clock_mhz, sample.event_reasons) == (None,) * 4

    with_rig(test)


def test_a_device_without_counters_gives_the_rest(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.work()
        rig.hide_counters(rig.uuids[0])
        for _ in range(2):
            rig.advance(10**9)
            (sample,) = await rig.devices.sample(rig.uuids[:1], activity=True)
            assert isinstance(sample, DeviceSample)
            assert (sample.sm_active, sample.utilisation) == (None, 1.0)

    with_rig(test)


def test_in_a_hurry_a_device_that_hangs_has_no_answer_yet(with_rig: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.devices.list_devices()
        sick, *well = rig.uuids
        rig.hang(sick)
        hurried = asyncio.create_task(rig.devices.sample(rig.uuids, quick=True, hurry=True))
        patient = asyncio.create_task(rig.devices.sample(rig.uuids))
        await asyncio.wait({hurried, patient}, return_when=asyncio.FIRST_COMPLETED)
        assert (hurried.done(), patient.done()) == (True, False)
        assert [sample.uuid for sample in await hurried if isinstance(sample, DeviceSample)] == well
        assert [isinstance(sample, DeviceSample) for sample in await patient] == [False] + [True] * 7

    with_rig(test)
