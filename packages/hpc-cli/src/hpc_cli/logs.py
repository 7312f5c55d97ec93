"""Where log records go: one line each on stderr, with the time of day."""

from __future__ import annotations

import logging
import sys

__all__ = ["start_logging"]

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
TIME = "%H:%M:%S"


def start_logging(level: str) -> None:
    """Log everything of `hpc_*` from `level` on, and what other libraries say from WARNING on.

    level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, TIME))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    for name in ("hpc_index", "hpc_qwen35", "hpc_server", "hpc_cli"):
        logging.getLogger(name).setLevel(level.upper())
