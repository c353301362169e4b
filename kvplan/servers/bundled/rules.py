"""What the bundled engine does with the memory it is given, in formulas: the prediction that `reconcile` tests.

Weights and KV come from the model's facts by the planner's own arithmetic; the engine sizes and asks its tensors. The
activation peak follows what one layer holds at once, read off engine/layers.py; the sampler's share is a constant that
was counted.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import FullAttention, LatentAttention, LayerCache, ModelSpec, SlidingWindow, Weight
from kvplan.sizing import layout, weights

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROTARY_BYTES = 4  # tables of cos and sin are float32
ROW_SCALE_BYTES = 4  # float32, for each row of a matrix that has one scale for each of its tensors
INDEX_BYTES = 8  # token ids, positions and slots are int64
# The profile run samples with top_p, penalties and log-probabilities in every row. Beside the logits there are then,
# for each row and token of the vocabulary, a float32 copy and 5 bytes of what the row has seen; and of as many rows as
# make PART_ELEMENTS tokens at most, what torch sorts at once (27 bytes; Triton's kernels sort nothing, and 17 bytes are
# what penalties take), counted on the engine's own sampler (8 to 256 rows, vocabularies of 32,000 to 151,936, torch
# 2.13, CPU): a constant, not a derivation. Where sampling sets the peak, agreement with that engine proves nothing.
LOGIT_BYTES = 4
SEEN_BYTES = 5
PART_BYTES = {"torch": 27, "triton": 17}
PART_ELEMENTS = 1 << 22
WIDE_ELEMENTS = 1 << 20  # of a quantized matrix that a CPU has in float32 at once
WIDE_ELEMENTS_ON_GPU = 1 << 24
INT_BYTES = 4
ADAPTED_AT_ONCE = 256  # tokens, by plain torch
FEW_TOKENS = 512  # up to which tiles of tokens with one adapter have 16 places; else 64
WIDENED_TOKENS = {"float32": 96, "bfloat16": 2048, "float16": 2048}  # of a step, from which a GPU widens fp8 in blocks


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """What a run of the bundled engine was given, everything resolved.

    total       bytes of the device, or the memory limit it was told to keep to
    num_blocks  as given; None: what gpu_memory_utilization leaves
    max_blocks  most blocks the engine makes where it has memory to spare (a CPU); None: no limit
    backend     whose temporaries count
    batches_in_flight  2 where a step is scheduled while the one before runs: windows hold both steps' tokens
    max_loras   slots for adapters, of max_lora_rank each
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
    """What guessing adds to a run.

    num_drafts  guessed at a time: a sequence may have so many tokens more whose logits are wanted
    draft       the model that guesses, with a part of every block; None: the text is guessed from
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
    """The memory of a run before it happens.

    non_torch               bytes on the device that are not torch's when the pool is sized, CUDA's context among them:
                            taken off the budget as given
    activation_coefficient  of a calibration: by what the formula's peak is multiplied
    """
    models = [spec] if speculation.draft is None else [spec, speculation.draft]
    loaded = sum(loaded_bytes(model, inputs) for model in models)
    buffers = sum(buffer_bytes(model, inputs) for model in models)
    block_bytes = sum(pool_block_bytes(model, inputs) for model in models)
    slots = lora_bytes(spec, inputs) if inputs.max_loras else 0
    peak = activations(spec, inputs, 1 + speculation.num_drafts)
    if speculation.draft is not None:  # in turns; nothing of it is sampled
        peak = max(peak, forward_bytes(speculation.draft, inputs, 1))
    peak = round(peak * activation_coefficient)
    num_blocks = inputs.num_blocks
    if num_blocks is None:
        budget = int(inputs.total * inputs.gpu_memory_utilization)
        num_blocks = max(0, budget - loaded - buffers - slots - peak - non_torch) // block_bytes
        num_blocks = min(num_blocks, inputs.max_blocks or num_blocks)
    return Prediction(
        weights=loaded,
        buffers=buffers,
        activations=peak,
        kv_cache=num_blocks * block_bytes,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        bytes_per_token=sum(
            layout.bytes_per_token(model, inputs.kv_cache_dtype, inputs.tensor_parallel_size) for model in models
        ),
        lora=slots,
    )


def taken_apart(spec: ModelSpec, inputs: EngineInputs) -> tuple[int, int]:
    """Of latent attention's quantized kv_b_proj: bytes that are not kept, and those of what is made of it.

    Its parts are multiplied by in two orders, so it is widened once, to the model's dtype.
    """
    form = weights.Layout(tp=inputs.tensor_parallel_size, dtype=inputs.dtype, as_stored=True)
    dropped = made = 0
    for layer, layer_weights in enumerate(spec.layer_weights):
        for weight in layer_weights:
            if is_taken_apart(weight) and weights.scheme_for(spec, weight, layer, None) is not None:
                columns, rows = weights.local_shape(weight, form.tp)
                dropped += weights.weight_bytes(spec, weight, layer, form)
                made += DTYPE_BYTES[inputs.dtype] * columns * sum(rows)
    return dropped, made


def is_taken_apart(weight: Weight) -> bool:
    return weight.name.endswith("kv_b_proj")


def loaded_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Weights: the engine runs the text part alone, and the scale of its KV cache is a number, no tensor of every
    layer."""
    of_rank = weights.Layout(tp=inputs.tensor_parallel_size, dtype=inputs.dtype, as_stored=True)
    groups = weights.rank_weights(spec, of_rank)
    kv_scales = sum(weights.kv_scale_bytes(caches, spec.quantization) for caches in spec.layers)
    return sum(groups.values()) - groups["vision_audio"] - kv_scales - taken_apart(spec, inputs)[0]


