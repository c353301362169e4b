"""Speculative heads with their own checkpoint, as separate models: EAGLE, EAGLE-3, DFlash and DSpark.

A head reads hidden states of its target and shares its embedding, and DFlash and DSpark its output head. If its
checkpoint has another embedding, it keeps that one; a config does not show it, but a different width does.
Source: vLLM 0.33 models/llama_eagle.py, llama_eagle3.py, qwen3_eagle3.py, qwen3_dflash.py, qwen3_dspark.py; equal to
its parameters for every compared head (tests/facts/speculation.jsonl).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.models.families.blocks import Heads, attention, gated_mlp, norm, qk_norms, row, table, vector, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, heads_of
from kvplan.models.families.draft_names import why_not
from kvplan.models.families.mla import latent_attention, latent_caches
from kvplan.models.families.mtp import is_assistant
from kvplan.models.families.speculators import FLAT
from kvplan.models.spec import LayerCache, ModelSpec, Part, Place, Weight

LLAMA3 = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM",
)  # fmt: skip
PARALLEL = ("PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")  # only in the format of the speculators library
QWEN3 = ("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM", "PeagleQwen3ForCausalLM")
LATENT = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Eagle:
    """Structure of an EAGLE head.

    norms       of every layer; first_norm: the first layer has its input norm, too
    fusion      what combines embedding and hidden state: replicated, or its inputs sharded
    final_norm  after the layers; has_head: an output head, which is replaced by the target's
    windows     layers slide as `layer_types` says
    """

    norms: tuple[str, ...] = ("post_attention_layernorm", "input_layernorm")
    first_norm: bool = True
    fusion: Literal["whole", "row"] = "whole"
    fusion_bias: bool = False
    final_norm: bool = True
    has_head: bool = False
    windows: bool = False


EAGLES: Mapping[str, Eagle] = {
    **dict.fromkeys(("LlamaForCausalLM", "EagleLlamaForCausalLM"), Eagle(first_norm=False, final_norm=False)),
    **dict.fromkeys(("MistralForCausalLM", "EagleMistralForCausalLM"), Eagle(fusion="row")),
    **dict.fromkeys(("Llama4ForCausalLM", "EagleLlama4ForCausalLM"), Eagle(has_head=True)),
    **dict.fromkeys(
        ("CohereForCausalLM", "EagleCohereForCausalLM"),  # of Cohere 2
        Eagle(norms=("input_layernorm",), fusion_bias=True, windows=True),
    ),
}
# The supported architectures, by method; a server has others, which are rejected by name (draft_names.py).
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "eagle": tuple(EAGLES),
    "eagle3": (*LLAMA3, *QWEN3, *PARALLEL, *LATENT),
    "dflash": ("DFlashDraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
}
AUX_STATES = 3  # hidden states of the target that EAGLE-3 reads if the config names no layers
INT64 = "int64"


def architecture_of(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def method_of(draft: ModelSpec) -> str:
    """A server's default method for a draft: by the architecture, and by words in its name."""
    name, architecture = draft.name.lower(), architecture_of(draft.config)
    if is_assistant(draft):
        return "mtp"
    if "eagle-" in name or (architecture.startswith("Eagle") and not architecture.startswith("Eagle3")):
        return "eagle"
    if "eagle3" in name or "Eagle3" in architecture or architecture.startswith(("PEagle", "Peagle")):
        return "eagle3"
    if "dflash" in name or "DFlash" in architecture:
        return "dflash"
    if "dspark" in name or "DSpark" in architecture:
        return "dspark"
    return "draft_model"


@lru_cache(maxsize=256)
def head_of(draft: ModelSpec, method: str, target: ModelSpec) -> ModelSpec:
    """The head as loaded with its target; the target's weights that it uses are marked `shared`.

    draft  the head's config, read like any model's
    Raise UnsupportedModelError for an architecture that is not modeled.
    """
    architecture = architecture_of(draft.config)
    if architecture not in ARCHITECTURES[method]:
        known = ", ".join(ARCHITECTURES[method])
        reason = why_not(architecture) or f"known: {known}"
        why = f"{method} heads of {printable(architecture or 'no architecture', 60)} are not modeled ({reason})"
        raise UnsupportedModelError(draft.name, why)
    if architecture in PARALLEL and not draft.config.get(FLAT):
        why = f"vLLM reads a head of {architecture} only in the format of the speculators library"
        raise UnsupportedModelError(draft.name, why, "convert it")
    config = Config(draft.config, draft.name)
    layers, outer = READERS[method](config, target, architecture)
    return replace(
        draft,
        layers=tuple(caches for _, caches in layers),
        layer_weights=tuple(weights for weights, _ in layers),
        other_weights=outer,
        first_layer=0,
        head=method,
        notes=(),
    )


