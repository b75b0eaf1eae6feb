"""The callback for Lightning, in real trainings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_pfi.callbacks import lightning, reporter

from .conftest import Told
from .train_lightning import BATCHES, data, model, trainer

SCRIPT = Path(__file__).with_name("train_lightning.py")
PACKAGE = "lightning.pytorch"
# Hints that more workers would load the data faster, and that srun is there.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning with this torch
]


def steps(*numbers: int) -> list[str]:
    return [f"{number} steps" for number in numbers]


def test_optimiser_steps_and_nothing_of_validation(told: Told) -> None:
    trainer(PACKAGE, accumulate_grad_batches=2, val_check_interval=2).fit(model(PACKAGE), data(), data())
    assert told.take() == steps(1, 2, 3, 4, 4)
    assert told.totals == ["4"] * 5


def test_a_resumed_training_counts_on(told: Told, tmp_path: Path) -> None:
    first = trainer(PACKAGE)
    first.fit(model(PACKAGE), data())
    assert told.take() == steps(*range(1, BATCHES + 1), BATCHES)
    first.save_checkpoint(tmp_path / "kept.ckpt")
    trainer(PACKAGE, max_epochs=2).fit(model(PACKAGE), data(), ckpt_path=tmp_path / "kept.ckpt")
    assert told.take() == steps(*range(BATCHES + 1, 2 * BATCHES + 1), 2 * BATCHES)
    assert set(told.totals) == {str(2 * BATCHES)}, "of the whole training, as the counter is"


def test_nothing_disturbs_the_training(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(counter: float, unit: str, total: float | None) -> bool:
        raise RuntimeError("no")

    monkeypatch.setattr(reporter, "report", fails)
    made = trainer(PACKAGE)
    made.fit(model(PACKAGE), data())
    assert made.global_step == BATCHES and told.take() == []


def test_of_two_ranks_one_reports(told: Told) -> None:
    run = [sys.executable, str(SCRIPT), PACKAGE, "devices=2", 'strategy="ddp"', "max_steps=2"]
    subprocess.run(run, check=True, timeout=250, capture_output=True)
    assert told.take() in (steps(1, 2), steps(1, 2, 2)), "the second step may come too soon after the first"


@pytest.mark.parametrize("missing", ["lightning", ""], ids=["pytorch_lightning alone", "both, this one used"])
def test_where_pytorch_lightning_is_used(told: Told, missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None\n" if missing else ""
    code = (
        f"{hide}import pytorch_lightning, runpy, sys\n"
        f"sys.argv = ['train', 'pytorch_lightning', 'max_steps=2']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "from slurm_pfi.callbacks.lightning import ReportProgress\n"
        "assert issubclass(ReportProgress, pytorch_lightning.Callback)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=250, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert told.take() in (steps(1, 2), steps(1, 2, 2)), "the second step may come too soon after the first"


def test_the_class_is_that_of_the_package() -> None:
    from lightning.pytorch import Callback

    assert issubclass(lightning.ReportProgress, Callback)
