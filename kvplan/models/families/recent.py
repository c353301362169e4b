"""Decoders in the words of the dense and the sparse readers: Beam, Flint, Muse Glimmer, Rnj-1, Molmo, HRM, Dory.

Source: vLLM 0.33 model_executor/models and vllm/models; compared with its parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from kvplan.models.families import dense, moe
from kvplan.models.families.blocks import SpecDraft, attention, column, embedding, gated_mlp, table, vector
from kvplan.models.families.config import Config
from kvplan.models.families.dense import FOUR_NORMS
from kvplan.models.families.hybrid import Layer
from kvplan.models.families.hybrid import draft as hybrid_draft
from kvplan.models.families.moe import NO_BIAS, Moe
from kvplan.models.families.renamed import reworded

MORE_WORDS = 128  # of Molmo's table (vLLM 0.33 molmo.py, ADDITIONAL_VOCAB_SIZE)
GATED = replace(NO_BIAS, norms=FOUR_NORMS, gate=True, windows="types")


def read_beam(config: Config, model_type: str) -> SpecDraft:
    """Beam: four norms, heads gated with a bias, experts chosen by groups."""
    router = Moe(router_dtype="float32", correction="buffer", shared="shared_expert_intermediate_size")
    draft = moe.read_with(config, replace(GATED, qk_norm="head"), router, model_type)
    bias = vector("self_attn.gate_bias", dense.heads_of(config).num_heads, "attention", split=True)
    draft.layer_weights = [(*weights, bias) for weights in draft.layer_weights]
    return draft


def read_flint(config: Config, model_type: str) -> SpecDraft:
    """Flint: a sink for each head in float32, a shared expert, windows by `layer_types`."""
    router = Moe(shared="shared_expert_intermediate_size", shared_name="mlp.shared_expert")
    draft = moe.read_with(config, replace(NO_BIAS, qk_norm="head", windows="types"), router, model_type)
    heads = dense.heads_of(config).num_heads
    sinks = vector("self_attn.softmax_offset", heads, "attention", split=True, dtype="float32")
    draft.layer_weights = [(*weights, sinks) for weights in draft.layer_weights]
    return draft


def read_rnj1(config: Config, model_type: str) -> SpecDraft:
    """Rnj-1: Gemma 3's layers, whose local ones look one chunk back."""
    return dense.read_with(config, replace(dense.TRAITS["gemma3_text"], windows="types"), model_type)


def read_molmo2(config: Config, model_type: str) -> SpecDraft:
    """Molmo 2: more words in the table than the head has, norms of queries and keys as `qk_norm_type` says."""
    normed = config.flag("use_qk_norm", True)
    kind: Literal["head", "full"] = "head" if config.text("qk_norm_type", "olmo") == "qwen3" else "full"
    traits = replace(NO_BIAS, qkv_bias=config.flag("qkv_bias", True), qk_norm=kind if normed else "no")
    draft = dense.read_with(config, traits, model_type)
    vocab, more = config.count("vocab_size"), config.count("additional_vocab_size", default=128, low=0)
    words = table("model.embed_tokens", vocab + more, config.count("hidden_size"))
    draft.other_weights = [words if w.name == words.name else w for w in draft.other_weights]
    return draft


def read_molmo(config: Config, model_type: str) -> SpecDraft:
    """Molmo: `intermediate_size` counts gate and up together, and 128 more words stand in the table."""
    inner = config.count("intermediate_size") // 2
    values = {"additional_vocab_size": MORE_WORDS, "use_qk_norm": config.flag("attention_layer_norm")}
    config = reworded(config, intermediate_size=inner, **values)
    tied = config.flag("weight_tying", config.flag("tie_word_embeddings"))
    return read_molmo2(reworded(config, tie_word_embeddings=tied), model_type)


