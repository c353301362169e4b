"""Zamba 2: Mamba 2 everywhere, and in some layers one of a few shared transformers, told apart by adapters.

Source: vLLM 0.33 zamba2.py; compared with its parameters (tests/facts/architectures.jsonl).
"""

from kvplan.models.families.blocks import Heads, SpecDraft, attention, gated_mlp, norm, row, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, outer_weights
from kvplan.models.families.hybrid import Layer, draft, ssm_dtype
from kvplan.models.families.mla import PLAIN
from kvplan.models.families.state import mamba2
from kvplan.models.spec import Part, Weight


def read(config: Config, model_type: str) -> SpecDraft:
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads, head_dim = config.count("n_mamba_heads", default=8), config.count("mamba_headdim")
    values = {**config.values, "mamba_proj_bias": config.flag("add_bias_linear")}
    mixer, state = mamba2(
        Config(values, config.where, config.notes), hidden, heads * head_dim, heads, head_dim,
        config.count("mamba_ngroups", default=1), config.count("mamba_d_state", default=64),
        config.count("mamba_d_conv", default=4), ssm_dtype=ssm_dtype(config, "mamba_ssm_cache_dtype", None),
    )  # fmt: skip
    mamba = (*mixer, norm("input_layernorm", hidden))
    chosen = config.ints("hybrid_layer_ids")
    if chosen is None:
        raise config.fail("hybrid_layer_ids", "missing", "kvplan cannot tell which layers attend")
    blocks, rank = config.count("num_mem_blocks", default=1), config.count("adapter_rank", default=128)
    inner, wide = config.count("intermediate_size"), config.count("attention_hidden_size", default=2 * hidden)
    count = config.count("num_attention_heads")
    width = config.count("attention_head_dim", default=2 * hidden // count)
    own = Heads(count, config.count("num_key_value_heads", default=count), width, width)
    qkv, _ = attention(wide, own)
    adapter: tuple[Weight, ...] = (
        Weight("gate_up_proj_adapter.A", "mlp", hidden, (Part(rank),), "outputs"),
        Weight("gate_up_proj_adapter.B", "mlp", rank, (Part(2 * inner),), "outputs"),
    )
    shared = (
        qkv,
        row("self_attn.o_proj", count * width, hidden, "attention"),
        *gated_mlp(hidden, inner),
        *adapter * len(chosen),  # each shared block has those of every layer that may use it
        norm("shared.input_layernorm", wide),
        norm("pre_ff_layernorm", hidden),
    )
    link = whole("linear", hidden, hidden, "mlp")
    layers: list[Layer] = [(mamba, (state,))] * num_layers
    for turn, i in enumerate(chosen):
        layers[i] = ((*mamba, link, *(shared if turn < blocks else ())), (attention_cache(own, None), state))
    tied = config.flag("tie_word_embeddings", True)
    other = list(outer_weights(config, PLAIN, vocab, hidden, tied))
    return draft(config, layers, other, heads=own, tied=tied, widest=inner)


READERS = {"zamba2": read}
