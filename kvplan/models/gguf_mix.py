"""The type of each tensor in a file that llama-quantize makes.

Source: llama.cpp, commit 0c1e57098, src/llama-quant.cpp. The mixes of other makers (Unsloth's UD, Ollama's own,
bartowski's `_L`) differ: their files must be read.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.models.ggml_types import BLOCKS

Shape = tuple[int, ...]

# File type -> the type of most of its tensors.
BASE: Final = {
    "F32": "F32", "F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0",
    "Q5_1": "Q5_1", "Q2_K": "Q2_K", "Q2_K_S": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "IQ1_S": "IQ1_S",
    "IQ1_M": "IQ1_M", "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS", "IQ3_XS": "IQ3_S", "IQ3_S": "IQ3_S", "IQ3_M": "IQ3_S", "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS", "TQ1_0": "TQ1_0", "TQ2_0": "TQ2_0", "MXFP4_MOE": "MXFP4",
}  # fmt: skip
# File types of about two bits: llama-quantize asks for an importance matrix, and has rules of their own for them.
IMATRIX_ONLY: Final = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
# Type of 256-element blocks -> that of 32 for rows that are not whole blocks.
FALLBACK: Final = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
# Parts of names of matrices that are never quantized (`tensor_allows_quantization`), of the architectures known here.
NOT_QUANTIZED: Final = (
    "_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "per_layer_model_proj", "ssm_conv1d",
    "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "position_embd", "token_types",
)  # fmt: skip
# Parts of names of what the converter stores in float32, beside vectors.
IN_FLOAT32: Final = (
    "_norm", "ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "shortconv.conv", "rope_f", "exp_probs_b", "attn_sinks",
)  # fmt: skip
CATEGORIES: Final = (
    "attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight", "attn_k.weight", "attn_q.weight", "attn_output.weight",
    "ffn_up", "ffn_gate", "ffn_down",
)  # fmt: skip
# File types whose attn_output has more bits in a model of eight experts.
OF_EIGHT: Final = (
    "Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS",
)  # fmt: skip
_VALUES: Final = ("attn_qkv", "attn_kv_b", "attn_v")
_LAYER: Final = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the choice of types depends on, beside a tensor's name and shape.

    kind         file type ("Q4_K_M")
    num_layers   with those for multi-token prediction
    ratio        query heads per KV head in the first layer; 0 without attention
    experts      of a layer; 0 for a dense model
    is_70b       llama.cpp's own name for the model's size is 70B
    imatrix      quantized with an importance matrix
    """

    kind: str
    num_layers: int
    ratio: int
    experts: int
    is_70b: bool
    imatrix: bool
    is_tied: bool
    values: int = 0
    counts: Counter[str] = field(default_factory=Counter)


def file_type(name: str) -> str:
    """A file type in llama-quantize's own spelling."""
    kind = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}.get(name.upper(), name.upper())
    if kind not in BASE:
        near = [known for known in BASE if known.startswith(kind)] or get_close_matches(kind.removeprefix("UD-"), BASE, 3, 0.7)
        likely = next((known for known in near if known.endswith("_K_M")), near[0] if near else None)
        cure = f"one of {', '.join(BASE)}" if likely is None else f"did you mean {likely}?"
        raise UsageError(f"--quant {name}", "not a file type of llama-quantize", cure)
    return kind


def is_quantized(name: str, shape: Shape) -> bool:
    """True if llama-quantize chooses the tensor's type; the others keep that of the source file."""
    matrix = len([size for size in shape if size > 1]) >= 2 or len(shape) > 2
    return matrix and name.endswith("weight") and not any(word in name for word in NOT_QUANTIZED)


def source_type(name: str, shape: Shape, wide: str = "F16") -> str:
    """Type of a tensor as the converter stores it in a file of 16 bits."""
    if len(shape) == 1 or name.endswith((".bias", ".scale")):
        return "F32"
    return "F32" if any(word in name for word in IN_FLOAT32) and "ssm_dt.weight" not in name else wide


