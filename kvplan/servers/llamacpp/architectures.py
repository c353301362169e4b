"""The graph of each architecture: how its layers are put together.

Source: llama.cpp at commit 0c1e57098, src/models/*.cpp. An architecture without a function here has no compute buffer
that kvplan can state.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.servers.llamacpp.blocks import SIGMOID, WEIGHTED, Inputs
from kvplan.servers.llamacpp.graph import Tensor, dims
from kvplan.servers.llamacpp.recurrent import RecurrentBlocks

Builder = Callable[[RecurrentBlocks], Tensor]
SOFTMAX: Final = 1


def build(blocks: RecurrentBlocks) -> None:
    """Build the whole graph of a model."""
    builder = (DRAFTERS if blocks.shape.drafts else BUILDERS).get(blocks.shape.arch)
    if builder is None:
        raise UnsupportedModelError(
            f"architecture {blocks.shape.arch!r}", "kvplan knows no compute buffer of it", "use another --engine"
        )
    blocks.expand(builder(blocks))


def finish(g: RecurrentBlocks, x: Tensor, *, op: str = "RMS_NORM", rows: Tensor | None = None,
           rows_after: Tensor | None = None) -> Tensor:  # fmt: skip
    """The last norm and the output matrix; `rows` are chosen before the norm, `rows_after` behind it.

    What is before the choice is kept for drafts, whether there are any or not; so is what goes into the output matrix.
    """
    if rows is not None:
        x = g.get_rows(g.output(x), rows)
    norm = g.find("output_norm.weight")
    norm = g.weight("token_embd_norm.weight") if norm is None else norm
    x = g.norm(x, norm, None, bias=g.find("output_norm.bias"), op=op)
    if rows_after is not None:
        x = g.get_rows(g.output(x), rows_after)
    return g.linear(g.head(), g.output(x), g.find("output.bias"))


def capped(g: RecurrentBlocks, x: Tensor) -> Tensor:
    return g.scale(g.unary(g.scale(x))) if g.shape.final_softcap else x


def chosen(g: RecurrentBlocks, layer: int, rows: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """In the last layer, only the tokens whose logits are kept."""
    if layer < g.shape.num_layers - 1:
        return tensors
    return tuple(g.get_rows(x, rows) for x in tensors)


def sizes(g: RecurrentBlocks, layer: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Heads of Q, K and V, and their elements."""
    shape, kv = g.shape, g.shape.kv_heads[layer]
    k, v = shape.head_dims(layer)
    return (shape.heads[layer], kv, kv), (k, k, v)


def head_norm(g: RecurrentBlocks, layer: int, name: str, x: Tensor, op: str = "RMS_NORM") -> Tensor:
    """A norm of Q or K, where the file has one."""
    weight = g.maybe(layer, f"attn_{name}_norm.weight")
    return x if weight is None else g.norm(x, weight, layer, op=op)


def attention_norm(g: RecurrentBlocks, layer: int, x: Tensor, op: str = "RMS_NORM") -> Tensor:
    weight = g.of(layer, "attn_norm.weight")
    return g.norm(x, weight, layer, bias=g.maybe(layer, "attn_norm.bias"), op=op)


def ffn_norm(g: RecurrentBlocks, layer: int, x: Tensor, op: str = "RMS_NORM") -> Tensor:
    weight = g.maybe(layer, "ffn_norm.weight")
    weight = g.of(layer, "ffn_norm") if weight is None else weight  # Falcon-H1's has no suffix in a file
    return g.norm(x, weight, layer, bias=g.maybe(layer, "ffn_norm.bias"), op=op)


def output(g: RecurrentBlocks, layer: int, x: Tensor) -> Tensor:
    return g.linear(g.of(layer, "attn_output.weight"), x, g.maybe(layer, "attn_output.bias"))


def mixture(g: RecurrentBlocks, layer: int, x: Tensor, default: int, normalize: bool) -> Tensor:
    """Routed experts, with shared ones beside them where the file has any."""
    out = g.experts(layer, x, gating=g.shape.gating or default, normalize=normalize)
    if g.maybe(layer, "ffn_up_shexp.weight") is None:
        return out
    shared = g.feed_forward(layer, x, suffix="_shexp")
    if (gate := g.maybe(layer, "ffn_gate_inp_shexp.weight")) is not None:
        shared = g.mul(shared, g.unary(g.mul_mat(gate, x), "sigmoid"))
    return g.add(out, shared)


