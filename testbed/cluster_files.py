"""What a simulated cluster lies on: its options, its folders, its configuration files, its free ports."""

from __future__ import annotations

import os
import pwd
import random
import re
import shlex
import shutil
import socket
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parent.parent
SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NVIDIA_MAJOR: Final = 195  # the kernel's number for NVIDIA's character devices
MAX_SOCKET_PATH: Final = 100  # below the 108 bytes of sun_path
PACKAGES: Final = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libslurm-dev gcc make"
ACCOUNTING_PACKAGES: Final = "slurmdbd mariadb-server"


class ClusterError(RuntimeError):
    """The cluster cannot do what was asked; the message says what happened, where, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of gres.conf: the device with this minor number, of this type."""

    minor: int
    type: str = "h200"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """How the cluster is to be.

    ``gres`` gives a node's GPUs in the order of gres.conf, so the position is the place in the list and the minor
    number is free; a node not named there has ``gpus_per_node`` GPUs with minor = position. ``parts`` are what several
    jobs may have of one GPU, by name (shard, mps): how many there are on each node. ``job_env`` reaches every
    batch script and task (``%n`` is replaced by the node's name), ``slurmd_env`` slurmd and its hooks,
    ``client_env`` the commands of the submitting user. ``prolog``/``epilog``: None takes the project's own hooks,
    ``hooks=False`` none at all. ``conf`` is added to slurm.conf as it is. ``accounting`` adds slurmdbd and its
    database.
    """

    nodes: int = 4
    gpus_per_node: int = 8
    gres: Mapping[str, Sequence[Gpu]] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    name: str = "pfi"
    partitions: Sequence[str] = ("main", "urgent")
    slurm_user: str | None = None
    hooks: bool = True
    prolog: Path | None = None
    epilog: Path | None = None
    plugin: bool = True
    plugstack: str | None = None
    conf: Sequence[str] = ()
    accounting: bool = False
    job_env: Mapping[str, str] = field(default_factory=dict)
    slurmd_env: Mapping[str, str] = field(default_factory=dict)
    client_env: Mapping[str, str] = field(default_factory=dict)
    parent: Path | None = None
    keep: bool = False

    @property
    def node_names(self) -> tuple[str, ...]:
        """n1, n2, ..."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def gpus(self, node: str) -> Sequence[Gpu]:
        """A node's GPUs in the order of gres.conf."""
        return self.gres.get(node, [Gpu(minor=minor) for minor in range(self.gpus_per_node)])

    @property
    def slurm_account(self) -> pwd.struct_passwd:
        """Who runs slurmctld: as root ``slurm_user`` (root if not given), else always ourselves."""
        ourselves = pwd.getpwuid(os.getuid())
        if self.slurm_user is None or self.slurm_user == ourselves.pw_name:
            return ourselves
        if os.getuid() != 0:
            raise ClusterError(f"slurm_user={self.slurm_user!r} needs root; we are {ourselves.pw_name}")
        try:
            return pwd.getpwnam(self.slurm_user)
        except KeyError:
            raise ClusterError(
                f"no user {self.slurm_user!r} here; install Debian's package slurmctld"
            ) from None


@dataclass(frozen=True)
class Layout:
    """Where everything of one cluster lies."""

    root: Path

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def log(self) -> Path:
        """Daemon logs, <daemon>.log."""
        return self.root / "log"

    @property
    def hook_log(self) -> Path:
        """Faults of our prolog and epilog."""
        return self.log / "hooks.log"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.root / "run" / "munge.sock"

    @property
    def database(self) -> Path:
        """The accounting's database, when there is one."""
        return self.root / "db"

    @property
    def hooks(self) -> Path:
        return self.root / "hooks"

    @property
    def out(self) -> Path:
        """Job output, <job id>.out; anybody may write here."""
        return self.root / "out"

    @property
    def state_dir(self) -> Path:
        """``node.state_dir`` of slurm-pfi on this cluster: one folder per node below it."""
        return self.root / "pfi"

    def spool(self, node: str) -> Path:
        return self.root / "spool" / node

    def device(self, node: str, minor: int) -> Path:
        return self.root / "dev" / node / f"nvidia{minor}"


