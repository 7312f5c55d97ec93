"""Encoded texts of earlier requests: of a growing conversation only what is new is tokenised."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

from hpc_index.ids import Int32Buffer

__all__ = ["TextCache"]

_ENTRY_BYTES = 400


class TextCache:
    """Texts to ids, bounded in bytes, the least recently used one leaves first.

    Kept by namespace: how long a prompt takes to encode must not tell what another namespace sent (D14).
    Its methods may be called from any thread.
    """

    def __init__(self, encode: Callable[[str], Int32Buffer], capacity_bytes: int) -> None:
        """Raises ValueError for a negative capacity; 0 keeps nothing."""
        if capacity_bytes < 0:
            raise ValueError(f"text cache capacity {capacity_bytes} bytes, need at least 0")
        self._encode = encode
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._ids: OrderedDict[tuple[bytes, str], Int32Buffer] = OrderedDict()
        self._hits = 0
        self._misses = 0
        self._evicted = 0

    def encode(self, text: str, salt: bytes, *, keep: bool = True) -> Int32Buffer:
        """Ids of a text, int32 [k], read-only. `keep` False leaves nothing behind (§7.7)."""
        key = (salt, text)
        with self._lock:
            ids = self._ids.get(key)
            if ids is not None:
                self._hits += 1
                self._ids.move_to_end(key)
                return ids
            self._misses += 1
        ids = self._encode(text)
        ids.flags.writeable = False
        size = _size(text, ids)
        with self._lock:
            if keep and size <= self._capacity and key not in self._ids:
                self._ids[key] = ids
                self._bytes += size
                while self._bytes > self._capacity:
                    (_, old), old_ids = self._ids.popitem(last=False)
                    self._bytes -= _size(old, old_ids)
                    self._evicted += 1
        return ids

    def counters(self) -> Mapping[str, int]:
        """Hits, misses and evictions; `text_cache.bytes` is a gauge."""
        with self._lock:
            return {
                "text_cache.hit": self._hits,
                "text_cache.miss": self._misses,
                "text_cache.evicted": self._evicted,
                "text_cache.bytes": self._bytes,
            }


def _size(text: str, ids: Int32Buffer) -> int:
    return len(text) * (1 if text.isascii() else 4) + ids.nbytes + _ENTRY_BYTES
