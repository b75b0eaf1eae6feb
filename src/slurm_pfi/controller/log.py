"""How the controller logs: a line for each entry, and tracebacks without what variables held."""

from __future__ import annotations

import sys

import structlog


def set_up_logging() -> None:
    """Plain tracebacks, also where rich is installed: with it structlog would show every local variable.

    Of the state of a site that is megabytes of log, and half a minute in the loop that holds the limits.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.dev.set_exc_info,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    )
