"""A costly answer is made again only when its age outweighs its cost."""

from __future__ import annotations

import itertools

import pytest

from slurm_pfi.controller.answers.fresh import Fresh


def test_it_is_made_again_after_four_times_what_it_took() -> None:
    now_s = [100.0]
    numbers = itertools.count()

    def make() -> int:
        now_s[0] += 0.25
        return next(numbers)

    fresh = Fresh(make, clock=lambda: now_s[0], spent=lambda: now_s[0])
    assert fresh.get() == 0
    now_s[0] += 0.99
    assert fresh.get() == 0
    now_s[0] += 0.02
    assert fresh.get() == 1


def test_what_failed_is_not_kept() -> None:
    broken = [True]

    def make() -> str:
        if broken[0]:
            raise OSError("no")
        return "yes"

    fresh = Fresh(make)
    with pytest.raises(OSError, match="no"):
        fresh.get()
    broken[0] = False
    assert fresh.get() == "yes"
