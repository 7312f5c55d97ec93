"""The safetensors files of a model folder: found, checked before they are mapped, and read by tensor name.

A header is data from outside: every size in it is held against the file before anything uses it. Only
safetensors is opened; pickled weights never are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import torch
from safetensors import SafetensorError, safe_open

from hpc_qwen35.errors import CheckpointError
from hpc_qwen35.files import model_file

__all__ = ["Checkpoint", "Entry", "open_checkpoint", "read_header"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER = 100_000_000  # bytes; the format's own bound
_MAX_INDEX = 64 << 20
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@attrs.frozen
class Entry:
    """One tensor of a file, as its header describes it. dtype: the format's own name, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@attrs.frozen(eq=False)
class Checkpoint:
    """All tensors of a model folder by the names in its files. Nothing of them is read yet."""

    folder: Path
    entries: Mapping[str, Entry]

    @contextmanager
    def reader(self) -> Iterator[TensorReader]:
        """Open the files as they are needed, and close them at the end."""
        with ExitStack() as stack:
            yield TensorReader(self, stack)


@attrs.define(eq=False)
class TensorReader:
    """Reads tensors of a checkpoint by name."""

    checkpoint: Checkpoint
    _stack: ExitStack
    _handles: dict[Path, safe_open] = attrs.field(factory=dict, init=False)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU as stored: copy what is to outlive the reader.

        Raises:
            CheckpointError: the file changed or is damaged in a way its header does not show.
        """
        entry = self.checkpoint.entries[name]
        try:
            handle = self._handles.get(entry.file)
            if handle is None:
                handle = self._stack.enter_context(safe_open(entry.file, framework="pt", device="cpu"))
                self._handles[entry.file] = handle
            tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{entry.file}: tensor {name!r} cannot be read: {error}") from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"{entry.file}: tensor {name!r} is not what the header says it is")
        return tensor


def open_checkpoint(folder: Path) -> Checkpoint:
    """Find and check the weight files of a folder: model.safetensors, or the shards of its index.

    Raises:
        CheckpointError: none there, one damaged, or one that says what cannot be; names file and tensor.
    """
    single = model_file(folder, _SINGLE)
    if single is not None:
        return Checkpoint(folder, read_header(single))
    index = model_file(folder, _INDEX)
    if index is None:
        raise CheckpointError(_nothing_found(folder))
    weight_map = _read_index(index)
    entries: dict[str, Entry] = {}
    headers: dict[str, dict[str, Entry]] = {}
    for name, file_name in weight_map.items():
        if file_name not in headers:
            if not file_name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: {file_name!r} is not a safetensors file, and no other is opened"
                )
            shard = model_file(folder, file_name)
            if shard is None:
                raise CheckpointError(f"{index} names {file_name!r}, which is missing")
            headers[file_name] = read_header(shard)
        entry = headers[file_name].get(name)
        if entry is None:
            raise CheckpointError(
                f"{index} puts tensor {name!r} into {file_name!r}, which has none of that name"
            )
        entries[name] = entry
    return Checkpoint(folder, entries)


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    text = f"{folder} has neither {_SINGLE} nor {_INDEX}"
    if pickled:
        text += (
            f"; {pickled[0]} is a pickle, which could run code and is never opened: convert it to safetensors"
        )
    return text


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _parse_object(raw: bytes, what: str) -> dict[str, object]:
    try:
        data = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{what} is a JSON {type(data).__name__}, not an object")
    return data


def _read_index(path: Path) -> dict[str, str]:
    size = path.stat().st_size
    if size > _MAX_INDEX:
        raise CheckpointError(f"{path} has {size} bytes: at most {_MAX_INDEX} are read")
    weight_map = _parse_object(path.read_bytes(), str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map is {type(weight_map).__name__}, not an object with entries"
        )
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(
                f"{path}: weight_map puts {name!r} into {file_name!r}, which is no file name"
            )
    return weight_map


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, every size checked against the file.

    Raises:
        CheckpointError: the text names the file and, where it is one tensor's fault, the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path} has {size} bytes and says its header has {length}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    header = _parse_object(raw, f"{path}: the header")
    header.pop("__metadata__", None)
    data_bytes = size - 8 - length
    entries, ranges = {}, []
    for name, value in header.items():
        entry, begin = _entry(path, name, value, data_bytes)
        entries[name] = entry
        ranges.append((begin, begin + entry.nbytes, name))
    end = 0
    for begin, stop, name in sorted(ranges):
        if begin != end:
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {begin}, the one before ends at {end}"
            )
        end = stop
    if end != data_bytes:
        raise CheckpointError(f"{path}: its tensors take {end} bytes, the file holds {data_bytes}")
    return entries


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 16:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 48 for n in value) else None


def _entry(path: Path, name: str, value: object, data_bytes: int) -> tuple[Entry, int]:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is described by {value!r}, not by an object")
    dtype, shape = value.get("dtype"), _whole_numbers(value.get("shape"))
    offsets = _whole_numbers(value.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{where} has dtype {dtype!r}: known are {', '.join(_ITEM_BYTES)}")
    if shape is None:
        raise CheckpointError(f"{where} has shape {value.get('shape')!r}: must be a list of sizes")
    if offsets is None or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise CheckpointError(
            f"{where} has data_offsets {value.get('data_offsets')!r}: "
            f"must lie within the file's {data_bytes} bytes of data"
        )
    nbytes = offsets[1] - offsets[0]
    need = _ITEM_BYTES[dtype]
    for n in shape:
        need *= n
    if need != nbytes:
        raise CheckpointError(
            f"{where}, {dtype} {list(shape)}, takes {need} bytes: data_offsets give it {nbytes}"
        )
    return Entry(path, dtype, shape, nbytes), offsets[0]
