"""The TOML file that both daemons read: strict, and an error names file, line, key, value and what is allowed."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from .flex import FlexError, parse_flex
from .model import Mode

DEFAULT_PATH: Final = Path("/etc/slurm-pfi/slurm-pfi.toml")
PATH_VARIABLE: Final = "SLURM_PFI_CONF"

_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
Watts = Annotated[float, Meta(ge=0, le=1e10)]
SomeWatts = Annotated[float, Meta(gt=0, le=1e10)]
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
    """How a reduction is shared, and what users are promised.

    ``time_limit_flex``: the tightest that a run's floor may become for its time limit, as a flex. A run that may have
    ``none`` may get none. ``compensate_time_limit``: raise the time limits of runs by what caps have cost them.
    """

    name: Literal["equal", "pfi", "marginal"] = "marginal"
    default_flex: str = "medium"
    none_partitions: tuple[str, ...] = ()
    none_accounts: tuple[str, ...] = ()
    none_qos: tuple[str, ...] = ()
    reserve_w: Watts = 0.0
    unmanaged_w: Watts = 0.0
    park_cap_w: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    silent_node: Literal["worst", "last_caps"] = "worst"
    draw_margin: Annotated[float, Meta(ge=0, le=1)] = 0.02
    contract_w: SomeWatts | None = None
    ramp_up_w_per_s: SomeWatts | None = None
    declared_pfi: dict[str, Annotated[float, Meta(gt=0, le=20)]] = {}
    time_limit_flex: str = "low"
    compensate_time_limit: bool = False


class TimesSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every time constant, with the values that the design names."""

    response_s: Seconds = 10.0
    start_grace_s: Seconds = 10.0
    max_hold_s: Seconds = 4 * 3600.0
    rebound_s: Annotated[float, Meta(ge=0, le=7 * 86400)] = 1800.0
    report_age_s: Seconds = 30.0
    node_silent_s: Seconds = 60.0
    node_answer_s: Seconds = 7.0
    start_settle_s: Seconds = 3.0
    cycle_s: Seconds = 10.0
    cycle_window_s: Seconds = 1.0
    report_s: Seconds = 5.0
    report_window_s: Seconds = 1.0
    activity_s: Seconds = 5.0
    rescan_s: Seconds = 10.0
    device_deadline_s: Seconds = 5.0
    slurm_timeout_s: Seconds = 30.0
    full_read_s: Seconds = 600.0
    full_read_min_s: Seconds = 60.0
    baseline_s: Seconds = 60.0
    learn_s: Seconds = 60.0
    tag_after_s: Seconds = 30.0
    tag_refresh_s: Seconds = 300.0


class TagSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Our part of AdminComment. ``job_line``: nodes are told a line of it for each capped job's own output."""

    enabled: bool = True
    job_line: bool = False
    max_writes_per_s: Annotated[float, Meta(gt=0, le=1000)] = 20.0


class ControllerSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The commanding daemon. ``user`` is whom node agents take orders from (SlurmUser).

    ``curves``: a file of the site's own measured curves, added to the library that comes with the package.
    ``history_days`` and ``history_max_mb`` bound history.db: older rows go, and the oldest samples of a large file.
    """

    user: str = "slurm"
    admins: tuple[str, ...] = ()
    state_dir: str = "/var/lib/slurm-pfi"
    run_dir: str = "/run/slurm-pfi-controller"
    curves: str | None = None
    history_days: Annotated[float, Meta(gt=0, le=3650)] = 90.0
    history_max_mb: Annotated[float, Meta(ge=16, le=1e6)] = 2048.0


class NodeSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root agent. Each node has its own folder, named after it, under ``state_dir``.

    ``identity_dir``, if set, replaces the kernel as the source of boot id and driver start (simulated nodes): it
    holds one folder per node with the files ``boot_id`` and ``driver_start``. ``metrics``: where Prometheus may read,
    ``off``, ``unix`` (metrics.sock in the node's folder) or a loopback ``ADDRESS:PORT``. ``hook_log``: where prolog and
    epilog say what went wrong, one line each; 'slurm-pfi hooks install' writes it and ``state_dir`` into them.
    """

    state_dir: str = "/run/slurm-pfi"
    hook_log: str = "/dev/kmsg"
    on_orphan: Literal["hold", "release"] = "hold"
    identity_dir: str | None = None
    metrics: str = "off"


class SlurmSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the site's Slurm is. Commands come from ``bin_dir`` or, without it, from the daemon's PATH.

    ``backend``: how jobs are read. ``auto`` is ``cli``, the commands' text; ``json`` is ``squeue --json`` (23.11 and
    later), ``pyslurm`` that library where it imports and matches. A way that cannot be gone is told once, and cli used.
    """

    conf: str = "/etc/slurm/slurm.conf"
    bin_dir: str | None = None
    backend: Literal["auto", "cli", "json", "pyslurm"] = "auto"


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

    @property
    def simulated(self) -> bool:
        """Whether the site's GPUs are simulated ones: then every figure is shown as that of a simulation."""
        return self.node.identity_dir is not None


def config_path(given: str | None = None) -> Path:
    """The file to read: the one given, else ``$SLURM_PFI_CONF``, else the site's own."""
    return Path(given or os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)


def parse_config(text: str, *, origin: str) -> Config:
    """Check and read TOML text. Raises ConfigError naming ``origin``, line, key and what is allowed."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_printable(f"{origin}: not valid TOML: {error}")) from error
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_printable(f"{origin}: {_explain(str(error), raw, text)}")) from error
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
    for field in ("default_flex", "time_limit_flex"):
        word = getattr(config.policy, field)
        try:
            parse_flex(word, site_default=config.policy.default_flex)
        except FlexError as error:
            raise ConfigError(f"{origin}: policy.{field} = {word!r}: {error}") from error
    if config.policy.default_flex == "none":
        raise ConfigError(
            f"{origin}: policy.default_flex = 'none': a site where no job gives power needs no limit"
        )
    _check_times(config.times, origin)
    for field in ("state_dir", "run_dir"):
        _absolute(origin, f"controller.{field}", getattr(config.controller, field))
    _absolute(origin, "node.state_dir", config.node.state_dir)
    _absolute(origin, "node.hook_log", config.node.hook_log)
    _check_metrics(config.node.metrics, origin)
    _absolute(origin, "slurm.conf", config.slurm.conf)
    for key, value in (
        ("node.identity_dir", config.node.identity_dir),
        ("slurm.bin_dir", config.slurm.bin_dir),
        ("controller.curves", config.controller.curves),
    ):
        if value is not None:
            _absolute(origin, key, value)


def _check_times(times: TimesSection, origin: str) -> None:
    """A node or GPU that hangs is noticed, and others make room within a cycle, before the limit must hold."""
    for name in ("node_answer_s", "device_deadline_s"):
        value_s = getattr(times, name)
        if value_s + times.cycle_window_s > times.response_s:
            raise ConfigError(
                f"{origin}: times.{name} = {value_s:g}: with times.cycle_window_s = {times.cycle_window_s:g} it must "
                f"not exceed times.response_s = {times.response_s:g}, or a limit may not hold in time when a node hangs"
            )


def _check_metrics(where: str, origin: str) -> None:
    """Off, a Unix socket or a loopback port: a root daemon listens to no network."""
    if where in ("off", "unix"):
        return
    host, _, port = where.rpartition(":")
    try:
        loopback = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback or _PORT.fullmatch(port) is None or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f'{origin}: node.metrics = {_shown_value(where)}: expected "off", "unix" or a loopback port such as '
            '"127.0.0.1:9401"'
        )


def _absolute(origin: str, key: str, value: str) -> None:
    if not Path(value).is_absolute():
        raise ConfigError(f"{origin}: {key} = {value!r}: write an absolute path")


# ------------------------------------------------------------------------------------------- errors for people

_PLACE: Final = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\[([0-9]+)\]|([^.\[\]]+)")
_HEADER: Final = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.-]+)\s*\]")
_KEY: Final = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
_WORDS: Final = {
    "float": "a number",
    "int": "a whole number",
    "str": "text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a section",
    "null": "no key at all",
}
_SECTIONS: Final[dict[str, type[_Section]]] = {
    "": Config,
    "node_set": NodeSet,
    "policy": PolicySection,
    "times": TimesSection,
    "tag": TagSection,
    "controller": ControllerSection,
    "node": NodeSection,
    "slurm": SlurmSection,
}


def _explain(said: str, raw: dict[str, Any], text: str) -> str:
    """What msgspec said, as line, key, value and what is wanted."""
    match = _PLACE.fullmatch(said)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    steps: list[str | int] = [int(number) if number else name for number, name in _STEP.findall(path)]
    if field := re.search(r"(unknown|required) field `(.*)`", what, re.DOTALL):
        return _wrong_field(field[1] == "unknown", field[2], steps, text)
    value: Any = raw
    for step in steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):  # a place that msgspec does not name, such as [...]
            return f"{_line(text, steps)}{_shown(steps)}: {_wanted(what)}"
    wanted = f"expected one of {', '.join(words)}" if (words := _vocabulary(what, steps)) else _wanted(what)
    if steps == ["node_set"]:
        wanted = "write [[node_set]], once for each set"
    return f"{_line(text, steps)}{_shown(steps)} = {_shown_value(value)}: {wanted}"


def _wrong_field(unknown: bool, name: str, steps: list[str | int], text: str) -> str:  # noqa: FBT001
    section = str(steps[0]) if steps else ""
    known = list(_SECTIONS[section].__struct_fields__) if section in _SECTIONS else []
    key = _shown([*steps, name])
    if not unknown:
        return f"{_line(text, steps)}{key} is missing"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"{_line(text, [*steps, name])}{key}: unknown key; {hint}"


def _vocabulary(what: str, steps: list[str | int]) -> tuple[str, ...]:
    """The words that a key of few words allows; empty for any other."""
    if not what.startswith("Invalid enum value"):
        return ()
    section = str(steps[0]) if len(steps) > 1 else ""
    of_key = get_type_hints(_SECTIONS[section])[str(steps[-1])]
    words = [get_args(part) if get_args(part) else (part,) for part in get_args(of_key)]
    return tuple(word for group in words for word in group if isinstance(word, str))


def _wanted(what: str) -> str:
    """``Expected `float` > 0.0`` in words."""
    wanted = re.fullmatch(r"Expected `([a-z| ]+)`(?: (.*))?(?:, got `(\w+)`)?", what)
    if wanted is None:
        return what
    kinds = " or ".join(_WORDS.get(kind, kind) for kind in wanted[1].split(" | "))
    got = re.search(r", got `(\w+)`", what)
    if got is not None:
        return f"expected {kinds}, got {_WORDS.get(got[1], got[1])}"
    return f"expected {kinds} {wanted[2]}" if wanted[2] else f"expected {kinds}"


def _shown(steps: list[str | int]) -> str:
    """``node_set[0].gpus`` as ``node_set 1: gpus``: people count from one."""
    shown = ""
    for step in steps:
        if isinstance(step, int):
            shown += f" {step + 1}:"
        else:
            shown += f" {step}" if shown.endswith(":") else f".{step}" if shown else step
    return shown.removesuffix(":")


def _shown_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "{...}" if isinstance(value, dict) else "[...]"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(text: str, steps: list[str | int]) -> str:
    """``line 7: `` where the key stands; empty when it is written in a way that is not looked for."""
    names = [step for step in steps if isinstance(step, str)]
    wanted = next((step for step in steps if isinstance(step, int)), 0)
    table, count, key = "", -1, names[-1] if names else ""
    header = ".".join(names[:-1])
    for number, line in enumerate(text.split("\n"), 1):
        if begins := _HEADER.match(line):
            table = begins[2]
            count += begins[1] == "[[" and table == (names[0] if names else "")
            if table == ".".join(names) and max(count, 0) == wanted:
                return f"line {number}: "
            continue
        assigns = _KEY.match(line)
        if assigns and assigns[1] == key and table == header and max(count, 0) == wanted:
            return f"line {number}: "
    return ""


def _printable(text: str) -> str:
    """One line without control characters: a file must not write on the admin's terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
