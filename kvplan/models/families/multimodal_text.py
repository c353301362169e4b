"""Language models found only inside multimodal models: Llama 3.2 Vision's and the first LLaVA's."""

from collections.abc import Callable
from dataclasses import replace

from kvplan.core.files import printable
from kvplan.models.families import dense, rope
from kvplan.models.families.blocks import (
    Heads,
    SpecDraft,
    attention,
    embedding,
    final_norm,
    gated_mlp,
    norm,
    qk_norms,
    vector,
)
from kvplan.models.families.config import Config
from kvplan.models.spec import CrossAttention, FullAttention, LayerCache, Part, Weight

IMAGE_ROWS = 8  # rows for image tokens in the embedding but not in the head


def read_llava(config: Config, model_type: str) -> SpecDraft:
    """LLaVA on Llama; the first published configs are flat."""
    return dense.read(config, "llama")


MINICPMV = {"2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}  # version -> its language model


def read_minicpmv(config: Config, model_type: str) -> SpecDraft:
    """MiniCPM-V: the language model follows from `version`, which 2.5 does not state.

    Source: vLLM 0.33 minicpmv.py (get_version_by_config).
    """
    stated = config.values.get("version", "2.5")
    version = f"{float(stated):.1f}" if isinstance(stated, int | float) else str(stated)
    if version not in MINICPMV or (version == "2.5" and config.values.get("hidden_size") == MINICPMV_2):
        known = ", ".join(MINICPMV)
        raise config.fail("version", f"{printable(repr(stated), 40)} is not sized", f"kvplan knows {known}")
    return dense.read(config, MINICPMV[version])


MINICPMV_2 = 2304  # hidden size of MiniCPM-V 2.0, which does not state its version either


def read_phi4mm(config: Config, model_type: str) -> SpecDraft:
    """Phi-4-multimodal: Phi-3's layers."""
    return dense.read(config, "phi3")


def cross_layer(hidden: int, inner: int, heads: Heads) -> tuple[Weight, ...]:
    """A layer that attends only to image tokens, with two gates."""
    return (
        *attention(hidden, heads, prefix="cross_attn"),
        *qk_norms(heads, "cross_attn"),
        vector("cross_attn_attn_gate", 1, "attention"),
        vector("cross_attn_mlp_gate", 1, "attention"),
        *gated_mlp(hidden, inner),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )


def read_mllama(config: Config, model_type: str) -> SpecDraft:
    """Llama 3.2 Vision: the layers of `cross_attention_layers` cache only K and V of the image's tokens."""
    heads, hidden = dense.heads_of(config), config.count("hidden_size")
    inner, vocab, num_layers = config.count("intermediate_size"), config.count("vocab_size"), config.num_layers()
    crossing = config.ints("cross_attention_layers")
    if crossing is None:
        raise config.fail("cross_attention_layers", "missing", "kvplan cannot size the model without it")
    if len(set(crossing)) != len(crossing) or any(i >= num_layers for i in crossing):
        raise config.fail(
            "cross_attention_layers", f"must name different layers below {num_layers}", "correct the config"
        )
    own = (
        *attention(hidden, heads),
        *gated_mlp(hidden, inner),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    cross = cross_layer(hidden, inner, heads)
    geometry = heads.num_kv_heads, heads.head_dim, heads.head_dim_v
    kinds: list[LayerCache] = [
        CrossAttention(*geometry) if i in crossing else FullAttention(*geometry) for i in range(num_layers)
    ]
    tied = config.flag("tie_word_embeddings")
    table, *head = embedding(vocab, hidden, tied)
    table = replace(table, parts=(Part(vocab + IMAGE_ROWS),))
    context = rope.context_of(config)
    return SpecDraft(
        hidden_size=hidden,
        num_heads=heads.num_heads,
        vocab_size=vocab,
        context=context,
        layers=[(kind,) for kind in kinds],
        layer_weights=[cross if i in crossing else own for i in range(num_layers)],
        other_weights=[table, *head, final_norm(hidden)],
        ropes=rope.tables(config, heads.head_dim, context.positions),
        tied=tied,
        widest_mlp=inner,
        multimodal=True,
    )


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "llava": read_llava,
    "llava_llama": read_llava,
    "minicpmv": read_minicpmv,
    "mllama": read_mllama,
    "mllama_text_model": read_mllama,
    "phi4mm": read_phi4mm,
}
