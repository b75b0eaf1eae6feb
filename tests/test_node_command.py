"""The admin's words to one node: with a config gone bad, on the command line, and what status shows."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from slurm_pfi.__main__ import node_words
from slurm_pfi.cli.root import main as root_main
from slurm_pfi.node.messages import DevicesFreed, ReleaseAsked, StopAsked
from slurm_pfi.node.notify import summary
from slurm_pfi.node.overview import overview
from slurm_pfi.node.report import gpu_fault
from slurm_pfi.node.rescue import rescue_config
from testbed import gpus
from testbed.lone_node import Commander, LoneNode, wait_for
from tests.node_world import World, window_step

ALL = [700_000] * 4


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LoneNode]:
    made = LoneNode(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def world() -> World:
    return World().start()


def spoil(site: LoneNode) -> None:
    """A typo as people make it: the rest of the file can still be read."""
    site.config.write_text(site.config.read_text().replace('cluster = "c"', 'cluster = "c'))


def capped(site: LoneNode, *, killed: bool) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 4)
            if killed:
                agent.kill()
                agent.wait()

    asyncio.run(story())


# ----------------------------------------------------------------------------------------------- a bad config


def test_the_red_button_works_with_a_bad_config_and_the_agent_alive(site: LoneNode) -> None:
    capped(site, killed=False)
    spoil(site)
    shown = site.ask("status")
    assert shown.returncode == 0 and "4 of 4 GPUs capped" in shown.stdout
    assert "warning: " in shown.stderr and "not valid TOML" in shown.stderr
    assert f"going on with the state folder {site.folder}/state" in shown.stderr
    done = site.ask("release")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: site.limits() == ALL, "the restore")
    assert site.ask("resume").returncode == 0


def test_the_red_button_works_with_a_bad_config_and_the_agent_dead(site: LoneNode) -> None:
    capped(site, killed=True)
    spoil(site)
    done = site.ask("release")
    assert done.returncode == 0, done.stderr
    assert "released without an agent: 4 GPUs at the prior limit; the next agent stays" in done.stdout
    assert "warning: " in done.stderr
    wait_for(lambda: site.limits() == ALL, "the restore")


def test_a_second_release_without_an_agent_says_that_nothing_is_left(site: LoneNode) -> None:
    capped(site, killed=True)
    first, second = site.ask("release"), site.ask("release")
    assert first.returncode == second.returncode == 0
    assert "nothing to restore" not in first.stdout
    assert second.stdout == (
        "slurm-pfi: n1 released without an agent: nothing to restore: no cap of ours stands; "
        "the next agent stays released until 'slurm-pfi node resume'\n"
    )
    site.start()
    said = [line for line in site.log.read_text().splitlines() if "released by the admin before" in line]
    assert len(said) == 1 and said[0].startswith("info ")


def test_the_state_folder_can_be_given_when_the_file_says_nothing(site: LoneNode) -> None:
    site.start()
    site.config.unlink()
    assert site.ask("status").returncode == 3
    shown = site.ask("status", "--state-dir", str(site.folder / "state"))
    assert shown.returncode == 0, shown.stderr
    assert f"going on with the state folder {site.folder}/state\n" in shown.stderr
    relative = site.ask("status", "--state-dir", "state")
    assert relative.returncode == 2 and "write an absolute path" in relative.stderr


def test_a_good_config_warns_of_nothing(site: LoneNode) -> None:
    site.start()
    assert site.ask("status").stderr == ""


def test_run_starts_on_no_bad_config(site: LoneNode) -> None:
    spoil(site)
    done = site.ask("run")
    assert done.returncode == 2 and "warning" not in done.stderr


@pytest.mark.parametrize(
    ("text", "state_dir", "identity_dir"),
    [
        ('cluster = 3\n[node]\nstate_dir = "/s"\nidentity_dir = "/i"\n', "/s", "/i"),
        ('cluster = \n[node] # ours\nstate_dir = "/s"\nmetrics = off\n[slurm]\nconf = "/c"\n', "/s", None),
        ('cluster = \n[controller]\nstate_dir = "/wrong"\n[node]\n', "/run/by-systemd", None),
        ('cluster = \n[node]\nstate_dir = "/s"\n[slurm]\nstate_dir = "/wrong"\n', "/s", None),
        ('[node]\nstate_dir = "relative"\nidentity_dir = 3\n', "/run/by-systemd", None),
        ("node = 3\n", "/run/by-systemd", None),
        ("\xff\0[[[", "/run/by-systemd", None),
    ],
)
def test_what_can_still_be_read_of_a_bad_file(
    tmp_path: Path, text: str, state_dir: str, identity_dir: str | None
) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    found = rescue_config(path, {"RUNTIME_DIRECTORY": "/run/by-systemd:/run/another"})
    assert (found.node.state_dir, found.node.identity_dir) == (state_dir, identity_dir)


def test_without_a_file_or_systemd_the_default_folder_counts(tmp_path: Path) -> None:
    assert rescue_config(tmp_path / "none.toml", {}).node.state_dir == "/run/slurm-pfi"
    assert rescue_config(tmp_path, {}).node.state_dir == "/run/slurm-pfi"


# ------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "of_node"),
    [
        ("node status", "status"),
        ("--config F node status", "--config F status"),
        ("--config=F node", "--config=F"),
        ("--config F status", None),
        ("--config node status", None),
        ("--config", None),
        ("status node", None),
        ("", None),
    ],
)
def test_node_is_found_behind_the_config(words: str, of_node: str | None) -> None:
    assert node_words(words.split()) == (None if of_node is None else of_node.split())


@pytest.mark.parametrize("before", ["slurm-pfi", "node"])
def test_the_config_may_stand_before_the_command(site: LoneNode, before: str) -> None:
    site.start()
    config = ["--config", str(site.config)]
    words = [*config, "node", "status"] if before == "slurm-pfi" else ["node", *config, "status"]
    done = subprocess.run(
        [sys.executable, "-m", "slurm_pfi", *words, "--node-name", "n1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("n1: ")


def test_the_help_lists_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert root_main(["--help"]) == 0
    assert "\n  node  " in capsys.readouterr().out


def test_click_hands_node_over_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(tmp_path / "none"), "node", "status", "--state-dir", str(tmp_path)]
    assert root_main([*words, "--node-name", "n9"]) == 3
    error = capsys.readouterr().err
    assert f"{tmp_path}/none: no such file" in error
    assert f"no agent listens at {tmp_path}/n9/control.sock; see: systemctl" in error


def test_who_does_not_answer_is_told_apart_from_who_is_not_there(site: LoneNode) -> None:
    agent = site.start()
    agent.kill()
    agent.wait()
    assert site.paths.control.exists()
    assert f"no agent listens at {site.paths.control}" in site.ask("resume").stderr


# ------------------------------------------------------------------------------------------------ what it says


def status_of(site: LoneNode) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(site.ask("status", "--json").stdout)
    return found


def test_status_shows_whether_the_plan_is_followed(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            site.start()
            run = site.job(7, "2")
            await controller.until(lambda report: report.runs, "the run")
            await controller.plan(window_step(200_000, {run: 450_000}))
            await controller.ceilings(200_000, 200_000, 450_000, 200_000)
            with gpus.Node(site.sim) as node:
                node.poke("hidden", 1, gpu=site.devices[1].uuid)
            await controller.until(lambda report: any(gpu.fault for gpu in report.gpus), "the loss")
            shown = await asyncio.to_thread(site.ask, "status")
            lines = shown.stdout.splitlines()
            assert "window open, 3 of 4 GPUs follow the plan" in lines[0]
            assert lines[1].endswith("; 1 run")
            rows = [line for line in lines if "  cap " in line]
            assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
            assert "cap  450 W  limit  450 W" in rows[2] and "cap  200 W  limit      ?" in rows[1]
            await controller.plan(window_step(None))
            data = await asyncio.to_thread(status_of, site)
            assert [gpu["cap_mw"] for gpu in data["gpus"]] == [None] * 4

    asyncio.run(story())


def test_status_shows_the_plan_refused_last(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            site.start()
            await controller.plan(window_step(200_000))
            assert (await asyncio.to_thread(status_of, site))["last_refused"] is None
            with pytest.raises(AssertionError, match="refused"):
                async with asyncio.timeout(60):
                    await refused(controller)
            await controller.until(lambda report: not report.refused, "said once to the controller")
            shown = (await asyncio.to_thread(site.ask, "status")).stdout
            assert "  SIMULATED GPUs: these are figures of a simulation, not of hardware." in shown
            assert "  last refused: plan 1/2, " in shown and " ago: park cap 1 mW lies outside" in shown

    async def refused(controller: Commander) -> None:
        from slurm_pfi.model import Plan, PlanId

        report = controller.reports[-1]
        steps = (window_step(1),)
        plan = Plan(
            cluster="c",
            node="n1",
            id=PlanId(1, 2),
            answers=report.id,
            mode="enforce",
            reason="t",
            steps=steps,
        )
        controller.server.send("n1", plan)
        report = await controller.until(lambda report: report.refused, "refused")
        raise AssertionError(report.refused)

    asyncio.run(story())


def test_the_summary_counts_who_follows(world: World) -> None:
    run = world.begin_job(7, 0)
    assert world.window(200_000, {run: 400_000})
    assert summary(world.state, world.now_ns).startswith("window open, 3 of 3 GPUs capped")
    first = next(iter(world.state.gpus))
    gpu = world.state.gpus[first]

    def with_first(**changes: Any) -> str:
        changed = {**world.state.gpus, first: structs.replace(gpu, **changes)}
        return summary(structs.replace(world.state, gpus=changed), world.now_ns)

    assert "2 of 3 GPUs follow the plan" in with_first(enforced_mw=None, requested_mw=None, read_fault="lost")
    assert "2 of 3 GPUs follow the plan" in with_first(enforced_mw=700_000, requested_mw=700_000)
    assert "2 of 3 GPUs follow the plan" in with_first(requested_mw=700_000)
    assert "3 of 3 GPUs capped" in with_first(enforced_mw=399_000, requested_mw=399_000)
    assert "3 of 3 GPUs capped" in with_first(enforced_mw=425_000, requested_mw=425_000, made_mw=425_000)


def test_a_lost_gpu_is_not_capped(world: World) -> None:
    assert world.window(200_000)
    first = next(iter(world.state.gpus))
    lost = structs.replace(world.state.gpus[first], enforced_mw=None, requested_mw=None, read_fault="lost")
    state = structs.replace(world.state, gpus={**world.state.gpus, first: lost}, held=None)
    assert "2 of 3 GPUs capped" in summary(state, world.now_ns)


def test_released_is_a_state_and_no_fault(world: World) -> None:
    assert world.window(200_000)
    world.event(ReleaseAsked())
    assert world.state.freeing
    world.event(DevicesFreed())
    world.advance(1_000_000_000)
    assert [gpu_fault(world.state, gpu) for gpu in world.state.gpus.values()] == [""] * 3
    report = world.reports[-1]
    assert report.released and {(gpu.fault, gpu.ceiling_mw) for gpu in report.gpus} == {("", None)}
    assert "fault" not in summary(world.state, world.now_ns)


def test_a_release_is_logged_once_and_not_as_a_fault(site: LoneNode) -> None:
    capped(site, killed=False)
    assert site.ask("release").returncode == 0
    assert site.ask("resume").returncode == 0
    wait_for(lambda: "info resumed" in site.log.read_text(), "resumed")
    lines = [line for line in site.log.read_text().splitlines() if "released" in line]
    assert [line for line in lines if line.startswith("info released")] != []
    assert [line for line in lines if "fault" in line] == []


def test_a_stop_whose_window_has_no_end_names_the_red_button(world: World) -> None:
    assert world.window(200_000)
    world.event(StopAsked())
    assert world.said("stopped")[0]["reason"] == (
        "3 GPUs keep their limits until an agent is back: no end of the window is known; "
        "'slurm-pfi node release' gives them back"
    )


def test_the_plan_refused_last_is_shown_for_an_hour(world: World) -> None:
    assert world.window(200_000)
    assert overview(world.state, world.now_ns)["last_refused"] is None
    assert not world.window(1)
    refused = overview(world.state, world.now_ns + 40_000_000_000)["last_refused"]
    assert (refused["plan"], refused["age_s"]) == ("1/2", 40.0)
    assert "park cap 1 mW lies outside" in refused["reason"]
    assert overview(world.state, world.now_ns + 3_601_000_000_000)["last_refused"] is None


def test_gpus_are_shown_by_position_and_those_without_one_last(world: World) -> None:
    places = {"GPU-0": 2, "GPU-1": None, "GPU-2": 0}
    moved = {u: structs.replace(gpu, position=places[u]) for u, gpu in world.state.gpus.items()}
    shown = overview(structs.replace(world.state, gpus=moved), world.now_ns)["gpus"]
    assert [gpu["position"] for gpu in shown] == [0, 2, None]
