"""Token choice against a slow model that follows the rules one at a time, in plain Python and numpy."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_index.requests import Sampling, TokenLogprobs
from hpc_qwen35.sampling import Choice, Chosen, LaneSampler, Unsampled, choose, uniform

VOCAB = 12
ROWS = 16
"""Rows of the logits: the last ones are padding, with the largest values of all."""

Float64: TypeAlias = npt.NDArray[np.float64]


def sampler(sampling: Sampling, prompt: tuple[int, ...] = (), vocab: int = VOCAB) -> LaneSampler:
    return LaneSampler(sampling, np.array(prompt, dtype=np.int32), vocab)


def padded(row: list[float]) -> torch.Tensor:
    return torch.tensor([[*row, *[99.0] * (ROWS - len(row))]], dtype=torch.float32)


def chosen(choice: Choice) -> int:
    assert isinstance(choice, Chosen)
    return choice.token


def adjusted_slowly(row: list[float], s: Sampling, prompt: tuple[int, ...], reply: list[int]) -> Float64:
    x = np.array(row, dtype=np.float64)
    for token in {*prompt, *reply}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(reply):
        x[token] -= s.presence_penalty + s.frequency_penalty * reply.count(token)
    for token, bias in s.logit_bias:
        x[token] += bias
    return x


def probabilities_slowly(x: Float64, s: Sampling) -> Float64:
    """The distribution after temperature and truncation; equal values rank by id."""
    rank = sorted(range(len(x)), key=lambda i: (-x[i], i))
    result: Float64 = np.zeros(len(x))
    if s.temperature == 0:
        result[rank[0]] = 1.0
        return result
    p = np.exp((x - x.max()) / s.temperature)
    most = p.max()
    kept = rank[: s.top_k] if s.top_k else rank
    mass = sum(p[i] for i in kept)
    nucleus, total = [], 0.0
    for i in kept:
        nucleus.append(i)
        total += p[i]
        if s.top_p < 1 and total >= s.top_p * mass:
            break
    for i in nucleus:
        if p[i] >= s.min_p * most:
            result[i] = p[i]
    result /= result.sum()
    return result


# Multiples of 1/4 are exact in FP32, and the small range makes ties common.
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)
TOKENS = st.integers(0, VOCAB - 1)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.0, 0.3, 0.77, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    logit_bias=st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, -0.5, 3.0, 100.0])), max_size=3).map(
        tuple
    ),
    seed=st.integers(-(2**70), 2**70),
)


@given(row=LOGITS, s=SAMPLINGS, prompt=st.lists(TOKENS, max_size=4), reply=st.lists(TOKENS, max_size=5))
def test_every_rule_follows_the_slow_model(
    row: list[float], s: Sampling, prompt: list[int], reply: list[int]
) -> None:
    """The token is where the slow model's running sum, in order of id, passes the draw's number."""
    lane = sampler(s, tuple(prompt))
    lane.record(reply)
    (choice,) = choose(padded(row), [lane])
    p = probabilities_slowly(adjusted_slowly(row, s, tuple(prompt), reply), s)
    token = chosen(choice)
    u = uniform(s.seed, 0)
    below = p[:token].sum()
    assert p[token] > 0
    if s.temperature > 0:
        assert below - 1e-12 <= u <= below + p[token] + 1e-12


@given(row=LOGITS, s=SAMPLINGS)
def test_draws_fall_where_the_distribution_says(row: list[float], s: Sampling) -> None:
    """Over 40 draws each token comes exactly as often as the stream's numbers fall into its share."""
    s = attrs.evolve(s, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, seed=7)
    lane = sampler(s)
    tokens = [chosen(choose(padded(row), [lane])[0]) for _ in range(40)]
    p = probabilities_slowly(adjusted_slowly(row, s, (), []), s)
    assert lane.draws == (40 if s.temperature else 0)
    edges = np.concatenate([[0.0], p.cumsum()])
    for i in range(VOCAB):
        inside = sum(edges[i] <= uniform(7, k) < edges[i + 1] for k in range(40))
        assert tokens.count(i) == (inside if s.temperature else 40 * int(p[i]))


