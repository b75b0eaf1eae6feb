"""What is wrong with the node, as lines of the log: one when it becomes so and one when it is over."""

from __future__ import annotations

from dataclasses import dataclass

from .log import Log, alike
from .report import all_faults, gpu_fault
from .state import State
from .wording import NOT_LISTED, kind_of


@dataclass(frozen=True)
class _Said:
    """A line, and the GPU that it is about; empty where it is about the node or one reading of a GPU."""

    uuid: str
    text: str


class FaultLines:
    """Remembers what was said. A text in which only a number has changed is the same fault.

    A GPU has one fault at a time, which may change its kind: that is said, and nothing is over before the GPU is well.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._said: dict[tuple[str, str], _Said] = {}

    def say(self, state: State) -> None:
        """Log what has become wrong or right since the last call."""
        now = {("", alike(text)): _Said(_not_listed(state, text), text) for text in all_faults(state)}
        for uuid, gpu in state.gpus.items():
            if fault := gpu_fault(state, gpu):
                place = "" if gpu.position is None else f" (position {gpu.position})"
                now[uuid, alike(kind_of(fault))] = _Said(uuid, f"{uuid}{place}: {fault}")
        for key, said in now.items():
            if key not in self._said:
                self._log.warning("fault", what=said.text)
        unwell = {said.uuid for said in now.values() if said.uuid}
        for key, said in self._said.items():
            if key not in now and said.uuid not in unwell:
                self._log.info("fault over", what=said.text)
        self._said = {key: self._said.get(key, said) for key, said in now.items()}


def _not_listed(state: State, text: str) -> str:
    """The GPU that a list did not tell of, if that is what this fault of the node says."""
    return next((uuid for uuid in state.gpus if state.faults.get(NOT_LISTED + uuid) == text), "")
