"""What a model is: facts only, no arithmetic about memory.

A ModelSpec says, layer by layer, what a model remembers of its past (`layers`), which weights it holds
(`layer_weights`, `other_weights`) and how it computes (`decoder`). The planner turns the first two into bytes; the
engine builds the model from the first and the last, and sizes its own tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import Enum
from functools import lru_cache
from typing import Any, Literal

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass


class Sharing(Enum):
    """What tensor parallelism does with the units (heads, channels, groups) of a tensor's part."""

    SPLIT = "split"  # evenly; the count must be divisible
    KV_HEADS = "kv_heads"  # evenly, or replicated when there are more ranks than heads
    GROUPS = "groups"  # evenly, rounded up: state groups are repeated until every rank has one
    PADDED_HEADS = "padded heads"  # evenly, then padded to the 64 or 128 heads that FlashMLA computes


@dataclass(frozen=True, slots=True)
class Part:
    """`units` things of `width` elements each that stand side by side in one tensor (heads, channels, rows)."""

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
    """One latent vector and one rope key per token, shared by all heads (MLA): whole on every rank.

    `sparse` marks layers that attend only to tokens an indexer picked (DeepSeek-V3.2, GLM-5).
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class SparseIndexer:
    """The fp8 index keys of DeepSeek sparse attention: one vector and one fp32 scale per 128 elements.

    pool  tokens that share a key (GLM-5.3-Flash); above 1, a request also keeps the raw keys and gates of the last ones
    """

    head_dim: int
    pool: int = 1


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """Index keys kept beside full attention, no values (MiniMax-M3)."""

    head_dim: int


@dataclass(frozen=True, slots=True)
class WindowLatent:
    """DeepSeek-V4: one vector that is both key and value, of each of the last `window` tokens."""

    head_dim: int
    qk_rope_head_dim: int
    window: int


@dataclass(frozen=True, slots=True)
class CompressedLatent:
    """DeepSeek-V4: one such vector for every `ratio` tokens; `index_head_dim` where an indexer picks among them."""

    head_dim: int
    qk_rope_head_dim: int
    ratio: int
    index_head_dim: int | None


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A state of constant size per sequence: a short convolution's inputs and, but for `short_conv`, a recurrence.

    kind         bounded_kda: KDA whose gate has a lower bound, which has kernels of its own
    convolution  parts of channels; `conv_kernel - 1` columns of each are kept
    recurrence   `heads` matrices of shape `head_shape`; `heads` is split over the ranks
    ssm_dtype    dtype of the recurrence when the model fixes it; None: the model's dtype
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
    """Which pipeline stages hold a weight that belongs to no layer."""

    FIRST = "first"
    LAST = "last"
    FIRST_AND_LAST = "first and last"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor, or several fused ones, as a server holds them: `[sum of parts, inputs]`, plus a bias per output.

    name         role within its layer, or the full name of a weight outside the layers
    sources      the checkpoint's names of what is fused here; quantization is decided by them
    inputs       columns; 1 for a vector
    split        "outputs": the parts are split over the ranks; "inputs": the columns are; "none": whole on each
    bias         one element per output (split as the outputs are)
    experts      copies, one per expert; 0 for a dense weight
    quantizable  a linear layer that quantization may shrink
    dtype        fixed by the model; None: the model's dtype
    wide_below   kept in float32 on GPUs below this compute capability (90 for 9.0); 0: nowhere
    pad_rows     outputs are padded to a multiple of this when held (vocabularies: 64)
    align_rows   a rank's outputs are padded to a multiple of this when held (a fused projection of Kimi K3: 16)
    least        smallest share of a rank where the weight is split: a smaller one is padded (Kimi K3's experts: 256)
    even         split only over ranks that divide this number (a tower's heads), whole on each otherwise; 0: always
    counted      False: a server holds it although the model's parameter count does not include it
    is_loaded    False: the parameter count includes it although a server does not hold it
    serves       the inputs a tower's weight is for ("image", "video", "audio"); none: the language model's
    whole_by_data  a tower's weight that each rank holds whole where ranks share the batch (`--mm-encoder-tp-mode data`)
    shared       a speculative head's weight in whose place it uses the target's, once both are loaded
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
    wide_below: int = 0
    pad_rows: int = 1
    align_rows: int = 1
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
        """Parameters of the model in this weight, all experts included."""
        per_copy = self.inputs * self.outputs + (self.outputs if self.bias else 0)
        return per_copy * max(1, self.experts) if self.counted else 0


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary table a server keeps: `positions x dim` elements of the model's dtype.

    served  it is no longer than the context that is served
    """

    dim: int
    positions: int
    served: bool = False

    def rows(self, context: int) -> int:
        """Positions of the table of a server of this context."""
        return min(self.positions, context) if self.served else self.positions


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one quantized linear layer is stored.

    group_size  inputs that share a scale (int4, nvfp4, mxfp4, gguf), or None
    block       (outputs, inputs) that share a scale (fp8 blocks), or None
    static      input scales are stored too
    zeros       zero points are stored beside the scales
    scale_bytes bytes of one block scale of fp8 blocks
    variant     the method's own name for a packing that is not its usual one: "gptq_v2", "desc_act", "gemv"
    """

    kind: Literal[
        "fp8_tensor",
        "fp8_channel",
        "fp8_block",
        "int8_channel",
        "int4",
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


@dataclass(frozen=True, slots=True, eq=False)
class Quantization:
    """How a checkpoint stores its linear layers, as its `quantization_config` says.

    method    the name the config gives the method
    default   scheme of a quantizable layer that nothing below names; None: it stays in the model's dtype
    names     exact module names and their scheme, None for "not quantized"
    patterns  globs and `re:` expressions over module names, likewise; the first that matches wins
    kv_dtype  KV cache dtype that the checkpoint asks for; None: it says nothing
    problem   why kvplan cannot size it: weights then need headers or a stated size; empty: it can
    mixed     ModelOpt's MIXED_PRECISION: every layer that is quantized is listed with its algorithm
    """

    method: str
    default: Scheme | None
    names: dict[str, Scheme | None] = field(default_factory=dict)
    patterns: tuple[tuple[str, Scheme | None], ...] = ()
    kv_dtype: str | None = None
    problem: str = ""
    mixed: bool = False

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
    """Low frequencies divided by `factor`, high ones kept, a smooth passage between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies blended between `beta_slow` and `beta_fast` turns.

    attention_factor  what cos and sin are multiplied by
    truncate          the blend's ends are rounded outwards to whole dimensions
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions of the first `dim` elements of a head.

    interleaved  pairs are (0, 1), (2, 3), ... as DeepSeek has them; otherwise (0, dim/2), (1, dim/2 + 1), ...
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Softmax attention over K and V heads; head counts, width and window are the layer's cache's and the model's.

    scale    what q.k is multiplied by
    qk_norm  q and k are normalized head by head before they rotate
    softcap  scores are squashed to softcap * tanh(score / softcap)
    sinks    one learned logit per head takes part in the softmax and no value
    """

    scale: float
    rotary: Rotary | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Multi-head latent attention (DeepSeek): q through a latent of q_lora_rank (None: directly), k and v always."""

    scale: float
    rotary: Rotary
    q_lora_rank: int | None
    qk_nope_head_dim: int
    v_head_dim: int
    bias: bool = False  # of q_a_proj, kv_a_proj_with_mqa and o_proj


Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    inner: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """`top_k` of `num_experts` gated MLPs per token, and shared ones for all.

    scoring      of the router's logits, over all experts
    renormalize  the chosen scores are divided by their sum (for softmax the same as a softmax over the chosen)
    scale        what the chosen scores are multiplied by in the end
    groups       experts are chosen from the `top_groups` best of `groups` groups; a group is scored by its best
                 expert, or by the sum of its two best where there is a correction
    correction   a learned bias is added to the scores for choosing, not for weighing (`e_score_correction_bias`)
    swiglu_limit, swiglu_alpha  of `clamped_swiglu` (gpt-oss)
    shared_inner width of the shared experts together; 0 for none
    names        how a checkpoint calls the router and the experts' matrices
    """

    num_experts: int
    top_k: int
    inner: int
    activation: Activation
    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool
    names: Literal["mixtral", "qwen", "gpt_oss"]
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction: bool = False
    router_bias: bool = False
    bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    shared_inner: int = 0


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention: HeadAttention | LatentHeads
    mlp: GatedMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class Decoder:
    """How a decoder-only transformer computes, beyond its sizes.

    sandwich         norms before and after attention and MLP (Gemma 2 and 3), not before only
    unit_offset      RMSNorm multiplies by 1 + weight (Gemma)
    embedding_scale  what embeddings are multiplied by; rounded to the model's dtype first
    logit_softcap    logits are squashed to softcap * tanh(logit / softcap)
    """

    layers: tuple[DecoderLayer, ...]
    norm_eps: float
    sandwich: bool = False
    unit_offset: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None


