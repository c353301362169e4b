"""Layers are split over pipeline stages as vLLM splits them, and every rank holds what is planned for its stage.

What stages compute is compared with one process in test_tp.py, where two ranks run anyway, and here on more ranks.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, kernels
from engine.extensions import ExtendedConfig, scheduler_of
from engine.kv_cache import KVCache, group_layers
from engine.loader import Checkpoint, NoWeights
from engine.memory import nbytes
from engine.scheduler import Batch
from engine.stages import StageModel, groups_on, layers_of
from engine.tp import TensorParallel, join
from kvplan.core.errors import InvalidInputError, KvplanError
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.servers.bundled.rules import EngineInputs, predict
from tests.engine.test_tp import DRAWN, SCHEDULES, job, run_ranks, schedule_job, steps_of
from tests.support.small_engines import engine_for, greedy, saved_model, wrong_greedy_tokens

FACTS = Path(__file__).parents[1] / "facts"
META = torch.device("meta")
INPUTS = EngineInputs(
    total=80 * 2**30, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16, max_model_len=4096, max_num_seqs=64,
    max_num_batched_tokens=2048, gpu_memory_utilization=0.9, num_blocks=1,
)  # fmt: skip


def facts(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FACTS / name).read_text(encoding="utf-8").splitlines()]


def stage_of(spec: ModelSpec, stage: int, num_stages: int, tp: int = 1, partition: str | None = None) -> StageModel:
    """A stage of a model, without memory."""
    config = EngineConfig(pipeline_parallel_size=num_stages, pp_layer_partition=partition)
    ranks, torch_kernels = TensorParallel(0, tp, stage, num_stages), kernels.load("torch", "cpu")
    return StageModel(config, spec, NoWeights(), torch_kernels, ranks, torch.bfloat16, META, 4096)


def block_bytes(model: StageModel) -> int:
    groups = groups_on(group_layers(model.spec, 16), model.mine)
    return KVCache(model.spec, groups, 1, 16, torch.bfloat16, META, model.tp).num_bytes


# --- which layers -------------------------------------------------------------------------------------------------


def test_layers_are_split_as_vllm_splits_them() -> None:
    """stage_layers.jsonl: the answers of vLLM 0.33's `get_pp_indices`."""
    rows = facts("stage_layers.jsonl")
    assert len(rows) > 50
    for row in rows:
        stages = [layers_of(row["num_layers"], stage, row["pp"]) for stage in range(row["pp"])]
        assert [len(stage) for stage in stages] == row["counts"]
        assert [layer for stage in stages for layer in stage] == list(range(row["num_layers"]))


def test_a_partition_is_taken_as_it_is() -> None:
    """vLLM's own answer with VLLM_PP_LAYER_PARTITION=5,8,3."""
    assert [layers_of(16, stage, 3, "5,8,3") for stage in range(3)] == [range(5), range(5, 13), range(13, 16)]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "partition", "text"),
    [
        (3, 2, "1,1", "pp_layer_partition must be 2 numbers that add up to 3 layers (1,1); change it or remove it"),
        (3, 2, "1,1,1", "pp_layer_partition must be 2 numbers that add up to 3 layers (1,1,1); change it or remove it"),
        (3, 2, "3,0", "pipeline_parallel_size 2 stages of 3 layers would leave one without any; lower it"),
        (3, 4, None, "pipeline_parallel_size 4 stages of 3 layers would leave one without any; lower it"),
    ],
)
def test_stages_that_cannot_be_had_are_named(
    num_layers: int, num_stages: int, partition: str | None, text: str
) -> None:
    with pytest.raises(KvplanError) as error:
        layers_of(num_layers, 0, num_stages, partition)
    assert str(error.value) == text


# --- what a rank holds --------------------------------------------------------------------------------------------


