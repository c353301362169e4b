"""A feed-forward part without a gate (Nemotron-H), in plain torch: down(relu(up(x))^2)."""

from typing import TYPE_CHECKING

import torch

from kvplan.models.spec import PlainMlp

if TYPE_CHECKING:
    from engine.layers import Builder


class PlainMlpLayer:
    """Two linear layers, each with this rank's share of the channels."""

    def __init__(self, builder: "Builder", name: str, facts: PlainMlp, hidden: int) -> None:
        mine = builder.tp.share(facts.inner, "MLP channels")
        self.up_proj = builder.outputs([(f"{name}.up_proj", facts.inner, mine)], hidden, bias=facts.bias)
        self.down_proj = builder.inputs(f"{name}.down_proj", hidden, facts.inner, mine, bias=facts.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down_proj(self.up_proj(x).relu_().square_())
