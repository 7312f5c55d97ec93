"""The engine: one worker thread, which alone calls the program, and a thread-safe front to it (§8.2).

Commands enter through one queue, which also is what an idle worker sleeps on. Everything a caller sees of a
request comes back through its `EventStream`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias

import attrs

from hpc_server.contracts import Program, ProgramStats
from hpc_server.events import Failed, FailureKind, Report
from hpc_server.options import EngineOptions
from hpc_server.scheduler import Job, Submission
from hpc_server.worker import ProgramError, Worker

__all__ = ["Engine", "EngineState", "EngineStats", "RejectedError"]

_log = logging.getLogger(__name__)
_SHUTDOWN = "the server is shutting down"
_MOST_IDLE_S = 0.1


class EngineState(enum.Enum):
    """Whether requests are taken."""

    RUNNING = "running"
    UNHEALTHY = "unhealthy"
    STOPPING = "stopping"


class RejectedError(Exception):
    """A request that was not taken in, and why."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@attrs.frozen(eq=False)
class EngineStats:
    """One consistent look at the engine, taken between two rounds. counters: the worker's own."""

    waiting: int
    running: int
    counters: Mapping[str, int]
    program: ProgramStats


@attrs.frozen(eq=False)
class _Submit:
    submission: Submission
    arrived: float


@attrs.frozen
class _Cancel:
    request_id: str


@attrs.frozen(eq=False)
class _Look:
    answer: Future[EngineStats | None]


class _Stop:
    pass


_Command: TypeAlias = _Submit | _Cancel | _Look | _Stop


