"""The agent's metrics (F9): what is exposed, what is not, and the little HTTP that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurm_pfi.bus.unix import SocketError
from slurm_pfi.config import ConfigError, parse_config
from slurm_pfi.gpu.device import LostError, UnknownDeviceError
from slurm_pfi.model import Run
from slurm_pfi.node import scrape
from slurm_pfi.node.metrics import exposition
from slurm_pfi.node.scrape import MetricsServer
from testbed.lone_node import Commander, LoneNode
from tests.node_world import S, World, replace, window_step

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(text: bytes) -> Samples:
    """Every sample, by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def of(world: World) -> Samples:
    """The metrics of a world's agent, through the real exposition and Prometheus' own parser."""
    counted = Counter(event for event, _ in world.audit)
    runtime: Any = SimpleNamespace(state=world.state, counted=counted, audit_lost=0)
    return scraped(exposition(runtime)())


def one(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"slurm_pfi_{name}", tuple(sorted(labels.items()))))


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


@pytest.fixture
def world() -> World:
    return World(3).start()


def test_watts_joules_limits_and_the_join_with_jobs(world: World) -> None:
    run = world.begin_job(7, 0, 1, restart=2)
    world.window(200_000, {run: 400_000})
    world.advance(2 * S)
    samples = of(world)
    gpu = world.state.gpus["GPU-0"]
    assert gpu.draw_mw is not None and gpu.telemetry.energy_mj is not None
    assert one(samples, "gpu_power_watts", gpu="GPU-0") == gpu.draw_mw / 1000
    assert one(samples, "gpu_energy_joules_total", gpu="GPU-0") == gpu.telemetry.energy_mj / 1000
    for name, watts in {"requested": 400, "enforced": 400, "prior": 700, "default": 700}.items():
        assert one(samples, f"gpu_limit_{name}_watts", gpu="GPU-0") == watts
    assert one(samples, "gpu_cap_watts", gpu="GPU-2") == 200
    job = {"job_id": "7", "restart": "2", "uid": "1000", "flex": "medium"}
    assert one(samples, "job_info", gpu="GPU-0", **job) == one(samples, "job_info", gpu="GPU-1", **job) == 1
    assert one(samples, "gpu_info", gpu="GPU-2", position="2", model=gpu.model) == 1
    assert one(samples, "window_open") == 1 and one(samples, "controller_connected") == 1
    assert one(samples, "limit_sets_total") == 3 and one(samples, "plans_accepted_total") == 1


def test_f9_what_is_unknown_has_no_series(world: World) -> None:
    world.advance(6 * S)
    world.devices.fail("sample", LostError("off the bus", uuid="GPU-1"))
    world.devices.fail("list", LostError("off the bus", uuid="GPU-1"))
    world.advance(6 * S)
    samples = of(world)
    for name in (
        "gpu_power_watts",
        "gpu_limit_requested_watts",
        "gpu_limit_enforced_watts",
        "gpu_energy_joules_total",
    ):
        assert one(samples, name, gpu="GPU-1") is None
        assert one(samples, name, gpu="GPU-0") is not None
    assert one(samples, "gpu_fault", gpu="GPU-1") == 1 and one(samples, "gpu_fault", gpu="GPU-0") == 0
    assert one(samples, "gpu_cap_watts", gpu="GPU-0") is None, "no cap is not a cap of 0 W"
    assert not any(
        value == 0 for (name, _), value in samples.items() if name.endswith(("_watts", "_joules_total"))
    )


def test_f9_series_are_bounded_by_what_runs_now(world: World) -> None:
    before = of(world)
    for job_id in range(1, 2001):
        world.end_job(world.begin_job(job_id, job_id % 3))
    assert of(world).keys() == before.keys(), "nothing is left of 2,000 jobs"
    runs = [world.begin_job(job_id, job_id % 3) for job_id in range(5000, 5012)]
    during = of(world)
    assert len(during) == len(before) + 12
    world.end_job(runs[0])
    gone = during.keys() - of(world).keys()
    assert [name for name, _ in gone] == ["slurm_pfi_job_info"]
    assert dict(next(iter(gone))[1])["job_id"] == "5000"


