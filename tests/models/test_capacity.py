"""The KV pool against what real servers computed and logged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.spec import Quantization, Scheme
from kvplan.planning.explain import explain
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.refusals import reason_of

GIB = 2**30
FORTY = 40 * GIB


def sized(model: str, gpu_name: str = "h100-80g", engine: str = "vllm", budget: int = FORTY, **args: Any) -> Plan:
    flags = EngineArgs(kv_cache_memory_bytes=budget, **args)
    return plan(Request(catalog.load(model), gpu(gpu_name), flags, parse_engine(engine)))


def refused(model: str, gpu_name: str, engine: str = "vllm", **args: Any) -> str:
    """Why the server does not start, whatever the memory."""
    return reason_of(sized(model, gpu_name, engine, **args))


# vLLM 0.33's own capacity code, 40 GiB of KV per rank, its defaults as an API server.
SERVER_ANSWERS = [
    ("llama-3.1-8b", "h100-80g", {"max_model_len": 131072}, 20_480, 327_680, 2.5),
    ("llama-3.1-70b", "h100-80g", {"tensor_parallel_size": 4, "max_model_len": 131072}, 32_768, 524_288, 4.0),
    ("mistral-7b-v0.1", "h100-80g", {"max_model_len": 32768}, 20_480, 523_878, 15.9875),
    ("gemma-3-27b", "h100-80g", {"max_model_len": 131072}, 32_768, 291_658, 2.2252),
    ("gpt-oss-20b", "h100-80g", {"max_model_len": 131072}, 109_226, 1_551_920, 11.8402),
    ("deepseek-v3", "h200", {"tensor_parallel_size": 8, "max_model_len": 163840}, 38_199, 611_184, 3.7304),
    ("qwen3-30b-a3b", "h100-80g", {"max_model_len": 40960}, 27_306, 436_896, 10.6664),
    ("mixtral-8x7b", "h100-80g", {"tensor_parallel_size": 2, "max_model_len": 32768}, 40_960, 655_360, 20.0),
    (
        "qwen3-next-80b-a3b", "h100-80g", {"tensor_parallel_size": 4, "max_model_len": 262144},
        10_922, 3_453_723, 13.1749,
    ),
    (
        "llama-4-scout", "h100-80g", {"tensor_parallel_size": 8, "max_model_len": 131072},
        436_906, 4_473_917, 34.1333,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu_name", "args", "blocks", "tokens", "concurrency"), SERVER_ANSWERS)
def test_blocks_tokens_and_concurrency_equal_the_servers(
    model: str, gpu_name: str, args: dict[str, Any], blocks: int, tokens: int, concurrency: float
) -> None:
    got = sized(model, gpu_name, **args).capacity
    assert (got.num_blocks, got.tokens) == (blocks, tokens)
    assert got.max_concurrency == pytest.approx(concurrency, abs=0.00005)


# Start-up logs that users posted, each with the KV memory or block count its server had (issues of vllm-project/vllm
# and others, named beside); the logged figure has two decimals.
LOGGED = [
    # noonghunna/club-3090#612, v0.24, RTX 5090, fp8 KV, 5.98 GiB; that project's files cache prefixes by a flag
    (
        "qwen3.6-35b-a3b", "rtx-5090", "vllm@0.24", int(5.98 * GIB),
        {"max_model_len": 131072, "kv_cache_dtype": "fp8", "enable_prefix_caching": True}, 4.33, 0.02,
    ),
    # vllm#40691, v0.19, H20, states not checkpointed: 1,487 blocks of 784 tokens
    (
        "qwen3.5-27b", "h20", "vllm@0.19", None,
        {"max_model_len": 32768, "enable_prefix_caching": False, "num_gpu_blocks_override": 1487}, 33.04, 0.005,
    ),
    # vllm#19029, every layer slides: 137,407 blocks
    (
        "starcoder2-3b", "a100-80g", "vllm@0.9", None,
        {"max_model_len": 16384, "max_num_batched_tokens": 8192, "num_gpu_blocks_override": 137407}, 178.68, 0.005,
    ),
    # vllm#15783, v0.8: 46.11 GiB
    ("qwen2.5-7b", "a100-80g", "vllm@0.8", int(46.11 * GIB), {"max_model_len": 10240}, 84.32, 0.02),
    # vllm#10517, RTX 3090: 3.81 GiB
    ("llama-3.1-8b", "rtx-3090", "vllm@0.6", int(3.81 * GIB), {"max_model_len": 20000}, 1.56, 0.005),
    # vllm#17122, L40S: 158,656 tokens at 16 a block
    (
        "llama-3.1-8b", "l40s", "vllm@0.8", None,
        {"max_model_len": 32768, "num_gpu_blocks_override": 158656 // 16}, 4.84, 0.005,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu_name", "engine", "budget", "args", "logged", "rounding"), LOGGED)
def test_concurrency_equals_what_servers_logged(
    model: str, gpu_name: str, engine: str, budget: int | None, args: dict[str, Any], logged: float, rounding: float
) -> None:
    got = sized(model, gpu_name, engine, budget or FORTY, **args)
    assert got.capacity.max_concurrency == pytest.approx(logged, abs=rounding)


def test_old_servers_count_tokens_of_one_group() -> None:
    # ggerganov-style hybrid log of hf-mem#61: gemma-4-31B, 10,051 blocks, 6 groups of 16 tokens -> 26,800 tokens.
    old = sized("gemma-4-31b", "h100-80g", "vllm@0.19", num_gpu_blocks_override=10_051)
    assert old.capacity.tokens == 26_800


def test_one_block_less_than_needed_does_not_start() -> None:
    # Llama-3.1-8B at 8,192 tokens: 512 blocks of 2 MiB, and the null block.
    need = (512 + 1) * 2_097_152
    assert sized("llama-3.1-8b", max_model_len=8192, budget=need).fits
    short = sized("llama-3.1-8b", max_model_len=8192, budget=need - 1)
    assert not short.fits
    assert short.deficit == 1


@pytest.mark.parametrize("budget", [GIB, FORTY])
@pytest.mark.parametrize(("blocks", "starts"), [(100, False), (512, False), (513, True), (30_000, True)])
def test_an_override_replaces_the_memory_that_a_request_is_checked_against(
    budget: int, blocks: int, starts: bool
) -> None:
    # 8,192 tokens of Llama-3.1-8B are 512 blocks, and the null block; the budget is no longer looked at.
    got = sized("llama-3.1-8b", max_model_len=8192, budget=budget, num_gpu_blocks_override=blocks)
    assert (got.fits, got.capacity.num_blocks) == (starts, blocks)
    assert got.deficit == max(0, 513 - blocks) * 2_097_152


def test_auto_fit_takes_the_context_that_an_override_holds() -> None:
    # 100 blocks of 16 tokens, one of them the null block (vLLM 0.33's own answer).
    got = sized("llama-3.1-8b", max_model_len="auto", num_gpu_blocks_override=100)
    assert (got.fits, got.capacity.max_model_len) == (True, 99 * 16)


def test_before_0_21_an_override_came_after_the_check() -> None:
    # vLLM 0.20 v1/core/kv_cache_utils.py: the memory decides whether it starts, then the blocks are replaced.
    got = sized("llama-3.1-8b", engine="vllm@0.20", max_model_len=8192, num_gpu_blocks_override=100)
    assert (got.fits, got.capacity.num_blocks) == (True, 100)
    assert not sized(
        "llama-3.1-8b", engine="vllm@0.20", max_model_len=8192, budget=GIB - 1, num_gpu_blocks_override=30_000
    ).fits


def test_the_null_block_is_asked_for_from_0_29_on() -> None:
    need = 512 * 2_097_152  # 8,192 tokens of Llama-3.1-8B without a null block
    assert sized("llama-3.1-8b", engine="vllm@0.28", max_model_len=8192, budget=need).fits
    assert not sized("llama-3.1-8b", engine="vllm@0.29", max_model_len=8192, budget=need).fits


def test_the_explanation_of_an_override_names_its_blocks() -> None:
    refused = sized("llama-3.1-8b", max_model_len=8192, num_gpu_blocks_override=100)
    lines = "\n".join(line for section in explain(refused) for line in section.lines)
    # 513 x 2 MiB needed, 100 x 2 MiB there
    assert "(512 + 1 null block) x 2,097,152 B = 1,075,838,976 B > 209,715,200 B: refused, 866,123,776 B short" in lines


@pytest.mark.parametrize("dtype", ["nvfp4", "nvfp4_4over6"])
def test_nvfp4_of_latent_attention_is_refused(dtype: str) -> None:
    # vLLM 0.33 config/vllm.py, validate_nvfp4_kv_cache_with_mla
    with pytest.raises(UsageError, match=f"{dtype}': an MLA model has no such cache"):
        sized("deepseek-v3", "b200", tensor_parallel_size=8, kv_cache_dtype=dtype)


def test_a_16_bit_cache_of_sparse_attention_is_refused_where_ranks_share_its_tokens() -> None:
    # vLLM 0.33: "DCP for FlashMLA sparse requires an fp8_ds_mla kv-cache", and no other backend takes DCP there
    shared: dict[str, Any] = {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}
    assert "no attention backend runs deepseek-v3.2" in refused("deepseek-v3.2", "h200", **shared)
    assert sized("deepseek-v3.2", "h200", kv_cache_dtype="fp8", **shared).settings.kv_dtype == "fp8_ds_mla"


# What vLLM 0.33 itself did with these: the bytes of a token and layer it kept, or no attention backend.
SPARSE_CACHES = [
    ("deepseek-v3.2", "h200", "auto", 1, 1152), ("deepseek-v3.2", "h200", "fp8", 1, 656),
    ("deepseek-v3.2", "h200", "fp8_e4m3", 1, 576), ("deepseek-v3.2", "h200", "fp8_e4m3", 2, None),
    ("deepseek-v3.2", "h200", "fp8", 2, 656), ("deepseek-v3.2", "h200", "nvfp4_ds_mla", 1, None),
    ("deepseek-v3.2", "h200", "bfloat16", 2, None), ("deepseek-v3.2", "b200", "auto", 2, 1152),
    ("deepseek-v3.2", "b200", "fp8_e4m3", 2, 576), ("deepseek-v3.2", "b200", "fp8_ds_mla", 1, 656),
    ("deepseek-v3.2", "b200", "nvfp4_ds_mla", 1, 352), ("glm-5", "b200", "auto", 1, 576),
    ("deepseek-v3.2", "rtx-5090", "auto", 1, 656), ("deepseek-v3.2", "rtx-5090", "bfloat16", 1, 656),
    ("glm-5", "rtx-5090", "fp8_e4m3", 1, 656), ("glm-5", "rtx-5090", "bfloat16", 1, None),
    ("glm-5", "rtx-5090", "fp8", 2, None), ("deepseek-v2-lite", "a10g", "fp8", 1, None),
    ("deepseek-v3", "b200", "nvfp4_ds_mla", 1, None), ("deepseek-v3", "b200", "fp8", 1, 576),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu_name", "dtype", "dcp", "token"), SPARSE_CACHES)
def test_caches_of_latent_attention_are_those_that_a_gpu_has_backends_for(
    model: str, gpu_name: str, dtype: str, dcp: int, token: int | None
) -> None:
    args: dict[str, Any] = {"tensor_parallel_size": 8, "decode_context_parallel_size": dcp, "max_model_len": 8192}
    if token is None:
        assert refused(model, gpu_name, kv_cache_dtype=dtype, **args)
        return
    layout = sized(model, gpu_name, kv_cache_dtype=dtype, **args).pool
    latent = layout.groups[0].first
    assert latent.page == token * latent.block_size


def test_before_0_30_plain_fp8_of_sparse_attention_was_refused_on_hopper() -> None:
    args: dict[str, Any] = {"tensor_parallel_size": 8, "kv_cache_dtype": "fp8_e4m3"}
    assert "no attention backend keeps a KV cache of fp8_e4m3" in refused("deepseek-v3.2", "h200", "vllm@0.28", **args)


# vLLM 0.33: "No valid attention backend found" for those that are refused.
@pytest.mark.parametrize(
    ("model", "gpu_name", "dtype", "taken"),
    [
        ("qwen3-8b", "b200", "nvfp4_4over6", True), ("qwen3-8b", "h100-80g", "nvfp4", True),
        ("qwen3-8b", "h100-80g", "nvfp4_4over6", False), ("gpt-oss-20b", "b200", "nvfp4", True),
        ("gpt-oss-20b", "h100-80g", "nvfp4", False), ("gemma-3-12b", "b200", "nvfp4", False),
        ("gemma-3-12b", "a10g", "fp8", False), ("qwen3-8b", "a10g", "fp8", True),
        ("qwen3.5-27b", "h100-80g", "nvfp4", True), ("qwen3.5-27b", "h100-80g", "nvfp4_4over6", False),
    ],
)  # fmt: skip
def test_four_bit_caches_are_those_that_flashinfer_reads(model: str, gpu_name: str, dtype: str, taken: bool) -> None:
    if taken:
        assert sized(model, gpu_name, kv_cache_dtype=dtype, max_model_len=8192).settings.kv_dtype == dtype
        return
    why = refused(model, gpu_name, kv_cache_dtype=dtype, max_model_len=8192)
    assert f"no attention backend keeps a KV cache of {dtype}" in why


@pytest.mark.parametrize(("engine", "concurrency"), [("vllm@0.9", 13.33), ("vllm@0.11", 13.33), ("vllm@0.14", 38.79)])
def test_before_0_14_chunked_layers_were_counted_in_full(engine: str, concurrency: float) -> None:
    """40 GiB over 131,072 tokens x 48 layers x 512 B; then blocks of 12 layers x 16 x 512 B, of which a request is
    charged 131,072 / 16 in full and 3 x (8,192 of a chunk + 8,192 of a batch) / 16. vLLM 0.9.2 knows no chunks, 0.10.2
    and 0.11.0 turn their groups off by default."""
    got = sized("llama-4-scout", "h200", engine, tensor_parallel_size=8, max_model_len=131072)
    assert got.capacity.max_concurrency == pytest.approx(concurrency, abs=0.01)


def test_before_0_14_no_backend_was_left_out_for_images() -> None:
    """`supports_mm_prefix` is in no file of 0.11.0, and in 0.14.0 and later."""
    args: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 8192, "kv_cache_dtype": "fp8"}
    stated = sized("gemma-3-12b", "a10g", "vllm@0.11", **args).refusal
    assert stated is not None
    assert stated.by == "stated_pool"  # 40 GiB: it comes after what is refused whatever the memory
    assert refused("gemma-3-12b", "a10g", "vllm@0.14", **args)


def test_a_checkpoints_own_fp8_cache_is_named_where_it_cannot_be_had() -> None:
    """The flag was not given, so leaving it out is no cure."""
    spec = catalog.load("deepseek-v2-lite")
    stored = replace(spec, quantization=Quantization("fp8", Scheme("fp8_channel"), kv_dtype="fp8"))
    answer = plan(Request(stored, gpu("a10g"), EngineArgs(max_model_len=8192, tensor_parallel_size=2)))
    assert answer.refusal is not None
    assert "no attention backend keeps a KV cache of fp8_e4m3 for deepseek-v2-lite" in answer.refusal.text
    assert answer.refusal.flags[-2:] == ("--kv-cache-dtype bfloat16", "--kv-cache-dtype float16")


# vLLM 0.33's own answers: "requires --tensor-parallel-size to be greater than the model's total number of KV heads"
@pytest.mark.parametrize(
    ("model", "tp", "dcp", "taken"),
    [
        ("qwen3-30b-a3b", 8, 2, True), ("qwen3-30b-a3b", 4, 2, False), ("qwen3-30b-a3b", 8, 4, False),
        ("gpt-oss-20b", 8, 2, False), ("llama-3.1-8b", 8, 8, False), ("qwen3.5-27b", 8, 2, True),
        ("deepseek-v2-lite", 4, 4, True),
    ],
)  # fmt: skip
def test_a_requests_tokens_are_shared_by_ranks_that_hold_the_same_heads(
    model: str, tp: int, dcp: int, taken: bool
) -> None:
    args: dict[str, Any] = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp, "max_model_len": 8192}
    if taken:
        assert sized(model, **args).pool.dcp == dcp
        return
    with pytest.raises(UsageError, match=f"decode_context_parallel_size {dcp}: {model} has . KV heads"):
        sized(model, **args)


@pytest.mark.parametrize(
    ("model", "gpu_name", "only", "block"),
    [
        ("gemma-3-12b", "b200", False, 64), ("gemma-3-12b", "b200", True, 16), ("gemma-4-31b", "b200", False, 64),
        ("gemma-4-31b", "b200", True, 16), ("gemma-4-e4b", "b200", False, 16), ("gemma-4-31b", "h100-80g", True, 16),
    ],
)  # fmt: skip
def test_blocks_are_larger_where_images_look_at_each_other(model: str, gpu_name: str, only: bool, block: int) -> None:
    assert sized(model, gpu_name, max_model_len=8192, language_model_only=only).pool.block_size == block


def test_a_step_need_not_hold_an_image_where_there_are_none() -> None:
    # Gemma 4's item of 2,496 tokens; the L40S's default is 2,048 (vLLM 0.33's own answers)
    steps = [
        sized("gemma-4-31b", "l40s", max_model_len=8192, language_model_only=only).settings.max_num_batched_tokens
        for only in (False, True)
    ]
    assert steps == [2496, 2048]


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("gemma-3-1b", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "does not go with the windows"),
        ("gemma-3n-e2b", {"pipeline_parallel_size": 2}, "gemma-3n-e2b cannot be split into stages"),
        ("nemotron-h-8b", {"enable_chunked_prefill": False}, "does not go with the cached states"),
    ],
)
def test_what_vllm_refuses_at_the_start_is_refused(model: str, args: dict[str, Any], message: str) -> None:
    # vLLM 0.33: "DCP not support sliding window.", "Pipeline parallelism is not supported for this model.", "Chunked
    # prefill is required for Mamba prefix caching."
    assert message in refused(model, "h100-80g", max_model_len=8192, **args)
    assert sized("nemotron-h-8b", max_model_len=8192, enable_chunked_prefill=False, enable_prefix_caching=False).fits


def test_auto_fit_takes_the_largest_context_the_pool_holds() -> None:
    # 8 GiB are 4,096 blocks of 2 MiB; one is the null block: 4,095 x 16 tokens.
    assert sized("llama-3.1-8b", budget=8 * GIB, max_model_len="auto").capacity.max_model_len == 4_095 * 16


@pytest.mark.parametrize(
    ("gpu_name", "usage", "release", "tokens", "seqs"),
    [
        ("a100-80g", "server", "vllm", 2048, 256),
        ("a100-80g", "offline", "vllm", 8192, 256),
        ("l40s", "server", "vllm", 2048, 256),
        ("h100-80g", "server", "vllm", 8192, 1024),
        ("h100-80g", "offline", "vllm", 16384, 1024),
        ("h200", "server", "vllm", 8192, 1024),
        ("b200", "server", "vllm", 16384, 1024),
        ("mi300x", "server", "vllm", 16384, 1024),
        ("gb10", "server", "vllm", 2048, 256),
        # vLLM engine/arg_utils.py of the wheels: 0.27.1 knows no class of 160 GiB, 0.8.5 no A100; 0.8.4 goes by the
        # device's name, and 0.8.3 runs 1,024 sequences on any GPU (vllm-project/vllm#16158). GB10: a log of 0.27.1
        # captures graphs of 256 sequences.
        ("gb10", "server", "vllm@0.27.1", 2048, 256),
        ("b200", "server", "vllm@0.28", 16384, 1024),
        ("b200", "server", "vllm@0.27.1", 8192, 1024),
        ("mi300x", "offline", "vllm@0.20", 16384, 1024),
        ("a100-80g", "server", "vllm@0.9", 2048, 256),
        ("a100-80g", "server", "vllm@0.8.5", 8192, 1024),
        ("mi300x", "server", "vllm@0.8.5", 8192, 1024),
        ("mi300x", "server", "vllm@0.8.4", 2048, 256),
        ("h200", "server", "vllm@0.8.4", 8192, 1024),
        ("rtx-4090", "server", "vllm@0.8.4", 2048, 256),
        ("rtx-4090", "server", "vllm@0.8.3", 2048, 1024),
    ],
)
def test_scheduler_defaults_by_gpu(gpu_name: str, usage: str, release: str, tokens: int, seqs: int) -> None:
    assert vllm.scheduler_defaults(gpu(gpu_name), usage, parse_engine(release)) == (tokens, seqs)


def test_windows_are_charged_with_two_batches_in_flight() -> None:
    # gpt-oss, window 128: cdiv(127 + 2 x tokens in a step, 16) + 1 blocks per group.
    for gpu_name, blocks in (("h100-80g", 1033), ("a100-80g", 265), ("b200", 2057)):
        answer = sized("gpt-oss-20b", gpu_name, max_model_len=131072)
        charged = [g.charged(131072, answer.settings, 1) for g in answer.pool.groups]
        assert sorted(charged) == [blocks, 8192]


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match="supports up to 131,072 tokens"):
        sized("llama-3.1-8b", max_model_len=131_073)


@pytest.mark.parametrize("text", ["tgi", "vllm@", "vllm@1", "vllm@0.34", "vllm@0.33.0.1", "vllm@0.5", "vllm@x.y"])
def test_engines_kvplan_does_not_know_are_refused(text: str) -> None:
    if text == "vllm@":
        assert parse_engine(text).number == vllm.NEWEST
        return
    with pytest.raises(UsageError, match="--engine"):
        parse_engine(text)


def test_versions_differ_where_their_releases_did() -> None:
    # config/cache.py and envs.py of the wheels of 0.19.0 (0.9 and "0") and 0.20.0 (0.92 and "1")
    new, middle, old = (parse_engine(f"vllm@{v}") for v in ("0.33", "0.20", "0.19"))
    assert (new.utilization, middle.utilization, old.utilization) == (0.92, 0.92, 0.90)
    assert [release.has("graphs_in_budget") for release in (new, middle, old)] == [True, True, False]


# --- the reference data, where it is at hand ----------------------------------------------------------------------


@needs_oracle_data
@pytest.mark.parametrize(
    ("cases", "configs", "refused"),
    [
        ("capacity_cases.jsonl", "capacity_configs", 0),
        ("capacity_cases_real.jsonl", "models", 0),
        ("capacity_cases_flags.jsonl", "models", 0),
    ],
)
def test_every_case_of_a_real_servers_capacity_code(
    cases: str, configs: str, refused: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oracles.main(["capacity", str(DATA / cases), str(DATA / configs)]) == 0
    total = len((DATA / cases).read_text().splitlines())
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{total - refused} equal / {refused} refused by name / 0 different"
    )


@needs_oracle_data
def test_every_real_config_is_sized_exactly_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert oracles.main(["models", str(DATA / "models")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("0 different (185 totals with towers exact)")


def planted_case(tmp_path: Path, **result: Any) -> Path:
    """A file with one true case of Llama-3.2-1B, changed by `result`."""
    config = catalog.facts("llama-3.2-1b")["config"]
    folder = tmp_path / "configs" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    # 32 KiB per token x 16 per block: 8 GiB hold 16,384 blocks; 2,048 for a request of 32,768.
    truth = {
        "available_memory": 8 * GIB, "num_gpu_blocks": 16_384, "kv_cache_size_tokens": 262_144, "max_concurrency": 8.0,
    }  # fmt: skip
    case = {
        "inputs": {"model": "m", "max_model_len": 32768, "available_memory": [8 * GIB]},
        "weights": {"param_bytes_per_rank": 2_471_628_800},
        "results": [truth | result],
    }
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(case) + "\n")
    return path


def test_the_capacity_command_passes_a_true_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = planted_case(tmp_path)
    assert oracles.main(["capacity", str(path), str(tmp_path / "configs")]) == 0
    assert capsys.readouterr().out == "1 equal / 0 refused by name / 0 different\n"


@pytest.mark.parametrize("result", [{"num_gpu_blocks": 16_385}, {"max_concurrency": 8.01}, {"error": "does not fit"}])
def test_the_capacity_command_sees_a_planted_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], result: dict[str, Any]
) -> None:
    path = planted_case(tmp_path, **result)
    assert oracles.main(["capacity", str(path), str(tmp_path / "configs")]) == 1
    assert "0 equal / 0 refused by name / 1 different" in capsys.readouterr().out


def test_the_capacity_command_refuses_an_argument_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planted_case(tmp_path)
    case = json.loads(path.read_text())
    case["inputs"]["engine_args"] = {"sparkle_size": 4}
    path.write_text(json.dumps(case) + "\n")
    assert oracles.main(["capacity", str(path), str(tmp_path / "configs")]) == 0
    assert "1 refused by name" in capsys.readouterr().out


def test_a_plan_is_the_same_however_often_it_is_made() -> None:
    first = sized("gemma-3-27b", max_model_len=32768)
    again = plan(replace(first.request))
    assert (first.capacity, first.memory) == (again.capacity, again.memory)


def test_states_without_the_hybrid_manager_are_refused() -> None:
    with pytest.raises(KvplanError, match="hybrid KV cache manager"):
        sized("nemotron-h-8b", disable_hybrid_kv_cache_manager=True)


@pytest.mark.parametrize(
    ("engine", "gpu_name", "context", "tokens", "seqs"),
    [
        ("vllm@0.6", "h100-80g", 8192, 8192, 256),  # a step held a whole prompt
        ("vllm@0.6", "h100-80g", 131072, 2048, 256),  # but for long contexts, which were chunked
        ("vllm@0.8", "v100-32g", 8192, 8192, 256),  # older GPUs kept the first engine longer
        ("vllm@0.8", "h100-80g", 8192, 8192, 1024),
    ],
)
def test_the_first_engine_had_other_defaults(engine: str, gpu_name: str, context: int, tokens: int, seqs: int) -> None:
    got = sized("llama-3.1-8b", gpu_name, engine, max_model_len=context).settings
    assert (got.max_num_batched_tokens, got.max_num_seqs) == (tokens, seqs)
