"""What goes into the core (events) and what it asks of the shell (actions). The order of actions is meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..gpu.device import DeviceFailure, DeviceInfo, DeviceLimits, DeviceSample
from ..gpu.journal import JournalEntry
from ..model import GpuId, Plan, Report, Run
from .jobfile import JobFile
from .plan import HeldPlan
from .state import Settings

# ------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the core has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRead:
    """What plan.json held at start. ``fault`` says why it could not be used."""

    held: HeldPlan | None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesListed:
    """All GPUs with their journal entries: None where there is none, a text where it cannot be read.

    ``positions`` leads from gres.conf positions to GPUs; ``map_fault`` says why it is not complete.
    """

    devices: tuple[DeviceInfo, ...]
    failures: tuple[DeviceFailure, ...]
    journal: dict[GpuId, JournalEntry | str | None]
    positions: dict[int, GpuId]
    driver_start: str
    map_fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesUnavailable:
    """The library as a whole gave no list."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilesRead:
    """Every job file that is valid."""

    files: tuple[JobFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReceived:
    """A plan came over the bus."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Answers to a Sample. ``quick`` and ``activity`` as in the request.

    ``map_changed``: gres.conf, or how boards are divided, is no longer as it was when the GPUs were listed.
    """

    samples: tuple[DeviceSample | DeviceFailure, ...]
    quick: bool = False
    activity: bool = False
    map_changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDone:
    """The device took a limit and read it back."""

    uuid: GpuId
    limits: DeviceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFailed:
    """It did not.

    ``in_doubt``: it may or may not have been done. ``not_tried``: the device was not even asked, for want of a journal
    entry. ``lasting``: soon trying again is no use.
    """

    uuid: GpuId
    error: str
    in_doubt: bool = False
    not_tried: bool = False
    lasting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultChanged:
    """Something beside the GPUs is wrong (or, with an empty text, no longer)."""

    what: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The way to the controller is there, or is gone."""

    up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked:
    """An admin wants every limit of ours gone at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAsked:
    """An admin lets the controller command again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesFreed:
    """No process of ours holds a GPU any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigured:
    """The admin changed the config."""

    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """SIGTERM."""


Event: TypeAlias = (
    Tick
    | PlanRead
    | DevicesListed
    | DevicesUnavailable
    | JobFilesRead
    | PlanReceived
    | Sampled
    | SetDone
    | SetFailed
    | FaultChanged
    | Connected
    | ReleaseAsked
    | ResumeAsked
    | DevicesFreed
    | Reconfigured
    | StopAsked
)

# ----------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Append one record to the audit file."""

    event: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJournal:
    """Make this entry durable. If that fails, no SetLimit for this GPU in the same batch may be carried out."""

    entry: JournalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimit:
    """Ask the device for a limit; answered by SetDone or SetFailed."""

    uuid: GpuId
    cap_mw: int
    reason: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Keep the plan for a restart; None removes it."""

    held: HeldPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveJobFile:
    """Remove the job file of this run, if it still is that run's."""

    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Send to the controller. The shell fills in what jobs told of their progress."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ListDevices:
    """Enumerate GPUs and read their journal entries; answered by DevicesListed or DevicesUnavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Read these GPUs; answered by Sampled.

    ``quick``: a set is waiting for its enforced limit. ``activity``: what they do too, which costs more calls.
    """

    uuids: tuple[GpuId, ...]
    quick: bool = False
    activity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeDevices:
    """Let go of every GPU until one is asked for again; answered by DevicesFreed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRestorer:
    """Leave a process behind that restores prior limits at this instant."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the agent."""


Action: TypeAlias = (
    Audit
    | WriteJournal
    | SetLimit
    | SavePlan
    | RemoveJobFile
    | SendReport
    | ListDevices
    | Sample
    | FreeDevices
    | LeaveRestorer
    | Exit
)
