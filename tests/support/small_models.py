"""Small random models of every family the engine runs, built by transformers: an oracle for logits and greedy tokens.

Every parameter is random, those that a fresh model has at 0 or 1 too (norms, biases, sinks, the router's correction),
so that a part left out or mapped wrongly changes the logits. Windows, softcaps and clamps are small enough to matter.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

AUTO: Any = transformers.AutoModelForCausalLM  # has untyped class methods
WINDOW = 12
VOCAB = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
BIASED = {"topk_method": "noaux_tc"}  # as published configs say it; transformers' class always has the routing bias
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.6}  # unlike, so that cos and sin are scaled too
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 7,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}

Build = Callable[[], Any]


def _of(config_class: Any, **changes: Any) -> Build:
    return lambda: config_class(**{**COMMON, **json.loads(json.dumps(changes))})  # transformers edits nested dicts


def _gemma3_multimodal() -> Any:
    """Text and a tiny image tower, whose weights a text-only loader must step over."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    text = _of(transformers.Gemma3TextConfig, **GEMMA3)().to_dict()
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3, boi_token_index=4,
        eoi_token_index=5,
    )  # fmt: skip


FAMILIES: dict[str, Build] = {
    "llama": _of(transformers.LlamaConfig),
    "llama_250": _of(transformers.LlamaConfig, vocab_size=250),  # a table that has to be padded
    "llama_tied": _of(transformers.LlamaConfig, tie_word_embeddings=True),
    "llama_bias": _of(transformers.LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama_llama3": _of(transformers.LlamaConfig, rope_parameters=LLAMA3_ROPE),
    "llama_linear": _of(
        transformers.LlamaConfig, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama_yarn": _of(transformers.LlamaConfig, head_dim=32, rope_parameters=YARN_ROPE),
    "mistral": _of(transformers.MistralConfig, sliding_window=WINDOW),
    "qwen2": _of(transformers.Qwen2Config),
    "qwen2_window": _of(
        transformers.Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": _of(transformers.Qwen3Config, head_dim=32, tie_word_embeddings=True),
    "mixtral": _of(transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "qwen3_moe": _of(
        transformers.Qwen3MoeConfig, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "qwen3_moe_mixed": _of(
        transformers.Qwen3MoeConfig, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        norm_topk_prob=False, mlp_only_layers=[1], attention_bias=True,
    ),
    "gemma2": _of(
        transformers.Gemma2Config, num_hidden_layers=4, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0, final_logit_softcapping=6.0, tie_word_embeddings=True,
    ),
    "gemma3_text": _of(transformers.Gemma3TextConfig, **GEMMA3),
    "gemma3": _gemma3_multimodal,
    "gpt_oss": _of(
        transformers.GptOssConfig, num_hidden_layers=4, head_dim=32, sliding_window=WINDOW, intermediate_size=64,
        num_local_experts=8, num_experts_per_tok=2, swiglu_limit=1.5,
        rope_parameters={**YARN_ROPE, "rope_theta": 150000.0, "truncate": False},
    ),
    "deepseek_v2": _of(transformers.DeepseekV2Config, **{**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v2_groups": _of(
        transformers.DeepseekV2Config, **DEEPSEEK, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        rope_parameters=DEEPSEEK_ROPE,
    ),
    "deepseek_v3": _of(
        transformers.DeepseekV3Config, **DEEPSEEK, **BIASED, n_group=2, topk_group=1, rope_parameters=DEEPSEEK_ROPE,
    ),
    "deepseek_v3_direct": _of(
        transformers.DeepseekV3Config, **{**DEEPSEEK, **BIASED, "q_lora_rank": None}, n_group=4, topk_group=2,
        attention_bias=True,
    ),
    "kimi_k2": _of(
        transformers.DeepseekV3Config, **DEEPSEEK, **BIASED, n_group=1, topk_group=1, rope_parameters=DEEPSEEK_ROPE,
    ),
}  # fmt: skip


QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5,
}  # fmt: skip
# As published: positions of three axes, of which text has one.
QWEN3_5: dict[str, Any] = {
    "mamba_ssm_dtype": "float32",  # as published configs state
    **{key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and key != "partial_rotary_factor"},
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
}  # fmt: skip
NEMOTRON_H = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
NEMOTRON_MOE: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4, "head_dim": 16,
    "n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8, "chunk_size": 16,
    "time_step_limit": (0.0, 1e9), "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
}  # fmt: skip
GRANITE_H: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_intermediate_size": 48,
    "intermediate_size": 40, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 16,
    "time_step_limit": (0.0, 1e9),
    "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 3.0,
}  # fmt: skip
# Of layers with recurrent states beside attention.
HYBRIDS: dict[str, Build] = {
    "qwen3_next": _of(transformers.Qwen3NextConfig, **QWEN3_NEXT),
    "qwen3_next_dense": _of(
        transformers.Qwen3NextConfig, **QWEN3_NEXT, mlp_only_layers=[0, 2], norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
    "nemotron_h": _of(
        transformers.NemotronHConfig, layers_block_type=NEMOTRON_H, num_hidden_layers=5, head_dim=16, n_groups=2,
        mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=8, chunk_size=16, time_step_limit=(0.0, 1e9),
    ),
    "nemotron_h_moe": _of(
        transformers.NemotronHConfig, **NEMOTRON_MOE, n_group=1, topk_group=1, routed_scaling_factor=2.5,
    ),
    "nemotron_h_latent": _of(
        transformers.NemotronHConfig, **NEMOTRON_MOE, n_group=2, topk_group=1, moe_latent_size=24, norm_topk_prob=False,
    ),
    "granite_h": _of(transformers.GraniteMoeHybridConfig, **GRANITE_H, num_local_experts=0),
    "granite_h_moe": _of(
        transformers.GraniteMoeHybridConfig, **GRANITE_H, num_local_experts=4, num_experts_per_tok=2, mamba_n_groups=2,
        position_embedding_type="rope",
    ),
    "lfm2": _of(
        transformers.Lfm2Config, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False,
        conv_bias=True, tie_word_embeddings=True,
    ),
    "qwen3_5": _of(transformers.Qwen3_5TextConfig, **QWEN3_5),
    "qwen3_5_moe": _of(transformers.Qwen3_5MoeTextConfig, **{**QWEN3_NEXT, **QWEN3_5}),
}  # fmt: skip


PARTLY_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
}  # fmt: skip
WINDOW_OF_THREE: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": WINDOW}  # the fourth is full
# Those that the engine knows by rows of traits (kvplan/models/families/decoder_dense.py).
ROWS: dict[str, Build] = {
    "qwen2_moe": _of(
        transformers.Qwen2MoeConfig, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=48, mlp_only_layers=[1],
    ),
    "phi3": _of(transformers.Phi3Config, rope_parameters=PARTLY_TURNED),
    **{
        f"phi3_{name}": _of(
            transformers.Phi3Config, original_max_position_embeddings=positions, rope_parameters=LONGROPE
        )
        for name, positions in (("short", 256), ("long", 64))  # engines of the tests run 256 tokens
    },
    "phi3_window": _of(transformers.Phi3Config, sliding_window=WINDOW, num_key_value_heads=4),
    "granite": _of(
        transformers.GraniteConfig, embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22,
        logits_scaling=3.0, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
    ),
    "olmo2": _of(transformers.Olmo2Config),
    "gemma": _of(transformers.GemmaConfig, head_dim=32, tie_word_embeddings=True),
    "cohere2": _of(transformers.Cohere2Config, **WINDOW_OF_THREE, tie_word_embeddings=True, logit_scale=0.25),
    "starcoder2": _of(transformers.Starcoder2Config, sliding_window=WINDOW),
    "starcoder2_plain": _of(transformers.Starcoder2Config, sliding_window=None, use_bias=False),
    "smollm3": _of(transformers.SmolLM3Config, no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    "glm4": _of(transformers.Glm4Config, head_dim=32, rope_parameters=PARTLY_TURNED),
    "exaone4": _of(transformers.Exaone4Config, **WINDOW_OF_THREE),
    "exaone4_full": _of(
        transformers.Exaone4Config, sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 3
    ),
    "seed_oss": _of(transformers.SeedOssConfig, head_dim=32),
    "glm4_moe": _of(
        transformers.Glm4MoeConfig, head_dim=32, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=2, topk_group=1, routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True,
        rope_parameters=PARTLY_TURNED,
    ),
    "glm4_moe_plain": _of(
        transformers.Glm4MoeConfig, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=False, rope_parameters={**PARTLY_TURNED, "partial_rotary_factor": 1.0},
    ),
    "olmo3": _of(
        transformers.Olmo3Config, **WINDOW_OF_THREE,
        rope_parameters={
            "full_attention": {**YARN_ROPE, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "glm": _of(transformers.GlmConfig, head_dim=32, attention_bias=True, rope_parameters=PARTLY_TURNED),
    "cohere": _of(transformers.CohereConfig, tie_word_embeddings=True, logit_scale=0.25),
    "cohere_normed": _of(transformers.CohereConfig, use_qk_norm=True, tie_word_embeddings=True),
    "phi": _of(transformers.PhiConfig, hidden_act="gelu_new", rope_parameters=PARTLY_TURNED),
    "stablelm": _of(transformers.StableLmConfig, use_qkv_bias=True, rope_parameters=PARTLY_TURNED),
    "stablelm_parallel": _of(
        transformers.StableLmConfig, use_parallel_residual=True, rope_parameters=PARTLY_TURNED
    ),
    "opt": _of(
        transformers.OPTConfig, ffn_dim=96, word_embed_proj_dim=64, tie_word_embeddings=True,
    ),
    "olmoe": _of(
        transformers.OlmoeConfig, num_experts=8, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True
    ),
    "granitemoe": _of(
        transformers.GraniteMoeConfig, num_local_experts=8, num_experts_per_tok=2, intermediate_size=32,
        embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=3.0,
        tie_word_embeddings=True,
    ),
    "phimoe": _of(
        transformers.PhimoeConfig, num_local_experts=8, intermediate_size=32, attention_bias=True, lm_head_bias=True,
        router_jitter_noise=0.2, original_max_position_embeddings=256,
        rope_parameters={
            **LONGROPE, "original_max_position_embeddings": 256, "short_mscale": 1.25, "long_mscale": 1.5,
        },
    ),
    "minimax_m2": _of(
        transformers.MiniMaxM2Config, num_local_experts=8, num_experts_per_tok=2, intermediate_size=32, head_dim=32,
        rotary_dim=16,
    ),
    "llama_dynamic": _of(
        transformers.LlamaConfig, max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
}  # fmt: skip


def small_config(family: str, **changes: Any) -> Any:
    """A transformers config of one of FAMILIES, ROWS or HYBRIDS, new at every call; changes: of its keys."""
    config = {**FAMILIES, **ROWS, **HYBRIDS}[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def _gain(name: str) -> float:
    """How strong a matrix is, in outputs per unit inputs: attention, routing and logits must not be flat."""
    if name.endswith(("lm_head.weight", "gate.weight", "router.weight")):
        return 3.0
    return 1.5 if name.endswith(("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")) else 1.0


def _random_like(name: str, tensor: torch.Tensor, config: Any, source: torch.Generator) -> torch.Tensor:
    """Values for one tensor of the model, of its shape, float32."""
    tied, family = bool(config.tie_word_embeddings), str(config.model_type)
    noise = torch.randn(tensor.shape, generator=source)
    if name.endswith("norm.weight"):
        # A tied head has the embedding's weights, which must stay weak or a model repeats its input for ever.
        strength = 3.0 if tied and name.endswith(".norm.weight") else 1.0
        # Gemma's norms multiply by 1 + weight, Qwen3-Next's and Qwen3.5's too but for the gated one of a delta net.
        has_offset = "gemma" in family or family.startswith(("qwen3_next", "qwen3_5"))
        offset = 1.0 if has_offset and "linear_attn" not in name else 0.0
        return strength * (1.0 + 0.2 * noise) - offset
    if name.endswith("sinks"):
        return noise
    if name.endswith("bias"):
        return 0.3 * noise
    # [..., outputs, inputs]; gpt-oss's experts are [experts, inputs, outputs]
    inputs = tensor.shape[-2 if family == "gpt_oss" and ".experts." in name else -1]
    return _gain(name) / math.sqrt(inputs) * noise


def _randomise(model: Any, seed: int) -> None:
    """Every parameter, and the router's correction buffer, from one generator in the model's own order."""
    source = torch.Generator().manual_seed(seed)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, tensor in [*model.named_parameters(), *buffers]:
        tensor.data.copy_(_random_like(name, tensor, model.config, source))


def build_small_model(family: str, seed: int = 0) -> Any:
    """The transformers model in float32, random from `seed`, in eval mode."""
    config = small_config(family)
    config.dtype = torch.float32
    model = AUTO.from_config(config, attn_implementation="eager", experts_implementation="eager")
    _randomise(model, seed)
    return model.eval()


def save_small_model(family: str, folder: Path, seed: int = 0, max_shard_size: str = "1GB") -> Path:
    """Writes config.json and safetensors to `folder`; returns it.

    max_shard_size  "100KB" makes several files and an index of any family
    """
    build_small_model(family, seed).save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "kimi_k2":  # transformers 5.23 has no class of that name; published Kimi K2 computes as DeepSeek-V3
        _set_model_type(folder, "kimi_k2")
    return folder


def _set_model_type(folder: Path, model_type: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))


def load_reference(folder: Path) -> Any:
    """The transformers model in `folder`, float32, eager attention (the one with sinks and softcaps), eval mode."""
    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] == "kimi_k2":
        values["model_type"] = "deepseek_v3"
    config = transformers.AutoConfig.for_model(**values)
    model: Any = AUTO.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    if (getattr(config, "rope_parameters", None) or {}).get(
        "rope_type"
    ) == "dynamic":  # as after a request of 256 tokens
        with torch.inference_mode():
            model(torch.zeros(1, 256, dtype=torch.long), use_cache=False)
    return model.eval()
