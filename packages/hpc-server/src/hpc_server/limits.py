"""Bounds of everything a client sends. One place, so that a reader can check that each number has one."""

from __future__ import annotations

from typing import Final

__all__ = [
    "HEAD_TIMEOUT_S",
    "INT64",
    "MAX_BIASES",
    "MAX_HEAD_BYTES",
    "MAX_JSON_DEPTH",
    "MAX_NAME_CHARS",
    "MAX_PENALTY",
    "MAX_REPETITION",
    "MAX_SALT_BYTES",
    "MAX_STOPS",
    "MAX_TEMPERATURE",
    "MAX_TOP_LOGPROBS",
    "MIN_REPETITION",
]

MAX_HEAD_BYTES: Final = 1 << 16
"""Of a request's line and headers together."""
HEAD_TIMEOUT_S: Final = 20.0
"""For a request's line and headers to arrive."""
MAX_JSON_DEPTH: Final = 64
"""Nesting of a body; tool schemas rarely pass 12."""
MAX_STOPS: Final = 4
MAX_TEMPERATURE: Final = 2.0
MAX_PENALTY: Final = 2.0
"""Presence and frequency penalties lie in [-2, 2]."""
MAX_REPETITION: Final = 10.0
MIN_REPETITION: Final = 0.01
"""Logits are divided by it: far smaller values overflow."""
MAX_BIASES: Final = 1024
"""Entries of logit_bias; each lies in [-100, 100]."""
MAX_TOP_LOGPROBS: Final = 20
MAX_SALT_BYTES: Final = 256
MAX_NAME_CHARS: Final = 256
"""Of model names, tool names and call ids."""
INT64: Final = (-(1 << 63), (1 << 63) - 1)
