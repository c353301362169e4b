"""Every difference between releases that an answer knows of: what changed, with which release, and who says so.

`read` names the releases whose own code was looked at: of 0.8 to 0.33 the first wheel of each but 0.12, 0.13 and 0.15,
and 0.8.5, 0.9.2, 0.10.2 and 0.27.1. Of what lies between two that were read, and of patches, a change is inferred.
Where logs are the source, tests/core/test_versions.py and reports/accuracy hold the rules against them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass

Number = tuple[int, int]
SGLANG_SOURCE = "sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py and srt/arg_groups/memory_hook.py"


@dataclass(frozen=True, slots=True)
class Change:
    """In every release of vLLM from `since` on, or of SGLang, whose third field counts.

    read  releases whose wheels were read on it; empty: it rests on logs, notes or issues alone
    """

    since: tuple[int, ...]
    what: str
    source: str
    read: str = ""

    @property
    def evidence(self) -> str:
        """The source, and the releases that were read."""
        return f"{self.source}; read in {self.read}" if self.read else f"{self.source}; inferred, no wheel read"


CHANGES = {
    "latent_cache": Change(
        (0, 7), "the pool holds MLA's latents, in entries of a multiple of 256 bytes until V1; before, full heads",
        "vLLM 0.7 worker/cache_engine.py; a log of DeepSeek-R1 on 0.7",
    ),
    "plain_projections": Change(
        (0, 8), "MLA keeps its projections apart; 0.7 kept them multiplied out beside the weights",
        "vLLM 0.7.3 attention/backends/mla; DeepSeek-R1 on 8 H200 and on 3 x 8 L20",
    ),
    "v1": Change(
        (0, 8), "the second engine by default from Ampere on: chunked prefill of 2,048 or 8,192 tokens a step, by the "
        "GPU; sampling with FlashInfer where it is installed", "release notes of 0.8; logs of 0.8 to 0.10",
    ),
    "fewer_sequences": Change(
        (0, 8, 4), "256 sequences at once by default on GPUs other than H100 and H200; the second engine ran 1,024",
        "vLLM engine/arg_utils.py (_set_default_args_v1); vllm-project/vllm#16158", "0.8.0, 0.8.2 to 0.8.5",
    ),
    "classes_by_memory": Change(
        (0, 8, 5), "the defaults of H100 for every GPU of 70 GiB or more; before, for H100 and H200 by name",
        "vLLM engine/arg_utils.py (_set_default_args_v1)", "0.8.4, 0.8.5",
    ),
    "a100_small": Change(
        (0, 9), "an A100 takes the defaults of small GPUs", "vLLM engine/arg_utils.py; vllm-project/vllm#17885",
        "0.8.5, 0.9.2",
    ),
    "hybrid_groups": Change(
        (0, 9), "windows keep no more than the window where a model mixes them with full attention",
        "vLLM 0.9.1 (hybrid KV cache manager)",
    ),
    "no_float16": Change(
        (0, 9), "Gemma 2, Gemma 3 and GLM-4 are refused in float16", "vllm-project/vllm#15766 ran one on 0.8",
    ),
    "start_gate": Change(
        (0, 9), "a server does not start where less memory is free than it may use",
        "vLLM v1/worker/gpu_worker.py (init_device)", "0.8.5, 0.9.2",
    ),
    "others_apart": Change(
        (0, 9), "memory that other processes hold does not count against the second engine's budget; before, it did",
        "vLLM v1/worker/gpu_worker.py (determine_available_memory)", "0.8.5, 0.9.2",
    ),
    "eplb": Change(
        (0, 9, 2), "experts may have spare copies and move between ranks (EPLB)", "vLLM distributed/eplb",
        "0.9.2 to 0.33",
    ),
    "items_by_batch": Change(
        (0, 10), "the encoder is profiled with as many of the largest items as fit its budget; before, one more",
        "vLLM v1/worker/utils.py, then multimodal/encoder_budget.py (MultiModalBudget)",
        "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16 to 0.33",
    ),
    "encoders_in_v1": Change(
        (0, 10), "V1 runs encoders, without a KV cache; before, V0 did", "vLLM v1/kv_cache_interface.py",
        "0.9.2 and 0.10.2",
    ),
    "runner_flag": Change(
        (0, 10, 1), "--runner and --convert; before, --task", "vLLM engine/arg_utils.py; vllm-project/vllm#21470",
        "0.9.2, 0.10.2, 0.11, 0.14",
    ),
    "sequence_parallel_experts": Change(
        (0, 10, 2), "ranks of several data-parallel replicas keep shared experts whole and share the tokens",
        "vLLM config/parallel.py (use_sequence_parallel_moe), model_executor/models/deepseek_v2.py",
        "0.9.2, 0.10.2, 0.11, 0.14",
    ),
    "padded_items": Change(
        (0, 11), "the profile run keeps each item's output padded to the encoder's whole budget",
        "vLLM v1/worker/gpu_model_runner.py (profile_run)", "0.10.2, 0.11, 0.14",
    ),
    "shorter_videos": Change(
        (0, 11), "the largest video of Qwen2-VL and Qwen2.5-VL has 14 frames; before, 16",
        "vLLM model_executor/models/qwen2_vl.py (_MAX_FRAMES_PER_VIDEO)", "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14 to 0.33",
    ),
    "v1_only": Change(
        (0, 11), "the second engine on every GPU; sampling sorts again: 38 bytes a sequence and vocabulary entry",
        "release notes of 0.11; llm-d-benchmark on H100",
    ),
    "encoder_data": Change(
        (0, 11), "--mm-encoder-tp-mode data: each rank holds the whole encoder",
        "vLLM model_executor/models (supports_encoder_tp_data)", "0.10.2 and 0.11",
    ),
    "attention_backend_names": Change(
        (0, 11), "attention backends go by one name; before, the second engine's ended in _VLLM_V1",
        "vLLM platforms/interface.py (_Backend)", "0.8.5, 0.9.2, 0.10.2, 0.11",
    ),
    "async_scheduling": Change(
        (0, 14), "one more batch is scheduled while the last one runs",
        "vLLM config/vllm.py (async_scheduling)", "0.11, 0.14",
    ),
    "chunked_groups": Change(
        (0, 14), "layers of chunked attention keep no more than the chunk; before, they are counted in full",
        "vLLM config/vllm.py and envs.py (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE, off until then)",
        "0.9.2, 0.10.2, 0.11, 0.14, 0.20",
    ),
    "items_as_they_are": Change(
        (0, 14), "the profile run keeps the outputs of items as they are; from 0.11 on padded",
        "vLLM v1/worker/gpu_model_runner.py (profile_run)", "0.11, 0.14, 0.16 to 0.33",
    ),
    "embeddings_counted": Change(
        (0, 14), "an item counts its embeddings alone; from 0.10 on, what stands between them too",
        "vLLM multimodal/profiling.py, then multimodal/encoder_budget.py", "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16",
    ),
    "video_without_timestamps": Change(
        (0, 14), "the largest video of Qwen3-VL counts its own tokens; before, 12.5 for each, with its timestamps",
        "vLLM model_executor/models/qwen3_vl.py (get_max_video_tokens)", "0.11, 0.14, 0.16 to 0.33",
    ),
    "gpt_oss_graphs": Change(
        (0, 14), "graphs of up to 1,024 tokens for gpt-oss on every GPU",
        "vLLM model_executor/models/config.py (GptOssForCausalLMConfig)", "0.11, 0.14, 0.20, 0.26, 0.28, 0.33",
    ),
    "images_look_ahead": Change(
        (0, 14), "the tokens of an image attend to each other both ways in Gemma 3, which few attention backends do",
        "vLLM v1/attention/backends (supports_mm_prefix)", "0.11, 0.14, 0.16 to 0.32",
    ),
    "small_expert_chunks": Change(
        (0, 14), "fused experts take 16,384 tokens at once; before, 32,768",
        "vLLM envs.py (VLLM_FUSED_MOE_CHUNK_SIZE)", "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16, 0.17",
    ),
    "graph_size_flag": Change(
        (0, 14), "--max-cudagraph-capture-size says the largest CUDA graph",
        "vLLM engine/arg_utils.py and config/vllm.py (_set_cudagraph_sizes)", "0.10.2, 0.11, 0.14, 0.16 to 0.33",
    ),
    "attention_backend_flag": Change(
        (0, 14), "--attention-backend; before, VLLM_ATTENTION_BACKEND",
        "vLLM engine/arg_utils.py and envs.py", "0.11, 0.14, 0.16 to 0.33",
    ),
    "auto_context": Change((0, 14), "--max-model-len auto", "vllm-project/vllm#29431"),
    "indexer_workspace": Change(
        (0, 14), "sparse attention reserves a workspace for the index keys of a prefill: 40 contexts of 132 B a token",
        "vLLM v1/attention/backends/mla/indexer.py (get_max_prefill_buffer_size)", "0.11, 0.14, 0.16 to 0.33",
    ),
    "groups_by_wish": Change(
        (0, 14), "--no-disable-hybrid-kv-cache-manager keeps windows short beside a KV connector, too",
        "vLLM config/vllm.py", "0.9.2, 0.10.2, 0.11, 0.14, 0.16 to 0.21",
    ),
    "cached_states": Change(
        (0, 16), "--enable-prefix-caching keeps recurrent states at block ends: attention blocks cover them",
        "vLLM v1/kv_cache_interface.py (MambaSpec), model_executor/models/config.py", "0.11, 0.14, 0.16 to 0.33",
    ),
    "towers_left_out": Change(
        (0, 16), "a limit of zero for all the inputs of a tower leaves it out; before, some classes did",
        "vLLM model_executor/models/interfaces.py (_mark_tower_model)", "0.14 and 0.16",
    ),
    "language_model_only": Change(
        (0, 17), "--language-model-only", "vLLM config/multimodal.py", "0.16 and 0.17",
    ),
    "lean_sampler": Change(
        (0, 17), "sampling takes 15 bytes a sequence and vocabulary entry, not 38",
        "llm-d-planner: Qwen3-14B 5.64 GiB in 0.16, 2.23 in 0.17",
    ),
    "prefetched_weights": Change(
        (0, 17), "--offload-group-size fetches the weights of some layers from host memory",
        "vLLM engine/arg_utils.py and config/offload.py", "0.14, 0.16 to 0.20, 0.33",
    ),
    "whole_expert_batches": Change(
        (0, 18), "fused experts take a whole batch at once; VLLM_FUSED_MOE_CHUNK_SIZE is gone",
        "vLLM envs.py and layers/fused_moe/modular_kernel.py", "0.17 to 0.20, 0.22, 0.26, 0.30, 0.32, 0.33",
    ),
    "backend_checks_blocks": Change(
        (0, 18), "an attention backend that was asked for refuses blocks it has no kernel for; before, it changed them",
        "vLLM platforms/cuda.py (check_and_update_config)", "0.10.2, 0.14, 0.16 to 0.33",
    ),
    "all_reduce_buffers": Change(
        (0, 18), "buffers for all-reduce over NVLink: about 2 GiB a rank", "llm-d-planner v0.19.0 accuracy report",
    ),
    "no_pplx": Change(
        (0, 19), "the exchanges named pplx and naive stand for allgather_reducescatter",
        "vLLM config/parallel.py", "0.18, 0.19, 0.20, 0.33",
    ),
    "indexer_logits": Change(
        (0, 19), "sparse attention sets 512 MiB aside for a prefill's scores against the index keys",
        "vLLM envs.py (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)", "0.14 to 0.33",
    ),
    "few_tokens_batched": Change(
        (0, 20), "256 tokens a step by default where experts' ranks exchange batches (deepep_low_latency)",
        "vLLM engine/arg_utils.py", "0.18, 0.19, 0.20, 0.33",
    ),
    "utilization_092": Change(
        (0, 20), "gpu_memory_utilization 0.92 by default, 0.90 before", "vLLM config/cache.py",
        "0.10, 0.11, 0.14, 0.16 to 0.33",
    ),
    "graphs_in_budget": Change(
        (0, 20), "an estimate of the CUDA graphs is taken off the budget; before, graphs came on top of it",
        "vLLM envs.py (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); its log line says 0.21", "0.18 to 0.33",
    ),
    "state_blocks": Change(
        (0, 20), "a server with recurrent states and CUDA graphs does not start with more sequences than blocks; 0.18 "
        "and 0.19 captured fewer graphs", "vLLM config/compilation.py", "0.18 to 0.20",
    ),
    "tokens_by_concurrency": Change(
        (0, 21), '"GPU KV cache size" is concurrency x context; before, one group\'s blocks',
        "vllm-project/vllm#40691; vLLM v1/core/kv_cache_utils.py", "0.18 to 0.29",
    ),
    "chosen_items": Change(
        (0, 21), "--mm-processor-kwargs and --limit-mm-per-prompt bound the largest image and video of Gemma 4",
        "vLLM model_executor/models/gemma4_mm.py (get_mm_max_tokens_per_item)", "0.19 to 0.33",
    ),
    "override_before_fit": Change(
        (0, 21), "--num-gpu-blocks-override replaces the memory before auto-fit and the check that one request fits; "
        "before, it only replaced the pool of a server that had passed them",
        "vLLM v1/core/kv_cache_utils.py (get_kv_cache_configs)", "0.8 to 0.33, 0.20 and 0.21 among them",
    ),
    "offloaded_in_shm": Change(
        (0, 21), "offloaded KV lies in one region of /dev/shm for all ranks; before, in pinned memory of each",
        "vLLM v1/kv_offload (SharedOffloadRegion)", "0.11, 0.14, 0.16, 0.19, 0.21, 0.24, 0.26 to 0.32",
    ),
    "rocm_weights_allocated": Change(
        (0, 21), '"Model loading took" is what torch allocated on AMD GPUs, too; before, what the device lost',
        "vLLM platforms/rocm.py (get_current_memory_usage)", "0.8, 0.9, 0.10, 0.14, 0.19 to 0.24, 0.33",
    ),
    "runner_v2_by_name": Change(
        (0, 22), "model runner V2 for a list of architectures: a table for penalties, a smaller sampling peak",
        "vLLM config/vllm.py (_is_default_v2_model_runner_model)", "0.21 to 0.33",
    ),
    "connectors_keep_groups": Change(
        (0, 22), "KV connectors that know groups leave the hybrid KV cache manager on; before, every connector turned "
        "it off, so that windows keep the whole context",
        "vLLM config/vllm.py and distributed/kv_transfer/kv_connector", "0.9.2, 0.10.2, 0.11, 0.14, 0.16 to 0.33",
    ),
    "lmcache_server": Change(
        (0, 23), "--kv-offloading-backend lmcache asks a separate server of LMCache; before, each rank kept its share",
        "vLLM config/vllm.py (_post_init_kv_transfer_config)", "0.14, 0.16, 0.19, 0.21 to 0.24, 0.26, 0.28, 0.30, 0.32",
    ),
    "tiled_experts": Change(
        (0, 24), "experts in 16 bits are padded to 128 columns a rank for FlashInfer's TRT-LLM kernel on Blackwell",
        "vLLM model_executor/layers/fused_moe/oracle/unquantized.py", "0.18 to 0.33",
    ),
    "runner_v2_quantized": Change(
        (0, 24), "model runner V2 for quantized models of its list too; before, only where the config names no "
        "quantization", "vLLM config/vllm.py (_is_default_v2_model_runner_model)", "0.22, 0.23, 0.24",
    ),
    "offloaded_pages": Change(
        (0, 24), "a chunk of offloaded KV is rounded up to pages of memory",
        "vLLM v1/kv_offload (BLOCK_SIZE_ALIGNMENT)", "0.11, 0.14, 0.16, 0.19, 0.21, 0.24, 0.26 to 0.32",
    ),
    "runner_v2_dense": Change(
        (0, 25), "model runner V2 for every dense model without recurrent states",
        "vLLM config/vllm.py (_is_default_v2_model_runner_model); vllm-project/vllm#44443", "0.24 to 0.33",
    ),
    "batches_in_flight": Change(
        (0, 26), "windows and chunks are charged for every batch in flight, one more than runs; before, for one",
        "vLLM v1/kv_cache_interface.py (max_in_flight_tokens)", "0.14 to 0.33",
    ),
    "rocm_graph_estimate": Change(
        (0, 26), "the estimate of CUDA graphs is made on AMD GPUs too",
        "vLLM v1/worker/gpu_worker.py (determine_available_memory)", "0.20 to 0.33",
    ),
    "consumed_memory": Change(
        (0, 27), 'a log\'s "peak activation" is what a step frees again, and includes the graph estimate',
        "vLLM v1/worker/gpu_worker.py (determine_available_memory); vllm-project/vllm#57936", "0.18 to 0.33",
    ),
    "runner_v2_named_hybrids": Change(
        (0, 27), "model runner V2 for listed architectures with recurrent states too",
        "vLLM config/vllm.py (_is_default_v2_model_runner_model)", "0.26, 0.27, 0.28",
    ),
    "runner_v2_encoder": Change(
        (0, 27), "model runner V2 profiles a batch of images or audio too",
        "vLLM v1/worker/gpu/model_runner.py (profile_run)", "0.22 to 0.33",
    ),
    "latents_offloaded_once": Change(
        (0, 27), "latents that every rank holds are offloaded once; before, by each rank",
        "vLLM v1/kv_offload (replicated_layout)", "0.11, 0.14, 0.16, 0.19, 0.21, 0.24, 0.26 to 0.32",
    ),
    "whole_dense_mlp": Change(
        (0, 28), "ranks that share tokens keep the dense MLPs of models with sparse attention whole",
        "vLLM models/deepseek_v32/nvidia/model.py", "0.27, 0.28 to 0.33",
    ),
    "hybrid_prefix_caching": Change(
        (0, 28), "models with recurrent states cache prefixes by default; before, only with --enable-prefix-caching",
        "vLLM config/model.py (is_prefix_caching_supported), and engine/arg_utils.py (default_prefix_caching), which "
        "leaves hybrids out in 0.26 and 0.27", "0.14 to 0.33",
    ),
    "aligned_states": Change(
        (0, 28), "two cached states a request, for Mamba too; before, Mamba kept one for every block of its context",
        "vLLM model_executor/models/config.py (mamba_cache_mode)", "0.16 to 0.33",
    ),
    "largest_class": Change(
        (0, 28), "a server on a GPU of 160 GiB or more takes steps of 16,384 tokens; before, 8,192",
        "vLLM engine/arg_utils.py (get_batch_defaults)", "0.27.1, 0.28",
    ),
    "large_graphs": Change(
        (0, 28), "graphs of up to 1,024 sequences on compute capability 10.x",
        "vLLM config/vllm.py (max_cudagraph_capture_size); vllm-project/vllm#49390", "0.14 to 0.33",
    ),
    "logits_as_they_are": Change(
        (0, 28), "the profile run of model runner V2 samples from the logits themselves, with no copy in float32",
        "vLLM v1/worker/gpu/sample/sampler.py (needs_logits_processing)", "0.22 to 0.33",
    ),
    "runner_v2": Change(
        (0, 29), "model runner V2 for every model", "vLLM config/vllm.py (use_v2_model_runner)", "0.28 to 0.33",
    ),
    "runner_v2_graph_estimate": Change(
        (0, 29), "model runner V2 estimates its CUDA graphs too; before, its estimate was 0",
        "vLLM v1/worker/gpu/model_runner.py (profile_cudagraph_memory)", "0.22 to 0.33",
    ),
    "null_block": Change(
        (0, 29), "the pool's null block is not counted as room for a request when one is checked for",
        "vLLM v1/core/kv_cache_utils.py (get_kv_cache_configs)", "0.28 and 0.29",
    ),
    "flash_attn_pages": Change(
        (0, 29), "FlashAttention 4 pages heads of 256 by 128 tokens on compute capability 10.x",
        "vLLM v1/attention/backends/flash_attn.py (FA4_HD256_PAGE_SIZE)", "0.28 to 0.33",
    ),
    "kda_checkpoints": Change(
        (0, 30), "KDA with a bounded gate on compute capability 9.0, 10.x, 12.x: blocks of whole 16 tokens, one more",
        "vLLM models/kimi_k3/nvidia/kda.py (get_kv_cache_spec)", "0.27 to 0.33",
    ),
    "sparse_fp8_hopper": Change(
        (0, 30), "fp8_e4m3 of sparse latent attention is plain fp8 on compute capability 9.x; before, refused",
        "vLLM v1/attention/backends/registry.py (FLASHINFER_MLA_SPARSE_SM90)", "0.28, 0.30 and 0.33",
    ),
    "profiled_without_splits": Change(
        (0, 31), "the profile run splits no large block; from 0.27 to 0.30 it did, and counted what was left of it",
        "vLLM v1/worker/gpu_worker.py (_scoped_allocator_max_split)", "0.21 to 0.33",
    ),
    "indexer_contexts": Change(
        (0, 32), "beyond 262,144 tokens of context sparse attention's workspace is of 16 contexts, not 40",
        "vLLM config/vllm.py (sparse_mla_prefill_workspace_factor)", "0.30 to 0.33",
    ),
    "mamba2_checkpoints": Change(
        (0, 32), "a cached state of Mamba2 takes one block more, for a checkpoint within a prompt",
        "vLLM model_executor/layers/mamba/mamba_mixer2.py (get_kv_cache_spec)", "0.29 to 0.33",
    ),
    "fewer_connector_keys": Change(
        (0, 32), "--kv-transfer-config refuses kv_buffer_size, kv_ip, kv_parallel_size and kv_rank",
        "vLLM config/kv_transfer.py", "0.14, 0.19, 0.21, 0.22, 0.24, 0.26 to 0.32",
    ),
    "delta_net_checkpoints": Change(
        (0, 33), "gated delta nets on compute capability 9.0, 10.x, 12.x: blocks of whole 64 tokens, one more",
        "vLLM model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py", "0.29 to 0.33",
    ),
    "sampler_warm_up": Change(
        (0, 33), "the profile run samples a second time with every sampling parameter set",
        "vLLM v1/worker/gpu/model_runner.py (_dummy_sampler_run)", "0.22 to 0.33",
    ),
    "uniform_decode_graphs": Change(
        (0, 33), "with drafts, graphs of whole sequences are captured beside the usual sizes",
        "vLLM config/vllm.py (_set_cudagraph_sizes)", "0.33",
    ),
    "draft_bounds_context": Change(
        (0, 33), "an independent draft model's context bounds its target's",
        "vLLM config/vllm.py (_limit_max_model_len_to_draft)", "0.33",
    ),
}  # fmt: skip

# SGLang's third field is a release of features. What came between two that were read counts from the later one.
READ = "sglang 0.4.9, 0.5.2, 0.5.5, 0.5.9, 0.5.12, 0.5.15 and 0.5.23 were read"
SGLANG_CHANGES = {
    "window_pools": Change(
        (0, 5), "window layers have a pool of their own in the models that SGLang lists",
        "sglang 0.5.2 srt/server_args.py",
    ),
    "state_pools": Change((0, 5), "recurrent states have slots beside the tokens", "sglang 0.5.9 and 0.5.23"),
    "reserve_by_parts": Change(
        (0, 5, 5), "the default fraction reserves 1.5 MiB per token of a chunk and 2 per sequence of the largest "
        "graph; before, it came from a table by GPU memory", f"{READ}: srt/server_args.py",
    ),
    "datacenter_pages": Change(
        (0, 5, 9), "attention backends of compute capability 10.x with pages of 64 tokens by default",
        f"{READ}: srt/server_args.py",
    ),
    "tracked_states": Change(
        (0, 5, 15), "two more state slots per request follow it for the prefix cache, unless told otherwise",
        f"{READ}: srt/arg_groups/overrides.py",
    ),
    "prefill_graphs": Change(
        (0, 5, 12), "the default fraction reserves memory for prefill graphs", f"{READ}: srt/server_args.py"
    ),
    "wider_small_gpus": Change(
        (0, 5, 23), "chunks of 4,096 tokens and graphs of 48 or 160 sequences below 35 GiB; before, 2,048 and 24 or 80",
        f"{READ}: memory_hook.py",
    ),
    "graphs_by_requests": Change(
        (0, 5, 23), "--max-running-requests bounds the largest graph that is not asked for", f"{READ}: memory_hook.py"
    ),
    "image_reservation": Change(
        (0, 5, 23), "memory for images is set aside before the pool is sized", f"{READ}: kv_cache_configurator.py"
    ),
    "request_windows": Change(
        (0, 5, 23), "without the prefix cache, --max-running-requests sizes the windows' pool",
        f"{READ}: pool_configurator.py",
    ),
    "decode_graph_flag": Change(
        (0, 5, 15), "--cuda-graph-max-bs-decode; before, --cuda-graph-max-bs", f"{READ}: srt/server_args.py"
    ),
    "padded_host_pools": Change(
        (0, 5, 9), "the host's pool of the hierarchical cache has a page more than was asked for",
        "sglang mem_cache/pool_host (HostKVCache)", "0.4.9, 0.5.2, 0.5.9, 0.5.23",
    ),
    "adapter_pools": Change(
        (0, 5, 2), "adapters have a pool of slots, made before the KV pool, for the modules that are stated",
        "sglang 0.5.2, 0.5.9 and 0.5.23 srt/lora/mem_pool.py",
    ),
    "halves": Change(
        (0, 5, 23), "a server that only prefills or decodes keeps less back", "sglang 0.5.23 arg_groups/memory_hook.py"
    ),
    "whole_towers": Change(
        (0, 5, 23), "--mm-enable-dp-encoder puts the whole encoder on each rank", "sglang 0.5.23 srt/models"
    ),
    "weights_on_host": Change(
        (0, 5, 23), "--cpu-offload-gb and --offload-group-size leave weights that the model reads elsewhere on the GPU",
        "sglang 0.5.2, 0.5.9 and 0.5.23 srt/utils/offloader.py (_get_resident_parameter_ids)",
    ),
    "expert_adapters": Change(
        (0, 5, 23), "adapters change experts and latent attention, too", "sglang 0.5.9 and 0.5.23 srt/lora/mem_pool.py"
    ),
    "drafts": Change(
        (0, 5, 23), "a draft's layers are counted in its target's pool, its weights before the pool is sized",
        f"{READ}: pool_configurator.py and kv_cache_configurator.py",
    ),
}  # fmt: skip


def since(name: str) -> tuple[int, ...]:
    """The release of vLLM that a change came with."""
    return CHANGES[name].since


# What a label says of a server beyond its release: word -> (field of Version, its value, the releases it can be said
# of: from `since` of the first change, before that of the second; None: no bound).
TOLD: Final[dict[str, tuple[str, bool, str | None, str | None]]] = {
    "v0": ("first_engine", True, None, "v1_only"),
    "v1": ("first_engine", False, "v1", None),
    "flashinfer": ("flashinfer", True, "v1", "lean_sampler"),
    "no-flashinfer": ("flashinfer", False, "v1", "lean_sampler"),
    "runner-v1": ("runner_v2", False, None, None),
    "runner-v2": ("runner_v2", True, "runner_v2_by_name", None),
    "no-graph-estimate": ("estimates_graphs", False, "graphs_in_budget", None),
}
# Sizes that a label says, `indexer-256`: word -> (field of Version, the releases it can be said of).
TOLD_SIZES: Final[dict[str, tuple[str, str | None, str | None]]] = {
    "indexer": ("indexer_logits_mib", None, None),
    "experts": ("expert_tokens", None, "whole_expert_batches"),
}
INDEXER_LOGITS_MIB: Final = 512  # vLLM 0.33 envs.py (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)
SIZES_MIB: Final = range(1, 10**6)  # of it: up to a terabyte
# The releases whose own answers the rules were compared with, case by case (tests/oracles.py).
COMPARED: Final[dict[str, tuple[tuple[int, ...], ...]]] = {"vllm": ((0, 33),), "sglang": ((0, 5, 23),)}
CHANGES_OF: Final = {"vllm": CHANGES, "sglang": SGLANG_CHANGES}
LAST = 10**6  # stands for the third field of a line's last release


@dataclass(frozen=True, slots=True)
class Version:
    """A release of a server, and what is known of how it was installed and started beyond its flags.

    What differs between vLLM's releases follows from CHANGES. None: not told, what the release does by default.

    patch               the third field of a number, where it matters
    estimates_graphs    False: the estimate of CUDA graphs is off (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0)
    first_engine        vLLM's V0 runs (VLLM_USE_V1=0, or a log's wording), where a release has both
    flashinfer          FlashInfer samples: it is in container images of 0.8 to 0.10, `pip install vllm` leaves it out
    runner_v2           VLLM_USE_V2_MODEL_RUNNER
    indexer_logits_mib  VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    expert_tokens       VLLM_FUSED_MOE_CHUNK_SIZE
    without             changes that it is planned without, to see what each does
    """

    number: Number
    engine: str = "vllm"
    patch: int | None = None
    estimates_graphs: bool = True
    first_engine: bool | None = None
    flashinfer: bool | None = None
    runner_v2: bool | None = None
    indexer_logits_mib: int = INDEXER_LOGITS_MIB
    expert_tokens: int | None = None
    without: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """`vllm@0.9`, with what was told: `vllm@0.9+flashinfer`; `--engine` reads it back."""
        suffixes = [f"+{word}" for word, (name, value, *_) in TOLD.items() if getattr(self, name) is value]
        if self.indexer_logits_mib != INDEXER_LOGITS_MIB:
            suffixes.append(f"+indexer-{self.indexer_logits_mib}")
        if self.expert_tokens is not None:
            suffixes.append(f"+experts-{self.expert_tokens}")
        patch = "" if self.patch is None else f".{self.patch}"
        return f"{self.engine}@{self.number[0]}.{self.number[1]}{patch}{''.join(suffixes)}"

    def has(self, change: str) -> bool:
        """Whether a change came with this release of its server or an earlier one; never so for the other server's."""
        changes = CHANGES_OF.get(self.engine, {})
        return change in changes and self.fields >= changes[change].since and change not in self.without

    def since(self, other: "Version") -> dict[str, Change]:
        """The changes that came with it after another release of its server, oldest first."""
        between = {
            name: change
            for name, change in CHANGES_OF.get(self.engine, {}).items()
            if other.fields < change.since <= self.fields
        }
        return dict(sorted(between.items(), key=lambda item: item[1].since))

    @property
    def is_compared(self) -> bool:
        """Whether the rules were compared with this release's own code; 0.5 of SGLang alone means the one that was."""
        given = self.number if self.patch is None else self.fields
        return given in [fields[: len(given)] for fields in COMPARED.get(self.engine, ())]

    @property
    def fields(self) -> tuple[int, ...]:
        """The number with its third field; the last of its line where none was given."""
        return (*self.number, LAST if self.patch is None else self.patch)

    @property
    def utilization(self) -> float:
        """Default gpu_memory_utilization."""
        return 0.92 if self.has("utilization_092") else 0.90

    @property
    def runs_first_engine(self) -> bool:
        """Whether vLLM's V0 runs."""
        return self.engine == "vllm" and bool(self.first_engine or not self.has("v1"))

    def lacks(self) -> Iterator[Change]:
        """The changes that came later, oldest first; none for another server."""
        if self.engine == "vllm":
            yield from (change for change in CHANGES.values() if self.number < change.since)


