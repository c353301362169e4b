"""Ranks that share a model give one rank's tokens, hold their share of it, and refuse what cannot be shared."""

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.tp import GROUP_TIMEOUT, TensorParallel, join
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.hf_config import load_spec
from kvplan.servers.bundled.rules import EngineInputs, predict
from tests.engine.test_lora import wrong_tokens
from tests.support.parts import some
from tests.support.small_adapters import merged_model, saved_adapter
from tests.support.small_engines import engine_for, random_tokens, saved_model, wrong_greedy_tokens
from tests.support.tp_worker import scores_of

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240  # of all jobs of a group of ranks: a hang is a failure, a slow machine is not
NUM_TOKENS = 16
PROMPTS = random_tokens(5, 17, 30)
CONFIG: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 400, "max_model_len": 96, "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}  # fmt: skip
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}

# 250 rows of the vocabulary: padded to 256, so that the second of two ranks has 122, and the last of four 58.


def job(family: str, size: int, params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "folder": str(saved_model(family)),
        "config": {**CONFIG, "tensor_parallel_size": size, **changes},
        "prompts": PROMPTS if family != "llama_250" else [[token % 250 for token in prompt] for prompt in PROMPTS],
        "params": {**GREEDY, **(params or {})},
    }


def adapters() -> dict[str, Path]:
    return {"x": saved_adapter("llama", seed=1), "y": saved_adapter("llama", rank=8, seed=2)}


