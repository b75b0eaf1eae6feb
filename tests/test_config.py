"""The config file: what is accepted, and that each refusal names file, line or key, and what is allowed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from slurm_pfi.config import PATH_VARIABLE, Config, ConfigError, config_path, load_config, parse_config

DATA: Final = Path(__file__).parent / "data" / "config"
EXAMPLE: Final = Path(__file__).parent.parent / "etc" / "slurm-pfi.toml"
NODE_SET: Final = '[[node_set]]\nnames = "n1"\ngpus = 8\ngpu_max_w = 700\noverhead_w = 500\n'


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, origin="site.toml")
    message = str(caught.value)
    assert message.startswith("site.toml: ")
    assert message.isprintable(), "one line, and nothing that acts on a terminal"
    return message.removeprefix("site.toml: ")


@pytest.mark.parametrize("name", ["good", "integer_for_float", "bom_and_crlf"])
def test_a_usable_file_is_read(name: str) -> None:
    config = load_config(DATA / f"{name}.toml")
    assert config.cluster == "lab"
    assert 900 <= config.policy.reserve_w < 901
    assert isinstance(config.policy.reserve_w, float)


def test_the_file_with_bom_really_has_one() -> None:
    raw = (DATA / "bom_and_crlf.toml").read_bytes()
    assert raw.startswith(b"\xef\xbb\xbf")
    assert b"\r\n" in raw


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bad_syntax", ["line 2"]),
        ("bad_type", ["line 4", 'policy.reserve_w = "900"', "expected a number", "got text"]),
        ("bad_value", ["line 4", "times.cycle_s = 0", "expected a number > 0"]),
        ("duplicate_section", ["policy", "line 6"]),
        ("duplicate_key", ["line 5"]),
        ("unknown_key", ["line 4", "policy.reserv_w", "did you mean reserve_w?"]),
    ],
)
def test_an_unusable_file_is_refused_by_file_place_and_what_is_allowed(name: str, parts: list[str]) -> None:
    path = DATA / f"{name}.toml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "[policy]\nreserve_w = true",
            "line 3: policy.reserve_w = true: expected a number, got true or false",
        ),
        ("[policy]\nreserve_w = nan", "line 3: policy.reserve_w = nan: expected a number >= 0.0"),
        ("[policy]\nreserve_w = inf", "line 3: policy.reserve_w = inf: expected a number <= 10000000000.0"),
        ("[policy]\nreserve_w = -1", "line 3: policy.reserve_w = -1: expected a number >= 0.0"),
        ("[times]\nrebound_s = -1", "line 3: times.rebound_s = -1: expected a number >= 0.0"),
        ("[policy]\ncontract_w = 0", "line 3: policy.contract_w = 0: expected a number > 0.0"),
        ("mode = 'on'", 'line 2: mode = "on": expected one of observe, enforce'),
        ("[policy]\nname = 'best'", 'line 3: policy.name = "best": expected one of equal, pfi, marginal'),
        (NODE_SET + "mode = 'on'", 'line 7: node_set 1: mode = "on": expected one of observe, enforce'),
        (NODE_SET + NODE_SET.replace("8", "8.5"), "line 9: node_set 2: gpus = 8.5: expected a whole number"),
        ("[[node_set]]\nnames = 'n1'", "line 2: node_set 1: gpus is missing"),
        ("[node_set]\nnames = 'n1'", "write [[node_set]], once for each set"),
        ("policy = 3", "line 2: policy = 3: expected a section, got a whole number"),
        ("[site]\nlimit = 1", "line 2: site: unknown key; known here: cluster, mode, node_set"),
        ("[policy]\nnone_qos = 'x'", 'line 3: policy.none_qos = "x": expected a list, got text'),
        ("[policy]\nnone_qos = [1]", "expected text in quotes, got a whole number"),
        ("[policy]\ndefault_flex = 'none'", "policy.default_flex = 'none'"),
        ("[policy]\ndefault_flex = 'auto'", "policy.default_flex = 'auto'"),
        ("[policy]\ntime_limit_flex = 'tight'", "policy.time_limit_flex = 'tight'"),
        ("[policy]\ncompensate_time_limit = 1", "policy.compensate_time_limit = 1"),
        ("[policy]\ndefault_flex = '0%'", "whole percentage from 1% to 100%"),
        ("[node]\nstate_dir = 'run'", "node.state_dir = 'run': write an absolute path"),
        ("[node]\nhook_log = 'log'", "node.hook_log = 'log': write an absolute path"),
        ("[slurm]\nbin_dir = 'bin'", "slurm.bin_dir = 'bin': write an absolute path"),
        ("[slurm]\nbackend = 'rest'", "expected one of auto, cli, json, pyslurm"),
        ("[times]\nnode_answer_s = 9.5", "times.node_answer_s = 9.5: with times.cycle_window_s = 1"),
        ("[times]\nresponse_s = 5\nnode_answer_s = 4", "times.device_deadline_s = 5: with"),
        ("times.cycle_s = 'x'", 'times.cycle_s = "x": expected a number'),
        ('"\\u001b[31m" = 1', "\\x1b[31m: unknown key"),
    ],
)
def test_each_message_says_where_what_and_what_is_allowed(lines: str, message: str) -> None:
    assert message in refused(f'cluster = "lab"\n{lines}\n')


def test_the_cluster_must_be_named() -> None:
    assert refused("") == "cluster is missing"
    assert "cluster" in refused('cluster = "a b"')


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; start from etc/slurm-pfi\.toml"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    other = tmp_path / "utf16.toml"
    other.write_bytes('cluster = "lab"'.encode("utf-16"))
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        load_config(other)


def test_the_file_named_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "/from/environment.toml")
    assert config_path("/given.toml") == Path("/given.toml")
    assert config_path() == Path("/from/environment.toml")
    monkeypatch.delenv(PATH_VARIABLE)
    assert config_path() == Path("/etc/slurm-pfi/slurm-pfi.toml")


# ------------------------------------------------------------------------------------------------ the example


def keys_of(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


def test_the_example_is_usable_and_observes() -> None:
    config = load_config(EXAMPLE)
    assert config.mode == "observe"
    assert {node_set.mode for node_set in config.node_set} == {None}, "one switch turns the site to enforce"


def test_each_commented_default_of_the_example_is_the_real_default() -> None:
    shown = tomllib.loads(re.sub(r"(?m)^#(?=[a-z_]+ = )", "", EXAMPLE.read_text(encoding="utf-8")))
    real: dict[str, Any] = msgspec.to_builtins(Config(cluster="mycluster"))
    compared = 0
    for key, value in shown.items():
        if key in ("cluster", "node_set"):
            continue
        for name, shown_value in value.items() if isinstance(value, dict) else [(None, value)]:
            default = real[key] if name is None else real[key][name]
            assert shown_value == (list(default) if isinstance(default, tuple) else default), (key, name)
            assert isinstance(shown_value, bool) == isinstance(default, bool)
            compared += 1
    assert compared > 30


def test_the_example_names_every_key() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for field in msgspec.structs.fields(Config):
        section = field.type if isinstance(field.type, type) else None
        if section is not None and issubclass(section, msgspec.Struct):
            body = text.partition(f"\n[{field.name}]\n")[2].partition("\n[")[0]
            assert body, f"the example has no section [{field.name}]"
            named = set(re.findall(r"(?m)^(?:#|# Example: )?([a-z_]+) = ", body))
            assert named == keys_of(section), field.name
    assert re.search(r"(?m)^#mode = ", text)
