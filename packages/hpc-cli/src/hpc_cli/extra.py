"""The extra `serve`: what a plain install of this package lacks, found without importing it."""

from __future__ import annotations

import importlib.util

from hpc_cli.errors import CommandError

__all__ = ["require_serving_extra"]

PARTS = ("hpc_qwen35", "hpc_server", "httpx")


def require_serving_extra(command: str) -> None:
    """Raise CommandError, which says what to install, unless all that `command` needs is there."""
    missing = [name for name in PARTS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"{command} needs {', '.join(missing)}: install them with `pip install 'hpc-cli[serve]'`"
        )
