"""Speculative heads with a checkpoint of their own: EAGLE, EAGLE-3, DFlash and DSpark, as models of their own.

A head reads hidden states of its target and shares its embedding, and DFlash and DSpark its output head. One whose
checkpoint holds another embedding keeps that; a config does not say so, widths that differ do.
Source: vLLM 0.33 models/llama_eagle.py, llama_eagle3.py, qwen3_eagle3.py, qwen3_dflash.py, qwen3_dspark.py; equal to
its parameters on every head compared (tests/facts/speculation.jsonl).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.blocks import Heads, attention, gated_mlp, norm, qk_norms, table, vector, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, heads_of
from kvplan.models.spec import LayerCache, ModelSpec, Part, Place, Weight

LLAMA3 = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "PEagleDraftModel",
    "PeagleLlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM",
)  # fmt: skip
QWEN3 = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM", "Qwen3ForCausalLM")
# The architectures that are read, by method; a server has others, which are refused by name.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    "eagle3": (*LLAMA3, *QWEN3),
    "dflash": ("DFlashDraftModel", "DFlashQwen3ForCausalLM"),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel", "Qwen3OmniDSparkModel"),
}
AUX_STATES = 3  # hidden states of the target that EAGLE-3 reads where the config names no layers
INT64 = "int64"


def architecture_of(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def method_of(draft: ModelSpec) -> str:
    """How a server takes a draft for which no method is named: by the architecture, and by what its name says."""
    name, architecture = draft.name.lower(), architecture_of(draft.config)
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
    """The head as it stands beside its target; what it uses of the target's own is marked `shared`.

    draft  the head's config, read as any model's is
    Raises UnsupportedModelError for an architecture that is not modeled.
    """
    architecture = architecture_of(draft.config)
    if architecture not in ARCHITECTURES[method]:
        known = ", ".join(ARCHITECTURES[method])
        why = f"{method} heads of {printable(architecture or 'no architecture', 60)} are not modeled (known: {known})"
        raise UnsupportedModelError(draft.name, why)
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
    """The embedding: the target's where it is as wide."""
    hidden = config.count("hidden_size")
    weight = table("model.embed_tokens", config.count("vocab_size"), hidden)
    return replace(weight, shared=hidden == target.hidden_size)


def output_head(config: Config, target: ModelSpec, *, shared: bool) -> tuple[Weight, ...]:
    """The output head over the draft's vocabulary, and which of the target's tokens each of its own is."""
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
    """EAGLE: Llama layers, the first without its norm; the logits are the target's head's."""
    hidden, heads = config.count("hidden_size"), heads_of(config)
    bias = config.flag("attention_bias")
    common = attention(hidden, heads, qkv_bias=bias, o_bias=bias) + gated_mlp(
        hidden, config.count("intermediate_size"), bias=config.flag("mlp_bias")
    )
    cache = (attention_cache(heads, None),)
    after, before = norm("post_attention_layernorm", hidden), norm("input_layernorm", hidden)
    layers: Layers = [
        ((*common, after) if index == 0 else (*common, after, before), cache) for index in range(config.num_layers())
    ]
    return layers, (shared_table(config, target), fusion(2 * hidden, hidden))


def read_eagle3(config: Config, target: ModelSpec, architecture: str) -> tuple[Layers, tuple[Weight, ...]]:
    """EAGLE-3: the first layer reads the embedding beside the hidden state; an output head of its own."""
    hidden, heads = config.count("hidden_size"), heads_of(config)
    extra = qk_norms(heads) if architecture in QWEN3 else ()
    extra += tuple(norm(name, hidden) for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"))
    extra += gated_mlp(hidden, config.count("intermediate_size"), bias=config.flag("mlp_bias"))
    cache = (attention_cache(heads, None),)
    bias = config.flag("attention_bias")
    layers: Layers = []
    for index in range(config.num_layers()):
        qkv, out = attention(hidden, heads, qkv_bias=bias, o_bias=bias)
        layers.append(((replace(qkv, inputs=hidden * (2 if index == 0 else 1)), out, *extra), cache))
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


def aux_states(config: Config, eagle: Config) -> int:
    stated = config.maybe_count("num_aux_hidden_states")
    if stated is not None:
        return stated
    return len(eagle.ints("eagle_aux_hidden_state_layer_ids") or ()) or AUX_STATES


def read_dflash(config: Config, target: ModelSpec, architecture: str) -> tuple[Layers, tuple[Weight, ...]]:
    """DFlash: Qwen3 layers over hidden states of several of the target's layers; the target's output head."""
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
    """How many of the target's layers it reads."""
    for holder, key in (
        (config, "eagle_aux_hidden_state_layer_ids"), (own, "target_layer_ids"), (config, "dspark_target_layer_ids"),
        (config, "target_layer_ids"), (own, "layer_ids"),
    ):  # fmt: skip
        if holder.values.get(key):
            return len(holder.ints(key) or ())
    return 0


def dflash_windows(config: Config, own: Config, heads: Heads, num_layers: int) -> list[int | None]:
    """Per layer the window, or None where the layer is full."""
    types = config.per_layer_names("layer_types", num_layers)
    always = own.flag("use_swa")
    slides = [kind == "sliding_attention" for kind in types or ()]
    if types is None or (always and not any(slides)):
        slides = [always] * num_layers
    if not any(slides):
        return [None] * num_layers
    window = own.maybe_count("swa_window_size") or config.count("sliding_window")
    return [window if each else None for each in slides]


def read_dspark(config: Config, target: ModelSpec, architecture: str) -> tuple[Layers, tuple[Weight, ...]]:
    """DSpark: DFlash with a head of transitions between tokens and one of confidence, whole on each rank."""
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
