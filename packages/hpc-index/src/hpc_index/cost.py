"""Predicted seconds of prefill and restore (§6.2, §11.4). Ranks sources; decides nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from hpc_index.errors import PolicyError

__all__ = ["PRESETS", "CostModel", "preset"]


@attrs.frozen
class CostModel:
    """A machine and a model in six numbers.

    chunk_seconds: fixed cost of one prefill pass. chunk_tokens: tokens of a pass.
    token_seconds: of each prefilled token. pair_seconds: of each (query, key) attention pair.
    host_bytes_per_second: host to device. batch_seconds: fixed cost of one restore.
    """

    chunk_seconds: float = 0.0
    chunk_tokens: int = 2048
    token_seconds: float = 1 / 4000
    pair_seconds: float = 0.0
    host_bytes_per_second: float = 50e9
    batch_seconds: float = 20e-6

    def __attrs_post_init__(self) -> None:
        for name in ("chunk_seconds", "token_seconds", "pair_seconds", "batch_seconds"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise PolicyError(f"CostModel.{name} is {value!r}; it must be a finite number of at least 0")
        if self.chunk_tokens < 1:
            raise PolicyError(f"CostModel.chunk_tokens is {self.chunk_tokens!r}; it must be at least 1")
        if not 0 < self.host_bytes_per_second < float("inf"):
            raise PolicyError(
                f"CostModel.host_bytes_per_second is {self.host_bytes_per_second!r}; it must be above 0"
            )

    def prefill_seconds(self, base: int, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens after `base` others; 0 for none.

        Passes, tokens and attention pairs: base * tokens + tokens * (tokens + 1) / 2.
        """
        if tokens <= 0:
            return 0.0
        passes = -(-tokens // self.chunk_tokens)
        pairs = base * tokens + tokens * (tokens + 1) // 2
        return passes * self.chunk_seconds + tokens * self.token_seconds + pairs * self.pair_seconds

    def restore_seconds(self, nbytes: int) -> float:
        """Seconds to bring `nbytes` from the host; 0 for none."""
        if nbytes <= 0:
            return 0.0
        return self.batch_seconds + nbytes / self.host_bytes_per_second


def _gpu(chunk_ms: float, token_us: float, pair_ns: float, gigabytes: float, batch_us: float) -> CostModel:
    return CostModel(
        chunk_seconds=chunk_ms * 1e-3,
        token_seconds=token_us * 1e-6,
        pair_seconds=pair_ns * 1e-9,
        host_bytes_per_second=gigabytes * 1e9,
        batch_seconds=batch_us * 1e-6,
    )


PRESETS: Mapping[str, CostModel] = MappingProxyType(
    {
        "generic": CostModel(),
        "cpu": CostModel(
            chunk_seconds=5e-3,
            token_seconds=46e-6,
            pair_seconds=3e-9,
            host_bytes_per_second=5e9,
            batch_seconds=50e-6,
        ),
        "rtx-5090-27b-int": _gpu(40.814, 235.69, 7.1007, 51.5, 8.457),
        "rtx-5090-27b-nvfp4": _gpu(14.673, 87.498, 1.9093, 51.5, 8.457),
        "rtx-3090-27b-int": _gpu(42.828, 718.28, 10.7786, 24.9, 55.3),
        "rtx-3090-35b-a3b-int": _gpu(32.306, 156.42, 4.1567, 24.9, 55.3),
        "rtx-pro-6000-27b-int": _gpu(36.346, 149.74, 1.3673, 50.3, 8.5),
        "rtx-pro-6000-35b-a3b-int": _gpu(16.890, 25.545, 1.0214, 50.3, 8.5),
        "rtx-pro-6000-27b-nvfp4": _gpu(12.680, 68.935, 2.2236, 50.3, 8.5),
    }
)
"""Measured coefficients by machine and model. `generic`: nothing measured; `cpu`: 2 cores, 5 M parameters."""


def preset(name: str) -> CostModel:
    """The preset of that name; PolicyError names the known ones."""
    model = PRESETS.get(name)
    if model is None:
        raise PolicyError(f"cost preset {name!r} is unknown; known are {', '.join(sorted(PRESETS))}")
    return model
