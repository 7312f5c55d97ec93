"""What all layers of one forward pass share, computed once before the first layer."""

from __future__ import annotations

import attrs
import torch

from hpc_kernels.paged_attention import PageRow, page_row
from hpc_kernels.rotary import rotary_table
from hpc_qwen35.kv_profiles import BLOCK

__all__ = ["DecodePass", "PrefillPass"]

RotaryTable = tuple[torch.Tensor, torch.Tensor]


@attrs.frozen(eq=False)
class PrefillPass:
    """Tokens [base, base + T) of one lane.

    row: the pages of blocks [0, ceil((base + T) / BLOCK)). cells: int64 [T], where each token's keys
    and values go. rotary: of the T positions; last_rotary: of the last one.
    """

    base: int
    slot: int
    row: PageRow
    cells: torch.Tensor
    rotary: RotaryTable
    last_rotary: RotaryTable

    @classmethod
    def of(cls, base: int, count: int, slot: int, row: torch.Tensor, inverse: torch.Tensor) -> PrefillPass:
        """inverse: the rotary frequencies, on the model's device; row may be longer than needed."""
        end = base + count
        pages = row[: -(-end // BLOCK)].to(device=inverse.device, dtype=torch.int64)
        positions = torch.arange(base, end, device=inverse.device)
        cos, sin = rotary_table(positions, inverse)
        cells = pages.index_select(0, positions // BLOCK) * BLOCK + positions % BLOCK
        return cls(base, slot, page_row(pages), cells, (cos, sin), (cos[-1:], sin[-1:]))


@attrs.frozen(eq=False)
class DecodePass:
    """One token at `positions[b]` of each of B lanes.

    slots: int64 [B]; slot: the only lane's, or None if there are several. rows[b]: the pages of
    blocks [0, ceil(lengths[b] / BLOCK)). cells: int64 [B]. lengths: positions + 1.
    """

    slots: torch.Tensor
    slot: int | None
    rows: list[PageRow]
    cells: torch.Tensor
    lengths: list[int]
    rotary: RotaryTable

    @classmethod
    def of(
        cls, positions: list[int], slots: list[int], rows: list[torch.Tensor], inverse: torch.Tensor
    ) -> DecodePass:
        """inverse: the rotary frequencies, on the model's device; rows may be longer than needed."""
        device = inverse.device
        lengths = [position + 1 for position in positions]
        pages = [
            row[: -(-length // BLOCK)].to(device=device, dtype=torch.int64)
            for row, length in zip(rows, lengths, strict=True)
        ]
        at = torch.tensor(positions, device=device)
        last = torch.stack([row[-1] for row in pages])
        return cls(
            slots=torch.tensor(slots, device=device),
            slot=slots[0] if len(slots) == 1 else None,
            rows=[page_row(row) for row in pages],
            cells=last * BLOCK + at % BLOCK,
            lengths=lengths,
            rotary=rotary_table(at, inverse),
        )
