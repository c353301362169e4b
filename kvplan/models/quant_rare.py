"""Quantization configs of AutoRound and AMD Quark, which few checkpoints have."""

import re
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.config import Config
from kvplan.models.quant_methods import exceptions, group_of, names_of
from kvplan.models.spec import Quantization, Scheme

UNQUANTIZED_BITS: Final = 16
_EXPRESSION: Final = re.compile(r"[*+?^$()\[\]{}|\\]")


def auto_round(config: Config) -> Quantization:
    """AutoRound's integer formats: AWQ's or GPTQ's packing, with other bits or groups for some modules.

    Source: vLLM 0.33 layers/quantization/inc (INCConfig, INCConfigParser); both packings store zero points. Its
    floating-point formats are not modeled.
    """
    data_type = config.text("data_type", "int")
    if data_type != "int":
        raise UnsupportedModelError("", f"data_type {printable(data_type, 20)}")
    usual = config.count("bits", default=0)
    scheme = packed(config, usual, group_of(config))
    names: dict[str, Scheme | None] = {}
    patterns: list[tuple[str, Scheme | None]] = []
    extra = config.sub("extra_config")
    for name in extra.values:
        own = extra.sub(name)
        bits = own.count("bits", default=usual)
        group = group_of(own) if "group_size" in own else group_of(config)
        stored = None if bits >= UNQUANTIZED_BITS else packed(config, bits, group)
        if _EXPRESSION.search(name):
            patterns.append((f"re:.*(?:{name.removeprefix('^')})", stored))
        else:
            names[name] = stored
    key, blocks = config.first(("block_name_to_quantize", "to_quant_block_names"))
    listed = blocks.split(",") if isinstance(blocks, str) else config.names(key) or []
    patterns += [(f"{block}.*", scheme) for block in listed]
    return Quantization("auto-round", None if listed else scheme, names, tuple(patterns))


def packed(config: Config, bits: int, group: int | None) -> Scheme:
    packing = config.text("packing_format", "auto_round:auto_gptq") + config.text("backend", "")
    match bits:
        case 4 if "awq" in packing:
            return Scheme("awq", group, zeros=True)
        case 4:
            return Scheme("gptq", group, zeros=not config.flag("sym", True))
        case 8:
            return Scheme("gptq_int8", group, zeros=not config.flag("sym", True))
    raise UnsupportedModelError("", f"{bits}-bit")


def quark(config: Config) -> Quantization:
    """Quark: one scheme for all linear layers outside `exclude`.

    Source: vLLM 0.33 layers/quantization/quark/quark.py. Schemes of single layers or of layer types are not modeled.
    """
    for key in ("layer_type_quant_config", "layer_quant_config"):
        kv_only = set(config.sub("export").names("kv_cache_group") or [])
        if set(config.sub(key).values) - kv_only:
            raise UnsupportedModelError("", f"schemes of single layers ({key})")
    whole = config.sub("global_quant_config")
    names, patterns = exceptions(names_of(config, "exclude"))
    return Quantization("quark", quark_scheme(whole.sub("weight"), whole.values.get("input_tensors")), names, patterns)


def quark_scheme(weight: Config, inputs: Any) -> Scheme:
    static = isinstance(inputs, dict) and inputs.get("is_dynamic") is False
    kind, by = weight.text("dtype", ""), weight.text("qscheme", "")
    match (kind, by):
        case ("fp8_e4m3", "per_tensor"):
            return Scheme("fp8_tensor", static=static)
        case ("fp8_e4m3", "per_channel"):
            return Scheme("fp8_channel", static=static)
        case ("fp4", "per_group") if weight.count("group_size") == 32:
            return Scheme("mxfp4", 32)
    raise UnsupportedModelError("", f"{printable(kind, 20)} {printable(by, 20)}")
