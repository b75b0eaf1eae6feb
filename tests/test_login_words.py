"""A run by its tag alone: like the controller's answer where a tag tells it, unknown where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.cli.common import SIMULATED
from slurm_pfi.cli.job import tag_lines
from slurm_pfi.cli.login_words import COLUMNS, NO_TAG, OLD_TAG, TAG_TO_COME, row_of, tag_of, view_of
from slurm_pfi.cli.tables import fit
from slurm_pfi.controller.answers.jobs import job_view
from slurm_pfi.controller.views import run_view
from slurm_pfi.slurm.backend import Special
from slurm_pfi.slurm.tag import SOURCES, format_tag
from slurm_pfi.slurm.tagged import TaggedRun

from .slurm_samples import FULL_TAG as TAG
from .slurm_samples import TAG_UNIX_S as AT_S
from .test_controller_core import NOW_S, RUN, S, Site, gpu


def run(comment: str = f"a note {format_tag(TAG)}", **changes: Any) -> TaggedRun:
    whole = TaggedRun(
        source="squeue",
        job_id=79,
        parent=77,
        spec="77_3",
        restart=0,
        cluster="c",
        user="anna",
        account="phys",
        partition="main",
        name="L70 FT",
        state="RUNNING",
        submit_unix_s=AT_S - 4000,
        start_unix_s=AT_S - 3600,
        end_unix_s=Special.NOT_SET,
        nodes=("n1", "n2"),
        gpus=8,
        admin_comment=comment,
    )
    return replace(whole, **changes)


def controllers() -> tuple[dict[str, Any], dict[str, Any]]:
    """What a controller tells of a run: as a row, and in full."""
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("G", RUN, draw_mw=600_000))
    site.identify(RUN, "n1")
    site.cycle()
    view = site.state.runs[RUN]
    config, science = site.config, site.core.science
    return run_view(view, site.state, 1000 * S), job_view(view, site.state, config, science, 1000 * S, NOW_S)


def test_programs_find_every_field_of_the_controller_s_answer() -> None:
    """What a tag cannot tell is there and unknown; never missing, never zero."""
    row, whole = controllers()
    assert set(row) <= set(row_of(run()))
    assert {*whole, "asked_unix_s", "events", "events_trouble", "other_runs"} <= set(view_of(run()))
    assert set(whole["cost"]) == set(view_of(run())["cost"])


def test_a_tag_tells_what_it_tells() -> None:
    told = view_of(run())
    assert (told["run"], told["spec"], told["source"], told["flex"]) == ("c:79.0", "77_3", "squeue", "10%")
    assert (told["cost"]["loss"], told["cost"]["saved_wh"], told["cost"]["capped_s"]) == (0.031, 840, 3120.0)
    assert told["pfi"] == {
        "value": 1.83,
        "low": 1.71,
        "high": 1.95,
        "source": "measured",
        "grid_w": [200, 300, 400, 500, 600, 700],
    }
    assert told["max_loss"] == pytest.approx(0.1)
    unknown = {"loss", "draw_mw", "cap_mw", "known_s", "events", "floor_passed", "state"}
    assert {told[name] for name in unknown} == {None}
    assert told["simulated"] is False
    lines = tag_lines(told, 80)
    assert lines[0] == "job 77_3 of anna: running"
    assert lines[1] == "8 GPUs on n[1-2], partition main, account phys"
    assert "  caps held it down for 52 min" in lines
    assert "  3.1 % of its throughput since its start, by its own counter" in lines
    assert "  840 Wh, all its GPUs" in lines


def test_a_simulation_is_called_so() -> None:
    told = view_of(run(format_tag(replace(TAG, simulated=True))))
    assert told["simulated"] is True
    assert SIMULATED in tag_lines(told, 80)
    assert SIMULATED not in tag_lines(view_of(run()), 80)
    assert view_of(run(""))["simulated"] is None, "no tag, nothing known"


def test_unknown_in_the_tag_stays_unknown() -> None:
    tag = replace(TAG, loss=None, energy_wh=None, capped_s=0.0, flex="auto", pfi_low=None, pfi_high=None)
    told = view_of(run(format_tag(tag), gpus=None, restart=None, cluster=""))
    assert (told["cost"]["loss"], told["cost"]["saved_wh"], told["max_loss"]) == (None, None, None)
    assert (told["run"], told["restart"], told["gpus"]) == (None, None, None)
    text = "\n".join(tag_lines(told, 80))
    assert "GPUs not known on n[1-2]" in text
    assert "Cost\n  not known" in text
    assert "Saved\n  not known" in text
    assert "nothing: no cap has bound it" in text
    _, cells = fit(COLUMNS, [row_of(run(format_tag(tag), gpus=None))], 200)[0]
    assert cells.split()[4:6] == ["?", "auto"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"admin_comment": ""}, NO_TAG),
        ({"admin_comment": "JS1:H4sI pfi=none of ours"}, NO_TAG),
        ({"admin_comment": "", "source": "sacct", "state": "COMPLETED"}, NO_TAG),
        ({"admin_comment": "", "source": "sacct", "state": "RUNNING"}, TAG_TO_COME),
        ({"restart": 1}, OLD_TAG),  # AdminComment outlives a requeue
        ({"restart": None, "start_unix_s": AT_S + 60}, OLD_TAG),
        ({"state": "PENDING", "start_unix_s": Special.NOT_SET}, OLD_TAG),
    ],
)
def test_no_tag_of_another_run_is_taken_for_this_one_s(changes: dict[str, Any], why: str) -> None:
    one = replace(run(), **changes)
    assert tag_of(one) == (None, why)
    told = view_of(one)
    assert (told["flex"], told["pfi"], told["cost"]["capped_s"]) == (None, None, None)
    assert f"nothing: {why}" in " ".join(" ".join(tag_lines(told, 80)).split())


def test_the_tag_of_a_later_run_is_its_own() -> None:
    tag = replace(TAG, restart=2)
    assert tag_of(run(format_tag(tag), restart=2))[0] == tag
    assert tag_of(run(format_tag(tag), restart=0)) == (None, OLD_TAG)


def test_a_tag_of_the_minute_in_which_the_run_began_is_its_own() -> None:
    assert tag_of(replace(run(), start_unix_s=AT_S + 59))[0] == TAG


TEXT = st.text(max_size=60)


@given(
    name=TEXT,
    account=TEXT,
    state=st.sampled_from(["RUNNING", "COMPLETED", "NODE_FAIL", "PENDING"]),
    source=st.sampled_from(SOURCES),
    loss=st.none() | st.floats(-0.99, 0.99),
    energy_wh=st.none() | st.integers(-(10**9), 10**9),
    width=st.integers(40, 120),
)
def test_every_run_has_honest_printable_words(
    name: str, account: str, state: str, source: Any, loss: float | None, energy_wh: int | None, width: int
) -> None:
    tag = replace(TAG, source=source, loss=loss, energy_wh=energy_wh)
    one = run(format_tag(tag), name=name, account=account, state=state, end_unix_s=AT_S)
    lines = tag_lines(view_of(one), width)
    assert all(line.isprintable() for line in lines)
    if state != "PENDING":
        assert ("not known" in lines[lines.index("Saved") + 1]) == (energy_wh is None)
        assert ("not known" in lines[lines.index("Cost") + 1]) == (loss is None)
