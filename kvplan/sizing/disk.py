"""Size of a model's checkpoint on disk, from its config: every tensor as stored, not sharded and not padded.

Multi-token prediction layers and second copies of a tied head are not counted: a server leaves them on disk unless
it speculates.
"""

from kvplan.models.spec import ModelSpec, Weight
from kvplan.sizing.weights import BYTES, linear_bytes, scheme_for

FULL_PRECISION = ("float32", "float")  # served in 16 bits, stored in 32


def stored_dtype(spec: ModelSpec) -> str:
    """The config's dtype for the files: a float32 checkpoint is served in bfloat16."""
    text = spec.config.get("text_config")
    for level in (spec.config, text if isinstance(text, dict) else {}):
        stated = level.get("dtype") or level.get("torch_dtype")
        if isinstance(stated, str):
            return "float32" if stated.removeprefix("torch.") in FULL_PRECISION else spec.dtype
    return spec.dtype


def tensor_bytes(spec: ModelSpec, weight: Weight, layer: int | None, dtype: str) -> int:
    """Bytes of one weight in the files: values, scales and bias, for all its experts."""
    if weight.quantizable and not weight.counted:  # a second copy of a matrix, made by the server (Gemma 4's K as V)
        return 0
    parts = [part.size for part in weight.parts]
    scheme = scheme_for(spec, weight, layer, None)
    element = BYTES[weight.dtype or dtype]
    bias = element * weight.outputs if weight.bias else 0
    if scheme is None:
        size = element * weight.inputs * weight.outputs
    else:
        size = linear_bytes(scheme, weight.inputs, parts)
        if scheme.kind in ("gptq", "gptq_int8"):  # each matrix stores the group of every input: `g_idx`, 32 bits
            size += 4 * weight.inputs * max(1, len(weight.sources))
    return (size + bias) * max(1, weight.experts)


def stored_bytes(spec: ModelSpec) -> int | None:
    """Bytes of all tensors of the checkpoint, or None for a quantization whose layout kvplan does not know."""
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
