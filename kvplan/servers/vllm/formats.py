"""Stored formats that vLLM does not load: a scheme, a shape per rank, a method of an earlier release, a form of config.

What vLLM 0.33 creates stands in a table of its own answers (quantized.txt); earlier releases have the rules below.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvplan.core.files import printable
from kvplan.models.quant import SIDE_FILE, STATED
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans import quantized
from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.releases import Version
from kvplan.servers.vllm import blocks
from kvplan.servers.vllm.changes import since
from kvplan.servers.words.arguments import Settings
from kvplan.sizing.weights import scheme_for

TABLE: Final = Path(__file__).with_name("quantized.txt")
NESTED_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
# Least compute capability of each storage scheme before 0.33. Source: vLLM model_executor/layers/quantization.
MIN_CAPABILITY: Final = {
    "fp8_tensor": 75, "fp8_channel": 75, "fp8_block": 75, "int8_channel": 75, "int8_tensor": 75, "int4": 75,
    "int8": 75, "awq": 75, "gptq": 60, "gptq_int8": 60, "nvfp4": 75, "mxfp8": 75, "mxfp4": 80,
}  # fmt: skip


def refusal(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of the checkpoint's format, or of its shapes on a rank."""
    spec, online = request.spec, request.args.quantization
    if (stored := form(spec) or experts(spec) or deprecated(request) or dropped(spec, request.release)) is not None:
        return stored
    if not request.release.is_compared:
        return capability(spec, request.gpu.sm, online) or blocks.refusal(request)
    return quantized.refusal(request, TABLE, settings.dtype)


def form(spec: ModelSpec) -> Refusal | None:
    """Return a refusal of a quantization_config: an algorithm in ModelOpt's nested form, or a KV cache scheme of
    compressed-tensors.

    Source: vLLM 0.33 transformers_utils/model_arch_config_convertor.py (_normalize_quantization_config),
    compressed_tensors.py (validate_kv_cache_scheme), model_loader/weight_utils.py (get_quant_config).
    """
    stated = spec.config.get(STATED)
    config: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    nested, producer = config.get("quantization"), config.get("producer")
    if isinstance(nested, Mapping) and isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        algorithm = nested.get("quant_algo")
        if algorithm is not None and str(algorithm).upper() not in NESTED_ALGORITHMS:
            stated, known = printable(str(algorithm), 40), ", ".join(NESTED_ALGORITHMS)
            return unsupported(f"it does not read {stated} in ModelOpt's nested form, only {known}")
    if is_mixed(config) and "quantized_layers" not in config and SIDE_FILE not in spec.config:
        return unsupported(f"it reads the layers of ModelOpt's mixed precision from {SIDE_FILE}, which is missing")
    scheme = config.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping) or config.get("quant_method") != "compressed-tensors":
        return None
    match scheme:
        case {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor" | "attn_head"}:
            return None
    return unsupported("of compressed-tensors it takes a kv_cache_scheme of symmetric 8-bit floats by tensor or head")


def is_mixed(config: Mapping[str, Any]) -> bool:
    """True if each layer has an algorithm of its own, in ModelOpt's flat or nested form."""
    return config.get("quant_method") == "modelopt" and algorithm(config) == "MIXED_PRECISION"


def algorithm(config: Mapping[str, Any]) -> str:
    """ModelOpt's algorithm, in its flat or nested form, in capitals."""
    nested = config.get("quantization")
    return str((nested if isinstance(nested, Mapping) else config).get("quant_algo")).upper()


def experts(spec: ModelSpec) -> Refusal | None:
    """Return a refusal of experts that compressed-tensors stores in several schemes.

    Source: vLLM 0.33 compressed_tensors/compressed_tensors_moe (get_moe_method).
    """
    if spec.quantization is None or not spec.quantization.known or spec.quantization.method != "compressed-tensors":
        return None
    for index, weights in enumerate(spec.layer_weights):
        schemes = {scheme_for(spec, weight, spec.first_layer + index, None) for weight in weights if weight.experts}
        if len(schemes) > 1:
            return unsupported(f"the experts of {spec.name} are stored in several schemes (layer {index})")
    return None


def dropped(spec: ModelSpec, release: Version) -> Refusal | None:
    """Return a refusal of a format that a release before the table's no longer loads."""
    stored = spec.quantization
    if stored is None or release.is_compared:
        return None
    if stored.method == "bitsandbytes" and release.has("no_bitsandbytes"):
        return _last_to_load("bitsandbytes weights", "no_bitsandbytes")
    in_order = stored.default is not None and stored.default.variant == "desc_act"
    if in_order and release.has("no_activation_order"):
        return _last_to_load(f"{stored.method} weights in groups by activation order", "no_activation_order")
    return None


def _last_to_load(what: str, change: str) -> Refusal:
    return unsupported(f"it does not load {what}; 0.{since(change)[1] - 1} was the last to do so")


def capability(spec: ModelSpec, sm: int, online: str | None) -> Refusal | None:
    """Return a refusal of a scheme that a release before the table's has no kernels for on this GPU."""
    for kind in spec.scheme_kinds or (("fp8_tensor",) if online else ()):
        least = MIN_CAPABILITY.get(kind, 0)
        if 0 < sm < least:
            scheme, needed, has = kind.partition("_")[0], f"{least / 10:.1f}", f"{sm / 10:.1f}"
            return unsupported(f"{scheme} weights need compute capability {needed}, this GPU has {has}")
    return None


def needs_deprecated(request: Request) -> bool:
    """True if vLLM loads the checkpoint only with --allow-deprecated-quantization."""
    stored = request.spec.quantization
    if stored is None or not request.release.has("deprecated_methods"):
        return False
    return quantized.method_of(stored) in quantized.listed(TABLE, "deprecated")


def deprecated(request: Request) -> Refusal | None:
    """Return a refusal of a deprecated method that a pasted command does not allow."""
    if request.args.allow_deprecated_quantization is not False or not needs_deprecated(request):
        return None
    text = f"the quantization method of {request.spec.name} is deprecated"
    return unsupported(text, "allow_deprecated_quantization", (True,))
