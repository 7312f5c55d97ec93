"""Writes the tables of measured figures into the documents: `python docs/figures/write_tables.py`.

A document holds `<!-- figures: FILE -->`; the table right below that line is made from FILE, the output of
`hpc bench serve --json`. A test runs the same and fails if a document says anything else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")])
PLACE = re.compile(r"(?P<marker><!-- figures: (?P<file>\S+) -->\n)(?P<table>(?:\|.*\n)*)")
ROWS = (
    ("ttft_cold_ms", "time to first token, cold", "{:.0f} ms"),
    ("ttft_warm_median_ms", "time to first token, warm (median of 11)", "{:.0f} ms"),
    ("cold_over_warm", "cold over warm", "{:.1f}x"),
    ("decode_tok_s", "decoding, one stream", "{:.0f} tokens/s"),
    ("cached_fraction", "prompt tokens reused, all requests but the first", "{:.1%}"),
    ("reuse_of_ideal", "reused, of what a perfect cache would reuse", "{:.2%}"),
)


def table(measured: dict[str, Any]) -> str:
    """One output as a Markdown table; its head says on what it was measured."""
    threads = f"{measured['threads']} thread" + ("" if measured["threads"] == 1 else "s")
    where = (
        f"{measured['model']}, {measured['parameters'] / 1e6:.1f} M parameters, {measured['device']}, "
        f"{threads}, {measured['dtype']} weights, {measured['kv_dtype']} KV"
    )
    rows = [f"| {label} | {form.format(measured[name])} |" for name, label, form in ROWS]
    return "\n".join([f"| {where} | |", "|---|---|", *rows]) + "\n"


def filled(text: str) -> str:
    """A document's text with the table of every marker made anew."""

    def place(found: re.Match[str]) -> str:
        return found["marker"] + table(json.loads((ROOT / found["file"]).read_text("utf-8")))

    return PLACE.sub(place, text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text("utf-8")), "utf-8")
