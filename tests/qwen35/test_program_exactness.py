"""Resumed = not resumed: with the cache or without, from device or host, the same bits (design §2)."""

import numpy as np
import pytest
import torch

from hpc_index.records import Ending
from hpc_index.requests import Request, Sampling
from tests.qwen35.programs import (
    GREEDY,
    VOCAB,
    Bench,
    Cold,
    Pass,
    Reply,
    join,
    prompt,
    small_config,
    small_weights,
    structural,
)


def two_turns(bench: Bench, first: int, more: int, new: int = 4) -> tuple[Reply, Reply]:
    """A turn, then one that repeats it with its reply and goes on; checked against the cold run."""
    a = prompt(1, first)
    one = bench.run(a, new)
    b = join(a, one.tokens, prompt(2, more))
    lane, quote = bench.admit(bench.request(b, new))
    two = Reply(quote)
    bench.prefill(lane, two)
    bench.same_as_cold(lane)
    while len(two.tokens) < new:
        bench.decode([lane], [two])
    bench.same_as_cold(lane)
    bench.finish(lane)
    return one, two


def test_every_tail_length_resumes_at_the_exact_frontier_with_the_same_bits() -> None:
    """Endpoints with tails of 0..63 tokens: the next turn starts where the last one ended."""
    bench = Bench()
    for tail in range(64):
        first = 128 + tail - 3  # four new tokens, of which the last is never processed
        a = prompt(100 + tail, first)
        one = bench.run(a)
        b = join(a, one.tokens, prompt(7, 20))
        lane, quote = bench.admit(bench.request(b))
        assert quote.reuse == 128 + tail
        bench.prefill(lane, Reply(quote))
        bench.same_as_cold(lane)
        bench.finish(lane)
    bench.balanced()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_prompts_of_any_length_repeat_exactly(length: int) -> None:
    """A repeated prompt reuses at most n - 1 tokens and gives the same reply (§6.1)."""
    bench = Bench()
    tokens = prompt(3, length)
    first = bench.run(tokens)
    second = bench.run(tokens)
    assert second.quote.reuse <= length - 1
    if second.quote.reuse == 0:
        assert second.logprobs == first.logprobs
    assert second.tokens == first.tokens
    bench.balanced()


def test_a_host_restore_gives_the_same_bits() -> None:
    """The device forgets the first conversation; the host brings blocks, tail and image back."""
    bench = Bench(kv_capacity=640, max_concurrency=1, device_snapshot_slots=1)
    a = prompt(1, 200)
    one = bench.run(a)
    for seed in range(10, 14):
        bench.run(prompt(seed, 500))
    b = join(a, one.tokens, prompt(2, 30))
    lane, quote = bench.admit(bench.request(b))
    assert quote.reuse == 203
    assert quote.restore_bytes > 0
    two = Reply(quote)
    bench.prefill(lane, two)
    bench.same_as_cold(lane)
    bench.decode([lane], [two])
    bench.same_as_cold(lane)
    bench.finish(lane)
    assert bench.program.stats().counters["restored_bytes"] > 0
    bench.balanced()


def test_a_shared_system_block_is_resumed_at_its_end_with_the_same_bits() -> None:
    """Two conversations share a prefix that ends inside a block: a tap with a copied tail page (§7.4)."""
    bench = Bench()
    system = prompt(4, 150)
    bench.run(join(system, prompt(5, 90)), hints=structural(150))
    lane, quote = bench.admit(bench.request(join(system, prompt(6, 80)), hints=structural(150)))
    assert quote.reuse == 150
    bench.prefill(lane, Reply(quote))
    bench.same_as_cold(lane)
    bench.finish(lane)


def test_chunked_prefill_and_resumption_agree_with_the_cold_run_cut_alike() -> None:
    """Prompts longer than a chunk, in chunks of 64, with a resumption in between."""
    bench = Bench(prefill_chunk=64)
    a = prompt(1, 300)
    one = Reply(bench.admit(bench.request(a))[1])
    lane = next(iter(bench.program._lanes))
    bench.prefill(lane, one, budget=64)
    bench.same_as_cold(lane)
    bench.finish(lane)
    lane, quote = bench.admit(bench.request(join(a, one.tokens, prompt(2, 200))))
    assert quote.reuse >= 256
    bench.prefill(lane, Reply(quote), budget=64)
    bench.same_as_cold(lane)


def test_a_cancelled_prefill_leaves_what_it_computed() -> None:
    """Blocks and the endpoint of a cancelled prompt serve the same prompt again, bit for bit (§7.7)."""
    bench = Bench()
    tokens = prompt(8, 400)
    lane, _ = bench.admit(bench.request(tokens))
    assert bench.program.prefill(lane, 192, bench.now).frontier == 192
    bench.finish(lane, Ending.CANCELLED)
    bench.balanced()
    lane, quote = bench.admit(bench.request(tokens))
    assert quote.reuse == 192
    bench.prefill(lane, Reply(quote))
    bench.same_as_cold(lane)
    bench.finish(lane)


def test_identical_prompts_arriving_together_do_not_disturb_each_other() -> None:
    """Two lanes compute the same blocks; each gives the cold reply, and nothing is left over (§7.6)."""
    bench = Bench()
    tokens = prompt(9, 200)
    pairs = [bench.admit(bench.request(tokens)) for _ in range(2)]
    replies = [Reply(quote) for _, quote in pairs]
    for (lane, _), reply in zip(pairs, replies, strict=True):
        bench.prefill(lane, reply, budget=100)
        bench.same_as_cold(lane)
    for _ in range(3):
        bench.decode([lane for lane, _ in pairs], replies)
    for lane, _ in pairs:
        bench.same_as_cold(lane)
        bench.finish(lane)
    assert replies[0].tokens == replies[1].tokens
    assert replies[0].logprobs == replies[1].logprobs
    bench.balanced()


