"""One line on stderr for each change: ``level event key=value ...``, for the journal of systemd or a file.

What repeats is counted, not written: the first time in full, then a line with the last one and ``repeated=N in_s=...``
after a minute, ten minutes, an hour and six hours, and once more when it has been quiet for a minute. So a failure of
eight GPUs each second for a day is some forty lines. The last word on a thing is never an old one: before an event that
ends another is written, what was counted of that other one is. What was done to a GPU is in audit.jsonl line by line.

structlog is not used here: where rich is installed it imports it, and this process runs as root with little in it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, TextIO

# systemd reads the level from this prefix (sd-daemon(3)) and strips it.
_PREFIX: Final = {"info": "<6>", "warning": "<4>", "error": "<3>"}
_GRAVE: Final = frozenset({"set_failed", "conflict", "reverted", "plan_refused"})

_OPPOSITES: Final = (
    frozenset({"fault", "fault over"}),
    frozenset({"released", "resumed"}),
    frozenset({"controller reached", "controller not reached"}),
)
_LAST: Final = "stopped"  # nothing from before is told after it

_SAME_S: Final = 600.0  # the same words again within this time are a repetition
_QUIET_S: Final = 60.0
_PAUSES_S: Final = (60.0, 600.0, 3600.0, 21600.0)
_BURST: Final = 240  # lines of one event that differ: sixteen GPUs, set and read back, several times over
_PER_S: Final = 120 / 3600.0
_MOST_KEPT: Final = 512
_NUMBER: Final = re.compile(r"(?<![\w-])[0-9]+(\.[0-9]+)?(?![\w-])", re.ASCII)
_PLAIN: Final = re.compile(r"[!#-<>-~]+")  # printable ASCII without space, quote and equals sign


@dataclass
class _Kind:
    """The lines of one event: what was said lately and when, and what was not said since the last line about it."""

    level: str
    said: dict[str, float] = field(default_factory=dict)
    room: float = _BURST
    room_s: float = 0.0
    unsaid: int = 0
    since_s: float = 0.0
    last_s: float = 0.0
    order: int = 0
    last: str = ""
    pause: int = 0
    due_s: float = 0.0

    def is_new(self, words: str, now_s: float) -> bool:
        """Whether these words may be written: not the same ones as just now, and not too many of a kind."""
        seen_s = self.said.pop(words, None)
        self.said[words] = now_s  # the newest last
        if len(self.said) > _MOST_KEPT:
            del self.said[next(iter(self.said))]
        if seen_s is not None and now_s - seen_s < _SAME_S:
            return False
        self.room = min(float(_BURST), self.room + (now_s - self.room_s) * _PER_S)
        self.room_s = now_s
        if self.room < 1.0:
            return False
        self.room -= 1.0
        return True

    def count(self, words: str, now_s: float) -> None:
        if not self.unsaid:
            self.since_s = now_s
            self.due_s = max(self.due_s, now_s + _PAUSES_S[0])
        self.unsaid += 1
        self.last, self.last_s = words, now_s

    def told(self, now_s: float) -> None:
        quiet = now_s - self.last_s >= _QUIET_S
        self.unsaid = 0
        self.pause = 0 if quiet else min(self.pause + 1, len(_PAUSES_S) - 1)
        self.due_s = now_s + _PAUSES_S[self.pause]


class Log:
    """Writes lines; never raises into the caller, whatever becomes of the stream. ``clock`` gives seconds."""

    def __init__(
        self, *, prefixed: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefixed = prefixed
        self._stream = stream
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._taken = 0

    def info(self, event: str, **fields: object) -> None:
        self._take("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._take("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._take("error", event, fields)

    def audited(self, event: str, fields: Mapping[str, object]) -> None:
        """A record that went into the audit file too."""
        self._take("warning" if event in _GRAVE else "info", event, fields)

    def tell_repeated(self, *, all_of_it: bool = False) -> None:
        """Write what has been counted and is due. To be called every few seconds, and with ``all_of_it`` in the end."""
        now_s = self._clock()
        due = [
            event
            for (_, event), kind in self._kinds.items()
            if kind.unsaid and (all_of_it or now_s >= kind.due_s or now_s - kind.last_s >= _QUIET_S)
        ]
        self._tell_all({word for event in due for word in _about(event)}, now_s)

    def _take(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        now_s = self._clock()
        self._taken += 1
        words = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
        kind = self._kinds.setdefault((level, event), _Kind(level=level, room_s=now_s))
        if kind.is_new(_alike_in_quotes(words), now_s):
            before = {name for _, name in self._kinds} if event == _LAST else _about(event) - {event}
            self._tell_all(before, now_s)
            self._write(level, f"{event} {words}")
            return
        kind.count(words, now_s)
        kind.order = self._taken
        if now_s >= kind.due_s:
            self._tell_all(_about(event), now_s)

    def _tell_all(self, events: Set[str], now_s: float) -> None:
        """What was counted of these events, in the order in which they came last."""
        counted = [(name, kind) for (_, name), kind in self._kinds.items() if kind.unsaid and name in events]
        for name, kind in sorted(counted, key=lambda each: each[1].order):
            self._tell(name, kind, now_s)

    def _tell(self, event: str, kind: _Kind, now_s: float) -> None:
        self._write(
            kind.level, f"{event} {kind.last} repeated={kind.unsaid} in_s={kind.last_s - kind.since_s:.0f}"
        )
        kind.told(now_s)

    def _write(self, level: str, text: str) -> None:
        prefix = _PREFIX[level] if self._prefixed else ""
        stream = self._stream or sys.stderr
        try:
            stream.write(f"{prefix}{level} {text.rstrip()}\n")
            stream.flush()
        except (OSError, ValueError):
            return  # nobody reads the log any more; limits must still be kept


def _about(event: str) -> frozenset[str]:
    """The event and the one that tells of the opposite."""
    return next((pair for pair in _OPPOSITES if event in pair), frozenset({event}))


def alike(text: str) -> str:
    """Text without its numbers, names kept: ``next try in 3.2 s`` is what ``next try in 1.1 s`` was."""
    return _NUMBER.sub("#", text)


def _alike_in_quotes(words: str) -> str:
    """The same for free text among ``key=value``; a bare value is a fact of its own."""
    parts = words.split('"')
    return '"'.join(alike(part) if place % 2 else part for place, part in enumerate(parts))


def _quoted(value: object) -> str:
    """Text of others on one line, without a way to forge another."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
