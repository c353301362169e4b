"""vLLM's settings: what it decides when a flag is not given, by version and GPU.

Source: vLLM 0.33 engine/arg_utils.py, config/vllm.py, platforms/interface.py; older behaviour from its release notes
and from start-up logs that users posted.
"""

from functools import lru_cache
from typing import Literal

from kvplan.errors import UnsupportedModelError, UsageError
from kvplan.gpu import GpuSpec
from kvplan.layout import KV_DTYPES
from kvplan.records import dataclass
from kvplan.rules.releases import Version, since
from kvplan.spec import LatentAttention, LayerCache, ModelSpec, RecurrentState, WindowLatent
from kvplan.units import GIB

AMPERE = 80  # compute capability from which GPUs have bfloat16
NEWEST = (0, 33)
OLDEST = (0, 6)


def version(number: tuple[int, int]) -> Version:
    """The behaviour of a release. Newer ones than kvplan knows are refused: their rules may differ."""
    if not OLDEST <= number <= NEWEST:
        raise UsageError(
            f"--engine vllm@{number[0]}.{number[1]}: kvplan knows vLLM {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}; use one of those"
        )
    return Version(number)


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """What the user asked for; None means "not given", and the server decides.

    max_model_len   tokens; "auto" fits the largest context the pool can hold
    performance_mode  throughput doubles the default token budget and sequences
    usage           server (`vllm serve`) or offline (`LLM(...)`): their token budgets differ
    """

    max_model_len: int | Literal["auto"] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    decode_context_parallel_size: int = 1
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    async_scheduling: bool = True
    enforce_eager: bool = False
    mamba_ssm_cache_dtype: str | None = None
    max_loras: int = 0
    max_lora_rank: int = 16
    fully_sharded_loras: bool = False
    kv_offloading_size: int = 0
    num_speculative_tokens: int = 0
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    usage: Literal["server", "offline"] = "server"
    # SGLang's own; those that have a counterpart above go by its name (page_size is block_size).
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    swa_full_tokens_ratio: float | None = None
    mamba_full_memory_ratio: float | None = None
    cuda_graph_max_bs: int | None = None
    cuda_graph_max_bs_prefill: int | None = None
    disable_prefill_cuda_graph: bool | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    enable_multimodal: bool | None = None
    max_mamba_cache_size: int | None = None
    mamba_radix_cache_strategy: str | None = None


