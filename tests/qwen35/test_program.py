"""The program around the model: what it leaves behind, what it refuses, what a failure touches."""

import gc
from collections import Counter

import numpy as np
import pytest
import torch

from hpc_index.ids import LaneId
from hpc_index.records import CopyKind, Ending, Plan, Readiness, Reason, Stream
from hpc_index.requests import Outcome, Sampling, Suspended
from hpc_qwen35.lane import Payload
from tests.qwen35.programs import Bench, Patched, Reply, join, prompt, structural


def test_without_state_cached_blocks_are_not_reused() -> None:
    """KV alone is no resume point: a failed lane leaves blocks and no snapshot, so reuse is 0 (§1)."""
    bench = Bench()
    tokens = prompt(1, 300)
    lane, _ = bench.admit(bench.request(tokens))
    bench.prefill(lane, Reply(bench.program.quote(bench.request(tokens), 0.0)))
    bench.finish(lane, Ending.FAILED)
    quote = bench.program.quote(bench.request(tokens), 1.0)
    assert quote.matched > 0
    assert quote.reuse == 0
    assert quote.stopped_by is Reason.NO_SNAPSHOT


def test_a_request_that_asked_for_no_caching_leaves_nothing() -> None:
    """No blocks, no snapshots, no pages: the counts are those of before (§7.7)."""
    bench = Bench()
    before = bench.program.stats().index
    reply = bench.run(prompt(2, 200), cacheable=False)
    after = bench.program.stats().index
    assert reply.quote.reuse == 0
    assert (after.blocks, after.snapshots) == (before.blocks, before.snapshots) == (0, 0)
    assert after.pages_free == before.pages_free


def test_a_program_without_reuse_gives_the_same_tokens_and_keeps_nothing() -> None:
    """--no-prefix-reuse changes no reply, only what is remembered."""
    plain, caching = Bench(prefix_reuse=False, host_cache_mib=None), Bench()
    for seed in (3, 3, 4):
        assert plain.run(prompt(seed, 150)).tokens == caching.run(prompt(seed, 150)).tokens
    assert plain.program.stats().index.blocks == 0


def test_namespaces_share_nothing() -> None:
    """The same prompt under another salt starts from nothing (D14)."""
    bench = Bench()
    tokens = prompt(5, 200)
    more = join(tokens, bench.run(tokens, cache_salt=b"a").tokens, prompt(6, 9))
    assert bench.run(more, cache_salt=b"b").quote.matched == 0
    assert bench.run(more, cache_salt=b"a").quote.reuse == 203


def test_after_fifty_requests_only_named_tensors_live() -> None:
    """Weights, pools, slots and the slab buffer are all that stays allocated: no hidden copy of anything."""
    bench = Bench(kv_capacity=1024, host_cache_mib=1)
    named = {t.untyped_storage().data_ptr() for t in bench.program.tensors().values()}
    gc.collect()
    before = _storages()
    rng = np.random.default_rng(0)
    tokens = prompt(6, 60)
    for i in range(50):
        reply = bench.run(tokens[-500:], 3)
        tokens = join(tokens, reply.tokens, prompt(100 + i, int(rng.integers(1, 40))))
    gc.collect()
    assert _storages() - before <= named
    assert named <= _storages()
    bench.balanced()


def _storages() -> set[int]:
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def test_the_ledgers_balance_after_every_way_to_end() -> None:
    """Done, cancelled, failed and suspended lanes all give back what they held."""
    bench = Bench(max_concurrency=3)
    for how in (Ending.DONE, Ending.CANCELLED, Ending.FAILED, Ending.SUSPENDED):
        for stage in ("admitted", "mid-prefill", "decoding"):
            lane, quote = bench.admit(bench.request(prompt(hash(how.value + stage) % 1000, 200)))
            reply = Reply(quote)
            if stage == "mid-prefill":
                bench.program.prefill(lane, 77, bench.now)
            elif stage == "decoding":
                bench.prefill(lane, reply)
                bench.decode([lane], [reply])
            bench.finish(lane, how)
            bench.balanced()


def test_closing_releases_running_lanes() -> None:
    """close() ends what still runs."""
    bench = Bench()
    for seed in (1, 2):
        bench.admit(bench.request(prompt(seed, 100)))
    bench.program.close()
    bench.balanced()


