"""How vLLM loads a model whose config can be read in two ways."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.models.quant import STATED
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans import Request
from kvplan.servers.weights import ONLINE_METHODS
from kvplan.sizing.weights import scheme_for

NESTED_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")


def loaded(request: Request) -> tuple[Request, list[str]]:
    """The request with the model as vLLM 0.33 loads it, and a note; usually unchanged.

    A quantization_config without quant_method (ModelOpt's own form) is passed over: layers are built in the
    model's dtype. Source: vLLM 0.33 transformers_utils/model_arch_config_convertor.py (_normalize_quantization_config).
    """
    if request.args.disable_sliding_window:
        from kvplan.servers.vllm.windows import without_windows  # only with the flag

        request = replace(request, spec=without_windows(request.spec))
    check_online(request)
    spec = request.spec
    if spec.quantization is None:
        return request, []
    check_forms(spec)
    check_experts(spec)
    if spec.quantization.named or request.args.quantization:
        return request, []
    note = (
        "quantization_config names no quant_method: vLLM builds the layers unquantized, which quantized tensors do not "
        'fit; add "quant_method" to config.json'
    )
    return replace(request, spec=replace(spec, quantization=None)), [note]


def check_online(request: Request) -> None:
    """Reject names of methods applied while loading that were read in vLLM 0.33 alone."""
    method, release = request.args.quantization, request.release
    if method in ONLINE_METHODS and method not in ("fp8", "experts_int8") and release.number < (0, 33):
        raise UsageError(
            f"--quantization {method}",
            f"is known of vLLM 0.33; whether {release.label} takes it was not checked",
            "use fp8, or --engine vllm@0.33",
        )


def check_experts(spec: ModelSpec) -> None:
    """Reject experts that compressed-tensors stores in several schemes.

    Source: vLLM 0.33 compressed_tensors/compressed_tensors_moe (get_moe_method).
    """
    if spec.quantization is None or not spec.quantization.known or spec.quantization.method != "compressed-tensors":
        return
    for index, weights in enumerate(spec.layer_weights):
        schemes = {scheme_for(spec, weight, spec.first_layer + index, None) for weight in weights if weight.experts}
        if len(schemes) > 1:
            raise UnsupportedModelError(spec.name, f"vLLM refuses experts in several schemes (layer {index})")


def check_forms(spec: ModelSpec) -> None:
    """Reject a quantization_config that vLLM refuses to read: an algorithm in ModelOpt's nested form, or a KV cache
    scheme of compressed-tensors.

    Source: the file above, and compressed_tensors.py (validate_kv_cache_scheme).
    """
    stated = spec.config.get(STATED)
    config: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    nested, producer = config.get("quantization"), config.get("producer")
    if isinstance(nested, Mapping) and isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        algorithm = nested.get("quant_algo")
        if algorithm is not None and str(algorithm).upper() not in NESTED_ALGORITHMS:
            raise UnsupportedModelError(
                spec.name,
                f"vLLM refuses the algorithm {printable(str(algorithm), 40)} in ModelOpt's nested form",
                f"of these it reads {', '.join(NESTED_ALGORITHMS)}",
            )
    scheme = config.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping) or config.get("quant_method") != "compressed-tensors":
        return
    match scheme:
        case {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor" | "attn_head"}:
            return
    raise UnsupportedModelError(
        spec.name,
        "vLLM refuses its kv_cache_scheme: of compressed-tensors it takes symmetric 8-bit floats by tensor or head",
        "remove kv_cache_scheme from config.json",
    )