Layers = list[tuple[tuple[Weight, ...], tuple[LayerCache, ...]]]


def target_width(config: Config) -> int:
    return config.count("target_hidden_size", default=config.count("hidden_size"))


def shared_table(config: Config, target: ModelSpec) -> Weight:
    """The embedding: the target's if the widths are equal."""
    hidden = config.count("hidden_size")
    weight = table("model.embed_tokens", config.count("vocab_size"), hidden)
    return replace(weight, shared=hidden == target.hidden_size)


def output_head(config: Config, target: ModelSpec, *, shared: bool) -> tuple[Weight, ...]:
    """The output head over the draft's vocabulary, and the map from its tokens to the target's."""
    hidden, vocab = config.count("hidden_size"), draft_vocab(config)
    head = table("lm_head", vocab, hidden, Place.LAST, "lm_head")
    if vocab == target.vocab_size:
        return (replace(head, shared=shared),)
    return head, replace(vector("draft_id_to_target_id", vocab, "lm_head"), dtype=INT64)


def draft_vocab(config: Config) -> int:
    return config.count("draft_vocab_size", default=config.count("vocab_size"))


def fusion(inputs: int, hidden: int) -> Weight:
    return whole("fc", inputs, hidden, "mlp")


def read_eagle(config: Config, target: ModelSpec, architecture: str) -> tuple[Layers, tuple[Weight, ...]]:
    """EAGLE: layers like a small model's behind a fusion; logits come from the target's head."""
    kind = EAGLES[architecture]
    hidden, heads, num_layers = config.count("hidden_size"), heads_of(config), config.num_layers()
    bias = config.flag("attention_bias")
    if config.flag("use_qk_norm") and kind.windows:
        raise UnsupportedModelError(config.where, "EAGLE heads with norms of queries and keys are not modeled")
    inner = config.count("intermediate_size_mlp" if kind.has_head else "intermediate_size")
    common = attention(hidden, heads, qkv_bias=bias, o_bias=bias) + gated_mlp(
        hidden, inner, bias=config.flag("mlp_bias")
    )
    norms = tuple(norm(name, hidden) for name in kind.norms)
    layers: Layers = [
        ((*common, *(norms[:1] if index == 0 and not kind.first_norm else norms)), (cache,))
        for index, cache in enumerate(eagle_caches(config, kind, heads, num_layers))
    ]
    combine = row if kind.fusion == "row" else whole
    outer = [shared_table(config, target), combine("fc", 2 * hidden, hidden, "mlp", bias=kind.fusion_bias)]
    if kind.final_norm:
        outer.append(norm("model.norm", hidden))
    if kind.has_head:
        outer += output_head(config, target, shared=True)
    return layers, tuple(outer)


def eagle_caches(config: Config, kind: Eagle, heads: Heads, num_layers: int) -> list[LayerCache]:
    """Cache of each layer of an EAGLE head."""
    types = config.per_layer_names("layer_types", num_layers) if kind.windows else None
    if types is None:
        if kind.windows:
            raise UnsupportedModelError(config.where, "has no layer_types, without which vLLM loads no such EAGLE head")
        if config.maybe_count("sliding_window") is not None and kind.fusion == "row":
            raise UnsupportedModelError(config.where, "EAGLE heads with windows are not modeled for Mistral")
        return [attention_cache(heads, None)] * num_layers
    windows = [config.count("sliding_window") if name == "sliding_attention" else None for name in types]
    return [attention_cache(heads, window) for window in windows]


