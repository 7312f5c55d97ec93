"""KV pages: sizes of the profiles, and copies of columns."""

from __future__ import annotations

import pytest
import torch

from hpc_qwen35.errors import OptionError
from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.kv_profiles import kv_profile
from tests.qwen35.models import CPU, DENSE, config_of
from tests.qwen35.test_config import PUBLISHED_27B


def test_page_of_the_27b() -> None:
    """BF16 takes 64 KiB a token and 4 MiB a page over the 16 layers (§3.1); FP32 twice that."""
    config = config_of(PUBLISHED_27B)
    assert kv_profile("bf16").token_bytes(config) * 16 == 64 << 10
    assert kv_profile("bf16").layer_record_bytes(config) * 16 == 4 << 20
    assert kv_profile("fp32").layer_record_bytes(config) * 16 == 8 << 20


@pytest.mark.parametrize("profile", ["bf16", "fp32"])
def test_typed_pages_are_the_bytes(profile: str) -> None:
    """A layer's typed pages and its records are one storage."""
    pool = KvPool(config_of(DENSE, num_hidden_layers=8), profile, 5, CPU)
    assert pool.bytes.shape == (2, 5, pool.layer_record_bytes)
    assert pool.page_bytes == 2 * pool.layer_record_bytes
    pool.layers[1][3] = 1.5
    assert (pool.bytes[1, 3].view(pool.profile.dtype) == 1.5).all()
    assert int(pool.bytes.count_nonzero()) == int(pool.bytes[1, 3].count_nonzero())


@pytest.mark.parametrize("profile", ["bf16", "fp32"])
@pytest.mark.parametrize("columns", [0, 1, 63, 64])
def test_copy_columns(profile: str, columns: int) -> None:
    """The first columns of a page are copied in every layer; the rest of the target keeps its bits."""
    pool = KvPool(config_of(DENSE, num_hidden_layers=8), profile, 3, CPU)
    pool.bytes.copy_(torch.randint(256, pool.bytes.shape, dtype=torch.uint8))
    before = [layer.clone().view(torch.uint8) for layer in pool.layers]
    pool.copy_columns(2, 0, columns)
    for layer, old in zip(pool.layers, before, strict=True):
        now = layer.view(torch.uint8)
        assert torch.equal(now[0, :columns], old[2, :columns])
        assert torch.equal(now[0, columns:], old[0, columns:])
        assert torch.equal(now[1:], old[1:])


@pytest.mark.parametrize("columns", [-1, 65])
def test_columns_are_range_checked(columns: int) -> None:
    """More columns than a page has would run into the next page."""
    with pytest.raises(ValueError, match=f"columns is {columns}: must be 0 to 64"):
        KvPool(config_of(DENSE), "fp32", 2, CPU).copy_columns(0, 1, columns)


def test_unknown_profile() -> None:
    """A profile that is not there is named with those that are."""
    with pytest.raises(OptionError, match="'int8' is not supported; supported: bf16, fp32"):
        KvPool(config_of(DENSE), "int8", 2, CPU)


def test_pool_sizes_are_checked() -> None:
    """No pages, or more than memory holds, is refused with the number."""
    with pytest.raises(ValueError, match="pages is 0: must be at least 1"):
        KvPool(config_of(DENSE), "fp32", 0, CPU)
    with pytest.raises(MemoryError, match="MiB could not be reserved on cpu"):
        KvPool(config_of(DENSE), "fp32", 1 << 44, CPU)
