"""The KV pages of all full-attention layers, in one storage (§5.4, design §4)."""

from __future__ import annotations

import attrs
import torch

from hpc_qwen35.config import Qwen35Config
from hpc_qwen35.kv_profiles import BLOCK, KvProfile, kv_profile
from hpc_qwen35.tensors import zeroed

__all__ = ["KvPool"]


@attrs.define(eq=False)
class KvPool:
    """`pages` pages of BLOCK tokens, zeroed. The index owns who uses which page; this holds their bytes.

    profile: given by name. bytes: uint8 [attention layers, pages, layer record bytes], contiguous, one
    storage. layers: for each attention layer in model order its pages, [pages, BLOCK, 2, HK, D] in the
    profile's dtype.

    Raises:
        OptionError: no such profile.
        ValueError: pages is not positive.
        MemoryError: the device has no room; the text names the size.
    """

    config: Qwen35Config
    profile: KvProfile = attrs.field(converter=kv_profile)
    pages: int
    device: torch.device
    bytes: torch.Tensor = attrs.field(init=False)
    layers: tuple[torch.Tensor, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.pages < 1:
            raise ValueError(f"pages is {self.pages}: must be at least 1")
        c = self.config
        shape = (len(c.attention_layers), self.pages, self.profile.layer_record_bytes(c))
        self.bytes = zeroed(shape, self.device)
        page = (self.pages, BLOCK, 2, c.num_key_value_heads, c.head_dim)
        self.layers = tuple(layer.view(page) for layer in self.bytes.view(self.profile.dtype))

    @property
    def layer_record_bytes(self) -> int:
        """Bytes of one layer's record of one page."""
        return self.bytes.shape[2]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.bytes.shape[0] * self.bytes.shape[2]

    def copy_columns(self, src: int, dst: int, columns: int) -> None:
        """Copy the first `columns` tokens of page src into page dst, every layer; the rest of dst stays.

        Raises:
            ValueError: columns is not in [0, BLOCK].
        """
        if not 0 <= columns <= BLOCK:
            raise ValueError(f"columns is {columns}: must be 0 to {BLOCK}")
        run = columns * (self.layer_record_bytes // BLOCK)
        self.bytes[:, dst, :run] = self.bytes[:, src, :run]
