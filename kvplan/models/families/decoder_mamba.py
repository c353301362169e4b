"""Computation of models with Mamba 2. Nemotron-H: in each layer Mamba 2, attention without positions, or a plain MLP.
Granite 4: in each layer Mamba 2 or attention, then an MLP or experts beside it. LFM2: a short convolution or attention,
then an MLP.

Source: transformers 5.23, models/nemotron_h/configuration_nemotron_h.py and modeling_nemotron_h.py, the same of
granitemoehybrid and lfm2; vLLM 0.33, model_executor/models/nemotron_h.py and granitemoehybrid.py, which do not bound
time steps either.
"""

from collections.abc import Mapping
from typing import Any

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.config import Config
from kvplan.models.families.decoder_rope import positive, read_rotary
from kvplan.models.families.dense import heads_of
from kvplan.models.families.hybrid import GRANITE_LAYERS, granite_types, lfm2_full_layers, lfm2_inner, nemotron_pattern
from kvplan.models.spec import (
    Decoder,
    DecoderLayer,
    GatedMlp,
    HeadAttention,
    Mamba2,
    MoeMlp,
    PlainMlp,
    PlainMoe,
    ShortConv,
    TensorNames,
)

NEMOTRON_H: Mapping[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "use_conv_bias": True,
    "conv_kernel": 4,
    "routed_scaling_factor": 1.0,
}
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
    keys = ("n_groups", "ssm_state_size", "conv_kernel")
    mamba = _mamba(config, config.count("mamba_num_heads"), config.count("mamba_head_dim"), keys)
    head_dim = heads_of(config).head_dim
    layers = {
        "M": DecoderLayer(mamba, None),
        "*": DecoderLayer(HeadAttention(scale=head_dim**-0.5, rotary=None), None),
    }
    if "-" in pattern:
        layers["-"] = DecoderLayer(None, PlainMlp(config.count("intermediate_size"), bias=config.flag("mlp_bias")))
    if "E" in pattern:
        layers["E"] = DecoderLayer(None, _plain_experts(config))
    return Decoder(tuple(layers[letter] for letter in pattern), positive(config, "layer_norm_epsilon"), names=NAMES)


def _plain_experts(config: Config) -> PlainMoe:
    if config.flag("mlp_bias") or config.count("n_shared_experts", default=1, low=0) != 1:
        raise UnsupportedModelError(
            config.where, "the engine runs experts without a gate only with one shared expert and without biases",
            "choose another model",
        )  # fmt: skip
    experts = PlainMoe(
        num_experts=config.count("n_routed_experts"),
        top_k=config.count("num_experts_per_tok"),
        inner=config.count("moe_intermediate_size"),
        shared_inner=config.count("moe_shared_expert_intermediate_size"),
        latent=config.maybe_count("moe_latent_size"),
        renormalize=config.flag("norm_topk_prob", True),
        scale=positive(config, "routed_scaling_factor"),
        groups=config.count("n_group", default=1),
        top_groups=config.count("topk_group", default=1),
    )
    count, groups = experts.num_experts, experts.groups
    if count % groups or experts.top_groups > groups or experts.top_k > count // groups * experts.top_groups:
        problem = f"leaves no choice of {experts.top_k} from {experts.top_groups} of {groups} groups of {count} experts"
        raise config.fail("num_experts_per_tok", problem, "correct the config")
    return experts


GRANITE: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 2048, "mamba_conv_bias": True,
    "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
}  # fmt: skip
GRANITE_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "mamba_proj_bias": (False,), "position_embedding_type": ("rope", "nope"),
    "normalization_function": ("rmsnorm",), "attention_bias": (False,),
}  # fmt: skip
GRANITE_NAMES = TensorNames(state="mamba", mlp="shared_mlp")


def read_granite(config: Config) -> Decoder:
    """Read the computation of a granitemoehybrid config; defaults are already filled in."""
    rotated = config.values.get("position_embedding_type") == "rope"
    rotary = read_rotary(config, "granitemoehybrid", heads_of(config).head_dim) if rotated else None
    full = HeadAttention(scale=positive(config, "attention_multiplier"), rotary=rotary)
    kinds = [GRANITE_LAYERS.get(name) for name in granite_types(config)]
    mixers: dict[str | None, HeadAttention | Mamba2] = {"attention": full}
    if "mamba" in kinds:
        heads = config.count("mamba_n_heads")
        inner = config.count("mamba_expand", default=2) * config.count("hidden_size")
        head_dim = config.count("mamba_d_head", default=inner // heads)
        mixers["mamba"] = _mamba(config, heads, head_dim, ("mamba_n_groups", "mamba_d_state", "mamba_d_conv"))
    mlp = _granite_mlp(config)
    return Decoder(
        tuple(DecoderLayer(mixers[kind], mlp) for kind in kinds),
        positive(config, "rms_norm_eps"),
        embedding_scale=positive(config, "embedding_multiplier"),
        residual_scale=positive(config, "residual_multiplier"),
        logit_divisor=positive(config, "logits_scaling"),
        names=GRANITE_NAMES,
    )


def _granite_mlp(config: Config) -> GatedMlp | MoeMlp:
    shared, count = config.count("shared_intermediate_size"), config.count("num_local_experts", default=0, low=0)
    if not count:
        return GatedMlp(shared, "silu", joined="input_linear", down="output_linear")
    top_k = config.count("num_experts_per_tok")
    if top_k > count:
        raise config.fail("num_experts_per_tok", f"must be at most {count} ({top_k})", "correct the config")
    return MoeMlp(
        count, top_k, config.count("intermediate_size"), "silu", scoring="softmax", renormalize=True, names="granite",
        shared_inner=shared,
    )  # fmt: skip


LFM2: Mapping[str, Any] = {"norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_position_embeddings": 128_000}
LFM2_NAMES = TensorNames(
    final_norm="embedding_norm", state="conv", mlp="feed_forward", before_attention="operator_norm",
    before_mlp="ffn_norm",
)  # fmt: skip


def read_lfm2(config: Config) -> Decoder:
    """Read the computation of an lfm2 config; defaults are already filled in."""
    head_dim, hidden = heads_of(config).head_dim, config.count("hidden_size")
    kernel = config.count("conv_L_cache", default=3, low=2)
    conv = ShortConv(config.count("conv_dim", default=hidden), kernel, config.flag("conv_bias"))
    names = ("out_proj", "q_layernorm", "k_layernorm")
    full = HeadAttention(head_dim**-0.5, read_rotary(config, "lfm2", head_dim), qk_norm="head", names=names)
    mlp = GatedMlp(lfm2_inner(config, "lfm2"), "silu", gate="w1", up="w3", down="w2")
    is_full = lfm2_full_layers(config, config.num_layers())
    return Decoder(
        tuple(DecoderLayer(full if flag else conv, mlp) for flag in is_full),
        positive(config, "norm_eps"),
        names=LFM2_NAMES,
    )


def _mamba(config: Config, heads: int, head_dim: int, keys: tuple[str, str, str]) -> Mamba2:
    """keys: of groups, state and kernel."""
    groups, state, kernel = keys
    conv_bias = config.flag("mamba_conv_bias", config.flag("use_conv_bias", True))
    mamba = Mamba2(heads, head_dim, config.count(groups), config.count(state), config.count(kernel), conv_bias)
    if heads % mamba.groups:
        raise config.fail(groups, f"must divide the {heads} heads of Mamba ({mamba.groups})", "correct the config")
    return mamba