# --- dense models and their mixtures of experts ---------------------------------------------------------------------


def standard(g: RecurrentBlocks, *, rope: bool = True, rope_period: int = 0, factors: bool = False,
             scaled_q: bool = False) -> Tensor:  # fmt: skip
    """Norm, attention, norm, feed-forward or experts: Llama, Qwen, Phi-3, Granite, StarCoder 2, SmolLM 3 and others.

    rope_period  every so many layers have no rope
    """
    shape = g.shape
    op = "NORM" if shape.arch == "starcoder2" else "RMS_NORM"
    x = g.embedded()
    positions, heat = g.positions(), temperature(g)
    inputs, rows = g.attention_inputs(), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        x = attention_norm(g, i, x, op)
        q, k, v = g.qkv(i, x, *sizes(g, i))
        q, k = head_norm(g, i, "q", q), head_norm(g, i, "k", k)
        if rope and not (rope_period and (i + 1) % rope_period == 0):
            scales = g.rope_factors(i) if factors else None
            q, k = g.rope(q, positions, scales), g.rope(k, positions, scales)
        if heat is not None:
            q = g.mul(q, heat)
        if scaled_q:
            q = g.scale(q)
        x, residual = chosen(g, i, rows, output(g, i, g.attend(i, q, k, v, inputs)), residual)
        x = feed(g, i, x, residual)
    x = finish(g, x, op=op)
    return g.scale(x) if shape.arch == "granite" else x


def temperature(g: RecurrentBlocks) -> Tensor | None:
    """The scale of each token's attention, where the model has one."""
    return g.input("F32", 1, 1, g.batch.tokens) if g.shape.temperature else None


def feed(g: RecurrentBlocks, layer: int, x: Tensor, residual: Tensor) -> Tensor:
    """The second half of a layer."""
    shape, arch = g.shape, g.shape.arch
    scaled = arch == "granite" and shape.residual_scale
    if scaled:
        x = g.scale(x)
    residual = x = g.add(x, residual)
    op = "NORM" if arch == "starcoder2" else "RMS_NORM"
    behind = "post_attention_norm.weight" if arch == "glm4moe" else "ffn_norm.weight"
    x = g.norm(x, g.of(layer, behind), layer, bias=g.maybe(layer, "ffn_norm.bias"), op=op)
    if g.maybe(layer, "ffn_gate_inp.weight") is not None:
        default, normalize = (SIGMOID, shape.norm_weights) if arch == "glm4moe" else (SOFTMAX, True)
        x = mixture(g, layer, x, default, normalize)
    elif arch == "phi3":
        x = g.feed_forward(layer, x, halves=True)
    else:
        x = g.feed_forward(layer, x, gated=arch != "starcoder2")
    if scaled:
        x = g.scale(x)
    return g.add(residual, x) if arch == "phi3" else g.add(x, residual)


def unsplit(g: RecurrentBlocks) -> Tensor:
    """Norms over all heads of Q and of K at once: OLMo 2 (norms behind the parts) and MiniMax-M2."""
    shape, olmo = g.shape, g.shape.arch == "olmo2"
    x = g.embedded()
    positions = g.positions()
    inputs = windowed_inputs(g)
    rows = g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        if not olmo:
            x = attention_norm(g, i, x)
        heads, head = sizes(g, i)
        q, k, v = g.qkv(i, x, heads, head, split=False)
        q, k = head_norm(g, i, "q", q), head_norm(g, i, "k", k)
        q, k, v = (g.reshape(t, d, n, g.batch.tokens) for t, d, n in zip((q, k, v), head, heads, strict=True))
        q, k = g.rope(q, positions), g.rope(k, positions)
        x = g.attend(i, q, k, v, inputs[shape.windowed[i]], keys_first=shape.has_windows)
        x, residual = chosen(g, i, rows, output(g, i, x), residual)
        if olmo:
            x = g.norm(x, g.of(i, "post_attention_norm.weight"), i)
            residual = g.add(x, residual)
            x = g.feed_forward(i, residual)
            x = g.norm(x, g.of(i, "post_ffw_norm.weight"), None)
        else:
            residual = g.add(x, residual)
            x = g.experts(i, ffn_norm(g, i, residual), gating=shape.gating or SIGMOID)
        x = g.add(x, residual)
    return finish(g, x)


