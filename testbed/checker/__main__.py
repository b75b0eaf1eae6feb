"""``python -m testbed.checker RUN_DIR``: exit 0 when all holds, 1 when not, 2 on wrong use."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .run import LATE_S, check_run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.checker", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="the whole verdict as one JSON object")
    parser.add_argument("--late-s", type=float, default=LATE_S, help="how late a limit may come into force")
    parser.add_argument(
        "--require", default="", metavar="1,3,9", help="invariants that must have had something to check"
    )
    given = parser.parse_args(arguments)
    if not given.run_dir.is_dir():
        parser.error(f"{given.run_dir} is not a folder")
    verdict = check_run(given.run_dir, late_s=given.late_s)
    required = tuple(name for name in given.require.split(",") if name)
    try:
        unchecked = verdict.unchecked(required)
    except KeyError as error:
        parser.error(f"--require: no invariant {error}; there are 1, 2, 3, 7, 9, placement and files")
    if given.json:
        print(json.dumps({**verdict.as_json(), "unchecked": unchecked}))
    else:
        print(verdict.text())
        for name in unchecked:
            print(f"required, but nothing to check: {name}")
    return 0 if verdict.holds and not unchecked else 1


if __name__ == "__main__":
    sys.exit(main())
