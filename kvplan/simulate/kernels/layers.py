"""A plan's layers as kernels of one rank."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple, assert_never

from kvplan.core.records import dataclass
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.quant import WEIGHT_ONLY
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    Scheme,
    SlidingWindow,
    SparseIndexer,
    Weight,
    WindowLatent,
)
from kvplan.servers.base import abilities_of
from kvplan.servers.plans.plan import Plan
from kvplan.servers.plans.weights import draft_layout, weight_layout
from kvplan.simulate.kernels.choice import multiplies_blocks
from kvplan.simulate.kernels.roof import IN_BLOCKS, Experts, Heads
from kvplan.sizing.weights import Layout, expert_tp, local_shape, ranks_of, scheme_for

LEAST_INPUTS: Final = 8  # of a linear layer; what has fewer is a vector or a short convolution
LAW, LAW_OF_LATENTS = "1.2", "1.01"  # as aiconfigurator takes them: DeepSeek balances its experts
FORMS: Final = {
    "fp8_tensor": "fp8",
    "fp8_channel": "fp8",
    "fp8_block": "fp8_block",
    "mxfp8": "fp8_block",
    "int8_channel": "int8",
    "int8_tensor": "int8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int4": "int4",
    "awq": "int4",
    "gptq": "int4",
    "nf4": "int4",
    "nf4_double": "int4",
    "int8": "wide8",
    "gptq_int8": "wide8",
    "bnb_int8": "wide8",
}


class Linear(NamedTuple):
    """A linear layer of a rank; form: what it is stored and multiplied in."""

    form: str
    outputs: int
    inputs: int


class Module(NamedTuple):
    """An attention layer that was measured whole; heads: of a rank; forms: of its linear layers, the best first."""

    kind: str
    heads: int
    forms: tuple[str, ...]


class State(NamedTuple):
    """A recurrent layer of a rank: heads, and elements of a sequence's state."""

    k_heads: int
    v_heads: int
    elements: int
    is_measured: bool


class Adapted(NamedTuple):
    """A linear layer of a rank as an adapter sees it; slices: layers of the checkpoint in it."""

    inputs: int
    outputs: int
    slices: int


