"""SGLang's model-specific rules: attention backends and their pages, windows, states, images.

What differs by class is a row of classes.py. Source: sglang 0.5.23 srt/configs/model_config.py,
srt/arg_groups/overrides.py and srt/arg_groups/model_overrides.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.hf_config import language_path, text_of
from kvplan.models.quant import SIDE_FILE
from kvplan.models.spec import ChunkedAttention, FullAttention, ModelSpec, RecurrentState, SlidingWindow, SparseIndexer
from kvplan.servers.plans.plan import Refusal, unsupported
from kvplan.servers.releases import Version
from kvplan.servers.sglang.classes import class_of, outer_of, outer_type, type_of
from kvplan.servers.words.arguments import EngineArgs

GRANITE = "GraniteMoeHybridForCausalLM"  # with states or without
STRATEGIES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
FP4 = 100  # compute capability with kernels for NVFP4
LARGE_HOPPER_MIB = 60 * 1024
QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")


def keeps_towers_whole(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if each rank loads the whole tower, because of --mm-enable-dp-encoder and a class that reads it."""
    return args.mm_encoder_tp_mode == "data" and outer_of(spec).tower == "by data"


def keeps_scales_twice(spec: ModelSpec, sm: int, release: Version) -> bool:
    """True if ModelOpt's NVFP4 experts keep a second copy of their block scales, which no kernel reads.

    Before Blackwell, Marlin's kernels take the first copy; llm-compressor's experts have no second.
    Source: sglang 0.5.23 modelopt_quant.py (ModelOptNvFp4FusedMoEMethod) and srt/layers/quantization/utils.py
    (swizzle_blockscale); sgl-project/sglang#38073.
    """
    return has_modelopt_fp4(spec) and sm < FP4 and release.has("fp4_before_blackwell")


def has_modelopt_fp4(spec: ModelSpec) -> bool:
    by_modelopt = spec.quantization is not None and spec.quantization.method != "compressed-tensors"
    return by_modelopt and "nvfp4" in spec.scheme_kinds


def caches_prefixes(args: EngineArgs) -> bool:
    """True if the radix cache is on: it is unless switched off, or the server is the decode side of a
    disaggregated pair.
    """
    return args.enable_prefix_caching is not False and args.disaggregation_mode != "decode"


def is_hopper(sm: int) -> bool:
    return 90 <= sm < 100


def is_datacenter_blackwell(sm: int) -> bool:
    return 100 <= sm < 110


ENCODER_DECODERS = ("whisper",)  # 17,262 tokens on SGLang 0.5.23; counting every layer twice gives 25,894


def check_class(spec: ModelSpec) -> None:
    """Reject a model whose pool in SGLang is not modeled."""
    if (what := class_of(spec).unmodeled) != "":
        raise UnsupportedModelError(spec.name, f"SGLang's pool of {what} is not modeled", "use vllm")
    if spec.model_type in ENCODER_DECODERS:
        raise UnsupportedModelError(spec.name, "SGLang's pool for an encoder's tokens is not modeled", "use vllm")


def check_dp_attention(spec: ModelSpec, args: EngineArgs) -> None:
    """Reject DP attention for classes that ignore it, and for those whose weights were not compared."""
    divides = outer_of(spec).dp_attention
    if not args.enable_dp_attention or divides:
        return
    does = "has weights that were not compared" if divides is None else "still splits attention over all ranks"
    raise UnsupportedModelError("--enable-dp-attention", f"SGLang's class of {outer_type(spec)} {does}", "remove it")


DP_ENCODER = "--mm-enable-dp-encoder"


