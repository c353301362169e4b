"""Older families against parameter counts of published checkpoints.

Each expected count is that of the transformers class (5.23) of the model_type, built with these dimensions on the meta
device; the ones marked "published" are also what the model's authors or its safetensors index state.
"""

from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.models import catalog
from kvplan.models.families import classic, multimodal_text
from kvplan.models.families.blocks import SpecDraft
from kvplan.models.families.config import Config
from kvplan.models.hf_config import read_config
from kvplan.models.spec import CrossAttention, FullAttention, Rope, Weight
from tests import oracles

READERS = {**classic.READERS, **multimodal_text.READERS}

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
STARCODER = {
    "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "n_positions": 8192, "n_inner": 24576,
    "vocab_size": 49152, "multi_query": True,
}  # fmt: skip
OPT_350M = {
    "model_type": "opt", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "ffn_dim": 4096,
    "max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 512, "do_layer_norm_before": False,
}  # fmt: skip
OPT_6_7B = OPT_350M | {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "ffn_dim": 16384,
    "word_embed_proj_dim": 4096, "do_layer_norm_before": True,
}  # fmt: skip
BLOOM = {
    "model_type": "bloom", "hidden_size": 14336, "n_head": 112, "n_layer": 70, "vocab_size": 250880, "seq_length": 2048,
}  # fmt: skip
MPT_7B = {
    "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2048,
    "vocab_size": 50432, "no_bias": True, "attn_config": {"alibi": True, "attn_type": "multihead_attention"},
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71,
    "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False, "alibi": False,
    "vocab_size": 65024, "max_position_embeddings": 2048,
}  # fmt: skip
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
FALCON_11B = FALCON_40B | {
    "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 16384, "num_ln_in_parallel_attn": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
FALCON_RW_1B = {
    "model_type": "falcon", "hidden_size": 2048, "n_head": 32, "n_layer": 24, "multi_query": False,
    "parallel_attn": False, "bias": True, "alibi": True, "vocab_size": 50304,
}  # fmt: skip
PHI_2 = {
    "model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": None, "intermediate_size": 10240, "vocab_size": 51200, "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.4,
}  # fmt: skip
PYTHIA_6_9B = {
    "model_type": "gpt_neox", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "intermediate_size": 16384, "vocab_size": 50432, "max_position_embeddings": 2048, "rotary_pct": 0.25,
}  # fmt: skip
GPT_J = {
    "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64,
    "vocab_size": 50400, "tie_word_embeddings": False,
}  # fmt: skip
STABLELM_12B = {
    "model_type": "stablelm", "hidden_size": 5120, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 40, "intermediate_size": 13824, "vocab_size": 100352, "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True,
}  # fmt: skip
STABLELM_3B = STABLELM_12B | {
    "hidden_size": 2560, "num_key_value_heads": 32, "num_hidden_layers": 32, "intermediate_size": 6912,
    "vocab_size": 50304, "qk_layernorm": False, "use_parallel_residual": False,
}  # fmt: skip
GLM_4_9B = {
    "model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40, "ffn_hidden_size": 13696,
    "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 151552,
    "seq_length": 131072, "add_qkv_bias": True, "add_bias_linear": False, "post_layer_norm": True, "rmsnorm": True,
}  # fmt: skip
QWEN_72B = {
    "model_type": "qwen", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80,
    "intermediate_size": 49152, "kv_channels": 128, "no_bias": True, "vocab_size": 152064,
    "max_position_embeddings": 32768, "seq_length": 8192,
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
LLAVA_7B = {
    "model_type": "llava", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_hidden_layers": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_3_2_11B_VISION = {
    "model_type": "mllama_text_model", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 40, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}  # fmt: skip


def read(values: dict[str, Any]) -> SpecDraft:
    kind = values["model_type"]
    return READERS[kind](Config(values, "config.json"), kind)


def weights(draft: SpecDraft) -> list[Weight]:
    return draft.other_weights + [weight for layer in draft.layer_weights for weight in layer]


def by_name(draft: SpecDraft, name: str) -> Weight:
    return next(weight for weight in weights(draft) if weight.name == name)


@pytest.mark.parametrize(
    ("values", "params"),
    [
        (GPT2, 124_439_808),  # published
        (GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),  # GPT-2 XL, published
        (STARCODER, 15_517_456_384),  # published
        (OPT_350M, 331_196_416),  # published
        (OPT_6_7B, 6_658_473_984),
        (BLOOM, 176_247_271_424),  # published
        (BLOOM | {"hidden_size": 4096, "n_head": 32, "n_layer": 30}, 7_069_016_064),  # BLOOM-7b1, published
        (MPT_7B, 6_649_286_656),  # published
        (FALCON_7B, 6_921_720_704),  # published total less the head its checkpoint stores twice
        (FALCON_40B, 41_303_293_952),
        (FALCON_40B | {"hidden_size": 14848, "num_attention_heads": 232, "num_hidden_layers": 80}, 178_557_088_768),
        (FALCON_11B, 11_102_822_400),
        (FALCON_RW_1B, 1_311_625_216),  # published
        (PHI_2, 2_779_683_840),  # published
        (PYTHIA_6_9B, 6_857_302_016),  # published
        (PYTHIA_6_9B | {"hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44,
                        "intermediate_size": 24576}, 20_554_567_680),  # GPT-NeoX-20B
        (GPT_J, 6_050_882_784),
        (STABLELM_3B, 2_795_443_200),  # published
        (STABLELM_12B, 12_143_185_920),
        (GLM_4_9B, 9_399_951_360),  # published total less 32 rotary frequencies
        (QWEN_72B, 72_287_920_128),  # published
        (DBRX, 131_596_523_520),  # published
        (LLAVA_7B, 6_738_415_616),  # Llama-2-7B
        (LLAMA_3_2_11B_VISION, 9_775_192_080),  # published 10,642,941,475 less the tower's 867,749,395
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_published_model(values: dict[str, Any], params: int) -> None:
    assert sum(weight.num_params for weight in weights(read(values))) == params


@pytest.mark.parametrize(
    ("values", "cache"),
    [
        (GPT2, FullAttention(12, 64, 64)),
        (STARCODER, FullAttention(1, 128, 128)),
        (STARCODER | {"multi_query": False}, FullAttention(48, 128, 128)),
        (MPT_7B | {"attn_config": {"kv_n_heads": 8}}, FullAttention(8, 128, 128)),
        (MPT_7B | {"attn_config": {"attn_type": "multiquery_attention"}}, FullAttention(1, 128, 128)),
        (FALCON_7B, FullAttention(1, 64, 64)),  # though num_kv_heads says 71
        (FALCON_40B, FullAttention(8, 64, 64)),
        (FALCON_RW_1B, FullAttention(32, 64, 64)),
        (PHI_2, FullAttention(32, 80, 80)),
        (STABLELM_12B, FullAttention(8, 160, 160)),
        (GLM_4_9B, FullAttention(2, 128, 128)),
        (GLM_4_9B | {"multi_query_attention": False}, FullAttention(32, 128, 128)),
        (DBRX, FullAttention(8, 128, 128)),
    ],
)
def test_each_family_names_its_kv_heads_in_its_own_way(values: dict[str, Any], cache: FullAttention) -> None:
    draft = read(values)
    assert set(draft.layers) == {(cache,)}


def test_the_default_context_is_the_one_the_model_was_made_for() -> None:
    assert read(GPT2).context.default == 1024
    assert read(BLOOM).context.default == 2048
    assert read(DBRX).context.default == 32768
    assert read(GLM_4_9B).context.default == 131072
    assert read(QWEN_72B).context.default == 8192  # seq_length, although max_position_embeddings says 32,768


def test_a_rotary_table_covers_the_rotated_part_of_a_head() -> None:
    assert read(GPT2).ropes == read(BLOOM).ropes == read(MPT_7B).ropes == read(FALCON_RW_1B).ropes == ()
    assert read(FALCON_7B).ropes == (Rope(64, 2048),)
    assert read(PYTHIA_6_9B).ropes == (Rope(32, 2048),)
    assert read(GPT_J).ropes == (Rope(64, 2048),)
    assert read(GLM_4_9B).ropes == (Rope(64, 131072),)
    assert read(DBRX).ropes == (Rope(128, 32768),)


def test_a_server_leaves_out_the_head_bias_of_phi() -> None:
    """vLLM 0.33 holds 5,559,265,280 bytes of phi-2: 51,200 biases of two bytes fewer than its parameters."""
    loaded_params = sum(weight.num_params for weight in weights(read(PHI_2)) if weight.is_loaded)
    assert 2 * loaded_params == 5_559_265_280


def test_opt_keeps_two_more_rows_of_positions() -> None:
    assert by_name(read(OPT_6_7B), "model.decoder.embed_positions").outputs == 2050


def test_qwen_1_states_the_mlp_twice_as_wide() -> None:
    draft = read(QWEN_72B)
    assert draft.widest_mlp == 24576
    assert [part.units for part in by_name(draft, "mlp.gate_up_proj").parts] == [24576, 24576]


def test_dbrx_is_a_mixture_of_sixteen_experts() -> None:
    draft = read(DBRX)
    assert draft.experts_per_token == 4
    experts = sum(weight.num_params for weight in weights(draft) if weight.group == "experts")
    assert experts == 126_835_752_960  # 40 layers x 16 experts x 3 matrices of 6,144 x 10,752


def test_llama_3_2_vision_keeps_image_tokens_in_its_cross_attention_layers() -> None:
    draft = read(LLAMA_3_2_11B_VISION)
    crossing = [i for i, caches in enumerate(draft.layers) if isinstance(caches[0], CrossAttention)]
    assert crossing == [3, 8, 13, 18, 23, 28, 33, 38]
    assert by_name(draft, "model.embed_tokens").outputs == 128256 + 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (MPT_7B | {"attn_config": {"alibi": False}}, "alibi is False"),
        (MPT_7B | {"attn_config": {"qk_ln": True}}, "qk_ln is True"),
    ],
)
def test_variants_nobody_serves_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**GPT2, "n_positions": None}, "n_positions: missing"),
        ({**GPT2, "n_embd": 770}, "hidden_size is not a multiple of the number of heads"),
        ({**MPT_7B, "expansion_ratio": 0}, "expansion_ratio must be above 0"),
        ({**PYTHIA_6_9B, "rotary_pct": 1.5}, "rotary_pct must be above 0 and at most 1"),
        ({**OPT_6_7B, "ffn_dim": "16384"}, "ffn_dim must be an integer"),
        ({**FALCON_40B, "num_kv_heads": 7}, "num_kv_heads does not divide the number of heads"),
        ({**GLM_4_9B, "multi_query_group_num": None}, "multi_query_group_num: missing"),
        ({**DBRX, "ffn_config": None}, "ffn_hidden_size: missing"),
        ({**DBRX, "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 2, "moe_top_k": 4}}, "moe_top_k must be"),
        ({**LLAMA_3_2_11B_VISION, "cross_attention_layers": None}, "cross_attention_layers: missing"),
        ({**LLAMA_3_2_11B_VISION, "cross_attention_layers": [3, 40]}, "cross_attention_layers must name"),
    ],
)
def test_a_damaged_config_is_refused_by_the_name_of_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read(values)


def test_the_first_name_of_stablelm_is_read_like_the_second() -> None:
    now = catalog.expand(catalog.facts("stablelm-3b")["config"])
    first = {key: value for key, value in now.items() if key != "partial_rotary_factor"}
    first |= {"model_type": "stablelm_epoch", "architectures": ["StableLMEpochForCausalLM"], "rope_pct": 0.25}
    old, new = (read_config(config, "config.json", "x") for config in (first, now))
    assert (old.layers, old.weights, old.ropes) == (new.layers, new.weights, new.ropes)
    assert oracles.total_params(old) == 2_795_443_200  # the transformers class, on the meta device
