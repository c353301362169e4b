"""A config's quantization_config -> Quantization: the scheme in which each layer is stored."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.config import Config
from kvplan.models.spec import ModelSpec, Quantization, Scheme

if TYPE_CHECKING:
    from kvplan.models.listed import Lists


STATED: Final = "quantization_config"
EXPERTS = r"re:.*\.experts(\..*)?$"
WEIGHT_ONLY = "weight-only"  # 4-bit weights with inputs in the model's dtype
BY_MATRIX = "experts by matrix"  # experts have one scale per matrix, and one for their inputs
SIDE_FILE: Final = "hf_quant_config.json"  # ModelOpt's, beside config.json


def with_side_file(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """`config` with the quantization of the file beside it, if it states none itself or lacks its list of layers. The
    file's name is then a key of it, too.

    Source: vLLM 0.33 transformers_utils/config.py (get_config) and model_loader/weight_utils.py (get_quant_config),
    sglang 0.5.23 configs/model_config.py (_parse_quant_hf_config). ModelOpt up to 0.29 writes only that file; older
    servers were not compared.
    """
    if not needs_side_file(config):
        return config
    from kvplan.models.processor import read  # only for a folder

    beside = read(directory / SIDE_FILE)
    return {**config, STATED: {**beside, **(config.get(STATED) or {})}, SIDE_FILE: True} if beside else config


def needs_side_file(config: Mapping[str, Any]) -> bool:
    """True if a config states no quantization, or a mixed one without its list of layers."""
    stated = config.get(STATED)
    mixed = isinstance(stated, Mapping) and str(stated.get("quant_algo")).upper() == "MIXED_PRECISION"
    return stated is None or (mixed and not stated.get("quantized_layers"))


def read_quantization(outer: Config, inner: Config) -> Quantization | None:
    """Quantization of a config, wherever it is defined, or None for an unquantized checkpoint."""
    holder = next((c for c in (outer, inner) if STATED in c), None)
    if holder is None:
        return None
    from kvplan.models.quant_methods import read  # only for a quantized checkpoint

    return read(holder.sub(STATED), inner)


def list_problem(spec: ModelSpec) -> str:
    """Describe what in the config's lists does not fit the model; empty if every entry matches one of its modules."""
    if spec.quantization is None or not spec.quantization.known:
        return ""
    from kvplan.models import quant_methods

    return quant_methods.list_problem(spec, spec.quantization)


def tables_of(quantization: Quantization) -> "Lists":
    """Answers of a config's names and patterns for each module."""
    from kvplan.models.listed import lists  # not needed for a model without lists

    return lists(quantization)


def scheme_of(
    quantization: Quantization, layer: int | None, sources: tuple[str, ...], fused: str = ""
) -> Scheme | None:
    """Scheme of a fused linear layer; the checkpoint's names of its parts decide, and must agree.

    layer  index of the layer, None outside the layers
    fused  the server's own name for the fused layer, which a list may contain instead
    """
    if not quantization.names and not quantization.patterns:
        return quantization.default
    tables = tables_of(quantization)
    key = (layer, sources, fused)
    if key not in tables.memo:
        tables.memo[key] = listed_scheme(quantization, tables, layer, sources, fused)
    return tables.memo[key]


# Methods that match the fused layer's name before those of its parts. Source: vLLM 0.33 compressed_tensors/utils.py
# (find_matched_target) and utils/gptq_utils.py.
FUSED_FIRST: Final = ("compressed-tensors", "gptq")


def listed_scheme(
    quantization: Quantization, tables: "Lists", layer: int | None, sources: tuple[str, ...], fused: str
) -> Scheme | None:
    if fused and layer is not None and tables.unquantized.find(layer, fused):  # overrides its parts (vLLM 0.33)
        return None
    if quantization.method in FUSED_FIRST and layer is not None and fused:
        answer = tables.chosen.find(layer, fused)
        by_fused = quantization.method == "gptq" and quantization.default is not None  # `dynamic` alone chose others
        if (answer or by_fused) and not any(tables.unquantized.find(layer, source) for source in sources):
            return answer[0] if answer else quantization.default
    answers = {tables.find(layer, source) for source in sources}
    if answers == {None} and fused:
        answers = {tables.find(layer, fused)}
    if quantization.mixed and len(answers) > 1:  # the parts that are listed decide (_resolve_quant_algo)
        answers.discard(None)
    schemes = {answer[0] if answer else quantization.default for answer in answers}
    if len(schemes) > 1:
        raise UnsupportedModelError(
            "quantization_config",
            f"{', '.join(sources)} of layer {layer} are fused by a server but stored in different schemes",
            "not modeled",
        )
    return schemes.pop()


