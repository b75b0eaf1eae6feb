"""A config for the red buttons when the site's own is of no use: all they need is where the node's folder is."""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..config import Config, NodeSection

_HEADER: Final = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]")


def rescue_config(path: Path, environment: Mapping[str, str] | None = None) -> Config:
    """What can still be read of a bad config file's ``[node]``: its folders and ``on_orphan``. Never raises.

    Without a ``state_dir`` there the first folder of ``$RUNTIME_DIRECTORY`` counts, as systemd gives it to the agent,
    else the default.
    """
    environment = os.environ if environment is None else environment
    found = _node_section(path)
    state_dir = _folder(found, "state_dir") or environment.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    node = NodeSection(
        state_dir=state_dir or NodeSection().state_dir,
        identity_dir=_folder(found, "identity_dir"),
        on_orphan="release" if found.get("on_orphan") == "release" else "hold",
    )
    return Config(cluster="unknown", node=node)


def _folder(found: Mapping[str, Any], key: str) -> str | None:
    value = found.get(key)
    return value if isinstance(value, str) and value.startswith("/") and "\0" not in value else None


def _node_section(path: Path) -> dict[str, Any]:
    """``[node]`` as it stands, or of a file that is no TOML those lines of it that are."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return {}
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    try:
        section = tomllib.loads(text).get("node")
        return section if isinstance(section, dict) else {}
    except tomllib.TOMLDecodeError:
        return _good_lines(text)


def _good_lines(text: str) -> dict[str, Any]:
    section, found = "", dict[str, Any]()
    for line in text.split("\n"):
        if header := _HEADER.match(line):
            section = header[1]
        elif section == "node":
            with contextlib.suppress(tomllib.TOMLDecodeError):
                found.update(tomllib.loads(line))
    return found
