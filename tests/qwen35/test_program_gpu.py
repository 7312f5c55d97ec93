"""The same program on a CUDA device: the same rules, bits compared with a cold run on that device."""

import pytest
import torch

from tests.qwen35.programs import Bench, Reply, join, prompt, structural

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_a_device_snapshot_resumes_with_the_same_bits() -> None:
    """The next turn starts at the exact frontier and computes what a cold run does."""
    bench = Bench(CUDA)
    a = prompt(1, 200)
    one = bench.run(a)
    lane, quote = bench.admit(bench.request(join(a, one.tokens, prompt(2, 30))))
    assert quote.reuse == 203
    two = Reply(quote)
    bench.prefill(lane, two)
    bench.same_as_cold(lane)
    bench.decode([lane], [two])
    bench.same_as_cold(lane)
    bench.finish(lane)
    bench.balanced()


def test_a_host_restore_from_pinned_memory_gives_the_same_bits() -> None:
    """Blocks, tail and image come back from page-locked slabs."""
    bench = Bench(CUDA, kv_capacity=640, max_concurrency=1, device_snapshot_slots=1)
    assert bench.program.tensors()["slabs"].is_pinned()
    a = prompt(1, 200)
    one = bench.run(a)
    for seed in range(10, 14):
        bench.run(prompt(seed, 500))
    lane, quote = bench.admit(bench.request(join(a, one.tokens, prompt(2, 30))))
    assert quote.reuse == 203
    assert quote.restore_bytes > 0
    bench.prefill(lane, Reply(quote))
    bench.same_as_cold(lane)
    bench.finish(lane)
    bench.balanced()


def test_a_shared_system_block_is_resumed_inside_a_block() -> None:
    """An exact tap with a copied tail page."""
    bench = Bench(CUDA)
    system = prompt(4, 150)
    bench.run(join(system, prompt(5, 90)), hints=structural(150))
    lane, quote = bench.admit(bench.request(join(system, prompt(6, 80)), hints=structural(150)))
    assert quote.reuse == 150
    bench.prefill(lane, Reply(quote))
    bench.same_as_cold(lane)


def test_eight_lanes_decode_like_a_cold_batch() -> None:
    """A lane's bits do not depend on its neighbours."""
    bench = Bench(CUDA, max_concurrency=8)
    for lane in bench.decode_together(8, rounds=5):
        bench.same_as_cold(lane)


def test_the_device_chooses_the_tokens_of_the_cpu() -> None:
    """FP32 greedy replies agree with the CPU's over 40 tokens on this random model."""
    a = prompt(30, 300)
    assert Bench(CUDA).run(a, 40).tokens == Bench().run(a, 40).tokens
