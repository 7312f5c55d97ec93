"""Random histories on a program with hardly any room, its lanes compared with cold runs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import attrs
import pytest

from hpc_index import check_invariants
from hpc_index.ids import LaneId
from hpc_index.records import Ending, Finish, HintKind, Plan, Readiness, Stale, Stream, TapHint
from hpc_index.requests import Outcome, PrefillStep, Request, Sampling, StepOut, Suspended
from tests.qwen35.programs import VOCAB, Bench, Cold, Pass, Patched, join, prompt

LONGEST = 400  # tokens of a prompt
# Logits of two cold runs that are cut differently differ by a few 1e-6 here; wrong reuse differs by 0.1.
TOLERANCE = 1e-4


class Traced(Bench):
    """Knows how every cached prefix was computed, and so whether a lane's bits can be told (design §2)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._cuts: dict[bytes, set[tuple[tuple[int, int, int], ...]]] = {}

    def _note(self, slot: int, p: Pass) -> None:
        s = next(s for s in self.program._lanes.values() if s.lane.slot == slot)
        view = s.request.prompt
        way = self._way.setdefault(s.lane.id, [])
        if not way and p.base:
            way += self._ways[view.cache_salt + s.part(0, p.base).tobytes()]
        way.append(p)
        if not view.cacheable:
            return
        for end in {*range(p.base - p.base % 64 + 64, p.end + 1, 64), p.end}:
            key = view.cache_salt + s.part(0, end).tobytes()
            self._cuts.setdefault(key, set()).add(_shape(way))
        self._ways[view.cache_salt + s.part(0, p.end).tobytes()] = list(way)

    def told(self, lane: LaneId) -> bool:
        """Whether every prefix that the lane may have taken from the cache was computed in one way only."""
        s = self.program._lanes[lane]
        salt = s.request.prompt.cache_salt
        ends = {*range(64, s.lane.frontier + 1, 64), *(p.end for p in self._way[lane])}
        keys = (salt + s.part(0, end).tobytes() for end in ends)
        return all(len(self._cuts.get(key, ())) <= 1 for key in keys)

    def like_cold(self, lane: LaneId) -> float:
        """The largest difference of the next token's logits from those of a cold run."""
        s = self.program._lanes[lane]
        cold = Cold(self.weights, self.config).replay(self._way[lane])
        ours = self.program.model.logits(self.program.model.states.views["hidden", -1][s.lane.slot][None])[0]
        return (ours - cold).abs().max().item()


def _shape(way: list[Pass]) -> tuple[tuple[int, int, int], ...]:
    return tuple((p.base, p.end, p.rows) for p in way)


@attrs.define(eq=False)
class Job:
    """One request. lane: None while it waits, new or set aside. decoding: its prompt is done."""

    request: Request
    reply: int
    lane: LaneId | None = None
    resume: Suspended | None = None
    decoding: bool = False


