"""Entry point. The node agent is dispatched before click is imported: root code stays small."""

from __future__ import annotations

import os
import sys


def node_words(words: list[str]) -> list[str] | None:
    """What ``slurm-pfi [--config FILE] node ...`` tells the node agent; None for every other command."""
    place = 0
    while place < len(words) and (words[place] == "--config" or words[place].startswith("--config=")):
        place += 2 if words[place] == "--config" else 1
    return words[:place] + words[place + 1 :] if words[place : place + 1] == ["node"] else None


def main() -> int:
    """Run the command line and return its exit code."""
    of_node = node_words(sys.argv[1:])
    if of_node is not None:
        from .node.command import main as node_main

        return node_main(of_node)
    # Many small products: more threads than one get in each other's way, on a busy machine by a factor of ten.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from .cli.root import main as cli_main

    return cli_main()


if __name__ == "__main__":
    sys.exit(main())
