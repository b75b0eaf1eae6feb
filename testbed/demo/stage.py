"""What the demo stands on: the site, the observer beside it, its words on the screen, and the way out of it all."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from slurm_pfi.slurm.tag import Tag, find_tag
from slurm_pfi.units import format_power

from ..cluster import REPO, ClusterError, wait_until
from ..observer import Samples, load_samples
from ..site import Site, SiteOptions
from . import figures
from .figures import SECOND_NS, Span
from .tables import Act, DemoJob, jobs_table
from .words import folded

RESTORE_S: Final = 60.0


class Stage:
    """Steps that a story is made of. Whatever happens, nothing stays behind."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out = out
        self.settings = settings
        self.jobs = [DemoJob.from_settings(entry) for entry in settings["jobs"]]
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        self.notes: dict[str, Any] = {"cli_s": []}
        self.acts: dict[str, Act] = {}
        self.site = Site(
            SiteOptions(
                **settings["site"],
                policy=settings["policy"],
                times=settings["times"],
                admin_limits={
                    node: {int(position): watts for position, watts in limits.items()}
                    for node, limits in settings.get("admin_limits", {}).items()
                },
            )
        )

    # ------------------------------------------------------------------------------------------ jobs

    def submit(self, job: DemoJob) -> None:
        job.job_id = self.site.submit(
            job.workload,
            gpus=job.gpus,
            nodes=job.nodes,
            flex=job.flex or None,
            partition=job.partition,
            where=job.where,
        )
        flag = f" --power-flex={job.flex}" if job.flex else ""
        gres = f"--gres=gpu:{job.gpus}" + (f" --nodes={job.nodes}" if job.nodes > 1 else "")
        self.say(f"$ sbatch {gres} --partition={job.partition}{flag}   -> job {job.job_id}: {job.name}")

    def run_of(self, job: DemoJob) -> dict[str, Any]:
        """What ``slurm-pfi jobs`` shows of it; empty once it has ended."""
        found: dict[str, Any] = self.site.jobs().get(job.job_id, {})
        return found

    def tag_of(self, job: DemoJob) -> Tag | None:
        """Our tag in what Slurm itself keeps of the job."""
        return find_tag(self.site.cluster.job_fields(job.job_id).get("AdminComment", ""))

    def read_tokens(self) -> None:
        """Every job's own token log as it is now."""
        for job in self.jobs:
            if job.job_id:
                job.tokens = self.site.tokens(job.job_id)
                job.uuids = job.uuids or self._uuids(job)

    def _uuids(self, job: DemoJob) -> list[str]:
        """Where the job really runs, as it registered itself with the simulation."""
        name = f"{job.job_id}.0"
        return [gpu["uuid"] for gpu in self.site.snapshot() if gpu["job"] == name]

    # ------------------------------------------------------------------------------------------ limits

    def set_limit(self, limit_mw: int, *flags: str) -> int:
        """Set it as a person would; returns when the controller audited it."""
        began_s = time.monotonic()
        self.cli("limit", "set", f"{limit_mw / 1e6:g}kW", *flags)
        took_s = time.monotonic() - began_s
        revision = max(limit["revision"] for limit in self.site.ask("limit_show")["limits"])
        controller = figures.read_audit(self.site.root / "controller/state/audit.jsonl")
        set_ns = figures.limit_entry_ns(controller, revision)
        self.say(f"(the command line itself took {took_s:.2f} s)")
        self.notes["cli_s"].append(round(took_s, 3))
        self._wait_within(limit_mw)
        return set_ns

    def give_back(self) -> Span:
        """Clear the limit as a person would, and wait until every GPU is back where it was before any agent."""
        self.cli("limit", "clear", "--all")
        started_ns = time.monotonic_ns()
        expected = {gpu["uuid"]: gpu["requested_mw"] for gpu in self.read("before.json")}
        self.site.wait_restored(expected, timeout_s=RESTORE_S)
        span = Span(started_ns, time.monotonic_ns())
        also = "".join(f", {which} at its {power} again" for which, power in self.set_by_admins())
        self.say(
            f"all {len(expected)} GPUs are back {span.seconds:.1f} s later{also}. For the first "
            f"{self.settings['times']['rebound_s']:g} s the site was kept at what it drew before the window, then its "
            "GPUs were let go step by step."
        )
        return span

    def set_by_admins(self) -> Iterator[tuple[str, str]]:
        """Each GPU that an admin had set before any agent came, with its limit."""
        for node, limits in self.settings.get("admin_limits", {}).items():
            for place, watts in limits.items():
                yield f"GPU {place} of {node}", format_power(round(watts * 1000))

    def set_policy(self, name: str) -> None:
        """Change the policy as an admin would: in the file, then SIGHUP."""
        self.say(f'(slurm-pfi.toml: [policy] name = "{name}", then SIGHUP to the controller)')
        self.site.set_policy(name)

    def forecast(self, limit_mw: int) -> dict[str, Any]:
        """What ``slurm-pfi what-if --json`` says of this limit now; empty where it cannot say."""
        with contextlib.suppress(ClusterError):
            found: dict[str, Any] = self.site.ask("what_if", {"limit_mw": limit_mw, "emergency": False})
            return found
        return {}

    def _wait_within(self, limit_mw: int) -> None:
        """Go on only when the caps are within the limit; otherwise say what the nodes complain of."""
        overhead_mw = round(self.site.options.overhead_w * 1000) * self.site.options.nodes
        try:
            wait_until(
                lambda: sum(gpu["effective_mw"] for gpu in self.site.snapshot()) + overhead_mw <= limit_mw,
                10,
                f"all caps within {format_power(limit_mw)}",
            )
        except ClusterError as error:
            faults = [fault for node in self.site.status()["nodes"] for fault in node["faults"]]
            raise ClusterError(f"{error}; the first fault told: {faults[0] if faults else 'none'}") from error

    # ------------------------------------------------------------------------------------------ time

    def watch(self, seconds: float, limit_mw: int | None, what: str) -> Span:
        """Let time pass, telling the site's draw every few seconds."""
        start_ns = time.monotonic_ns()
        end_ns = start_ns + round(seconds * SECOND_NS)
        step_ns = 5 * SECOND_NS
        while (now_ns := time.monotonic_ns()) < end_ns:
            time.sleep((min(end_ns, now_ns + step_ns) - now_ns) / SECOND_NS)
            sample = self.samples().samples[-1]
            limit = "" if limit_mw is None else f" of {format_power(limit_mw)}"
            done_s = (time.monotonic_ns() - start_ns) / SECOND_NS
            self.say(
                f"  {what}: {done_s:3.0f} of {seconds:.0f} s, site draw {format_power(sample.site_draw_mw)}{limit}"
            )
        return Span(start_ns, time.monotonic_ns())

    def act(self, name: str, span: Span, limit_mw: int | None) -> Act:
        """Remember what a stretch of the story looked like, and show it."""
        runs = self.site.jobs()
        act = Act(name, span, limit_mw, {job.job_id: runs.get(job.job_id, {}) for job in self.jobs})
        self.read_tokens()
        self.acts[name] = act
        before = self.acts["before"]
        self.console.print(jobs_table(self.jobs, act, before, runs, width=self.console.width))
        draw_mw = self.samples().samples[-1].site_draw_mw
        limit = "no limit" if limit_mw is None else f"limit {format_power(limit_mw)}"
        told = "CAP and DRAW of each GPU; RATE against the job's own before"
        passed = "; ! = floor passed" if any(run.get("floor_passed") for run in act.runs.values()) else ""
        self.say(f"site draw {format_power(draw_mw)}, {limit}. ({told}{passed})")
        return act

    # ------------------------------------------------------------------------------------------ around it

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """The observer beside it: it reads the simulation's shared state, not NVML and not the controller."""
        site = self.site
        command = [
            sys.executable,
            "-m",
            "testbed.observer",
            "--sim-dir",
            str(site.root / "sim"),
            "--nodes",
            ",".join(site.node_names),
            "--overhead-w",
            str(site.options.overhead_w),
            "--out",
            str(self.out / "samples.jsonl"),
        ]
        with subprocess.Popen(command, cwd=REPO, start_new_session=True) as observer:
            try:
                wait_until(lambda: len(self.samples().samples) > 0, 10, "the observer samples")
                yield
            finally:
                observer.send_signal(signal.SIGTERM)
                observer.wait(timeout=10)

    @contextlib.contextmanager
    def everything_stopped(self) -> Iterator[None]:
        """Whatever happens: clear the limit, wait for the restore, keep the files, stop all that was started."""
        try:
            yield
        finally:
            # A second Ctrl-C must not leave caps or processes behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self.say("stopping everything ...")
            if (self.out / "before.json").exists():
                with contextlib.suppress(ClusterError):
                    self._restore_at_once()
                with contextlib.suppress(OSError):
                    self.site.save_run(self.out)
            self.notes["own_faults"] = self.site.own_faults()
            for line in self.notes["own_faults"]:
                self.say(f"a fault of ours: {line}")
            self.notes["leftovers"] = self.site.stop()
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _restore_at_once(self) -> None:
        """Who interrupts does not want to wait for a ramp: the red button skips it."""
        expected = {gpu["uuid"]: gpu["requested_mw"] for gpu in self.read("before.json")}
        self.site.cli("limit", "clear", "--all", check=False)
        if any(gpu["requested_mw"] != expected[gpu["uuid"]] for gpu in self.site.snapshot()):
            self.site.cli("off", check=False)
        self.site.wait_restored(expected)

    def samples(self) -> Samples:
        path = self.out / "samples.jsonl"
        if not path.exists() or not path.read_text().count("\n"):
            return Samples(hz=10, load_mw=0, gpus={}, samples=())
        return load_samples(path)

    def cli(self, *arguments: str) -> str:
        """Run a command of ours and show what it says."""
        self.say(f"$ slurm-pfi {' '.join(arguments)}")
        done = self.site.cli(*arguments, columns=self.console.width)
        self.say(done.stdout.rstrip(), as_it_is=True)
        return done.stdout

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def write(self, name: str, content: object) -> None:
        (self.out / name).write_text(json.dumps(content, indent=1) + "\n")

    def say(self, text: str, *, as_it_is: bool = False) -> None:
        """Lines break as ``words.folded`` has it; ``as_it_is`` leaves them to who wrote them for this width."""
        shown = text if as_it_is else folded(text, self.console.width)
        self.console.print(shown, markup=False, soft_wrap=True)

    def head(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left")
