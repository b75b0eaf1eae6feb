"""What ``slurm-pfi doctor`` says of slurm.conf, gres.conf and Slurm's own answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_pfi.cli.checks.commands import run
from slurm_pfi.cli.checks.risks import gpu_orders, site_risks
from slurm_pfi.cli.checks.slurm import (
    accounting_finding,
    compare_nodes,
    compare_running,
    nodes_shown,
    version_finding,
)
from slurm_pfi.cli.checks.slurmconf import gpu_count, parse_show_config, parse_slurm_conf
from slurm_pfi.config import SlurmSection

from .doctor_texts import RISKY_GRES, RISKY_SLURM, SOUND_GRES, SOUND_SLURM, only

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
