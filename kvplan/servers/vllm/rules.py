"""vLLM's settings: its defaults for flags that are not given, by version and GPU.

Source: vLLM 0.33 engine/arg_utils.py, config/vllm.py, platforms/interface.py; older behavior from its release notes
and from start-up logs that users posted.
"""

import json
from functools import lru_cache
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import GIB
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    ModelSpec,
    RecurrentState,
    Sharing,
    SlidingWindow,
    WindowLatent,
)
from kvplan.servers.releases import Version, number_text
from kvplan.servers.vllm.changes import RELEASES, since
from kvplan.servers.vllm.classes import class_of, context_limits, type_of
from kvplan.servers.words.arguments import EngineArgs, Settings, lacking
from kvplan.sizing.layout import SHORT_DTYPES, check_dtype, check_kv_dtype

AMPERE = 80  # compute capability from which GPUs support bfloat16
OLDEST, NEWEST = RELEASES.oldest, RELEASES.newest


def version(number: tuple[int, int]) -> Version:
    """Return a release's rules. Releases newer than kvplan knows are rejected: their rules may differ."""
    if not OLDEST <= number <= NEWEST:
        raise UsageError(
            f"--engine vllm@{number[0]}.{number[1]}",
            f"kvplan supports vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
            "use one of these releases",
        )
    return Version(number)


LARGE, LARGEST = 70 * GIB, 160 * GIB
BY_NAME = ("h100", "h200")


def scheduler_defaults(gpu: GpuSpec, usage: str, release: Version) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of a GPU, by its memory or name.

    Source: vLLM 0.8.0 to 0.33 engine/arg_utils.py (_set_default_args_v1, get_batch_defaults).
    """
    is_server = usage == "server"
    if release.has("largest_class") and gpu.total_memory >= LARGEST:
        return 16384, 1024
    if is_large(gpu, release):
        return 8192 if is_server else 16384, 1024
    return 2048 if is_server else 8192, 256 if release.has("fewer_sequences") else 1024


def is_large(gpu: GpuSpec, release: Version) -> bool:
    """True if its defaults are those of large GPUs. NVML reports no memory on GB10, so it counts as small in every
    release (two logs of 0.27: graphs of 256 sequences), in 0.33 by its compute capability.
    """
    if not release.has("classes_by_memory"):
        return any(name in gpu.device_name.lower() for name in BY_NAME)
    is_small = gpu.is_gb10 or (gpu.is_a100 and release.has("a100_small"))
    return gpu.total_memory >= LARGE and not is_small


def is_v0(release: Version, sm: int) -> bool:
    """True if the first engine runs: always before 0.8, and until 0.11 on GPUs older than Ampere or if requested."""
    if release.first_engine is not None:
        return release.first_engine
    return not release.has("v1") or (not release.has("v1_only") and 0 < sm < AMPERE)


def runs_v2(spec: ModelSpec, release: Version, *, amd: bool = False) -> bool:
    """True if model runner V2 runs, by the release, the architecture and the model's components."""
    if release.runner_v2 is not None:
        return release.runner_v2
    if release.has("runner_v2"):
        return not (amd and is_between(release, class_of(spec).runner_v1_on_amd))
    if not release.has("runner_v2_by_name"):
        return False
    named = is_between(release, class_of(spec).runner_v2)
    if named and (release.has("runner_v2_quantized") or spec.quantization is None):
        return not spec.has_states or release.has("runner_v2_named_hybrids")
    return release.has("runner_v2_dense") and not spec.experts_per_token and not spec.has_states


def is_between(release: Version, minors: tuple[int, int]) -> bool:
    """True from the first to the last of two minor releases."""
    return release.is_within((0, minors[0]), (0, minors[1] + 1))


def caches_prefixes(spec: ModelSpec, args: EngineArgs, release: Version) -> bool:
    """True if prefixes are cached: as requested, else the release's default for this kind of model."""
    if spec.has_states and not release.has("cached_states"):
        return False
    if args.enable_prefix_caching is not None:
        return args.enable_prefix_caching
    if release.runs_first_engine:  # vLLM 0.7.3 engine/arg_utils.py: on by default only with V1
        return False
    if CrossAttention in spec.cache_kinds:  # vLLM 0.33 config/model.py (is_prefix_caching_supported)
        return False
    return not spec.has_states or (spec.has_attention and release.has("hybrid_prefix_caching"))


