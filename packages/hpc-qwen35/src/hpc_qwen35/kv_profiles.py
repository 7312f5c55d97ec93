"""How keys and values are stored in a KV page: one profile per storage form (§3.1)."""

from __future__ import annotations

import attrs
import torch

from hpc_qwen35.config import Qwen35Config
from hpc_qwen35.errors import OptionError

__all__ = ["BLOCK", "PROFILES", "KvProfile", "kv_profile"]

BLOCK = 64
"""Tokens of a block and of a page (§3.1)."""


@attrs.frozen
class KvProfile:
    """A layer's record of one page: [BLOCK, 2, HK, D] in `dtype`, a token's keys, then its values.

    Token-major, so that the first c columns of a page are one run of bytes, and so that gathered pages
    read as one sequence.
    """

    name: str
    dtype: torch.dtype

    def layer_record_bytes(self, config: Qwen35Config) -> int:
        """Bytes of one layer's record of one page."""
        return BLOCK * self.token_bytes(config)

    def token_bytes(self, config: Qwen35Config) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * config.num_key_value_heads * config.head_dim * self.dtype.itemsize


PROFILES = {
    profile.name: profile for profile in (KvProfile("bf16", torch.bfloat16), KvProfile("fp32", torch.float32))
}


def kv_profile(name: str) -> KvProfile:
    """The profile of this name. Raises OptionError, which names those there are."""
    profile = PROFILES.get(name)
    if profile is None:
        raise OptionError(f"KV profile {name!r} is not supported; supported: {', '.join(PROFILES)}")
    return profile
