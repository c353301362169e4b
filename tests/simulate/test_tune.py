"""`kvplan tune`: its rates are those of `simulate` with the flags it prints; nothing that it may turn serves more."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.pasted import read_command
from kvplan.simulate.settings import STEPS, Setting, Space
from kvplan.simulate.steady import means_of
from kvplan.simulate.tuning import PRECISION
from kvplan.workloads.trace import TraceRequest
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

LOAD = ("--prompt-tokens", "1200", "--output-tokens", "40", "--num-requests", "80")
MODEL = ("llama-3.1-8b", "--gpu", "l40s", "--ctx", "4k")
SLO = ("--slo", "ttft.p90=1500ms,tpot.p90=70ms")
FIXED = ("--no-fp8", "--gpu-memory-utilization", "0.9", "--block-size", "16", "-q", "--jobs", "1")
JSON = ("--format", "json")


def tuned(run: Run, *more: str, load: tuple[str, ...] = LOAD, model: tuple[str, ...] = MODEL) -> dict[str, Any]:
    document: dict[str, Any] = run("tune", *model, *load, *more, *JSON).json
    return document


def verdicts(run: Run, rate: float, *flags: str) -> set[bool]:
    """Whether `simulate` keeps each target with its likely figures."""
    words = ("simulate", *MODEL, *LOAD, *SLO, "--rate", f"{rate:.9f}", "-q", *flags, *JSON)
    document = run(*words).json
    return {target["value"] <= target["limit"] for target in document["variants"][0]["slo"]}


def test_the_rate_is_what_simulate_keeps_with_the_flags_it_prints(run: Run) -> None:
    document = tuned(run, *SLO, *FIXED, "--max-num-seqs", "32")
    best = document["settings"][0]
    flags = shlex.split(best["command"])[3:]
    flags = [word for place, word in enumerate(flags) if "--max-model-len" not in flags[max(0, place - 1) : place + 1]]
    assert verdicts(run, best["requests_per_s"] * 0.999999, *flags) == {True}
    assert verdicts(run, best["requests_per_s"] * (1 + 2 * PRECISION), *flags) != {True}


@pytest.mark.full
def test_nothing_that_may_be_turned_serves_more(run: Run) -> None:
    """Every number of sequences and of tokens in a step, by `simulate` itself, at a rate a twentieth higher."""
    document = tuned(run, *SLO, *FIXED)
    best = document["settings"][0]["requests_per_s"]
    for seqs in STEPS["max_num_seqs"][:6]:
        for tokens in STEPS["max_num_batched_tokens"]:
            flags = ("--max-num-seqs", seqs, "--max-num-batched-tokens", tokens, *FIXED[1:5])
            assert verdicts(run, 1.05 * best, *map(str, flags)) != {True}, flags


def test_the_same_answer_with_any_number_of_processes(run: Run) -> None:
    narrow = ("--no-fp8", "--gpu-memory-utilization", "0.9", "--max-num-seqs", "32", "-q")
    few = (*LOAD[:4], "--num-requests", "40")
    assert tuned(run, *SLO, *narrow, "--jobs", "1", load=few) == tuned(run, *SLO, *narrow, "--jobs", "2", load=few)


def test_what_is_stated_is_kept(run: Run) -> None:
    document = tuned(run, *SLO, *FIXED, "--max-num-seqs", "48", "--max-num-batched-tokens", "2048")
    assert document["num_settings"] == 1
    assert document["settings"][0]["flags"] == {}
    command = read_command(document["settings"][0]["command"])
    assert (command.args["max_num_seqs"], command.args["max_num_batched_tokens"]) == (48, 2048)


def test_no_row_of_the_front_is_beaten_by_another(run: Run) -> None:
    document = tuned(run, *SLO, *FIXED[1:], "--max-num-seqs", "32")
    points = [
        (-row["requests_per_s"], "kv_cache_dtype" in row["flags"], *(target["value"] for target in row["targets"]))
        for row in document["settings"]
        if row["on_front"]
    ]
    assert points
    for point in points:
        assert not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)


def test_servers_side_by_side_share_the_load(run: Run) -> None:
    """Two GPUs as two servers serve twice what one does: each simulated server gets half of the rate."""
    fixed = (*FIXED, "--max-num-seqs", "48", "--max-num-batched-tokens", "2048", "--tp", "1")
    one = tuned(run, *SLO, *fixed)["settings"][0]
    two = tuned(run, *SLO, *fixed, "--num-gpus", "2")["settings"][0]
    assert (one["servers"], two["servers"]) == (1, 2)
    assert two["requests_per_s"] == pytest.approx(2 * one["requests_per_s"], rel=1e-9)


def test_a_rate_that_must_be_served_has_three_verdicts(run: Run) -> None:
    fixed = (*SLO, *FIXED, "--max-num-seqs", "48", "--max-num-batched-tokens", "2048", "--exit-code")
    best = tuned(run, *fixed[:-1])["settings"][0]
    assert best["low"] < best["requests_per_s"] < best["high"]
    answers = {}
    for rate in (0.9 * best["low"], best["requests_per_s"], 1.1 * best["high"]):
        ran = run("tune", *MODEL, *LOAD, *fixed, "--rate", f"{rate:.6f}", *JSON)
        answers[ran.json["verdict"]] = (ran.code, ran.json["answer"].partition(":")[0])
    assert answers == {
        "kept": (0, "Yes"), "too close to call": (1, "Too close to call"), "broken": (1, "No"),
    }  # fmt: skip


def test_targets_that_nothing_keeps(run: Run) -> None:
    ran = run("tune", *MODEL, *LOAD, *FIXED, "--max-num-batched-tokens", "2048", "--slo", "tpot=2ms", "--exit-code")
    assert ran.code == 1
    assert ran.out.startswith("No: no setting of llama-3.1-8b on 1 x l40s serves ")


def test_users_and_all_at_once_need_no_target(run: Run) -> None:
    fixed = (*FIXED, "--max-num-batched-tokens", "4096", "--num-requests", "60")
    by_users = tuned(run, *fixed, "--users", "8", load=LOAD[:4])
    assert by_users["settings"][0]["running_peak"] <= 8
    at_once = tuned(run, *fixed, "--rate", "inf", load=LOAD[:4])
    assert at_once["settings"][0]["requests_per_s"] > by_users["settings"][0]["requests_per_s"]


def test_every_format_says_it(run: Run, tmp_path: Path) -> None:
    fixed = (*SLO, *FIXED, "--max-num-seqs", "48", "--max-num-batched-tokens", "4096")
    report = tmp_path / "answer.md"
    document = run("tune", *MODEL, *LOAD, *fixed, "--report", report, *JSON).json
    schema = run("schema", "tune").json
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(document)) == []
    assert document["answer"].replace("_", "") in report.read_text().replace("*", "").replace("\\", "").replace("_", "")
    table = run("tune", *MODEL, *LOAD, *fixed)
    assert " ".join(table.out.split()).startswith(document["answer"])
    assert document["settings"][0]["command"] in table.out
    rows = run("tune", *MODEL, *LOAD, *fixed, "--format", "csv").out.splitlines()
    assert len(rows) == 1 + len(document["settings"])
    assert rows[0].startswith("servers,tensor_parallel_size,requests_per_s,")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--engine", "sglang", *SLO), "only vLLM's scheduler"),
        (("--dp", "2", *SLO), "--data-parallel-size"),
        (("--pp", "2", *SLO), "--pipeline-parallel-size"),
        ((), "--slo"),
        ((*SLO, "--rate", "1:5s,2:5s"), "--rate"),
        ((*SLO, "--max-concurrency", "4", "--rate", "2"), "--max-concurrency"),
        ((*SLO, "--ctx", "auto"), "--ctx"),
        ((*SLO, "--num-gpus", "3", "--tp", "2"), "--num-gpus 3"),
        ((*SLO, "--num-gpus", "0"), "--num-gpus"),
        ((*SLO, "--jobs", "0"), "--jobs"),
        (("--slo", "ttft"), "--slo"),
        ((*SLO, "--profile", "sharegpt"), "conflict"),
        ((*SLO, "--ctx", "1k"), "--ctx: no prompt fits in the context of 1,024 tokens"),
    ],
)
def test_what_cannot_be_asked_is_one_line(run: Run, options: tuple[str, ...], part: str) -> None:
    ran = run(
        "tune",
        "llama-3.1-8b",
        "--gpu",
        "l40s",
        *LOAD,
        *(("--ctx", "4k") if "--ctx" not in options else ()),
        *options,
        "-q",
    )
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert part in ran.err


def test_a_model_that_does_not_fit_says_so(run: Run) -> None:
    ran = run("tune", "llama-3.1-70b", "--gpu", "l40s", "--ctx", "4k", *LOAD, *SLO, *FIXED)
    assert ran.code == 2
    assert "does not fit on l40s" in ran.err


def test_a_flag_is_turned_one_step_at_a_time() -> None:
    values = {name: (None, *steps) for name, steps in STEPS.items()}
    where = Space(((1, 1),), values)
    near = set(where.near(Setting(1, 1, None, 64)))
    assert {setting.max_num_seqs for setting in near if setting.max_num_batched_tokens is None} >= {32, 96, None, 64}
    assert Setting(1, 1, None, 128) not in near
    assert all(setting.kv_cache_dtype is None for setting in near)


def test_prompt_tokens_that_were_sent_before_are_taken_as_cached() -> None:
    """Three prompts of 100 tokens; the second begins as the first did for two runs of 16, the third for one."""
    rows = [TraceRequest(0.0, 100, 10, ids) for ids in ((1, 2, 3), (1, 2, 9), (1, 7))]
    assert means_of(rows, 16).computed == pytest.approx((100 + (100 - 32) + (100 - 16)) / 3)


@pytest.mark.full
def test_host_memory_is_worth_its_flags_where_chats_come_back(run: Run) -> None:
    """As `simulate --tier` says of these chats: half of their prompt tokens come from tiers (docs/simulate.md)."""
    chats = ("--trace", "examples/chats.jsonl", "--num-requests", "120", "--ctx", "16k")
    model = ("llama-3.1-8b", "--gpu", "rtx-4090")
    fixed = (
        *SLO,
        *FIXED,
        "--max-num-seqs",
        "32",
        "--max-num-batched-tokens",
        "4096",
        "--enable-prefix-caching",
        "--tier",
        "cpu=64GiB@25GB/s",
    )
    document = tuned(run, *fixed, load=chats, model=model)
    best, usual = document["settings"][0], next(row for row in document["settings"] if row["is_default"])
    assert best["flags"] == {"kv_offloading_size": 64 * 2**30, "kv_offloading_backend": "lmcache"}
    assert best["requests_per_s"] > 1.1 * usual["requests_per_s"]
    assert "--kv-offloading-size 64 --kv-offloading-backend lmcache" in document["answer"]


def test_host_memory_needs_prompts_that_share_something(run: Run) -> None:
    ran = run("tune", *MODEL, *LOAD, *SLO, "--tier", "cpu=64GiB@25GB/s")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "--tier: helps only where prompts share their beginning" in ran.err


def rows_of_vllm() -> list[dict[str, Any]]:
    """Settings drawn at random from what tune may propose, and what vLLM 0.33's own code made of them."""
    path = Path(__file__).parents[1] / "facts" / "tune_settings.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", rows_of_vllm(), ids=lambda row: f"{row['model']}-{row['gpu']}-{row['inputs']['tp']}")
