"""Small programs for tests: a random model, a record of its passes, and their replay without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from hpc_index import CostModel
from hpc_index.ids import Int32Buffer, LaneId
from hpc_index.records import (
    Ending,
    Finish,
    HintKind,
    Lane,
    Plan,
    PromptView,
    Quote,
    Readiness,
    Stale,
    TapHint,
    TurnEnd,
)
from hpc_index.requests import Outcome, Request, Sampling, StepOut, Suspended, TokenLogprobs
from hpc_qwen35.config import Qwen35Config, parse_config
from hpc_qwen35.init import initialise
from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.load import assemble
from hpc_qwen35.memory import Memory
from hpc_qwen35.model import Qwen35Model
from hpc_qwen35.options import Options
from hpc_qwen35.program import Qwen35Program
from hpc_qwen35.state_pool import StatePool
from hpc_qwen35.weights import Qwen35Weights, fuse_tensors

VOCAB = 97
GREEDY = Sampling(temperature=0.0, logprobs=3)
CPU = torch.device("cpu")


def small_config() -> Qwen35Config:
    """Two GDN layers and two attention layers, shared heads in both."""
    return parse_config(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        }
    )


def small_weights(config: Qwen35Config, device: torch.device = CPU) -> Qwen35Weights:
    tensors = initialise(config, torch.Generator().manual_seed(1))
    return fuse_tensors(config, tensors, device, torch.float32)


@attrs.frozen(eq=False)
class Pass:
    """One lane's part of one forward pass: tokens from `base` on, in a batch of `rows` (0: prefill)."""

    base: int
    tokens: tuple[int, ...]
    rows: int

    @property
    def end(self) -> int:
        return self.base + len(self.tokens)


