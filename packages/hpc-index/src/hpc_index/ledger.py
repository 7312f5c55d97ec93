"""Who holds which page, slot or slab: free ids, lowest first (§5.4, D6)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from hpc_index.errors import InvariantError

__all__ = ["Counters", "FreeList", "SlotLedger"]


class FreeList:
    """Ids 0..size - 1 of one kind. Taken lowest first, so that runs of copies stay long."""

    def __init__(self, what: str, size: int) -> None:
        self.what = what
        self.size = size
        self._heap = list(range(size))
        self._free = bytearray(b"\x01") * size

    def __len__(self) -> int:
        """Free ids."""
        return len(self._heap)

    def __contains__(self, item: int) -> bool:
        return 0 <= item < self.size and bool(self._free[item])

    def take(self, count: int) -> list[int]:
        """`count` ids, ascending. The caller made sure that so many are free."""
        if count > len(self._heap):
            raise InvariantError(f"{self.what}: {count} asked for, {len(self._heap)} free")
        taken = [heapq.heappop(self._heap) for _ in range(count)]
        for item in taken:
            self._free[item] = 0
        return taken

    def give(self, ids: Iterable[int]) -> None:
        """Return ids. Each must be taken, or a page would get two owners."""
        for item in ids:
            if not 0 <= item < self.size or self._free[item]:
                raise InvariantError(f"{self.what} {item} returned; it is not taken")
            self._free[item] = 1
            heapq.heappush(self._heap, item)


class SlotLedger:
    """State slots: lanes and snapshots share one numbering, snapshots at most `limit` of them (§5.4).

    A slot changes hands without a copy: a finishing lane's own slot becomes its endpoint's (§7.7).
    """

    def __init__(self, slots: int, limit: int) -> None:
        self._free = FreeList("slot", slots)
        self.limit = limit
        self.held = 0
        """Slots of snapshots, of captures not yet published, and reserved for taps."""

    @property
    def free(self) -> int:
        """Slots that nothing holds."""
        return len(self._free)

    @property
    def size(self) -> int:
        """All slots."""
        return self._free.size

    def __contains__(self, slot: int) -> bool:
        return slot in self._free

    @property
    def room(self) -> bool:
        """Whether a snapshot may take one more slot."""
        return self.held < self.limit

    def take_for_lane(self) -> int:
        """A slot for a lane's active state."""
        return self._free.take(1)[0]

    def take_for_snapshot(self) -> int | None:
        """A slot for a snapshot within the limit; None if there is none now."""
        if not self.room or not len(self._free):
            return None
        self.held += 1
        return self._free.take(1)[0]

    def freeze(self) -> None:
        """A lane's slot becomes a snapshot's."""
        self.held += 1

    def give_from_lane(self, slot: int) -> None:
        """A lane's slot comes free."""
        self._free.give((slot,))

    def give_from_snapshot(self, slot: int) -> None:
        """A snapshot's slot comes free."""
        self.held -= 1
        self._free.give((slot,))


class Counters(dict[str, int]):
    """Monotonic counters by name; a name with a reason carries it after a dot."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self[name] = self.get(name, 0) + amount
