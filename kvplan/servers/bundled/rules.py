"""The bundled engine's memory use in formulas: the prediction that `reconcile` tests.

Weights and KV come from the model's facts by the planner's own arithmetic; the engine takes its sizes from its tensors.
The activation peak follows from the live tensors of one layer, derived from engine/layers.py; the sampler's part is a
measured constant.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.units import MEMORY_PAGE
from kvplan.models.spec import (
    DeltaNet,
    FullAttention,
    HeadAttention,
    LatentAttention,
    LatentHeads,
    LayerCache,
    Mamba2,
    ModelSpec,
    PlainMlp,
    RecurrentState,
    Scheme,
    ShortConv,
    SlidingWindow,
    Weight,
)
from kvplan.sizing import layout, weights

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROTARY_BYTES = 4  # tables of cos and sin are float32
SHAPE_BYTES = 16  # of int4's weight_shape, which a server holds
ROW_SCALE_BYTES = 4  # float32, for each row of a matrix with one scale per tensor
INDEX_BYTES = 8  # token ids, positions and slots are int64
# The profile run samples with top_p, penalties and log-probabilities in every row. Next to the logits there are then,
# for each row and vocabulary entry, a float32 copy and 5 bytes for tokens the row has seen; and, for as many rows as
# make at most PART_ELEMENTS tokens, the temporaries of torch's sort (27 bytes; with Triton's kernels there is no sort,
# and penalties take 17 bytes). Counted on the engine's own sampler (8 to 256 rows, vocabularies of 32,000 to 151,936,
# torch 2.13, CPU): a constant, not a derivation. If sampling sets the peak, agreement with that engine proves nothing.
LOGIT_BYTES = 4
SEEN_BYTES = 5
PART_BYTES = {"torch": 27, "triton": 17}
PART_ELEMENTS = 1 << 22
WIDE_ELEMENTS = 1 << 20  # of a quantized matrix that a CPU holds in float32 at once
WIDE_ELEMENTS_ON_GPU = 1 << 24
INT_BYTES = 4
FILE_HEADER_BYTES = 40  # of a chunk in a file: 8 that name the format, and a SHA-256
DELTA_CHUNK = 64  # tokens of a gated delta net whose corrections are solved together
IN_PLACE = ("relu", "relu2")  # activations
ADAPTED_AT_ONCE = 256  # tokens, in plain torch
FEW_TOKENS = 512  # up to this many, tiles of tokens with one adapter have 16 places; beyond, 64
WIDENED_TOKENS = {"float32": 96, "bfloat16": 2048, "float16": 2048}  # tokens from which a GPU dequantizes block fp8


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """Inputs of a run of the bundled engine, all resolved.

    total       bytes of the device, or the memory limit that was set
    num_blocks  as given; None: as many as gpu_memory_utilization leaves room for
    max_blocks  most blocks the engine allocates when memory is plentiful (a CPU); None: no limit
    backend     the backend whose temporaries count
    batches_in_flight  2 if a step is scheduled while the previous one runs: windows hold both steps' tokens
    max_loras   slots for adapters, of max_lora_rank each
    stage       of the pipeline_parallel_size ones; partition: layers of each, if given
    states_in_blocks  recurrent states lie in blocks of the pool, whose tokens make room for one: prefixes are cached
    """

    total: int
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    tensor_parallel_size: int = 1
    num_blocks: int | None = None
    max_blocks: int | None = None
    backend: Literal["torch", "triton"] = "triton"
    batches_in_flight: int = 1
    max_loras: int = 0
    max_lora_rank: int = 16
    fully_sharded_loras: bool = False
    states_in_blocks: bool = False
    pipeline_parallel_size: int = 1
    stage: int = 0
    partition: tuple[int, ...] = ()

    @property
    def has_head(self) -> bool:
        """True on ranks of the last stage, which sample."""
        return self.stage == self.pipeline_parallel_size - 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes per rank by component, and the pool."""

    weights: int
    buffers: int
    activations: int
    kv_cache: int
    num_blocks: int
    block_bytes: int
    bytes_per_token: int
    lora: int = 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """Additions of speculative decoding to a run.

    num_drafts  draft tokens per step: a sequence may need logits for this many more tokens
    draft       the draft model, with its part of every block; None: n-gram drafting from the text
    """

    num_drafts: int = 0
    draft: ModelSpec | None = None


