"""``what-if``, ``offer`` and the words of ``limit set`` over a real control socket, as a stranger reads them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pfi.bus.asking import Request, ask
from slurm_pfi.bus.unix import Peer
from slurm_pfi.cli.forecast_words import counted, job_ids
from slurm_pfi.cli.root import main
from slurm_pfi.config import Config, ControllerSection
from slurm_pfi.controller.answers import forecast_orders
from slurm_pfi.controller.answers.orders import Orders
from slurm_pfi.controller.shell import Controller
from slurm_pfi.model import Run

from .forecast_site import ForecastSite, served
from .test_controller_core import Site, W, gpu

Said = tuple[int, str, str]
Call = Callable[..., Said]


def mixed_site() -> ForecastSite:
    """Two runs with a baseline, one without, two idle GPUs, and a node that never spoke."""
    site = ForecastSite(nodes=5)
    runs = [site.train("n1", 101, 650), site.train("n2", 102, 600, "low")]
    site.hear("n3", *(gpu(f"n3-{i}", Run("c", 103), draw_mw=300 * W) for i in range(2)))
    site.idle("n4")
    for run, node in zip(runs, ("n1", "n2"), strict=True):
        site.job(run, node, end_unix_s=int(time.time()) + 7200, limit_s=7200)
    return site


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[Site], Call]]:
    """Serve a site; what comes back runs a command line on 80 columns: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    with ExitStack() as open_sites:

        def start(site: Site) -> Call:
            monkeypatch.setenv("SLURM_PFI_CONF", str(open_sites.enter_context(served(site, tmp_path))))

            def call(*arguments: str) -> Said:
                try:
                    code = main(arguments)
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 99
                out, error = capsys.readouterr()
                # A path is as long as it is.
                lines = [line for line in out.splitlines() if not line.startswith("drawn: ")]
                assert max((len(line) for line in lines), default=0) <= 80 or "--json" in arguments
                return code, out, error

            return call

        yield start


def flat(text: str) -> str:
    """Without the line breaks of the terminal."""
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------- what-if


def test_what_if_tells_who_gives_what_and_how_surely(serve: Callable[[Site], Call]) -> None:
    code, out, error = serve(mixed_site())("what-if", "5800W")
    assert (code, error) == (0, "")
    text = flat(out)
    assert (
        "What if a limit of 5800 W were in force now? That is 150 W (2.5 %) below the uncapped draw." in text
    )
    assert "It can be held." in text
    assert "of the throughput of 3 runs on 6 GPUs, while it lasts." in text
    # 2 x 650 + 2 x 600 seen, 2 x 700 bounded, 2 x 75 idle, 2 x 700 never heard, 5 x 100 beside the GPUs.
    assert "Uncapped draw 5950 W, of which 3300 W is not measured but the most it can be:" in text
    assert "Counted at their worst, they do not answer or take no plan: n5." in text
    assert "<700 W" in out and "never seen uncapped" in out
    assert "nothing is measured yet" in text and "published curves" in text


