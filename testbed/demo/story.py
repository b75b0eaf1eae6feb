"""The demo itself: nine jobs, an economic limit, an emergency, the end. It prints what a person wants to see."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from slurm_pfi.units import format_power

from ..checker.run import check_run
from ..cluster import REPO, ClusterError, wait_until
from ..observer import Samples, load_samples, mean_site_draw_mw
from ..site import Site, SiteOptions
from . import figures
from .figures import SECOND_NS, Span
from .tables import Act, DemoJob, acts_table, jobs_table

SETTINGS: Final = Path(__file__).with_name("demo.toml")
MUST_CHECK: Final = ("1", "2", "3", "9", "placement")


class Story:
    """One run of the demo. ``tell`` returns the exit code; whatever happens, nothing stays behind."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.settings = tomllib.loads(SETTINGS.read_text())
        self.jobs = [DemoJob.from_settings(entry) for entry in self.settings["jobs"]]
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        self.notes: dict[str, Any] = {}
        self.site: Site
        self.acts: list[Act] = []
        self.started_s = time.monotonic()

    # ------------------------------------------------------------------------------------------ the story

    def tell(self) -> int:
        if self.out.exists():
            shutil.rmtree(self.out)
        self.out.mkdir(parents=True)
        self._introduce()
        options = SiteOptions(
            **self.settings["site"],
            policy=self.settings["policy"],
            times=self.settings["times"],
            admin_limits={
                node: {int(position): watts for position, watts in limits.items()}
                for node, limits in self.settings["admin_limits"].items()
            },
        )
        self.site = Site(options)
        with self._everything_stopped():
            self.site.start()
            self._write("before.json", self.site.snapshot())
            with self._observed():
                self._play()
        return self._judge()

    def _introduce(self) -> None:
        site = self.settings["site"]
        self._say(
            "slurm-pfi demo: a real Slurm cluster (slurmctld, "
            f"{site['nodes']} x slurmd, munge) whose {site['nodes']} x {site['gpus']} GPUs are SIMULATED behind a "
            "stand-in libnvidia-ml.so.1."
        )
        self._say(
            "Job models: arXiv 2609.11542, fitted (model, not measurement). Draws and tokens below are simulated."
        )
        times = ", ".join(f"{key} {value:g}" for key, value in self.settings["times"].items())
        self._say(f"Time constants are shortened ({SETTINGS.relative_to(REPO)}): {times}")

    def _play(self) -> None:
        story = self.settings["story"]
        self._head("Nine jobs of the user nobody; eight start now")
        early = [job for job in self.jobs if not job.late]
        for job in early:
            self._submit(job)
        self.site.wait_training(*(job.job_id for job in early))
        before = self._watch(story["before_s"], None, "measuring every job at full power")
        uncapped_mw = round(mean_site_draw_mw(self._samples(), before.start_ns, before.end_ns))
        self._act("before", before, None)
        self._say(f"Site draw without caps: {format_power(uncapped_mw)}, node overhead included.")
        self.notes["uncapped_mw"] = uncapped_mw

        limit_mw = int(uncapped_mw * story["economic_share"]) // 10_000 * 10_000
        self._head(f"An economic limit {1 - limit_mw / uncapped_mw:.1%} below that draw: floors hold")
        started = self._set_limit(limit_mw)
        self._economic(story, started, limit_mw)

        limit_mw = int(uncapped_mw * story["emergency_share"]) // 10_000 * 10_000
        self._head(f"An emergency limit {1 - limit_mw / uncapped_mw:.1%} below: floors may be passed")
        started = self._set_limit(limit_mw, "--emergency")
        span = Span(started, self._watch(story["emergency_s"], limit_mw, "emergency limit").end_ns)
        self._act("emergency", span, limit_mw)
        passed = [job.job_id for job in self.jobs if self._run(job).get("floor_passed")]
        self._say(
            f"Floors passed by order of the emergency: {len(passed)}, of jobs {', '.join(map(str, passed))}"
        )
        self._show_tag(self.jobs[0])
        self.notes["floors_passed"] = passed

        self._head("Clear: every GPU goes back to the limit it had before")
        self._cli("limit", "clear", "--all")
        expected = {gpu["uuid"]: gpu["requested_mw"] for gpu in self._read("before.json")}
        began_s = time.monotonic()
        self.site.wait_restored(expected)
        special = sorted({mw for mw in expected.values() if mw != 700_000})
        self._say(
            f"all {len(expected)} GPUs are back {time.monotonic() - began_s:.1f} s later, the one that an admin "
            f"had set before at {', '.join(format_power(mw) for mw in special)} again"
        )
        self._write("after.json", self.site.snapshot())
        self._write("foreign.json", self.site.foreign)

    def _economic(self, story: dict[str, float], started_ns: int, limit_mw: int) -> None:
        """The window, with a job that starts and one that ends inside it."""
        self._watch(story["late_job_after_s"], limit_mw, "economic limit")
        late = next(job for job in self.jobs if job.late)
        self._submit(late)
        self.site.wait_training(late.job_id)
        self._watch(story["job_ends_after_s"] - story["late_job_after_s"], limit_mw, "with one job more")
        leaving = next(job for job in self.jobs if job.leaves)
        self.site.cluster.run(["scancel", str(leaving.job_id)])
        self._say(f"job {leaving.job_id} ({leaving.name}) is cancelled by its user")
        rest_s = story["economic_s"] - (time.monotonic_ns() - started_ns) / SECOND_NS
        end_ns = self._watch(max(4.0, rest_s), limit_mw, "with one job less").end_ns
        self._act("economic", Span(started_ns, end_ns), limit_mw)
        self._cli("status")

    # ------------------------------------------------------------------------------------------ steps

    def _submit(self, job: DemoJob) -> None:
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
        self._say(f"$ sbatch {gres} --partition={job.partition}{flag}   -> job {job.job_id}: {job.name}")

    def _set_limit(self, limit_mw: int, *flags: str) -> int:
        """Set it as a person would; returns when the controller audited it."""
        began_s = time.monotonic()
        self._cli("limit", "set", f"{limit_mw / 1e6:g}kW", *flags)
        took_s = time.monotonic() - began_s
        revision = max(limit["revision"] for limit in self.site.ask("limit_show")["limits"])
        controller = figures.read_audit(self.site.root / "controller/state/audit.jsonl")
        set_ns = figures.limit_entry_ns(controller, revision)
        self._say(f"(the command line itself took {took_s:.2f} s)")
        self.notes.setdefault("cli_s", []).append(round(took_s, 3))
        self._wait_within(limit_mw)
        return set_ns

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

    def _cli(self, *arguments: str) -> None:
        self._say(f"$ slurm-pfi {' '.join(arguments)}")
        done = self.site.cli(*arguments)
        self._say(done.stdout.rstrip())

    def _watch(self, seconds: float, limit_mw: int | None, what: str) -> Span:
        """Let time pass, telling the site's draw every few seconds."""
        start_ns = time.monotonic_ns()
        end_ns = start_ns + round(seconds * SECOND_NS)
        step_ns = 5 * SECOND_NS
        while (now_ns := time.monotonic_ns()) < end_ns:
            time.sleep((min(end_ns, now_ns + step_ns) - now_ns) / SECOND_NS)
            sample = self._samples().samples[-1]
            limit = "" if limit_mw is None else f" of {format_power(limit_mw)}"
            done_s = (time.monotonic_ns() - start_ns) / SECOND_NS
            self._say(
                f"  {what}: {done_s:3.0f} of {seconds:.0f} s, site draw {format_power(sample.site_draw_mw)}{limit}"
            )
        return Span(start_ns, time.monotonic_ns())

    def _act(self, name: str, span: Span, limit_mw: int | None) -> None:
        """Remember what a stretch of the story looked like, and show it."""
        runs = self.site.jobs()
        act = Act(
            name=name, span=span, limit_mw=limit_mw, runs={job.job_id: self._run(job) for job in self.jobs}
        )
        for job in self.jobs:
            if job.job_id:
                job.tokens = self.site.tokens(job.job_id)
                job.uuids = job.uuids or self._uuids(job)
        self.acts.append(act)
        self.console.print(jobs_table(self.jobs, act, self.acts[0], runs, width=self.console.width))
        draw_mw = self._samples().samples[-1].site_draw_mw
        limit = "no limit" if limit_mw is None else f"limit {format_power(limit_mw)}"
        told = "CAP and DRAW of each GPU; RATE against the job's own before"
        passed = "; ! = floor passed" if any(run.get("floor_passed") for run in act.runs.values()) else ""
        self._say(f"site draw {format_power(draw_mw)}, {limit}. ({told}{passed})")

    def _show_tag(self, job: DemoJob) -> None:
        """What Slurm itself keeps of a job."""
        self._say(f"$ scontrol show job {job.job_id} | grep AdminComment")
        self._say(
            f"   AdminComment={self.site.cluster.job_fields(job.job_id).get('AdminComment', '').strip()}"
        )

    def _uuids(self, job: DemoJob) -> list[str]:
        """Where the job really runs, as it registered itself with the simulation."""
        name = f"{job.job_id}.0"
        return [gpu["uuid"] for gpu in self.site.snapshot() if gpu["job"] == name]

    def _run(self, job: DemoJob) -> dict[str, Any]:
        found: dict[str, Any] = self.site.jobs().get(job.job_id, {})
        return found

    # ------------------------------------------------------------------------------------------ judging

    def _judge(self) -> int:
        samples = load_samples(self.out / "samples.jsonl")
        before, economic, emergency = (act for act in self.acts)
        nodes = {node: figures.read_audit(self.out / "nodes" / node / "audit.jsonl") for node in samples.gpus}
        summary: dict[str, Any] = {"simulated": True, "settings": str(SETTINGS.relative_to(REPO))}
        for act, key in ((economic, ""), (emergency, "emergency_")):
            caps = figures.gpu_caps(samples, act.span.start_ns + 3 * SECOND_NS)
            read_ns = figures.compliance_ns(nodes, act.span.start_ns, caps)
            excess_w = figures.excess_w(samples, act.limit_mw or 0, Span(read_ns, act.span.end_ns))
            summary[f"{key}limit_w"] = (act.limit_mw or 0) / 1000
            summary[f"{key}compliance_s"] = round((read_ns - act.span.start_ns) / SECOND_NS, 3)
            summary[f"{key}worst_excess_w"] = round(excess_w, 1)
        summary |= self._promises(samples, before, economic)
        summary |= self._restored()
        summary["uncapped_w"] = self.notes["uncapped_mw"] / 1000
        summary["floors_passed"] = self.notes["floors_passed"]
        summary["cli_s"] = self.notes["cli_s"]
        verdict = check_run(self.out)
        unchecked = verdict.unchecked(MUST_CHECK)
        summary["checker"] = {"holds": verdict.holds, "unchecked": list(unchecked)}
        summary["seconds"] = round(time.monotonic() - self.started_s, 1)
        summary["leftovers"] = self.notes.get("leftovers", [])
        summary["jobs"] = [job.summary(self.acts) for job in self.jobs]

        self._head("What was measured")
        self.console.print(acts_table(summary))
        self._say(verdict.text())
        failed = _not_reached(summary)
        summary["reached"] = not failed
        self._write("summary.json", summary)
        for line in failed:
            self._say(f"NOT REACHED: {line}")
        where = self.out.relative_to(Path.cwd()) if self.out.is_relative_to(Path.cwd()) else self.out
        self._say(
            f"Figures in {where}/summary.json, raw samples in {where}/samples.jsonl. {summary['seconds']:.0f} s."
        )
        return 1 if failed else 0

    def _promises(self, samples: Samples, before: Act, economic: Act) -> dict[str, Any]:
        none = next(job for job in self.jobs if job.partition == "urgent")
        five = next(job for job in self.jobs if job.flex == "5%")
        draw_mw = before.runs[five.job_id]["draw_mw"] // len(five.uuids)
        window = economic.span
        prior_mw = min(gpu["requested_mw"] for gpu in self._read("before.json") if gpu["uuid"] in none.uuids)
        return {
            "none_capped": figures.lowest_cap(samples, none.uuids, window) < prior_mw,
            "flex5_loss": round(figures.loss(five.tokens, before.span, window), 4),
            "flex5_cap_w": figures.lowest_cap(samples, five.uuids, window) / 1000,
            "flex5_draw_w": round(draw_mw / 1000, 1),
            "flex5_tested_s": round(figures.seconds_below(samples, five.uuids, draw_mw, window), 1),
        }

    def _restored(self) -> dict[str, int]:
        before = {gpu["uuid"]: gpu for gpu in self._read("before.json")}
        after = self._read("after.json")
        right = sum(
            gpu["requested_mw"] == gpu["effective_mw"] == before[gpu["uuid"]]["requested_mw"] for gpu in after
        )
        return {"restored_gpus": right, "restored_wrong": len(after) - right}

    # ------------------------------------------------------------------------------------------ around it

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
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
                wait_until(lambda: len(self._samples().samples) > 0, 10, "the observer samples")
                yield
            finally:
                observer.send_signal(signal.SIGTERM)
                observer.wait(timeout=10)

    @contextlib.contextmanager
    def _everything_stopped(self) -> Iterator[None]:
        """Whatever happens: clear the limit, wait for the restore, keep the files, stop all that was started."""
        try:
            yield
        finally:
            # A second Ctrl-C must not leave caps or processes behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._say("stopping everything ...")
            if (self.out / "before.json").exists():
                with contextlib.suppress(ClusterError):
                    self.site.cli("limit", "clear", "--all", check=False)
                    expected = {gpu["uuid"]: gpu["requested_mw"] for gpu in self._read("before.json")}
                    self.site.wait_restored(expected)
                with contextlib.suppress(OSError):
                    self.site.save_run(self.out)
            self.notes["leftovers"] = self.site.stop()
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _samples(self) -> Samples:
        path = self.out / "samples.jsonl"
        if not path.exists() or not path.read_text().count("\n"):
            return Samples(hz=10, load_mw=0, gpus={}, samples=())
        return load_samples(path)

    def _read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def _write(self, name: str, content: object) -> None:
        (self.out / name).write_text(json.dumps(content, indent=1) + "\n")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _head(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left")


def _not_reached(summary: dict[str, Any]) -> list[str]:
    """Every promise of the demo that its own measurement does not bear out."""
    promises = {
        "the last GPU was at its new cap more than 1 s after the limit": summary["compliance_s"] <= 1,
        "the same in the emergency": summary["emergency_compliance_s"] <= 1,
        "the site drew more than the economic limit": summary["worst_excess_w"] <= 0,
        "the site drew more than the emergency limit": summary["emergency_worst_excess_w"] <= 0,
        "a job that was never to be slowed was capped": not summary["none_capped"],
        "the job that was promised 5 % lost more": summary["flex5_loss"] <= 0.05,
        "its promise was not put to the test for 10 s": summary["flex5_tested_s"] >= 10,
        "not every GPU is back at its prior limit": summary["restored_wrong"] == 0,
        "the checker found something": summary["checker"]["holds"] and not summary["checker"]["unchecked"],
        "something was left running or a node was drained": not summary["leftovers"],
        "no floor was passed in the emergency, so that was not shown": bool(summary["floors_passed"]),
    }
    return [text for text, kept in promises.items() if not kept]
