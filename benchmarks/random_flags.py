"""Flags of both servers for a model, at random: those that suit it more often than those that do not.

A vLLM case has keys as the oracle reads them (`engine_args` under their Python names), an SGLang case its `argv`.
"""

import json
import random
from collections.abc import Callable
from typing import Any, Final

from benchmarks.random_configs import EXPERTS
from benchmarks.random_quantizations import is_moe, number, text_config

GIB: Final = 2**30
Draw = random.Random
Case = dict[str, Any]
Choices = list[tuple[float, str, list[Any]]]

COMMON: Final = ["H100"] * 9 + ["A100"] * 3 + ["H200"] * 3 + ["B200"] * 3 + ["L40S"] * 2
GPUS: Final = [*COMMON, "A10G", "RTX4090", "RTX5090", "V100", "T4", "B300", "GB10"]
TOKENS: Final = [-1, 999, 2048, 4096, 8192, 10_001, 16_384, 32_768, 40_000, 65_536, 131_072, 262_144]
# A target and a draft of tests/facts/heads, as their publishers pair them, with vLLM's name of the method.
PAIRS: Final = {
    "Qwen__Qwen3-8B": ["eagle3-qwen3-8b", "dflash-qwen3-8b", "speculators-eagle3-qwen3-8b", "eagle3-qwen3-arch-8b"],
    "Qwen__Qwen3-4B": ["dflash-qwen3-4b", "eagle3-full-vocab-4b", "eagle3-norms-4b"],
    "Qwen__Qwen3-32B": ["eagle3-qwen3-32b", "Qwen__Qwen3-0.6B"],
    "Qwen__Qwen3-30B-A3B": ["eagle3-qwen3-30b-a3b"], "Qwen__Qwen2.5-7B": ["eagle-qwen2.5-7b", "Qwen__Qwen2.5-0.5B"],
    "Qwen__Qwen3.5-27B": ["dflash-qwen3.5-27b"], "zai-org__GLM-4.6": ["eagle3-glm-4.6"],
    "meta-llama__Meta-Llama-3.1-8B": ["eagle-llama-3.1-8b", "eagle3-llama-3.1-8b", "meta-llama__Llama-3.2-1B"],
    "meta-llama__Llama-3.3-70B-Instruct": ["eagle-llama-3.3-70b", "eagle3-llama-3.3-70b", "meta-llama__Llama-3.2-1B"],
    "openai__gpt-oss-20b": ["eagle3-gpt-oss-20b"], "openai__gpt-oss-120b": ["eagle3-gpt-oss-120b"],
    "deepseek-ai__DeepSeek-V3": ["eagle3-deepseek-v3", "eagle3-mla-deepseek-v3"],
    "moonshotai__Kimi-K2-Instruct": ["eagle3-kimi-k2", "eagle3-mla-kimi-k2"],
    "Qwen__Qwen2.5-VL-7B-Instruct": ["eagle3-qwen2.5-vl-7b"], "Qwen__Qwen3-VL-8B-Instruct": ["eagle3-qwen3-vl-8b"],
    "meta-llama__Llama-4-Scout-17B-16E-Instruct": ["eagle3-llama-4-scout", "eagle-llama-4-scout"],
    "google__gemma-4-26B-A4B": ["gemma-4-26b-a4b-assistant"], "mistralai__Mistral-7B-v0.3": ["eagle-mistral-7b"],
    "MiniMaxAI__MiniMax-M2.5": ["eagle3-minimax-m2"], "CohereLabs__c4ai-command-a-03-2025": ["eagle-command-a"],
}  # fmt: skip


def is_latent(config: Case) -> bool:
    return number(text_config(config), "kv_lora_rank") > 0


def has_states(config: Case) -> bool:
    text = json.dumps(text_config(config))
    return any(word in text for word in ('"mamba', '"linear_', '"ssm_', '"conv_kernel"', '"layers_block_type"'))


