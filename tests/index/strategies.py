"""Small geometries and prompts for tests of the index."""

from __future__ import annotations

import numpy as np

from hpc_index import CostModel, Policy, PrefixIndex
from hpc_index.records import Geometry, Pool, PromptView, TapHint
from tests.index.double import Engine, tokens_of

__all__ = ["COST", "engine", "geometry", "policy", "prompt", "random_tokens"]

COST = CostModel(token_seconds=1e-4)


def geometry(
    *,
    block: int = 64,
    pages: int = 64,
    lags: tuple[int, ...] = (0,),
    lanes: int = 2,
    snapshots: int = 4,
    slabs: int = 0,
    image_slabs: int = 4,
    unit: int = 1,
) -> Geometry:
    """A geometry of round numbers: pages of 1000 bytes, one slab a block of all pools."""
    pools = tuple(Pool(f"pool{i}", pages, lag, 1000) for i, lag in enumerate(lags))
    slab = 1000 * len(pools)
    return Geometry(block, unit, pools, lanes, lanes + snapshots, image_slabs * slab, slab, slabs, 1 << 20)


def policy(**changes: int) -> Policy:
    """No cushion and small gaps, so that small prompts have room and taps."""
    values = {"cushion_tokens": 0, "window_tokens": 64, "tap_ladder_tokens": 4096, "prefill_chunk": 64}
    return Policy(**{**values, **changes})


def engine(rules: Policy | None = None, cost: CostModel = COST, **sizes: object) -> Engine:
    """An engine double on a fresh index."""
    return Engine(PrefixIndex(geometry(**sizes), cost, rules or policy()))  # type: ignore[arg-type]


def random_tokens(seed: int, count: int) -> list[int]:
    """Distinct-looking token ids from a seed."""
    return np.random.default_rng(seed).integers(10, 5000, count).tolist()  # type: ignore[no-any-return]


def prompt(tokens: list[int], *hints: TapHint, salt: bytes = b"", cacheable: bool = True) -> PromptView:
    """A prompt of a namespace."""
    return PromptView(tokens_of(tokens), hints=hints, cache_salt=salt, cacheable=cacheable)
