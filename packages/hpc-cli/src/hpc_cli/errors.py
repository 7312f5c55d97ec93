"""What a person sees when a command cannot go on: one clear line on stderr, never a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

__all__ = ["FAILURE", "USAGE", "CommandError", "reported"]

FAILURE = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell expects


class CommandError(Exception):
    """An expected failure. The message names the option or object, the value seen and what would do.

    exit_code: FAILURE, or USAGE where another command line would have worked.
    """

    def __init__(self, message: str, *, exit_code: int = FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def reported(*, with_traceback: bool = False) -> Iterator[None]:
    """Turn an expected failure inside the block into one line on stderr and its exit code.

    Anything else is a bug and keeps its traceback. `with_traceback` (`--log-level debug`) shows where an
    expected failure came from as well. Ctrl+C ends with code 130.
    """
    try:
        yield
    except CommandError as error:
        if with_traceback:
            traceback.print_exception(error)
        print(f"hpc: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        print("hpc: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