class Engine:
    """Runs a program for many clients. Every public method may be called from any thread.

    report: called on the worker thread with the report of each request that is over.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        program: Program,
        options: EngineOptions | None = None,
        *,
        report: Callable[[Report], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options if options is not None else EngineOptions()
        self.max_context = program.max_context
        self.vocab_size = program.vocab_size
        self._program = program
        self._report = report
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._worker = Worker(program, self.options, clock, self._settled)
        self._idle_s = self.options.landing_poll_s
        self._thread = threading.Thread(target=self._run, name="hpc-engine", daemon=True)
        # Guards what follows; never held while the program is called.
        self._lock = threading.Lock()
        self._open: dict[str, Submission] = {}
        self._state = EngineState.RUNNING
        self._why = ""

    @property
    def state(self) -> EngineState:
        """Whether requests are taken."""
        return self._state

    @property
    def why(self) -> str:
        """Why the state is what it is; empty while it runs."""
        return self._why

    @property
    def alive(self) -> bool:
        """The worker runs and can serve: what /health and keep-alive comments stand on."""
        return self._state is EngineState.RUNNING and self._thread.is_alive()

    @property
    def open(self) -> int:
        """Requests that are not over."""
        with self._lock:
            return len(self._open)

    def start(self) -> None:
        """Start the worker. Raises RuntimeError if it was started before."""
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        """Queue a request. Raises RejectedError if it is not taken in; otherwise its last event will come."""
        with self._lock:
            if self._state is EngineState.UNHEALTHY:
                raise RejectedError(FailureKind.UNHEALTHY, f"the engine cannot go on: {self._why}")
            if self._state is EngineState.STOPPING:
                raise RejectedError(FailureKind.STOPPING, _SHUTDOWN)
            # A request counts as waiting until its lane is known; that may lag by a round.
            waiting = len(self._open) - len(self._worker.scheduler.running)
            if waiting >= self.options.max_queue:
                message = f"{waiting} requests wait already; max_queue is {self.options.max_queue}"
                raise RejectedError(FailureKind.QUEUE_FULL, message)
            if submission.id in self._open:
                raise ValueError(f"request id {submission.id!r} is in use")
            self._open[submission.id] = submission
        self._inbox.put(_Submit(submission, self._clock()))

    def cancel(self, request_id: str) -> None:
        """End a request within one prefill chunk or decode round. Ids that are over are ignored."""
        self._inbox.put(_Cancel(request_id))

    async def stats(self, timeout_s: float = 2.0) -> EngineStats | None:
        """A look between two rounds; None if the worker is gone or busy for longer than timeout_s."""
        if not self._thread.is_alive():
            return None
        look = _Look(Future())
        self._inbox.put(look)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(look.answer)
        except TimeoutError:
            return None

    def begin_stop(self) -> None:
        """Refuse new requests, give running ones their final error now, and let the worker wind down."""
        with self._lock:
            if self._state is EngineState.STOPPING:
                return
            self._state, self._why = EngineState.STOPPING, "shutdown"
            submissions = tuple(self._open.values())
        # Told from here, not by the worker: a long prefill chunk must not delay the last event.
        failed = Failed(FailureKind.STOPPING, _SHUTDOWN)
        for submission in submissions:
            try:
                submission.stream.loop.call_soon_threadsafe(submission.stream.deliver, failed)
            except RuntimeError:  # its loop is closed, nobody listens
                _log.debug("request %s has no listener left", submission.id)
        self._inbox.put(_Stop())

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End every request, close the program and join the worker. False if it takes longer."""
        self.begin_stop()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The worker thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # the thread must not die without telling its clients
            _log.critical("the engine worker died", exc_info=error)
            self._give_up(f"worker died: {error!r}")
            self._refuse_until_stopped()
        finally:
            self._close()

    def _serve(self) -> None:
        busy = stopping = False
        while True:
            try:
                command = self._next(busy)
                while command is not None:
                    if isinstance(command, _Stop):
                        stopping = True
                        self._worker.fail_all(FailureKind.STOPPING, _SHUTDOWN, release=True)
                        return
                    self._apply(command)
                    command = self._poll_inbox()
                busy = self._worker.round()
            except ProgramError as fault:
                _log.critical("the engine gives up: %s", fault, exc_info=fault)
                self._give_up(str(fault))
                if not stopping:
                    self._refuse_until_stopped()
                return

    def _next(self, busy: bool) -> _Command | None:
        """The next command; sleeps if nothing can be done before one comes or a copy lands."""
        if busy:
            return self._poll_inbox()
        wait = self.options.landing_poll_s
        if not self._worker.scheduler.everything():
            # Nobody waits for what is still in flight: look at it less and less often.
            wait = self._idle_s = min(2 * self._idle_s, _MOST_IDLE_S)
            if not self._program.stats().index.tickets_open:
                self._idle_s = self.options.landing_poll_s
                return self._inbox.get()
        try:
            return self._inbox.get(timeout=wait)
        except queue.Empty:
            return None

    def _poll_inbox(self) -> _Command | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _apply(self, command: _Command) -> None:
        if isinstance(command, _Submit):
            self._worker.submit(command.submission, command.arrived)
        elif isinstance(command, _Cancel):
            self._worker.cancel(command.request_id)
        elif isinstance(command, _Look):
            self._answer(command)

    def _answer(self, look: _Look) -> None:
        scheduler = self._worker.scheduler
        stats = EngineStats(
            waiting=scheduler.waiting,
            running=len(scheduler.running),
            counters=self._worker.counters,
            program=self._program.stats(),
        )
        self._reply(look, stats)

    @staticmethod
    def _reply(look: _Look, stats: EngineStats | None) -> None:
        if look.answer.set_running_or_notify_cancel():
            look.answer.set_result(stats)

    def _give_up(self, why: str) -> None:
        with self._lock:
            if self._state is EngineState.RUNNING:
                self._state, self._why = EngineState.UNHEALTHY, why
        self._worker.fail_all(FailureKind.UNHEALTHY, f"the engine cannot go on: {why}", release=False)

    def _refuse_until_stopped(self) -> None:
        """Answer what entered before the state was seen; `submit` refuses the rest."""
        while not isinstance(command := self._inbox.get(), _Stop):
            if isinstance(command, _Submit):
                self._worker.submit(command.submission, command.arrived)
                self._worker.fail_all(FailureKind.UNHEALTHY, self._why, release=False)
            elif isinstance(command, _Look):
                self._reply(command, None)

    def _close(self) -> None:
        while (command := self._poll_inbox()) is not None:
            if isinstance(command, _Submit):
                self._worker.submit(command.submission, command.arrived)
            elif isinstance(command, _Look):
                self._reply(command, None)
        self._worker.fail_all(FailureKind.STOPPING, _SHUTDOWN, release=False)
        try:
            self._program.close()
        except Exception as error:
            _log.error("closing the program failed", exc_info=error)

    def _settled(self, job: Job, report: Report) -> None:
        with self._lock:
            self._open.pop(job.submission.id, None)
        if self._report is not None:
            try:
                self._report(report)
            except Exception as error:  # a log or metrics fault is no reason to fail a request
                _log.error("reporting a request failed", exc_info=error)
