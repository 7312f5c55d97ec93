"""The tree of blocks (§5.1-5.2): one node a block, below one root a namespace (D14)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs

from hpc_index.ids import Ticket
from hpc_index.keys import block_hash, root_hash

if TYPE_CHECKING:
    from hpc_index.snapshots import Snapshot

__all__ = ["Node", "Residency", "Tree"]


class Residency(enum.Enum):
    """Whether a copy exists in one tier."""

    ABSENT = "absent"
    FILLING = "filling"
    """The destination of a copy in flight."""
    RESIDENT = "resident"
    BROKEN = "broken"
    """Its restore failed while lanes map it. Never matched; dropped with the last of them."""


@attrs.define(eq=False)
class Node:
    """One block of a token path. Its key never changes; where its copies lie does (§10, invariant 2).

    parent: None for a root, which stands before the first block and holds nothing.
    depth: block index, -1 for a root. hash: chained lookup hash. key: exact tokens and media key.
    ahead: what follows the block as far as a lagging pool's last column was computed from it. Two blocks
        that differ in nothing else are two nodes, since that pool's pages differ.
    pages: one a pool while device is not ABSENT, else empty. slab: -1 while host is ABSENT.
    filling: the restore that brings the device copy, while FILLING.
    refs: lanes whose path it is on. pins: copies in flight that need it. Both count for every ancestor too.
    live_below: snapshots whose path includes it.
    lru, backed: its place in the device LRU, 0 while it is in none.
    """

    parent: Node | None
    depth: int
    hash: int
    key: bytes
    ahead: bytes = b""
    pages: tuple[int, ...] = ()
    device: Residency = Residency.ABSENT
    slab: int = -1
    host: Residency = Residency.ABSENT
    filling: Ticket | None = None
    refs: int = 0
    pins: int = 0
    live_below: int = 0
    lru: int = 0
    backed: bool = False
    children: dict[int, list[Node]] = attrs.field(factory=dict)
    snapshots: list[Snapshot] = attrs.field(factory=list)

    @property
    def held(self) -> bool:
        """Whether a lane or a copy needs it; if not, nothing below it is needed either."""
        return self.refs > 0 or self.pins > 0

    @property
    def on_device(self) -> bool:
        """Whether a lane may map its pages: resident, or on the way (design §2)."""
        return self.device is Residency.RESIDENT or self.device is Residency.FILLING

    @property
    def usable(self) -> bool:
        """Whether a match may pass through it."""
        return self.on_device or (self.host is Residency.RESIDENT and self.device is Residency.ABSENT)

    def up(self) -> Iterator[Node]:
        """The node and its ancestors, the root excluded."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def walk(self) -> Iterator[Node]:
        """The node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            for twins in node.children.values():
                stack.extend(twins)


class Tree:
    """Roots by namespace, and the lookup of a child: by hash, then by exact comparison.

    hasher gives the lookup hash of a child from its parent's hash and its key. A constant one makes every
    lookup a collision and changes no result.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.roots: dict[bytes, Node] = {}
        self.hasher: Callable[[int, bytes], int] = block_hash
        self.blocks = 0

    def root(self, cache_salt: bytes) -> Node | None:
        """The root of a namespace, None if nothing of it is kept."""
        return self.roots.get(cache_salt)

    def open_root(self, cache_salt: bytes) -> Node:
        """The root of a namespace, made if there is none."""
        root = self.roots.get(cache_salt)
        if root is None:
            root = Node(parent=None, depth=-1, hash=root_hash(cache_salt, self._seed), key=cache_salt)
            self.roots[cache_salt] = root
        return root

    def close_root(self, root: Node) -> None:
        """Forget a namespace of which nothing is left."""
        if not root.children and not root.snapshots and not root.held:
            self.roots.pop(root.key, None)

    def alike(self, parent: Node, key: bytes) -> list[Node]:
        """Children of that exact key. More than one only where a pool lags."""
        return [c for c in parent.children.get(self.hasher(parent.hash, key), ()) if c.key == key]

    def find(self, parent: Node, key: bytes, ahead: bytes) -> Node | None:
        """The child of that exact key with that continuation."""
        for child in parent.children.get(self.hasher(parent.hash, key), ()):
            if child.key == key and child.ahead == ahead:
                return child
        return None

    def insert(self, parent: Node, key: bytes, ahead: bytes, pages: tuple[int, ...]) -> Node:
        """A new child that owns `pages`, resident on the device."""
        found = self.hasher(parent.hash, key)
        node = Node(parent, parent.depth + 1, found, key, ahead, pages, Residency.RESIDENT)
        parent.children.setdefault(found, []).append(node)
        self.blocks += 1
        return node

    def detach(self, node: Node) -> None:
        """Take a node (and what hangs below it) out of its parent's children."""
        parent = node.parent
        if parent is None:
            return
        twins = parent.children[node.hash]
        twins.remove(node)
        if not twins:
            del parent.children[node.hash]
        self.blocks -= sum(1 for _ in node.walk())
        if parent.parent is None:
            self.close_root(parent)

    def nodes(self) -> Iterator[Node]:
        """Every block, parents first."""
        for root in self.roots.values():
            for node in root.walk():
                if node.parent is not None:
                    yield node
