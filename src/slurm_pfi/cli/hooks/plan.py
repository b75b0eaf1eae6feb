"""What 'hooks install' and 'hooks remove' would do, step by step: made by looking, before anything is changed."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from ..checks.slurmconf import SlurmConf
from .places import Place, hook_values, matches, place_of, references, site_script, text_of_script
from .safe import RefusedError, check_folder, check_runnable, is_right, shared_kind, text_of
from .scripts import OURS, WRAPPERS, Hook, Settings, is_ours_or_stub, rendered, stub, wrapped_site, wrapper

Verb: TypeAlias = Literal["make folder", "make file", "write", "replace", "keep", "neutralise", "remove"]

INSTALLED: Final[tuple[Hook, ...]] = ("Epilog", "Prolog")
"""In this order: whatever a prolog writes there is an epilog to remove."""
REMOVED: Final[tuple[Hook, ...]] = ("Prolog", "Epilog")


@dataclass(frozen=True, slots=True)
class Step:
    """One change, or with ``keep`` none. ``data``: what ``write``, ``replace`` and ``neutralise`` put there."""

    verb: Verb
    path: Path
    why: str = ""
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """``steps`` in their order, and what is left to the admin, as lines."""

    steps: tuple[Step, ...]
    todo: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """``running``: what slurmctld runs with, which an edit of slurm.conf may not have reached; None: it did not say."""

    conf: SlurmConf
    conf_file: Path
    folder: Path
    running: SlurmConf | None = None

    @property
    def conf_dir(self) -> Path:
        return self.conf_file.parent

    def place(self, hook: Hook) -> Place:
        return place_of(hook, self.conf, self.conf_dir, self.folder)


# -------------------------------------------------------------------------------------------------------- install


def plan_install(site: Site, settings: Settings, *, wrap: bool) -> Plan:
    """Both hooks, whole, before anything names them. Raises RefusedError; then nothing is to be done."""
    steps: list[Step] = []
    todo: list[str] = []
    lines: list[str] = []
    if not f"{settings.state_dir}{settings.log_file}".isprintable():
        raise RefusedError("node.state_dir and node.hook_log must be printable to be written into a script")
    for hook in INSTALLED:
        for value in hook_values(hook, site.conf, site.conf_dir):
            if glob.has_magic(value) and Path(value).parent == site.folder:
                raise RefusedError(
                    f"--folder {site.folder} is the one of {hook}={value}, which would run whatever lies there as "
                    f"{hook}: name another"
                )
    _log(settings.log_file, steps)
    for hook in INSTALLED:
        place = site.place(hook)
        _folder(place.path.parent, steps)
        why = f"among {place.via}" if place.kind == "pattern" else ""
        steps.append(_file(hook, place.path, rendered(hook, settings), why))
        wrapping = site.folder / WRAPPERS[hook]
        if place.via == str(wrapping) or (place.kind == "script" and wrap):
            theirs = site_script(hook, place, site.folder)
            data = wrapper(hook, theirs, place.path, settings.log_file)
            steps.append(_file(hook, wrapping, data, f"runs {theirs} and ours"))
        if place.kind == "none":
            lines.append(f"{hook}={place.path}")
        elif place.kind == "script" and wrap:
            lines.append(f"{hook}={wrapping}")
        elif place.kind == "script":
            todo += _call(hook, place)
    if lines:
        todo.append(f"once every node has these files, write into {site.conf_file}, on all hosts:")
        todo += [f"    {line}" for line in sorted(lines, reverse=True)]
        todo.append("and run 'scontrol reconfigure'; a node that lacks a file which is named there drains")
    return Plan(tuple(steps), tuple(todo))


def _log(log_file: str, steps: list[Step]) -> None:
    """The hooks write only into a log that is there: in /dev they would make a file that grows in memory."""
    path = Path(log_file)
    if path.is_char_device():
        return
    if path.is_relative_to("/dev"):
        raise RefusedError(f"node.hook_log = {log_file!r} is no device on this host: name a file")
    check_folder(path.parent)
    if text_of(path) is None:
        if not path.parent.is_dir():
            raise RefusedError(f"node.hook_log = {log_file!r}: {path.parent} is not there")
        steps.append(Step("make file", path, "the hooks' log, which they do not make"))


def _folder(folder: Path, steps: list[Step]) -> None:
    check_folder(folder)
    check_runnable(folder)
    if not folder.is_dir() and all(step.path != folder for step in steps):
        steps.append(Step("make folder", folder))


def _file(hook: Hook, path: Path, data: bytes, why: str) -> Step:
    """Write it, replace what is ours, keep what is right; never touch a file of others."""
    text = text_of(path)
    if text is None:
        return Step("write", path, why, data)
    if not (is_ours_or_stub(hook, text) or wrapped_site(hook, text)):
        raise RefusedError(f"{path} is there and not ours: move it away first")
    return Step("keep" if is_right(path, data) else "replace", path, why, data)


def _call(hook: Hook, place: Place) -> list[str]:
    """How a site with one script calls ours from it."""
    where = "as its last command, before it ends with 0" if hook == "Prolog" else "as its first command"
    return [
        f"{place.via} is your {hook}. In it, {where}:",
        f"    {place.path} || :",
        f"(with '|| :' only {place.via} itself can fail). Or leave it as it is, and run this with --wrapper.",
    ]


# --------------------------------------------------------------------------------------------------------- remove


def plan_remove(site: Site, *, unasked: bool) -> Plan:
    """Both hooks out again, as long as nothing names them. Raises RefusedError; then nothing is to be done.

    ``unasked``: do not insist on slurmctld's word on what it runs with.
    """
    steps: list[Step] = []
    for hook in REMOVED:
        for pattern in _patterns(site, hook):
            steps += _from_pattern(site, hook, pattern, unasked=unasked)
        own = site.folder / OURS[hook]
        place = site.place(hook)
        paths = {site.folder / WRAPPERS[hook]: None, own: None}
        if place.kind == "named":
            paths[place.path] = None
        gone = {step.path for step in steps}
        steps += _unnamed(site, hook, [path for path in paths if path not in gone], unasked=unasked)
    return Plan(tuple(steps))


def _patterns(site: Site, hook: Hook) -> list[str]:
    confs = [site.conf, *([site.running] if site.running is not None else [])]
    values = [value for conf in confs for value in hook_values(hook, conf, site.conf_dir)]
    return [value for value in dict.fromkeys(values) if glob.has_magic(value)]


def _from_pattern(site: Site, hook: Hook, pattern: str, *, unasked: bool) -> list[Step]:
    """Slurm lists the files of a pattern and then runs them: one that goes meanwhile drains the node."""
    found = matches(pattern)
    ours = [path for path in found if is_ours_or_stub(hook, text_of_script(path) or "")]
    if ours and len(ours) == len(found):
        raise RefusedError(
            f"{hook}={pattern} matches only {', '.join(map(str, ours))}: without it every node drains at its next job. "
            f"Take {hook} out of slurm.conf first, or put a hook of yours there"
        )
    steps = []
    for path in ours:
        text_of(path)  # refuses a symlink
        check_folder(path.parent)
        if (kind := shared_kind(path)) is not None:
            raise RefusedError(
                f"{path} lies on a file system that other nodes share ({kind}), and when none of them looks cannot be "
                f"known here: take {hook}={pattern} out of slurm.conf first, or delete it while no node runs jobs"
            )
        _check_unused(site, path, unasked=unasked)
        steps += [
            Step("neutralise", path, "still found, does nothing", stub(hook)),
            Step("remove", path, "once slurmd does not look at the folder"),
        ]
    return steps


def _unnamed(site: Site, hook: Hook, paths: Iterable[Path], *, unasked: bool) -> list[Step]:
    """Files that must not be named any more, neither in slurm.conf nor in what slurmctld runs with."""
    steps = []
    for path in paths:
        text = text_of(path)
        if text is None:
            continue
        if not (is_ours_or_stub(hook, text) or wrapped_site(hook, text)):
            raise RefusedError(f"{path} is not ours: move it away yourself")
        check_folder(path.parent)
        _check_unused(site, path, unasked=unasked)
        steps.append(Step("remove", path))
    return steps


def _check_unused(site: Site, path: Path, *, unasked: bool) -> None:
    """A hook that is named and gone drains its node. Raises RefusedError, also where that cannot be known."""
    if site.running is None and not unasked:
        raise RefusedError(
            "slurmctld does not say which hooks it runs with, so they may still be named: see "
            "'scontrol show config', or say --unasked"
        )
    confs = [(str(site.conf_file), site.conf)]
    if site.running is not None:
        confs.append(("slurmctld, which was not told of the edit yet (scontrol reconfigure),", site.running))
    if users := list(references(path, confs, site.conf_dir)):
        raise RefusedError(f"{path} is still needed: {'; '.join(users)}. Take it out there first")


def changes(steps: Sequence[Step]) -> bool:
    """Whether anything is left to do."""
    return any(step.verb != "keep" for step in steps)
