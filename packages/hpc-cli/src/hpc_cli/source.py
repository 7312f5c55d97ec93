"""Which model is served, and what it is called."""

from __future__ import annotations

from pathlib import Path

import attrs

from hpc_cli.model_folder import resolve_model
from hpc_qwen35.bundled import tiny_folder

__all__ = ["BUNDLED_NAME", "Source", "find_source"]

BUNDLED_NAME = "hpc-tiny"


@attrs.frozen
class Source:
    """A model folder, its name in the API, and where it is from in words."""

    folder: Path
    name: str
    shown: str


def find_source(model: str | None, served_name: str | None) -> Source:
    """The folder of `model`, or of the bundled one. Raises CommandError if there is none."""
    if model is None:
        return Source(tiny_folder(), served_name or BUNDLED_NAME, "the package (bundled)")
    folder = resolve_model(model)
    # A hub id is a name already; of a path the last part is one.
    name = folder.resolve().name if Path(model).expanduser().is_dir() else model
    return Source(folder, served_name or name, str(folder))