class Soak:
    """One history. faults: one copy in so many fails; 0 for none."""

    def __init__(self, seed: int, faults: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Traced(
            max_concurrency=self.rng.choice([8, 8, 3]),
            kv_capacity=64 * self.rng.choice([14, 24, 40]),
            host_cache_mib=self.rng.choice([0, 1, 1, 2]),
            device_snapshot_slots=self.rng.choice([1, 2, 5]),
            prefill_chunk=self.rng.choice([64, 128]),
        )
        self.program = self.bench.program
        self.faults = faults
        self.jobs: list[Job] = []
        self.known = [prompt(1000 * seed, 150).tolist()]
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        run = self.program._copies.run

        def copy(plan: Plan) -> int:
            if (
                faults
                and plan.copies
                and plan.stream is not Stream.COMPUTE
                and not self.rng.randrange(faults)
            ):
                raise RuntimeError("the device refused the copy")
            return run(plan)

        self.program._copies = Patched(self.program._copies, copy)  # type: ignore[assignment]

    def step(self) -> None:
        """One random operation, all ledgers checked after it."""
        self.now += 1.0
        actions = (self.submit, self.admit, self.prefill, self.prefill, self.decode, self.decode, self.look)
        rare = (self.suspend, self.prefetch, self.end, self.speak, self.speak)
        self.rng.choice(actions if self.rng.random() < 0.8 else rare)()
        check_invariants(self.program.index)

    def close(self) -> None:
        """End everything; nothing may be held but cache."""
        for job in list(self.jobs):
            self.finish(job, Ending.CANCELLED)
        self.bench.balanced()

    def some(self, *, prefilled: bool | None = None) -> list[Job]:
        running = [j for j in self.jobs if j.lane is not None]
        return [j for j in running if prefilled is None or j.decoding is prefilled]

    def submit(self) -> None:
        """A prompt: a known sequence as it is, cut, edited or grown."""
        if len(self.jobs) > 10:
            return
        rng = self.rng
        tokens = list(rng.choice(self.known))
        cut = rng.choice(
            [len(tokens), len(tokens), len(tokens) // 64 * 64, rng.randrange(len(tokens) + 1), 150]
        )
        new = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 30, 63, 64, 65, 150]))]
        tokens = (tokens[:cut] + new)[:LONGEST] or [1]
        hints = [
            TapHint(rng.randrange(len(tokens) + 1), rng.choice(list(HintKind)))
            for _ in range(rng.randrange(3))
        ]
        sampling = Sampling(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1 << 30),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
        )
        request = self.bench.request(
            join(tokens),
            rng.choice([1, 8, 80]),
            sampling,
            hints=tuple(hints),
            cache_salt=rng.choice([b"", b"", b"", b"other"]),
            cacheable=rng.random() < 0.95,
        )
        self.jobs.append(Job(request, request.max_new))

    def admit(self) -> None:
        waiting = [j for j in self.jobs if j.lane is None]
        if not waiting:
            return
        job = self.rng.choice(waiting)
        quote = self.program.quote(job.request, self.now)
        assert quote.reuse < len(job.request.prompt.tokens)
        if quote.readiness is Readiness.TEMPORARILY_BLOCKED:
            self.seen["blocked"] += 1
            if not self.some():
                raise AssertionError(f"blocked with nothing running: {quote}")
            return
        assert quote.readiness is Readiness.READY
        lane = self.program.admit(quote, job.request, self.now, job.resume)
        assert not isinstance(lane, Stale)
        job.lane = lane
        self.seen["reused"] += quote.reuse > 0
        self.seen["restored"] += quote.restore_bytes > 0

    def prefill(self) -> None:
        jobs = self.some(prefilled=False)
        if not jobs:
            return
        job = self.rng.choice(jobs)
        assert job.lane is not None
        step = self.program.prefill(job.lane, self.rng.choice([64, 100, 128, 1]), self.now)
        self.take(job, step)
        if step.short:
            self.make_way(job)

    def take(self, job: Job, step: PrefillStep) -> None:
        if step.failed:
            self.seen["failed"] += 1
            assert self.faults
            self.finish(job, Ending.FAILED)
        elif step.done:
            job.decoding = True
            if step.first is not None:
                self.chosen(job, step.first)

    def chosen(self, job: Job, step: StepOut) -> None:
        assert step.outcome is Outcome.TOKENS
        assert all(0 <= t < VOCAB for t in step.tokens)
        job.reply -= 1
        if job.reply <= 0:
            self.finish(job, Ending.DONE)

    def decode(self) -> None:
        jobs = self.some(prefilled=True)
        if not jobs:
            return
        jobs = self.rng.sample(jobs, self.rng.randint(1, len(jobs)))
        for _ in range(self.rng.choice([1, 1, 5])):
            lanes = [j.lane for j in jobs if j.lane is not None]
            for job, step in zip(jobs, self.program.decode(lanes, self.now), strict=True):
                if step.outcome is Outcome.SHORT:
                    self.seen["short"] += 1
                else:
                    self.chosen(job, step)
            jobs = [j for j in jobs if j in self.jobs]
            if not jobs or step.outcome is Outcome.SHORT:
                break
        if jobs and step.outcome is Outcome.SHORT:
            self.make_way(jobs[-1])

    def make_way(self, job: Job) -> None:
        """Set another lane aside; a lane that has the pool to itself and finds no page ends (D7)."""
        others = [j for j in self.some() if j is not job]
        if others:
            self.set_aside(others[-1])
        else:
            self.finish(job, Ending.CANCELLED)

    def end(self) -> None:
        """A client goes away, at whatever stage its request is."""
        if self.jobs:
            self.finish(self.rng.choice(self.jobs), self.rng.choice([Ending.CANCELLED, Ending.FAILED]))

    def speak(self) -> None:
        """Forced tokens, a boundary, or the pending token taken back and replaced."""
        jobs = self.some(prefilled=True)
        if not jobs:
            return
        job = self.rng.choice(jobs)
        assert job.lane is not None
        action = self.rng.randrange(3)
        s = self.program._lanes[job.lane]
        if action == 0 and s.chosen:
            self.program.keep(job.lane, 0, self.now)
        if action == 1:
            self.program.boundary(job.lane, self.now)
        if action != 1 or self.rng.random() < 0.3:
            self.program.force(
                job.lane, prompt(self.rng.randrange(99), self.rng.choice([1, 3, 70])), self.now
            )
        if action == 1 and self.rng.random() < 0.3:
            self.program.boundary(job.lane, self.now)

    def suspend(self) -> None:
        jobs = self.some()
        if jobs:
            self.set_aside(self.rng.choice(jobs))

    def set_aside(self, job: Job) -> None:
        assert job.lane is not None
        suspended = self.program.finish(job.lane, Finish(Ending.SUSPENDED), self.now)
        assert suspended is not None
        self.seen["suspended"] += 1
        old = job.request
        view = attrs.evolve(old.prompt, tokens=suspended.tokens, hints=())
        job.request = Request(view, max(1, job.reply), old.sampling, old.stop_tokens, old.ignore_eos)
        job.lane, job.resume, job.decoding = None, suspended, False
        if -(-(len(suspended.tokens) + job.reply) // 64) > self.program.resolved.pages:
            self.jobs.remove(job)

    def prefetch(self) -> None:
        waiting = [j for j in self.jobs if j.lane is None]
        if waiting:
            self.seen["prefetched"] += self.program.prefetch(self.rng.choice(waiting).request, self.now) > 0

    def look(self) -> None:
        """A lane against the cold run: its very bits where they can be told, else its logits."""
        jobs = [j for j in self.some() if j.lane in self.bench._way]
        if not jobs:
            return
        lane = self.rng.choice(jobs).lane
        assert lane is not None
        if self.bench.told(lane):
            self.seen["exact"] += 1
            self.bench.same_as_cold(lane)
        else:
            self.seen["near"] += 1
            assert self.bench.like_cold(lane) <= TOLERANCE

    def finish(self, job: Job, how: Ending) -> None:
        self.jobs.remove(job)
        if job.lane is None:
            return
        s = self.program._lanes[job.lane]
        tokens = s.part(0, s.end).tolist()
        self.program.finish(job.lane, Finish(how), self.now)
        self.known = [*self.known[-6:], tokens[: LONGEST - 60]]


def history(seed: int, steps: int, faults: int = 0) -> Counter[str]:
    soak = Soak(seed, faults)
    for _ in range(steps):
        soak.step()
    soak.close()
    return soak.seen + Counter(soak.program.stats().index.counters)


def test_random_histories_run_on_the_bytes_of_a_cold_run() -> None:
    """Growing, edited, cancelled, suspended and forced sequences share pages, and each keeps its own bits."""
    seen = sum((history(seed, 400, faults=3 if seed > 3 else 0) for seed in range(6)), Counter())
    wanted = {"exact", "near", "restored", "reused", "suspended", "duplicates", "failed"}
    assert wanted <= set(+seen), sorted(wanted - set(+seen))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_long_random_histories(seed: int) -> None:
    """The same, at length: 40 histories of 1,500 steps, every other one with copies that fail."""
    history(seed, 1500, faults=3 * (seed % 2))
