"""What ``slurm-pfi doctor`` says of prolog, epilog and the sbatch plugin."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest

from slurm_pfi.cli.checks.finding import Finding
from slurm_pfi.cli.checks.hooks import (
    hook_findings,
    limit_findings,
    order_findings,
    plugin_finding,
    repeated_finding,
    timeout_finding,
)
from slurm_pfi.cli.hooks.scripts import Hook, Settings, rendered, stub
from slurm_pfi.slurm.version import Version

from .doctor_texts import only

REPO: Final = Path(__file__).parent.parent


def hook(tmp_path: Path, *values: str, is_node: bool = True) -> list[Finding]:
    return list(hook_findings("Prolog", values, tmp_path, Path("/run/slurm-pfi"), is_node=is_node))


def install(path: Path, text: str | None = None, mode: int = 0o755) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text or (REPO / "prolog/slurm-pfi-prolog").read_text())
    path.chmod(mode)
    return path


def test_our_hook_is_found_directly_in_a_folder_and_behind_a_wrapper(tmp_path: Path) -> None:
    ours = install(tmp_path / "prolog.d/slurm-pfi-prolog")
    install(tmp_path / "prolog.d/10-other", "#!/bin/sh\nexit 0\n")
    assert only(hook(tmp_path, str(ours))).outcome == "ok"
    assert only(hook(tmp_path, f"{tmp_path}/prolog.d/*")).outcome == "ok"
    assert only(hook(tmp_path, str(tmp_path / "prolog.d/10-other"), str(ours))).outcome == "ok"
    wrapper = install(tmp_path / "wrapper", f"#!/bin/sh\nexec {ours}\n")
    assert only(hook(tmp_path, str(wrapper))).outcome == "ok"


def test_without_our_hook_no_run_is_seen(tmp_path: Path) -> None:
    other = install(tmp_path / "other", "#!/bin/sh\nexit 0\n")
    for values in ((), (str(other),)):
        finding = only(hook(tmp_path, *values))
        assert finding.outcome == "warn"
        assert "run 'slurm-pfi hooks install'" in finding.todo
        assert "no run is" in finding.found


def test_hooks_that_drain_nodes_fail(tmp_path: Path) -> None:
    missing = hook(tmp_path, str(tmp_path / "absent"))
    assert [finding.outcome for finding in missing] == ["fail"]
    assert "is configured and not there: Slurm drains this node" in missing[0].found
    (tmp_path / "prolog.d").mkdir()
    empty = hook(tmp_path, f"{tmp_path}/prolog.d/*")
    assert "matches no file on this node: Slurm drains it" in empty[0].found
    assert [finding.outcome for finding in empty] == ["fail"]
    install(tmp_path / "prolog.d/slurm-pfi-prolog")
    install(tmp_path / "prolog.d/notes.txt", "note\n", mode=0o644)
    beside = hook(tmp_path, f"{tmp_path}/prolog.d/*")
    assert [finding.outcome for finding in beside] == ["fail", "ok"]
    assert "notes.txt is not an executable file" in beside[0].found


def test_a_pipe_or_a_loop_of_links_among_hooks_is_not_waited_for(tmp_path: Path) -> None:
    install(tmp_path / "prolog.d/slurm-pfi-prolog")
    os.mkfifo(tmp_path / "prolog.d/pipe")
    (tmp_path / "prolog.d/loop").symlink_to("loop")
    found = hook(tmp_path, f"{tmp_path}/prolog.d/*")
    assert [finding.outcome for finding in found] == ["unseen", "fail", "ok"]
    assert "pipe is not an executable file" in found[1].found


def test_a_hook_that_others_may_write_fails(tmp_path: Path) -> None:
    path = install(tmp_path / "slurm-pfi-prolog", mode=0o775)
    findings = hook(tmp_path, str(path))
    assert findings[0].outcome == "fail"
    assert "mode 0775" in findings[0].found


def test_on_a_host_that_runs_no_jobs_a_missing_hook_says_nothing(tmp_path: Path) -> None:
    for value in ("absent", "absent.d/*"):
        finding = only(hook(tmp_path, str(tmp_path / value), is_node=False))
        assert finding.outcome == "unseen"


def test_hook_and_agent_must_mean_the_same_folder(tmp_path: Path) -> None:
    text = (
        (REPO / "prolog/slurm-pfi-prolog")
        .read_text()
        .replace("state_dir=/run/slurm-pfi", "state_dir=/run/other")
    )
    finding = only(hook(tmp_path, str(install(tmp_path / "slurm-pfi-prolog", text))))
    assert finding.outcome == "fail"
    assert "works in /run/other, the agent in /run/slurm-pfi" in finding.found


def test_the_order_among_other_hooks(tmp_path: Path) -> None:
    files = [(Path("10-a"), "#!/bin/sh\n"), (Path("mine"), ""), (Path("zz-b"), "#!/bin/sh\n")]
    said: dict[Hook, str] = {"Prolog": "zz-b run after ours", "Epilog": "10-a run before ours"}
    for hook, name in said.items():
        ours = (REPO / f"{hook.lower()}/slurm-pfi-{hook.lower()}").read_text()
        found = only(order_findings(hook, [files[0], (files[1][0], ours), files[2]]))
        assert (found.outcome, name in found.found) == ("warn", True)
        best = [files[0], (files[1][0], ours)] if hook == "Prolog" else [(files[1][0], ours), files[2]]
        assert list(order_findings(hook, best)) == []
        assert list(order_findings(hook, files)) == [], "ours is not among them"


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ("nvidia-smi -pl 300", True),
        ("/usr/bin/nvidia-smi -i 0 --power-limit=300", True),
        ("sudo nvidia-smi --gpu-reset -i 0", True),
        ("nvidia-smi -q -d POWER", False),
        ("# nvidia-smi -pl 300", False),
        ("nvidia-smi -pm 1", False),
    ],
)
def test_other_hooks_that_set_limits(line: str, sets: bool) -> None:
    found = list(limit_findings("Prolog", [(Path("/etc/slurm/10-gpu"), f"#!/bin/sh\n{line}\n")]))
    assert [(each.outcome, "/etc/slurm/10-gpu sets" in each.found) for each in found] == [
        ("warn", True)
    ] * sets


def test_what_a_removal_left_a_log_that_is_gone_another_version(tmp_path: Path) -> None:
    path = install(tmp_path / "zz-slurm-pfi-prolog", stub("Prolog").decode())
    assert "does nothing: no run is seen" in hook(tmp_path, str(path))[0].found
    text = rendered("Prolog", Settings("/run/slurm-pfi", str(tmp_path / "log"))).decode()
    finding = only(hook(tmp_path, str(install(path, text))))
    assert (finding.outcome, "which is not there" in finding.found) == ("warn", True)
    (tmp_path / "log").touch()
    assert only(hook(tmp_path, str(path))).outcome == "ok"
    install(path, text.replace("umask 022", "umask 077"))
    assert "of another version" in only(hook(tmp_path, str(path))).found


def test_a_folder_of_hooks_that_others_may_write(tmp_path: Path) -> None:
    path = install(tmp_path / "prolog.d/slurm-pfi-prolog")
    path.parent.chmod(0o777)
    findings = hook(tmp_path, str(path))
    assert findings[0].outcome == "fail"
    assert f"{path.parent} may be written by others (mode 0777)" in findings[0].found


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        (Version(22, 5), "fail"),
        (Version(23, 2), "warn"),
        (None, "warn"),
        (Version(24, 11), "ok"),
        (Version(26, 5), "ok"),
    ],
)
def test_two_lines_for_one_hook(version: Version | None, outcome: str) -> None:
    found = repeated_finding("Prolog", ("/site", "/ours"), version)
    assert (found.outcome, "/ours alone" in found.found) == (outcome, outcome != "ok")


@pytest.mark.parametrize(
    ("value", "outcome"),
    [("", "ok"), ("65534", "ok"), ("60", "ok"), ("10", "ok"), ("9", "warn"), ("6", "fail"), ("1", "fail")],
)
def test_the_time_of_hooks(value: str, outcome: str) -> None:
    assert timeout_finding(value).outcome == outcome


@pytest.mark.parametrize(
    ("line", "there", "outcome", "part"),
    [
        ("optional {so} x=1", True, "ok", "as optional"),
        ("# optional {so}", True, "warn", "does not list slurm_pfi.so"),
        ("required {so}", True, "warn", "as required"),
        ("required {so}", False, "fail", "every sbatch is blocked"),
        ("optional {so}", False, "warn", "is not on this host"),
        ("optional slurm_pfi.so", True, "unseen", "PluginDir"),
        ("include {folder}/more.d/*", True, "ok", "as optional"),
    ],
)
def test_plugstack(tmp_path: Path, line: str, there: bool, outcome: str, part: str) -> None:
    so = tmp_path / "slurm_pfi.so"
    if there:
        so.write_bytes(b"")
    (tmp_path / "more.d").mkdir()
    (tmp_path / "more.d/pfi.conf").write_text(f"optional {so}\n")
    path = tmp_path / "plugstack.conf"
    path.write_text(f"optional /usr/lib/other.so\n{line.format(so=so, folder=tmp_path)}\n")
    finding = plugin_finding(path)
    assert (finding.outcome, part in finding.found) == (outcome, True), finding


def test_no_plugstack_at_all(tmp_path: Path) -> None:
    finding = plugin_finding(tmp_path / "plugstack.conf")
    assert finding.outcome == "warn"
    assert "sbatch has no --power-flex" in finding.found


def test_the_line_that_is_shipped_is_optional() -> None:
    text = (REPO / "etc/plugstack.conf").read_text()
    assert re.search(r"(?m)^optional /\S*/slurm_pfi\.so$", text)
