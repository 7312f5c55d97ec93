"""Models that travel inside the package, in the layout of a downloaded checkpoint."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["tiny_folder"]


def tiny_folder() -> Path:
    """The folder of the tiny model: config, weights, tokenizer, chat template.

    FileNotFoundError if the package was not installed as files on disk: weights are mapped, not read.
    """
    folder = files(__package__).joinpath("tiny")
    if not isinstance(folder, Path) or not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the bundled model is not a folder on disk but {folder}")
    return folder
