"""Rounds of the worker over a scripted program: order, endings, suspension, reuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hpc_index.ids import LaneId
from hpc_index.records import Quote, Stale
from hpc_index.requests import Request, StepOut, Suspended
from hpc_server.events import Failed, FailureKind, Finished, FinishReason, TextDelta
from hpc_server.scripted import ScriptedProgram
from hpc_server.scripted_replies import HashReplies
from hpc_server.scripted_transfers import Faults
from tests.server.driving import (
    EOS,
    REPLIES,
    VOCAB,
    Collected,
    Driver,
    driver,
    expected,
    failure,
    prompt,
    reason,
    request,
)
from tests.server.served import geometry, small


def test_a_request_gets_its_reply_and_ends_at_its_length() -> None:
    """Started comes first, tokens are the script's, the last event says why it ended."""
    run = driver()
    stream = run.submit(request(prompt(70), 12))
    run.run()
    assert stream.started is not None
    assert stream.events[0] is stream.started
    assert stream.ids == expected(prompt(70), 12)
    assert reason(stream) is FinishReason.LENGTH


def test_a_stop_token_ends_a_request() -> None:
    """The stop token is the last id and the reason is stop."""
    run = driver(replies=HashReplies(100, 400, length=5))
    stream = run.submit(request(prompt(20), 50))
    run.run()
    assert stream.ids[-1] == EOS
    assert len(stream.ids) == 6
    assert reason(stream) is FinishReason.STOP


def test_ignore_eos_goes_on_to_the_length() -> None:
    """With ignore_eos the reply has exactly max_new tokens."""
    run = driver(replies=HashReplies(100, 400, length=5))
    stream = run.submit(request(prompt(20), 30, ignore_eos=True))
    run.run()
    assert len(stream.ids) == 30
    assert reason(stream) is FinishReason.LENGTH


def test_a_second_turn_resumes_at_the_exact_endpoint() -> None:
    """A prompt that goes on after a reply reuses all processed tokens of the first turn."""
    run = driver()
    first = run.submit(request(prompt(70), 20))
    run.run()
    turn = [*prompt(70), *first.ids, *prompt(30, seed=1)]
    second = run.submit(request(turn, 4))
    run.run()
    assert second.started is not None
    # The last generated token was never processed.
    assert second.started.reused == 70 + 20 - 1
    assert second.ids == expected(turn, 4)


def test_requests_start_in_order_and_nobody_overtakes() -> None:
    """Small requests behind a large one that is blocked for pages wait for it."""
    run = driver(small(geometry(pages=16, lanes=4)))
    streams = [run.submit(request(prompt(n, seed=n), 4)) for n in (150, 180, 20, 21)]
    order: list[int] = []
    while run.worker.scheduler.everything():
        run.round()
        order += [i for i, s in enumerate(streams) if s.started is not None and i not in order]
    assert order == [0, 1, 2, 3]
    run.settle()


def test_admission_stays_open_while_another_prompt_is_prefilled() -> None:
    """A second request gets its lane while the first one's long prompt is still computed."""
    run = driver()
    run.submit(request(prompt(500), 4))
    run.round()
    second = run.submit(request(prompt(20, seed=5), 4))
    run.round()
    assert second.started is not None
    assert not run.worker.scheduler.running[0].decoding
    run.run()


def test_a_decoding_lane_goes_on_while_another_prefills() -> None:
    """Each round gives one chunk to a prompt and one step to every reply."""
    run = driver()
    first = run.submit(request(prompt(20), 100))
    run.round()
    run.submit(request(prompt(500, seed=2), 4))
    before = len(first.ids)
    for _ in range(5):
        run.round()
    assert len(first.ids) == before + 5
    run.run()


@pytest.mark.parametrize("rounds", [0, 1, 3, 6, 12])
@pytest.mark.parametrize("lag", [False, True])
def test_cancelling_at_any_stage_returns_every_count(rounds: int, lag: bool) -> None:
    """Queued, just admitted, mid-prefill, decoding: lanes, pages and slots come back (field report 46)."""
    run = driver(small(geometry(lag=lag), faults=Faults(landing_delay_s=0.05)))
    stream = run.submit(request(prompt(150), 100))
    for _ in range(rounds):
        run.round()
    run.worker.cancel("r1")
    run.worker.outbox.flush()
    assert reason(stream) is FinishReason.CANCELLED
    run.settle()


