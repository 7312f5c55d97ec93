"""Choosing tokens: one `LaneSampler` a request, one `choose` a round.

The rules apply in this order, each to what the one before left:

1. rows past the addressable vocabulary are cut off (lm_head has padding rows with non-zero weights);
2. repetition penalty, on prompt and generated tokens; 3. presence and frequency penalty, on generated
   tokens; 4. logit bias;
5. temperature 0 takes the largest logit, otherwise logits are divided by it;
6. top_k; 7. top_p of the renormalised rest; 8. min_p, relative to the most likely token.

Equal values rank by id, the lowest first, so exactly k tokens survive top_k and a nucleus has one form.
Log-probabilities are those of step 1: no penalty, bias, temperature or truncation enters them.

A request's random stream is a function of its seed and the draw's number (`uniform`), and a draw reads
nothing but its own row: neither batch mates nor a suspension can change it (D7).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import attrs
import numpy as np
import torch

from hpc_index.ids import Int32Array, Int32Buffer
from hpc_index.requests import Sampling, TokenLogprobs

__all__ = ["Choice", "Chosen", "LaneSampler", "SamplerPayload", "Unsampled", "choose", "uniform"]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Most nuclei of a large vocabulary lie within this many tokens, and to find these costs a tenth of a sort.
_NUCLEUS_GUESS = 1024
_SORTED_WHOLE = 8192
_FLOAT32_MAX = torch.finfo(torch.float32).max


class Chosen(NamedTuple):
    """A token, and its log-probabilities if the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None


@attrs.frozen
class Unsampled:
    """No token could be chosen for this lane, and why. Its sampler's state is unchanged."""

    why: str


Choice: TypeAlias = Chosen | Unsampled


@attrs.frozen(eq=False)
class SamplerPayload:
    """All that a suspended lane's sampler must carry to go on as if nothing had happened (D7).

    draws: numbers taken from the random stream so far.
    prompt: int32 [p], ids of the prompt, ascending, each once; empty without a repetition penalty.
    generated: int32 [g], ids generated so far, ascending, each once; empty without penalties.
    counts: int32 [g], how often each of them was.
    """

    draws: int
    prompt: Int32Array
    generated: Int32Array
    counts: Int32Array


