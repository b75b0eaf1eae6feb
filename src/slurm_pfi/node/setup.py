"""From the config to the parts of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import secrets
from pathlib import Path
from typing import Final

from ..config import Config
from ..gpu.identity import HostIdentity, read_identity
from ..gpu.mapping import slices_sign
from ..gpu.remote import RemoteGpuDevices
from ..gpu.rights import may_set_limits
from ..slurm.gres import GresError
from ..slurm.gresconf import gpu_files
from ..slurm.slurmd import ask_slurmd
from .hardware import FilesUnreadError, Hardware
from .paths import NodePaths
from .state import NS_PER_S, Settings

_CLOSE_S: Final = 3.0


def make_hardware(config: Config, node: str, paths: NodePaths) -> Hardware:
    """The real GPUs of this node, behind NVML in a child process."""
    hardware = Hardware(
        devices=RemoteGpuDevices(
            deadline_s=config.times.device_deadline_s,
            may_replace=lambda: hardware.may_replace(),  # noqa: PLW0108 - set later
        ),
        journal_folder=paths.journal,
        identity=lambda: identity_of(config, node),
        gres_files=lambda: read_gres_files(config, node),
        map_sign=lambda: map_sign(config),
        may_set=config.simulated or may_set_limits(),
    )
    return hardware


async def close_hardware(hardware: Hardware) -> None:
    """End the NVML process; one that is stuck in the driver is left to the kernel."""
    if isinstance(hardware.devices, RemoteGpuDevices):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hardware.devices.close(), _CLOSE_S)


def identity_of(config: Config, node: str) -> HostIdentity:
    """Boot id and driver start, by way of the seam for simulated nodes. Raises IdentityError."""
    folder = config.node.identity_dir
    return read_identity(None if folder is None else Path(folder) / node)


def gres_files(config: Config, node: str) -> dict[int, str] | str:
    """The device file of each position in gres.conf, or why they are not known. May wait for slurmd a few seconds.

    gres.conf lies beside slurm.conf. Where its text leaves the order to slurmd, slurmd is asked. A node without GPUs
    in it has no positions, which is not a fault.
    """
    try:
        return read_gres_files(config, node)
    except FilesUnreadError as error:
        return str(error)


def read_gres_files(config: Config, node: str) -> dict[int, str] | str:
    """The same for the agent. Raises FilesUnreadError when the file cannot be had: its text may be as it was."""
    conf = Path(config.slurm.conf)
    path = conf.with_name("gres.conf")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        text = f"{path} cannot be read: {error}; set slurm.conf in the config to where Slurm's files are"
        if isinstance(error, OSError):
            raise FilesUnreadError(text) from error
        return text
    try:
        return gpu_files(text, node, origin=str(path))
    except GresError as error:
        unclear = str(error)
    try:
        return ask_slurmd(node, conf)
    except GresError as error:
        return f"{unclear}; slurmd was asked for the order: {error}"


def map_sign(config: Config) -> object:
    """Differs when positions may lead to other GPUs: Slurm's files were written, or a board was divided anew.

    Raises OSError when that cannot be told.
    """
    conf = Path(config.slurm.conf)
    return _sign(conf), _sign(conf.with_name("gres.conf")), slices_sign()


def _sign(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


def settings_of(config: Config, node: str, boot_id: str, agent_id: str | None = None) -> Settings:
    """What the core is told of the config. Each agent process has an id of its own."""
    times = config.times
    return Settings(
        cluster=config.cluster,
        node=node,
        agent_id=agent_id or secrets.token_hex(8),
        boot_id=boot_id,
        on_orphan=config.node.on_orphan,
        report_ns=_ns(times.report_s),
        report_window_ns=_ns(times.report_window_s),
        activity_ns=_ns(times.activity_s),
        report_age_ns=_ns(times.report_age_s),
        response_ns=_ns(times.response_s),
        deadline_ns=_ns(times.device_deadline_s),
        simulated=config.simulated,
    )


def commanders(config: Config) -> frozenset[int]:
    """The users whose plans are read: root, ourselves, and the controller's user where this host knows it."""
    trusted = {0, os.geteuid()}
    with contextlib.suppress(KeyError):
        trusted.add(pwd.getpwnam(config.controller.user).pw_uid)
    return frozenset(trusted)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
