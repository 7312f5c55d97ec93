"""One running sequence of the program: its tokens, those that wait to be processed, its random stream.

A token that was chosen or forced *waits* until a forward pass processes it; the index's frontier counts
processed tokens only. After a decode round one token waits, the pending one. Between two rounds a server may
drop it (`keep`), append tokens of its own (`force`), or ask for a snapshot right after it (`boundary`).
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from hpc_index.ids import Int32Array, Int32Buffer
from hpc_index.records import Lane
from hpc_index.requests import Request, Suspended
from hpc_qwen35.sampling import LaneSampler, SamplerPayload

__all__ = ["Payload", "Sequence"]

_ROOM = 1024  # tokens reserved beyond the prompt before the buffer grows


@attrs.frozen(eq=False)
class Payload:
    """What a suspended lane needs beyond its tokens (D7).

    waiting: how many of the last tokens were chosen or forced and not processed; they go through the decode
    path again. boundary: position at which an output-boundary snapshot is due, or None.
    """

    sampler: SamplerPayload
    waiting: int
    boundary: int | None


@attrs.define(eq=False)
class Sequence:
    """A request and, once attached, the lane that runs it.

    prefill_end: prompt tokens [0, prefill_end) are processed by prefill; the rest of a resumed lane's
    tokens waits. waiting: chosen or forced, oldest first. chosen: tokens of `waiting` that the last step
    chose, which `keep` may still drop. boundary: position at which a snapshot is due, or None.
    """

    request: Request
    sampler: LaneSampler
    prefill_end: int
    generated: int = 0
    waiting: list[int] = attrs.Factory(list)
    chosen: int = 0
    boundary: int | None = None
    failed: bool = False
    lane: Lane = attrs.field(init=False)
    row: torch.Tensor = attrs.field(init=False)
    _tokens: Int32Array = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        prompt = self.request.prompt.tokens
        self._tokens = np.empty(len(prompt) + _ROOM, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt

    @classmethod
    def start(cls, request: Request, vocab: int, resume: Suspended | None) -> Sequence:
        """A sequence without a lane yet, for a new request or for one that goes on from `resume`.

        Raises:
            ValueError: a sampling option is out of range.
            TypeError: `resume` is not from this program.
        """
        tokens = request.prompt.tokens
        if resume is None:
            return cls(request, LaneSampler(request.sampling, tokens, vocab), len(tokens))
        payload = resume.payload
        if not isinstance(payload, Payload):
            raise TypeError(f"resume.payload is {type(payload).__name__}, not this program's own Payload")
        end = len(tokens) - payload.waiting
        return cls(
            request,
            LaneSampler.resume(request.sampling, payload.sampler, vocab),
            end,
            generated=resume.generated,
            waiting=tokens[end:].tolist(),
            boundary=payload.boundary,
        )

    def attach(self, lane: Lane) -> None:
        """Run on this lane from now on. `row` is a view of the index's live page row."""
        self.lane = lane
        self.row = torch.from_numpy(lane.pages[0])

    @property
    def prefilling(self) -> bool:
        """Prompt tokens are left for prefill."""
        return self.lane.frontier < self.prefill_end

    @property
    def end(self) -> int:
        """Position after the last token, processed or waiting."""
        return (self.prefill_end if self.prefilling else self.lane.frontier) + len(self.waiting)

    def part(self, begin: int, end: int) -> Int32Buffer:
        """Known tokens [begin, end): a view, to be used before the next `append`."""
        return self._tokens[begin:end]

    def append(self, tokens: list[int], *, chosen: int) -> None:
        """Let tokens wait; the last `chosen` of them were chosen by this step."""
        end = self.end
        need = end + len(tokens)
        if need > len(self._tokens):
            grown = np.empty(2 * need, dtype=np.int32)
            grown[:end] = self._tokens[:end]
            self._tokens = grown
        self._tokens[end:need] = tokens
        self.waiting += tokens
        self.chosen = chosen
        self.generated += len(tokens)

    def keep(self, count: int) -> None:
        """Drop all but the first `count` of the tokens the last step chose; their draws stay used.

        Raises:
            ValueError: count is negative or more than that step chose.
        """
        if not 0 <= count <= self.chosen:
            raise ValueError(f"keep {count} tokens: the last step chose {self.chosen}")
        drop = self.chosen - count
        if drop:
            self.sampler.take_back(self.waiting[-drop:])
            del self.waiting[-drop:]
            self.generated -= drop
        self.chosen = count

    def take_waiting(self, count: int) -> Int32Buffer:
        """The first `count` waiting tokens, which a forward pass is about to process."""
        return self.part(self.lane.frontier, self.lane.frontier + count)

    def processed(self, count: int) -> None:
        """A forward pass has processed the first `count` waiting tokens and the index has committed them."""
        del self.waiting[:count]
        self.chosen = 0

    def suspended(self) -> Suspended:
        """Everything a later lane needs to go on (D7)."""
        payload = Payload(self.sampler.payload(), len(self.waiting), self.boundary)
        return Suspended(tokens=self._tokens[: self.end].copy(), generated=self.generated, payload=payload)