def read_eagle3(config: Config, target: ModelSpec, architecture: str) -> tuple[Layers, tuple[Weight, ...]]:
    """EAGLE-3: the first layer reads the embedding and the hidden state; it has its own output head."""
    hidden = config.count("hidden_size")
    extra = tuple(norm(name, hidden) for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"))
    extra += gated_mlp(hidden, config.count("intermediate_size"), bias=config.flag("mlp_bias"))
    mixer, cache = eagle3_attention(config, hidden, architecture)
    layers: Layers = []
    for index in range(config.num_layers()):
        weights = tuple(
            replace(weight, inputs=2 * hidden) if index == 0 and weight.name in READS_BOTH else weight
            for weight in mixer
        )
        layers.append((weights + extra, (cache,)))
    outer = [shared_table(config, target), norm("model.norm", hidden), *output_head(config, target, shared=False)]
    eagle = config.sub("eagle_config") if isinstance(config.values.get("eagle_config"), dict) else Config({}, "")
    if eagle.flag("use_aux_hidden_state", True):
        width, states = target_width(config), aux_states(config, eagle)
        if eagle.flag("norm_before_fc", config.flag("norm_before_fc")):
            outer.append(norm("model.input_norm", width * states))
        if config.flag("fc_norm"):
            outer += [norm(f"model.fc_norm.{i}", width) for i in range(states)]
        outer.append(fusion(width * states, hidden))
    return layers, tuple(outer)


READS_BOTH = (  # the projections of the layer's input
    "self_attn.qkv_proj", "self_attn.fused_qkv_a_proj", "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa",
)  # fmt: skip


def eagle3_attention(config: Config, hidden: int, architecture: str) -> tuple[tuple[Weight, ...], LayerCache]:
    """Attention of an EAGLE-3 layer and its cache: MLA in DeepSeek's heads."""
    if architecture in LATENT:
        return latent_attention(config, hidden), latent_caches(config, indexed=None)[0]
    heads, bias = heads_of(config), config.flag("attention_bias")
    weights = attention(hidden, heads, qkv_bias=bias, o_bias=bias)
    return weights + (qk_norms(heads) if architecture in QWEN3 else ()), attention_cache(heads, None)


def aux_states(config: Config, eagle: Config) -> int:
    stated = config.maybe_count("num_aux_hidden_states")
    if stated is not None:
        return stated
    return len(eagle.ints("eagle_aux_hidden_state_layer_ids") or ()) or AUX_STATES


def read_dflash(config: Config, target: ModelSpec, architecture: str) -> tuple[Layers, tuple[Weight, ...]]:
    """DFlash: Qwen3 layers over hidden states of several target layers; the target's output head."""
    hidden, heads, num_layers = config.count("hidden_size"), heads_of(config), config.num_layers()
    own = config.sub("dflash_config") if isinstance(config.values.get("dflash_config"), dict) else Config({}, "")
    if own.flag("attention_sink_bias", config.flag("add_swa_attention_sink_bias")):
        raise UnsupportedModelError(config.where, "DFlash heads with attention sinks are not modeled")
    bias = config.flag("attention_bias")
    weights = (
        attention(hidden, heads, qkv_bias=bias, o_bias=bias)
        + qk_norms(heads)
        + gated_mlp(hidden, config.count("intermediate_size"))
        + tuple(norm(name, hidden) for name in ("input_layernorm", "post_attention_layernorm"))
    )
    layers: Layers = [
        (weights, (attention_cache(heads, window),)) for window in dflash_windows(config, own, heads, num_layers)
    ]
    features = target_width(config) * (num_target_layers(config, own) or num_layers)
    outer = (
        shared_table(config, target),
        *output_head(config, target, shared=not config.flag("has_own_lm_head")),
        vector("model.mask_embedding", hidden),
        norm("model.hidden_norm", hidden),
        norm("model.norm", hidden),
        *((fusion(features, hidden),) if own.flag("use_aux_hidden_state", True) else ()),
    )
    return layers, outer


def num_target_layers(config: Config, own: Config) -> int:
    """Number of target layers whose hidden states it reads."""
    for holder, key in (
        (config, "eagle_aux_hidden_state_layer_ids"), (own, "target_layer_ids"), (config, "dspark_target_layer_ids"),
        (config, "target_layer_ids"), (own, "layer_ids"),
    ):  # fmt: skip
        if holder.values.get(key):
            return len(holder.ints(key) or ())
    return 0


def dflash_windows(config: Config, own: Config, heads: Heads, num_layers: int) -> list[int | None]:
    """Window of each layer, or None if the layer is full."""
    types = config.per_layer_names("layer_types", num_layers)
    always = own.flag("use_swa")
    slides = [kind == "sliding_attention" for kind in types or ()]
    if types is None or (always and not any(slides)):
        slides = [always] * num_layers
    if not any(slides):
        return [None] * num_layers
    window = own.maybe_count("swa_window_size") or config.count("sliding_window")
    return [window if has_window else None for has_window in slides]


def read_dspark(config: Config, target: ModelSpec, architecture: str) -> tuple[Layers, tuple[Weight, ...]]:
    """DSpark: DFlash with a head for token transitions and one for confidence, replicated on each rank."""
    layers, outer = read_dflash(config, target, architecture)
    hidden, vocab, rank = config.count("hidden_size"), config.count("vocab_size"), config.count("markov_rank")
    second = table("model.markov_head.markov_w2", draft_vocab(config), rank, group="lm_head")
    more = [
        Weight("model.markov_head.markov_w1", "lm_head", rank, (Part(vocab),)),
        Weight(second.name, "lm_head", rank, (Part(-(-draft_vocab(config) // 64) * 64),)),
    ]
    if config.flag("enable_confidence_head"):
        width = hidden + (rank if config.flag("confidence_head_with_markov") else 0)
        more.append(whole("model.confidence_head.proj", width, 1, "mlp", bias=True, quantizable=False, dtype="float32"))
    return layers, (*outer, *more)


READERS: Mapping[str, Callable[[Config, ModelSpec, str], tuple[Layers, tuple[Weight, ...]]]] = {
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "dflash": read_dflash,
    "dspark": read_dspark,
}
