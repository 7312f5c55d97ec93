"""The life of a lane (§6.4, §7.4-7.7): staged, activated, grown, committed."""

from __future__ import annotations

import numpy as np

from hpc_index import admission, captures
from hpc_index.admission import Candidate, Match, Needs
from hpc_index.cost import CostModel
from hpc_index.errors import PromptError
from hpc_index.ids import Int32Buffer, LaneId
from hpc_index.lane_state import LaneState
from hpc_index.records import (
    Copy,
    CopyKind,
    Grown,
    Lane,
    Plan,
    PromptView,
    Quote,
    Short,
    SnapshotKind,
    Stale,
    Stream,
    int32,
)
from hpc_index.snapshots import Snapshot
from hpc_index.store import Store
from hpc_index.taps import TapRules, plan_taps
from hpc_index.tree import Node, Residency

__all__ = ["activate", "commit", "grow", "next_event", "publish_blocks", "restore_copies", "stage"]


def stage(
    store: Store, cost: CostModel, lane_id: LaneId, quote: Quote, prompt: PromptView
) -> tuple[LaneState, list[Plan]] | Stale:
    """Re-validate a quote, pin its path, evict, reserve every page and the slot, start restores (§6.4)."""
    found = admission.match(store, cost, prompt)
    candidate = next((c for c in found.candidates if _is_source(c, quote)), None)
    if candidate is None:
        return Stale(f"the snapshot at {quote.reuse} is gone")
    total = admission.entitlement(store, len(prompt.tokens), quote.max_new)
    if total is None:
        return Stale("the pool is too small")
    need = admission.needs(store, candidate, found.keys, total)
    if admission.shortfall(store, candidate, need):
        return Stale("the pages were taken")
    if not store.slots.free:
        return Stale("the slots were taken")
    hold = store.hold(candidate.nodes, candidate.snapshot)
    # Pinned, the arithmetic of `shortfall` is what eviction finds.
    if not store.make_room(need.pages):
        store.release(hold)
        return Stale("the pages were taken")
    state = _new_lane(store, lane_id, quote, prompt, candidate, need)
    state.hold = hold
    store.epoch += 1
    store.counters.count("hits" if candidate.snapshot else "misses")
    store.counters.count("prompt_tokens", state.n)
    store.counters.count("reused_tokens", state.base)
    if candidate.snapshot is not None:
        store.snapshots.hit(candidate.snapshot)
    plans = _restore(store, state, candidate)
    _map(store, state, candidate, need)
    _plan_taps(store, state, found, candidate)
    state.event = next_event(store, state)
    return state, plans


def _is_source(candidate: Candidate, quote: Quote) -> bool:
    if candidate.snapshot is None:
        return quote.source is None
    return candidate.snapshot.id == quote.source


def _new_lane(
    store: Store, lane_id: LaneId, quote: Quote, prompt: PromptView, candidate: Candidate, need: Needs
) -> LaneState:
    n = len(prompt.tokens)
    tokens = np.zeros(n + min(quote.max_new, store.policy.window_tokens), np.int32)
    tokens[:n] = prompt.tokens
    rows = tuple(np.full(pages.size, -1, np.int32) for pages in store.pages)
    root = store.tree.open_root(prompt.cache_salt) if prompt.cacheable else None
    if root is not None:
        root.refs += 1
    path = list(candidate.nodes[: need.path])
    for node in path:
        node.refs += 1
    return LaneState(
        lane=Lane(lane_id, candidate.frontier, rows, store.slots.take_for_lane()),
        prompt=prompt,
        n=n,
        max_new=quote.max_new,
        root=root,
        path=path,
        tokens=tokens,
        frontiers=[max(0, candidate.frontier - pool.lag) for pool in store.geometry.pools],
        mapped=[need.total] * len(store.pages),
        base=candidate.frontier,
        source=candidate.snapshot,
        hold=store.hold((), None),
        mark=candidate.frontier,
    )