def test_stages_hold_vllms_weights_and_blocks() -> None:
    """capacity.jsonl: parameter bytes of each stage, and blocks of a budget, by vLLM 0.33's own code.

    Of other models that both run, vLLM's classes have embedding and head on every stage, or pad experts.
    """
    compared = 0
    for row in facts("capacity.jsonl"):
        inputs = row["inputs"]
        if inputs.get("pp", 1) > 1 and inputs["model"] in ("llama-3.1-70b", "qwen3-32b") and "weights" in row:
            spec, tp, pp = catalog.load(inputs["model"]), inputs.get("tp", 1), inputs["pp"]
            stages = [stage_of(spec, stage, pp, tp) for stage in range(pp)]
            weights = [stage["param_bytes_per_rank"] for stage in row["weights"]]
            assert [nbytes(stage.weights) for stage in stages] == weights
            for result in row["results"]:
                if "num_gpu_blocks" in result and "engine_args" not in inputs:
                    budget = result["available_memory"]
                    budgets = budget if isinstance(budget, list) else [budget] * pp
                    rooms = [room // block_bytes(stage) for room, stage in zip(budgets, stages, strict=True)]
                    assert min(rooms) == result["num_gpu_blocks"]
                    compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    ("name", "num_stages", "tp", "partition"),
    [
        ("llama-3.1-8b", 2, 2, None),
        ("llama-3.2-1b", 3, 1, None),  # tied, 5 + 6 + 5 layers
        ("mixtral-8x7b", 3, 1, None),  # whose class in vLLM has embedding and head on every stage
        ("gemma-3-12b", 2, 1, None),  # six groups of 8 layers, not all of which a stage has
        ("gpt-oss-20b", 2, 1, "11,13"),
        ("deepseek-v2-lite", 2, 1, None),
    ],
)
def test_a_stage_holds_what_is_planned_for_it(name: str, num_stages: int, tp: int, partition: str | None) -> None:
    spec = replace(catalog.load(name), quantization=None)
    counts = () if partition is None else tuple(map(int, partition.split(",")))
    total = 0
    for stage in range(num_stages):
        model = stage_of(spec, stage, num_stages, tp, partition)
        planned = predict(spec, replace(
            INPUTS, tensor_parallel_size=tp, pipeline_parallel_size=num_stages, stage=stage, partition=counts,
        ))  # fmt: skip
        assert nbytes(model.weights) == planned.weights
        assert nbytes(list(model.buffers.values())) == planned.buffers
        assert block_bytes(model) == planned.kv_cache
        total += planned.weights
    tied = next(weight.num_params for weight in spec.other_weights if weight.group == "embedding") if spec.tied else 0
    assert total == predict(spec, replace(INPUTS, tensor_parallel_size=tp)).weights + 2 * tied // tp


def test_a_stage_reads_its_own_tensors_and_refuses_what_is_left_over_among_them(tmp_path: Path) -> None:
    source = saved_model("llama")
    tensors = load_file(source / "model.safetensors")

    def load(stage: int, **more: torch.Tensor) -> StageModel:
        save_file(tensors | more, tmp_path / "model.safetensors")
        config, ranks = EngineConfig(pipeline_parallel_size=2), TensorParallel(0, 1, stage, 2)
        facts_of = (kernels.load("torch", "cpu"), ranks, torch.float32, torch.device("cpu"), 64)
        return StageModel(config, engine_for("llama").spec, Checkpoint(tmp_path), *facts_of)

    assert [len(load(stage).layers) for stage in range(2)] == [2, 1]
    odd = {"model.layers.2.self_attn.q_proj.bias": torch.zeros(64)}
    assert load(0, **odd).mine == range(2)  # another stage's
    with pytest.raises(InvalidInputError, match=r"1 tensors have no place .*model\.layers\.2\.self_attn\.q_proj\.bias"):
        load(1, **odd)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"async_scheduling": True}, "async_scheduling cannot be combined with pipeline_parallel_size above 1"),
        ({"max_loras": 1}, "max_loras cannot be combined with pipeline_parallel_size above 1"),
        ({"kv_offloading_size": 1.0}, "kv_offloading_size cannot be combined with pipeline_parallel_size above 1"),
        ({"pp_layer_partition": "1,x"}, 'pp_layer_partition must be numbers of layers, such as "20,22", or None'),
        ({"pipeline_parallel_size": 1, "pp_layer_partition": "3"}, "pp_layer_partition needs several stages"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be a whole number of at least 1 (0)"),
    ],
)
def test_what_stages_are_not_combined_with_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KvplanError) as error:
        EngineConfig(**{"pipeline_parallel_size": 2, **changes})
    assert text in str(error.value)


