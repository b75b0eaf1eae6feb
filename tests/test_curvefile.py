"""Curve files: what is read, what is repaired and counted, and what is refused by file, line and curve."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.elasticity import curvefile
from slurm_pfi.elasticity.curve import CurveError
from slurm_pfi.elasticity.curvefile import CurveFile, CurveFileError, load_curves, read_curves

HEADER = "curve_id,gpu,cap_w,power_w_per_gpu,throughput"
GOOD = "good,A100,400,390,2.0\ngood,A100,300,300,1.8\ngood,A100,200,200,1.0\n"
A = "a,A100,400,390,2.0\na,A100,300,300,1.8\na,A100,200,200,1.0\n"


def read(rows: str, header: str = HEADER) -> CurveFile:
    return read_curves(f"{header}\n{rows}", origin="x.csv")


def test_a_clean_file() -> None:
    header = f"{HEADER},workload,family,task,source,licence,basis,power_basis,something"
    more = ",resnet50/imagenet bs8,,train,here,MIT,model,measured mean,7"
    made = read("".join(f"{row}{more}\n" for row in A.split()), header)
    (curve,) = made.curves
    assert not made.skipped
    assert (curve.curve_id, curve.gpu, curve.family, curve.task) == ("a", "A100", "resnet", "train")
    assert (curve.source, curve.licence, curve.basis) == ("here", "MIT", "model")
    assert curve.draw_measured
    assert curve.sweep.cap_w.tolist() == [400, 300, 200]
    assert curve.sweep.power_w.tolist() == [390, 300, 200]
    assert (curve.uncapped_w, curve.draw_w, curve.uncapped_known) == (400, 390, False)
    assert curve.repairs().total == 0
    assert curve.curve()[0].loss == pytest.approx([0, 0.1, 0.5])


def test_the_form_of_the_text_does_not_matter() -> None:
    text = f"{HEADER}\n{A}"
    plain = read_curves(text, origin="x")
    quoted = io.StringIO()
    csv.writer(quoted, quoting=csv.QUOTE_ALL).writerows(csv.reader(io.StringIO(text)))
    for other in (
        "\ufeff" + text,
        text.replace("\n", "\r\n"),
        text.replace("\n", "\n\n"),
        "\n\n" + text.replace(",", " , ").rstrip("\n"),
        text.replace("\n", "\n,,,,\n"),
        quoted.getvalue(),
    ):
        made = read_curves(other, origin="x")
        assert not made.skipped, other
        assert made.curves[0].sweep.power_w.tolist() == plain.curves[0].sweep.power_w.tolist()
        assert made.curves[0].sweep.throughput.tolist() == plain.curves[0].sweep.throughput.tolist()


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        (A.replace("1.8", "fast"), 3, "throughput 'fast' is no number above zero"),
        (A.replace("1.8", "nan"), 3, "throughput 'nan'"),
        (A.replace("1.8", "inf"), 3, "throughput 'inf'"),
        (A.replace("1.8", ""), 3, "throughput ''"),
        (A.replace("1.8", "0"), 3, "throughput '0'"),
        (A.replace("1.8", "1_8"), 3, "throughput '1_8'"),
        (A.replace("300,300", "300,-300"), 3, "power_w_per_gpu '-300'"),
        (A.replace("200,200", "200,200000"), 4, "figures are watts of one GPU"),
        (A.replace("200,200", "200,0.01"), 4, "figures are watts of one GPU"),
        (A.replace("1.8", "1e-30"), 3, "use another unit"),
        (A.replace("1.8", "1e30"), 3, "use another unit"),
        (A.replace("300,300", "0,300"), 3, "cap_w '0'"),
        (A.replace("300,300", "300,300,9"), 3, "6 fields where the header has 5"),
        (A.replace(",1.8", ""), 3, "4 fields where the header has 5"),
        (A.replace("a,A100,300", "a,V100,300"), 3, "gpu changes from 'A100' to 'V100'"),
        (A.replace("A100", "NVIDIA"), 2, "names no GPU model"),
        (A.split("\n", maxsplit=1)[0] + "\n", 2, "two or more different caps"),
        (
            A.replace("A100", "A100-SXM(500W)"),
            2,
            "no uncapped point: the highest cap is 400 W, the default limit",
        ),
    ],
)
def test_a_bad_row_takes_its_curve_out_and_no_other(rows: str, line: int, says: str) -> None:
    made = read(rows + GOOD)
    assert [curve.curve_id for curve in made.curves] == ["good"]
    (skipped,) = made.skipped
    assert (skipped.curve_id, skipped.line) == ("a", line)
    assert says in skipped.reason
    assert f"curve a, line {line}: " in str(skipped)


def test_rows_that_name_no_curve_are_told() -> None:
    made = read(f",A100,400,390,2.0\nb\x1b[31m,A100,400,390,2\n{GOOD}")
    assert [curve.curve_id for curve in made.curves] == ["good"]
    assert [(one.curve_id, one.line) for one in made.skipped] == [("", 2), ("", 3)]


@pytest.mark.parametrize("name", ["default_cap_w", "tdp_w"])
def test_the_default_limit_tells_a_curve_without_an_uncapped_point(name: str) -> None:
    rows = "".join(f"{row},400\n" for row in A.split()) + "".join(f"{row},500\n" for row in GOOD.split())
    made = read(rows, f"{HEADER},{name}")
    assert [(curve.curve_id, curve.uncapped_known) for curve in made.curves] == [("a", True)]
    assert "no uncapped point" in made.skipped[0].reason
    given_limit = read_curves(f"{HEADER}\n{A}", origin="x", uncapped_w=500)
    assert "no uncapped point" in given_limit.skipped[0].reason
    assert not given_limit.curves


def test_a_curve_that_ends_below_others_of_its_gpu_is_doubted() -> None:
    made = read(A.removeprefix("a,A100,400,390,2.0\n") + GOOD)
    assert [bool(curve.doubts) for curve in made.curves] == [True, False]
    assert "default_cap_w" in made.curves[0].doubts[0]


def test_repairs_are_counted() -> None:
    rows = "a,A100,300,310,1.7\na,A100,400,400,2\na,A100,200,200,1.9\na,A100,300,290,1.9\na,A100,100,100,1\n"
    curve = read(rows).curves[0]
    repairs = curve.repairs()
    assert (repairs.duplicates, repairs.raised, repairs.unsorted) == (1, 1, 2)
    assert curve.sweep.power_w.tolist() == [400, 300, 200, 100]
    flat = read("a,A100,300,400,1.7\na,A100,400,400,2\na,A100,400,400,2\n").curves[0]
    assert flat.repairs().duplicates == 1
    with pytest.raises(CurveError, match="no cap lowered"):
        flat.curve()


def test_draw_that_nobody_measured() -> None:
    for text, measured in (("measured mean per GPU", True), ("", True), ("cap (draw not reported)", False)):
        rows = "".join(f"{row},{text}\n" for row in A.split())
        curve = read(rows, f"{HEADER},power_basis").curves[0]
        assert curve.draw_measured is measured
        assert bool(curve.doubts) is not measured


def test_an_unknown_basis_is_refused() -> None:
    made = read("".join(f"{row},guessed\n" for row in A.split()), f"{HEADER},basis")
    assert "basis 'guessed' is none of measured, model" in made.skipped[0].reason


def test_columns_asked_for_are_those_of_the_uncapped_point() -> None:
    rows = "a,A100,300,300,1.8,0.3\na,A100,400,390,2.0,0.7\na,A100,200,200,1.0,0.2\n"
    text = f"{HEADER},dram\n{rows}"
    made = read_curves(text, origin="x", need=("dram",), keep=("other",))
    assert made.curves[0].kept == {"dram": "0.7", "other": ""}
    with pytest.raises(CurveFileError, match=r"x: no column other$"):
        read_curves(text, origin="x", need=("other",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "x.csv: the file is empty"),
        ("\n \n", "x.csv: the file is empty"),
        ("curve_id,gpu\na,b", "x.csv: no column cap_w, power_w_per_gpu, throughput"),
        ("curve_id,gpu\na,b", "throughput; one row for each measured cap of each curve is needed$"),
        (HEADER.replace(",", ";"), "commas; one row for each measured cap"),
        (HEADER.replace(",", ";"), "columns are separated by commas"),
        (f"{HEADER},gpu\n", "x.csv: column gpu is there twice"),
        (f'{HEADER}\na,"A100,400', "x.csv: line 2: unexpected end of data"),
        (f"{HEADER}\na\0", "zero bytes"),
    ],
)
def test_files_that_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(CurveFileError, match=says):
        read_curves(text, origin="x.csv")


def test_a_header_alone_holds_no_curve() -> None:
    made = read("")
    assert (made.curves, made.skipped) == ((), ())


def test_bytes_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sweeps.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEADER}\r\n{A}".encode())
    assert len(load_curves(path).curves) == 1
    path.write_bytes(f"{HEADER}\n{A}".encode() + b"\xff\xfe")
    with pytest.raises(CurveFileError, match="line 5 is not UTF-8"):
        load_curves(path)
    with pytest.raises(CurveFileError, match="cannot be read"):
        load_curves(tmp_path / "missing")
    with pytest.raises(CurveFileError, match="cannot be read"):
        load_curves(tmp_path)
    monkeypatch.setattr(curvefile, "MAX_BYTES", 1 << 20)
    path.write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(CurveFileError, match="more than 1 MiB"):
        load_curves(path)


CELL = st.sampled_from(
    ["a", "b", "", "A100", "400", "200", "nan", "-1", "0", "x,y", '"', "1e999", "\x1b", "100"]
)


@settings(max_examples=200)
@given(st.lists(st.lists(CELL, min_size=4, max_size=6), max_size=8), st.integers(0, 99))
def test_any_text_gives_finite_curves_or_a_reason(rows: list[list[str]], seed: int) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([HEADER.split(","), *rows, *csv.reader(io.StringIO(GOOD))])
    made = read_curves(out.getvalue(), origin="x")
    named = {row[0] for row in rows if row[0] and row[0].isprintable()} | {"good"}
    assert {curve.curve_id for curve in made.curves} | {one.curve_id for one in made.skipped} - {""} == named
    assert "good" in {curve.curve_id for curve in made.curves}
    for curve in made.curves:
        for column in curve.points():
            assert (column > 0).all()
    # The order of rows changes nothing but what is counted as unsorted.
    shuffled = GOOD.splitlines()
    random.Random(seed).shuffle(shuffled)
    assert read("\n".join(shuffled)).curves[0].sweep.power_w.tolist() == [390, 300, 200]
