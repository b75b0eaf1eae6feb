"""What the measuring commands with a quick form share: their command line, and where their figures go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from testbed.cluster_files import REPO


def wants_quick(name: str, argv: list[str] | None) -> bool:
    """Whether ``python -m bench.NAME`` was asked for its quick form."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument(
        "--quick", action="store_true", help="small and short: whether it works, not what it costs"
    )
    return bool(parser.parse_args(argv).quick)


def tell(name: str, result: dict[str, Any], table: Callable[[dict[str, Any]], str], *, quick: bool) -> None:
    """Write build/bench/NAME.json and print the table; what is quick lies apart from what counts."""
    target = REPO / ("build/bench/quick" if quick else "build/bench") / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**result, "quick": quick}, indent=2) + "\n")
    print(table(result))
    print(f"written to {target.relative_to(REPO)}")
