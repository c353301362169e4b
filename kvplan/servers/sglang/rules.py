"""SGLang's settings: its defaults for flags that are not given. Its pools are in sglang/pool.py, model-specific rules
in sglang/models.py.

SGLang measures no activation peak. It loads the model, reserves a fraction of what was free before, and turns the rest
into tokens: KV bytes = free before loading x mem_fraction_static - what loading took. Activations and CUDA graphs use
the reserved fraction, which a rule of thumb sizes.

Source: sglang 0.5.23 srt/arg_groups (memory_hook.py, cuda_graph_hook.py, overrides.py); srt/server_args.py of 0.5.15 to
0.5.2, 0.4.9 and 0.4.4 for the older defaults. Equal to SGLang's own code in every compared case (tests/oracles.py).
"""

from collections.abc import Iterator

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.units import GIB, MIB, format_gib
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Version
from kvplan.servers.sglang import drafts, exchange
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang.changes import RELEASES
from kvplan.servers.sglang.classes import class_of
from kvplan.servers.sglang.models import takes_images
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import DEFAULTS, EngineArgs, Settings, lacking
from kvplan.sizing.weights import up

OLDEST, NEWEST = RELEASES.oldest, RELEASES.newest

# `memory.total` of nvidia-smi in MiB, from which SGLang computes its default fraction: more than CUDA reports. Source:
# public listings ("0MiB / 81559MiB").
SMI_MIB = {
    "t4": 15_360, "a10": 23_028, "a10g": 23_028, "l4": 23_034, "rtx-4090": 24_564, "rtx-3090": 24_576,
    "rtx-5090": 32_607, "a100-40g": 40_960, "a40": 46_068, "l40": 46_068, "l40s": 46_068, "rtx-a6000": 49_140,
    "rtx-6000-ada": 49_140, "h100-80g": 81_559, "h100-pcie-80g": 81_559, "a100-80g": 81_920,
    "a100-pcie-80g": 81_920, "h100-nvl-94g": 95_830, "h20": 97_871, "gh200-96g": 97_871, "rtx-pro-6000": 97_887,
    "h200": 143_771, "b200": 183_359,
}  # fmt: skip
# (below this many MiB, chunked_prefill_size, largest decode graph, the same from tensor parallel size 4 on)
CLASSES = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 4096, 48, 160),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
)
BLACKWELL, CONSUMER_BLACKWELL = 100, 120  # compute capabilities
LARGEST_CLASS = (16_384, 512, 512)
CLASSES_055 = (CLASSES[0], (35 * 1024, 2048, 24, 80), *CLASSES[2:])
CLASSES_04 = ((35 * 1024, 2048, 8, 80), (160 * 1024, 8192, 160, 160))  # 256 graphs from 90 GiB on: irrelevant here
# Token counts of captured prefill graphs: (from, to, step).
PREFILL_GRAPHS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
PREFILL_STEP = 512  # beyond the last range
LARGE_GRAPHS = 300  # sequences; DP attention reserves 1.5 MiB for each one of a rank beyond these
MLA_GRAPHS_MIB = 1536
VISION_FACTOR = 0.95  # factor on the fraction, for a vision tower like ViT-L, whose size is 24 layers of 1,024
VISION_SIZE = (24, 1024)
VISION_STEP, VISION_RANGE = 0.1, (0.8, 1.05)  # a tenth less for each multiple of that tower size
IMAGE_CACHE = 100 * MIB  # image embeddings, allocated after the pool (SGLANG_VLM_CACHE_SIZE_MB)
IMAGE_TRANSPORT, MANY_REQUESTS = GIB, 400  # for Qwen3-VL on large Hopper GPUs; three times that for so many requests
FIRST_LLAMAS = "llama-2"  # in the model's name: prefill graphs of 4,096 tokens at most
FIRST_LLAMAS_GRAPHS, LATENT_GRAPHS = 4096, 8192
# max_running_requests: per context that the pool holds, and its limits.
LEAST_REQUESTS, MOST_REQUESTS, REQUESTS_PER_CONTEXT = 2048, 4096, 512
KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
SPARSE_KV_DTYPES = ("auto", "bfloat16", "bf16", "fp8", "fp8_e4m3")


