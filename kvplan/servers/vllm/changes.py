"""Every difference between vLLM's releases that affects an answer: what changed, in which release, and the source.

`read` lists the releases whose own code was read: 0.6.3.post1, 0.6.4.post1 and 0.6.5, of 0.8 to 0.33 the first wheel of
each except 0.12, 0.13 and 0.15, and 0.8.5, 0.9.2, 0.10.2 and 0.27.1. For releases between two that were read, and for
patches, a change is inferred.
Rules based on logs are checked by tests/core/test_versions.py and reports/accuracy.
"""

from typing import Final

from kvplan.servers.releases import ReleaseChange, Releases

CHANGES: Final = {
    "whole_gpu_counted": ReleaseChange(
        (0, 6, 4), "the CUDA context and what other processes hold count against the budget; before, neither did",
        "vLLM worker/worker.py (determine_num_available_blocks); vllm-project/vllm#10360, #11230",
        "0.6.3.post1, 0.6.4.post1",
    ),
    "increase_counted": ReleaseChange(
        (0, 6, 5), "only what the server itself adds counts against the budget, without its CUDA context",
        "vLLM worker/worker.py and utils.py (memory_profiling)", "0.6.4.post1, 0.6.5",
    ),
    "latent_cache": ReleaseChange(
        (0, 7), "the pool holds MLA's latents, in entries of a multiple of 256 bytes until V1; before, full heads",
        "vLLM 0.7 worker/cache_engine.py; a log of DeepSeek-R1 on 0.7",
    ),
    "plain_projections": ReleaseChange(
        (0, 8), "MLA keeps its projections apart; 0.7 kept them multiplied out in addition to the weights",
        "vLLM 0.7.3 attention/backends/mla; DeepSeek-R1 on 8 H200 and on 3 x 8 L20",
    ),
    "v1": ReleaseChange(
        (0, 8), "the second engine by default from Ampere on: chunked prefill of 2,048 or 8,192 tokens a step, by the "
        "GPU; sampling with FlashInfer where it is installed", "release notes of 0.8; logs of 0.8 to 0.10",
    ),
    "long_mrope": ReleaseChange(
        (0, 8), "rotary tables of positions of images have four times the rows of the context",
        "vLLM layers/rotary_embedding/mrope.py; logs of Qwen2.5-VL on 0.8 and 0.10", "0.11 to 0.15, 0.29 to 0.33",
    ),
    "fewer_sequences": ReleaseChange(
        (0, 8, 4), "256 sequences at once by default on GPUs other than H100 and H200; the second engine ran 1,024",
        "vLLM engine/arg_utils.py (_set_default_args_v1); vllm-project/vllm#16158", "0.8.0, 0.8.2 to 0.8.5",
    ),
    "classes_by_memory": ReleaseChange(
        (0, 8, 5), "the defaults of H100 for every GPU of 70 GiB or more; before, for H100 and H200 by name",
        "vLLM engine/arg_utils.py (_set_default_args_v1)", "0.8.4, 0.8.5",
    ),
    "a100_small": ReleaseChange(
        (0, 9), "an A100 takes the defaults of small GPUs", "vLLM engine/arg_utils.py; vllm-project/vllm#17885",
        "0.8.5, 0.9.2",
    ),
    "hybrid_groups": ReleaseChange(
        (0, 9), "windows keep no more than the window where a model mixes them with full attention",
        "vLLM 0.9.1 (hybrid KV cache manager)",
    ),
    "no_float16": ReleaseChange(
        (0, 9), "Gemma 2, Gemma 3 and GLM-4 are refused in float16", "vllm-project/vllm#15766 ran one on 0.8",
    ),
    "start_gate": ReleaseChange(
        (0, 9), "a server does not start where less memory is free than it may use",
        "vLLM v1/worker/gpu_worker.py (init_device)", "0.8.5, 0.9.2",
    ),
    "others_apart": ReleaseChange(
        (0, 9), "the CUDA context and what other processes hold do not count against the second engine's budget; "
        "before, they did",
        "vLLM v1/worker/gpu_worker.py (determine_available_memory)", "0.8.5, 0.9.2",
    ),
    "fp8_blocks_by_marlin": ReleaseChange(
        (0, 9), "below compute capability 8.9 scales of fp8 blocks are stored once per output, in 16 bits",
        "vLLM model_executor/layers/quantization/utils/marlin_utils_fp8.py", "0.8, 0.9, 0.33",
    ),
    "random_states": ReleaseChange(
        (0, 9), "the profile run samples from a random copy of the hidden states it chose",
        "vLLM v1/worker/gpu_model_runner.py (_dummy_sampler_run)", "0.8.0, 0.8.5, 0.9.0, 0.11",
    ),
    "states_while_sampling": ReleaseChange(
        (0, 9, 2), "the profile run keeps all hidden states while it samples; before, those that are sampled",
        "vLLM v1/worker/gpu_model_runner.py (profile_run)", "0.8.5, 0.9.0 to 0.9.2, 0.10 to 0.25",
    ),
    "eplb": ReleaseChange(
        (0, 9, 2), "experts may have spare copies and move between ranks (EPLB)", "vLLM distributed/eplb",
        "0.9.2 to 0.33",
    ),
    "items_by_batch": ReleaseChange(
        (0, 10), "the encoder is profiled with as many of the largest items as fit its budget; before, one more",
        "vLLM v1/worker/utils.py, then multimodal/encoder_budget.py (MultiModalBudget)",
        "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16 to 0.33",
    ),
    "encoders_in_v1": ReleaseChange(
        (0, 10), "V1 runs encoders, without a KV cache; before, V0 did", "vLLM v1/kv_cache_interface.py",
        "0.9.2 and 0.10.2",
    ),
    "runner_flag": ReleaseChange(
        (0, 10, 1), "--runner and --convert; before, --task", "vLLM engine/arg_utils.py; vllm-project/vllm#21470",
        "0.9.2, 0.10.2, 0.11, 0.14",
    ),
    "sequence_parallel_experts": ReleaseChange(
        (0, 10, 2), "ranks of several data-parallel replicas keep shared experts whole and share the tokens",
        "vLLM config/parallel.py (use_sequence_parallel_moe), model_executor/models/deepseek_v2.py",
        "0.9.2, 0.10.2, 0.11, 0.14",
    ),
    "padded_items": ReleaseChange(
        (0, 11), "the profile run keeps each item's output padded to the encoder's whole budget",
        "vLLM v1/worker/gpu_model_runner.py (profile_run)", "0.10.2, 0.11, 0.14",
    ),
    "shorter_videos": ReleaseChange(
        (0, 11), "the largest video of Qwen2-VL and Qwen2.5-VL has 14 frames; before, 16",
        "vLLM model_executor/models/qwen2_vl.py (_MAX_FRAMES_PER_VIDEO)", "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14 to 0.33",
    ),
    "v1_only": ReleaseChange(
        (0, 11), "the second engine on every GPU", "release notes of 0.11",
    ),
    "processor_cache": ReleaseChange(
        (0, 11), "--mm-processor-cache-gb: 4 GiB of processed images, videos and sounds in host memory",
        "vLLM 0.11 and 0.33 config/multimodal.py",
    ),
    "encoder_data": ReleaseChange(
        (0, 11), "--mm-encoder-tp-mode data: each rank holds the whole encoder",
        "vLLM model_executor/models (supports_encoder_tp_data)", "0.10.2 and 0.11",
    ),
    "attention_backend_names": ReleaseChange(
        (0, 11), "attention backends go by one name; before, the second engine's ended in _VLLM_V1",
        "vLLM platforms/interface.py (_Backend)", "0.8.5, 0.9.2, 0.10.2, 0.11",
    ),
    "sampler_on_request": ReleaseChange(
        (0, 12), "FlashInfer samples only on request, and sampling sorts: 38 bytes a sequence and vocabulary entry; "
        "before, it sampled wherever it was installed", "vLLM v1/sample/ops/topk_topp_sampler.py",
        "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16",
    ),
    "padded_to_item": ReleaseChange(
        (0, 12), "the profile run keeps each item's output padded to the most tokens of an item; before, to the budget",
        "vLLM v1/worker/gpu_model_runner.py (profile_run)", "0.11, 0.12, 0.13",
    ),
    "async_scheduling": ReleaseChange(
        (0, 14), "one more batch is scheduled while the last one runs",
        "vLLM config/vllm.py (async_scheduling)", "0.11, 0.14",
    ),
    "chunked_groups": ReleaseChange(
        (0, 14), "layers of chunked attention keep no more than the chunk; before, they are counted in full",
        "vLLM config/vllm.py and envs.py (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE, off until then)",
        "0.9.2, 0.10.2, 0.11, 0.14, 0.20",
    ),
    "items_as_they_are": ReleaseChange(
        (0, 14), "the profile run keeps the outputs of items as they are; from 0.11 on padded",
        "vLLM v1/worker/gpu_model_runner.py (profile_run)", "0.11, 0.14, 0.16 to 0.33",
    ),
    "embeddings_counted": ReleaseChange(
        (0, 14), "an item counts only its embeddings; from 0.10 on, also the tokens between them",
        "vLLM multimodal/profiling.py, then multimodal/encoder_budget.py", "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16",
    ),
    "video_without_timestamps": ReleaseChange(
        (0, 14), "the largest video of Qwen3-VL counts its own tokens; before, 12.5 for each, with its timestamps",
        "vLLM model_executor/models/qwen3_vl.py (get_max_video_tokens)", "0.11, 0.14, 0.16 to 0.33",
    ),
    "gpt_oss_graphs": ReleaseChange(
        (0, 14), "graphs of up to 1,024 tokens for gpt-oss on every GPU",
        "vLLM model_executor/models/config.py (GptOssForCausalLMConfig)", "0.11, 0.14, 0.20, 0.26, 0.28, 0.33",
    ),
    "images_look_ahead": ReleaseChange(
        (0, 14), "the tokens of an image attend to each other both ways in Gemma 3, which few attention backends do",
        "vLLM v1/attention/backends (supports_mm_prefix)", "0.11, 0.14, 0.16 to 0.32",
    ),
    "small_expert_chunks": ReleaseChange(
        (0, 14), "fused experts take 16,384 tokens at once; before, 32,768",
        "vLLM envs.py (VLLM_FUSED_MOE_CHUNK_SIZE)", "0.8.5, 0.9.2, 0.10.2, 0.11, 0.14, 0.16, 0.17",
    ),
    "kept_expert_workspace": ReleaseChange(
        (0, 14), "fused experts have a workspace that stays; before, each pass made one and freed it, so that it "
        "counts in the peak of the forward pass alone",
        "vLLM fused_moe/unquantized_fused_moe_method.py, fused_moe.py (fused_experts_impl) and v1/worker/workspace.py",
        "0.11, 0.12, 0.13, 0.14",
    ),
    "graph_size_flag": ReleaseChange(
        (0, 14), "--max-cudagraph-capture-size says the largest CUDA graph",
        "vLLM engine/arg_utils.py and config/vllm.py (_set_cudagraph_sizes)", "0.10.2, 0.11, 0.14, 0.16 to 0.33",
    ),
    "attention_backend_flag": ReleaseChange(
        (0, 14), "--attention-backend; before, VLLM_ATTENTION_BACKEND",
        "vLLM engine/arg_utils.py and envs.py", "0.11, 0.14, 0.16 to 0.33",
    ),
    "auto_context": ReleaseChange((0, 14), "--max-model-len auto", "vllm-project/vllm#29431"),
    "indexer_workspace": ReleaseChange(
        (0, 14), "sparse attention reserves a workspace for the index keys of a prefill: 40 contexts of 132 B a token",
        "vLLM v1/attention/backends/mla/indexer.py (get_max_prefill_buffer_size)", "0.11, 0.14, 0.16 to 0.33",
    ),
    "groups_by_wish": ReleaseChange(
        (0, 14), "--no-disable-hybrid-kv-cache-manager keeps windows short with a KV connector, too",
        "vLLM config/vllm.py", "0.9.2, 0.10.2, 0.11, 0.14, 0.16 to 0.21",
    ),
    "adapter_graphs": ReleaseChange(
        (0, 14), "CUDA graphs are captured with adapters and without",
        "vLLM v1/cudagraph_dispatcher.py (_get_lora_cases)", "0.11, 0.14, 0.19, 0.25, 0.29 and 0.33",
    ),
    "deprecated_methods": ReleaseChange(
        (0, 14), "deprecated quantization methods (fbgemm_fp8) start only with --allow-deprecated-quantization",
        "vLLM model_executor/layers/quantization/__init__.py (DEPRECATED_QUANTIZATION_METHODS)", "0.13, 0.14, 0.33",
    ),
    "cached_states": ReleaseChange(
        (0, 16), "--enable-prefix-caching keeps recurrent states at block ends: attention blocks cover them",
        "vLLM v1/kv_cache_interface.py (MambaSpec), model_executor/models/config.py", "0.11, 0.14, 0.16 to 0.33",
    ),
    "towers_left_out": ReleaseChange(
        (0, 16), "a limit of zero for all the inputs of a tower skips it; before, some classes did",
        "vLLM model_executor/models/interfaces.py (_mark_tower_model)", "0.14 and 0.16",
    ),
    "language_model_only": ReleaseChange(
        (0, 17), "--language-model-only", "vLLM config/multimodal.py", "0.16 and 0.17",
    ),
    "omni_sounds": ReleaseChange(
        (0, 17), "Qwen-Omni counts its sounds where it counts images and videos; before, audio was left out",
        "vLLM model_executor/models/qwen3_omni_moe_thinker.py (get_mm_max_tokens_per_item)", "0.14, 0.16 to 0.33",
    ),
    "lean_sampler": ReleaseChange(
        (0, 17), "sampling takes 14 bytes a sequence and vocabulary entry, not 38",
        "vLLM v1/sample/ops (apply_top_k_top_p_triton); llm-d-planner: Qwen3-14B 5.64 GiB in 0.16, 2.23 in 0.17",
        "0.16, 0.17",
    ),
    "prefetched_weights": ReleaseChange(
        (0, 17), "--offload-group-size fetches the weights of some layers from host memory",
        "vLLM engine/arg_utils.py and config/offload.py", "0.14, 0.16 to 0.20, 0.33",
    ),
    "whole_expert_batches": ReleaseChange(
        (0, 18), "fused experts take a whole batch at once; VLLM_FUSED_MOE_CHUNK_SIZE is gone",
        "vLLM envs.py and layers/fused_moe/modular_kernel.py", "0.17 to 0.20, 0.22, 0.26, 0.30, 0.32, 0.33",
    ),
    "backend_checks_blocks": ReleaseChange(
        (0, 18), "an explicit attention backend refuses blocks it has no kernel for; before, it changed them",
        "vLLM platforms/cuda.py (check_and_update_config)", "0.10.2, 0.14, 0.16 to 0.33",
    ),
    "all_reduce_buffers": ReleaseChange(
        (0, 18), "buffers for all-reduce over NVLink: about 2 GiB a rank", "llm-d-planner v0.19.0 accuracy report",
    ),
    "no_pplx": ReleaseChange(
        (0, 19), "the exchanges named pplx and naive stand for allgather_reducescatter",
        "vLLM config/parallel.py", "0.18, 0.19, 0.20, 0.33",
    ),
    "indexer_logits": ReleaseChange(
        (0, 19), "sparse attention reserves 512 MiB for a prefill's scores against the index keys",
        "vLLM envs.py (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)", "0.14 to 0.33",
    ),
    "few_tokens_batched": ReleaseChange(
        (0, 20), "256 tokens a step by default where experts' ranks exchange batches (deepep_low_latency)",
        "vLLM engine/arg_utils.py", "0.18, 0.19, 0.20, 0.33",
    ),
    "utilization_092": ReleaseChange(
        (0, 20), "gpu_memory_utilization 0.92 by default, 0.90 before", "vLLM config/cache.py",
        "0.10, 0.11, 0.14, 0.16 to 0.33",
    ),
    "graphs_in_budget": ReleaseChange(
        (0, 20), "an estimate of the CUDA graphs is subtracted from the budget (previously graphs came on top)",
        "vLLM envs.py (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); its log line says 0.21", "0.18 to 0.33",
    ),
    "state_blocks": ReleaseChange(
        (0, 20), "a server with recurrent states and CUDA graphs does not start with more sequences than blocks; 0.18 "
        "and 0.19 captured fewer graphs", "vLLM config/compilation.py", "0.18 to 0.20",
    ),
    "tokens_by_concurrency": ReleaseChange(
        (0, 20, 1), '"GPU KV cache size" is concurrency x context; before, one group\'s blocks',
        "vllm-project/vllm#40691; vLLM v1/core/kv_cache_utils.py; two logs of 0.20.1",
        "0.18 to 0.29, 0.20.0 and 0.20.1",
    ),
    "chosen_items": ReleaseChange(
        (0, 21), "--mm-processor-kwargs and --limit-mm-per-prompt bound the largest image and video of Gemma 4",
        "vLLM model_executor/models/gemma4_mm.py (get_mm_max_tokens_per_item)", "0.19 to 0.33",
    ),
    "override_before_fit": ReleaseChange(
        (0, 21), "--num-gpu-blocks-override replaces the memory before auto-fit and the check that one request fits; "
        "before, it only replaced the pool of a server that had passed them",
        "vLLM v1/core/kv_cache_utils.py (get_kv_cache_configs)", "0.8 to 0.33, 0.20 and 0.21 among them",
    ),
    "rocm_weights_allocated": ReleaseChange(
        (0, 21), '"Model loading took" is what torch allocated on AMD GPUs, too; before, what the device lost',
        "vLLM platforms/rocm.py (get_current_memory_usage)", "0.8, 0.9, 0.10, 0.14, 0.19 to 0.24, 0.33",
    ),
    "gemma_assistants": ReleaseChange(
        (0, 21), "Gemma 4's assistants draft, reading its caches", "vLLM models/gemma4_mtp.py", "0.20 to 0.33"
    ),
    "runner_v2_by_name": ReleaseChange(
        (0, 22), "model runner V2 for a list of architectures: a table for penalties, a smaller sampling peak",
        "vLLM config/vllm.py (_is_default_v2_model_runner_model)", "0.21 to 0.33",
    ),
    "connectors_keep_groups": ReleaseChange(
        (0, 22), "KV connectors that know groups leave the hybrid KV cache manager on; before, every connector turned "
        "it off, so that windows keep the whole context",
        "vLLM config/vllm.py and distributed/kv_transfer/kv_connector", "0.9.2, 0.10.2, 0.11, 0.14, 0.16 to 0.33",
    ),
    "lmcache_server": ReleaseChange(
        (0, 23), "--kv-offloading-backend lmcache asks a separate server of LMCache; before, each rank kept its share",
        "vLLM config/vllm.py (_post_init_kv_transfer_config)", "0.14, 0.16, 0.19, 0.21 to 0.24, 0.26, 0.28, 0.30, 0.32",
    ),
    "tiled_experts": ReleaseChange(
        (0, 24), "experts in 16 bits are padded to 128 columns a rank for FlashInfer's TRT-LLM kernel on Blackwell",
        "vLLM model_executor/layers/fused_moe/oracle/unquantized.py", "0.18 to 0.33",
    ),
    "runner_v2_quantized": ReleaseChange(
        (0, 24), "model runner V2 for quantized models of its list too; before, only where the config names no "
        "quantization", "vLLM config/vllm.py (_is_default_v2_model_runner_model)", "0.22, 0.23, 0.24",
    ),
    "runner_v2_dense": ReleaseChange(
        (0, 25), "model runner V2 for every dense model without recurrent states",
        "vLLM config/vllm.py (_is_default_v2_model_runner_model); vllm-project/vllm#44443", "0.24 to 0.33",
    ),
    "b12x_in_every_layer": ReleaseChange(
        (0, 25), "--moe-backend flashinfer_b12x keeps its workspaces in every layer, not once",
        "vllm-project/vllm#43328, #49476 (0.23.1rc1 starts where 0.25.1 does not)", "0.25, 0.33",
    ),
    "planned_frames": ReleaseChange(
        (0, 26), "the largest video of GLM-V is that of at most 600 frames with the most tokens, from the video "
        "processor's own size; before, frames were added until one was too many",
        "vLLM model_executor/models/glm4_1v.py (_get_max_video_frames)", "0.17 to 0.33",
    ),
    "batches_in_flight": ReleaseChange(
        (0, 26), "windows and chunks are charged for every batch in flight, one more than runs; before, for one",
        "vLLM v1/kv_cache_interface.py (max_in_flight_tokens)", "0.14 to 0.33",
    ),
    "rocm_graph_estimate": ReleaseChange(
        (0, 26), "the estimate of CUDA graphs is made on AMD GPUs too",
        "vLLM v1/worker/gpu_worker.py (determine_available_memory)", "0.20 to 0.33",
    ),
    "consumed_memory": ReleaseChange(
        (0, 27), 'a log\'s "peak activation" is the memory freed after the profile run, including the graph estimate',
        "vLLM v1/worker/gpu_worker.py (determine_available_memory); vllm-project/vllm#57936", "0.18 to 0.33",
    ),
    "runner_v2_named_hybrids": ReleaseChange(
        (0, 27), "model runner V2 for listed architectures with recurrent states too",
        "vLLM config/vllm.py (_is_default_v2_model_runner_model)", "0.26, 0.27, 0.28",
    ),
    "runner_v2_encoder": ReleaseChange(
        (0, 27), "model runner V2 profiles a batch of images or audio too",
        "vLLM v1/worker/gpu/model_runner.py (profile_run)", "0.22 to 0.33",
    ),
    "offloaded_region": ReleaseChange(
        (0, 27), "offloaded KV lies in one region of /dev/shm for all ranks, in whole pages of memory, and the latents "
        "of all ranks once; before, each rank pinned its tensors, which torch rounds up to powers of two bytes",
        "vLLM v1/kv_offload/cpu/spec.py (_uses_shared_region, replicated_layout); vllm-project/vllm#50094",
        "0.11, 0.12, 0.14, 0.16, 0.19, 0.21, 0.24, 0.26 to 0.33",
    ),
    "no_bitsandbytes": ReleaseChange(
        (0, 28), "bitsandbytes weights are not loaded", "vLLM model_executor/layers/quantization/__init__.py",
        "0.26, 0.27, 0.28, 0.29, 0.30, 0.32, 0.33",
    ),
    "whole_dense_mlp": ReleaseChange(
        (0, 28), "ranks that share tokens keep the dense MLPs of models with sparse attention whole",
        "vLLM models/deepseek_v32/nvidia/model.py", "0.27, 0.28 to 0.33",
    ),
    "hybrid_prefix_caching": ReleaseChange(
        (0, 28), "models with recurrent states cache prefixes by default; before, only with --enable-prefix-caching",
        "vLLM config/model.py (is_prefix_caching_supported), and engine/arg_utils.py (default_prefix_caching), which "
        "leaves hybrids out in 0.26 and 0.27", "0.14 to 0.33",
    ),
    "aligned_states": ReleaseChange(
        (0, 28), "two cached states a request, for Mamba too; before, Mamba kept one for every block of its context",
        "vLLM model_executor/models/config.py (mamba_cache_mode)", "0.16 to 0.33",
    ),
    "largest_class": ReleaseChange(
        (0, 28), "a server on a GPU of 160 GiB or more takes steps of 16,384 tokens; before, 8,192",
        "vLLM engine/arg_utils.py (get_batch_defaults)", "0.27.1, 0.28",
    ),
    "large_graphs": ReleaseChange(
        (0, 28), "graphs of up to 1,024 sequences on compute capability 10.x",
        "vLLM config/vllm.py (max_cudagraph_capture_size); vllm-project/vllm#49390", "0.14 to 0.33",
    ),
    "logits_as_they_are": ReleaseChange(
        (0, 28), "the profile run of model runner V2 samples from the logits themselves, with no copy in float32",
        "vLLM v1/worker/gpu/sample/sampler.py (needs_logits_processing)", "0.22 to 0.33",
    ),
    "pinned_again": ReleaseChange(
        (0, 29), "--offload-group-size pins each weight again when it has been loaded, and torch keeps the first block",
        "vLLM model_executor/model_loader/utils.py (device_loading_context)", "0.27 to 0.33",
    ),
    "refined_expert_blocks": ReleaseChange(
        (0, 29), "ranks may share FP8 experts in parts of their blocks; before, refused",
        "vLLM model_executor/layers/quantization/fp8.py", "0.25 to 0.30, 0.32, 0.33",
    ),
    "runner_v2": ReleaseChange(
        (0, 29), "model runner V2 for every model", "vLLM config/vllm.py (use_v2_model_runner)", "0.28 to 0.33",
    ),
    "runner_v2_graph_estimate": ReleaseChange(
        (0, 29), "model runner V2 reserves memory for CUDA graphs (previously 0)",
        "vLLM v1/worker/gpu/model_runner.py (profile_cudagraph_memory)", "0.22 to 0.33",
    ),
    "null_block": ReleaseChange(
        (0, 29), "the pool's null block is not counted as room for a request when one is checked for",
        "vLLM v1/core/kv_cache_utils.py (get_kv_cache_configs)", "0.28 and 0.29",
    ),
    "flash_attn_pages": ReleaseChange(
        (0, 29), "FlashAttention 4 pages heads of 256 by 128 tokens on compute capability 10.x",
        "vLLM v1/attention/backends/flash_attn.py (FA4_HD256_PAGE_SIZE)", "0.28 to 0.33",
    ),
    "kda_checkpoints": ReleaseChange(
        (0, 30), "KDA with a bounded gate on compute capability 9.0, 10.x, 12.x: blocks of whole 16 tokens, one more",
        "vLLM models/kimi_k3/nvidia/kda.py (get_kv_cache_spec)", "0.27 to 0.33",
    ),
    "sparse_fp8_hopper": ReleaseChange(
        (0, 30), "fp8_e4m3 of sparse latent attention is plain fp8 on compute capability 9.x; before, refused",
        "vLLM v1/attention/backends/registry.py (FLASHINFER_MLA_SPARSE_SM90)", "0.28, 0.30 and 0.33",
    ),
    "no_activation_order": ReleaseChange(
        (0, 30), "GPTQ weights in groups by activation order (desc_act) are refused",
        "vLLM model_executor/layers/quantization/utils/gptq_utils.py", "0.28, 0.29, 0.30, 0.32, 0.33",
    ),
    "profiled_without_splits": ReleaseChange(
        (0, 31), "the profile run splits no large block; from 0.27 to 0.30 it did, and counted what was left of it",
        "vLLM v1/worker/gpu_worker.py (_scoped_allocator_max_split)", "0.21 to 0.33",
    ),
    "indexer_contexts": ReleaseChange(
        (0, 32), "beyond 262,144 tokens of context sparse attention's workspace is of 16 contexts, not 40",
        "vLLM config/vllm.py (sparse_mla_prefill_workspace_factor)", "0.30 to 0.33",
    ),
    "short_mrope": ReleaseChange(
        (0, 32), "rotary tables of Qwen3-VL and Qwen3.5 have the rows of the context; before, four times as many",
        "vLLM model_executor/models/qwen3_vl.py (mrope_positions_factor)", "0.30, 0.31, 0.32, 0.33",
    ),
    "workspace_pool": ReleaseChange(
        (0, 32), "asleep, workspaces of experts' kernels and of sparse attention are released",
        "vLLM v1/worker/gpu_worker.py (_init_workspace_and_model_runner)", "0.31, 0.32, 0.33",
    ),
    "mamba2_checkpoints": ReleaseChange(
        (0, 32), "a cached state of Mamba2 takes one block more, for a checkpoint within a prompt",
        "vLLM model_executor/layers/mamba/mamba_mixer2.py (get_kv_cache_spec)", "0.29 to 0.33",
    ),
    "pooled_pages": ReleaseChange(
        (0, 32), "GLM-5.3-Flash: states keep a checkpoint, and pages are whole rows of the kernels",
        "vLLM models/glm5next/common/kda.py and attention.py, v1/attention/backends/mla (customize_spec)",
        "0.30 to 0.33",
    ),
    "fewer_connector_keys": ReleaseChange(
        (0, 32), "--kv-transfer-config refuses kv_buffer_size, kv_ip, kv_parallel_size and kv_rank",
        "vLLM config/kv_transfer.py", "0.14, 0.19, 0.21, 0.22, 0.24, 0.26 to 0.32",
    ),
    "delta_net_checkpoints": ReleaseChange(
        (0, 33), "gated delta nets on compute capability 9.0, 10.x, 12.x: blocks of whole 64 tokens, one more",
        "vLLM model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py", "0.29 to 0.33",
    ),
    "float_cache_as_model": ReleaseChange(
        (0, 33), "a KV cache of float16 or bfloat16 must be of the model's dtype",
        "vLLM config/vllm.py (_reject_mismatched_float_kv_cache)", "0.28, 0.30, 0.32, 0.33",
    ),
    "one_kv_layout": ReleaseChange(
        (0, 33), "one layout of the KV cache must suit all attention backends of a model",
        "vLLM v1/attention/backends/utils.py (get_supported_kv_cache_layouts)", "0.33",
    ),
    "sampler_warm_up": ReleaseChange(
        (0, 33), "the profile run samples twice, the second time with every sampling parameter set",
        "vLLM v1/worker/gpu/model_runner.py (_dummy_sampler_run)", "0.22 to 0.33",
    ),
    "uniform_decode_graphs": ReleaseChange(
        (0, 33), "with drafts, graphs of whole sequences are captured in addition to the usual sizes",
        "vLLM config/vllm.py (_set_cudagraph_sizes)", "0.33",
    ),
    "prefill_context": ReleaseChange(
        (0, 33), "--prefill-context-parallel-size repeats weights and KV cache on ranks that divide a prompt",
        "vLLM v1/worker/gpu/pcp_manager.py, whose refusals differ from 0.26 to 0.32", "0.33",
    ),
    "b12x_split_experts": ReleaseChange(
        (0, 33), "--moe-backend flashinfer_b12x reserves more rows in every layer, and room to split experts",
        "FlashInfer fused_moe/cute_dsl (0.6.13 with vLLM 0.25, 0.7.2 with 0.33); the releases between are not read",
        "0.25, 0.33",
    ),
    "online_methods": ReleaseChange(
        (0, 33), "--quantization takes more names of methods that are applied while loading than fp8 and "
        "experts_int8", "vLLM model_executor/layers/quantization/__init__.py; the releases between are not read",
        "0.14, 0.33",
    ),
    "staged_drafts": ReleaseChange(
        (0, 33), "a draft stands on the last pipeline stage, where an embedding is made for heads that share it",
        "vLLM v1/worker/gpu/spec_decode/eagle/utils.py and model_executor/models/utils.py", "0.33",
    ),
    "yarn_length_stated": ReleaseChange(
        (0, 33), "with YaRN the context is the config's length, not its original length times the factor",
        "vLLM config/model.py (_get_and_verify_max_len); vllm-project/vllm#56446, which may be in a release before",
        "0.33",
    ),
    "draft_bounds_context": ReleaseChange(
        (0, 33), "an independent draft model's context bounds its target's",
        "vLLM config/vllm.py (_limit_max_model_len_to_draft)", "0.33",
    ),
}  # fmt: skip


# CUDA of each release's wheel: of the torch that it pins, by the requirements of both on the package index (0.6.3:
# torch 2.4.0, CUDA 12.1; 0.6.4: 2.5.1, 12.4; 0.10.2: 2.8.0, 12.8; 0.20: 2.11.0, 13.0). The images of 0.9 have 12.8.
BUILDS: Final = (((0, 6), (12, 1)), ((0, 6, 4), (12, 4)), ((0, 9), (12, 8)), ((0, 20), (13, 0)))
# The release compared, case by case: tests/oracles.py
RELEASES: Final = Releases(
    oldest=(0, 6), newest=(0, 33), compared=((0, 33),), changes=CHANGES, listed=True, builds=BUILDS
)


def since(name: str) -> tuple[int, ...]:
    """Release of vLLM that introduced a change."""
    return CHANGES[name].since
