"""Which cached pages go first (§9.1): least recently used, backed copies before last copies.

Entries are blocks and snapshot tails that hold device pages and that nothing needs. Each gives exactly one
page to every pool (§6.3), so the number of entries is the number of evictable pages. A path is released
deepest block first, so its tail goes before its head.
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

from hpc_index.snapshots import Snapshot
from hpc_index.tree import Node

__all__ = ["DeviceLru", "Entry"]

Entry: TypeAlias = Node | Snapshot
"""A block, or a snapshot standing for its tail pages."""

_SLACK = 64


class DeviceLru:
    """Two orders by release time, as heaps with lazy deletion: an entry's `lru` names its current item."""

    def __init__(self) -> None:
        self._heaps: tuple[list[tuple[int, Entry]], list[tuple[int, Entry]]] = ([], [])
        self._live = [0, 0]
        self._clock = 0

    def __len__(self) -> int:
        """Evictable entries, backed and unbacked."""
        return self._live[0] + self._live[1]

    @property
    def backed(self) -> int:
        """Entries with a host copy."""
        return self._live[1]

    def add(self, entry: Entry, *, backed: bool) -> None:
        """Append at the most recent end."""
        self._clock += 1
        self._place(entry, self._clock, backed)

    def discard(self, entry: Entry) -> None:
        """Take out, if it is in."""
        if entry.lru:
            self._live[entry.backed] -= 1
            entry.lru = 0

    def reback(self, entry: Entry, *, backed: bool) -> None:
        """Its host copy came or went: change lists, keep its recency."""
        if entry.lru and entry.backed is not backed:
            tick = entry.lru
            self.discard(entry)
            self._place(entry, tick, backed)

    def pop(self, *, only_backed: bool = False) -> Entry | None:
        """The next entry to evict: the oldest backed one, else (unless only_backed) the oldest of all."""
        for backed in (True,) if only_backed else (True, False):
            heap = self._heaps[backed]
            while heap:
                tick, entry = heapq.heappop(heap)
                if entry.lru == tick and entry.backed is backed:
                    self.discard(entry)
                    return entry
        return None

    def _place(self, entry: Entry, tick: int, backed: bool) -> None:
        entry.lru, entry.backed = tick, backed
        self._live[backed] += 1
        heap = self._heaps[backed]
        heapq.heappush(heap, (tick, entry))
        if len(heap) > 2 * self._live[backed] + _SLACK:
            heap[:] = [(t, e) for t, e in heap if e.lru == t and e.backed is backed]
            heapq.heapify(heap)
