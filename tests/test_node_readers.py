"""What the agent reads of others: job files; and its own lock and log."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.config import parse_config
from slurm_pfi.node.jobfile import JobFile, JobFileError, parse_job_file, read_job_folder, remove_job_file
from slurm_pfi.node.lock import Lock, LockedError, end_holder
from slurm_pfi.node.log import Log
from slurm_pfi.node.paths import node_name
from slurm_pfi.node.setup import gres_files
from slurm_pfi.node.watch import FolderWatch

GOOD = b"pfi-job 1\njob_id 1234\nrestart 0\nuid 65534\ngpus 0,2-3\nflex 10%\n"
ME = frozenset({os.geteuid()})


def test_a_job_file_as_the_format_says() -> None:
    assert parse_job_file("1234.0", GOOD) == JobFile(
        job_id=1234, restart=0, uid=65534, gpus=(0, 2, 3), flex="10%"
    )
    none = parse_job_file("1.2", b"pfi-job 1\njob_id 1\nrestart 2\nuid 0\ngpus -\nflex -\n")
    assert (none.gpus, none.flex) == ((), "")
    assert parse_job_file("1234.0", GOOD.replace(b"10%", b"invalid")).flex == "invalid"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"pfi-job 1", b"pfi-job 2", "version 1"),
        (b"job_id 1234", b"job_id 99", "job 99.0"),
        (b"job_id 1234", b"job_id 01234", "version 1"),
        (b"restart 0", b"restart 1", "1234.1"),
        (b"flex 10%\n", b"flex 10%", "version 1"),
        (b"flex 10%\n", b"flex 10%\nmore 1\n", "version 1"),
        (b"flex 10%", b"flex 0%", "one of"),
        (b"flex 10%", b"flex huge", "one of"),
        (b"gpus 0,2-3", b"gpus 3-2", "positions"),
        (b"gpus 0,2-3", b"gpus 0,0", "twice"),
        (b"gpus 0,2-3", b"gpus 0-99999", "positions"),
        (b"gpus 0,2-3", b"gpus 0,,1", "positions"),
        (b"gpus 0,2-3", b"gpus ", "version 1"),
        (b"uid 65534", b"uid -1", "version 1"),
        (b"uid 65534", "uid ٣".encode(), "ASCII"),
        (b"pfi-job", b"\0fi-job", "version 1"),
    ],
)
def test_anything_else_is_no_job_file(old: bytes, new: bytes, why: str) -> None:
    data = GOOD.replace(old, new)
    assert data != GOOD
    with pytest.raises(JobFileError, match=why):
        parse_job_file("1234.0", data)


@given(st.binary(max_size=1200))
def test_no_bytes_harm_the_reader(data: bytes) -> None:
    with pytest.raises(JobFileError):
        parse_job_file("1234.0", data)


def test_a_folder_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "1234.0").write_bytes(GOOD)
    (tmp_path / ".1235.0.tmp").write_bytes(b"half a")
    (tmp_path / "1235.0").symlink_to(tmp_path / "1234.0")
    (tmp_path / "1236.0").write_bytes(GOOD.replace(b"1234", b"1236"))
    (tmp_path / "1236.0").chmod(0o664)
    (tmp_path / "1237.0").write_bytes(GOOD.replace(b"1234", b"1237"))
    files, ignored = read_job_folder(tmp_path, trusted_uids=ME)
    assert [file.job_id for file in files] == [1234, 1237]
    assert sorted(ignored) == ["1235.0", "1236.0"]
    files, ignored = read_job_folder(tmp_path, trusted_uids=frozenset({os.geteuid() + 1}))
    assert files == () and "owned by uid" in ignored["1234.0"]
    remove_job_file(tmp_path, 1234, 0)
    remove_job_file(tmp_path, 1234, 0)
    assert not (tmp_path / "1234.0").exists()
    with pytest.raises(OSError, match=r"No such file"):
        read_job_folder(tmp_path / "missing", trusted_uids=ME)


def test_a_watched_folder_tells_of_a_rename_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        watch = FolderWatch()
        watch.watch(tmp_path)
        told = asyncio.Event()
        asyncio.get_running_loop().add_reader(watch.descriptor, told.set)
        (tmp_path / ".x").write_text("")
        (tmp_path / ".x").rename(tmp_path / "1.0")
        await asyncio.wait_for(told.wait(), 5)
        watch.drain()
        asyncio.get_running_loop().remove_reader(watch.descriptor)
        watch.close()

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------- the rest


def test_a_lock_names_its_holder_and_can_be_ended(tmp_path: Path) -> None:
    code = (
        "import sys, signal; from pathlib import Path; from slurm_pfi.node.lock import Lock; "
        "held = Lock(Path(sys.argv[1])); print('held', flush=True); signal.pause()"
    )
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=f"pid {holder.pid}"):
            Lock(path)
        assert end_holder(path) == holder.pid
    assert end_holder(path) is None
    Lock(path).release()


def test_text_of_others_cannot_forge_a_log_line() -> None:
    stream = io.StringIO()
    Log(prefixed=True, stream=stream).warning(
        "job file ignored", name="1.0\nerror all lost", why="a=b", gpus=[]
    )
    assert stream.getvalue() == '<4>warning job file ignored name="1.0\\nerror all lost" why="a=b" gpus=-\n'


def test_a_node_name() -> None:
    assert node_name("n1", {}) == "n1"
    assert node_name(None, {"SLURMD_NODENAME": "n2"}) == "n2"
    assert "." not in node_name(None, {})
    for bad in ("../n1", "a/b", "-n", "n 1"):
        with pytest.raises(ValueError, match="not a node name"):
            node_name(bad, {})


def test_gres_conf_missing_or_odd_is_a_text_not_a_guess(tmp_path: Path) -> None:
    config = parse_config(f'cluster = "c"\n[slurm]\nconf = "{tmp_path}/slurm.conf"\n', origin="test")
    missing = gres_files(config, "n1")
    assert isinstance(missing, str) and "gres.conf" in missing
    (tmp_path / "gres.conf").write_text("NodeName=n1 Name=gpu File=/dev/nvidia[0-1]\n")
    assert gres_files(config, "n1") == {0: "/dev/nvidia0", 1: "/dev/nvidia1"}
    (tmp_path / "gres.conf").write_text("what is this\n")
    assert isinstance(gres_files(config, "n1"), str)
