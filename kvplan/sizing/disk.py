"""What a model's checkpoint weighs on disk, from its config: every tensor as it is stored, not split and not padded.

Blocks for speculation (multi-token prediction) and second copies of a tied head are not counted: a server that is not
asked to speculate leaves them on disk.
"""

from kvplan.models.spec import ModelSpec, Weight
from kvplan.sizing.weights import BYTES, linear_bytes, scheme_for

FULL_PRECISION = ("float32", "float")  # served in 16 bits, stored in 32


def stored_dtype(spec: ModelSpec) -> str:
    """The dtype the config states for the files: a checkpoint in float32 is served in bfloat16."""
    text = spec.config.get("text_config")
    for level in (spec.config, text if isinstance(text, dict) else {}):
        stated = level.get("dtype") or level.get("torch_dtype")
        if isinstance(stated, str):
            return "float32" if stated.removeprefix("torch.") in FULL_PRECISION else spec.dtype
    return spec.dtype


def tensor_bytes(spec: ModelSpec, weight: Weight, layer: int | None, dtype: str) -> int:
    """Bytes of one weight in the files: its values, what scales them, and its bias, of all its experts."""
    if weight.quantizable and not weight.counted:  # a second copy of a matrix, which a server makes (Gemma 4's K as V)
        return 0
    parts = [part.size for part in weight.parts]
    scheme = scheme_for(spec, weight, layer, None)
    element = BYTES[weight.dtype or dtype]
    bias = element * weight.outputs if weight.bias else 0
    if scheme is None:
        size = element * weight.inputs * weight.outputs
    else:
        size = linear_bytes(scheme, weight.inputs, parts)
        if scheme.kind in ("gptq", "gptq_int8"):  # each matrix has the group of every input: `g_idx`, 32 bits
            size += 4 * weight.inputs * max(1, len(weight.sources))
    return (size + bias) * max(1, weight.experts)


def stored_bytes(spec: ModelSpec) -> int | None:
    """Bytes of all tensors of the checkpoint; None for a quantization whose layout kvplan does not know."""
    if spec.quantization is not None and not spec.quantization.known:
        return None
    dtype = stored_dtype(spec)
    by_name = spec.quantization is not None and bool(spec.quantization.names or spec.quantization.patterns)
    total = sum(tensor_bytes(spec, weight, None, dtype) for weight in spec.other_weights)
    sizes: dict[int, int] = {}
    for index, weights in enumerate(spec.layer_weights):
        key = index if by_name else id(weights)
        if key not in sizes:
            sizes[key] = sum(tensor_bytes(spec, weight, index, dtype) for weight in weights)
        total += sizes[key]
    return total
