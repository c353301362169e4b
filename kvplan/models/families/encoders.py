"""Encoders for embedding and reranking: BERT, RoBERTa, XLM-RoBERTa and ModernBERT.

Every token attends to all others of its prompt, so nothing is cached. Names, sharding and dtypes are from vLLM 0.33's
parameters; weights that only transformers counts are marked as not loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.blocks import SpecDraft, column, norm, row, table, whole
from kvplan.models.families.classic_shape import heads_of
from kvplan.models.families.config import Config
from kvplan.models.families.rope import Context
from kvplan.models.spec import Part, Place, Rope, Weight

LABELS: Final = 2  # transformers' num_labels if a config does not set it
PADDING: Final = 1  # transformers' pad_token_id of RoBERTa and XLM-RoBERTa if a config does not set it
CLASSIFIES: Final = "ForSequenceClassification"
PER_TOKEN: Final = ("ForMaskedLM", "ForTokenClassification")


def labels(config: Config) -> int:
    named = config.values.get("id2label")
    return len(named) if isinstance(named, Mapping) and named else config.count("num_labels", default=LABELS)


def in_float32(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """A head that vLLM keeps in float32, replicated on each rank."""
    return tuple(replace(weight, dtype="float32", place=Place.LAST, quantizable=False) for weight in weights)


def classifies(config: Config) -> bool:
    names = config.values.get("architectures")
    if isinstance(names, list) and any(str(name).endswith(PER_TOKEN) for name in names):
        raise UnsupportedModelError(
            f"{config.where}: architectures", f"{names[0]!r:.60} has a head for each token, which is not modeled"
        )
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(CLASSIFIES) for name in names)


def positions_of(config: Config, model_type: str) -> int:
    """Positions that a prompt can use.

    RoBERTa's begin after the padding token's: its table has rows that no prompt reaches. Published tokenizers state the
    same (512 of 514, 8,192 of 8,194), and vLLM takes it from them. `max_seq_length` is that of sentence-transformers.
    Source: vLLM 0.33 model_executor/models/roberta.py, config/model.py (_get_and_verify_max_len).
    """
    positions = config.count("max_position_embeddings")
    if model_type in ("roberta", "xlm-roberta"):
        unused = config.count("pad_token_id", default=PADDING, low=0) + 1
        if positions <= unused:
            raise config.fail("max_position_embeddings", f"must be more than pad_token_id + 1 ({positions})")
        positions -= unused
    return min(positions, config.count("max_seq_length", default=positions))


def draft(
    config: Config, heads: int, hidden: int, inner: int, layers: list[tuple[Weight, ...]], outer: list[Weight],
    positions: int, ropes: tuple[Rope, ...] = (),
) -> SpecDraft:  # fmt: skip
    return SpecDraft(
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=config.count("vocab_size"),
        context=Context.of(positions),
        layers=[()] * len(layers),
        layer_weights=layers,
        other_weights=outer,
        ropes=ropes,
        tied=True,
        widest_mlp=inner,
    )


def read_bert(config: Config, model_type: str) -> SpecDraft:
    """BERT and RoBERTa: learned positions, a norm after each half of a layer; only a classifier has a pooler."""
    hidden, heads = heads_of(config)
    inner, part = config.count("intermediate_size"), Part(heads.num_heads, heads.head_dim)
    prefix = "attention.self"
    layer = (
        column(
            f"{prefix}.qkv_proj", hidden, (part, part, part), "attention", bias=True,
            sources=tuple(f"{prefix}.{name}" for name in ("query", "key", "value")),
        ),
        row("attention.output.dense", hidden, hidden, "attention", bias=True),
        norm("attention.output.LayerNorm", hidden, "layer"),
        column("intermediate.dense", hidden, inner, "mlp", bias=True),
        row("output.dense", inner, hidden, "mlp", bias=True),
        norm("output.LayerNorm", hidden, "layer"),
    )  # fmt: skip
    outer = [
        table("embeddings.word_embeddings", config.count("vocab_size"), hidden),
        table("embeddings.position_embeddings", config.count("max_position_embeddings"), hidden),
        table("embeddings.token_type_embeddings", config.count("type_vocab_size", default=2), hidden),
        norm("embeddings.LayerNorm", hidden, "layer"),
    ]
    plain = model_type == "bert"
    name = "pooler.dense" if plain else "classifier.dense"
    dense = whole(name, hidden, hidden, "lm_head", bias=True)
    if classifies(config):
        last = "classifier" if plain else "classifier.out_proj"
        outer += in_float32((dense, whole(last, hidden, labels(config), "lm_head", bias=True)))
    else:  # transformers' headless class has a pooler, which a server leaves out
        outer.append(replace(dense, name="pooler.dense", is_loaded=False))
    return draft(
        config, heads.num_heads, hidden, inner, [layer] * config.num_layers(), outer, positions_of(config, model_type)
    )


def read_modernbert(config: Config, model_type: str) -> SpecDraft:
    """ModernBERT: rotary positions, gated MLPs, a window in most layers, and no norm before the first attention."""
    hidden, heads = heads_of(config)
    inner, part = config.count("intermediate_size"), Part(heads.num_heads, heads.head_dim)
    bias, in_mlp, in_norm = (config.flag(name, False) for name in ("attention_bias", "mlp_bias", "norm_bias"))
    body = (
        column("attn.Wqkv", hidden, (part, part, part), "attention", bias=bias),
        row("attn.Wo", hidden, hidden, "attention", bias=bias),
        norm("mlp_norm", hidden, "layer", in_norm),
        column("mlp.Wi", hidden, (Part(inner), Part(inner)), "mlp", bias=in_mlp),
        row("mlp.Wo", inner, hidden, "mlp", bias=in_mlp),
    )
    first = norm("attn_norm", hidden, "layer", in_norm)
    layers = [body, *[(first, *body)] * (config.num_layers() - 1)]
    outer = [
        table("embeddings.tok_embeddings", config.count("vocab_size"), hidden),
        norm("embeddings.norm", hidden, "layer", in_norm),
        replace(norm("final_norm", hidden, "layer", in_norm), place=Place.LAST),
    ]
    if classifies(config):
        dense = whole("pooling.dense", hidden, hidden, "lm_head", bias=config.flag("classifier_bias", False))
        outer += in_float32(
            (
                dense,
                replace(norm("pooling.norm", hidden, "layer", in_norm), group="lm_head"),
                whole("classifier", hidden, labels(config), "lm_head", bias=True),
            )
        )
    ropes = tuple(Rope(heads.head_dim, config.count("max_position_embeddings")) for _ in range(2))
    return draft(config, heads.num_heads, hidden, inner, layers, outer, positions_of(config, model_type), ropes)


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "bert": read_bert,
    "roberta": read_bert,
    "xlm-roberta": read_bert,
    "modernbert": read_modernbert,
}
