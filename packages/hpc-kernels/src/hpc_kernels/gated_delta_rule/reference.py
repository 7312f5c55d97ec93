"""The recurrence that defines the gated delta rule, one token at a time. Slow, and right in FP64."""

from __future__ import annotations

import torch

__all__ = ["recurrent_gated_delta_rule"]


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [T, HV, V], state after the last token [HV, K, V]), in the dtype of `state`; inputs stay.

    q, k: [T, HK, K], already normed and q scaled. v: [T, HV, V]. g: [T, HV], the logarithm of the decay.
    beta: [T, HV]. state: [HV, K, V] before the first token. Value head j reads q/k head j // (HV / HK).

    Per token: S <- exp(g) S; u = beta (v - S^T k), on the decayed S; S <- S + k u^T; o = S^T q. A token with
    k = v = g = beta = 0 therefore leaves S as it is (§7.2).
    """
    group = v.shape[1] // k.shape[1]
    q, k = (x.to(state.dtype).repeat_interleave(group, dim=1) for x in (q, k))
    v, g, beta = v.to(state.dtype), g.to(state.dtype), beta.to(state.dtype)
    out = torch.empty_like(v)
    for t in range(v.shape[0]):
        state = state * torch.exp(g[t])[:, None, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * u[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out, state
