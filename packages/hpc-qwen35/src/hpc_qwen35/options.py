"""Options of a program: what was asked, and what it resolved to.

Defaults are §14.2's; the host tier's is D8's. Everything unset is derived once, here, from the model's sizes
and the memory at hand, and the effective values are reported back. Nothing is filled in later.
"""

from __future__ import annotations

import attrs

from hpc_index.policy import Policy
from hpc_qwen35.errors import OptionError
from hpc_qwen35.kv_profiles import BLOCK
from hpc_qwen35.memory import Memory

__all__ = ["MAX_LANES", "Options", "Resolved", "Sizes", "check", "resolve"]

MAX_LANES = 8
"""Most sequences that decode in one batch."""

_MIB = 1 << 20
_SLAB_ALIGN = 4096  # §5.4: a slab record is rounded up to 4 KiB
_CPU_SHARE = 0.25  # D8: of the memory the process may use, once for the host tier and once for KV on a CPU
_CUDA_HEADROOM = 3 << 30  # activations of one prefill chunk, and what the libraries take for themselves


@attrs.frozen
class Options:
    """What a user asked for; None (or "auto") leaves the choice to `resolve`.

    kv_capacity counts tokens, host_cache_mib mebibytes (0: no host tier); threads are torch's intra-op ones.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_concurrency: int = 4
    max_context: int | None = None
    kv_capacity: int | None = None
    host_cache_mib: int | None = None
    prefill_chunk: int = 2048
    device_snapshot_slots: int | None = None
    taps_per_request: int | None = None
    tap_ladder_tokens: int | None = None
    tap_min_gap_tokens: int | None = None
    prefix_reuse: bool = True
    threads: int | None = None


@attrs.frozen
class Sizes:
    """What the model's shape dictates: bytes of a KV page, of a state image, and its own context limit."""

    page_bytes: int
    image_bytes: int
    model_context: int


