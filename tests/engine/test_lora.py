"""Adapters in the engine: logits and tokens of each request are those of the model that its adapter is merged into."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine
from engine.adapters import Adapters
from engine.draft_rules import SpeculativeConfig
from engine.kernels import torch_backend
from engine.layers import GroupedAttention, Linear, SummedLinear
from engine.loader import NoWeights
from engine.lora import LoraSlots
from engine.models import Model
from engine.tp import TensorParallel
from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError, UsageError
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.serve.real import inputs_of
from kvplan.servers.bundled.rules import EngineInputs, lora_bytes, predict
from tests.support import small_models
from tests.support.parts import some
from tests.support.small_adapters import ATTENTION, MLP, merged_model, saved_adapter
from tests.support.small_engines import ROUNDING, engine_for, greedy, random_tokens, run_dry, saved_model


@cache
def reference(folder: Path) -> Any:
    return small_models.load_reference(folder)


@torch.inference_mode()
def wrong_tokens(folder: Path, prompt: list[int], token_ids: list[int]) -> list[str]:
    """Where tokens are not what transformers chooses with the weights in this folder, but for ties by rounding."""
    text = torch.tensor([[*prompt, *token_ids]])
    logits = reference(folder)(text, use_cache=False).logits[0, -1 - len(token_ids) : -1]
    wrong = []
    for row, token in zip(logits, token_ids, strict=True):
        best = int(row.argmax())
        if token != best and row[best] - row.topk(2).values[1] >= ROUNDING * row.abs().max():
            wrong.append(f"{token} for {best}")
    return wrong


def with_adapters(family: str, adapters: dict[str, Path], **changes: Any) -> Engine:
    engine = engine_for(family, **{"max_loras": len(adapters), "max_lora_rank": 8, **changes})
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine


def test_each_request_of_a_batch_has_its_own_adapter() -> None:
    paths = {"x": saved_adapter("llama", seed=1), "y": saved_adapter("llama", ATTENTION[:2], rank=8, seed=2)}
    engine = with_adapters("llama", paths)
    names = [None, "x", "y", "x", None]
    prompts = random_tokens(5, 17, 30, 9, 21)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        engine.add_request(prompt, greedy(), request_id=str(i), adapter=name)
    outputs = run_dry(engine)
    tokens = [outputs[str(i)].token_ids for i in range(len(names))]
    for name, prompt, token_ids in zip(names, prompts, tokens, strict=True):
        folder = saved_model("llama") if name is None else merged_model("llama", paths[name])
        assert len(token_ids) == 16
        assert wrong_tokens(folder, prompt, token_ids) == []
    plain = engine.generate(prompts, greedy())
    assert [output.token_ids != other for output, other in zip(plain, tokens, strict=True)] == [
        name is not None for name in names
    ]


FAMILY_TARGETS = {
    "llama_bias": ATTENTION + MLP,
    "qwen2": ATTENTION + MLP,
    "gemma3_text": ATTENTION + MLP,
    "llama": MLP,
    "mixtral": ATTENTION,  # experts cannot be adapted
    "gpt_oss": ATTENTION,
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
}


@pytest.mark.parametrize("family", some(FAMILY_TARGETS, ("qwen2", "deepseek_v3")))
def test_tokens_of_every_kind_of_layer_are_those_of_the_merged_model(family: str) -> None:
    path = saved_adapter(family, FAMILY_TARGETS[family], seed=3)
    engine = with_adapters(family, {"x": path})
    prompts = random_tokens(5, 30)
    for output in engine.generate(prompts, greedy(8), adapter="x"):
        assert wrong_tokens(merged_model(family, path), output.prompt_token_ids, output.token_ids) == []
    plain = engine.generate(prompts, greedy(8))
    assert [output.token_ids for output in plain] == [
        output.token_ids for output in engine_for(family).generate(prompts, greedy(8))
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"rank_pattern": (("k_proj", 2), ("down_proj", 8)), "alpha_pattern": (("q_proj", 16), ("o_proj", 1.5))},
    ],
)
def test_ranks_and_scales_of_a_layer_are_pefts(config: dict[str, Any]) -> None:
    path = saved_adapter("llama", seed=4, **config)
    engine = with_adapters("llama", {"x": path})
    for output in engine.generate(random_tokens(5, 30), greedy(8), adapter="x"):
        assert wrong_tokens(merged_model("llama", path), output.prompt_token_ids, output.token_ids) == []


@pytest.mark.parametrize("is_async", some([False, True], [True]))
def test_adapters_beyond_the_slots_wait_their_turn(is_async: bool) -> None:
    """Three adapters in one slot, and a pool so small that requests are preempted."""
    paths = {name: saved_adapter("llama", seed=i) for i, name in enumerate("xyz")}
    engine = with_adapters("llama", paths, max_loras=1, num_blocks=18, async_scheduling=is_async)
    names = ["x", "y", None, "z", "x", None, "y"]
    prompts = random_tokens(9, 17, 20, 12, 21, 9, 14)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        engine.add_request(prompt, greedy(), request_id=str(i), adapter=name)
    outputs = run_dry(engine)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        folder = saved_model("llama") if name is None else merged_model("llama", paths[name])
        assert wrong_tokens(folder, prompt, outputs[str(i)].token_ids) == []
    assert engine.stats().num_preemptions > 0


def test_each_adapter_has_a_prefix_cache_of_its_own() -> None:
    engine = with_adapters("llama", {"x": saved_adapter("llama", seed=1), "y": saved_adapter("llama", seed=2)})
    (prompt,) = random_tokens(40)
    hits = []
    for name in (None, "x", "y", "x", None):
        (output,) = engine.generate([prompt], greedy(2), adapter=name)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 0, 36, 36]  # 9 of 10 blocks of 4: the last token is computed anew


def test_without_adapters_nothing_of_them_is_there() -> None:
    engine = engine_for("llama")
    attention = engine.runner.model.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert {type(attention.qkv_proj), type(attention.o_proj)} == {Linear, SummedLinear}
    assert type(engine.runner.model.adapters) is Adapters
    assert engine.memory_report().lora == 0


# --- bytes ----------------------------------------------------------------------------------------------------------

ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "facts" / "adapters.jsonl").read_text().splitlines()]
DENSE = ("llama-3.1-8b", "llama-3.1-70b", "qwen2-7b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "qwen3-32b-fp8",
         "gemma-2-9b", "gemma-3-27b", "mathstral-7b", "mistral-nemo-12b", "mistral-small-3.1-24b", "smollm2-1.7b",
         "llama-3.2-1b", "yi-1.5-34b")  # fmt: skip
WITH_TABLES = ("llama", "qwen3")  # model types whose embedding and head have adapters in vLLM, and none here


def is_comparable(row: dict[str, Any]) -> bool:
    inputs = row["inputs"]
    has_own = {"lora_target_modules", "lora_dtype"} & inputs["engine_args"].keys()
    return inputs["model"] in DENSE and inputs.get("pp", 1) == 1 and not has_own


def on_meta(model: str, slots: LoraSlots, tp: int) -> ModelSpec:
    """The model's layers without memory, with these slots; its spec."""
    spec = catalog.load(model)
    device = torch.device("meta")
    Model(spec, NoWeights(), torch_backend, TensorParallel(0, tp), torch.bfloat16, device, 64, slots)
    return spec


