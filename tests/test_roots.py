"""Other generations of Slurm: what cannot be built is an error with a name, never a skip that looks like a pass."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from testbed import roots
from testbed.roots import RootError, ready_root


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where debootstrap is looked for; empty, as on a machine that lacks it. Nothing is built yet."""
    monkeypatch.setattr(roots, "ROOTS", tmp_path / "roots")
    monkeypatch.setattr(roots, "_PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def without_network(programs: Path) -> None:
    path = programs / "debootstrap"
    path.write_text("#!/bin/sh\necho 'E: Failed getting release file'\nexit 1\n")
    path.chmod(0o755)


def test_without_root_it_is_said_who_can_build_it(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(RootError, match=r"Debian trixie: .* only root can build it"):
        ready_root("trixie")


def test_without_debootstrap_it_is_said_what_to_install(programs: Path) -> None:
    with pytest.raises(RootError, match=r"Debian trixie: debootstrap is not installed; .* apt-get install"):
        ready_root("trixie")


def test_without_network_the_release_and_the_reason_are_named_and_nothing_counts_as_built(
    programs: Path,
) -> None:
    without_network(programs)
    for _ in range(2):
        with pytest.raises(
            RootError, match=r"Debian trixie: debootstrap exited 1.*Failed getting release file"
        ):
            ready_root("trixie")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["trixie"], 1), (["--where-possible", "trixie"], 0), (["--where-possible"], 2)]
)
def test_only_what_was_said_to_be_tried_may_be_missing(
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
) -> None:
    without_network(programs)
    monkeypatch.setattr(sys, "argv", ["roots", *arguments])
    assert roots.main() == code
    said = capsys.readouterr().err
    assert ("NOT TESTED: Debian trixie" in said) is (arguments == ["--where-possible", "trixie"])
    assert ("failed on: Debian trixie" in said) is (code == 1)
