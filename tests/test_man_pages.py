"""The man pages say what the code does: every command, option and key, and no other; and mandoc finds no fault."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import pytest

from slurm_pfi.cli.root import root
from slurm_pfi.config import Config
from slurm_pfi.node.command import make_parser

MAN: Final = Path(__file__).resolve().parent.parent / "docs/man"
PAGES: Final = ("slurm-pfi.1", "slurm-pfi.toml.5", "slurm-pfi-controller.8", "slurm-pfi-node.8")


def text_of(page: str) -> str:
    return (MAN / page).read_text()


def parts(text: str, macro: str) -> dict[str, str]:
    """What stands below each heading of this macro."""
    _, *found = re.split(rf"(?m)^\.{macro} ", text)
    made = {}
    for part in found:
        heading, _, body = part.partition("\n")
        assert heading not in made, f"{heading} comes twice"
        made[heading] = body
    return made


def items(text: str) -> list[str]:
    return re.findall(r"(?m)^\.It (.*)$", text)


@pytest.mark.parametrize("page", PAGES)
def test_mandoc_finds_no_fault(page: str) -> None:
    program = shutil.which("mandoc")
    assert program is not None, "install Debian's package mandoc (make setup does)"
    done = subprocess.run(
        [program, "-Tlint", "-W", "warning", MAN / page], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)
    shown = subprocess.run([program, "-Tutf8", MAN / page], capture_output=True, text=True, check=True).stdout
    assert "NAME" in re.sub(r".\x08", "", shown)


def test_these_are_all_pages_and_they_name_each_other() -> None:
    assert sorted(path.name for path in MAN.iterdir()) == sorted(PAGES)
    for page in PAGES:
        text = text_of(page)
        assert all(text.isascii() for text in text.splitlines())
        named = {f"{name}.{section}" for name, section in re.findall(r"(?m)^\.Xr (slurm-pfi\S*) (\d)", text)}
        assert named == set(PAGES) - {page}


# ------------------------------------------------------------------------------------------------ commands


def commands(command: click.Command = root, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands that are no groups."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from commands(found, f"{path} {name}".strip())


def documented_options(body: str) -> dict[frozenset[str], bool]:
    """Names of each option, and whether it takes a value."""
    found = {}
    for item in items(body):
        names = frozenset(f"-{name}" for name in re.findall(r"Fl (\S+)", item))
        assert names, item
        found[names] = " Ar " in item
    return found


def real_options(command: click.Command) -> dict[frozenset[str], bool]:
    return {
        frozenset((*option.opts, *option.secondary_opts)): not option.is_flag
        for option in command.params
        if isinstance(option, click.Option)
    }


def test_every_command_and_option_is_in_the_page_and_no_other() -> None:
    documented = parts(parts(text_of("slurm-pfi.1"), "Sh")["COMMANDS"], "Ss")
    real = dict(commands())
    assert list(documented) == list(real)
    for path, command in real.items():
        if path == "node":  # has a page of its own
            continue
        body = documented[path]
        assert documented_options(body) == real_options(command), path
        line = body.partition("\n")[0]
        arguments = [param for param in command.params if isinstance(param, click.Argument)]
        shown = re.sub(r" (Oo Ar options Oc(?= )|Op Ar options$)", "", line)
        assert shown.startswith(f".Nm Cm {path}")
        assert re.findall(r"(Oo )?Ar (\S+)", shown) == [
            ("" if one.required else "Oo ", (one.metavar or (one.name or "").upper()).strip("[]"))
            for one in arguments
        ], path
        assert (shown != line) == bool(real_options(command)), path


def test_what_comes_before_a_command_is_in_the_page() -> None:
    body = parts(parts(text_of("slurm-pfi.1"), "Sh")["DESCRIPTION"].partition(".El")[0], "It")
    named = {frozenset(f"-{name}" for name in re.findall(r"Fl (\S+)", f"x {item}")) for item in body}
    assert named == {frozenset({"--config"}), frozenset({"--version"}), frozenset({"-h", "--help"})}
    assert {option for options in real_options(root) for option in options} == {"--config", "--version"}
    statuses = items(parts(text_of("slurm-pfi.1"), "Sh")["EXIT STATUS"])
    assert statuses == ["0", "1", "2", "3"]


def test_the_node_s_commands_and_options_are_in_its_page_and_no_other() -> None:
    parser = make_parser()
    (sub,) = (action for action in parser._actions if action.dest == "command")
    choices: Any = sub.choices
    sections = parts(text_of("slurm-pfi-node.8"), "Ss")
    assert items(sections["Commands"]) == [f"Cm {name}" for name in choices]
    options = {
        name: action.nargs != 0
        for one in (parser, *choices.values())
        for action in one._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }
    shown = {next(iter(names)): value for names, value in documented_options(sections["Options"]).items()}
    assert shown == options
    synopsis = parts(text_of("slurm-pfi-node.8"), "Sh")["SYNOPSIS"]
    assert {f"-{name}" for name in re.findall(r"Fl (\S+)", synopsis)} == set(options)
    assert set(re.findall(r"\b(run|release|resume|status)\b", synopsis)) == set(choices)


# ------------------------------------------------------------------------------------------------ config


def shown_default(value: Any) -> str:
    """A default as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"\\(dq{value}\\(dq"
    return {(): "[]"}.get(value, repr(value)) if isinstance(value, tuple) else repr(value)


def keys_of(section: Any) -> list[str]:
    """As the page's items: name and default, in no order."""
    made = []
    for field in msgspec.structs.fields(section):
        kind = str(field.type)
        if "Section" in kind or "NodeSet" in kind:
            continue
        if field.required:
            made.append(f"Va {field.name} No (required)")
            continue
        value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        made.append(
            f"Va {field.name} No (no default)"
            if value is None
            else f"Va {field.name} No = {shown_default(value)}"
        )
    return sorted(made)


def test_every_key_with_its_default_is_in_the_page_and_no_other() -> None:
    documented = parts(parts(text_of("slurm-pfi.toml.5"), "Sh")["KEYS"], "Ss")
    real = {"The whole file": keys_of(Config)}
    for field in msgspec.structs.fields(Config):
        inner = getattr(field.type, "__args__", (field.type,))[0]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            repeated = inner is not field.type
            real[f"[[{field.name}]]" if repeated else f"[{field.name}]"] = keys_of(inner)
    assert {name: sorted(items(body)) for name, body in documented.items()} == real
    for name, body in documented.items():
        for item in re.split(r"(?m)^\.It ", body)[1:]:
            assert len(item.partition("\n")[2].replace(".El", "").strip()) > 10, (
                f"{name}: {item} is not explained"
            )