def uniform(seed: int, draw: int) -> float:
    """Number `draw` of stream `seed`: a multiple of 2^-53 in [0, 1). Any integer is a seed (modulo 2^64).

    SplitMix64 read at a position instead of in sequence. The seed is mixed before it becomes the start of
    the stream, so that neighbouring seeds do not give streams shifted by one.
    """
    return (_mix(_mix(seed & _MASK64) + (draw + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014)."""
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


class LaneSampler:
    """The sampling state of one request: its draws so far, and what its penalties have seen.

    sampling: the request's options; ValueError names the first one out of range.
    prompt_tokens: int32 [n]; read only for the repetition penalty.
    vocab: addressable token ids are [0, vocab).
    """

    def __init__(self, sampling: Sampling, prompt_tokens: Int32Buffer, vocab: int) -> None:
        _check(sampling, vocab)
        self.sampling = sampling
        self.vocab = vocab
        self.draws = 0
        self._bias = _merged(sampling.logit_bias)
        self._repeats = sampling.repetition_penalty != 1.0
        self._penalises = (
            self._repeats or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self._counts: Counter[int] = Counter()
        self._prompt: frozenset[int] = frozenset(np.unique(prompt_tokens).tolist() if self._repeats else ())
        # Dense rows on the logits' device, made at the first use and kept current by `_touch`.
        self._offsets: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @classmethod
    def resume(cls, sampling: Sampling, payload: SamplerPayload, vocab: int) -> LaneSampler:
        """The sampler that `payload()` was taken from, under the same options."""
        sampler = cls(sampling, payload.prompt, vocab)
        sampler.draws = payload.draws
        sampler._counts.update(dict(zip(payload.generated.tolist(), payload.counts.tolist(), strict=True)))
        return sampler

    def payload(self) -> SamplerPayload:
        """A copy of the state, for `resume`."""
        generated = sorted(self._counts)
        return SamplerPayload(
            draws=self.draws,
            prompt=np.array(sorted(self._prompt), dtype=np.int32),
            generated=np.array(generated, dtype=np.int32),
            counts=np.array([self._counts[i] for i in generated], dtype=np.int32),
        )

    @property
    def plain(self) -> bool:
        """The choice is the largest raw logit: no state is read."""
        return self.sampling.temperature == 0.0 and not self._penalises and not self._bias

    def record(self, tokens: Iterable[int]) -> None:
        """Count tokens that became part of the reply without being chosen here (forced ones)."""
        if self._penalises:
            for token in tokens:
                self._counts[token] += 1
                self._touch(token)

    def take_back(self, tokens: Iterable[int]) -> None:
        """Uncount tokens that were chosen but not kept. Draws are not taken back: each is used once.

        ValueError for a token that was not counted.
        """
        if self._penalises:
            for token in tokens:
                if self._counts[token] == 0:
                    raise ValueError(f"token {token} was never recorded, so it cannot be taken back")
                self._counts[token] -= 1
                if self._counts[token] == 0:
                    del self._counts[token]
                self._touch(token)

    def adjusted(self, row: torch.Tensor) -> torch.Tensor:
        """Logits after penalties and bias: float32 [vocab] in and out, the input unchanged."""
        if self._repeats:
            r = self.sampling.repetition_penalty
            seen = self._dense_seen(row.device)
            row = torch.where(seen, torch.where(row > 0, row / r, row * r), row)
        if self._penalises or self._bias:
            row = row + self._dense_offsets(row.device)
        return row

    def _offset(self, token: int) -> float:
        count = self._counts.get(token, 0)
        presence = self.sampling.presence_penalty if count else 0.0
        offset = self._bias.get(token, 0.0) - presence - self.sampling.frequency_penalty * count
        return max(-_FLOAT32_MAX, min(_FLOAT32_MAX, offset))

    def _touch(self, token: int) -> None:
        if self._offsets is not None:
            self._offsets[token] = self._offset(token)
        if self._seen is not None:
            self._seen[token] = token in self._counts or token in self._prompt

    def _dense_offsets(self, device: torch.device) -> torch.Tensor:
        if self._offsets is None:
            ids = sorted(self._bias.keys() | self._counts.keys())
            values = np.zeros(self.vocab, dtype=np.float32)
            values[ids] = [self._offset(i) for i in ids]
            self._offsets = _lasting(values, device)
        return self._offsets

    def _dense_seen(self, device: torch.device) -> torch.Tensor:
        if self._seen is None:
            values = np.zeros(self.vocab, dtype=np.bool_)
            values[sorted(self._prompt | self._counts.keys())] = True
            self._seen = _lasting(values, device)
        return self._seen


def _lasting(
    values: np.ndarray[tuple[int], np.dtype[np.float32 | np.bool_]], device: torch.device
) -> torch.Tensor:
    """Values on the device, to be updated in place between passes too, where inference mode is off."""
    with torch.inference_mode(False):
        return torch.from_numpy(values).to(device)


@torch.no_grad()
def choose(logits: torch.Tensor, samplers: Sequence[LaneSampler]) -> list[Choice]:
    """One token a lane, in order, and each sampler one step further.

    logits: float32 [B, V] with V >= the samplers' vocab; row b belongs to samplers[b]; not changed.
    A row whose largest adjusted logit is not finite (a NaN, an infinity, every token at -inf) gives that lane
    an `Unsampled`; the others are not affected. -inf marks a token that must not be chosen.
    ValueError if shapes, dtype or vocabularies do not fit together.
    """
    if not samplers:
        return []
    vocab = samplers[0].vocab
    _check_batch(logits, samplers, vocab)
    rows = logits[:, :vocab]
    choices: dict[int, Choice] = {}
    plain = [b for b, sampler in enumerate(samplers) if sampler.plain]
    if plain:
        values, ids = (rows if len(plain) == len(samplers) else rows[plain]).max(dim=1)
        for b, peak, token in zip(plain, values.tolist(), ids.tolist(), strict=True):
            choices[b] = _chosen(rows[b], token, samplers[b]) if math.isfinite(peak) else _unsampled(peak)
    for b, sampler in enumerate(samplers):
        if b not in choices:
            choices[b] = _choose_one(rows[b], sampler)
    return [choices[b] for b in range(len(samplers))]


def _choose_one(row: torch.Tensor, sampler: LaneSampler) -> Choice:
    adjusted = sampler.adjusted(row)
    largest = adjusted.max(dim=0)
    peak, token = largest.values.item(), int(largest.indices)
    if not math.isfinite(peak):
        return _unsampled(peak)
    sampling = sampler.sampling
    if sampling.temperature > 0.0:
        token = _draw(adjusted, peak, sampling, uniform(sampling.seed, sampler.draws))
        sampler.draws += 1
    return _chosen(row, token, sampler)


def _chosen(row: torch.Tensor, token: int, sampler: LaneSampler) -> Chosen:
    sampler.record((token,))
    count = sampler.sampling.logprobs
    return Chosen(token, None if count is None else _logprobs(row, token, count))


def _unsampled(peak: float) -> Unsampled:
    return Unsampled(
        f"the largest logit after penalties and bias is {peak}; it must be finite "
        "(the row holds NaN or infinity, or masks every token)"
    )


def _draw(row: torch.Tensor, peak: float, sampling: Sampling, u: float) -> int:
    """The token at fraction u of the remaining weight, laid out in order of id. row: float32 [vocab]."""
    ids: torch.Tensor | None = None
    if 0 < sampling.top_k < row.shape[0]:
        ids = _largest(row, sampling.top_k)
        row = row[ids]
    # FP64, and the peak taken off first: no temperature can overflow, and 1.0 is the largest weight.
    weights = row.double().sub_(peak).div_(sampling.temperature).exp_()
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if ids is not None:
        ids, order = ids.sort()
        weights = weights[order]
    if sampling.min_p > 0.0:
        weights = weights * (weights >= sampling.min_p)
    index = _pick(weights, u)
    return index if ids is None else int(ids[index])


def _pick(weights: torch.Tensor, u: float) -> int:
    """The first index whose running sum exceeds u of the whole; never one of weight 0."""
    sums = weights.cumsum(0)
    # u is at most 1 - 2^-53, and that much of a sum rounds to less than the sum: the last one exceeds it.
    return int(torch.searchsorted(sums, u * sums[-1].item(), right=True))


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ids of the fewest tokens, most likely first, whose weight reaches top_p of the sum; at least one."""
    goal = top_p * weights.sum().item()
    if weights.shape[0] > _SORTED_WHOLE:
        ranked = _largest(weights, _NUCLEUS_GUESS)
        sums = weights[ranked].cumsum(0)
        if sums[-1].item() >= goal:
            return ranked[: int((sums < goal).sum()) + 1]
    values, ranked = weights.sort(descending=True, stable=True)
    return ranked[: int((values.cumsum(0) < goal).sum()) + 1]


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest values, largest first, equal ones by id. count: 1..len(values).

    `topk` leaves the order of equal values open, and BF16 models make many of them.
    """
    edge = values.topk(count).values[-1]
    above = (values > edge).nonzero().squeeze(1)
    ids = torch.cat((above, (values == edge).nonzero().squeeze(1)[: count - above.shape[0]]))
    return ids[values[ids].sort(descending=True, stable=True).indices]


def _logprobs(row: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Natural logarithms over the addressable vocabulary, of raw logits float32 [vocab]."""
    logs = row.double().log_softmax(0)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = _largest(row, min(count, row.shape[0]))
        top = tuple(zip(ids.tolist(), logs[ids].tolist(), strict=True))
    return TokenLogprobs(chosen=logs[token].item(), top=top)


def _merged(bias: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Bias by id; an id named twice gets the sum."""
    merged: dict[int, float] = {}
    for token, value in bias:
        merged[token] = merged.get(token, 0.0) + value
    return merged


def _check(sampling: Sampling, vocab: int) -> None:
    bounds = (
        ("vocab", vocab, vocab >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < math.inf, "0 or more and finite"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        ("top_p", sampling.top_p, 0.0 <= sampling.top_p <= 1.0, "within [0, 1]"),
        ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "within [0, 1]"),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "finite"),
        (
            "frequency_penalty",
            sampling.frequency_penalty,
            math.isfinite(sampling.frequency_penalty),
            "finite",
        ),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0.0 < sampling.repetition_penalty < math.inf,
            "above 0 and finite",
        ),
        (
            "logprobs",
            sampling.logprobs,
            sampling.logprobs is None or sampling.logprobs >= 0,
            "None or at least 0",
        ),
    )
    for name, value, fits, bound in bounds:
        if not fits:
            raise ValueError(f"{name} is {value}; it must be {bound}")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab:
            raise ValueError(f"logit_bias names token {token}; ids are within [0, {vocab})")
        if not math.isfinite(bias):
            raise ValueError(f"logit_bias of token {token} is {bias}; it must be finite")


def _check_batch(logits: torch.Tensor, samplers: Sequence[LaneSampler], vocab: int) -> None:
    if logits.dtype != torch.float32:
        raise ValueError(f"logits are {logits.dtype}; they must be torch.float32")
    if logits.ndim != 2 or logits.shape[0] != len(samplers) or logits.shape[1] < vocab:
        raise ValueError(f"logits are {list(logits.shape)}; they must be [{len(samplers)}, at least {vocab}]")
    for sampler in samplers:
        if sampler.vocab != vocab:
            raise ValueError(f"a sampler has vocab {sampler.vocab}; all of a batch must have {vocab}")