def batches_at_once(args: EngineArgs, release: Version, *, runner_v2: bool) -> int:
    """Batches scheduled at once: one per pipeline stage, and one more with asynchronous scheduling.

    Source: vLLM 0.24 to 0.33 config/vllm.py (max_concurrent_batches): runner V1 schedules ahead only on a single stage.
    """
    stages = args.pipeline_parallel_size
    waits = args.speculative_method in ("ngram", "suffix")  # runner V1 drafts them from the last step's tokens
    is_async = release.has("async_scheduling") and args.async_scheduling is not False
    ahead = is_async and (runner_v2 or (stages == 1 and not waits))
    return stages + 1 if ahead else stages


def estimates_graphs(release: Version, *, amd: bool, runner_v2: bool) -> bool:
    """True if a CUDA graph estimate is subtracted before the KV pool is sized."""
    made = not runner_v2 or release.has("runner_v2_graph_estimate")
    there = not amd or release.has("rocm_graph_estimate")
    return release.has("graphs_in_budget") and release.estimates_graphs and made and there


V0_CHUNKED_FROM = 32_768  # V0 enabled chunked prefill for longer contexts


def v0_defaults(context: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of V0: a step fits a whole prompt, 256 sequences on any GPU.

    Source: vLLM 0.6 config.py (SchedulerConfig) and posted logs of 0.6 and 0.7.
    """
    return (2048 if context > V0_CHUNKED_FROM else max(context, 2048)), 256


def resolve_dtype(spec: ModelSpec, stated: str, sm: int) -> str:
    """Dtype of weights and activations. GPUs before Ampere have no bfloat16: `auto` then means float16, or float32
    for models that float16 breaks.
    """
    name = SHORT_DTYPES.get(stated, stated)
    if name == "auto":
        name = spec.dtype
        if 0 < sm < AMPERE and name == "bfloat16":
            name = "float32" if type_of(spec).no_float16 else "float16"
    check_dtype(name)
    return name


V4_KV_DTYPES = (
    "auto",
    "fp8",
    "fp8_e4m3",
    "fp8_ds_mla",
)  # DeepSeek-V4 has one cache layout, whichever of these is asked


def has_rope_key(spec: ModelSpec) -> bool:
    """True if latents include a rope key, as the 656-byte layout does; GLM-5.3-Flash's do not."""
    return any(isinstance(c, LatentAttention) and c.qk_rope_head_dim for caches in spec.layers for c in caches)


def stored_kv_dtype(spec: ModelSpec) -> str | None:
    """KV dtype of `auto` for a quantized checkpoint, if not the model's: ModelOpt's for any attention, that of
    compressed-tensors for all but latent attention.

    Source: vLLM 0.33 model_executor/layers/attention/attention.py (Attention) and mla_attention.py (MLAAttention).
    """
    stored = spec.quantization
    if stored is None or (spec.is_mla and stored.method == "compressed-tensors"):
        return None
    return stored.kv_dtype


def later_kv_dtype(spec: ModelSpec, stated: str, sm: int) -> str:
    """The KV dtype of DeepSeek-V4.1: packed latents, the compressed ones in 4 bits where the kernels read that.

    Source: vLLM 0.33 models/deepseek_v41/attention.py (_resolve_dsv4_kv_cache_dtype).
    """
    check_kv_dtype(stated)
    narrow = 100 <= sm < 110
    if stated in ("auto", "fp8"):
        return "nvfp4_ds_mla" if narrow else "fp8_ds_mla"
    if stated == "fp8_ds_mla" or (stated == "nvfp4_ds_mla" and narrow):
        return stated
    problem = f"{spec.name} keeps packed latents" + (
        ", these only on compute capability 10.x" if "nvfp4" in stated else ""
    )
    raise UsageError(f"--kv-cache-dtype {stated}", problem, "remove it")


def resolve_kv_dtype(spec: ModelSpec, stated: str, dtype: str, sm: int) -> str:
    """KV dtype in effect. `auto` is the model's dtype whatever the weights are stored in, unless the checkpoint
    has scales for an fp8 cache.

    Sparse MLA: fp8 means the 656-byte layout, plain fp8 on compute capability 10.x and 11.x; GLM-5 there defaults to
    fp8 (vLLM 0.33's own results; 12.0 uses the 656 bytes: logs of GLM-5.1 on RTX PRO 6000).
    """
    if spec.is_later_v4:
        return later_kv_dtype(spec, stated, sm)
    if WindowLatent in spec.cache_kinds and stated in V4_KV_DTYPES:
        return "fp8_ds_mla"
    check_kv_dtype(stated)
    if WindowLatent in spec.cache_kinds:
        raise UsageError(f"--kv-cache-dtype {stated}", f"{spec.name} uses its own cache layout", "remove it")
    name = stated
    if name == "auto":
        name = stored_kv_dtype(spec) or dtype
        if spec.is_sparse_mla and type_of(spec).fp8_on_blackwell and 100 <= sm < 120:
            name = "fp8"
    if name in ("fp8", "fp8_e4m3") and spec.is_sparse_mla:
        return "fp8" if 100 <= sm < 120 or not has_rope_key(spec) else "fp8_ds_mla"
    return name


# --- images, videos and sounds ---------------------------------------------------------------------------------------


def mm_limits(args: EngineArgs) -> dict[str, int]:
    """Items of each modality that a prompt may have, if a limit was given."""
    if args.limit_mm_per_prompt is None:
        return {}
    from kvplan.servers.words.item_limits import limits_of  # only with the flag

    return {name: limit.count for name, limit in limits_of(args.limit_mm_per_prompt).items()}


@lru_cache(maxsize=1024)
def served_inputs(spec: ModelSpec) -> frozenset[str]:
    """Modalities that the model's towers serve."""
    return frozenset(name for weight in spec.other_weights for name in weight.serves)


def left_out(spec: ModelSpec, args: EngineArgs, release: Version) -> frozenset[str]:
    """Disabled modalities, and the towers that serve no other.

    Source: vLLM 0.33 config/multimodal.py (get_limit_per_prompt), model_executor/models/interfaces.py
    (_mark_tower_model).
    """
    tables = frozenset({"tables"}) if tables_on_host(spec, args) else frozenset()
    if args.language_model_only:
        return served_inputs(spec) | tables
    if not release.has("towers_left_out"):
        return tables
    return tables | {name for name, count in mm_limits(args).items() if count == 0}


TABLES: Final = ("qwen4_exp", "deepseek_v41")  # model types, or their beginnings, with tables of n-grams


@lru_cache(maxsize=1024)
def has_tables(spec: ModelSpec) -> bool:
    return spec.model_type.startswith(TABLES) and any(weight.serves == ("tables",) for weight in spec.weights)


def tables_on_host(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if tables of n-grams are not on the GPU: by default. Source: vLLM 0.33 config/engram.py."""
    return has_tables(spec) and json.loads(args.engram_config or "{}").get("cpu_offload") is not False


def takes_items(spec: ModelSpec, args: EngineArgs, release: Version) -> bool:
    """True if an encoder runs in addition to the language model."""
    return spec.multimodal and not left_out(spec, args, release).issuperset(served_inputs(spec) or {""})


def check_mm_flags(args: EngineArgs, release: Version) -> None:
    """Reject flags that the release does not have."""
    if args.language_model_only and not release.has("language_model_only"):
        raise unknown_flag("--language-model-only", release, since("language_model_only"))
    if args.mm_encoder_tp_mode == "data" and not release.has("encoder_data"):
        raise unknown_flag("--mm-encoder-tp-mode data", release, since("encoder_data"))
    if args.skip_mm_profiling and not release.has("items_by_batch"):
        raise unknown_flag("--skip-mm-profiling", release, since("items_by_batch"))


def unknown_flag(flag: str, release: Version, first: tuple[int, ...]) -> UsageError:
    return UsageError(
        flag, f"{release.label} does not support it", f"remove it, or use vllm@{first[0]}.{first[1]} or newer"
    )


INPUTS = ("image", "video", "audio")  # for any model; commands reject those that it lacks


def mm_notes(spec: ModelSpec, args: EngineArgs, release: Version) -> list[str]:
    """Notes on effects of a limit that are not sized."""
    served = served_inputs(spec)
    limits = {name: count for name, count in mm_limits(args).items() if name in served}
    notes = []
    unserved = [name for name, count in mm_limits(args).items() if name not in served and name not in INPUTS]
    if unserved and served:
        lacking = printable(", ".join(unserved), 80)
        notes.append(
            f"--limit-mm-per-prompt: {spec.name} takes no {lacking}; its inputs are {', '.join(sorted(served))}"
        )
    if 0 in limits.values() and not release.has("towers_left_out"):
        notes.append(
            f"--limit-mm-per-prompt: whether {release.label} skips a tower at 0 depends on the model's class; it is "
            "counted"
        )
    return notes


# --- which caches a GPU's attention backends take ---------------------------------------------------------------------

FP8_IN_TRITON = 89  # compute capability from which Triton's kernels read fp8


def sparse_kv_dtype(spec: ModelSpec, stated: str, name: str, dcp: int, sm: int, release: Version) -> str:
    """KV dtype that the backends of sparse MLA use for a requested one.

    Hopper uses the 656-byte layout for fp8, and plain fp8 for fp8_e4m3 on one rank per request. 12.x has only the 656
    bytes.
    Source: vLLM 0.33 v1/attention/backends/mla, platforms/cuda.py, and its results on H200, B200 and RTX 5090.
    """
    stored = stored_kv_dtype(spec)
    if 90 <= sm < 100:
        e4m3 = stated == "fp8_e4m3" or (stated == "auto" and stored == "fp8")  # a checkpoint's fp8 is fp8_e4m3
        if e4m3 and release.has("sparse_fp8_hopper") and dcp == 1:
            return "fp8"
    return "fp8_ds_mla" if sm >= 120 else name


def has_uneven_heads(spec: ModelSpec) -> bool:
    """True if keys are wider than values (MiMo-V2): only FlashAttention's and Triton's kernels support such heads."""
    return any(
        isinstance(cache, FullAttention | SlidingWindow) and cache.head_dim != cache.head_dim_v
        for caches in spec.layers
        for cache in caches
    )


BATCHED_TOKENS = 256  # default per step if ranks exchange tokens in batches of one size


def exchanges_in_batches(args: EngineArgs) -> bool:
    """True if expert ranks exchange tokens in batches of one size, for as many tokens as a step has."""
    batched = args.all2all_backend in ("deepep_low_latency", "nixl_ep")
    return batched and args.enable_expert_parallel and args.data_parallel_size > 1


def sees_ahead(spec: ModelSpec, args: EngineArgs, release: Version) -> bool:
    """True if an image's tokens attend bidirectionally (Gemma 3, Gemma 4's large ones): few backends support it."""
    if not release.has("images_look_ahead"):
        return False
    kind = spec.model_type == "gemma3_text" or (spec.model_type == "gemma4_text" and spec.item_tokens > 0)
    return kind and takes_items(spec, args, release)


def generates(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if the model plainly generates text: no flag asks for anything else, nor does its architecture."""
    plain = args.runner == "auto" and args.convert in ("auto", "none")
    return plain and spec.architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def expert_backend(name: str | None) -> str:
    """The name of --moe-backend as vLLM reads it; "auto" if none is given."""
    return (name or "auto").lower().replace("-", "_")


def check_flags(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject flags that the release does not have, and a model that it caches in a way that is not modeled."""
    for name in lacking("vllm"):
        if getattr(args, name) is not None:
            cure = "; vLLM's is --gpu-memory-utilization" if name == "mem_fraction_static" else ""
            raise UsageError(
                f"--{name.replace('_', '-')}", f"is a flag of SGLang{cure}", "remove it or add --engine sglang"
            )
    if spec.is_mla and not release.has("latent_cache"):
        raise UnsupportedModelError(
            spec.name,
            f"vLLM 0.{release.number[1]} kept full heads of its latent attention, which is not modeled",
            f"use vllm@{number_text(since('latent_cache'))} or newer",
        )
    check_mm_flags(args, release)
    if args.max_cudagraph_capture_size is not None and not release.has("graph_size_flag"):
        raise unknown_flag("--max-cudagraph-capture-size", release, since("graph_size_flag"))


def served_context(spec: ModelSpec, args: EngineArgs, release: Version) -> int:
    """The context as stated, else the model's own. Raise UsageError for one beyond it."""
    default, limit = context_limits(spec, release)
    context = default if args.max_model_len in (None, "auto") else args.max_model_len
    assert isinstance(context, int)
    if context > limit:
        from kvplan.servers.plans.overrides import too_long
        from kvplan.servers.vllm.hf_overrides import OPTION

        raise too_long(spec, context, limit, OPTION)
    return context


def step_sizes(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version, context: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs). Raise UsageError for stated ones that contradict each other."""
    default_tokens, default_seqs = scheduler_defaults(gpu, args.usage, release)
    if is_v0(release, gpu.sm):
        default_tokens, default_seqs = v0_defaults(context)
    if args.performance_mode == "throughput":
        default_tokens, default_seqs = 2 * default_tokens, 2 * default_seqs
    if release.has("few_tokens_batched") and exchanges_in_batches(args):
        default_tokens = BATCHED_TOKENS
    seqs = args.max_num_seqs or default_seqs
    item_tokens = spec.item_tokens if takes_items(spec, args, release) else 0
    tokens = args.max_num_batched_tokens or min(seqs * context, max(default_tokens, item_tokens))
    if not args.enable_chunked_prefill:
        tokens = max(tokens, context) if args.max_num_batched_tokens is None else tokens
        if tokens < context:
            raise UsageError(
                f"max_num_batched_tokens {tokens:,}",
                f"without chunked prefill a step must hold the whole context of {context:,} tokens",
            )
    if args.max_num_seqs is not None and args.max_num_seqs > tokens:
        raise UsageError(
            f"max_num_seqs {args.max_num_seqs:,}",
            f"is more than max_num_batched_tokens, {tokens:,}",
            "each running sequence needs a token in a step",
        )
    return tokens, min(seqs, tokens)


def cache_format(spec: ModelSpec, args: EngineArgs, dtype: str, sm: int, release: Version) -> tuple[str, str | None]:
    """(KV dtype in effect, the requested attention backend)."""
    kv_dtype = resolve_kv_dtype(spec, args.kv_cache_dtype, dtype, sm)
    if spec.is_sparse_mla:
        dcp = args.decode_context_parallel_size
        kv_dtype = sparse_kv_dtype(spec, args.kv_cache_dtype, kv_dtype, dcp, sm, release)
    if kv_dtype.startswith("turboquant") and args.pipeline_parallel_size > 1:
        problem = "how pipeline stages group its layers (the first and last are in the model's dtype) is not modeled"
        raise UnsupportedModelError(f"--kv-cache-dtype {kv_dtype}", problem, "use ranks in place of stages, or fp8")
    if args.attention_backend is None:
        return kv_dtype, None
    from kvplan.servers.vllm import backends  # only with the flag

    backend = backends.resolve(args.attention_backend, release)
    return backends.sparse_layout(backend, kv_dtype) if spec.is_sparse_mla else kv_dtype, backend


def resolve(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> Settings:
    """Return the settings in effect.

    Raise UsageError for a context beyond the model's, or flags that contradict each other.
    """
    check_flags(spec, args, release)
    context = served_context(spec, args, release)
    tokens, seqs = step_sizes(spec, gpu, args, release, context)
    dtype, amd = resolve_dtype(spec, args.dtype, gpu.sm), gpu.vendor == "amd"
    kv_dtype, backend = cache_format(spec, args, dtype, gpu.sm, release)
    runner_v2 = runs_v2(spec, release, amd=amd) and args.speculative_method != "suffix"
    batches = batches_at_once(args, release, runner_v2=runner_v2)
    return Settings(
        version=release,
        max_model_len=context,
        auto_fit=args.max_model_len == "auto",
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        in_flight_tokens=tokens * (batches if release.has("batches_in_flight") else 1),
        gpu_memory_utilization=args.gpu_memory_utilization or release.utilization,
        kv_dtype=kv_dtype,
        dtype=dtype,
        backend=backend,
        batches=batches,
        first_engine=is_v0(release, gpu.sm),
        runner_v2=runner_v2,
        graphs_in_budget=estimates_graphs(release, amd=amd, runner_v2=runner_v2),
        prefix_caching=caches_prefixes(spec, args, release),
    )


def head_dims(spec: ModelSpec) -> frozenset[int]:
    """Head widths that an attention backend computes; for MLA, the latent's with its rope key."""
    dims: set[int] = set()
    for cache in {cache for caches in spec.layers for cache in caches}:
        match cache:
            case FullAttention(_, width) | SlidingWindow(_, width) | ChunkedAttention(_, width):
                dims.add(width)
            case LatentAttention(latent, rope):
                dims.add(latent + rope)
    return frozenset(dims)


def default_block_size(spec: ModelSpec, kv_dtype: str, sm: int, *, ahead: bool) -> int:
    """The attention backend's smallest block, at least 16, before states or a user increase it.

    ahead  an image's tokens attend bidirectionally

    Source: vLLM 0.33 platforms/interface.py and the backends it chose for some 180 configurations.
    """
    blackwell, hopper = 100 <= sm < 120, 90 <= sm < 100
    fp8, by_token = kv_dtype.startswith("fp8"), kv_dtype.endswith("_per_token_head")
    if spec.is_sparse_mla:
        return 64
    if spec.is_mla:
        if blackwell:
            return 32  # FLASHINFER_MLA
        return 64 if hopper and fp8 else 16  # FLASHMLA; else FLASH_ATTN_MLA or TRITON_MLA
    if kv_dtype.startswith("turboquant"):
        return 32
    if spec.model_type.startswith("minimax_m3"):
        return 128
    if spec.model_type == "gemma4_text" and hopper and fp8 and not by_token:
        return 64
    is_wide = max(head_dims(spec), default=0) >= 256  # TRITON_FLASHINFER; else FLASH_ATTN
    return 64 if blackwell and ahead and is_wide and not by_token else 16


def check_block_size(block_size: int | None) -> None:
    if block_size is not None and (block_size < 1 or block_size % 16 or block_size > 2**20):
        raise UsageError(f"--block-size {block_size}", "must be a multiple of 16", "use 16, 32, 64 or 128")


# Token exchanges with which several ranks compute shared experts on their own part of the tokens, so keep them whole.
SHARES_TOKENS = (
    None, "allgather_reducescatter", "naive", "pplx", "deepep_high_throughput", "deepep_low_latency", "deepep_v2",
    "flashinfer_nvlink_one_sided", "mori_high_throughput", "mori_low_latency", "nixl_ep", "passthrough",
)  # fmt: skip


def keeps_shared_whole(spec: ModelSpec, args: EngineArgs, release: Version) -> bool:
    """True if each rank keeps shared experts whole, as it computes them for its own tokens (sequence parallel MoE)."""
    spread = args.tensor_parallel_size > 1 and args.data_parallel_size > 1 and args.enable_expert_parallel
    known = release.has("sequence_parallel_experts") and args.all2all_backend in SHARES_TOKENS
    return spread and known and type_of(spec).whole_shared


def keeps_dense_whole(spec: ModelSpec, args: EngineArgs, release: Version) -> bool:
    """True if dense MLPs of a MoE model are kept whole, too: only with DeepSeek's sparse attention."""
    return spec.is_sparse_mla and release.has("whole_dense_mlp") and keeps_shared_whole(spec, args, release)


def check_state_groups(spec: ModelSpec, tp: int) -> None:
    """Reject rank counts that do not divide Mamba 2's heads, or its groups if there are several.

    Source: vLLM 0.9 to 0.33 model_executor/layers/mamba/mamba_mixer2.py, SGLang 0.5 layers/attention/mamba/mamba.py.
    """
    if not spec.has_states:
        return
    states = {cache for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState)}
    for state in (cache for cache in states if cache.kind == "mamba2"):
        groups = next((part.units for part in state.convolution if part.sharing is Sharing.GROUPS), 1)
        for count, what in ((state.heads, "heads"), (groups if groups > 1 else tp, "groups")):
            if count % tp:
                raise UsageError(
                    f"tensor_parallel_size {tp}",
                    f"does not divide the {count} {what} of the states of {spec.name}",
                    "use a divisor",
                )


MOST_RANKS: Final = 16  # that a remedy names


def sizes_text(spec: ModelSpec) -> str:
    """Tensor parallel sizes that divide a model's heads: "1, 2, 4 or 8"."""
    heads, kv_heads = spec.num_heads, spec.most_kv_heads or 1
    sizes = [tp for tp in range(1, MOST_RANKS + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)]
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last


def check_parallel(spec: ModelSpec, args: EngineArgs, *, flat: bool) -> None:
    """Reject parallel sizes that a server rejects at start-up.

    flat  the hybrid KV cache manager is off
    """
    tp = args.tensor_parallel_size
    if spec.cache_kinds != {RecurrentState} and spec.num_heads % tp:
        raise UsageError(
            f"tensor_parallel_size {tp}",
            f"does not divide the {spec.num_heads} attention heads of {spec.name}",
            f"use {sizes_text(spec)}",
        )
    check_state_groups(spec, tp)
    if args.decode_context_parallel_size > 1 and tp % args.decode_context_parallel_size:
        raise UsageError(
            f"decode_context_parallel_size {args.decode_context_parallel_size}",
            f"must divide tensor_parallel_size {tp}",
            "use a divisor",
        )
    heads = spec.most_kv_heads
    dcp = args.decode_context_parallel_size
    if dcp > 1 and heads and (tp <= heads or dcp > tp // heads):
        raise UsageError(
            f"decode_context_parallel_size {dcp}",
            f"{spec.name} has {heads} KV heads, and only ranks that hold the same ones can share a request's tokens",
            f"use a tensor_parallel_size of {dcp * heads} or more",
        )
    if spec.has_states and flat and len(spec.cache_kinds) > 1:
        raise UnsupportedModelError(
            spec.name, "mixes attention with recurrent states", "it cannot run without the hybrid KV cache manager"
        )