def test_f9_odd_words_come_out_valid(world: World) -> None:
    """A model name of the driver, and a fault text, with all that a text format may stumble over."""
    odd = 'x"y\\z\nlimit 5\ud800é' + "\x00"
    world.state = replace(
        world.state,
        gpus={uuid: replace(gpu, model=odd) for uuid, gpu in world.state.gpus.items()},
        faults={"nvml": odd},
    )
    samples = of(world)
    assert one(samples, "faults") == 1
    labels = [dict(labels) for name, labels in samples if name == "slurm_pfi_gpu_info"]
    assert len(labels) == 3 and all('x"y\\z' in label["model"] for label in labels)


def test_no_label_holds_a_time_or_free_text(world: World) -> None:
    run = world.begin_job(7, 0)
    world.window(200_000, {run: None})
    world.devices.fail("set", UnknownDeviceError("code 4711 at 12:00:01"))
    world.advance(3 * S)
    allowed = {"gpu", "position", "model", "job_id", "restart", "uid", "flex", "cause"}
    assert {key for _, labels in of(world) for key, _ in labels} <= allowed
    assert not any("4711" in value for _, labels in of(world) for _, value in labels)


def test_causes_of_reverted_caps_and_failures_are_counted(world: World) -> None:
    world.window(200_000)
    world.advance(2 * S)
    world.devices.write_foreign("GPU-0", 700_000)
    world.advance(2 * S)
    samples = of(world)
    assert one(samples, "cap_reverted_total", cause="default value") == 1
    assert one(samples, "cap_reverted_total", cause="another value") == 0
    world.devices.fail("set", UnknownDeviceError("no"), times=3)
    world.devices.write_foreign("GPU-1", 690_000)
    world.advance(20 * S)
    samples = of(world)
    assert one(samples, "cap_reverted_total", cause="another value") == 1
    assert one(samples, "limit_set_failures_total") == len(world.said("set_failed")) > 0


def test_f4_a_bad_config_shows_in_a_metric(world: World) -> None:
    assert one(of(world), "config_reload_successful") == 1
    world.state = replace(world.state, faults={"config": "the old settings stay in force: x"})
    assert one(of(world), "config_reload_successful") == 0


# ------------------------------------------------------------------------------------------------- the server


