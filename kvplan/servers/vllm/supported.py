"""What vLLM does not run on a GPU or with a model, however much memory there is."""

from collections.abc import Callable
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import ChunkedAttention, ModelSpec, SlidingWindow, WindowLatent
from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.plans.weights import ONLINE_METHODS
from kvplan.servers.releases import Version
from kvplan.servers.vllm import classes, features, rules
from kvplan.servers.vllm.changes import since
from kvplan.servers.words.arguments import RANKS, Settings

AMPERE: Final = 80
FLOATS: Final = ("float16", "bfloat16")
# Methods whose get_supported_act_dtypes has float32. Source: vLLM 0.33 model_executor/layers/quantization.
OLDEST_GPU: Final = 70
IN_FLOAT32: Final = ("compressed-tensors",)


def check_architecture(spec: ModelSpec, release: Version, sm: int) -> None:
    """Reject a model whose caches a release sizes in a way that is not modeled."""
    if later := classes.too_early(spec, release):
        problem = f"{release.label} has no class for {spec.architecture}"
        raise UnsupportedModelError(spec.name, problem, f"use --engine vllm@{later}, the first that has it")
    first: tuple[int, ...] = classes.class_of(spec).first_sized
    if spec.is_pooled and sm // 10 != 9:  # other kernels read whole rows
        first = since("pooled_pages")
    if not release.is_within(first):
        raise UnsupportedModelError(
            spec.name,
            f"how vLLM {release.number[0]}.{release.number[1]} pages the caches of {spec.architecture} is not modeled",
            f"use --engine vllm@{first[0]}.{first[1]}",
        )


def refusal(request: Request, settings: Settings) -> Refusal | None:
    """Return the first refusal of a combination that vLLM could be sized with, or None if it starts."""
    return next(filter(None, (reason(request, settings) for reason in REASONS)), None)


