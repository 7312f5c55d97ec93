"""The tap planner (§7.1, D3, D13), with hand-computed plans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_index.records import HintKind, Span, TapHint
from hpc_index.taps import PlannedTap, TapRules, TapSource, plan_taps

RULES = TapRules(limit=8, ladder=4096, min_gap=1024, spacing=64, junction=512)
HINTS = (
    TapHint(100, HintKind.STRUCTURAL),
    TapHint(5000, HintKind.MESSAGE),
    TapHint(9000, HintKind.MESSAGE),
    TapHint(21800, HintKind.MESSAGE),
    TapHint(29990, HintKind.MESSAGE),
    TapHint(30010, HintKind.OPENER),
    TapHint(12345, HintKind.EXPLICIT),
)


def split(taps: tuple[PlannedTap, ...]) -> tuple[list[int], list[int]]:
    return [t.position for t in taps if t.exact], [t.position for t in taps if not t.exact]


def test_all_sources_of_a_long_chat() -> None:
    """Exact at marker, opener and system end; the ladder at n - G 2^k, snapped to messages; no tail."""
    exact, flexible = split(plan_taps(30020, 0, HINTS, (), (), RULES))
    assert exact == [100, 12345, 30010]
    assert flexible == [13636, 21800, 25924]


def test_automatic_markers_are_structural_and_not_shared() -> None:
    """3000 stays an ordinary tap; 5000 absorbs the structural 5030 and becomes a Boundary for it."""
    hints = (
        TapHint(3000, HintKind.AUTOMATIC),
        TapHint(5000, HintKind.AUTOMATIC),
        TapHint(5030, HintKind.STRUCTURAL),
    )
    taps = {t.position: t for t in plan_taps(8000, 0, hints, (), (), RULES) if t.exact}
    assert set(taps) == {3000, 5000}
    assert not taps[3000].boundary
    assert taps[5000].boundary


def test_a_short_user_turn_keeps_the_earliest_of_its_cluster() -> None:
    """System end and opener 13 tokens apart give one tap, at the system end, and no prompt tail."""
    hints = (TapHint(1085, HintKind.STRUCTURAL), TapHint(1098, HintKind.OPENER))
    assert [t.position for t in plan_taps(1104, 0, hints, (), (), RULES)] == [1085]


def test_an_explicit_marker_is_never_dropped_for_its_neighbours() -> None:
    """2115 lies between a structural end and an opener and is kept beside the earlier one."""
    hints = (
        TapHint(2109, HintKind.STRUCTURAL),
        TapHint(2115, HintKind.EXPLICIT),
        TapHint(2117, HintKind.OPENER),
    )
    assert [t.position for t in plan_taps(2124, 0, hints, (), (), RULES)] == [2109, 2115]


def test_the_prompt_tail_is_flexible() -> None:
    """With nothing near the end, n - 1 is tapped at a chunk boundary."""
    taps = plan_taps(3000, 0, (TapHint(100, HintKind.STRUCTURAL),), (), (), RULES)
    assert split(taps) == ([100], [2999])


def test_exactly_a_block_before_is_too_near() -> None:
    """D3: something at most 64 tokens before drops a tap; 65 tokens before does not."""
    opener = (TapHint(1000, HintKind.OPENER),)
    assert 1000 not in {t.position for t in plan_taps(1001, 936, opener, (), (), RULES)}
    assert 1000 in {t.position for t in plan_taps(1001, 935, opener, (), (), RULES)}


def test_an_existing_snapshot_drops_the_opener_after_it() -> None:
    """A snapshot at 30000 serves what would leave at 30010."""
    assert 30010 not in {t.position for t in plan_taps(30020, 0, HINTS, (30000,), (), RULES)}


def test_a_tap_inside_media_moves_to_its_start() -> None:
    """Nothing may resume inside a span, so the marker's tap lies before it."""
    exact, _ = split(plan_taps(30020, 0, HINTS, (), (Span(12000, 13000),), RULES))
    assert 12000 in exact
    assert 12345 not in exact


def test_the_budget_goes_to_the_marker_first() -> None:
    """With one tap allowed, it is the client's."""
    rules = TapRules(limit=1, ladder=4096, min_gap=1024, spacing=64, junction=512)
    assert [t.position for t in plan_taps(30020, 0, HINTS, (), (), rules)] == [12345]


def test_a_long_prompt_has_few_ladder_taps() -> None:
    """240,000 tokens without hints: the tail and about log2(n / G) taps."""
    assert len(plan_taps(240_000, 0, (), (), (), RULES)) <= 7