def test_stages_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(KvplanError) as error:
        join(2, torch.device("cpu"), 2)
    assert str(error.value) == (
        "tensor_parallel_size x pipeline_parallel_size: 4 ranks need 4 processes; "
        "start with: torchrun --nproc-per-node 4 ..."
    )


# --- the schedule -------------------------------------------------------------------------------------------------


def steps_of_engine(row: dict[str, Any]) -> list[list[Any]]:
    """The batches of an engine's loop with a queue as deep as there are stages, in one process.

    The scheduler of every rank is this one; only here are so many steps' tokens on their way to one host at once.
    """
    job, num_stages = schedule_job(row), row["pp"]
    config = {name: value for name, value in job["config"].items() if name != "pipeline_parallel_size"}
    engine, steps = engine_for(Path(job["folder"]), **config), list[list[Any]]()
    assert isinstance(engine.scheduler.config, ExtendedConfig)
    limits = replace(engine.scheduler.config, batch_queue_depth=num_stages, pipeline_stages=num_stages)
    engine.scheduler = scheduler_of(limits, row["num_blocks"], tuple(group.rule for group in engine.runner.groups))
    engine.runner._downloads._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(num_stages)]

    def note(batch: Batch) -> None:
        if batch.num_tokens:
            tokens = [[seq.request_id, n] for seq, n in batch.num_tokens.items()]
            steps.append([tokens, [seq.request_id for seq in batch.preempted]])

    engine.on_schedule = note
    engine.generate(job["prompts"], [greedy(n) for n in job["max_tokens"]])
    return steps


@pytest.mark.parametrize("row", SCHEDULES, ids=lambda row: str(row["name"]))
def test_the_loop_follows_vllms_batch_queue(row: dict[str, Any]) -> None:
    """With three stages and more a batch of nothing takes a place in the queue; a pool that is full shows it."""
    assert steps_of_engine(row) == steps_of(row)


# --- more ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_two_by_two_ranks_give_the_tokens_of_one() -> None:
    """Two stages of two ranks each: every stage shares its layers, and hands on from rank to rank."""
    families = ("llama", "llama_tied", "gpt_oss", "gemma3_text", "deepseek_v3")
    pp: dict[str, Any] = {"pipeline_parallel_size": 2}
    jobs = [job(family, 2, **pp) for family in families] + [
        job("llama", 2, DRAWN, **pp), job("llama", 2, {"temperature": 1.0}, **pp), job("llama", 2, num_blocks=18, **pp),
        job("llama", 2, num_blocks=None, memory_limit=4_000_000, **pp),
    ]  # fmt: skip
    answers = run_ranks(jobs, 4)
    for i, stage_job in enumerate(jobs):
        assert all(rank[i]["tokens"] == answers[0][i]["tokens"] for rank in answers)
        if i < len(families):
            for prompt, token_ids in zip(stage_job["prompts"], answers[0][i]["tokens"], strict=True):
                assert wrong_greedy_tokens(families[i], prompt, token_ids) == []
    assert len({rank[-1]["num_blocks"] for rank in answers}) == 1  # the tightest rank's
    halves = job("llama", 2, DRAWN)
    assert answers[0][len(families)]["tokens"] == run_ranks([halves], 2)[0][0]["tokens"]


@pytest.mark.full
def test_three_stages_follow_vllms_schedule() -> None:
    row = next(row for row in SCHEDULES if row["name"] == "three")
    job = schedule_job(row)
    ranks = [rank[0] for rank in run_ranks([job], 3)]
    assert [rank["schedule"] for rank in ranks] == [steps_of(row)] * 3
    for prompt, token_ids in zip(job["prompts"], ranks[0]["tokens"], strict=True):
        assert wrong_greedy_tokens("llama", prompt, token_ids) == []
