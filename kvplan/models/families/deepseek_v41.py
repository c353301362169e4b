"""DeepSeek-V4.1: as V4, but a few layers compress, and those after them read their entries; some layers add rows of a
table of n-grams, which lies in host memory unless a server is told otherwise.

Source: vLLM 0.33 models/deepseek_v41 (attention.py, compressor.py, common/engram.py, nvidia/model.py); equal to its
parameters (tests/facts/deepseek_v41.jsonl).
"""

from dataclasses import replace

from kvplan.models.families import rope
from kvplan.models.families.blocks import SpecDraft, column, correction_bias, embedding, final_norm, norm, vector, whole
from kvplan.models.families.config import Config
from kvplan.models.families.deepseek_v4 import FLOAT32, attention, feed_forward, hyper_connections, picker
from kvplan.models.families.qwen4_exp import is_prime
from kvplan.models.spec import CompressedLatent, LayerCache, Part, Place, Rope, Weight, WindowLatent

SHARED_KEYS = ("index_topk", "candidate_topk_blocks")  # whose products layers share in buffers
RATIOS = (0, 1, 2)  # tokens per entry of the compressed cache that a layer reads; 0: the layer has only its window


def layer_ids(config: Config, key: str, num_layers: int) -> list[int]:
    """Layers from 0 that a key names, in order."""
    ids = list(config.ints(key) or ())
    if any(not 0 <= index < num_layers for index in ids) or ids != sorted(set(ids)):
        raise config.fail(key, f"must name layers from 0 to {num_layers - 1}, in order", "correct the config")
    return ids


def compress_ratios(config: Config, num_layers: int, sources: list[int]) -> list[int]:
    """One ratio per layer; the config also lists those of the draft's layers, after them."""
    ratios = config.ints("compress_ratios")
    if ratios is None or len(ratios) < num_layers:
        raise config.fail("compress_ratios", f"must have one entry for each of the {num_layers} layers")
    for index, ratio in enumerate(ratios[:num_layers]):
        if ratio not in RATIOS:
            raise config.fail("compress_ratios", f"{ratio} is not a ratio kvplan can size here (it knows 0, 1, 2)")
        if ratio and index < min(sources, default=num_layers):
            raise config.fail("kv_source_layer_ids", f"layer {index} has no compressed cache to read")
        if index in sources and not ratio:
            raise config.fail("kv_source_layer_ids", f"layer {index} compresses nothing (compress_ratios)")
    return list(ratios[:num_layers])


def head_sizes(config: Config, index: int) -> tuple[int, ...]:
    """Rows of each head of the `index`-th table: a prime number that no other head has."""
    lengths, heads = config.count("engram_max_ngram_size", low=2) - 1, config.count("engram_n_heads")
    size, sizes = 0, []
    for head in range((index + 1) * lengths * heads):
        size = config.count("engram_vocab_size") if head % heads == 0 else size + 1  # every length starts anew
        while not is_prime(size) or size in sizes:
            size += 1
        sizes.append(size)
    return tuple(sizes[index * lengths * heads :])


def ngrams(config: Config, hidden: int, index: int) -> tuple[Weight, ...]:
    """The `index`-th table of n-grams, and what reads its rows."""
    dim, copies, sizes = config.count("engram_head_dim"), config.count("hc_mult"), head_sizes(config, index)
    if list(config.ints("engram_num_embeddings") or ())[index : index + 1] != [sum(sizes)]:
        raise config.fail("engram_num_embeddings", f"must be {sum(sizes)} for table {index}", "correct the config")
    return (
        Weight(
            "engram.embed_tokens", "embedding", dim, (Part(sum(sizes)),), "outputs", dtype="mxfp8", heads=sizes,
            serves=("tables",),
        ),
        column("engram.wkv", len(sizes) * dim, (Part((copies + 1) * hidden),), "mlp"),
        vector("engram.q_weight", copies * hidden, "mlp"),
        vector("engram.k_weight", copies * hidden, "mlp"),
    )  # fmt: skip


def takes_images(config: Config) -> bool:
    """True by the outer key that a model with images has."""
    return "image_token_id" in config


def base(config: Config, hidden: int, vocab: int) -> tuple[Weight, ...]:
    """What every layer has."""
    image_bias = correction_bias("ffn.gate.bias_vl", config.count("n_routed_experts"))
    return (
        *attention(config, hidden),
        *hyper_connections(hidden, config.count("hc_mult")),
        norm("attn_norm", hidden),
        norm("ffn_norm", hidden),
        *feed_forward(config, hidden, vocab, hashed=False),
        *((image_bias,) if takes_images(config) else ()),
    )


def read(config: Config, model_type: str) -> SpecDraft:
    """DeepSeek-V4.1 Flash."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    dim, rotary, index_dim = config.count("head_dim"), config.count("qk_rope_head_dim"), config.count("index_head_dim")
    sources, pickers, with_tables = (
        layer_ids(config, key, num_layers)
        for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids")
    )
    for key in SHARED_KEYS:  # their values are read where buffers are sized
        config.maybe_count(key)
    every, context = base(config, hidden, vocab), rope.context_of(config)
    window = WindowLatent(dim, rotary, config.count("sliding_window"), narrow=True)
    layers: list[tuple[tuple[Weight, ...], tuple[LayerCache, ...]]] = []
    for index, ratio in enumerate(compress_ratios(config, num_layers, sources)):
        weights: tuple[Weight, ...] = every
        caches: tuple[LayerCache, ...] = (window,)
        if index in pickers:
            weights += picker(config, hidden)
        if index in sources:
            caches += (CompressedLatent(dim, rotary, ratio, index_dim if index in pickers else None),)
            weights += (
                whole("attn.compressor.fused_wkv_wgate", hidden, (dim,) * ratio, "attention", quantizable=False),
                norm("attn.compressor.norm", dim),
            )
        if index in sources and index in pickers:
            weights += (
                whole("attn.indexer.wk", dim, index_dim, "attention", quantizable=False),
                norm("attn.indexer.k_norm", index_dim),
            )
        if index in with_tables:
            weights += ngrams(config, hidden, with_tables.index(index))
        layers.append((weights, caches))
    tied, ends = config.flag("tie_word_embeddings"), ("start", "end", "newline")  # of images and their rows
    marks = [vector(f"image_{end}", hidden, "embedding", dtype="float32") for end in ends if takes_images(config)]
    return SpecDraft(
        hidden_size=hidden,
        num_heads=config.count("num_attention_heads"),
        vocab_size=vocab,
        context=context,
        tied=tied,
        layers=[caches for _, caches in layers],
        layer_weights=[weights for weights, _ in layers],
        other_weights=[
            *embedding(vocab, hidden, tied),
            final_norm(hidden),
            *(replace(mark, place=Place.EVERY) for mark in marks),
        ],
        ropes=(Rope(FLOAT32 * rotary, context.positions),) * 2,
        experts_per_token=config.count("num_experts_per_tok"),
        widest_mlp=config.count("moe_intermediate_size"),
    )


READERS = {"deepseek_v41_text": read, "deepseek_v41": read}
