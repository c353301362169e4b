"""Qwen4's preview: gated delta nets and attention over an index of pooled keys, mixed by hyper-connections; some layers
add rows of an n-gram table, which lies in host memory unless a server is told otherwise.

Source: vLLM 0.33 models/qwen4_exp (nvidia/model.py, hyperconnection.py, ple_layer.py, ngram_embedding.py,
indexer_qsa.py, common/qsa_cache.py); transformers 5.23 models/qwen4_exp/configuration_qwen4_exp.py.
"""

from dataclasses import replace

from kvplan.models.families.blocks import SpecDraft, attention, norm, qk_norms, replicated, table, vector, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, heads_of
from kvplan.models.families.hybrid import draft, ssm_dtype
from kvplan.models.families.moe import Moe, expert_layer
from kvplan.models.families.state import gated_delta_net
from kvplan.models.spec import LayerCache, Part, Place, RecurrentState, Sharing, SparseIndexer, Weight

FULL: tuple[str, ...] = ("full_attention", "indexed_attention", "qwen_sparse_attention")
ALIGNED = 16  # rows of the projection that also injects: padded to a multiple
STORED = {"": None, "float8_e4m3fn": "fp8", "nvfp4": "nvfp4"}  # of tables: as the checkpoint's quantization says, or so
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # Miller-Rabin is exact below 2**64 with these


def is_prime(number: int) -> bool:
    """True for a prime below 2**64."""
    if number < 2 or any(number % prime == 0 for prime in WITNESSES):
        return number in WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in WITNESSES:
        power = pow(base, odd, number)
        if power not in (1, number - 1) and not any(
            (power := power * power % number) == number - 1 for _ in range(twos - 1)
        ):
            return False
    return True


def table_rows(config: Config, index: int) -> int:
    """Rows of the table of the `index`-th layer that has one: for each head the next prime that no earlier head has."""
    heads = (config.count("ngram_size", default=3, low=2) - 1) * config.count("heads_per_ngram", default=8)
    size, rows = config.count("ngram_vocab_size_base", default=20_000_000) - 1, 0
    for head in range((index + 1) * heads):
        size += 1
        while not is_prime(size):
            size += 1
        rows += size if head >= index * heads else 0
    step = config.count("make_ngram_vocab_size_divisible_by", default=128)
    return -(-rows // step) * step


def streams(config: Config, hidden: int, name: str, *, injects: bool = True) -> tuple[Weight, ...]:
    """Mixing of several copies of the hidden state, by a low-rank gate."""
    copies, rank = config.count("hc_count", default=4), config.count("hc_lowrank", default=320)
    down = -(-(rank + copies) // ALIGNED) * ALIGNED if injects else rank
    return (
        norm(f"{name}.hc_norm", copies * hidden),
        whole(f"{name}.input_mix_weight_down", copies * hidden, down, "mlp", quantizable=False),
        whole(f"{name}.input_mix_weight_up", rank, copies * hidden, "mlp", quantizable=False),
    )


def ngrams(config: Config, hidden: int, index: int) -> tuple[tuple[Weight, ...], LayerCache]:
    """A layer's n-gram table, what reads it, and its convolution's state, whole on every rank."""
    width, wide = config.count("ple_embed_dim", default=hidden), config.count("hc_count", default=4) * hidden
    size, heads = config.count("ngram_size", default=3, low=2), config.count("heads_per_ngram", default=8)
    kernel = config.count("ple_conv_kernel_size", default=4)
    total = (size - 1) * heads
    if width % total:
        raise config.fail("ple_embed_dim", f"is no multiple of the {total} heads ({width})", "correct the config")
    stored = config.text("ple_embedding_dtype", "")
    if stored not in STORED:
        raise config.fail("ple_embedding_dtype", f"{stored!r:.40} is none of {', '.join(filter(None, STORED))}")
    weights = (
        Weight(
            "ple.ple_embedding.ngram_embedding", "embedding", width // total, (Part(table_rows(config, index)),),
            "outputs", dtype=STORED[stored], serves=("tables",),
        ),
        whole("ple.kv_proj", width, (wide, hidden), "mlp"),
        *(norm(f"ple.norm_{name}", wide) for name in ("key", "query", "conv")),
        vector("ple.conv1d", wide * kernel, "mlp"),
    )  # fmt: skip
    return weights, RecurrentState("short_conv", (kernel - 1) * size + 1, (Part(1, wide, Sharing.GROUPS),), 0, (1, 1))


def read(config: Config, model_type: str) -> SpecDraft:
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads, tied = heads_of(config), config.flag("tie_word_embeddings")
    types = config.per_layer_names("layer_types", num_layers)
    if types is None:
        every = config.count("full_attention_interval", default=4)
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    linear, state = gated_delta_net(config, hidden, ssm_dtype(config, "mamba_ssm_dtype", None))
    full = attention(hidden, heads, qkv_bias=config.flag("attention_bias"), gate=True) + qk_norms(heads)
    caches: tuple[LayerCache, ...] = (attention_cache(heads, None),)
    if config.maybe_count("indexer_n_heads") is not None:
        dim, pool = config.count("indexer_head_dim"), config.count("indexer_compress_ratio", low=2)
        rows = (config.count("indexer_n_heads") + 1) * dim
        qkv, *others = full
        full = (
            replace(qkv, parts=(*qkv.parts, replicated(rows))),  # one matrix with the index's queries and keys
            *others,
            norm("self_attn.indexer.q_layernorm", dim),
            norm("self_attn.indexer.k_layernorm", dim),
        )
        caches += (SparseIndexer(dim, pool, plain=True, positions=24 if "mrope_section" in rope(config) else 0),)
    moe = Moe(shared="shared_expert_intermediate_size", shared_name="mlp.shared_expert", shared_gate=True)
    base = (
        *streams(config, hidden, "attn_hyper_connection"),
        *streams(config, hidden, "mlp_hyper_connection"),
        *expert_layer(config, moe, hidden),
    )
    with_tables = sorted(set(config.ints("ple_layer_ids") or ()))  # numbered from 1
    layers = []
    for number, kind in enumerate(types, 1):
        if kind != "linear_attention" and kind not in FULL:
            raise config.fail("layer_types", f"{kind!r} is a layer kind kvplan cannot size here")
        weights, own = (linear, (state,)) if kind == "linear_attention" else (full, caches)
        if number in with_tables:
            added, window = ngrams(config, hidden, with_tables.index(number))
            weights, own = weights + added, (*own, window)
        layers.append((weights + base, own))
    other = [
        table("model.embed_tokens", vocab, hidden, Place.EVERY),
        *(() if tied else (table("lm_head", vocab, hidden, Place.LAST, "lm_head"),)),
        *(
            Weight(w.name, w.group, w.inputs, w.parts, place=Place.LAST)
            for w in streams(config, hidden, "model.hyper_connection_mixer", injects=False)
        ),
    ]
    return draft(config, layers, other, heads=heads, tied=tied)


def rope(config: Config) -> dict[str, object]:
    stated = config.values.get("rope_parameters") or config.values.get("rope_scaling")
    return stated if isinstance(stated, dict) else {}


READERS = {"qwen4_exp_text": read, "qwen4_exp": read}
