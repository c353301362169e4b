"""Tensors that are live at once where a layer has experts, latents (MLA) or recurrent states; see activations.py."""

from collections.abc import Iterator

from kvplan.models.spec import LatentAttention, ModelSpec, RecurrentState, Sharing, Weight
from kvplan.servers.vllm.activations import SINGLE, Layer, Live, stays, wide_norm
from kvplan.sizing.weights import local_shape

# Routers that read hidden states in float32. Source: vLLM 0.33 models/minimax_m2.py, mimo_v2.py.
WIDE_ROUTERS = {"minimax_m2": 3, "mimo_v2_flash": 5}
# Hidden states that a class keeps beyond others on several ranks, eagerly. Source: models/*.py of 0.33.
BEYOND = {"llama4": -1, SINGLE: -1, "granitemoehybrid": 1, "gemma4": 3}


def live(spec: ModelSpec, layer: Layer, tp: int, *, eager: bool, given: bool) -> Iterator[Live]:
    if layer.parts.router:
        yield from experts(spec, layer, tp, eager=eager, given=given)
    for cache in layer.caches:
        match cache:
            case LatentAttention():
                yield latents(spec, layer, tp)
            case RecurrentState("mamba1"):
                yield mamba1(spec, layer, tp)
            case RecurrentState("mamba2"):
                yield mamba2(spec, layer, cache, tp, eager=eager)
            case RecurrentState("gated_delta_net"):
                yield delta_net(spec, layer, tp, eager=eager)


def experts(spec: ModelSpec, layer: Layer, tp: int, *, eager: bool, given: bool) -> Iterator[Live]:
    """Beside the kernels' workspace, which is a buffer: outputs of routed and shared experts, and what holds them."""
    parts, hidden, kind = layer.parts, spec.hidden_size, spec.model_type.removesuffix("_text")
    inputs = {} if eager else {"attention": parts.attention}
    if spec.quantization is not None and spec.quantization.method == "mxfp4":  # Triton's kernels have no workspace
        inner = sum(local_shape(w, tp)[0] for w in layer.weights if w.experts and w.split == "inputs")
        yield {**inputs, "hidden": 4 * hidden, "chosen experts": spec.experts_per_token * (hidden + inner)}
        return
    if eager:
        copies = 4 + (tp > 1) + 2 * parts.shared + (BEYOND.get(kind, 0) if tp > 1 else 0)
        copies -= stays(spec, given=given)
    else:
        copies = (6 if parts.shared else 4 + (tp > 1)) + (2 if tp > 1 and wide_norm(spec) == 11 else 0)
    if eager and (base := WIDE_ROUTERS.get(kind)) is not None:
        yield {"hidden": (base + 2) * hidden, "router": 2 * parts.router}
    yield {**inputs, "hidden": copies * hidden, "router": (2 if eager else 1) * parts.router}


def latents(spec: ModelSpec, layer: Layer, tp: int) -> Live:
    """MLA, beside the stand-in for its prefill workspace: projections, normalized latents, queries, outputs."""
    by_name = {weight.name.rpartition(".")[2]: weight for weight in layer.weights}
    narrow = next((by_name[name] for name in ("fused_qkv_a_proj", "kv_a_proj_with_mqa") if name in by_name), None)
    queries = next((by_name[name] for name in ("q_b_proj", "q_proj") if name in by_name), None)
    normed = by_name["kv_b_proj"].inputs + (by_name["q_b_proj"].inputs if "q_b_proj" in by_name else 0)
    return {
        "hidden": 2 * spec.hidden_size,
        "latents": (narrow.outputs if narrow else 0) + normed,
        "queries": sum(local_shape(queries, tp)[1]) if queries else 0,
        "attention": layer.parts.attention,
    }


def projected(layer: Layer, tp: int, *names: str) -> int:
    """Outputs of the projections of these names, on a rank."""
    return sum(sum(local_shape(weight, tp)[1]) for weight in layer.weights if weight.name.endswith(names))


def outputs_of(layer: Layer, tp: int) -> int:
    """Inputs of a mixer's last matrix, on a rank."""
    return sum(
        local_shape(w, tp)[0] for w in layer.weights if w.group == "state" and w.split == "inputs" and is_last(w)
    )


def is_last(weight: Weight) -> bool:
    return weight.name.endswith("out_proj")


def mamba1(spec: ModelSpec, layer: Layer, tp: int) -> Live:
    inner = outputs_of(layer, tp)
    return {"hidden": (4 + (tp > 1)) * spec.hidden_size, "in_proj": projected(layer, tp, "in_proj"), "inner": inner}


def mamba2(spec: ModelSpec, layer: Layer, state: RecurrentState, tp: int, *, eager: bool) -> Live:
    """Mamba 2: eagerly a norm over several groups is computed in float32; compiled, in_proj has a second copy."""
    inner, projection = outputs_of(layer, tp), projected(layer, tp, "in_proj")
    if not eager:
        return {"hidden": 3 * spec.hidden_size, "in_proj": 2 * projection, "inner": 2 * inner}
    base = 2 if spec.model_type == SINGLE else 3
    groups = next((part.units for part in state.convolution if part.sharing is Sharing.GROUPS), 1)
    if groups // tp > 1:
        return {"hidden": base * spec.hidden_size, "in_proj": projection, "inner": 5 * inner}
    return {"hidden": (base + 1 + (tp > 1)) * spec.hidden_size, "in_proj": projection, "inner": 2 * inner}


def delta_net(spec: ModelSpec, layer: Layer, tp: int, *, eager: bool) -> Live:
    """Gated delta net: Qwen3-Next's interleaved projection is taken apart into copies, Qwen3.5's is not."""
    inner, projection = outputs_of(layer, tp), projected(layer, tp, "in_proj_qkvz", "in_proj_qkv", "in_proj_z")
    small = 2 * projected(layer, tp, "in_proj_ba", "in_proj_b", "in_proj_a")
    mixed = projection - inner  # queries, keys and values
    apart = spec.model_type == "qwen3_next"
    if eager:
        hidden = ((5 if wide_norm(spec) else 4) + (tp > 1)) * spec.hidden_size
        copies = {"qkv": 2 * mixed, "core": 3 * inner} if apart else {"core": 3 * inner}
        return {"hidden": hidden, "in_proj": projection + small, **copies}
    copies = {"qkv": mixed, "core": 3 * inner} if apart else {"core": 2 * inner}
    return {"attention": inner, "hidden": 2 * spec.hidden_size, "in_proj": projection + small, **copies}
