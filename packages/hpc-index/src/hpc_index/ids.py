"""Identifiers. Distinct types, so that a page number can never stand where a slab number belongs."""

from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Int32Array",
    "Int32Buffer",
    "LaneId",
    "SnapshotId",
    "Ticket",
    "UInt64Array",
]

LaneId = NewType("LaneId", int)
"""One running sequence. Never reused within the life of an index, so a stale id is an error, not a mix-up."""

SnapshotId = NewType("SnapshotId", int)
"""One snapshot. Never reused within the life of an index."""

Ticket = NewType("Ticket", int)
"""One copy plan on its way. Tickets grow by one a plan."""

Int32Array: TypeAlias = npt.NDArray[np.int32]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]

Int32Buffer: TypeAlias = Int32Array
"""Token ids. A one-dimensional contiguous int32 array: tokens never travel as Python lists."""
