"""How a site's slurm.conf leads, or would lead, to our hooks. Reads files, writes none."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

from ..checks.slurmconf import SlurmConf
from .safe import RefusedError, real, text_of
from .scripts import IN_GLOB, OURS, WRAPPERS, Hook, is_ours, is_ours_or_stub, wrapped_site

Kind: TypeAlias = Literal["pattern", "named", "called", "script", "none"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where our hook lies, or shall lie, and how Slurm comes to it.

    ``kind``: ``pattern`` a file among those that a pattern matches, ``named`` in slurm.conf itself, ``called`` by the
    site's script, ``script`` the site's script does not call it yet, ``none`` slurm.conf has no such hook. ``via``: the
    pattern, or the site's script.
    """

    hook: Hook
    kind: Kind
    path: Path
    via: str = ""


def place_of(hook: Hook, conf: SlurmConf, conf_dir: Path, folder: Path) -> Place:
    """Judge one hook. ``folder``: where our hooks lie at a site without patterns. Raises RefusedError."""
    values = hook_values(hook, conf, conf_dir)
    own = folder / OURS[hook]
    for value in values:
        if not glob.has_magic(value) and _is_named(hook, Path(value), own):
            return Place(hook, "named", Path(value), value)
    patterns = [value for value in values if glob.has_magic(value)]
    scripts = [value for value in values if not glob.has_magic(value)]
    for file in (file for value in values for file in files_of(value)):
        if str(own) in (text_of_script(file) or ""):
            return Place(hook, "called", own, str(file))
    if patterns:
        # Ours may already lie in any of them; else last of all prologs and first of all epilogs.
        in_order = patterns[::-1] if hook == "Prolog" else patterns
        for pattern in in_order:
            for path in matches(pattern):
                if is_ours_or_stub(hook, text_of_script(path) or ""):
                    return Place(hook, "pattern", path, pattern)
        return Place(hook, "pattern", name_in(hook, in_order[0]), in_order[0])
    if scripts:
        return Place(hook, "script", own, scripts[-1] if hook == "Prolog" else scripts[0])
    return Place(hook, "none", own)


def hook_values(hook: Hook, conf: SlurmConf, conf_dir: Path) -> tuple[str, ...]:
    """What slurm.conf gives for a hook, as absolute paths. Raises RefusedError for a path that slurmd fetches."""
    values = []
    for value in conf.values.get(hook.lower(), ()):
        if not value:
            continue
        if not value.startswith("/") and conf_dir.name in ("conf", "conf-cache"):
            raise RefusedError(
                f"{hook}={value}: a configless slurmd fetches it from slurmctld and would overwrite it in {conf_dir}; "
                "run this on slurmctld's host, where the file comes from"
            )
        values.append(str(conf_dir / value))
    return tuple(values)


def name_in(hook: Hook, pattern: str) -> Path:
    """A new name for our hook that the pattern matches. Raises RefusedError when there is none."""
    folder, _, last = pattern.rpartition("/")
    if glob.has_magic(folder):
        raise RefusedError(
            f"{hook}={pattern} means more than one folder: name one, or copy the hook there yourself"
        )
    for name in (f"{name}{suffix}" for suffix in ("", ".sh") for name in IN_GLOB[hook]):
        if not last.startswith(".") and fnmatchcase(name, last):
            return Path(folder) / name
    raise RefusedError(
        f"{hook}={pattern} matches none of the names that we would choose ({', '.join(IN_GLOB[hook])}, also with .sh)"
    )


def matches(pattern: str) -> list[Path]:
    """The files of a pattern in the order in which Slurm runs them, glob(3)'s in the C locale."""
    return [Path(name) for name in sorted(glob.glob(pattern))]  # noqa: PTH207 (patterns are absolute)


def files_of(value: str) -> list[Path]:
    """The files that one setting means."""
    return matches(value) if glob.has_magic(value) else [Path(value)]


def references(path: Path, confs: Iterable[tuple[str, SlurmConf]], conf_dir: Path) -> Iterator[str]:
    """Who would miss this file: settings that name it or a link to it, and scripts in settings that call it.

    Not a pattern that lists it by its own name: that finds one file less.
    """
    entry = (path.name, real(path.parent))
    for where, conf in confs:
        for hook in OURS:
            for value in hook_values(hook, conf, conf_dir):
                for file in files_of(value):
                    if glob.has_magic(value) and (file.name, real(file.parent)) == entry:
                        continue
                    if real(file) == real(path):
                        yield f"{where} has {hook}={value}" + (
                            f", that is {file}" if str(file) != value else ""
                        )
                    elif str(path) in (text_of_script(file) or ""):
                        yield f"{file} ({where} has {hook}={value}) names it"


def text_of_script(path: Path) -> str | None:
    """The text of a site's hook, which may be a symlink; None when it cannot be read."""
    try:
        return text_of(real(path))
    except (RefusedError, OSError):
        return None


def site_script(hook: Hook, place: Place, folder: Path) -> Path:
    """The site's own script, also when slurm.conf already names our wrapper of it. Raises RefusedError."""
    wrapper = folder / WRAPPERS[hook]
    if Path(place.via) != wrapper:
        return Path(place.via)
    inner = wrapped_site(hook, text_of(wrapper) or "")
    if inner is None:
        raise RefusedError(f"{wrapper} is not as we wrote it: name the site's script in slurm.conf again")
    return inner


def _is_named(hook: Hook, path: Path, own: Path) -> bool:
    text = text_of_script(path)
    return (
        path == own
        or (text is None and path.name == OURS[hook])
        or (text is not None and is_ours(hook, text))
    )
