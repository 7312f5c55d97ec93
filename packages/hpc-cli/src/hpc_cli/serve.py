"""`hpc serve`: its options and what is refused before anything is loaded.

This file imports no model and no server, so that help and usage errors come at once; `compose` builds both.
"""

from __future__ import annotations

import enum
import ipaddress
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from typer.core import TyperCommand

from hpc_cli.errors import USAGE, CommandError, reported
from hpc_cli.extra import require_serving_extra
from hpc_cli.values import AUTO, auto_or_whole, whole

__all__ = ["LogLevel", "ServeCommand", "ServeOptions", "serve"]

ELSEWHERE = {
    "--model": "the model is an argument: hpc serve MODEL",
    "-m": "the model is an argument: hpc serve MODEL",
    "--alias": "hpc calls it --served-model-name",
    "--ctx-size": "hpc calls it --max-context",
    "-c": "hpc calls it --max-context",
    "--max-model-len": "hpc calls it --max-context",
    "--parallel": "hpc calls it --max-concurrency",
    "-np": "hpc calls it --max-concurrency",
    "--max-num-seqs": "hpc calls it --max-concurrency",
    "--kv-cache-dtype": "hpc calls it --kv-dtype",
    "--cache-ram": "hpc calls it --host-cache-mib",
    "--enable-prefix-caching": "reuse is on; --no-prefix-reuse turns it off",
    "--no-enable-prefix-caching": "hpc calls it --no-prefix-reuse",
    "--ubatch-size": "hpc calls it --prefill-chunk",
    "--max-num-batched-tokens": "hpc calls it --prefill-chunk",
}
"""Flags of other servers that people try first, and what to type here."""


class LogLevel(enum.StrEnum):
    """Least severity that is logged. DEBUG also shows where an expected failure came from."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Device(enum.StrEnum):
    """Where the model runs; auto takes a CUDA device if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(enum.StrEnum):
    """Type of weights and activations; auto is the faster one on the device."""

    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"


@attrs.frozen
class ServeOptions:
    """What `hpc serve` was asked for. None (and `auto`) is resolved from model and machine (§14.2)."""

    model: str | None
    host: str
    port: int
    device: str
    dtype: str
    kv_dtype: str
    max_concurrency: int
    max_queue: int
    max_context: int | None
    kv_capacity: int | None
    host_cache_mib: int | None
    prefill_chunk: int
    device_snapshot_slots: int | None
    taps_per_request: int | None
    tap_ladder_tokens: int | None
    tap_min_gap_tokens: int | None
    prefix_reuse: bool
    threads: int | None
    served_model_name: str | None
    scripted: Path | None
    strict_requests: bool
    log_level: LogLevel
    ready_file: Path | None
    allow_unauthenticated: bool


class ServeCommand(TyperCommand):
    """Answers a flag of another server with ours before the parser calls it unknown."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a flag of ELSEWHERE, then parse. Raises a usage error."""
        for arg in args:
            if arg == "--":
                break
            hint = ELSEWHERE.get(arg.partition("=")[0])
            if hint is not None:
                ctx.fail(f"No such option: {arg.partition('=')[0]} ({hint}).")
        return super().parse_args(ctx, args)


