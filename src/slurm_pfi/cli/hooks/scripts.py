"""The texts of the hooks: ours with this site's paths, the one that does nothing, the one that runs two."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal, TypeAlias

Hook: TypeAlias = Literal["Prolog", "Epilog"]
"""As slurm.conf(5) spells it."""

OURS: Final[dict[Hook, str]] = {"Prolog": "slurm-pfi-prolog", "Epilog": "slurm-pfi-epilog"}
IN_GLOB: Final[dict[Hook, tuple[str, ...]]] = {
    "Prolog": ("zz-slurm-pfi-prolog", "99-slurm-pfi-prolog", "slurm-pfi-prolog"),
    "Epilog": ("00-slurm-pfi-epilog", "aa-slurm-pfi-epilog", "slurm-pfi-epilog"),
}
"""Names in a folder with a pattern, the best first. Slurm runs the files of a pattern in the order of their names and
stops at the first that fails. So the job file is written last, after hooks that refuse a job or set GPUs their own way,
and removed first."""
WRAPPERS: Final[dict[Hook, str]] = {hook: f"{name}-and-site" for hook, name in OURS.items()}
DEADLINE_S: Final = 6
"""After this long our hooks end, whatever hangs."""

_STUB: Final = "was removed and does nothing"
_WRAPS: Final = "Runs the site's"
_SETTING: Final = r"(?m)^{name}=(.*)$"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is set in a hook when it is installed."""

    state_dir: str
    log_file: str


def rendered(hook: Hook, settings: Settings) -> bytes:
    """Our hook with this site's paths."""
    text = _packaged(hook)
    for name in ("state_dir", "log_file"):
        begin, found, rest = text.partition(f"\n{name}=")
        if not found:
            raise ValueError(f"{OURS[hook]} sets no {name}")
        text = f"{begin}{found}{shlex.quote(getattr(settings, name))}\n{rest.partition(chr(10))[2]}"
    return text.encode()


def settings_of(text: str) -> Settings | None:
    """The paths set in a hook of ours; None where there are none or they are not understood."""
    found = {}
    for name in ("state_dir", "log_file"):
        line = re.search(_SETTING.format(name=name), text)
        try:
            words = shlex.split(line[1]) if line is not None else []
        except ValueError:
            return None
        if len(words) != 1:
            return None
        found[name] = words[0]
    return Settings(**found)


def is_ours(hook: Hook, text: str) -> bool:
    """Whether this is our hook itself, of whatever version; a script that calls it is not."""
    return f">{OURS[hook]}[" in text and settings_of(text) is not None


def is_current(hook: Hook, text: str) -> bool:
    """Whether a hook of ours is the one of this version, whatever its paths."""
    settings = settings_of(text)
    return settings is not None and text.encode() == rendered(hook, settings)


def stub(hook: Hook) -> bytes:
    """A hook in place of ours that may be run at any time until its file goes."""
    return (
        f"#!/bin/sh\n# {OURS[hook]} {_STUB}: 'slurm-pfi hooks remove' deletes this file.\nexit 0\n".encode()
    )


def is_stub(hook: Hook, text: str) -> bool:
    """Whether this is what `stub` gives."""
    return f"# {OURS[hook]} {_STUB}" in text


def is_ours_or_stub(hook: Hook, text: str) -> bool:
    """Whether we wrote this file among a site's hooks."""
    return is_ours(hook, text) or is_stub(hook, text)


def wrapper(hook: Hook, site: Path, ours: Path, log_file: str) -> bytes:
    """A hook that runs the site's script and ours; only the site's can fail, as it would without us."""
    its, mine, log = shlex.quote(str(site)), shlex.quote(str(ours)), shlex.quote(log_file)
    lines = [
        "#!/bin/sh",
        f"# {_WRAPS} {hook} and slurm-pfi's; the site's exit status counts.",
        *([f"{its} || exit"] if hook == "Prolog" else []),
        f"if [ -f {mine} ] && [ -x {mine} ]; then",
        f"    {mine}",
        f"elif [ -c {log} ] || [ -f {log} ]; then",
        f"    {{ printf '<12>%s: cannot be run\\n' {mine} >>{log}; }} 2>/dev/null",
        "fi",
        "exit 0" if hook == "Prolog" else f"exec {its}",
    ]
    return "\n".join([*lines, ""]).encode()


def wrapped_site(hook: Hook, text: str) -> Path | None:
    """The site's script in a wrapper of ours, None when this is no such wrapper."""
    lines = text.splitlines()
    if len(lines) < 4 or not lines[1].startswith(f"# {_WRAPS} {hook} "):
        return None
    line = lines[2].removesuffix(" || exit") if hook == "Prolog" else lines[-1].removeprefix("exec ")
    words = shlex.split(line)
    return Path(words[0]) if len(words) == 1 else None


def _packaged(hook: Hook) -> str:
    return files(__package__).joinpath("scripts", OURS[hook]).read_text("ascii")