def adapted_job(*, fully_sharded: bool) -> dict[str, Any]:
    """Requests of two adapters and of none in one batch, on two ranks."""
    slots: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8, "fully_sharded_loras": fully_sharded}
    return job("llama", 2, **slots) | {"adapters": {name: str(path) for name, path in adapters().items()}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(jobs: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    """Each rank's answers to the jobs, from `size` processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(jobs), encoding="utf-8")
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, "-m", "tests.support.tp_worker", str(path)]
        ranks = [
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            ended = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(stderr for _, stderr in ended)
    return [[json.loads(line) for line in stdout.splitlines()] for stdout, _ in ended]


# --- two ranks -----------------------------------------------------------------------------------------------------

SHARED = ("llama", "llama_250", "gpt_oss", "deepseek_v3")
OTHERS = (
    "qwen2", "mixtral", "gemma3_text", "phi3", "cohere2", "starcoder2", "glm4", "qwen2_moe", "olmo2", "minimax_m2",
    "cohere_normed", "phimoe", "opt", "granitemoe", "stablelm",
)  # fmt: skip
DRAWN = {"temperature": 1.0, "seed": 3, "top_p": 0.9}

# In a step of 256 tokens a llama of 64 hidden holds most while it norms the stream, which is whole on every rank; half
# an MLP beside both streams is 2 + 3 * 48 / 64 = 4.25 such tensors. float32: both streams, their sum, its norm and the
# product. bfloat16: both streams, their sum, the norm and the product, and the sum and the norm in float32.
WIDE_STEP = {"float32": 256 * 64 * 5 * 4, "bfloat16": 256 * 64 * (5 * 2 + 2 * 4)}


# --- stages --------------------------------------------------------------------------------------------------------

STAGED = ("llama", "llama_tied", "gpt_oss", "opt", "phi")
SCORED = {**DRAWN, "logprobs": 2, "prompt_logprobs": 3, "frequency_penalty": 0.7}
# By vLLM 0.33's own scheduler with a batch queue as deep as there are stages: of each step that computes something, the
# tokens of each request, and who gave way.
SCHEDULES = [
    json.loads(line)
    for line in (ROOT / "tests" / "facts" / "stage_schedules.jsonl").read_text(encoding="utf-8").splitlines()
]


def schedule_job(row: dict[str, Any]) -> dict[str, Any]:
    """A trace's requests, as prompts of a small model."""
    names = ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    base = job("llama", 1, pipeline_parallel_size=row["pp"], **{name: row[name] for name in names})
    return base | {"prompts": random_tokens(*row["prompt_lens"]), "max_tokens": row["max_tokens"]}


def steps_of(row: dict[str, Any]) -> list[list[Any]]:
    """The trace's steps, with requests named as an engine names its first ones."""
    names = {f"r{i}": f"request-{i + 1}" for i in range(len(row["prompt_lens"]))}
    return [
        [[[names[who], n] for who, n in scheduled], [names[who] for who in preempted]]
        for scheduled, preempted in row["steps"]
    ]


@cache
def narrow_model() -> Path:
    """A llama whose norms hold most, as of most real models that are shared by ranks: a config without weights."""
    config = json.loads((saved_model("llama") / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 16}
    folder = Path(tempfile.mkdtemp(prefix="kvplan-narrow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def narrow_job() -> dict[str, Any]:
    changes: dict[str, Any] = {"load_format": "dummy", "max_num_batched_tokens": 512}
    return job("llama", 1, pipeline_parallel_size=2, **changes) | {"folder": str(narrow_model())}


@cache
def two_ranks() -> dict[str, list[dict[str, Any]]]:
    """One start of two processes for all tests: every family, and what else is asked of two ranks."""
    jobs = {family: job(family, 2) for family in SHARED} | {
        "drawn": job("llama", 2, DRAWN),
        "unseeded": job("llama", 2, {"temperature": 1.0}),
        "small pool": job("llama", 2, num_blocks=18),
        "overlap": job("llama", 2, async_scheduling=True),
        "overlap, drawn": job("llama", 2, {**DRAWN, "frequency_penalty": 0.7}, async_scheduling=True),
        "overlap, small pool": job("llama", 2, num_blocks=18, async_scheduling=True),
        "its own pool": job("llama", 2, num_blocks=None, memory_limit=4_000_000),
        "own prompts": job("llama", 2) | {"own_prompts": True},
        "three": job("llama", 3),
        **{f"stages, {family}": job(family, 1, pipeline_parallel_size=2) for family in STAGED},
        "stages, drawn": job("llama", 1, SCORED, pipeline_parallel_size=2),
        "stages, its own pool": job("llama", 1, pipeline_parallel_size=2, num_blocks=None, memory_limit=4_000_000),
        "stages, three": job("llama", 1, pipeline_parallel_size=3),
        "stages, narrow": narrow_job(),
        **{f"stages, {row['name']}": schedule_job(row) for row in SCHEDULES if row["pp"] == 2},
        **{dtype: job("llama", 2, dtype=dtype, max_num_batched_tokens=256) for dtype in WIDE_STEP},
    }
    answers = run_ranks(list(jobs.values()), 2)
    return {name: [answer[i] for answer in answers] for i, name in enumerate(jobs)}


@cache
def two_ranks_of_others() -> dict[str, list[dict[str, Any]]]:
    jobs = {family: job(family, 2) for family in OTHERS} | {
        "guessed": job("llama", 2) | {"draft": str(saved_model("llama"))},
        "adapters shared": adapted_job(fully_sharded=False),
        "adapters fully shared": adapted_job(fully_sharded=True),
    }
    return dict(zip(jobs, zip(*run_ranks(list(jobs.values()), 2), strict=True), strict=True))


@pytest.mark.parametrize("family", some(SHARED + OTHERS, SHARED))
def test_two_ranks_give_the_tokens_of_one(family: str) -> None:
    first, second = (two_ranks_of_others() if family in OTHERS else two_ranks())[family]
    assert first["tokens"] == second["tokens"]
    for prompt, token_ids in zip(job(family, 2)["prompts"], first["tokens"], strict=True):
        assert len(token_ids) == NUM_TOKENS
        assert wrong_greedy_tokens(family, prompt, token_ids) == []


@pytest.mark.parametrize("how", ["drawn", "unseeded"])
def test_two_ranks_draw_alike(how: str) -> None:
    first, second = two_ranks()[how]
    assert first["tokens"] == second["tokens"]


def test_two_ranks_preempt_alike() -> None:
    first, second = two_ranks()["small pool"]
    assert first["num_preemptions"] == second["num_preemptions"] > 0
    assert first["tokens"] == second["tokens"]
    for prompt, token_ids in zip(PROMPTS, first["tokens"], strict=True):
        assert wrong_greedy_tokens("llama", prompt, token_ids) == []


@pytest.mark.parametrize("how", ["overlap", "overlap, drawn", "overlap, small pool"])
def test_two_ranks_overlap_alike(how: str) -> None:
    first, second = two_ranks()[how]
    assert first["tokens"] == second["tokens"]
    assert first["num_preemptions"] == second["num_preemptions"]
    assert (first["num_preemptions"] > 0) == (how == "overlap, small pool")
    if how != "overlap, drawn":
        for prompt, token_ids in zip(PROMPTS, first["tokens"], strict=True):
            assert len(token_ids) == NUM_TOKENS
            assert wrong_greedy_tokens("llama", prompt, token_ids) == []


@pytest.mark.full
def test_two_ranks_guess_alike() -> None:
    """With the model itself as its draft, shared by the ranks as it is: every guess holds."""
    first, second = two_ranks_of_others()["guessed"]
    assert first["tokens"] == second["tokens"] == two_ranks()["llama"][0]["tokens"]
    assert first["guesses"] == second["guesses"]
    _, num_tokens, num_accepted, *_ = first["guesses"]
    assert num_tokens == num_accepted > 0


def test_rank_0_hands_its_requests_to_all() -> None:
    first, second = two_ranks()["own prompts"]  # the second rank asks for prompts a token shorter
    assert first["tokens"] == second["tokens"] == two_ranks()["llama"][0]["tokens"]


def test_a_rank_takes_its_own_gpu_before_it_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would otherwise guess, and every rank would make a context on the first GPU."""
    calls: list[tuple[str, Any]] = []
    world = {"is_initialized": lambda: False, "get_world_size": lambda: 2, "get_rank": lambda: 1}
    for name, stand_in in world.items():
        monkeypatch.setattr(torch.distributed, name, stand_in)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **options: calls.append((backend, options))
    )
    monkeypatch.setenv("RANK", "1")
    device = torch.device("cuda:1")
    assert join(2, device) == TensorParallel(1, 2)
    assert calls == [("set_device", device), ("nccl", {"timeout": GROUP_TIMEOUT, "device_id": device})]


def test_two_ranks_have_pools_of_one_size() -> None:
    first, second = two_ranks()["its own pool"]
    assert first["num_blocks"] == second["num_blocks"] > 2


def test_the_number_of_processes_is_the_number_of_ranks() -> None:
    assert [answer["error"] for answer in two_ranks()["three"]] == [
        "UsageError: tensor_parallel_size: 3 requested, 2 processes run; make them equal"
    ] * 2
    assert [answer["error"] for answer in two_ranks()["stages, three"]] == [
        "UsageError: tensor_parallel_size x pipeline_parallel_size: 3 requested, 2 processes run; make them equal"
    ] * 2


def test_two_ranks_hold_half_of_the_pool() -> None:
    whole = engine_for("llama", num_blocks=400).memory_report().kv_cache
    assert [2 * answer["kv_cache"] for answer in two_ranks()["llama"]] == [whole] * 2
    whole = engine_for("deepseek_v3", num_blocks=400).memory_report().kv_cache
    assert [answer["kv_cache"] for answer in two_ranks()["deepseek_v3"]] == [whole] * 2  # latents serve all heads


# A llama of 64 hidden, 3 layers, 4 heads and 2 KV heads of 16, 96 inner and 256 rows, by hand:
#   embedding and head   2 * 256 * 64                                             = 32,768
#   per layer   q and o  2 * 64 * 64 = 8,192;  k and v  2 * 32 * 64 = 4,096;  MLP  3 * 96 * 64 = 18,432
#   norms       2 * 64 per layer and 64, whole on every rank                      =    448
LLAMA_PARAMETERS = {
    1: 32_768 + 3 * (8_192 + 4_096 + 18_432) + 448,
    2: 32_768 // 2 + 3 * (8_192 + 4_096 + 18_432) // 2 + 448,
    4: 32_768 // 4 + 3 * (8_192 // 4 + 4_096 // 2 + 18_432 // 4) + 448,  # 2 KV heads, each on two of the ranks
}


def test_ranks_hold_their_share_of_the_weights() -> None:
    assert engine_for("llama").memory_report().weights == 4 * LLAMA_PARAMETERS[1]
    assert [answer["weights"] for answer in two_ranks()["llama"]] == [4 * LLAMA_PARAMETERS[2]] * 2
    # 250 rows are padded to 256 on either count of ranks
    assert [answer["weights"] for answer in two_ranks()["llama_250"]] == [4 * LLAMA_PARAMETERS[2]] * 2


@pytest.mark.parametrize("dtype", WIDE_STEP)
def test_the_peak_of_a_rank_is_the_planners(dtype: str) -> None:
    inputs = EngineInputs(
        total=2**34, dtype=dtype, kv_cache_dtype=dtype, block_size=4, max_model_len=96, max_num_seqs=8,
        max_num_batched_tokens=256, gpu_memory_utilization=0.9, num_blocks=400, backend="torch", tensor_parallel_size=2,
    )  # fmt: skip
    planned = predict(load_spec(saved_model("llama"), name="llama"), inputs).activations
    assert planned == WIDE_STEP[dtype]
    # gloo's thread lets go of the tensor it summed last when it comes to it: that one may live on for a while.
    summed = 256 * 64 * getattr(torch, dtype).itemsize
    for rank in two_ranks()[dtype]:
        assert planned <= rank["activations"] <= 1.01 * planned + summed  # small tensors


@pytest.mark.full
@pytest.mark.parametrize("how", ["shared", "fully shared"])
def test_two_ranks_add_what_adapters_would_on_one(how: str) -> None:
    first, second = two_ranks_of_others()[f"adapters {how}"]
    assert first["tokens"] == second["tokens"]
    folders = [*(merged_model("llama", path) for path in adapters().values()), saved_model("llama")]
    for folder, prompt, token_ids in zip(folders, PROMPTS, first["tokens"], strict=True):
        assert len(token_ids) == NUM_TOKENS
        assert wrong_tokens(folder, prompt, token_ids) == []
    # float32 at rank 8 of 3 layers: q, k, v of 64 inputs with 32, 16 and 16 outputs; o of 32 with 64; gate and up of
    # 64 with 48 each; down of 48 with 64. Fully shared: half of A in q, k, v, gate and up, half of B in o and down.
    a, b = (3 * 64 + 2 * 64, 64 + 96), (32 + 48, 64 + 64)
    shares = (a[0] // 2 + a[1] + b[0] + b[1] // 2) if how == "fully shared" else sum(a + b)
    # 512 tokens: 32 tiles of 16, and one more for each slot; where the layers begin
    beside = (32 + 2) * (1 + 16) + 2 + 3 * (4 + 2 + 3 + 2)
    assert [rank["lora"] for rank in (first, second)] == [4 * (2 * 8 * 3 * shares + beside)] * 2


@pytest.mark.parametrize("family", STAGED)
def test_two_stages_give_the_tokens_of_one_process(family: str) -> None:
    first, second = two_ranks()[f"stages, {family}"]
    assert first["tokens"] == second["tokens"]
    for prompt, token_ids in zip(job(family, 1)["prompts"], first["tokens"], strict=True):
        assert len(token_ids) == NUM_TOKENS
        assert wrong_greedy_tokens(family, prompt, token_ids) == []


def test_two_stages_draw_and_score_as_one_process_does() -> None:
    scored_job = job("llama", 1, SCORED)
    outputs = engine_for(Path(scored_job["folder"]), **scored_job["config"]).generate(
        PROMPTS, SamplingParams(**scored_job["params"])
    )
    first, second = two_ranks()["stages, drawn"]
    assert first["tokens"] == second["tokens"] == [output.token_ids for output in outputs]
    assert first["logprobs"] == second["logprobs"]
    for output, rows in zip(outputs, first["logprobs"], strict=True):
        expected = scores_of(output)
        assert len(rows) == len(expected) == NUM_TOKENS + len(output.prompt_token_ids)
        for row, reference in zip(rows, expected, strict=True):
            assert (row is None) == (reference is None)
            if row is not None:  # other batches: sums in another order
                assert row["chosen"] == pytest.approx(reference["chosen"], abs=1e-4)
                values, others = ([value for _, value in scores["top"]] for scores in (row, reference))
                assert values == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("row", SCHEDULES[:2], ids=lambda row: str(row["name"]))
def test_two_stages_follow_vllms_schedule(row: dict[str, Any]) -> None:
    first, second = two_ranks()[f"stages, {row['name']}"]
    assert first["schedule"] == second["schedule"] == steps_of(row)
    assert first["tokens"] == second["tokens"]
    assert first["num_preemptions"] == sum(len(preempted) for _, preempted in row["steps"])
    for prompt, token_ids in zip(schedule_job(row)["prompts"], first["tokens"], strict=True):
        assert wrong_greedy_tokens("llama", prompt, token_ids) == []


# The first of two stages has 2 of 3 layers: k and v of 2 heads of 16 in float32, in blocks of 4 tokens. The stream that
# goes from one to the other is two tensors [24 tokens, 64] of float32, beside a table of 96 positions of 16 floats.
LAYER_PARAMETERS = 8_192 + 4_096 + 18_432 + 2 * 64


def test_a_stage_holds_its_layers_and_an_end() -> None:
    first, second = two_ranks()["stages, llama"]
    assert first["weights"] == 4 * (16_384 + 2 * LAYER_PARAMETERS)
    assert second["weights"] == 4 * (16_384 + 1 * LAYER_PARAMETERS + 64)
    assert first["weights"] + second["weights"] == 4 * LLAMA_PARAMETERS[1]
    assert two_ranks()["stages, llama_tied"][1]["weights"] == second["weights"]  # the table lies on both
    assert first["buffers"] == second["buffers"] == 96 * 16 * 4 + 2 * 24 * 64 * 4
    assert (first["block_bytes"], second["block_bytes"]) == (2 * 2 * 4 * 2 * 16 * 4, 2 * 4 * 2 * 16 * 4)
    assert (first["kv_cache"], second["kv_cache"]) == (400 * first["block_bytes"], 400 * second["block_bytes"])


@pytest.mark.parametrize("stage", [0, 1])
def test_the_peak_of_a_stage_is_the_planners(stage: int) -> None:
    inputs = EngineInputs(
        total=2**34, dtype="float32", kv_cache_dtype="float32", block_size=4, max_model_len=96, max_num_seqs=8,
        max_num_batched_tokens=512, gpu_memory_utilization=0.9, num_blocks=400, backend="torch", stage=stage,
        pipeline_parallel_size=2,
    )  # fmt: skip
    planned = predict(load_spec(narrow_model()), inputs)
    rank = two_ranks()["stages, narrow"][stage]
    assert (planned.weights, planned.buffers) == (rank["weights"], rank["buffers"])
    assert (planned.kv_cache, planned.block_bytes) == (rank["kv_cache"], rank["block_bytes"])
    assert planned.activations == 512 * 256 * 5 * 4  # both streams, their sum, its norm and the product
    assert planned.activations <= rank["activations"] <= 1.01 * planned.activations  # small tensors


def test_the_tightest_stage_sizes_the_pool_of_all() -> None:
    first, second = two_ranks()["stages, its own pool"]
    assert first["num_blocks"] == second["num_blocks"] > 2


# --- four ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_four_ranks_copy_two_kv_heads_and_give_the_tokens_of_one() -> None:
    answers = run_ranks([job(family, 4) for family in SHARED + OTHERS], 4)
    for i, family in enumerate(SHARED + OTHERS):
        tokens = [rank[i]["tokens"] for rank in answers]
        assert tokens == [tokens[0]] * 4
        for prompt, token_ids in zip(job(family, 4)["prompts"], tokens[0], strict=True):
            assert wrong_greedy_tokens(family, prompt, token_ids) == []
    assert [rank[0]["weights"] for rank in answers] == [4 * LLAMA_PARAMETERS[4]] * 4
    whole = engine_for("llama", num_blocks=400).memory_report().kv_cache
    assert [2 * rank[0]["kv_cache"] for rank in answers] == [whole] * 4  # each holds one of the two KV heads


# --- shares, without processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "num_kv_heads", "ranges"),
    [
        (1, 2, [range(2)]),
        (2, 8, [range(4), range(4, 8)]),
        (4, 2, [range(1), range(1), range(1, 2), range(1, 2)]),
        (4, 1, [range(1)] * 4),
        (2, 2, [range(1), range(1, 2)]),
    ],
)
def test_kv_heads_are_shared_or_copied(size: int, num_kv_heads: int, ranges: list[range]) -> None:
    shares = [TensorParallel(rank, size).share_kv_heads(num_kv_heads) for rank in range(size)]
    assert [range(share.start, share.stop) for share in shares] == ranges


@pytest.mark.parametrize(
    ("family", "size", "what"),
    [
        ("llama", 3, "4 heads cannot be shared by 3 ranks; use a divisor of 4"),
        ("llama", 8, "4 heads cannot be shared by 8 ranks; use a divisor of 4"),
        ("deepseek_v3", 8, "4 heads cannot be shared by 8 ranks; use a divisor of 4"),
    ],
)
def test_heads_that_cannot_be_shared_are_named(
    family: str, size: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.llm.join", lambda size, device_type, num_stages: TensorParallel(0, size))
    with pytest.raises(UnsupportedModelError) as error:
        engine_for(family, tensor_parallel_size=size)
    assert str(error.value) == f"tensor_parallel_size: {what}"


def test_kv_heads_that_cannot_be_copied_evenly_are_named() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        TensorParallel(0, 4).share_kv_heads(3)
    assert str(error.value) == (
        "tensor_parallel_size: 4 ranks cannot copy 3 KV heads evenly; use a multiple or a divisor of 3"
    )


def test_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError) as error:
        join(4, torch.device("cpu"))
    assert str(error.value) == (
        "tensor_parallel_size: 4 ranks need 4 processes; start with: torchrun --nproc-per-node 4 ..."
    )


def test_one_rank_needs_nobody() -> None:
    alone, x = join(1, torch.device("cpu")), torch.arange(3)
    assert alone == TensorParallel(0, 1)
    assert all(f(x) is x for f in (alone.all_reduce, alone.all_gather, alone.broadcast))
    assert alone.smallest(7) == 7
    assert not torch.distributed.is_initialized()
