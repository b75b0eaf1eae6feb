"""Mutants of what stands between a SIGKILL and a cap that is left behind, lifted early, or taken for a prior limit."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

_SETS: Final = "tests/test_node_sets.py"
_PRIORS: Final = "tests/test_node_priors.py"
_AGENT: Final = "tests/test_node_agent.py"
_RESTORE: Final = "tests/test_node_restore.py"
_JOURNAL: Final = "tests/test_journal.py"

CHAOS_MUTANTS: Final = (
    Mutant(
        name="a-set-that-lands-late-is-somebody-elses",
        invariant="3",
        file="node/sets.py",
        old="    late_mw = next((mw for mw in gpu.lost_mw if near(mw, found_mw)), None)\n",
        new="    late_mw = None\n",
        tests=(f"{_SETS}::test_a_set_that_hung_and_is_done_long_after_is_ours_and_goes",),
    ),
    Mutant(
        name="a-lost-set-comes-off-the-record",
        invariant="4",
        file="node/sets.py",
        old="            issued_mw=tuple(dict.fromkeys((*undo.issued_mw, *gpu.lost_mw))),\n",
        new="            issued_mw=undo.issued_mw,\n            lost_mw=(),\n",
        tests=(f"{_SETS}::test_a_set_that_hung_and_is_done_long_after_is_ours_and_goes",),
    ),
    Mutant(
        name="a-restorer-lifts-a-window-without-end",
        invariant="3",
        file="node/restorer.py",
        old="        if is_open and ends_ns is None:\n",
        new="        if not is_open and ends_ns is not None:\n",
        tests=(f"{_AGENT}::test_a_restorer_that_nobody_dismissed_lifts_nothing_in_a_later_window",),
    ),
    Mutant(
        name="a-restorer-that-has-just-begun-stays",
        invariant="one actor a node",
        file="node/command.py",
        old="        late = dismiss(node, paths)  # a restorer",
        new="        late = None  # a restorer",
        tests=(f"{_AGENT}::test_a_restorer_that_began_while_an_agent_looked_for_it_is_dismissed_too",),
    ),
    Mutant(
        name="gpus-are-restored-one-after-another",
        invariant="3",
        file="node/restore.py",
        old="    await asyncio.gather(*tasks)\n",
        new="    for task in tasks:\n        await task\n",
        tests=(f"{_RESTORE}::test_a_gpu_that_hangs_and_one_that_fails_hold_up_nobody",),
    ),
    Mutant(
        name="an-unwritten-entry-is-forgotten",
        invariant="4",
        file="node/runtime.py",
        old="            self._unwritten[action.entry.uuid] = action\n",
        new="",
        tests=(f"{_AGENT}::test_a_rest_that_could_not_be_written_down_is_as_soon_as_it_can_be",),
    ),
    Mutant(
        name="a-damaged-entry-blocks-its-gpu-for-ever",
        invariant="3",
        file="node/intake.py",
        old="        if info.uuid in old and not old[info.uuid].blocked:\n",
        new="        if info.uuid in old:\n",
        tests=(f"{_PRIORS}::test_a_gpu_whose_entry_was_put_right_is_taken_up_again",),
    ),
    Mutant(
        name="an-entry-grows-beyond-what-is-read",
        invariant="4",
        file="gpu/journal.py",
        old="        if len(data) > _MAX_BYTES:",
        new="        if len(data) > 10 * _MAX_BYTES:",
        tests=(f"{_JOURNAL}::test_what_could_not_be_read_again_is_not_written",),
    ),
    Mutant(
        name="entries-of-replaced-gpus-pile-up",
        invariant="4",
        file="gpu/journal.py",
        old="                    self.remove(uuid)\n",
        new="                    pass\n",
        tests=(f"{_JOURNAL}::test_entries_of_replaced_gpus_go_once_their_limits_are_gone",),
    ),
    Mutant(
        name="a-limit-that-a-restore-met-is-lost",
        invariant="7",
        file="node/restore.py",
        old="        found_mw = limits.replaced_mw\n",
        new="        found_mw = None\n",
        tests=(
            "tests/test_node_restore.py::test_a_limit_written_just_before_the_restore_is_put_back_and_told",
        ),
    ),
)
