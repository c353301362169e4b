"""Configs and flags of rare kinds that random draws found (benchmarks/random_cases.py), against the servers' answers.

Numbers are those of vLLM 0.33's and SGLang 0.5.23's own planning code for the same configs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec
from kvplan.models.spec import Quantization, Scheme
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.servers.words.command import Repeated
from kvplan.sizing.layout import token_bytes
from kvplan.sizing.weights import Layout, kv_scale_bytes
from tests import oracles

FACTS = Path(__file__).parents[1] / "facts"
GB20 = 20_000_000_000


def planned(spec: Any, card: str = "h100-80g", engine: str = "vllm", **args: Any) -> Plan:
    return plan(Request(spec, gpu(card), EngineArgs(**{"max_model_len": 2048} | args), release=parse_engine(engine)))


def written(folder: Path, model: str, **changes: Any) -> Path:
    """A folder with a catalog model's config and changed keys; None removes one, an object changes a part."""
    config = dict(catalog.load(model).config)
    for key, value in changes.items():
        old = config.get(key)
        config[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


# --- positions and caches --------------------------------------------------------------------------------------------


def test_a_familys_default_counts_beside_a_key_that_its_class_does_not_read(tmp_path: Path) -> None:
    # n_positions is GPT-2's name; Mistral's class has 131,072 positions by default, the smaller one.
    spec = load_spec(written(tmp_path, "mistral-nemo-12b", max_position_embeddings=None, n_positions=256_000))
    assert spec.max_model_len == 131_072


@pytest.mark.parametrize(
    ("card", "dtype", "blocks"),
    [
        ("h100-80g", "fp8_e5m2", 5086), ("h100-80g", "fp8_per_token_head", 4932), ("a100-80g", "fp8", 5086),
        ("l40s", "fp8", 5086), ("b200", "fp8", 5086), ("h100-80g", "fp8", None), ("h200", "fp8_e4m3", None),
    ],
)  # fmt: skip
def test_fp8_caches_of_alibi_models_are_refused_where_flash_attention_would_run(
    card: str, dtype: str, blocks: int | None
) -> None:
    """BLOOM-7B1 on Hopper: FlashAttention 2 computes ALiBi, and has no fp8 KV cache."""
    answer = planned(catalog.load("bloom-7b1"), card, kv_cache_dtype=dtype, kv_cache_memory_bytes=GB20)
    if blocks is None:
        assert answer.refusal is not None
        assert "FLASH_ATTN keeps no KV cache of fp8" in answer.refusal.text
    else:
        assert answer.refusal is None
        assert answer.capacity.num_blocks == blocks


@pytest.mark.parametrize(
    ("card", "dtype", "block", "blocks"),
    [
        ("h100-80g", "fp8_per_token_head", 16, 60_096), ("b200", "fp8_per_token_head", 16, 60_096),
        ("b200", "int8_per_token_head", 16, 60_096), ("h100-80g", "fp8", 64, 15_258), ("b200", "fp8", 64, 15_258),
    ],
)  # fmt: skip
def test_caches_with_a_scale_per_token_have_tritons_blocks(card: str, dtype: str, block: int, blocks: int) -> None:
    answer = planned(catalog.load("gemma-4-26b-a4b"), card, kv_cache_dtype=dtype, kv_cache_memory_bytes=GB20)
    assert (answer.pool.block_size, answer.capacity.num_blocks) == (block, blocks)


def test_layers_that_all_read_anothers_cache_are_refused(tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    folder = written(tmp_path, "gemma-4-e4b", text_config={"num_hidden_layers": 12, "layer_types": kinds})
    with pytest.raises(KvplanError, match="num_kv_shared_layers leaves none of 12 layers a cache"):
        load_spec(folder)


def test_yarn_is_not_what_phi_3s_class_reads(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    with pytest.raises(KvplanError, match="names yarn, which Phi-3's class reads as longrope"):
        load_spec(written(tmp_path, "phi-3-mini-4k", rope_scaling=yarn))


@pytest.mark.parametrize(("rope", "context"), [({"rope_type": "linear", "factor": 2.0}, 262_144), (None, 131_072)])
def test_a_disabled_window_is_stretched_as_positions_are(
    tmp_path: Path, rope: dict[str, Any] | None, context: int
) -> None:
    """vLLM's max_model_len of Qwen2.5-72B, whose unused window has as many tokens as its positions."""
    spec = load_spec(written(tmp_path, "qwen2.5-72b", rope_scaling=rope, max_position_embeddings=131_072,
                             sliding_window=131_072, use_sliding_window=False))  # fmt: skip
    answer = planned(spec, "b200", disable_sliding_window=True, max_model_len=None, tensor_parallel_size=2)
    assert answer.capacity.max_model_len == context


@pytest.mark.parametrize("card", ["a100-80g", "h100-80g"])
def test_falcons_cache_stays_in_the_models_dtype(tmp_path: Path, card: str) -> None:
    """vLLM's Falcon-7B in fp8_e5m2: 111,992 blocks of 16 x 2 x 64 x 2 bytes in 32 layers, in 14,679,056,979 bytes."""
    config = {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
        "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
        "bias": False, "alibi": False, "vocab_size": 65_024, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    stated: dict[str, Any] = {"kv_cache_dtype": "fp8_e5m2", "kv_cache_memory_bytes": 14_679_056_979}
    answer = planned(load_spec(tmp_path), card, **stated)
    assert (answer.refusal, answer.capacity.num_blocks) == (None, 111_992)
    assert any("--kv-cache-dtype fp8_e5m2 is ignored" in note for note in answer.notes)


@pytest.mark.parametrize(("block", "refused"), [(32, True), (48, True), (256, False)])
def test_blocks_of_deepseek_v4_are_multiples_of_what_its_kernels_read(block: int, refused: bool) -> None:
    answer = planned(catalog.load("deepseek-v4-flash"), "b200", block_size=block, tensor_parallel_size=4)
    assert (answer.refusal is not None and "takes multiples of 256" in answer.refusal.text) is refused


def test_gpt_2_has_its_tables_and_last_norm_on_every_stage(tmp_path: Path) -> None:
    """vLLM's two stages of GPT-2 medium are equally large: 407,433,216 bytes."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24,
        "n_positions": 1024, "vocab_size": 50_257, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    stages: dict[str, Any] = {"pipeline_parallel_size": 2, "max_model_len": 999}
    assert planned(load_spec(tmp_path), **stages).memory.weights == 407_433_216


# --- quantized weights -----------------------------------------------------------------------------------------------


def test_zero_points_of_kv_scales_have_the_models_dtype() -> None:
    """compressed-tensors, an attention layer: q, k and v in float32 (12 bytes), as many zero points in the model's."""
    spec = catalog.load("qwen3-8b")
    stored = Quantization("compressed-tensors", Scheme("nvfp4", 16))
    sizes = [kv_scale_bytes(spec.layers[0], stored, Layout(dtype=dtype), spec.dtype) for dtype in (None, "float32")]
    assert sizes == [18, 24]


def test_names_that_a_class_does_not_map_leave_nothing_unquantized(tmp_path: Path) -> None:
    """Qwen3-VL's layers are `model.language_model.layers`: vLLM's Quark ignores `model.layers.0.mlp.down_proj`."""
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False}
    inputs = weight | {"is_dynamic": True}
    whole = {"weight": weight, "input_tensors": inputs, "bias": None, "output_tensors": None}

    def stored(*excluded: str) -> int:
        quark = {"quant_method": "quark", "exclude": ["lm_head", "re:.*visual.*", *excluded],
                 "layer_quant_config": {}, "layer_type_quant_config": {}, "global_quant_config": whole,
                 "export": {"kv_cache_group": []}}  # fmt: skip
        spec = load_spec(written(tmp_path, "qwen3-vl-8b", quantization_config=quark))
        return planned(spec, "b200", dtype="half").memory.weights

    assert stored("model.layers.0.mlp.down_proj") == stored() == 10_594_083_584
    # down_proj is 12,288 x 4,096: a byte more each, less 4,096 scales of 4 bytes
    assert stored("model.language_model.layers.0.mlp.down_proj") - stored() == 12_288 * 4_096 - 4 * 4_096


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_awqs_packing_has_no_part_in_what_vllm_creates(tmp_path: Path, version: str) -> None:
    """A shared expert of GLM-4.6 has 1,536 / 8 inputs on a rank, which groups of 128 do not divide."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": version,
           "modules_to_not_convert": ["mlp.gate"]}  # fmt: skip
    spec = load_spec(written(tmp_path, "glm-4.6", quantization_config=awq))
    answer = planned(spec, "b200", tensor_parallel_size=8)
    assert answer.refusal is not None
    assert "shared_experts.down_proj is 5,120 x 192" in answer.refusal.text


@pytest.mark.parametrize("method", ["fp8", "fp8_per_block", "mxfp8"])
def test_methods_applied_while_loading_are_not_computed_in_float32(method: str) -> None:
    answer = planned(catalog.load("command-r7b"), "h200", quantization=method, dtype="float32")
    assert answer.refusal is not None
    assert answer.refusal.text == f"--quantization {method} is not supported in float32"


# --- pooling, flags --------------------------------------------------------------------------------------------------


def test_token_classifiers_are_pooled_and_their_scores_quantized_as_linear_layers(tmp_path: Path) -> None:
    """Qwen3-1.7B: a classifier of two labels in float32 in place of its (tied) head, 2 x 2,048 x 4 bytes; one of five
    in fp8 has a byte for each weight and a float32 scale.
    """
    labels = {str(label): f"L{label}" for label in range(5)}
    tokens = written(tmp_path, "qwen3-1.7b", architectures=["Qwen3ForTokenClassification"],
                     id2label={key: labels[key] for key in "01"})  # fmt: skip
    assert planned(load_spec(tokens)).memory.weights == 3_441_166_336
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    texts = written(tmp_path, "qwen3-1.7b", architectures=["Qwen3ForSequenceClassification"], id2label=labels,
                    quantization_config=fp8)  # fmt: skip
    assert planned(load_spec(texts)).memory.weights == 2_031_875_060


def test_mxfp8_while_loading_reaches_towers() -> None:
    """vLLM's answer for whole towers: "MXFP8 requires input_size_per_partition (4304) to be divisible by 32."."""
    args: dict[str, Any] = {"tensor_parallel_size": 2, "quantization": "mxfp8"}
    refusal = planned(catalog.load("qwen3-vl-235b-a22b"), "b200", mm_encoder_tp_mode="data", **args).refusal
    assert refusal is not None
    assert "1,152 x 4,304" in refusal.text
    for model in ("qwen3-32b", "gemma-4-31b", "gemma-3-27b"):  # Gemma's towers are created unquantized
        assert planned(catalog.load(model), "b200", **args).refusal is None


@pytest.mark.parametrize(
    ("model", "method"),
    [("glm-5.1-nvfp4", "mxfp8"), ("deepseek-v4-flash", "fp8_per_block"), ("gpt-oss-20b", "fp8")],
)
def test_a_method_that_vllm_reads_in_the_config_is_not_changed_by_the_flag(model: str, method: str) -> None:
    spec = catalog.load(model)
    with_flag, without = (planned(spec, "b200", tensor_parallel_size=8, quantization=name) for name in (method, None))
    assert with_flag.memory.weights == without.memory.weights
    assert any(f"--quantization {method} is ignored" in note for note in with_flag.notes)
    with pytest.raises(KvplanError, match="is stored as fp8; remove the flag"):
        planned(catalog.load("qwen3-8b-fp8"), quantization="mxfp8")


@pytest.mark.parametrize(("stated", "batches", "tokens"), [(True, 2, 173_934), (None, 1, 230_101)])
def test_a_classifier_schedules_ahead_if_asked_to(
    tmp_path: Path, stated: bool | None, batches: int, tokens: int
) -> None:
    """Phi-3-mini with five labels on four ranks, in vLLM's 10,786 blocks of 16 tokens.

    A request of 4,096 takes its window less a token (2,046) and the tokens in flight, and one block more: with 1,000 of
    these 192 blocks, with 2,000 of them 254.
    """
    assert (4096 * 10_786 // 192, 4096 * 10_786 // 254) == (230_101, 173_934)
    spec = load_spec(written(tmp_path, "phi-3-mini-4k", architectures=["Phi3ForSequenceClassification"],
                             id2label={str(label): f"L{label}" for label in range(5)}))  # fmt: skip
    args: dict[str, Any] = {"tensor_parallel_size": 4, "max_model_len": 4096, "max_num_batched_tokens": 1000}
    answer = planned(spec, "l40s", async_scheduling=stated, kv_cache_memory_bytes=16_964_947_264, **args)
    assert (answer.settings.batches, answer.capacity.tokens) == (batches, tokens)


def test_every_stage_has_a_classifiers_score(tmp_path: Path) -> None:
    """Gemma 2 27B with two labels, the larger of vLLM's two stages on two ranks: 4,608 x 2 x 4 bytes are the score."""
    spec = load_spec(written(tmp_path, "gemma-2-27b", architectures=["Gemma2ForSequenceClassification"],
                             id2label={"0": "a", "1": "b"}))  # fmt: skip
    stages: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    assert planned(spec, "h200", **stages).memory.weights == 14_203_855_872


def test_a_score_in_awq_packs_whole_groups_of_eight_labels(tmp_path: Path) -> None:
    """Qwen3-4B, five labels, on four ranks: the score keeps 40 groups x 5 scales in float32, and no values."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    labels = {str(label): f"L{label}" for label in range(5)}
    tokens = written(tmp_path, "qwen3-4b", architectures=["Qwen3ForTokenClassification"], id2label=labels,
                     quantization_config=awq)  # fmt: skip
    assert planned(load_spec(tokens), tensor_parallel_size=4).memory.weights == 684_517_152


def test_jambas_classifier_scores_beside_its_output_head(tmp_path: Path) -> None:
    """Jamba Large 1.5, one label, on eight ranks: 65,536 / 8 x 8,192 x 2 bytes are the head, 8,192 x 4 the score."""
    spec = load_spec(written(tmp_path, "jamba-1.5-large", architectures=["JambaForSequenceClassification"],
                             id2label={"0": "a"}))  # fmt: skip
    assert planned(spec, "b200", tensor_parallel_size=8).memory.weights == 99_653_344_192


def test_longrope_has_a_factor_for_each_pair_of_rotated_values(tmp_path: Path) -> None:
    """vLLM stops at heads of 64 with 48 factors: "expected shape should be broadcastable to [48]"."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
    assert load_spec(written(tmp_path, "phi-3-mini-128k", rope_scaling=scaling)).context_limit == 131_072
    with pytest.raises(KvplanError, match="short_factor has 48 factors for 32 pairs of rotated values"):
        load_spec(written(tmp_path, "phi-3-mini-128k", rope_scaling=scaling, head_dim=64))


def test_mixed_precision_of_modelopt_needs_its_list_of_layers(tmp_path: Path) -> None:
    """vLLM's answer to the nested form inside config.json: "Cannot find the config file for modelopt_mixed"."""
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    nested = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"], "quantized_layers": layers}
    stored = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": nested}
    spec = load_spec(written(tmp_path, "qwen2.5-7b", quantization_config=stored))
    refusal = planned(spec, "h200").refusal
    assert refusal is not None
    assert "hf_quant_config.json, which is missing" in refusal.text


def test_with_adapters_a_step_holds_the_drafts_of_all_requests() -> None:
    """vLLM 0.33 create_engine_config: batched tokens below max_num_seqs x (drafts + 1) are a ValueError."""
    args: dict[str, Any] = {
        "max_loras": 2, "max_lora_rank": 16, "speculative_method": "ngram", "num_speculative_tokens": 4,
        "max_num_seqs": 128,
    }  # fmt: skip
    spec = catalog.load("qwen3-8b")
    refusal = planned(spec, max_num_batched_tokens=512, **args).refusal
    assert refusal is not None
    assert "640 tokens, and max_num_batched_tokens is 512" in refusal.text
    assert planned(spec, max_num_batched_tokens=640, **args).refusal is None


def test_modelopts_fp8_experts_are_not_balanced(tmp_path: Path) -> None:
    """vLLM's answers: "EPLB is not supported ModelOptFp8MoEMethod." for FP8, and a start for NVFP4."""
    args: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    fp8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*mlp.gate"]}
    with pytest.raises(KvplanError, match="vLLM does not balance the experts"):
        planned(load_spec(written(tmp_path, "qwen3-30b-a3b", quantization_config=fp8)), "b200", **args)
    fp4 = fp8 | {"quant_algo": "NVFP4"}
    spec = load_spec(written(tmp_path, "qwen3-30b-a3b", quantization_config=fp4))
    assert planned(spec, "b200", **args).refusal is None


def test_a_backend_that_runs_on_no_newer_gpu_does_not_run_on_an_older_one() -> None:
    """vLLM's answer for Nemotron 3 Nano on four T4: deep_gemm is not supported for unquantized experts."""
    spec = catalog.load("nemotron-3-nano")
    args: dict[str, Any] = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    refusal = planned(spec, "t4", moe_backend="deep_gemm", **args).refusal
    assert refusal is not None
    assert "--moe-backend deep_gemm" in refusal.text
    other = planned(spec, "t4", moe_backend="triton", **args).refusal
    assert other is None or "--moe-backend" not in other.text


def test_an_override_adds_no_part_that_a_config_lacks() -> None:
    spec = catalog.load("qwen3-8b")
    with pytest.raises(KvplanError, match="a text_config, which its config does not have"):
        planned(spec, hf_overrides=json.dumps({"text_config": {"max_position_embeddings": 65_536}}))
    added = planned(spec, hf_overrides=json.dumps({"vision_config": {"depth": 4}}))
    assert added.memory.weights == planned(spec).memory.weights


def test_minimax_m3_takes_no_adapters(tmp_path: Path) -> None:
    folder = written(tmp_path, "minimax-m3", architectures=["MiniMaxM3SparseForConditionalGeneration"])
    with pytest.raises(KvplanError, match="vLLM has no adapters for"):
        planned(load_spec(folder), max_loras=1, max_lora_rank=8)


def test_a_modelopt_config_with_its_algorithm_outside_is_not_read_by_vllm(tmp_path: Path) -> None:
    """Of {"quant_algo": ..., "producer": ...} vLLM tells no method: its layers are built in bfloat16."""
    flat = {"quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.31"}}
    answer = planned(load_spec(written(tmp_path, "qwen3-1.7b", quantization_config=flat)))
    assert answer.memory.weights == 3_441_149_952
    assert any("names no quant_method" in note for note in answer.notes)


# --- SGLang ----------------------------------------------------------------------------------------------------------


def test_sglang_computes_gpt_oss_in_bfloat16_whatever_the_dtype_is() -> None:
    answer = planned(catalog.load("gpt-oss-20b"), engine="sglang", dtype="float16")
    assert (answer.settings.dtype, answer.settings.kv_dtype) == ("bfloat16", "bfloat16")


def test_sglang_reads_no_text_config_that_an_override_adds() -> None:
    override = json.dumps({"text_config": {"max_position_embeddings": 65_536}})
    with pytest.raises(KvplanError, match="adds a text_config"):
        planned(catalog.load("qwen3-next-80b-a3b"), engine="sglang", hf_overrides=override)


@pytest.mark.parametrize(("tp", "dtype", "cell"), [(1, "bfloat16", 137_472), (4, "bfloat16", 45_312),
                                                   (2, "fp8_e5m2", 45_312)])  # fmt: skip
def test_sglang_keeps_minimax_m3s_index_keys_beside_its_kv(tp: int, dtype: str, cell: int) -> None:
    """SGLang's _cell_size: 60 layers of K and V, and 57 index keys of 128 in the model's dtype."""
    layers = catalog.load("minimax-m3").layers
    assert sum(token_bytes(cache, dtype, tp) for caches in layers for cache in caches) == cell


@pytest.mark.parametrize(
    ("model", "card", "runner", "refused"),
    [
        ("qwen3-30b-a3b", "h100-80g", "flashinfer_cutedsl", True),
        ("qwen3-30b-a3b", "h100-80g", "flashinfer_trtllm", False),
        ("qwen3-30b-a3b-fp8", "b200", "flashinfer_cutlass", True),
        ("qwen3-30b-a3b-fp8", "b200", "flashinfer_trtllm_routed", False),
        ("qwen3-30b-a3b-fp8", "h100-80g", "flashinfer_cutlass", False),  # its method is not known yet
        ("qwen3-30b-a3b-fp8", "b200", "triton", False),
    ],
)
def test_sglangs_kernels_of_experts_take_certain_quantizations(
    model: str, card: str, runner: str, refused: bool
) -> None:
    """What handle_moe_kernel_config of SGLang 0.5.23 asserts for unquantized and fp8 checkpoints."""
    repeated = Repeated("sglang", ("--moe-runner-backend", runner))
    args = EngineArgs(max_model_len=2048)
    answer = plan(Request(catalog.load(model), gpu(card), args, release=parse_engine("sglang"), repeated=repeated))
    assert (answer.refusal is not None and f"{runner} does not go with" in answer.refusal.text) is refused


DETERMINISTIC = [json.loads(line) for line in (FACTS / "deterministic_sglang.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", DETERMINISTIC, ids=lambda row: f"{row['inputs']['model']} {row['inputs']['argv'][1:]}")
def test_sglangs_deterministic_inference_keeps_the_pool_before_blackwell(row: dict[str, Any]) -> None:
    """tests/facts/deterministic_sglang.jsonl: SGLang 0.5.23's own settings and pools with the flag."""
    assert oracles.compare_sglang(row, catalog.load) == (oracles.EQUAL, [])


@pytest.mark.parametrize(
    ("card", "args", "text"),
    [
        ("t4", {}, "FlashAttention v3 Backend requires"),
        ("h100-80g", {"prefill_attention_backend": "flashmla"}, "runs with fa3, fa4, flashinfer, triton"),
    ],
)
def test_sglangs_deterministic_inference_is_refused_where_its_backend_is(
    card: str, args: dict[str, Any], text: str
) -> None:
    """DETERMINISTIC_ATTENTION_BACKEND_CHOICES, fa3 and (on Blackwell) flashinfer as the usual ones."""
    settings = EngineArgs(max_model_len=2048, **args)
    repeated = Repeated("sglang", ("--enable-deterministic-inference",))
    request = Request(catalog.load("qwen3-0.6b"), gpu(card), settings, parse_engine("sglang"), repeated=repeated)
    refusal = plan(request).refusal
    assert refusal is not None
    assert text in refusal.text


def test_sglangs_deterministic_inference_is_not_modeled_on_blackwell() -> None:
    repeated = Repeated("sglang", ("--enable-deterministic-inference",))
    args = EngineArgs(max_model_len=2048)
    request = Request(catalog.load("qwen3-0.6b"), gpu("b200"), args, parse_engine("sglang"), repeated=repeated)
    with pytest.raises(KvplanError, match="is not modeled with flashinfer"):
        plan(request)


@pytest.mark.parametrize(("part", "dtype"), [("FP8", "bfloat16"), ("NVFP4", "fp8")])
def test_sglang_reads_mixed_precision_beside_a_config_if_a_layer_is_nvfp4(
    tmp_path: Path, part: str, dtype: str
) -> None:
    """SGLang's answer for Falcon-H1 3B with layers in FP8 and an FP8 cache in hf_quant_config.json: bfloat16, because
    it takes such layers for w4afp8's; with a layer in NVFP4 they are modelopt_mixed's (_parse_modelopt_quant_config).
    """
    folder = written(tmp_path, "falcon-h1-3b")
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": part}}
    beside = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": beside}))
    assert planned(load_spec(folder), "b200", engine="sglang").settings.kv_dtype == dtype


def test_sglang_drafts_over_stages_on_prefill_servers_alone() -> None:
    with pytest.raises(KvplanError, match="drafts over pipeline stages with EAGLE or DSpark on a prefill server"):
        planned(catalog.load("qwen3-8b"), engine="sglang", pipeline_parallel_size=2, speculative_method="ngram")


# --- rows of seeds 6401 and 6501 --------------------------------------------------------------------------------------


def test_auto_round_and_awq_reach_towers_that_their_lists_do_not_name(tmp_path: Path) -> None:
    """Mistral-Small-3.1 on vLLM; for Qwen3-VL-235B "The input size is not aligned with the quantized weight shape."."""
    round4 = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
              "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}}}  # fmt: skip
    folder = written(tmp_path, "mistral-small-3.1-24b", quantization_config=round4,
                     text_config={"num_key_value_heads": 16})  # fmt: skip
    assert planned(load_spec(folder), "l40s").memory.weights == 14_687_401_984
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["gate"]}
    refused, starts = (
        planned(load_spec(written(tmp_path, "qwen3-vl-235b-a22b", quantization_config=awq | changes)), "h200",
                tensor_parallel_size=4, mm_encoder_tp_mode="data").refusal
        for changes in ({}, {"modules_to_not_convert": ["visual"]})
    )  # fmt: skip
    assert refused is not None
    assert "4,304" in refused.text
    assert starts is None


@pytest.mark.parametrize(("model", "block"), [("gemma-3-12b", 64), ("gemma-3-27b", 16)])
def test_only_wide_heads_that_see_ahead_have_flashinfers_blocks_on_blackwell(model: str, block: int) -> None:
    """TRITON_FLASHINFER for heads of 256, FLASH_ATTN for those of 128."""
    assert planned(catalog.load(model), "b200").pool.block_size == block


def test_a_requested_backend_leaves_minimax_m3_the_blocks_of_its_own() -> None:
    answer = planned(catalog.load("minimax-m3"), "h200", kv_cache_dtype="fp8", attention_backend="TRITON_ATTN")
    assert answer.pool.block_size == 128


def test_mamba_groups_that_ranks_repeat_make_one_matrix(tmp_path: Path) -> None:
    """Granite 4 h-1b in NVFP4: in_proj has five parts with two scales of 4 bytes each on one rank, one part on two."""
    nvfp4 = {"quant_method": "modelopt", "producer": {"name": "modelopt"},
             "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"],
                              "group_size": 16}}  # fmt: skip
    spec = load_spec(written(tmp_path, "granite-4.0-h-1b", quantization_config=nvfp4))
    assert planned(spec, "h200", tensor_parallel_size=2).memory.weights == 526_604_704


def test_nvfp4_experts_of_deepseek_v4_are_modelopts(tmp_path: Path) -> None:
    """vLLM's answer on an H100: "NvFp4 MoE backend 'FLASHINFER_CUTLASS' does not support the deployment"."""
    stored = dict(catalog.load("deepseek-v4-flash").config["quantization_config"]) | {"moe_quant_algo": "NVFP4"}
    stored["quantized_layers"] = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4"} for layer in range(43)}
    spec = load_spec(written(tmp_path, "deepseek-v4-flash", quantization_config=stored))
    for card, starts in (("h100-80g", False), ("b200", True)):
        refusal = planned(spec, card, tensor_parallel_size=4, moe_backend="flashinfer_cutlass").refusal
        assert (refusal is None or "--moe-backend" not in refusal.text) == starts


def test_a_pooling_server_loads_float32_in_float16(tmp_path: Path) -> None:
    """Of SmolLM2-135M as of Gemma 3, which vLLM rejects in float16."""
    for model, dtype in (("smollm2-135m", "float16"), ("gemma-3-1b", "bfloat16")):
        spec = load_spec(written(tmp_path, model, dtype="float32", torch_dtype=None))
        assert planned(spec, runner="pooling").settings.dtype == dtype
        assert planned(spec).settings.dtype == "bfloat16"


def test_states_follow_the_blocks_of_the_cache_whatever_their_flag_says() -> None:
    """Qwen3.6-27B on four ranks: 832 tokens with and without --mamba-block-size."""
    spec = catalog.load("qwen3.6-27b")
    args: dict[str, Any] = {"tensor_parallel_size": 4, "mamba_block_size": 128}
    assert planned(spec, "a100-80g", block_size=64, **args).pool.block_size == 832
    refusal = planned(spec, "a100-80g", enable_prefix_caching=False, **args).refusal
    assert refusal is not None
    assert "can only be set with --enable-prefix-caching" in refusal.text
    with pytest.raises(KvplanError, match="is not modeled for"):
        planned(catalog.load("mamba-2.8b"), enable_prefix_caching=True, mamba_block_size=128)


def test_a_config_without_a_length_takes_any_context() -> None:
    """Mamba 2.8B: vLLM takes the 40,000 tokens it is told, and 2,048 of itself."""
    spec = catalog.load("mamba-2.8b")
    assert [planned(spec, max_model_len=length).settings.max_model_len for length in (40_000, None)] == [40_000, 2048]


def test_adapters_beside_experts_in_int8_are_sized() -> None:
    """Qwen3-Next with two adapters of rank 8 and --quantization int8_per_channel_weight_only: vLLM starts."""
    args: dict[str, Any] = {"quantization": "int8_per_channel_weight_only", "max_loras": 2, "max_lora_rank": 8}
    by_channel, by_experts = (planned(catalog.load("qwen3-next-80b-a3b"), "h200", tensor_parallel_size=4, **flags)
                              for flags in (args, args | {"quantization": "experts_int8"}))  # fmt: skip
    assert by_channel.memory == by_experts.memory


def test_pairs_of_image_positions_fill_a_heads_rotary_table(tmp_path: Path) -> None:
    """Qwen3.5-35B, of whose heads a quarter is rotated: 32 pairs in 11 + 11 + 10, and 16 in heads of 128."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    whole, half = (
        planned(
            load_spec(written(tmp_path, "qwen3.5-35b-a3b", text_config={"head_dim": width, "rope_parameters": rope}))
        )
        for width in (256, 128)
    )
    assert whole.refusal is None
    assert half.refusal is not None
    assert "32 pairs of rotated values, a head 16" in half.refusal.text


def test_an_algorithm_that_no_class_claims_contradicts_the_flag(tmp_path: Path) -> None:
    """vLLM's answer: "Quantization method specified in the model config (modelopt) does not match"."""
    stored = {"quant_method": "modelopt", "producer": {"name": "modelopt"},
              "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]}}  # fmt: skip
    spec = load_spec(written(tmp_path, "qwen3-8b", quantization_config=stored))
    with pytest.raises(KvplanError, match="is stored as modelopt; remove the flag"):
        planned(spec, quantization="fp8")


def test_scales_of_packed_weights_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    """Phi-4-mini in float32 on four ranks: an MLP in W4A16 and attention in FP8, as vLLM creates them."""
    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    groups = {
        "group_0": {"targets": ["re:.*mlp.*"], "weights": int4, "format": "pack-quantized"},
        "group_1": {
            "targets": ["re:.*self_attn.*"],
            "weights": fp8 | {"strategy": "channel"},
            "input_activations": fp8 | {"strategy": "token", "dynamic": True},
        },
    }
    stored = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": groups}
    spec = load_spec(written(tmp_path, "phi-4-mini", quantization_config=stored | {"format": "mixed-precision"}))
    args: dict[str, Any] = {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8", "dtype": "float32"}
    assert planned(spec, **args).memory.weights == 1_138_145_024
