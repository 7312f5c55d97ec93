"""The order of requests: first come, first served, nobody overtakes (§6.3), suspended ones first (D7).

Holds no clock and calls nothing: the engine asks it who is next and tells it what happened.
"""

from __future__ import annotations

from collections import deque

import attrs

from hpc_index.ids import LaneId
from hpc_index.records import Reason
from hpc_index.requests import Request, Suspended
from hpc_server.events import EventStream, TextOutput

__all__ = ["Job", "Scheduler", "Submission"]


@attrs.frozen(eq=False)
class Submission:
    """A request as it enters the engine.

    text: given if stop strings must end the request at once; the worker then drives it until the last
        event. Without it the consumer makes text of the tokens on its own side.
    """

    id: str
    request: Request
    stream: EventStream
    text: TextOutput | None = None


@attrs.define(eq=False)
class Job:
    """A submission on its way, owned by the worker.

    request, resume: what to quote next; after a suspension the prompt holds the generated tokens too.
    order: rank by first admission, kept over suspensions (D7). lane: None while it waits.
    fresh: tokens or prompt progress since the last admission, to tell a request that cannot run at all.
    """

    submission: Submission
    request: Request
    arrived: float
    resume: Suspended | None = None
    order: int | None = None
    lane: LaneId | None = None
    decoding: bool = False
    fresh: bool = False
    frontier: int = 0
    generated: int = 0
    reused: int = 0
    matched: int = 0
    stopped_by: Reason | None = None
    restored_bytes: int = 0
    prefilled: int = 0
    suspensions: int = 0
    admitted_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None

    @property
    def running_lane(self) -> LaneId:
        """Its lane. Raises RuntimeError while it waits."""
        if self.lane is None:
            raise RuntimeError(f"request {self.submission.id} has no lane")
        return self.lane


class Scheduler:
    """Who waits and who runs."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._admissions = 0

    @property
    def waiting(self) -> int:
        """Requests without a lane."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[Job, ...]:
        """Requests with a lane, by first admission."""
        return tuple(self._running)

    def enqueue(self, job: Job) -> None:
        """A new request goes to the end."""
        self._waiting.append(job)

    def head(self) -> Job | None:
        """The only request that may be admitted next."""
        return self._waiting[0] if self._waiting else None

    def admit(self, lane: LaneId) -> Job:
        """The head takes a lane."""
        job = self._waiting.popleft()
        if job.order is None:
            job.order = self._admissions
            self._admissions += 1
        job.lane, job.decoding, job.fresh = lane, False, False
        self._running.append(job)
        self._running.sort(key=_rank)
        return job

    def suspend(self, job: Job) -> None:
        """A running request gives its lane up and is next in turn.

        Victims are the youngest first, so pushing each to the front keeps the queue in order of age.
        """
        self._running.remove(job)
        job.lane, job.decoding = None, False
        self._waiting.appendleft(job)

    def remove(self, job: Job) -> None:
        """A request is over, wherever it is."""
        if job.lane is None:
            self._waiting.remove(job)
        else:
            self._running.remove(job)

    def find(self, request_id: str) -> Job | None:
        """A request by its id."""
        for job in (*self._running, *self._waiting):
            if job.submission.id == request_id:
                return job
        return None

    def everything(self) -> tuple[Job, ...]:
        """Running requests, then waiting ones in order."""
        return (*self._running, *self._waiting)

    def oldest_prefilling(self) -> Job | None:
        """Whose prompt gets this round's chunk."""
        return next((job for job in self._running if not job.decoding), None)

    def decoding(self) -> tuple[Job, ...]:
        """Every request whose prompt is done."""
        return tuple(job for job in self._running if job.decoding)

    def youngest(self) -> Job | None:
        """Whom to suspend when pages run out (D7)."""
        return self._running[-1] if self._running else None


def _rank(job: Job) -> int:
    return -1 if job.order is None else job.order