def capability(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of a GPU that no build has kernels for.

    Source: vLLM 0.33 CMakeLists.txt (CUDA_SUPPORTED_ARCHS).
    """
    sm = request.gpu.sm
    if 0 < sm < OLDEST_GPU:
        return unsupported(f"it needs compute capability {OLDEST_GPU / 10:.1f}, this GPU has {sm / 10:.1f}")
    return None


def architecture(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of an architecture that only earlier releases run, or none does."""
    answer = classes.standing(request)
    return answer if isinstance(answer, Refusal) else None


def windows(request: Request, settings: Settings) -> Refusal | None:
    return classes.refusal(request.spec)


def experts(request: Request, settings: Settings) -> Refusal | None:
    if request.args.moe_backend in (None, "auto"):
        return None
    from kvplan.servers.vllm import expert_kernels  # with its table, which few plans need

    return expert_kernels.refusal(request)


def dtype(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of the dtype of weights and activations.

    Source: vLLM 0.33 config/model.py (_check_valid_dtype), v1/worker/gpu_worker.py (_check_if_gpu_supports_dtype),
    model_executor/model_loader (get_supported_act_dtypes).
    """
    spec, sm, name = request.spec, request.gpu.sm, settings.dtype
    method, online = spec.quantization.method if spec.quantization is not None else "", request.args.quantization
    old = 0 < sm < AMPERE
    if old and name == "bfloat16":
        text = f"--dtype bfloat16 needs compute capability 8.0, this GPU has {sm / 10:.1f}"
        return unsupported(text, "dtype", ("float16", "float32"))
    if name == "float16" and classes.type_of(spec).no_float16 and request.release.has("no_float16"):
        return unsupported(f"{spec.name} is not supported in float16", "dtype", ("bfloat16", "float32"))
    if method == "mxfp4" and name != "bfloat16" and not old:
        return unsupported(f"{spec.name} is supported in bfloat16 alone, as stored in MXFP4", "dtype", ("bfloat16",))
    if name == "float32" and method and method not in IN_FLOAT32:
        text = f"{method} weights, as {spec.name} has, are not supported in float32"
        return unsupported(text, "dtype", ("bfloat16", "float16"))
    if name == "float32" and online in ONLINE_METHODS:
        return unsupported(f"--quantization {online} is not supported in float32", "dtype", ("bfloat16", "float16"))
    return None


def kv_dtype(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of a KV dtype that does not go with the model's dtype or its checkpoint.

    Source: vLLM 0.33 config/vllm.py (_reject_mismatched_float_kv_cache), model_executor/layers/attention/attention.py
    (_init_kv_cache_quant).
    """
    spec, stated = request.spec, request.args.kv_cache_dtype
    if stated in FLOATS and stated != settings.dtype and request.release.has("float_cache_as_model"):
        text = f"--kv-cache-dtype {stated} is incompatible with a model that runs in {settings.dtype}"
        return unsupported(text, "kv_cache_dtype", ("auto",))
    if stated == "fp8_e5m2" and stores_scales(spec) and not spec.is_mla:
        text = f"fp8_e5m2 KV cache is not supported with fp8 checkpoints, as {spec.name} is"
        return unsupported(text, "kv_cache_dtype", ("fp8", "auto"))
    return None


def stores_scales(spec: ModelSpec) -> bool:
    """True if vLLM reads scales of K and V from the checkpoint."""
    if spec.quantization is None:
        return False
    from kvplan.servers.plans import quantized  # with the table, which few plans need
    from kvplan.servers.vllm.formats import TABLE

    return quantized.stores_scales(spec.quantization, TABLE)


def weights(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of quantized weights."""
    if request.spec.quantization is None and request.args.quantization is None:
        return None
    from kvplan.servers.vllm import formats  # most models store none

    return formats.refusal(request, settings)


def check_sized(request: Request, settings: Settings) -> None:
    """Reject weights that neither kvplan can size nor vLLM loads."""
    if request.spec.quantization is not None and not request.spec.quantization.known:
        from kvplan.servers.plans import quantized

        quantized.check_sized(request, weights(request, settings))


def needs_deprecated(request: Request) -> bool:
    """True if vLLM loads the checkpoint only with --allow-deprecated-quantization."""
    if request.spec.quantization is None:
        return False
    from kvplan.servers.vllm import formats

    return formats.needs_deprecated(request)


def cache_name(spec: ModelSpec, stated: str, sm: int) -> str:
    """The KV dtype by which vLLM chooses a backend; "auto" is the model's dtype.

    Source: vLLM 0.33 utils/torch_utils.py (resolve_kv_cache_dtype_string), model_executor/models/config.py.
    """
    stored = rules.stored_kv_dtype(spec)
    if stated == "auto" and stored is not None:
        return "fp8_e4m3" if stored == "fp8" else stored
    if stated == "auto" and spec.is_sparse_mla and classes.type_of(spec).fp8_on_blackwell and 100 <= sm < 110:
        return "fp8_e4m3" if spec.model_type == "glm_moe_dsa" else "fp8"
    return "auto" if stated == "bfloat16" and spec.model_type == "deepseek_v32" else stated


def attention(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of an attention backend, or of layers that no backend runs."""
    spec, args, sm = request.spec, request.args, request.gpu.sm
    name = cache_name(spec, args.kv_cache_dtype, sm)
    is_plain = name in ("auto", *FLOATS) and settings.backend is None and settings.dtype in FLOATS
    if not sm or settings.first_engine:
        return None
    if is_plain and sm >= AMPERE and not spec.is_sparse_mla and args.decode_context_parallel_size == 1:
        return None  # the table has a backend for each of these (tests/servers/vllm/test_attention.py)
    from kvplan.servers.vllm import attention as kernels  # with its table, which most plans do not need

    return kernels.refusal(request, settings, name)


def block_size(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of blocks that DeepSeek-V4's kernels do not read.

    Source: vLLM 0.33 models/deepseek_v4 (get_supported_kernel_block_sizes), v1/worker/utils.py
    (select_common_block_size); smaller ones than a compressed entry leave pages without bytes.
    """
    stated = request.args.block_size
    if stated is None or not request.spec.is_compressed_mla:
        return None
    from kvplan.servers.vllm.deepseek_v4 import V4_BLOCK, later_block  # not needed for other models

    step = later_block(request.gpu.sm) if request.spec.is_later_v4 else V4_BLOCK
    if stated % step == 0:
        return None
    text = f"--block-size {stated}: {request.spec.name} takes multiples of {step}"
    return unsupported(text, "block_size", (step,))


def shared_caches(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of stages that separate DeepSeek-V4.1's layers from the one whose compressed entries they read.

    Source: vLLM 0.33 models/deepseek_v41/attention.py ("PP splits inside a v4.1 kv-sharing group").
    """
    spec, stages = request.spec, request.args.pipeline_parallel_size
    if stages == 1 or not spec.is_later_v4:
        return None
    from kvplan.models.families.mtp import text_values
    from kvplan.sizing.weights import stage_layers

    values = text_values(spec)
    sources, ratios = values["kv_source_layer_ids"], values["compress_ratios"]
    for first in (layers.start for layers in stage_layers(spec.num_layers, stages)):
        if ratios[first] and first not in sources:
            text = f"--pipeline-parallel-size {stages} starts a stage of {spec.name} at layer {first}, which reads the"
            return unsupported(f"{text} cache of an earlier one", "pipeline_parallel_size", (1,))
    return None


def prefill(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of whole prompts where states are cached.

    Source: vLLM 0.33 config/vllm.py ("Chunked prefill is required for Mamba prefix caching").
    """
    if request.args.enable_chunked_prefill or not request.spec.has_states or not settings.prefix_caching:
        return None
    text = f"--no-enable-chunked-prefill does not go with the cached states of {request.spec.name}"
    return unsupported(text, "enable_prefix_caching", (False,))


def state_blocks(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of a size of states' blocks without prefix caching; with it they follow the cache's blocks.

    Source: vLLM 0.33 config/vllm.py (validate_mamba_block_size), platforms/interface.py (_align_hybrid_block_size).
    """
    spec, stated = request.spec, request.args.mamba_block_size
    if stated in (None, settings.max_model_len):
        return None
    if not settings.prefix_caching:
        text = "--mamba-block-size can only be set with --enable-prefix-caching"
        return unsupported(text, "enable_prefix_caching", (True,))
    if spec.has_states and not (spec.has_attention and request.release.has("aligned_states")):
        raise UsageError(f"--mamba-block-size {stated}", f"is not modeled for {spec.name}", "remove it")
    return None


def ranks(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of ranks that the model's class, its experts or its windows cannot be divided among.

    Source: vLLM 0.33 config/model.py (verify_with_parallel_config), config/vllm.py.
    """
    spec, args = request.spec, request.args
    if args.enable_expert_parallel and not spec.experts_per_token:
        return unsupported(f"{spec.name} has no experts to spread", "enable_expert_parallel", (False,))
    if args.enable_expert_parallel and classes.type_of(spec).hides_experts:
        return unsupported(f"it does not find the experts of {spec.name}", "enable_expert_parallel", (False,))
    if args.pipeline_parallel_size > 1 and classes.type_of(spec).no_stages:
        return unsupported(f"{spec.name} cannot be split into stages", "pipeline_parallel_size", (1,))
    if args.tensor_parallel_size > 1 and classes.type_of(spec).one_rank:
        return unsupported(f"{spec.name} runs on one rank alone", "tensor_parallel_size", (1,))
    dcp = args.decode_context_parallel_size
    if dcp > 1 and (holder := windowed(request)) is not None:
        text = f"--decode-context-parallel-size {dcp} does not go with the windows of {holder.name}"
        return unsupported(text, "decode_context_parallel_size", (1,))
    return None


def windowed(request: Request) -> ModelSpec | None:
    """The model or its draft, if it keeps windows of tokens in pages of their own."""
    flat = features.hybrid_manager_is_off(request.args, request.release)
    spec, draft = request.spec, request.draft
    own = spec.cache_kinds & {SlidingWindow, ChunkedAttention} and not flat
    if own or WindowLatent in spec.cache_kinds:
        return spec
    return draft if draft is not None and draft.cache_kinds & {SlidingWindow, WindowLatent} else None


def draft_ranks(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of a draft with ranks of its own on model runner V1; V2 loads it on its target's ranks.

    Source: vLLM 0.33 v1/spec_decode/draft_model.py (_raise_if_draft_tp_mismatch),
    v1/worker/gpu/spec_decode/standalone_ar/speculator.py (load_draft_model).
    """
    stated, tp = request.repeated and request.repeated.speculative.get(RANKS), request.args.tensor_parallel_size
    if request.draft is None or request.draft.head or settings.runner_v2 or stated in (None, tp):
        return None
    return unsupported(f"model runner V1 refuses {RANKS} {stated} with --tensor-parallel-size {tp}")


def adapted_drafts(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of steps that do not hold every request's drafts where adapters are applied.

    Source: vLLM 0.33 engine/arg_utils.py (create_engine_config).
    """
    args = request.args
    if not args.max_loras or args.speculative_method is None:
        return None
    needed = settings.max_num_seqs * (args.num_speculative_tokens + 1)
    if settings.max_num_batched_tokens >= needed:
        return None
    text = (
        f"with adapters a step must hold the drafts of {settings.max_num_seqs:,} requests, {needed:,} tokens, and "
        f"max_num_batched_tokens is {settings.max_num_batched_tokens:,}"
    )
    return unsupported(text, "max_num_batched_tokens", (needed,))


REASONS: Final[tuple[Callable[[Request, Settings], Refusal | None], ...]] = (
    capability, architecture, windows, dtype, kv_dtype, block_size, shared_caches, attention, weights, experts, prefill,
    state_blocks,
    ranks, draft_ranks, adapted_drafts,
)  # fmt: skip