def test_the_stream_is_uniform() -> None:
    """20,000 numbers of one stream fill 16 bins evenly, and so do first numbers of neighbouring seeds."""
    for numbers in ([uniform(3, i) for i in range(20_000)], [uniform(s, 0) for s in range(20_000)]):
        assert all(0.0 <= u < 1.0 for u in numbers)
        counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
        # Five standard deviations of a binomial count; the seeds are fixed, so this cannot flicker.
        assert np.abs(counts - 1250).max() < 5 * math.sqrt(20_000 / 16)


def test_the_stream_is_fixed() -> None:
    """The numbers are part of a request's result, and seed 0 gives SplitMix64's published sequence."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [uniform(0, i) for i in range(3)] == [(z >> 11) * 2.0**-53 for z in published]
    assert [uniform(0, 0), uniform(1, 0), uniform(1, 1), uniform(-1, 0)] == [
        0.8833108082136426,
        0.7497482413580301,
        0.37239342287916577,
        0.64635420864685,
    ]
    assert uniform(2**64 + 5, 3) == uniform(5, 3)


def test_streams_of_neighbouring_seeds_share_nothing() -> None:
    """No stream is a shifted copy of the next one."""
    numbers = [uniform(seed, draw) for seed in range(100) for draw in range(100)]
    assert len(set(numbers)) == len(numbers)


@given(
    rows=st.lists(LOGITS, min_size=2, max_size=5),
    samplings=st.lists(SAMPLINGS, min_size=5, max_size=5),
)
def test_batch_mates_do_not_matter(rows: list[list[float]], samplings: list[Sampling]) -> None:
    """Each lane gets what it would get alone, whatever the others are and do, round after round."""
    together = [sampler(s, (1, 2)) for s in samplings[: len(rows)]]
    alone = [sampler(s, (1, 2)) for s in samplings[: len(rows)]]
    logits = torch.cat([padded(row) for row in rows])
    for _ in range(3):
        single = [choose(logits[b : b + 1], [lane])[0] for b, lane in enumerate(alone)]
        assert choose(logits, together) == single


@given(row=LOGITS, s=SAMPLINGS, prompt=st.lists(TOKENS, max_size=4), before=st.integers(0, 6))
def test_a_suspended_lane_goes_on_as_if_nothing_had_happened(
    row: list[float], s: Sampling, prompt: list[int], before: int
) -> None:
    """The payload carries the stream's position and all that penalties have seen (D7)."""
    logits = padded(row)
    steady = sampler(s, tuple(prompt))
    expected = [chosen(choose(logits, [steady])[0]) for _ in range(before + 4)]
    first = sampler(s, tuple(prompt))
    tokens = [chosen(choose(logits, [first])[0]) for _ in range(before)]
    second = LaneSampler.resume(s, first.payload(), VOCAB)
    tokens += [chosen(choose(logits, [second])[0]) for _ in range(4)]
    assert tokens == expected


@given(row=LOGITS, s=SAMPLINGS, kept=st.lists(TOKENS, max_size=3), dropped=st.lists(TOKENS, max_size=3))
def test_tokens_taken_back_leave_no_trace(
    row: list[float], s: Sampling, kept: list[int], dropped: list[int]
) -> None:
    """Penalties see only what stayed, also once their rows exist."""
    lane, other = sampler(s, (0, 3)), sampler(s, (0, 3))
    tensor = padded(row)[0, :VOCAB]
    lane.adjusted(tensor)
    lane.record(kept)
    lane.record(dropped)
    lane.take_back(dropped)
    other.record(kept)
    assert torch.equal(lane.adjusted(tensor), other.adjusted(tensor))


def test_what_was_never_recorded_cannot_be_taken_back() -> None:
    """A wrong bookkeeping shows at once."""
    lane = sampler(Sampling(presence_penalty=1.0))
    with pytest.raises(ValueError, match="token 3 was never recorded"):
        lane.take_back([3])


def test_equal_logits_go_to_the_lowest_id() -> None:
    """Greedy choice, top_k=1, top_p=0 and min_p=1 at a unique peak all mean the first of the largest."""
    row = [1.0, 5.0, 5.0, 2.0] + [0.0] * 8
    samplings = [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=0.0)]
    choices = choose(padded(row).repeat(3, 1), [sampler(s) for s in samplings])
    assert [chosen(c) for c in choices] == [1, 1, 1]


