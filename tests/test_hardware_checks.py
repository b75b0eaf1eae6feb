"""The checks for real GPUs, checked on the stand-in: they read everything, write nothing, and fail without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testbed import gpus

REPO = Path(__file__).resolve().parent.parent
SETTERS = ("nvmlDeviceSetPowerManagementLimit", "nvmlDeviceSetPersistenceMode")


def run_checks(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/hardware",
    ]
    return subprocess.run(
        command,
        cwd=REPO,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_hardware_checks_read_everything_and_write_nothing(tmp_path: Path) -> None:
    gpus.create_node(tmp_path / "n1", gpus=2)
    with gpus.Node(tmp_path / "n1") as node:
        for setter in SETTERS:
            node.fault(setter, gpus.FaultKind.SILENT)
        done = run_checks(gpus.nvml_environment(tmp_path / "n1"))
        assert done.returncode == 0, done.stdout
        assert node.faults_fired() == 0, "a setter was called"
    assert "4 passed" in done.stdout
    assert "enforced_mw        700000" in done.stdout


def test_without_a_gpu_they_fail_and_say_why(tmp_path: Path) -> None:
    done = run_checks({"LD_LIBRARY_PATH": str(gpus.library_path().parent), "PFI_STANDIN_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert "there is no NVIDIA GPU to check on this machine" in done.stdout
    assert "passed" not in done.stdout
