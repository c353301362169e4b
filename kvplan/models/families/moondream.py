"""Moondream 3: blocks with one norm, heads scaled by what they read, experts after the first layers; and its tower.

Source: vLLM 0.33 moondream3.py; compared with its parameters (tests/facts/architectures.jsonl).
"""

from kvplan.models.families import dense, moe
from kvplan.models.families.blocks import SpecDraft, vector
from kvplan.models.families.config import Config
from kvplan.models.families.dense import Traits
from kvplan.models.families.moe import Moe
from kvplan.models.families.tower_blocks import block, column, depth_of, layer_norm, linear, row
from kvplan.models.spec import Part, Weight

TEXT = {
    "hidden_size": ("dim", 2048), "intermediate_size": ("ff_dim", 8192), "num_hidden_layers": ("n_layers", 24),
    "vocab_size": ("vocab_size", 51200), "max_position_embeddings": ("max_context", 4096),
    "num_attention_heads": ("n_heads", 32), "num_key_value_heads": ("n_kv_heads", 32),
}  # fmt: skip
EXPERTS = {
    "first_k_dense_replace": ("start_layer", 4), "num_experts": ("n_experts", 64),
    "num_experts_per_tok": ("n_experts_per_tok", 8), "moe_intermediate_size": ("expert_inner_dim", 1024),
}  # fmt: skip


def read(config: Config, model_type: str) -> SpecDraft:
    text = config.sub("config").sub("text")
    sparse = text.sub("moe")
    values = {key: text.count(name, default=default) for key, (name, default) in TEXT.items()}
    values |= {key: sparse.count(name, default=default) for key, (name, default) in EXPERTS.items()}
    own = Config({"rope_theta": text.number("rope_theta", 1_500_000.0), **values}, text.where, config.notes)
    traits = Traits(
        qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, norms=("ln",), layer_norm=True, lm_head_bias=True
    )
    draft = moe.read_with(own, traits, Moe(router_bias=True), model_type)
    heads = dense.heads_of(own)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    scales = (
        vector("attn.tau_alpha", heads.num_heads, "attention", split=True),
        *(Weight(f"attn.tau_{name}", "attention", width, (Part(heads.num_heads),), "outputs") for name in ("wq", "wv")),
    )
    draft.layer_weights = [(*weights, *scales) for weights in draft.layer_weights]
    return draft


def tower(outer: Config) -> list[Weight]:
    """SigLIP's blocks; each image and its crops side by side, through two layers."""
    config = outer.sub("config").sub("vision")
    hidden, patch = config.count("enc_dim", default=1152), config.count("enc_patch_size", default=14)
    inner, middle = config.count("enc_ff_dim", default=4304), config.count("proj_inner_dim", default=8192)
    text = outer.sub("config").sub("text").count("dim", default=2048)
    return [
        linear("vision.pos_emb", hidden, (config.count("crop_size", default=378) // patch) ** 2),
        linear("vision.patch_emb", 3 * patch**2, hidden, bias=True),
        *block(config, hidden, config.count("enc_n_heads", default=16), inner)
        * depth_of(config, "enc_n_layers", default=27),
        layer_norm("vision.post_ln", hidden),
        column("vision_proj.fc1", 2 * hidden, middle),
        row("vision_proj.fc2", middle, text),
    ]


READERS = {"moondream3": read}