COMPARABLE = [row for row in ROWS if is_comparable(row)]


@pytest.mark.parametrize("row", some(COMPARABLE, COMPARABLE[3:6]), ids=lambda row: row["inputs"]["model"])
def test_slots_are_as_large_as_vllms(row: dict[str, Any]) -> None:
    """What vLLM 0.33's create_lora_weights made, less [rank, vocabulary + hidden] of embedding and head."""
    inputs, args = row["inputs"], row["inputs"]["engine_args"]
    slots = LoraSlots(args["max_loras"], args["max_lora_rank"], args.get("fully_sharded_loras", False), 64)
    spec = on_meta(inputs["model"], slots, inputs.get("tp", 1))
    tables = 2 * slots.max_lora_rank * (spec.vocab_size + spec.hidden_size) * (spec.model_type in WITH_TABLES)
    expected = row["slots"][0] - 2 * slots.max_loras * tables
    assert sum(layer.a.nbytes + layer.b.nbytes for layer in slots.layers) == expected


PLANNED: list[Any] = [
    ("deepseek-v2-lite", 2, True, 2048), ("llama-3.1-8b", 1, False, 64), ("llama-3.1-8b", 4, True, 8192),
    ("gemma-3-27b", 2, False, 512), ("qwen3-30b-a3b", 2, True, 513), ("mixtral-8x7b", 4, False, 2048),
]  # fmt: skip
FULLY_PLANNED = [pytest.param(*row, marks=pytest.mark.full) for row in PLANNED[1:]]
# At rank 64 of a model of 64 hidden adapters set the peak; at rank 8 the plain model does.
PEAKS = [
    pytest.param("bfloat16", 64),
    *(pytest.param("float32", rank, marks=pytest.mark.full) for rank in (64, 8)),
]