def test_a_tiny_temperature_is_greedy_among_the_largest() -> None:
    """The smallest positive number divides without overflow; equal peaks share evenly."""
    lane = sampler(Sampling(temperature=5e-324, seed=1))
    row = padded([1.0, 5.0, 5.0] + [4.999] * 9)
    tokens = {chosen(choose(row, [lane])[0]) for _ in range(40)}
    assert tokens == {1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_bans_and_forces(temperature: float) -> None:
    """-100 keeps the most likely token out, +100 brings the least likely one in, and more is no error."""
    row = [9.0] + [1.0] * 10 + [-9.0]
    for down, up in ((-100.0, 100.0), (-1e300, 1e300)):
        banned = sampler(Sampling(temperature=temperature, logit_bias=((0, down),)))
        forced = sampler(Sampling(temperature=temperature, logit_bias=((11, up),)))
        assert all(chosen(choose(padded(row), [banned])[0]) != 0 for _ in range(20))
        assert all(chosen(choose(padded(row), [forced])[0]) == 11 for _ in range(20))


def test_bias_of_one_token_adds_up() -> None:
    """An id named twice gets the sum."""
    lane = sampler(Sampling(temperature=0.0, logit_bias=((5, 2.0), (5, 2.0))))
    assert chosen(choose(padded([3.0] + [0.0] * 11), [lane])[0]) == 5


def test_padding_rows_are_never_chosen() -> None:
    """Rows past the vocabulary hold the largest logits here, and nothing sees them."""
    logits = padded([0.0] * VOCAB)
    for s in (Sampling(temperature=0.0), Sampling(logprobs=20, seed=3), Sampling(top_p=0.9, seed=3)):
        (choice,) = choose(logits, [sampler(s)])
        assert isinstance(choice, Chosen)
        assert choice.token < VOCAB
        if choice.logprobs is not None:
            assert [i for i, _ in choice.logprobs.top] == list(range(VOCAB))
            assert choice.logprobs.chosen == pytest.approx(-math.log(VOCAB))


@pytest.mark.parametrize(
    "s", [Sampling(temperature=0.0), Sampling(), Sampling(top_k=3, presence_penalty=1.0)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_fails_its_own_lane_only(s: Sampling, bad: float) -> None:
    """The lane says what was found and stays where it was; its batch mates get their tokens."""
    good, broken = sampler(s), sampler(s)
    logits = torch.cat([padded([0.0] * 11 + [50.0]), padded([0.0, bad] + [1.0] * 10)])
    first, second = choose(logits, [good, broken])
    assert chosen(first) == 11
    assert isinstance(second, Unsampled)
    assert str(bad) in second.why
    assert broken.draws == 0
    assert broken.payload().generated.size == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_left_out_and_a_full_mask_fails(temperature: float) -> None:
    """-inf marks what must not be chosen; when nothing is left the lane says so."""
    lane = sampler(Sampling(temperature=temperature))
    some = [-math.inf] * VOCAB
    some[4] = -3.0
    assert chosen(choose(padded(some), [lane])[0]) == 4
    (choice,) = choose(padded([-math.inf] * VOCAB), [lane])
    assert isinstance(choice, Unsampled)
    assert "masks every token" in choice.why


@given(row=LOGITS, s=SAMPLINGS, count=st.integers(0, VOCAB + 3))
def test_logprobs_are_those_of_the_raw_distribution(row: list[float], s: Sampling, count: int) -> None:
    """No penalty, temperature or truncation enters; the most likely come first, equal ones by id."""
    (choice,) = choose(padded(row), [sampler(attrs.evolve(s, logprobs=count), (1,))])
    assert isinstance(choice, Chosen)
    x = np.array(row)
    logs = x - x.max() - math.log(np.exp(x - x.max()).sum())
    rank = sorted(range(VOCAB), key=lambda i: (-x[i], i))[:count]
    assert isinstance(choice.logprobs, TokenLogprobs)
    assert choice.logprobs.chosen == pytest.approx(logs[choice.token])
    assert [i for i, _ in choice.logprobs.top] == rank
    assert [v for _, v in choice.logprobs.top] == pytest.approx([logs[i] for i in rank])


def test_no_logprobs_unless_asked() -> None:
    """None asks for none, 0 for the chosen token's alone."""
    none, own = choose(
        padded([0.0] * VOCAB).repeat(2, 1), [sampler(Sampling()), sampler(Sampling(logprobs=0))]
    )
    assert isinstance(none, Chosen)
    assert none.logprobs is None
    assert isinstance(own, Chosen)
    assert own.logprobs is not None
    assert own.logprobs.top == ()


@pytest.mark.parametrize("vocab", [8192, 8193, 20_000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.9999])
def test_a_large_nucleus_is_the_one_that_a_full_sort_gives(vocab: int, top_p: float) -> None:
    """Whether a partial sort suffices or not, the token is the slow model's."""
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    s = Sampling(top_p=top_p, seed=5)
    lane = sampler(s, vocab=vocab)
    p = probabilities_slowly(row[0].double().numpy(), s)
    edges = np.concatenate([[0.0], p.cumsum()])
    for draw in range(3):
        token = chosen(choose(row, [lane])[0])
        assert edges[token] - 1e-9 <= uniform(5, draw) <= edges[token + 1] + 1e-9


def test_logits_are_left_as_they_were() -> None:
    """`choose` reads rows that a later round or another reader may still need."""
    logits = padded([float(i) for i in range(VOCAB)])
    before = logits.clone()
    s = Sampling(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((1, 5.0),), top_p=0.5, min_p=0.1)
    choose(logits, [sampler(s, (3,))])
    assert torch.equal(logits, before)


def test_no_lanes_give_no_choices() -> None:
    """An empty round is not an error."""
    assert choose(torch.empty(0, ROWS), []) == []


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature is -0.1; it must be 0 or more"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"top_k": -1}, r"top_k is -1; it must be 0 \(off\) or more"),
    ({"top_p": 1.5}, r"top_p is 1.5; it must be within \[0, 1\]"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"min_p": -0.5}, "min_p is -0.5"),
    ({"presence_penalty": math.nan}, "presence_penalty is nan; it must be finite"),
    ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"logit_bias": ((VOCAB, 1.0),)}, r"token 12; ids are within \[0, 12\)"),
    ({"logit_bias": ((-1, 1.0),)}, "token -1"),
    ({"logit_bias": ((1, math.nan),)}, "logit_bias of token 1 is nan"),
]


