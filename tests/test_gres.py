"""GRES text, positions and host lists as Slurm writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.slurm.gres import GresError, parse_gres, parse_positions
from slurm_pfi.slurm.hosts import HostListError, expand_list, host_in_list


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        (None, ()),
        ("", ()),
        ("0", (0,)),
        ("0,1,5", (0, 1, 5)),
        ("0,2-3", (0, 2, 3)),
        ("12-14,3", (12, 13, 14, 3)),
        ("0-15", tuple(range(16))),
    ],
)
def test_positions(text: str | None, positions: tuple[int, ...]) -> None:
    assert parse_positions(text) == positions


DAMAGED_POSITIONS = (
    ", 0, ,0 0,,1 3-1 1- -1 a 0-a 0x1 0,0 0-3,2 1024 0-999999999999 N/A (null) NoDevFiles 0;1 1.5"
)


@pytest.mark.parametrize(
    "text", [*DAMAGED_POSITIONS.split(), " 0", "0 1", "0\n", "\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_damaged_positions_are_errors(text: str) -> None:
    with pytest.raises(GresError):
        parse_positions(text)


@given(st.lists(st.integers(0, 1023), unique=True, max_size=64))
def test_any_set_of_positions_is_read_back(positions: list[int]) -> None:
    assert parse_positions(",".join(map(str, positions))) == tuple(positions)


@given(st.text(max_size=30))
def test_any_text_is_positions_or_an_error(text: str) -> None:
    try:
        positions = parse_positions(text)
    except GresError:
        return
    assert len(set(positions)) == len(positions)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:h200:3(IDX:0,2-3)", {"h200": (0, 2, 3)}),
        ("gpu:4(IDX:0-3)", {"": (0, 1, 2, 3)}),
        ("gpu(IDX:2)", {"": (2,)}),
        ("gpu:(null):3(IDX:0,6-7)", {"": (0, 6, 7)}),
        ("gpu:h200:0(IDX:N/A)", {"h200": ()}),
        ("(null)", {}),
        ("", {}),
        ("N/A", {}),
        ("gpu:h100-sxm5.80gb_x:2(IDX:6-7)", {"h100-sxm5.80gb_x": (6, 7)}),
        ("gpu:1g.5gb:2(IDX:7,20)", {"1g.5gb": (7, 20)}),
        ("gpu:h200:8(S:0-1)", {"h200": None}),
        ("gres/gpu:h200:2", {"h200": None}),
        ("gres:gpu:2", {"": None}),
        ("gpu:h200:2", {"h200": None}),
        ("gpu", {"": None}),
        ("gpu:a:1(IDX:0),gpu:b:3(IDX:1,3-4),shard:4(IDX:0-3)", {"a": (0,), "b": (1, 3, 4)}),
    ],
)
def test_gres_text(text: str, gpus: dict[str, tuple[int, ...] | None]) -> None:
    assert {gres.type: gres.indices for gres in parse_gres(text) if gres.name == "gpu"} == gpus


def test_a_count_without_indices_is_kept() -> None:
    (gres,) = parse_gres("gpu:h200:2")
    assert (gres.count, gres.indices) == (2, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu:h200:2(IDX:0,", "cut off"),
        ("gpu:h200:3(IDX:0-1)", "counts 3 and names 2"),
        ("gpu:h200:1(IDX:)", "names no index"),
        ("gpu:h200:1(IDX:x)", "x"),
        ("gpu:h200:1(INDEX:1)", "INDEX"),
        ("gpu:h200:2(IDX:0)(IDX:1)", "not a resource"),
        ("gpu:h200:1)", "unexpected ')'"),
        ("gpu:h200:1,,gpu:a:1", "at 11"),
        ("gpu:h200:-1", "not a resource"),
    ],
)
def test_damaged_gres_is_an_error_with_its_place(text: str, said: str) -> None:
    with pytest.raises(GresError, match=said.replace("(", r"\(").replace(")", r"\)")):
        parse_gres(text)


HOSTS = [
    ("q7-[09-10]", ["q7-09", "q7-10"]),
    ("h[098-101]", ["h098", "h099", "h100", "h101"]),
    ("alpha,beta[002,005],gamma", ["alpha", "beta002", "beta005", "gamma"]),
    (
        "x003,x0[10-12],x[103-104],x[10,12-14],x-m11",
        ["x003", "x010", "x011", "x012", "x103", "x104", "x10", "x12", "x13", "x14", "x-m11"],
    ),
    ("n[001-003,1-2]", ["n001", "n002", "n003", "n1", "n2"]),
    ("r-[1-2]-u-[03-04,08]", ["r-1-u-03", "r-1-u-04", "r-1-u-08", "r-2-u-03", "r-2-u-04", "r-2-u-08"]),
    ("a1", ["a1"]),
    ("n[8-11]", ["n8", "n9", "n10", "n11"]),
    ("/dev/nvidia[3,1]", ["/dev/nvidia3", "/dev/nvidia1"]),
    ("n[1-2]0", ["n10", "n20"]),
]


@pytest.mark.parametrize(("text", "hosts"), HOSTS)
def test_lists_hold_exactly_their_names(text: str, hosts: list[str]) -> None:
    assert list(expand_list(text, 100)) == hosts
    for host in hosts:
        assert host_in_list(host, text)
    for stranger in (
        {host.replace("0", "") for host in hosts} | {host + "0" for host in hosts} | {"n08", "n0"}
    ):
        assert host_in_list(stranger, text) == (stranger in hosts)


@given(st.integers(0, 300), st.integers(0, 40), st.integers(1, 4), st.integers(0, 400), st.integers(1, 4))
def test_matching_and_expanding_agree(low: int, more: int, width: int, number: int, name_width: int) -> None:
    text = f"n[{str(low).zfill(width)}-{low + more}]"
    name = f"n{str(number).zfill(name_width)}"
    assert host_in_list(name, text) == (name in expand_list(text, 100))


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[1", "n1]", "n[[1]]", "n[]", "n[2-1]", "n[a]", "a b", "n[1-2", "n[1,]"]
)
def test_damaged_lists_are_errors(text: str) -> None:
    with pytest.raises(HostListError):
        host_in_list("n1", text)


def test_a_list_is_not_expanded_without_end() -> None:
    with pytest.raises(HostListError, match="more than 64"):
        expand_list("n[1-999999999]", 64)