def has_mtp(config: Case) -> bool:
    text = text_config(config)
    return any(number(text, key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"))


def sees(config: Case) -> bool:
    return any(key in config for key in ("vision_config", "audio_config"))


def picked(draw: Draw, choices: Choices) -> Case:
    return {key: draw.choice(values) for chance, key, values in choices if draw.random() < chance}


def started(draw: Draw, model: str, config: Case, suited: Callable[[], bool]) -> Case:
    """The model, its GPU, and ranks that mostly divide its heads."""
    drawn: Case = {"model": model, "gpu": draw.choice(GPUS)}
    if draw.random() < 0.5:
        heads = number(text_config(config), "num_attention_heads")
        ranks = [2, 2, 2, 4, 4, 4, 8, 8, 3]
        drawn["tp"] = draw.choice(
            [size for size in ranks if heads % size == 0 and size != 3] or [1] if suited() else ranks
        )
    if draw.random() < 0.1:
        drawn["pp"] = draw.choice([2, 3, 4]) if not suited() else 2
    return drawn


def budgets(draw: Draw) -> list[int]:
    return [draw.randrange(1, 20) * GIB + draw.randrange(GIB), draw.randrange(20, 120) * GIB + draw.randrange(GIB)]


# --- vLLM ------------------------------------------------------------------------------------------------------------

VLLM: Choices = [
    (0.55, "max_model_len", TOKENS),
    (0.08, "block_size", [16, 32, 64, 128, 256, 48]),
    (0.2, "max_num_batched_tokens", [512, 2048, 4096, 8192, 16_384, 32_768, 1000]),
    (0.2, "max_num_seqs", [1, 8, 64, 128, 256, 512, 2000]),
    (0.15, "gpu_memory_utilization", [0.5, 0.85, 0.9, 0.95]),
    (0.2, "enable_prefix_caching", [False, False, True]),
    (0.05, "disable_hybrid_kv_cache_manager", [True]),
    (0.08, "usage_context", ["LLM_CLASS"]),
]
KV: Final = ["fp8", "fp8", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "auto"]
OTHER_KV: Final = ["nvfp4", "int8_per_token_head", "fp8_per_token_head", "turboquant_4bit_nc", "turboquant_k8v4",
                   "turboquant_3bit_nc", "int4_per_token_head", "float16", "fp8_ds_mla"]  # fmt: skip
YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
ENGINE: Choices = [
    (0.04, "quantization", ["fp8", "fp8", "mxfp8", "fp8_per_block", "int8_per_channel_weight_only", "bitsandbytes"]),
    (0.02, "allow_deprecated_quantization", [True]),
    (0.02, "cpu_offload_gb", [4, 7.5]),
    (0.03, "kv_offloading_size", [16, 64]),
    (0.08, "enforce_eager", [True]),
    (0.05, "async_scheduling", [True, False]),
    (0.04, "dtype", ["float16", "bfloat16", "half", "float32", "auto"]),
    (0.03, "enable_chunked_prefill", [False, True]),
    (0.02, "performance_mode", ["throughput", "interactivity", "balanced"]),
    (0.03, "num_gpu_blocks_override", [1000, 20_000]),
    (0.02, "kv_transfer_config", [{"kv_connector": "NixlConnector", "kv_role": "kv_both"},
                                  {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                                   "kv_connector_extra_config": {"cpu_bytes_to_use": 10**9}}]),
    (0.02, "runner", ["pooling", "generate"]),
    (0.02, "optimization_level", [0, 2]),
    (0.05, "compilation_config", [
        {"cudagraph_mode": "FULL"}, {"cudagraph_mode": "FULL_DECODE_ONLY"}, {"cudagraph_mode": "PIECEWISE"},
        {"cudagraph_mode": "NONE"}, {"cudagraph_mode": "FULL_AND_PIECEWISE"}, {"mode": 0},
        {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}, {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 3},
    ]),
    (0.03, "cudagraph_capture_sizes", [[1, 2, 4, 8], [1, 8, 64, 256]]),
    (0.02, "max_cudagraph_capture_size", [64, 1024, 2048]),
    (0.01, "enable_sleep_mode", [True]),
    (0.02, "scheduling_policy", ["priority"]),
    (0.01, "kv_cache_dtype_skip_layers", [["0", "1"], ["sliding_window"]]),
    (0.01, "disable_sliding_window", [True]),
]  # fmt: skip
OVERRIDES: Final = [{"max_position_embeddings": 65_536}, {"rope_scaling": YARN}, {"rope_parameters": YARN},
                    {"num_hidden_layers": 4}]  # fmt: skip
NESTED_OVERRIDES: Final = [*({"text_config": changes} for changes in OVERRIDES), {"vision_config": {"depth": 4}}]
RERANKER: Final = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
                   "is_original_qwen3_reranker": True}  # fmt: skip
SEEING: Choices = [
    (0.15, "limit_mm_per_prompt", [{"image": 0}, {"image": 1}, {"image": 4, "video": 0}, {"image": 2, "video": 0},
                                   {"image": 0, "video": 0, "audio": 0}]),
    (0.1, "language_model_only", [True]), (0.05, "mm_encoder_tp_mode", ["data"]), (0.03, "skip_mm_profiling", [True]),
]  # fmt: skip
STATEFUL: Choices = [
    (0.1, "mamba_cache_mode", ["all", "align", "none"]), (0.06, "mamba_cache_dtype", ["float32", "float16", "auto"]),
    (0.08, "mamba_ssm_cache_dtype", ["float32", "float16", "bfloat16", "auto"]),
    (0.04, "mamba_block_size", [128, 512]),
]  # fmt: skip
BACKENDS: Final = ["FLASHINFER", "TRITON_ATTN", "FLASH_ATTN", "FLEX_ATTENTION"]
MOE_BACKENDS: Final = [
    *["triton", "marlin", "cutlass", "deep_gemm", "flashinfer_cutlass", "flashinfer_trtllm"] * 3, "auto", "aiter",
    "b12x", "batched_triton", "emulation", "flashinfer_b12x", "flashinfer_cutedsl", "humming", "triton_unfused",
]  # fmt: skip
LATENT_BACKENDS: Final = ["FLASHMLA", "CUTLASS_MLA", "TRITON_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA"]


def vllm_case(draw: Draw, model: str, source: str, config: Case) -> Case:
    """Draw a vLLM case for a config; `source` names the real model whose drafts fit it, or is empty."""

    def suited() -> bool:
        return draw.random() < 0.85

    drawn = started(draw, model, config, suited) | picked(draw, VLLM)
    longest = number(text_config(config), "max_position_embeddings")
    if longest and drawn.get("max_model_len", 0) > longest and suited():
        drawn["max_model_len"] = longest
    if draw.random() < 0.3:
        drawn["kv_cache_dtype"] = draw.choice(KV if suited() else OTHER_KV)
    options = picked(draw, ENGINE)
    for fits, choices in ((sees(config), SEEING), (has_states(config), STATEFUL)):
        if fits or not suited():
            options |= picked(draw, choices)
    if draw.random() < 0.05:
        is_qwen3 = config.get("architectures") == ["Qwen3ForCausalLM"]
        overrides = OVERRIDES if (text_config(config) is config) == suited() else NESTED_OVERRIDES
        options["hf_overrides"] = draw.choice([*overrides, RERANKER] if is_qwen3 else overrides)
    options |= spread(draw, config, drawn) | vllm_drafts(draw, source, config)
    if draw.random() < 0.06:
        options |= {"enable_lora": True, "max_loras": draw.choice([1, 2, 4]), "max_lora_rank": draw.choice([8, 16, 64])}
    if draw.random() < 0.05:
        fitting = LATENT_BACKENDS if is_latent(config) == suited() else BACKENDS
        options["attention_backend"] = draw.choice(fitting)
    if draw.random() < 0.02:
        options |= {"offload_group_size": 8, "offload_num_in_group": draw.choice([1, 2]), "offload_prefetch_step": 1}
    if options:
        drawn["engine_args"] = options
    return drawn | {"available_memory": budgets(draw)}


def spread(draw: Draw, config: Case, drawn: Case) -> Case:
    """Experts' kernels, experts over ranks, their spare copies, and caches split by decode context."""
    options: Case = {}
    moe = is_moe(text_config(config))
    if draw.random() < (0.25 if moe else 0.01):
        options["moe_backend"] = draw.choice(MOE_BACKENDS)
    if draw.random() < (0.25 if moe else 0.02):
        options["enable_expert_parallel"] = True
        if moe and draw.random() < 0.25 and drawn.get("tp", 1) > 1:
            experts = max(number(text_config(config), key) for key in EXPERTS)
            options |= {"enable_eplb": True, "eplb_config": {"num_redundant_experts": draw.choice([0, 8, experts])}}
    if draw.random() < (0.1 if drawn.get("tp", 1) % 2 == 0 else 0.005):
        options["decode_context_parallel_size"] = draw.choice([2, 2, 4])
        if draw.random() < 0.4:
            options["dcp_kv_cache_interleave_size"] = draw.choice([1, 8, 16])
    return options


def vllm_drafts(draw: Draw, source: str, config: Case) -> Case:
    chance, count = draw.random(), draw.choice([1, 1, 2, 3, 4])
    if chance < 0.04:
        drafts: Case = draw.choice([{"method": "ngram", "prompt_lookup_max": 4}, {"method": "suffix"}])
    elif source in PAIRS and chance < 0.45:
        head = draw.choice(PAIRS[source])
        drafts = {"model": head}
        kind = next((kind for kind in ("eagle3", "eagle", "dflash") if kind in head), None)
        if kind is not None and draw.random() < 0.8:
            drafts["method"] = kind
        if draw.random() < 0.15:
            drafts["draft_tensor_parallel_size"] = 1
        if draw.random() < 0.15:
            drafts["max_model_len"] = draw.choice([2048, 8192])
    elif (has_mtp(config) and chance < 0.2) or chance > 0.99:
        drafts = {"method": "mtp"}
    else:
        return {}
    return {"speculative_config": drafts | {"num_speculative_tokens": count}}


# --- SGLang ----------------------------------------------------------------------------------------------------------

SGLANG: Choices = [
    (0.25, "mem-fraction-static", [0.7, 0.8, 0.85, 0.88, 0.9, 0.95]),
    (0.15, "context-length", [2048, 8192, 16_384, 32_768, 65_536, 131_072]),
    (0.12, "page-size", [1, 16, 32, 64, 128]),
    (0.2, "chunked-prefill-size", [512, 2048, 4096, 8192, 16_384, -1]),
    (0.05, "max-prefill-tokens", [4096, 16_384, 32_768]),
    (0.2, "max-running-requests", [1, 8, 64, 256, 1024]),
    (0.05, "max-total-tokens", [20_000, 100_001, 4_000_000]),
    (0.1, "cuda-graph-max-bs-decode", [1, 8, 64, 256, 512]),
    (0.03, "cuda-graph-bs-decode", [["1", "2", "4", "8", "24"]]),
    (0.05, "dtype", ["float16", "bfloat16"]),
    (0.03, "quantization", ["fp8", "fp8", "mxfp8", "awq", "bitsandbytes"]),
    (0.03, "cpu-offload-gb", [2, 4]),
    (0.03, "disaggregation-mode", ["prefill", "decode"]),
    (0.05, "schedule-conservativeness", [0.3, 1.2]),
    (0.04, "json-model-override-args", [
        json.dumps({"max_position_embeddings": 65_536}), json.dumps({"rope_scaling": YARN}),
        json.dumps({"num_hidden_layers": 4}), json.dumps({"text_config": {"max_position_embeddings": 65_536}}),
        json.dumps({"text_config": {"rope_parameters": YARN}}),
    ]),
]  # fmt: skip
SWITCHES: Final = {
    "disable-radix-cache": 0.06, "disable-cuda-graph": 0.05, "disable-overlap-schedule": 0.04,
    "enable-mixed-chunk": 0.03, "disable-hybrid-swa-memory": 0.04, "enable-memory-saver": 0.02,
    "is-embedding": 0.015, "enable-torch-compile": 0.02, "enable-deterministic-inference": 0.005,
    "enable-multimodal": 0.02, "trust-remote-code": 0.1,
}  # fmt: skip
WINDOWED: Choices = [(0.15, "swa-full-tokens-ratio", [0.1, 0.3, 0.5, 0.8, 1.0])]
STATES: Choices = [
    (0.15, "max-mamba-cache-size", [32, 100, 500]), (0.1, "mamba-full-memory-ratio", [0.3, 0.5, 1.2]),
    (0.08, "mamba-ssm-dtype", ["float32", "bfloat16", "float16"]),
    (0.08, "mamba-radix-cache-strategy", ["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]),
]  # fmt: skip
SGLANG_BACKENDS: Final = ["triton", "flashinfer", "fa3", "trtllm_mha", "fa4", "torch_native"]
MOE_RUNNERS: Final = ["triton", "triton", "deep_gemm", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_mxfp4",
                      "triton_kernel", "cutlass", "marlin", "flashinfer_cutedsl"]  # fmt: skip
SGLANG_LATENT: Final = ["triton", "flashinfer", "fa3", "flashmla", "cutlass_mla", "trtllm_mla"]


def words(options: Case) -> list[str]:
    drawn: list[str] = []
    for name, value in options.items():
        drawn += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    return drawn


def sglang_case(draw: Draw, model: str, source: str, config: Case) -> Case:
    """Draw an SGLang case for a config; `source` as above. Ranks that do not divide heads fail out of its reach."""

    def suited() -> bool:
        return draw.random() < 0.9

    drawn = started(draw, model, config, lambda: True)
    options = picked(draw, SGLANG)
    if draw.random() < 0.25:
        options["kv-cache-dtype"] = draw.choice(["fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "bf16", "auto"])
    if draw.random() < 0.12:
        name = draw.choice(["attention-backend", "attention-backend", "prefill-attention-backend"])
        options[name] = draw.choice(SGLANG_LATENT if is_latent(config) == suited() else SGLANG_BACKENDS)
    longest = number(text_config(config), "max_position_embeddings")
    if longest and options.get("context-length", 0) > longest and suited():
        options["context-length"] = longest
    for fits, choices in ((has_states(config), STATES), (number(text_config(config), "sliding_window") > 0, WINDOWED)):
        if fits or not suited():
            options |= picked(draw, choices)
    argv = words(options) + [f"--{name}" for name, chance in SWITCHES.items() if draw.random() < chance]
    argv += sglang_spread(draw, config, drawn) + sglang_drafts(draw, source, config) + sglang_extras(draw)
    return drawn | {"argv": argv, "available_memory": budgets(draw)}


def sglang_spread(draw: Draw, config: Case, drawn: Case) -> list[str]:
    ranks, moe = drawn.get("tp", 1), is_moe(text_config(config))
    argv: list[str] = []
    if ranks > 1 and draw.random() < (0.3 if is_latent(config) else 0.15 if moe else 0.01):
        argv += ["--dp-size", str(draw.choice([ranks, ranks, 2])), "--enable-dp-attention"]
    elif draw.random() < 0.03:
        argv += ["--dp-size", "2"]
    if moe and ranks > 1 and draw.random() < 0.2:
        argv += ["--ep-size", str(ranks)]
    if draw.random() < (0.15 if moe else 0.01):
        argv += ["--moe-runner-backend", draw.choice(MOE_RUNNERS)]
    return argv


def sglang_drafts(draw: Draw, source: str, config: Case) -> list[str]:
    chance = draw.random()
    steps = draw.choice([["3", "1", "4"], ["1", "1", "2"], ["5", "4", "8"], []])
    names = ("num-steps", "eagle-topk", "num-draft-tokens")
    sizes = [word for name, size in zip(names, steps, strict=False) for word in (f"--speculative-{name}", size)]
    if chance < 0.02:
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
    heads = [head for head in PAIRS.get(source, ()) if not head.startswith("speculators")]
    if heads and chance < 0.4:
        head = draw.choice(heads)
        kind = (
            "STANDALONE"
            if "__" in head
            else "EAGLE3"
            if "eagle3" in head
            else "DFLASH"
            if "dflash" in head
            else "EAGLE"
        )
        return ["--speculative-algorithm", kind, "--speculative-draft-model-path", head,
                *([] if kind == "DFLASH" else sizes)]  # fmt: skip
    if has_mtp(config) and chance < 0.25:
        return ["--speculative-algorithm", draw.choice(["EAGLE", "NEXTN"]), *sizes]
    return []


def sglang_extras(draw: Draw) -> list[str]:
    argv: list[str] = []
    if draw.random() < 0.06:
        argv += ["--enable-hierarchical-cache", *draw.choice([
            ["--hicache-ratio", "2"], ["--hicache-size", "30"], ["--hicache-size", "0"], [],
            ["--hicache-ratio", "1.5", "--hicache-write-policy", "write_through"],
            ["--hicache-size", "60", "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"],
        ])]  # fmt: skip
    if draw.random() < 0.05:
        argv += ["--enable-lora", "--max-lora-rank", draw.choice(["16", "64"])]
        argv += ["--lora-target-modules", *draw.choice([["q_proj", "v_proj"], ["all"]])]
        argv += ["--max-loras-per-batch", draw.choice(["2", "8"])]
    return argv
