"""Run the demo; exit 0 when everything that it promises was measured to hold."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from ..cluster import REPO, ClusterError
from .story import MIXES, Story


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=REPO / "build/demo", help="where results go")
    parser.add_argument("--mix", choices=sorted(MIXES), default="one", help="which jobs run")
    given = parser.parse_args()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # A closed terminal must not leave a cluster behind; and who is started in the background has SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    story = Story(given.out, given.mix)
    try:
        return story.tell()
    except KeyboardInterrupt:
        print(
            "\ninterrupted: the limit was cleared and everything that was started has been stopped",
            file=sys.stderr,
        )
        return 130
    except ClusterError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