SGLANG_ONLY = (
    "mem_fraction_static", "max_total_tokens", "swa_full_tokens_ratio", "mamba_full_memory_ratio", "cuda_graph_max_bs",
    "cuda_graph_max_bs_prefill", "disable_prefill_cuda_graph", "prefill_attention_backend", "decode_attention_backend",
    "enable_multimodal", "max_mamba_cache_size", "mamba_radix_cache_strategy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings a server runs with: the user's, and its own where none were given.

    batches           batches scheduled at once; in_flight_tokens are what windows are charged for
    first_engine      it is vLLM's V0 that runs
    runner_v2         it is model runner V2 that runs
    graphs_in_budget  an estimate of the CUDA graphs is subtracted before the KV pool is sized
    prefix_caching    finished blocks are kept for requests that begin alike
    """

    version: Version
    max_model_len: int
    auto_fit: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    in_flight_tokens: int
    gpu_memory_utilization: float
    kv_dtype: str
    dtype: str
    batches: int = 1
    first_engine: bool = False
    runner_v2: bool = False
    graphs_in_budget: bool = False
    prefix_caching: bool = True


GPU_CLASSES = (
    # minimum total bytes, tokens offline, tokens server, sequences
    (160 * GIB, 16384, 16384, 1024),
    (70 * GIB, 16384, 8192, 1024),
    (0, 8192, 2048, 256),
)


def scheduler_defaults(gpu: GpuSpec, usage: str) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of a GPU: large memory counts, but for A100 and GB10."""
    for least, offline, server, seqs in GPU_CLASSES:
        small_class = least and least < 160 * GIB and (gpu.is_a100 or gpu.is_gb10)
        if gpu.total_memory >= least and not small_class:
            return (server if usage == "server" else offline), seqs
    raise AssertionError("the last class has no minimum")


def is_v0(release: Version, sm: int) -> bool:
    """The first engine: everywhere before 0.8, and until 0.11 on GPUs older than Ampere or where it was asked for."""
    if release.first_engine is not None:
        return release.first_engine
    return not release.has("v1") or (not release.has("v1_only") and 0 < sm < AMPERE)


# Architectures that model runner V2 takes by default, from a release to the next row's.
# Source: vLLM 0.22 to 0.28 config/vllm.py (DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES), all read.
RUNNER_V2_BY_NAME: tuple[tuple[tuple[int, int], frozenset[str]], ...] = (
    ((0, 22), frozenset({"Qwen3ForCausalLM"})),
    ((0, 23), frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"})),
    (
        (0, 24),
        frozenset(
            {
                "Qwen3ForCausalLM", "DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM",
                "LlamaForCausalLM", "MistralForCausalLM",
            }
        ),
    ),
    ((0, 25), frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})),
    (
        (0, 26),
        frozenset(
            {
                "DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "InklingForCausalLM",
                "InklingForConditionalGeneration", "LongcatFlashNgramForCausalLM", "Qwen2MoeForCausalLM",
            }
        ),
    ),
    (
        (0, 27),
        frozenset(
            {
                "DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "InklingForCausalLM",
                "InklingForConditionalGeneration", "KimiK3ForConditionalGeneration", "LongcatFlashNgramForCausalLM",
                "Qwen2MoeForCausalLM",
            }
        ),
    ),
    (
        (0, 28),
        frozenset(
            {
                "DeepseekV2ForCausalLM", "DeepseekV4ForCausalLM", "GraniteMoeForCausalLM", "InklingForCausalLM",
                "InklingForConditionalGeneration", "KimiK3ForConditionalGeneration", "LongcatFlashNgramForCausalLM",
                "Qwen2MoeForCausalLM",
            }
        ),
    ),
)  # fmt: skip
# Likewise those that keep runner V1 on AMD GPUs. Source: vLLM 0.29 to 0.32 config/vllm.py (ROCM_DEFAULT_MRV1_...).
RUNNER_V1_ON_AMD: tuple[tuple[tuple[int, int], frozenset[str]], ...] = (
    ((0, 29), frozenset({"DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"})),
    ((0, 30), frozenset({"DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"})),
    ((0, 32), frozenset()),
)


def runs_v2(spec: ModelSpec, release: Version, *, amd: bool = False) -> bool:
    """Whether it is model runner V2 that runs, by the release, the architecture and what the model is made of."""
    if release.runner_v2 is not None:
        return release.runner_v2
    if release.has("runner_v2"):
        return not (amd and spec.architecture in _row(RUNNER_V1_ON_AMD, release))
    if not release.has("runner_v2_by_name"):
        return False
    if spec.architecture in _row(RUNNER_V2_BY_NAME, release):
        return not has_states(spec) or release.has("runner_v2_named_hybrids")
    return release.has("runner_v2_dense") and not spec.experts_per_token and not has_states(spec)


def _row(table: tuple[tuple[tuple[int, int], frozenset[str]], ...], release: Version) -> frozenset[str]:
    """The row of the newest release in a table that is not newer than this one."""
    return next(names for first, names in reversed(table) if first <= release.number)


def caches_prefixes(spec: ModelSpec, args: EngineArgs, release: Version) -> bool:
    """Whether prefixes are cached: as asked, else as the release does it for this kind of model."""
    if has_states(spec) and not release.has("cached_states"):
        return False
    if args.enable_prefix_caching is not None:
        return args.enable_prefix_caching
    return not has_states(spec) or (has_attention(spec) and release.has("hybrid_prefix_caching"))


def batches_at_once(args: EngineArgs, release: Version, *, runner_v2: bool) -> int:
    """Batches scheduled at once: one per pipeline stage, and one more where scheduling runs ahead.

    Source: vLLM 0.24 to 0.33 config/vllm.py (max_concurrent_batches): runner V1 runs ahead on one stage alone.
    """
    stages = args.pipeline_parallel_size
    ahead = release.has("async_scheduling") and args.async_scheduling and (stages == 1 or runner_v2)
    return stages + 1 if ahead else stages


def estimates_graphs(release: Version, *, amd: bool, runner_v2: bool) -> bool:
    """Whether an estimate of the CUDA graphs is subtracted before the KV pool is sized."""
    made = not runner_v2 or release.has("runner_v2_graph_estimate")
    there = not amd or release.has("rocm_graph_estimate")
    return release.has("graphs_in_budget") and release.estimates_graphs and made and there