def _restore(store: Store, state: LaneState, candidate: Candidate) -> list[Plan]:
    """Bring from the host what the device lacks; note every restore that the content waits for."""
    snapshot = candidate.snapshot
    absent = [n for n in candidate.nodes if n.device is Residency.ABSENT]
    tail = snapshot if snapshot is not None and not snapshot.tail_on_device else None
    for node in absent:
        node.pages, node.device = store.take_bundle(), Residency.FILLING
    if tail is not None:
        tail.pages, tail.tail_device = store.take_bundle(), Residency.FILLING
    copies = restore_copies(store, absent, tail)
    image = snapshot is not None and snapshot.slot < 0
    if image and snapshot is not None:
        src = np.array(snapshot.slabs[: store.geometry.image_slabs], np.int32)
        copies.append(Copy(CopyKind.SLABS_TO_SLOT, src, int32(state.lane.slot)))
    plans: list[Plan] = []
    if copies:
        plan, flight = store.transfers.launch(Stream.RESTORE, copies)
        flight.hold = store.hold(candidate.nodes, snapshot)
        flight.fills, flight.tail, flight.nbytes = tuple(absent), tail is not None, candidate.nbytes
        for node in absent:
            node.filling = plan.ticket
        if tail is not None:
            tail.filling = plan.ticket
        if image:
            flight.lane, state.slot_ticket = state, plan.ticket
            state.waits.add(plan.ticket)
        plans.append(plan)
        store.counters.count("restores")
        store.counters.count("restored_bytes", candidate.nbytes)
    state.waits.update(n.filling for n in candidate.nodes if n.filling is not None)
    if snapshot is not None and snapshot.filling is not None:
        state.waits.add(snapshot.filling)
    for ticket in state.waits:
        store.transfers.open[ticket].waiters.append(state)
    return plans


def restore_copies(store: Store, blocks: list[Node], tail: Snapshot | None) -> list[Copy]:
    """SLAB_TO_PAGE copies of blocks in path order, then of a tail, a copy a pool."""
    copies = []
    slabs = [n.slab for n in blocks] + ([tail.slabs[-1]] if tail is not None else [])
    if not slabs:
        return []
    for pool in range(len(store.pages)):
        pages = [n.pages[pool] for n in blocks] + ([tail.pages[pool]] if tail is not None else [])
        copies.append(
            Copy(CopyKind.SLAB_TO_PAGE, np.array(slabs, np.int32), np.array(pages, np.int32), pool=pool)
        )
    return copies


def _map(store: Store, state: LaneState, candidate: Candidate, need: Needs) -> None:
    """Fill the rows: shared pages of the path, then private pages up to the entitlement."""
    for pool, (row, shared) in enumerate(zip(state.lane.pages, need.shared, strict=True)):
        row[:shared] = [n.pages[pool] for n in candidate.nodes[:shared]]
        row[shared : need.total] = store.pages[pool].take(need.total - shared)


def _plan_taps(store: Store, state: LaneState, found: Match, candidate: Candidate) -> None:
    if state.root is None or not store.slots.limit:
        return
    policy = store.policy
    rules = TapRules(
        limit=policy.taps_per_request,
        ladder=policy.tap_ladder_tokens,
        min_gap=policy.tap_min_gap_tokens,
        spacing=store.block,
        unit=store.geometry.unit,
        junction=policy.junction_tokens,
    )
    source = candidate.snapshot
    taps = plan_taps(
        state.n,
        state.base,
        state.prompt.hints,
        found.frontiers,
        state.prompt.spans,
        rules,
        echoes=source is not None and source.kind is SnapshotKind.ENDPOINT,
        matched=found.blocks * store.block,
    )
    state.taps = list(taps)
    store.counters.count("taps_planned", len(taps))


def activate(store: Store, state: LaneState) -> list[Plan]:
    """Build the lane's state and private pages from its source (§6.4), after the restores they come from.

    A plan without copies (the image came from the host, nothing else to copy) only orders compute work
    after the restore. The source stays pinned until the plan lands.
    """
    snapshot = state.source
    slot = int32(state.lane.slot)
    copies: list[Copy] = []
    if snapshot is None:
        copies.append(Copy(CopyKind.ZERO_SLOT, np.empty(0, np.int32), slot))
    elif snapshot.slot >= 0:
        copies.append(Copy(CopyKind.SLOT_TO_SLOT, int32(snapshot.slot), slot))
    for i, pool in enumerate(store.geometry.pools):
        b = _shared(state, i)
        columns = state.base - pool.lag - b * store.block
        if columns > 0 and snapshot is not None:
            nodes = state.hold.nodes
            pages = nodes[b].pages if b < len(nodes) else snapshot.pages
            if pages:
                dst = int32(int(state.lane.pages[i][b]))
                copies.append(Copy(CopyKind.PAGE_TO_PAGE, int32(pages[i]), dst, pool=i, columns=columns))
    plan, flight = store.transfers.launch(Stream.COMPUTE, copies, tuple(sorted(state.waits)))
    flight.hold, state.hold = state.hold, store.hold((), None)
    flight.waiters.append(state)
    state.staged = False
    return [plan]


