"""From a checkpoint folder and options to a running program."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from os import sched_getaffinity
from pathlib import Path
from typing import TypeAlias

import attrs
import torch

from hpc_index import CostModel, PrefixIndex
from hpc_index.records import Geometry, Pool
from hpc_qwen35.config import MoeFfn, Qwen35Config, read_config
from hpc_qwen35.copies import CopyEngine, make_slabs
from hpc_qwen35.errors import OptionError
from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.kv_profiles import BLOCK, kv_profile
from hpc_qwen35.loading import load_weights
from hpc_qwen35.memory import Memory, measure
from hpc_qwen35.model import Qwen35Model
from hpc_qwen35.names import layer_tensors
from hpc_qwen35.options import Options, Resolved, Sizes, check, resolve
from hpc_qwen35.program import Qwen35Program
from hpc_qwen35.state_pool import StateLayout, StatePool
from hpc_qwen35.threads import choose_threads, torch_measure
from hpc_qwen35.weights import Qwen35Weights

__all__ = ["Progress", "assemble", "cost_model", "geometry", "load"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told (what, done, total) while something takes time; units are bytes."""

_log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(
    folder: Path,
    options: Options,
    progress: Progress | None = None,
    *,
    addressable_vocab: int | None = None,
) -> Qwen35Program:
    """Read the checkpoint, resolve every option and reserve all memory; the program is ready for requests.

    addressable_vocab: ids the tokenizer can produce; rows above are padding and never chosen.

    Raises:
        ConfigError, CheckpointError: the folder holds no model that this program runs.
        OptionError: an option out of range, or one the machine leaves no room for.
        MemoryError: a pool could not be reserved.
    """
    check(options)
    device = _device(options.device)
    dtype = _named("--dtype", options.dtype, device)
    config = read_config(folder)
    if addressable_vocab is not None:
        config = config.with_addressable_vocab(addressable_vocab)
    told = None if progress is None else partial(progress, "weights")
    loaded = load_weights(folder, config, device, _DTYPES[dtype], told)
    notes: tuple[str, ...] = ()
    if loaded.ignored:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(loaded.ignored.items()))
        notes = (f"tensors of the checkpoint that this version does not use: {counts}",)
    return assemble(config, loaded.weights, options, measure(device), notes)


def assemble(
    config: Qwen35Config,
    weights: Qwen35Weights,
    options: Options,
    memory: Memory,
    notes: tuple[str, ...] = (),
    cost: CostModel | None = None,
) -> Qwen35Program:
    """A program around weights that are already on their device, in their compute dtype.

    notes: what the start log should say besides what `resolve` has to.
    cost: ranks resume points; None derives one from the model's size and the device class.

    Raises:
        OptionError, MemoryError: as `load`.
    """
    device, dtype = weights.device, weights.dtype
    kv_dtype = _named("--kv-dtype", options.kv_dtype, device)
    sizes = Sizes(
        page_bytes=len(config.attention_layers) * kv_profile(kv_dtype).layer_record_bytes(config),
        image_bytes=StateLayout.of(config, dtype).image_bytes,
        model_context=config.max_position_embeddings,
    )
    decode_threads, prefill_threads = _threads(options.threads, device, dtype, config)
    resolved = resolve(
        options,
        sizes,
        memory,
        device=str(device),
        dtype=next(name for name, value in _DTYPES.items() if value is dtype),
        kv_dtype=kv_dtype,
        decode_threads=decode_threads,
        prefill_threads=prefill_threads,
    )
    resolved = attrs.evolve(resolved, notes=(*resolved.notes, *notes))
    kv = KvPool(config, kv_dtype, resolved.pages, device)
    states = StatePool(config, resolved.slots, device, dtype)
    slabs = make_slabs(resolved.slabs, resolved.slab_bytes, pinned=device.type == "cuda")
    return Qwen35Program(
        Qwen35Model(config, weights, kv, states),
        CopyEngine((kv,), states, slabs),
        PrefixIndex(geometry(resolved), cost or cost_model(config, resolved), resolved.policy),
        resolved,
        addressable=config.addressable_vocab,
    )


def geometry(r: Resolved) -> Geometry:
    """The index's ledgers for these sizes: one KV pool, no lag."""
    return Geometry(
        block=BLOCK,
        unit=1,
        pools=(Pool(name="kv", pages=r.pages, lag=0, page_bytes=r.page_bytes),),
        lanes=r.max_concurrency,
        slots=r.slots,
        image_bytes=r.image_bytes,
        slab_bytes=r.slab_bytes,
        slabs=r.slabs,
        slabs_per_chunk=max(r.slabs, 1),
    )


def cost_model(config: Qwen35Config, r: Resolved) -> CostModel:
    """Seconds of prefill and restore, from the model's size and the device class (§6.2).

    A roofline of measured sustained rates: token cost from the multiply-adds of a token, pair cost from those
    of attention. It ranks sources and decides nothing else, so a factor of two does no harm.
    """
    rates = _CPU if r.device == "cpu" else _CUDA
    pair_flops = 4 * len(config.attention_layers) * config.num_attention_heads * config.head_dim
    return CostModel(
        chunk_seconds=rates.chunk_seconds * len(config.layers),
        chunk_tokens=r.prefill_chunk,
        token_seconds=2 * _token_weights(config) / rates.flops,
        pair_seconds=pair_flops / rates.attention_flops,
        host_bytes_per_second=rates.host_bytes,
        batch_seconds=rates.batch_seconds,
    )


def _token_weights(config: Qwen35Config) -> float:
    """Weights that one token is multiplied with in the decoder layers; of routed experts only the chosen."""
    total = 0.0
    for layer in range(len(config.layers)):
        for name, shape in layer_tensors(config, layer).items():
            share = 1.0
            if isinstance(config.ffn, MoeFfn) and ".experts." in name:
                share = config.ffn.num_experts_per_tok / config.ffn.num_experts
            total += share * math.prod(shape)
    return total


@attrs.frozen
class _Rates:
    """Sustained rates of a device class: operations and host bytes a second, seconds a layer and a batch."""

    flops: float
    attention_flops: float
    host_bytes: float
    chunk_seconds: float
    batch_seconds: float


# Two cores with AVX-512: `benchmarks/model_cpu.py`. One H200, eager: no more than its order of magnitude.
_CPU = _Rates(160e9, 600e9, host_bytes=5e9, chunk_seconds=0.6e-3, batch_seconds=50e-6)
_CUDA = _Rates(300e12, 300e12, host_bytes=20e9, chunk_seconds=0.5e-3, batch_seconds=100e-6)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise OptionError(f"--device is {name!r}: must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device is 'cuda': torch finds no CUDA device on this machine")
    return torch.device(name)


def _named(flag: str, name: str, device: torch.device) -> str:
    if name == "auto":
        return "fp32" if device.type == "cpu" else "bf16"
    if name not in _DTYPES:
        raise OptionError(f"{flag} is {name!r}: must be auto, {' or '.join(_DTYPES)}")
    return name


def _threads(
    asked: int | None, device: torch.device, dtype: torch.dtype, config: Qwen35Config
) -> tuple[int, int]:
    """Threads of the decode and of the prefill phase; measured unless asked for."""
    if asked is not None:
        return asked, asked
    if device.type != "cpu":
        return 1, 1
    choice = choose_threads(len(sched_getaffinity(0)), torch_measure(dtype, config.hidden_size))
    _log.info("threads measured: %s", choice.summary())
    return choice.decode, choice.prefill