def parallel(g: RecurrentBlocks) -> Tensor:
    """Attention and feed-forward beside each other: Command-R and Command-R7B (windows, rope only within them)."""
    shape, windowed = g.shape, g.shape.arch == "cohere2"
    x = g.embedded()
    positions, inputs, rows = g.positions(), windowed_inputs(g), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        normed = attention_norm(g, i, x, "NORM")
        q, k, v = g.qkv(i, normed, *sizes(g, i))
        q, k = head_norm(g, i, "q", q, "NORM"), head_norm(g, i, "k", k, "NORM")
        if shape.windowed[i] or not windowed:
            q, k = g.rope(q, positions), g.rope(k, positions)
        x = output(g, i, g.attend(i, q, k, v, inputs[shape.windowed[i]], keys_first=windowed))
        x, residual, normed = chosen(g, i, rows, x, residual, normed)
        x = g.add(g.add(g.feed_forward(i, normed), residual), x)
    x = finish(g, x, op="NORM")
    return g.scale(x) if shape.logit_scale else x


# --- windows --------------------------------------------------------------------------------------------------------


def windowed_inputs(g: RecurrentBlocks) -> dict[bool, Inputs]:
    """What layers with a window (True) and without (False) read."""
    full = g.attention_inputs()
    return {False: full, True: g.attention_inputs(windowed=True) if g.shape.has_windows else full}


def gemma(g: RecurrentBlocks) -> Tensor:
    """Gemma 2 and 3: norms before and behind each part."""
    shape = g.shape
    x = g.scale(g.embedded())
    positions, inputs, rows = g.positions(), windowed_inputs(g), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        q, k, v = g.qkv(i, attention_norm(g, i, x), *sizes(g, i))
        q = g.scale(g.rope(head_norm(g, i, "q", q), positions))
        k = g.rope(head_norm(g, i, "k", k), positions)
        x = g.attend(i, q, k, v, inputs[shape.windowed[i]], keys_first=shape.has_windows)
        x, residual = chosen(g, i, rows, g.mul_mat(g.of(i, "attn_output.weight"), x), residual)
        x = g.norm(x, g.of(i, "post_attention_norm.weight"), i)
        residual = g.add(x, residual)
        x = g.feed_forward(i, ffn_norm(g, i, residual))
        x = g.norm(x, g.of(i, "post_ffw_norm.weight"), None)
        x = g.add(x, residual)
    return capped(g, finish(g, x))


def gemma4(g: RecurrentBlocks) -> Tensor:
    """Gemma 4: other head sizes within windows, keys as values, an input of each layer's own, experts."""
    shape = g.shape
    x = g.scale(g.embedded())
    positions, inputs, rows = g.positions(), windowed_inputs(g), g.output_rows()
    own = gemma4_inputs(g, x) if g.find("per_layer_token_embd.weight") is not None else None
    for i in range(shape.num_layers):
        x = gemma4_layer(g, i, x, positions, inputs[shape.windowed[i]])
        if own is not None:
            residual = x
            x = g.unary(g.mul_mat(g.of(i, "inp_gate.weight"), x))
            x = g.mul(x, g.view(own, dims(*own.ne[:2]), (own.nb[1],)))
            x = g.mul_mat(g.of(i, "proj.weight"), x)
            x = g.add(residual, g.norm(x, g.of(i, "post_norm.weight"), i))
        if (scale := g.maybe(i, "layer_output_scale.weight")) is not None:
            x = g.mul(x, scale)
    return capped(g, finish(g, x, rows_after=rows))