@pytest.mark.parametrize(("model", "tp", "fully_sharded", "max_num_tokens"), PLANNED[:1] + FULLY_PLANNED)
def test_the_plan_of_adapters_is_what_the_tensors_take(
    model: str, tp: int, fully_sharded: bool, max_num_tokens: int
) -> None:
    slots = LoraSlots(3, 16, fully_sharded, max_num_tokens)
    spec = on_meta(model, slots, tp)
    inputs = EngineInputs(
        total=2**36, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16, max_model_len=64, max_num_seqs=8,
        max_num_batched_tokens=max_num_tokens, gpu_memory_utilization=0.9, tensor_parallel_size=tp, max_loras=3,
        fully_sharded_loras=fully_sharded,
    )  # fmt: skip
    assert slots.num_bytes == lora_bytes(spec, inputs)


def test_a_run_with_adapters_is_as_planned() -> None:
    engine = with_adapters("llama", {"x": saved_adapter("llama")}, num_blocks=None, memory_limit=4_000_000)
    memory = engine.memory_report()
    planned = predict(engine.spec, inputs_of(engine))
    assert (planned.lora, planned.weights, planned.buffers) == (memory.lora, memory.weights, memory.buffers)
    # llama of 64 hidden, 96 inner, 3 layers: rank 8 of q, k, v (64 inputs; 64 + 32 + 32 outputs), o (64, 64), gate and
    # up (64; 192), down (96; 64); float32
    elements = 8 * 3 * (3 * 64 + 128 + 64 + 64 + 2 * 64 + 192 + 96 + 64)
    starts = 3 * (4 + 2 + 3 + 2)
    assert memory.lora == 4 * (elements + starts + 1 + 33 + 33 * 16)  # 512 tokens: 32 tiles of 16, and one more
    plain = engine_for("llama", num_blocks=None, memory_limit=1_200_000).memory_report()
    adapted = engine_for("llama", num_blocks=None, memory_limit=1_200_000, max_loras=1).memory_report()
    assert 2 < adapted.num_blocks < plain.num_blocks


@pytest.mark.parametrize(("dtype", "rank"), PEAKS)
def test_the_peak_of_a_step_with_adapters_is_as_planned(dtype: str, rank: int) -> None:
    engine = engine_for("llama", max_loras=2, max_lora_rank=rank, dtype=dtype, max_num_batched_tokens=256)
    planned, measured = predict(engine.spec, inputs_of(engine)).activations, engine.memory_report().activations
    assert planned <= measured <= 1.01 * planned + 2_000  # small tensors


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed_adapter(folder: Path, config: dict[str, Any] | None = None, tensors: Any = None) -> Path:
    source = saved_adapter("llama")
    values = json.loads((source / "adapter_config.json").read_text()) | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps(values))
    matrices = load_file(source / "adapter_model.safetensors")
    save_file(matrices if tensors is None else tensors(matrices), folder / "adapter_model.safetensors")
    return folder


