"""A run as one JSON object for programs, or as a table for people."""

from __future__ import annotations

import io
import json
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from hpc_cli.bench.figures import Seen, ideal_reuse
from hpc_cli.bench.run import Outcome

__all__ = ["as_json", "as_table"]

ABOUT = ("threads", "device", "dtype", "kv_dtype", "parameters")
"""What a server that was started here says about itself; null for one started elsewhere."""
DIGITS = 4
TABLE_WIDTH = 100


def as_json(outcome: Outcome) -> str:
    """One object: the figures, what they were measured on, and every request under `turns`."""
    fields: dict[str, Any] = {name: _rounded(value) for name, value in attrs.asdict(outcome.figures).items()}
    fields |= {name: outcome.about.get(name) for name in ABOUT}
    fields |= {"model": outcome.model, "url": outcome.url, "repeat": len(outcome.playings)}
    fields["turns"] = [
        {"repeat": number, **row}
        for number, played in enumerate(outcome.playings, 1)
        for row in _rows(played)
    ]
    return json.dumps(fields, indent=2)


def as_table(outcome: Outcome) -> str:
    """The last playing request by request, then the figures (medians over all playings)."""
    turns = Table(
        "session", "turn", "prompt", "cached", "ideal", "TTFT ms", "tokens/s", box=None, pad_edge=False
    )
    for column in turns.columns[2:]:
        column.justify = "right"
    for row in _rows(outcome.playings[-1]):
        shown = ("session", "turn", "prompt_tokens", "cached_tokens", "ideal_tokens")
        turns.add_row(
            *(_text(row[name], 0) for name in shown), _text(row["ttft_ms"], 1), _text(row["decode_tok_s"], 1)
        )
    summary = Table(box=None, pad_edge=False, show_header=False)
    for name, value in attrs.asdict(outcome.figures).items():
        summary.add_row(name, _text(value, 3))
    for name in ABOUT:
        summary.add_row(name, _text(outcome.about.get(name), 0))
    summary.add_row("model", outcome.model)
    out = io.StringIO()
    console = Console(file=out, width=TABLE_WIDTH)
    console.print(turns)
    console.print()
    console.print(summary)
    return out.getvalue().rstrip()


def _rows(played: tuple[Seen, ...]) -> list[dict[str, Any]]:
    ideal: list[int] | list[None] = ideal_reuse(played) or [None] * len(played)
    return [
        {
            "session": seen.session,
            "turn": seen.turn,
            "prompt_tokens": seen.prompt_tokens,
            "cached_tokens": seen.cached_tokens,
            "ideal_tokens": best,
            "completion_tokens": seen.completion_tokens,
            "ttft_ms": _rounded(seen.ttft_ms),
            "decode_tok_s": _rounded(seen.decode_tok_s),
        }
        for seen, best in zip(played, ideal, strict=True)
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _text(value: object, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value)