def buffer_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Rotary tables, scales that are spread over rows, and what is widened once."""
    tables = sum(ROTARY_BYTES * rope.dim * inputs.max_model_len for rope in spec.ropes)
    return tables + row_scale_bytes(spec, inputs.tensor_parallel_size) + taken_apart(spec, inputs)[1]


def row_scale_bytes(spec: ModelSpec, tp: int) -> int:
    """The engine spreads the scales of fp8 per tensor over the rows, once: its product takes one for each."""
    num_rows = 0
    for layer, layer_weights in enumerate(spec.layer_weights):
        for weight in layer_weights:
            scheme = weights.scheme_for(spec, weight, layer, None)
            if scheme is not None and scheme.kind == "fp8_tensor" and not (weight.experts or is_taken_apart(weight)):
                num_rows += sum(weights.local_shape(weight, tp)[1])
    return ROW_SCALE_BYTES * num_rows


# --- the pool ---------------------------------------------------------------------------------------------------------


def kind_of(caches: tuple[LayerCache, ...]) -> tuple[str, int]:
    """Layers of the same kind share block tables: (kind, window)."""
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


def group_sizes(spec: ModelSpec) -> list[int]:
    """Layers per group: kinds cut into groups of the smallest kind's size (the largest's if less than half more)."""
    counts: dict[tuple[str, int], int] = {}
    for caches in spec.layers:
        counts[kind_of(caches)] = counts.get(kind_of(caches), 0) + 1
    low, high = min(counts.values()), max(counts.values())
    size = high if high < 1.5 * low else low
    sizes: list[int] = []
    for count in counts.values():
        groups = -(-count // size)
        sizes += [len(range(i, count, groups)) for i in range(groups)]
    return sizes


def pool_block_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """One block: block_size tokens of as many layers as the largest group has."""
    per_layer = layout.token_bytes(spec.layers[0][0], inputs.kv_cache_dtype, inputs.tensor_parallel_size)
    return inputs.block_size * per_layer * max(group_sizes(spec))


# --- the activation peak ----------------------------------------------------------------------------------------------


def activations(spec: ModelSpec, inputs: EngineInputs, rows_each: int = 1) -> int:
    """Most bytes one step holds: in an MLP, in the experts, in attention, or while sampling, whichever is largest.

    rows_each  tokens of a sequence whose logits are wanted, at most
    """
    rows = num_rows(inputs, rows_each)
    size = DTYPE_BYTES[inputs.dtype]
    part = min(rows, max(1, PART_ELEMENTS // spec.vocab_size))
    # Logits that are squashed are float32 from there on; Triton's kernels sample from others as they are.
    is_wide = inputs.backend == "torch" or spec.decoder.logit_softcap is not None
    logits = rows * (LOGIT_BYTES if is_wide else size)
    sampling = spec.vocab_size * (logits + rows * (LOGIT_BYTES + SEEN_BYTES) + part * PART_BYTES[inputs.backend])
    in_adapters = adapters_bytes(spec, inputs, num_step_tokens(inputs)) if inputs.max_loras else 0
    return max(forward_bytes(spec, inputs, rows_each), max(sampling, in_adapters) + step_input_bytes(spec, inputs))


def num_step_tokens(inputs: EngineInputs) -> int:
    """A step has no more tokens than all its sequences have."""
    return min(inputs.max_num_batched_tokens, inputs.max_num_seqs * inputs.max_model_len)


def num_rows(inputs: EngineInputs, rows_each: int) -> int:
    """Rows of a step's logits."""
    return min(inputs.max_num_seqs * rows_each, num_step_tokens(inputs))