def gemma4_inputs(g: RecurrentBlocks, x: Tensor) -> Tensor:
    """Each layer's own part of every token's embedding, beside a projection of the common one."""
    width, tokens = g.shape.per_layer_input, g.batch.tokens
    ids = g.input("I32", tokens)
    own = g.get_rows(g.weight("per_layer_token_embd.weight"), ids)
    own = g.expand(g.scale(g.reshape(own, width, g.shape.num_layers, tokens)))
    projected = g.scale(g.mul_mat(g.weight("per_layer_model_proj.weight"), x))
    projected = g.reshape(projected, width, g.shape.num_layers, tokens)
    projected = g.norm(projected, g.weight("per_layer_proj_norm.weight"), None)
    own = g.scale(g.add(projected, own))
    return g.cont(g.permute(own, 0, 2, 1, 3), width, tokens, g.shape.num_layers)


def gemma4_layer(g: RecurrentBlocks, i: int, x: Tensor, positions: Tensor, inputs: Inputs) -> Tensor:
    shape, tokens = g.shape, g.batch.tokens
    residual, x = x, attention_norm(g, i, x)
    head, kv = shape.head_dims(i)[0], shape.kv_heads[i]
    factors = None if shape.windowed[i] else g.rope_factors(i)
    q = g.reshape(g.mul_mat(g.of(i, "attn_q.weight"), x), head, shape.heads[i], tokens)
    q = g.rope(head_norm(g, i, "q", q), positions, factors)
    if shape.attends(i):
        k = g.mul_mat(g.of(i, "attn_k.weight"), x)
        own = g.maybe(i, "attn_v.weight")
        v = k if own is None else g.mul_mat(own, x)
        k, v = g.reshape(k, head, kv, tokens), g.reshape(v, head, kv, tokens)
        k, v = head_norm(g, i, "k", k), g.same("RMS_NORM", v)
        x = g.attend(i, q, g.rope(k, positions, factors), v, inputs, keys_first=True)
    else:
        last = shape.num_layers - shape.num_shared_kv
        x = g.attend(i, q, None, None, inputs, reuse=last - (2 if shape.windowed[i] else 1), keys_first=True)
    x = g.norm(g.mul_mat(g.of(i, "attn_output.weight"), x), g.of(i, "post_attention_norm.weight"), i)
    residual = g.add(x, residual)
    x = g.feed_forward(i, ffn_norm(g, i, residual))
    if g.maybe(i, "ffn_gate_inp.weight") is not None:
        x = g.norm(x, g.of(i, "post_ffw_norm_1.weight"), i)
        routed = g.norm(residual, g.of(i, "pre_ffw_norm_2.weight"), i)
        router = g.mul(g.scale(g.same("RMS_NORM", residual)), g.of(i, "ffn_gate_inp.scale"))
        logits = g.mul_mat(g.of(i, "ffn_gate_inp.weight"), router)
        routed = g.experts(i, routed, logits=logits, scaled=False)
        x = g.add(x, g.norm(routed, g.of(i, "post_ffw_norm_2.weight"), i))
    return g.add(g.norm(x, g.of(i, "post_ffw_norm.weight"), None), residual)


def gpt_oss(g: RecurrentBlocks) -> Tensor:
    """gpt-oss: windows, attention sinks, experts with biases; all tokens run through the last layer."""
    shape = g.shape
    x = g.embedded()
    positions, inputs, rows = g.positions(), windowed_inputs(g), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        q, k, v = g.qkv(i, attention_norm(g, i, x), *sizes(g, i))
        q, k = g.rope(q, positions), g.rope(k, positions)
        sinks = g.maybe(i, "attn_sinks.weight")
        x = g.attend(i, q, k, v, inputs[shape.windowed[i]], keys_first=True, sinks=sinks)
        residual = g.add(output(g, i, x), residual)
        x = g.norm(residual, g.of(i, "post_attention_norm.weight"), i)
        x = g.experts(i, x, gating=WEIGHTED, normalize=False)
        x = g.add(x, residual)
    return finish(g, x, rows=rows)


# --- latent attention -----------------------------------------------------------------------------------------------


