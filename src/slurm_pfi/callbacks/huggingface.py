"""Progress of a Hugging Face ``Trainer``:

    from slurm_pfi.callbacks.huggingface import ReportProgress
    trainer = Trainer(..., callbacks=[ReportProgress()])

It counts tokens where the trainer does (``TrainingArguments(include_num_input_tokens_seen=...)``), else optimiser
steps. Both are counted over all ranks and go on when training resumes from a checkpoint, so one process of the run
reports: the main one. Its node's counter is the run's; other nodes need not tell one.
"""

from __future__ import annotations

from typing import Any

from .reporter import Reporter, base_class


class _Hooks:
    """The callback without its base class. What it cannot read it does not report; training is never disturbed."""

    def __init__(self) -> None:
        self._reporter = Reporter()
        self._first: tuple[float, int] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After an optimiser step, however many batches it gathered."""
        self._tell(args, state, last=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The last counter, which may have come too soon after the one before."""
        self._tell(args, state, last=True)

    def _tell(self, args: Any, state: Any, *, last: bool) -> None:
        try:
            if state.is_world_process_zero:
                counter, unit = _counter(args, state)
                self._reporter.tell(counter, unit, self._total(state, counter, unit), last=last)
        except Exception:  # training must never fail for its report
            return

    def _total(self, state: Any, counter: float, unit: str) -> float | None:
        """What the counter will be at the last step. Of tokens by how many a step took since this process began."""
        step, steps = state.global_step, getattr(state, "max_steps", 0)
        if steps <= 0:
            return None
        if unit == "steps":
            return float(steps)
        if self._first is None:
            self._first = (counter, step)
        first, since = self._first
        if step <= since:
            return None
        return float(counter + max(0, steps - step) * (counter - first) / (step - since))


def _counter(args: Any, state: Any) -> tuple[float, str]:
    """Tokens if they are counted in this training: a checkpoint may bring a count that no longer rises."""
    counted = getattr(args, "include_num_input_tokens_seen", False) not in (False, None, "no")
    tokens = getattr(state, "num_input_tokens_seen", 0) if counted else 0
    return (tokens, "tokens") if tokens else (state.global_step, "steps")


def __getattr__(name: str) -> Any:
    """Make the class when it is first asked for, so that importing this module loads no library (PEP 562)."""
    if name != "ReportProgress":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    base = base_class("transformers", "TrainerCallback", "transformers", __name__)
    made = type(name, (_Hooks, base), {"__module__": __name__, "__doc__": __doc__})
    globals()[name] = made
    return made
