"""gres.conf read as slurmd reads it; where slurmd is there, both are asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_pfi.slurm.gres import GresError
from slurm_pfi.slurm.gresconf import gpu_files
from slurm_pfi.slurm.hosts import expand_list

SLURMD = shutil.which("slurmd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")

# name -> (Gres= of slurm.conf, gres.conf with @ for the device file's stem, device numbers in Slurm's order for n1)
CASES: dict[str, tuple[str, str, list[int]]] = {
    "one line": ("gpu:h200:4", "NodeName=n[1-4] Name=gpu Type=h200 File=@[0-3]", [0, 1, 2, 3]),
    "order in the brackets": ("gpu:4", "Name=gpu File=@[3,1],@0,@[5-5]", [3, 1, 0, 5]),
    "several lines": ("gpu:3", "Name=gpu File=@2\nName=gpu File=@0\nName=gpu File=@1", [2, 0, 1]),
    "lines for all nodes first": (
        "gpu:3",
        "NodeName=n1 Name=gpu File=@3\nName=gpu File=@1\nName=gpu File=@2",
        [1, 2, 3],
    ),
    "types as in slurm.conf": (
        "gpu:a:1,gpu:b:2",
        "Name=gpu Type=b File=@[3,1]\nName=gpu Type=a File=@2",
        [2, 3, 1],
    ),
    "types mixed": (
        "gpu:b:2,gpu:a:1",
        "Name=gpu Type=b File=@3\nName=gpu Type=a File=@2\nName=gpu Type=b File=@1",
        [3, 1, 2],
    ),
    "types only in gres.conf": ("gpu:2", "Name=gpu Type=b File=@3\nName=gpu Type=a File=@2", [3, 2]),
    "more than slurm.conf wants": ("gpu:3", "Name=gpu File=@[3,1]\nName=gpu File=@[2,4]", [3, 1, 2]),
    "another node's line": (
        "gpu:1",
        "NodeName=n[2-9],m1 Name=gpu File=@7\nNodeName=n1 Name=gpu File=@5",
        [5],
    ),
    "padding is part of a name": (
        "gpu:1",
        "NodeName=n[01-09] Name=gpu File=@7\nNodeName=n[1-9] Name=gpu File=@5",
        [5],
    ),
    "comments and continued lines": (
        "gpu:2",
        "# Name=gpu File=@7\nAutoDetect=off\nNODENAME=n1 name=gpu \\\n  file=@[0-1] Cores=0-7 # File=@8\n\n",
        [0, 1],
    ),
    "spaces and quotes": ("gpu:2", 'NodeName="n1"  Name = gpu   File = "@[1,0]" Count=2', [1, 0]),
    "detection off for this node": (
        "gpu:2",
        "NodeName=n1 AutoDetect=off\nNodeName=n1 Name=gpu File=@[3,2]",
        [3, 2],
    ),
}


def _text(case: str, stem: Path) -> tuple[str, str, list[str]]:
    gres, text, numbers = CASES[case]
    return gres, text.replace("@", str(stem)) + "\n", [f"{stem}{number}" for number in numbers]


@pytest.mark.parametrize("case", CASES)
def test_positions_in_slurms_order(case: str) -> None:
    gres, text, files = _text(case, Path("/dev/nvidia"))
    assert gpu_files(text, "n1", gres=gres) == dict(enumerate(files))


@pytest.mark.skipif(SLURMD is None and "CI" not in os.environ, reason="slurmd is not installed")
@pytest.mark.parametrize("case", CASES)
def test_slurmd_says_the_same(case: str, tmp_path: Path) -> None:
    stem = tmp_path / "nvidia"
    for number in range(10):
        (tmp_path / f"nvidia{number}").symlink_to("/dev/null")
    gres, text, files = _text(case, stem)
    (tmp_path / "gres.conf").write_text(text)
    (tmp_path / "slurm.conf").write_text(SLURM_CONF.replace("DIR", str(tmp_path)).replace("GRES", gres))
    command = [SLURMD or "slurmd", "-G", "-N", "n1", "-f", str(tmp_path / "slurm.conf")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    said = re.findall(r"Gres Name=gpu .*? File=(\S+)", answer.stdout + answer.stderr)
    assert [file for part in said for file in expand_list(part, 64)] == files, answer.stderr


SLURM_CONF = """
ClusterName=order
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=DIR/state
SlurmdSpoolDir=DIR/spool
SlurmdPidFile=DIR/slurmd.pid
SlurmctldPidFile=DIR/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname=localhost CPUs=16 RealMemory=16000 Gres=GRES State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def test_a_node_without_lines_has_no_gpus() -> None:
    assert gpu_files("NodeName=n2 Name=gpu File=/dev/nvidia0\nName=nic File=/dev/mlx0\n", "n1") == {}


