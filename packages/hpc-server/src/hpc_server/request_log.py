"""One log line per request, with what it reused and why reuse stopped there. Never any prompt text."""

from __future__ import annotations

import logging

from hpc_server.events import Report

__all__ = ["RequestLog"]


class RequestLog:
    """Writes a line at INFO for each report; `record.report` carries the whole record for handlers."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger if logger is not None else logging.getLogger("hpc_server.requests")

    def __call__(self, report: Report) -> None:
        """Log one finished request."""
        self._logger.info("%s", _Line(report), extra={"report": report})


class _Line:
    """Formats only when a handler wants the text."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __str__(self) -> str:
        r = self._report
        parts = [
            f"{r.id} {r.outcome}",
            f"prompt {r.prompt_tokens}",
            f"reused {r.reused}",
            f"matched {r.matched}",
            f"restored {r.restored_bytes / 2**20:.1f} MiB",
            f"prefilled {r.prefilled}",
            f"generated {r.generated}",
            f"queued {_ms(r.queued_s)}",
            f"ttft {_ms(r.ttft_s)}",
            "- tok/s" if r.tokens_per_s is None else f"{r.tokens_per_s:.1f} tok/s",
            f"reuse stopped: {'-' if r.stopped_by is None else r.stopped_by.value}",
        ]
        if r.suspensions:
            parts.append(f"suspended {r.suspensions}x")
        return " | ".join(parts)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"
