"""Keys of blocks: exact bytes decide, hashes find."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_index.errors import PromptError
from hpc_index.keys import BlockKeys, block_hash, check_prompt, root_hash, token_bytes
from hpc_index.records import HintKind, PromptView, Span, TapHint
from tests.index.strategies import engine, prompt, random_tokens


def chain(tokens: list[int], extras: list[int] | None = None) -> list[int]:
    keys = BlockKeys(
        token_bytes(np.array(tokens, np.int32)),
        None if extras is None else np.array(extras, np.uint64),
        64,
        0,
    )
    hashes, last = [], root_hash(b"", 0)
    for b in range(len(tokens) // 64):
        last = block_hash(last, keys.key(b))
        hashes.append(last)
    return hashes


def test_a_changed_token_changes_its_block_and_all_after() -> None:
    """Hashes are chained: a change in block 2 leaves blocks 0 and 1 alone."""
    tokens = random_tokens(0, 256)
    other = list(tokens)
    other[130] += 1
    a, b = chain(tokens), chain(other)
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert a[3] != b[3]


def test_a_media_key_changes_its_block_and_all_after() -> None:
    """The media key is part of the chain."""
    tokens = random_tokens(0, 256)
    a, b = chain(tokens), chain(tokens, [0, 7, 0, 0])
    assert a[0] == b[0]
    assert all(x != y for x, y in zip(a[1:], b[1:], strict=True))


def test_namespaces_and_seeds_start_other_chains() -> None:
    """Neither the salt nor the seed can be left out of the root."""
    assert len({root_hash(b"", 0), root_hash(b"a", 0), root_hash(b"", 1)}) == 3


def test_a_constant_hash_gives_no_false_hit() -> None:
    """With every lookup a collision, blocks are still told apart by their tokens."""
    double = engine()
    double.index._store.tree.hasher = lambda _parent, _key: 42
    a, b = random_tokens(1, 200), random_tokens(2, 200)
    double.complete(prompt(a), [1] * 64)
    double.complete(prompt(b), [2] * 64)
    assert double.index.stats().blocks == 8
    assert double.index.quote(prompt([*a, *[1] * 64, 5]), 1, 0.0).reuse == 264
    assert double.index.quote(prompt([*b, *[2] * 64, 5]), 1, 0.0).reuse == 264
    assert double.index.quote(prompt([*a[:64], *b[64:]]), 1, 0.0).matched == 64


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (PromptView(np.zeros(3, np.int64)), "int64"),
        (PromptView(np.zeros((2, 2), np.int32)), "shape"),
        (PromptView(np.zeros(0, np.int32)), "empty"),
        (PromptView([1, 2]), "list"),  # type: ignore[arg-type]
        (PromptView(np.zeros(65, np.int32), np.zeros(1, np.uint64)), "touch 2"),
        (PromptView(np.zeros(3, np.int32), np.zeros(1, np.int64)), "uint64"),
        (PromptView(np.zeros(3, np.int32), hints=(TapHint(4, HintKind.OPENER),)), "position is 4"),
        (PromptView(np.zeros(3, np.int32), spans=(Span(2, 2),)), "Span"),
    ],
)
def test_a_malformed_prompt_is_refused_with_what_is_wrong(view: PromptView, message: str) -> None:
    """Types, lengths and positions are checked before anything is changed."""
    with pytest.raises(PromptError, match=message):
        check_prompt(view, 64)
