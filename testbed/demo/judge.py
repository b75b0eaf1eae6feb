"""What the demo promised against what was measured, from the files that it left behind."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slurm_pfi.units import format_power

from ..checker.run import check_run
from ..cluster import REPO
from ..observer import Samples, load_samples
from . import figures
from .figures import SECOND_NS, Span
from .tables import Act, acts_table
from .words import Compared, comparison, folded

if TYPE_CHECKING:
    from .story import Story

MUST_CHECK: Final = ("1", "2", "3", "9", "placement")
PEAK_SHARE: Final = 1.01


def judge(story: Story) -> int:
    """Say what was measured and what of it was not reached; writes summary.json. Returns the exit code."""
    samples = load_samples(story.out / "samples.jsonl")
    summary = _summary(story, samples)
    verdict = check_run(story.out)
    unchecked = verdict.unchecked(MUST_CHECK)
    summary["checker"] = {"holds": verdict.holds, "unchecked": list(unchecked)}
    summary["seconds"] = round(time.monotonic() - story.started_s, 1)
    summary["leftovers"] = story.notes.get("leftovers", [])
    summary["own_faults"] = story.notes.get("own_faults", [])
    summary["jobs"] = [job.summary(list(story.acts.values())) for job in story.jobs]

    story.head("What was measured")
    story.console.print(acts_table(summary))
    story.say("")
    story.say(
        "The independent checker, from traces and audit files alone. The numbers are those of its checks; the others "
        "are not for this run. A kernel is a piece of work that a job starts on a GPU."
    )
    story.say(folded(verdict.text(), story.console.width, hang=11), as_it_is=True)
    story.say("")
    story.say(comparison(Compared(**summary["compared"])))
    failed = _not_reached(summary)
    summary["reached"] = not failed
    story.write("summary.json", summary)
    for line in failed:
        story.say(f"NOT REACHED: {line}")
    out = story.out
    where = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    story.say(f"The page: {where}/report.html. Figures: {where}/summary.json, samples.jsonl beside it.")
    story.say(f"{summary['seconds']:.0f} s in all.")
    return 1 if failed else 0


def _summary(story: Story, samples: Samples) -> dict[str, Any]:
    acts = story.acts
    nodes = {node: figures.read_audit(story.out / "nodes" / node / "audit.jsonl") for node in samples.gpus}
    settings = Path(__file__).with_name("demo.toml").relative_to(REPO)
    summary: dict[str, Any] = {"simulated": True, "settings": str(settings), "mix": story.mix}
    for name, key in (("economic", ""), ("equal", "equal_"), ("emergency", "emergency_")):
        act = acts[name]
        read_ns = figures.compliance_ns(nodes, act.span.start_ns)
        excess_w = figures.excess_w(samples, act.limit_mw or 0, Span(read_ns, act.span.end_ns))
        summary[f"{key}limit_w"] = (act.limit_mw or 0) / 1000
        summary[f"{key}compliance_s"] = round((read_ns - act.span.start_ns) / SECOND_NS, 3)
        summary[f"{key}worst_excess_w"] = round(excess_w, 1)
    summary |= _promises(story, samples, acts["before"], acts["economic"])
    summary |= kept_in_windows(story, samples)
    summary |= _tags(story)
    summary |= _rebound(story, samples)
    summary |= _restored(story)
    summary["uncapped_w"] = story.notes["uncapped_mw"] / 1000
    summary["floors_passed"] = story.notes["floors_passed"]
    summary["cli_s"] = story.notes["cli_s"]
    return summary


def _promises(story: Story, samples: Samples, before: Act, economic: Act) -> dict[str, Any]:
    none = next(job for job in story.jobs if job.partition == "urgent")
    five = next(job for job in story.jobs if job.flex == "5%")
    draw_mw = before.runs[five.job_id]["draw_mw"] // len(five.uuids)
    window = economic.span
    prior_mw = min(gpu["requested_mw"] for gpu in story.read("before.json") if gpu["uuid"] in none.uuids)
    return {
        "none_capped": figures.lowest_cap(samples, none.uuids, window) < prior_mw,
        "flex5_loss": round(figures.loss(five.tokens, before.span, window), 4),
        "flex5_cap_w": figures.lowest_cap(samples, five.uuids, window) / 1000,
        "flex5_draw_w": round(draw_mw / 1000, 1),
        "flex5_tested_s": round(figures.seconds_below(samples, five.uuids, draw_mw, window), 1),
    }


def kept_in_windows(story: Story, samples: Samples) -> dict[str, Any]:
    """Throughput kept in the last seconds of either window, of jobs that ran through both: nothing moves any more,
    and the same jobs share the same limit."""
    seconds = story.settings["story"]["compare_s"]
    before = story.acts["before"].settled
    spans = {name: story.acts[name].last(seconds) for name in ("economic", "equal")}
    kept: dict[str, dict[int, float]] = {}
    for name, span in spans.items():
        kept[name] = {}
        for job in story.jobs:
            rate = figures.share_kept(job.tokens, before, span)
            if rate is not None:
                kept[name][job.job_id] = rate
    both = kept["economic"].keys() & kept["equal"].keys()
    gpus = {job.job_id: len(job.uuids) for job in story.jobs}
    total = sum(gpus[job_id] for job_id in both)

    def share(name: str) -> float:
        return round(sum(gpus[job_id] * kept[name][job_id] for job_id in both) / total, 4)

    jobs = [job for job in story.jobs if job.job_id in both]
    caps = {
        name: [figures.mean_cap_w(samples, job.uuids, span) for job in jobs] for name, span in spans.items()
    }
    gaps = (abs(one - other) / other for one, other in zip(caps["economic"], caps["equal"], strict=True))
    forecast = story.notes["forecast"]
    compared = Compared(
        kept=share("economic"),
        kept_equal=share("equal"),
        cap_gap=round(sum(len(job.uuids) * gap for job, gap in zip(jobs, gaps, strict=True)) / total, 4),
        step=forecast["certificate"]["step"] if forecast else None,
        measured=sum(run["measured"] for run in forecast["runs"]) if forecast else None,
        jobs=len(forecast.get("runs", jobs)),
    )
    return {
        "kept": compared.kept,
        "kept_equal": compared.kept_equal,
        "kept_jobs": len(both),
        "compared": asdict(compared),
    }


def _tags(story: Story) -> dict[str, Any]:
    """The loss in every tag against the job's own token counter, since it began."""
    errors = []
    for job in story.jobs:
        tag = story.notes["tags"].get(job.job_id)
        own = figures.loss_since_start(job.tokens, story.acts["before"].settled, story.notes["tags_ns"])
        if tag is not None and tag.loss is not None and own is not None:
            errors.append(abs(tag.loss - own))
    measured = sum(1 for tag in story.notes["tags"].values() if tag is not None and tag.source == "measured")
    return {
        "tag_loss_error": round(max(errors), 4) if errors else None,
        "tags_with_loss": len(errors),
        "tags_measured": measured,
    }