def deepseek2(g: RecurrentBlocks) -> Tensor:
    """DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash: one latent per token as K and V."""
    shape = g.shape
    if not shape.is_mla:
        raise UnsupportedModelError(
            "architecture 'deepseek2'", "this file keeps K and V of every head, as old ones do", "fetch a newer file"
        )
    x = g.embedded()
    heat, positions = temperature(g), g.positions()
    inputs, rows = g.attention_inputs(only_k=True), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        q, k, v = latent_qkv(g, i, attention_norm(g, i, x), positions)
        q = q if heat is None else g.mul(q, heat)
        x = g.attend_latent(i, q, k, v, inputs, g.of(i, "attn_v_b.weight"))
        x, residual = chosen(g, i, rows, g.mul_mat(g.of(i, "attn_output.weight"), x), residual)
        residual = g.add(x, residual)
        x = ffn_norm(g, i, residual)
        x = g.feed_forward(i, x) if i < shape.dense_lead else mixture(g, i, x, SOFTMAX, shape.norm_weights)
        x = g.add(x, residual)
    return finish(g, x)


def latent_qkv(g: RecurrentBlocks, i: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape, tokens = g.shape, g.batch.tokens
    latent, rope, heads = shape.latent, shape.rope, shape.heads[i]
    if (direct := g.maybe(i, "attn_q.weight")) is not None:
        q = g.mul_mat(direct, x)
    else:
        q = g.norm(g.mul_mat(g.of(i, "attn_q_a.weight"), x), g.of(i, "attn_q_a_norm.weight"), i)
        q = g.mul_mat(g.of(i, "attn_q_b.weight"), q)
    q = g.reshape(q, shape.k_head_mla, heads, tokens)
    joint = g.mul_mat(g.of(i, "attn_kv_a_mqa.weight"), x)
    row = 4 * (latent + rope)
    compressed = g.view(joint, dims(latent, tokens), (row,))
    q_rope = g.view(q, dims(rope, heads, tokens), q.nb[1:3])
    k_rope = g.view(joint, dims(rope, 1, tokens), (row, row))
    q_rope, k_rope = g.rope(q_rope, positions), g.rope(k_rope, positions)
    compressed = g.norm(compressed, g.of(i, "attn_kv_a_norm.weight"), i)
    q_plain = g.view(q, dims(shape.k_head_mla - rope, heads, tokens), q.nb[1:3])
    absorbed = g.mul_mat(g.of(i, "attn_k_b.weight"), g.permute(q_plain, 0, 2, 1, 3))
    queries = g.concat(g.permute(absorbed, 0, 2, 1, 3), q_rope)
    compressed = g.reshape(compressed, latent, 1, tokens)
    return queries, g.concat(compressed, k_rope), compressed


# --- recurrent and hybrid models ------------------------------------------------------------------------------------


def mamba(g: RecurrentBlocks) -> Tensor:
    x = g.embedded()
    states, rows = g.states(), g.output_rows()
    layer_of = g.mamba2 if g.shape.arch == "mamba2" else g.mamba
    for i in range(g.shape.num_layers):
        residual = x
        x = layer_of(i, attention_norm(g, i, x), states)
        x, residual = chosen(g, i, rows, x, residual)
        x = g.add(x, residual)
    return finish(g, x)


def qwen_hybrid(g: RecurrentBlocks) -> Tensor:
    """Qwen3-Next and Qwen3.5: gated delta nets, and gated attention every few layers."""
    shape = g.shape
    x = g.embedded()
    states, inputs = g.states(), g.attention_inputs()
    positions, rows = g.positions(), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        x = g.expand(attention_norm(g, i, x))
        x = g.delta_layer(i, x, states) if shape.recurrent[i] else gated_attention(g, i, x, positions, inputs)
        residual = g.add(x, residual)
        x = g.norm(residual, g.of(i, "post_attention_norm.weight"), i)
        routed = g.maybe(i, "ffn_gate_inp.weight") is not None
        x = mixture(g, i, x, SOFTMAX, True) if routed else g.feed_forward(i, x)
        x = g.add(x, residual)
    return finish(g, x, rows_after=rows)


def gated_attention(g: RecurrentBlocks, i: int, x: Tensor, positions: Tensor, inputs: Inputs) -> Tensor:
    """Attention times a gate that is the second half of each query head."""
    shape, tokens = g.shape, g.batch.tokens
    heads, (head, _, _) = sizes(g, i)
    joint, k, v = g.qkv(i, x, heads, (2 * head, head, head), split=False)
    packed = shape.arch == "qwen3next" and not shape.drafts
    if packed:
        joint = g.reshape(joint, 2 * head, heads[0], tokens)
    steps = (8 * head, 8 * head * heads[0])
    q, gate = (g.view(joint, dims(head, heads[0], tokens), steps) for _ in range(2))
    k, v = g.reshape(k, head, heads[1], tokens), g.reshape(v, head, heads[2], tokens)
    q, k = head_norm(g, i, "q", q), head_norm(g, i, "k", k)
    gate = g.cont(gate, head * heads[0], tokens)
    x = g.attend(i, g.rope(q, positions), g.rope(k, positions), v, inputs)
    x = g.mul(x, g.unary(gate, "sigmoid"))
    return g.mul_mat(g.of(i, "attn_output.weight"), x)


def nemotron_h(g: RecurrentBlocks) -> Tensor:
    """Nemotron-H: each layer is Mamba 2, attention without rope, a feed-forward or experts."""
    shape = g.shape
    x = g.embedded()
    states, inputs, rows = g.states(), g.attention_inputs(), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        x = attention_norm(g, i, x)
        if shape.recurrent[i]:
            x = g.mamba2(i, x, states)
        elif shape.ffn[i] == 0:
            q, k, v = g.qkv(i, x, *sizes(g, i))
            x = output(g, i, g.attend(i, q, k, v, inputs))
        elif g.maybe(i, "ffn_gate_inp.weight") is None:
            x = g.feed_forward(i, x, gated=False, squared=True)
        else:
            x = nemotron_experts(g, i, x)
        x = g.add(x, residual)
    return finish(g, x, rows_after=rows)


def nemotron_experts(g: RecurrentBlocks, i: int, x: Tensor) -> Tensor:
    down, up = g.maybe(i, "ffn_latent_down.weight"), g.maybe(i, "ffn_latent_up.weight")
    inner = x if down is None else g.mul_mat(down, x)
    logits = g.mul_mat(g.of(i, "ffn_gate_inp.weight"), x)
    routed = g.experts(i, inner, gating=SIGMOID, normalize=g.shape.norm_weights, logits=logits, gated=False,
                       squared=True)  # fmt: skip
    routed = routed if up is None else g.mul_mat(up, routed)
    return g.add(routed, g.feed_forward(i, x, gated=False, squared=True, suffix="_shexp"))


def falcon_h1(g: RecurrentBlocks) -> Tensor:
    """Falcon-H1: attention and Mamba 2 beside each other in every layer."""
    shape = g.shape
    x = g.embedded()
    positions, states = g.positions(), g.states()
    inputs, rows = g.attention_inputs(), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        q, k, v = g.qkv(i, attention_norm(g, i, x), *sizes(g, i))
        attended = output(g, i, g.attend(i, g.rope(q, positions), g.rope(k, positions), v, inputs))
        mixed = g.mamba2(i, attention_norm(g, i, residual), states)
        x = g.add(attended, mixed)
        residual = g.add(x, residual)
        x, residual = chosen(g, i, rows, x, residual)
        x = g.add(g.feed_forward(i, ffn_norm(g, i, residual)), residual)
    return finish(g, x)


def lfm2(g: RecurrentBlocks) -> Tensor:
    """LFM2: short convolutions, and attention in some layers."""
    shape = g.shape
    x = g.expand(g.embedded())
    states, inputs = g.states(), windowed_inputs(g)
    positions, rows = g.positions(), g.output_rows()
    for i in range(shape.num_layers):
        residual = x
        x = attention_norm(g, i, x)
        if shape.recurrent[i]:
            x = g.short_conv(i, x, states)
        else:
            q, k, v = g.qkv(i, x, *sizes(g, i))
            q, k = g.rope(head_norm(g, i, "q", q), positions), g.rope(head_norm(g, i, "k", k), positions)
            x = g.attend(i, q, k, v, inputs[shape.windowed[i]], keys_first=shape.has_windows)
            x = g.mul_mat(g.of(i, "attn_output.weight"), x)
        x, residual = chosen(g, i, rows, x, residual)
        x = g.add(residual, x)
        x = g.add(x, g.feed_forward(i, ffn_norm(g, i, x)))
    return finish(g, x)


# --- multi-token prediction -----------------------------------------------------------------------------------------


def predicted(g: RecurrentBlocks) -> Tensor:
    """The file's own block for multi-token prediction: a token's embedding beside the model's last hidden state."""
    shape, (i,), latent = g.shape, g.shape.running, g.shape.arch == "deepseek2"
    tokens, hidden = g.input("I32", g.batch.tokens), g.input("F32", g.shape.hidden_size, g.batch.tokens)
    own = g.maybe(i, "nextn.embed_tokens.weight")
    x = g.get_rows(g.weight("token_embd.weight") if own is None else own, tokens)
    positions, rows, inputs = g.positions(), g.output_rows(), g.attention_inputs(only_k=latent)
    x, hidden = g.norm(x, g.of(i, "nextn.enorm.weight"), i), g.norm(hidden, g.of(i, "nextn.hnorm.weight"), i)
    residual = g.mul_mat(g.of(i, "nextn.eh_proj.weight"), g.concat(x, hidden))
    x = attention_norm(g, i, residual)
    if latent:
        x = g.attend_latent(i, *latent_qkv(g, i, x, positions), inputs, g.of(i, "attn_v_b.weight"))
        x = g.mul_mat(g.of(i, "attn_output.weight"), x)
    elif shape.hybrid:
        x = gated_attention(g, i, x, positions, inputs)
    else:
        q, k, v = g.qkv(i, x, *sizes(g, i))
        q, k = g.rope(head_norm(g, i, "q", q), positions), g.rope(head_norm(g, i, "k", k), positions)
        x = output(g, i, g.attend(i, q, k, v, inputs))
    first = shape.arch == "qwen3next"  # chooses the tokens whose logits are kept before the feed-forward part
    if first:
        x, residual = g.get_rows(x, rows), g.get_rows(residual, rows)
    residual = g.add(x, residual)
    x = g.norm(residual, g.of(i, "ffn_norm.weight" if latent else "post_attention_norm.weight"), i)
    if g.maybe(i, "ffn_gate_inp.weight") is None:
        x = g.feed_forward(i, x)
    else:
        x = mixture(g, i, x, SIGMOID if shape.arch == "glm4moe" else SOFTMAX, shape.hybrid or shape.norm_weights)
    norm = g.maybe(i, "nextn.shared_head_norm.weight")
    x = g.norm(g.add(x, residual), g.weight("output_norm.weight") if norm is None else norm, None)
    x = g.output(x) if first else g.get_rows(g.output(x), rows)
    head = g.maybe(i, "nextn.shared_head_head.weight")
    return g.linear(g.head() if head is None else head, x)


DRAFTERS: Final[dict[str, Builder]] = dict.fromkeys(
    ("deepseek2", "glm4moe", "qwen3next", "qwen35", "qwen35moe"), predicted
)
BUILDERS: Final[dict[str, Builder]] = {
    **dict.fromkeys(("llama", "mistral3", "granite"), partial(standard, factors=True)),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "glm4moe", "starcoder2"), standard),
    "smollm3": lambda g: standard(g, rope_period=4),
    "phi3": lambda g: standard(g, factors=True, scaled_q=True),
    **dict.fromkeys(("olmo2", "minimax-m2"), unsplit),
    **dict.fromkeys(("command-r", "cohere2"), parallel),
    **dict.fromkeys(("gemma2", "gemma3"), gemma),
    **dict.fromkeys(("mamba", "mamba2"), mamba),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), qwen_hybrid),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), nemotron_h),
    "gemma4": gemma4, "gpt-oss": gpt_oss, "deepseek2": deepseek2, "falcon-h1": falcon_h1, "lfm2": lfm2,
}  # fmt: skip
