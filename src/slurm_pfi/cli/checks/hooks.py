"""Prolog, epilog and the sbatch plugin: a hook that cannot be run drains nodes, so each file is looked at."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...slurm.version import Version, read_version
from ..hooks.places import files_of, matches, text_of_script
from ..hooks.scripts import DEADLINE_S, OURS, Hook, is_current, is_ours, is_stub, settings_of
from . import commands
from .finding import Facts, Finding

_LAST_LINE: Final = Version(22, 5)
_ALL_LINES: Final = Version(24, 11)
_ONE_LINE: Final = (
    "write one line with a pattern, or one script that runs both ('slurm-pfi hooks install --wrapper')"
)
PLUGIN: Final = "slurm_pfi.so"
SHORTEST_TIMEOUT_S: Final = 10
_SETS_LIMITS: Final = re.compile(
    r"^[^#\n]*\b(?:nvidia-smi\b[^#\n]*\s(?:-pl|--power-limit|-gpp|-r|--gpu-reset)\b|dcgmi\s+config\b[^#\n]*-P\b)",
    re.MULTILINE,
)


def hooks(facts: Facts) -> Iterator[Finding]:
    """Both hooks as slurm.conf configures them, and the time that Slurm gives them."""
    if facts.slurm is None:
        yield Finding("hooks", "unseen", facts.slurm_said)
        return
    for hook in OURS:
        yield from hook_findings(
            hook,
            tuple(value for value in facts.slurm.values.get(hook.lower(), ()) if value),
            facts.slurm_conf.parent,
            Path(facts.config.node.state_dir),
            is_node=facts.is_node,
        )
    yield timeout_finding(facts.slurm.value("PrologEpilogTimeout"))


def hook_findings(
    hook: Hook, values: tuple[str, ...], conf_dir: Path, state_dir: Path, *, is_node: bool
) -> Iterator[Finding]:
    """Judge one hook by the values that slurm.conf gives for it."""
    word, ours = hook.lower(), OURS[hook]
    if not values:
        # Not "set it": a node that lacks a file which slurm.conf names drains.
        todo = "run 'slurm-pfi hooks install' on every node; it says the line to add once all have the file"
        yield Finding(word, "warn", f"slurm.conf has no {hook}: no run is ever seen", todo)
        return
    for value in values:
        if is_node and glob.has_magic(value) and not matches(str(conf_dir / value)):
            yield Finding(
                word,
                "fail",
                f"{hook}={value} matches no file on this node: Slurm drains it at the next job",
                f"put {ours} into that folder, or take {hook} out of slurm.conf",
            )
    files = _files(values, conf_dir)
    if not files:
        if not is_node:
            said = f"{hook}={','.join(values)} matches nothing on this host, which is no node"
            yield Finding(word, "unseen", said, "run this on a node")
        return
    damaged = [finding for path in files if (finding := _damage(hook, path, is_node=is_node))]
    yield from damaged
    for path in files:
        if is_stub(hook, text_of_script(path) or ""):
            todo = f"'slurm-pfi hooks remove' deletes it, 'slurm-pfi hooks install' puts {ours} back"
            yield Finding(
                word, "warn", f"{path} is what a removal left and does nothing: no run is seen", todo
            )
    mine = [
        (path, text) for path in files if (text := text_of_script(path)) is not None and _leads_to(hook, text)
    ]
    if not mine:
        unseen = [str(path) for path in files if text_of_script(path) is None]
        if unseen and not any(finding.outcome == "fail" for finding in damaged):
            yield Finding(
                word, "unseen", f"cannot be read here: {', '.join(unseen)}", "run doctor on a node as root"
            )
        elif not unseen:
            yield Finding(
                word,
                "warn",
                f"{hook}={','.join(values)} does not lead to {ours}: no run is seen",
                "run 'slurm-pfi hooks install', which says what else is to be done",
            )
        return
    yield _settings_finding(hook, *mine[0], state_dir)


def _files(values: tuple[str, ...], conf_dir: Path) -> list[Path]:
    """All files that slurm.conf's values mean, in the order in which Slurm runs them."""
    return [file for value in values for file in files_of(str(conf_dir / value))]


