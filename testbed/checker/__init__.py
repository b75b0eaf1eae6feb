"""Proves the invariants of a whole run from what the run left behind.

Imports nothing of slurm_pfi: a checker that shares code with the checked shares its mistakes. The formats are those
of docs/design.md, "Files and formats". ``python -m testbed.checker RUN_DIR`` is the command line.
"""

from .run import check_run
from .verdict import Finding, Result, Verdict

__all__ = ["Finding", "Result", "Verdict", "check_run"]
