"""What an admin reads when something is wrong: one line on stderr with what, where and what to do; the exit code."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest

from slurm_pfi.bus.unix import UnreachableError, connect
from slurm_pfi.cli.common import why_unreachable
from slurm_pfi.cli.root import main

POWER = "write a power with its unit"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A usable config whose controller does not run."""
    path = tmp_path / "site.toml"
    path.write_text(f'cluster = "lab"\n[controller]\nrun_dir = "{tmp_path}/run"\n')
    monkeypatch.setenv("SLURM_PFI_CONF", str(path))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 99
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("slurm-pfi: ")
    assert error.count("\n") == 1, error
    return code, error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["18.5"], f"power '18.5' has no unit: {POWER}"),
        (["-5kW"], f"power '-5kW' is below zero: {POWER}"),
        (["--for", "1h", "-5kW"], "is below zero"),
        (["-5"], "has no unit"),
        (["5kw"], "unknown unit 'kw'"),
        (["nanW"], "not a number with a unit"),
        (["99999999MW"], "above 10 GW"),
        (["10kW", "--for", "0s"], "--for: duration '0s' is zero"),
        (["10kW", "--for", "-2h"], "--for: duration '-2h' is not understood"),
        (["10kW", "--for", "2"], "--for: duration '2' is not understood"),
        (["10kW", "--until", "yesterday"], "--until: time 'yesterday' is not understood: write 18:00"),
        (["10kW", "--until", "2026-11-30T18:00"], "--until: time '2026-11-30T18:00' has no offset"),
        (["10kW", "--until", "2020-01-01T00:00Z"], "the limit would end"),
        (["10kW", "--until", "25:00"], "is not on the clock"),
        (["10kW", "--from", "2099-01-01T00:00Z", "--until", "2098-01-01T00:00Z"], "end before it begins"),
        (["10kW", "--from", "999999d"], "more than ten years"),
        (["10kW", "--until", "18:00", "--for", "2h"], "give --until or --for, not both"),
        (["10kW", "--untill", "18:00"], "no such option '--untill'. Did you mean '--until'"),
        (["10kW", "20kW"], "unexpected extra argument"),
        ([], "missing argument 'POWER'; see 'slurm-pfi limit set --help'"),
    ],
)
def test_wrong_use_of_limit_set(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, error = said(capsys, "limit", "set", *arguments)
    assert code == 2
    assert message in error


def test_yesterday_is_told_as_such(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yesterday = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 86_400))
    code, error = said(capsys, "limit", "set", "10kW", "--until", yesterday)
    assert code == 2
    assert "the limit would end 24 h 00 min ago" in error
    assert "nothing was set" in error


@pytest.mark.parametrize(
    "command",
    [["status"], ["jobs"], ["job", "1"], ["top"], ["limit", "show"], ["off"], ["limit", "set", "5kW"]],
)
def test_no_controller(config: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, error = said(capsys, *command)
    assert code == 3
    assert "the controller cannot be reached" in error
    assert f"{config.parent}/run/control.sock is not there" in error
    assert "start it" in error


def test_a_controller_that_has_ended(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(config.parent / "run/control.sock"))
    code, error = said(capsys, "status", "--json")
    assert code == 3
    assert "nobody listens at" in error
    assert "see its log" in error


def test_a_socket_that_this_user_may_not_open(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "control.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        folder.chmod(0)
        message = _as_ordinary_user(path)
        folder.chmod(0o755)
    assert re.fullmatch(
        rf"uid \d+ may not open {path}; let users into its folder: chmod 0755 {folder}", message
    )


def _as_ordinary_user(path: Path) -> str:
    """What a process without root's powers is told; root itself may open everything."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            connect(path).close()
            os.write(writing, b"it was opened")
        except UnreachableError as error:
            os.write(writing, why_unreachable(error, path).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as told:
        message = told.read()
    os.waitpid(child, 0)
    return message


def test_a_config_with_an_unknown_key(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text('cluster = "lab"\n[policy]\nreserv_w = 5\n')
    code, error = said(capsys, "status")
    assert code == 2
    assert f"{config}: line 3: policy.reserv_w: unknown key; did you mean reserve_w?" in error


def test_a_config_that_is_not_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = said(capsys, "--config", f"{config}.absent", "status")
    assert code == 2
    assert f"{config}.absent: no such file" in error


def test_config_check(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert "0 observe). Without a [[node_set]] nothing is managed: add one." in capsys.readouterr().out
    node_set = '[[node_set]]\nnames = "n1"\ngpus = 8\ngpu_max_w = 700\noverhead_w = 1\n'
    config.write_text('cluster = "lab"\n' + node_set)
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out.endswith(
        "fine. Cluster lab, policy marginal, 1 nodes (0 enforce, 1 observe).\n"
    )
    config.write_text(
        'cluster = "lab"\n' + '[[node_set]]\nnames = "n[1"\ngpus = 8\ngpu_max_w = 700\noverhead_w = 1\n'
    )
    code, error = said(capsys, "config", "check")
    assert code == 2
    assert f"{config}: node_set 1: names = 'n[1'" in error


@pytest.mark.parametrize("arguments", [["stauts"], ["status", "--jsn"], ["limit", "shwo"], ["--confg", "x"]])
def test_words_that_are_not_known(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, error = said(capsys, *arguments)
    assert code == 2
    assert re.search(r"no such (command|option) .*(; see|\? See) 'slurm-pfi.* --help'$", error.strip())


def test_a_guess_at_what_was_meant_is_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    _, error = said(capsys, "config", "chek")
    assert error.strip().endswith("Did you mean 'check'? See 'slurm-pfi config --help'")


@pytest.mark.parametrize("group", [[], ["config"], ["limit"], ["study"]])
def test_lists_of_commands_are_not_cut_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, group: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*group, "--help"]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.partition("Commands:")[2]
    for line in text.partition("Commands:")[2].splitlines():
        assert len(line) <= 80
        assert not line.startswith("   "), f"a line of its own for each command: {line}"


def test_help_needs_no_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PFI_CONF", "/absent.toml")
    assert main(["limit", "set", "--help"]) == 0
    assert "--emergency" in capsys.readouterr().out


def test_each_reading_command_can_answer_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["jobs"], ["limit", "show"], ["config", "check"], ["doctor"]):
        assert main([*command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out, command
