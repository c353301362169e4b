"""FP8 weights in blocks: which shards of a rank vLLM before 0.33 refuses because they do not consist of whole blocks.

Source: vLLM 0.33 model_executor/layers/quantization/utils/fp8_utils.py (validate_fp8_block_shape) and
layers/fused_moe/oracle/fp8.py. Fused projections may be uneven: their scales are then loaded part by part.
"""

from collections.abc import Iterator
from math import gcd

from kvplan.models.spec import Weight
from kvplan.servers.plans.plan import Refusal, Request, smaller, unsupported
from kvplan.servers.plans.weights import own_layout
from kvplan.sizing.weights import FINEST_BLOCK, Layout, local_shape, ranks_of, scheme_for


def refusal(request: Request) -> Refusal | None:
    """Return a refusal of ranks that do not share the model's FP8 weights in whole blocks."""
    spec, layout = request.spec, own_layout(request, 0)
    stored = spec.quantization
    if layout is None or stored is None or "fp8_block" not in spec.scheme_kinds:
        return None
    seen: set[int] = set()
    for index, weights in enumerate(spec.layer_weights):
        if id(weights) in seen:
            continue
        seen.add(id(weights))
        for weight in weights:
            scheme = scheme_for(spec, weight, spec.first_layer + index, layout.online)
            if scheme is None or scheme.kind != "fp8_block" or scheme.block is None:
                continue
            refines = stored.method == "fp8" and request.release.has("refined_expert_blocks")
            for size, block in uneven(weight, scheme.block, layout, refines=refines):
                return _refusal(request, weight, size, block)
    return None


def uneven(weight: Weight, block: tuple[int, int], layout: Layout, *, refines: bool) -> Iterator[tuple[int, int]]:
    """(size of a rank's shard, the block that does not divide it).

    refines  scales of experts are loaded for smaller blocks if these divide the shard
    """
    ranks = ranks_of(weight, layout)
    columns, parts = local_shape(weight, ranks)
    if ranks > 1 and weight.split == "inputs" and columns % block[1]:
        size, side = columns, block[1]
    elif weight.split == "outputs" and parts[0] % block[0] and (weight.experts or (ranks > 1 and len(parts) == 1)):
        size, side = parts[0], block[0]
    else:
        return
    if not (weight.experts and refines and gcd(*block, columns, parts[0]) >= FINEST_BLOCK):
        yield size, side


def _refusal(request: Request, weight: Weight, size: int, block: int) -> Refusal:
    args = request.args
    text = (
        f"{weight.name} of {request.spec.name} has {size} values on a rank, which FP8 blocks of {block} do not divide"
    )
    if weight.experts and not args.enable_expert_parallel:
        return unsupported(text, "enable_expert_parallel", (True,))
    return unsupported(text, "tensor_parallel_size", smaller(args.tensor_parallel_size))