def check_towers(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject data-parallel towers for classes whose code was not read."""
    if args.mm_encoder_tp_mode != "data" or not any(weight.serves for weight in spec.other_weights):
        return
    if not release.has("whole_towers"):
        raise UnsupportedModelError(DP_ENCODER, f"is modeled only for 0.5.23, not for {release.label}", "remove it")
    if outer_of(spec).tower is None:
        raise UnsupportedModelError(
            DP_ENCODER, f"what SGLang's class of {outer_type(spec)} does with it is not modeled", "remove it"
        )


def tower_notes(spec: ModelSpec, args: EngineArgs) -> Iterator[str]:
    if args.mm_encoder_tp_mode != "data":
        return
    if keeps_towers_whole(spec, args):
        yield f"{DP_ENCODER}: every rank loads the whole encoder and computes its share of the images"
    elif outer_of(spec).tower == "split":
        yield f"{DP_ENCODER}: SGLang's class of {outer_type(spec)} does not read it; its encoder stays as it is"
    else:
        yield f"{DP_ENCODER}: the model has no encoder"


# --- dtypes and context -----------------------------------------------------------------------------------------------

WIDE = (None, "float32", "float")  # float32 checkpoints, served in half precision


def model_dtype(spec: ModelSpec) -> str:
    """Default dtype of weights: float16 for float32 checkpoints and those that name none, but for a few classes."""
    text, usual = text_of(spec.config), outer_of(spec).dtype
    stated = text.get("dtype") or text.get("torch_dtype") or spec.config.get("dtype") or spec.config.get("torch_dtype")
    if isinstance(stated, str):
        stated = stated.removeprefix("torch.")
    if stated is None and usual:
        return usual
    if stated not in WIDE or "mxfp4" in spec.scheme_kinds:
        return spec.dtype
    return "bfloat16" if str(text.get("model_type", spec.model_type)).startswith("gemma") else "float16"


def reads_side_file(nested: Mapping[str, Any]) -> bool:
    """True if ModelOpt's readers take the algorithm of a hf_quant_config.json; others' have no cache.

    Source: sglang 0.5.23 srt/configs/model_config.py (_parse_modelopt_quant_config).
    """
    algorithm, layers = str(nested.get("quant_algo")).upper(), nested.get("quantized_layers")
    if algorithm != "MIXED_PRECISION":
        return algorithm in ("FP8", "MXFP8") or "FP4" in algorithm
    kinds = [layer.get("quant_algo") for layer in layers.values()] if isinstance(layers, Mapping) else []
    return any(str(kind).upper() in ("NVFP4", "W4A16_NVFP4") for kind in kinds)


def has_fp8_cache(spec: ModelSpec) -> bool:
    """True if the checkpoint's config turns `auto` into an fp8 cache, by the rules of SGLang's reader for its
    method.
    """
    config = spec.config.get("quantization_config") or text_of(spec.config).get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    nested = config.get("quantization")
    if isinstance(nested, Mapping) and SIDE_FILE in spec.config:  # in config.json its cache is not read
        return str(nested.get("kv_cache_quant_algo")).upper() == "FP8" and reads_side_file(nested)
    scheme, algo = config.get("kv_cache_scheme"), str(config.get("kv_cache_quant_algo")).upper()
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else "")).lower()
    is_fp8 = isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8
    if method == "compressed-tensors":
        return (
            isinstance(scheme, Mapping)
            and is_fp8
            and scheme.get("strategy") == "tensor"
            and scheme.get("symmetric", True) is True
            and not scheme.get("dynamic")
        )
    if method.startswith("modelopt"):
        return is_fp8 if isinstance(scheme, Mapping) else algo == "FP8"
    return method == "fp8" and algo == "FP8"


# Its order, and rope types for which transformers states the original length, with which nothing is scaled.
# Source: sglang 0.5.23 utils/hf_transformers/common.py (CONTEXT_LENGTH_KEYS, get_context_length).
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
UNSCALED_ROPES = ("yarn", "longrope", "su", "llama3")


def context_length(spec: ModelSpec) -> int:
    """Default and largest accepted context: the first length in SGLang's order, scaled."""
    length = next((spec.lengths[key] for key in LENGTHS if key in spec.lengths), spec.context_limit)
    text = text_of(spec.config)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping) or "original_max_position_embeddings" in rope:
        return length
    kind, row = rope.get("rope_type") or rope.get("type"), type_of(spec)
    if row.rope_per_kind or (kind in UNSCALED_ROPES and not row.own_rope):
        return length
    return int(length * (rope.get("factor") or 1))


# --- windows ----------------------------------------------------------------------------------------------------------


def has_window_pool(spec: ModelSpec) -> bool:
    return class_of(spec).window_pool if spec.architecture else type_of(spec).window_pool


