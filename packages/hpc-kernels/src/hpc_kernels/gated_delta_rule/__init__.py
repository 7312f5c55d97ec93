"""The gated delta rule of Gated DeltaNet: the recurrence that defines it, its chunks, its single step."""

from hpc_kernels.gated_delta_rule.chunk import CHUNK, chunk_gated_delta_rule
from hpc_kernels.gated_delta_rule.gates import gates
from hpc_kernels.gated_delta_rule.recurrent import step_gated_delta_rule
from hpc_kernels.gated_delta_rule.reference import recurrent_gated_delta_rule

__all__ = [
    "CHUNK",
    "chunk_gated_delta_rule",
    "gates",
    "recurrent_gated_delta_rule",
    "step_gated_delta_rule",
]
