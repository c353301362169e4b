"""Names and shapes of the tensors that a model has in a GGUF file, from its ModelSpec.

Source: the architectures of llama.cpp (commit 0c1e57098, src/models/*.cpp) and what its converter writes, compared with
files of 44 models (`tests/models/test_gguf_model.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.hf_config import text_of
from kvplan.models.spec import ModelSpec, RecurrentState, Weight

Shape = tuple[int, ...]
Named = tuple[str, Shape]

# model_type -> architecture of llama.cpp.
ARCHITECTURES: Final = {
    "llama": "llama", "mistral": "llama", "ministral3": "mistral3", "mixtral": "llama", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "gemma4_text": "gemma4",
    "phi3": "phi3", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "kimi_k2": "deepseek2",
    "glm4_moe_lite": "deepseek2", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2",
    "granite": "granite", "olmo2": "olmo2", "cohere": "command-r", "cohere2": "cohere2", "starcoder2": "starcoder2",
    "smollm3": "smollm3", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h", "mamba": "mamba", "lfm2": "lfm2",
}  # fmt: skip

# Role of a weight in its layer -> its tensors in a file, one for each part, or one for all of them.
ROLES: Final[dict[str, tuple[str, ...]]] = {
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "self_attn.qk_proj": ("attn_q", "attn_k"),
    "self_attn.v_slice": (),  # Gemma 4: the keys are the values
    "self_attn.o_proj": ("attn_output",),
    "self_attn.out_proj": ("attn_output",),
    "self_attn.q_norm": ("attn_q_norm",),
    "self_attn.q_layernorm": ("attn_q_norm",),
    "self_attn.k_layernorm": ("attn_k_norm",),
    "self_attn.k_norm": ("attn_k_norm",),
    "self_attn.sinks": ("attn_sinks",),
    "self_attn.q_proj": ("attn_q",),
    "self_attn.q_a_proj": ("attn_q_a",),
    "self_attn.fused_qkv_a_proj": ("attn_q_a", "attn_kv_a_mqa"),
    "self_attn.q_a_layernorm": ("attn_q_a_norm",),
    "self_attn.q_b_proj": ("attn_q_b",),
    "self_attn.kv_a_proj_with_mqa": ("attn_kv_a_mqa",),
    "self_attn.kv_a_layernorm": ("attn_kv_a_norm",),
    "input_layernorm": ("attn_norm",),
    "norm": ("attn_norm",),
    "operator_norm": ("attn_norm",),
    "ffn_norm": ("ffn_norm",),
    "pre_ff_layernorm": ("ffn_norm.",),
    "pre_feedforward_layernorm": ("ffn_norm",),
    "post_feedforward_layernorm": ("post_ffw_norm",),
    "pre_feedforward_layernorm_2": ("pre_ffw_norm_2",),
    "post_feedforward_layernorm_1": ("post_ffw_norm_1",),
    "post_feedforward_layernorm_2": ("post_ffw_norm_2",),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
    "mlp.up_proj": ("ffn_up",),
    "mlp.down_proj": ("ffn_down",),
    "mlp.gate": ("ffn_gate_inp",),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    "mlp.experts.w13": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.w2": ("ffn_down_exps",),
    "mlp.shared_expert_gate": ("ffn_gate_inp_shexp",),
    "router.proj": ("ffn_gate_inp",),
    "router.scale": ("ffn_gate_inp.scale",),
    "router.per_expert_scale": ("ffn_down_exps.scale",),
    "experts.w13": ("ffn_gate_up_exps",),
    "experts.w2": ("ffn_down_exps",),
    "linear_attn.conv1d": ("ssm_conv1d",),
    "linear_attn.A_log": ("ssm_a.",),
    "linear_attn.dt_bias": ("ssm_dt.bias",),
    "linear_attn.norm": ("ssm_norm",),
    "linear_attn.out_proj": ("ssm_out",),
    "mamba.in_proj": ("ssm_in",),
    "mamba.conv1d": ("ssm_conv1d",),
    "mamba.x_proj": ("ssm_x",),
    "mamba.dt_proj": ("ssm_dt",),
    "mamba.dt_bias": ("ssm_dt.bias",),
    "mamba.A": ("ssm_a.",),
    "mamba.D": ("ssm_d.",),
    "mamba.norm": ("ssm_norm",),
    "mamba.out_proj": ("ssm_out",),
    "conv.conv": ("shortconv.conv",),
    "conv.in_proj": ("shortconv.in_proj",),
    "conv.out_proj": ("shortconv.out_proj",),
}
for _stem in ("mlp.shared_expert", "mlp.shared_experts"):
    ROLES[f"{_stem}.gate_up_proj"] = ("ffn_gate_shexp", "ffn_up_shexp")
    ROLES[f"{_stem}.up_proj"] = ("ffn_up_shexp",)
    ROLES[f"{_stem}.down_proj"] = ("ffn_down_shexp",)
# Names of a layer's parts that stand for others: (start, its usual form).
STEMS: Final = (("feed_forward.", "mlp."), ("mixer.shared_experts", "mlp.shared_experts"))
SANDWICHED: Final = ("gemma2", "gemma3", "gemma4", "olmo2", "qwen3next", "qwen35", "qwen35moe", "glm4moe", "gpt-oss")
OUTSIDE: Final = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}


def architecture_of(spec: ModelSpec) -> str:
    """llama.cpp's name of the model's architecture; one that it or kvplan lacks is refused by name."""
    name = ARCHITECTURES.get(spec.model_type)
    if name is None or (name == "gemma4" and text_of(spec.config).get("hidden_size_per_layer_input")):
        raise UnsupportedModelError(
            spec.name, f"how model_type '{spec.model_type}' is laid out in a GGUF file is not known", "name the file"
        )
    if name == "nemotron_h" and any(weight.experts for layer in spec.layer_weights for weight in layer):
        return "nemotron_h_moe"
    return name


# Models whose layers for multi-token prediction the converter keeps -> the config's key for their number, and the
# number without it. Source: llama.cpp 0c1e57098, conversion/qwen.py and glm.py.
NEXTN: Final = {
    "glm4_moe": ("num_nextn_predict_layers", 0), "glm4_moe_lite": ("num_nextn_predict_layers", 0),
    "qwen3_next": ("mtp_num_hidden_layers", 1), "qwen3_5_text": ("mtp_num_hidden_layers", 0),
    "qwen3_5_moe_text": ("mtp_num_hidden_layers", 0),
}  # fmt: skip


def num_nextn(spec: ModelSpec, drafts: bool = False) -> int:
    """Layers for multi-token prediction that a file has after the model's own.

    drafts  the file is one to draft with: those of other models than GLM-4.5 are published with and without them
    """
    if spec.model_type not in NEXTN or not (drafts or spec.model_type == "glm4_moe"):
        return 0
    key, usual = NEXTN[spec.model_type]
    return int(text_of(spec.config).get(key) or usual)


def tensors_of(spec: ModelSpec, drafts: bool = False) -> list[Named]:
    """(name, shape in ggml's order) of every tensor of the language model, in a file's order."""
    architecture = architecture_of(spec)
    named = list(_outside(spec, architecture))
    for index, layer in enumerate(spec.layer_weights):
        named += _layer(spec, architecture, index, layer)
    for index in range(spec.num_layers, spec.num_layers + num_nextn(spec, drafts)):
        named += _layer(spec, architecture, index, spec.layer_weights[-1])
        named.append((f"blk.{index}.nextn.eh_proj.weight", (2 * spec.hidden_size, spec.hidden_size)))
        named += [(f"blk.{index}.nextn.{name}.weight", (spec.hidden_size,)) for name in ("enorm", "hnorm")]
        named.append((f"blk.{index}.nextn.shared_head_norm.weight", (spec.hidden_size,)))
    return named


def _outside(spec: ModelSpec, architecture: str) -> Iterator[Named]:
    for weight in spec.other_weights:
        if weight.group == "vision_audio":
            continue
        name = OUTSIDE.get(weight.name)
        if name is None:
            raise _unknown(spec, weight)
        if name == "output_norm" and architecture == "lfm2":
            name = "token_embd_norm"
        shape = (weight.outputs,) if weight.inputs == 1 else (weight.inputs, weight.outputs)
        yield f"{name}.weight", shape
        if weight.bias:
            yield f"{name}.bias", (weight.outputs,)
    yield from rope_tensors(spec, architecture)


def rope_tensors(spec: ModelSpec, architecture: str) -> Iterator[Named]:
    """Factors of the rotary frequencies, which the converter stores for some scalings."""
    config = text_of(spec.config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    head = config.get("head_dim") or spec.hidden_size // max(1, spec.num_heads)
    if kind == "llama3":
        yield "rope_freqs.weight", (head // 2,)
    elif architecture == "gemma4":
        yield "rope_freqs.weight", (config["global_head_dim"] // 2,)
    elif kind in ("longrope", "su"):
        half = int(head * (config.get("partial_rotary_factor") or 1)) // 2
        yield "rope_factors_long.weight", (half,)
        yield "rope_factors_short.weight", (half,)


def _layer(spec: ModelSpec, architecture: str, index: int, weights: tuple[Weight, ...]) -> Iterator[Named]:
    config = text_of(spec.config)
    for weight in weights:
        for name, shape in _weight(spec, architecture, weight, config):
            yield f"blk.{index}.{name}", shape
    if architecture == "gemma4":
        yield f"blk.{index}.layer_output_scale.weight", (1,)


def _weight(spec: ModelSpec, architecture: str, weight: Weight, config: Mapping[str, Any]) -> Iterator[Named]:
    """Tensors of one weight of a layer."""
    name = weight.name
    for stem, usual in STEMS:
        if name.startswith(stem):
            name = usual + name.removeprefix(stem)
    if name.startswith("mixer."):  # Nemotron-H: one mixer of any kind in each layer
        stems = {"attention": "self_attn.", "state": "mamba.", "norm": "mamba."}
        name = stems.get(weight.group, "mlp.") + name.removeprefix("mixer.")
    special = _special(spec, architecture, name, weight, config)
    if special is not None:
        yield from special
        return
    roles = ROLES.get(name)
    if name == "post_attention_layernorm":
        roles = ("post_attention_norm" if architecture in SANDWICHED else "ffn_norm",)
    if roles is None:
        raise _unknown(spec, weight)
    parts = [part.size for part in weight.parts] if len(roles) == len(weight.parts) else [weight.outputs]
    for role, outputs in zip(roles, parts, strict=len(roles) > 0):
        yield from _tensor(role, weight, outputs)


def _tensor(role: str, weight: Weight, outputs: int) -> Iterator[Named]:
    """A tensor and its bias; a role that ends in a dot has no `weight` after it, one with a dot inside is whole."""
    shape: Shape = (outputs,) if weight.inputs == 1 else (weight.inputs, outputs)
    copies = (weight.experts,) if weight.experts else ()
    whole = role.endswith((".bias", ".scale"))
    yield role.removesuffix(".") if role.endswith(".") else role if whole else f"{role}.weight", shape + copies
    if weight.bias:
        yield f"{role}.bias", (outputs, *copies)


def _special(
    spec: ModelSpec, architecture: str, name: str, weight: Weight, config: Mapping[str, Any]
) -> list[Named] | None:
    """Tensors whose shape or split differs from the weight's; None for any other weight."""
    hidden = weight.inputs
    if architecture == "phi3" and name == "self_attn.qkv_proj":
        return [("attn_qkv.weight", (hidden, weight.outputs))]
    if architecture == "phi3" and name == "mlp.gate_up_proj":
        return [("ffn_up.weight", (hidden, weight.outputs))]
    if name == "mlp.experts.w13" and len(weight.parts) == 1:  # experts without a gate
        return list(_tensor("ffn_up_exps", weight, weight.outputs))
    if name == "mlp.shared_expert_gate":
        return [("ffn_gate_inp_shexp.weight", (hidden,))]
    if name == "self_attn.kv_b_proj":
        nope, value, rank = config["qk_nope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
        return [
            ("attn_k_b.weight", (nope, rank, spec.num_heads)),
            ("attn_v_b.weight", (rank, value, spec.num_heads)),
        ]
    if name == "linear_attn.in_proj_qkvz":
        channels = _channels(spec)
        return [("attn_qkv.weight", (hidden, channels)), ("attn_gate.weight", (hidden, weight.outputs - channels))]
    if name == "linear_attn.in_proj_ba":
        if architecture == "qwen3next":
            return [("ssm_ba.weight", (hidden, weight.outputs))]
        return [(f"{role}.weight", (hidden, weight.outputs // 2)) for role in ("ssm_beta", "ssm_alpha")]
    if name in ("mamba.A", "mamba.D") and weight.inputs == 1 and architecture != "mamba":
        return [("ssm_" + name[-1].lower(), (1, weight.outputs))]
    if name == "mamba.norm":
        if architecture == "falcon-h1" and not config.get("mamba_rms_norm"):
            return []  # in the server's class, in no checkpoint
        groups = int(config.get("n_groups") or config.get("mamba_n_groups") or 1)
        return [("ssm_norm.weight", (weight.outputs // groups, groups))]
    return None


def _channels(spec: ModelSpec) -> int:
    """Channels of the convolution of a gated delta net: queries, keys and values."""
    states = (cache for layer in spec.layers for cache in layer if isinstance(cache, RecurrentState))
    return sum(part.size for part in next(states).convolution)


def _unknown(spec: ModelSpec, weight: Weight) -> UnsupportedModelError:
    return UnsupportedModelError(
        spec.name, f"what '{weight.name}' is called in a GGUF file is not known", "name the GGUF file"
    )
