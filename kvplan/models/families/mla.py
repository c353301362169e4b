"""Multi-head latent attention: DeepSeek-V2/V3/R1/V3.2, Kimi-K2, GLM-4.7-Flash, GLM-5."""

from dataclasses import replace

from kvplan.models.families import rope
from kvplan.models.families.blocks import SpecDraft, column, norm, replicated, row, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import Traits, dense_mlp, outer_weights
from kvplan.models.families.moe import TOP_K_KEYS, Moe, expert_layer, sparse_layers
from kvplan.models.families.moe import read as read_plain
from kvplan.models.spec import LatentAttention, LayerCache, Part, SparseIndexer, Weight

DEEPSEEK = Moe(shared="n_shared_experts")
ROUTERS: dict[str, Moe] = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": replace(DEEPSEEK, correction="buffer"),
    "deepseek_v32": replace(DEEPSEEK, correction="buffer"),
    "kimi_k2": replace(DEEPSEEK, correction="buffer"),
    "glm_moe_dsa": replace(DEEPSEEK, correction="buffer"),
    "mistral4": DEEPSEEK,
    "glm4_moe_lite": replace(DEEPSEEK, correction="buffer", router_dtype="float32"),
    "axk1": replace(DEEPSEEK, correction="buffer"),
    "pangu_ultra_moe": replace(DEEPSEEK, correction="buffer"),
    "sarvam_mla": Moe(shared="num_shared_experts", correction="buffer"),
}
BY_METHOD = ("deepseek_v3", "deepseek_v32", "kimi_k2")  # a routing bias if topk_method is noaux_tc
MORE_NORMS = {"axk1": ("post_mlp_layernorm",), "pangu_ultra_moe": ("pre_mlp_layernorm", "post_mlp_layernorm")}
PLAIN = Traits(qkv_bias=False, o_bias=False, mlp_bias=False)


def latent_attention(config: Config, hidden: int, *, output_gate: bool = False) -> tuple[Weight, ...]:
    """The projections of MLA: down to the latents (replicated), up to the heads (sharded).

    output_gate  the heads' outputs are gated by a projection of the input, fused with the latents' if there are two
    """
    heads = config.count("num_attention_heads")
    nope, rotary = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim", low=0)
    latent, v_dim = config.count("kv_lora_rank"), config.count("v_head_dim")
    q_rank = config.maybe_count("q_lora_rank")
    bias = config.flag("attention_bias")
    q_width = Part(heads, nope + rotary)
    gate = Part(heads, v_dim)
    if q_rank is None:
        query: tuple[Weight, ...] = (
            column("self_attn.q_proj", hidden, (q_width,), "attention"),
            whole("self_attn.kv_a_proj_with_mqa", hidden, latent + rotary, "attention", bias=bias),
            *((column("self_attn.g_proj", hidden, (gate,), "attention"),) if output_gate else ()),
        )
    else:
        sources = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
        down = whole(
            "self_attn.fused_qkv_a_proj", hidden, (q_rank, latent + rotary), "attention", bias=bias, sources=sources
        )
        if output_gate:
            parts = (replicated(q_rank), replicated(latent + rotary), gate)
            fused = (*sources, "self_attn.g_proj")
            down = column("self_attn.fused_qkv_a_g_proj", hidden, parts, "attention", sources=fused)
        query = (
            down,
            norm("self_attn.q_a_layernorm", q_rank),
            column("self_attn.q_b_proj", q_rank, (q_width,), "attention"),
        )
    return (
        *query,
        norm("self_attn.kv_a_layernorm", latent),
        column("self_attn.kv_b_proj", latent, (Part(heads, nope + v_dim),), "attention"),
        row("self_attn.o_proj", heads * v_dim, hidden, "attention", bias=bias),
    )


def indexer(config: Config, hidden: int) -> tuple[Weight, ...]:
    """DeepSeek sparse attention's indexer: replicated on each rank, its key norm in float32."""
    dim, heads = config.count("index_head_dim"), config.count("index_n_heads")
    return (
        whole("self_attn.indexer.wq_b", config.count("q_lora_rank"), dim * heads, "attention"),
        whole("self_attn.indexer.wk_weights_proj", hidden, (dim, heads), "attention", quantizable=False),
        replace(norm("self_attn.indexer.k_norm", dim, "layer"), dtype="float32"),
    )


def indexed_layers(config: Config, num_layers: int) -> list[bool]:
    """True for each layer with its own indexer: all, or those that `indexer_types` calls full."""
    types = config.per_layer_names("indexer_types", num_layers)
    if types is None:
        return [True] * num_layers
    for kind in types:
        if kind not in ("full", "shared"):
            raise config.fail(
                "indexer_types", f"{kind!r} is an indexer kind kvplan cannot size (it knows full, shared)"
            )
    return [kind == "full" for kind in types]


def latent_caches(config: Config, *, indexed: bool | None) -> tuple[LayerCache, ...]:
    """The latent, and the indexer's keys if the layer has one; `indexed` None: the model is not sparse."""
    latent = LatentAttention(config.count("kv_lora_rank"), config.count("qk_rope_head_dim"), indexed is not None)
    return (latent, SparseIndexer(config.count("index_head_dim"))) if indexed else (latent,)


def read(config: Config, model_type: str) -> SpecDraft:
    """Read any family of ROUTERS."""
    if config.values.get("use_mla") is False:  # DeepSeek-OCR: DeepSeek's first attention in a config of the second's
        return read_plain(Config({**config.values, "head_dim": None}, config.where, config.notes), "deepseek")
    moe = ROUTERS[model_type]
    if model_type in BY_METHOD and config.values.get("topk_method") != "noaux_tc":
        moe = replace(moe, correction="")
    return read_with(config, moe, model_type)


def read_with(config: Config, moe: Moe, model_type: str) -> SpecDraft:
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    tied = config.flag("tie_word_embeddings")
    context = rope.context_of(config)
    sparse = sparse_layers(config, num_layers)
    dsa = "index_head_dim" in config
    indexed = indexed_layers(config, num_layers) if dsa else [False] * num_layers
    names = ("input_layernorm", "post_attention_layernorm", *MORE_NORMS.get(model_type, ()))
    norms = tuple(norm(name, hidden) for name in names)
    base = latent_attention(config, hidden) + norms
    extra = {True: indexer(config, hidden) if dsa else (), False: ()}
    feed_forward = {True: expert_layer(config, moe, hidden) if any(sparse) else ()}
    if not all(sparse):
        feed_forward[False] = dense_mlp(config, PLAIN, hidden, config.count("intermediate_size"))
    return SpecDraft(
        hidden_size=hidden,
        num_heads=config.count("num_attention_heads"),
        vocab_size=vocab,
        context=context,
        layers=[latent_caches(config, indexed=flag if dsa else None) for flag in indexed],
        layer_weights=[base + extra[indexed[i]] + feed_forward[sparse[i]] for i in range(num_layers)],
        other_weights=list(outer_weights(config, PLAIN, vocab, hidden, tied)),
        ropes=rope.tables(config, config.count("qk_rope_head_dim"), context.positions),
        tied=tied,
        experts_per_token=config.count(*TOP_K_KEYS, default=1),
        widest_mlp=config.count("moe_intermediate_size", "intermediate_size"),
    )


READERS = dict.fromkeys(ROUTERS, read)
