"""Computation of Qwen3-Next and Qwen3.5: gated delta nets, with gated full attention in every fourth layer.

Source: transformers 5.23, configuration_*.py and modeling_*.py of models/qwen3_next, qwen3_5 and qwen3_5_moe. Text has
one position per token, so that Qwen3.5's positions of three axes are plain ones.
"""

from collections.abc import Mapping
from typing import Any

from kvplan.models.families.config import Config
from kvplan.models.families.decoder_rope import positive, read_partial_rotary
from kvplan.models.families.dense import heads_of
from kvplan.models.families.moe import EXPERT_KEYS, sparse_layers
from kvplan.models.spec import Activation, Decoder, DecoderLayer, DeltaNet, GatedMlp, HeadAttention, MoeMlp

# Its config class's defaults for missing keys; sizes of states and experts are required.
QWEN3_NEXT: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0, "max_position_embeddings": 32_768,
    "norm_topk_prob": True, "num_experts_per_tok": 10, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN3_5: Mapping[str, Any] = {**QWEN3_NEXT, "num_experts_per_tok": 8}
QWEN_HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": QWEN3_NEXT, "qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_5,
}  # fmt: skip


def read_qwen_hybrid(config: Config, model_type: str, activation: Activation) -> Decoder:
    """Read the computation of a config of QWEN_HYBRIDS; defaults are already filled in."""
    num_layers = config.num_layers()
    types = config.per_layer_names("layer_types", num_layers)
    if types is None:
        every = config.count("full_attention_interval", default=4)
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    delta_net = DeltaNet(
        k_heads=config.count("linear_num_key_heads"),
        v_heads=config.count("linear_num_value_heads"),
        k_dim=config.count("linear_key_head_dim"),
        v_dim=config.count("linear_value_head_dim"),
        kernel=config.count("linear_conv_kernel_dim"),
        by_key_head=model_type == "qwen3_next",
    )
    if delta_net.v_heads % delta_net.k_heads:
        raise config.fail(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads, {delta_net.k_heads} ({delta_net.v_heads})",
            "correct the config",
        )
    mixers: dict[str, HeadAttention | DeltaNet] = {
        "linear_attention": delta_net,
        "full_attention": _attention(config),
    }
    has_experts = "num_experts" in config
    sparse = sparse_layers(config, num_layers) if has_experts else [False] * num_layers
    feed_forward: dict[bool, GatedMlp | MoeMlp] = {}
    if any(sparse):
        feed_forward[True] = _experts(config, activation)
    if not all(sparse):
        feed_forward[False] = GatedMlp(config.count("intermediate_size"), activation)
    return Decoder(
        layers=tuple(
            DecoderLayer(mixers[kind], feed_forward[is_sparse]) for kind, is_sparse in zip(types, sparse, strict=True)
        ),
        norm_eps=positive(config, "rms_norm_eps"),
        unit_offset=True,
    )


def _attention(config: Config) -> HeadAttention:
    head_dim = heads_of(config).head_dim
    bias = config.flag("attention_bias")
    rotary = read_partial_rotary(config, "qwen3_next", head_dim)
    return HeadAttention(scale=head_dim**-0.5, rotary=rotary, qkv_bias=bias, out_bias=bias, qk_norm="head", gated=True)


def _experts(config: Config, activation: Activation) -> MoeMlp:
    return MoeMlp(
        num_experts=config.count(*EXPERT_KEYS),
        top_k=config.count("num_experts_per_tok"),
        inner=config.count("moe_intermediate_size"),
        activation=activation,
        scoring="softmax",
        renormalize=config.flag("norm_topk_prob"),
        names="qwen",
        shared_inner=config.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
