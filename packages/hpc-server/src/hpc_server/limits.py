"""Bounds of everything a client sends. One place, so that a reader can check that each number has one."""

from __future__ import annotations

from typing import Final

__all__ = [
    "INT64",
    "MAX_BIASES",
    "MAX_JSON_DEPTH",
    "MAX_NAME_CHARS",
    "MAX_PENALTY",
    "MAX_REPETITION",
    "MAX_SALT_BYTES",
    "MAX_STOPS",
    "MAX_TEMPERATURE",
    "MAX_TOP_LOGPROBS",
]

MAX_JSON_DEPTH: Final = 64
"""Nesting of a body; tool schemas rarely pass 12."""
MAX_STOPS: Final = 4
MAX_TEMPERATURE: Final = 2.0
MAX_PENALTY: Final = 2.0
"""Presence and frequency penalties lie in [-2, 2]."""
MAX_REPETITION: Final = 10.0
MAX_BIASES: Final = 1024
"""Entries of logit_bias; each lies in [-100, 100]."""
MAX_TOP_LOGPROBS: Final = 20
MAX_SALT_BYTES: Final = 256
MAX_NAME_CHARS: Final = 256
"""Of model names, tool names and call ids."""
INT64: Final = (-(1 << 63), (1 << 63) - 1)
