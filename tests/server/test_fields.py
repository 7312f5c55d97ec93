"""The field tables, and what the documentation says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_server.protocols import openai_chat, openai_completions
from hpc_server.protocols.body import parse_body
from hpc_server.protocols.errors import RequestError
from hpc_server.protocols.fields import Fields, Use, shown

README = Path(__file__).parents[2] / "packages" / "hpc-server" / "README.md"


@pytest.mark.parametrize(
    ("path", "table"),
    [("chat/completions", openai_chat.FIELDS), ("completions", openai_completions.FIELDS)],
)
def test_the_readme_lists_every_field_with_its_use(path: str, table: Mapping[str, Use]) -> None:
    """One list per endpoint, and it is the one that the code reads (D11)."""
    text = README.read_text(encoding="utf-8").split(f"### POST /v1/{path}\n")[1]
    for use in Use:
        row = next(line for line in text.splitlines() if line.startswith(f"| {use.value} |"))
        listed = re.findall(r"`(\w+)`", row)
        assert listed == sorted(name for name, found in table.items() if found is use)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(json_values, st.integers(-5, 5), st.integers(6, 9))
def test_an_integer_is_read_exactly_if_it_is_one_in_range(value: object, low: int, high: int) -> None:
    """Booleans are no integers, whole floats are, everything else is an error that names the field."""
    fits = not isinstance(value, bool) and isinstance(value, int | float) and value in range(low, high + 1)
    fields = Fields({"x": value}, "at.")
    if value is None:
        assert fields.integer("x", low, high) is None
    elif fits:
        assert fields.integer("x", low, high) == value
    else:
        with pytest.raises(RequestError, match=re.escape(f"[{low}, {high}]")) as caught:
            fields.integer("x", low, high)
        assert caught.value.param == "at.x"


@given(json_values)
def test_a_shown_value_is_short(value: object) -> None:
    """Error texts never repeat a prompt."""
    assert len(shown(value)) <= 140


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_a_request_error(data: bytes) -> None:
    """parse_body raises nothing else."""
    try:
        value = parse_body(data)
    except RequestError as error:
        value = error.body()
    assert isinstance(value, dict)
