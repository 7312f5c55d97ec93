"""The engine's thread: faults, orderly stop, idle waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from hpc_index.ids import LaneId
from hpc_index.records import Finish
from hpc_index.requests import StepOut, Suspended
from hpc_server.contracts import Program
from hpc_server.engine import Engine, EngineState, RejectedError
from hpc_server.events import Failed, FailureKind
from hpc_server.options import EngineOptions
from hpc_server.scheduler import Submission
from hpc_server.scripted import ScriptedProgram
from hpc_server.scripted_transfers import Faults
from tests.server.driving import VOCAB, Collected, request
from tests.server.served import MODEL, geometry, plain_replies, served, small, sse_events, until


class _Wrapped:
    """Passes everything on to a program; tests override one method."""

    def __init__(self, program: ScriptedProgram) -> None:
        self.inner = program

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class _BrokenDecode(_Wrapped):
    """Decoding fails always; whether a lane can be ended is up to the test."""

    finish_too = True

    def decode(self, lanes: Sequence[LaneId], now: float) -> list[StepOut]:
        raise RuntimeError("device lost")

    def finish(self, lane: LaneId, how: Finish, now: float) -> Suspended | None:
        if self.finish_too:
            raise RuntimeError("device lost")
        return self.inner.finish(lane, how, now)


class _BrokenDecodeOnly(_BrokenDecode):
    finish_too = False


def broken(program: ScriptedProgram) -> Program:
    return _BrokenDecode(program)  # type: ignore[return-value]


def broken_once(program: ScriptedProgram) -> Program:
    return _BrokenDecodeOnly(program)  # type: ignore[return-value]


def test_a_failed_pass_is_a_500_and_the_server_goes_on() -> None:
    """The client learns that the model failed, without internals; health stays good."""
    with served(plain_replies(), wrap=broken_once) as running:
        answer = running.complete(max_tokens=5)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "model_failed"
        assert "device lost" not in error["message"]
        assert running.client.get("/health").status_code == 200
        assert running.complete(max_tokens=1).status_code == 200
        running.idle()


def test_a_dead_program_makes_the_server_unhealthy() -> None:
    """Health turns 503 within moments and every later request is told so."""
    with served(plain_replies(), wrap=broken) as running:
        assert running.complete(max_tokens=5).status_code == 503
        until(lambda: running.client.get("/health").status_code == 503)
        answer = running.complete(max_tokens=5)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unhealthy"
        assert "hpc_up 0.0" in running.client.get("/metrics").text


def test_stop_ends_streams_with_an_error_event() -> None:
    """A stream in progress gets a last error event at once, without [DONE], and the worker is joined."""
    slow = small(decode_steps_per_s=50.0)
    with served(plain_replies(), slow) as running:
        future = running.pool.submit(running.complete, stream=True, max_tokens=500, ignore_eos=True)
        until(lambda: running.program.stats().counters["decode_steps"] > 2)
        began = time.monotonic()
        assert running.engine.stop(5)
        answer = future.result(5)
        assert time.monotonic() - began < 3
        events = sse_events(answer.text)
        assert events[-1]["error"]["code"] == "shutting_down"  # type: ignore[index]
        assert "[DONE]" not in answer.text


def test_stop_does_not_wait_for_a_long_chunk_to_tell_clients() -> None:
    """The last event comes while the worker is still inside the program."""
    slow = small(prefill_tokens_per_s=64.0)  # one chunk takes a second
    with served(plain_replies(), slow) as running:
        future = running.pool.submit(running.complete, [320] * 200, max_tokens=5)
        until(lambda: running.index().lanes == 1)
        began = time.monotonic()
        running.engine.begin_stop()
        assert future.result(5).status_code == 503
        assert time.monotonic() - began < 0.8


def test_stop_without_start_and_twice_is_fine() -> None:
    """Stopping is idempotent, also before the worker ever ran."""
    engine = Engine(ScriptedProgram(plain_replies(), vocab_size=VOCAB, options=small()))
    assert engine.stop(1)
    assert engine.stop(1)
    with pytest.raises(RejectedError, match="shutting down"):
        engine.submit(Submission("a", request([1, 2, 3]), Collected()))


def test_an_idle_worker_sleeps() -> None:
    """Without requests and copies no round is run; a request wakes it at once."""
    with served(plain_replies(4)) as running:
        running.complete(max_tokens=2)
        running.idle()
        time.sleep(0.02)
        before = running.engine_rounds()
        time.sleep(0.1)
        assert running.engine_rounds() - before <= 2
        began = time.monotonic()
        running.complete(max_tokens=1)
        assert time.monotonic() - began < 1.0


def test_copies_land_while_nothing_else_happens() -> None:
    """Write-backs of an ended request are taken note of without another request."""
    delayed = small(faults=Faults(landing_delay_s=0.05))
    with served(plain_replies(4), delayed) as running:
        running.complete([320] * 100, max_tokens=2)
        until(lambda: running.index().tickets_open == 0)
        running.idle()


def test_submit_from_many_threads_loses_nothing() -> None:
    """Every request submitted from any thread gets its last event."""
    program = ScriptedProgram(plain_replies(), vocab_size=VOCAB, options=small(geometry(lanes=4)))
    engine = Engine(program, EngineOptions(prefill_chunk=64))
    engine.start()
    streams: list[Collected] = []
    lock = threading.Lock()

    def submit(base: int) -> None:
        for i in range(25):
            stream = Collected()
            with lock:
                streams.append(stream)
            engine.submit(Submission(f"{base}-{i}", request([20 + base, 30 + i], 3), stream))
            if i % 5 == 0:
                engine.cancel(f"{base}-{i}")

    threads = [threading.Thread(target=submit, args=(base,)) for base in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: all(stream.last is not None for stream in streams))
    assert len(streams) == 100
    assert not any(isinstance(stream.last, Failed) for stream in streams)
    assert engine.stop(5)


def test_requests_that_arrive_during_a_stop_are_answered() -> None:
    """Nothing submitted is left without a last event, whatever the race."""
    for _ in range(20):
        engine = Engine(ScriptedProgram(plain_replies(), vocab_size=VOCAB, options=small()))
        engine.start()
        stopper = threading.Thread(target=engine.stop)
        streams: list[Collected] = []
        refusals: list[FailureKind] = []
        stopper.start()
        for i in range(10):
            stream = Collected()
            try:
                engine.submit(Submission(str(i), request([1, 2, 3 + i], 50), stream))
            except RejectedError as error:
                refusals.append(error.kind)
            else:
                streams.append(stream)
        stopper.join()
        assert set(refusals) <= {FailureKind.STOPPING}
        assert engine.state is EngineState.STOPPING
        assert all(stream.last is not None for stream in streams)


def test_an_id_cannot_be_used_twice_at_once() -> None:
    """Two open requests of one id would get each other's events."""
    with served(plain_replies(), small(decode_steps_per_s=50.0)) as running:
        running.engine.submit(Submission("same", request([1, 2, 3], 50), Collected()))
        with pytest.raises(ValueError, match="'same' is in use"):
            running.engine.submit(Submission("same", request([1, 2, 3], 50), Collected()))
        running.engine.cancel("same")
        running.idle()


def test_options_name_the_value_and_the_bound() -> None:
    """Options are checked when they are made."""
    with pytest.raises(ValueError, match=r"prefill_chunk is 0; it must be a number in \[1, "):
        EngineOptions(prefill_chunk=0)


def test_the_served_name_is_reported() -> None:
    """The root route says which model is served."""
    with served() as running:
        assert running.client.get("/").json()["model"] == MODEL
        assert running.client.head("/").status_code == 200
