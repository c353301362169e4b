"""Nemotron-H, Granite 4 and LFM2 on the engine: logits and tokens are transformers', bytes as planned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_selective_state_update

from engine import Engine, EngineConfig
from engine.mamba2 import CHUNK, chunk_rule, step_rule
from engine.state_slots import StateBlocks, StateShape, StateSlots, with_room_for_states
from kvplan.core.errors import KvplanError
from kvplan.models import catalog, hf_config
from kvplan.models.spec import FullAttention, HeadAttention, Mamba2, PlainMlp, PlainMoe, RecurrentState
from kvplan.serve.real import inputs_of
from kvplan.servers.bundled.rules import predict
from kvplan.sizing import layout
from tests.engine.test_engine_models import BOUND, reference_logits, teacher_forced
from tests.support import small_models
from tests.support.small_engines import engine_for, greedy, random_tokens, run_dry, wrong_greedy_tokens

FULL = pytest.mark.full
FAMILY = "nemotron_h"
PROMPT_LENS = (1, 7, CHUNK + 3)


@pytest.mark.parametrize(
    ("family", "is_cached"),
    [
        (FAMILY, False),
        ("granite_h", True),
        ("granite_h_moe", False),
        ("nemotron_h_moe", False),
        ("nemotron_h_latent", True),
        ("lfm2", True),
        pytest.param("lfm2", False, marks=FULL),
        *(pytest.param(*case, marks=FULL) for case in [(FAMILY, True), ("granite_h", False), ("granite_h_moe", True)]),
        *(pytest.param(*case, marks=FULL) for case in [("nemotron_h_moe", True), ("nemotron_h_latent", False)]),
    ],
)
def test_teacher_forced_logits_are_those_of_transformers(family: str, is_cached: bool, tmp_path: Path) -> None:
    """Of a checkpoint as it is published; prompts in chunks that end anywhere, beside the others' decodes."""
    folder = small_models.save_small_model(family, tmp_path / family)
    reference = small_models.load_reference(folder)
    if family != "lfm2":
        publish_granite(folder) if family.startswith("granite") else publish(folder)
    texts = random_tokens(*(n + 12 for n in PROMPT_LENS))
    engine = engine_for(folder, enable_prefix_caching=is_cached, max_num_batched_tokens=24)
    for logits, text, n in zip(teacher_forced(engine, texts, PROMPT_LENS), texts, PROMPT_LENS, strict=True):
        expected = reference_logits(reference, text, n)
        assert (logits - expected).abs().max() < BOUND * expected.abs().max()