def _rebound(story: Story, samples: Samples) -> dict[str, Any]:
    """The site's peak in the rebound after the first window, against its draw before it."""
    start_ns, end_ns = story.notes["rebound"]
    end_ns = min(end_ns, start_ns + round(story.settings["times"]["rebound_s"] * SECOND_NS))
    peak_mw = max(sample.site_draw_mw or 0 for sample in samples.between(start_ns, end_ns))
    return {
        "rebound_s": round((end_ns - start_ns) / SECOND_NS, 1),
        "rebound_peak_w": round(peak_mw / 1000, 1),
    }


def _restored(story: Story) -> dict[str, int]:
    before = {gpu["uuid"]: gpu for gpu in story.read("before.json")}
    after = story.read("after.json")
    right = sum(
        gpu["requested_mw"] == gpu["effective_mw"] == before[gpu["uuid"]]["requested_mw"] for gpu in after
    )
    return {"restored_gpus": right, "restored_wrong": len(after) - right}


def _not_reached(summary: dict[str, Any]) -> list[str]:
    """Every promise of the demo that its own measurement does not bear out."""
    error = summary["tag_loss_error"]
    allowed_w = summary["uncapped_w"] * PEAK_SHARE
    promises = {
        "the last GPU was at its new cap more than 1 s after the limit": summary["compliance_s"] <= 1,
        "the same in the emergency": summary["emergency_compliance_s"] <= 1,
        "the site drew more than the economic limit": summary["worst_excess_w"] <= 0,
        'the same with policy "equal"': summary["equal_worst_excess_w"] <= 0,
        "the site drew more than the emergency limit": summary["emergency_worst_excess_w"] <= 0,
        "a job that was never to be slowed was capped": not summary["none_capped"],
        "the job that was promised 5 % lost more": summary["flex5_loss"] <= 0.05,
        "its promise was not put to the test for 10 s": summary["flex5_tested_s"] >= 10,
        "sharing by measured cost kept less than an equal cut": summary["kept"]
        >= summary["kept_equal"] - 0.005,
        "a tag's loss is further than 1 point from the job's own counter": error is not None
        and error <= 0.01,
        "fewer than four jobs have a measured tag": summary["tags_measured"] >= 4,
        f"the site drew more than {format_power(round(allowed_w * 1000))} while caps rose": summary[
            "rebound_peak_w"
        ]
        <= allowed_w,
        "not every GPU is back at its prior limit": summary["restored_wrong"] == 0,
        "the checker found something": summary["checker"]["holds"] and not summary["checker"]["unchecked"],
        "something was left running or a node was drained": not summary["leftovers"],
        "a daemon told of a fault in itself": not summary["own_faults"],
        "no floor was passed in the emergency, so that was not shown": bool(summary["floors_passed"]),
    }
    return [text for text, kept in promises.items() if not kept]
