"""Qwen3-Next and Qwen3.5 on the engine: logits and tokens are transformers', states in slots as large as planned."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from engine import EngineConfig
from engine.attention import TritonAttention
from engine.delta_net import CHUNK, chunk_rule, step_rule
from engine.kernels import torch_backend
from engine.llm import Engine
from engine.state_slots import StateSlots
from engine.tp import TensorParallel
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models import catalog, hf_config
from kvplan.models.spec import HeadAttention, RecurrentState
from kvplan.servers.bundled.rules import EngineInputs, predict
from kvplan.sizing import layout
from tests.engine.test_engine_models import BOUND, reference_logits, teacher_forced
from tests.support import small_models
from tests.support.oracle_data import needs_oracle_data, spec_named
from tests.support.small_engines import engine_for, greedy, random_tokens, run_dry, wrong_greedy_tokens

PROMPT_LENS = (1, 7, CHUNK + 3)


def engine_of(family: str, **changes: Any) -> Engine:
    return engine_for(family, **{"enable_prefix_caching": False, **changes})


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        ("qwen3_next", 24),
        ("qwen3_5", 24),
        *(
            pytest.param(*case, marks=FULL)
            for case in (("qwen3_next", 120), ("qwen3_next_dense", 24), ("qwen3_5", 120), ("qwen3_5_moe", 24))
        ),
    ],
)
def test_teacher_forced_logits_are_those_of_transformers(family: str, budget: int, tmp_path: Path) -> None:
    """Prompts whole and in chunks that end anywhere, beside the others' decodes."""
    folder = small_models.save_small_model(family, tmp_path / family)
    reference = small_models.load_reference(folder)
    texts = random_tokens(*(n + 12 for n in PROMPT_LENS))
    engine = engine_of(family, max_num_batched_tokens=budget)
    for logits, text, n in zip(teacher_forced(engine, texts, PROMPT_LENS), texts, PROMPT_LENS, strict=True):
        expected = reference_logits(reference, text, n)
        assert (logits - expected).abs().max() < BOUND * expected.abs().max()


def publish(folder: Path, model_type: str) -> None:
    """Make a text model's folder one as Qwen publishes: beside a vision tower, experts packed, layers for drafts."""
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": model_type, "text_config": config, "vision_config": VISION, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**outer, "dtype": "float32"}))
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = name.replace("model.", "model.language_model.", 1)
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", own)
        if match:
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
        else:
            tensors[own] = tensor
    for (place, part), by_number in experts.items():
        stacked = [torch.stack([by_number[i] for i in range(len(by_number))])]
        if part == "gate":
            up = experts[place, "up"]
            stacked.append(torch.stack([up[i] for i in range(len(up))]))
        if part != "up":
            tensors[f"{place}.{'gate_up' if part == 'gate' else part}_proj"] = torch.cat(stacked, 1)
    beside = {"model.visual.patch_embed.proj.bias": torch.ones(4), "mtp.norm.weight": torch.ones(4)}
    save_file({**tensors, **beside}, folder / "model.safetensors")


VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
    "num_position_embeddings": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "model_type": "qwen3_5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "model_type"),
    [pytest.param("qwen3_5", "qwen3_5", marks=FULL), ("qwen3_5_moe", "qwen3_5_moe")],
)
def test_qwen3_5_reads_as_published(family: str, model_type: str, tmp_path: Path) -> None:
    """Names of Qwen3.5-35B-A3B's index (sgl-project/sglang-jax#1251, paiml/realizar#134): experts in two tensors,
    [256, 1024, 2048] and [256, 2048, 512] there, behind model.language_model., with visual and mtp beside."""
    folder = small_models.save_small_model(family, tmp_path / family)
    reference = small_models.load_reference(folder)
    publish(folder, model_type)
    (text,) = random_tokens(30)
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "max_model_len": 64, "max_num_batched_tokens": 24}
    engine = Engine(folder, EngineConfig(device="cpu", dtype="float32", enable_prefix_caching=False, **options))
    (logits,) = teacher_forced(engine, [text], (20,))
    expected = reference_logits(reference, text, 20)
    assert (logits - expected).abs().max() < BOUND * expected.abs().max()


