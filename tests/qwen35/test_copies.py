"""Copy plans executed on bytes."""

import itertools

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_index.ids import Ticket
from hpc_index.records import Copy, CopyKind, Plan, Stream, int32
from hpc_qwen35.copies import CopyEngine, PlanError, copy_runs, make_slabs

LAYERS, PAGES, RECORD, COLUMNS = 2, 12, 64, 4
SLOTS, IMAGE, SLAB = 3, 300, 128


@attrs.define(eq=False)
class BytePages:
    bytes: torch.Tensor

    def copy_columns(self, src: int, dst: int, columns: int) -> None:
        width = RECORD // COLUMNS * columns
        self.bytes[:, dst, :width] = self.bytes[:, src, :width]


@attrs.define(eq=False)
class ByteImages:
    bytes: torch.Tensor


def engine(slabs: int = 16) -> CopyEngine:
    noise = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (LAYERS, PAGES, RECORD), dtype=torch.uint8, generator=noise)
    images = torch.randint(0, 256, (SLOTS, IMAGE), dtype=torch.uint8, generator=noise)
    return CopyEngine((BytePages(pages),), ByteImages(images), make_slabs(slabs, SLAB, pinned=False))


def plan(stream: Stream, *copies: Copy) -> Plan:
    return Plan(ticket=Ticket(1), stream=stream, after=(), copies=copies)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30),
)
def test_runs_cover_every_pair_in_order(pairs: list[tuple[int, int]]) -> None:
    """Expanding the runs gives back the ids, and two neighbouring runs could not have been one."""
    src = np.array([s for s, _ in pairs], dtype=np.int32)
    dst = np.array([d for _, d in pairs], dtype=np.int32)
    runs = list(copy_runs(src, dst))
    assert [(s + i, d + i) for s, d, n in runs for i in range(n)] == pairs
    for (s, d, n), (s2, d2, _) in itertools.pairwise(runs):
        assert (s + n, d + n) != (s2, d2)


def test_a_block_comes_back_from_a_slab_bit_identical() -> None:
    """Device to host to another page, in any order of ids."""
    e = engine()
    before = e.pools[0].bytes.clone()
    out = Copy(CopyKind.PAGE_TO_SLAB, int32(3, 4, 1), int32(9, 10, 2))
    assert e.run(plan(Stream.WRITE, out)) == 3 * LAYERS * RECORD
    back = Copy(CopyKind.SLAB_TO_PAGE, int32(2, 10, 9), int32(7, 8, 11))
    e.run(plan(Stream.RESTORE, back))
    assert torch.equal(e.pools[0].bytes[:, [7, 8, 11]], before[:, [1, 4, 3]])
    assert (e.written_bytes, e.restored_bytes) == (384, 384)


def test_an_image_is_split_over_slabs_and_comes_back_bit_identical() -> None:
    """300 bytes take three slabs of 128, not necessarily contiguous."""
    e = engine()
    before = e.images.bytes[1].clone()
    e.run(plan(Stream.WRITE, Copy(CopyKind.SLOT_TO_SLABS, int32(1), int32(5, 0, 12))))
    e.run(plan(Stream.RESTORE, Copy(CopyKind.SLABS_TO_SLOT, int32(5, 0, 12), int32(2))))
    assert torch.equal(e.images.bytes[2], before)


def test_an_image_with_the_wrong_number_of_slabs_is_refused() -> None:
    """A plan that does not fit the buffers is an error, never a partial copy."""
    with pytest.raises(PlanError, match="300 bytes was given 2 slabs of 128"):
        engine().run(plan(Stream.WRITE, Copy(CopyKind.SLOT_TO_SLABS, int32(1), int32(5, 0))))


def test_slots_are_copied_and_zeroed() -> None:
    """A fork copies the snapshot's image, a new lane starts from zeros."""
    e = engine()
    before = e.images.bytes[0].clone()
    e.run(
        plan(
            Stream.COMPUTE,
            Copy(CopyKind.SLOT_TO_SLOT, int32(0), int32(1)),
            Copy(CopyKind.ZERO_SLOT, int32(), int32(0)),
        )
    )
    assert torch.equal(e.images.bytes[1], before)
    assert not e.images.bytes[0].any()


def test_a_tail_copy_moves_only_its_columns() -> None:
    """The first columns of a page; what lies behind them stays."""
    e = engine()
    before = e.pools[0].bytes.clone()
    e.run(plan(Stream.COMPUTE, Copy(CopyKind.PAGE_TO_PAGE, int32(2), int32(6), columns=3)))
    after = e.pools[0].bytes
    assert torch.equal(after[:, 6, :48], before[:, 2, :48])
    assert torch.equal(after[:, 6, 48:], before[:, 6, 48:])


def test_slabs_too_small_for_a_block_are_refused() -> None:
    """Geometry and buffers must agree before anything is copied."""
    pages = BytePages(torch.zeros((4, 2, 64), dtype=torch.uint8))
    with pytest.raises(PlanError, match="takes 256 bytes, a slab has 128"):
        CopyEngine(
            (pages,), ByteImages(torch.zeros((1, 8), dtype=torch.uint8)), make_slabs(2, 128, pinned=False)
        )
