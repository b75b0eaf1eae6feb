"""A counter that lies by no more than curves allow: what the GPUs did, read through NVML, finds it and rules."""

from __future__ import annotations

import pytest

from slurm_pfi.slurm.tag import find_tag
from testbed.site import Site

from ..site_fixture import TRAIN, hold, set_limit, small_site, wait_as, wait_seen

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(times={"tag_refresh_s": 2, "learn_s": 2, "baseline_s": 5, "activity_s": 1})
PARKED_W = 200
BESIDE_W = 2000
GPUS = 8
CAP_W = 480


@pytest.mark.parametrize("factor", [1 / 1.05, 1.05])
def test_a_lie_of_5_percent_is_found_by_what_the_gpus_did(site: Site, factor: float) -> None:
    honest = site.submit(TRAIN, gpus=1, flex="high", where="n1")
    liar = site.submit(TRAIN, gpus=1, flex="high", where="n2", lie=factor)
    site.wait_training(honest, liar)
    wait_seen(site, honest, liar)
    hold(site, 12)
    set_limit(site, BESIDE_W + (GPUS - 2) * PARKED_W + 2 * CAP_W)
    wait_as("the lie is found", lambda: bool(site.jobs()[liar]["disputed"]), 40)
    said = " ".join(site.cli("job", str(liar)).stdout.split())
    print(said)  # noqa: T201
    assert "by its counter" in said
    assert "its counter and its GPUs disagree: at a cap of " in said
    assert "estimated from the activity of its GPUs" in said
    assert not site.jobs()[honest]["disputed"]
    hold(site, 6)
    shown = site.jobs()
    assert not shown[honest]["disputed"]
    assert abs(shown[liar]["cap_mw"] - shown[honest]["cap_mw"]) <= 0.05 * shown[honest]["cap_mw"]
    tag = find_tag(shown[liar]["tag"])
    assert tag is not None
    assert tag.source == "default"
