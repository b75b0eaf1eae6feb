"""The demo itself: nine jobs, the same limit shared two ways, an emergency, the end. It prints what a person wants
to see."""

from __future__ import annotations

import shutil
import time
import tomllib
from pathlib import Path
from typing import Any, Final

from slurm_pfi.units import format_power

from ..cluster import REPO
from ..observer import mean_site_draw_mw
from .figures import SECOND_NS, Span
from .judge import judge
from .stage import Stage
from .tables import learned_table

HERE: Final = Path(__file__).parent
SETTINGS: Final = HERE / "demo.toml"
MIXES: Final = {"one": SETTINGS, "two": HERE / "mix_two.toml"}


def load_settings(mix: str) -> dict[str, Any]:
    """The demo's settings, with the jobs of this mix."""
    settings = tomllib.loads(SETTINGS.read_text())
    return settings | tomllib.loads(MIXES[mix].read_text())


class Story(Stage):
    """One run of the demo. ``tell`` returns the exit code."""

    def __init__(self, out: Path, mix: str = "one") -> None:
        super().__init__(out, load_settings(mix))
        self.mix = mix
        self.started_s = time.monotonic()

    def tell(self) -> int:
        if self.out.exists():
            shutil.rmtree(self.out)
        self.out.mkdir(parents=True)
        self.introduce()
        with self.everything_stopped():
            self.site.start()
            self.write("before.json", self.site.snapshot())
            with self.observed():
                self._play()
        return judge(self)

    def introduce(self) -> None:
        site = self.settings["site"]
        self.say(
            "slurm-pfi demo: a real Slurm cluster (slurmctld, "
            f"{site['nodes']} x slurmd, munge) whose {site['nodes']} x {site['gpus']} GPUs are SIMULATED behind a "
            "stand-in libnvidia-ml.so.1."
        )
        self.say(
            "Job models: arXiv 2609.11542, fitted (model, not measurement), by its names: L70 is Llama-3.1-70B, Q32 "
            "and Q30 Qwen3, oss gpt-oss-20b; PT pretraining, FT fine-tuning. Draws and tokens below are simulated."
        )
        for which, power in self.set_by_admins():
            self.say(
                f"An admin had set {which} to {power} before any agent came: there it must come back to."
            )
        times = ", ".join(f"{key} {value:g}" for key, value in self.settings["times"].items())
        self.say(f"Time constants are shortened ({SETTINGS.relative_to(REPO)}): {times}")

    def _play(self) -> None:
        uncapped_mw = self._before()
        story = self.settings["story"]
        limit_mw = int(uncapped_mw * story["economic_share"]) // 10_000 * 10_000
        self._head_of_limit("economic", limit_mw, uncapped_mw, "floors hold")
        self.cli("what-if", format_power(limit_mw).replace(" ", ""))
        self.say(
            "(The uncapped draw in this answer is the controller's: what each job drew while it worked. The "
            f"{format_power(uncapped_mw)} further up are the observer's, the mean of the whole site over some seconds.)"
        )
        self._economic(story, limit_mw)
        self._rebound("rebound")
        self._equal(story, limit_mw)
        self._emergency(story, int(uncapped_mw * story["emergency_share"]) // 10_000 * 10_000, uncapped_mw)
        self._end()

    def _head_of_limit(self, kind: str, limit_mw: int, uncapped_mw: int, what: str) -> None:
        self.head(f"An {kind} limit {100 * (1 - limit_mw / uncapped_mw):.1f} % below that draw: {what}")

    def _before(self) -> int:
        early = [job for job in self.jobs if not job.late]
        self.head(f"{len(self.jobs)} jobs of an ordinary user; {len(early)} start now")
        for job in early:
            self.submit(job)
        self.site.wait_training(*(job.job_id for job in early))
        span = self.watch(self.settings["story"]["before_s"], None, "measuring every job at full power")
        uncapped_mw = round(mean_site_draw_mw(self.samples(), span.start_ns, span.end_ns))
        self.act("before", span, None)
        self.say(f"Site draw without caps: {format_power(uncapped_mw)}, node overhead included.")
        self.notes["uncapped_mw"] = uncapped_mw
        return uncapped_mw

    def _economic(self, story: dict[str, float], limit_mw: int) -> None:
        """The window, with a job that starts and one that ends inside it; afterwards it is left to learn."""
        started_ns = self.set_limit(limit_mw)
        self.watch(story["late_job_after_s"], limit_mw, "economic limit")
        late = next(job for job in self.jobs if job.late)
        self.submit(late)
        self.site.wait_training(late.job_id)
        self.watch(story["job_ends_after_s"] - story["late_job_after_s"], limit_mw, "with one job more")
        leaving = next(job for job in self.jobs if job.leaves)
        self.site.cluster.run(["scancel", str(leaving.job_id)])
        self.say(f"job {leaving.job_id} ({leaving.name}) is cancelled by its user")
        rest_s = story["economic_s"] - (time.monotonic_ns() - started_ns) / SECOND_NS
        end_ns = self.watch(max(4.0, rest_s), limit_mw, "with one job less").end_ns
        self.act("economic", Span(started_ns, end_ns), limit_mw)
        self.notes["forecast"] = self.forecast(limit_mw)
        self.cli("status")

    def _rebound(self, name: str) -> None:
        """Nobody's new peak: caps rise step by step, and the site draws no more than it did before."""
        self.head("Clear: caps rise step by step, so that the site makes no new peak")
        span = self.give_back()
        self.notes[name] = (span.start_ns, span.end_ns)

    def _equal(self, story: dict[str, float], limit_mw: int) -> None:
        """The same limit, jobs and floors once more, every job cut alike: what sharing by measured cost is worth."""
        self.head('The same limit once more under policy "equal": every job gives the same share')
        self.set_policy("equal")
        self.watch(story["between_s"], None, "at full power again")
        started_ns = self.set_limit(limit_mw)
        end_ns = self.watch(story["equal_s"], limit_mw, 'policy "equal"').end_ns
        self.act("equal", Span(started_ns, end_ns), limit_mw)
        self._learned()
        self.set_policy("marginal")

    def _learned(self) -> None:
        """What the controller wrote of each job into Slurm, against the job's own counter at this moment."""
        self.say("")
        self.say("What the controller learned of each job, as it stands in Slurm (scontrol show job):")
        self.notes["tags"] = {job.job_id: self.tag_of(job) for job in self.jobs if self.run_of(job)}
        self.read_tokens()
        self.notes["tags_ns"] = time.monotonic_ns()
        self.console.print(learned_table(self.jobs, self.notes["tags"], width=self.console.width))

    def _emergency(self, story: dict[str, float], limit_mw: int, uncapped_mw: int) -> None:
        self._head_of_limit("emergency", limit_mw, uncapped_mw, "floors may be passed")
        started_ns = self.set_limit(limit_mw, "--emergency")
        span = Span(started_ns, self.watch(story["emergency_s"], limit_mw, "emergency limit").end_ns)
        act = self.act("emergency", span, limit_mw)
        passed = [job_id for job_id, run in act.runs.items() if run.get("floor_passed")]
        self.say(
            f"Below their floor at this moment, by order of the emergency: {len(passed)} jobs "
            f"({', '.join(map(str, passed))}). A floor moves with what is learned of its job."
        )
        self.notes["floors_passed"] = passed

    def _end(self) -> None:
        self._rebound("second_rebound")
        self.write("after.json", self.site.snapshot())
        self.write("foreign.json", self.site.foreign)
        self.head("What a user sees of it")
        asked = next(job for job in self.jobs if job.flex == "high")
        self.cli("job", str(asked.job_id))
        self.head("What an admin shows of it")
        self.cli("report", "1", "--html", str(self.out / "report.html"), "--csv", str(self.out / "report"))
