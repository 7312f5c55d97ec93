"""From a model folder to weights: names matched against what the config demands, every difference named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch

from hpc_qwen35.checkpoint import Checkpoint, Entry, TensorReader, open_checkpoint
from hpc_qwen35.config import MoeFfn, Qwen35Config
from hpc_qwen35.errors import CheckpointError
from hpc_qwen35.names import expected_tensors
from hpc_qwen35.weights import Qwen35Weights, fuse

__all__ = ["Loaded", "Progress", "load_weights"]

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read) after every tensor."""

_DTYPES = ("F32", "BF16", "F16")
_SHOWN = 5  # names of one kind that an error lists
_SCALES = re.compile(r"\.(weight_scale(_inv|_2)?|input_scale|qweight|qzeros|scales|g_idx)$")
_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_IGNORED = (("mtp.", "mtp"), ("model.mtp.", "mtp"), ("model.visual.", "visual"), ("visual.", "visual"))
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")


@attrs.frozen(eq=False)
class Loaded:
    """Weights, and how many tensors of the files were left alone, by reason."""

    weights: Qwen35Weights
    ignored: Mapping[str, int]


def load_weights(
    folder: Path,
    config: Qwen35Config,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Loaded:
    """Read and fuse the weights of a model folder.

    Tensors of multi-token prediction and of the vision tower are left alone and counted, and so is a head
    stored next to tied embeddings.

    Raises:
        CheckpointError: files missing, damaged or quantised, or tensors missing, unexpected or of another
            shape; the text names file and tensor.
    """
    checkpoint = open_checkpoint(folder)
    stored, ignored = _match(checkpoint, config)
    total = sum(checkpoint.entries[name].nbytes for names in stored.values() for name in names)
    with checkpoint.reader() as reader:
        source = _Source(reader, stored, total, progress)
        weights = fuse(config, source.read, device, dtype)
    return Loaded(weights, ignored)


@attrs.define(eq=False)
class _Source:
    """Gives `fuse` its tensors and reports progress. Per-expert tensors are stacked on the way."""

    reader: TensorReader
    stored: Mapping[str, tuple[str, ...]]
    total: int
    progress: Progress | None
    done: int = 0

    def read(self, name: str) -> torch.Tensor:
        names = self.stored[name]
        if len(names) > 1 or _EXPERT.search(names[0]):
            return self._stack(name, names)
        return self._one(names[0])

    def _one(self, stored_name: str) -> torch.Tensor:
        tensor = self.reader.read(stored_name)
        self.done += self.reader.checkpoint.entries[stored_name].nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)
        return tensor

    def _stack(self, name: str, names: tuple[str, ...]) -> torch.Tensor:
        tensors = [self._one(stored_name) for stored_name in names]
        if name.endswith("gate_up_proj"):
            pairs = zip(tensors[::2], tensors[1::2], strict=True)
            tensors = [torch.cat(pair) for pair in pairs]
        return torch.stack(tensors)


def _stripper(names: Mapping[str, Entry], folder: Path) -> str:
    """The prefix that the text model's tensors have in these files."""
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in names:
            return prefix
    tried = ", ".join(repr(f"{prefix}embed_tokens.weight") for prefix in _PREFIXES)
    raise CheckpointError(f"{folder}: no tensor is named {tried}: this is no checkpoint of a supported model")


def _match(checkpoint: Checkpoint, config: Qwen35Config) -> tuple[dict[str, tuple[str, ...]], Counter[str]]:
    """(for each expected name the stored tensors that make it up, count of ignored tensors by reason)."""
    entries, folder = checkpoint.entries, checkpoint.folder
    scales = [name for name in entries if _SCALES.search(name)]
    if scales:
        raise CheckpointError(
            f"{folder}: {_listed(scales)}: this checkpoint is quantised; only float32, bfloat16 and float16 "
            "weights are supported"
        )
    prefix = _stripper(entries, folder)
    expected = expected_tensors(config)
    found: dict[str, str] = {}
    ignored: Counter[str] = Counter()
    unexpected = []
    for stored_name in entries:
        reason = next((why for start, why in _IGNORED if stored_name.startswith(start)), None)
        if reason is not None:
            ignored[reason] += 1
            continue
        name = stored_name.removeprefix(prefix)
        head = stored_name.endswith("lm_head.weight")
        if head and config.tie_word_embeddings:
            ignored["tied lm_head"] += 1
        elif head:
            found["lm_head.weight"] = stored_name
        elif name in expected or (isinstance(config.ffn, MoeFfn) and _EXPERT.match(name)):
            found[name] = stored_name
        else:
            unexpected.append(stored_name)
    if unexpected:
        raise CheckpointError(f"{folder}: unexpected {_listed(unexpected)}")
    stored = {}
    missing = []
    for name in expected:
        parts = (name,) if name in found else _expert_parts(name, config)
        if parts and all(part in found for part in parts):
            stored[name] = tuple(found.pop(part) for part in parts)
        else:
            missing += [part for part in parts or (name,) if part not in found]
    if missing:
        raise CheckpointError(f"{folder}: missing {_listed(missing)}")
    if found:
        raise CheckpointError(f"{folder}: unexpected {_listed(list(found.values()))}")
    _check_shapes(entries, stored, expected, config)
    return stored, ignored


def _expert_parts(name: str, config: Qwen35Config) -> tuple[str, ...]:
    """The per-expert tensors that make up a stacked one: gate, up of every expert in turn, or down."""
    if not isinstance(config.ffn, MoeFfn):
        return ()
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".mlp.experts"):
        return ()
    halves = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    experts = range(config.ffn.num_experts)
    return tuple(f"{stem}.{expert}.{half}_proj.weight" for expert in experts for half in halves)


def _check_shapes(
    entries: Mapping[str, Entry],
    stored: Mapping[str, tuple[str, ...]],
    expected: Mapping[str, tuple[int, ...]],
    config: Qwen35Config,
) -> None:
    for name, parts in stored.items():
        shape = expected[name]
        if len(parts) > 1 or _EXPERT.search(parts[0]):
            rows = shape[1] // 2 if name.endswith("gate_up_proj") else shape[1]
            shape = (rows, shape[2])
        for part in parts:
            entry = entries[part]
            if entry.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{entry.file}: tensor {part!r} is {entry.dtype}: only {', '.join(_DTYPES)} are supported"
                )
            if entry.shape != shape:
                raise CheckpointError(
                    f"{entry.file}: tensor {part!r} is {list(entry.shape)}: "
                    f"{config.architecture} with this config.json needs {list(shape)}"
                )


def _listed(names: list[str]) -> str:
    """'tensor a' or '7 tensors: a, b, c, d, e, ...'."""
    if len(names) == 1:
        return f"tensor {names[0]!r}"
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} tensors: {', '.join(repr(name) for name in names[:_SHOWN])}{more}"
