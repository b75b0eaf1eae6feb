"""Entry point. The node agent is dispatched before click is imported: root code stays small."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    if sys.argv[1:2] == ["node"]:
        from .node.command import main as node_main

        return node_main(sys.argv[2:])
    # Many small products: more threads than one get in each other's way, on a busy machine by a factor of ten.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from .cli.root import main as cli_main

    return cli_main()


if __name__ == "__main__":
    sys.exit(main())