def counted_window(spec: ModelSpec, window: int) -> int:
    """Tokens of a window as SGLang's scheduler counts them."""
    return window if class_of(spec).whole_windows else window - 1


# --- images -----------------------------------------------------------------------------------------------------------


def takes_images(spec: ModelSpec, stated: bool | None) -> bool:
    """True if the server takes more than text; stated: --enable-multimodal."""
    if class_of(spec).text_only or (stated is None and class_of(spec).images_on_request):
        return False
    return (spec.multimodal or bool(language_path(spec.config))) and stated is not False


def is_large_hopper_qwen3_vl(spec: ModelSpec, sm: int, memory_mib: int, stated: bool | None) -> bool:
    """True for Qwen3-VL on a Hopper GPU of 60 GiB or more, which has defaults of its own."""
    return (
        is_hopper(sm)
        and memory_mib >= LARGE_HOPPER_MIB
        and spec.config.get("model_type") in QWEN3_VL
        and takes_images(spec, stated)
    )


KDA = {"kda", "bounded_kda"}


def tower_shape(spec: ModelSpec, usual: tuple[int, int]) -> tuple[int, int] | None:
    """(layers, width) of the vision tower as SGLang reads it, `usual` if no class defines it, or None without a
    tower.
    """
    tower, row = spec.config.get("vision_config"), outer_of(spec)
    if not row.tower_kept:
        return None
    if not isinstance(tower, Mapping):
        return usual if outer_type(spec) == "llava" else None
    if not row.tower_read:
        return usual
    layers, width = (
        tower[key] if isinstance(tower.get(key), int) else other
        for key, other in zip(row.tower_keys, row.tower_size or usual, strict=True)
    )
    return layers, width


