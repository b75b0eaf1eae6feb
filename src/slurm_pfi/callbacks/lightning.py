"""Progress of a Lightning ``Trainer``, from ``lightning`` or ``pytorch_lightning``:

    from slurm_pfi.callbacks.lightning import ReportProgress
    trainer = Trainer(..., callbacks=[ReportProgress()])

It counts optimiser steps (``Trainer.global_step``), which all ranks take together and which go on when training resumes
from a checkpoint, so one process of the run reports: the one of global rank 0. Validation, test and prediction report
nothing.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from .reporter import Reporter, base_class


class _Hooks:
    """The callback without its base class. What it cannot read it does not report; training is never disturbed."""

    def __init__(self) -> None:
        super().__init__()
        self._reporter = Reporter()
        self._told: int | None = None
        self._total: float | None = None

    def on_train_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        """What was done before, in a training that resumes, is nothing new."""
        self._told = getattr(trainer, "global_step", None)
        self._total = _steps_in_all(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """After each batch; while gradients are gathered the counter stands still and there is nothing to tell."""
        self._tell(trainer, last=False)

    def on_train_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """The last counter, which may have come too soon after the one before."""
        self._tell(trainer, last=True)

    def _tell(self, trainer: Any, *, last: bool) -> None:
        try:
            step = trainer.global_step
            if trainer.is_global_zero and (last or step != self._told):
                self._told = step
                self._reporter.tell(step, "steps", self._total, last=last)
        except Exception:  # training must never fail for its report
            return


def _steps_in_all(trainer: Any) -> float | None:
    """How many optimiser steps the training will take; None where it does not say, or ends by something else.

    Lightning's own estimate counts one optimiser; a module that steps by itself may have several.
    """
    try:
        if trainer.max_steps > 0:
            return float(trainer.max_steps)
        steps = trainer.estimated_stepping_batches if trainer.lightning_module.automatic_optimization else 0
        return float(steps) if 0 < steps < math.inf else None
    except Exception:  # training must never fail for its report
        return None


def __getattr__(name: str) -> Any:
    """Make the class when it is first asked for, so that importing this module loads no library (PEP 562)."""
    if name != "ReportProgress":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    made = type(name, (_Hooks, _callback()), {"__module__": __name__, "__doc__": __doc__})
    globals()[name] = made
    return made


def _callback() -> type[Any]:
    """The base class of the package that this program uses; where it has loaded neither yet, ``lightning`` first."""
    for module in ("lightning.pytorch", "pytorch_lightning"):
        if sys.modules.get(module) is not None:
            return base_class(module, "Callback", module, __name__)
    try:
        return base_class("lightning.pytorch", "Callback", "lightning", __name__)
    except ImportError as error:
        try:
            return base_class("pytorch_lightning", "Callback", "pytorch-lightning", __name__)
        except ImportError:
            raise error from None
