"""A model's facts, without memory arithmetic.

A ModelSpec defines, layer by layer, what a model caches (`layers`), its weights (`layer_weights`, `other_weights`) and
how it computes (`decoder`). The planner turns the first two into bytes; the engine builds the model from the first and
the last, and takes sizes from its own tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeVar

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass

T = TypeVar("T")


class Sharing(Enum):
    """Division of the units (heads, channels, groups) of a tensor's part by tensor parallelism."""

    SPLIT = "split"  # evenly; the count must be divisible
    KV_HEADS = "kv_heads"  # evenly, or replicated if there are more ranks than heads
    GROUPS = "groups"  # evenly, rounded up: state groups are replicated until every rank has one
    PADDED_HEADS = "padded heads"  # evenly, then padded to the 64 or 128 heads that FlashMLA computes


@dataclass(frozen=True, slots=True)
class Part:
    """`units` groups of `width` elements each, side by side in one tensor (heads, channels, rows)."""

    units: int
    width: int = 1
    sharing: Sharing = Sharing.SPLIT

    @property
    def size(self) -> int:
        return self.units * self.width


# --- what one layer remembers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Keys and values of every token (MHA, GQA, MQA)."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Keys and values of the last `window` tokens."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window: int


@dataclass(frozen=True, slots=True)
class ChunkedAttention:
    """Keys and values of the current chunk of `chunk` tokens (Llama 4)."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    chunk: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One latent vector and one rope key per token, shared by all heads (MLA): replicated on every rank.

    `sparse` marks layers that attend only to tokens picked by an indexer (DeepSeek-V3.2, GLM-5).
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class SparseIndexer:
    """The fp8 index keys of DeepSeek sparse attention: one vector and one fp32 scale per 128 elements.

    pool       tokens per key (GLM-5.3-Flash); above 1, a request also keeps the raw keys and gates of the last tokens
    plain      keys in bfloat16 without scales and gates (Qwen4), and `positions` bytes beside each raw key
    """

    head_dim: int
    pool: int = 1
    plain: bool = False
    positions: int = 0

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its scales, one per 128 elements."""
        return 2 * self.head_dim if self.plain else self.head_dim + -(-self.head_dim // 128) * 4


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """Index keys stored in addition to full attention, no values (MiniMax-M3)."""

    head_dim: int


@dataclass(frozen=True, slots=True)
class WindowLatent:
    """DeepSeek-V4: one vector that is both key and value, for each of the last `window` tokens.

    narrow  wholly in 8 bits where the kernels read that (V4.1 on compute capability 10.x)
    """

    head_dim: int
    qk_rope_head_dim: int
    window: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class CompressedLatent:
    """DeepSeek-V4: one such vector for every `ratio` tokens; `index_head_dim` if an indexer picks among them."""

    head_dim: int
    qk_rope_head_dim: int
    ratio: int
    index_head_dim: int | None


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A state of constant size per sequence: a short convolution's inputs and, except for `short_conv`, a recurrence.

    kind         bounded_kda: KDA whose gate has a lower bound, with kernels of its own
    convolution  parts of channels; `conv_kernel - 1` columns of each are kept
    recurrence   `heads` matrices of shape `head_shape`; `heads` is sharded over the ranks
    ssm_dtype    dtype of the recurrence if the model fixes it; None: the model's dtype
    """

    kind: Literal["mamba1", "mamba2", "gated_delta_net", "kda", "bounded_kda", "short_conv", "lightning"]
    conv_kernel: int
    convolution: tuple[Part, ...]
    heads: int
    head_shape: tuple[int, int]
    ssm_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Keys and values of the encoder's or image's tokens, written once per request."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int


LayerCache = (
    FullAttention
    | SlidingWindow
    | ChunkedAttention
    | LatentAttention
    | SparseIndexer
    | KeyIndex
    | WindowLatent
    | CompressedLatent
    | RecurrentState
    | CrossAttention
)

# --- what one layer weighs --------------------------------------------------------------------------------------

Group = Literal[
    "embedding", "attention", "mlp", "experts", "shared_expert", "router", "norm", "state", "lm_head", "vision_audio"
]


class Place(Enum):
    """Pipeline stages of a weight outside the layers."""

    FIRST = "first"
    LAST = "last"
    FIRST_AND_LAST = "first and last"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor, or several fused ones, as loaded by a server: `[sum of parts, inputs]`, plus a bias per output.

    name         role within its layer, or the full name of a weight outside the layers
    sources      the checkpoint's names of the fused tensors, which determine the quantization
    inputs       columns; 1 for a vector
    split        "outputs": the parts are sharded over the ranks; "inputs": the columns are; "none": replicated
    bias         one element per output (sharded like the outputs)
    experts      copies, one per expert; 0 for a dense weight
    quantizable  a linear layer that can be quantized
    dtype        fixed by the model; None: the model's dtype
    narrow_on    in float32 on GPUs of other major compute capabilities than these; none: never
    pad_rows     outputs are padded to a multiple of this in memory (vocabularies: 64)
    align_rows   a rank's outputs are padded to a multiple of this in memory (a fused projection of Kimi K3: 16)
    heads        outputs of each head of an n-gram table, of which a rank has whole ones
    least        smallest shard of a rank if the weight is sharded: smaller ones are padded (Kimi K3's experts: 256)
    even         sharded only if the rank count divides this number (a tower's heads), else replicated; 0: always
    counted      False: a server has it although the model's parameter count does not include it
    is_loaded    False: the parameter count includes it although a server does not load it
    serves       modalities of a tower's weight ("image", "video", "audio"); none: the language model's
    whole_by_data  a tower's weight replicated on ranks that divide the batch (`--mm-encoder-tp-mode data`)
    shared       a speculative head's weight that is replaced by the target's once both are loaded
    """

    name: str
    group: Group
    inputs: int
    parts: tuple[Part, ...]
    split: Literal["outputs", "inputs", "none"] = "none"
    bias: bool = False
    experts: int = 0
    quantizable: bool = False
    dtype: str | None = None
    narrow_on: tuple[int, ...] = ()
    pad_rows: int = 1
    align_rows: int = 1
    heads: tuple[int, ...] = ()
    least: int = 0
    even: int = 0
    counted: bool = True
    is_loaded: bool = True
    sources: tuple[str, ...] = ()
    place: Place = Place.FIRST
    serves: tuple[str, ...] = ()
    whole_by_data: bool = False
    shared: bool = False

    @property
    def outputs(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def num_params(self) -> int:
        """Number of parameters in this weight, for all experts."""
        per_copy = self.inputs * self.outputs + (self.outputs if self.bias else 0)
        return per_copy * max(1, self.experts) if self.counted else 0


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary table of a server: `positions x dim` elements of the model's dtype.

    served  it is limited to the served context
    """

    dim: int
    positions: int
    served: bool = False

    def rows(self, context: int) -> int:
        """Positions of the table in a server with this context."""
        return min(self.positions, context) if self.served else self.positions


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage scheme of one quantized linear layer.

    group_size  inputs that share a scale (int4, nvfp4, mxfp4, gguf), or None
    block       (outputs, inputs) that share a scale (fp8 blocks), or None
    static      input scales are stored too
    zeros       zero points are stored in addition to the scales (of int8 with static input scales: the inputs'); GPTQ
                always stores them, and here uses them (`sym: false`)
    scale_bytes bytes of one scale of block fp8
    variant     the method's own name for an unusual packing: "gptq_v2", "desc_act"
    inputs      how a layer's inputs are quantized, if compressed-tensors or Quark says so: "float8 token"
    """

    kind: Literal[
        "fp8_tensor",
        "fp8_channel",
        "fp8_block",
        "int8_channel",
        "int8_tensor",
        "int4",
        "int8",
        "awq",
        "gptq",
        "gptq_int8",
        "nvfp4",
        "mxfp4",
        "mxfp8",
        "nf4",
        "nf4_double",
        "bnb_int8",
    ]
    group_size: int | None = None
    block: tuple[int, int] | None = None
    static: bool = False
    zeros: bool = False
    scale_bytes: int = 4
    variant: str = ""
    inputs: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Quantization:
    """Storage schemes of a checkpoint's linear layers, from its `quantization_config`.

    method    the method's name: that of its format, where a config may name one format in several ways
    default   scheme of a quantizable layer that nothing below matches; None: it stays in the model's dtype
    names     exact module names and their scheme, None for "not quantized"
    patterns  globs and `re:` expressions over module names, likewise; the first match wins
    kv_dtype  KV cache dtype that the checkpoint requests; None: none
    kv_by_head  scales of the KV cache are stored for each KV head
    head      scheme of an untied output head that nothing above matches; None: the model's dtype
    problem   why kvplan cannot size it: weights then need headers or a given size; empty: it can
    unread    of a format that is not read: what of it ("3-bit")
    mixed     ModelOpt's MIXED_PRECISION: every quantized layer is listed with its algorithm
    named     the config states the method (`quant_method`)
    stated    the method as the config states it; empty: as `method`
    whole_names  names of modules outside the layers do not include the modules inside them
    """

    method: str
    default: Scheme | None
    names: dict[str, Scheme | None] = field(default_factory=dict)
    patterns: tuple[tuple[str, Scheme | None], ...] = ()
    kv_dtype: str | None = None
    problem: str = ""
    mixed: bool = False
    named: bool = True
    kv_by_head: bool = False
    head: Scheme | None = None
    unread: str = ""
    stated: str = ""
    whole_names: bool = False

    @property
    def known(self) -> bool:
        return not self.problem


# --- how a decoder computes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones unchanged, a smooth transition between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies blended between `beta_slow` and `beta_fast` turns.

    attention_factor  factor on cos and sin
    truncate          the blend's ends are rounded outwards to whole dimensions
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each pair's frequency divided by a factor of its own, from one of two lists.

    short, long  by whether the longest request is beyond original_positions, as vLLM chooses, so that one cache has one
    short_scale, long_scale  factor on cos and sin
    """

    original_positions: int
    short: tuple[float, ...]
    long: tuple[float, ...]
    short_scale: float
    long_scale: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling by length: a base for the longest request, if it is beyond original_positions, so that one cache has
    one."""

    factor: float
    original_positions: int


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | DynamicScaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions of the first `dim` elements of a head.

    interleaved  pairs are (0, 1), (2, 3), ... as in DeepSeek; otherwise (0, dim/2), (1, dim/2 + 1), ...
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Softmax attention over K and V heads; head counts, width and window are in the layer's cache and the model.

    scale    factor on q.k
    qk_norm  q and k are normalized before rotation: per head, over all heads at once (OLMo 2), the same where a rank
             has its own heads' weights alone (split), or per head around the mean with weights of its own (Cohere)
    softcap  scores are softcapped: softcap * tanh(score / softcap)
    sinks    one learned logit per head is part of the softmax, without a value
    gated    each head's output is multiplied by the sigmoid of a gate projected together with its query
    joined   a checkpoint has q, k and v in one tensor, qkv_proj (Phi 3)
    names    its names for the output projection and the norms of q and k
    """

    scale: float
    rotary: Rotary | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["", "head", "full", "split", "around_mean"] = ""
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False
    joined: bool = False
    names: tuple[str, str, str] = ("o_proj", "q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Multi-head latent attention (DeepSeek): q through a latent of q_lora_rank (None: directly), k and v always."""

    scale: float
    rotary: Rotary
    q_lora_rank: int | None
    qk_nope_head_dim: int
    v_head_dim: int
    bias: bool = False  # for q_a_proj, kv_a_proj_with_mqa and o_proj


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Linear attention with a gated delta rule (Qwen3-Next): a short convolution, then a matrix per value head as
    state.

    Each of k_heads serves v_heads / k_heads consecutive value heads; queries are as wide as keys.

    by_key_head  a checkpoint has one input projection, the outputs of a key head side by side (Qwen3-Next); otherwise
                 queries, keys and values in one, and their gates in three others (Qwen3.5)
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    by_key_head: bool = True

    @property
    def channels(self) -> int:
        """Convolution channels: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A state space (Mamba 2): a short convolution, then a matrix per head as state, decayed alike in all elements.

    Each of groups serves heads / groups consecutive heads with what a state is written and read with, `state` wide.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Convolution channels: the heads' inputs, then what the groups write and read."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class ShortConv:
    """LFM2: between two gates of a projection a short convolution, whose last inputs are the state."""

    channels: int
    kernel: int
    bias: bool = False


SmoothActivation = Literal["silu", "gelu_tanh", "gelu"]
Activation = Literal[SmoothActivation, "clamped_swiglu"]
PlainActivation = Literal[SmoothActivation, "relu", "relu2"]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)).

    joined  a checkpoint's name for gate and up in one tensor (Granite 4, Phi 3); empty: they are two
    gate, up, down  its names for the others
    """

    inner: int
    activation: Activation
    bias: bool = False
    joined: str = ""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up(x))), with a checkpoint's names for the two; relu2 is the square of relu."""

    inner: int
    bias: bool = False
    activation: PlainActivation = "relu2"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class PlainMoe:
    """`top_k` of `num_experts` MLPs without a gate per token, and a shared one; scores as `sigmoid` with a correction.

    latent  the experts' inputs and outputs are projected to and from so many elements; None: they are not
    """

    num_experts: int
    top_k: int
    inner: int
    shared_inner: int
    latent: int | None
    renormalize: bool
    scale: float
    groups: int
    top_groups: int


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """`top_k` of `num_experts` gated MLPs per token, and shared ones for all.

    scoring      function of the router's logits, over all experts; sparsemixer: of those near the best (Phi 3.5 MoE)
    jitter       how near, of sparsemixer
    renormalize  the chosen scores are divided by their sum (for softmax the same as a softmax over the chosen)
    scale        final factor on the chosen scores
    groups       experts are chosen from the `top_groups` best of `groups` groups; a group's score is its best
    expert's, or the sum of its two best if there is a correction
    correction   a learned bias is added to the scores for choosing, not for weighting (`e_score_correction_bias`)
    swiglu_limit, swiglu_alpha  of `clamped_swiglu` (gpt-oss)
    shared_inner total width of the shared experts; 0 for none
    shared_gate  their output is multiplied by the sigmoid of a gate, one per token (Qwen's one shared expert)
    wide_router  the router is kept in float32
    names        a checkpoint's names for the router and the experts' matrices
    """

    num_experts: int
    top_k: int
    inner: int
    activation: Activation
    scoring: Literal["softmax", "sigmoid", "sparsemixer"]
    renormalize: bool
    names: Literal["mixtral", "minimax", "qwen", "gpt_oss", "granite"]
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction: bool = False
    router_bias: bool = False
    bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    shared_inner: int = 0
    shared_gate: bool = False
    wide_router: bool = False
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """None: the layer has no such part (Nemotron-H's have one of them)."""

    attention: HeadAttention | LatentHeads | DeltaNet | Mamba2 | ShortConv | None
    mlp: GatedMlp | MoeMlp | PlainMlp | PlainMoe | None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A checkpoint's names for the parts of a model and of its layers; empty: there is no such norm, or no name."""

    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn"
    state: str = "linear_attn"
    mlp: str = "mlp"
    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str = ""
    after_mlp: str = ""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Computation of a decoder-only transformer, beyond its sizes.

    norm             kind of the norms but those of q and k
    parallel         attention and MLP read the same norm, and both are added to the stream (Cohere)
    unit_offset      RMSNorm multiplies by 1 + weight (Gemma)
    embedding_scale  factor on embeddings; rounded to the model's dtype first
    residual_scale   factor on what attention and MLP add to the stream (Granite)
    logit_divisor    logits are divided by it (Granite)
    logit_softcap    logits are softcapped: softcap * tanh(logit / softcap)
    head_bias        the head has a bias
    learned          rows of a table of learned positions that is added to the embeddings, of which the first two are
                     not used (OPT); 0: there is none
    """

    layers: tuple[DecoderLayer, ...]
    norm_eps: float
    norm: Literal["rms", "layer", "layer_without_bias"] = "rms"
    parallel: bool = False
    unit_offset: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    learned: int = 0
    names: TensorNames = TensorNames()


TEXT_ONLY = " (text only)"  # suffix of the name of a model sized without its tower


def _not_read() -> Decoder:
    raise UnsupportedModelError("this model", "was described by its sizes only", "the engine needs its config.json")


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A model's facts. Compared by identity: two readings are two objects.

    layers         one entry per layer: its caches, none, one or several
    layer_weights  one entry per layer, in the order of `layers`
    other_weights  embedding, head, final norm, towers
    max_model_len  the published default context; context_limit: the largest accepted one
    lengths        every length that the config states, by its key: a server may prefer another
    text_only      a tower was left out on request; `name` says so too
    item_tokens    tokens of one multimodal item that must be computed in one step; 0: no such need
    first_layer    number of the first layer in the checkpoint's names: a speculative head's layers follow its target's
    head           the speculative method whose head this is; empty: an independent model
    notes          what the reader derived or found odd, for the user
    read_decoder   reads how it computes; only the engine calls it
    config         the original config.json, so that a run can include it
    processor      processor settings for images, videos and audio from the same folder, by scope
    """

    name: str
    model_type: str
    architecture: str
    dtype: str
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_model_len: int
    context_limit: int
    layers: tuple[tuple[LayerCache, ...], ...]
    layer_weights: tuple[tuple[Weight, ...], ...]
    other_weights: tuple[Weight, ...]
    ropes: tuple[Rope, ...] = ()
    quantization: Quantization | None = None
    tied: bool = False
    experts_per_token: int = 0
    multimodal: bool = False
    text_only: bool = False
    widest_mlp: int = 0
    item_tokens: int = 0
    first_layer: int = 0
    head: str = ""
    notes: tuple[str, ...] = field(default=())
    source: str = ""
    read_decoder: Callable[[], Decoder] = field(default=_not_read, repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    processor: Mapping[str, Any] = field(default_factory=dict, repr=False)
    lengths: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def decoder(self) -> Decoder:
        """Return how the layers compute. Raise UnsupportedModelError, by name, for what the engine cannot run."""
        return self.read_decoder()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def cache_kinds(self) -> frozenset[type[LayerCache]]:
        return _cache_kinds(self)

    @property
    def is_mla(self) -> bool:
        return LatentAttention in self.cache_kinds

    @property
    def is_sparse_mla(self) -> bool:
        return any(isinstance(cache, LatentAttention) and cache.sparse for cache in _distinct_caches(self))

    @property
    def scheme_kinds(self) -> tuple[str, ...]:
        """Every kind of storage scheme of the checkpoint's linear layers."""
        return _scheme_kinds(self)

    @property
    def is_compressed_mla(self) -> bool:
        """True if each layer caches a window of latents, and compressed entries for older tokens (DeepSeek-V4)."""
        return WindowLatent in self.cache_kinds

    @property
    def is_later_v4(self) -> bool:
        """True if few layers compress, for all after them (DeepSeek-V4.1)."""
        return any(isinstance(cache, WindowLatent) and cache.narrow for cache in _distinct_caches(self))

    @property
    def is_pooled(self) -> bool:
        """True if each of an indexer's keys covers several tokens (GLM-5.3-Flash)."""
        return any(isinstance(cache, SparseIndexer) and cache.pool > 1 for cache in _distinct_caches(self))

    @property
    def is_encoder(self) -> bool:
        """True if no layer caches anything of a token after its step (BERT)."""
        return bool(self.layers) and not any(self.layers)

    @property
    def has_states(self) -> bool:
        return RecurrentState in self.cache_kinds

    @property
    def has_attention(self) -> bool:
        return bool(self.cache_kinds - {RecurrentState})

    @property
    def most_kv_heads(self) -> int:
        """Largest number of KV heads in any layer; 0 for MLA, whose cache is replicated on every rank."""
        kinds = (FullAttention, SlidingWindow, ChunkedAttention)
        return max([cache.num_kv_heads for cache in _distinct_caches(self) if isinstance(cache, kinds)], default=0)

    @property
    def served_name(self) -> str:
        """The model's name as requested: what a server loads, whichever part of it was sized."""
        return self.name.removesuffix(TEXT_ONLY)

    def is_part_of(self, target: "ModelSpec") -> bool:
        """True if this is a head contained in the target's own checkpoint."""
        return bool(self.head) and self.config is target.config

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight, once for each place it is used."""
        return _every_weight(self)


def unique(values: Iterable[T]) -> list[T]:
    """Each object once, in order."""
    return list({id(value): value for value in values}.values())


def interned(values: Sequence[T]) -> tuple[T, ...]:
    """The values, equal ones as one object; each object is hashed once."""
    kinds: dict[T, T] = {}
    known = {id(value): kinds.setdefault(value, value) for value in unique(values)}
    return tuple(known[id(value)] for value in values)


@lru_cache(maxsize=256)
def _every_weight(spec: ModelSpec) -> tuple[Weight, ...]:
    return spec.other_weights + tuple(weight for layer in spec.layer_weights for weight in layer)


@lru_cache(maxsize=1024)
def _distinct_caches(spec: ModelSpec) -> frozenset[LayerCache]:
    return frozenset(cache for caches in spec.layers for cache in caches)


@lru_cache(maxsize=1024)
def _cache_kinds(spec: ModelSpec) -> frozenset[type[LayerCache]]:
    return frozenset(type(cache) for cache in _distinct_caches(spec))


@lru_cache(maxsize=1024)
def _scheme_kinds(spec: ModelSpec) -> tuple[str, ...]:
    stored = spec.quantization
    if stored is None:
        return ()
    schemes = {stored.default, *stored.names.values(), *(scheme for _, scheme in stored.patterns)}
    return tuple(sorted(scheme.kind for scheme in schemes if scheme is not None))
