"""Figures of the studies: what was lost, over the reduction, a line and a shaded interval for each policy.

matplotlib is an extra; nothing else here needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FORMATS: Final = (".svg", ".png")
_MARKS: Final = "osD^vPX*"
_PANEL_INCHES: Final = (5.2, 3.9)


class FigureError(Exception):
    """A figure that cannot be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Line:
    """One policy, all sequences of one length: y over x, and the interval ``low`` to ``high`` shaded."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def __post_init__(self) -> None:
        if not len(self.x) == len(self.y) == len(self.low) == len(self.high):
            raise ValueError("a line needs as many of x, y, low and high")


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: ``lines`` by the name that the legend shows; a name has the same colour in all panels."""

    title: str
    lines: Mapping[str, Line]
    x_label: str
    y_label: str


def check_target(path: Path) -> None:
    """See whether a figure can be made there, before the work that it shows. Raises FigureError."""
    if path.suffix.lower() not in FORMATS:
        raise FigureError(f"{path}: a figure is a file {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise FigureError(f"{path}: there is no folder {path.parent}")
    _matplotlib()


def draw(path: Path, panels: Sequence[Panel], *, title: str, note: str) -> None:
    """Write the panels side by side, two in a row, to an SVG or PNG file. ``note`` stands below them.

    Raises FigureError when matplotlib is not there or the file cannot be written.
    """
    check_target(path)
    figure_class = _matplotlib()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.8)
    figure = figure_class(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    for panel, axis in zip(panels, axes, strict=False):
        _fill(axis, panel, names)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.supxlabel(note, fontsize="small")
    # No date and no random ids inside: the same study makes the same file.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        figure.savefig(path, metadata=metadata, dpi=150)
    except OSError as error:
        raise FigureError(f"{path}: {error.strerror or error}") from error


def _fill(axis: Any, panel: Panel, names: Sequence[str]) -> None:
    for name, line in panel.lines.items():
        place = names.index(name)
        colour = f"C{place % 10}"
        axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        marker = _MARKS[place % len(_MARKS)]
        size = 4 if len(line.x) > 1 else 8  # a lone point has no line that leads to it
        axis.plot(line.x, line.y, color=colour, marker=marker, markersize=size, label=name)
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(visible=True, alpha=0.3)


def _matplotlib() -> Any:
    """The class of figures: used without pyplot, it needs no display and keeps no state."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FigureError(
            "a figure needs matplotlib, which is not installed: pip install 'slurm-pfi[plot]'"
        ) from error
    matplotlib.rcParams["svg.hashsalt"] = "slurm-pfi"
    return Figure
