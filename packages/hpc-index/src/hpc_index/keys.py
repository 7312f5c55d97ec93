"""Keys of blocks (§5.1, D1): the exact key that decides equality, and the chained hash that finds it.

A hash only chooses which children are compared. Two blocks are the same block if and only if their exact
keys are equal and their parents are the same block.
"""

from __future__ import annotations

import attrs
import numpy as np
import xxhash

from hpc_index.errors import PromptError
from hpc_index.ids import Int32Buffer, UInt64Array
from hpc_index.records import PromptView

__all__ = ["BlockKeys", "block_hash", "check_prompt", "root_hash", "token_bytes"]

_TOKEN_BYTES = 4
_NO_EXTRA = bytes(8)


def root_hash(cache_salt: bytes, seed: int) -> int:
    """The hash that a namespace's chain starts from (D14): xxh3_64 of the salt, seeded."""
    return xxhash.xxh3_64_intdigest(cache_salt, seed & 0xFFFF_FFFF_FFFF_FFFF)


def block_hash(parent: int, key: bytes) -> int:
    """lookup_hash(b) = xxh3_64(lookup_hash(b - 1) || tokens || extra)."""
    return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + key)


def token_bytes(tokens: Int32Buffer) -> bytes:
    """Tokens as little-endian int32, the same on every machine."""
    return tokens.astype("<i4", copy=False).tobytes()


@attrs.frozen(eq=False)
class BlockKeys:
    """Exact keys of the blocks of one token sequence.

    raw: its tokens as bytes. extras: the cumulative media key a block; blocks beyond the array keep the
    last value. lead: tokens of the next block that a block's page was computed from (the largest lag).
    """

    raw: bytes
    extras: UInt64Array | None
    block: int
    lead: int

    def media(self, b: int) -> bytes:
        """The media key of block b, 8 bytes."""
        if self.extras is None or not len(self.extras):
            return _NO_EXTRA
        return int(self.extras[min(b, len(self.extras) - 1)]).to_bytes(8, "little")

    def key(self, b: int) -> bytes:
        """Exact key of the full block b: its tokens, then its media key."""
        size = _TOKEN_BYTES * self.block
        return self.raw[size * b : size * (b + 1)] + self.media(b)

    def ahead(self, b: int) -> bytes:
        """What follows block b as far as a lagging pool's last column reads it; empty where none lags."""
        if not self.lead:
            return b""
        start = _TOKEN_BYTES * self.block * (b + 1)
        return self.raw[start : start + _TOKEN_BYTES * self.lead] + self.media(b + 1)

    def between(self, begin: int, end: int) -> bytes:
        """Tokens [begin, end) and the media key of their block: the exact key of a tail (§5.3)."""
        return self.raw[_TOKEN_BYTES * begin : _TOKEN_BYTES * end] + self.media(begin // self.block)


def check_prompt(prompt: PromptView, block: int) -> None:
    """Raise PromptError unless tokens, extras, hints and spans have their types and lengths."""
    check_tokens("PromptView.tokens", prompt.tokens)
    n = len(prompt.tokens)
    if n < 1:
        raise PromptError("PromptView.tokens is empty; a prompt has at least one token")
    if prompt.extras is not None:
        want = -(-n // block)
        extras = prompt.extras
        if not isinstance(extras, np.ndarray) or extras.dtype != np.uint64 or extras.ndim != 1:
            raise PromptError("PromptView.extras must be a one-dimensional uint64 array")
        if len(extras) != want:
            raise PromptError(
                f"PromptView.extras has {len(extras)} keys; {n} tokens in blocks of {block} touch {want}"
            )
    for hint in prompt.hints:
        if hint.position < 0 or hint.position > n:
            raise PromptError(f"TapHint.position is {hint.position}; the prompt has tokens 0..{n}")
    for span in prompt.spans:
        if not 0 <= span.begin < span.end <= n:
            raise PromptError(f"Span is [{span.begin}, {span.end}); it must lie in [0, {n}) and not be empty")


def check_tokens(name: str, tokens: Int32Buffer) -> None:
    """Raise PromptError unless `tokens` is a one-dimensional contiguous int32 array."""
    if not isinstance(tokens, np.ndarray):
        raise PromptError(f"{name} is a {type(tokens).__name__}; it must be a numpy int32 array")
    if tokens.dtype != np.int32 or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise PromptError(
            f"{name} has dtype {tokens.dtype} and shape {tokens.shape}; it must be one-dimensional "
            "contiguous int32"
        )
