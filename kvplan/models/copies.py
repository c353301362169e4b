"""A quantized copy of a catalog model, known by its name alone: sized as the format's usual tool writes it by default.

That is every linear layer of the text model, but no router, head or tower. Of 44 published copies in these formats
whose base the catalog has, 41 have these weights within 0.3%; Llama 3.1 405B differs (16% more in fp8, 1% in AWQ), and
Qwen2.5 72B, widened for its groups (0.31%). Six logs of others' copies print 0 to 2.1% more, which counts buffers and
rounding; one of Gemma 3 in AWQ prints 13% more (an untied head). Not taken: NVFP4, whose publishers leave out 1 to 38%
differently, Unsloth's dynamic 4 bits (13 to 15%), and less than 8 bits of models with states (one log prints 21% less).
"""

import copy
import re
from typing import Any, Final, NamedTuple

from kvplan.core.errors import KvplanError
from kvplan.models import catalog, hf_config
from kvplan.models.lookup import base_of, relatives
from kvplan.models.spec import ModelSpec

_TOWERS: Final = ("visual", "vision", "audio", "multi_modal_projector")
_LEFT_OUT: Final = [
    "lm_head",
    *(f"re:.*{part}.*" for part in _TOWERS),
    r"re:.*\.gate$",
    "re:.*shared_expert_gate$",
    "re:.*router.*",
]
_PER_TOKEN: Final = {"strategy": "token", "dynamic": True, "symmetric": True}
_BY_GPTQ: Final = {
    "quant_method": "gptq", "group_size": 128, "desc_act": False, "sym": True, "dynamic": {r"-:.*\.gate$": {}},
}  # fmt: skip


def _compressed(format_name: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config of compressed-tensors with one group for all linear layers, as llm-compressor's recipes write it."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    if inputs is not None:
        group["input_activations"] = inputs
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": _LEFT_OUT,
    }


class Format(NamedTuple):
    """words   what a name says of it, as a pattern
    label   how the note calls it
    config  quantization_config
    bits    of a weight
    """

    words: str
    label: str
    config: dict[str, Any]
    bits: int


# In the order in which names are asked: "gptq-int8" is not int8 by llm-compressor.
FORMATS: Final = (
    Format("gptq.*8", "GPTQ in 8 bits, as GPTQModel writes it", {**_BY_GPTQ, "bits": 8}, 8),
    Format("gptq", "GPTQ in 4 bits, as GPTQModel writes it", {**_BY_GPTQ, "bits": 4}, 4),
    Format(
        "awq(?!.*8)", "AWQ in 4 bits, as AutoAWQ writes it",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": list(_TOWERS)}, 4,
    ),
    Format(
        "autoround", "4 bits, as AutoRound writes it",
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
         "packing_format": "auto_round:auto_gptq"}, 4,
    ),
    Format(
        "bnb", "NF4, as bitsandbytes writes it",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True}, 4,
    ),
    Format(
        "w4a16|int4", "W4A16, as llm-compressor writes it",
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}), 4,
    ),
    Format(
        "w8a8|int8", "W8A8, as llm-compressor writes it",
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
                    {"num_bits": 8, "type": "int", **_PER_TOKEN}), 8,
    ),
    Format(
        "fp8", "FP8, as llm-compressor writes it",
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"},
                    {"num_bits": 8, "type": "float", **_PER_TOKEN}), 8,
    ),
)  # fmt: skip
_OTHERS: Final = re.compile(r"nvfp4|mxfp|gguf|mlx|exl|unsloth|qat|w4a[48]|fp8a16|q[2-8](?:_|$)")


def format_of(name: str) -> Format | None:
    """The format that a repository's name ends with, or None where it says none or one whose copies differ."""
    words = name.rstrip("/").rpartition("/")[2].lower()[len(base_of(name)) :]
    if _OTHERS.search(words):
        return None
    return next((known for known in FORMATS if re.search(known.words, words)), None)


def is_copy(name: str) -> bool:
    """True if a name says that it is a copy, in a format of these, of a model that the catalog has."""
    return format_of(name) is not None and bool(relatives(name))


def sized(name: str, *, text_only: bool = False) -> tuple[ModelSpec, str] | None:
    """The facts of a copy that its name says to be one of a catalog model, and a note of how it is taken; else None."""
    stored = format_of(name)
    base = next((known for known in relatives(name) if base_of(known) == known), None)
    if stored is None or base is None:
        return None
    facts = catalog.facts(base)
    own = catalog.load(base).quantization
    if own is not None and own.method != "fp8":  # made in 4 bits: nobody packs them again
        return None
    values = copy.deepcopy({**catalog.expand(facts["config"]), "quantization_config": stored.config})
    try:
        spec = hf_config.read_config(values, name, name, source=facts["source"], text_only=text_only)
    except KvplanError:  # of a model whose layers the format does not fit
        return None
    if spec.quantization is None or not spec.quantization.known or (stored.bits < 8 and spec.has_states):
        return None
    named = "" if "/" in name else "; the server's command takes the repository or folder of a copy"
    return spec, (
        f"sized as {facts['id']} in {stored.label}; others' copies differ: name its config.json, or add "
        f"--weights-bytes{named}"
    )
