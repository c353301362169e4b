"""What SGLang does not run on a GPU or with a model, however much memory there is."""

from pathlib import Path
from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import ModelSpec, Quantization
from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.sglang import models
from kvplan.servers.sglang.classes import class_of, standing, unread
from kvplan.servers.words.arguments import Settings

OLDEST_GPU: Final = 75  # srt/model_executor/model_runner_components/load_model_utils.py
SPARSE_MLA_CAPABILITY: Final = 90  # srt/layers/attention/dsa_backend.py: kernels for 9.x, 10.x and 12.x

MODELOPT_FP8: Final = 89  # compute capability that modelopt_quant.py asks for (ModelOptFp8Config.get_min_capability)
IN_FLOAT32: Final = ("bitsandbytes", "gguf")  # schemes whose layers compute in float32, too
TABLE: Final = Path(__file__).with_name("quantized.txt")  # SGLang 0.5.23's answers

# Quantization methods that kernels of experts take, asked of every model. Source: srt/arg_groups/moe_hook.py
# (handle_moe_kernel_config).
DETERMINISTIC: Final = "--enable-deterministic-inference"
OLDEST_FA3: Final = 80  # its usual backend
DETERMINISTIC_BACKENDS: Final = ("fa3", "fa4", "flashinfer", "triton")
RUNNER_FLAG: Final = "--moe-runner-backend"
_OF_MODELOPT: Final = ("modelopt_fp4", "modelopt_mixed")
RUNNERS: Final = {
    "flashinfer_cutlass": (*_OF_MODELOPT, "modelopt_fp8"),
    "flashinfer_cutedsl": (*_OF_MODELOPT, "nvfp4_online"),
    "flashinfer_trtllm": (*_OF_MODELOPT, "nvfp4_online", "fp8", "mxfp8", "modelopt_fp8", "compressed-tensors"),
    "flashinfer_trtllm_routed": (*_OF_MODELOPT, "nvfp4_online", "fp8", "mxfp8"),
}
UNQUANTIZED_TOO: Final = tuple(name for name in RUNNERS if name != "flashinfer_cutedsl")
MODELOPT_NAMES: Final = {"mixed": "modelopt_mixed", "nvfp4": "modelopt_fp4", "fp8": "modelopt_fp8"}
OWN_EXPERTS: Final = ("minimax_m3", "deepseek_v4")  # whose experts may be stored in a scheme of their own


def refusal(request: Request, settings: Settings) -> Refusal | None:
    """Return the first refusal of a combination that SGLang could be sized with, or None if it starts."""
    spec, sm = request.spec, request.gpu.sm
    if 0 < sm < OLDEST_GPU:
        return unsupported(f"it needs compute capability {OLDEST_GPU / 10:.1f}, this GPU has {sm / 10:.1f}")
    if spec.is_sparse_mla and 0 < sm < SPARSE_MLA_CAPABILITY:
        needs = f"needs compute capability 9.0, this GPU has {sm / 10:.1f}"
        return unsupported(f"the sparse attention of {spec.name} {needs}")
    if isinstance(answer := standing(request), Refusal):
        return answer
    if request.release.is_compared and (unknown := unread(spec)):
        return unknown
    backend = models.backend_refusal(spec, sm, request.args, request.release)
    flags = backend or deterministic(request) or runner(request)
    return flags or dtype(request, settings) or weights(request, settings)


def deterministic(request: Request) -> Refusal | None:
    """Return a refusal of a pasted --enable-deterministic-inference, which chooses among a few attention backends.

    Source: srt/arg_groups/attention_hook.py (handle_deterministic_inference) and overrides.py. FlashInfer's, the usual
    one on Blackwell, keeps no prefixes.
    """
    args, sm = request.args, request.gpu.sm
    if request.repeated is None or request.repeated.value(DETERMINISTIC) is None:
        return None
    stated = {args.prefill_attention_backend, args.decode_attention_backend} - {None}
    if others := sorted(str(name) for name in stated - set(DETERMINISTIC_BACKENDS)):
        known = ", ".join(DETERMINISTIC_BACKENDS)
        return unsupported(f"{DETERMINISTIC} runs with {known}, not with {others[0]}")
    if not stated and 0 < sm < OLDEST_FA3:
        return unsupported(f"{DETERMINISTIC}: FlashAttention v3 Backend requires SM>=80 and SM<=90")
    if "flashinfer" in stated or (not stated and sm >= models.FP4):
        raise UnsupportedModelError(DETERMINISTIC, "is not modeled with flashinfer, which keeps no prefixes")
    return None


