"""Where a model is looked for, what is fetched, and what a person is told when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from hpc_cli.errors import CommandError
from hpc_cli.model_folder import resolve_model


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """A path that is a folder needs no hub."""
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`owner/name` below the working folder is that folder."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == Path("owner/name")


def test_a_file_is_refused(tmp_path: Path) -> None:
    """The weights file itself is a likely slip; the message says what to give."""
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CommandError, match=r"is a file; give the folder that holds config\.json"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("model", ["./missing", "/nowhere/at/all", "plain-name", "a/b/c", "../x", "owner/"])
def test_neither_folder_nor_id(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be a hub id never reaches the hub."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="no such folder, and it is no hub id"):
        resolve_model(model)


def test_only_data_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as safetensors, JSON and templates; no Python file and no pickled weights."""
    asked: dict[str, Any] = {}

    def fetch(hub_id: str, **options: Any) -> str:
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_model("owner/name") == tmp_path
    assert asked["hub_id"] == "owner/name"
    assert sorted(asked["allow_patterns"]) == ["*.jinja", "*.json", "*.safetensors"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LocalEntryNotFoundError("offline"), "no such folder here, the hub cannot be reached"),
        (HFValidationError("bad id"), "could not be fetched: bad id"),
        (OSError(28, "No space left on device"), "could not be fetched.*No space left"),
    ],
)
def test_hub_faults_are_explained(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault of the hub becomes one line that names the model."""

    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CommandError, match=told) as raised:
        resolve_model("owner/name")
    assert "'owner/name'" in str(raised.value)
