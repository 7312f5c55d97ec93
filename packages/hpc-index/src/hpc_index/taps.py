"""Where a prompt's snapshots will lie (§7.1, D13): a pure function of the prompt, usable without an index."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import attrs

from hpc_index.records import HintKind, Span, TapHint

__all__ = ["PlannedTap", "TapRules", "TapSource", "inside_span", "plan_taps"]


class TapSource(enum.IntEnum):
    """Why a tap was planned, in the order in which candidates are accepted."""

    EXPLICIT = 1
    JUNCTION = 2
    OPENER = 3
    STRUCTURAL = 4
    TAIL = 5
    LADDER = 6


@attrs.frozen
class PlannedTap:
    """A snapshot to take after tokens [0, position).

    exact: ends a prefill chunk; otherwise it is taken at the chunk boundary that reaches it.
    boundary: other conversations may share it (published as Boundary, §9.3).
    """

    position: int
    exact: bool
    boundary: bool
    source: TapSource


@attrs.frozen
class TapRules:
    """The numbers of the plan, all in tokens.

    limit: most taps. ladder: G. min_gap: of ladder taps, on both sides. spacing: any other tap is dropped
    when something lies at most so far before it (D3; the block). unit: taps lie on multiples of it.
    junction: least distance of a junction tap from the base, 0 for none (D13).
    """

    limit: int
    ladder: int
    min_gap: int
    spacing: int
    unit: int = 1
    junction: int = 0


@attrs.frozen
class _Candidate:
    position: int
    source: TapSource
    boundary: bool


def plan_taps(
    n: int,
    base: int,
    hints: Iterable[TapHint],
    existing: Iterable[int],
    spans: Sequence[Span],
    rules: TapRules,
    *,
    echoes: bool = False,
    matched: int = 0,
) -> tuple[PlannedTap, ...]:
    """The taps of a prompt of n tokens resumed at `base`, by position, each in (base, n - 1].

    existing: frontiers of snapshots on the prompt's path. echoes: the request resumed from an endpoint, so
    its client returns replies token for token and the opener is not tapped. matched: tokens of the cached
    block path; past the base it marks where other prompts diverged (D13).
    """
    if n < 2 or rules.limit < 1:
        return ()
    last = n - 1
    hints = tuple(hints)

    def settle(position: int) -> int:
        settled, position = -1, min(position, last)
        while settled != position:
            settled = position
            position -= position % rules.unit
            for span in spans:
                if span.begin < position < span.end:
                    position = span.begin
        return settled

    semantic: list[_Candidate] = []
    candidates: list[_Candidate] = []
    for hint in hints:
        at = settle(hint.position)
        if hint.kind is HintKind.EXPLICIT:
            candidates.append(_Candidate(at, TapSource.EXPLICIT, boundary=True))
        elif hint.kind is HintKind.OPENER and not echoes:
            semantic.append(_Candidate(at, TapSource.OPENER, boundary=False))
        elif hint.kind in (HintKind.STRUCTURAL, HintKind.AUTOMATIC):
            shared = hint.kind is HintKind.STRUCTURAL
            semantic.append(_Candidate(at, TapSource.STRUCTURAL, boundary=shared))
    candidates += _cluster([c for c in semantic if c.position > base], rules.spacing)
    # D13: other prompts left this path at `matched`; a snapshot there serves the next one that does.
    junction = settle(min(matched, last - last % rules.spacing))
    if rules.junction and junction - base >= rules.junction and n - junction > rules.spacing:
        candidates.append(_Candidate(junction, TapSource.JUNCTION, boundary=True))
    candidates.append(_Candidate(settle(last), TapSource.TAIL, boundary=False))
    candidates += [
        _Candidate(settle(p), TapSource.LADDER, boundary=False) for p in _ladder(n, base, hints, rules)
    ]
    accepted: list[PlannedTap] = []
    present = {p for p in existing if p > base}
    present.add(base)
    for c in sorted(candidates, key=lambda c: (c.source, -c.position)):
        if len(accepted) == rules.limit:
            break
        if c.position <= base or c.position in present or _crowded(c, present, rules):
            continue
        present.add(c.position)
        exact = c.source not in (TapSource.TAIL, TapSource.LADDER)
        accepted.append(PlannedTap(c.position, exact, c.boundary, c.source))
    return tuple(sorted(accepted, key=lambda t: t.position))


def inside_span(position: int, spans: Iterable[Span]) -> bool:
    """Whether a position lies strictly inside a media span, where nothing may resume (§6.1)."""
    return any(span.begin < position < span.end for span in spans)


def _cluster(semantic: list[_Candidate], spacing: int) -> list[_Candidate]:
    """Of semantic candidates closer than `spacing` to the first of their run, keep only that one.

    It serves them all, and stays a Boundary if any that it replaces was one.
    """
    kept: list[_Candidate] = []
    for c in sorted(semantic, key=lambda c: (c.position, c.source)):
        if kept and c.position - kept[-1].position < spacing:
            kept[-1] = attrs.evolve(kept[-1], boundary=kept[-1].boundary or c.boundary)
        else:
            kept.append(c)
    return kept


def _ladder(n: int, base: int, hints: tuple[TapHint, ...], rules: TapRules) -> list[int]:
    """Positions n - G * 2^k above the base, snapped back to a message boundary within the gap."""
    messages = [h.position for h in hints if h.kind is HintKind.MESSAGE]
    gap = max(rules.min_gap, rules.spacing)
    positions = []
    reach = rules.ladder
    while reach < n and n - reach > base:
        target = n - reach
        before = max((m for m in messages if base < m <= target), default=None)
        positions.append(target if before is None or target - before >= gap else before)
        reach *= 2
    return positions


def _crowded(c: _Candidate, present: set[int], rules: TapRules) -> bool:
    if c.source is TapSource.EXPLICIT:
        return False
    if c.source is TapSource.LADDER:
        gap = max(rules.min_gap, rules.spacing)
        return any(abs(c.position - p) < gap for p in present)
    return any(0 <= c.position - p <= rules.spacing for p in present)
