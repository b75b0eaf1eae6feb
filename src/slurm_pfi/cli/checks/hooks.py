"""Prolog, epilog and the sbatch plugin: a hook that cannot be run drains nodes, so each file is looked at."""

from __future__ import annotations

import glob
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias

from .finding import Facts, Finding

Hook: TypeAlias = Literal["Prolog", "Epilog"]
OURS: Final[dict[Hook, str]] = {"Prolog": "slurm-pfi-prolog", "Epilog": "slurm-pfi-epilog"}
PLUGIN: Final = "slurm_pfi.so"
SHORTEST_TIMEOUT_S: Final = 10
_MOST_BYTES: Final = 256 * 1024
_STATE_DIR: Final = re.compile(r"^state_dir=(.*)$", re.MULTILINE)


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
        yield Finding(
            word, "warn", f"slurm.conf has no {hook}: no run is ever seen", f"set {hook}= to {ours}"
        )
        return
    files: list[Path] = []
    for value in values:
        if glob.has_magic(value):
            found = _matching(str(conf_dir / value))
            if not found and is_node:
                yield Finding(
                    word,
                    "fail",
                    f"{hook}={value} matches no file on this node: Slurm drains it at the next job",
                    f"put {ours} into that folder, or take {hook} out of slurm.conf",
                )
            files += found
        else:
            files.append(conf_dir / value)
    damaged = [finding for path in files if (finding := _damage(hook, path, is_node=is_node))]
    yield from damaged
    mine = [
        (path, text) for path in files if (text := _text(path)) is not None and _is_ours(path, text, ours)
    ]
    if not mine:
        unseen = [str(path) for path in files if _text(path) is None]
        if unseen and not any(finding.outcome == "fail" for finding in damaged):
            yield Finding(
                word, "unseen", f"cannot be read here: {', '.join(unseen)}", "run doctor on a node as root"
            )
        elif not unseen:
            yield Finding(
                word,
                "warn",
                f"{hook}={','.join(values)} does not lead to {ours}: no run is seen",
                f"add {ours} to it",
            )
        return
    yield _state_dir_finding(word, *mine[0], state_dir)


def _matching(pattern: str) -> list[Path]:
    """The files of a pattern as Slurm finds them, by glob(3); an absolute pattern rules Path.glob out."""
    return [Path(name) for name in sorted(glob.glob(pattern))]  # noqa: PTH207


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
    if about.st_mode & 0o022:
        text = f"{path} may be written by others (mode {stat.S_IMODE(about.st_mode):04o}), and root runs it"
        return Finding(word, "fail", text, f"chmod 0755 {path}")
    return None


def _text(path: Path) -> str | None:
    """What the file holds, None when it cannot be read here."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def _is_ours(path: Path, text: str, ours: str) -> bool:
    """Our script under any name, or another one that calls it."""
    return path.name == ours or ours in text


def _state_dir_finding(word: str, path: Path, text: str, state_dir: Path) -> Finding:
    """The hook must write where the agent reads."""
    match = _STATE_DIR.search(text)
    try:
        written = shlex.split(match[1]) if match else []
    except ValueError:
        written = []
    if not written:
        return Finding(
            word, "ok", f"leads to {OURS['Prolog' if word == 'prolog' else 'Epilog']} by way of {path}"
        )
    if Path(written[0]).resolve() != state_dir.resolve():
        return Finding(
            word,
            "fail",
            f"{path} works in {written[0]}, the agent in {state_dir}: no run is seen",
            f"write state_dir={state_dir} into {path}, or change node.state_dir",
        )
    return Finding(word, "ok", f"{path} works in {written[0]}")


def timeout_finding(value: str) -> Finding:
    """PrologEpilogTimeout: ours takes milliseconds; what is said is for the other hooks of the site."""
    name = "hook timeout"
    if not value or value in ("0", "65534"):
        return Finding(
            name, "ok", "PrologEpilogTimeout is not set: Slurm waits for a hanging hook without end"
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
            for included in _matching(str(path.parent / words[1])):
                yield from _plugins(included, depth + 1)
        elif words[0].lower() in ("optional", "required"):
            yield words[0].lower(), words[1]