@needs_oracle_data
@pytest.mark.parametrize("name", ["Qwen__Qwen3.5-27B", "Qwen__Qwen3.6-27B", "Qwen__Qwen3.5-35B-A3B"])
def test_every_layer_of_a_published_qwen3_5_has_a_computation(name: str) -> None:
    """Three delta nets, then one attention that turns a quarter of 256 elements, as the published configs say."""
    decoder = spec_named(name).decoder
    kinds = [type(layer.attention).__name__ for layer in decoder.layers]
    assert kinds == ["DeltaNet", "DeltaNet", "DeltaNet", "HeadAttention"] * (len(kinds) // 4)
    attention = decoder.layers[3].attention
    assert isinstance(attention, HeadAttention)
    assert attention.rotary is not None
    assert (attention.rotary.dim, attention.rotary.theta, attention.gated) == (64, 10_000_000, True)


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=FULL), True])
def test_tokens_stay_the_models_when_sequences_give_way_and_slots_change_hands(is_async: bool) -> None:
    """A pool too small for all: who is preempted begins anew, in whatever slot is free."""
    prompts = random_tokens(20, 9, 33, 14, 26)
    engine = engine_of("qwen3_next", num_blocks=22, max_num_seqs=3, async_scheduling=is_async)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(14), request_id=str(i))
    outputs = run_dry(engine)
    assert engine.scheduler.num_preemptions
    for i, prompt in enumerate(prompts):
        assert wrong_greedy_tokens("qwen3_next", prompt, outputs[str(i)].token_ids) == []


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_the_rule_in_chunks_and_step_by_step_is_that_of_transformers(length: int) -> None:
    source = torch.Generator().manual_seed(length)
    heads, k_dim, v_dim = 3, 8, 5

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    q, k, v = drawn(length, heads, k_dim), drawn(length, heads, k_dim), drawn(length, heads, v_dim)
    beta, log_decay, state = drawn(length, heads).sigmoid(), -drawn(length, heads).abs(), drawn(heads, v_dim, k_dim)
    k = k / k.norm(dim=-1, keepdim=True)
    expected, last = torch_recurrent_gated_delta_rule(
        q[None], k[None], v[None], g=log_decay[None], beta=beta[None], initial_state=state.transpose(-1, -2)[None],
        output_final_state=True,
    )  # fmt: skip
    scaled = q * k_dim**-0.5
    outputs, after = chunk_rule(scaled, k, v, beta, log_decay, state)
    torch.testing.assert_close(outputs, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, last[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)
    stepped, steps = state[None], []
    for i in range(length):
        output, stepped = step_rule(
            scaled[i : i + 1], k[i : i + 1], v[i : i + 1], beta[i : i + 1], log_decay[i : i + 1], stepped
        )
        steps.append(output)
    torch.testing.assert_close(torch.cat(steps), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stepped[0], after, rtol=1e-4, atol=1e-5)


def saved(folder: Path, family: str = "qwen3_next", **changes: Any) -> Path:
    small_models.small_config(family, **changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_next", "float32"), ("qwen3_next", "bfloat16"), ("qwen3_5", "float32"), ("qwen3_5_moe", "bfloat16")],
)
def test_memory_is_as_planned_to_the_byte_and_activations_nearly(family: str, dtype: Any, tmp_path: Path) -> None:
    """Activations: a formula, of a chunk's matrices a fitted one; 16 shapes gave -9% to +15%."""
    spec = hf_config.load_spec(saved(tmp_path, family, linear_key_head_dim=64, linear_value_head_dim=32))
    sizes: dict[str, Any] = {
        "block_size": 16, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 3, "max_num_batched_tokens": 128,
    }  # fmt: skip
    config = EngineConfig(device="cpu", dtype=dtype, load_format="dummy", enable_prefix_caching=False, **sizes)
    engine = Engine(spec, config)
    memory = engine.memory_report()
    predicted = predict(
        spec,
        EngineInputs(
            total=memory.total, dtype=dtype, kv_cache_dtype=dtype, gpu_memory_utilization=0.9, backend="torch", **sizes
        ),
    )
    assert (predicted.weights, predicted.buffers) == (memory.weights, memory.buffers)
    assert (predicted.kv_cache, predicted.block_bytes) == (memory.kv_cache, memory.block_bytes)
    assert predicted.activations == pytest.approx(memory.activations, rel=0.16)
    slots = [kv for kv in engine.runner.kv.layers.values() if isinstance(kv, StateSlots)]
    assert len(slots) == 3  # and one layer of attention
    state = next(cache for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState))
    # 3 columns of 2 * 2 * 64 + 4 * 32 channels, and 4 matrices of 32 x 64, of each of 3 sequences.
    size = 4 if dtype == "float32" else 2
    of_matrices = size if family == "qwen3_next" else 4  # Qwen3.5's are in float32
    assert layout.state_bytes(state, dtype, 1) == 3 * 384 * size + 4 * 32 * 64 * of_matrices
    assert {kv.inputs.nbytes + kv.states.nbytes for kv in slots} == {3 * layout.state_bytes(state, dtype, 1)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_loras": 2}, "max_loras is not combined with the recurrent states of "),
        (
            {"kv_offloading_size": 1.0, "enable_prefix_caching": False},
            "kv_offloading_size is not combined with the recurrent states of ",
        ),
    ],
)
def test_what_states_are_not_combined_with_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine_of("qwen3_next", **changes)
    assert str(caught.value).startswith(says)


def test_there_is_no_kernel_for_states(tmp_path: Path) -> None:
    spec = hf_config.load_spec(saved(tmp_path))
    reason = TritonAttention(torch_backend).unsupported(spec, TensorParallel(), 16, torch.float32, torch.float32)
    assert reason == "recurrent states have no kernel here; use backend torch"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("falcon-h1-34b", "layer 0 keeps FullAttention and a mamba2 state, which the engine cannot run"),
        ("jamba-mini", "jamba-1.5-mini: layer 0 keeps a mamba1 state, which the engine cannot run"),
        ("kimi-linear-48b-a3b", "kimi-linear-48b-a3b: layer 0 keeps a kda state, which the engine cannot run"),
    ],
)
def test_other_models_with_states_are_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(says)):
        Engine(catalog.load(name), EngineConfig(device="cpu", load_format="dummy", enable_prefix_caching=False))
