"""The tag: our part of a job's AdminComment, one token at its end. Pure text; the rest of the field is not ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

from ..flex import FlexError, parse_flex
from ..units import format_duration

MAX_TAG_BYTES: Final = 200
MAX_COMMENT_BYTES: Final = 65_000
"""The accounting database cuts the field at 65,535 bytes, in silence. Beyond this nothing is written."""

Source: TypeAlias = Literal["measured", "predicted", "declared", "default"]

SOURCES: Final[tuple[Source, ...]] = ("measured", "predicted", "declared", "default")

_NUMBER: Final = r"\d{1,4}(?:\.\d{1,3})?"
_TAG: Final = re.compile(
    rf"pfi=(?P<pfi>{_NUMBER})(?:\[(?P<low>{_NUMBER}),(?P<high>{_NUMBER})\])?"
    rf";src=(?P<source>{'|'.join(SOURCES)})"
    r";grid=(?P<grid_low>\d{1,5})-(?P<grid_high>\d{1,5})/(?P<grid_step>\d{1,5})"
    r";flex=(?P<flex>[a-z0-9%]{1,8})"
    r";loss=(?P<loss>-?\d{1,3}\.\d%|\?)"
    r";wh=(?P<wh>-?\d{1,12}|\?)"
    r";capped=(?P<capped>\d{1,8})m"
    r";t=(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\dZ)"
    r"(?:;restart=(?P<restart>\d{1,6}))?"
    r"(?P<simulated>;sim=yes)?"
    # Fields that a later version may add.
    r"(?:;[a-z]{1,16}=[!-:<-~]{0,64}){0,8}",
    re.ASCII,
)
# One of ours wherever it stands alone: between blanks or at an end. The blank before it is ours as well.
_OURS: Final = re.compile(rf"(?: |(?<![^\t\n\r ])){_TAG.pattern}(?![^\t\n\r ])", re.ASCII)
_OURS_FIRST: Final = re.compile(rf"{_TAG.pattern}(?: |\Z)", re.ASCII)


class TagError(ValueError):
    """A tag that cannot be written, or text that is no tag."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A measurement with a date. ``pfi_low`` and ``pfi_high`` bound it where a source gives an interval.

    ``grid_*_w`` is the cap grid of the PFI. ``loss`` (0..1) and ``energy_wh`` (negative: saved) are since the run's
    start; None while unknown. ``capped_s`` is the time spent under a cap. Resolution: 0.1 % and whole minutes.
    ``restart``: which run of the job this was measured of; after a requeue the last run's tag stands for a moment.
    ``simulated``: the GPUs are, so that nothing was measured on hardware.
    """

    pfi: float
    source: Source
    grid_low_w: int
    grid_high_w: int
    grid_step_w: int
    flex: str
    loss: float | None
    energy_wh: int | None
    capped_s: float
    at_unix_s: float
    pfi_low: float | None = None
    pfi_high: float | None = None
    restart: int = 0
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class NotRewritable:
    """The field must stay as it is; ``why`` says what would be damaged."""

    why: str


def format_tag(tag: Tag) -> str:
    """The tag as one ASCII token of at most 200 bytes. Raises TagError for values that have no place in it."""
    try:
        parse_flex(tag.flex)
        interval = ""
        if tag.pfi_low is not None and tag.pfi_high is not None:
            interval = f"[{tag.pfi_low:.2f},{tag.pfi_high:.2f}]"
        loss = "?" if tag.loss is None else f"{round(tag.loss * 100, 1) + 0.0:.1f}%"
        text = (
            f"pfi={tag.pfi:.2f}{interval};src={tag.source}"
            f";grid={tag.grid_low_w}-{tag.grid_high_w}/{tag.grid_step_w};flex={tag.flex}"
            f";loss={loss};wh={'?' if tag.energy_wh is None else tag.energy_wh}"
            f";capped={_minutes(tag.capped_s)}m"
            f";t={datetime.fromtimestamp(tag.at_unix_s, UTC):%Y-%m-%dT%H:%MZ}"
            f"{f';restart={tag.restart}' if tag.restart else ''}"
            f"{';sim=yes' if tag.simulated else ''}"
        )
    except (FlexError, ValueError, OverflowError, OSError) as error:
        raise TagError(f"a tag cannot be written: {error}") from error
    if len(text) > MAX_TAG_BYTES or _TAG.fullmatch(text) is None:
        raise TagError(f"a tag cannot be written: {text[:MAX_TAG_BYTES]!r} is not one")
    return text


def _minutes(seconds: float) -> int:
    """Whole minutes; the first counts as soon as it has begun, for 0 says that there was no cap."""
    return max(1, int(seconds // 60)) if seconds >= 1 else int(seconds // 60)


def capped_text(capped_s: float) -> str:
    """A tag's time under caps in words: it has whole minutes, of which the first counts at once."""
    return "less than 2 min" if capped_s < 120 else format_duration(capped_s)


def parse_tag(text: str) -> Tag:
    """Read one token. Fields that a later version added are ignored. Raises TagError."""
    match = _TAG.fullmatch(text) if len(text) <= 2 * MAX_TAG_BYTES else None
    if match is None:
        raise TagError(f"{text[:MAX_TAG_BYTES]!r} is not a tag")
    part = match.groupdict()
    try:
        at = datetime.strptime(part["time"], "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC)
    except ValueError as error:
        raise TagError(f"{part['time']!r} is not a time") from error
    return Tag(
        pfi=float(part["pfi"]),
        pfi_low=None if part["low"] is None else float(part["low"]),
        pfi_high=None if part["high"] is None else float(part["high"]),
        source=next(source for source in SOURCES if source == part["source"]),
        grid_low_w=int(part["grid_low"]),
        grid_high_w=int(part["grid_high"]),
        grid_step_w=int(part["grid_step"]),
        flex=part["flex"],
        loss=None if part["loss"] == "?" else float(part["loss"].removesuffix("%")) / 100,
        energy_wh=None if part["wh"] == "?" else int(part["wh"]),
        capped_s=int(part["capped"]) * 60.0,
        at_unix_s=at.timestamp(),
        restart=int(part["restart"] or 0),
        simulated=part["simulated"] is not None,
    )


def find_tag(comment: str) -> Tag | None:
    """Our tag in an AdminComment, the last if there are several; None if there is none."""
    found = None
    for match in _OURS.finditer(comment):
        try:
            found = parse_tag(match.group().lstrip(" "))
        except TagError:
            continue
    return found


def merge(existing: str | None, tag: Tag) -> str | NotRewritable:
    """The field with this tag at its end, after a blank, in place of any older one of ours.

    Everything else stays byte for byte. Text that could be ours but is not surely so counts as foreign.
    """
    foreign = foreign_text(existing or "")
    if "\0" in foreign:
        return NotRewritable("the AdminComment holds a zero byte")
    merged = f"{foreign} {format_tag(tag)}" if foreign else format_tag(tag)
    size = len(merged.encode("utf-8", "surrogateescape"))
    if size > MAX_COMMENT_BYTES:
        return NotRewritable(
            f"the AdminComment would have {size} bytes; beyond {MAX_COMMENT_BYTES} it may be cut"
        )
    return merged


def foreign_text(comment: str) -> str:
    """What others have put there: the comment without our tags, and without the one blank that came with each."""
    first = _OURS_FIRST.match(comment)
    while first is not None:
        comment = comment[first.end() :]
        first = _OURS_FIRST.match(comment)
    return _OURS.sub("", comment)
