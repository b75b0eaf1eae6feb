"""``slurm-pfi doctor`` and ``hooks check`` as a whole, and the checks of folders and GPUs, one thing wrong in each."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pfi.cli.checks import gpus
from slurm_pfi.cli.checks.daemons import folder_finding
from slurm_pfi.cli.checks.everything import CHECKS, gather, run_checks
from slurm_pfi.cli.checks.finding import Finding
from slurm_pfi.cli.root import main
from slurm_pfi.config import load_config
from slurm_pfi.gpu.device import Capabilities, DeviceInfo, DeviceLimits

from .doctor_texts import RISKY_GRES, RISKY_SLURM, SOUND_GRES, SOUND_SLURM, only

# ------------------------------------------------------------------------------------------- folders, GPUs


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
