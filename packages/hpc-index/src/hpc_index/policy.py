"""What a deployment may choose about caching (§14.2), and the checks of the constructor's arguments."""

from __future__ import annotations

import attrs

from hpc_index.errors import GeometryError, PolicyError
from hpc_index.records import Geometry

__all__ = ["Policy", "check_geometry"]

_LARGEST_BLOCK = 8192

_LEAST = {
    "taps_per_request": 0,
    "tap_ladder_tokens": 1,
    "tap_min_gap_tokens": 0,
    "prefill_chunk": 1,
    "window_tokens": 1,
    "cushion_tokens": 0,
    "prefetch_blocks": 1,
    "junction_tokens": 0,
    "hash_seed": 0,
}


@attrs.frozen
class Policy:
    """Choices that change what is kept, never what is correct.

    taps_per_request: most taps planned for one prompt (§7.1); 0 plans none.
    tap_ladder_tokens: G of the geometric ladder.
    tap_min_gap_tokens: least distance of a ladder tap to any other snapshot, on both sides.
    prefill_chunk: tokens of a usual prefill chunk; decides which chunk is a prompt's last.
    window_tokens: output tokens that an admission reserves pages for, if it may generate as many (D7).
    cushion_tokens: reserved beyond the window: the largest round plus one forced span (D7). Never the
        reason why a request is refused.
    prefetch_blocks: most blocks of one prefetch (§6.6).
    junction_tokens: a junction tap lies at least so far past the base (D13); 0 plans none.
    hash_seed: seed of every namespace's root hash (D1). Equal seeds give equal hashes in every process.
    """

    taps_per_request: int = 8
    tap_ladder_tokens: int = 4096
    tap_min_gap_tokens: int = 2048
    prefill_chunk: int = 2048
    window_tokens: int = 4096
    cushion_tokens: int = 64
    prefetch_blocks: int = 256
    junction_tokens: int = 512
    hash_seed: int = 0

    def __attrs_post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PolicyError(f"Policy.{name} is {value!r}; it must be an integer of at least {least}")

    @classmethod
    def resolve(
        cls,
        *,
        prefill_chunk: int,
        host_tier: bool,
        taps_per_request: int | None = None,
        tap_ladder_tokens: int | None = None,
        tap_min_gap_tokens: int | None = None,
    ) -> Policy:
        """The defaults of §14.2 for what is None.

        8 taps a request with a host tier and 2 without, where taps would evict other conversations'
        snapshots; a ladder of max(4096, 2 chunks) and a gap of max(1024, chunk), since flexible taps land
        on chunk boundaries and a finer grid only repeats them.
        """
        return cls(
            taps_per_request=(8 if host_tier else 2) if taps_per_request is None else taps_per_request,
            tap_ladder_tokens=max(4096, 2 * prefill_chunk)
            if tap_ladder_tokens is None
            else tap_ladder_tokens,
            tap_min_gap_tokens=max(1024, prefill_chunk) if tap_min_gap_tokens is None else tap_min_gap_tokens,
            prefill_chunk=prefill_chunk,
        )


def check_geometry(geometry: Geometry) -> None:
    """Raise GeometryError unless the sizes can describe a cache.

    A pool lags by at most one token: with more, a tail could span two pages (§5.3, design §2).
    """

    def need(field: str, value: int, low: int, high: int | None = None) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise GeometryError(f"Geometry.{field} is {value!r}; it must be an integer")
        if value < low or (high is not None and value > high):
            bound = f"at least {low}" if high is None else f"{low}..{high}"
            raise GeometryError(f"Geometry.{field} is {value}; it must be {bound}")

    need("block", geometry.block, 1, _LARGEST_BLOCK)
    need("unit", geometry.unit, 1)
    if geometry.block % geometry.unit:
        raise GeometryError(f"Geometry.unit is {geometry.unit}; it must divide block = {geometry.block}")
    need("pools (their number)", len(geometry.pools), 1, 2)
    for i, pool in enumerate(geometry.pools):
        need(f"pools[{i}].pages", pool.pages, 1)
        need(f"pools[{i}].lag", pool.lag, 0, 1)
        need(f"pools[{i}].page_bytes", pool.page_bytes, 1)
    need("lanes", geometry.lanes, 1)
    need("slots", geometry.slots, geometry.lanes)
    need("image_bytes", geometry.image_bytes, 1)
    need("slabs", geometry.slabs, 0)
    need("slab_bytes", geometry.slab_bytes, 1)
    need("slabs_per_chunk", geometry.slabs_per_chunk, 1)
    block_bytes = sum(pool.page_bytes for pool in geometry.pools)
    if geometry.slabs and geometry.slab_bytes < block_bytes:
        raise GeometryError(
            f"Geometry.slab_bytes is {geometry.slab_bytes}; one slab must hold a block of all pools, "
            f"{block_bytes} bytes"
        )
    if 0 < geometry.slabs < geometry.image_slabs + 1:
        raise GeometryError(
            f"Geometry.slabs is {geometry.slabs}; a host tier must hold one image and one block, "
            f"{geometry.image_slabs + 1} slabs (or 0 for no host tier)"
        )
