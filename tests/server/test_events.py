"""Events on their way from the worker thread to a loop."""

from __future__ import annotations

import asyncio
import threading

from hpc_server.events import Event, EventStream, Failed, FailureKind, Outbox, Started, Tokens

END = Failed(FailureKind.STOPPING, "over")


def test_what_a_round_posts_arrives_together_and_in_order() -> None:
    """A flush from another thread wakes the reader once, with all of a round's events."""

    async def run() -> None:
        stream, outbox = EventStream(asyncio.get_running_loop()), Outbox()
        events: list[Event] = [Started(5, 0, 0), Tokens((1,)), Tokens((2, 3)), END]
        for event in events:
            outbox.post(stream, event)
        assert await stream.read(0.01) == []
        thread = threading.Thread(target=outbox.flush)
        thread.start()
        assert await stream.read(5) == events
        thread.join()

    asyncio.run(run())


def test_nothing_follows_a_last_event() -> None:
    """Whatever comes after the end, from the worker or from a stop, is not part of the request."""

    async def run() -> None:
        stream = EventStream(asyncio.get_running_loop())
        for event in (Tokens((1,)), END, Tokens((2,)), END):
            stream.deliver(event)
        assert len(await stream.read(1)) == 2

    asyncio.run(run())


def test_events_for_a_closed_loop_are_counted() -> None:
    """A loop that is gone neither raises in the worker nor loses count."""
    loop = asyncio.new_event_loop()
    stream, outbox = EventStream(loop), Outbox()
    loop.close()
    outbox.post(stream, Tokens((1,)))
    outbox.post(stream, END)
    outbox.flush()
    assert outbox.undeliverable == 2