def test_what_cannot_be_held_is_no_and_tells_what_can(serve: Callable[[Site], Call]) -> None:
    call = serve(mixed_site())
    code, out, _ = call("what-if", "50%")
    text = flat(out)
    assert code == 1
    assert "It CANNOT be held: " in text and "with every run at its floor" in text
    assert "The lowest limit that can be: " in text and "At their floor, they give no more:" in text
    data = json.loads(call("what-if", "50%", "--json")[1])
    assert not data["feasible"]
    least_w = -(-data["least_limit_mw"] // W)
    assert call("what-if", f"{least_w}W")[0] == 0
    assert call("what-if", f"{least_w - 1}W")[0] == 1


def test_an_emergency_may_pass_floors_and_says_whose(serve: Callable[[Site], Call]) -> None:
    call = serve(mixed_site())
    code, out, _ = call("what-if", "4500W")
    assert code == 1
    assert "As an emergency limit, which passes floors, it could be held: see --emergency." in flat(out)
    code, out, _ = call("what-if", "4500W", "--emergency")
    assert code == 0
    assert "past floor" in out
    assert "Past their floor, below what their users were promised: 101, 102, 103." in flat(out)


def test_more_than_there_is_gets_an_answer(serve: Callable[[Site], Call]) -> None:
    call = serve(mixed_site())
    code, out, _ = call("what-if", "-90kW")
    assert code == 1
    assert "What if the site drew 90.00 kW less? That is more than it draws" in flat(out)
    code, out, _ = call("what-if", "90kW")
    assert code == 0
    assert "It binds nothing: without caps the site draws at most" in flat(out)


@pytest.mark.parametrize(
    ("word", "target"),
    [
        ("20%", {"share": 0.2}),
        ("-20 %", {"share": 0.2}),
        ("-2kW", {"less_mw": 2_000_000}),
        ("-.5kW", None),
        ("2.5kW", {"limit_mw": 2_500_000}),
        ("+2kW", None),
        ("0%", None),
        ("-0W", None),
        ("20", None),
        ("nan%", None),
        ("1e3%", None),
        ("20 %%", None),
        ("", None),
    ],
)
def test_targets(serve: Callable[[Site], Call], word: str, target: dict[str, Any] | None) -> None:
    site = ForecastSite(nodes=1)
    site.train("n1", 1, 650)
    code, out, error = serve(site)("what-if", word, "--json")
    if target is None:
        assert (code, out) == (2, "")
        assert error.startswith("slurm-pfi: target ") and error.count("\n") == 1
        assert "write 20% or -2kW for so much less, or 18.5kW for a limit" in error
    else:
        assert code in (0, 1)
        asked = json.loads(out)["target"]
        assert {key: value for key, value in asked.items() if value} == target


def test_sites_with_nothing_to_cut_get_an_honest_answer(serve: Callable[[Site], Call]) -> None:
    idle = ForecastSite(nodes=2, mode="observe")
    for node in ("n1", "n2"):
        idle.idle(node)
    call = serve(idle)
    code, out, _ = call("what-if", "10%")
    assert code == 1
    assert "There is no run whose GPUs a plan can reach: nothing to cut." in flat(out)
    assert "is no reduction" in flat(out) and "Mode observe" in out
    code, out, _ = call("offer")
    assert code == 1 and "It can give NOTHING: there is no run" in flat(out)


def test_a_site_of_no_nodes_has_nothing_to_limit(serve: Callable[[Site], Call]) -> None:
    empty = ForecastSite(nodes=1)
    empty.state = msgspec.structs.replace(empty.state, nodes={})
    call = serve(empty)
    code, out, _ = call("what-if", "10%")
    assert code == 1 and "There is NOTHING to limit: the config names no node" in flat(out)
    assert call("offer")[0] == 1


def test_simulated_gpus_and_a_site_that_is_off_are_labelled(serve: Callable[[Site], Call]) -> None:
    site = mixed_site()
    node = msgspec.structs.replace(site.config.node, identity_dir="/somewhere")
    site.config = msgspec.structs.replace(site.config, node=node)
    site.state = msgspec.structs.replace(site.state, off=True)
    call = serve(site)
    for arguments in (("what-if", "5%"), ("offer",)):
        out = call(*arguments)[1]
        assert "SIMULATED GPUs" in out and "OFF: no limit is enforced" in out


# --------------------------------------------------------------------------------------------------- offer


def test_an_offer_is_a_table_that_explains_itself(serve: Callable[[Site], Call]) -> None:
    call = serve(mixed_site())
    code, out, error = call("offer")
    assert (code, error) == (0, "")
    text = flat(out)
    for word in ("GIVES", "LOSS", "95 %", "NEXT kW", "SURE", "LASTS"):
        assert word in out
    assert "comes from runs never seen uncapped" in text
    assert "1 whose end is not known are not counted on" in text
    assert "No run's curve was measured here yet" in text
    assert "10 s from the order" in text
    data = json.loads(call("offer", "--json")[1])
    assert {"given_mw", "loss", "price_per_kw", "run", "reduction"} == set(data["supply"])
    assert data["levels"][-1]["less_mw"] == data["most_mw"]
    assert f"Most: {data['most_mw'] / W:.0f} W" in text


def test_an_offer_is_drawn(serve: Callable[[Site], Call], tmp_path: Path) -> None:
    call = serve(mixed_site())
    picture = tmp_path / "offer.svg"
    code, out, _ = call("offer", "--plot", str(picture))
    assert code == 0 and f"drawn: {picture}" in flat(out).replace("\n", "")
    assert ET.parse(picture).getroot().tag.endswith("svg")
    bitmap = tmp_path / "offer.PNG"
    code, out, error = call("offer", "--json", "--plot", str(bitmap))
    assert code == 0 and bitmap.read_bytes().startswith(b"\x89PNG")
    assert json.loads(out)["levels"] and "drawn" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [("offer.pdf", "must end in .svg or .png"), ("nowhere/offer.svg", "there is no folder")],
)
def test_a_picture_that_cannot_be_is_refused_before_anything_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    message: str,
) -> None:
    monkeypatch.setenv("SLURM_PFI_CONF", str(tmp_path / "none.toml"))
    with pytest.raises(SystemExit) as end:
        main(("offer", "--plot", str(tmp_path / name)))
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as end:
        main(("offer", "--plot", str(tmp_path / "offer.svg")))
    assert end.value.code == 2 and "slurm-pfi[plot]" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- limit set