class _Rendered:
    """Counts how often the metrics are made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return b"x 1\n"


@pytest.fixture(params=["unix", "127.0.0.1:0"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class _Served:
    """A server and a way to it."""

    def __init__(self, where: str, folder: Path, *, deadline_s: float = 5.0) -> None:
        self.rendered = _Rendered()
        if where != "unix":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                where = f"127.0.0.1:{free.getsockname()[1]}"
        self.where = where
        self.path = folder / "metrics.sock"
        self.server = MetricsServer(where, self.path, self.rendered, deadline_s=deadline_s)

    async def __aenter__(self) -> _Served:
        self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def connect(self) -> socket.socket:
        unix = self.where == "unix"
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.settimeout(20)
        sock.connect(str(self.path) if unix else ("127.0.0.1", int(self.where.rpartition(":")[2])))
        return sock

    def get(self, sent: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> bytes:
        with self.connect() as sock:
            sock.sendall(sent)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    async def ask(self, sent: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> bytes:
        return await asyncio.to_thread(self.get, sent)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"GET /metrics?a=b HTTP/1.0\n\n", b"200 OK"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\nx=1", b"405 Method Not Allowed"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400 Bad Request"),
        (b"GET\r\n\r\n", b"400 Bad Request"),
        (b"\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 1400, b"431 Request Header Fields Too Large"),
    ],
)
def test_requests_and_what_they_get(where: str, sent: bytes, status: bytes, tmp_path: Path) -> None:
    async def story() -> bytes:
        async with _Served(where, tmp_path) as served:
            return await served.ask(sent)

    head, _, body = asyncio.run(story()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
    if sent.startswith(b"HEAD"):
        assert body == b"" and length == 4
    else:
        assert len(body) == length
    if status == b"200 OK":
        assert b"Content-Type: text/plain; version=0.0.4" in head


def test_hostile_clients_keep_no_scrape_out_and_do_not_stay(where: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with _Served(where, tmp_path, deadline_s=1.0) as served:
            slow = [await asyncio.to_thread(served.connect) for _ in range(3 * scrape._MOST_CONNECTIONS)]
            for sock in slow:
                with contextlib.suppress(OSError):  # the oldest of them are gone by now
                    sock.sendall(b"GET /met")
            assert b"200 OK" in await served.ask()
            with served.connect() as gone:
                gone.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            for sock in slow:
                with contextlib.closing(sock), contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(sock.recv, 1) == b"", "dropped: too many, or too late"
            assert b"200 OK" in await served.ask()

    asyncio.run(story())
    gc.collect()


def test_a_flood_of_scrapes_makes_the_metrics_once_a_second(tmp_path: Path) -> None:
    async def story() -> int:
        async with _Served("unix", tmp_path) as served:
            began_s = time.monotonic()
            for _ in range(50):
                assert b"x 1" in await served.ask()
            return served.rendered.count - int(time.monotonic() - began_s)

    assert asyncio.run(story()) <= 1


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async def story() -> None:
        async with _Served("127.0.0.1:0", tmp_path) as served:
            second = MetricsServer(served.where, tmp_path / "m", _Rendered())
            with pytest.raises(SocketError, match="another process listens there; choose another port"):
                second.start()
            assert b"200 OK" in await served.ask()

    asyncio.run(story())


@pytest.mark.parametrize(
    "value",
    ["on", "", "9401", ":9401", "0.0.0.0:9401", "10.0.0.1:9401", "localhost:9401", "127.0.0.1:0", "127.0.0.1:65536",
     "127.0.0.1:+80", "[::]:9401", "127.0.0.1", "/run/metrics.sock"],
)  # fmt: skip
def test_only_a_unix_socket_or_a_loopback_port_is_accepted(value: str) -> None:
    with pytest.raises(ConfigError, match=r'node\.metrics = .*: expected "off", "unix" or a loopback port'):
        parse_config(f'cluster = "c"\n[node]\nmetrics = "{value}"\n', origin="x")


@pytest.mark.parametrize("value", ["off", "unix", "127.0.0.1:9401", "[::1]:9401", "127.0.0.2:1"])
def test_these_are_accepted(value: str) -> None:
    assert parse_config(f'cluster = "c"\n[node]\nmetrics = "{value}"\n', origin="x").node.metrics == value


# -------------------------------------------------------------------------------------------------- the agent

COST: Final = """
import sys
from slurm_pfi.node import command
assert not [name for name in sys.modules if name.startswith("prometheus_client")]
"""


def test_an_agent_without_metrics_does_not_load_the_client() -> None:
    subprocess.run([sys.executable, "-c", COST], check=True, timeout=60)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LoneNode]:
    made = LoneNode(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_the_agent_serves_them(site: LoneNode) -> None:
    site.config.write_text(site.config.read_text().replace("[slurm]", 'metrics = "unix"\n[slurm]'))
    served = _Served("unix", site.paths.folder)

    async def story() -> None:
        async with Commander(site) as controller:
            site.start()
            run: Run = site.job(7, "0")
            await controller.until(lambda report: report.runs, "the run")
            await controller.plan(window_step(200_000, {run: 400_000}))
            await controller.ceilings(400_000, 200_000, 200_000, 200_000)
            head, _, body = (await served.ask()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            samples = scraped(body)
            uuid = site.devices[0].uuid
            assert one(samples, "gpu_limit_enforced_watts", gpu=uuid) == 400
            assert one(samples, "job_info", gpu=uuid, job_id="7", restart="0", uid="1000", flex="") == 1
            assert one(samples, "limit_sets_total") == 4
            assert one(samples, "simulated") == 1

    asyncio.run(story())
    assert site.paths.metrics.stat().st_mode & 0o777 == 0o666
    assert site.paths.metrics.stat().st_uid == os.geteuid()


def test_metrics_that_cannot_be_served_are_a_fault_and_no_more(site: LoneNode) -> None:
    site.paths.prepare()
    site.paths.metrics.write_text("mine")
    site.config.write_text(site.config.read_text().replace("[slurm]", 'metrics = "unix"\n[slurm]'))
    site.start()
    status = site.ask("status")
    assert (
        "Prometheus cannot read metrics:" in status.stdout and "exists and is not a socket" in status.stdout
    )
    assert site.paths.metrics.read_text() == "mine"
