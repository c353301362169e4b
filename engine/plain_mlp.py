"""Feed-forward parts without a gate, in plain torch: down(activation(up(x))), alone or as experts (Nemotron-H)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kvplan.models.spec import PlainActivation, PlainMlp, PlainMoe

if TYPE_CHECKING:
    from engine.layers import Builder


ACTIVATIONS: dict[PlainActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu2": lambda x: x.relu_().square_(),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu_,
}


class PlainMlpLayer:
    """Two linear layers, each with this rank's share of the channels."""

    def __init__(self, builder: "Builder", name: str, facts: PlainMlp, hidden: int) -> None:
        mine = builder.tp.share(facts.inner, "MLP channels")
        self.up_proj = builder.outputs([(f"{name}.{facts.up}", facts.inner, mine)], hidden, bias=facts.bias)
        self.down_proj = builder.inputs(f"{name}.{facts.down}", hidden, facts.inner, mine, bias=facts.bias)
        self.activation = ACTIVATIONS[facts.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down_proj(self.activation(self.up_proj(x)))


class PlainMoeLayer:
    """Experts without a gate beside a shared one; each expert is loaded as a linear layer of its kind is."""

    def __init__(self, builder: "Builder", name: str, facts: PlainMoe, hidden: int) -> None:
        self.facts, self.kernels = facts, builder.kernels
        mine, whole, width = builder.tp.share(facts.inner, "expert channels"), slice(None), facts.latent or hidden
        self.router = builder.empty(facts.num_experts, hidden)
        builder.source.fill(self.router, f"{name}.gate.weight", tuple(self.router.shape))
        self.correction = builder.vector(f"{name}.gate.e_score_correction_bias", facts.num_experts, dtype=torch.float32)
        names = [f"{name}.experts.{e}" for e in range(facts.num_experts)]
        self.up_projs = [builder.outputs([(f"{expert}.up_proj", facts.inner, mine)], width) for expert in names]
        self.down_projs = [builder.inputs(f"{expert}.down_proj", width, facts.inner, mine) for expert in names]
        self.shared = PlainMlpLayer(builder, f"{name}.shared_experts", PlainMlp(facts.shared_inner), hidden)
        self.enter = self.leave = None
        if facts.latent:
            self.enter = builder.outputs([(f"{name}.fc1_latent_proj", width, whole)], hidden)
            self.leave = builder.outputs([(f"{name}.fc2_latent_proj", hidden, whole)], width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        facts = self.facts
        ids, weights = self.kernels.route(
            F.linear(x.float(), self.router.float()), self.correction, top_k=facts.top_k, scoring="sigmoid",
            groups=facts.groups, top_groups=facts.top_groups, renormalize=facts.renormalize, scale=facts.scale,
        )  # fmt: skip
        inputs = x if self.enter is None else self.enter(x)
        out = torch.zeros_like(inputs, dtype=torch.float32)
        for e in ids.unique().tolist():
            rows, places = (ids == e).nonzero(as_tuple=True)
            y = self.down_projs[e](self.up_projs[e](inputs[rows]).relu_().square_())
            out.index_add_(0, rows, y.float() * weights[rows, places, None])
        y = out.to(x.dtype)
        return self.shared(x) + (y if self.leave is None else self.leave(y))