LATENT_KEPT = since("latent_cache")
V0_CHUNKED_FROM = 32_768  # V0 turned chunked prefill on by itself for longer contexts


def v0_defaults(context: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of V0: a step held a whole prompt, 256 sequences on any GPU.

    Source: vLLM 0.6 config.py (SchedulerConfig) and posted logs of 0.6 and 0.7.
    """
    return (2048 if context > V0_CHUNKED_FROM else max(context, 2048)), 256


@lru_cache(maxsize=1024)
def caches_of(spec: ModelSpec) -> frozenset[type[LayerCache]]:
    return frozenset(type(cache) for caches in spec.layers for cache in caches)


@lru_cache(maxsize=1024)
def is_mla(spec: ModelSpec) -> bool:
    return any(isinstance(cache, LatentAttention) for caches in spec.layers for cache in caches)


@lru_cache(maxsize=1024)
def is_sparse_mla(spec: ModelSpec) -> bool:
    return any(isinstance(c, LatentAttention) and c.sparse for caches in spec.layers for c in caches)


@lru_cache(maxsize=1024)
def has_states(spec: ModelSpec) -> bool:
    return any(isinstance(cache, RecurrentState) for caches in spec.layers for cache in caches)


@lru_cache(maxsize=1024)
def has_attention(spec: ModelSpec) -> bool:
    return bool(caches_of(spec) - {RecurrentState})


NO_FLOAT16 = ("gemma2", "gemma3_text", "glm4")  # vLLM refuses these in float16 (config/model.py)


def resolve_dtype(spec: ModelSpec, asked: str, sm: int, release: Version | None = None) -> str:
    """The dtype of weights and activations. GPUs before Ampere have no bfloat16: `auto` then means float16, or float32
    for models that float16 breaks."""
    old = 0 < sm < AMPERE
    name = {"half": "float16", "float": "float32"}.get(asked, asked)
    if name == "auto":
        name = spec.dtype
        if old and name == "bfloat16":
            name = "float32" if spec.model_type in NO_FLOAT16 else "float16"
    if name not in ("bfloat16", "float16", "float32"):
        raise UsageError(f"--dtype {asked!r}: is not one vLLM takes; use auto, bfloat16, float16 or float32")
    if old and name == "bfloat16":
        raise UsageError(f"--dtype {asked}: needs compute capability 8.0, this GPU has {sm / 10:.1f}; use float16")
    if name == "float16" and spec.model_type in NO_FLOAT16 and (release is None or release.has("no_float16")):
        raise UsageError(f"--dtype {asked}: vLLM refuses {spec.name} in float16; use bfloat16 or float32")
    return name


# Least compute capability of each storage scheme. Source: vLLM 0.33 model_executor/layers/quantization.
MIN_CAPABILITY = {
    "fp8_tensor": 75, "fp8_channel": 75, "fp8_block": 75, "int8_channel": 75, "int4": 75, "awq": 75, "gptq": 60,
    "nvfp4": 75, "mxfp8": 75, "mxfp4": 80,
}  # fmt: skip
SPARSE_MLA_CAPABILITY = 90  # v1/attention/backends/mla: 9.x, 10.x and 12.x have a sparse backend


@lru_cache(maxsize=1024)
def scheme_kinds(spec: ModelSpec) -> tuple[str, ...]:
    """Every way the checkpoint stores a linear layer."""
    found = spec.quantization
    if found is None:
        return ()
    schemes = {found.default, *found.names.values(), *(scheme for _, scheme in found.patterns)}
    return tuple(sorted(scheme.kind for scheme in schemes if scheme is not None))


def check_capability(spec: ModelSpec, args: EngineArgs, sm: int) -> None:
    """Refuse what the GPU has no kernels for. GPUs whose capability is unknown (AMD, a stated size) are not checked."""
    if not sm:
        return
    kinds = scheme_kinds(spec)
    if not kinds and args.quantization:
        kinds = ("fp8_tensor",)
    for kind in kinds:
        least = MIN_CAPABILITY.get(kind, 0)
        if sm < least:
            raise UsageError(
                f"{spec.name}: its {kind.partition('_')[0]} weights need compute capability {least / 10:.1f}, this GPU "
                f"has {sm / 10:.1f}; choose a newer GPU or another checkpoint"
            )
    if is_sparse_mla(spec) and sm < SPARSE_MLA_CAPABILITY:
        raise UsageError(
            f"{spec.name}: sparse attention needs compute capability 9.0, this GPU has {sm / 10:.1f}; take a newer one"
        )


V4_KV_DTYPES = (
    "auto",
    "fp8",
    "fp8_e4m3",
    "fp8_ds_mla",
)  # DeepSeek-V4 has one cache layout, whichever of these is asked


def resolve_kv_dtype(spec: ModelSpec, asked: str, dtype: str, sm: int) -> str:
    """The KV dtype in effect. `auto` is the model's dtype whatever the weights are stored in, unless the checkpoint
    carries scales for an fp8 cache.

    Sparse MLA: fp8 means the 656-byte layout, plain fp8 on compute capability 10.x and 11.x; GLM-5 there starts in fp8
    without being asked (vLLM 0.33's own answers; 12.0 has the 656 bytes: logs of GLM-5.1 on RTX PRO 6000).
    """
    if WindowLatent in caches_of(spec) and asked in V4_KV_DTYPES:
        return "fp8_ds_mla"
    if asked not in KV_DTYPES:
        raise UsageError(f"--kv-cache-dtype {asked!r}: is not one kvplan knows; use one of {', '.join(KV_DTYPES)}")
    if WindowLatent in caches_of(spec):
        raise UsageError(f"--kv-cache-dtype {asked}: {spec.name} keeps its cache in a layout of its own; leave it out")
    name = asked
    if name == "auto":
        name = (spec.quantization.kv_dtype if spec.quantization else None) or dtype
        if is_sparse_mla(spec) and spec.model_type == "glm_moe_dsa" and 100 <= sm < 120:
            name = "fp8"
    if name in ("fp8", "fp8_e4m3") and is_sparse_mla(spec):
        return "fp8" if 100 <= sm < 120 else "fp8_ds_mla"
    if name.startswith("nvfp4") and name != "nvfp4_ds_mla" and is_mla(spec):
        raise UsageError(
            f"--kv-cache-dtype {name}: vLLM refuses it for the latent attention of {spec.name}; use fp8, or "
            "nvfp4_ds_mla where attention is sparse"
        )
    return name


def check_sparse_dcp(spec: ModelSpec, kv_dtype: str, dcp: int, sm: int) -> None:
    """Hopper's sparse kernels give no log-sum-exp for a 16-bit cache, which ranks that share a request's tokens need.

    Source: vLLM 0.33 v1/attention/backends/mla/flashmla_sparse.py.
    """
    if dcp > 1 and is_sparse_mla(spec) and 90 <= sm < 100 and not kv_dtype.endswith("_ds_mla"):
        raise UsageError(
            f"decode_context_parallel_size {dcp}: vLLM refuses it for the {kv_dtype} cache of {spec.name} on compute "
            f"capability {sm / 10:.1f}; use --kv-cache-dtype fp8"
        )


def resolve(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> Settings:
    """The settings in effect.

    Raises UsageError for a context beyond the model's, or flags that contradict each other.
    """
    for name in SGLANG_ONLY:
        if getattr(args, name) is not None:
            cure = "; vLLM's is --gpu-memory-utilization" if name == "mem_fraction_static" else ""
            raise UsageError(
                f"--{name.replace('_', '-')}: is a flag of SGLang{cure}; leave it out or add --engine sglang"
            )
    asked = args.max_model_len
    context = spec.max_model_len if asked in (None, "auto") else asked
    assert isinstance(context, int)
    if context > spec.context_limit:
        raise UsageError(
            f"max_model_len {context:,}: {spec.name} was made for {spec.context_limit:,} tokens; use at most that"
        )
    if is_mla(spec) and release.number < LATENT_KEPT:
        raise UnsupportedModelError(
            f"{spec.name}: vLLM 0.{release.number[1]} kept full heads of its latent attention, which is not modelled; "
            f"use vllm@0.{LATENT_KEPT[1]} or newer"
        )
    default_tokens, default_seqs = scheduler_defaults(gpu, args.usage)
    if is_v0(release, gpu.sm):
        default_tokens, default_seqs = v0_defaults(context)
    if args.performance_mode == "throughput":
        default_tokens, default_seqs = 2 * default_tokens, 2 * default_seqs
    seqs = args.max_num_seqs or default_seqs
    tokens = args.max_num_batched_tokens or min(seqs * context, max(default_tokens, spec.item_tokens))
    if not args.enable_chunked_prefill:
        tokens = max(tokens, context) if args.max_num_batched_tokens is None else tokens
        if tokens < context:
            raise UsageError(
                f"max_num_batched_tokens {tokens:,}: without chunked prefill a step must hold the whole context of "
                f"{context:,} tokens"
            )
    if args.max_num_seqs is not None and args.max_num_seqs > tokens:
        raise UsageError(
            f"max_num_seqs {args.max_num_seqs:,}: is more than max_num_batched_tokens, {tokens:,}; each running "
            "sequence needs a token in a step"
        )
    seqs = min(seqs, tokens)
    amd = gpu.vendor == "amd"
    runner_v2 = runs_v2(spec, release, amd=amd)
    batches = batches_at_once(args, release, runner_v2=runner_v2)
    dtype = resolve_dtype(spec, args.dtype, gpu.sm, release)
    kv_dtype = resolve_kv_dtype(spec, args.kv_cache_dtype, dtype, gpu.sm)
    check_sparse_dcp(spec, kv_dtype, args.decode_context_parallel_size, gpu.sm)
    return Settings(
        version=release,
        max_model_len=context,
        auto_fit=asked == "auto",
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        in_flight_tokens=tokens * (batches if release.has("batches_in_flight") else 1),
        gpu_memory_utilization=args.gpu_memory_utilization or release.utilization,
        kv_dtype=kv_dtype,
        dtype=dtype,
        batches=batches,
        first_engine=is_v0(release, gpu.sm),
        runner_v2=runner_v2,
        graphs_in_budget=estimates_graphs(release, amd=amd, runner_v2=runner_v2),
        prefix_caching=caches_prefixes(spec, args, release),
    )


def default_block_size(spec: ModelSpec, kv_dtype: str, sm: int) -> int:
    """The attention backend's smallest block, at least 16, before states or a user raise it.

    Source: vLLM 0.33 platforms/interface.py and the backends it chose for some 180 configurations.
    """
    blackwell, hopper = 100 <= sm < 120, 90 <= sm < 100
    fp8 = kv_dtype.startswith("fp8")
    if is_sparse_mla(spec):
        return 64
    if is_mla(spec):
        if blackwell:
            return 32  # FLASHINFER_MLA
        return 64 if hopper and fp8 else 16  # FLASHMLA; else FLASH_ATTN_MLA or TRITON_MLA
    if kv_dtype.startswith("turboquant"):
        return 32
    if spec.model_type.startswith("minimax_m3"):
        return 128
    if spec.model_type == "gemma4_text" and ((hopper and fp8) or blackwell):
        return 64
    if spec.model_type == "gemma3_text" and spec.multimodal and blackwell:
        return 64
    return 16


def check_block_size(block_size: int | None) -> None:
    if block_size is not None and (block_size < 1 or block_size % 16 or block_size > 2**20):
        raise UsageError(f"--block-size {block_size}: must be a multiple of 16; use 16, 32, 64 or 128")


def check_parallel(spec: ModelSpec, args: EngineArgs) -> None:
    """The splits a server refuses at start-up."""
    tp = args.tensor_parallel_size
    if args.enable_expert_parallel and not spec.experts_per_token:
        raise UsageError(f"--enable-expert-parallel: {spec.name} has no experts; leave it out")
    if caches_of(spec) != {RecurrentState} and spec.num_heads % tp:
        raise UsageError(
            f"tensor_parallel_size {tp}: does not divide the {spec.num_heads} attention heads of {spec.name}; "
            "use a divisor"
        )
    if args.decode_context_parallel_size > 1 and tp % args.decode_context_parallel_size:
        raise UsageError(
            f"decode_context_parallel_size {args.decode_context_parallel_size}: must divide tensor_parallel_size {tp}"
        )
    if has_states(spec) and args.disable_hybrid_kv_cache_manager and len(caches_of(spec)) > 1:
        raise UnsupportedModelError(
            f"{spec.name}: mixes attention with recurrent states; it cannot run without the hybrid KV cache manager"
        )
