"""A prefix index for hybrid language models: content-addressed KV blocks and sparse state snapshots."""

from hpc_index.cost import PRESETS, CostModel, preset
from hpc_index.index import PrefixIndex
from hpc_index.invariants import check_invariants
from hpc_index.policy import Policy
from hpc_index.taps import PlannedTap, TapRules, plan_taps

__all__ = [
    "PRESETS",
    "CostModel",
    "PlannedTap",
    "Policy",
    "PrefixIndex",
    "TapRules",
    "check_invariants",
    "plan_taps",
    "preset",
]
