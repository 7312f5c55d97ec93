"""The log line of a request, and the metrics that are made from the same report."""

from __future__ import annotations

import logging

import pytest

from hpc_index.records import Reason
from hpc_server.events import Report
from hpc_server.metrics import Metrics, Snapshot
from hpc_server.request_log import RequestLog
from tests.server.served import plain_replies, served

REPORT = Report(
    id="chatcmpl-1",
    outcome="stop",
    prompt_tokens=3300,
    reused=3201,
    matched=3264,
    stopped_by=Reason.NO_SNAPSHOT,
    restored_bytes=5 << 20,
    prefilled=99,
    generated=41,
    suspensions=1,
    queued_s=0.002,
    ttft_s=0.05,
    decode_s=0.2,
    total_s=0.25,
)


def test_a_line_has_every_figure(caplog: pytest.LogCaptureFixture) -> None:
    """Prompt, reused, matched, restored, prefilled, times, speed, and why reuse stopped."""
    with caplog.at_level(logging.INFO):
        RequestLog()(REPORT)
    (record,) = caplog.records
    line = record.getMessage()
    for part in (
        "chatcmpl-1 stop", "prompt 3300", "reused 3201", "matched 3264", "restored 5.0 MiB", "prefilled 99",
        "generated 41", "queued 2 ms", "ttft 50 ms", "200.0 tok/s", "reuse stopped: no_snapshot",
        "suspended 1x",
    ):  # fmt: skip
        assert part in line
    assert record.__dict__["report"] is REPORT


def test_a_request_that_never_ran_has_dashes(caplog: pytest.LogCaptureFixture) -> None:
    """No figure is made up."""
    with caplog.at_level(logging.INFO):
        RequestLog()(Report(id="x", outcome="cancelled", prompt_tokens=5))
    assert "queued - | ttft - | - tok/s | reuse stopped: -" in caplog.text


def test_metrics_count_reports() -> None:
    """Tokens, outcomes and the time to the first token."""
    metrics = Metrics()
    metrics.finished(REPORT)
    metrics.finished(Report(id="x", outcome="cancelled", prompt_tokens=5))
    text = metrics.render(Snapshot(up=True, stats=None, frontend={"echo_hit": 2})).decode()
    for line in (
        'hpc_requests_total{outcome="stop"} 1.0',
        'hpc_requests_total{outcome="cancelled"} 1.0',
        "hpc_prompt_tokens_total 3300.0",
        "hpc_reused_tokens_total 3201.0",
        "hpc_ttft_seconds_count 1.0",
        'hpc_ttft_seconds_bucket{le="0.08"} 1.0',
        'hpc_frontend_total{event="echo_hit"} 2.0',
        "hpc_up 1.0",
    ):
        assert line in text


def test_two_apps_do_not_share_metrics() -> None:
    """Each has its own registry."""
    first, second = Metrics(), Metrics()
    first.finished(REPORT)
    nothing = Snapshot(up=True, stats=None, frontend={})
    assert 'outcome="stop"' not in second.render(nothing).decode()


def test_the_scrape_has_the_index_and_the_program() -> None:
    """Counters of every layer and the index's gauges appear under their own names."""
    with served(plain_replies(4)) as running:
        running.complete([320] * 100, max_tokens=3)
        running.idle()
        text = running.client.get("/metrics").text
    for part in (
        'hpc_index_total{event="published_blocks"}',
        'hpc_index_objects{of="pages_free_0"}',
        'hpc_index_objects{of="snapshots"}',
        'hpc_program_total{event="prefill_tokens"} 100.0',
        'hpc_engine_total{event="suspensions"} 0.0',
        'hpc_engine_requests{of="running"} 0.0',
        "hpc_prefilled_tokens_total 100.0",
    ):
        assert part in text
