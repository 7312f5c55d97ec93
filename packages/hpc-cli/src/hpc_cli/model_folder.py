"""Where a model lies: a folder of this machine, or one fetched from the Hugging Face hub.

Only data is ever fetched. A checkpoint's Python files and pickled weights are never asked for, so nothing
of a model can run here.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpc_cli.errors import CommandError

__all__ = ["resolve_model"]

FETCHED = ("*.safetensors", "*.json", "*.jinja")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str) -> Path:
    """The folder that holds `model`, a path or a hub id (`owner/name`). A folder that exists wins.

    Fetches a hub model into the hub's own cache, or takes it from there. Raises CommandError if there is
    neither such a folder nor such a model, or the hub cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CommandError(
            f"model {model!r} is a file; give the folder that holds config.json and *.safetensors"
        )
    if not HUB_ID.fullmatch(model):
        raise CommandError(
            f"model {model!r}: there is no such folder, and it is no hub id either (those read owner/name)"
        )
    return _fetch(model)


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and most starts need no hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(FETCHED)))
    except GatedRepoError as error:
        raise CommandError(
            f"model {hub_id!r} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CommandError(
            f"model {hub_id!r}: the hub has no such model (or hides it), and there is no such folder here"
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise CommandError(
            f"model {hub_id!r}: there is no such folder here, the hub cannot be reached, and its cache on "
            "this machine does not hold the model. Go online once, or give the path of a model folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CommandError(f"model {hub_id!r} could not be fetched: {error}") from error