def predict(
    spec: ModelSpec,
    inputs: EngineInputs,
    *,
    non_torch: int = 0,
    activation_coefficient: float = 1.0,
    speculation: Speculation = Speculation(),
) -> Prediction:
    """Predict the memory of a run before it starts.

    non_torch               bytes on the device that torch does not own when the pool is sized, including the CUDA
    context: subtracted from the budget as given
    activation_coefficient  from a calibration: factor on the formula's peak
    """
    models = [spec] if speculation.draft is None else [spec, speculation.draft]
    loaded = sum(loaded_bytes(model, inputs) for model in models)
    buffers = sum(buffer_bytes(model, inputs) for model in models)
    block_bytes = sum(pool_block_bytes(model, inputs) for model in models)
    states = state_slot_bytes(spec, inputs)
    slots = lora_bytes(spec, inputs) if inputs.max_loras else 0
    peak = activations(spec, inputs, 1 + speculation.num_drafts)
    if speculation.draft is not None:  # one after the other; the draft's peak has no sampling
        peak = max(peak, forward_bytes(speculation.draft, inputs, 1))
    peak = round(peak * activation_coefficient)
    num_blocks = inputs.num_blocks
    if num_blocks is None:
        budget = int(inputs.total * inputs.gpu_memory_utilization)
        num_blocks = max(0, budget - loaded - buffers - slots - states - peak - non_torch) // block_bytes
        num_blocks = min(num_blocks, inputs.max_blocks or num_blocks)
    return Prediction(
        weights=loaded,
        buffers=buffers,
        activations=peak,
        kv_cache=num_blocks * block_bytes + states,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        bytes_per_token=sum(token_bytes(model, inputs) for model in models),
        lora=slots,
    )


def token_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """KV cache bytes of a token in the layers of this rank."""
    caches = [cache for layer in layers_of(spec, inputs) for cache in spec.layers[layer]]
    return sum(layout.token_bytes(cache, inputs.kv_cache_dtype, inputs.tensor_parallel_size) for cache in caches)


def taken_apart(spec: ModelSpec, inputs: EngineInputs) -> tuple[int, int]:
    """(bytes that are not kept, bytes of the tensors made from them) for MLA's quantized kv_b_proj.

    Its parts are multiplied in two orders, so it is dequantized once, to the model's dtype.
    """
    form = form_of(inputs)
    dropped = made = 0
    for layer in layers_of(spec, inputs):
        for weight in spec.layer_weights[layer]:
            if is_taken_apart(weight) and weights.scheme_for(spec, weight, layer, None) is not None:
                columns, rows = weights.local_shape(weight, form.tp)
                dropped += weights.weight_bytes(spec, weight, layer, form)
                made += DTYPE_BYTES[inputs.dtype] * columns * sum(rows)
    return dropped, made


def form_of(inputs: EngineInputs) -> weights.Layout:
    """Sharding of the model on this rank."""
    return weights.Layout(
        tp=inputs.tensor_parallel_size, pp=inputs.pipeline_parallel_size, stage=inputs.stage,
        partition=inputs.partition, dtype=inputs.dtype, as_stored=True,
    )  # fmt: skip


def layers_of(spec: ModelSpec, inputs: EngineInputs) -> range:
    """Layers of the inputs' stage."""
    return weights.layers_on(spec, form_of(inputs))


def is_taken_apart(weight: Weight) -> bool:
    return weight.name.endswith("kv_b_proj")


def loaded_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Weights: the engine runs only the text part, and its KV cache scale is a number rather than a tensor per
    layer.
    """
    form = form_of(inputs)
    groups = weights.rank_weights(spec, form)
    stored = spec.quantization
    kv_scales = sum(weights.kv_scale_bytes(spec.layers[i], stored, form, spec.dtype) for i in layers_of(spec, inputs))
    moved = ends_bytes(spec, inputs) if inputs.pipeline_parallel_size > 1 else 0
    shapes = SHAPE_BYTES * sum(scheme.kind == "int4" for _, scheme in quantized_weights(spec, inputs))
    return sum(groups.values()) - groups["vision_audio"] - kv_scales - shapes - taken_apart(spec, inputs)[0] + moved


def ends_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes by which this stage's embedding, final norm and head exceed those of a server's class for the model.

    Some classes have them on every stage. Here the first stage has the embedding, also the last if it is tied; the last
    has the rest.
    """
    form, excess = form_of(inputs), 0
    for weight in spec.other_weights:
        if weight.group != "vision_audio":
            is_embedding = weight.group == "embedding"
            is_last = not is_embedding or (spec.tied and not weight.name.endswith("positions"))
            is_here = (is_embedding and inputs.stage == 0) or (inputs.has_head and is_last)
            excess += (is_here - weights.on_stage(weight.place, form)) * weights.weight_bytes(spec, weight, None, form)
    return excess