def find_program(name: str) -> str:
    """The program's path. Raises ClusterError that names the packages."""
    path = shutil.which(name, path=SEARCH_PATH)
    if path is None:
        raise ClusterError(
            f"{name} is not installed. On Debian or Ubuntu run as root: "
            f"apt-get install --no-install-recommends {PACKAGES} {ACCOUNTING_PACKAGES}"
        )
    return path


def slurm_version() -> tuple[int, int]:
    """(22, 5) for Slurm 22.05.x."""
    text = subprocess.run([find_program("slurmd"), "-V"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ClusterError(f"slurmd -V says {text!r}: no version in it")
    return int(match.group(1)), int(match.group(2))


def slurm_release() -> str:
    """``22.05``, as Slurm writes it."""
    major, minor = slurm_version()
    return f"{major:02}.{minor:02}"


def find_ports(count: int) -> list[int]:
    """Ports free on loopback, below the range from which the kernel lends ports for outgoing connections."""
    lowest_lent = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.sample(range(10000, max(lowest_lent, 20000)), k=400):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ClusterError(f"found only {len(ports)} of {count} free ports on 127.0.0.1")


def make_folders(layout: Layout, options: ClusterOptions) -> None:
    """All folders with their owners, the device nodes, and the munge key."""
    account = options.slurm_account
    longest = max(
        len(str(layout.spool(node) / f"{node}_4294967295.4294967295")) for node in options.node_names
    )
    if longest > MAX_SOCKET_PATH:
        raise ClusterError(
            f"{layout.root}: socket paths below it would be {longest} bytes long, {MAX_SOCKET_PATH} are allowed; "
            "use a shorter parent folder such as /tmp"
        )
    layout.root.chmod(0o755)
    folders = [layout.etc, layout.munge, layout.munge_socket.parent, layout.hooks, layout.state_dir]
    folders += [layout.log, layout.root / "state", layout.out]
    for node in options.node_names:
        folders += [layout.spool(node), layout.device(node, 0).parent, layout.state_dir / node / "jobs"]
    for folder in folders:
        folder.mkdir(parents=True)
    for folder in (layout.log, layout.root / "state"):
        os.chown(folder, account.pw_uid, account.pw_gid)
    layout.hook_log.touch()
    layout.out.chmod(0o1777)
    layout.munge.chmod(0o700)
    key = layout.munge / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for node in options.node_names:
        for gpu in options.gpus(node):
            _make_device(layout.device(node, gpu.minor), gpu.minor)


def _make_device(path: Path, minor: int) -> None:
    """A real device node where we may; else a symlink, whose minor number is known by the name alone."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(NVIDIA_MAJOR, minor))
    except PermissionError:
        path.symlink_to("/dev/null")


def write_files(layout: Layout, options: ClusterOptions, ports: Sequence[int]) -> None:
    """slurm.conf, gres.conf, cgroup.conf, plugstack.conf and the hooks. ``ports``: slurmctld's, then each node's."""
    (layout.etc / "gres.conf").write_text(_gres_conf(layout, options))
    cgroups = "cgroup/v1" if slurm_version() < (23, 2) else "disabled"
    (layout.etc / "cgroup.conf").write_text(f"CgroupPlugin={cgroups}\n")
    (layout.etc / "plugstack.conf").write_text(_plugstack(layout, options))
    hook_lines = _write_hooks(layout, options)
    layout.slurm_conf.write_text(
        "\n".join([*_slurm_conf(layout, options, ports), *hook_lines, *options.conf, ""])
    )


def install_hook(source: Path, target: Path, *, state_dir: Path, log_file: Path) -> None:
    """Copy a hook and set the folder it writes to and the log for its faults, which must exist to be used."""
    text = source.read_text()
    for name, value in {"state_dir": state_dir, "log_file": log_file}.items():
        text, count = re.subn(rf"(?m)^{name}=/.*$", lambda _: f"{name}={shlex.quote(str(value))}", text)  # noqa: B023
        if count != 1:
            raise ClusterError(f"{source}: expected one line '{name}=/...', found {count}")
    target.write_text(text)
    target.chmod(0o755)


def _gres_conf(layout: Layout, options: ClusterOptions) -> str:
    lines = ["AutoDetect=off"]
    for node in options.node_names:
        for gpu in options.gpus(node):
            lines.append(f"NodeName={node} Name=gpu Type={gpu.type} File={layout.device(node, gpu.minor)}")
        lines += [f"NodeName={node} Name={name} Count={count}" for name, count in options.parts.items()]
    return "\n".join([*lines, ""])


def _plugstack(layout: Layout, options: ClusterOptions) -> str:
    if options.plugstack is not None:
        return options.plugstack
    if not options.plugin:
        return ""
    # A plugin fits one release of Slurm alone.
    build = REPO / "build/spank" / slurm_release()
    built = subprocess.run(
        [find_program("make"), "--no-print-directory", "-C", str(REPO / "spank"), f"BUILD={build}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        raise ClusterError(f"the SPANK plugin could not be built in {REPO / 'spank'}:\n{built.stderr}")
    # A copy that every submitting user can read: the project itself may lie below /root.
    plugin = layout.etc / "slurm_pfi.so"
    shutil.copy(build / "slurm_pfi.so", plugin)
    return f"optional {plugin}\n"


def _write_hooks(layout: Layout, options: ClusterOptions) -> list[str]:
    lines = []
    if options.hooks:
        ours = {
            "Prolog": (options.prolog, REPO / "prolog/slurm-pfi-prolog"),
            "Epilog": (options.epilog, REPO / "epilog/slurm-pfi-epilog"),
        }
        for key, (given, source) in ours.items():
            path = given
            if path is None:
                path = layout.hooks / source.name
                install_hook(source, path, state_dir=layout.state_dir, log_file=layout.hook_log)
            lines.append(f"{key}={path}")
    if options.job_env:
        # Jobs do not inherit slurmd's environment; the lines that TaskProlog prints do reach them.
        task_prolog = layout.hooks / "task-prolog"
        lines_out = []
        for name, value in options.job_env.items():
            quoted = value.replace("'", "'\\''").replace("%n", "'\"$SLURMD_NODENAME\"'")
            lines_out.append(f"printf 'export %s=%s\\n' {name} '{quoted}'")
        task_prolog.write_text("\n".join(["#!/bin/sh", *lines_out, ""]))
        task_prolog.chmod(0o755)
        lines.append(f"TaskProlog={task_prolog}")
    return lines


def _slurm_conf(layout: Layout, options: ClusterOptions, ports: Sequence[int]) -> list[str]:
    us = pwd.getpwuid(os.getuid()).pw_name
    root = layout.root
    lines = [
        f"ClusterName={options.name}",
        "SlurmctldHost=localhost(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={options.slurm_account.pw_name}",
        f"SlurmdUser={us}",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "CredType=cred/munge",
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/spool/%n",
        f"SlurmctldPidFile={root}/state/slurmctld.pid",
        f"SlurmdPidFile={root}/spool/%n/slurmd.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/slurmd.%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=verbose",
        f"PlugStackConfig={layout.etc}/plugstack.conf",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
        "SlurmdParameters=config_overrides",
        "PrologFlags=Alloc",
        f"GresTypes={','.join(['gpu', *options.parts])}",
        "ReturnToService=2",
        "InactiveLimit=0",
        "KillWait=2",
        "MinJobAge=600",
        "MessageTimeout=20",
        "TCPTimeout=5",
        "SlurmctldTimeout=60",
        "SlurmdTimeout=60",
    ]
    for node, port in zip(options.node_names, ports[1:], strict=True):
        by_type: dict[str, int] = {}
        for gpu in options.gpus(node):
            by_type[gpu.type] = by_type.get(gpu.type, 0) + 1
        counts = [f"gpu:{type_}:{count}" for type_, count in by_type.items()]
        gres = ",".join([*counts, *(f"{name}:{count}" for name, count in options.parts.items())])
        lines.append(
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname=localhost Port={port} CPUs=64 RealMemory=64000"
            + (f" Gres={gres}" if gres else "")
        )
    for number, partition in enumerate(options.partitions):
        default = "YES" if number == 0 else "NO"
        lines.append(f"PartitionName={partition} Nodes=ALL Default={default} MaxTime=INFINITE State=UP")
    return lines