@attrs.frozen
class Resolved:
    """The effective values of a running program. notes: what a user should know about the choices."""

    device: str
    dtype: str
    kv_dtype: str
    decode_threads: int
    prefill_threads: int
    max_concurrency: int
    max_context: int
    pages: int
    page_bytes: int
    slots: int
    image_bytes: int
    slabs: int
    slab_bytes: int
    prefill_chunk: int
    policy: Policy
    prefix_reuse: bool
    notes: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.pages * BLOCK

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier; 0 when it is off."""
        return self.slabs * self.slab_bytes


def _within(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise OptionError(f"{name} is {value}: must be between {low} and {high}")


def check(o: Options) -> None:
    """Refuse values that no model and no machine could make sense of. Raises OptionError."""
    _within("--max-concurrency", o.max_concurrency, 1, MAX_LANES)
    _within("--prefill-chunk", o.prefill_chunk, BLOCK, 1 << 16)
    if o.prefill_chunk % BLOCK:
        raise OptionError(f"--prefill-chunk is {o.prefill_chunk}: must be a multiple of {BLOCK}")
    big = 1 << 31
    _within("--max-context", o.max_context, 2, big)
    _within("--kv-capacity", o.kv_capacity, BLOCK, big)
    _within("--host-cache-mib", o.host_cache_mib, 0, 1 << 24)
    _within("--device-snapshot-slots", o.device_snapshot_slots, 1, 4096)
    _within("--cache-taps-per-request", o.taps_per_request, 0, 64)
    _within("--cache-tap-ladder", o.tap_ladder_tokens, BLOCK, big)
    _within("--cache-tap-min-gap", o.tap_min_gap_tokens, 0, big)
    _within("--threads", o.threads, 1, 4096)


def slab_bytes_of(sizes: Sizes) -> int:
    """Bytes of a host slab: one block's record, rounded up to 4 KiB (§5.4)."""
    return -(-sizes.page_bytes // _SLAB_ALIGN) * _SLAB_ALIGN


def _host_slabs(o: Options, sizes: Sizes, memory: Memory, notes: list[str]) -> int:
    slab = slab_bytes_of(sizes)
    least = -(-sizes.image_bytes // slab) + 2  # one image, its tail and one block
    if not o.prefix_reuse:
        if o.host_cache_mib:
            raise OptionError("--host-cache-mib needs prefix reuse: it cannot go with --no-prefix-reuse")
        return 0
    if o.host_cache_mib is None:
        slabs = int(memory.process_limit * _CPU_SHARE) // slab
        if slabs >= least:
            return slabs
        notes.append(
            f"host tier off: a quarter of the {memory.process_limit // _MIB} MiB this process may use holds "
            f"{slabs} slabs of {slab} bytes, one snapshot needs {least}"
        )
        return 0
    slabs = o.host_cache_mib * _MIB // slab
    if o.host_cache_mib and slabs < least:
        need = -(-least * slab // _MIB)
        raise OptionError(
            f"--host-cache-mib is {o.host_cache_mib}: must be 0 (no host tier) or at least {need}"
        )
    if o.host_cache_mib * _MIB > memory.process_limit:
        raise OptionError(
            f"--host-cache-mib is {o.host_cache_mib}: this process may use {memory.process_limit // _MIB} MiB"
        )
    return slabs


def _pages(o: Options, sizes: Sizes, memory: Memory, device: str, fixed_bytes: int) -> int:
    """Pages of the KV pool: as asked, else what the device has room for (§5.4)."""
    if o.kv_capacity is not None:
        return -(-o.kv_capacity // BLOCK)
    if device == "cpu":
        return int(memory.process_limit * _CPU_SHARE) // sizes.page_bytes
    return (memory.device_free - fixed_bytes - _CUDA_HEADROOM) // sizes.page_bytes


def resolve(
    o: Options,
    sizes: Sizes,
    memory: Memory,
    *,
    device: str,
    dtype: str,
    kv_dtype: str,
    decode_threads: int,
    prefill_threads: int,
) -> Resolved:
    """Derive every unset value (§14.2, D8).

    Raises:
        OptionError: a value out of its range, or one that the others leave no room for. The text names
            the flag, the value and the bound.
    """
    check(o)
    notes: list[str] = []
    lanes = o.max_concurrency
    slabs = _host_slabs(o, sizes, memory, notes)
    if not o.prefix_reuse:
        for flag, value in (
            ("--device-snapshot-slots", o.device_snapshot_slots),
            ("--cache-taps-per-request", o.taps_per_request),
            ("--cache-tap-ladder", o.tap_ladder_tokens),
            ("--cache-tap-min-gap", o.tap_min_gap_tokens),
        ):
            if value is not None:
                raise OptionError(f"{flag} needs prefix reuse: it cannot go with --no-prefix-reuse")
    snapshot_slots = o.device_snapshot_slots
    if snapshot_slots is None:
        snapshot_slots = 0 if not o.prefix_reuse else lanes + (1 if slabs else 2)
    slots = lanes + snapshot_slots
    pages = _pages(o, sizes, memory, device, slots * sizes.image_bytes)
    if o.max_context is not None and o.max_context > sizes.model_context:
        raise OptionError(f"--max-context is {o.max_context}: the model's own limit is {sizes.model_context}")
    # One request alone must reach the limit, and every lane must get a page (§5.4).
    need = max(-(-(o.max_context or BLOCK) // BLOCK), lanes)
    if pages < need:
        source = "--kv-capacity" if o.kv_capacity is not None else "the memory left for KV"
        raise OptionError(
            f"{source} holds {max(pages, 0) * BLOCK} tokens: --max-context and --max-concurrency need "
            f"at least {need * BLOCK}"
        )
    max_context = o.max_context or min(sizes.model_context, pages * BLOCK)
    if o.max_context is None and max_context < sizes.model_context:
        notes.append(
            f"max context is {max_context} of the model's {sizes.model_context}: the KV pool is full then"
        )
    return Resolved(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        decode_threads=decode_threads,
        prefill_threads=prefill_threads,
        max_concurrency=lanes,
        max_context=max_context,
        pages=pages,
        page_bytes=sizes.page_bytes,
        slots=slots,
        image_bytes=sizes.image_bytes,
        slabs=slabs,
        slab_bytes=slab_bytes_of(sizes),
        prefill_chunk=o.prefill_chunk,
        policy=Policy.resolve(
            prefill_chunk=o.prefill_chunk,
            host_tier=slabs > 0,
            taps_per_request=o.taps_per_request,
            tap_ladder_tokens=o.tap_ladder_tokens,
            tap_min_gap_tokens=o.tap_min_gap_tokens,
        ),
        prefix_reuse=o.prefix_reuse,
        notes=tuple(notes),
    )