def buffer_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes of rotary tables, scales expanded over rows, weights dequantized once, and what goes between stages."""
    tables = sum(ROTARY_BYTES * dim * inputs.max_model_len for dim in rope_dims(spec, inputs))
    return tables + made_bytes(spec, inputs) + taken_apart(spec, inputs)[1] + stream_bytes(spec, inputs)


def rope_dims(spec: ModelSpec, inputs: EngineInputs) -> list[int]:
    """Width of each distinct RoPE table of this stage's layers."""
    mixers = (spec.decoder.layers[layer].attention for layer in layers_of(spec, inputs))
    ropes = {mixer.rotary for mixer in mixers if isinstance(mixer, HeadAttention | LatentHeads)}
    return [rope.dim for rope in ropes if rope is not None]


def stream_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes of the buffers between stages: the two tensors that a layer takes over, for a step of the most tokens,
    where a stage receives them and where it sends them on.
    """
    neighbors = (inputs.stage > 0) + (not inputs.has_head)
    return neighbors * 2 * inputs.max_num_batched_tokens * spec.hidden_size * DTYPE_BYTES[inputs.dtype]


def quantized_weights(spec: ModelSpec, inputs: EngineInputs) -> list[tuple[Weight, Scheme]]:
    """This rank's quantized matrices with their schemes, but for experts and what is dequantized once."""
    pairs = [
        (weight, weights.scheme_for(spec, weight, layer, None))
        for layer in layers_of(spec, inputs)
        for weight in spec.layer_weights[layer]
        if not (weight.experts or is_taken_apart(weight))
    ]
    return [(weight, scheme) for weight, scheme in pairs if scheme is not None]


def made_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes of what kernels take and no checkpoint has: per-tensor fp8 scales, expanded over the rows; of
    compressed-tensors' int4 zero points where it is symmetric, and the order of inputs whose groups are no neighbors.
    """
    total = 0
    for weight, scheme in quantized_weights(spec, inputs):
        columns, rows = weights.local_shape(weight, inputs.tensor_parallel_size)
        if scheme.kind == "fp8_tensor":
            total += ROW_SCALE_BYTES * sum(rows)
        if scheme.kind == "int4":
            groups = -(-columns // (scheme.group_size or columns))
            total += 0 if scheme.zeros else groups * sum(rows) // 2
            total += INT_BYTES * columns if scheme.variant else 0
    return total


# --- the pool ---------------------------------------------------------------------------------------------------------


def is_state(caches: tuple[LayerCache, ...]) -> bool:
    """True if a layer keeps a state per sequence instead of blocks, of a kind that the engine runs."""
    if len(caches) != 1 or not isinstance(caches[0], RecurrentState):
        return False
    return caches[0].kind in ("gated_delta_net", "mamba2", "short_conv")


def paged_layers(spec: ModelSpec) -> list[tuple[LayerCache, ...]]:
    return [caches for caches in spec.layers if not is_state(caches) and (caches or not spec.has_states)]


def state_slot_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes of recurrent state slots, one for each sequence that may run, allocated in addition to the pool."""
    if inputs.states_in_blocks:
        return 0
    states = [cache for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState)]
    of_sequence = sum(layout.state_bytes(state, inputs.dtype, inputs.tensor_parallel_size) for state in states)
    return inputs.max_num_seqs * of_sequence


def kind_of(caches: tuple[LayerCache, ...]) -> tuple[str, int]:
    """(kind, window) of a layer; layers with the same one share block tables."""
    match caches:
        case (FullAttention(),) | (LatentAttention(sparse=False),):
            return "full", 0
        case (SlidingWindow(window=window),):
            return "window", window
        case _:
            kinds = " and ".join(type(cache).__name__ for cache in caches) or "no cache"
            raise UnsupportedModelError(
                "the bundled engine", f"does not run layers with {kinds}", "profile another model"
            )


