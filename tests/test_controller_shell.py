"""The controller's process where it needs no socket: faults of ours, and a config that changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import structlog

from slurm_pfi.bus.asking import Reply, Request, ask
from slurm_pfi.config import Config, ControllerSection, NodeSet, load_config
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.answers.orders import Orders
from slurm_pfi.controller.budget import look
from slurm_pfi.controller.core import Core
from slurm_pfi.controller.log import set_up_logging
from slurm_pfi.controller.nodes import cannot_leave, declared_nodes, with_nodes
from slurm_pfi.controller.shell import CONTROL_SOCKET, Controller
from slurm_pfi.controller.views import run_view, site_view
from slurm_pfi.model import Run

from .test_controller_core import RUN, S, Site, W, gpu


class Broken(Core):
    """A core with a fault."""

    def step(self, state: cs.State, event: cs.Event, now_ns: int) -> tuple[cs.State, list[cs.Action]]:
        raise ZeroDivisionError("planted")


def test_a_fault_of_the_core_ends_neither_the_process_nor_what_is_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(
        cluster="c",
        node_set=(NodeSet(names="n1", gpus=1, gpu_max_w=700, overhead_w=0),),
        controller=ControllerSection(state_dir=str(tmp_path), run_dir=str(tmp_path)),
    )

    async def disturb() -> None:
        controller = Controller(config, tmp_path / "config.toml")
        before = controller.state
        controller.core = Broken(config, controller.core.science)
        for _ in range(3):
            controller.take(cs.OffChanged(off=True))
        assert controller.state == before

    asyncio.run(disturb())
    said = capsys.readouterr()
    assert (said.out + said.err).count("planted") >= 1
    assert (said.out + said.err).count("please report it") == 1


def test_a_worker_that_ends_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        cluster="c",
        node_set=(NodeSet(names="n1", gpus=1, gpu_max_w=700, overhead_w=0),),
        controller=ControllerSection(state_dir=str(tmp_path / "state"), run_dir=str(tmp_path / "run")),
    )
    (tmp_path / "state").mkdir()

    async def live() -> int:
        controller = Controller(config, tmp_path / "config.toml")

        async def fail() -> bool:
            controller.stop()
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(controller.private_data, "read", fail)
        return await controller.run()

    assert asyncio.run(live()) == 0
    said = capsys.readouterr()
    assert "no longer asked, restart the controller: ZeroDivisionError('planted')" in said.out + said.err


class Stumbling(Core):
    """A core whose fault comes with the whole state in its frame, as real ones do."""

    def step(self, state: cs.State, event: cs.Event, now_ns: int) -> tuple[cs.State, list[cs.Action]]:
        raise KeyError(state)


def test_a_fault_in_a_large_state_is_told_in_a_few_lines_and_not_with_the_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = NodeSet(names="n[1-300]", gpus=8, gpu_max_w=700, overhead_w=0)
    section = ControllerSection(state_dir=str(tmp_path), run_dir=str(tmp_path))
    config = Config(cluster="c", node_set=(nodes,), controller=section)

    sizes: list[int] = []

    async def disturb() -> None:
        controller = Controller(config, tmp_path / "config.toml")
        sizes.append(len(repr(controller.state)))
        controller.core = Stumbling(config, controller.core.science)
        controller.take(cs.OffChanged(off=True))

    set_up_logging()
    try:
        asyncio.run(disturb())
    finally:
        structlog.reset_defaults()
    said = capsys.readouterr()
    text = said.out + said.err
    assert "please report it" in text
    assert "raise KeyError(state)" in text, "the traceback is there"
    assert sizes[0] > 50_000
    assert len(text) < sizes[0] + 5_000, "the state at most once, as the error's own words, and in no frame"


def test_a_request_that_fails_is_told_in_the_log_that_its_answer_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stumble(_self: Orders, _request: Request, _peer: object) -> Reply:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Orders, "handle", stumble)
    section = ControllerSection(state_dir=str(tmp_path), run_dir=str(tmp_path))

    async def ask_it() -> Reply:
        control = Controller(Config(cluster="c", controller=section), tmp_path / "config.toml")._control
        await control.start()
        try:
            return await asyncio.to_thread(ask, tmp_path / CONTROL_SOCKET, "status")
        finally:
            await control.close()

    reply = asyncio.run(ask_it())
    assert "see the daemon's log" in reply.message
    said = capsys.readouterr()
    assert "please report it" in said.out + said.err
    assert "ZeroDivisionError('planted')" in said.out + said.err


def changed(site: Site, **changes: object) -> dict[str, cs.NodeView]:
    (declared,) = site.config.node_set
    node_set = msgspec.structs.replace(declared, **changes)
    return declared_nodes(msgspec.structs.replace(site.config, node_set=(node_set,)))


def why_not(site: Site, **changes: object) -> str:
    return cannot_leave(site.state, changed(site, **changes), site.config, site.now_ns)


def test_a_reload_in_a_window_neither_lifts_caps_nor_leaves_them_without_an_end() -> None:
    site = Site(nodes=2, gpus=1)
    for name in ("n1", "n2"):
        site.hear(name, gpu(f"G{name}"))
    assert why_not(site, names="n1") == ""
    assert why_not(site, mode="observe") == ""
    site.limit(900)
    site.cycle()
    assert "n2" in why_not(site, names="n1")
    assert "observe" in why_not(site, mode="observe")
    assert why_not(site, overhead_w=200.0) == ""
    assert why_not(site, names="n[1-3]") == ""
    site.limit(None)
    site.cycle()
    for name in ("n1", "n2"):
        site.hear(name, gpu(f"G{name}", limit_w=200))
    assert "n2" in why_not(site, names="n1"), "not restored yet"
    for name in ("n1", "n2"):
        site.hear(name, gpu(f"G{name}"))
    assert why_not(site, names="n1") == ""


@pytest.mark.parametrize(
    ("line", "told"), [("slurm_timeout_s = 7", True), ("tag_after_s = 7", False)], ids=["waits", "taken"]
)
def test_a_reload_names_what_waits_for_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, told: bool
) -> None:
    path = tmp_path / "slurm-pfi.toml"
    text = f'cluster = "c"\n[controller]\nstate_dir = "{tmp_path}"\nrun_dir = "{tmp_path}"\n'
    path.write_text(text)
    controller = Controller(load_config(path), path)
    path.write_text(f"{text}[times]\n{line}\n")
    controller._reload()
    said = capsys.readouterr()
    assert "config reloaded" in said.out + said.err
    assert ("until a restart" in said.out + said.err) is told


def test_a_node_that_died_may_be_given_up_in_a_window() -> None:
    """In two steps, and until the second it counts as before: at the most that it could draw if it came back."""
    site = Site(nodes=2, gpus=1, node_silent_s=30.0)
    for name in ("n1", "n2"):
        site.hear(name, gpu(f"G{name}"))
    site.limit(900)
    site.cycle()
    site.wait(31)
    site.hear("n1", gpu("Gn1", limit_w=200))
    assert "observe" in why_not(site, mode="observe"), "n1 is heard"

    def rest(mode: str) -> dict[str, cs.NodeView]:
        declared = changed(site)
        return {**declared, "n2": msgspec.structs.replace(declared["n2"], mode=mode)}

    assert cannot_leave(site.state, rest("observe"), site.config, site.now_ns) == ""
    assert "n2" in cannot_leave(site.state, changed(site, names="n1"), site.config, site.now_ns)
    before_mw = look(site.state, site.config, site.now_ns).constants_mw["n2"]
    site.state = with_nodes(site.state, rest("observe"))
    assert look(site.state, site.config, site.now_ns).constants_mw["n2"] == before_mw == 700 * W
    assert why_not(site, names="n1") == ""
    last_caps = msgspec.structs.replace(
        site.config, policy=msgspec.structs.replace(site.config.policy, silent_node="last_caps")
    )
    site.state = with_nodes(site.state, changed(site))
    assert "observe" in cannot_leave(site.state, rest("observe"), last_caps, site.now_ns), (
        "it counts at its caps"
    )


def test_runs_of_a_node_that_left_the_config_are_forgotten_and_shown_without_it() -> None:
    site = Site(nodes=2, gpus=2)
    both, gone = RUN, Run("c", 2)
    site.hear("n1", gpu("A", both), gpu("B"))
    site.hear("n2", gpu("C", both), gpu("D", gone))
    site.state = with_nodes(site.state, changed(site, names="n1"))
    assert set(site.state.runs) == {both}
    site_view(site.state, site.config, site.now_ns)
    assert run_view(site.state.runs[both], site.state, site.now_ns)["nodes"] == ["n1"]
    site.limit(500)
    site.wait(S / S)
    site.cycle()
    site.hear("n1", gpu("A"), gpu("B"))
    assert not site.state.runs
