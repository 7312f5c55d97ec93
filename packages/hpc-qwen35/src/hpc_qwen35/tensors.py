"""The long-lived tensors of a program: how they are reserved, and what they are called."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from math import prod

import attrs
import torch

__all__ = ["named_tensors", "zeroed"]


def zeroed(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros, uint8, page-aligned. On a CPU the system hands pages out as they are first touched.

    `torch.zeros` would write all of it: seconds, and resident memory, for a pool that fills in hours.

    Raises:
        MemoryError: there is no room; the text names the size.
    """
    nbytes = prod(shape)
    try:
        if device.type != "cpu" or not nbytes:
            return torch.zeros(shape, dtype=torch.uint8, device=device)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
    except (RuntimeError, OSError) as error:
        raise MemoryError(f"{nbytes >> 20} MiB could not be reserved on {device}: {error}") from error


def named_tensors(name: str, value: object) -> dict[str, torch.Tensor]:
    """Every tensor in attrs records, mappings and tuples below `value`, each once, as `name.field.0 ...`."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, tensor in _walk(name, value):
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            found[path] = tensor
    return found


def _walk(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(f"{name}.{key}", item)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _walk(f"{name}.{i}", item)
    elif attrs.has(kind := type(value)):
        for field in attrs.fields(kind):
            yield from _walk(f"{name}.{field.name}", getattr(value, field.name))
