"""Options: what was asked, and what it resolves to."""

import pytest

from hpc_qwen35.errors import OptionError
from hpc_qwen35.memory import Memory
from hpc_qwen35.options import Options, Resolved, Sizes, resolve

SIZES = Sizes(page_bytes=100_000, image_bytes=250_000, model_context=32_768)
SLAB = 102_400  # page_bytes at the next 4 KiB
GIB = 1 << 30


def of(
    options: Options, sizes: Sizes = SIZES, limit: int = 8 * GIB, free: int = 0, device: str = "cpu"
) -> Resolved:
    memory = Memory(process_limit=limit, device_free=free)
    return resolve(
        options,
        sizes,
        memory,
        device=device,
        dtype="fp32",
        kv_dtype="fp32",
        decode_threads=1,
        prefill_threads=2,
    )


def test_defaults_on_a_cpu_take_a_quarter_of_memory_twice() -> None:
    """The KV pool and the host tier each get 25 % of what the process may use (D8)."""
    r = of(Options())
    assert r.pages == 2 * GIB // SIZES.page_bytes
    assert r.slabs == 2 * GIB // SLAB
    assert r.host_bytes == r.slabs * SLAB


def test_defaults_follow_the_configuration_table() -> None:
    """C + 1 snapshot slots and 8 taps with a host tier, ladder and gap from the chunk (§14.2)."""
    r = of(Options(max_concurrency=3, prefill_chunk=1024))
    assert r.slots == 3 + 4
    assert r.policy.taps_per_request == 8
    assert r.policy.tap_ladder_tokens == 4096
    assert r.policy.tap_min_gap_tokens == 1024
    assert r.max_context == SIZES.model_context


def test_without_a_host_tier_slots_are_the_only_snapshots() -> None:
    """C + 2 slots and 2 taps a request when the host tier is off (§14.2)."""
    r = of(Options(host_cache_mib=0))
    assert (r.slabs, r.slots, r.policy.taps_per_request) == (0, 4 + 6, 2)


def test_a_small_machine_turns_the_host_tier_off_with_a_note() -> None:
    """A quarter of memory that cannot hold one image and two blocks means no tier, said aloud (D8)."""
    r = of(Options(kv_capacity=4096), limit=4 * 4 * SLAB)
    assert r.slabs == 0
    assert any("host tier off" in note for note in r.notes)


def test_a_host_tier_below_the_minimum_is_refused_with_the_needed_size() -> None:
    """An explicit size that holds no snapshot names the size that would."""
    big = Sizes(page_bytes=1 << 20, image_bytes=10 << 20, model_context=4096)
    with pytest.raises(OptionError, match=r"--host-cache-mib is 5: must be 0 .* or at least 12"):
        of(Options(host_cache_mib=5), sizes=big)


def test_a_host_tier_beyond_memory_is_refused() -> None:
    """What the process may not use cannot be reserved."""
    with pytest.raises(OptionError, match="this process may use 8192 MiB"):
        of(Options(host_cache_mib=9000))


def test_max_context_is_clamped_to_the_pool_with_a_note() -> None:
    """A pool smaller than the model's context shortens the context and says so (D8)."""
    r = of(Options(kv_capacity=1000))
    assert r.pages == 16
    assert r.max_context == 1024
    assert any("1024 of the model's 32768" in note for note in r.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(max_concurrency=0), r"--max-concurrency is 0: must be between 1 and 8"),
        (Options(max_concurrency=9), r"--max-concurrency is 9: must be between 1 and 8"),
        (Options(prefill_chunk=100), r"--prefill-chunk is 100: must be a multiple of 64"),
        (Options(prefill_chunk=0), r"--prefill-chunk is 0: must be between 64"),
        (Options(max_context=40_000), r"--max-context is 40000: the model's own limit is 32768"),
        (Options(max_context=2048, kv_capacity=1024), r"--kv-capacity holds 1024 tokens: .* at least 2048"),
        (Options(max_concurrency=8, kv_capacity=64), r"--kv-capacity holds 64 tokens: .* at least 512"),
        (Options(device_snapshot_slots=0), r"--device-snapshot-slots is 0: must be between 1"),
        (Options(threads=0), r"--threads is 0"),
        (Options(host_cache_mib=-1), r"--host-cache-mib is -1"),
        (Options(prefix_reuse=False, host_cache_mib=64), r"--host-cache-mib needs prefix reuse"),
        (Options(prefix_reuse=False, taps_per_request=4), r"--cache-taps-per-request needs prefix reuse"),
    ],
)
def test_an_option_out_of_range_names_itself_its_value_and_the_bound(options: Options, message: str) -> None:
    """Every refusal says which flag, what it was and what would do."""
    with pytest.raises(OptionError, match=message):
        of(options)


def test_no_prefix_reuse_reserves_nothing_for_the_cache() -> None:
    """Without reuse there are no snapshot slots and no host tier."""
    r = of(Options(prefix_reuse=False))
    assert (r.slots, r.slabs) == (4, 0)


def test_on_a_gpu_free_memory_becomes_kv() -> None:
    """The pool takes what is free after the state slots and the headroom (§5.4)."""
    r = of(Options(), free=20 * GIB, device="cuda")
    assert r.pages == (20 * GIB - r.slots * SIZES.image_bytes - 3 * GIB) // SIZES.page_bytes


def test_a_full_gpu_is_a_clear_error() -> None:
    """No room for a page per lane is refused, not a negative pool."""
    with pytest.raises(OptionError, match="the memory left for KV holds 0 tokens"):
        of(Options(), free=1 * GIB, device="cuda")
