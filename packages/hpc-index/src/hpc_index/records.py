"""The records that cross the seam between the index, a program that owns the bytes, and a server.

Both sides import this module and nothing else of each other. Every record is a value: it is never
changed after it was made, except `Lane`, whose rows and frontier the index keeps current. Positions and
lengths count tokens, `now` and durations are seconds, sizes are bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias

import attrs
import numpy as np

from hpc_index.ids import Int32Array, Int32Buffer, LaneId, SnapshotId, Ticket, UInt64Array

__all__ = [
    "Chunk",
    "Copy",
    "CopyKind",
    "Ending",
    "Finish",
    "Geometry",
    "Grown",
    "HintKind",
    "IndexStats",
    "Lane",
    "Plan",
    "Plans",
    "Pool",
    "PromptView",
    "Quote",
    "Readiness",
    "Reason",
    "Short",
    "Skipped",
    "SnapshotKind",
    "Span",
    "Stale",
    "Stream",
    "TapHint",
    "TapSlot",
    "TurnEnd",
    "int32",
]


class HintKind(enum.Enum):
    """Why a position of a prompt is a likely reuse point (§7.1)."""

    EXPLICIT = "explicit"
    """The client named it. Never dropped for being near another tap."""
    AUTOMATIC = "automatic"
    """A protocol's default marker: planned like a structural boundary, published as an ordinary tap."""
    OPENER = "opener"
    """Start of the final assistant generation opener: the next turn may re-render what follows."""
    STRUCTURAL = "structural"
    """End of the tools, or of the leading system block: new conversations share what lies before."""
    MESSAGE = "message"
    """A message boundary. Never a tap itself; ladder taps snap to it."""


@attrs.frozen
class TapHint:
    """A likely reuse point: the state after tokens [0, position)."""

    position: int
    kind: HintKind


@attrs.frozen
class Span:
    """Tokens [begin, end) of one media item. Nothing resumes or taps strictly inside (§6.1)."""

    begin: int
    end: int


@attrs.frozen(eq=False)
class PromptView:
    """What the index sees of a prompt.

    tokens: int32 [n].
    extras: uint64 [ceil(n / block)] or None; the cumulative media key of every block that the prompt
        touches, the last partial one included (§5.1). Blocks beyond the prompt keep the last value.
    cache_salt: namespace (D14). Prompts of different salts never share anything.
    hints: likely reuse points, in any order.
    spans: media spans, in order of begin.
    cacheable: False leaves nothing behind and reuses nothing (§7.7).
    """

    tokens: Int32Buffer
    extras: UInt64Array | None = None
    cache_salt: bytes = b""
    hints: tuple[TapHint, ...] = ()
    spans: tuple[Span, ...] = ()
    cacheable: bool = True


@attrs.frozen
class Pool:
    """One growing KV pool: `pages` pages of `page_bytes`, committed `lag` tokens behind the frontier.

    lag is 0 for the text model's KV and 1 for an MTP layer, whose column t needs token t + 1.
    """

    name: str
    pages: int
    lag: int
    page_bytes: int