def _damage(hook: Hook, path: Path, *, is_node: bool) -> Finding | None:
    """What would make Slurm fail to run this file, or let somebody else write it."""
    word = hook.lower()
    try:
        about = path.stat()
    except FileNotFoundError:
        if is_node:
            text = f"{path} is configured and not there: Slurm drains this node at the next job"
            return Finding(word, "fail", text, f"install it, or take it out of {hook} in slurm.conf")
        return None
    except OSError as error:
        return Finding(word, "unseen", f"{path}: {error.strerror}", "run doctor as root")
    if not stat.S_ISREG(about.st_mode) or not about.st_mode & 0o111:
        text = f"{path} is not an executable file: Slurm drains the node at the next job"
        return Finding(word, "fail", text, f"chmod 0755 {path}, or move it out of the folder of hooks")
    for file in (path, path.parent):
        mode = file.stat().st_mode
        if mode & 0o022:
            text = f"{file} may be written by others (mode {stat.S_IMODE(mode):04o}), and root runs "
            return Finding(word, "fail", text + ("it" if file == path else path.name), f"chmod 0755 {file}")
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        text = f"{path} lies on a file system mounted noexec: Slurm drains the node at the next job"
        return Finding(word, "fail", text, "put it elsewhere")
    return None


def _leads_to(hook: Hook, text: str) -> bool:
    """Our script itself, or another one that names it."""
    return OURS[hook] in text and not is_stub(hook, text)


def _settings_finding(hook: Hook, path: Path, text: str, state_dir: Path) -> Finding:
    """The hook must write where the agent reads, and say its faults where somebody does."""
    word = hook.lower()
    settings = settings_of(text)
    if settings is None:
        return Finding(word, "ok", f"leads to {OURS[hook]} by way of {path}")
    install = "run 'slurm-pfi hooks install'"
    if Path(settings.state_dir).resolve() != state_dir.resolve():
        return Finding(
            word,
            "fail",
            f"{path} works in {settings.state_dir}, the agent in {state_dir}: no run is seen",
            f"{install}, or change node.state_dir",
        )
    log = Path(settings.log_file)
    if not log.is_char_device() and not log.is_file():
        return Finding(
            word, "warn", f"{path} says its faults in {log}, which is not there: nobody reads them", install
        )
    if is_ours(hook, text) and not is_current(hook, text):
        return Finding(word, "warn", f"{path} is of another version of slurm-pfi", install)
    return Finding(word, "ok", f"{path} works in {settings.state_dir}, faults go to {log}")


def others(facts: Facts) -> Iterator[Finding]:
    """The site's own hooks beside ours: their order, and those that set power limits themselves."""
    if facts.slurm is None:
        return
    for hook in OURS:
        values = tuple(value for value in facts.slurm.values.get(hook.lower(), ()) if value)
        if len(values) > 1:
            yield repeated_finding(hook, values, _slurm_version(facts))
        files = [(path, text_of_script(path) or "") for path in _files(values, facts.slurm_conf.parent)]
        yield from order_findings(hook, files)
        yield from limit_findings(hook, files)


def repeated_finding(hook: Hook, values: tuple[str, ...], version: Version | None) -> Finding:
    """Two lines for one hook, as it was seen: 22.05 runs the last alone, 24.11 and 26.05 run all in their order."""
    word, said = hook.lower(), f"slurm.conf has {hook} {len(values)} times"
    if version is not None and version >= _ALL_LINES:
        return Finding(word, "ok", f"{said}, and Slurm runs all of them")
    if version is not None and version <= _LAST_LINE:
        return Finding(word, "fail", f"{said}: Slurm {version} runs {values[-1]} alone", _ONE_LINE)
    return Finding(word, "warn", f"{said}: older versions of Slurm run {values[-1]} alone", _ONE_LINE)


def _slurm_version(facts: Facts) -> Version | None:
    ran = commands.run(facts.config.slurm, "scontrol", "--version")
    version = None if isinstance(ran, str) else read_version(ran.out)
    return version if isinstance(version, Version) else None


def order_findings(hook: Hook, files: list[tuple[Path, str]]) -> Iterator[Finding]:
    """Slurm stops at the first hook that fails: what ours has written then has nobody to remove it, or the reverse."""
    places = [place for place, (_, text) in enumerate(files) if is_ours(hook, text)]
    if not places:
        return
    if hook == "Prolog" and places[-1] < len(files) - 1:
        why = "if one of them refuses the job, its job file is left until the controller finds out"
        after = ", ".join(path.name for path, _ in files[places[-1] + 1 :])
        yield Finding(
            "prolog order", "warn", f"{after} run after ours: {why}", "let ours be the last by its name"
        )
    if hook == "Epilog" and places[0] > 0:
        why = "if one of them fails, the job file is left until the controller finds out"
        before = ", ".join(path.name for path, _ in files[: places[0]])
        yield Finding(
            "epilog order", "warn", f"{before} run before ours: {why}", "let ours be the first by its name"
        )


