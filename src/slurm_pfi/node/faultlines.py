"""What is wrong with the node, as lines of the log: one when it becomes so and one when it is over."""

from __future__ import annotations

from .log import Log, alike
from .report import all_faults, gpu_fault
from .state import State


class FaultLines:
    """Remembers what was said. A text in which only a number has changed is the same fault."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._said: dict[str, str] = {}

    def say(self, state: State) -> None:
        """Log what has become wrong or right since the last call."""
        texts = [*all_faults(state)]
        texts += [f"{uuid}: {fault}" for uuid, gpu in state.gpus.items() if (fault := gpu_fault(state, gpu))]
        now = {alike(text): text for text in texts}
        for key, text in now.items():
            if key not in self._said:
                self._log.warning("fault", what=text)
        for key, text in self._said.items():
            if key not in now:
                self._log.info("fault over", what=text)
        self._said = now