@attrs.define(eq=False)
class Recorder:
    """A model that tells of every pass: (slot, pass)."""

    model: Qwen35Model
    note: Callable[[int, Pass], None]

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def prefill(self, tokens: torch.Tensor, base: int, slot: int, row: torch.Tensor) -> torch.Tensor:
        self.note(slot, Pass(base, tuple(tokens.tolist()), 0))
        return self.model.prefill(tokens, base, slot, row)

    def decode(
        self,
        tokens: torch.Tensor,
        positions: Sequence[int],
        slots: Sequence[int],
        rows: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        for token, position, slot in zip(tokens.tolist(), positions, slots, strict=True):
            self.note(slot, Pass(position, (token,), len(slots)))
        return self.model.decode(tokens, positions, slots, rows)


class Cold:
    """The same weights with pools of its own and no cache: replays passes as they were cut."""

    def __init__(self, weights: Qwen35Weights, config: Qwen35Config, rows: int = 8, pages: int = 40) -> None:
        self.kv = KvPool(config, "fp32", rows * pages, weights.device)
        self.states = StatePool(config, rows, weights.device, torch.float32)
        self.model = Qwen35Model(config, weights, self.kv, self.states)
        self._rows = [torch.arange(i * pages, (i + 1) * pages, dtype=torch.int32) for i in range(rows)]
        self.frontier = 0

    def replay(self, passes: Sequence[Pass]) -> torch.Tensor:
        """Logits [vocab] after the last pass. Other rows of a batch hold unrelated content."""
        logits = torch.empty(0)
        for p in passes:
            assert p.base == self.frontier
            if p.rows == 0:
                hidden = self.model.prefill(torch.tensor(p.tokens), p.base, 0, self._rows[0])[None]
            else:
                others = list(range(1, p.rows))
                hidden = self.model.decode(
                    torch.tensor([p.tokens[0], *others]),
                    [p.base, *(0 for _ in others)],
                    [0, *others],
                    [self._rows[0], *(self._rows[i] for i in others)],
                )
            self.frontier = p.end
            logits = self.model.logits(hidden)[0]
        return logits

    def image(self) -> bytes:
        return bytes(self.states.bytes[0].cpu().numpy())

    def columns(self, begin: int, end: int) -> torch.Tensor:
        """KV of tokens [begin, end), every layer."""
        return columns(self.kv, self._rows[0], begin, end)


def columns(kv: KvPool, row: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    at = torch.arange(begin, end)
    return torch.stack([layer[row[at // 64].long(), at % 64].cpu() for layer in kv.layers])


@attrs.define(eq=False)
class Reply:
    quote: Quote
    tokens: list[int] = attrs.Factory(list)
    logprobs: list[TokenLogprobs] = attrs.Factory(list)

    def take(self, step: StepOut) -> None:
        assert step.outcome in (Outcome.TOKENS, Outcome.STOPPED)
        self.tokens += step.tokens.tolist()
        self.logprobs += step.logprobs


class Bench:
    """A program, driven one request at a time or several together."""

    def __init__(self, device: torch.device = CPU, **options: Any) -> None:
        self.config = small_config()
        self.weights = small_weights(self.config, device)
        asked = Options(kv_capacity=4096, host_cache_mib=4, threads=1, kv_dtype="fp32")
        asked = attrs.evolve(asked, **options)
        self.program: Qwen35Program = assemble(
            self.config,
            self.weights,
            asked,
            Memory(process_limit=1 << 30, device_free=0),
            # So small a model prefills faster than it restores; these tests are about restoring.
            cost=CostModel(token_seconds=1e-3),
        )
        self.program._model = Recorder(self.program._model, self._note)  # type: ignore[assignment]
        self.now = 0.0
        # How each token prefix was last computed, and each lane's own way to where it is.
        self._ways: dict[bytes, list[Pass]] = {}
        self._way: dict[LaneId, list[Pass]] = {}

    def _note(self, slot: int, p: Pass) -> None:
        s = next(s for s in self.program._lanes.values() if s.lane.slot == slot)
        if s.lane.id not in self._way:
            self._way[s.lane.id] = list(self._ways.get(s.part(0, p.base).tobytes(), []))
        way = self._way[s.lane.id]
        way.append(p)
        self._ways[s.part(0, p.end).tobytes()] = list(way)

    def same_as_cold(self, lane: LaneId) -> None:
        """State and KV of a running lane are the bits that its passes give without a cache."""
        s = self.program._lanes[lane]
        cold = Cold(self.weights, self.config)
        cold.replay(self._way[lane])
        assert cold.frontier == s.lane.frontier
        image = self.program.tensors()["states"][s.lane.slot]
        assert bytes(image.cpu().numpy()) == cold.image()
        kv = self.program._copies.pools[0]
        assert isinstance(kv, KvPool)
        ours = columns(kv, s.row, 0, cold.frontier)
        assert torch.equal(ours.view(torch.int32), cold.columns(0, cold.frontier).view(torch.int32))

    def request(
        self, tokens: Int32Buffer, max_new: int = 4, sampling: Sampling = GREEDY, **view: Any
    ) -> Request:
        return Request(PromptView(tokens, **view), max_new, sampling, ignore_eos=True)

    def admit(self, r: Request, resume: Suspended | None = None) -> tuple[LaneId, Quote]:
        self.now += 1.0
        q = self.program.quote(r, self.now)
        assert q.readiness is Readiness.READY, q
        lane = self.program.admit(q, r, self.now, resume)
        assert not isinstance(lane, Stale), lane
        return lane, q

    def lane(self, lane: LaneId) -> Lane:
        return self.program._lanes[lane].lane

    def prefill(self, lane: LaneId, reply: Reply, budget: int = 2048) -> None:
        while True:
            step = self.program.prefill(lane, budget, self.now)
            assert not step.failed
            assert not step.short
            if step.done:
                if step.first is not None:
                    reply.take(step.first)
                return

    def decode(self, lanes: Sequence[LaneId], replies: Sequence[Reply]) -> None:
        for reply, step in zip(replies, self.program.decode(lanes, self.now), strict=True):
            reply.take(step)

    def finish(self, lane: LaneId, how: Ending = Ending.DONE) -> Suspended | None:
        return self.program.finish(lane, Finish(how, TurnEnd.FINAL), self.now)

    def run(self, tokens: Int32Buffer, max_new: int = 4, budget: int = 2048, **view: Any) -> Reply:
        """One request from admission to its end."""
        lane, quote = self.admit(self.request(tokens, max_new, **view))
        reply = Reply(quote)
        self.prefill(lane, reply, budget)
        while len(reply.tokens) < max_new:
            self.decode([lane], [reply])
        self.finish(lane)
        return reply

    def decode_together(self, count: int, *, rounds: int) -> list[LaneId]:
        """Prompts of different lengths, prefilled one by one and then decoded in one batch."""
        lanes, replies = [], []
        for i in range(count):
            lane, quote = self.admit(self.request(prompt(20 + i, 40 + 17 * i), max_new=rounds + 1))
            reply = Reply(quote)
            self.prefill(lane, reply)
            lanes.append(lane)
            replies.append(reply)
        for _ in range(rounds):
            self.decode(lanes, replies)
        return lanes

    def balanced(self) -> None:
        """Nothing runs, so nothing is held but cache."""
        s = self.program.stats().index
        assert (s.lanes, s.slots_active, s.tickets_open) == (0, 0, 0)
        assert set(s.pages_active) == set(s.pages_filling) == {0}
        for free, cached, pool in zip(
            s.pages_free, s.pages_cached, self.program.index.geometry.pools, strict=True
        ):
            assert free + cached == pool.pages


class Patched:
    """A copy engine whose `run` is another."""

    def __init__(self, engine: object, run: Callable[[Plan], int]) -> None:
        self._engine = engine
        self.run = run

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def prompt(seed: int, length: int) -> Int32Buffer:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)


def join(*parts: Int32Buffer | list[int]) -> Int32Buffer:
    return np.concatenate([np.asarray(p, dtype=np.int32) for p in parts])


def structural(position: int) -> tuple[TapHint, ...]:
    return (TapHint(position, HintKind.STRUCTURAL),)
