"""State images: layout, alignment, and views on one storage."""

from __future__ import annotations

import pytest
import torch

from hpc_qwen35.state_pool import StateLayout, StatePool
from tests.qwen35.models import CPU, DENSE, config_of
from tests.qwen35.test_config import PUBLISHED_27B


def test_size_of_the_27b_image() -> None:
    """Recurrent, conv and hidden parts of the 27B are the spec's bytes (§3.2); none of them needs padding."""
    config = config_of(PUBLISHED_27B)
    layout = StateLayout.of(config, torch.bfloat16)
    total = {
        name: sum(p.nbytes for p in layout.parts if p.name == name)
        for name in ("recurrent", "conv", "hidden")
    }
    assert total == {"recurrent": 150_994_944, "conv": 2_949_120, "hidden": 10_240}
    assert layout.image_bytes == sum(total.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_aligned_and_apart(dtype: torch.dtype) -> None:
    """Every part starts on 256 bytes, none overlaps the next, and the image is padded to 256."""
    layout = StateLayout.of(config_of(DENSE, linear_value_head_dim=12, hidden_size=50), dtype)
    end = 0
    for part in layout.parts:
        assert part.offset % 256 == 0
        assert part.offset >= end
        end = part.offset + part.nbytes
    assert layout.image_bytes % 256 == 0
    assert layout.image_bytes >= end


def test_a_layer_is_one_range() -> None:
    """A layer's parts follow each other, layers in model order, so that a layer restores in one piece."""
    config = config_of(DENSE)
    layout = StateLayout.of(config, torch.float32)
    assert [part.layer for part in layout.parts] == [n for n in config.gdn_layers for _ in range(2)] + [-1]


def test_views_share_the_storage() -> None:
    """What is written through a view is in the slot's bytes, in its part's place, and in no other slot."""
    pool = StatePool(config_of(DENSE), 3, CPU, torch.bfloat16)
    for number, part in enumerate(pool.parts):
        view = pool.views[part.name, part.layer]
        assert view.shape == (3, *part.shape)
        view[1] = number + 1
        mine = pool.bytes[1, part.offset : part.offset + part.nbytes].view(part.dtype)
        assert torch.equal(mine, torch.full_like(mine, number + 1))
    assert not pool.bytes[[0, 2]].any()


def test_a_copied_image_is_the_whole_state() -> None:
    """Copying one row of bytes copies every part."""
    pool = StatePool(config_of(DENSE), 2, CPU, torch.float32)
    pool.bytes[0] = torch.randint(256, (pool.image_bytes,), dtype=torch.uint8)
    pool.bytes[1].copy_(pool.bytes[0])
    for view in pool.views.values():
        assert torch.equal(view[0].view(torch.uint8), view[1].view(torch.uint8))


def test_no_slots() -> None:
    """A pool of no slots is refused."""
    with pytest.raises(ValueError, match="slots is 0: must be at least 1"):
        StatePool(config_of(DENSE), 0, CPU, torch.float32)


def test_too_large() -> None:
    """A pool that no memory holds is a MemoryError with its size."""
    with pytest.raises(MemoryError, match="MiB could not be reserved on cpu"):
        StatePool(config_of(DENSE), 1 << 44, CPU, torch.float32)