class Exchange(NamedTuple):
    """Data-parallel ranks that share experts: how many, among which ranks tokens are exchanged, and how often a step.

    A step's experts see the tokens of all ranks, which are taken to be equally busy.
    """

    peers: int = 1
    ranks: int = 1
    times: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Kernels of a rank, each with how often a step runs it.

    linear, prompt_linear  for all tokens, and only for those of prompts (decompression of latents)
    gathered  linear layers that are sharded over all ranks, for the tokens of all of them
    heads, latents, modules, states  attention and recurrences; latents: heads of a rank
    adapted                linear layers to which adapters add
    small                  short kernels by their width in elements
    head                   the output head, for tokens that are sampled
    sums, ranks            all-reduces of the hidden state, and among how many ranks
    law                    exponent of the power law by which tokens chose experts where kernels were measured
    """

    linear: Counter[Linear]
    prompt_linear: Counter[Linear]
    gathered: Counter[Linear]
    experts: Counter[tuple[str, Experts]]
    heads: Counter[Heads]
    latents: Counter[int]
    modules: Counter[Module]
    states: Counter[State]
    adapted: Counter[Adapted]
    small: Counter[int]
    head: Linear
    sums: int
    ranks: int
    hidden: int
    kv_bytes: int
    law: str
    exchange: Exchange


def form_of(scheme: Scheme | None, gpu: GpuSpec, *, narrow_inputs: bool) -> str:
    """Number format in which a layer of a scheme is stored and multiplied, by the GPU's own formats.

    Source: vLLM 0.33's kernels. Formats that a GPU lacks, and weights without a format for inputs, are widened to 16
    bits first (Marlin). Experts in mxfp4 get 16-bit inputs where no layer is in fp8 (gpt-oss), else mxfp8's.
    """
    if scheme is None:
        return "bfloat16"
    form = FORMS[scheme.kind]
    if scheme.variant == WEIGHT_ONLY:
        return "int4" if form in ("nvfp4", "mxfp4", "int4") else "wide8"
    match form:
        case "fp8" | "fp8_block":
            if gpu.fp8_flops is None or (scheme.kind == "mxfp8" and gpu.fp4_flops is None):
                return "wide8"
        case "int8":
            return "int8" if gpu.int8_flops is not None else "wide8"
        case "nvfp4":
            return "nvfp4" if gpu.fp4_flops is not None and gpu.vendor == "nvidia" else "int4"
        case "mxfp4":
            return "mxfp4_mxfp8" if gpu.fp4_flops is not None and narrow_inputs else "mxfp4"
    return form


class Reader:
    """Collects a plan's kernels, layer by layer."""

    def __init__(
        self, spec: ModelSpec, gpu: GpuSpec, layout: Layout, kv_bytes: int, peers: int, *, narrow_inputs: bool | None,
        in_blocks: bool = False,
    ) -> None:  # fmt: skip
        self.spec, self.gpu, self.layout, self.kv_bytes, self.peers = spec, gpu, layout, kv_bytes, peers
        self.tp, self.in_blocks = layout.attention_tp or layout.tp, in_blocks
        quantization = spec.quantization
        has_default = quantization is not None and quantization.default is not None
        self.narrow = has_default if narrow_inputs is None else narrow_inputs
        self.linear: Counter[Linear] = Counter()
        self.prompt_linear: Counter[Linear] = Counter()
        self.gathered: Counter[Linear] = Counter()
        self.experts: Counter[tuple[str, Experts]] = Counter()
        self.heads: Counter[Heads] = Counter()
        self.latents: Counter[int] = Counter()
        self.modules: Counter[Module] = Counter()
        self.states: Counter[State] = Counter()
        self.adapted: Counter[Adapted] = Counter()
        self.small: Counter[int] = Counter()

    def layers(self) -> Layers:
        for index, (weights, caches) in enumerate(zip(self.spec.layer_weights, self.spec.layers, strict=True)):
            is_module = any([self._cache(cache, caches, weights, index) for cache in caches])  # noqa: C419 -- adds each
            for weight in weights:
                if not (is_module and weight.group == "attention"):
                    self._weight(weight, index, latent=any(isinstance(cache, LatentAttention) for cache in caches))
            if not is_module:
                self.small[self._rotated(caches)] += 2  # rotation; the cache's new entries
        for weight in self.spec.other_weights if self.spec.head else ():
            if weight.group == "mlp":  # joins a target's hidden state and a token's embedding
                self._weight(weight, 0, latent=False)
        exchange = self._exchange()
        sums = 2 * self.spec.num_layers + 1 - (exchange.times if self.layout.attention_tp else 0)
        return Layers(
            self.linear, self.prompt_linear, self.gathered, self.experts, self.heads, self.latents, self.modules,
            self.states, self.adapted, self.small, self._head(), 0 if self.tp == 1 else sums, self.tp,
            self.spec.hidden_size, self.kv_bytes, LAW_OF_LATENTS if self.spec.is_mla else LAW, exchange,
        )  # fmt: skip

    def _exchange(self) -> Exchange:
        """Replicas exchange tokens before and after each layer of experts; where only attention is replicated, the
        tensor ranks do, and for each layer.
        """
        if self.peers == 1:
            return Exchange()
        if self.layout.attention_tp:
            return Exchange(self.peers, self.layout.tp, self.spec.num_layers)
        return Exchange(self.peers, self.peers, sum(self.experts.values()))

    # --- weights

    def _form(self, weight: Weight, index: int | None) -> str:
        scheme = scheme_for(self.spec, weight, index, self.layout.online)
        return form_of(scheme, self.gpu, narrow_inputs=self.narrow)

    def _weight(self, weight: Weight, index: int, *, latent: bool) -> None:
        if weight.group == "lm_head":  # of a drafting layer: the target's, which is counted as the head
            return
        if weight.inputs < LEAST_INPUTS:
            if weight.group == "norm" and weight.outputs >= self.spec.hidden_size:
                self.small[4 * self.spec.hidden_size] += 1  # with the sum before it: two read, two written
            return
        form = self._form(weight, index)
        if weight.experts:
            if weight.split == "outputs":
                self._experts(weight, form)
            return
        inputs, parts = local_shape(weight, ranks_of(weight, self.layout))
        layer = Linear(form, sum(parts), inputs)
        is_gathered = self.layout.attention_tp and ranks_of(weight, self.layout) > self.tp
        if latent and weight.name.endswith("kv_b_proj"):
            self.prompt_linear[layer] += 1
        else:
            (self.gathered if is_gathered else self.linear)[layer] += 1
            self.adapted[Adapted(inputs, sum(parts), len(parts))] += 1
        if form in ("fp8_block", "nvfp4"):
            self.small[2 * inputs * (self.peers if is_gathered else 1)] += 1  # its inputs are quantized
        if weight.group in ("mlp", "shared_expert") and weight.split == "outputs" and len(parts) > 1:
            self.small[sum(parts) * 3 // 2 * (self.peers if is_gathered else 1)] += 1  # activation

    def _experts(self, weight: Weight, form: str) -> None:
        width = expert_tp(self.layout)
        form = IN_BLOCKS if self.in_blocks and form == "fp8_block" else form
        shape = Experts(
            weight.inputs, weight.parts[0].size, self.spec.experts_per_token, weight.experts, width, self.layout.ep
        )
        self.experts[form, shape] += 1

    def _head(self) -> Linear:
        weights = self.spec.other_weights
        head = next((weight for weight in weights if weight.group == "lm_head"), None)
        own = head or next(weight for weight in weights if weight.group == "embedding")
        form = "bfloat16" if head is None else self._form(head, None)
        return Linear(form, -(-own.outputs // self.layout.tp), own.inputs)

    # --- caches

    def _cache(
        self, cache: LayerCache, caches: tuple[LayerCache, ...], weights: tuple[Weight, ...], index: int
    ) -> bool:
        """Add a cache's kernel; True if it was measured with the layer's linear layers in it."""
        spec, tp = self.spec, self.tp
        own = max(1, spec.num_heads // tp)
        attention = [
            self._form(weight, index) for weight in weights if weight.group == "attention" and weight.quantizable
        ]
        forms = (*dict.fromkeys(attention), "fp8_block", "bfloat16")
        match cache:
            case FullAttention(num_kv_heads=kv, head_dim=dim):
                if any(isinstance(other, KeyIndex) for other in caches):
                    self.modules[Module("msa", own, forms)] += 1
                    return True
                self.heads[Heads(own, max(1, kv // tp), dim, 0, self.kv_bytes)] += 1
            case SlidingWindow(num_kv_heads=kv, head_dim=dim, window=window):
                self.heads[Heads(own, max(1, kv // tp), dim, window, self.kv_bytes)] += 1
            case ChunkedAttention(num_kv_heads=kv, head_dim=dim, chunk=chunk):
                self.heads[Heads(own, max(1, kv // tp), dim, chunk, self.kv_bytes)] += 1
            case LatentAttention(sparse=True):
                self.modules[Module("dsa", own, forms)] += 1
                return True
            case LatentAttention():
                self.latents[own] += 1
            case WindowLatent():
                if not any(isinstance(other, CompressedLatent) for other in caches):
                    self.modules[Module("dsv4_hca", own, forms)] += 1  # the nearest that was measured
                return True
            case CompressedLatent(index_head_dim=picked):
                self.modules[Module("dsv4_csa" if picked else "dsv4_hca", own, forms)] += 1
                return True
            case RecurrentState():
                self.states[self._state(cache, tp)] += 1
            case SparseIndexer() | KeyIndex() | CrossAttention():
                pass
            case _:
                assert_never(cache)
        return False

    @staticmethod
    def _state(cache: RecurrentState, tp: int) -> State:
        elements = cache.heads * cache.head_shape[0] * cache.head_shape[1]
        elements += sum(part.size for part in cache.convolution) * (cache.conv_kernel - 1)
        is_delta = cache.kind == "gated_delta_net"
        k_heads = cache.convolution[0].units if is_delta else max(1, cache.heads // 2)
        return State(max(1, k_heads // tp), max(1, cache.heads // tp), max(1, elements // tp), is_delta)

    def _rotated(self, caches: tuple[LayerCache, ...]) -> int:
        """Elements of a token's queries and keys on a rank."""
        spec, tp = self.spec, self.tp
        widths = [
            cache.num_kv_heads * cache.head_dim for cache in caches if isinstance(cache, FullAttention | SlidingWindow)
        ]
        dim = next((cache.head_dim for cache in caches if isinstance(cache, FullAttention | SlidingWindow)), 128)
        return 2 * (spec.num_heads * dim + sum(widths)) // tp


NARROW: Final[dict[str, bool]] = {"sglang": True}


def layers(plan: Plan, narrow: bool | None = None) -> Layers:
    """The kernels of a rank of a plan; narrow: whether experts in mxfp4 get inputs of 8 bits, None: by the server."""
    request = plan.request
    kv_bytes = 1 if "fp8" in str(plan.settings.kv_dtype) else 2
    narrow = NARROW.get(request.release.engine) if narrow is None else narrow
    peers = peers_of(plan)
    if peers == 1 and request.args.data_parallel_size > 1:  # replicas that share nothing
        request = replace(request, args=replace(request.args, data_parallel_size=1))
    layout = weight_layout(request, 0)
    in_blocks = multiplies_blocks(request.release, request.gpu, expert_tp(layout))
    return _read(request.spec, request.gpu, layout, kv_bytes, peers, narrow, in_blocks)


def draft_layers(plan: Plan, modules: int) -> Layers:
    """The kernels of one pass of a plan's drafter, which runs one of so many modules."""
    request, draft = plan.request, plan.request.draft
    assert draft is not None
    kv_bytes, peers = 1 if "fp8" in str(plan.settings.kv_dtype) else 2, peers_of(plan, draft)
    if peers == 1 and request.args.data_parallel_size > 1:
        request = replace(request, args=replace(request.args, data_parallel_size=1))
    layout, count = draft_layout(request), max(1, draft.num_layers // modules)
    if count < draft.num_layers:
        draft = replace(draft, layers=draft.layers[:count], layer_weights=draft.layer_weights[:count])
    in_blocks = multiplies_blocks(request.release, request.gpu, expert_tp(layout))
    return _read(draft, request.gpu, layout, kv_bytes, peers, None, in_blocks)


def peers_of(plan: Plan, draft: ModelSpec | None = None) -> int:
    """Data-parallel ranks that exchange tokens in every step; 1: each is a server of its own."""
    request = plan.request
    is_shared = bool((draft or request.spec).experts_per_token) and abilities_of(request.release.engine).shares_experts
    return request.args.data_parallel_size if request.args.enable_dp_attention or is_shared else 1


@lru_cache(maxsize=64)
def _read(
    spec: ModelSpec, gpu: GpuSpec, layout: Layout, kv_bytes: int, peers: int, narrow: bool | None, in_blocks: bool
) -> Layers:
    return Reader(spec, gpu, layout, kv_bytes, peers, narrow_inputs=narrow, in_blocks=in_blocks).layers()
