"""One scheduling round after another over a `Program` (§8.2). Only the engine's thread calls it.

A round takes note of landed copies, admits while the head of the queue is ready, gives one prefill chunk to
the oldest prompt and one decode round to everyone else. Admission stays open while a prompt is prefilled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import attrs

from hpc_index.records import Ending, Finish, Quote, Readiness, Stale, TurnEnd
from hpc_index.requests import Outcome, StepOut
from hpc_server.contracts import Program
from hpc_server.events import (
    Event,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Outbox,
    Report,
    Started,
    TextDelta,
    Tokens,
)
from hpc_server.options import EngineOptions
from hpc_server.scheduler import Job, Scheduler, Submission

__all__ = ["ProgramError", "Worker"]

_log = logging.getLogger(__name__)
_STALE_TRIES = 4


class ProgramError(Exception):
    """The program cannot go on: it could not even end a lane, or failed round after round."""


@attrs.define
class _Counts:
    """What the worker did, for /metrics."""

    rounds: int = 0
    failed_rounds: int = 0
    stale_quotes: int = 0
    short_waits: int = 0
    suspensions: int = 0
    prefetches: int = 0
    prefetched_bytes: int = 0
    tokens_past_stop: int = 0


class Worker:
    """Applies rounds to a program. Raises ProgramError from any method when the program is beyond use.

    settled: called with each job whose last event was just posted.
    """

    def __init__(
        self,
        program: Program,
        options: EngineOptions,
        clock: Callable[[], float],
        settled: Callable[[Job, Report], None],
    ) -> None:
        self._program = program
        self._options = options
        self._clock = clock
        self._settled = settled
        self._counts = _Counts()
        self._failures = 0
        # The head is quoted again only after something that could change the answer.
        self._changed = True
        self.scheduler = Scheduler()
        self.outbox = Outbox()

    @property
    def counters(self) -> Mapping[str, int]:
        """Monotonic counters by name."""
        return {**attrs.asdict(self._counts), "undeliverable_events": self.outbox.undeliverable}

    def submit(self, submission: Submission, arrived: float) -> None:
        """Put a request at the end of the queue."""
        if self.scheduler.head() is None:
            self._changed = True
        self.scheduler.enqueue(Job(submission, submission.request, arrived))

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is. One that is over already is left alone."""
        job = self.scheduler.find(request_id)
        if job is not None:
            self._end(job, Finish(Ending.CANCELLED), FinishReason.CANCELLED)

    def poll(self) -> bool:
        """Take note of landed copies; True if some did."""
        landed = self._program.poll(self._clock())
        self._changed = self._changed or landed
        return landed

    def round(self) -> bool:
        """One round. False if nothing could be done but to wait for copies or for new commands."""
        self._counts.rounds += 1
        landed = self.poll()
        admitted = self._admit_ready()
        prefilled = self._prefill_one()
        self.outbox.flush()  # a first token does not wait for the decode round
        decoded = self._decode_all()
        self.outbox.flush()
        return landed or admitted or prefilled or decoded

    def fail_all(self, kind: FailureKind, message: str, *, release: bool) -> None:
        """Answer every request with an error. release: end their lanes too (not after a ProgramError)."""
        for job in self.scheduler.everything():
            if release and job.lane is not None:
                self._release(job, Finish(Ending.CANCELLED))
            self._settle(job, kind.value, lambda r: Failed(kind, message, r))
        self.outbox.flush()

    # Admission (§6.3, §6.4, §6.6)

    def _admit_ready(self) -> bool:
        admitted = False
        while (job := self.scheduler.head()) is not None and self._changed:
            try:
                quote = self._try_admit(job)
                if quote is not None and quote.readiness is Readiness.TEMPORARILY_BLOCKED:
                    self._wait_for_room(job)
                    continue
            except Exception as error:  # whatever a model raises becomes this request's error
                self._fail_round((job,), error)
                continue
            if quote is None:
                admitted = True
            elif quote.readiness is Readiness.PERMANENTLY_INFEASIBLE:
                self._fail(job, FailureKind.INFEASIBLE, _infeasible(job, quote))
            else:  # stale each time: the next round tries again
                break
        return admitted

    def _try_admit(self, job: Job) -> Quote | None:
        """Quote and admit the head; the quote if that did not give it a lane."""
        quote = self._program.quote(job.request, self._clock())
        for _ in range(_STALE_TRIES):
            if quote.readiness is not Readiness.READY:
                return quote
            now = self._clock()
            lane = self._program.admit(quote, job.request, now, job.resume)
            if not isinstance(lane, Stale):
                self.scheduler.admit(lane)
                self._admitted(job, quote, now)
                return None
            self._counts.stale_quotes += 1
            quote = self._program.quote(job.request, self._clock())
        return quote

    def _admitted(self, job: Job, quote: Quote, now: float) -> None:
        job.frontier = quote.reuse
        job.restored_bytes += quote.restore_bytes
        if job.admitted_at is None:
            job.admitted_at = now
            job.reused, job.matched, job.stopped_by = quote.reuse, quote.matched, quote.stopped_by
            prompt_tokens = len(job.submission.request.prompt.tokens)
            self._post(job, Started(prompt_tokens, quote.reuse, quote.matched))

    def _wait_for_room(self, job: Job) -> None:
        """The head is blocked until something changes: use the wait for its restores (§6.6)."""
        if not self.scheduler.running and not self._program.stats().index.tickets_open:
            message = "no lane runs and no copy is in flight, yet the request is blocked"
            self._fail(job, FailureKind.INFEASIBLE, message)
            return
        self._changed = False
        copied = self._program.prefetch(job.request, self._clock())
        self._counts.prefetches += 1
        self._counts.prefetched_bytes += copied

    # Prefill and decode

    def _prefill_one(self) -> bool:
        job = self.scheduler.oldest_prefilling()
        if job is None:
            return False
        try:
            step = self._program.prefill(job.running_lane, self._options.prefill_chunk, self._clock())
        except Exception as error:
            self._fail_round((job,), error)
            return True
        if step.failed:
            self._fail(job, FailureKind.PROGRAM, "the lane failed while its prompt was prefilled")
            return True
        if step.short:
            return self._make_room(job, step.landing)
        job.prefilled += step.frontier - job.frontier
        job.frontier = step.frontier
        job.fresh = True
        job.decoding = step.done
        if step.first is not None:
            self._step(job, step.first)
        return True

    def _decode_all(self) -> bool:
        jobs = self.scheduler.decoding()
        if not jobs:
            return False
        try:
            steps = self._program.decode([job.running_lane for job in jobs], self._clock())
        except Exception as error:
            self._fail_round(jobs, error)
            return True
        self._failures = 0
        worked = False
        short: list[tuple[Job, StepOut]] = []
        for job, step in zip(jobs, steps, strict=True):
            if step.outcome is Outcome.SHORT:
                short.append((job, step))
                continue
            worked = True
            self._step(job, step)
        if short:
            # One victim a round: its pages may be enough for all.
            worked = self._make_room(short[0][0], any(step.landing for _, step in short)) or worked
        return worked

    def _step(self, job: Job, step: StepOut) -> None:
        """Pass a step's tokens on and end the request where it ends: stop token, stop string, length."""
        if step.outcome is Outcome.FAILED:
            self._fail(job, FailureKind.PROGRAM, "the lane failed when its next token was chosen")
            return
        try:
            ending = self._pass_on(job, step)
        except Exception as error:
            self._fail_round((job,), error)
            return
        if ending is FinishReason.STOP:
            self._end(job, Finish(Ending.DONE, TurnEnd.FINAL), ending)
        elif ending is FinishReason.LENGTH:
            self._end(job, Finish(Ending.DONE, TurnEnd.LENGTH), ending)

    def _pass_on(self, job: Job, step: StepOut) -> FinishReason | None:
        ids = tuple(step.tokens.tolist())
        request = job.submission.request
        keep = min(len(ids), request.max_new - job.generated)
        closing = step.outcome is Outcome.STOPPED and keep == len(ids)
        stopped, deltas = closing, None
        text = job.submission.text
        if text is not None:
            collected: list[TextDelta] = []
            for i in range(keep - closing):
                collected += text.feed(ids[i : i + 1])
                if text.stopped:
                    keep, stopped, closing = i + 1, True, False
                    break
            deltas = tuple(collected)
        now = self._clock()
        if keep < len(ids):
            self._counts.tokens_past_stop += len(ids) - keep
            self._program.keep(job.running_lane, keep, now)
        job.generated += keep
        job.fresh = True
        job.first_at = now if job.first_at is None else job.first_at
        job.last_at = now
        self._post(job, Tokens(ids[:keep], step.logprobs[:keep], closing, deltas))
        if stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if job.generated >= request.max_new else None

    # Running out of pages (D7, §9.5)

    def _make_room(self, job: Job, landing: bool) -> bool:
        """Wait for landing pages, or suspend the youngest lane. True if something changed."""
        if landing:
            self._counts.short_waits += 1
            return False
        victim = self.scheduler.youngest()
        if victim is None or (victim is job and not job.fresh and len(self.scheduler.running) == 1):
            self._fail(job, FailureKind.INFEASIBLE, "the KV pools cannot hold this request even alone")
        else:
            self._suspend(victim)
        return True

    def _suspend(self, job: Job) -> None:
        try:
            suspended = self._program.finish(job.running_lane, Finish(Ending.SUSPENDED), self._clock())
        except Exception as error:
            raise ProgramError(f"suspending a lane failed: {error!r}") from error
        if job.decoding:
            if suspended is None:
                raise ProgramError("the program gave nothing back to resume a suspended lane from")
            request = job.submission.request
            prompt = attrs.evolve(request.prompt, tokens=suspended.tokens)
            job.request = attrs.evolve(request, prompt=prompt, max_new=request.max_new - job.generated)
            job.resume = suspended
        # A prompt that was not done drew no token: what it was admitted with still says all.
        self.scheduler.suspend(job)
        job.suspensions += 1
        self._counts.suspensions += 1
        self._released()

    # Endings

    def _end(self, job: Job, how: Finish, reason: FinishReason) -> None:
        if how.how is Ending.DONE:
            self._failures = 0  # a reply got through; a prompt alone would not show that decoding works
        if job.lane is not None:
            self._release(job, how)
        self._settle(job, reason.value, lambda report: Finished(reason, report))

    def _fail(self, job: Job, kind: FailureKind, message: str) -> None:
        if job.lane is not None:
            self._release(job, Finish(Ending.FAILED))
        self._settle(job, kind.value, lambda report: Failed(kind, message, report))

    def _fail_round(self, jobs: Iterable[Job], error: Exception) -> None:
        """A call into the program raised: its lanes fail, the others go on if those can be ended."""
        _log.error("a program call failed", exc_info=error)
        self._counts.failed_rounds += 1
        self._failures += 1
        for job in jobs:
            self._fail(job, FailureKind.PROGRAM, f"the model failed: {type(error).__name__}")
        if self._failures >= self._options.max_failures:
            raise ProgramError(f"{self._failures} program calls failed in a row, last: {error!r}")

    def _release(self, job: Job, how: Finish) -> None:
        try:
            self._program.finish(job.running_lane, how, self._clock())
        except Exception as error:
            raise ProgramError(f"ending a lane failed: {error!r}") from error
        self._released()

    def _released(self) -> None:
        self._changed = True

    def _settle(self, job: Job, outcome: str, last: Callable[[Report], Event]) -> None:
        if job is self.scheduler.head():
            self._changed = True  # another request is the head now
        self.scheduler.remove(job)
        report = self._report(job, outcome)
        self._post(job, last(report))
        self._settled(job, report)

    def _post(self, job: Job, event: Event) -> None:
        self.outbox.post(job.submission.stream, event)

    def _report(self, job: Job, outcome: str) -> Report:
        first, last, admitted = job.first_at, job.last_at, job.admitted_at
        return Report(
            id=job.submission.id,
            outcome=outcome,
            prompt_tokens=len(job.submission.request.prompt.tokens),
            reused=job.reused,
            matched=job.matched,
            stopped_by=job.stopped_by,
            restored_bytes=job.restored_bytes,
            prefilled=job.prefilled,
            generated=job.generated,
            suspensions=job.suspensions,
            queued_s=None if admitted is None else admitted - job.arrived,
            ttft_s=None if first is None else first - job.arrived,
            decode_s=0.0 if first is None or last is None else last - first,
            total_s=self._clock() - job.arrived,
        )


def _infeasible(job: Job, quote: Quote) -> str:
    tokens = len(job.request.prompt.tokens)
    why = quote.blocked_by.value if quote.blocked_by is not None else "no reason given"
    return f"a prompt of {tokens} tokens with up to {job.request.max_new} new ones does not fit ({why})"
