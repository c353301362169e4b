"""DeepSeek-V4: a short window in every layer, compressed entries for older tokens, hyper-connections, fp4 experts."""

from dataclasses import replace

from kvplan.models.families import rope
from kvplan.models.families.blocks import (
    SpecDraft,
    column,
    correction_bias,
    embedding,
    experts,
    final_norm,
    gated_mlp,
    norm,
    router,
    row,
    vector,
    whole,
)
from kvplan.models.families.config import Config
from kvplan.models.spec import CompressedLatent, Group, LayerCache, Part, Place, Rope, Sharing, Weight, WindowLatent

FLOAT32 = 2  # elements of 16 bits in one of its rotary tables, which are in float32
RATIOS = (0, 4, 128)  # tokens per compressed entry; 0: the layer has only its window


def full_precision(name: str, inputs: int, outputs: int, group: Group) -> Weight:
    """A float32 matrix replicated on every rank."""
    return whole(name, inputs, outputs, group, quantizable=False, dtype="float32")


def compressor(prefix: str, hidden: int, dim: int, ratio: int) -> tuple[Weight, ...]:
    """Key and gate projections, position biases and a norm; twice as wide with overlapping windows (ratio 4)."""
    width = 2 * dim if ratio == 4 else dim
    return (
        whole(f"{prefix}.fused_wkv_wgate", hidden, (width, width), "attention", quantizable=False),
        full_precision(f"{prefix}.ape", ratio, width, "attention"),
        norm(f"{prefix}.norm", dim),
    )


