"""Computation of Nemotron-H: in each layer Mamba 2, attention without positions, or a plain MLP.

Source: transformers 5.23, models/nemotron_h/configuration_nemotron_h.py and modeling_nemotron_h.py; vLLM 0.33,
model_executor/models/nemotron_h.py, which does not bound time steps from below either.
"""

from collections.abc import Mapping
from typing import Any

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.config import Config
from kvplan.models.families.decoder_rope import positive
from kvplan.models.families.dense import heads_of
from kvplan.models.families.hybrid import nemotron_pattern
from kvplan.models.spec import Decoder, DecoderLayer, HeadAttention, Mamba2, PlainMlp, TensorNames

NEMOTRON_H: Mapping[str, Any] = {"layer_norm_epsilon": 1e-5, "use_conv_bias": True, "conv_kernel": 4}
NEMOTRON_H_ONLY: dict[str, tuple[Any, ...]] = {
    "use_bias": (False,), "mamba_proj_bias": (False,), "attention_bias": (False,), "residual_in_fp32": (False,),
    "mamba_hidden_act": ("silu",), "mlp_hidden_act": ("relu2",), "sliding_window": (),
}  # fmt: skip
NAMES = TensorNames(
    embedding="embeddings", final_norm="norm_f", attention="mixer", state="mixer", mlp="mixer", before_attention="norm",
    before_mlp="norm",
)  # fmt: skip


def read_nemotron_h(config: Config) -> Decoder:
    """Read the computation of a nemotron_h config; defaults are already filled in."""
    pattern = nemotron_pattern(config)
    if "E" in pattern:
        raise UnsupportedModelError(
            config.where, f"layer {pattern.index('E')} has experts without a gate, which the engine cannot run",
            "choose another model",
        )  # fmt: skip
    mamba = Mamba2(
        heads=config.count("mamba_num_heads"),
        head_dim=config.count("mamba_head_dim"),
        groups=config.count("n_groups"),
        state=config.count("ssm_state_size"),
        kernel=config.count("conv_kernel"),
        conv_bias=config.flag("mamba_conv_bias", config.flag("use_conv_bias", True)),
    )
    if mamba.heads % mamba.groups:
        raise config.fail(
            "n_groups", f"must divide mamba_num_heads, {mamba.heads} ({mamba.groups})", "correct the config"
        )
    head_dim = heads_of(config).head_dim
    layers = {
        "M": DecoderLayer(mamba, None),
        "*": DecoderLayer(HeadAttention(scale=head_dim**-0.5, rotary=None), None),
    }
    if "-" in pattern:
        layers["-"] = DecoderLayer(None, PlainMlp(config.count("intermediate_size"), bias=config.flag("mlp_bias")))
    return Decoder(tuple(layers[letter] for letter in pattern), positive(config, "layer_norm_epsilon"), names=NAMES)