def test_vllm_takes_what_may_be_proposed_and_makes_the_same_of_it(row: dict[str, Any]) -> None:
    given, resolved = row["inputs"], row["resolved"]
    flags = {name: given[name] for name in STEPS if name in given}
    assert all(value in STEPS[name] for name, value in flags.items())
    base = EngineArgs(
        max_model_len=given["max_model_len"],
        tensor_parallel_size=given["tp"],
        kv_cache_memory_bytes=given["available_memory"][0],
    )
    made = plan(Request(catalog.load(row["model"]), gpu(row["gpu"]), replace(base, **flags)))
    assert made.settings.max_num_seqs == resolved["max_num_seqs"]
    assert made.settings.max_num_batched_tokens == resolved["max_num_batched_tokens"]
    assert made.settings.prefix_caching == resolved["enable_prefix_caching"]
    assert made.capacity.num_blocks == row["num_gpu_blocks"]


def test_no_more_is_promised_than_a_server_computes(run: Run) -> None:
    """A target of the time per token alone is kept by any burst that a short run holds; the queue is not in it."""
    document = tuned(run, "--slo", "tpot=2s", *FIXED, "--max-num-seqs", "256", "--max-num-batched-tokens", "4096")
    best = document["settings"][0]
    assert best["requests_per_s"] < 1.2 * best["closed_form_requests_per_s"]
    assert best["high"] < 2 * best["requests_per_s"]
    assert document["limits"] == ["all that the server computes: more requests would only wait"]
