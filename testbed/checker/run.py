"""All checks of one run folder, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .audited import check_audit, check_foreign, find_changes
from .budget import check_sum, check_worst_case
from .caps import check_caps
from .files import FILES, load_run
from .peak import check_rebounds
from .placement import check_placement
from .plans import Plans, RunMap
from .site import Site
from .verdict import Result, Verdict

LATE_S: Final = 5.0
NOTICE_S: Final = 10.0
NEWS_S: Final = 3.0


def check_run(
    path: Path, *, late_s: float = LATE_S, notice_s: float = NOTICE_S, news_s: float = NEWS_S
) -> Verdict:
    """Check a run folder.

    ``late_s``: how long after its ``set`` a limit may come into force. ``notice_s``: how long an agent may take to
    notice a foreign write. ``news_s``: how old a read-back may be before the controller must know it.
    Never raises on what the files hold: that is a finding.
    """
    run = load_run(path)
    site = Site(run)
    plans, runs = Plans(run), RunMap(run)
    changes = find_changes(run, late_s)
    results = (
        check_sum(run, site),
        check_worst_case(run, site, plans, runs, news_s),
        check_caps(run, site, plans, runs, changes),
        check_foreign(run, plans, runs, changes, notice_s),
        check_audit(run, site, plans, changes, late_s),
        check_placement(run, site, plans, runs),
        check_rebounds(run, site),
    )
    files = Result(
        FILES,
        "what the run left can be read",
        run.lines,
        "lines",
        tuple(run.findings),
        notes=tuple(run.notes),
    )
    return Verdict(run_dir=str(path), zero_ns=run.first_ns, results=(files, *results))
