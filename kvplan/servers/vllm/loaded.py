"""How vLLM loads a model whose config can be read in two ways."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.models.quant import STATED
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import Request
from kvplan.servers.plans.weights import ONLINE_METHODS
from kvplan.servers.vllm.classes import class_of
from kvplan.servers.vllm.formats import algorithm

# Methods whose lists name modules whole. Source: vLLM 0.33 layers/quantization/quark/utils.py,
# compressed_tensors/utils.py and utils/quant_utils.py.
BY_WHOLE_NAME: Final = ("compressed-tensors", "fp8", "quark")
UNCLAIMED: Final = ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")  # algorithms of ModelOpt that no class of vLLM claims
TEXT_LAYERS: Final = "model.layers."


def loaded(request: Request) -> tuple[Request, list[str]]:
    """The request with the model as vLLM 0.33 loads it, and a note; usually unchanged.

    A quantization_config without quant_method (ModelOpt's own form) is passed over: layers are built in the
    model's dtype. Source: vLLM 0.33 transformers_utils/model_arch_config_convertor.py (_normalize_quantization_config).
    """
    if request.args.disable_sliding_window:
        from kvplan.servers.vllm.windows import without_windows  # only with the flag

        request = replace(request, spec=without_windows(request.spec))
    check_online(request)
    request = replace(request, spec=with_names_of_class(request.spec))
    spec, quantization = request.spec, request.spec.quantization
    if quantization is None:
        return request, []
    method = request.args.quantization
    if method is not None and is_claimed(spec) and request.release.is_compared:
        note = f"--quantization {method} is ignored: vLLM reads the method of {spec.name} in its config"
        return replace(request, args=replace(request.args, quantization=None)), [note]
    if quantization.named or method:
        by_name = quantization.method == "fp8"  # quant_utils.py (is_layer_skipped)
        return (replace(request, spec=with_whole_names(spec)) if by_name else request), []
    note = (
        "quantization_config names no quant_method: vLLM builds the layers unquantized, which quantized tensors do not "
        'fit; add "quant_method" to config.json'
    )
    return replace(request, spec=unquantized(spec)), [note]


@lru_cache(maxsize=64)
def with_names_of_class(spec: ModelSpec) -> ModelSpec:
    """The model without listed names that match none of its modules: its class calls them by another prefix."""
    stored = spec.quantization
    if stored is None or class_of(spec).maps_names or stored.method not in BY_WHOLE_NAME:
        return spec
    names = {name: scheme for name, scheme in stored.names.items() if not name.startswith(TEXT_LAYERS)}
    return spec if names == stored.names else replace(spec, quantization=replace(stored, names=names))


@lru_cache(maxsize=64)
def with_whole_names(spec: ModelSpec) -> ModelSpec:
    stored = spec.quantization
    return spec if stored is None else replace(spec, quantization=replace(stored, whole_names=True))


@lru_cache(maxsize=64)
def unquantized(spec: ModelSpec) -> ModelSpec:
    return replace(spec, quantization=None)


def is_claimed(spec: ModelSpec) -> bool:
    """True if vLLM takes the checkpoint's method from its config, whatever --quantization says.

    Source: vLLM 0.33 override_quantization_method of modelopt.py, inc.py, mxfp4.py, models/deepseek_v4.
    """
    if spec.quantization is None:
        return False
    method = spec.quantization.method
    if method == "modelopt" and algorithm(spec.config.get(STATED) or {}) in UNCLAIMED:
        return False
    by_type = {"gpt_oss": "mxfp4", "deepseek_v4": "fp8", "deepseek_v41_text": "fp8"}.get(spec.model_type)
    return method in ("modelopt", "auto-round", by_type)


def check_online(request: Request) -> None:
    """Reject names of methods applied while loading that were read in vLLM 0.33 alone."""
    method, release = request.args.quantization, request.release
    if method in ONLINE_METHODS and method not in ("fp8", "experts_int8") and not release.has("online_methods"):
        raise UsageError(
            f"--quantization {method}",
            f"is known of vLLM 0.33; whether {release.label} takes it was not checked",
            "use fp8, or --engine vllm@0.33",
        )
