"""The server under test: one that is started here and always ended, or one that runs already."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from hpc_cli.errors import CommandError

__all__ = ["Subject", "running", "started"]

SECONDS_TO_LOAD = 900.0
SECONDS_TO_END = 20.0
SECONDS_TO_DIE = 1.0  # between a broken connection and the end of the process that held it
SECONDS_BETWEEN_LOOKS = 0.05
LOG_LINES_SHOWN = 15


@attrs.frozen
class Subject:
    """A server that answers. about: what it resolved at its start; empty for one started elsewhere."""

    url: str
    about: Mapping[str, Any]


def running(url: str) -> Subject:
    """A server that somebody else started. A path such as `/v1` at the end of `url` is taken off."""
    return Subject(url=url.rstrip("/").removesuffix("/v1"), about={})


@contextmanager
def started(model: str | None, serve_options: Sequence[str]) -> Iterator[Subject]:
    """Start `hpc serve` on a free port with this interpreter, and end it with the block, whatever happens.

    Raises CommandError, with the end of its log, if it ends before it answers.
    """
    with tempfile.TemporaryDirectory(prefix="hpc-bench-") as folder:
        ready, log_path = Path(folder) / "ready.json", Path(folder) / "serve.log"
        # -P: a file of the working folder, which may be a model's, must not stand for a module.
        command = [sys.executable, "-P", "-m", "hpc_cli", "serve", "--port", "0", "--ready-file", str(ready)]
        command += [*serve_options, *(["--", model] if model is not None else [])]
        with _termination_unwinds():
            with log_path.open("wb") as log:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603
            try:
                about = _wait(process, ready, log_path)
                with _last_words(process, log_path):
                    yield Subject(url=str(about["url"]), about=about)
            finally:
                _end(process)


@contextmanager
def _last_words(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    """Add the end of the log to a failure whose cause is that the server died."""
    try:
        yield
    except CommandError as error:
        try:
            code = process.wait(SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            raise error from None
        raise CommandError(f"{error}. The server ended with code {code}; {_tail(log)}") from error


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Let SIGTERM end the block like an exception, as the server that it started must not outlive it."""

    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(process: subprocess.Popen[bytes], ready: Path, log: Path) -> Mapping[str, Any]:
    give_up = time.monotonic() + SECONDS_TO_LOAD
    while time.monotonic() < give_up:
        if ready.exists():
            about: Mapping[str, Any] = json.loads(ready.read_text("utf-8"))
            return about
        if process.poll() is not None:
            raise CommandError(
                f"the server ended with code {process.returncode} before it answered; {_tail(log)}"
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)
    raise CommandError(f"the server was not ready after {SECONDS_TO_LOAD:.0f} s; {_tail(log)}")


def _tail(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return "its last words:\n" + "\n".join(f"  {line}" for line in lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        print(f"the server did not end within {SECONDS_TO_END:.0f} s of SIGTERM: killed", file=sys.stderr)
        process.kill()
        process.wait()
