"""``slurm-pfi study``: how well the policies do, on model data and on measured curves."""

from __future__ import annotations

import click

from . import curves, floors, paper


@click.group(short_help="Try the policies on many sets of runs.")
def study() -> None:
    """Try the policies on many sets of runs, and print what each of them loses."""


study.add_command(paper.paper)
study.add_command(curves.curves)
study.add_command(floors.floors)