def renamed(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


REFUSED = [
    ({"use_dora": True}, None, UnsupportedModelError,
     "use_dora is True, which is not supported; train the adapter without it"),
    ({"bias": "all"}, None, UnsupportedModelError,
     "bias is 'all', which is not supported; train the adapter with bias 'none'"),
    ({"modules_to_save": ["lm_head"]}, None, UnsupportedModelError, r"modules_to_save is \['lm_head'\]"),
    ({"peft_type": "IA3"}, None, UnsupportedModelError, "peft_type is 'IA3'; only LORA is supported"),
    ({"init_lora_weights": "pissa"}, None, UnsupportedModelError, "changes the model's own weights"),
    ({"r": 16}, None, InvalidInputError, "says rank 16; they do not belong together"),
    ({"r": "4"}, None, InvalidInputError, "r must be a whole number of at least 1"),
    ({"lora_alpha": True}, None, InvalidInputError, "lora_alpha must be a number"),
    (None, renamed("q_proj", "kv_b_proj"), UnsupportedModelError, "changes model.layers.0.self_attn.kv_b_proj"),
    (None, renamed("model.layers.0.mlp.gate_proj", "lm_head"), UnsupportedModelError, "is no matrix of a linear layer"),
    (None, renamed(".lora_B.", ".lora_embedding_B."), UnsupportedModelError, "is no matrix of a linear layer"),
    (None, lambda tensors: {k: v for k, v in tensors.items() if "lora_B" not in k}, InvalidInputError, "lora_A alone"),
    (None, lambda tensors: {k: v[:, :32].contiguous() if "lora_A" in k else v for k, v in tensors.items()},
     InvalidInputError, "the adapter is of another model"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "error", "text"), REFUSED)
def test_what_is_more_than_two_matrices_is_refused_by_name(
    config: Any, tensors: Any, error: type[KvplanError], text: str, tmp_path: Path
) -> None:
    engine = engine_for("llama", max_loras=1)
    with pytest.raises(error, match=text):
        engine.load_adapter("x", changed_adapter(tmp_path, config, tensors))


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    engine = engine_for("llama", max_loras=1, max_lora_rank=1)
    with pytest.raises(InvalidInputError, match=r"adapter_config\.json: no such file or directory"):
        engine.load_adapter("x", tmp_path)
    with pytest.raises(InvalidInputError, match="has rank 4, slots are for 1; raise max_lora_rank"):
        engine.load_adapter("x", saved_adapter("llama"))
    changed_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InvalidInputError, match=r"adapter_model\.safetensors is damaged or truncated"):
        engine.load_adapter("x", tmp_path)
    file.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"adapter_model\.bin is pickled and is not read"):
        engine.load_adapter("x", tmp_path)


def test_names_that_are_not_known_are_refused() -> None:
    engine = with_adapters("llama", {"x": saved_adapter("llama")})
    with pytest.raises(InvalidInputError, match="adapter: 'y' is not known"):
        engine.add_request([3, 4], adapter="y")
    with pytest.raises(UsageError, match="adapter must be a name"):
        engine.add_request([3, 4], adapter=["x"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="adapter 'x' is there already"):
        engine.load_adapter("x", saved_adapter("llama"))
    with pytest.raises(UsageError, match="no slots for adapters; set max_loras to 1 or more"):
        engine_for("llama").load_adapter("x", saved_adapter("llama"))
    with pytest.raises(InvalidInputError, match="the engine has none"):
        engine_for("llama").add_request([3, 4], adapter="x")


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_adapters_are_guessed_for_as_well(method: str) -> None:
    """Several tokens of a sequence in a step all have its adapter; a draft model guesses without it."""
    path = saved_adapter("llama", seed=1)
    prompts = [prompt * 2 for prompt in random_tokens(5, 17, 9)]
    model = saved_model("llama") if method == "draft_model" else None
    config = SpeculativeConfig(method, 3, model, *((1, 3) if method == "ngram" else ()))
    tokens = []
    for changes in ({}, {"speculative_config": config}):
        engine = with_adapters("llama", {"x": path}, **changes)
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, greedy(), request_id=str(i), adapter="x" if i else None)
        outputs = run_dry(engine)
        tokens.append([outputs[str(i)].token_ids for i in range(len(prompts))])
    assert tokens[0] == tokens[1]
    assert (stats := engine.draft_stats()) is not None
    assert stats.num_accepted_tokens > 0
