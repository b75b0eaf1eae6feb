"""Accounting for a simulated cluster: a private MariaDB and slurmdbd, so that sacct answers.

The database lies in the cluster's folder, listens on a socket there and on no port, and knows its one client by the
user that it runs as: there is no password. As root it runs as ``mysql``, else as whoever we are; slurmdbd runs as
SlurmUser.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .cluster_files import ClusterError, ClusterOptions, Layout, find_program
from .processes import submitter

PROGRAMS: Final = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr", "sacct")
ACCOUNT: Final = "research"
DATABASE: Final = "slurm_acct_db"
_SLURM_CONF: Final = (
    "AccountingStorageType=accounting_storage/slurmdbd",
    "AccountingStorageHost=127.0.0.1",
    "AccountingStorageTRES=gres/gpu",
    "AccountingStoreFlags=job_comment",
)
_SMALL_AND_QUICK: Final = (
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=64M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",  # a database that goes with the cluster need not reach the disk
    "--debug-no-sync",
    "--loose-innodb-snapshot-isolation=OFF",  # asked for by slurmdbd 26.05; loose: older ones do not know it
)


def database_account() -> pwd.struct_passwd:
    """Who runs the database: mariadbd does not run as root. Raises ClusterError where the user is missing."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    try:
        return pwd.getpwnam("mysql")
    except KeyError:
        raise ClusterError("no user mysql here; install Debian's package mariadb-server") from None


def database_socket(layout: Layout) -> Path:
    """Where the database listens."""
    return layout.database / "socket"


def database_env(layout: Layout) -> dict[str, str]:
    """slurmdbd cannot be told a socket by its configuration; MariaDB's client library can by its environment."""
    return {"MYSQL_UNIX_PORT": str(database_socket(layout))}


def make_database(layout: Layout, options: ClusterOptions) -> None:
    """An empty database, and what it is to do when it starts: let SlurmUser in. Raises ClusterError."""
    account = database_account()
    layout.database.mkdir()
    os.chown(layout.database, account.pw_uid, account.pw_gid)
    client = f"'{options.slurm_account.pw_name}'@'localhost'"
    # slurmdbd would make its database itself, but a first connection that fails for want of one leaves MariaDB's client
    # library (seen with 11.8.9) in a state in which every later answer is refused as having too many columns.
    statements = (
        f"CREATE DATABASE IF NOT EXISTS {DATABASE}",
        f"CREATE USER IF NOT EXISTS {client} IDENTIFIED VIA unix_socket",
        f"GRANT ALL ON {DATABASE}.* TO {client}",
    )
    _init_file(layout).write_text("".join(f"{statement};\n" for statement in statements))
    arguments = [
        "--no-defaults",
        f"--datadir={_data(layout)}",
        "--skip-test-db",
        "--skip-name-resolve",
        *_SMALL_AND_QUICK,
    ]
    arguments += ["--auth-root-authentication-method=socket"]
    if os.getuid() == 0:
        arguments.append(f"--user={account.pw_name}")
    made = subprocess.run(
        [find_program("mariadb-install-db"), *arguments], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        said = (made.stdout + made.stderr)[-2000:]
        raise ClusterError(f"mariadb-install-db could not make a database in {_data(layout)}:\n{said}")


def database_command(layout: Layout) -> list[str]:
    """mariadbd in the foreground, on its socket alone."""
    return [
        "mariadbd",
        "--no-defaults",
        f"--datadir={_data(layout)}",
        f"--tmpdir={_data(layout)}",
        f"--socket={database_socket(layout)}",
        f"--pid-file={layout.database}/pid",
        f"--init-file={_init_file(layout)}",
        "--skip-networking",
        "--skip-log-bin",
        "--character-set-server=utf8mb4",  # as Debian configures it; the built-in latin1 turns others' letters into ?
        "--collation-server=utf8mb4_general_ci",
        *_SMALL_AND_QUICK,
    ]


def write_files(layout: Layout, options: ClusterOptions, port: int) -> None:
    """slurmdbd.conf, which must be its own user's and nobody else's to read, and what slurm.conf needs beside.

    AdminComment is always recorded; the users' own comment only where asked for.
    """
    with layout.slurm_conf.open("a") as slurm_conf:
        # On this one connection Slurm takes munge's socket from here, and not from AuthInfo.
        own = [f"AccountingStoragePort={port}", f"AccountingStoragePass={layout.munge_socket}"]
        slurm_conf.write("\n".join([*_SLURM_CONF, *own, ""]))
    account = options.slurm_account
    path = layout.etc / "slurmdbd.conf"
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "CommunicationParameters=NoInAddrAny",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={port}",
        f"SlurmUser={account.pw_name}",
        f"LogFile={layout.log}/slurmdbd.log",
        f"PidFile={layout.root}/state/slurmdbd.pid",
        "DebugLevel=info",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        f"StorageUser={account.pw_name}",
        f"StorageLoc={DATABASE}",
    ]
    path.touch(mode=0o600)
    path.write_text("\n".join([*lines, ""]))
    os.chown(path, account.pw_uid, account.pw_gid)


def registration(options: ClusterOptions) -> list[Sequence[str]]:
    """The sacctmgr commands that make the cluster, one account and its users known."""
    users = sorted({submitter(None).pw_name, pwd.getpwuid(os.getuid()).pw_name})
    return [
        ["sacctmgr", "-i", "add", "cluster", options.name],
        ["sacctmgr", "-i", "add", "account", ACCOUNT, f"cluster={options.name}"],
        ["sacctmgr", "-i", "add", "user", ",".join(users), f"account={ACCOUNT}"],
    ]


def _data(layout: Layout) -> Path:
    return layout.database / "data"


def _init_file(layout: Layout) -> Path:
    return layout.etc / "database.sql"