def runner(request: Request) -> Refusal | None:
    """Return a refusal of a pasted --moe-runner-backend that does not compute the checkpoint's quantization."""
    stored, name = request.spec.quantization, request.repeated and request.repeated.value(RUNNER_FLAG)
    if name not in RUNNERS or request.spec.model_type.startswith(OWN_EXPERTS):
        return None
    method = request.args.quantization
    if method is None and stored is not None and knows_method(request.spec, request.gpu.sm):
        method = MODELOPT_NAMES.get(modelopt_kind(stored, request.spec), stored.stated or stored.method)
    if (name in UNQUANTIZED_TOO) if method is None else (method in RUNNERS[name]):
        return None
    return unsupported(f"{RUNNER_FLAG} {name} does not go with {method or 'unquantized'} weights")


def knows_method(spec: ModelSpec, sm: int) -> bool:
    """True if SGLang reads the checkpoint's method before it checks the runner: for some classes alone."""
    if spec.architecture.startswith("NemotronH"):
        return spec.quantization is not None and spec.quantization.method == "modelopt"
    return models.is_datacenter_blackwell(sm) and class_of(spec).reads_method


def modelopt_kind(stored: Quantization, spec: ModelSpec) -> str:
    """What SGLang tells ModelOpt's checkpoints by; empty for other methods."""
    if stored.method != "modelopt" or "mxfp8" in spec.scheme_kinds:
        return ""
    return "mixed" if stored.mixed else "nvfp4" if "nvfp4" in spec.scheme_kinds else "fp8"


def dtype(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of quantized layers in float32 (get_supported_act_dtypes)."""
    stored = request.spec.quantization
    if stored is None or stored.method in IN_FLOAT32 or settings.dtype != "float32":
        return None
    text = f"{stored.method} weights, as {request.spec.name} has, are not supported in float32"
    return unsupported(text, "dtype", ("auto",))


def weights(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of quantized weights: their scheme, or their shapes on a rank."""
    if request.spec.quantization is None and request.args.quantization is None:
        return None
    if not request.release.is_compared:
        return earlier(request)
    from kvplan.servers.plans import quantized  # most models store none

    unchecked = frozenset(class_of(request.spec).unchecked)
    return quantized.refusal(request, TABLE, settings.dtype, unchecked)


def earlier(request: Request) -> Refusal | None:
    """Return a refusal of a scheme by a release before the table's."""
    spec, sm = request.spec, request.gpu.sm
    if models.has_modelopt_fp4(spec) and 0 < sm < models.FP4 and not request.release.has("fp4_before_blackwell"):
        return unsupported("it loads NVFP4 below compute capability 10.0 from 0.5.15 on")
    by_modelopt = spec.quantization is not None and spec.quantization.method.startswith("modelopt")
    if by_modelopt and "nvfp4" not in spec.scheme_kinds and 0 < sm < MODELOPT_FP8:
        return unsupported(f"it loads ModelOpt's FP8 from compute capability 8.9 on, this GPU has {sm / 10:.1f}")
    from kvplan.servers.vllm import formats  # whose rule it is, too

    return formats.capability(spec, sm, request.args.quantization)


def check_sized(request: Request, settings: Settings) -> None:
    """Reject weights that neither kvplan can size nor SGLang loads."""
    if request.spec.quantization is not None and not request.spec.quantization.known:
        from kvplan.servers.plans import quantized

        quantized.check_sized(request, weights(request, settings))