def captures_prefill(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if prefills get CUDA graphs: not with pipeline stages, KDA, images in most models, or if there are no
    prefills.
    """
    decodes = args.disaggregation_mode == "decode"
    if args.cuda_graph_backend_prefill is not None:  # whatever the class and the stages are
        return args.cuda_graph_backend_prefill != "disabled" and not decodes
    off = args.enforce_eager or args.disable_prefill_cuda_graph or not class_of(spec).captured
    if off or args.pipeline_parallel_size > 1 or decodes:
        return False
    kinds = {cache.kind for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState)}
    if kinds & KDA and not class_of(spec).captured_with_kda:
        return False
    return not takes_images(spec, args.enable_multimodal) or class_of(spec).captured_with_images


# --- attention backends and pages -------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def has_uneven_values(spec: ModelSpec) -> bool:
    """True if K and V of a head differ in width."""
    return any(
        cache.head_dim != cache.head_dim_v
        for caches in spec.layers
        for cache in caches
        if isinstance(cache, FullAttention | SlidingWindow | ChunkedAttention)
    )


def default_backend(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> str | None:
    """Default attention backend, as far as its page size depends on it; None: pages of any size."""
    if spec.is_sparse_mla:
        return "dsa"
    if not is_datacenter_blackwell(sm) or not release.has("datacenter_pages"):
        return None
    name, row = spec.architecture, class_of(spec)
    if row.page_by_backend:
        followed = args.mamba_radix_cache_strategy in ("extra_buffer", "extra_buffer_lazy")
        paged = followed or not caches_prefixes(args) or args.speculative_method is not None
        return "trtllm_mha" if paged and drafts_in_a_row(args) else "triton"
    stated = args.prefill_attention_backend or args.decode_attention_backend
    if row.blackwell and (name != GRANITE or spec.has_states) and not (stated and row.chosen_alone):
        return row.blackwell
    if spec.is_mla:
        return "flashinfer"
    if row.blackwell_paged:
        return "trtllm_mha"
    if name.startswith("NemotronH") and not stated:
        return "trtllm_mha" if args.speculative_method is None or args.speculative_eagle_topk in (None, 1) else "triton"
    if not drafts_in_a_row(args):
        return "flashinfer"
    return "fa4" if has_uneven_values(spec) else "trtllm_mha"


def drafts_in_a_row(args: EngineArgs) -> bool:
    """True if nothing is drafted, or if drafting is sequential as far as SGLang knows when it chooses a backend."""
    return args.speculative_method in (None, "dflash") or args.speculative_eagle_topk == 1


def backends(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> tuple[str | None, str | None]:
    """(prefill backend, decode backend)."""
    usual = default_backend(spec, sm, args, release)
    return args.prefill_attention_backend or usual, args.decode_attention_backend or usual


# `--attention-backend` and its two halves in 0.5.23 (srt/arg_groups/choices.py).
NAMES_OF_BACKENDS = frozenset(
    {
        "triton", "torch_native", "flex_attention", "dsa", "nsa", "qsa", "dsv4", "compressed", "fa3", "fa4",
        "flashinfer", "llada2_cfg_flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "trtllm_mha",
        "hpc_ops", "minicpm_flashattn", "minicpm_flashinfer", "aiter", "wave", "intel_amx", "ascend", "intel_xpu",
    }
)  # fmt: skip
UNKNOWN_BACKEND = "unknown"  # for a log that gives page sizes but no backend
PLAIN_BACKENDS = ("triton", "flashinfer")  # to propose in place of another


def check_backends(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject requested attention backends that the release lacks, and one phase without the other."""
    stated = (args.prefill_attention_backend, args.decode_attention_backend)
    if spec.architecture == "GptOssForCausalLM" and any(stated) and not all(stated) and release.has("named_backends"):
        phase = "prefill" if stated[0] is None else "decode"
        raise UsageError(
            f"--{phase}-attention-backend", f"SGLang does not choose one for {spec.architecture}", "state it, too"
        )
    for phase in ("prefill", "decode"):
        name, flag = getattr(args, f"{phase}_attention_backend"), f"--{phase}-attention-backend"
        known = NAMES_OF_BACKENDS | {None, UNKNOWN_BACKEND}
        if name not in known and release.has("named_backends"):
            raise UsageError(f"{flag} {name}", f"{release.label} has no such backend", "choose another backend")


def backend_refusal(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> Refusal | None:
    """Return a refusal of an attention backend that SGLang has but does not start with."""
    for phase in ("prefill", "decode"):
        argument = f"{phase}_attention_backend"
        name = getattr(args, argument)
        if name in (None, UNKNOWN_BACKEND):
            continue
        flag = f"--{phase}-attention-backend {name}"
        row = class_of(spec)
        others = tuple(other for other in row.backends or PLAIN_BACKENDS if other != name)
        if name == "flex_attention" and args.speculative_method is not None:
            return unsupported(f"{flag} does not run with speculative decoding", argument, others)
        if name not in (row.backends or (name,)) or row.not_backend == name:
            return unsupported(f"{flag} does not run with {spec.architecture}", argument, others)
        from kvplan.servers.sglang import attention  # only here: few plans name a backend

        if sm and (reason := attention.refused(phase, name, args.kv_cache_dtype, sm, latent=spec.is_mla)) is not None:
            why, by_dtype = reason
            values = ("auto", "fp8_e4m3") if by_dtype else others
            return unsupported(f"{flag}: {why}", "kv_cache_dtype" if by_dtype else argument, values)
    if backends(spec, sm, args, release)[1] == "trtllm_mla" and args.kv_cache_dtype == "fp8_e5m2":
        text = f"its decode attention backend, trtllm_mla, does not take --kv-cache-dtype {args.kv_cache_dtype}"
        return unsupported(text, "kv_cache_dtype", ("auto", "fp8_e4m3"))
    return None


PAGE_OF_V4 = 256  # model_overrides/deepseek_v4.py; other pages of latents in deepseek_v2.py
PLAIN_NAMES = {"tokenspeed_mla": "cutedsl_mla"}  # deprecated
PAGES_64 = ("flashmla", "hpc_ops")
PAGES_OF: Mapping[str, tuple[int, ...]] = {
    "trtllm_mla": (32, 64), "cutedsl_mla": (32, 64), "trtllm_mha": (16, 32, 64, 128),
}  # fmt: skip


def page_size(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> int:
    """Tokens per page: as requested, if the attention backend accepts it; sparse attention uses 64."""
    if spec.is_compressed_mla:
        return PAGE_OF_V4
    if spec.is_sparse_mla or spec.is_pooled:  # of keys, which pool several tokens
        pools = (c.pool for caches in spec.layers for c in caches if isinstance(c, SparseIndexer) and not c.plain)
        return 64 * max(pools, default=1)
    usual = class_of(spec).page if is_hopper(sm) or is_datacenter_blackwell(sm) else 0
    prefill, decode = (PLAIN_NAMES.get(name or "", name) for name in backends(spec, sm, args, release))
    size = args.block_size or usual or 1
    if forced := _forced_page(spec, sm, args, release):
        size = forced
    if decode in PAGES_64 or prefill == "hpc_ops":
        size = 64
    for backend in (decode, prefill):
        known = PAGES_OF.get(backend or "")
        if known is not None and size not in known and (backend == decode or backend == "trtllm_mha"):
            size = 64
    in_a_row = (args.speculative_eagle_topk or 0) <= 1  # FA4's kernel of trees takes pages of any size
    if "fa4" in (prefill, decode) and not spec.is_mla and is_datacenter_blackwell(sm) and in_a_row:
        return 128
    return size


def _forced_page(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> int | None:
    """Qwen's hybrids on compute capability 10.x use the page size of their backend, whatever is requested."""
    is_stated = args.prefill_attention_backend and args.prefill_attention_backend == args.decode_attention_backend
    backend = default_backend(spec, sm, args, release)
    if not class_of(spec).page_by_backend or backend is None or is_stated:
        return None
    return 64 if backend == "trtllm_mha" else 1


# --- states -----------------------------------------------------------------------------------------------------------


def keeps_states(spec: ModelSpec) -> bool:
    """True if the prefix cache keeps states of this hybrid."""
    return class_of(spec).caches_states and spec.has_states


def strategy(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> str:
    """State strategy of the prefix cache: `no_buffer`, `extra_buffer`, `extra_buffer_lazy`, or `auto` if it keeps none.

    Raise UsageError for what SGLang refuses to start with.
    """
    stated = args.mamba_radix_cache_strategy or "auto"
    if stated not in STRATEGIES:
        raise UsageError(
            f"--mamba-radix-cache-strategy {stated!r}", f"is not one of {', '.join(STRATEGIES)}", "use one of them"
        )
    if not caches_prefixes(args):
        return "auto"
    if not keeps_states(spec):
        if stated.startswith("extra_buffer"):
            raise UsageError(
                f"--mamba-radix-cache-strategy {stated}", f"{spec.name} has no states that the cache keeps"
            )
        return "auto"
    tracked = class_of(spec).tracked
    page = _forced_page(spec, sm, args, release) or args.block_size or 1
    overlap = args.async_scheduling is not False
    chosen = stated
    if stated == "auto":
        follows = tracked and release.has("tracked_states")
        chosen = "extra_buffer" if (overlap or page > 1) and follows else "no_buffer"
        overlap = overlap and chosen != "no_buffer"
    flag = f"--mamba-radix-cache-strategy {stated}"
    if chosen != "no_buffer" and not tracked:
        raise UsageError(flag, f"SGLang has no extra buffer for {spec.architecture}", "use no_buffer")
    if chosen == "extra_buffer_lazy" and (not overlap or args.pipeline_parallel_size > 1):
        raise UsageError(flag, "needs the overlap schedule, which is off here", "use extra_buffer")
    if chosen == "no_buffer" and overlap:
        raise UsageError(flag, "needs --disable-overlap-schedule", "add it")
    if chosen == "no_buffer" and page > 1:
        raise UsageError(f"--page-size {page}", "without an extra buffer for states pages have 1 token", "remove it")
    if chosen == "no_buffer" and "trtllm_mha" in backends(spec, sm, args, release):
        raise UsageError(flag, "does not work with the attention backend trtllm_mha", "choose another backend")
    return chosen


BASE_SLOTS = 3  # the running state, and the cache's copies between prefill and decode


def slots_per_request(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> int:
    """State slots that a running request may take."""
    if not caches_prefixes(args):
        return 1
    match strategy(spec, sm, args, release):
        case "extra_buffer":
            overlap = args.async_scheduling is not False and args.pipeline_parallel_size == 1
            return BASE_SLOTS + (2 if overlap else 1)
        case "extra_buffer_lazy":
            return BASE_SLOTS + 1
        case _:
            return BASE_SLOTS
