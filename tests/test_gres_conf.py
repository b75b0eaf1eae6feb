"""gres.conf read as slurmd reads it; where slurmd is there, both are asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_pfi.config import parse_config
from slurm_pfi.gpu.mapping import Unresolved, resolve
from slurm_pfi.node.setup import gres_files
from slurm_pfi.slurm.gres import GresError
from slurm_pfi.slurm.gresconf import gpu_files
from slurm_pfi.slurm.slurmd import ask_slurmd, printed_files
from testbed.cluster_files import REPO

from .test_gpu_mapping import devices

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
    assert ask_slurmd("n1", tmp_path / "slurm.conf") == dict(enumerate(files))


# What only slurmd can tell: name -> (Gres= of slurm.conf, gres.conf, files of each position, device numbers or names)
ONLY_SLURMD: dict[str, tuple[str, str, list[str]]] = {
    "types in the order of slurm.conf": (
        "gpu:b:2,gpu:a:2",
        "Name=gpu Type=a File=@3\nName=gpu Type=b File=@[1,0]\nName=gpu Type=a File=@2",
        ["@1", "@0", "@3", "@2"],
    ),
    "slices behind the whole GPU": (
        "gpu:w:1,gpu:s:2",
        "Name=gpu Type=s MultipleFiles=@2,@-cap1,@-cap2\nName=gpu Type=s MultipleFiles=@2,@-cap1,@-cap66\n"
        "Name=gpu Type=w File=@3",
        ["@3", "@2,@-cap1,@-cap2", "@2,@-cap1,@-cap66"],
    ),
    "only slices": (
        "gpu:2",
        "Name=gpu MultipleFiles=@2,@-cap1,@-cap66\nName=gpu MultipleFiles=@2,@-cap1,@-cap2",
        ["@2,@-cap1,@-cap66", "@2,@-cap1,@-cap2"],
    ),
    "slices before it, as slurm.conf has them": (
        "gpu:s:1,gpu:w:1",
        "Name=gpu Type=w File=@3\nName=gpu Type=s File=@-cap66",
        ["@-cap66", "@3"],
    ),
    "an included file": ("gpu:2", "Include DIR/more.conf\nName=gpu File=@3", ["@5", "@3"]),
    "shards of them": (
        "gpu:b:1,gpu:a:1,shard:8",
        "Name=gpu Type=a File=@3\nName=gpu Type=b File=@1\nName=shard Count=8",
        ["@1", "@3"],
    ),
}


@pytest.mark.skipif(SLURMD is None and "CI" not in os.environ, reason="slurmd is not installed")
@pytest.mark.parametrize("case", ONLY_SLURMD)
def test_where_the_text_does_not_tell_slurmd_is_asked(case: str, tmp_path: Path) -> None:
    for name in (*(f"nvidia{number}" for number in range(10)), *(f"nvidia-cap{n}" for n in (1, 2, 66))):
        (tmp_path / name).symlink_to("/dev/null")
    gres, text, files = ONLY_SLURMD[case]
    stem = str(tmp_path / "nvidia")
    (tmp_path / "more.conf").write_text(f"Name=gpu File={stem}5\n")
    (tmp_path / "gres.conf").write_text(text.replace("DIR", str(tmp_path)).replace("@", stem) + "\n")
    slurm_conf = SLURM_CONF.replace("DIR", str(tmp_path)).replace("Gres=GRES", f"Gres={gres}")
    if "shard" in gres:
        slurm_conf = slurm_conf.replace("GresTypes=gpu", "GresTypes=gpu,shard")
    (tmp_path / "slurm.conf").write_text(slurm_conf)
    config = parse_config(f'cluster = "c"\n[slurm]\nconf = "{tmp_path}/slurm.conf"\n', origin="test")
    assert gres_files(config, "n1") == {i: file.replace("@", stem) for i, file in enumerate(files)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give capabilities up")
@pytest.mark.skipif(SLURMD is None and "CI" not in os.environ, reason="slurmd is not installed")
def test_slurmd_answers_under_the_capabilities_of_the_agents_unit(tmp_path: Path) -> None:
    unit = (REPO / "etc/slurm-pfi-node.service").read_text()
    names = re.findall(r"(?m)^CapabilityBoundingSet=(.*)$", unit)[0].split()
    bounds = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in names)
    (tmp_path / "nvidia0").symlink_to("/dev/null")
    (tmp_path / "gres.conf").write_text(f"Name=gpu File={tmp_path}/nvidia0\n")
    (tmp_path / "slurm.conf").write_text(SLURM_CONF.replace("DIR", str(tmp_path)).replace("GRES", "gpu:1"))
    code = "import sys, pathlib; from slurm_pfi.slurm.slurmd import ask_slurmd; "
    code += "print(ask_slurmd('n1', pathlib.Path(sys.argv[1])))"
    cut = ["setpriv", f"--bounding-set=-all,{bounds}", "--inh-caps=-all", "--no-new-privs", "--"]
    command = [*cut, sys.executable, "-c", code, str(tmp_path / "slurm.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == f"{ {0: str(tmp_path / 'nvidia0')} }\n", done.stderr


@pytest.mark.skipif(SLURMD is None and "CI" not in os.environ, reason="slurmd is not installed")
def test_slices_that_slurmd_takes_apart_lead_to_no_board(tmp_path: Path) -> None:
    """Where GresTypes= has shard, 22.05 counts every file of MultipleFiles= as a position; jobs' numbers do not."""
    for name in ("nvidia2", "nvidia3", "nvidia-cap1", "nvidia-cap2", "nvidia-cap66"):
        (tmp_path / name).symlink_to("/dev/null")
    stem = tmp_path / "nvidia"
    text = f"Name=gpu Type=w File={stem}3\n"
    text += "".join(f"Name=gpu Type=s MultipleFiles={stem}2,{stem}-cap1,{stem}-cap{n}\n" for n in (2, 66))
    (tmp_path / "gres.conf").write_text(text)
    slurm_conf = SLURM_CONF.replace("DIR", str(tmp_path)).replace("GresTypes=gpu", "GresTypes=gpu,shard")
    (tmp_path / "slurm.conf").write_text(slurm_conf.replace("Gres=GRES", "Gres=gpu:w:1,gpu:s:2"))
    found = resolve(ask_slurmd("n1", tmp_path / "slurm.conf"), devices([2, 3]), proc=tmp_path / "proc")
    boards = {position for position, to in found.items() if not isinstance(to, Unresolved)}
    assert boards in ({0}, {0, 1, 2})  # a later slurmd may have mended it


