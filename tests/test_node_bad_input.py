"""What reaches the node agent from others, changed at random: nothing of it moves a limit, and each says why."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_pfi.bus.codec import CodecError, decode
from slurm_pfi.model import Plan, PlanId, Run
from slurm_pfi.node.jobfile import MAX_BYTES, read_job_folder
from tests.fault_site import ALL, LoneNode, agent_on, ceilings, site, until, window_step
from tests.node_world import S, World

__all__ = ["site"]
RUN = Run("c", 1, 0)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from(
        [0, -1, 1, 199_999, 700_001, 2**31, 2**53, 2**63, 2**64, 1e308, -0.0, 0.5, "NaN", "inf", ""]
    ),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


def world() -> World:
    """A window is open: the run's GPU at 400 W, the others parked at 200 W."""
    made = World(3).start()
    made.begin_job(1, 0)
    assert made.window(200_000, {RUN: 400_000})
    made.advance(2 * S)
    return made


def hear(made: World, payload: bytes) -> Plan | None:
    """What the bus hands to the core, if anything. Checks what must hold whatever came."""
    try:
        message = decode(payload)
    except CodecError as error:
        assert str(error), "the connection ends with a reason"
        return None
    if not isinstance(message, Plan):
        return None
    before, held, sets = made.requested(), made.state.held, len(made.devices.sets)
    if not made.send(message):
        assert made.state.held == held and made.requested() == before and len(made.devices.sets) == sets
        reason = made.said("plan_refused")[-1]["reason"]
        made.advance(S)
        assert any(reason in report.refused for report in made.reports[-4:]), "the controller hears why"
    made.advance(S)
    assert all(200_000 <= limit_mw <= 700_000 for limit_mw in made.requested())
    msgspec.json.encode([made.reports[-2:], made.audit[-20:]])  # what is told can be written down
    return message


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_plan_changed_at_random_is_refused_or_within_the_range(data: st.DataObject) -> None:
    made = world()
    plan = made.make_plan(
        window_step(200_000, {RUN: 300_000}), window_step(None, {}, 60.0), priors={"GPU-0": 650_000}
    )
    value = msgspec.json.decode(msgspec.json.encode(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        value = put(value, data.draw(st.sampled_from(places(value))), data.draw(ODD))
        if not isinstance(value, dict):
            break
    try:
        payload = msgspec.json.encode(value)
    except (OverflowError, msgspec.MsgspecError):
        payload = repr(value).encode()
    hear(made, payload)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bytes_changed_at_random_harm_nothing(data: st.DataObject) -> None:
    made = world()
    payload = bytearray(msgspec.json.encode(made.make_plan(window_step(200_000, {RUN: 300_000}))))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    hear(made, bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    hear(made, data.draw(st.binary(max_size=64)))


def test_numbers_that_are_none_never_arrive() -> None:
    made = world()
    good = msgspec.json.encode(made.make_plan(window_step(200_000, {RUN: 300_000})))
    for odd in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"300000"', b"300000.5", b"9" * 400):
        payload = good.replace(b'"cap_mw":300000', b'"cap_mw":' + odd)
        assert payload != good
        hear(made, payload)
        assert made.requested()[0] == 400_000, odd
    for name in (b'"epoch":1', b'"seq":2', b'"seq":5'):
        payload = good.replace(name, name + b"0" * 40)
        assert payload != good and hear(made, payload) is not None
        assert made.said("plan_refused")[-1]["reason"].startswith("a number in it is beyond"), name
    assert made.state.highest_epoch == 1, "else no controller could command this node any more"
    good = msgspec.json.encode(made.make_plan(window_step(200_000, {RUN: 300_000})))
    assert hear(made, good) is not None and made.requested()[0] == 300_000


def test_a_plan_too_long_for_a_log_line_is_refused() -> None:
    made = world()
    assert not made.window(200_000, {RUN: 300_000}, reason="x" * 100_000)
    assert "reason" in made.said("plan_refused")[-1]["reason"]
    assert len(made.said("plan_refused")[-1]["reason"]) < 200
    assert not made.window(200_000, node="x" * 100_000)
    assert len(made.said("plan_refused")[-1]["reason"]) <= 1000
    assert len(made.reports[-1].refused) < 1100


def test_refused_plans_reach_the_controller_with_their_reason(site: LoneNode) -> None:
    async def story() -> None:
        async with agent_on(site) as (commander, _):
            report = await commander.until(lambda r: len(r.gpus) == 4, "listed")
            run = site.job(7, "1")
            report = await commander.until(lambda r: r.runs, "the run")
            plan = msgspec.structs.replace
            good = Plan(
                cluster="c",
                node="n1",
                id=PlanId(1, 5),
                answers=report.id,
                mode="enforce",
                reason="test",
                steps=(window_step(200_000, {run: 300_000}),),
            )
            bad = {
                "this is c/n1": plan(good, node="n2"),
                "outside 200000..700000": plan(good, steps=(window_step(100_000),)),
                "another boot": plan(good, answers=plan(report.id, boot_id="boot-0")),
                "never sent": plan(good, answers=plan(report.id, seq=9999)),
            }
            for why, each in bad.items():
                commander.server.send("n1", each)
                told = await commander.until(lambda r, why=why: why in r.refused, f"refused: {why}")  # type: ignore[misc]
                assert ceilings(told) == ALL
            commander.server.send("n1", plan(good, answers=commander.reports[-1].id))
            await commander.ceilings(200_000, 300_000, 200_000, 200_000)

    asyncio.run(story())


def test_a_job_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "1.0").open("wb") as file:
        file.truncate(1 << 30)
    read = _bytes_read()
    files, ignored = read_job_folder(tmp_path, trusted_uids=frozenset({os.geteuid()}))
    assert files == () and ignored == {"1.0": f"larger than {MAX_BYTES} bytes"}
    assert _bytes_read() - read < 1 << 20


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_each_odd_job_file_is_one_line_in_the_log(site: LoneNode) -> None:
    async def story() -> None:
        async with agent_on(site) as (commander, _):
            folder = site.paths.jobs
            with (folder / "1.0").open("wb") as file:
                file.truncate(1 << 30)
            (folder / "2.0").write_bytes(b"pfi-job 1\njob_id 2\nrest")
            (folder / "3.0").symlink_to(folder / "2.0")
            os.mkfifo(folder / "4.0")
            site.job(5, "1")
            (folder / "5.0").chmod(0o666)
            site.job(6, "2")
            os.chown(folder / "6.0", 65534, 65534)
            site.job(7, "3")
            report = await commander.until(lambda r: r.runs, "the sound one")
            assert [one.run.job_id for one in report.runs] == [7]

            def lines(number: int) -> int:
                return site.log.read_text().count(f"job file ignored name={number}.0")

            await until(lambda: all(lines(number) for number in range(1, 7)), "each told")
            (folder / "8.0").write_bytes(b"")  # looked at again
            await until(lambda: lines(8), "told")
            assert [lines(number) for number in range(1, 7)] == [1] * 6

    asyncio.run(story())
