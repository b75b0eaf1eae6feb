"""The callback for the Hugging Face Trainer, in real trainings."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from slurm_pfi.callbacks import huggingface, reporter
from slurm_pfi.callbacks.huggingface import ReportProgress

from .conftest import Told
from .train_huggingface import BATCH, LENGTH, trainer

PER_BATCH = BATCH * LENGTH
SCRIPT = Path(__file__).with_name("train_huggingface.py")


def tokens(*batches: int) -> list[str]:
    return [f"{number * PER_BATCH} tokens" for number in batches]


def test_tokens_of_each_optimiser_step_and_none_of_evaluation(told: Told, tmp_path: Path) -> None:
    trainer(
        tmp_path / "out",
        include_num_input_tokens_seen="all",
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    ).train()
    assert told.take() == tokens(2, 4, 6, 8, 8)
    assert told.totals == ["", *[str(8 * PER_BATCH)] * 4], "known once a step was seen"


def test_steps_where_tokens_are_not_counted(told: Told, tmp_path: Path) -> None:
    trainer(tmp_path / "out").train()
    assert told.take() == ["1 steps", "2 steps", "3 steps", "4 steps", "4 steps"]
    assert told.totals == ["4"] * 5


@pytest.mark.parametrize("counted", ["all", "no"])
def test_a_resumed_training_counts_on(told: Told, tmp_path: Path, counted: str) -> None:
    out = tmp_path / "out"
    trainer(
        out, save_strategy="steps", save_steps=2, max_steps=2, include_num_input_tokens_seen="all"
    ).train()
    assert told.take() == tokens(1, 2, 2)
    trainer(out, include_num_input_tokens_seen=counted).train(
        resume_from_checkpoint=str(out / "checkpoint-2")
    )
    assert told.take() == (tokens(3, 4, 4) if counted == "all" else ["3 steps", "4 steps", "4 steps"])


def test_a_second_training_begins_anew(told: Told, tmp_path: Path) -> None:
    twice = trainer(tmp_path / "out", max_steps=2)
    twice.train()
    twice.train()
    assert told.take() == ["1 steps", "2 steps", "2 steps"] * 2


def test_nothing_disturbs_the_training(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(counter: float, unit: str, total: float | None) -> bool:
        raise RuntimeError("no")

    monkeypatch.setattr(reporter, "report", fails)
    ended = trainer(tmp_path / "out").train()
    assert ended.global_step == 4 and told.take() == []


def test_fast_steps_are_not_all_told(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "APART_S", 3600.0)
    trainer(tmp_path / "out").train()
    assert told.take() == ["1 steps", "4 steps"], "the first and the last"


def test_of_two_ranks_one_reports_for_both(told: Told, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launch, str(SCRIPT), str(tmp_path / "out"), 'include_num_input_tokens_seen="all"', "max_steps=1"],
        check=True,
        timeout=250,
        capture_output=True,
    )
    assert told.take() == tokens(2, 2), "the tokens of both, once"


def test_it_is_a_callback_like_any_other() -> None:
    made: Any = pickle.loads(pickle.dumps(ReportProgress()))
    assert isinstance(made, TrainerCallback) and type(made) is huggingface.ReportProgress