def version(number: tuple[int, ...]) -> Version:
    """Return a release's rules: (0, 5), or (0, 4, 3), whose third field matters for the default fraction."""
    if not OLDEST <= number[:2] <= NEWEST:
        raise UsageError(
            f"--engine sglang@{'.'.join(map(str, number))}",
            f"kvplan supports SGLang {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
            "use one of these releases",
        )
    return Version((number[0], number[1]), "sglang", number[2] if len(number) > 2 else None)


# --- settings ---------------------------------------------------------------------------------------------------------

QUANTIZED_WHILE_LOADING = ("fp8",)  # of the schemes that vLLM supports, too
CURES = {  # for arguments that SGLang lacks
    "gpu_memory_utilization": ("SGLang divides memory by --mem-fraction-static", "give that"),
    "kv_cache_memory_bytes": ("SGLang has no such flag", "--engine-arg max_total_tokens=N sets its pool"),
    "num_gpu_blocks_override": ("SGLang counts tokens", "--engine-arg max_total_tokens=N sets its pool"),
    "attention_backend": (
        "SGLang has one for each phase here",
        "give --prefill-attention-backend and --decode-attention-backend",
    ),
    "kv_offloading_size": ("SGLang's own is its hierarchical cache", "remove it"),
    "kv_transfer_config": ("SGLang has no connectors of vLLM", "remove it"),
}


UNCHUNKED = "enable_chunked_prefill"  # SGLang has --chunked-prefill-size -1 for it
PREFILL_TOKENS = 16_384  # --max-prefill-tokens: of a step whose prompts are whole


def check_args(spec: ModelSpec, args: EngineArgs) -> None:
    """Reject flags that SGLang does not have, and features that are not modeled."""
    for name in lacking("sglang"):
        if name != UNCHUNKED and getattr(args, name) != DEFAULTS[name]:
            flag = f"--{name.replace('_', '-')}"
            if name in CURES:
                raise UsageError(flag, *CURES[name])
            raise UsageError(flag, "SGLang has no such flag", "remove it")
    if args.quantization is not None and spec.quantization is None and args.quantization not in QUANTIZED_WHILE_LOADING:
        raise UsageError(
            f"--quantization {args.quantization}",
            "is not one that is modeled for SGLang",
            "name a quantized checkpoint",
        )
    check_experts(spec, args)
    if spec.is_sparse_mla and args.kv_cache_dtype not in SPARSE_KV_DTYPES:
        raise UsageError(
            f"--kv-cache-dtype {args.kv_cache_dtype}", f"SGLang's sparse attention takes {', '.join(SPARSE_KV_DTYPES)}"
        )


