"""The served program when it is a real model: options for it, and what it resolved."""

from __future__ import annotations

from hpc_cli.errors import USAGE, CommandError
from hpc_cli.progress import LoadProgress
from hpc_cli.serve import ServeOptions
from hpc_cli.source import Source
from hpc_cli.started import Facts
from hpc_qwen35.errors import CheckpointError, ConfigError, OptionError
from hpc_qwen35.load import load
from hpc_qwen35.options import Options
from hpc_qwen35.program import Qwen35Program
from hpc_server.contracts import Program
from hpc_server.tokenizer import Tokenizer

__all__ = ["load_model"]


def load_model(options: ServeOptions, source: Source, tokenizer: Tokenizer) -> tuple[Program, Facts]:
    """Read the checkpoint and reserve all memory, with progress on stderr.

    Raises CommandError for a folder without a model, an option out of range, and too little memory.
    """
    try:
        with LoadProgress() as progress:
            program = load(source.folder, _asked(options), progress, addressable_vocab=tokenizer.vocab_size)
    except OptionError as error:
        raise CommandError(str(error), exit_code=USAGE) from error
    except (ConfigError, CheckpointError) as error:
        raise CommandError(str(error)) from error
    except MemoryError as error:
        raise CommandError(f"out of memory while loading {source.name}: {error}") from error
    return program, _facts(program, source)


def _asked(options: ServeOptions) -> Options:
    return Options(
        device=options.device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        max_concurrency=options.max_concurrency,
        max_context=options.max_context,
        kv_capacity=options.kv_capacity,
        host_cache_mib=options.host_cache_mib,
        prefill_chunk=options.prefill_chunk,
        device_snapshot_slots=options.device_snapshot_slots,
        taps_per_request=options.taps_per_request,
        tap_ladder_tokens=options.tap_ladder_tokens,
        tap_min_gap_tokens=options.tap_min_gap_tokens,
        prefix_reuse=options.prefix_reuse,
        threads=options.threads,
    )


def _facts(program: Qwen35Program, source: Source) -> Facts:
    resolved = program.resolved
    return Facts(
        model=source.name,
        source=source.shown,
        parameters=sum(t.numel() for name, t in program.tensors().items() if name.startswith("weights.")),
        device=resolved.device,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        threads=resolved.decode_threads,
        prefill_threads=resolved.prefill_threads,
        max_concurrency=resolved.max_concurrency,
        max_context=resolved.max_context,
        pages=resolved.pages,
        kv_tokens=resolved.kv_tokens,
        kv_bytes=resolved.pages * resolved.page_bytes,
        slots=resolved.slots,
        image_bytes=resolved.image_bytes,
        slabs=resolved.slabs,
        host_bytes=resolved.host_bytes,
        prefill_chunk=resolved.prefill_chunk,
        taps_per_request=resolved.policy.taps_per_request,
        tap_ladder_tokens=resolved.policy.tap_ladder_tokens,
        tap_min_gap_tokens=resolved.policy.tap_min_gap_tokens,
        prefix_reuse=resolved.prefix_reuse,
        notes=resolved.notes,
    )
