"""What the agent tells Prometheus, in base units: watts, joules, and counts since the agent's start.

What is not known has no series: a GPU that cannot be read is absent, never 0. Labels are GPUs, running jobs and words
of fixed vocabularies, so the number of series is bounded by what is on the node now, and a job's go with the job.
No free text and no time is a label.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, cast, get_args

from .notify import window_open
from .report import all_faults, gpu_fault
from .state import Cause, Gpu, State

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from .runtime import Runtime

_PREFIX: Final = "slurm_pfi_"
_GPU_WATTS: Final[tuple[tuple[str, str, Callable[[Gpu], int | None]], ...]] = (
    ("gpu_power_watts", "Draw of the GPU now.", lambda gpu: gpu.draw_mw),
    ("gpu_limit_requested_watts", "Power limit asked of the GPU, by whomever.", lambda gpu: gpu.requested_mw),
    ("gpu_limit_enforced_watts", "Power limit that rules on the GPU.", lambda gpu: gpu.enforced_mw),
    (
        "gpu_limit_prior_watts",
        "Power limit before slurm-pfi, to which it goes back.",
        lambda gpu: gpu.prior_mw,
    ),
    ("gpu_limit_default_watts", "Default power limit of the GPU.", lambda gpu: gpu.default_mw),
    ("gpu_cap_watts", "Cap of slurm-pfi on the GPU; absent without one.", lambda gpu: gpu.current_mw),
)
_COUNTED: Final = (
    ("set", "limit_sets", "Power limits asked of GPUs, restores included."),
    ("set_failed", "limit_set_failures", "Of these, those that failed."),
    ("conflict", "limit_conflicts", "Limits of other writers found in the place of ours."),
    ("plan_accepted", "plans_accepted", "Plans of the controller taken."),
    ("plan_refused", "plans_refused", "Plans refused; the reason is in the log and in the report."),
)


def exposition(runtime: Runtime) -> Callable[[], bytes]:
    """A function that gives the metrics of this instant in Prometheus' text format.

    The client library is loaded here: some MB that an agent without metrics does not pay.
    """
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(cast("Collector", _Now(runtime)))
    return lambda: generate_latest(registry)


class _Now:
    """A collector: all metrics are made anew at each scrape, so what is gone leaves nothing behind."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[object]:
        return families(self._runtime)


def families(runtime: Runtime) -> Iterator[object]:
    """All metrics of this instant."""
    state = runtime.state
    yield from _gpus(state)
    yield from _runs(state)
    yield from _node(state)
    yield from _counters(runtime)


def _gpus(state: State) -> Iterator[object]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily(f"{_PREFIX}gpu", "A GPU of this node.", labels=("gpu", "position", "model"))
    for gpu in state.gpus.values():
        place = "" if gpu.position is None else str(gpu.position)
        # A driver's text, which must not spoil the others.
        model = gpu.model.encode("utf-8", "replace").decode()
        info.add_metric((gpu.uuid, place, model), {})
    yield info
    for name, text, of in _GPU_WATTS:
        yield _gauge(f"{name}", text, ((gpu.uuid, of(gpu)) for gpu in state.gpus.values()))
    energy = CounterMetricFamily(f"{_PREFIX}gpu_energy_joules", "Energy counter of the GPU.", labels=("gpu",))
    for gpu in state.gpus.values():
        if gpu.telemetry.energy_mj is not None and not gpu.read_fault:
            energy.add_metric((gpu.uuid,), gpu.telemetry.energy_mj / 1000)
    yield energy
    fault = GaugeMetricFamily(
        f"{_PREFIX}gpu_fault", "1 while the GPU may not follow a plan; why is in the log.", labels=("gpu",)
    )
    for gpu in state.gpus.values():
        fault.add_metric((gpu.uuid,), float(bool(gpu_fault(state, gpu))))
    yield fault


def _gauge(name: str, text: str, of_gpus: Iterable[tuple[str, int | None]]) -> object:
    """Watts of each GPU of which they are known."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=("gpu",))
    for uuid, value_mw in of_gpus:
        if value_mw is not None:
            family.add_metric((uuid,), value_mw / 1000)
    return family


def _runs(state: State) -> Iterator[object]:
    """One series for each running job and GPU of it, to join the others with ``on (gpu) group_left``."""
    from prometheus_client.core import InfoMetricFamily

    labels = ("gpu", "job_id", "restart", "uid", "flex")
    job = InfoMetricFamily(f"{_PREFIX}job", "The job that runs on the GPU.", labels=labels)
    for run, seen in state.runs.items():
        for uuid in seen.gpus:
            job.add_metric((uuid, str(run.job_id), str(run.restart), str(seen.uid), seen.flex), {})
    yield job


def _node(state: State) -> Iterator[object]:
    from prometheus_client.core import GaugeMetricFamily

    values = (
        ("window_open", "1 while a plan caps this node's GPUs.", window_open(state, time.monotonic_ns())),
        ("simulated", "1 where the GPUs, and so all figures, are simulated ones.", state.settings.simulated),
        ("released", "1 while an admin has taken the node from slurm-pfi.", state.released),
        ("controller_connected", "1 while the controller is reached.", state.connected),
        (
            "config_reload_successful",
            "0 while the config file is bad and the old one rules.",
            "config" not in state.faults,
        ),
        (
            "faults",
            "Faults of the node beside those of single GPUs; the log says which.",
            len(all_faults(state)),
        ),
    )
    for name, text, value in values:
        yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=float(value))


def _counters(runtime: Runtime) -> Iterator[object]:
    from prometheus_client.core import CounterMetricFamily

    for event, name, text in _COUNTED:
        yield CounterMetricFamily(f"{_PREFIX}{name}", text, value=float(runtime.counted[event]))
    lost = CounterMetricFamily(
        f"{_PREFIX}audit_lost_lines", "Audit lines not written.", value=float(runtime.audit_lost)
    )
    yield lost
    reverted = CounterMetricFamily(
        f"{_PREFIX}cap_reverted", "Caps found lifted and applied again, by cause.", labels=("cause",)
    )
    for cause in get_args(Cause):
        reverted.add_metric((cause,), float(runtime.state.reverted.get(cause, 0)))
    yield reverted