@attrs.frozen
class Geometry:
    """Sizes of everything the index keeps a ledger of.

    block: tokens of a KV block and of a page (D25).
    unit: snapshots lie on multiples of it; it divides block. 1 means any frontier (R3).
    pools: one or two KV pools.
    lanes: most sequences that run at once.
    slots: state images on the device, active ones and snapshots in one numbering; at least `lanes`,
        and more than `lanes` if anything is to be kept.
    image_bytes: one state image.
    slab_bytes: one host slab, which holds one block of all pools or one piece of an image.
    slabs: host slabs; 0 means no host tier.
    slabs_per_chunk: slabs of one pinned allocation; a slab never crosses chunks (§5.4).
    """

    block: int
    unit: int
    pools: tuple[Pool, ...]
    lanes: int
    slots: int
    image_bytes: int
    slab_bytes: int
    slabs: int
    slabs_per_chunk: int

    @property
    def image_slabs(self) -> int:
        """Slabs that one state image takes: ceil(image_bytes / slab_bytes)."""
        return -(-self.image_bytes // self.slab_bytes)

    @property
    def snapshot_slots(self) -> int:
        """Slots beyond the lanes' own: how many images stay on the device."""
        return self.slots - self.lanes


class CopyKind(enum.Enum):
    """What one copy moves. Ids are pages (P), host slabs (H) or state slots (S)."""

    PAGE_TO_SLAB = "page_to_slab"
    """src P [k] of one pool, dst H [k]: the pool's part of each slab."""
    SLAB_TO_PAGE = "slab_to_page"
    """src H [k], dst P [k] of one pool."""
    PAGE_TO_PAGE = "page_to_page"
    """src P [k], dst P [k] of one pool; the first `columns` tokens of each page."""
    SLOT_TO_SLABS = "slot_to_slabs"
    """src S [1], dst H [image_slabs]: the image's bytes in order over the slabs."""
    SLABS_TO_SLOT = "slabs_to_slot"
    """src H [image_slabs], dst S [1]."""
    SLOT_TO_SLOT = "slot_to_slot"
    """src S [1], dst S [1]."""
    ZERO_SLOT = "zero_slot"
    """src empty, dst S [1]: the state before any token."""


@attrs.frozen(eq=False)
class Copy:
    """One copy of a plan. `pool` and `columns` are 0 where the kind has no use for them."""

    kind: CopyKind
    src: Int32Array
    dst: Int32Array
    pool: int = 0
    columns: int = 0


class Stream(enum.Enum):
    """Where a plan runs. Each stream executes its plans in order (§11.1)."""

    RESTORE = "restore"
    """Host to device. Nothing waits for it but the layers that read what it brings (§6.5)."""
    WRITE = "write"
    """Device to host, after the compute work queued so far."""
    COMPUTE = "compute"
    """On the device, in order with the forward passes; it has landed once it is enqueued."""


@attrs.frozen(eq=False)
class Plan:
    """Copies to run in order on one stream, after the plans named in `after` and all before it on its stream.

    The program reports the end of every plan once, with `PrefixIndex.landed(ticket, ok)`.
    """

    ticket: Ticket
    stream: Stream
    after: tuple[Ticket, ...]
    copies: tuple[Copy, ...]


Plans: TypeAlias = tuple[Plan, ...]
"""Plans in the order in which they are to be enqueued."""


class Readiness(enum.Enum):
    """Can a request start (§6.3)? A blocked one keeps its place; an infeasible one never will."""

    READY = "ready"
    TEMPORARILY_BLOCKED = "temporarily_blocked"
    PERMANENTLY_INFEASIBLE = "permanently_infeasible"


class Reason(enum.Enum):
    """Why a request cannot start now, or why reuse stopped where it did."""

    # blocked_by
    NO_LANE = "no_lane"
    """Every lane runs."""
    NO_PAGES = "no_pages"
    """Running lanes hold the pages that it needs."""
    POOL_TOO_SMALL = "pool_too_small"
    """It needs more pages than a pool has."""
    FILLING = "filling"
    """What it would resume from is still being copied."""
    # stopped_by
    NOT_CACHEABLE = "not_cacheable"
    """The request asked for no caching."""
    EMPTY = "empty"
    """Nothing of this prompt was ever seen in this namespace (its first block is new)."""
    DIVERGED = "diverged"
    """Reuse reaches the last snapshot before the prompt leaves what is cached."""
    NO_SNAPSHOT = "no_snapshot"
    """More blocks are cached than reused: no snapshot lies at their end."""
    COST = "cost"
    """A deeper snapshot exists; restoring it would take longer than prefilling (§6.2, D2)."""
    CAPACITY = "capacity"
    """A deeper snapshot exists; its pages do not fit now (§6.3)."""
    COMPLETE = "complete"
    """All that a prompt of this length may reuse was reused (F = n - 1)."""


@attrs.frozen
class Quote:
    """What admission would do now (§6.1-6.3). Pins nothing; `stage` re-validates it.

    reuse: tokens resumed from, the frontier of `source` (0 from the root).
    matched: tokens of the longest cached block path, reusable or not.
    restore_bytes: bytes that must come from the host.
    max_new: as asked. epoch: state of the index when it was made.
    """

    readiness: Readiness
    blocked_by: Reason | None
    stopped_by: Reason | None
    source: SnapshotId | None
    reuse: int
    matched: int
    restore_bytes: int
    max_new: int
    epoch: int


@attrs.frozen
class Stale:
    """A quote that no longer holds. Quote again; the request is not failed."""

    why: str


@attrs.define(eq=False)
class Lane:
    """One running sequence, kept current by the index until `finish`.

    frontier: tokens whose KV and state are committed.
    pages: a row a pool, int32 [that pool's pages]; row[b] is the page of block b, -1 where none is
        mapped. The arrays stay the same objects for the lane's life.
    slot: the lane's active state image.
    """

    id: LaneId
    frontier: int
    pages: tuple[Int32Array, ...]
    slot: int


@attrs.frozen
class TapSlot:
    """Capture the state after tokens [0, position) into this slot, within the chunk."""

    position: int
    slot: int


@attrs.frozen
class Chunk:
    """Prefill up to `end` and capture `taps` on the way (empty unless the program can tap inside)."""

    end: int
    taps: tuple[TapSlot, ...]


@attrs.frozen
class Grown:
    """The rows now map every position asked for."""


@attrs.frozen
class Short:
    """The pools cannot give `missing` more pages. `landing` of them come free once copies land."""

    missing: int
    landing: int


@attrs.frozen
class Skipped:
    """A capture that did not happen, and why. It is counted in the stats under that reason."""

    why: str


class SnapshotKind(enum.Enum):
    """How a snapshot came to be (D9)."""

    TAP = "tap"
    ENDPOINT = "endpoint"
    BOUNDARY = "boundary"
    """A tap that other conversations may share: an explicit or structural one."""
    OUTPUT_BOUNDARY = "output_boundary"
    """Inside generated text: after `</think>`, before `<tool_call>` (§12.3)."""


class TurnEnd(enum.Enum):
    """How a turn ended, which says something about whether it continues (D19)."""

    FINAL = "final"
    TOOL_CALL = "tool_call"
    LENGTH = "length"


class Ending(enum.Enum):
    """How a lane ends."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """A forward pass failed: no endpoint, only taps already captured."""
    SUSPENDED = "suspended"
    """Its pages are needed: the endpoint lies at its exact frontier and is never skipped (D7)."""
    UNSTAGED = "unstaged"
    """It was staged and never activated."""


@attrs.frozen
class Finish:
    """How a lane ends, and if it is done, how its turn did."""

    how: Ending
    turn_end: TurnEnd | None = None


@attrs.frozen
class IndexStats:
    """Gauges and counters of an index, all since its construction.

    counters: monotonic, by name; every skip, drop, eviction and fallback has one. Names with a reason
        carry it after a dot (`taps_dropped.no_slot`).
    """

    blocks: int
    snapshots: int
    lanes: int
    pages_free: tuple[int, ...]
    pages_active: tuple[int, ...]
    pages_cached: tuple[int, ...]
    pages_filling: tuple[int, ...]
    slots_free: int
    slots_active: int
    slots_snapshot: int
    slabs_free: int
    slabs_used: int
    tickets_open: int
    counters: Mapping[str, int]


def int32(*values: int) -> Int32Array:
    """An int32 array of a few ids."""
    return np.array(values, dtype=np.int32)
