"""Executes the index's copy plans on the KV pool, the state slots and the host slabs.

The index decides, this moves bytes. Everything is a pure copy of bytes, so what comes back is bit-identical
for every KV profile (§11.2). Rows of consecutive ids on both sides move as one copy: the index hands ids
out lowest first, so that runs stay long (D6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import numpy as np
import torch

from hpc_index.ids import Int32Array
from hpc_index.records import Copy, CopyKind, Plan, Stream

__all__ = ["CopyEngine", "Images", "Pages", "PlanError", "copy_runs", "make_slabs"]


class PlanError(Exception):
    """A plan that this program's buffers cannot carry out: the index and the geometry disagree."""


class Pages(Protocol):
    """A KV pool as bytes: uint8 [layers, pages, layer record bytes], and a copy of page columns."""

    @property
    def bytes(self) -> torch.Tensor:
        """All pages of all layers, one storage."""

    def copy_columns(self, src: int, dst: int, columns: int) -> None:
        """Copy the first `columns` tokens of page src into page dst, every layer."""


class Images(Protocol):
    """State images as bytes: uint8 [slots, image bytes], slot-major, one storage."""

    @property
    def bytes(self) -> torch.Tensor:
        """Every slot's image."""


def make_slabs(slabs: int, slab_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Reserve the host tier: uint8 [slabs, slab_bytes], one preallocated buffer, page-locked for a GPU.

    Raises:
        MemoryError: the allocation failed; the text names the size.
    """
    try:
        return torch.empty((slabs, slab_bytes), dtype=torch.uint8, pin_memory=pinned and slabs > 0)
    except RuntimeError as error:
        mib = slabs * slab_bytes >> 20
        kind = "page-locked " if pinned else ""
        raise MemoryError(
            f"the host tier's {mib} MiB of {kind}memory could not be reserved: {error}"
        ) from error


def copy_runs(src: Int32Array, dst: Int32Array) -> Iterator[tuple[int, int, int]]:
    """(first source, first destination, length) of the runs in which both ids grow by one."""
    if len(src) == 0:
        return
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    start = 0
    for end in (*breaks.tolist(), len(src)):
        yield int(src[start]), int(dst[start]), end - start
        start = end


@attrs.define(eq=False)
class CopyEngine:
    """Runs plans in order, each to its end: a plan has landed when `run` returns.

    pools: in the index's order. A slab holds pool i's part of a block at `offsets[i]`, layer records in
    model order (design §4); an image's packed byte o lies in its slab o // slab_bytes (§5.4).
    """

    pools: tuple[Pages, ...]
    images: Images
    slabs: torch.Tensor
    restored_bytes: int = 0
    written_bytes: int = 0
    _offsets: tuple[int, ...] = attrs.field(init=False)
    _actions: dict[CopyKind, Callable[[Copy], int]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        offset, offsets = 0, []
        for pool in self.pools:
            offsets.append(offset)
            offset += pool.bytes.shape[0] * pool.bytes.shape[2]
        self._offsets = tuple(offsets)
        if self.slabs.shape[0] and offset > self.slabs.shape[1]:
            raise PlanError(f"a block of all pools takes {offset} bytes, a slab has {self.slabs.shape[1]}")
        self._actions = {
            CopyKind.PAGE_TO_SLAB: self._page_to_slab,
            CopyKind.SLAB_TO_PAGE: self._slab_to_page,
            CopyKind.PAGE_TO_PAGE: self._page_to_page,
            CopyKind.SLOT_TO_SLABS: self._slot_to_slabs,
            CopyKind.SLABS_TO_SLOT: self._slabs_to_slot,
            CopyKind.SLOT_TO_SLOT: self._slot_to_slot,
            CopyKind.ZERO_SLOT: self._zero_slot,
        }

    def run(self, plan: Plan) -> int:
        """Carry out one plan; the bytes it moved. Raises RuntimeError if the device refuses a copy."""
        moved = sum(self._actions[copy.kind](copy) for copy in plan.copies)
        if plan.stream is Stream.RESTORE:
            self.restored_bytes += moved
        elif plan.stream is Stream.WRITE:
            self.written_bytes += moved
        return moved

    def _layer_records(self, pool: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(device pages of one layer, that layer's part of every slab), both uint8 [ids, record bytes]."""
        offset = self._offsets[pool]
        for layer in self.pools[pool].bytes:
            record = layer.shape[1]
            yield layer, self.slabs[:, offset : offset + record]
            offset += record

    def _page_to_slab(self, copy: Copy) -> int:
        for pages, slabs in self._layer_records(copy.pool):
            for src, dst, n in copy_runs(copy.src, copy.dst):
                slabs[dst : dst + n].copy_(pages[src : src + n])
        return self._page_bytes(copy.pool) * len(copy.src)

    def _slab_to_page(self, copy: Copy) -> int:
        for pages, slabs in self._layer_records(copy.pool):
            for src, dst, n in copy_runs(copy.src, copy.dst):
                pages[dst : dst + n].copy_(slabs[src : src + n])
        return self._page_bytes(copy.pool) * len(copy.src)

    def _page_to_page(self, copy: Copy) -> int:
        for src, dst in zip(copy.src.tolist(), copy.dst.tolist(), strict=True):
            self.pools[copy.pool].copy_columns(src, dst, copy.columns)
        return 0

    def _page_bytes(self, pool: int) -> int:
        layers, _, record = self.pools[pool].bytes.shape
        return layers * record

    def _pieces(self, image: torch.Tensor, slabs: Int32Array) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self.slabs.shape[1]
        if len(slabs) != -(-len(image) // size):
            raise PlanError(f"an image of {len(image)} bytes was given {len(slabs)} slabs of {size}")
        for i, slab in enumerate(slabs.tolist()):
            piece = image[i * size : (i + 1) * size]
            yield piece, self.slabs[slab, : len(piece)]

    def _slot_to_slabs(self, copy: Copy) -> int:
        image = self.images.bytes[int(copy.src[0])]
        for piece, slab in self._pieces(image, copy.dst):
            slab.copy_(piece)
        return len(image)

    def _slabs_to_slot(self, copy: Copy) -> int:
        image = self.images.bytes[int(copy.dst[0])]
        for piece, slab in self._pieces(image, copy.src):
            piece.copy_(slab)
        return len(image)

    def _slot_to_slot(self, copy: Copy) -> int:
        self.images.bytes[int(copy.dst[0])].copy_(self.images.bytes[int(copy.src[0])])
        return 0

    def _zero_slot(self, copy: Copy) -> int:
        self.images.bytes[int(copy.dst[0])].zero_()
        return 0
