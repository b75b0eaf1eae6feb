"""The checks of ``slurm-pfi doctor``, each on texts and folders in which one thing is wrong."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from slurm_pfi.cli.checks import gpus
from slurm_pfi.cli.checks.commands import run
from slurm_pfi.cli.checks.daemons import folder_finding
from slurm_pfi.cli.checks.everything import CHECKS, gather, run_checks
from slurm_pfi.cli.checks.finding import Finding
from slurm_pfi.cli.checks.hooks import (
    hook_findings,
    limit_findings,
    order_findings,
    plugin_finding,
    repeated_finding,
    timeout_finding,
)
from slurm_pfi.cli.checks.risks import gpu_orders, site_risks
from slurm_pfi.cli.checks.slurm import (
    accounting_finding,
    compare_nodes,
    compare_running,
    nodes_shown,
    version_finding,
)
from slurm_pfi.cli.checks.slurmconf import gpu_count, parse_show_config, parse_slurm_conf
from slurm_pfi.cli.hooks.scripts import Hook, Settings, rendered, stub
from slurm_pfi.cli.root import main
from slurm_pfi.config import SlurmSection, load_config
from slurm_pfi.gpu.device import Capabilities, DeviceInfo, DeviceLimits

REPO: Final = Path(__file__).parent.parent

# A site with five settings that change what may be assumed.
RISKY_SLURM: Final = """\
ClusterName=lab
SlurmctldHost=head
PrologFlags=Serial
Prolog=/etc/slurm/prolog.d/*
GresTypes=gpu,mps,shard
AccountingStorageTRES=license/matlab   # gres/gpu is missing
NodeName=a[01-16] CPUs=128 Gres=gpu:big:8 State=UNKNOWN
NodeName=b[01-02] CPUs=64 \\
    Gres=gpu:big_1g.10gb:14,gpu:big:1
NodeName=c[1-4] CPUs=64 Gres=gpu:mid:4,shard:mid:32
PartitionName=gpu Nodes=ALL Default=YES
Include /etc/slurm/more.conf
"""
RISKY_GRES: Final = """\
NodeName=a[01-16] Name=gpu Type=big File=/dev/nvidia[0-7] Cores=0-63
NodeName=b[01-02] AutoDetect=nvml
NodeName=c[1-4] Name=gpu Type=mid File=/dev/nvidia0
NodeName=c[1-4] Name=gpu Type=mid File=/dev/nvidia2
NodeName=c[1-4] Name=gpu Type=mid File=/dev/nvidia[1,3]
NodeName=c[1-4] Name=shard Count=32
"""
SOUND_SLURM: Final = """\
PrologFlags=Contain,X11
GresTypes=gpu
AccountingStorageTRES=gres/gpu,license/x
NodeName=a[01-16] Gres=gpu:8
"""
SOUND_GRES: Final = "NodeName=a[01-16] Name=gpu File=/dev/nvidia[0-7]\n"


def only(findings: Any) -> Finding:
    listed = list(findings)
    assert len(listed) == 1, listed
    finding = listed[0]
    assert isinstance(finding, Finding)
    if finding.outcome == "fail":
        assert finding.todo, "a failure says what to do"
    return finding


# ------------------------------------------------------------------------------------------- slurm.conf, gres.conf


def test_five_risks_of_a_site_are_named() -> None:
    risks = {risk.name: risk for risk in site_risks(RISKY_SLURM, RISKY_GRES)}
    assert list(risks) == ["prolog-late", "prolog-serial", "gpu-not-in-tres", "gpu-shared", "gpu-order"]
    assert risks["prolog-late"].text.startswith(
        "PrologFlags lacks Alloc: the prolog is late or missing on some nodes"
    )
    assert "more.conf, which was not read" in risks["prolog-late"].text
    assert risks["prolog-late"].grave
    assert "one slow prolog delays all" in risks["prolog-serial"].text
    assert risks["gpu-not-in-tres"].text.startswith("gres/gpu is not in AccountingStorageTRES")
    assert "MIG on b[01-02]" in risks["gpu-shared"].text
    assert "shard on c[1-4]" in risks["gpu-shared"].text
    assert risks["gpu-order"].text.startswith("on c[1-4] Slurm index 1 is /dev/nvidia2")
    assert all(risk.todo for risk in risks.values())


def test_a_sound_site_has_none() -> None:
    assert site_risks(SOUND_SLURM, SOUND_GRES) == ()


@pytest.mark.parametrize(
    ("flags", "late"),
    [
        ("Alloc", False),
        ("contain", False),
        ("X11", False),
        ("NoHold", True),
        ("DeferBatch", True),
        ("", True),
    ],
)
def test_which_prolog_flags_do(flags: str, late: bool) -> None:
    text = SOUND_SLURM.replace("Contain,X11", flags) if flags else SOUND_SLURM.partition("\n")[2]
    assert [risk.name for risk in site_risks(text, SOUND_GRES)] == (["prolog-late"] if late else [])


def test_positions_that_cannot_be_known_are_told_by_set_of_nodes() -> None:
    orders = {order.nodes: order for order in gpu_orders(parse_slurm_conf(RISKY_SLURM), RISKY_GRES)}
    assert set(orders) == {"a[01-16]", "b[01-02]", "c[1-4]"}
    assert orders["c[1-4]"].files[1] == "/dev/nvidia2"
    assert "AutoDetect=nvml gives no files" in orders["b[01-02]"].unknown


def test_nodes_of_one_line_that_differ_in_gres_conf_are_kept_apart() -> None:
    gres = "NodeName=a[01-03] Name=gpu File=/dev/nvidia[0-7]\nNodeName=a[04-16] Name=gpu File=/dev/nvidia[7,0-6]\n"
    (risk,) = site_risks(SOUND_SLURM, gres)
    assert risk.text.startswith("on a[04-16] Slurm index 0 is /dev/nvidia7")


def test_slurm_conf_is_read_as_slurm_writes_it() -> None:
    included = {
        "/etc/slurm/more.conf": "Prolog=/second # twice from 23.11 on\nInclude /etc/slurm/deep.conf\n"
    }
    text = (
        "prolog = /first  SlurmUser=slurm\n#Epilog=/no\nAuthInfo=socket=/run/m\nNodeName=DEFAULT Gres=gpu:2\n"
    )
    text += 'NodeName=x[1-2]\nNodeName=y Gres=""\nInclude /etc/slurm/more.conf\n'
    conf = parse_slurm_conf(text, include=included.get)
    assert conf.values["prolog"] == ("/first", "/second")
    assert conf.value("SLURMUSER") == "slurm"
    assert conf.value("AuthInfo") == "socket=/run/m"
    assert conf.value("Epilog") == ""
    assert conf.gpus_by_node() == {"x1": 2, "x2": 2, "y": 0}
    assert conf.unread == ("/etc/slurm/deep.conf",)
    assert conf.names_node("x2")
    assert not conf.names_node("x3")


def test_a_file_that_includes_itself_ends() -> None:
    conf = parse_slurm_conf("Include a\n", include=lambda _: "Include a\nSlurmUser=x\n")
    assert conf.value("SlurmUser") == "x"
    assert conf.unread


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpu:h200:8(S:0-1)", 8),
        ("gpu:a:1,gpu:b:2,shard:9", 3),
        ("(null)", 0),
        ("", 0),
        ("gpu", 1),
        ("gpu:(", None),
    ],
)
def test_gpus_of_a_gres_text(text: str, count: int | None) -> None:
    assert gpu_count(text) == count


# ------------------------------------------------------------------------------------------- Slurm's answers


def test_settings_that_run_and_settings_that_are_written() -> None:
    shown = "Configuration data as of now\nProlog                = /new/hook\nSlurmUser             = slurm(64030)\n"
    shown += (
        "Epilog                  = (null)\nPrologEpilogTimeout     = 60 sec\nPlugStackConfig         = /p\n"
    )
    running = parse_show_config(shown)
    same = parse_slurm_conf("Prolog=/new/hook\nSlurmUser=slurm\nPrologEpilogTimeout=60\nPlugStackConfig=/p\n")
    assert only(compare_running(same, running)).outcome == "ok"
    edited = parse_slurm_conf("Prolog=/new/hook\nEpilog=/new/epilog\n")
    finding = only(compare_running(edited, running))
    assert finding.outcome == "warn"
    assert "Epilog=/new/epilog is written" in finding.found
    assert "scontrol reconfigure" in finding.todo


@pytest.mark.parametrize(
    ("shown", "outcome", "part"),
    [
        ("AccountingStorageType   = accounting_storage/slurmdbd\n", "ok", "sacct -o admincomment"),
        (
            "AccountingStorageType   = accounting_storage/none\nMinJobAge               = 300 sec\n",
            "ok",
            "a tag is gone 300 sec after its job's end",
        ),
        ("AccountingStorageType = (null)\n", "ok", "a tag is gone some time after"),  # as newer Slurm says it
        ("", "unseen", "does not say"),
    ],
)
def test_whether_the_accounting_keeps_tags(shown: str, outcome: str, part: str) -> None:
    finding = accounting_finding(parse_show_config(shown))
    assert finding.outcome == outcome
    assert part in finding.found


def test_nodes_as_scontrol_shows_them() -> None:
    text = "NodeName=n1 Arch=x86_64 Gres=gpu:h200:8(S:0-1) NodeAddr=n1 Comment=Gres=gpu:1\n"
    text += "NodeName=n2 Gres=(null) NodeAddr=n2\nNodeName=n3 NodeAddr=n3\n"
    assert nodes_shown(text) == {"n1": 8, "n2": 0, "n3": None}


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome", "parts"),
    [
        ({"n1": 8, "n2": 8}, {"n1": 8, "n2": 8, "login": 0}, "ok", ["2 nodes"]),
        ({"n1": 8}, {"n1": 8, "n2": 8, "n3": 4}, "warn", ["n[2-3]", "no budget counts them"]),
        ({"n1": 8, "n7": 8}, {"n1": 8}, "warn", ["n7", "worst for ever"]),
        ({"n1": 4, "n2": 4}, {"n1": 8, "n2": 8}, "fail", ["n[1-2]", "says 4 GPUs, Slurm says 8"]),
        ({"n1": 8}, {"n1": 4}, "warn", ["n1", "says 8 GPUs, Slurm says 4"]),
        ({"n1": 8}, {"n1": None}, "unseen", ["n1", "not understood"]),
        ({}, {}, "fail", ["no [[node_set]]"]),
    ],
)
def test_node_sets_against_slurm(
    ours: dict[str, int], theirs: dict[str, int | None], outcome: str, parts: list[str]
) -> None:
    finding = only(compare_nodes(ours, theirs))
    assert finding.outcome == outcome
    for part in parts:
        assert part in finding.found


@pytest.mark.parametrize(
    ("said", "outcome"),
    [("slurm-wlm 22.05.8", "ok"), ("slurm 24.11.5", "ok"), ("slurm 21.08.8-2", "warn"), ("what?", "warn")],
)
def test_versions(said: str, outcome: str) -> None:
    assert version_finding(said).outcome == outcome


def test_a_command_that_hangs_is_given_up(tmp_path: Path) -> None:
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    before = time.monotonic()
    answer = run(SlurmSection(bin_dir=str(tmp_path)), "scontrol", "ping", patience_s=0.3)
    assert answer == "scontrol ping gave no answer within 0.3 s"
    assert time.monotonic() - before < 5
    assert run(SlurmSection(bin_dir=str(tmp_path)), "squeue") == f"squeue is not found in {tmp_path}"


# ------------------------------------------------------------------------------------------- hooks and plugin


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
    [((22, 5), "fail"), ((23, 2), "warn"), (None, "warn"), ((24, 11), "ok"), ((26, 5), "ok")],
)
def test_two_lines_for_one_hook(version: tuple[int, int] | None, outcome: str) -> None:
    found = repeated_finding("Prolog", ("/site", "/ours"), version)
    assert (found.outcome, "/ours alone" in found.found) == (outcome, outcome != "ok")


def test_hooks_check_names_the_five_risks_and_changes_nothing(
    bare_site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files alone are looked at: without Slurm, a driver or a daemon of ours."""
    folder = bare_site.parent / "judged"
    folder.mkdir()
    (folder / "slurm.conf").write_text(
        RISKY_SLURM.replace("PrologFlags", "PrologEpilogTimeout=5\nPrologFlags")
    )
    (folder / "gres.conf").write_text(RISKY_GRES)
    before = files_below(bare_site.parent)
    assert main(["hooks", "check", "--json", "--slurm-conf", str(folder / "slurm.conf")]) == 1
    answer = json.loads(capsys.readouterr().out)
    found = {check["check"]: check for check in answer["checks"]}
    five = {"prolog-late", "prolog-serial", "gpu-not-in-tres", "gpu-shared", "gpu-order"}
    assert five <= set(found)
    assert "shorter than the 6 s" in found["hook timeout"]["found"]
    assert found["slurm.conf"]["outcome"] == "warn", "an Include that cannot be read may hold anything"
    assert files_below(bare_site.parent) == before
    (folder / "slurm.conf").write_text(SOUND_SLURM)
    (folder / "gres.conf").write_text(SOUND_GRES)
    main(["hooks", "check", "--json", "--slurm-conf", str(folder / "slurm.conf")])
    assert not five & {check["check"] for check in json.loads(capsys.readouterr().out)["checks"]}


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


# ------------------------------------------------------------------------------------------- folders, privilege


def test_folders(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert folder_finding(folder, os.getuid(), "make it").outcome == "unseen"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    assert folder_finding(folder, os.getuid(), "").outcome == "ok"
    assert folder_finding(folder, os.getuid() + 1, "").outcome == "fail"
    folder.chmod(0o775)
    assert "may be written by others (mode 0775)" in folder_finding(folder, os.getuid(), "").found
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert folder_finding(link, os.getuid(), "").outcome == "fail"


@pytest.mark.parametrize(
    ("euid", "effective", "outcome"),
    [
        (0, "000001ffffffffff", "ok"),
        (0, "00000000a80425fb", "warn"),
        (1000, "0000000000200000", "ok"),
        (1000, "0000000000000000", "unseen"),
    ],
)
def test_who_may_set_limits(euid: int, effective: str, outcome: str) -> None:
    assert gpus.privilege_finding(euid, f"Name:\tx\nCapEff:\t{effective}\n").outcome == outcome


def test_positions_lead_to_device_files(tmp_path: Path) -> None:
    def judged(files: dict[int, str] | str) -> Finding:
        return only(gpus.position_findings("n1", files, None))

    (tmp_path / "nvidia0").symlink_to("/dev/null")
    (tmp_path / "nvidia1").write_text("no device")
    good, bad = str(tmp_path / "nvidia0"), str(tmp_path / "nvidia1")
    assert judged({0: good}).outcome == "unseen", "without NVML nobody knows whose they are"
    assert judged({0: good, 1: bad}).outcome == "fail"
    assert "1 of 2 positions of n1" in judged({0: good, 1: bad}).found
    assert only(gpus.position_findings("n1", {0: good}, ())).outcome == "fail"
    assert judged("gres.conf:1: damaged").outcome == "fail"
    assert judged({}).outcome == "warn"


@pytest.mark.parametrize(
    ("why", "euid", "outcome"),
    [
        ("no library", 0, "fail"),
        ("no library", 1000, "fail"),
        ("Permission denied", 0, "fail"),
        ("Permission denied", 1000, "unseen"),
    ],
)
def test_who_may_not_look_has_seen_no_fault(why: str, euid: int, outcome: str) -> None:
    assert gpus.no_nvml_finding(why, euid).outcome == outcome


# ------------------------------------------------------------------------------------------- the whole of it


@pytest.fixture
def bare_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a config and nothing else; no Slurm, no driver, no daemon."""
    path = tmp_path / "site.toml"
    path.write_text(
        'cluster = "lab"\n[[node_set]]\nnames = "n1"\ngpus = 8\ngpu_max_w = 700\noverhead_w = 1\n'
        f'[controller]\nuser = "root"\nstate_dir = "{tmp_path}/state"\nrun_dir = "{tmp_path}/run"\n'
        f'[node]\nstate_dir = "{tmp_path}/node"\n[slurm]\nconf = "{tmp_path}/slurm.conf"\nbin_dir = "{tmp_path}"\n'
    )
    monkeypatch.setenv("SLURM_PFI_CONF", str(path))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return path


def files_below(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_a_bare_host_is_told_all_that_is_missing_and_nothing_is_changed(
    bare_site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_below(bare_site.parent)
    assert main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["node"] == "n1"
    by_check = {check["check"]: check for check in answer["checks"]}
    for name in ("slurm.conf", "slurm commands", "slurmctld", "nvml", "gpu positions", "controller", "agent"):
        assert by_check[name]["outcome"] == "fail", by_check[name]
        assert by_check[name]["todo"]
    assert by_check["config"]["outcome"] == "ok"
    assert not any("this check broke" in check["found"] for check in answer["checks"])
    assert answer["counts"]["fail"] == sum(check["outcome"] == "fail" for check in answer["checks"])
    assert files_below(bare_site.parent) == before


def test_for_people_every_line_fits_80_columns(
    bare_site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "\x1b" not in out, "no colour where there is no terminal"
    assert re.search(r"(?m)^\d+ ok, \d+ warn, [1-9]\d* fail, \d+ unseen$", out.rstrip())
    assert "-> " in out


def test_one_check_that_breaks_harms_no_other(bare_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_facts: object) -> Any:
        raise RuntimeError("surprise")

    config = load_config(bare_site)
    facts = gather(config, bare_site, {}, "elsewhere")
    monkeypatch.setattr(sys.modules["slurm_pfi.cli.checks.everything"], "CHECKS", (broken, *CHECKS[:2]))
    findings = list(run_checks(facts))
    assert findings[0].outcome == "unseen"
    assert "surprise" in findings[0].found
    assert len(findings) == 3


def test_an_unusable_config_ends_it_with_2(bare_site: Path) -> None:
    bare_site.write_text("cluster = 5\n")
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == 2


# ------------------------------------------------------------------------------------------- the unit


def test_the_controllers_unit_says_why_for_each_hardening_line() -> None:
    text = (REPO / "etc/slurm-pfi-controller.service").read_text()
    service = text.partition("[Service]\n")[2].partition("\n[Install]")[0]
    why = ""
    for line in service.splitlines():
        if line.startswith("#"):
            why = line
        elif not line:
            why = ""
        elif re.match(r"(Protect|Restrict|Private|Capability|NoNew|Lock|SystemCall|Memory|Tasks)", line):
            assert why, f"{line}: say why in a comment above"
    assert re.search(r"(?m)^Type=(exec|notify)$", service)
    assert "\nUser=slurm\n" in service
    assert "\nPrivateUsers=" not in service, "it must see the uids of its peers"
    defaults = load_config(REPO / "etc/slurm-pfi.toml").controller
    assert f"\nStateDirectory={defaults.state_dir.removeprefix('/var/lib/')}\n" in service
    assert f"\nRuntimeDirectory={defaults.run_dir.removeprefix('/run/')}\n" in service


def _info(index: int, **changes: Any) -> DeviceInfo:
    limits = DeviceLimits(
        min_mw=200_000, max_mw=700_000, default_mw=700_000, requested_mw=700_000, enforced_mw=700_000
    )
    made = DeviceInfo(
        uuid=f"GPU-{index}", model="H", pci="", minor=index, index=index, limits=limits, persistence=True
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize(
    ("persistence", "outcome", "text"),
    [(True, "ok", "on"), (False, "warn", "is off on 1 GPUs"), (None, "warn", "do not tell")],
)
def test_persistence_mode_decides_what_a_cap_is_worth(
    persistence: bool | None, outcome: str, text: str
) -> None:
    found = gpus.persistence_finding((_info(0), _info(1, persistence=persistence)))
    assert (found.outcome, text in found.found) == (outcome, True)
    assert persistence is True or ("default limits" in found.found and "nvidia-persistenced" in found.todo)


@pytest.mark.parametrize(
    ("settable", "outcome"),
    [((True, None), "ok"), ((True, False), "warn"), ((False, False), "fail")],
)
def test_limits_that_cannot_be_set_are_found_without_setting_one(
    settable: tuple[bool | None, ...], outcome: str
) -> None:
    infos = tuple(_info(n, capabilities=Capabilities(settable=each)) for n, each in enumerate(settable))
    found = gpus.limits_finding(infos, "from 200 W to 700 W")
    assert found.outcome == outcome and "from 200 W to 700 W" in found.found
    assert bool(found.todo) == (outcome != "ok")