def _refuse_open_door(host: str, allowed: bool) -> None:
    """D27: beyond loopback a server needs a key, and this version has none to give."""
    if allowed or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise CommandError(
            f"--host {host} is reachable from other machines, where anyone could use the model and read what "
            "it cached. Stay on 127.0.0.1, or pass --allow-unauthenticated if the network itself is guarded",
            exit_code=USAGE,
        )


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A model folder or a hub id (owner/name). Without one: the bundled tiny model.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.AUTO,
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and activations.")] = Dtype.AUTO,
    kv_dtype: Annotated[Dtype, typer.Option(help="Type of the KV cache.")] = Dtype.AUTO,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 4,
    max_queue: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, help="Requests that may wait; further ones are answered with 429."),
    ] = 256,
    max_context: Annotated[
        str,
        typer.Option(
            metavar="TOKENS|auto",
            parser=auto_or_whole,
            help="Most tokens of prompt and reply. auto: the model's limit, or what the KV pool holds.",
        ),
    ] = AUTO,
    kv_capacity: Annotated[
        str,
        typer.Option(
            metavar="TOKENS|auto",
            parser=auto_or_whole,
            help="Tokens that the KV pool holds. auto: free device memory; on a CPU a quarter of all.",
        ),
    ] = AUTO,
    host_cache_mib: Annotated[
        str,
        typer.Option(
            metavar="MIB|auto",
            parser=auto_or_whole,
            help="Host memory for cached prefixes; 0 for none. auto: a quarter of the memory.",
        ),
    ] = AUTO,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Most prompt tokens of one forward pass.")] = 2048,
    device_snapshot_slots: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            parser=auto_or_whole,
            help="Snapshots kept on the device. auto: max-concurrency + 1, or + 2 without host cache.",
        ),
    ] = AUTO,
    cache_taps_per_request: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            parser=auto_or_whole,
            help="New snapshots that one prompt may leave. auto: 8, or 2 without host cache.",
        ),
    ] = AUTO,
    cache_tap_ladder: Annotated[
        str,
        typer.Option(
            metavar="TOKENS|auto",
            parser=auto_or_whole,
            help="Distance between snapshots of a long prompt. auto: max(4096, 2 x prefill-chunk).",
        ),
    ] = AUTO,
    cache_tap_min_gap: Annotated[
        str,
        typer.Option(
            metavar="TOKENS|auto",
            parser=auto_or_whole,
            help="Least distance of a prompt-tail snapshot from another. auto: max(1024, prefill-chunk).",
        ),
    ] = AUTO,
    no_prefix_reuse: Annotated[
        bool, typer.Option("--no-prefix-reuse", help="Prefill every prompt whole.")
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="Name in the API. Default: the folder's."),
    ] = None,
    scripted: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Serve the replies of this file instead of a model's; caching works as ever (for tests).",
        ),
    ] = None,
    strict_requests: Annotated[
        bool,
        typer.Option("--strict-requests", help="Refuse unknown request fields instead of ignoring them."),
    ] = False,
    threads: Annotated[
        str,
        typer.Option(
            metavar="N|auto", parser=auto_or_whole, help="CPU threads of the model. auto: measured at start."
        ),
    ] = AUTO,
    log_level: Annotated[LogLevel, typer.Option(help="Least severity that is logged.")] = LogLevel.INFO,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write the URL and the resolved values here, as JSON, once requests are accepted.",
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Listen beyond this machine without any key.")
    ] = False,
) -> None:
    """Serve a model on an OpenAI-compatible HTTP endpoint, with exact prefix reuse.

    Ctrl+C or SIGTERM ends it in order. What was resolved is printed at the start.
    """
    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        device=device.value,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_context=whole(max_context),
        kv_capacity=whole(kv_capacity),
        host_cache_mib=whole(host_cache_mib),
        prefill_chunk=prefill_chunk,
        device_snapshot_slots=whole(device_snapshot_slots),
        taps_per_request=whole(cache_taps_per_request),
        tap_ladder_tokens=whole(cache_tap_ladder),
        tap_min_gap_tokens=whole(cache_tap_min_gap),
        prefix_reuse=not no_prefix_reuse,
        threads=whole(threads),
        served_model_name=served_model_name,
        scripted=scripted,
        strict_requests=strict_requests,
        log_level=log_level,
        ready_file=ready_file,
        allow_unauthenticated=allow_unauthenticated,
    )
    with reported(with_traceback=log_level is LogLevel.DEBUG):
        _refuse_open_door(host, allow_unauthenticated)
        require_serving_extra("hpc serve")
        from hpc_cli import compose  # torch and the server: seconds to import

        compose.run(options)
