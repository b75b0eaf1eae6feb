"""Frames: what goes in comes out, and nothing else passes."""

from __future__ import annotations

import json
import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.bus.codec import HEADER_BYTES, MAX_FRAME_BYTES, CodecError, decode, encode, frame_length
from slurm_pfi.model import GpuReport, Plan, PlanId, PlanStep, Report, ReportId, Run, RunCap, RunReport

NAMES = st.text(min_size=1, max_size=12)
POWERS = st.none() | st.integers(0, 10**9)
SECONDS = st.floats(0, 1e7, allow_nan=False)
RUNS = st.builds(Run, cluster=NAMES, job_id=st.integers(1, 2**32 - 1), restart=st.integers(0, 2**16))
IDS = st.builds(ReportId, boot_id=NAMES, agent_id=NAMES, seq=st.integers(0, 2**53))
PLAN_IDS = st.builds(PlanId, epoch=st.integers(0, 2**53), seq=st.integers(0, 2**53))
STEPS = st.builds(
    PlanStep,
    starts_in_s=SECONDS,
    park_cap_mw=POWERS,
    caps=st.lists(st.builds(RunCap, run=RUNS, cap_mw=POWERS), max_size=3).map(tuple),
)
PLANS = st.builds(
    Plan,
    cluster=NAMES,
    node=NAMES,
    id=PLAN_IDS,
    answers=IDS,
    mode=st.sampled_from(["observe", "enforce"]),
    reason=st.text(max_size=20),
    steps=st.lists(STEPS, max_size=3).map(tuple),
    priors=st.dictionaries(NAMES, st.integers(0, 10**9), max_size=3),
    gone=st.lists(RUNS, max_size=2).map(tuple),
)
GPUS = st.builds(
    GpuReport,
    uuid=NAMES,
    model=NAMES,
    position=st.none() | st.integers(0, 63),
    min_mw=st.integers(0, 10**9),
    max_mw=st.integers(0, 10**9),
    default_mw=st.integers(0, 10**9),
    requested_mw=POWERS,
    enforced_mw=POWERS,
    ceiling_mw=POWERS,
    prior_mw=POWERS,
    draw_mw=POWERS,
    runs=st.lists(RUNS, max_size=2).map(tuple),
)
REPORTS = st.builds(
    Report,
    cluster=NAMES,
    node=NAMES,
    id=IDS,
    highest_epoch=st.integers(0, 2**53),
    held=st.none() | PLAN_IDS,
    released=st.booleans(),
    window_ends_in_s=st.none() | SECONDS,
    gpus=st.lists(GPUS, max_size=3).map(tuple),
    runs=st.lists(
        st.builds(RunReport, run=RUNS, uid=st.integers(0, 2**32 - 1), flex=NAMES, gpus=st.just(())),
        max_size=2,
    ).map(tuple),
)


PLAN = Plan(
    cluster="c",
    node="n1",
    id=PlanId(epoch=1, seq=2),
    answers=ReportId(boot_id="b", agent_id="a", seq=3),
    mode="enforce",
    reason="limit",
    steps=(PlanStep(starts_in_s=0.0, park_cap_mw=200_000),),
)


def plan(**changes: object) -> Plan:
    return msgspec.structs.replace(PLAN, **changes)


def as_json(**changes: object) -> dict[str, object]:
    """A plan's payload as plain JSON, with some fields changed."""
    fields: dict[str, object] = json.loads(encode(plan())[HEADER_BYTES:])
    return fields | changes


@given(REPORTS | PLANS)
def test_round_trip(message: Report | Plan) -> None:
    frame = encode(message)
    assert frame_length(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    assert decode(frame[HEADER_BYTES:]) == message


def test_the_length_is_four_bytes_big_endian() -> None:
    frame = encode(plan())
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    assert json.loads(frame[4:])["type"] == "plan"


@given(st.binary(max_size=200))
def test_garbage_is_a_codec_error(payload: bytes) -> None:
    with pytest.raises(CodecError):
        decode(payload)


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_out_of_bounds_is_refused_by_its_header(length: int) -> None:
    with pytest.raises(CodecError, match=str(length)):
        frame_length(struct.pack(">I", length))


def test_the_largest_frame_passes_and_one_byte_more_does_not() -> None:
    room = MAX_FRAME_BYTES - (len(encode(plan(reason=""))) - HEADER_BYTES)
    assert frame_length(encode(plan(reason="x" * room))[:HEADER_BYTES]) == MAX_FRAME_BYTES
    with pytest.raises(CodecError, match="above"):
        encode(plan(reason="x" * (room + 1)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_not_sent(bad: float) -> None:
    with pytest.raises(CodecError):
        encode(plan(steps=(PlanStep(starts_in_s=bad, park_cap_mw=None),)))


def test_an_optional_number_that_is_not_finite_does_not_become_unknown() -> None:
    report = Report(
        cluster="c",
        node="n1",
        id=ReportId(boot_id="b", agent_id="a", seq=1),
        highest_epoch=0,
        held=None,
        released=False,
        window_ends_in_s=math.inf,
        gpus=(),
        runs=(),
    )
    with pytest.raises(CodecError, match="not finite"):
        encode(report)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", '"5"', "true", "null", "[]"])
def test_what_is_not_a_number_is_refused(text: str) -> None:
    payload = json.dumps(as_json(steps=[{"starts_in_s": "HERE", "park_cap_mw": None}]))
    with pytest.raises(CodecError):
        decode(payload.replace('"HERE"', text).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "order"},
        {"type": None},
        {"mode": "force"},
        {"node": 7},
        {"id": {"epoch": "1", "seq": 2}},
        {"id": {"epoch": 1.5, "seq": 2}},
        {"priors": {"GPU-1": None}},
        {"steps": None},
    ],
)
def test_wrong_types_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CodecError):
        decode(json.dumps(as_json(**changes)).encode())


def test_a_missing_field_is_refused_and_an_unknown_one_ignored() -> None:
    fields = as_json(newer_field={"a": [1]})
    assert decode(json.dumps(fields).encode()) == plan()
    del fields["answers"]
    with pytest.raises(CodecError, match="answers"):
        decode(json.dumps(fields).encode())
