"""Record what Slurm's own programs answer, for tests that need no Slurm.

    python -m testbed.record_slurm                                            # the host's Slurm
    python -m testbed.roots trixie --run build/roots/trixie.venv/bin/python -m testbed.record_slurm

Starts a real cluster with jobs of every kind and writes the answers of the commands that slurm-pfi and its users call
to ``tests/data/slurm/<release>/``: the output as it came, in ``commands.json`` the command line, exit status and what
was said, and in ``jobs.json`` which job is which. Made neutral are the cluster's folder, host and user names, the
mark that ends a field, and the dates: the moment of recording becomes 2026-01-01. Large outputs are compressed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from slurm_pfi.slurm.squeue import squeue_words

from .cluster import REPO, Cluster, ClusterOptions, wait_until
from .cluster_files import slurm_release, slurm_version

DATA: Final = REPO / "tests" / "data" / "slurm"
NOW_UNIX_S: Final = 1_767_225_600  # 2026-01-01T00:00:00Z
END: Final = "<end>"
_WINDOW_S: Final = 3 * 86_400  # what is no further from now is one of our times
_COMPRESS_ABOVE: Final = 8_000  # bytes
SLEEP: Final = "#!/bin/sh\nexec sleep 600\n"
ODD_NAME: Final = "a|b;JobState=FAILED\nJobId=1 \udcff\udce9 é🙂"
LONG_COMMENT: Final = "pfi:10% " + "a long comment, " * 40 + "end"
TAG: Final = (
    "JS1:AAAA pfi=1.50;src=default;grid=200-700/100;flex=10%;loss=?;wh=?;capped=0m;t=2026-01-01T00:00Z"
)


@dataclass
class Recorder:
    """Runs commands on the cluster and writes what they gave, made neutral, below ``folder``."""

    cluster: Cluster
    folder: Path
    said: dict[str, dict[str, Any]] = field(default_factory=dict)

    def record(self, name: str, command: Sequence[str]) -> None:
        """One command, run as an admin, its times in Unix seconds."""
        done = self.cluster.run(
            command, user="root" if os.getuid() == 0 else None, env={"SLURM_TIME_FORMAT": "%s"}, check=False
        )
        out = self.neutral(done.stdout.encode("utf-8", "surrogateescape"))
        self.said[name] = {
            "command": [self.neutral(os.fsencode(word)).decode() for word in command],
            "exit": done.returncode,
            "stderr": self.neutral(done.stderr.encode("utf-8", "surrogateescape")).decode("utf-8", "replace"),
        }
        path = self.folder / f"{name}.out"
        if len(out) > _COMPRESS_ABOVE:
            path.with_suffix(".out.gz").write_bytes(gzip.compress(out, mtime=0))
        else:
            path.write_bytes(out)

    def neutral(self, text: bytes) -> bytes:
        """Without what only this machine and this moment have."""
        text = text.replace(os.fsencode(self.cluster.folder), b"/cluster")
        text = text.replace(os.uname().nodename.encode(), b"login1").replace(
            os.uname().release.encode(), b"6.1.0"
        )
        text = re.sub(rb"#\d+ [^\n]*?(?:19|20)\d\d(?= )", b"#1 SMP", text)  # the kernel's build
        now = int(time.time())

        def shifted(match: re.Match[bytes]) -> bytes:
            at = int(match.group())
            return str(at - now + NOW_UNIX_S).encode() if abs(at - now) < _WINDOW_S else match.group()

        # A year further off is what Slurm takes as the end of a job without a limit.
        text = re.sub(rb"(?<![0-9.])1[789]\d{8}(?![0-9])", shifted, text)
        return re.sub(rb"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d", b"2026-01-01T00:00:00", text)


def submit_jobs(cluster: Cluster) -> dict[str, int]:
    """Jobs of every kind by a name of ours, each in the state that is to be recorded."""

    def running(*arguments: str) -> int:
        job = cluster.sbatch(SLEEP, *arguments)
        cluster.wait_job_state(job, "RUNNING")
        return job

    jobs = {
        "exclusive": running("--exclusive", "--nodelist=n3", "--gres=gpu:8"),
        "gpus": running("--gres=gpu:2", "--time=1-02:03", "--job-name=train"),
        "cpu_only": running("--job-name=cpu", "--time=30"),
        "uneven": running("--nodes=2", "--gres=gpu:1", "--job-name=two"),
        "odd": running(f"--job-name={ODD_NAME}", "--comment=AdminComment=x\nJobId=7", "--gres=gpu:1"),
        "long_comment": running(f"--comment={LONG_COMMENT}", "--time=UNLIMITED"),
        "null_texts": running("--job-name=(null)", "--comment=N/A"),
        "het": running("--gres=gpu:1", ":", "--gres=gpu:1", "--comment=second"),
        "array": running("--array=0-3%2", "--gres=gpu:1", "--job-name=sweep", "--time=2:00:00"),
        "suspended": running("--gres=gpu:1"),
        "requeued": running("--requeue"),
        "held": cluster.sbatch(SLEEP, "--hold", "--gres=gpu:4"),
        "held_unlimited": cluster.sbatch(SLEEP, "--hold", "--time=UNLIMITED"),
    }
    for name, script in {"completed": "#!/bin/sh\nexit 0\n", "failed": "#!/bin/sh\nexit 3\n"}.items():
        jobs[name] = cluster.sbatch(script, "--gres=gpu:1")
        cluster.wait_job_state(jobs[name], name.upper())
    jobs["cancelled"] = running("--gres=gpu:1")
    cluster.run(["scancel", str(jobs["cancelled"])])
    cluster.wait_job_state(jobs["cancelled"], "CANCELLED")
    cluster.scontrol("suspend", str(jobs["suspended"]))
    cluster.requeue(jobs["requeued"])
    cluster.scontrol("update", f"jobid={jobs['gpus']}", f"admincomment={TAG}")
    return jobs


def commands(jobs: dict[str, int], *, json_of_scontrol: bool) -> dict[str, Sequence[str]]:
    """What is recorded while slurmctld answers."""
    gpus, array = str(jobs["gpus"]), str(jobs["array"])
    squeue_json = ["squeue", "--local", "--all", "--states=all"]
    both: dict[str, Sequence[str]] = {
        "squeue": squeue_words(None, END),
        "squeue-array": squeue_words(jobs["array"], END),
        "squeue-unknown": squeue_words(999_999, END),
        "squeue-json": [*squeue_json, "--json"],
        "squeue-one-json": [*squeue_json, "--jobs", array, "--json"],
        "squeue-unknown-json": [*squeue_json, "--jobs", "999999", "--json"],
        "scontrol-job": ["scontrol", "show", "job", "-d", gpus],
        "scontrol-uneven": ["scontrol", "show", "job", "-d", str(jobs["uneven"])],
        "scontrol-array": ["scontrol", "-o", "show", "job", "-d", array],
        "scontrol-node": ["scontrol", "-o", "show", "node"],
        "sinfo": ["sinfo", "-h", "-N", "-O", f"NodeList:{END},Gres:{END},GresUsed:{END},StateLong:{END}"],
        "slurmd-gres": ["slurmd", "-G", "-N", "n1"],
        "version": ["squeue", "-V"],
        "sacct": [
            *("sacct", "--allocations", "--parsable", f"--delimiter={END}", "--noheader", "--allusers"),
            "--format=JobIDRaw,JobID,State,AllocTRES,ReqTRES,NodeList,Timelimit,ElapsedRaw,AdminComment",
        ],
        "sacct-steps": ["sacct", "-P", "-j", gpus, "--format=JobID,JobName,State,AllocTRES,Elapsed,TotalCPU"],
        "sacct-json": ["sacct", "-j", gpus, "--json"],
        "sacctmgr-qos": ["sacctmgr", "-P", "show", "qos", "format=Name,Priority,UsageFactor,GrpTRES"],
    }
    if json_of_scontrol:
        both["scontrol-job-json"] = ["scontrol", "show", "job", gpus, "--json"]
        both["scontrol-array-json"] = ["scontrol", "show", "job", array, "--json"]
        both["scontrol-unknown-json"] = ["scontrol", "show", "job", "999999", "--json"]
    return both


def record_submissions(recorder: Recorder) -> None:
    """What sbatch prints."""
    for name, words in {
        "sbatch": [],
        "sbatch-parsable": ["--parsable"],
        "sbatch-cluster": ["-M", "pfi"],
    }.items():
        recorder.record(name, ["sbatch", *words, "--hold", "--output=/dev/null", "--wrap=true"])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.record_slurm", description="Record what Slurm's programs answer."
    )
    parser.add_argument("--into", type=Path, default=DATA, help="below it a folder by the release is made")
    into: Path = parser.parse_args().into
    options = ClusterOptions(
        nodes=3, gpus_per_node=8, hooks=False, plugin=False, accounting=True, partitions=("main",)
    )
    with Cluster(options) as cluster:
        jobs = submit_jobs(cluster)
        folder = into / slurm_release()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        recorder = Recorder(cluster, folder)
        wait_until(_has_all(cluster, jobs), 30, "slurmdbd knows the jobs")
        for name, command in commands(jobs, json_of_scontrol=slurm_version() >= (23, 2)).items():
            recorder.record(name, command)
        record_submissions(recorder)
        cluster.stop_slurmctld()
        try:
            gpus = str(jobs["gpus"])
            recorder.record("down-squeue", squeue_words(None, END))
            recorder.record("down-squeue-json", ["squeue", "--json"])
            recorder.record("down-scontrol", ["scontrol", "update", f"jobid={gpus}", "admincomment=x"])
            if slurm_version() >= (23, 2):
                recorder.record("down-scontrol-json", ["scontrol", "show", "job", gpus, "--json"])
        finally:
            cluster.start_slurmctld()
        (folder / "commands.json").write_text(json.dumps(recorder.said, indent=1) + "\n")
        (folder / "jobs.json").write_text(json.dumps(jobs, indent=1) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {len(recorder.said)} commands, {size} bytes")
    return 0


def _has_all(cluster: Cluster, jobs: dict[str, int]) -> Callable[[], bool]:
    return lambda: bool(cluster.sacct(str(jobs["cancelled"]), "JobID"))


if __name__ == "__main__":
    sys.exit(main())