def with_words(release: Version, words: list[str]) -> Version:
    """A release of vLLM with the words of a label (`+flashinfer`) taken in.

    Raises UsageError for a word it does not know, that contradicts another, or that is not of this release.
    """
    fields: dict[str, Any] = {}
    for word in words:
        name, value = field_of(release, word)
        if fields.setdefault(name, value) != value:
            raise UsageError(
                f"--engine {release.label}+{'+'.join(words)}", "contradicts itself", "keep one of the words"
            )
    return replace(release, **fields)


def field_of(release: Version, word: str) -> tuple[str, bool | int]:
    """(field of Version, its value) that a word of a label stands for."""
    kind, _, size = word.partition("-")
    if kind in TOLD_SIZES and size.isascii() and size.isdigit() and len(size) < 7 and int(size) in SIZES_MIB:
        name, first, last = TOLD_SIZES[kind]
        check_told(release, word, first, last)
        return name, int(size)
    if word not in TOLD:
        raise UsageError(
            f"--engine {release.label}+{printable(word, 40)}",
            "is not a word kvplan knows",
            f"use {', '.join(TOLD)}, indexer-MIB or experts-TOKENS",
        )
    name, value, first, last = TOLD[word]
    check_told(release, word, first, last)
    return name, value


def check_told(release: Version, word: str, first: str | None, last: str | None) -> None:
    """Refuse a word for a release before the change `first`, or from `last` on."""
    if first and release.number < since(first):
        raise UsageError(
            f"--engine {release.label}+{word}",
            f"can be said of vLLM from {number_text(since(first))} on",
            "leave it out",
        )
    if last and release.number >= since(last):
        raise UsageError(
            f"--engine {release.label}+{word}", f"can be said of vLLM before {number_text(since(last))}", "leave it out"
        )


def number_text(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


def patch_of(engine: str, number: tuple[int, ...]) -> int | None:
    """The third field of a number where a change came within its line; None where it changes nothing."""
    lines = {change.since[:2] for change in CHANGES_OF[engine].values() if len(change.since) == 3}
    return number[2] if len(number) == 3 and number[:2] in lines else None
