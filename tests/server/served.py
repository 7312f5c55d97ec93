"""A scripted server on a real socket, for tests: the whole stack but a model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import attrs
import httpx
import orjson

from hpc_index import Policy, check_invariants
from hpc_index.records import Geometry, IndexStats, Pool
from hpc_server.app import create_app
from hpc_server.contracts import Program
from hpc_server.engine import Engine
from hpc_server.events import Report
from hpc_server.metrics import Metrics
from hpc_server.options import EngineOptions, ServerOptions
from hpc_server.scripted import ScriptedOptions, ScriptedProgram
from hpc_server.scripted_replies import HashReplies, Replies
from hpc_server.serve import bind, run_app
from tests.server import texts

__all__ = ["Served", "geometry", "plain_replies", "served", "small", "sse_events", "until"]

MODEL = "tiny"


def geometry(
    *, pages: int = 256, lanes: int = 4, slots: int = 12, slabs: int = 512, lag: bool = False
) -> Geometry:
    """Blocks of 16 tokens, so that short prompts span several."""
    pools = [Pool("main", pages=pages, lag=0, page_bytes=64)]
    if lag:
        pools.append(Pool("mtp", pages=pages, lag=1, page_bytes=32))
    return Geometry(
        block=16,
        unit=1,
        pools=tuple(pools),
        lanes=lanes,
        slots=slots,
        image_bytes=300,
        slab_bytes=128,
        slabs=slabs,
        slabs_per_chunk=64,
    )


def small(shape: Geometry | None = None, **options: object) -> ScriptedOptions:
    """Options for that geometry, with a policy that fits its size."""
    policy = Policy(
        tap_ladder_tokens=64, tap_min_gap_tokens=16, prefill_chunk=64, window_tokens=32, cushion_tokens=2
    )
    made = ScriptedOptions(geometry=shape or geometry(), policy=policy, max_context=2048)
    return attrs.evolve(made, **options)  # type: ignore[arg-type]


def plain_replies(length: int = 0) -> HashReplies:
    """Replies of text tokens only, without structure."""
    return HashReplies(low=300, high=400, length=length)


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen in time")
        time.sleep(0.002)


def sse_events(text: str) -> list[dict[str, object]]:
    """The JSON objects of a stream, `[DONE]` left out."""
    datas = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [orjson.loads(data) for data in datas if data != "[DONE]"]


@attrs.frozen(eq=False)
class Served:
    """A running server."""

    url: str
    client: httpx.Client
    engine: Engine
    program: ScriptedProgram
    reports: list[Report]
    pool: ThreadPoolExecutor

    def chat(self, text: str = "hello world", **fields: object) -> httpx.Response:
        """One chat request of one user message."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, prompt: object = "hello world", **fields: object) -> httpx.Response:
        """One completion request."""
        return self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    def index(self) -> IndexStats:
        """The index's gauges; read while the worker may run, so only for waiting."""
        while True:
            try:
                return self.program.index.stats()
            except RuntimeError:  # a dict changed under the reader
                time.sleep(0.001)

    def engine_rounds(self) -> int:
        """Rounds that the worker has run, from the metrics."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith('hpc_engine_total{event="rounds"}'):
                return int(float(line.split()[-1]))
        raise AssertionError("the metrics have no rounds")

    def idle(self) -> None:
        """Wait until nothing runs, waits or is copied, then check that every ledger balances."""
        until(lambda: not self.busy())
        check_invariants(self.program.index)
        stats = self.index()
        shape = self.program.options.geometry
        assert stats.pages_active == (0,) * len(shape.pools)
        assert stats.slots_active == 0
        for pool, free, cached in zip(shape.pools, stats.pages_free, stats.pages_cached, strict=True):
            assert free + cached == pool.pages
        assert stats.slabs_free + stats.slabs_used == shape.slabs

    def busy(self) -> bool:
        """Is a lane, a waiting request or a copy left?"""
        stats = self.index()
        return bool(stats.lanes or stats.tickets_open or self.engine.open)


@contextlib.contextmanager
def served(
    replies: Replies | None = None,
    options: ScriptedOptions | None = None,
    *,
    server: ServerOptions | None = None,
    engine: EngineOptions | None = None,
    wrap: Callable[[ScriptedProgram], Program] | None = None,
) -> Iterator[Served]:
    """Run a server for the length of a `with` block, then stop it and check that it stopped.

    wrap: puts a faulty double around the program.
    """
    tokenizer = texts.tokenizer()
    made = options if options is not None else small()
    program = ScriptedProgram(replies or plain_replies(8), vocab_size=tokenizer.vocab_size, options=made)
    metrics, reports = Metrics(), list[Report]()

    def report(record: Report) -> None:
        metrics.finished(record)
        reports.append(record)

    outer: Program = program if wrap is None else wrap(program)
    started = threading.Event()
    run = Engine(outer, engine or EngineOptions(prefill_chunk=64), report=report)
    app = create_app(run, texts.frontend(), server or ServerOptions(model=MODEL), metrics)
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    run.start()
    thread = threading.Thread(
        target=run_app, args=(app, run, listener), kwargs={"on_started": lambda _url: started.set()}
    )
    thread.start()
    try:
        assert started.wait(5)
        with httpx.Client(base_url=url, timeout=10) as client, ThreadPoolExecutor(16) as pool:
            yield Served(url, client, run, program, reports, pool)
    finally:
        stopped = run.stop(5)
        thread.join(6)
    assert stopped
    assert not thread.is_alive()
