"""Match, choice and capacity (§6.1-6.3): what a prompt could resume from, and what of it fits."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from hpc_index.cost import CostModel
from hpc_index.keys import BlockKeys, token_bytes
from hpc_index.records import PromptView, Quote, Readiness, Reason
from hpc_index.snapshots import Snapshot
from hpc_index.store import Store
from hpc_index.taps import inside_span
from hpc_index.tree import Node

__all__ = ["Candidate", "Match", "Needs", "entitlement", "match", "needs", "quote", "rank", "shortfall"]


@attrs.frozen(eq=False)
class Candidate:
    """One way to start: from a snapshot, or from the root (snapshot None).

    nodes: the snapshot's path. host_blocks: how many of them are only on the host.
    nbytes: to restore, image and tail included. seconds: predicted, restore and prefill.
    """

    snapshot: Snapshot | None
    frontier: int
    nodes: tuple[Node, ...]
    host_blocks: int
    nbytes: int
    seconds: float


@attrs.frozen(eq=False)
class Match:
    """The cached path of a prompt, and every way to start.

    path: blocks equal to the prompt's. blocks: their number, plus one if a block equals the prompt's last
    matched one except for what followed it (lagging pools). candidates: best first, the root among them.
    """

    keys: BlockKeys
    path: tuple[Node, ...]
    blocks: int
    candidates: tuple[Candidate, ...]

    @property
    def frontiers(self) -> tuple[int, ...]:
        """Frontiers of all snapshots that the prompt could resume from."""
        return tuple(c.frontier for c in self.candidates if c.snapshot is not None)


@attrs.frozen
class Needs:
    """Pages that a start from a candidate takes, and what it leaves shared.

    total: blocks mapped in each pool. shared: blocks of each pool's row that stay the tree's.
    pages: to be taken from each pool, restore destinations included.
    path: how many of the candidate's blocks the lane's path begins with.
    """

    total: int
    shared: tuple[int, ...]
    pages: tuple[int, ...]
    path: int


def match(store: Store, cost: CostModel, prompt: PromptView) -> Match:
    """Walk the prompt's blocks from its root, exactly compared, and collect snapshots with F <= n - 1."""
    n = len(prompt.tokens)
    keys = BlockKeys(token_bytes(prompt.tokens), prompt.extras, store.block, store.lead)
    found = [Candidate(None, 0, (), 0, 0, cost.prefill_seconds(0, n))]
    root = store.tree.root(prompt.cache_salt) if prompt.cacheable else None
    path: list[Node] = []
    deepest = 0
    if root is not None:
        _collect(store, cost, prompt, keys, root, (), 0, found)
        parent, host_blocks = root, 0
        for b in range((n - 1) // store.block):
            twins = [t for t in store.tree.alike(parent, keys.key(b)) if t.usable]
            if not twins:
                break
            deepest = b + 1
            ahead = keys.ahead(b)
            before = tuple(path) if any(t.snapshots for t in twins) else ()
            for twin in twins:
                here = host_blocks + (0 if twin.on_device else 1)
                if twin.snapshots:
                    _collect(store, cost, prompt, keys, twin, (*before, twin), here, found)
            same = next((t for t in twins if t.ahead == ahead), None)
            if same is None:
                break
            host_blocks += 0 if same.on_device else 1
            path.append(same)
            parent = same
    return Match(keys, tuple(path), deepest, rank(found))


def _collect(
    store: Store,
    cost: CostModel,
    prompt: PromptView,
    keys: BlockKeys,
    anchor: Node,
    nodes: tuple[Node, ...],
    host_blocks: int,
    found: list[Candidate],
) -> None:
    n = len(prompt.tokens)
    begin = store.block * (anchor.depth + 1)
    for s in anchor.snapshots:
        if s.frontier > n - 1 or not s.valid or inside_span(s.frontier, prompt.spans):
            continue
        if s.tail and s.tail != keys.between(begin, s.frontier):
            continue
        nbytes = host_blocks * store.block_bytes
        nbytes += store.geometry.image_bytes if s.slot < 0 else 0
        nbytes += 0 if s.tail_on_device else store.block_bytes
        seconds = cost.restore_seconds(nbytes) + cost.prefill_seconds(s.frontier, n - s.frontier)
        found.append(Candidate(s, s.frontier, nodes, host_blocks, nbytes, seconds))


def rank(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """By predicted seconds, then fewer transferred bytes, then deeper (D2)."""
    return tuple(sorted(candidates, key=lambda c: (c.seconds, c.nbytes, -c.frontier)))


def entitlement(store: Store, n: int, max_new: int) -> int | None:
    """Blocks that a lane is promised in every pool (D7); None if the smallest pool has too few.

    The prompt and the output window must fit; the cushion is cut where a pool ends.
    """
    output = min(max_new, store.policy.window_tokens)
    smallest = min(pages.size for pages in store.pages)
    least = -(-(n + output) // store.block)
    if least > smallest:
        return None
    return min(smallest, -(-(n + output + store.policy.cushion_tokens) // store.block))


def needs(store: Store, candidate: Candidate, keys: BlockKeys, total: int) -> Needs:
    """Pages of a start from `candidate` with `total` blocks mapped.

    A pool's own frontier is F - lag, and what lies past it must be private, since the lane rewrites it
    (design §2). The last block of an aligned frontier is not the lane's at all if another token followed
    there: its copy joins the tree as a block of its own.
    """
    path = len(candidate.nodes)
    snapshot = candidate.snapshot
    if store.lead and path and snapshot is not None and not snapshot.tail:
        last = candidate.nodes[-1]
        if last.ahead != keys.ahead(path - 1):
            path -= 1
    shared = tuple(
        max(0, min(path, (candidate.frontier - pool.lag) // store.block)) for pool in store.geometry.pools
    )
    tail = 1 if snapshot is not None and not snapshot.tail_on_device else 0
    pages = tuple(total - s + candidate.host_blocks + tail for s in shared)
    return Needs(total, shared, pages, path)


def shortfall(store: Store, candidate: Candidate, need: Needs) -> int:
    """Pages missing in the worst pool, the candidate's own entries not evictable (§6.3); 0 if it fits."""
    own = sum(1 for n in candidate.nodes if n.lru)
    if candidate.snapshot is not None and candidate.snapshot.lru:
        own += 1
    return store.missing(need.pages, own)


def quote(store: Store, cost: CostModel, prompt: PromptView, max_new: int, lane_free: bool) -> Quote:
    """What admission would do now. The root decides what is blocked and what can never start."""
    found = match(store, cost, prompt)
    n = len(prompt.tokens)
    total = entitlement(store, n, max_new)
    chosen: Candidate | None = None
    short = 0
    if total is not None:
        for candidate in found.candidates:
            missing = shortfall(store, candidate, needs(store, candidate, found.keys, total))
            if not missing:
                chosen = candidate
                break
            if candidate.snapshot is None:
                short = missing
    readiness, blocked = Readiness.READY, None
    if total is None:
        readiness, blocked = Readiness.PERMANENTLY_INFEASIBLE, Reason.POOL_TOO_SMALL
    elif not lane_free:
        readiness, blocked = Readiness.TEMPORARILY_BLOCKED, Reason.NO_LANE
    elif chosen is None:
        landing = store.landing() >= short
        readiness, blocked = (
            Readiness.TEMPORARILY_BLOCKED,
            (Reason.FILLING if landing else Reason.NO_PAGES),
        )
    elif not store.slots.free:
        # Slots of lanes that ended while their restore was in flight (§6.5).
        readiness, blocked = Readiness.TEMPORARILY_BLOCKED, Reason.FILLING
    best = chosen or found.candidates[0]
    return Quote(
        readiness=readiness,
        blocked_by=blocked,
        stopped_by=_stopped(store, prompt, found, best),
        source=best.snapshot.id if best.snapshot else None,
        reuse=best.frontier,
        matched=max(found.blocks * store.block, best.frontier),
        restore_bytes=best.nbytes,
        max_new=max_new,
        epoch=store.epoch,
    )


def _stopped(store: Store, prompt: PromptView, found: Match, chosen: Candidate) -> Reason:
    n = len(prompt.tokens)
    if not prompt.cacheable:
        return Reason.NOT_CACHEABLE
    if chosen.frontier >= (n - 1) - (n - 1) % store.geometry.unit and chosen.frontier > 0:
        return Reason.COMPLETE
    place = found.candidates.index(chosen)
    if any(c.frontier > chosen.frontier for c in found.candidates[:place]):
        return Reason.CAPACITY
    if any(c.frontier > chosen.frontier for c in found.candidates[place + 1 :]):
        return Reason.COST
    if not found.blocks and not chosen.frontier:
        return Reason.EMPTY
    if found.blocks > chosen.frontier // store.block:
        return Reason.NO_SNAPSHOT
    return Reason.DIVERGED
