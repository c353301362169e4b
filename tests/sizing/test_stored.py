"""Weights from a checkpoint's own headers: files that transformers wrote, split as the facts say."""

from pathlib import Path

import pytest

from kvplan.models.checkpoint import read_checkpoint
from kvplan.models.hf_config import load_spec, read_config
from kvplan.models.tensors import Checkpoint, TensorInfo
from kvplan.sizing.stored import stored_weights
from kvplan.sizing.weights import Layout, total_weights

COMMON = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "llama": COMMON,
    "qwen2": COMMON,
    "gemma2": COMMON | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "qwen3_moe": COMMON | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": COMMON | {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 8, "topk_method": "noaux_tc",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each family, saved by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folders = {}
    for family, values in MODELS.items():
        folder = tmp_path_factory.mktemp(family)
        config = transformers.AutoConfig.for_model(family, **values)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="100KB")
        folders[family] = folder
    return folders


def read(folder: Path) -> Checkpoint:
    checkpoint = read_checkpoint(folder)
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("family", MODELS)
def test_one_rank_holds_what_the_files_hold(checkpoints: dict[str, Path], family: str) -> None:
    folder = checkpoints[family]
    checkpoint, spec = read(folder), load_spec(folder)
    # Three layers' routing biases of 8 experts were saved in 2 bytes and are kept in 4.
    widened = 3 * 8 * 2 if family == "deepseek_v3" else 0
    stored_bytes = sum(stored_weights(spec, checkpoint, Layout()).values())
    assert stored_bytes == sum(t.num_bytes for t in checkpoint.tensors) + widened


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(pp=2, stage=1), Layout(tp=2, ep=2)]
)
def test_a_rank_holds_the_same_by_headers_as_by_facts(
    checkpoints: dict[str, Path], family: str, layout: Layout
) -> None:
    """A vocabulary of 512 needs no padding, so both ways must agree to the byte."""
    spec = load_spec(checkpoints[family])
    by_headers = stored_weights(spec, read(checkpoints[family]), layout)
    assert sum(by_headers.values()) == total_weights(spec, layout)


def test_a_float32_checkpoint_is_held_in_the_dtype_it_is_served_in() -> None:
    spec = read_config({"model_type": "llama"} | COMMON, "config.json", "x")
    wide = Checkpoint(
        "safetensors", (TensorInfo("model.layers.0.mlp.up_proj.weight", "F32", (128, 64), 32768),), 32768, (), ()
    )
    assert stored_weights(spec, wide, Layout()) == {"mlp": 128 * 64 * 2}
    assert stored_weights(spec, wide, Layout(dtype="float32")) == {"mlp": 128 * 64 * 4}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w1.weight"),
        ("mixtral", "block_sparse_moe.experts.3.w2.weight"),
        ("gpt_oss", "mlp.experts.gate_up_proj_blocks"),
        ("gpt_oss", "mlp.experts.down_proj_scales"),
        ("phi3", "self_attn.qkv_proj.weight"),
        ("phi3", "mlp.gate_up_proj.weight"),
    ],
)
def test_other_usual_names_are_split_too(model_type: str, name: str) -> None:
    """Names as in the published checkpoints of Mixtral, gpt-oss and Phi-3."""
    extra = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128, "num_key_value_heads": 8}
    spec = read_config({"model_type": model_type} | COMMON | extra, "config.json", "x")
    checkpoint = Checkpoint("safetensors", (TensorInfo(f"model.layers.0.{name}", "U8", (8, 128), 1024),), 1024, (), ())
    assert sum(stored_weights(spec, checkpoint, Layout()).values()) == 1024
    assert sum(stored_weights(spec, checkpoint, Layout(tp=2)).values()) == 512
    assert "other" not in stored_weights(spec, checkpoint, Layout(tp=2))


def test_layers_past_the_models_own_stay_on_disk() -> None:
    spec = read_config({"model_type": "llama"} | COMMON, "config.json", "x")
    extra = Checkpoint(
        "safetensors", (TensorInfo("model.layers.4.mlp.up_proj.weight", "BF16", (128, 64), 16384),), 16384, (), ()
    )
    assert not stored_weights(spec, extra, Layout())


def test_a_tensor_without_a_name_in_the_facts_is_counted_whole() -> None:
    spec = read_config({"model_type": "llama"} | COMMON, "config.json", "x")
    odd = Checkpoint("safetensors", (TensorInfo("model.layers.0.extra.weight", "BF16", (8, 8), 128),), 128, (), ())
    assert stored_weights(spec, odd, Layout(tp=2)) == {"other": 128}


def test_gguf_tensors_are_split_by_the_modules_they_are() -> None:
    """Types and sizes as llama.cpp writes them: Q4_K is 144 bytes per 256 weights, F32 norms."""
    spec = read_config({"model_type": "llama"} | COMMON, "config.json", "x")
    quarter = 128 * 64 * 144 // 256
    gguf = Checkpoint(
        "gguf",
        (
            TensorInfo("blk.0.ffn_up.weight", "Q4_K", (128, 64), quarter),
            TensorInfo("blk.1.ffn_down.weight", "Q4_K", (64, 128), quarter),
            TensorInfo("blk.0.attn_norm.weight", "F32", (64,), 256),
            TensorInfo("token_embd.weight", "Q4_K", (512, 64), 4 * quarter),
            TensorInfo("blk.0.something_new.weight", "F32", (8,), 32),
        ),
        6 * quarter + 288, (), (),
    )  # fmt: skip
    whole, two = stored_weights(spec, gguf, Layout()), stored_weights(spec, gguf, Layout(tp=2))
    assert whole == {"mlp": 2 * quarter, "norm": 64 * 2, "embedding": 4 * quarter, "other": 32}
    assert two == {"mlp": quarter, "norm": 64 * 2, "embedding": 2 * quarter, "other": 32}


def test_a_vocabulary_is_padded_as_a_server_pads_it() -> None:
    """1,000 rows are held as 1,024: vLLM pads to a multiple of 64."""
    spec = read_config({"model_type": "llama"} | COMMON | {"vocab_size": 1000}, "config.json", "x")
    table = Checkpoint(
        "safetensors", (TensorInfo("model.embed_tokens.weight", "BF16", (1000, 64), 128000),), 128000, (), ()
    )
    assert stored_weights(spec, table, Layout()) == {"embedding": 1024 * 64 * 2}
    assert stored_weights(spec, table, Layout(tp=2)) == {"embedding": 512 * 64 * 2}
