"""The chunked gated delta rule: matrix products inside chunks of 64 tokens, one short recurrence over chunks.

Within a chunk with cumulative log-decay G and start state S, the writes u solve
(I + A) u = beta (v - e^G S^T k) with A[i, j] = beta_i e^(G_i - G_j) k_i.k_j below the diagonal.
With T = inv(I + A): u = T (beta v) - T (beta e^G k) S, and o = (q e^G) S + tril(q k^T e^(G_i - G_j)) u.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name it has everywhere)

from hpc_kernels.gated_delta_rule.triangular import inverse_unit_lower

__all__ = ["CHUNK", "chunk_gated_delta_rule"]

CHUNK = 64
"""Tokens of a chunk, and the grid of the spec's blocks (§7.2)."""


def _by_head(x: torch.Tensor, phase: int, padded: int) -> torch.Tensor:
    """[T, H, ...] as contiguous [chunks, H, CHUNK, ...]; zeros around T change nothing (§7.2)."""
    if padded != x.shape[0]:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (phase, padded - phase - x.shape[0]))
    return x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    phase: int = 0,
) -> torch.Tensor:
    """Outputs FP32 [T, HV, V] of one lane; `state` FP32 [HV, K, V] moves T tokens on, in place.

    q, k: FP32 [T, HK, K]; v: FP32 [T, HV, V]; g, beta: FP32 [T, HV], as in the reference. T >= 1.
    phase: position of the first token within a chunk, base % CHUNK for a lane whose state holds `base`
    tokens: the grid then lies where an unsplit run has it, so that a cut moves the sums of one chunk only.
    ValueError if it is not in [0, CHUNK).
    """
    if not 0 <= phase < CHUNK:
        raise ValueError(f"phase is {phase}: must be 0 to {CHUNK - 1}")
    T, HK, K = k.shape
    HV, V = v.shape[1:]
    group = HV // HK
    N = -(-(phase + T) // CHUNK)
    q, k, v = (_by_head(x, phase, N * CHUNK) for x in (q, k, v))
    g, beta = _by_head(g, phase, N * CHUNK), _by_head(beta, phase, N * CHUNK).unsqueeze(-1)

    G = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril_()
    # Above the diagonal G_i - G_j is positive and may overflow, so it is masked before the exponential.
    decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill_(~causal, -torch.inf).exp_()
    decay = decay.view(N, HK, group, CHUNK, CHUNK)
    k_t = k.transpose(-1, -2)
    kk, qk = (torch.matmul(x, k_t).unsqueeze(2) for x in (k, q))  # one product for a group of value heads
    A = (decay * kk).view(N, HV, CHUNK, CHUNK).mul_(beta)
    inverse = inverse_unit_lower(A.view(N * HV, CHUNK, CHUNK)).view(N, HV, CHUNK, CHUNK)

    e_G = G.exp().unsqueeze(-1)
    wide = (N, HK, group, CHUNK)
    by_group = (e_G * beta).view(*wide, 1)
    w = torch.matmul(inverse, (k.unsqueeze(2) * by_group).view(N, HV, CHUNK, K))
    u = torch.matmul(inverse, v * beta)
    to_end = (G[..., -1:] - G).exp_().view(*wide, 1)  # decay from each token to its chunk's end
    k_end = (k.unsqueeze(2) * to_end).view(N, HV, CHUNK, K).transpose(-1, -2)
    chunk_decay = e_G[:, :, -1:]

    # Start states of all chunks and the state at the end; u becomes the true writes on the way.
    states = state.new_empty(N + 1, HV, K, V)
    states[0] = state
    before = states[0]
    for w_i, u_i, k_i, decay_i, after in zip(
        w.unbind(), u.unbind(), k_end.unbind(), chunk_decay.unbind(), states[1:].unbind(), strict=True
    ):
        u_i.baddbmm_(w_i, before, alpha=-1)
        torch.mul(before, decay_i, out=after)
        before = after.baddbmm_(k_i, u_i)
    state.copy_(before)

    q_decayed = (q.unsqueeze(2) * e_G.view(*wide, 1)).view(N * HV, CHUNK, K)
    out = torch.bmm(q_decayed, states[:-1].view(N * HV, K, V))
    scores = decay.mul_(qk).view(N * HV, CHUNK, CHUNK)
    out.baddbmm_(scores, u.view(N * HV, CHUNK, V))
    return out.view(N, HV, CHUNK, V).transpose(1, 2).reshape(N * CHUNK, HV, V)[phase : phase + T]
