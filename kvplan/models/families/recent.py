"""Decoders in the words of the dense and the sparse readers: Beam, Flint, Muse Glimmer, Rnj-1, Molmo, HRM.

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


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "beam": read_beam,
    "flint": read_flint,
    "rnj1": read_rnj1,
    "molmo2": read_molmo2,
    "molmo2_text": read_molmo2,
    "hrm_text": read_hrm,
    "molmo": read_molmo,
}
