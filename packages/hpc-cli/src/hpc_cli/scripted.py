"""The served program when it is a script: replies from a file, over the real index and its ledgers.

It needs the model folder's tokenizer and chat template, and neither its weights nor torch.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from hpc_cli.errors import USAGE, CommandError
from hpc_cli.serve import ServeOptions
from hpc_cli.source import Source
from hpc_cli.started import Facts
from hpc_index.errors import GeometryError, PolicyError
from hpc_index.policy import Policy
from hpc_index.records import Geometry
from hpc_server.contracts import Program
from hpc_server.scripted import ScriptedOptions, ScriptedProgram
from hpc_server.scripted_replies import ScriptFileError
from hpc_server.tokenizer import Tokenizer

__all__ = ["load_script"]

MIB = 1 << 20


def load_script(
    script: Path, options: ServeOptions, source: Source, tokenizer: Tokenizer
) -> tuple[Program, Facts]:
    """A program that answers from `script`.

    Raises CommandError for a script that cannot be read, an option that only a model has, and sizes that
    describe no cache.
    """
    _refuse_model_options(options)
    try:
        sizes = _sizes(options)
        program = ScriptedProgram.from_file(script, tokenizer, sizes)
    except ScriptFileError as error:
        raise CommandError(str(error)) from error
    except (GeometryError, PolicyError) as error:
        raise CommandError(str(error), exit_code=USAGE) from error
    return program, _facts(sizes, source, options)


def _refuse_model_options(options: ServeOptions) -> None:
    only_a_model_has = {
        "--device": options.device == "cuda",
        "--dtype": options.dtype != "auto",
        "--kv-dtype": options.kv_dtype != "auto",
        "--threads": options.threads is not None,
    }
    for flag, given in only_a_model_has.items():
        if given:
            raise CommandError(f"{flag} needs a model: it cannot go with --scripted", exit_code=USAGE)


def _sizes(options: ServeOptions) -> ScriptedOptions:
    """The scripted program's own sizes, but for what the command line says."""
    base = ScriptedOptions()
    given = base.geometry
    pages, spare, slabs = given.pools[0].pages, given.snapshot_slots, given.slabs
    if options.kv_capacity is not None:
        pages = -(-options.kv_capacity // given.block)
    if options.device_snapshot_slots is not None:
        spare = options.device_snapshot_slots
    if options.host_cache_mib is not None:
        slabs = options.host_cache_mib * MIB // given.slab_bytes
    geometry = attrs.evolve(
        given,
        pools=(attrs.evolve(given.pools[0], pages=pages),),
        lanes=options.max_concurrency,
        slots=options.max_concurrency + spare,
        slabs=slabs,
    )
    policy = Policy.resolve(
        prefill_chunk=options.prefill_chunk,
        host_tier=slabs > 0,
        taps_per_request=options.taps_per_request,
        tap_ladder_tokens=options.tap_ladder_tokens,
        tap_min_gap_tokens=options.tap_min_gap_tokens,
    )
    context = min(base.max_context, pages * given.block)
    return attrs.evolve(base, geometry=geometry, policy=policy, max_context=options.max_context or context)


def _facts(sizes: ScriptedOptions, source: Source, options: ServeOptions) -> Facts:
    geometry: Geometry = sizes.geometry
    pool = geometry.pools[0]
    return Facts(
        model=source.name,
        source=source.shown,
        parameters=None,
        device="cpu",
        dtype=None,
        kv_dtype=None,
        threads=None,
        prefill_threads=None,
        max_concurrency=geometry.lanes,
        max_context=sizes.max_context,
        pages=pool.pages,
        kv_tokens=pool.pages * geometry.block,
        kv_bytes=pool.pages * pool.page_bytes,
        slots=geometry.slots,
        image_bytes=geometry.image_bytes,
        slabs=geometry.slabs,
        host_bytes=geometry.slabs * geometry.slab_bytes,
        prefill_chunk=options.prefill_chunk,
        taps_per_request=sizes.policy.taps_per_request,
        tap_ladder_tokens=sizes.policy.tap_ladder_tokens,
        tap_min_gap_tokens=sizes.policy.tap_min_gap_tokens,
        prefix_reuse=options.prefix_reuse,
    )