def test_a_dropped_token_is_not_part_of_the_sequence() -> None:
    """keep(0) takes the last choice back: the next turn resumes without it."""
    bench = Bench()
    tokens = prompt(7, 150)
    lane, quote = bench.admit(bench.request(tokens, 10))
    reply = Reply(quote)
    bench.prefill(lane, reply)
    bench.decode([lane], [reply])
    bench.program.keep(lane, 0, bench.now)
    bench.finish(lane)
    again = join(tokens, reply.tokens[:1], prompt(8, 10))
    assert bench.program.quote(bench.request(again), 9.0).reuse == 151


def penalised(bench: Bench) -> tuple[LaneId, Reply]:
    """A lane that decoded one token under penalties."""
    sampling = Sampling(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    lane, quote = bench.admit(bench.request(prompt(7, 20), 10, sampling))
    reply = Reply(quote)
    bench.prefill(lane, reply)
    bench.decode([lane], [reply])
    return lane, reply


def payload(suspended: Suspended | None) -> Payload:
    assert suspended is not None
    assert isinstance(suspended.payload, Payload)
    return suspended.payload


def test_a_dropped_token_is_forgotten_by_penalties_and_counts() -> None:
    """keep(0) leaves a lane as if the token had not been chosen, but for the draw that it used."""
    bench = Bench()
    lane, reply = penalised(bench)
    bench.program.keep(lane, 0, bench.now)
    suspended = bench.finish(lane, Ending.SUSPENDED)
    assert suspended is not None
    assert suspended.tokens.tolist() == [*prompt(7, 20).tolist(), reply.tokens[0]]
    assert suspended.generated == 1
    state = payload(suspended)
    assert (state.sampler.generated.tolist(), state.sampler.counts.tolist()) == ([reply.tokens[0]], [1])
    assert state.waiting == 0


def test_forced_tokens_count_for_penalties() -> None:
    """A forced token is part of the reply: penalties see it, whether it is processed or not (D7)."""
    bench = Bench()
    lane, reply = penalised(bench)
    bench.program.force(lane, np.array([90, 91, 90], dtype=np.int32), bench.now)
    state = payload(bench.finish(lane, Ending.SUSPENDED))
    seen = dict(zip(state.sampler.generated.tolist(), state.sampler.counts.tolist(), strict=True))
    assert seen == Counter([*reply.tokens, 90, 91, 90])
    assert state.waiting == 4


def test_a_lane_set_aside_twice_counts_all_it_generated() -> None:
    """What a suspension carries includes what the one before it carried: counts, prompt ids, tokens (D7)."""
    bench = Bench()
    lane, reply = penalised(bench)
    first = bench.finish(lane, Ending.SUSPENDED)
    assert first is not None
    r = bench.request(first.tokens, 8, Sampling(temperature=0.0, repetition_penalty=1.5))
    lane, _ = bench.admit(r, first)
    bench.prefill(lane, reply)
    bench.decode([lane], [reply])
    second = bench.finish(lane, Ending.SUSPENDED)
    assert second is not None
    assert second.generated == len(reply.tokens) == 3
    assert second.tokens.tolist() == [*prompt(7, 20).tolist(), *reply.tokens]
    assert payload(second).sampler.prompt.tolist() == sorted(set(prompt(7, 20).tolist()))


def test_a_long_reply_keeps_all_its_tokens() -> None:
    """The token buffer grows past what was reserved at the start."""
    bench = Bench()
    lane, quote = bench.admit(bench.request(prompt(7, 20), 3000))
    reply = Reply(quote)
    bench.prefill(lane, reply)
    forced = [prompt(i, 700) for i in range(3)]
    for part in forced:
        bench.program.force(lane, part, bench.now)
    suspended = bench.finish(lane, Ending.SUSPENDED)
    assert suspended is not None
    assert np.array_equal(suspended.tokens, join(prompt(7, 20), reply.tokens, *forced))


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_boundary_lies_where_it_was_asked_for(ahead: int) -> None:
    """Also inside a forced span, right after a token was taken back, and across a suspension (§12.3)."""
    bench = Bench()
    tokens = prompt(10, 100)
    lane, quote = bench.admit(bench.request(tokens, 40))
    reply = Reply(quote)
    bench.prefill(lane, reply)
    bench.program.keep(lane, 0, bench.now)
    known = tokens
    if ahead:
        bench.program.force(lane, prompt(11, ahead), bench.now)
        known = join(known, prompt(11, ahead))
    bench.program.boundary(lane, bench.now)
    if ahead == 1:
        suspended = bench.finish(lane, Ending.SUSPENDED)
        assert suspended is not None
        lane, _ = bench.admit(bench.request(suspended.tokens, 40), suspended)
        bench.prefill(lane, reply)
    bench.program.force(lane, prompt(12, 90), bench.now)
    bench.decode([lane], [reply])
    bench.same_as_cold(lane)
    bench.finish(lane)
    other, quote = bench.admit(bench.request(join(known, prompt(13, 20))))
    assert quote.reuse == 100 + ahead
    bench.prefill(other, reply)
    bench.same_as_cold(other)


def test_decoding_without_a_pending_token_is_refused() -> None:
    """Neither a half prefilled lane nor one whose token was dropped has anything to decode."""
    bench = Bench()
    lane, quote = bench.admit(bench.request(prompt(9, 200)))
    bench.program.prefill(lane, 64, bench.now)
    with pytest.raises(ValueError, match="lane 1 has no pending token"):
        bench.program.decode([lane], bench.now)
    reply = Reply(quote)
    bench.prefill(lane, reply)
    bench.program.keep(lane, 0, bench.now)
    with pytest.raises(ValueError, match="lane 1 has no pending token"):
        bench.program.decode([lane], bench.now)
    bench.program.force(lane, prompt(3, 2), bench.now)
    bench.decode([lane], [reply])
    bench.same_as_cold(lane)


@pytest.mark.parametrize("stage", ["prefill", "decode", "forced"])
@pytest.mark.parametrize("how", [Ending.DONE, Ending.CANCELLED, Ending.SUSPENDED])
def test_a_pass_without_memory_fails_its_lanes_and_publishes_nothing_of_them(
    stage: str, how: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is half moved is never a resume point; what was kept before serves the retry."""
    bench = Bench(max_concurrency=2)
    tokens = prompt(9, 200)
    r = bench.request(tokens, 20)
    lane, quote = bench.admit(r)
    reply = Reply(quote)
    bench.program.prefill(lane, 100, bench.now)
    if stage != "prefill":
        bench.prefill(lane, reply)
    if stage == "forced":
        bench.program.force(lane, prompt(3, 5), bench.now)
    mixer = bench.program.model.layers[-1].mixer

    def full(*_: object) -> torch.Tensor:
        raise RuntimeError("not enough memory: you tried to allocate 1 byte")

    with monkeypatch.context() as patch:
        patch.setattr(type(mixer), "prefill", full)
        patch.setattr(type(mixer), "decode", full)
        if stage == "prefill":
            assert bench.program.prefill(lane, 100, bench.now).failed
        else:
            assert [s.outcome for s in bench.program.decode([lane], bench.now)] == [Outcome.FAILED]
    assert bench.program.stats().counters["passes_failed"] == 1
    before = bench.program.stats().index.snapshots
    suspended = bench.finish(lane, how)
    assert bench.program.stats().index.snapshots == before
    bench.balanced()
    if suspended is not None:
        r = bench.request(suspended.tokens, 20)
    lane, quote = bench.admit(r, suspended)
    bench.prefill(lane, reply)
    bench.decode([lane], [reply])
    again = Bench()
    again.run(tokens, 1)
    assert reply.tokens[:1] == again.run(tokens, 1).tokens
    if suspended is None:
        assert quote.reuse in (0, 100, 199)
    bench.finish(lane)
    bench.balanced()


def test_keeping_more_than_was_chosen_is_refused() -> None:
    """keep() cannot invent tokens."""
    bench = Bench()
    lane, quote = bench.admit(bench.request(prompt(7, 20)))
    bench.prefill(lane, Reply(quote))
    with pytest.raises(ValueError, match="keep 2 tokens: the last step chose 1"):
        bench.program.keep(lane, 2, bench.now)


def test_forced_tokens_continue_like_the_cold_run() -> None:
    """Forced tokens are processed in one pass, the last with the batch; bits as without a cache."""
    bench = Bench()
    lane, quote = bench.admit(bench.request(prompt(9, 100), 40))
    reply = Reply(quote)
    bench.prefill(lane, reply)
    bench.program.force(lane, np.array([5, 6, 7, 8], dtype=np.int32), bench.now)
    bench.decode([lane], [reply])
    bench.same_as_cold(lane)
    assert bench.lane(lane).frontier == 100 + 1 + 4
    bench.finish(lane)
    known = join(prompt(9, 100), reply.tokens[:1], [5, 6, 7, 8], prompt(1, 5))
    assert bench.program.quote(bench.request(known), 9.0).reuse == 105


@pytest.mark.parametrize("ids", [[], [97], [-1]])
def test_forcing_what_is_no_token_is_refused(ids: list[int]) -> None:
    """Only ids of the vocabulary can be forced."""
    bench = Bench()
    lane, quote = bench.admit(bench.request(prompt(9, 20)))
    bench.prefill(lane, Reply(quote))
    with pytest.raises(ValueError, match=r"must be one or more ids within \[0, 97\)"):
        bench.program.force(lane, np.array(ids, dtype=np.int32), bench.now)


def test_an_output_boundary_is_a_resume_point() -> None:
    """A prompt that repeats the reply up to the boundary resumes right there (§12.3)."""
    bench = Bench()
    tokens = prompt(10, 200)
    lane, quote = bench.admit(bench.request(tokens, 200))
    reply = Reply(quote)
    bench.prefill(lane, reply)
    while len(reply.tokens) < 150:
        if len(reply.tokens) == 80:
            bench.program.boundary(lane, bench.now)
        bench.decode([lane], [reply])
    bench.finish(lane)
    branch = join(tokens, reply.tokens[:80], prompt(11, 40))
    lane, quote = bench.admit(bench.request(branch))
    assert quote.reuse == 280
    bench.prefill(lane, Reply(quote))
    bench.same_as_cold(lane)


def test_a_stop_token_ends_the_sequence_unless_ignored() -> None:
    """The step that chose a stop token says so."""
    bench = Bench()
    tokens = prompt(12, 50)
    chosen = bench.run(tokens, 1).tokens[0]
    for ignore, outcome in ((False, Outcome.STOPPED), (True, Outcome.TOKENS)):
        r = bench.request(tokens, 5)
        r = type(r)(r.prompt, r.max_new, r.sampling, frozenset({chosen}), ignore)
        lane, _ = bench.admit(r)
        step = bench.program.prefill(lane, 2048, bench.now)
        assert step.first is not None
        assert step.first.outcome is outcome
        bench.finish(lane)


def test_pages_run_out_as_short_not_as_an_error() -> None:
    """A lane that cannot grow is told so and left as it was; setting another aside lets it go on (D7)."""
    bench = Bench(kv_capacity=512, max_concurrency=2)
    lanes, replies = [], []
    for seed in (1, 2):
        lane, quote = bench.admit(bench.request(prompt(seed, 100), 20))
        reply = Reply(quote)
        bench.prefill(lane, reply)
        lanes.append(lane)
        replies.append(reply)
    bench.program.force(lanes[0], prompt(3, 350), bench.now)
    short, other = bench.program.decode(lanes, bench.now)
    assert (short.outcome, len(short.tokens)) == (Outcome.SHORT, 0)
    assert other.outcome is Outcome.TOKENS
    assert bench.lane(lanes[0]).frontier == 100
    bench.finish(lanes[1], Ending.SUSPENDED)
    bench.decode([lanes[0]], [replies[0]])
    assert bench.lane(lanes[0]).frontier == 451
    bench.same_as_cold(lanes[0])
    bench.finish(lanes[0])
    bench.balanced()


def test_a_request_beyond_the_pool_is_infeasible() -> None:
    """What can never fit is told at once (§6.3)."""
    bench = Bench(kv_capacity=256, max_concurrency=1)
    quote = bench.program.quote(bench.request(prompt(1, 500)), 0.0)
    assert quote.readiness is Readiness.PERMANENTLY_INFEASIBLE
    assert quote.blocked_by is Reason.POOL_TOO_SMALL


def test_a_prefetched_prompt_needs_no_block_from_the_host() -> None:
    """Blocks of a waiting request come back into spare pages; admission restores only the rest (§6.6)."""
    bench = Bench(kv_capacity=640, max_concurrency=1, device_snapshot_slots=1)
    a = prompt(1, 200)
    a = join(a, bench.run(a).tokens)
    for seed in range(10, 14):
        bench.run(prompt(seed, 500))
    r = bench.request(join(a, prompt(3, 20)))
    before = bench.program.quote(r, bench.now).restore_bytes
    copied = bench.program.prefetch(r, bench.now)
    assert copied > 0
    assert bench.program.quote(r, bench.now).restore_bytes == before - copied
    assert bench.program.poll(bench.now)
    assert not bench.program.poll(bench.now)


def test_a_failed_restore_fails_its_lane_and_nothing_else() -> None:
    """The lane whose bytes did not come is told; others decode on; nothing leaks; a retry works."""
    bench = Bench(kv_capacity=1024, max_concurrency=2, device_snapshot_slots=1)
    a = prompt(1, 200)
    a = join(a, bench.run(a).tokens)
    for seed in range(10, 16):
        bench.run(prompt(seed, 500))
    neighbour, quote = bench.admit(bench.request(prompt(40, 100), 30))
    reply = Reply(quote)
    bench.prefill(neighbour, reply)

    copies = bench.program._copies
    run = copies.run
    faulty = True

    def refuse_restores(plan: Plan) -> int:
        if faulty and plan.stream is Stream.RESTORE:
            raise RuntimeError("the device refused the copy")
        return run(plan)

    bench.program._copies = Patched(copies, refuse_restores)  # type: ignore[assignment]
    r = bench.request(join(a, prompt(3, 20)))
    lane, quote = bench.admit(r)
    assert quote.restore_bytes > 0
    assert bench.program.prefill(lane, 2048, bench.now).failed
    bench.finish(lane, Ending.FAILED)
    bench.decode([neighbour], [reply])
    bench.same_as_cold(neighbour)
    bench.finish(neighbour)
    bench.balanced()
    assert bench.program.stats().counters["copies_failed.restore"] > 0

    faulty = False
    lane, quote = bench.admit(r)
    bench.prefill(lane, Reply(quote))
    bench.same_as_cold(lane)


def test_a_failed_capture_is_no_resume_point_and_is_not_written() -> None:
    """A snapshot whose own copy failed goes, its bytes never reach the host, and its lane runs on (§7.4)."""
    bench = Bench()
    copies = bench.program._copies
    run = copies.run

    def refuse_captures(plan: Plan) -> int:
        if plan.stream is Stream.COMPUTE and any(c.kind is CopyKind.PAGE_TO_PAGE for c in plan.copies):
            raise RuntimeError("the device refused the copy")
        return run(plan)

    bench.program._copies = Patched(copies, refuse_captures)  # type: ignore[assignment]
    system = prompt(4, 150)
    lane, quote = bench.admit(bench.request(join(system, prompt(5, 90)), hints=structural(150)))
    bench.prefill(lane, Reply(quote))
    bench.same_as_cold(lane)
    counters = bench.program.stats().counters
    assert (counters["copies_failed.compute"], counters["copies_failed.write"]) == (1, 1)
    assert counters["written_bytes"] == 0
    bench.finish(lane)
    assert bench.program.quote(bench.request(join(system, prompt(6, 9))), 9.0).reuse == 0
    bench.balanced()


def test_a_lane_with_nan_fails_alone() -> None:
    """NaN in one lane's state is that lane's failure; its neighbour's bits do not change."""
    bench = Bench(max_concurrency=2)
    lanes, replies = [], []
    for seed in (1, 2):
        lane, quote = bench.admit(bench.request(prompt(seed, 70), 10))
        reply = Reply(quote)
        bench.prefill(lane, reply)
        lanes.append(lane)
        replies.append(reply)
    image = bench.program.tensors()["states"][bench.lane(lanes[0]).slot]
    image.view(torch.float32).fill_(float("nan"))
    steps = bench.program.decode(lanes, bench.now)
    assert [s.outcome for s in steps] == [Outcome.FAILED, Outcome.TOKENS]
    bench.same_as_cold(lanes[1])
    bench.finish(lanes[0], Ending.CANCELLED)
    assert bench.program.stats().index.counters["endpoints_skipped.failed"] == 1
    bench.finish(lanes[1])
    bench.balanced()


def test_copies_stay_within_the_kinds_of_the_seam() -> None:
    """Every kind of copy has an executor."""
    assert set(Bench().program._copies._actions) == set(CopyKind)


def test_sampling_out_of_range_stages_nothing() -> None:
    """A request that cannot be sampled is refused before it takes anything."""
    bench = Bench()
    r = bench.request(prompt(1, 50), sampling=Sampling(temperature=-1.0))
    quote = bench.program.quote(r, 0.0)
    with pytest.raises(ValueError, match="temperature is -1"):
        bench.program.admit(quote, r, 0.0, None)
    bench.balanced()
