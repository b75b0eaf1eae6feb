"""The TOML file that both daemons read: strict, and an error names file, key, value and what is allowed."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from .flex import FlexError, parse_flex
from .model import Mode

DEFAULT_PATH: Final = Path("/etc/slurm-pfi/slurm-pfi.toml")
PATH_VARIABLE: Final = "SLURM_PFI_CONF"

Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
Watts = Annotated[float, Meta(ge=0, le=1e10)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class ConfigError(ValueError):
    """A config file that cannot be used; the message is one line for the admin."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error, not a wish."""


class NodeSet(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes alike. ``gpus`` and ``gpu_max_w`` count for a node whose agent has never been heard.

    ``overhead_w`` is what one node draws at most beside its GPUs. ``mode`` overrides the file's own.
    """

    names: str
    gpus: Annotated[int, Meta(ge=0, le=64)]
    gpu_max_w: Watts
    overhead_w: Watts
    mode: Mode | None = None


class PolicySection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a reduction is shared, and what users are promised."""

    name: Literal["equal", "marginal"] = "marginal"
    default_flex: str = "medium"
    none_partitions: tuple[str, ...] = ()
    none_accounts: tuple[str, ...] = ()
    none_qos: tuple[str, ...] = ()
    reserve_w: Watts = 0.0
    unmanaged_w: Watts = 0.0
    park_cap_w: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    silent_node: Literal["worst", "last_caps"] = "worst"
    draw_margin: Annotated[float, Meta(ge=0, le=1)] = 0.02
    declared_pfi: dict[str, Annotated[float, Meta(gt=0, le=20)]] = {}


class TimesSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every time constant, with the values that the design names."""

    response_s: Seconds = 10.0
    start_grace_s: Seconds = 10.0
    max_hold_s: Seconds = 4 * 3600.0
    report_age_s: Seconds = 30.0
    node_silent_s: Seconds = 60.0
    node_answer_s: Seconds = 7.0
    start_settle_s: Seconds = 3.0
    cycle_s: Seconds = 10.0
    cycle_window_s: Seconds = 1.0
    report_s: Seconds = 5.0
    report_window_s: Seconds = 1.0
    rescan_s: Seconds = 10.0
    device_deadline_s: Seconds = 5.0
    slurm_timeout_s: Seconds = 30.0
    full_read_s: Seconds = 600.0
    full_read_min_s: Seconds = 60.0
    baseline_s: Seconds = 60.0
    tag_after_s: Seconds = 30.0
    tag_refresh_s: Seconds = 300.0


class TagSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Our part of AdminComment."""

    enabled: bool = True
    max_writes_per_s: Annotated[float, Meta(gt=0, le=1000)] = 20.0


class ControllerSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The commanding daemon. ``user`` is whom node agents take orders from (SlurmUser)."""

    user: str = "slurm"
    admins: tuple[str, ...] = ()
    state_dir: str = "/var/lib/slurm-pfi"
    run_dir: str = "/run/slurm-pfi-controller"


class NodeSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root agent. Each node has its own folder, named after it, under ``state_dir``.

    ``identity_dir``, if set, replaces the kernel as the source of boot id and driver start (simulated nodes): it
    holds one folder per node with the files ``boot_id`` and ``driver_start``.
    """

    state_dir: str = "/run/slurm-pfi"
    on_orphan: Literal["hold", "release"] = "hold"
    identity_dir: str | None = None


class SlurmSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the site's Slurm is. Commands come from ``bin_dir`` or, without it, from the daemon's PATH."""

    conf: str = "/etc/slurm/slurm.conf"
    bin_dir: str | None = None


class Config(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. ``observe`` is the default: plans and reports, writes no limit."""

    cluster: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")]
    mode: Mode = "observe"
    node_set: tuple[NodeSet, ...] = ()
    policy: PolicySection = PolicySection()
    times: TimesSection = TimesSection()
    tag: TagSection = TagSection()
    controller: ControllerSection = ControllerSection()
    node: NodeSection = NodeSection()
    slurm: SlurmSection = SlurmSection()


def config_path(given: str | None = None) -> Path:
    """The file to read: the one given, else ``$SLURM_PFI_CONF``, else the site's own."""
    return Path(given or os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)


def parse_config(text: str, *, origin: str) -> Config:
    """Check and read TOML text. Raises ConfigError naming ``origin``, the key and what is allowed."""
    try:
        raw: dict[str, Any] = tomllib.loads(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}") from error
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error}") from error
    _check(config, origin)
    return config


def load_config(path: Path) -> Config:
    """Read the file. Raises ConfigError, also when it cannot be opened or is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; start from etc/slurm-pfi.toml") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    return parse_config(text, origin=str(path))


def _check(config: Config, origin: str) -> None:
    """What types alone cannot say."""
    try:
        parse_flex(config.policy.default_flex, site_default=config.policy.default_flex)
    except FlexError as error:
        raise ConfigError(
            f"{origin}: policy.default_flex = {config.policy.default_flex!r}: {error}"
        ) from error
    if config.policy.default_flex == "none":
        raise ConfigError(
            f"{origin}: policy.default_flex = 'none': a site where no job gives power needs no limit"
        )
    for field in ("state_dir", "run_dir"):
        _absolute(origin, f"controller.{field}", getattr(config.controller, field))
    _absolute(origin, "node.state_dir", config.node.state_dir)
    _absolute(origin, "slurm.conf", config.slurm.conf)


def _absolute(origin: str, key: str, value: str) -> None:
    if not Path(value).is_absolute():
        raise ConfigError(f"{origin}: {key} = {value!r}: write an absolute path")