def step_input_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """A step's own tensors, which on a CPU are the host's arrays."""
    if inputs.backend != "triton":
        return 0
    num_groups, tokens = len(group_sizes(spec)), num_step_tokens(inputs)
    width, seqs = -(-inputs.max_model_len // inputs.block_size), num_rows(inputs, 1)
    return INDEX_BYTES * tokens * (2 + num_groups) + 4 * seqs * (1 + width * num_groups)


def forward_bytes(spec: ModelSpec, inputs: EngineInputs, rows_each: int) -> int:
    """Most bytes until a step's logits are there."""
    tp, tokens = inputs.tensor_parallel_size, num_step_tokens(inputs)
    size, hidden = DTYPE_BYTES[inputs.dtype], spec.hidden_size
    widest = max(layer_elements(spec, layer, inputs) for layer in range(spec.num_layers))
    # Beside the layer's own: the residual stream and what the norm made of it.
    in_layer = max(tokens * size * (2 * hidden + widest), latent_attention_bytes(spec, inputs, tokens))
    in_product = max(product_bytes(spec, layer, inputs, tokens) for layer in range(spec.num_layers))
    in_head = num_rows(inputs, rows_each) * (size * hidden + head_bytes(inputs) * padded_vocabulary(spec, tp))
    if inputs.backend == "torch":
        in_layer = max(in_layer, norm_bytes(spec, inputs, tokens))
    return max(in_layer, in_product, in_head) + step_input_bytes(spec, inputs)


def norm_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """While plain torch norms the residual stream, which no rank has less of: what is added, both, and their sum; the
    sum and its norm in float32; and the result, before and after it is multiplied by the weight.

    Where 1 + weight is meant, the product too is in float32. A float32 sum is wide already, and nothing is narrowed.
    """
    size = DTYPE_BYTES[inputs.dtype]
    if size == 4:
        wide, results = 1, 1
    else:
        wide, results = (3, 1) if spec.decoder.unit_offset else (2, 2)
    return tokens * spec.hidden_size * (size * (3 + results) + 4 * wide)


def head_bytes(inputs: EngineInputs) -> int:
    """Per logit, while the head's product becomes what is sampled from: Triton's kernels read the product itself."""
    size = DTYPE_BYTES[inputs.dtype]
    match inputs.backend:
        case "triton":
            return size
        case "torch":
            return size if size == LOGIT_BYTES else size + LOGIT_BYTES
        case _:
            assert_never(inputs.backend)


def product_bytes(spec: ModelSpec, layer: int, inputs: EngineInputs, tokens: int) -> int:
    """While plain torch multiplies by a quantized matrix: both streams, the product, and the weights that are wide.

    On a GPU that is left to torch for fp8 in blocks where so many tokens share the widening.
    """
    on_gpu = inputs.backend == "triton"
    most, size = 0, DTYPE_BYTES[inputs.dtype]
    for weight in spec.layer_weights[layer]:
        scheme = weights.scheme_for(spec, weight, layer, None)
        if (
            scheme is None or is_taken_apart(weight) or (on_gpu and weight.experts)
        ):  # Triton widens experts in registers
            continue
        if on_gpu and (scheme.kind != "fp8_block" or tokens < WIDENED_TOKENS[inputs.dtype]):
            continue
        columns, rows = weights.local_shape(weight, inputs.tensor_parallel_size)
        tallest = max(rows) if scheme.kind == "nvfp4" else sum(rows)  # whose fused parts are widened one by one
        wide = min(columns * tallest, max(columns, WIDE_ELEMENTS_ON_GPU if on_gpu else WIDE_ELEMENTS))
        # In float32, then rounded to 16 bits; beside it 4-bit values are int32, and blocks' scales are gathered.
        # Of e2m1 there are the halves of bytes in 16 bits, and a float16 and a float32 made of them.
        each = (
            8 if scheme.kind in ("fp8_block", "mxfp4", "nvfp4") else 4 + size % 4 + 4 * (scheme.kind in ("awq", "gptq"))
        )
        results = 4 * spec.hidden_size if weight.experts else size * sum(rows)  # experts' sum is float32
        most = max(most, tokens * (size * 2 * spec.hidden_size + results) + each * wide)
    return most


def latent_attention_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """In MLA's attention: per token both streams, what was projected down and up, and the output; beside them a prefill
    of one sequence expands its whole context: cached rows, then keys (parts and whole) or keys, values and the result.

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
                case "triton":  # torch's kernel for keys wider than values sums in float32
                    beside = result * (0 if size == 4 else 4)
                case "torch":  # a mask
                    beside = context * queries
                case _:
                    assert_never(inputs.backend)
            return size * (tokens * per_token + expanded + result) + beside
        case _:
            return 0


def value_dim(spec: ModelSpec, num_heads: int) -> int:
    """Width of one head's values: what o_proj reads, by head."""
    out = next(weight for weight in spec.layer_weights[0] if weight.name.endswith("o_proj"))
    return out.inputs // num_heads


def padded_vocabulary(spec: ModelSpec, tp: int) -> int:
    return -(-spec.vocab_size // (64 * tp)) * 64 * tp


def layer_elements(spec: ModelSpec, layer: int, inputs: EngineInputs) -> int:
    """Elements per token that the widest moment of one layer holds beside the two streams."""
    parts: dict[str, int] = {}
    top_k = spec.experts_per_token
    for weight in spec.layer_weights[layer]:
        _columns, rows = weights.local_shape(weight, inputs.tensor_parallel_size)
        if weight.experts and weight.split == "outputs":
            parts["experts"] = moe_elements(spec, sum(rows) // 2, top_k, inputs)
        elif weight.group in ("mlp", "shared_expert") and weight.split == "outputs" and len(rows) == 2:
            parts[weight.group] = sum(rows) + sum(rows) // 2  # gate and up, and their product
        elif weight.name.endswith("qkv_proj"):
            query, key, _ = rows
            parts["attention"] = sum(rows) + rotation_elements(query, inputs)
            if any(other.name.endswith("q_norm") for other in spec.layer_weights[layer]):
                parts["attention"] += query + key
    shared = parts.pop("shared_expert", 0)
    # Shared experts run when the routed ones' result exists.
    return max([*parts.values(), shared + spec.hidden_size if shared else 0, 0])


def rotation_elements(query: int, inputs: EngineInputs) -> int:
    """While queries are turned, per token: nothing in Triton (in place), where the result of attention then counts.

    Plain torch turns them in float32: both halves, their concatenation and, with 16-bit types, the wide copy before
    and the narrow one after.
    """
    match inputs.backend:
        case "triton":
            return query
        case "torch":
            return 2 * query if inputs.dtype == "float32" else 7 * query
        case _:
            assert_never(inputs.backend)


def moe_elements(spec: ModelSpec, inner: int, top_k: int, inputs: EngineInputs) -> int:
    """Per token: its rows at all chosen experts ([gate, up], their product, and the output), and their sum."""
    hidden, size = spec.hidden_size, DTYPE_BYTES[inputs.dtype]
    match inputs.backend:
        case "triton":
            return top_k * (3 * inner + hidden) + hidden
        case "torch":  # one expert at a time; the float32 sum of all
            return hidden * 4 // size
        case _:
            assert_never(inputs.backend)


# --- adapters ---------------------------------------------------------------------------------------------------------
# Slots as vLLM's, but for experts, embedding and head, which have none here, and for what latent attention absorbs.


def lora_bytes(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Bytes of one rank."""
    layers = [[weight for weight in layer if is_adapted(weight)] for layer in spec.layer_weights]
    elements = sum(slot_elements(weight, inputs) for layer in layers for weight in layer)
    starts = sum(len(weight.parts) + 1 for layer in layers for weight in layer)
    slots = inputs.max_loras * elements * DTYPE_BYTES[inputs.dtype]
    return slots + INT_BYTES * (starts + inputs.max_loras) + tile_bytes(inputs)


def is_adapted(weight: Weight) -> bool:
    """Whether it is a linear layer that is run as one."""
    return weight.inputs > 1 and weight.group != "norm" and not weight.experts and not is_taken_apart(weight)


def slot_elements(weight: Weight, inputs: EngineInputs) -> int:
    """A [rank, inputs] for each layer that is fused in it, and B [outputs, rank].

    Fully sharded: a share of A's rows where the outputs are split, and of B's where the inputs are.
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
        raise UsageError("--fully-sharded-loras", f"{ranks} ranks cannot share {value} evenly", "leave it out")
    return value // ranks


def adapters_bytes(spec: ModelSpec, inputs: EngineInputs, tokens: int) -> int:
    """Most that a step holds while adapters add to a product, every token having one: both streams, the product, what
    it is of, and A's results in float32; in plain torch also the tokens that are added to at once, and wide matrices.
    """
    size, peak = DTYPE_BYTES[inputs.dtype], 0
    for layer in spec.layer_weights:
        attention = 0
        for weight in filter(is_adapted, layer):
            columns, rows = weights.local_shape(weight, inputs.tensor_parallel_size)
            if weight.name.endswith("qkv_proj"):
                attention = sum(rows) + (rows[0] if inputs.backend == "torch" else 0)  # queries are turned beside
            width = 2 * spec.hidden_size + sum(rows) + (columns if weight.split == "inputs" else 0)
            width += attention if weight.name.endswith("o_proj") else 0
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
    """Tiles of tokens, each of one adapter: places for their numbers, and the adapter of each."""
    largest = inputs.max_num_batched_tokens
    tiles = {few: places(few) for few in {FEW_TOKENS, largest}}
    counts = {few: few // tile + min(inputs.max_loras, few) for few, tile in tiles.items()}
    return INT_BYTES * (max(counts.values()) + max(counts[few] * tiles[few] for few in counts))


def places(num_tokens: int) -> int:
    return 16 if num_tokens <= FEW_TOKENS else 64
