"""Prometheus metrics: request counters kept here, everything else read from the engine when asked.

Each app has its own registry; nothing is registered globally.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hpc_server.engine import EngineStats
from hpc_server.events import Report

__all__ = ["Metrics", "Snapshot"]

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


@attrs.frozen(eq=False)
class Snapshot:
    """What is read at scrape time. stats: None while the worker is busy or gone."""

    up: bool
    stats: EngineStats | None
    frontend: Mapping[str, int]


class Metrics:
    """One app's metrics. Called from the worker thread (reports) and the event loop; both are safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        one = self._registry
        self._requests = Counter("hpc_requests", "Requests over, by outcome", ["outcome"], registry=one)
        self._errors = Counter("hpc_errors", "Errors that clients were told, by code", ["code"], registry=one)
        self._dropped = Counter(
            "hpc_request_adjustments", "Request fields not taken as sent, by reason", ["reason"], registry=one
        )
        self._prompt = Counter("hpc_prompt_tokens", "Prompt tokens of admitted requests", registry=one)
        self._reused = Counter("hpc_reused_tokens", "Prompt tokens resumed from a snapshot", registry=one)
        self._prefilled = Counter("hpc_prefilled_tokens", "Prompt tokens computed", registry=one)
        self._generated = Counter("hpc_generated_tokens", "Generated tokens", registry=one)
        self._restored = Counter("hpc_restored_bytes", "Bytes restored from the host", registry=one)
        self._ttft = Histogram("hpc_ttft_seconds", "Time to first token", buckets=_SECONDS, registry=one)
        self._queued = Histogram("hpc_queued_seconds", "Wait for a lane", buckets=_SECONDS, registry=one)

    def finished(self, report: Report) -> None:
        """Count a request that went through the engine."""
        self._requests.labels(report.outcome).inc()
        self._generated.inc(report.generated)
        self._prefilled.inc(report.prefilled)
        self._restored.inc(report.restored_bytes)
        if report.queued_s is not None:
            self._prompt.inc(report.prompt_tokens)
            self._reused.inc(report.reused)
            self._queued.observe(report.queued_s)
        if report.ttft_s is not None:
            self._ttft.observe(report.ttft_s)

    def failed(self, code: str) -> None:
        """Count an error that a client was told."""
        self._errors.labels(code).inc()

    def adjusted(self, reason: str, times: int = 1) -> None:
        """Count something of a request that was not taken as sent."""
        self._dropped.labels(reason).inc(times)

    def render(self, snapshot: Snapshot) -> bytes:
        """The text exposition, on the event loop."""
        self._engine.snapshot = snapshot
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Turns one snapshot into metrics. The monotonic counts are kept where they arise."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(up=False, stats=None, frontend={})

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        yield GaugeMetricFamily("hpc_up", "1 while the engine serves", value=float(snapshot.up))
        yield _counters("hpc_frontend", "Text side, by event", snapshot.frontend)
        stats = snapshot.stats
        if stats is None:
            return
        yield _gauges("hpc_engine_requests", "Requests by state", _requests(stats))
        yield _counters("hpc_engine", "Engine, by event", stats.counters)
        yield _counters("hpc_program", "Program, by event", stats.program.counters)
        yield _counters("hpc_index", "Prefix index, by event", stats.program.index.counters)
        yield _gauges("hpc_index_objects", "What the index holds", _objects(stats))


def _requests(stats: EngineStats) -> Mapping[str, int]:
    return {"waiting": stats.waiting, "running": stats.running}


def _objects(stats: EngineStats) -> Mapping[str, int]:
    """Every gauge of the index; those of a pool get its number."""
    values: dict[str, int] = {}
    for name, value in attrs.asdict(stats.program.index, recurse=False).items():
        if isinstance(value, int):
            values[name] = value
        elif isinstance(value, tuple):
            values |= {f"{name}_{pool}": count for pool, count in enumerate(value)}
    return values


def _counters(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["event"])
    for event, value in values.items():
        family.add_metric([event], value)
    return family


def _gauges(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["of"])
    for of, value in values.items():
        family.add_metric([of], value)
    return family
