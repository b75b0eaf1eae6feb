"""The texts of prolog and epilog as they are installed."""

from __future__ import annotations

import shlex
import subprocess
import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.cli.hooks.scripts import OURS, Settings, is_current, is_ours, rendered, settings_of

REPO = Path(__file__).parent.parent


def test_what_is_installed_is_what_the_project_has() -> None:
    """The package's copies are links to prolog/ and epilog/, which a wheel holds as files."""
    for hook, name in OURS.items():
        text = (REPO / hook.lower() / name).read_text()
        assert settings_of(text) == Settings("/run/slurm-pfi", "/dev/kmsg")
        assert rendered(hook, Settings("/run/slurm-pfi", "/dev/kmsg")).decode() == text
    packaged = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "cli/hooks/scripts/*" in packaged["slurm_pfi"]


def test_prolog_and_epilog_are_guarded_by_the_same_lines() -> None:
    """Each is one file that needs no other; what bounds their time and their faults is in both."""
    guards = set()
    for hook, name in OURS.items():
        text = (REPO / hook.lower() / name).read_text()
        _, begin, rest = text.partition("\nstate_dir=")
        guard, end, _ = rest.partition("\n# is_number TEXT")
        assert begin and end
        assert guard.count(f"{name}[") == 1
        guards.add(guard.replace(f"{name}[", "["))
    assert len(guards) == 1


PATHS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/"), min_size=1, max_size=12)


@given(PATHS | st.just("a b'$(x)`y`\"\\"), PATHS)
def test_any_path_is_set_as_it_is(state: str, log: str) -> None:
    settings = Settings(f"/{state}", f"/{log}")
    for hook in OURS:
        text = rendered(hook, settings).decode()
        assert settings_of(text) == settings
        assert is_ours(hook, text)
        assert is_current(hook, text)


def test_the_shell_reads_the_same_path(tmp_path: Path) -> None:
    odd = "a b'$(touch x)`touch y`\"\\ é"
    lines = rendered("Prolog", Settings(f"/{odd}", "/dev/null")).decode().splitlines()
    line = next(line for line in lines if line.startswith("state_dir="))
    shown = subprocess.run(
        ["/bin/sh", "-c", f'{line}\nprintf %s "$state_dir"'],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert shown.stdout == f"/{odd}"
    assert shlex.split(line.partition("=")[2]) == [f"/{odd}"]
    assert list(tmp_path.iterdir()) == []