def test_limit_set_speaks_of_its_start_and_of_the_way_out(serve: Callable[[Site], Call]) -> None:
    site = ForecastSite(nodes=2)
    for number in (1, 2):
        site.train(f"n{number}", number, 650)
    call = serve(site)
    code, out, _ = call("limit", "set", "2kW")
    assert code == 0 and "it CANNOT be held now: " in out
    assert "with --emergency, which passes floors, it could be held" in flat(out)
    assert "'slurm-pfi what-if 2000W --emergency' shows at whose cost" in flat(out)
    out = call("limit", "set", "700W")[1]
    assert "'slurm-pfi what-if 700W' shows the lowest limit that can be" in flat(out)


def test_a_limit_that_starts_later_is_not_said_to_bind_now(
    serve: Callable[[Site], Call], tmp_path: Path
) -> None:
    site = ForecastSite(nodes=2)
    for number in (1, 2):
        site.train(f"n{number}", number, 650)
    serve(site)

    def said(watts: int) -> str:
        order = {"id": "m", "class": "economic", "limit_mw": watts * W, "start_unix_s": time.time() + 7200}
        return ask(tmp_path / "run/control.sock", "limit_set", order).message

    assert "it CANNOT be held at its start, as the site is now:" in said(2000)
    assert "at its start, as the site is now:\nall GPU caps together: 2300 W" in said(2500)
    assert "it would bind nothing" in said(5000)


# ---------------------------------------------------------------------------------------------- the requests


@pytest.mark.parametrize(
    "target",
    [{}, {"share": 0.1, "limit_mw": 5}, {"share": -0.1}, {"limit_mw": -1}, {"less_mw": 0.5}, {"watts": 5}],
)
def test_a_request_that_is_no_target_is_refused(
    serve: Callable[[Site], Call], tmp_path: Path, target: dict[str, Any]
) -> None:
    serve(ForecastSite(nodes=1))
    reply = ask(tmp_path / "run/control.sock", "what_if", target)
    assert not reply.ok and reply.exit_code == 2 and reply.message.startswith("what_if: ")


def test_the_controller_goes_on_while_it_forecasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = ControllerSection(state_dir=str(tmp_path), run_dir=str(tmp_path))
    go_on = threading.Event()
    monkeypatch.setattr(forecast_orders, "offer", lambda *_asked: go_on.wait(20))

    async def both() -> None:
        orders = Orders(Controller(Config(cluster="c", controller=section), tmp_path / "site.toml"))
        peer = Peer(pid=1, uid=0, gid=0)
        slow = asyncio.create_task(orders.handle(Request(command="offer"), peer))
        await asyncio.sleep(0)
        assert (await orders.handle(Request(command="jobs"), peer)).ok
        assert not slow.done()
        go_on.set()
        assert (await slow).data is True

    asyncio.run(both())


def test_who_asks_in_a_loop_gets_the_same_offer_and_half_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ControllerSection(state_dir=str(tmp_path), run_dir=str(tmp_path))
    made: list[float] = []

    def slow(*_asked: object) -> float:
        made.append(time.monotonic())
        ends_s = time.thread_time() + 0.1
        while time.thread_time() < ends_s:
            pass
        return made[-1]

    monkeypatch.setattr(forecast_orders, "offer", slow)
    monkeypatch.setattr(forecast_orders, "what_if", slow)

    async def loop() -> None:
        orders = Orders(Controller(Config(cluster="c", controller=section), tmp_path / "site.toml"))
        peer = Peer(pid=1, uid=0, gid=0)
        # At once, so that a busy machine does not let the first grow old before the second is asked.
        offers = await asyncio.gather(*(orders.handle(Request(command="offer"), peer) for _ in range(2)))
        assert offers[0].data == offers[1].data and len(made) == 1
        made.clear()
        what = Request(command="what_if", args={"share": 0.1})
        await asyncio.gather(*(orders.handle(what, peer) for _ in range(3)))

    asyncio.run(loop())
    assert len(made) == 3
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(made))


def test_job_ids_are_told_in_order_and_one_run_is_not_runs() -> None:
    assert job_ids(["c:10.0", "c:7.0", "c:9.1", "c:9.0"], {}) == "7, 9, 9.1, 10"


def test_tasks_and_components_are_told_as_slurm_names_them() -> None:
    names = {"c:12.0": "10_12", "c:13.0": "10_2", "c:21.1": "20+1"}
    assert job_ids(["c:12.0", "c:21.1", "c:13.0", "c:9.0"], names) == "9, 10_2, 10_12, 20+1.1"
    assert counted(1, "run") == "1 run"
    assert counted(2, "run") == "2 runs"
