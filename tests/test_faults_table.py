"""docs/faults.md, the tests and the mutants say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from testbed.gpu_faults import FAULTS
from testbed.mutant import Mutant
from testbed.mutants import MUTANTS, REPO

PAGE = (REPO / "docs/faults.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]
NUMBERED = {int(row[0]): row for row in ROWS if row[0].isdigit()}
CASES = {row[0]: row for row in ROWS if re.fullmatch(r"[CDF][0-9]+", row[0])}
OF_HOOKS = [row for row in ROWS if re.fullmatch(r"[AG][0-9]+", row[0])]


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def check(row: list[str], name: re.Pattern[str]) -> Mutant:
    """The test of this row exists and is named after it; its mutant, which some test is to find."""
    *_, test, mutant = row
    file, _, function = test.partition("::")
    assert name.match(function), f"{function} is not named after {row[0]}"
    assert function in functions_in(REPO / "tests" / file), test
    (planted,) = [one for one in MUTANTS if one.name == mutant]
    assert planted.tests, mutant
    return planted


def check_run(row: list[str], name: re.Pattern[str]) -> Mutant:
    """As `check`, and the mutant runs this very test."""
    planted, test = check(row, name), row[-2]
    assert {f"tests/{test}", f"tests/{test.partition('::')[0]}"} & set(planted.tests), (
        f"{row[-1]} does not run {test}"
    )
    return planted


def test_every_fault_has_its_row_test_and_mutant() -> None:
    assert list(NUMBERED) == list(range(1, 45)) == sorted(FAULTS)
    for number, row in NUMBERED.items():
        check_run(row, re.compile(rf"test_fault_{number:02d}_"))


def test_every_case_has_its_row_test_and_mutant() -> None:
    assert {*(f"C{number}" for number in range(1, 11)), "F1", "F3", "F4", "F5", "F7", "F9"} <= set(CASES)
    for case, row in CASES.items():
        check(row, re.compile(rf"test_{case.lower()}_"))


def test_every_case_of_the_hooks_has_its_row_test_and_mutant() -> None:
    assert {row[0] for row in OF_HOOKS} == {"A1", "A2", "A4", "A11", "G2"}
    for row in OF_HOOKS:
        assert check_run(row, re.compile(r"test_")).invariant == row[0]


def test_every_mutant_of_a_fault_runs_the_fault_s_own_test() -> None:
    """A mutant may serve several rows; each number that it names is tested by it."""
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    for number, row in NUMBERED.items():
        planted = by_name[row[-1]]
        assert re.search(rf"\b{number}\b", planted.invariant), f"{planted.name} does not break {number}"


def test_every_mutants_text_is_there_once() -> None:
    for mutant in MUTANTS:
        assert (REPO / "src/slurm_pfi" / mutant.file).read_text().count(mutant.old) == 1, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert not function or function in functions_in(REPO / file), test
