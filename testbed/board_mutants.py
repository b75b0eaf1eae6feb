"""Shared GPUs, each of their rules taken out: its own test must notice."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

BOARDS: Final = "tests/test_boards.py::test_"
NODE: Final = "tests/test_boards_node.py::test_"
MAPPING: Final = "tests/test_gpu_mapping.py::test_"

BOARD_MUTANTS: Final = (
    Mutant(
        name="a-shared-gpu-takes-the-lowest-floor",
        invariant="7, shared GPUs",
        file="controller/shares.py",
        old="        floor_mw = max(demand.floor_mw for demand in demands)\n",
        new="        floor_mw = min(demand.floor_mw for demand in demands)\n",
        tests=(BOARDS + "a_shared_gpu_goes_down_to_the_higher_floor_of_its_runs_and_no_further",),
    ),
    Mutant(
        name="who-allows-nothing-is-outvoted",
        invariant="7, shared GPUs",
        file="controller/shares.py",
        old="flex_none=any(",
        new="flex_none=all(",
        tests=(BOARDS + "an_emergency_takes_a_gpu_of_one_that_allows_nothing_last",),
    ),
    Mutant(
        name="runs-on-one-gpu-are-strangers",
        invariant="7, shared GPUs",
        file="controller/boards.py",
        old="                if other != number:\n                    links",
        new="                if False:\n                    links",
        tests=(BOARDS + "runs_that_hang_together_by_others_have_one_cap",),
    ),
    Mutant(
        name="a-shared-gpu-counts-once-for-each-run",
        invariant="7, shared GPUs",
        file="controller/shares.py",
        old="tuple({gpu.key: gpu for view in views for gpu in commandable_gpus(view, self.site)}.values())",
        new="tuple(gpu for view in views for gpu in commandable_gpus(view, self.site))",
        tests=(BOARDS + "a_shared_gpu_goes_down_to_the_higher_floor_of_its_runs_and_no_further",),
    ),
    Mutant(
        name="a-job-file-that-stayed-behind-is-joined",
        invariant="7, shared GPUs",
        file="controller/boards.py",
        old="    return view.job is not None and view.read_due_ns is None and not view.reading\n",
        new="    return True\n",
        tests=(BOARDS + "nobody_joins_a_run_that_slurm_has_not_confirmed",),
    ),
    Mutant(
        name="who-joins-asks-for-no-watts",
        invariant="7, shared GPUs",
        file="controller/shares.py",
        old="        if one.waiting and floors_mw + more_mw > budget_mw + unparked_mw:\n",
        new="        if one.waiting and not asks.joins and floors_mw + more_mw > budget_mw + unparked_mw:\n",
        tests=(BOARDS + "who_comes_to_a_shared_gpu_waits_until_what_both_need_fits",),
    ),
    Mutant(
        name="a-join-raises-before-it-is-acknowledged",
        invariant="7, shared GPUs",
        file="controller/planning.py",
        old="        ((run, node), min(caps))\n",
        new="        ((run, node), max(caps))\n",
        tests=(
            BOARDS + "who_joins_two_gpus_of_different_caps_raises_none_before_others_are_known_to_be_lower",
        ),
    ),
    Mutant(
        name="a-new-controller-takes-from-a-sharer-what-it-had",
        invariant="7, shared GPUs",
        file="controller/core.py",
        old=' or (phase == "waiting" and self._was_there(state, view, flex)):\n',
        new=":\n",
        tests=(BOARDS + "a_new_controller_takes_from_no_sharer_what_it_had_though_the_limit_is_infeasible",),
    ),
    Mutant(
        name="who-does-not-fit-keeps-others-from-a-shared-gpu",
        invariant="7, shared GPUs",
        file="controller/shares.py",
        old="        if not claimed.isdisjoint(asks.claims):\n            continue\n",
        new="        if not claimed.isdisjoint(asks.claims):\n            continue\n        claimed |= asks.claims\n",
        tests=(BOARDS + "one_whose_need_does_not_fit_keeps_nobody_else_from_a_shared_gpu",),
    ),
    Mutant(
        name="a-new-controller-plans-without-slurms-word",
        invariant="7, shared GPUs",
        file="controller/core.py",
        old="        return heard and all(answered(view) for view in state.runs.values() if view.shares)\n",
        new="        return heard\n",
        tests=(BOARDS + "a_new_controller_waits_for_slurms_word_on_who_shares",),
    ),
    Mutant(
        name="a-shared-draw-is-everybodys",
        invariant="7, shared GPUs",
        file="controller/core.py",
        old="        if shared := shares_now(view, nodes, report):\n",
        new="        if (shared := shares_now(view, nodes, report)) and False:\n",
        tests=(BOARDS + "who_shares_is_not_measured_and_the_draw_is_nobodys",),
    ),
    Mutant(
        name="what-a-cap-cost-while-sharing-is-nothing",
        invariant="7, shared GPUs",
        file="controller/measuring/record.py",
        old="            or self.shared\n",
        new="",
        tests=(BOARDS + "what_a_cap_cost_while_sharing_is_not_known",),
    ),
    Mutant(
        name="a-neighbours-plan-goes-below-the-park-cap",
        invariant="7, shared GPUs",
        file="node/limits.py",
        old="        if step.park_cap_mw is not None and len(caps) < len(here):\n",
        new="        if False:\n",
        tests=(NODE + "a_run_that_is_not_admitted_has_the_park_cap_at_least",),
    ),
    Mutant(
        name="a-shared-gpu-takes-the-lowest-cap",
        invariant="7, shared GPUs",
        file="node/limits.py",
        old="        cap_mw, run = max(((cap",
        new="        cap_mw, run = min(((cap",
        tests=(NODE + "a_tenant_that_did_not_agree_keeps_the_board_uncapped",),
    ),
    Mutant(
        name="a-board-counts-for-each-slice",
        invariant="7, shared GPUs",
        file="node/intake.py",
        old="        gpus=tuple(dict.fromkeys(positions[place] for place in seen.positions if place in positions)),\n",
        new="        gpus=tuple(positions[place] for place in seen.positions if place in positions),\n",
        tests=(NODE + "a_run_with_several_slices_has_their_board_once",),
    ),
    Mutant(
        name="a-board-divided-anew-is-not-noticed",
        invariant="7, shared GPUs",
        file="node/intake.py",
        old="    if event.map_changed:\n",
        new="    if False:\n",
        tests=(NODE + "a_changed_map_is_read_at_once_and_not_again_and_again",),
    ),
    Mutant(
        name="a-slice-that-leads-nowhere-harms-no-other",
        invariant="7, shared GPUs",
        file="gpu/mapping.py",
        old="        elif place.is_slice and lost:\n",
        new="        elif False:\n",
        tests=(MAPPING + "a_slice_that_leads_nowhere_takes_the_other_slices_with_it",),
    ),
    Mutant(
        name="a-gpu-and-a-slice-of-it-are-told-apart",
        invariant="7, shared GPUs",
        file="gpu/mapping.py",
        old="        elif place.minor in whole and claims[place.minor] > 1:\n",
        new="        elif False:\n",
        tests=(MAPPING + "a_whole_gpu_and_slices_of_it_are_not_told_apart",),
    ),
)
