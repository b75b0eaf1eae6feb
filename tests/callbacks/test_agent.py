"""Both callbacks against the agent's own sockets, and inside a real Slurm job."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
from pathlib import Path

import pytest

from testbed.site import Site

from ..progress_node import made_node, run_file, until
from ..site_fixture import clear_limits, small_site, wait_as

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
HUGGINGFACE = (str(HERE / "train_huggingface.py"), "{out}", "max_steps=100000")
LIGHTNING = (str(HERE / "train_lightning.py"), "lightning.pytorch", "max_epochs=100000")


@pytest.mark.parametrize("train", [HUGGINGFACE, LIGHTNING], ids=["huggingface", "lightning"])
def test_the_agent_hears_its_rate(
    train: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        with made_node() as node:
            async with node.open(run_file(41)):
                words = [word.format(out=tmp_path / "out") for word in train]
                monkeypatch.setenv("PYTHONWARNINGS", "ignore")
                node.below_stepd(
                    "slurmstepd: [41.batch]", sys.executable, *words, job_id=41, python_path=SOURCE
                )
                await until(lambda: (told := node.told(41)) and (told.rate_per_s or 0) > 0, "a rate", 90)
                told = node.told(41)
                assert told is not None and told.unit == "steps" and told.counter > 1
                assert node.drops == []

    asyncio.run(story())


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_in_real_jobs(tmp_path: Path) -> None:
    """The controller knows what each training has done. The jobs are ours: another user may not reach this Python."""
    with Site(small_site(nodes=1)) as site:
        jobs: list[int] = []
        for name, train in (("huggingface", HUGGINGFACE), ("lightning", LIGHTNING)):
            words = " ".join(f"'{word.format(out=site.root / 'out' / name)}'" for word in train)
            text = (
                f"#!/bin/sh\nexport PYTHONPATH={SOURCE} HOME={site.root}/out\nexec {sys.executable} {words}\n"
            )
            jobs.append(site.cluster.sbatch(text, "--gres=gpu:1", user=pwd.getpwuid(os.getuid()).pw_name))
        try:
            wait_as("both tell a rate", lambda: all(rate(site, job) > 0 for job in jobs), timeout_s=100)
        except Exception as error:
            raise AssertionError([site.cluster.job_output(job)[-1500:] for job in jobs]) from error
        site.cluster.cancel_all()
        clear_limits(site)


def rate(site: Site, job: int) -> float:
    """Counter units per second that the controller knows; 0 while it knows none."""
    return site.jobs().get(job, {}).get("rate_per_s") or 0.0
