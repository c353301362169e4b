"""Weight bytes per rank from a checkpoint's files, tensor by tensor.

The headers give each tensor's size; the model's facts say how a server shards it. A tensor that the facts do not
name is counted in full on every rank, to be on the safe side.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod

from kvplan.models.names import RENAMED
from kvplan.models.spec import ModelSpec, Part, Place, Sharing, Weight
from kvplan.models.tensors import Checkpoint, TensorInfo
from kvplan.sizing.layout import cdiv
from kvplan.sizing.weights import BYTES, Layout, expert_copies, held_dtype, layers_on, on_stage, ranks_of, up

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"(experts)\.\d+\.")
# Suffixes after a module's name in checkpoints: the tensor itself, and the scales and zeros of quantized ones.
_SUFFIX = re.compile(
    r"\.(weight|bias|qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_scale_2|weight_scale_inv|"
    r"weight_shape|weight_zero_point|weight_global_scale|input_scale|input_global_scale|input_zero_point)$"
)

# GGUF's names for a layer's modules, and for those outside the layers (ggml-org/llama.cpp, gguf-py constants).
_GGUF_LAYER = re.compile(r"^blk\.(\d+)\.")
GGUF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.0.gate_proj", "ffn_up_exps": "mlp.experts.0.up_proj",
    "ffn_down_exps": "mlp.experts.0.down_proj", "token_embd": "model.embed_tokens", "output": "lm_head",
    "output_norm": "model.norm",
}  # fmt: skip
KEPT = ("scales", "_scale", "_scale_2", "_scale_inv")  # suffixes of tensors that stay in their stored dtype


@lru_cache(maxsize=64)
def by_source(spec: ModelSpec, layer: int) -> dict[str, tuple[Weight, Part | None]]:
    """Checkpoint module name within a layer -> (the weight it is part of, its part)."""
    table: dict[str, tuple[Weight, Part | None]] = {}
    for weight in spec.layer_weights[layer]:
        names = weight.sources or (weight.name,)
        fused = len(names) == len(weight.parts)
        for i, name in enumerate(names):
            table[name] = (weight, weight.parts[i] if fused else None)
        table.setdefault(weight.name, (weight, None))  # already fused in the checkpoint
        if weight.experts:  # all experts in one tensor
            stem, kind = weight.name.rpartition(".")[0], weight.name.rpartition(".")[2]
            table.setdefault(f"{stem}.{'gate_up_proj' if kind == 'w13' else 'down_proj'}", (weight, None))
    return table


def weight_of(spec: ModelSpec, layer: int, role: str) -> tuple[Weight, Part | None] | None:
    """(weight, part) of a module of a layer, by its own name or a common alternative."""
    table = by_source(spec, layer)
    for pattern, name in ((None, ""), *RENAMED):
        role = role if pattern is None else pattern.sub(name, role)
        if role in table:
            return table[role]
    return None


def share(part: Part, tp: int) -> tuple[int, int]:
    """(units on one rank, total units) of a sharded part."""
    match part.sharing:
        case Sharing.SPLIT:
            return cdiv(part.units, tp), part.units
        case Sharing.KV_HEADS:
            return max(1, part.units // tp), part.units
        case Sharing.GROUPS | Sharing.PADDED_HEADS:
            return cdiv(part.units, tp), part.units


def held_bytes(tensor: TensorInfo, weight: Weight | None, layout: Layout, dtype: str) -> int:
    """Bytes of a tensor once loaded: unquantized floating-point ones are converted to the server's dtype.

    Scales keep their own, as do tensors stored with less than 16 bits.
    """
    wide = tensor.dtype in ("F64", "F32", "F16", "BF16")
    if not wide or tensor.name.endswith(KEPT) or weight is None:
        return tensor.num_bytes
    return prod(tensor.shape) * BYTES[held_dtype(weight, layout, dtype)]


def is_twice(tensor: TensorInfo, weight: Weight, layout: Layout) -> bool:
    """True for block scales of NVFP4 experts of which a rank keeps a second copy (its padding is not counted)."""
    scales = tensor.dtype == "F8_E4M3" and tensor.name.endswith("weight_scale")
    return layout.twice_scaled and weight.experts > 0 and scales


def rank_bytes(size: int, weight: Weight, part: Part | None, layout: Layout, *, bias: bool) -> int:
    """Bytes of one loaded tensor of `size` on one rank."""
    if weight.experts > 0 and layout.ep > 1:  # a tensor of one expert, or of all experts
        return cdiv(size * expert_copies(weight, layout), weight.experts)
    ranks = ranks_of(weight, layout)
    match weight.split:
        case "none":
            return size
        case "inputs":
            return size if bias else cdiv(size, ranks)
        case "outputs":
            mine, units = share(part or weight.parts[0], ranks)
            return cdiv(size * mine, units)


def outside_layers(spec: ModelSpec, name: str) -> Weight | None:
    """The weight of a tensor outside the layers, by the suffix of its name."""
    module = _SUFFIX.sub("", name)
    for weight in spec.other_weights:
        if module == weight.name or module.endswith("." + weight.name.rpartition(".")[2]):
            return weight
    return None


@lru_cache(maxsize=4096)
def tower_inputs(spec: ModelSpec) -> tuple[frozenset[str], frozenset[str]]:
    """(modalities of the vision towers, those of the audio towers)."""
    served = {name for weight in spec.other_weights for name in weight.serves}
    return frozenset(served - {"audio"}), frozenset(served & {"audio"})


def inputs_of(spec: ModelSpec, name: str) -> frozenset[str]:
    """Modalities that a tower's tensor serves, by its name; if unknown, the empty name, which is never disabled."""
    seen, heard = tower_inputs(spec)
    return (heard if "audio" in name else seen) or frozenset({""})


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name is returned unchanged."""
    layer = _GGUF_LAYER.match(name)
    module, _, tensor = (name[layer.end() :] if layer else name).rpartition(".")
    if module not in GGUF_NAMES:
        return f"model.layers.{layer.group(1)}.{module}.{tensor}" if layer else name
    return f"model.layers.{layer.group(1)}.{GGUF_NAMES[module]}.{tensor}" if layer else f"{GGUF_NAMES[module]}.{tensor}"


def stored_weights(spec: ModelSpec, checkpoint: Checkpoint, layout: Layout) -> Counter[str]:
    """Bytes on one rank by tensor group.

    Layers beyond the model's (multi-token prediction) and a second copy of a tied head are only on disk.
    """
    total: Counter[str] = Counter()
    stage = layers_on(spec, layout)
    for tensor in checkpoint.tensors:
        if checkpoint.format == "gguf":
            tensor = replace(tensor, name=hugging_face_name(tensor.name))
        match = _LAYER.search(tensor.name)
        tower = any(word in tensor.name for word in ("visual", "vision", "audio", "mm_projector", "multi_modal"))
        if match is None or tower:
            weight = outside_layers(spec, tensor.name)
            if spec.tied and tensor.name.startswith("lm_head"):
                continue
            place = weight.place if weight else Place.FIRST
            if tower and layout.left_out.issuperset(inputs_of(spec, tensor.name)):
                continue
            if on_stage(place, layout):
                group = weight.group if weight else ("vision_audio" if tower else "other")
                splits = weight is not None and weight.split == "outputs" and not tower
                size = held_bytes(tensor, weight, layout, spec.dtype)
                if weight is not None and weight.pad_rows > 1 and tensor.shape[:1] == (weight.outputs,):
                    size = size * up(weight.outputs, weight.pad_rows) // weight.outputs
                total[group] += cdiv(size, layout.tp) if splits else size
            continue
        layer = int(match.group(1))
        if layer not in stage:
            continue
        module = _EXPERT.sub(r"\1.0.", tensor.name[match.end() :])
        role, is_bias = _SUFFIX.sub("", module), module.endswith((".bias", "_bias"))
        match weight_of(spec, layer, role):
            case None:
                total["other"] += tensor.num_bytes
            case weight, part:
                size = held_bytes(tensor, weight, layout, spec.dtype) * (2 if is_twice(tensor, weight, layout) else 1)
                total[weight.group] += rank_bytes(size, weight, part, layout, bias=is_bias)
    return total