def limit_findings(hook: Hook, files: list[tuple[Path, str]]) -> Iterator[Finding]:
    """Other writers of limits: above a cap of ours they are set back and told as a conflict at every job."""
    setters = [str(path) for path, text in files if not is_ours(hook, text) and _SETS_LIMITS.search(text)]
    if setters:
        text = f"{', '.join(setters)} sets power limits or resets GPUs itself: inside a window each job is a conflict"
        yield Finding(f"{hook.lower()} limits", "warn", text, "leave power limits to slurm-pfi on its nodes")


def timeout_finding(value: str) -> Finding:
    """PrologEpilogTimeout: ours takes milliseconds; what is said is for the other hooks of the site."""
    name = "hook timeout"
    if not value or value in ("0", "65534"):
        text = "PrologEpilogTimeout is not set: Slurm waits for a hanging hook without end"
        return Finding(name, "ok", f"{text}; ours end after {DEADLINE_S} s")
    if value.isascii() and value.isdigit() and int(value) <= DEADLINE_S:
        text = f"PrologEpilogTimeout={value} is shorter than the {DEADLINE_S} s after which our hooks leave what hangs"
        return Finding(
            name,
            "fail",
            f"{text}: a file system that hangs drains nodes",
            f"allow {SHORTEST_TIMEOUT_S} s or more",
        )
    if value.isascii() and value.isdigit() and int(value) < SHORTEST_TIMEOUT_S:
        return Finding(
            name,
            "warn",
            f"PrologEpilogTimeout={value}: a node that is slow for a moment is drained",
            f"allow {SHORTEST_TIMEOUT_S} s or more",
        )
    return Finding(name, "ok", f"PrologEpilogTimeout={value}")


# ------------------------------------------------------------------------------------------------ sbatch plugin


def plugin(facts: Facts) -> Iterator[Finding]:
    """Whether plugstack.conf lists our plugin as optional, and whether the file is there."""
    if facts.slurm is None:
        yield Finding("sbatch plugin", "unseen", facts.slurm_said)
        return
    path = facts.slurm_conf.parent / facts.slurm.value("PlugStackConfig", "plugstack.conf")
    yield plugin_finding(path)


def plugin_finding(path: Path) -> Finding:
    """Judge a plugstack.conf."""
    name = "sbatch plugin"
    todo = f"add the line of etc/plugstack.conf to {path} on submit hosts and nodes"
    try:
        entries = list(_plugins(path, 0))
    except FileNotFoundError:
        return Finding(name, "warn", f"{path} is not there: sbatch has no --power-flex", todo)
    except (OSError, UnicodeDecodeError) as error:
        return Finding(name, "unseen", f"{path} cannot be read: {error}", "run doctor as root")
    mine = [(word, where) for word, where in entries if Path(where).name == PLUGIN]
    if not mine:
        return Finding(name, "warn", f"{path} does not list {PLUGIN}: sbatch has no --power-flex", todo)
    word, where = mine[0]
    there = Path(where).is_file() if Path(where).is_absolute() else None
    if word == "required":
        return Finding(
            name,
            "fail" if there is False else "warn",
            f"{path} lists {where} as required"
            + (", and it is not there: every sbatch is blocked" if there is False else ""),
            "write optional: a host without the plugin then loses the flag only, not sbatch",
        )
    if there is False:
        return Finding(
            name, "warn", f"{where} is not on this host: sbatch here has no --power-flex", f"install {where}"
        )
    if there is None:
        return Finding(name, "unseen", f"{where} is looked for in Slurm's PluginDir", "give its full path")
    return Finding(name, "ok", f"{path} lists {where} as optional")


def _plugins(path: Path, depth: int) -> Iterator[tuple[str, str]]:
    """(optional or required, plugin) of each line, those of included files in their place."""
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split("#", 1)[0].split()
        if len(words) < 2:
            continue
        if words[0].lower() == "include" and depth < 4:
            for included in matches(str(path.parent / words[1])):
                yield from _plugins(included, depth + 1)
        elif words[0].lower() in ("optional", "required"):
            yield words[0].lower(), words[1]