def attention(config: Config, hidden: int) -> tuple[Weight, ...]:
    """Low-rank queries, one shared key-value vector, grouped low-rank output, sinks."""
    heads, dim = config.count("num_attention_heads"), config.count("head_dim")
    q_rank, o_rank, groups = config.count("q_lora_rank"), config.count("o_lora_rank"), config.count("o_groups")
    if heads * dim % groups:
        raise config.fail("o_groups", f"does not divide the {heads} heads of {dim} ({groups})")
    return (
        whole("attn.fused_wqa_wkv", hidden, (q_rank, dim), "attention", sources=("attn.wq_a", "attn.wkv")),
        norm("attn.q_norm", q_rank),
        norm("attn.kv_norm", dim),
        column("attn.wq_b", q_rank, (Part(heads, dim),), "attention"),
        column("attn.wo_a", heads * dim // groups, (Part(groups, o_rank),), "attention"),
        row("attn.wo_b", groups * o_rank, hidden, "attention"),
        Weight(
            "attn.attn_sink", "attention", 1, (Part(heads, sharing=Sharing.PADDED_HEADS),), "outputs", dtype="float32"
        ),
    )


def picker(config: Config, hidden: int) -> tuple[Weight, ...]:
    """Queries and their weights of an index."""
    dim, heads = config.count("index_head_dim"), config.count("index_n_heads")
    return (
        whole("attn.indexer.wq_b", config.count("q_lora_rank"), dim * heads, "attention"),
        whole("attn.indexer.weights_proj", hidden, heads, "attention", quantizable=False),
    )


def indexer(config: Config, hidden: int, ratio: int) -> tuple[Weight, ...]:
    keys = compressor("attn.indexer.compressor", hidden, config.count("index_head_dim"), ratio)
    return (*picker(config, hidden), *keys)


def hyper_connections(hidden: int, copies: int) -> tuple[Weight, ...]:
    """Mixing weights of the `copies` residual streams before attention and feed-forward, in float32."""
    outputs = 2 * copies + copies * copies
    return tuple(
        weight
        for part in ("attn", "ffn")
        for weight in (
            full_precision(f"hc_{part}_fn", copies * hidden, outputs, "mlp"),
            vector(f"hc_{part}_base", outputs, "mlp", dtype="float32"),
            vector(f"hc_{part}_scale", 3, "mlp", dtype="float32"),
        )
    )


def feed_forward(config: Config, hidden: int, vocab: int, *, hashed: bool) -> tuple[Weight, ...]:
    """Experts; the first layers choose them by a table of token ids, the others by scores with a bias."""
    count, inner = config.count("n_routed_experts"), config.count("moe_intermediate_size")
    top_k = config.count("num_experts_per_tok")
    bias = correction_bias("ffn.gate.e_score_correction_bias", count)
    table = Weight("ffn.gate.tid2eid", "router", top_k, (Part(vocab),), dtype="int32", counted=False)
    chosen = (table,) if hashed else (bias,)
    if config.maybe_count("vision_n_layers"):  # two biases, of text and of images, in every layer
        chosen = (*((table,) if hashed else ()), bias, bias)
    shared = inner * config.count("n_shared_experts", default=0, low=0)
    return (
        router("ffn.gate", hidden, count),
        *chosen,
        *experts(hidden, inner, count, prefix="ffn.experts"),
        *(gated_mlp(hidden, shared, prefix="ffn.shared_experts", group="shared_expert") if shared else ()),
    )


def compress_ratios(config: Config, num_layers: int) -> list[int]:
    """One ratio per layer; the config also lists those of the multi-token prediction layers, after them."""
    ratios = config.ints("compress_ratios")
    if ratios is None or len(ratios) < num_layers:
        raise config.fail("compress_ratios", f"must have one entry for each of the {num_layers} layers")
    for ratio in ratios[:num_layers]:
        if ratio not in RATIOS:
            raise config.fail("compress_ratios", f"{ratio} is not a ratio kvplan can size (it knows 0, 4, 128)")
    return ratios[:num_layers]


def read(config: Config, model_type: str) -> SpecDraft:
    """DeepSeek-V4 Flash and Pro."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    dim, rotary = config.count("head_dim"), config.count("qk_rope_head_dim")
    copies, index_dim = config.count("hc_mult"), config.count("index_head_dim")
    hash_layers = config.count("num_hash_layers", default=0, low=0)
    window = WindowLatent(dim, rotary, config.count("sliding_window"))
    base = (
        *attention(config, hidden),
        *hyper_connections(hidden, copies),
        norm("attn_norm", hidden),
        norm("ffn_norm", hidden),
    )
    extras = {
        0: (),
        4: compressor("attn.compressor", hidden, dim, 4) + indexer(config, hidden, 4),
        128: compressor("attn.compressor", hidden, dim, 128),
    }
    caches: dict[int, tuple[LayerCache, ...]] = {
        0: (window,),
        4: (window, CompressedLatent(dim, rotary, 4, index_dim)),
        128: (window, CompressedLatent(dim, rotary, 128, None)),
    }
    ratios = compress_ratios(config, num_layers)
    moe = {hashed: feed_forward(config, hidden, vocab, hashed=hashed) for hashed in (True, False)}
    context, tied = rope.context_of(config), config.flag("tie_word_embeddings")
    head = (
        full_precision("model.hc_head_fn", copies * hidden, copies, "mlp"),
        vector("model.hc_head_base", copies, "mlp", dtype="float32"),
        vector("model.hc_head_scale", 1, "mlp", dtype="float32"),
    )
    return SpecDraft(
        hidden_size=hidden,
        num_heads=config.count("num_attention_heads"),
        vocab_size=vocab,
        context=context,
        tied=tied,
        layers=[caches[ratio] for ratio in ratios],
        layer_weights=[base + extras[ratio] + moe[i < hash_layers] for i, ratio in enumerate(ratios)],
        other_weights=[
            *embedding(vocab, hidden, tied),
            *(replace(weight, place=Place.EVERY) for weight in head),
            final_norm(hidden),
        ],
        ropes=(Rope(FLOAT32 * rotary, context.positions),) * 2,
        experts_per_token=config.count("num_experts_per_tok"),
        widest_mlp=config.count("moe_intermediate_size"),
    )


READERS = {"deepseek_v4": read}