def mixed(
    tensors: Sequence[tuple[str, Shape]], kind: str, *, ratio: int, experts: int, layers: int, is_70b: bool,
    imatrix: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Type of every tensor, by its name."""
    types = {name: source_type(name, shape, "BF16" if kind == "BF16" else "F16") for name, shape in tensors}
    if kind in ("F16", "BF16"):
        return types
    if kind == "F32":
        return dict.fromkeys(types, "F32")
    listed = sorted((item for item in tensors if is_quantized(*item)), key=lambda item: (_layer_of(item[0]), item[0]))
    mixture = Mixture(
        kind, layers, ratio, experts, is_70b, imatrix,
        is_tied=not any(name == "output.weight" for name, _ in listed),
        values=sum(_category(name) in _VALUES for name, _ in listed),
    )  # fmt: skip
    for name, shape in listed:
        types[name] = fallback(_chosen(mixture, name, shape), shape[0])
    return types


def fallback(kind: str, columns: int) -> str:
    """The type that a row of so many elements can have instead of one whose blocks it does not fill."""
    block, _ = BLOCKS[kind]
    if columns % block == 0:
        return kind
    smaller = kind if block <= 32 else FALLBACK.get(kind, "IQ4_NL")
    return "F16" if columns % BLOCKS[smaller][0] else smaller


def _layer_of(name: str) -> int:
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def _category(name: str) -> str:
    return next((word.removesuffix(".weight") for word in CATEGORIES if word in name), "")


def _more(index: int, count: int) -> bool:
    """True for the first and last eighth of the layers, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _chosen(mixture: Mixture, name: str, shape: Shape) -> str:
    """Type of one tensor before rows that are not whole blocks are considered; counts it."""
    base = BASE[mixture.kind]
    embedding = name in ("token_embd.weight", "per_layer_token_embd.weight")
    if name == "output.weight" or (mixture.is_tied and embedding):
        return _output(mixture.kind, base, shape[0])
    if mixture.kind == "MXFP4_MOE":
        return "MXFP4" if len(shape) > 2 and shape[2] > 1 else "Q8_0"
    if embedding:
        return _embedding(mixture.kind, base)
    category = _category(name)
    counter = "values" if category in _VALUES else category
    running = mixture.counts[counter]
    mixture.counts[counter] += 1
    if mixture.kind in IMATRIX_ONLY:
        return _of_two_bits(mixture, base, category, running)
    if category in _VALUES:
        return _values(mixture, base, category, running)
    if category in ("ffn_down", "ffn_gate", "ffn_up"):
        index = _layer_of(name) if mixture.experts > 1 else running
        return _mlp(mixture, base, category, index)
    return _attention(mixture, base, category)


def _output(kind: str, base: str, columns: int) -> str:
    if kind == "MXFP4_MOE" or base == "Q8_0" or columns % BLOCKS[base][0]:
        return "Q8_0"
    return "Q5_K" if kind in (*IMATRIX_ONLY, "IQ3_XXS") else "Q6_K"


def _embedding(kind: str, base: str) -> str:
    if kind in ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"):
        return "Q2_K"
    if kind in ("IQ2_S", "IQ2_M", "IQ3_XXS"):
        return "IQ3_S"
    return "Q4_K" if kind in ("TQ1_0", "TQ2_0") else base


def _of_two_bits(mixture: Mixture, base: str, category: str, running: int) -> str:
    wider = mixture.kind in ("IQ2_S", "IQ2_M")
    if category in _VALUES:
        return "Q4_K" if mixture.ratio >= 4 or mixture.experts >= 4 else "IQ3_S" if wider else "Q2_K"
    if category == "attn_k" and mixture.experts == 8:
        return "Q4_K"
    if category == "ffn_down" and running < mixture.num_layers // 8:
        return "IQ3_S" if wider else "Q2_K"
    if category == "attn_output":
        if mixture.experts == 8:
            return "Q5_K"
        return "IQ2_XXS" if mixture.kind in ("IQ1_S", "IQ1_M") else "IQ3_S" if wider else base
    return base


def _values(mixture: Mixture, base: str, category: str, running: int) -> str:
    kind, grouped = mixture.kind, mixture.ratio >= 4
    chosen = base
    match kind:
        case "Q2_K":
            chosen = "Q4_K" if grouped else "Q3_K"
        case "Q2_K_S" | "IQ3_XS" | "IQ3_S" if grouped:
            chosen = "Q4_K"
        case "IQ3_XXS":
            chosen = "Q4_K" if grouped else "IQ3_XXS" if mixture.imatrix else "IQ3_S"
        case "IQ3_M":
            chosen = "Q4_K"
        case "Q3_K_M":
            chosen = "Q5_K" if running < 2 else "Q4_K"
        case "Q3_K_L":
            chosen = "Q5_K"
        case "IQ4_NL" | "IQ4_XS" if grouped:
            chosen = "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if _more(running, mixture.values):
            chosen = "Q6_K"
        case "Q4_K_S" if running < 4:
            chosen = "Q5_K"
    if mixture.is_70b and chosen in ("Q3_K", "Q4_K"):
        chosen = "Q5_K"
    return "Q8_0" if mixture.experts == 8 else chosen


def _mlp(mixture: Mixture, base: str, category: str, index: int) -> str:
    kind, count = mixture.kind, mixture.num_layers
    first = index < count // 8
    if category != "ffn_down":
        middle = not first and index < 7 * count // 8
        return "IQ3_XXS" if kind == "IQ3_XS" and middle else base
    match kind:
        case "Q2_K":
            return "Q3_K"
        case "Q2_K_S" if first:
            return "Q4_K"
        case "IQ3_XXS" if not mixture.imatrix:
            return "Q4_K" if first else "Q3_K"
        case "Q3_K_M":
            return "Q5_K" if index < count // 16 else "Q4_K"
        case "IQ3_M" if first or (mixture.experts == 8 and _more(index, count)):
            return "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if _more(index, count):
            return "Q6_K"
        case "IQ4_NL" | "IQ4_XS" if first and not mixture.imatrix:
            return "Q5_K"
        case "Q4_K_S" if first:
            return "Q5_K"
        case "Q4_0" | "Q5_0" if first and mixture.imatrix:
            return "Q4_1" if kind == "Q4_0" else "Q5_1"
    return base


def _attention(mixture: Mixture, base: str, category: str) -> str:
    """Type of a tensor of attention that has no values, and of any other without rules."""
    kind = mixture.kind
    if category == "attn_k" and mixture.experts == 8:
        return "Q8_0"
    if category in ("attn_k", "attn_q"):
        return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(kind, base)
    if category != "attn_output":
        return base
    if mixture.experts == 8:
        return "Q5_K" if kind in OF_EIGHT else base
    return {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}.get(kind, base)
