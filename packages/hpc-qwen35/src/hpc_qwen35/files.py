"""Which files of a model folder may be opened."""

from __future__ import annotations

from pathlib import Path

from hpc_qwen35.errors import CheckpointError

__all__ = ["model_file"]


def model_file(folder: Path, name: str) -> Path | None:
    """The regular file `name` of a model folder, links followed, or None if there is none.

    A link may lead to a file of the folder itself, or, as in a hub's cache, from
    `.../snapshots/<revision>` to `.../blobs`. A name comes from the folder's own index, so it must be plain.

    Raises:
        CheckpointError: the name has a path in it or is too long for the file system, the file is no regular
            file, or a link leads elsewhere, nowhere or to itself.
    """
    if not name or Path(name).name != name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name")
    root = folder.resolve()
    path = root / name
    try:
        if not path.is_symlink() and not path.exists():
            return None
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is a link to {path.resolve()}, which does not exist") from None
    except (OSError, RuntimeError) as error:  # Python 3.12 and older raise RuntimeError for a loop of links
        raise CheckpointError(f"{path} cannot be opened: {error}") from error
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{path} is a link to {target}, outside the model folder: put the file itself there"
        )
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    return target