def test_eight_lanes_decode_like_a_cold_batch_of_eight() -> None:
    """A lane's bits depend on the number of rows, not on who its neighbours are."""
    bench = Bench(max_concurrency=8)
    for lane in bench.decode_together(8, rounds=5):
        bench.same_as_cold(lane)
        bench.finish(lane)
    bench.balanced()


def test_suspension_and_resumption_change_no_token() -> None:
    """A lane set aside in mid-reply goes on as if nothing had happened, its random stream included (D7)."""
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=5, presence_penalty=0.5, logprobs=2)
    tokens = prompt(11, 170)

    def generate(suspend_after: int | None) -> Reply:
        bench = Bench(kv_capacity=640, max_concurrency=1)
        lane, quote = bench.admit(bench.request(tokens, 20, sampling))
        reply = Reply(quote)
        bench.prefill(lane, reply)
        while len(reply.tokens) < 20:
            if len(reply.tokens) == suspend_after:
                suspended = bench.finish(lane, Ending.SUSPENDED)
                assert suspended is not None
                assert suspended.tokens.tolist() == [*tokens.tolist(), *reply.tokens]
                bench.run(prompt(50, 400))
                again = bench.request(suspended.tokens, 20 - len(reply.tokens), sampling)
                lane, quote = bench.admit(again, suspended)
                assert quote.reuse == len(suspended.tokens) - 1
                bench.prefill(lane, reply)
            bench.decode([lane], [reply])
        bench.same_as_cold(lane)
        bench.finish(lane)
        bench.balanced()
        return reply

    whole = generate(None)
    for after in (1, 7, 19):
        parts = generate(after)
        assert parts.tokens == whole.tokens
        assert parts.logprobs == whole.logprobs


def test_a_lane_suspended_in_mid_prefill_goes_on_from_its_frontier() -> None:
    """Its endpoint lies at the exact frontier and is never skipped (D7)."""
    bench = Bench()
    tokens = prompt(12, 300)
    lane, _ = bench.admit(bench.request(tokens))
    bench.program.prefill(lane, 100, bench.now)
    suspended = bench.finish(lane, Ending.SUSPENDED)
    assert suspended is not None
    assert suspended.generated == 0
    lane, quote = bench.admit(bench.request(suspended.tokens), suspended)
    assert quote.reuse == 100
    reply = Reply(quote)
    bench.prefill(lane, reply)
    bench.same_as_cold(lane)
    assert len(reply.tokens) == 1


def test_another_cut_differs_no_more_than_two_cold_runs_do() -> None:
    """Where the cut differs, logits differ as between cold runs in chunks of 64 and of 2,048.

    Measured here: both gaps are a few 1e-7 on logits of order 1; the bound is the cold gap times four, since
    each is one draw of the same rounding noise.
    """
    weights, config = small_weights(small_config()), small_config()
    tokens = prompt(13, 500)

    def cold(chunk: int) -> torch.Tensor:
        cuts = range(0, len(tokens), chunk)
        return Cold(weights, config).replay([Pass(c, tuple(tokens[c : c + chunk].tolist()), 0) for c in cuts])

    whole = cold(2048)
    noise = (cold(64) - whole).abs().max().item()
    bench = Bench()
    bench.run(tokens[:333], 1)
    lane, quote = bench.admit(bench.request(tokens))
    assert quote.reuse == 333
    reply = Reply(quote)
    bench.prefill(lane, reply)
    logs = whole.double().log_softmax(0)
    assert [token for token, _ in reply.logprobs[0].top] == logs.topk(3).indices.tolist()
    for token, value in reply.logprobs[0].top:
        assert abs(value - logs[token].item()) <= 4 * noise + 1e-6


def test_a_random_stream_is_its_own_whatever_else_is_in_the_batch() -> None:
    """A sampled request draws the same numbers alone and among seven others."""
    sampling = Sampling(temperature=1.0, seed=77, logprobs=0)
    tokens = prompt(14, 90)

    def draw(bench: Bench, others: int) -> list[int]:
        lanes, replies = [], []
        for i in range(others + 1):
            r: Request = bench.request(prompt(60 + i, 50) if i else tokens, 8, GREEDY if i else sampling)
            lane, quote = bench.admit(r)
            reply = Reply(quote)
            bench.prefill(lane, reply)
            lanes.append(lane)
            replies.append(reply)
        for _ in range(7):
            bench.decode(lanes, replies)
        return replies[0].tokens

    assert draw(Bench(max_concurrency=8), 0) == draw(Bench(max_concurrency=8), 7)


def test_vocabulary_ids_only_are_generated() -> None:
    """Every generated id can be fed back."""
    bench = Bench()
    reply = bench.run(prompt(15, 30), 12)
    assert np.all(np.array(reply.tokens) < VOCAB)


def test_two_turns_reuse_all_that_was_processed() -> None:
    """The second turn resumes at the end of the first, whose last token was never processed."""
    bench = Bench()
    _, two = two_turns(bench, 210, 25)
    assert two.quote.reuse == 213
    bench.balanced()
