"""Hunyuan 4: sparse latent attention with gated heads and sinks, between copies of the residual stream.

Source: vLLM 0.33 models/hy_v4; compared with its parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable
from dataclasses import replace

from kvplan.models.families.blocks import SpecDraft, column, vector
from kvplan.models.families.config import Config
from kvplan.models.families.deepseek_v4 import full_precision
from kvplan.models.families.mla import read_with
from kvplan.models.families.moe import Moe
from kvplan.models.spec import Part, Place, Weight


def streams(hidden: int, copies: int) -> tuple[Weight, ...]:
    """What mixes the copies before attention and before the MLP."""
    return tuple(
        weight
        for part in ("attn", "mlp")
        for weight in (
            full_precision(f"hc_{part}_layer.hc_fn", copies * hidden, 2 * copies, "mlp"),
            vector(f"hc_{part}_layer.hc_base", 2 * copies, "mlp", dtype="float32"),
            vector(f"hc_{part}_layer.hc_scale", 2, "mlp", dtype="float32"),
        )
    )


def read(config: Config, model_type: str) -> SpecDraft:
    router = Moe(shared="n_shared_experts", router_dtype="float32", correction="counted")
    draft = read_with(config, router, model_type)
    hidden, heads, copies = draft.hidden_size, draft.num_heads, config.count("hc_mult", default=4)
    extra = (
        vector("self_attn.learnable_sink_param", heads, "attention", split=True, dtype="float32"),
        column("self_attn.linear_gate", hidden, (Part(heads, config.count("v_head_dim")),), "attention"),
        *streams(hidden, copies),
    )
    draft.layer_weights = [(*weights, *extra) for weights in draft.layer_weights]
    head = (
        full_precision("model.hc_head_fn", copies * hidden, copies, "mlp"),
        vector("model.hc_head_base", copies, "mlp", dtype="float32"),
        vector("model.hc_head_scale", 1, "mlp", dtype="float32"),
    )
    draft.other_weights += [replace(weight, place=Place.LAST) for weight in head]
    return draft


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {"hy_v4": read}