def test_one_type_needs_no_slurm_conf() -> None:
    assert gpu_files("Name=gpu Type=h200 File=/dev/nvidia[1,0]", "n1") == {
        0: "/dev/nvidia1",
        1: "/dev/nvidia0",
    }


def test_a_slice_stays_a_position_of_its_own() -> None:
    text = "Name=gpu Type=w File=/dev/nvidia3\nName=gpu Type=s MultipleFiles=/dev/nvidia2,/dev/nvidia-caps/nvidia-cap66"
    files = gpu_files(text, "n1", gres="gpu:w:1,gpu:s:1")
    assert files == {0: "/dev/nvidia3", 1: "/dev/nvidia2,/dev/nvidia-caps/nvidia-cap66"}


@pytest.mark.parametrize(
    ("text", "gres", "said"),
    [
        ("Include /etc/slurm/more.conf", None, "not supported: include"),
        ("include more.conf", None, "not supported: include"),
        ("AutoDetect=nvml\nName=gpu", None, "gres.conf:2: .*File="),
        ("AutoDetect=nvml", None, "gives no files"),
        ("AutoDetect=nvml\nName=gpu File=/dev/nvidia[3,1]", None, "order GPUs itself"),
        ("Name=gpu Count=4", None, "gres.conf:1: .*File="),
        ("Name=gpu File=/dev/nvidia[0-1] Count=4", None, "Count=4 but File= names 2"),
        ("Name=gpu Type=a File=/dev/nvidia0\nName=gpu File=/dev/nvidia1", None, "some have none"),
        ("Name=gpu Type=a File=/dev/nvidia0\nName=gpu Type=b File=/dev/nvidia1", None, "several types"),
        ("Name=gpu File=/dev/nvidia[0-1]", "gpu:4", "4 GPUs are wanted"),
        ("Name=gpu File=/dev/nvidia[0-1]", "gpu:h200:2", "2 GPUs are wanted"),
        ("Name=gpu File=/dev/nvidia[1-0]", None, "runs backwards"),
        ("Name=gpu File=/dev/nvidia[0-999999]", None, "more than 64"),
        ("Name=gpu NodeName=n1 File=/dev/nvidia0", None, "must be the first"),
        ("File=/dev/nvidia0 Name=gpu", None, "begins with"),
        ("Name=gpu File=/dev/nvidia0 Bogus=1", None, "unknown key 'Bogus'"),
        ("Name=gpu Name=gpu File=/dev/nvidia0", None, "twice"),
        ("\n\nName=gpu File", None, "gres.conf:3: .*key=value"),
        ("NodeName=n[1 Name=gpu File=/dev/nvidia0", None, "not closed"),
    ],
)
def test_an_order_that_may_not_be_slurms_is_an_error(text: str, gres: str | None, said: str) -> None:
    with pytest.raises(GresError, match=said):
        gpu_files(text, "n1", gres=gres)


def test_detection_with_files_in_ascending_order_is_the_same_either_way() -> None:
    assert len(gpu_files("AutoDetect=nvml\nName=gpu File=/dev/nvidia[0-7]", "n1")) == 8
