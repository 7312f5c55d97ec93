"""The start report says what was resolved, to a person and to a program."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from hpc_cli.errors import CommandError
from hpc_cli.started import Facts, lines, write_ready_file

FACTS = Facts(
    model="hpc-tiny",
    source="the package (bundled)",
    parameters=4_700_000,
    device="cpu",
    dtype="fp32",
    kv_dtype="fp32",
    threads=1,
    prefill_threads=2,
    max_concurrency=4,
    max_context=32_768,
    pages=1_024,
    kv_tokens=65_536,
    kv_bytes=256 << 20,
    slots=9,
    image_bytes=3 << 19,
    slabs=2_000,
    host_bytes=500 << 20,
    prefill_chunk=2_048,
    taps_per_request=8,
    tap_ladder_tokens=4_096,
    tap_min_gap_tokens=2_048,
    prefix_reuse=True,
    notes=("max context clamped",),
)
URL = "http://127.0.0.1:8000"


def test_report_names_every_resolved_value() -> None:
    """Model, device, types, threads, pages, tokens, slots, slabs, taps, notes and URL are all there."""
    report = "\n".join(lines(FACTS, URL))
    for shown in (
        "hpc-tiny: 4.7 M parameters",
        "cpu, threads: 1 to decode, 2 to prefill, fp32 weights, fp32 KV",
        "4 at once, up to 32,768 tokens each, prefill in chunks of 2,048",
        "1,024 pages, 65,536 tokens, 256.0 MiB",
        "9 slots of 1.5 MiB: 4 for requests, 5 for snapshots",
        "2,000 slabs, 500.0 MiB",
        "up to 8 a request, ladder 4,096 tokens, gap 2,048",
        "max context clamped",
        f"{URL}/v1",
    ):
        assert shown in report


def test_report_says_what_is_off() -> None:
    """A missing host tier and reuse that is switched off are said, not left out."""
    report = "\n".join(lines(attrs.evolve(FACTS, slabs=0, host_bytes=0, prefix_reuse=False), URL))
    assert "no host tier" in report
    assert "prefix reuse is off" in report


def test_ready_file_is_whole(tmp_path: Path) -> None:
    """It holds the URL and every fact, and no temporary file stays beside it."""
    path = tmp_path / "ready.json"
    write_ready_file(path, FACTS, URL)
    written = json.loads(path.read_text("utf-8"))
    assert written["url"] == URL
    assert {name: written[name] for name in attrs.asdict(FACTS) if name != "notes"} == {
        name: value for name, value in attrs.asdict(FACTS).items() if name != "notes"
    }
    assert list(tmp_path.iterdir()) == [path]


def test_ready_file_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    """The option and the path are named."""
    with pytest.raises(CommandError, match=r"--ready-file .*missing"):
        write_ready_file(tmp_path / "missing" / "ready.json", FACTS, URL)