def test_cancelled_work_is_reused() -> None:
    """Blocks computed before a cancellation serve the same prompt again (field report 49)."""
    run = driver()
    run.submit(request(prompt(200), 100))
    for _ in range(10):
        run.round()
    run.worker.cancel("r1")
    run.settle()
    again = run.submit(request(prompt(200), 4))
    run.run()
    assert again.started is not None
    assert again.started.reused >= 128
    assert again.ids == expected(prompt(200), 4)


def test_identical_prompts_together_get_identical_replies() -> None:
    """Four equal prompts at once: equal tokens, and no page is lost to the duplicates."""
    run = driver()
    streams = [run.submit(request(prompt(100), 10)) for _ in range(4)]
    run.run()
    assert {tuple(stream.ids) for stream in streams} == {tuple(expected(prompt(100), 10))}


@pytest.mark.parametrize("lag", [False, True])
def test_suspension_under_a_tiny_pool_is_invisible(lag: bool) -> None:
    """Replies that outgrow the pool are set aside and go on with the same tokens (D7)."""
    run = driver(small(geometry(pages=24, lanes=3, slots=8, lag=lag)))
    streams = [run.submit(request(prompt(60, seed=s), 200)) for s in range(3)]
    run.run()
    assert run.worker.counters["suspensions"] > 0
    for seed, stream in enumerate(streams):
        assert stream.ids == expected(prompt(60, seed), 200)
        assert reason(stream) is FinishReason.LENGTH
        assert sum(1 for event in stream.events if event is stream.started) == 1


def test_the_youngest_by_first_admission_is_suspended_first() -> None:
    """The oldest request is never set aside while younger ones run."""
    run = driver(small(geometry(pages=24, lanes=3, slots=8)))
    for seed in range(3):
        run.submit(request(prompt(60, seed=seed), 200))
    run.run()
    by_id = {report.id: report.suspensions for report in run.reports}
    assert by_id["r1"] == 0
    assert by_id["r3"] >= 1


def test_a_request_that_can_never_fit_is_refused_with_its_size() -> None:
    """A prompt larger than the pool fails at once and the next request runs."""
    run = driver(small(geometry(pages=8)))
    large = run.submit(request(prompt(400), 4))
    little = run.submit(request(prompt(30, seed=1), 4))
    run.run()
    assert failure(large) is FailureKind.INFEASIBLE
    assert isinstance(large.last, Failed)
    assert "400 tokens" in large.last.message
    assert reason(little) is FinishReason.LENGTH


class _Words:
    """Makes each token one letter; stops after a count."""

    def __init__(self, stop_after: int) -> None:
        self._left = stop_after
        self.fed: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> Sequence[TextDelta]:
        self.fed += token_ids
        self._left -= len(token_ids)
        return ()

    def finish(self) -> Sequence[TextDelta]:
        return ()

    @property
    def stopped(self) -> bool:
        return self._left <= 0


@pytest.mark.parametrize("per_step", [1, 3, 4])
def test_a_stop_string_ends_decoding_at_its_token(per_step: int) -> None:
    """No token after the one that completes a stop string is given out or kept in the endpoint."""
    run = driver(small(tokens_per_step=per_step))
    text = _Words(stop_after=6)
    stream = run.submit(request(prompt(100), 50), text)
    run.run()
    said = expected(prompt(100), 6)
    assert stream.ids == text.fed == said
    assert reason(stream) is FinishReason.STOP
    again = run.submit(request([*prompt(100), *said, *prompt(20, seed=9)], 2))
    run.run()
    assert again.started is not None
    # At best all but the token that completed the stop string, which was never processed.
    assert 96 <= again.started.reused <= 100 + 5


@pytest.mark.parametrize("per_step", [2, 3, 5])
def test_the_length_cuts_a_step_of_several_tokens(per_step: int) -> None:
    """max_new holds exactly when a round gives more than is left."""
    run = driver(small(tokens_per_step=per_step))
    stream = run.submit(request(prompt(40), 10))
    run.run()
    assert stream.ids == expected(prompt(40), 10)


class _StaleOnce(ScriptedProgram):
    """The first admissions are stale."""

    stale = 2

    def admit(self, q: Quote, r: Request, now: float, resume: Suspended | None) -> LaneId | Stale:
        if self.stale:
            self.stale -= 1
            return Stale("for the test")
        return super().admit(q, r, now, resume)