TEXT_ONLY = " (text only)"  # ends the name of a model that was sized without its tower


def _not_read() -> Decoder:
    raise UnsupportedModelError("this model", "was described by its sizes only", "the engine needs its config.json")


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A model's facts. Compared by identity: two readings are two objects.

    layers         one entry per layer: the caches it keeps, none, one or several
    layer_weights  one entry per layer, beside `layers`
    other_weights  embedding, head, final norm, towers
    max_model_len  the context a server takes when none is asked for; context_limit: the largest it accepts
    text_only      a tower was left out when this was read, as asked; `name` says so too
    item_tokens    tokens of one multimodal item that must be computed in one step; 0: no such need
    first_layer    number of the first layer in the checkpoint's names: a speculative head's layers follow its target's
    head           the method of speculation whose head this is; empty: a model of its own
    notes          what the reader derived or found odd, for the user
    read_decoder   reads how it computes, which only the engine asks for
    config         the config.json all this was read from, so that a run can carry it
    processor      what the folder beside it says of the processor of images, videos and sounds, by scope
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

    @property
    def decoder(self) -> Decoder:
        """How the layers compute; raises UnsupportedModelError, by name, for what the engine cannot run."""
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
    def is_pooled(self) -> bool:
        """Whether an indexer's keys stand for several tokens each (GLM-5.3-Flash)."""
        return any(isinstance(cache, SparseIndexer) and cache.pool > 1 for cache in _distinct_caches(self))

    @property
    def is_encoder(self) -> bool:
        """Whether no layer keeps anything of a token once its step is computed (BERT)."""
        return bool(self.layers) and not any(self.layers)

    @property
    def has_states(self) -> bool:
        return RecurrentState in self.cache_kinds

    @property
    def has_attention(self) -> bool:
        return bool(self.cache_kinds - {RecurrentState})

    @property
    def most_kv_heads(self) -> int:
        """KV heads of the layers that have the most; 0 for latent attention, whose cache is whole on every rank."""
        kinds = (FullAttention, SlidingWindow, ChunkedAttention)
        return max([cache.num_kv_heads for cache in _distinct_caches(self) if isinstance(cache, kinds)], default=0)

    @property
    def served_name(self) -> str:
        """The model's name as it was asked for: what a server loads, whatever part of it was sized."""
        return self.name.removesuffix(TEXT_ONLY)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight once per place it stands in."""
        return self.other_weights + tuple(weight for layer in self.layer_weights for weight in layer)


@lru_cache(maxsize=1024)
def _distinct_caches(spec: ModelSpec) -> frozenset[LayerCache]:
    return frozenset(cache for caches in spec.layers for cache in caches)


@lru_cache(maxsize=1024)
def _cache_kinds(spec: ModelSpec) -> frozenset[type[LayerCache]]:
    return frozenset(type(cache) for cache in _distinct_caches(spec))