def _shared(state: LaneState, pool: int) -> int:
    """Blocks of a fresh lane's row that are the tree's."""
    row = state.lane.pages[pool]
    count = 0
    for node in state.path:
        if not node.pages or node.pages[pool] != row[count]:
            break
        count += 1
    return count


def grow(store: Store, state: LaneState, tokens: int) -> Grown | Short:
    """Map every position below frontier + tokens in each pool, evicting cache only (§9.5); all or nothing."""
    blocks = -(-(state.lane.frontier + tokens) // store.block)
    if all(blocks <= m for m in state.mapped):
        return Grown()
    smallest = min(pages.size for pages in store.pages)
    need = [max(0, blocks - m) for m in state.mapped]
    missing = max(store.missing(need), blocks - smallest)
    if missing > 0:
        store.counters.count("grow_short")
        return Short(missing, 0 if blocks > smallest else min(missing, store.landing()))
    store.make_room(need)
    for i, (row, n) in enumerate(zip(state.lane.pages, need, strict=True)):
        row[state.mapped[i] : state.mapped[i] + n] = store.pages[i].take(n)
        state.mapped[i] += n
    store.epoch += 1
    store.counters.count("grown_pages", max(need))
    return Grown()


def next_event(store: Store, state: LaneState) -> int:
    """The frontier before which a commit has nothing to do but to take tokens.

    With something due at every commit (restores in flight, captures unpublished) it is the next token.
    """
    if state.root is None:
        return 1 << 62
    if state.pending or state.waits:
        return 0
    block_end = store.block * (len(state.path) + 1) + store.lead
    if state.taps:
        # Flexible taps are due before the last chunk, so every prefill boundary is looked at.
        return 0
    return block_end


def commit(store: Store, state: LaneState, new: Int32Buffer, frontiers: tuple[int, ...]) -> tuple[Plan, ...]:
    """Take committed tokens; publish the blocks that all pools have, capture due taps (§7.4, §7.6)."""
    lane = state.lane
    begin = lane.frontier
    end = begin + len(new)
    _check_commit(store, state, new, frontiers, end)
    state.append(new)
    lane.frontier = end
    state.frontiers[:] = frontiers
    if end < state.event or state.root is None:
        return ()
    if not state.doomed and not state.waits:
        publish_blocks(store, state)
    copies: list[Copy] = []
    taken = captures.due_taps(store, state, copies)
    plans = captures.launch_captures(store, copies, taken)
    plans += captures.publish_pending(store, state)
    state.event = next_event(store, state)
    return tuple(plans)


def _check_commit(
    store: Store, state: LaneState, new: Int32Buffer, frontiers: tuple[int, ...], end: int
) -> None:
    begin = state.lane.frontier
    if begin < state.n:
        overlap = min(end, state.n) - begin
        if not np.array_equal(new[:overlap], state.tokens[begin : begin + overlap]):
            raise PromptError(f"commit: tokens at [{begin}, {begin + overlap}) are not the prompt's")
    if len(frontiers) != len(state.frontiers):
        raise PromptError(f"commit: {len(frontiers)} frontiers given; there are {len(state.frontiers)} pools")
    for i, pool in enumerate(store.geometry.pools):
        if not state.frontiers[i] <= frontiers[i] <= max(0, end - pool.lag):
            raise PromptError(
                f"commit: pool {pool.name} is at {frontiers[i]}; it must lie in "
                f"[{state.frontiers[i]}, {max(0, end - pool.lag)}]"
            )
        if state.mapped[i] * store.block < end - pool.lag:
            raise PromptError(
                f"commit: frontier {end} is past the {state.mapped[i]} blocks mapped in pool {pool.name}"
            )


def publish_blocks(store: Store, state: LaneState) -> None:
    """Put every block that all pools have committed into the tree (§7.6)."""
    limit = min(state.frontiers) // store.block
    if state.root is None or len(state.path) >= limit:
        return
    first = len(state.path)
    keys = state.keys(store.block, store.lead, first)
    parent = state.path[-1] if state.path else state.root
    for b in range(first, limit):
        key, ahead = keys.key(b), keys.ahead(b)
        rows = tuple(int(row[b]) for row in state.lane.pages)
        node = store.tree.find(parent, key, ahead)
        if node is None:
            node = store.tree.insert(parent, key, ahead, rows)
            store.counters.count("published_blocks")
        elif node.device is Residency.ABSENT:
            node.pages, node.device = rows, Residency.RESIDENT
            store.counters.count("adopted_blocks")
        else:
            store.counters.count("duplicates")
        node.refs += 1
        store.lru.discard(node)
        state.path.append(node)
        parent = node
    store.epoch += 1