def test_without_slurmds_answer_both_reasons_are_told(tmp_path: Path) -> None:
    (tmp_path / "gres.conf").write_text("AutoDetect=nvml\n")
    config = parse_config(f'cluster = "c"\n[slurm]\nconf = "{tmp_path}/slurm.conf"\n', origin="test")
    said = gres_files(config, "n1")
    assert isinstance(said, str)
    assert "AutoDetect=nvml gives no files" in said and "slurmd was asked" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no GPU"),
        ("slurmd: error: no such plugin\n", "names no GPU"),
        ("slurmd: Gres Name=shard Type=h Count=4 Index=0 ID=1 File=/dev/nvidia0 (null)\n", "names no GPU"),
        ("slurmd: Gres Name=gpu Type=(null) Count=4 ID=7696487 (null)\n", "without a device file"),
        ("slurmd: Gres Name=gpu Count=3 ID=7 File=/dev/nvidia[0-1] (null)\n", "Count=3"),
        ("slurmd: Gres Name=gpu Count=1 ID=7 File=/dev/nvidia[0-1 (null)\n", "not closed"),
        ("slurmd: Gres Name=gpu Count=999 ID=7 File=/dev/nvidia[0-998] (null)\n", "more than 64"),
    ],
)
def test_what_slurmd_may_print_besides_files_is_an_error(text: str, said: str) -> None:
    with pytest.raises(GresError, match=said):
        printed_files(text)


def test_a_list_of_files_and_the_files_of_one_slice() -> None:
    text = (
        "slurmd: Gres Name=gpu Type=w Count=2 Index=0 ID=7 File=/dev/nvidia[1,0] Cores=0-3 (null)\n"
        "slurmd: Gres Name=gpu Type=s Count=1 Index=9 ID=7 File=/dev/nvidia2,/dev/nvidia-caps/nvidia-cap9 Links=-1\n"
    )
    files = ["/dev/nvidia1", "/dev/nvidia0", "/dev/nvidia2,/dev/nvidia-caps/nvidia-cap9"]
    assert printed_files(text) == dict(enumerate(files))


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
        ("Name=gpu MultipleFiles=/dev/nvidia2,/dev/nvidia-caps/nvidia-cap9", None, "MultipleFiles= counts"),
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