def publish(folder: Path) -> None:
    """As Nemotron-H-8B and Nano-9B-v2: backbone.embeddings, backbone.layers.N.mixer, and a pattern of letters."""
    tensors = {name.replace("model.", "backbone.", 1): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    letters = {"linear_attention": "M", "mlp": "-", "full_attention": "*", "moe": "E"}
    pattern = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    values = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def publish_granite(folder: Path) -> None:
    """As IBM publishes Granite 4: layers called mamba and attention, and positions "nope" where there are none."""
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["mamba", "attention", "mamba"]
    config["position_embedding_type"] = config["position_embedding_type"] or "nope"
    (folder / "config.json").write_text(json.dumps(config))


def test_names_are_those_that_ibm_publishes(tmp_path: Path) -> None:
    """Those that vLLM 0.33 granitemoehybrid.py loads experts, router and shared MLP from."""
    folder = small_models.save_small_model("granite_h_moe", tmp_path / "granite")
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    names = {name.removeprefix("model.layers.1.") for name in names if name.startswith("model.layers.1.")}
    parts = {name for name in names if "norm" not in name and "self_attn" not in name}
    assert parts == {
        "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.layer.weight", "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight",
    }  # fmt: skip


def test_names_are_those_that_nvidia_publishes(tmp_path: Path) -> None:
    """vLLM 0.33 nemotron_h.py maps backbone to model, embeddings to embed_tokens; transformers reads backbone too."""
    folder = small_models.save_small_model(FAMILY, tmp_path / FAMILY)
    publish(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"} <= names
    assert {name.removeprefix("backbone.layers.0.") for name in names if name.startswith("backbone.layers.0.")} == {
        "norm.weight", "mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.conv1d.weight", "mixer.conv1d.bias",
        "mixer.in_proj.weight", "mixer.out_proj.weight", "mixer.norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize("is_cached", [pytest.param(False, marks=FULL), True])
def test_tokens_stay_the_models_when_sequences_give_way(is_cached: bool) -> None:
    (shared,) = random_tokens(48, seed=2)
    prompts = [shared + tail for tail in random_tokens(3, 20, 9, 26)]
    engine = engine_for(FAMILY, num_blocks=13 if is_cached else 40, max_num_seqs=3, enable_prefix_caching=is_cached)
    for i, prompt in enumerate(prompts * 2):
        engine.add_request(prompt, greedy(14), request_id=str(i))
    outputs = run_dry(engine)
    assert engine.scheduler.num_preemptions
    assert (sum(output.num_cached_tokens for output in outputs.values()) > 0) == is_cached
    for i, prompt in enumerate(prompts * 2):
        assert wrong_greedy_tokens(FAMILY, prompt, outputs[str(i)].token_ids) == []


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 5])
def test_the_rule_in_chunks_and_step_by_step_is_that_of_transformers(length: int) -> None:
    source = torch.Generator().manual_seed(length)
    heads, dim, width = 4, 5, 6

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    values, writes, reads = drawn(length, heads, dim), drawn(length, heads, width), drawn(length, heads, width)
    dt, decay, first = drawn(length, heads).exp(), -drawn(heads).exp(), drawn(heads, dim, width)
    theirs, ours, expected, steps = first[None].clone(), first[None], [], []
    scaled, log_decay = values * dt[..., None], dt * decay
    for i in range(length):
        row = slice(i, i + 1)
        rates = decay[:, None, None].expand(heads, dim, width)
        wide = dt[row, :, None].expand(1, heads, dim)
        expected.append(mamba2_selective_state_update(theirs, values[row], wide, rates, writes[row], reads[row]))
        output, ours = step_rule(scaled[row], writes[row], reads[row], log_decay[row], ours)
        steps.append(output)
    outputs, after = chunk_rule(scaled, writes, reads, log_decay, first)
    for outs, state in ((outputs, after), (torch.cat(steps), ours[0])):
        torch.testing.assert_close(outs, torch.cat(expected), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state, theirs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("family", [FAMILY, "granite_h_moe", "nemotron_h_latent", "lfm2"])
def test_memory_is_as_planned_to_the_byte_and_activations_nearly(
    family: str, dtype: Any, is_cached: bool, tmp_path: Path
) -> None:
    small_models.small_config(family).save_pretrained(tmp_path)
    spec = hf_config.load_spec(tmp_path)
    sizes: dict[str, Any] = {
        "block_size": 16, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 3, "max_num_batched_tokens": 128,
    }  # fmt: skip
    config = EngineConfig(device="cpu", dtype=dtype, load_format="dummy", enable_prefix_caching=is_cached, **sizes)
    engine = Engine(spec, config)
    memory, predicted = engine.memory_report(), predict(spec, inputs_of(engine))
    assert (predicted.weights, predicted.buffers) == (memory.weights, memory.buffers)
    assert (predicted.kv_cache, predicted.block_bytes) == (memory.kv_cache, memory.block_bytes)
    assert predicted.activations == pytest.approx(memory.activations, rel=0.2)
    states = [kv for kv in engine.runner.kv.layers.values() if isinstance(kv, StateSlots | StateBlocks)]
    assert {type(kv) for kv in states} == {StateBlocks if is_cached else StateSlots}
    state = next(cache for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState))
    # 3 columns of 4 * 32 + 2 * 2 * 8 channels in the model's dtype, and 4 matrices of 32 x 8, Nemotron-H's in float32.
    size = 4 if dtype == "float32" else 2
    if family == "lfm2":  # 2 columns of 64 channels
        assert layout.state_bytes(state, dtype, 1) == 2 * 64 * size
        return
    assert layout.state_bytes(state, dtype, 1) == 3 * 160 * size + 4 * 32 * 8 * (size if "granite" in family else 4)
    shape = StateShape.of(state, engine.runner.dtype)
    assert shape.num_bytes == layout.state_bytes(state, dtype, 1)


@pytest.mark.parametrize("name", ["nemotron-h-8b"])
def test_a_published_model_is_what_its_pattern_says(name: str) -> None:
    """M-M-M-M*-...: 24 of Mamba 2, 4 of attention and 24 of MLPs among the 52 layers of Nemotron-H-8B."""
    spec = catalog.load(name)
    kinds = [layer.attention or layer.mlp for layer in spec.decoder.layers]
    counts = [
        sum(isinstance(kind, kind_of_layer) for kind in kinds) for kind_of_layer in (Mamba2, HeadAttention, PlainMlp)
    ]
    assert counts == [24, 4, 24]
    assert sum(counts) == spec.num_layers


def test_experts_of_a_published_model_are_what_its_pattern_says() -> None:
    """MEMEM*EMEMEM*...: 23 of Mamba 2, 23 of experts and 6 of attention among Nemotron-3-Nano's 52 layers."""
    layers = catalog.load("nemotron-3-nano-30b-a3b").decoder.layers
    kinds = [type(layer.attention or layer.mlp) for layer in layers]
    assert [kinds.count(kind_of_layer) for kind_of_layer in (Mamba2, PlainMoe, HeadAttention)] == [23, 23, 6]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mlp_bias": True}, "experts without a gate only with one shared expert and without biases"),
        ({"n_shared_experts": 2}, "experts without a gate only with one shared expert and without biases"),
        ({"num_experts_per_tok": 9}, "leaves no choice of 9 from 1 of 1 groups of 8 experts"),
    ],
)
def test_other_experts_are_refused_by_name(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    small_models.small_config("nemotron_h_moe", **changes).save_pretrained(tmp_path)
    spec = hf_config.load_spec(tmp_path)
    with pytest.raises(KvplanError, match=says):
        Engine(spec, EngineConfig(device="cpu", load_format="dummy"))


@pytest.mark.parametrize(
    ("name", "tokens", "page"), [("nemotron-h-8b", 1040, 4_259_840), ("nemotron-nano-9b-v2", 1312, 5_373_952)]
)
def test_a_block_has_the_tokens_that_a_state_takes(name: str, tokens: int, page: int) -> None:
    """vLLM 0.33's own block_size_after_backend and mamba_page_size_padded, asked of its code for these models."""
    spec = catalog.load(name)
    config = with_room_for_states(spec, EngineConfig(device="cpu"))
    assert config.block_size == tokens
    attention = next(cache for caches in spec.layers for cache in caches if isinstance(cache, FullAttention))
    assert tokens * layout.token_bytes(attention, "bfloat16", 1) == page
    state = next(cache for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState))
    assert page - 16 * page // tokens < StateShape.of(state, torch.bfloat16).num_bytes <= page
