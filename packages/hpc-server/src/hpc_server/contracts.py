"""What the server asks of a program: the protocol that a model fits by shape (hpc-qwen35, ScriptedProgram).

Every method is called from one thread, the engine worker. `now` is seconds on a monotonic clock. A program
decides nothing about caching: it moves the bytes of the index's plans and computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hpc_index.ids import Int32Buffer, LaneId
from hpc_index.records import Finish, IndexStats, Quote, Stale
from hpc_index.requests import PrefillStep, Request, StepOut, Suspended

__all__ = ["Program", "ProgramStats"]


class ProgramStats(Protocol):
    """Counters of a program; `index` is the cache's own."""

    @property
    def index(self) -> IndexStats:
        """The index's gauges and counters."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The program's own monotonic counters: `restored_bytes`, `written_bytes`, `prefill_tokens` …"""


class Program(Protocol):
    """A model with its cache (design §2)."""

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence, prompt and reply together."""

    @property
    def vocab_size(self) -> int:
        """Addressable token ids are [0, vocab_size)."""

    def quote(self, r: Request, now: float) -> Quote:
        """What admission would do. Changes and pins nothing."""

    def admit(self, q: Quote, r: Request, now: float, resume: Suspended | None) -> LaneId | Stale:
        """Start the request on a lane, restoring what the quote promised; Stale if it no longer holds."""

    def prefill(self, lane: LaneId, budget: int, now: float) -> PrefillStep:
        """One chunk of at most `budget` prompt tokens; the last one also chooses the first token."""

    def decode(self, lanes: Sequence[LaneId], now: float) -> list[StepOut]:
        """One round for lanes whose prefill is done: process the pending token, choose the next."""

    def keep(self, lane: LaneId, n: int, now: float) -> None:
        """Keep only the first n tokens of the last step's, before they become part of the sequence."""

    def force(self, lane: LaneId, tokens: Int32Buffer, now: float) -> None:
        """Continue with these tokens: processed like prompt tokens, the last one pending."""

    def boundary(self, lane: LaneId, now: float) -> None:
        """Snapshot the state right after the pending token, once it is processed (§12.3)."""

    def finish(self, lane: LaneId, how: Finish, now: float) -> Suspended | None:
        """End a lane in any state; what it computed stays reusable. Suspended only for Ending.SUSPENDED."""

    def prefetch(self, r: Request, now: float) -> int:
        """Copy host blocks of a waiting request into spare device pages; bytes on their way (§6.6)."""

    def poll(self, now: float) -> bool:
        """Take note of copies that landed. True if one did: retry admission."""

    def stats(self) -> ProgramStats:
        """Gauges and counters, consistent at this moment."""

    def close(self) -> None:
        """Release every lane and wait for copies in flight. Nothing may be called afterwards."""
