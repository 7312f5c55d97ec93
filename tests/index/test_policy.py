"""What the constructor refuses."""

from __future__ import annotations

import attrs
import pytest

from hpc_index import Policy
from hpc_index.errors import GeometryError, PolicyError
from hpc_index.policy import check_geometry
from hpc_index.records import Geometry, Pool
from tests.index.strategies import geometry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 0}, "block is 0"),
        ({"block": 8193}, r"1\.\.8192"),
        ({"unit": 3}, "divide block"),
        ({"pools": ()}, "number"),
        ({"pools": (Pool("a", 1, 0, 1),) * 3}, "number"),
        ({"pools": (Pool("a", 0, 0, 1),)}, "pages is 0"),
        ({"pools": (Pool("a", 1, 2, 1),)}, "lag is 2"),
        ({"slots": 1}, "slots is 1"),
        ({"lanes": 0}, "lanes is 0"),
        ({"image_bytes": 0}, "image_bytes"),
        ({"slabs": 4}, "5 slabs"),
        ({"slabs": 9, "slab_bytes": 999}, "1000 bytes"),
        ({"slabs_per_chunk": 0}, "slabs_per_chunk"),
        ({"block": True}, "integer"),
    ],
)
def test_an_impossible_geometry_is_refused(change: dict[str, object], message: str) -> None:
    """The message names the field, the value and the bound."""
    bad: Geometry = attrs.evolve(geometry(), **change)  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match=message):
        check_geometry(bad)


def test_the_smallest_host_tier_holds_an_image_and_a_block() -> None:
    """4 slabs an image: 5 slabs are enough, 0 mean no host tier."""
    check_geometry(geometry(slabs=5))
    check_geometry(geometry(slabs=0))


@pytest.mark.parametrize("field", [a.name for a in attrs.fields(Policy)])
def test_a_policy_value_is_a_whole_number_in_range(field: str) -> None:
    """Every field refuses a negative number and a fraction, by name."""
    for value in (-1, 1.5):
        with pytest.raises(PolicyError, match=field):
            Policy(**{field: value})  # type: ignore[arg-type]


def test_defaults_follow_the_chunk_and_the_host_tier() -> None:
    """§14.2: 8 taps with a host tier and 2 without; ladder and gap grow with the chunk."""
    small, large = (
        Policy.resolve(prefill_chunk=512, host_tier=False),
        Policy.resolve(prefill_chunk=8192, host_tier=True, taps_per_request=3),
    )
    assert (small.taps_per_request, small.tap_ladder_tokens, small.tap_min_gap_tokens) == (2, 4096, 1024)
    assert (large.taps_per_request, large.tap_ladder_tokens, large.tap_min_gap_tokens) == (3, 16384, 8192)
    assert Policy.resolve(prefill_chunk=2048, host_tier=True).taps_per_request == 8
