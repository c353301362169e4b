"""What vLLM does not run on a GPU or with a model, however much memory there is."""

from pathlib import Path
from typing import Final

from kvplan.models.spec import ModelSpec
from kvplan.servers.plans import Request
from kvplan.servers.settings import Settings
from kvplan.servers.start import Refusal, unsupported
from kvplan.servers.vllm import moe_backends, rules

AMPERE = 80
FLOATS = ("float16", "bfloat16")

TABLE: Final = Path(__file__).with_name("quantized.txt")  # vLLM 0.33's answers


def refusal(request: Request, settings: Settings) -> Refusal | None:
    """Return the first refusal of a combination that vLLM could be sized with, or None if it starts."""
    experts = moe_backends.refusal(request.spec, request.args, request.gpu.sm, request.release)
    return kv_dtype(request, settings) or attention(request, settings) or weights(request, settings) or experts


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
    """True if vLLM reads scales of K and V from the checkpoint: its quantization has a method for the KV cache."""
    if spec.quantization is None:
        return False
    method = spec.quantization.method
    declared = method == "compressed-tensors" and spec.quantization.kv_dtype is not None
    return declared or method == "fp8" or method.startswith("modelopt")


def cache_name(spec: ModelSpec, stated: str, sm: int) -> str:
    """The KV dtype by which vLLM chooses a backend; "auto" is the model's dtype.

    Source: vLLM 0.33 utils/torch_utils.py (resolve_kv_cache_dtype_string), model_executor/models/config.py.
    """
    stored = rules.stored_kv_dtype(spec)
    if stated == "auto" and stored is not None:
        return "fp8_e4m3" if stored == "fp8" else stored
    if stated == "auto" and spec.is_sparse_mla and spec.model_type in rules.FP8_ON_BLACKWELL and 100 <= sm < 110:
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
        return None  # the table has a backend for each of these (tests/servers/test_attention.py)
    from kvplan.servers.vllm import attention as kernels  # with its table, which most plans do not need

    return kernels.refusal(request, settings, name)


def weights(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of quantized weights: their scheme, or their shapes on a rank."""
    if request.spec.quantization is None and request.args.quantization is None:
        return None
    if not request.release.has("quantized_layers"):
        return None
    from kvplan.servers import quantized  # most models store none

    return quantized.refusal(request, TABLE, settings.dtype)


def needs_deprecated(request: Request) -> bool:
    """True if vLLM loads the checkpoint only with --allow-deprecated-quantization."""
    if request.spec.quantization is None or not request.release.has("quantized_layers"):
        return False
    from kvplan.servers import quantized

    return quantized.needs(request.spec.quantization, TABLE) == quantized.DEPRECATED
