"""How many threads torch should use on a CPU: measured at start, a number for each phase.

Decode is a chain of small products, where handing work to another thread can cost more than it saves;
prefill is few large ones, where it pays. Both numbers may differ because a switch is cheap:
`torch.set_num_threads` takes 0.1 us, and a change of team about 10 us at the next product.

torch keeps the number per calling thread. The thread that computes must set it, not the one that measured.
Another number of threads may sum in another order: within a process each phase keeps its own, so that
results are the same from run to run only if the choice is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import attrs
import torch

__all__ = ["Measure", "ThreadChoice", "ThreadTiming", "candidates", "choose_threads", "torch_measure"]

# A larger team must earn its cores, which others may need: it has to be this much faster.
_WORTHWHILE = 0.9
# Past this factor in both phases the machine is oversubscribed, and still larger teams only get worse.
_HOPELESS = 1.5
# Decode is measured on 8 layers of width 256, or fewer of a larger width; past 1,024 threads pay alike.
_LAYERS = 8
_WIDTH = 256
_WIDEST = 1024
# Prefill on fewer layers and many rows: on a busy machine every product waits once for the slowest thread,
# and the measurement has to end all the same.
_PREFILL_LAYERS = 2
_PREFILL_ROWS = 512
_MOST_REPEATS = 10


@attrs.frozen
class ThreadTiming:
    """Seconds of one decode-like and one prefill-like piece of work at `threads` threads."""

    threads: int
    decode: float
    prefill: float


@attrs.frozen
class ThreadChoice:
    """Threads for each phase, with what was measured.

    timings: in the order measured. unmeasured: candidates left out, because time ran out or because
    smaller ones had already become slower. seconds: what the measurement took.
    """

    decode: int
    prefill: int
    timings: tuple[ThreadTiming, ...]
    unmeasured: tuple[int, ...]
    seconds: float

    def summary(self) -> str:
        """One line for the start log."""
        measured = ", ".join(
            f"{t.threads}: {t.decode * 1e3:.2f}/{t.prefill * 1e3:.2f} ms" for t in self.timings
        )
        skipped = f"; not measured: {', '.join(map(str, self.unmeasured))}" if self.unmeasured else ""
        return f"decode {self.decode}, prefill {self.prefill} (threads: decode/prefill {measured}{skipped})"


Measure: TypeAlias = Callable[[int], ThreadTiming]
"""Runs both pieces of work at the given number of threads."""


def candidates(cores: int) -> tuple[int, ...]:
    """1, 2, 4 … below `cores`, and `cores`."""
    if cores < 1:
        raise ValueError(f"cores is {cores}; it must be at least 1")
    return (*(2**i for i in range((cores - 1).bit_length())), cores)


def choose_threads(
    cores: int,
    measure: Measure,
    *,
    budget: float = 0.25,
    clock: Callable[[], float] = time.perf_counter,
) -> ThreadChoice:
    """The fewest threads of each phase that are within a tenth of the fastest measured.

    cores: most threads to consider. budget: seconds after which no further candidate is measured; the
    first one always is. Sets nothing: the caller does, in the thread that computes.
    """
    begin = clock()
    timings: list[ThreadTiming] = []
    waiting = list(candidates(cores))
    while waiting and (not timings or (clock() - begin < budget and not _hopeless(timings))):
        timings.append(measure(waiting.pop(0)))
    return ThreadChoice(
        decode=_fewest([(t.threads, t.decode) for t in timings]),
        prefill=_fewest([(t.threads, t.prefill) for t in timings]),
        timings=tuple(timings),
        unmeasured=tuple(waiting),
        seconds=clock() - begin,
    )


def _fewest(times: list[tuple[int, float]]) -> int:
    fastest = min(seconds for _, seconds in times)
    return min(threads for threads, seconds in times if seconds * _WORTHWHILE <= fastest)


def _hopeless(timings: list[ThreadTiming]) -> bool:
    last = timings[-1]
    return last.decode > _HOPELESS * min(t.decode for t in timings) and last.prefill > _HOPELESS * min(
        t.prefill for t in timings
    )


def torch_measure(
    dtype: torch.dtype,
    hidden: int,
    *,
    slice_seconds: float = 0.012,
    clock: Callable[[], float] = time.perf_counter,
) -> Measure:
    """A `Measure` on torch: products of the shapes that a model of this width and dtype runs.

    slice_seconds: time for each phase of each candidate, after one run that is not counted. The fastest
    of the runs counts: whatever else the machine does can only add. The calling thread's number of threads
    is put back after each measurement.
    """
    hidden = min(hidden, _WIDEST)
    layers = min(_LAYERS, max(1, _LAYERS * _WIDTH**2 // hidden**2))
    weights = [torch.full((rows, hidden), 1e-3, dtype=dtype) for rows in (3 * hidden, hidden)]
    one, many = (torch.full((rows, hidden), 1e-3, dtype=dtype) for rows in (1, _PREFILL_ROWS))

    def chain(rows: torch.Tensor, layers: int) -> None:
        for _ in range(layers):
            for weight in weights:
                torch.nn.functional.linear(rows, weight)

    def measure(threads: int) -> ThreadTiming:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with torch.no_grad():
                return ThreadTiming(
                    threads=threads,
                    decode=_fastest(lambda: chain(one, layers), slice_seconds, clock),
                    prefill=_fastest(lambda: chain(many, min(layers, _PREFILL_LAYERS)), slice_seconds, clock),
                )
        finally:
            torch.set_num_threads(before)

    return measure


def _fastest(work: Callable[[], None], seconds: float, clock: Callable[[], float]) -> float:
    work()
    begin = clock()
    fastest = float("inf")
    for _ in range(_MOST_REPEATS):
        start = clock()
        work()
        end = clock()
        fastest = min(fastest, end - start)
        if end - begin >= seconds:
            break
    return fastest