def test_a_prompt_of_one_token_has_none() -> None:
    """Nothing lies below n - 1 = 0."""
    assert plan_taps(1, 0, HINTS, (), (), RULES) == ()


def test_a_client_that_echoes_needs_no_opener() -> None:
    """After an endpoint resume its own endpoint serves the next turn (§7.1)."""
    opener = (TapHint(2900, HintKind.OPENER),)
    sources = {t.source for t in plan_taps(3000, 2000, opener, (), (), RULES, echoes=True)}
    assert TapSource.OPENER not in sources


def test_the_junction_is_where_others_left() -> None:
    """D13: matched to 1280, resumed at 200: an exact Boundary at 1280, and none if it is near base or end."""
    taps = plan_taps(3000, 200, (), (), (), RULES, matched=1280)
    assert [(t.position, t.boundary) for t in taps if t.exact] == [(1280, True)]
    assert not [t for t in plan_taps(3000, 800, (), (), (), RULES, matched=1280) if t.exact]
    assert not [t for t in plan_taps(1340, 200, (), (), (), RULES, matched=1280) if t.exact]


hint = st.builds(TapHint, st.integers(0, 5000), st.sampled_from(HintKind))


@given(
    n=st.integers(1, 5000),
    base=st.integers(0, 4000),
    hints=st.lists(hint, max_size=8),
    existing=st.lists(st.integers(1, 5000), max_size=4),
    span=st.tuples(st.integers(0, 4000), st.integers(1, 900)),
    limit=st.integers(0, 8),
    unit=st.sampled_from([1, 4, 64]),
)
def test_every_plan_keeps_the_rules(
    n: int,
    base: int,
    hints: list[TapHint],
    existing: list[int],
    span: tuple[int, int],
    limit: int,
    unit: int,
) -> None:
    """Taps lie in (base, n - 1], on the unit, outside media, apart, within budget; the plan is a function."""
    base -= base % unit
    spans = (Span(span[0] - span[0] % unit, span[0] + span[1]),)
    rules = TapRules(limit, 512, 256, 64, unit, 128)
    taps = plan_taps(n, base, hints, existing, spans, rules, matched=base + 640)
    assert taps == plan_taps(n, base, tuple(reversed(hints)), existing, spans, rules, matched=base + 640)
    assert len(taps) <= limit
    positions = [t.position for t in taps]
    assert positions == sorted(set(positions))
    for tap in taps:
        assert base < tap.position <= n - 1
        assert tap.position % unit == 0
        assert not spans[0].begin < tap.position < spans[0].end
        assert tap.position not in existing


def test_the_junction_s_distances_are_exact() -> None:
    """D13: at least 512 tokens past the base, and more than 64 before the end."""

    def junctions(n: int, base: int) -> list[int]:
        taps = plan_taps(n, base, (), (), (), RULES, matched=1280)
        return [t.position for t in taps if t.source is TapSource.JUNCTION]

    assert (junctions(3000, 768), junctions(3000, 769)) == ([1280], [])
    assert (junctions(1345, 200), junctions(1344, 200)) == ([1280], [])


def test_of_one_source_the_deepest_comes_first() -> None:
    """Two markers and one tap: the later marker, which serves more."""
    rules = TapRules(limit=1, ladder=4096, min_gap=1024, spacing=64)
    hints = (TapHint(500, HintKind.EXPLICIT), TapHint(900, HintKind.EXPLICIT))
    assert [t.position for t in plan_taps(2000, 0, hints, (), (), rules)] == [900]


def test_boundaries_a_block_apart_are_two_clusters() -> None:
    """63 tokens apart they are one, at the earlier; 64 apart each has its tap (§7.1)."""

    def planned(opener: int) -> list[int]:
        hints = (TapHint(1000, HintKind.STRUCTURAL), TapHint(opener, HintKind.OPENER))
        return [t.position for t in plan_taps(opener + 10, 0, hints, (), (), RULES) if t.exact]

    assert planned(1063) == [1000]
    assert planned(1064) == [1000, 1064]


def test_a_ladder_tap_may_lie_exactly_the_gap_from_another() -> None:
    """n - G = 5904: a snapshot 1,024 tokens before it leaves it, one 1,023 before does not."""
    assert 5904 in {t.position for t in plan_taps(10_000, 0, (), (4880,), (), RULES)}
    assert 5904 not in {t.position for t in plan_taps(10_000, 0, (), (4881,), (), RULES)}


def test_a_marker_right_after_the_base_is_kept() -> None:
    """A client's marker is dropped for nothing that lies near it (D10)."""
    hints = (TapHint(130, HintKind.EXPLICIT),)
    assert 130 in {t.position for t in plan_taps(2000, 100, hints, (120,), (), RULES)}
