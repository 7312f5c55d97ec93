"""Device and host memory of the scripted program: a page, image or slab holds digests instead of numbers.

Column t of a page holds the digest of tokens [0, t], an image that of its whole prefix. Two prefixes that
differ anywhere have different digests from there on, so bytes in a wrong place are always noticed.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpc_index.ids import Int32Buffer
from hpc_index.records import Copy, CopyKind, Geometry, Lane, PromptView

__all__ = ["DigestMemory", "PrefixDigests", "WrongReuseError"]

_Words: TypeAlias = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)


class WrongReuseError(RuntimeError):
    """A lane would read bytes that belong to another prefix."""


def _mixed(words: _Words) -> _Words:
    """The finaliser of splitmix64, elementwise."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _powers(base: int, count: int) -> _Words:
    """base^1 … base^count modulo 2^64."""
    return np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)


class PrefixDigests:
    """Digests of every prefix of a growing sequence: d[t] = d[t-1] * base + mix(token t, its media key)."""

    def __init__(self, prompt: PromptView, block: int) -> None:
        self._extras = prompt.extras
        self._block = block
        salt = np.frombuffer(prompt.cache_salt.ljust(-(-len(prompt.cache_salt) // 8) * 8, b"\0"), np.uint64)
        seed = _mixed(np.append(salt, np.uint64(len(prompt.cache_salt)))).sum(dtype=np.uint64)
        self._seed = int(seed)
        self._values: _Words = np.empty(0, np.uint64)
        self._tokens: Int32Buffer = np.empty(0, np.int32)
        self._count = 0
        self.extend(prompt.tokens)

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> Int32Buffer:
        """The sequence so far, int32 [n]."""
        return self._tokens[: self._count]

    @property
    def values(self) -> _Words:
        """uint64 [n]; values[t] stands for tokens [0, t]."""
        return self._values[: self._count]

    def extend(self, tokens: Int32Buffer) -> None:
        """Append tokens."""
        begin, end = self._count, self._count + len(tokens)
        if end > len(self._values):
            capacity = max(end, 2 * len(self._values))
            self._values = np.resize(self._values, capacity) if begin else np.empty(capacity, np.uint64)
            self._tokens = np.resize(self._tokens, capacity) if begin else np.empty(capacity, np.int32)
        words = tokens.astype(np.uint64)
        if self._extras is not None and len(self._extras):
            at = np.minimum(np.arange(begin, end) // self._block, len(self._extras) - 1)
            words ^= _mixed(self._extras[at] + np.uint64(1))
        words = _mixed(words + np.uint64(1))
        last = int(self._values[begin - 1]) if begin else self._seed
        scaled = np.cumsum(words * _powers(_INVERSE, len(words)), dtype=np.uint64) + np.uint64(last)
        self._values[begin:end] = scaled * _powers(_BASE, len(words))
        self._tokens[begin:end] = tokens
        self._count = end


class DigestMemory:
    """Pages of every pool, state slots and host slabs; copies and forward passes change them."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        block, slabs = geometry.block, geometry.slabs
        self._pages = [np.zeros((pool.pages, block), np.uint64) for pool in geometry.pools]
        self._slots = np.zeros((geometry.slots, 2), np.uint64)  # frontier, digest
        self._slab_pages = np.zeros((slabs, len(geometry.pools), block), np.uint64)
        self._slab_images = np.zeros((slabs, 3), np.uint64)  # frontier, digest, 1 + number of the piece

    def copy(self, copy: Copy) -> None:
        """Execute one copy. Raises WrongReuseError for an image put together from the wrong pieces."""
        src, dst, pool = copy.src, copy.dst, copy.pool
        match copy.kind:
            case CopyKind.PAGE_TO_SLAB:
                self._slab_pages[dst, pool] = self._pages[pool][src]
                self._slab_images[dst] = 0
            case CopyKind.SLAB_TO_PAGE:
                self._pages[pool][dst] = self._slab_pages[src, pool]
            case CopyKind.PAGE_TO_PAGE:
                self._pages[pool][dst, : copy.columns] = self._pages[pool][src, : copy.columns]
            case CopyKind.SLOT_TO_SLABS:
                self._slab_images[dst, :2] = self._slots[src[0]]
                self._slab_images[dst, 2] = np.arange(1, len(dst) + 1)
                self._slab_pages[dst] = 0
            case CopyKind.SLABS_TO_SLOT:
                self._slots[dst[0]] = self._gathered(src)
            case CopyKind.SLOT_TO_SLOT:
                self._slots[dst[0]] = self._slots[src[0]]
            case CopyKind.ZERO_SLOT:
                self._slots[dst[0]] = 0

    def verify(self, lane: Lane, digests: PrefixDigests) -> None:
        """Check everything that a pass from the lane's frontier on would read. Raises WrongReuseError."""
        frontier = lane.frontier
        state = self._slots[lane.slot].tolist()
        expected = [frontier, int(digests.values[frontier - 1]) if frontier else 0]
        if state != expected:
            raise WrongReuseError(
                f"lane {lane.id}: slot {lane.slot} holds the state at {state[0]}, not that of "
                f"its own prefix at {frontier}"
            )
        for row, pages, pool in zip(lane.pages, self._pages, self._geometry.pools, strict=True):
            end = max(0, frontier - pool.lag)
            used = row[: -(-end // self._geometry.block)]
            if np.any(used < 0):
                raise WrongReuseError(f"lane {lane.id}: pool {pool.name} has a block below {end} unmapped")
            found = pages[used].reshape(-1)[:end]
            wrong = np.flatnonzero(found != digests.values[pool.lag : pool.lag + end])
            if wrong.size:
                column = int(wrong[0])
                page = int(used[column // self._geometry.block])
                raise WrongReuseError(
                    f"lane {lane.id}: pool {pool.name} page {page} holds another prefix at position {column}"
                )

    def advance(self, lane: Lane, digests: PrefixDigests, end: int, taps: dict[int, int]) -> None:
        """Process tokens [frontier, end): write pages, state and taps (position to slot)."""
        block = self._geometry.block
        for row, pages, pool in zip(lane.pages, self._pages, self._geometry.pools, strict=True):
            columns = np.arange(max(0, lane.frontier - pool.lag), max(0, end - pool.lag))
            targets = row[columns // block]
            if np.any(targets < 0):
                raise WrongReuseError(f"lane {lane.id}: pool {pool.name} has no page for position {end - 1}")
            pages[targets, columns % block] = digests.values[columns + pool.lag]
        for position, slot in taps.items():
            self._slots[slot] = (position, digests.values[position - 1])
        self._slots[lane.slot] = (end, digests.values[end - 1])

    def _gathered(self, slabs: Int32Buffer) -> _Words:
        pieces = self._slab_images[slabs]
        in_order = np.array_equal(pieces[:, 2], np.arange(1, len(slabs) + 1))
        if not in_order or np.any(pieces[:, :2] != pieces[0, :2]):
            raise WrongReuseError(f"slabs {slabs.tolist()} do not hold the pieces of one image in order")
        image: _Words = pieces[0, :2]
        return image
