"""The tensors that live inside a nested record, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch

__all__ = ["named_tensors"]


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
