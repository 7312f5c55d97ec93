"""Progress of a long load: a bar on a terminal, a few plain lines anywhere else. On stderr."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType

import attrs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["LoadProgress"]

SECONDS_BETWEEN_LINES = 5.0
MIB = 1 << 20


@attrs.define
class LoadProgress:
    """A `progress(stage, done, total)` callback. `with LoadProgress() as progress:` cleans the bar up.

    A log file gets one line a stage, and one every five seconds of a stage that takes longer.
    """

    _console: Console = attrs.field(factory=lambda: Console(stderr=True))
    _bar: Progress | None = None
    _task: TaskID | None = None
    _stage: str | None = None
    _last_line: float = 0.0

    def __enter__(self) -> LoadProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of a stage are through."""
        if self._bar is None:
            self._line(stage, done, total)
            return
        if stage != self._stage:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(stage, total=total)
            self._stage = stage
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total)

    def _line(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        counted = f" {done / MIB:,.0f} of {total / MIB:,.0f} MiB" if stage == self._stage else ""
        with suppress(OSError):  # nobody reads stderr: no reason not to load
            print(f"{stage} ...{counted}", file=sys.stderr, flush=True)
        self._stage, self._last_line = stage, now
