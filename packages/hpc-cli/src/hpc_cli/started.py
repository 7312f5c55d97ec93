"""What a started server says about itself: lines for a person, and the same facts as JSON for a program."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from hpc_cli.errors import USAGE, CommandError

__all__ = ["Facts", "clear_ready_file", "lines", "write_ready_file"]

KIB = 1024


@attrs.frozen
class Facts:
    """The effective values of a running server (§14.2). Sizes are bytes.

    None stands where a scripted server has no such thing.
    """

    model: str
    source: str
    parameters: int | None
    device: str
    dtype: str | None
    kv_dtype: str | None
    threads: int | None
    prefill_threads: int | None
    max_concurrency: int
    max_context: int
    pages: int
    kv_tokens: int
    kv_bytes: int
    slots: int
    image_bytes: int
    slabs: int
    host_bytes: int
    prefill_chunk: int
    taps_per_request: int
    tap_ladder_tokens: int
    tap_min_gap_tokens: int
    prefix_reuse: bool
    notes: tuple[str, ...] = ()


def lines(facts: Facts, url: str) -> Iterable[str]:
    """The start report: one topic a line, then what to know about the choices, then the URL."""
    size = "no weights" if facts.parameters is None else f"{facts.parameters / 1e6:,.1f} M parameters"
    yield f"model     {facts.model}: {size}, from {facts.source}"
    yield f"device    {_device(facts)}"
    yield (
        f"requests  {facts.max_concurrency} at once, up to {facts.max_context:,} tokens each, "
        f"prefill in chunks of {facts.prefill_chunk:,}"
    )
    yield f"KV        {facts.pages:,} pages, {facts.kv_tokens:,} tokens, {_size(facts.kv_bytes)}"
    yield (
        f"states    {facts.slots} slots of {_size(facts.image_bytes)}: {facts.max_concurrency} for requests, "
        f"{facts.slots - facts.max_concurrency} for snapshots"
    )
    host = f"{facts.slabs:,} slabs, {_size(facts.host_bytes)}" if facts.slabs else "no host tier"
    yield f"host      {host}"
    yield f"taps      {_taps(facts)}"
    for note in facts.notes:
        yield f"note      {note}"
    yield f"ready     {url}/v1  (Ctrl+C ends)"


def clear_ready_file(path: Path) -> None:
    """Remove what an earlier server left, before a model is read: whoever waits for the file means this one.

    Raises CommandError (usage) if a file could not be put there.
    """
    try:
        path.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        message = f"--ready-file {path}: cannot be written: {error.strerror}"
        raise CommandError(message, exit_code=USAGE) from error


def write_ready_file(path: Path, facts: Facts, url: str) -> None:
    """Put the facts and the URL at `path` as one JSON object, whole or not at all.

    Raises CommandError if the file cannot be written.
    """
    document: Mapping[str, object] = {"url": url, "pid": os.getpid(), **attrs.asdict(facts)}
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
        Path(name).replace(path)
    except OSError as error:
        raise CommandError(f"--ready-file {path}: cannot be written: {error.strerror}") from error


def _device(facts: Facts) -> str:
    if facts.dtype is None:
        return f"{facts.device}: replies come from a file"
    threads = ""
    if facts.threads is not None:
        threads = f", threads: {facts.threads} to decode, {facts.prefill_threads} to prefill"
    return f"{facts.device}{threads}, {facts.dtype} weights, {facts.kv_dtype} KV"


def _taps(facts: Facts) -> str:
    if not facts.prefix_reuse:
        return "none: prefix reuse is off"
    return (
        f"up to {facts.taps_per_request} a request, ladder {facts.tap_ladder_tokens:,} tokens, "
        f"gap {facts.tap_min_gap_tokens:,}"
    )


def _size(size: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < KIB:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= KIB
    return f"{size:,.1f} GiB"
