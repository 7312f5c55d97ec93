"""What other engines' users reported about hybrid prefix caches, as behaviour that must not come back."""

from __future__ import annotations

import random

from hpc_index import check_invariants
from hpc_index.records import Ending, HintKind, Quote, TapHint
from tests.index.adversary import Adversary
from tests.index.double import Run
from tests.index.strategies import engine, policy, prompt, random_tokens


def test_blocks_without_a_state_are_never_reused() -> None:
    """KV of a path with no snapshot on it gives no reuse, however long the match."""
    double = engine(policy(taps_per_request=0))
    tokens = random_tokens(1, 300)
    run = double.start(prompt(tokens), 1)
    double.prefill(run, 512)
    double.finish(run, Ending.FAILED)
    quote = double.index.quote(prompt(tokens), 1, 0.0)
    assert (quote.reuse, quote.matched) == (0, 256)


def test_the_second_of_two_like_turns_prefills_only_what_is_new() -> None:
    """A turn and the same turn with 20 tokens more: the endpoint is restored."""
    double = engine()
    tokens = random_tokens(1, 500)
    run, _ = double.complete(prompt(tokens), range(100), budget=512)
    again = [*run.tokens, *random_tokens(2, 20)]
    _, reused = double.complete(prompt(again), [], budget=512)
    assert len(again) - reused <= 64 + 20


def test_three_questions_on_one_system_text_share_it() -> None:
    """The second and third resume at the end of the 2,000-token system block."""
    double = engine(policy(prefill_chunk=512), pages=200, snapshots=8)
    system = random_tokens(1, 2000)
    for seed in (2, 3, 4):
        question = [*system, *random_tokens(seed, 150)]
        _, reused = double.complete(prompt(question, TapHint(2000, HintKind.STRUCTURAL)), range(70), 512)
        assert reused == (0 if seed == 2 else 2000)


def test_a_repeated_prompt_reuses_almost_all_and_leaves_a_token_to_run() -> None:
    """The same request twice: at least n - 64 and at most n - 1 tokens are reused."""
    double = engine(policy(prefill_chunk=64), pages=100)
    tokens = random_tokens(1, 700)
    double.complete(prompt(tokens), range(5))
    _, reused = double.complete(prompt(tokens), range(5))
    assert len(tokens) - 64 <= reused <= len(tokens) - 1


def test_every_planned_tap_is_published_or_dropped_with_a_reason() -> None:
    """Nothing is captured or lost in silence."""
    double = engine(policy(prefill_chunk=64), pages=60, snapshots=2, slabs=20)
    for seed in range(6):
        tokens = random_tokens(seed % 3, 200) + random_tokens(seed, 150)
        hints = [TapHint(p, HintKind.EXPLICIT) for p in (70, 200, 260)]
        run = double.start(prompt(tokens, *hints), 1)
        for _ in range(seed):
            if not run.prefilled:
                double.prefill(run, 128)
        double.finish(run, Ending.CANCELLED)
        double.land_all()
    count = double.index.stats().counters
    dropped = sum(v for k, v in count.items() if k.startswith("taps_dropped."))
    assert count["taps_planned"] == count["taps_published"] + dropped
    assert dropped
    assert count["taps_published"]


def test_no_slot_for_a_capture_never_stops_a_request() -> None:
    """More lanes than snapshot slots, all capturing: each request runs to its end."""
    double = engine(policy(), pages=60, lanes=4, snapshots=1)
    runs = [
        double.start(prompt(random_tokens(seed, 200), TapHint(100, HintKind.EXPLICIT)), 8)
        for seed in range(4)
    ]
    for run in runs:
        while not run.prefilled:
            double.prefill(run, 512, taps_inside=True)
        double.decode(run, 1)
    for run in runs:
        double.finish(run)
    check_invariants(double.index)
    assert double.index.stats().lanes == 0


def test_a_cancelled_request_gives_everything_back_at_every_stage() -> None:
    """Staged, restoring, mid-prefill, in decode: free counts return to where they were."""
    double = engine(policy(taps_per_request=0), pages=12, slabs=60, snapshots=2)
    tokens = random_tokens(1, 300)
    double.complete(prompt(tokens), [], budget=512)
    double.complete(prompt(random_tokens(2, 690), cacheable=False), [], budget=1024)
    for stage in range(4):
        run = double.stage(prompt([*tokens[:250], *random_tokens(3, 100)]), 40)
        assert isinstance(run, Run)
        if stage >= 1:
            double.activate(run)
        if stage >= 2:
            double.prefill(run, 64)
        if stage >= 3:
            while not run.prefilled:
                double.prefill(run, 64)
            double.decode(run, 1)
        double.finish(run, Ending.CANCELLED if stage else Ending.UNSTAGED)
        double.land_all()
        check_invariants(double.index)
        stats = double.index.stats()
        assert stats.pages_active == stats.pages_filling == (0,)
        assert stats.slots_active == stats.tickets_open == stats.lanes == 0
        assert stats.pages_free[0] + stats.pages_cached[0] == 12


def test_blocks_of_a_cancelled_request_stay_reusable() -> None:
    """Cancelled at 128 of 300 tokens: the endpoint there serves the next request."""
    double = engine(policy(taps_per_request=0))
    tokens = random_tokens(1, 300)
    run = double.start(prompt(tokens), 1)
    double.prefill(run, 128)
    double.finish(run, Ending.CANCELLED)
    assert double.index.quote(prompt(tokens), 1, 0.0).reuse == 128


def test_a_cyclic_working_set_larger_than_the_device_keeps_reusing() -> None:
    """Four sessions on a device with room for two: with a host tier every later turn resumes."""
    double = engine(policy(taps_per_request=0), pages=12, slabs=80, snapshots=2)
    talks = [random_tokens(seed, 200) for seed in range(4)]
    for turn in range(3):
        for talk in talks:
            _, reused = double.complete(prompt(list(talk)), [], budget=512)
            assert reused == (len(talk) - 70 if turn else 0)
            talk += random_tokens(len(talk), 70)
    assert double.index.stats().counters["restores"] == 8


def test_random_use_keeps_every_rule() -> None:
    """A few thousand steps from one seed, all invariants after each."""
    rng = random.Random(45)
    adversary = Adversary(rng.randrange)
    names = ["serve", "start", "prefill", "decode", "finish", "land", "prefetch"]
    for _ in range(1500):
        getattr(adversary, rng.choice(names))()
        check_invariants(adversary.engine.index)
    adversary.close()
    assert isinstance(adversary.engine.index.quote(prompt([1]), 0, 0.0), Quote)