def check_values(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject values that SGLang's flags do not take, and those of which it is not known when a server starts."""
    exchange.check(spec, args, release)
    if args.kv_cache_dtype not in KV_DTYPES:
        raise UsageError(
            f"--kv-cache-dtype {args.kv_cache_dtype!r}",
            "is not one that is modeled for SGLang",
            f"use {', '.join(KV_DTYPES)}",
        )
    sglang_models.check_backends(spec, args, release)


def check_disaggregation(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject prefill/decode disaggregation for pools that are not modeled."""
    if args.disaggregation_mode is None:
        return
    flag = f"--disaggregation-mode {args.disaggregation_mode}"
    if not release.has("halves"):
        raise UnsupportedModelError(flag, f"is modeled only for 0.5.23, not for {release.label}", "remove it")
    if args.disaggregation_mode == "decode" and args.enable_prefix_caching:
        raise UsageError(flag, "keeps no prefixes; the decode radix cache is not modeled", "remove it")
    lacks = {
        "recurrent states": spec.has_states,
        "drafts": args.speculative_method is not None,
        "--enable-hierarchical-cache": bool(args.enable_hierarchical_cache),
        "adapters": args.max_loras > 0,
    }
    for what, has in lacks.items():
        if has:
            raise UnsupportedModelError(flag, f"is not modeled with {what}", "use only one")


def check_experts(spec: ModelSpec, args: EngineArgs) -> None:
    """Reject combinations of DP attention and expert parallelism that SGLang rejects, and those not sized."""
    tp, dp = args.tensor_parallel_size, args.data_parallel_size
    if args.enable_dp_attention and (dp == 1 or tp % dp):
        raise UsageError(
            f"--enable-dp-attention with --dp-size {dp}",
            f"requires --dp-size > 1 that divides --tp-size {tp}",
            "change --dp-size",
        )
    if args.enable_dp_attention and args.speculative_method is not None:
        drafts.check_dp_attention(args)
    if args.enable_eplb and not args.enable_expert_parallel:
        raise UsageError(
            "enable_eplb", "SGLang requires several ranks of experts with it", "add enable_expert_parallel"
        )
    if args.enable_dp_lm_head and not args.enable_dp_attention:
        raise UsageError("--enable-dp-lm-head", "requires --enable-dp-attention", "add it")
    if args.moe_dense_tp_size not in (None, 1):
        raise UsageError(f"--moe-dense-tp-size {args.moe_dense_tp_size}", "is not supported by SGLang", "use 1")
    spare = args.num_redundant_experts
    experts = max((weight.experts for weight in spec.weights), default=0) if spare else 0
    if spare and (not args.enable_expert_parallel or (experts + spare) % tp):
        raise UsageError(
            f"--ep-num-redundant-experts {spare}",
            f"{experts} experts and {spare} spare ones cannot be split evenly over the ranks of --ep-size",
            "use a number for which they can",
        )
    if dp > 1 and args.enable_expert_parallel and not args.enable_dp_attention:
        raise UsageError(
            "enable_expert_parallel with replicas", "is not modeled", "use --dp-size 1, or add --enable-dp-attention"
        )


def resolve(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> Settings:
    """The settings in effect; `max_num_seqs` is an upper bound until the pool is known (max_requests)."""
    check_args(spec, args)
    check_disaggregation(spec, args, release)
    sglang_models.check_class(spec)
    vllm.check_parallel(spec, args, flat=False)  # it has no hybrid manager
    drafts.check_branches(spec, gpu.sm, args, release)
    stated, longest = args.max_model_len, sglang_models.context_length(spec)
    context = longest if stated in (None, "auto") else stated
    assert isinstance(context, int)
    if context > longest:
        from kvplan.servers.plans.overrides import too_long
        from kvplan.servers.sglang.config_overrides import OPTION

        raise too_long(spec, context, longest, OPTION)
    dtype = resolve_dtype(spec, gpu.sm, args)
    chunk = chunk_size(gpu, args, release)
    if not args.enable_chunked_prefill:
        chunk = max(chunk, context)
    elif args.enable_dp_attention:
        chunk //= args.data_parallel_size
    return Settings(
        version=release,
        max_model_len=context,
        auto_fit=stated == "auto",
        max_num_batched_tokens=chunk,
        max_num_seqs=drafts.requests_at_most(args, spec) or MOST_REQUESTS,
        in_flight_tokens=chunk,
        gpu_memory_utilization=args.mem_fraction_static or default_fraction(spec, gpu, args, release),
        kv_dtype=resolve_kv_dtype(spec, stated_kv_dtype(args), dtype, gpu.sm),
        dtype=dtype,
        prefix_caching=sglang_models.caches_prefixes(args),
    )


def resolve_dtype(spec: ModelSpec, sm: int, args: EngineArgs) -> str:
    """Dtype of weights: float16 before compute capability 8.0, whatever the model or --dtype says.

    Source: SGLang 0.5.23 model_runner_components/load_model_utils.py (maybe_downgrade_dtype_for_legacy_gpu).
    """
    if 0 < sm < vllm.AMPERE:
        return "float16"
    if class_of(spec).dtype:
        return class_of(spec).dtype
    ignored = spec.model_type == "gpt_oss" and "mxfp4" in spec.scheme_kinds  # arg_groups/overrides.py: its kernels'
    stated = sglang_models.model_dtype(spec) if args.dtype == "auto" or ignored else args.dtype
    return vllm.resolve_dtype(spec, stated, sm)


def stated_kv_dtype(args: EngineArgs) -> str:
    """The KV dtype as stated; one backend implies its own (srt/arg_groups/serving_hook.py)."""
    return "fp8_e4m3" if args.decode_attention_backend == "tokenspeed_mla" else args.kv_cache_dtype


def resolve_kv_dtype(spec: ModelSpec, stated: str, dtype: str, sm: int) -> str:
    """The KV dtype in effect: the model's, unless the checkpoint has scales for an fp8 cache.

    Sparse attention uses fp8 from compute capability 10.0 on and bfloat16 below, whatever the checkpoint says; fp8
    takes 656 bytes per token there if the kernel needs its own scales (flashmla_kv; GLM on 12.x).
    """
    stated = "bfloat16" if stated == "bf16" else stated  # SGLang's name for it
    if spec.is_compressed_mla:
        return "fp8" if stated == "auto" else vllm.resolve_kv_dtype(spec, stated, dtype, sm)
    if not spec.is_sparse_mla:
        stored = "fp8" if sglang_models.has_fp8_cache(spec) else dtype
        return stored if stated == "auto" else vllm.resolve_kv_dtype(spec, stated, dtype, sm)
    if stated == "bfloat16" or (stated == "auto" and sm < BLACKWELL):
        return "bfloat16"
    scaled = sm < BLACKWELL or (sm >= CONSUMER_BLACKWELL and spec.model_type == "glm_moe_dsa")
    return "fp8_ds_mla" if scaled else "fp8"


def smi_mib(gpu: GpuSpec) -> int:
    """Total memory reported by nvidia-smi; if no listing is known or the user gave a size, the size that CUDA
    reports.
    """
    seen = gpu.total_memory // MIB
    return seen if gpu.total_memory_kind == "given" else SMI_MIB.get(gpu.name, seen)


def gpu_class(gpu: GpuSpec, args: EngineArgs, release: Version) -> tuple[int, int]:
    """(chunked_prefill_size, largest decode graph) by the GPU's memory."""
    small_tp = args.tensor_parallel_size < 4
    classes: tuple[tuple[int, int, int, int], ...] = CLASSES
    if not release.has("wider_small_gpus"):
        classes = CLASSES_055 if release.has("reserve_by_parts") else CLASSES_04
    for below, chunk, graphs, graphs_tp4 in classes:
        if smi_mib(gpu) < below:
            return chunk, graphs if small_tp else graphs_tp4
    chunk, graphs, graphs_tp4 = LARGEST_CLASS
    return chunk, graphs if small_tp else graphs_tp4


def chunk_size(gpu: GpuSpec, args: EngineArgs, release: Version) -> int:
    """Tokens of a prompt in a step; without chunks those that a step's prompts may have together."""
    if not args.enable_chunked_prefill:
        return args.max_num_batched_tokens or PREFILL_TOKENS
    return args.max_num_batched_tokens or gpu_class(gpu, args, release)[0]


def decode_graphs(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> int:
    """Sequences of the largest graph: as requested, else the GPU's default, at most --max-running-requests. Qwen3-VL on
    a large Hopper GPU takes up to 512.
    """
    if args.cuda_graph_max_bs is not None:
        return args.cuda_graph_max_bs
    usual, max_seqs = gpu_class(gpu, args, release)[1], args.max_num_seqs
    if max_seqs is None or not release.has("graphs_by_requests"):
        return usual
    large = sglang_models.is_large_hopper_qwen3_vl(spec, gpu.sm, smi_mib(gpu), args.enable_multimodal)
    return max_seqs if max_seqs < usual or (large and max_seqs <= LARGEST_CLASS[2]) else usual


def most_prefill_tokens(spec: ModelSpec, chunk: int, args: EngineArgs) -> int:
    """Tokens of the largest prefill graph."""
    if stated := args.cuda_graph_max_bs_prefill or class_of(spec).largest_prefill:
        return stated
    if not args.enable_chunked_prefill:
        return 0
    staged = args.pipeline_parallel_size > 1 and args.cuda_graph_backend_prefill == "breakable"
    limit = min(chunk, LATENT_GRAPHS) if spec.is_mla or staged else chunk
    if args.max_total_tokens is not None:
        limit = min(limit, args.max_total_tokens)
    return min(limit, FIRST_LLAMAS_GRAPHS) if FIRST_LLAMAS in spec.name.lower() else limit


def captures_decodes(args: EngineArgs) -> bool:
    if args.cuda_graph_backend_decode is not None:
        return args.cuda_graph_backend_decode != "disabled"
    return not args.enforce_eager


def prefill_graphs(spec: ModelSpec, chunk: int, args: EngineArgs) -> int:
    """How many graphs prefills have. With DeepEP they are made before the chunk is looked at, of whole 8 tokens."""
    if not exchange.exchanges(args):
        return num_prefill_graphs(most_prefill_tokens(spec, chunk, args))
    return num_prefill_graphs(args.cuda_graph_max_bs_prefill or exchange.GRAPH_TOKENS, exchange.GRAPH_UNIT)


def num_prefill_graphs(most: int, unit: int = 1) -> int:
    """Prefill graphs of up to `most` tokens, each of whole units."""
    sizes = [size for start, end, step in PREFILL_GRAPHS for size in range(start, end + 1, step)]
    sizes += range(PREFILL_GRAPHS[-1][1] + PREFILL_STEP, most + 1, PREFILL_STEP)
    return len({up(size, unit) for size in sizes if size <= most})


def default_fraction(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> float:
    """Default of mem_fraction_static: what a rule of thumb leaves after activations and graphs."""
    total, ranks = smi_mib(gpu), args.tensor_parallel_size * args.pipeline_parallel_size
    if not release.has("reserve_by_parts"):
        fraction = _older_fraction(total, ranks, release)
    else:
        fraction = round((total - reserved_mib(spec, gpu, args, release)) / total, 3)
    if fraction <= 0:
        raise UsageError(
            "--mem-fraction-static",
            f"SGLang's rule of thumb leaves nothing of {total:,} MiB for weights and KV",
            "state it, or lower --max-num-batched-tokens (chunked_prefill_size)",
        )
    return fraction * vision_factor(spec, args)


def usual_fraction(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> float | None:
    """Default of mem_fraction_static, or None if the rule of thumb leaves nothing."""
    try:
        return default_fraction(spec, gpu, args, release)
    except UsageError:
        return None


def vision_factor(spec: ModelSpec, args: EngineArgs) -> float:
    """Factor that lowers the default for a model that takes images, by the tower's layers x width squared."""
    sees = takes_images(spec, args.enable_multimodal) and args.disaggregation_mode != "decode"
    shape = sglang_models.tower_shape(spec, VISION_SIZE) if sees else None
    if shape is None:
        return 1.0
    layers, width = shape
    times = layers * width**2 / (VISION_SIZE[0] * VISION_SIZE[1] ** 2)
    least, limit = VISION_RANGE
    return VISION_FACTOR * max(least, min(limit, 1 - VISION_STEP * (times - 1)))


def reserved_mib(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> float:
    """Reserved MiB: 1.5 per token of a chunk, 2 per sequence of the largest graph, 8 per prefill graph."""
    chunk, mode = chunk_size(gpu, args, release), args.disaggregation_mode
    tokens = chunk if mode != "decode" else args.max_num_seqs or decode_graphs(spec, gpu, args, release)
    reserved = 512 + 1.5 * max(tokens, 2048) + args.tensor_parallel_size * args.pipeline_parallel_size / 8 * 1024
    reserved += graphs_mib(spec, gpu, args, release)
    reserved = max(reserved, 10 * 1024) if smi_mib(gpu) > 60 * 1024 else reserved
    keeps_decodes = captures_decodes(args) and mode != "prefill"
    return reserved + exchange.kept_mib(args, prefill_graphs=False, decode_graphs=keeps_decodes)


def graphs_mib(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> float:
    """The part of what is reserved that graphs and their inputs take."""
    mode, reserved = args.disaggregation_mode, 0.0
    if captures_decodes(args) and mode != "prefill":
        reserved += 2 * decode_graphs(spec, gpu, args, release)
    if args.enable_dp_attention and mode != "prefill":
        largest = decode_graphs(spec, gpu, args, release)
        reserved += 3 * largest * args.data_parallel_size
        reserved += 1.5 * largest * args.data_parallel_size if largest > LARGE_GRAPHS else 0
    if release.has("prefill_graphs") and sglang_models.captures_prefill(spec, args):
        graphs = prefill_graphs(spec, chunk_size(gpu, args, release), args)
        reserved += MLA_GRAPHS_MIB if spec.is_mla else 8 * graphs
        reserved += exchange.kept_mib(args, prefill_graphs=True, decode_graphs=False)
    return reserved


def image_reservation(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> int:
    """Bytes reserved for images before the pool is sized; they are allocated later."""
    if not release.has("image_reservation") or not takes_images(spec, args.enable_multimodal):
        return 0
    if not sglang_models.is_large_hopper_qwen3_vl(spec, gpu.sm, smi_mib(gpu), args.enable_multimodal):
        return IMAGE_CACHE
    return IMAGE_TRANSPORT * (3 if (args.max_num_seqs or 0) >= MANY_REQUESTS else 1)


def _older_fraction(total: int, ranks: int, release: Version) -> float:
    """Default in 0.4: by tensor parallel size up to 0.4.4, then by the GPU's memory."""
    if not release.has("fraction_by_memory"):
        table = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87))
        return next((fraction for least, fraction in table if ranks >= least), 0.88)
    gib = 2.8 + ranks / 10 if total < 35 * 1024 else (9.5 if total < 90 * 1024 else 12) + ranks / 2
    return round((total - (32 if total >= 160 * 1024 else gib) * 1024) / total, 3)


def notes(
    args: EngineArgs, settings: Settings, reserved: int, needed: int, usual: float | None, images: int
) -> Iterator[str]:
    """Notes on assumptions that no row shows.

    reserved, needed  bytes reserved for activations and graphs, and those by SGLang's own rule of thumb
    usual             the fraction that its rule of thumb chooses, or None
    images            bytes reserved for images
    """
    if args.mem_fraction_static is None:
        fraction = f"{settings.gpu_memory_utilization:.6g}"
        yield f"no --mem-fraction-static: using {fraction} from SGLang's rule of thumb; the printed command sets it"
    elif reserved < needed and (usual is None or args.mem_fraction_static > usual * (1 + 1e-6)):
        yield (
            f"{format_gib(max(0, reserved))} are reserved for activations and CUDA graphs; SGLang's rule of thumb "
            f"keeps {format_gib(needed)}"
        )
    if images:
        yield f"{format_gib(images)} more are reserved for images before the KV pool is sized"


def replicas_note(replicas: int, ranks: int) -> str:
    """Note that plain --dp-size starts separate servers, unlike DP attention."""
    return (
        f"--dp-size {replicas}: {replicas} servers of {ranks} GPUs each, {replicas * ranks:,} GPUs in all; with "
        "--enable-dp-attention its ranks lie inside --tp-size"
    )