def group_layers(spec: ModelSpec, *, with_states: bool = False) -> list[tuple[tuple[str, int], list[int]]]:
    """(kind and window, layers) of each group: kinds are split into groups of the smallest kind's size (the largest's
    if less than 1.5x that).
    """
    kinds: dict[tuple[str, int], list[int]] = {}
    for layer, caches in enumerate(spec.layers):
        if not is_state(caches) and (caches or not spec.has_states):
            kinds.setdefault(kind_of(caches), []).append(layer)
    if with_states and spec.has_states:
        kinds["state", 0] = [layer for layer, caches in enumerate(spec.layers) if is_state(caches)]
    counts = [len(layers) for layers in kinds.values()]
    low, high = min(counts), max(counts)
    size = high if high < 1.5 * low else low
    groups: list[tuple[tuple[str, int], list[int]]] = []
    for kind, layers in kinds.items():
        count = -(-len(layers) // size)
        groups += [(kind, layers[i::count]) for i in range(count)]
    return groups


def group_sizes(spec: ModelSpec, stage: range | None = None, *, with_states: bool = False) -> list[int]:
    """Layers per group. The groups are the whole model's; with a stage's layers, only those count."""
    groups = group_layers(spec, with_states=with_states)
    return [sum(stage is None or layer in stage for layer in layers) for _, layers in groups]


def blocks_per_request(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Blocks charged to a request of the full context, over all groups.

    Source: vLLM 0.33 v1/kv_cache_interface.py (max_memory_usage_bytes of each kind, mamba_cache_mode "align").
    """
    groups = group_layers(spec, with_states=inputs.states_in_blocks)
    return sum(_charged(kind, window, inputs) for (kind, window), _ in groups)


def _charged(kind: str, window: int, inputs: EngineInputs) -> int:
    context, in_flight = inputs.max_model_len, inputs.max_num_batched_tokens * inputs.batches_in_flight
    match kind:
        case "full":
            return layout.cdiv(context, inputs.block_size)
        case "window":  # a window may start within a block: one more block
            return layout.cdiv(min(window - 1 + in_flight, context), inputs.block_size) + 1
        case "state":  # the running one, and the one before, which is found in the cache
            return 2
        case _:
            raise AssertionError(f"{kind} is no kind of group")


def pool_block_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes of one block: block_size tokens for as many layers as the largest group has."""
    per_layer = layout.token_bytes(paged_layers(spec)[0][0], inputs.kv_cache_dtype, inputs.tensor_parallel_size)
    sizes = group_sizes(spec, layers_of(spec, inputs), with_states=inputs.states_in_blocks)
    return inputs.block_size * per_layer * max(sizes)


def chunk_bytes(block_bytes: int) -> int:
    """Bytes of a block in host memory: whole pages."""
    return layout.cdiv(block_bytes, MEMORY_PAGE) * MEMORY_PAGE


def file_bytes(block_bytes: int) -> int:
    """Bytes of a block in a file."""
    return chunk_bytes(block_bytes) + FILE_HEADER_BYTES


# --- the activation peak ----------------------------------------------------------------------------------------------


def activations(spec: ModelSpec, inputs: EngineInputs, rows_each: int = 1) -> int:
    """Peak bytes of one step: in an MLP, in the experts, in attention, or while sampling, whichever is largest.

    rows_each  most tokens of a sequence that need logits
    """
    rows = num_rows(inputs, rows_each) if inputs.has_head else 0
    size = DTYPE_BYTES[inputs.dtype]
    part = min(rows, max(1, PART_ELEMENTS // spec.vocab_size))
    # Softcapped logits are float32 from there on; Triton's kernels sample others as they are.
    is_wide = inputs.backend == "torch" or spec.decoder.logit_softcap is not None
    logits = rows * (LOGIT_BYTES if is_wide else size)
    sampling = spec.vocab_size * (logits + rows * (LOGIT_BYTES + SEEN_BYTES) + part * PART_BYTES[inputs.backend])
    in_adapters = adapters_bytes(spec, inputs, num_step_tokens(inputs)) if inputs.max_loras else 0
    return max(forward_bytes(spec, inputs, rows_each), max(sampling, in_adapters) + step_input_bytes(spec, inputs))


def num_step_tokens(inputs: EngineInputs) -> int:
    """Tokens of a step, at most those that all its sequences have."""
    return min(inputs.max_num_batched_tokens, inputs.max_num_seqs * inputs.max_model_len)


def num_rows(inputs: EngineInputs, rows_each: int) -> int:
    """Rows of logits in a step."""
    return min(inputs.max_num_seqs * rows_each, num_step_tokens(inputs))


def step_input_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes of a step's input tensors, which on a CPU are the host's arrays."""
    if inputs.backend != "triton":
        return 0
    num_groups = len(group_sizes(spec, with_states=inputs.states_in_blocks))
    tokens = num_step_tokens(inputs)
    width, seqs = -(-inputs.max_model_len // inputs.block_size), num_rows(inputs, 1)
    return INDEX_BYTES * tokens * (2 + num_groups) + 4 * seqs * (1 + width * num_groups)


def forward_bytes(spec: ModelSpec, inputs: EngineInputs, rows_each: int) -> int:
    """Peak bytes until a step's logits are computed."""
    tp, tokens = inputs.tensor_parallel_size, num_step_tokens(inputs)
    size, hidden = DTYPE_BYTES[inputs.dtype], spec.hidden_size
    layers = layers_of(spec, inputs)
    widest = max(layer_elements(spec, layer, inputs) for layer in layers)
    # In addition to the layer's own: the residual stream, its normalized copy, and what runs beside an MLP.
    streams = 1 + bool(spec.decoder.names.before_attention) + spec.decoder.parallel
    in_layer = max(tokens * size * (streams * hidden + widest), latent_attention_bytes(spec, inputs, tokens))
    if spec.has_states:
        in_layer = max(in_layer, delta_net_bytes(spec, inputs, tokens), mamba2_bytes(spec, inputs, tokens))
        in_layer = max(in_layer, short_conv_bytes(spec, inputs, tokens))
    in_product = max(product_bytes(spec, layer, inputs, tokens) for layer in layers)
    rows = num_rows(inputs, rows_each) if inputs.has_head else 0
    in_head = rows * (size * hidden + head_bytes(inputs) * padded_vocabulary(spec, tp))
    if inputs.backend == "torch":
        in_layer = max(in_layer, norm_bytes(spec, inputs, tokens))
    return max(in_layer, in_product, in_head) + step_input_bytes(spec, inputs)


def norm_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """Bytes while plain torch normalizes the residual stream, which every rank holds in full: both addends and
    their sum; the sum and its norm in float32; and the result, before and after the multiplication by the
    weight.

    If the factor is 1 + weight, the product is in float32 too. A float32 sum needs no upcast or downcast.
    """
    size = DTYPE_BYTES[inputs.dtype]
    if size == 4:
        wide, results = 1, 1
    else:
        wide, results = (3, 1) if spec.decoder.unit_offset else (2, 2)
    return tokens * spec.hidden_size * (size * (3 + results) + 4 * wide)


def head_bytes(inputs: EngineInputs) -> int:
    """Bytes per logit from the head's matmul to sampling: Triton's kernels read the matmul's result directly."""
    size = DTYPE_BYTES[inputs.dtype]
    match inputs.backend:
        case "triton":
            return size
        case "torch":
            return size if size == LOGIT_BYTES else size + LOGIT_BYTES
        case _:
            assert_never(inputs.backend)


def product_bytes(spec: ModelSpec, layer: int, inputs: EngineInputs, tokens: int) -> int:
    """Bytes while plain torch multiplies by a quantized matrix: both streams, the product, and the dequantized weights.

    On a GPU torch does this for block fp8 if enough tokens share the dequantization.
    """
    on_gpu = inputs.backend == "triton"
    limit, size = 0, DTYPE_BYTES[inputs.dtype]
    for weight in spec.layer_weights[layer]:
        scheme = weights.scheme_for(spec, weight, layer, None)
        if (
            scheme is None or is_taken_apart(weight) or (on_gpu and weight.experts)
        ):  # Triton dequantizes experts in registers
            continue
        if on_gpu and (scheme.kind != "fp8_block" or tokens < WIDENED_TOKENS[inputs.dtype]):
            continue
        columns, rows = weights.local_shape(weight, inputs.tensor_parallel_size)
        tallest = max(rows) if scheme.kind == "nvfp4" else sum(rows)  # whose fused parts are dequantized one by one
        wide = min(columns * tallest, max(columns, WIDE_ELEMENTS_ON_GPU if on_gpu else WIDE_ELEMENTS))
        # In float32, then rounded to 16 bits; in addition 4-bit values are int32, and block scales are gathered.
        # For e2m1 there are the nibbles in 16 bits, and a float16 and a float32 copy.
        item = (
            8
            if scheme.kind in ("fp8_block", "mxfp4", "nvfp4")
            else 4 + size % 4 + 4 * (scheme.kind in ("awq", "gptq", "int4"))
        )
        results = 4 * spec.hidden_size if weight.experts else size * sum(rows)  # the experts' sum is float32
        limit = max(limit, tokens * (size * 2 * spec.hidden_size + results) + item * wide)
    return limit


def latent_attention_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """Bytes in MLA's attention: per token both streams, the down and up projections, and the output; in addition a
    prefill of one sequence expands its whole context: cached rows, then keys (parts and whole) or keys, values and
    the result.

    0 for a model that caches keys and values.
    """
    match spec.layers[0][0]:
        case LatentAttention(kv_lora_rank=rank, qk_rope_head_dim=rope):
            size, tp = DTYPE_BYTES[inputs.dtype], inputs.tensor_parallel_size
            named = {weight.name.rpartition(".")[2]: weight for weight in spec.layer_weights[0]}
            heads = named["kv_b_proj"].parts[0].units // tp
            _, (keys_and_values,) = weights.local_shape(named["kv_b_proj"], tp)
            value = value_dim(spec, heads * tp)
            nope = keys_and_values // heads - value
            queries, context = min(tokens, inputs.max_model_len), inputs.max_model_len
            down, latent_queries = rank + rope, 0
            if "q_b_proj" in named:
                latent_queries = named["q_b_proj"].inputs
            per_token = 2 * spec.hidden_size + down + rank + 2 * latent_queries + heads * (2 * (nope + rope) + value)
            expanded = context * (rank + rope + heads * (nope + rope + max(nope, value)))
            result = queries * heads * value
            match inputs.backend:
                case "triton":  # torch's kernel for keys wider than values accumulates in float32
                    beside = result * (0 if size == 4 else 4)
                case "torch":  # a mask
                    beside = context * queries
                case _:
                    assert_never(inputs.backend)
            return size * (tokens * per_token + expanded + result) + beside
        case _:
            return 0


def delta_net_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """Bytes in a gated delta net, in plain torch (there is no kernel): while its inputs are concatenated, or while the
    longest prefill runs, whose convolution window, queries, keys and results are live next to those of all tokens.

    A chunk's own matrices, the same size for any step, are CHUNK_TILES tiles of its tokens, keys and values.
    """
    size = DTYPE_BYTES[inputs.dtype]
    wide = 4 if size < 4 else 0  # float32 copies unless already float32
    longest = min(inputs.max_model_len, tokens - min(inputs.max_num_seqs, tokens) + 1)
    peak = 0
    for layer in spec.decoder.layers:
        net = layer.attention
        if not isinstance(net, DeltaNet):
            continue
        values, repeated = net.v_heads * net.v_dim, net.v_heads * net.k_dim
        projected = 2 * spec.hidden_size + 3 * net.channels + values + 2 * net.v_heads
        of_all = tokens * (size * (2 * spec.hidden_size + net.channels + values) + 4 * (values + 2 * net.v_heads))
        of_one = longest * (net.channels * (2 * size + wide) + 4 * (2 * repeated + 2 * values))
        chunk = min(longest, DELTA_CHUNK)
        of_chunk = (
            4 * net.v_heads * (4 * chunk * chunk + chunk * (4 * net.k_dim + 5 * net.v_dim) + 2 * net.k_dim * net.v_dim)
        )
        peak = max(peak, tokens * size * projected, of_all + of_one + of_chunk)
    return peak


def mamba2_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """Bytes in Mamba 2, in plain torch: while the longest prefill runs, whose convolution window and what its heads are
    written with and read with are live next to the projection and the results of all tokens; or in the gated norm.
    """
    size = DTYPE_BYTES[inputs.dtype]
    wide = 4 if size < 4 else 0
    longest = min(inputs.max_model_len, tokens - min(inputs.max_num_seqs, tokens) + 1)
    peak = 0
    for layer in spec.decoder.layers:
        net = layer.attention
        if not isinstance(net, Mamba2):
            continue
        rows = net.inner + net.channels + net.heads
        of_all = tokens * (size * (2 * spec.hidden_size + rows) + 4 * (net.inner + 2 * net.heads))
        of_one = longest * (net.channels * (2 * size + wide) + 4 * (2 * net.heads * net.state + 3 * net.inner))
        chunk = min(longest, DELTA_CHUNK)
        of_chunk = 4 * net.heads * (3 * chunk * chunk + 2 * chunk * net.state + 2 * net.head_dim * net.state)
        copies = size + 4 if wide else 0  # of the result, in the model's dtype and then in float32
        in_norm = tokens * (size * (2 * spec.hidden_size + rows) + (3 * 4 + copies) * net.inner)
        peak = max(peak, of_all + of_one + of_chunk, in_norm)
    return peak


def short_conv_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """Bytes in LFM2's convolution: both streams, the projection, what is convolved and the results of all tokens, and
    the longest prefill's window and result.
    """
    longest = min(inputs.max_model_len, tokens - min(inputs.max_num_seqs, tokens) + 1)
    widths = [layer.attention.channels for layer in spec.decoder.layers if isinstance(layer.attention, ShortConv)]
    elements = [tokens * (2 * spec.hidden_size + 5 * width) + 2 * longest * width for width in widths]
    return DTYPE_BYTES[inputs.dtype] * max(elements, default=0)


def value_dim(spec: ModelSpec, num_heads: int) -> int:
    """Width of one head's values: o_proj's input per head."""
    out = next(weight for weight in spec.layer_weights[0] if weight.name.endswith("o_proj"))
    return out.inputs // num_heads


def padded_vocabulary(spec: ModelSpec, tp: int) -> int:
    return -(-spec.vocab_size // (64 * tp)) * 64 * tp


def layer_elements(spec: ModelSpec, layer: int, inputs: EngineInputs) -> int:
    """Peak elements per token of one layer in addition to the two streams."""
    parts: dict[str, int] = {}
    top_k = spec.experts_per_token
    for weight in spec.layer_weights[layer]:
        _columns, rows = weights.local_shape(weight, inputs.tensor_parallel_size)
        if weight.experts and weight.split == "outputs":
            parts["experts"] = moe_elements(spec, sum(rows) // 2, top_k, inputs)
        elif weight.group in ("mlp", "shared_expert") and weight.split == "outputs" and len(rows) == 2:
            parts[weight.group] = sum(rows) + sum(rows) // 2  # gate and up, and their product
        elif weight.group == "mlp" and weight.split == "outputs":
            mlp = spec.decoder.layers[layer].mlp
            parts["mlp"] = 2 * sum(rows)
            if isinstance(mlp, PlainMlp) and mlp.activation in IN_PLACE:  # then the second product, and it with a bias
                parts["mlp"] = sum(rows) + spec.hidden_size * (1 + mlp.bias)
        elif weight.name.endswith("qkv_proj"):
            query, key, _ = rows
            mixer = spec.decoder.layers[layer].attention
            if isinstance(mixer, HeadAttention) and mixer.gated:  # half of it is the gate
                query //= 2
            parts["attention"] = sum(rows) + rotation_elements(query, inputs)
            if any(other.name.endswith("q_norm") for other in spec.layer_weights[layer]):
                parts["attention"] += query + key
    shared = parts.pop("shared_expert", 0)
    # Shared experts run after the routed ones, whose result is live.
    return max([*parts.values(), shared + spec.hidden_size if shared else 0, 0])


def rotation_elements(query: int, inputs: EngineInputs) -> int:
    """Elements per token while RoPE is applied to queries: none in Triton (in place), where attention's result counts
    then.

    Plain torch applies it in float32: both halves, their concatenation and, for 16-bit types, the upcast copy before
    and the downcast one after.
    """
    match inputs.backend:
        case "triton":
            return query
        case "torch":
            return 2 * query if inputs.dtype == "float32" else 7 * query
        case _:
            assert_never(inputs.backend)


def moe_elements(spec: ModelSpec, inner: int, top_k: int, inputs: EngineInputs) -> int:
    """Elements per token: its rows at all chosen experts ([gate, up], their product, and the output), and their sum."""
    hidden, size = spec.hidden_size, DTYPE_BYTES[inputs.dtype]
    match inputs.backend:
        case "triton":
            return top_k * (3 * inner + hidden) + hidden
        case "torch":  # one expert at a time; the float32 sum of all
            return hidden * 4 // size
        case _:
            assert_never(inputs.backend)


# --- adapters ---------------------------------------------------------------------------------------------------------
# Slots as in vLLM, except that experts, embedding, head and the weights that MLA absorbs have none here.


def lora_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """LoRA bytes of one rank."""
    layers = [[weight for weight in layer if is_adapted(weight)] for layer in spec.layer_weights]
    elements = sum(slot_elements(weight, inputs) for layer in layers for weight in layer)
    starts = sum(len(weight.parts) + 1 for layer in layers for weight in layer)
    slots = inputs.max_loras * elements * DTYPE_BYTES[inputs.dtype]
    return slots + INT_BYTES * (starts + inputs.max_loras) + tile_bytes(inputs)


def is_adapted(weight: Weight) -> bool:
    """True if it runs as a linear layer."""
    return (
        weight.inputs > 1
        and weight.dtype is None
        and weight.group != "norm"
        and not weight.experts
        and not is_taken_apart(weight)
    )


def slot_elements(weight: Weight, inputs: EngineInputs) -> int:
    """Elements of A [rank, inputs] for each fused layer, and of B [outputs, rank].

    Fully sharded: a shard of A's rows if the outputs are split, and of B's if the inputs are.
    """
    ranks, rank = inputs.tensor_parallel_size, inputs.max_lora_rank
    columns, rows = weights.local_shape(weight, ranks)
    rows_a, rows_b = rank, sum(rows)
    if inputs.fully_sharded_loras and weight.split == "outputs":
        rows_a = shared(rank, ranks)
    if inputs.fully_sharded_loras and weight.split == "inputs":
        rows_b = shared(rows_b, ranks)
    return len(weight.parts) * rows_a * columns + rows_b * rank


def shared(value: int, ranks: int) -> int:
    if value % ranks:
        raise UsageError("--fully-sharded-loras", f"{ranks} ranks cannot share {value} evenly", "remove it")
    return value // ranks


def adapters_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """Peak bytes of a step while adapters are added to a matmul, every token having one: both streams, the product, its
    input, and A's results in float32; in plain torch also the tokens processed at once, and upcast matrices.
    """
    size, peak = DTYPE_BYTES[inputs.dtype], 0
    for layer in spec.layer_weights:
        attention = 0
        for weight in filter(is_adapted, layer):
            columns, rows = weights.local_shape(weight, inputs.tensor_parallel_size)
            if weight.name.endswith("qkv_proj"):
                attention = sum(rows) + (rows[0] if inputs.backend == "torch" else 0)  # RoPE copies of queries
            width = 2 * spec.hidden_size + sum(rows) + (columns if weight.split == "inputs" else 0)
            width += attention if (weight.group, weight.split) == ("attention", "inputs") else 0
            small = 4 * len(weight.parts) * inputs.max_lora_rank
            beside = 0
            if inputs.backend == "torch":
                some, wide = min(tokens, ADAPTED_AT_ONCE), 0 if size == 4 else 4
                shrink = some * max(columns * (size + wide), 4 * columns + small) + wide * columns * small // 4
                expand = max(rows) * (some * (size + wide) + wide * inputs.max_lora_rank)
                beside = max(shrink, expand)
            peak = max(peak, tokens * (size * width + small) + beside)
    return peak


def tile_bytes(inputs: EngineInputs) -> int:
    """Bytes of tiles of tokens, one adapter each: the token indices, and the adapter of each tile."""
    largest = inputs.max_num_batched_tokens
    tiles = {few: places(few) for few in {FEW_TOKENS, largest}}
    counts = {few: few // tile + min(inputs.max_loras, few) for few, tile in tiles.items()}
    return INT_BYTES * (max(counts.values()) + max(counts[few] * tiles[few] for few in counts))


def places(num_tokens: int) -> int:
    return 16 if num_tokens <= FEW_TOKENS else 64
