"""A whole site for all tests of a module, and the proof after each of them that nothing was left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.site import Site, SiteOptions

from ..site_fixture import clear_limits, hook_faults, prove, small_site


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """One site for all tests of a module, as its ``SITE_OPTIONS`` or the fixture's parameter says."""
    options = getattr(request, "param", None) or getattr(request.module, "SITE_OPTIONS", None) or small_site()
    assert isinstance(options, SiteOptions)
    with Site(options) as started:
        yield started


@pytest.fixture(autouse=True)
def _site_left_whole(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """After a test: no job, no limit, every GPU as before, no fault of hooks or daemons, and the checker agrees."""
    yield
    if "site" not in request.fixturenames:
        return
    used: Site = request.getfixturevalue("site")
    if used.cluster.layout.slurm_conf.exists():
        used.cluster.cancel_all()
    if used.is_running("controller"):
        clear_limits(used)
        used.wait_restored()
    assert hook_faults(used) == []
    assert used.own_faults() == []
    prove(used, tmp_path / "proof")
