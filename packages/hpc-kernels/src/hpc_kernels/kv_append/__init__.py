"""Writing new tokens' keys and values into KV pages."""

from hpc_kernels.kv_append.append import kv_append
from hpc_kernels.kv_append.reference import kv_append_reference

__all__ = ["kv_append", "kv_append_reference"]
