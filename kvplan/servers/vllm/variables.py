"""Environment variables of vLLM that change its memory."""

from collections.abc import Mapping
from typing import Final

from kvplan.models.spec import ChunkedAttention, ModelSpec
from kvplan.servers.words.arguments import EngineArgs
from kvplan.servers.words.command import Variable


def _has_chunks(spec: ModelSpec, args: EngineArgs) -> bool:
    return ChunkedAttention in spec.cache_kinds


def _offloads(spec: ModelSpec, args: EngineArgs) -> bool:
    return bool(args.kv_offloading_size) and args.kv_offloading_backend != "lmcache"


def _uses_lmcache(spec: ModelSpec, args: EngineArgs) -> bool:
    return "LMCache" in (args.kv_transfer_config or "") or args.kv_offloading_backend == "lmcache"


VARIABLES: Final[Mapping[str, Variable]] = {
    "VLLM_USE_V1": Variable(
        "vllm", "first_engine", "off", "0 runs the first engine, with its own batches and sampler",
        "vLLM 0.8.5, 0.9.2, 0.10.2 engine/arg_utils.py; 0.11 has the second engine alone", (0, 8), (0, 11),
    ),
    "VLLM_USE_FLASHINFER_SAMPLER": Variable(
        "vllm", "flashinfer", "on", "1 samples without a sort",
        "vLLM 0.8.5, 0.9.2, 0.10.2, 0.11.0, 0.14.0, 0.16.0 v1/sample/ops/topk_topp_sampler.py", (0, 8), (0, 17),
    ),
    "VLLM_USE_V2_MODEL_RUNNER": Variable(
        "vllm", "runner_v2", "on", "which model runner profiles and samples", "vLLM 0.22 to 0.33 config/vllm.py",
        (0, 22),
    ),
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": Variable(
        "vllm", "estimates_graphs", "on", "0 takes no estimate of the CUDA graphs off the budget",
        "vLLM 0.20 to 0.33 v1/worker/gpu_worker.py; 0.18 and 0.19 have it off by default", (0, 20),
    ),
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": Variable(
        "vllm", "pinned_weights", "off", "1 keeps offloaded weights in their own size; pinned, torch rounds each up",
        "vLLM 0.19 to 0.33 envs.py and model_executor/offloader/base.py", (0, 17),
    ),
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": Variable(
        "vllm", "indexer_logits_mib", "size", "MiB of logits that a sparse indexer makes in the profile run",
        "vLLM 0.19 to 0.33 model_executor/layers/sparse_attn_indexer.py", (0, 19),
    ),
    "VLLM_ATTENTION_BACKEND": Variable(
        "vllm", "attention_backend", "text", "the attention backend, as --attention-backend",
        "vLLM 0.8.5 to 0.14.0 envs.py; 0.16 reads it no more", (0, 6), (0, 16),
    ),
    "VLLM_FUSED_MOE_CHUNK_SIZE": Variable(
        "vllm", "expert_tokens", "size", "tokens that go through fused experts at once",
        "vLLM 0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16, 0.17 envs.py; 0.18 has it no more", (0, 8), (0, 18),
    ),
    "VLLM_MLA_DISABLE": Variable(
        "vllm", "", "on", "1 keeps full keys and values of every head in place of latents",
        "vLLM 0.8.5 to 0.33 config/model.py", (0, 7), None, lambda spec, *_: spec.is_mla,
    ),
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": Variable(
        "vllm", "", "on", "whether layers of chunked attention keep no more than the chunk",
        "vLLM 0.10.2 to 0.32 config/vllm.py and envs.py", (0, 10), None, _has_chunks, usual=(),
    ),
    "VLLM_PP_LAYER_PARTITION": Variable(
        "vllm", "pp_layer_partition", "text", "the layers of each pipeline stage",
        "vLLM 0.8.5 to 0.33 distributed/utils.py", (0, 6),
    ),
    "VLLM_USE_SIMPLE_KV_OFFLOAD": Variable(
        "vllm", "", "on", "1 keeps --kv-offloading-size in SimpleCPUOffloadConnector; name it in --kv-transfer-config",
        "vLLM 0.19 to 0.33 envs.py and config/vllm.py", (0, 19), None, _offloads,
    ),
    "LMCACHE_MAX_LOCAL_CPU_SIZE": Variable(
        "vllm", "lmcache_max_local_cpu_size", "gib", "GiB of host memory that LMCache takes in each rank",
        "LMCache's documentation (max_local_cpu_size)", (0, 8),
    ),
    "LMCACHE_CONFIG_FILE": Variable(
        "vllm", "", "text", "a file of LMCache's settings, which is not read; write LMCACHE_MAX_LOCAL_CPU_SIZE",
        "LMCache's documentation", (0, 8), None, _uses_lmcache,
    ),
    "LMCACHE_USE_LAYERWISE": Variable(
        "vllm", "", "on", "true allows only piecewise CUDA graphs", "vLLM 0.33 lmcache_connector.py", (0, 8), None,
        _uses_lmcache, usual=("", "0", "false", "False"),
    ),
}  # fmt: skip
