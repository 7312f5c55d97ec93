"""State images: everything of a sequence that is not in KV pages, one image a slot (§3.2, design §4).

An image is a list of named parts. A layer's parts lie next to each other, so that restoring layer by layer
moves one range a layer. Every part, and every image, starts on a 256-byte boundary: the same arithmetic
then runs on the same alignment in every slot, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from hpc_qwen35.config import Qwen35Config
from hpc_qwen35.tensors import zeroed

__all__ = ["Part", "StateLayout", "StatePool"]

_ALIGN = 256


@attrs.frozen
class Part:
    """One tensor of an image: `conv`, `recurrent` (of a GDN layer) or `hidden` (layer is -1).

    conv: [conv_width - 1, channels], raw columns before the frontier, oldest first, in the compute dtype.
    recurrent: FP32 [HV, K, V]. hidden: [hidden_size] after the final norm, of the last token.
    """

    name: str
    layer: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@attrs.frozen
class StateLayout:
    """Where the parts of an image lie; image_bytes is padded to 256."""

    parts: tuple[Part, ...]
    image_bytes: int

    @classmethod
    def of(cls, config: Qwen35Config, conv_dtype: torch.dtype) -> StateLayout:
        """The layout for a model that computes in conv_dtype. Stored dtype = live dtype: no rounding."""
        parts: list[Part] = []
        offset = 0

        def add(name: str, layer: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
            nonlocal offset
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            parts.append(Part(name, layer, offset, nbytes, dtype, shape))
            offset += -(-nbytes // _ALIGN) * _ALIGN

        heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        for layer in config.gdn_layers:
            add("conv", layer, conv_dtype, (config.conv_width - 1, config.conv_channels))
            add("recurrent", layer, torch.float32, heads)
        add("hidden", -1, conv_dtype, (config.hidden_size,))
        return cls(tuple(parts), offset)


@attrs.define(eq=False)
class StatePool:
    """`slots` state images, zeroed: those of running lanes and device snapshots, in one numbering.

    Zeros are the state before any token. bytes: uint8 [slots, image_bytes], contiguous, one storage.
    views: a part's tensors over all slots, [slots, *shape], strided, keyed by (name, layer).

    Raises:
        ValueError: slots is not positive.
        MemoryError: the device has no room; the text names the size.
    """

    config: Qwen35Config
    slots: int
    device: torch.device
    conv_dtype: torch.dtype
    layout: StateLayout = attrs.field(init=False)
    bytes: torch.Tensor = attrs.field(init=False)
    views: Mapping[tuple[str, int], torch.Tensor] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}: must be at least 1")
        self.layout = StateLayout.of(self.config, self.conv_dtype)
        shape = (self.slots, self.layout.image_bytes)
        self.bytes = zeroed(shape, self.device)
        self.views = {
            (part.name, part.layer): self.bytes[:, part.offset : part.offset + part.nbytes]
            .view(part.dtype)
            .view(self.slots, *part.shape)
            for part in self.layout.parts
        }

    @property
    def parts(self) -> tuple[Part, ...]:
        """What an image is made of, in order of offset."""
        return self.layout.parts

    @property
    def image_bytes(self) -> int:
        """Bytes of one image, padding included."""
        return self.layout.image_bytes
