"""LFM2's short convolution between two gates, in plain torch: its last inputs are all the state there is.

Source: transformers 5.23 modeling_lfm2.py.
"""

from typing import TYPE_CHECKING

import torch

from engine.kv_cache import LayerKV
from engine.recurrent import check_one_rank, move_on
from engine.step import StepTensors
from kvplan.models.spec import ShortConv

if TYPE_CHECKING:
    from engine.layers import Builder


class ShortConvLayer:
    """Projection, gate, convolution, gate and output; its weights lie whole on one rank."""

    def __init__(self, builder: "Builder", name: str, facts: ShortConv, hidden: int) -> None:
        """Raises UnsupportedModelError for several ranks."""
        check_one_rank(builder.tp, name)
        whole, width = slice(None), facts.channels
        self.in_proj = builder.outputs([(f"{name}.in_proj", 3 * width, whole)], hidden, bias=facts.bias)
        self.kernel = builder.empty(width, 1, facts.kernel)
        builder.source.fill(self.kernel, f"{name}.conv.weight", tuple(self.kernel.shape))
        self.conv_bias = builder.vector(f"{name}.conv.bias", width) if facts.bias else None
        self.out_proj = builder.inputs(f"{name}.out_proj", hidden, width, whole, bias=facts.bias)

    def __call__(self, x: torch.Tensor, step: StepTensors, kv: LayerKV) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; moves each sequence's state on by its tokens."""
        before, after, values = self.in_proj(x).chunk(3, -1)
        out = torch.empty_like(values)

        def rule(turned: torch.Tensor, rows: slice, states: torch.Tensor, *, is_chunk: bool) -> torch.Tensor:
            out[rows] = turned
            return states

        move_on(before * values, step, kv, self.kernel, self.conv_bias, rule, activate=lambda convolved: convolved)
        return self.out_proj(out.mul_(after))
