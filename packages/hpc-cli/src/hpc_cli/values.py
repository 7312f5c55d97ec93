"""Option values that typer has no type for: a whole number or `auto`."""

from __future__ import annotations

import typer

__all__ = ["AUTO", "auto_or_whole", "whole"]

AUTO = "auto"


def auto_or_whole(text: str) -> str:
    """Let `auto` and whole numbers pass; raise a usage error for anything else.

    Bounds depend on the model and the machine, so whoever resolves the options checks them (§14.2). The
    text stays text, as `auto` is an answer of its own; `whole` reads it.
    """
    if text == AUTO:
        return text
    try:
        return str(int(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither 'auto' nor a whole number") from None


def whole(text: str) -> int | None:
    """Read a value that passed `auto_or_whole`; None stands for `auto`."""
    return None if text == AUTO else int(text)
