"""Gated delta nets (Qwen3-Next, Qwen3.5) in plain torch: a short convolution, then a matrix per head that each token
decays and corrects.

A sequence's state lies in a slot of its own: the convolution's last inputs and the matrices. There is no GPU kernel.
Source of the rule: arXiv 2412.06464; of its form in chunks, section 3.3; of the layout, transformers 5.23
modeling_qwen3_next.py and modeling_qwen3_5.py.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.kv_cache import LayerKV
from engine.recurrent import check_one_rank, move_on
from engine.step import StepTensors
from kvplan.models.spec import DeltaNet

if TYPE_CHECKING:
    from engine.layers import Builder

CHUNK = 64  # tokens whose corrections are solved for at once
NORM_EPS = 1e-6  # of queries and keys


class DeltaNetLayer:
    """Projections, convolution, rule, gated norm and output; its weights lie whole on one rank."""

    def __init__(self, builder: "Builder", name: str, facts: DeltaNet, hidden: int, norm_eps: float) -> None:
        """Raises UnsupportedModelError for several ranks."""
        check_one_rank(builder.tp, name)
        self.facts, self.norm_eps = facts, norm_eps
        values = facts.v_heads * facts.v_dim
        whole = slice(None)
        rows, gates = [("in_proj_qkvz", facts.channels + values)], [("in_proj_ba", 2 * facts.v_heads)]
        if not facts.by_key_head:
            rows, gates = [("in_proj_qkv", facts.channels), ("in_proj_z", values)], [("in_proj_b", facts.v_heads)]
            gates.append(("in_proj_a", facts.v_heads))
        self.in_proj, self.gates = (
            builder.outputs([(f"{name}.{part}", count, whole) for part, count in parts], hidden)
            for parts in (rows, gates)
        )
        self.kernel = builder.empty(facts.channels, 1, facts.kernel)
        builder.source.fill(self.kernel, f"{name}.conv1d.weight", tuple(self.kernel.shape))
        self.decay = builder.vector(f"{name}.A_log", facts.v_heads, dtype=torch.float32)
        self.dt_bias = builder.vector(f"{name}.dt_bias", facts.v_heads)
        self.norm = builder.norm(f"{name}.norm", facts.v_dim)
        self.out_proj = builder.inputs(f"{name}.out_proj", hidden, values, whole)

    def __call__(self, x: torch.Tensor, step: StepTensors, kv: LayerKV) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; moves each sequence's state on by its tokens."""
        facts = self.facts
        mixed, z, beta, log_decay = self._project(x)
        out = x.new_empty(x.shape[0], facts.v_heads, facts.v_dim, dtype=torch.float32)

        def rule(turned: torch.Tensor, rows: slice, states: torch.Tensor, *, is_chunk: bool) -> torch.Tensor:
            if not is_chunk:
                out[rows], states = step_rule(*self._heads(turned), beta[rows], log_decay[rows], states)
                return states
            out[rows], state = chunk_rule(*self._heads(turned), beta[rows], log_decay[rows], states[0])
            return state[None]

        move_on(mixed, step, kv, self.kernel, None, rule)
        return self.out_proj(self._normed(out.to(x.dtype), z).flatten(1))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v in a row [num_tokens, channels], z like the output, beta and log decay [num_tokens, v_heads])."""
        facts = self.facts
        if facts.by_key_head:
            heads_per_key = facts.v_heads // facts.k_heads  # value heads of a key head, which lie beside it
            parts = self.in_proj(x).unflatten(-1, (facts.k_heads, -1))
            q, k, v, z = parts.split(
                [facts.k_dim, facts.k_dim, heads_per_key * facts.v_dim, heads_per_key * facts.v_dim], -1
            )
            b, a = self.gates(x).unflatten(-1, (facts.k_heads, -1)).split([heads_per_key, heads_per_key], -1)
            mixed = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1)
        else:
            mixed, z = self.in_proj(x).split([facts.channels, facts.v_heads * facts.v_dim], -1)
            b, a = self.gates(x).chunk(2, -1)
        log_decay = -self.decay.exp() * F.softplus(a.flatten(1).float() + self.dt_bias)
        return mixed, z.reshape(-1, facts.v_heads, facts.v_dim), b.flatten(1).sigmoid(), log_decay

    def _heads(self, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [num_tokens, v_heads, dim] float32, queries and keys of length 1, queries scaled."""
        facts = self.facts
        width = facts.k_heads * facts.k_dim
        q, k, v = turned.float().split([width, width, facts.v_heads * facts.v_dim], -1)
        q, k = (_unit(part.unflatten(-1, (facts.k_heads, -1))) for part in (q, k))
        heads_per_key = facts.v_heads // facts.k_heads
        q, k = q.repeat_interleave(heads_per_key, 1) * facts.k_dim**-0.5, k.repeat_interleave(heads_per_key, 1)
        return q, k, v.unflatten(-1, (facts.v_heads, -1))

    def _normed(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each head's values, times the sigmoid-weighted gate."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        return ((self.norm * wide.to(x.dtype)).float() * F.silu(z.float())).to(x.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def step_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token of each of several sequences: (outputs, states after it), all float32.

    q, k             [num_seqs, heads, k_dim]; v [num_seqs, heads, v_dim]
    beta, log_decay  [num_seqs, heads]
    states           [num_seqs, heads, v_dim, k_dim]
    """
    states = states * log_decay.exp()[..., None, None]
    correction = (v - (states * k[..., None, :]).sum(-1)) * beta.float()[..., None]
    states = states + correction[..., None] * k[..., None, :]
    return (states * q[..., None, :]).sum(-1), states


def chunk_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several tokens of one sequence, CHUNK at a time: the same as step_rule for each, rounding apart.

    q, k             [num_tokens, heads, k_dim]; v [num_tokens, heads, v_dim]
    beta, log_decay  [num_tokens, heads]
    state            [heads, v_dim, k_dim] before the first
    """
    outputs, carried = [], state.transpose(-1, -2)  # [heads, k_dim, v_dim]
    for start in range(0, q.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        queries, keys, values = (x[part].transpose(0, 1) for x in (q, k, v))  # [heads, tokens, dim]
        weight = beta[part].float().T[..., None]
        decay = log_decay[part].T.cumsum(-1)  # [heads, tokens], of each token since the chunk began
        between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        system = ((keys * weight) @ keys.transpose(-1, -2) * between).tril(-1)
        known = torch.cat([values * weight, keys * weight * decay.exp()[..., None]], -1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        new, old = solved.split([values.shape[-1], keys.shape[-1]], -1)
        new = new - old @ carried
        inside = (queries @ keys.transpose(-1, -2) * between) @ new
        outputs.append((queries * decay.exp()[..., None]) @ carried + inside)
        last = decay[..., -1:]
        carried = carried * last.exp()[..., None]
        carried = carried + (keys * (last - decay).exp()[..., None]).transpose(-1, -2) @ new
    return torch.cat(outputs, 1).transpose(0, 1), carried.transpose(-1, -2)
