"""Mamba 2 in plain torch: a short convolution, then a matrix per head that each token decays and adds to.

A sequence's state lies in a slot: the convolution's last inputs and the matrices. There is no GPU kernel. Source of the
rule and of its form in chunks: arXiv 2405.21060, section 6; of the layout, transformers 5.23 modeling_nemotron_h.py.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.kv_cache import LayerKV
from engine.recurrent import check_one_rank, move_on
from engine.step import StepTensors
from kvplan.models.spec import Mamba2

if TYPE_CHECKING:
    from engine.layers import Builder

CHUNK = 64  # tokens whose outputs are computed at once


class Mamba2Layer:
    """Projection, convolution, rule, gated norm by groups and output; its weights lie whole on one rank."""

    def __init__(self, builder: "Builder", name: str, facts: Mamba2, hidden: int, norm_eps: float) -> None:
        """Raises UnsupportedModelError for several ranks."""
        check_one_rank(builder.tp, name)
        self.facts, self.norm_eps = facts, norm_eps
        whole = slice(None)
        rows = facts.inner + facts.channels + facts.heads  # gate, what is convolved, time steps
        self.in_proj = builder.outputs([(f"{name}.in_proj", rows, whole)], hidden)
        self.kernel = builder.empty(facts.channels, 1, facts.kernel)
        builder.source.fill(self.kernel, f"{name}.conv1d.weight", tuple(self.kernel.shape))
        self.conv_bias = builder.vector(f"{name}.conv1d.bias", facts.channels) if facts.conv_bias else None
        self.decay = builder.vector(f"{name}.A_log", facts.heads, dtype=torch.float32)
        self.skip = builder.vector(f"{name}.D", facts.heads)
        self.dt_bias = builder.vector(f"{name}.dt_bias", facts.heads)
        self.norm = builder.norm(f"{name}.norm", facts.inner)
        self.out_proj = builder.inputs(f"{name}.out_proj", hidden, facts.inner, whole)

    def __call__(self, x: torch.Tensor, step: StepTensors, kv: LayerKV) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; moves each sequence's state on by its tokens."""
        facts = self.facts
        gate, mixed, dt = self.in_proj(x).split([facts.inner, facts.channels, facts.heads], -1)
        dt = F.softplus(dt + self.dt_bias).float()
        log_decay = -self.decay.exp() * dt
        out = x.new_empty(x.shape[0], facts.heads, facts.head_dim, dtype=torch.float32)

        def rule(turned: torch.Tensor, rows: slice, states: torch.Tensor, *, is_chunk: bool) -> torch.Tensor:
            values, writes, reads = self._heads(turned)
            scaled = values * dt[rows, :, None]
            if is_chunk:
                y, state = chunk_rule(scaled, writes, reads, log_decay[rows], states[0])
                states = state[None]
            else:
                y, states = step_rule(scaled, writes, reads, log_decay[rows], states)
            out[rows] = y + values * self.skip.float()[:, None]
            return states

        move_on(mixed, step, kv, self.kernel, self.conv_bias, rule)
        return self.out_proj(self._normed(out.to(x.dtype).flatten(1), gate))

    def _heads(self, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(values [n, heads, head_dim], what they are written with, and read with [n, heads, state]), float32."""
        facts = self.facts
        width = facts.groups * facts.state
        values, writes, reads = turned.float().split([facts.inner, width, width], -1)
        heads_per_group = facts.heads // facts.groups
        writes, reads = (
            part.unflatten(-1, (facts.groups, -1)).repeat_interleave(heads_per_group, 1) for part in (writes, reads)
        )
        return values.unflatten(-1, (facts.heads, -1)), writes, reads

    def _normed(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm, by groups, of the heads' outputs times the sigmoid-weighted gate."""
        wide = (x.float() * F.silu(gate.float())).unflatten(-1, (self.facts.groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        normed: torch.Tensor = self.norm * wide.flatten(1).to(x.dtype)
        return normed


def step_rule(
    values: torch.Tensor, writes: torch.Tensor, reads: torch.Tensor, log_decay: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several sequences: (outputs [num_seqs, heads, head_dim], states after it), all float32.

    values         [num_seqs, heads, head_dim], times the time step; log_decay [num_seqs, heads]
    writes, reads  [num_seqs, heads, state]
    states         [num_seqs, heads, head_dim, state]
    """
    states = states * log_decay.exp()[..., None, None] + values[..., None] * writes[..., None, :]
    return (states * reads[..., None, :]).sum(-1), states


def chunk_rule(
    values: torch.Tensor, writes: torch.Tensor, reads: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several tokens of one sequence, CHUNK at a time: the same as step_rule for each, rounding apart.

    values         [num_tokens, heads, head_dim], times the time step; log_decay [num_tokens, heads]
    writes, reads  [num_tokens, heads, state]
    state          [heads, head_dim, state] before the first
    """
    outputs = []
    for start in range(0, values.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        v, b, c = (x[part].transpose(0, 1) for x in (values, writes, reads))  # [heads, tokens, dim]
        decay = log_decay[part].T.cumsum(-1)  # [heads, tokens], of each token since the chunk began
        between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        inside = (c @ b.transpose(-1, -2) * between) @ v
        outputs.append(inside + (c * decay.exp()[..., None]) @ state.transpose(-1, -2))
        last = decay[..., -1:]
        state = state * last.exp()[..., None] + (v * (last - decay).exp()[..., None]).transpose(-1, -2) @ b
    return torch.cat(outputs, 1).transpose(0, 1), state