def read_hrm(config: Config, model_type: str) -> SpecDraft:
    """HRM: two stacks without norms, each turned several times, with a cache a turn."""
    heads, hidden, inner = dense.heads_of(config), config.count("hidden_size"), config.count("intermediate_size")
    vocab, depth = config.count("vocab_size"), config.count("num_layers_per_stack", default=16)
    turns = config.count("H_cycles", default=2) * (config.count("L_cycles", default=3) + 1)
    width = heads.num_heads * heads.head_dim
    weights = (
        *attention(hidden, heads),
        column("self_attn.gate_proj", hidden, width, "attention"),
        *gated_mlp(hidden, inner),
    )
    caches, tied = (dense.attention_cache(heads, None),), config.flag("tie_word_embeddings")
    layers: list[Layer] = [(weights if i < 2 * depth else (), caches) for i in range(turns * depth)]
    other = [*embedding(vocab, hidden, tied), vector("model.z_L_init", hidden)]
    return hybrid_draft(config, layers, other, heads=heads, tied=tied, widest=inner)


def read_domyn_edge(config: Config, model_type: str) -> SpecDraft:
    """Domyn Edge: four norms, keys alone normalized, a window of each layer (-1: none)."""
    draft = dense.read_with(config, replace(NO_BIAS, norms=FOUR_NORMS, qk_norm="head"), model_type)
    draft.layer_weights = [tuple(w for w in weights if w.name != "self_attn.q_norm") for weights in draft.layer_weights]
    heads, sizes = dense.heads_of(config), config.items("window_sizes") or []
    if len(sizes) not in (0, len(draft.layers)):
        raise config.fail("window_sizes", f"has {len(sizes)} entries for {len(draft.layers)} layers")
    for i, size in enumerate(sizes):
        back = config.whole(f"window_sizes[{i}]", size[0] if isinstance(size, list) and size else size, low=-1)
        draft.layers[i] = (dense.attention_cache(heads, None if back < 0 else back + 1),)
    return draft


DORY = ("sliding_attention", "mlp") * 3 + ("full_attention", "mlp")  # types of its layers if the config lists none


def read_dory(config: Config, model_type: str) -> SpecDraft:
    """Dory: layers of attention or of an MLP alone, scales instead of norms; a loop's layers have a cache a turn."""
    hidden, inner, vocab = config.count("hidden_size"), config.count("intermediate_size"), config.count("vocab_size")
    heads, num_layers, window = dense.heads_of(config), config.num_layers(), config.maybe_count("sliding_window")
    types = config.per_layer_names("layer_types", num_layers) or [DORY[i % len(DORY)] for i in range(num_layers)]
    width = heads.num_heads * heads.head_dim
    mixer = (
        *attention(hidden, heads),
        column("mixer.g_proj", hidden, width, "attention"),
        *(vector(f"mixer.{name}", width, "attention", split=True) for name in ("sqk", "s_gate")),
        vector("attn_alpha", hidden),
    )
    mlp = (
        *gated_mlp(hidden, inner),
        *(vector(f"mixer.suv_{name}", inner, "mlp", split=True) for name in ("gate", "up")),
        vector("mlp_alpha", hidden),
    )
    first, last = config.count("n_input_layers", default=0, low=0), config.count("n_output_layers", default=0, low=0)
    once = config.values.get("recurrent_kv_cache_mode") == "last_loop"
    loops = 1 if once else config.count("n_recurrent_loops", default=1)
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        turns = loops if first <= i < num_layers - last else 1
        cache = dense.attention_cache(heads, window if kind == "sliding_attention" else None)
        layers.append((mlp, ()) if kind == "mlp" else (mixer, (cache,) * turns))
    tied = config.flag("tie_word_embeddings")
    other = [*embedding(vocab, hidden, tied), vector("lm_head.logit_scale", vocab, "lm_head", split=True)]
    return hybrid_draft(config, layers, other, heads=heads, tied=tied, widest=inner)


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "beam": read_beam,
    "flint": read_flint,
    "rnj1": read_rnj1,
    "molmo2": read_molmo2,
    "molmo2_text": read_molmo2,
    "hrm_text": read_hrm,
    "molmo": read_molmo,
    "domyn_edge": read_domyn_edge,
    "dory": read_dory,
}