@pytest.mark.parametrize(("options", "error"), BAD_OPTIONS)
def test_options_out_of_range_are_refused(options: dict[str, Any], error: str) -> None:
    """The message names the option, the value and the bound."""
    with pytest.raises(ValueError, match=error):
        sampler(Sampling(**options))


@pytest.mark.parametrize(
    ("logits", "vocab", "error"),
    [
        (torch.zeros(1, 4, dtype=torch.float64), 4, "torch.float64; they must be torch.float32"),
        (torch.zeros(2, 4), 4, r"\[2, 4\]; they must be \[1, at least 4\]"),
        (torch.zeros(1, 3), 4, r"\[1, 3\]; they must be \[1, at least 4\]"),
        (torch.zeros(4), 4, r"\[4\]; they must be \[1, at least 4\]"),
    ],
)
def test_logits_of_another_form_are_refused(logits: torch.Tensor, vocab: int, error: str) -> None:
    """Wrong dtype, rows or columns are misuse, not a lane's failure."""
    with pytest.raises(ValueError, match=error):
        choose(logits, [sampler(Sampling(), vocab=vocab)])


def test_lanes_of_different_vocabularies_are_refused() -> None:
    """One model has one vocabulary."""
    with pytest.raises(ValueError, match="vocab 4; all of a batch must have 5"):
        choose(torch.zeros(2, 8), [sampler(Sampling(), vocab=5), sampler(Sampling(), vocab=4)])


def test_the_ends_of_the_interval_choose_tokens_of_some_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest number of a stream pick the first and the last token that is possible."""
    for u, expected in ((0.0, 2), (1.0 - 2.0**-53, 8)):
        monkeypatch.setattr("hpc_qwen35.sampling.uniform", lambda seed, draw, u=u: u)
        for step in range(50):
            row = [-math.inf] * 2 + [0.01 * step * i for i in range(7)] + [-math.inf] * 3
            assert chosen(choose(padded(row), [sampler(Sampling())])[0]) == expected


@pytest.mark.parametrize("vocab", [VOCAB, 9000])
def test_a_nucleus_ends_where_its_share_is_reached_exactly(vocab: int) -> None:
    """Of four equal tokens, half the weight is two of them."""
    row = torch.full((1, vocab), -math.inf)
    row[0, 3:7] = 1.0
    lane = sampler(Sampling(top_p=0.5, seed=2), vocab=vocab)
    assert {chosen(choose(row, [lane])[0]) for _ in range(30)} == {3, 4}