HEADS: Final = {"chatglm": "output_layer", "internlm2": "output"}  # names of output heads that are no lm_head


def head_scheme(quantization: Quantization, model_type: str) -> Scheme | None:
    """Scheme of an untied output head: what the config says of it by name, else the method's."""
    answer = tables_of(quantization).find(None, HEADS.get(model_type, "lm_head"))
    return answer[0] if answer else quantization.head


# Methods that quantize a tower's linear layers unless a list names them. AWQ and GPTQ without a list take it from the
# stored tensors, where towers are in 16 bits (vLLM 0.33 auto_awq.py and auto_gptq.py, maybe_update_config).
TOWERS_TOO: Final = ("compressed-tensors", "modelopt", "fp8", "quark", "auto-round")
NEVER_BY_MODELOPT: Final = ("vision_tower", "vision_model")  # vLLM 0.33 modelopt.py (get_quant_method)
EVEN: Final = 64  # widths of Gemma 4's towers that all methods take; compressed-tensors takes any (gemma4_mm.py)


def tower_scheme(quantization: Quantization, sources: tuple[str, ...], config: Mapping[str, Any]) -> Scheme | None:
    """Scheme of a tower's linear layer, by the checkpoint's names of its parts in the first layer.

    config  the model's, whose widths of the tower may be ones that a method does not take
    """
    by_list = quantization.method == "awq" and (quantization.names or quantization.patterns)
    if quantization.method not in TOWERS_TOO and not by_list:
        return None
    if quantization.method != "compressed-tensors" and is_odd(config):
        return None
    if quantization.method == "modelopt" and any(name.startswith(NEVER_BY_MODELOPT) for name in sources):
        return None
    tables = tables_of(quantization)
    for table in (tables.unquantized, tables.chosen):
        for source in sources:
            if answer := table.find_in_tower(source, whole_names=quantization.whole_names):
                return answer[0]
    return quantization.default


def is_odd(config: Mapping[str, Any]) -> bool:
    """True for towers of Gemma 4 whose widths are no multiples of 64."""
    tower = config.get("vision_config")
    if config.get("model_type") != "gemma4" or not isinstance(tower, Mapping):
        return False
    return any(int(tower.get(key) or 0) % EVEN for key in ("hidden_size", "intermediate_size"))


SCHEME_NAMES = {
    "fp8_tensor": "fp8", "fp8_channel": "fp8", "fp8_block": "fp8", "int8_channel": "int8", "int8_tensor": "int8",
    "int4": "w4a16", "int8": "w8a16", "awq": "awq int4", "gptq": "gptq int4", "gptq_int8": "gptq int8",
    "nf4_double": "nf4", "bnb_int8": "int8",
}  # fmt: skip


def scheme_name(quantization: Quantization) -> str:
    """Common name of how the linear layers are stored: "fp8", "w4a16", "mxfp4 (experts)", "fp8 + mxfp4 (experts)".

    A method that kvplan does not model keeps its own name.
    """
    names = [SCHEME_NAMES.get(quantization.default.kind, quantization.default.kind)] if quantization.default else []
    kinds: dict[int, Scheme] = {}
    listed: dict[tuple[int, bool], None] = {}  # thousands of entries share a few schemes: by identity, not by value
    for where, scheme in (*quantization.names.items(), *quantization.patterns):
        if scheme is not None:
            kinds[id(scheme)] = scheme
            listed[id(scheme), "experts" in where] = None
    for key, of_experts in listed:
        name = SCHEME_NAMES.get(kinds[key].kind, kinds[key].kind)
        names.append(f"{name} (experts)" if of_experts else name)
    return " + ".join(dict.fromkeys(names)) or quantization.method