def test_a_stale_quote_is_quoted_again() -> None:
    """Staleness is no failure; it is counted."""
    run = Driver.over(_StaleOnce(REPLIES, vocab_size=VOCAB, options=small()))
    stream = run.submit(request(prompt(40), 3))
    run.run()
    assert stream.ids == expected(prompt(40), 3)
    assert run.worker.counters["stale_quotes"] == 2


class _Prefetches(ScriptedProgram):
    """Counts prefetch calls."""

    calls = 0

    def prefetch(self, r: Request, now: float) -> int:
        self.calls += 1
        return super().prefetch(r, now)


def test_a_blocked_head_is_prefetched_once_a_change() -> None:
    """Waiting for a lane asks for a prefetch once, not every round (§6.6)."""
    program = _Prefetches(REPLIES, vocab_size=VOCAB, options=small(geometry(lanes=1)))
    run = Driver.over(program)
    run.submit(request(prompt(40), 60))
    run.round()
    run.submit(request(prompt(40, seed=1), 4))
    for _ in range(30):
        run.round()
    assert 1 <= program.calls <= 2
    run.run()


def test_requests_that_must_not_be_cached_leave_nothing() -> None:
    """cacheable=False reuses nothing and adds no block or snapshot (§7.7)."""
    run = driver()
    for _ in range(2):
        stream = run.submit(request(prompt(100), 10, cacheable=False))
        run.run()
        assert stream.started is not None
        assert stream.started.reused == 0
    stats = run.program.index.stats()
    assert (stats.blocks, stats.snapshots) == (0, 0)


def test_a_report_says_what_a_request_did() -> None:
    """Counts and times of the log line come from the worker's own clock."""
    run = driver()
    run.submit(request(prompt(70), 5))
    run.run()
    (report,) = run.reports
    assert (report.prompt_tokens, report.prefilled, report.generated) == (70, 70, 5)
    assert report.outcome == "length"
    assert report.stopped_by is not None
    assert report.ttft_s is not None
    assert report.ttft_s >= (report.queued_s or 0.0) > 0
    # The first token comes with the prompt's last chunk, the second in the same round.
    assert report.tokens_per_s == pytest.approx(4 / 0.03)


def test_a_long_random_run_never_reads_wrong_bytes() -> None:
    """Mixed prompts, cancellations and tiny pools: every reply is the script's, every ledger balances."""
    rng = np.random.default_rng(11)
    options = small(
        geometry(pages=60, lanes=3, slots=7, slabs=150, lag=True),
        faults=Faults(landing_delay_s=0.02),
        taps_inside=True,
        tokens_per_step=2,
    )
    run = driver(options)
    open_streams: list[tuple[Collected, list[int], int]] = []
    for step in range(400):
        if step < 300 and rng.random() < 0.25:
            family = int(rng.integers(4))
            tokens = prompt(int(rng.integers(1, 200)), seed=family)
            max_new = int(rng.integers(1, 120))
            open_streams.append((run.submit(request(tokens, max_new)), tokens, max_new))
        if rng.random() < 0.04 and run.count:
            run.worker.cancel(f"r{int(rng.integers(1, run.count + 1))}")
        run.round()
    run.run()
    assert len(open_streams) > 40
    for stream, tokens, max_new in open_streams:
        said = expected(tokens, max_new)
        assert isinstance(stream.last, Finished)
        assert stream.ids == said[: len(stream.ids)]
        if stream.last.reason is not FinishReason.CANCELLED:
            assert stream.ids == said


def test_a_first_token_does_not_wait_for_the_decode_round() -> None:
    """By the time the others' decode begins, the token that prefill chose is with its client."""
    run = driver()
    other = run.submit(request(prompt(20), 50))
    run.round()
    assert other.ids
    seen: list[int] = []
    late: list[Collected] = []
    decode = run.program.decode

    def watched(lanes: Sequence[LaneId], now: float) -> Sequence[StepOut]:
        seen.append(len(late[0].ids))
        return decode(lanes, now)

    run.program.decode = watched  # type: ignore[assignment,method-assign]
    late.append(run.submit(request(prompt(10, seed=1), 5)))
    run.round()
    assert seen == [1]
    run.run()
