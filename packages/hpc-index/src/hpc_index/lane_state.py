"""What the index knows of one running sequence."""

from __future__ import annotations

import attrs
import numpy as np

from hpc_index.ids import Int32Array, Int32Buffer, Ticket
from hpc_index.keys import BlockKeys, token_bytes
from hpc_index.records import Lane, PromptView, SnapshotKind
from hpc_index.snapshots import Snapshot
from hpc_index.taps import PlannedTap
from hpc_index.transfers import Hold
from hpc_index.tree import Node

__all__ = ["LaneState", "Pending"]


@attrs.define(eq=False)
class Pending:
    """A captured state that waits for the blocks it anchors on (§7.4).

    ticket: the plan that captures it, None for one that the program captured inside a chunk.
    """

    position: int
    slot: int
    pages: tuple[int, ...]
    kind: SnapshotKind
    ticket: Ticket | None


@attrs.define(eq=False)
class LaneState:
    """One lane, from stage to finish.

    root: of its namespace; None if nothing of it may be kept. path: the blocks of its committed tokens that
    are in the tree, each counted in `refs`. A page of its rows belongs to it unless the block of the same
    index on `path` owns that page.
    tokens: int32, the first lane.frontier are committed; the prompt's are there from the start.
    frontiers: committed tokens of each pool. mapped: blocks mapped in each pool.
    source, hold: what it resumes from, pinned until its activation lands.
    taps: planned and not yet due, by position. reserved: slots given out in a chunk, by position.
    last_tap: the tap that the next one supersedes (§9.3). mark: deepest snapshot before the frontier.
    waits: restores that its content depends on. Until they land it publishes nothing; doomed: one failed.
    slot_ticket: the restore that writes its slot, while in flight.
    event: no block completes and no tap is due before the frontier reaches it.
    """

    lane: Lane
    prompt: PromptView
    n: int
    max_new: int
    root: Node | None
    path: list[Node]
    tokens: Int32Array
    frontiers: list[int]
    mapped: list[int]
    base: int
    source: Snapshot | None
    hold: Hold
    staged: bool = True
    taps: list[PlannedTap] = attrs.field(factory=list)
    reserved: dict[int, int] = attrs.field(factory=dict)
    pending: list[Pending] = attrs.field(factory=list)
    last_tap: Snapshot | None = None
    mark: int = 0
    chunk_end: int = 0
    budget: int = 0
    waits: set[Ticket] = attrs.field(factory=set)
    doomed: bool = False
    slot_ticket: Ticket | None = None
    event: int = 0

    def append(self, new: Int32Buffer) -> None:
        """Tokens at positions from the frontier on; the frontier itself moves in `commit`."""
        begin = self.lane.frontier
        end = begin + len(new)
        if end > len(self.tokens):
            grown = np.zeros(max(end, 2 * len(self.tokens)), np.int32)
            grown[: len(self.tokens)] = self.tokens
            self.tokens = grown
        self.tokens[begin:end] = new

    def keys(self, block: int, lead: int, begin_block: int = 0) -> BlockKeys:
        """Keys of its committed tokens. Blocks before begin_block are left blank, which costs nothing."""
        blank = 4 * block * begin_block
        raw = bytes(blank) + token_bytes(self.tokens[block * begin_block : self.lane.frontier])
        return BlockKeys(raw, self.prompt.extras, block, lead)

    def private_pages(self, pool: int, begin: int = 0) -> list[int]:
        """Pages of its row from block `begin` on that no block of the tree owns."""
        row = self.lane.pages[pool][begin : self.mapped[pool]].tolist()
        shared = {n.pages[pool] for n in self.path[begin:] if n.pages}
        return [page for page in row if page >= 0 and page not in shared]
