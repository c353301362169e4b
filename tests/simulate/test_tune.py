"""`kvplan tune`: its rates are those of `simulate` with the flags it prints; nothing that it may turn serves more."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvplan.asked.pasted import read_command
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.settings import STEPS, Setting, Space, space
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


def verdicts(run: Run, rate: float, *flags: str, load: tuple[str, ...] = LOAD) -> set[bool]:
    """Whether `simulate` keeps each target with its likely figures."""
    words = ("simulate", *MODEL, *load, *SLO, "--rate", f"{rate:.9f}", "-q", *flags, *JSON)
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
    """Every number of sequences and of tokens in a step, by `simulate` itself, at a rate a twentieth higher.

    The run is long enough that a queue longer than the server's capacity misses the targets: a short one ends first.
    """
    load = (*LOAD[:4], "--num-requests", "480")
    document = tuned(run, *SLO, *FIXED, load=load)
    best = document["settings"][0]["requests_per_s"]
    for seqs in STEPS["max_num_seqs"][:6]:
        for tokens in STEPS["max_num_batched_tokens"]:
            flags = ("--max-num-seqs", seqs, "--max-num-batched-tokens", tokens, *FIXED[1:5])
            assert verdicts(run, 1.05 * best, *map(str, flags), load=load) != {True}, flags


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
    single = tuned(run, *SLO, *fixed)["settings"][0]
    two = tuned(run, *SLO, *fixed, "--num-gpus", "2")["settings"][0]
    assert (single["servers"], two["servers"]) == (1, 2)
    assert two["requests_per_s"] == pytest.approx(2 * single["requests_per_s"], rel=1e-9)


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
    assert "the highest rate" not in ran.out  # which would stand before what it is within


def test_users_and_all_at_once_need_no_target(run: Run) -> None:
    fixed = (*FIXED, "--max-num-batched-tokens", "4096", "--num-requests", "60")
    by_users = tuned(run, *fixed, "--users", "8", load=LOAD[:4])
    assert by_users["settings"][0]["running_peak"] <= 8
    at_once = tuned(run, *fixed, "--rate", "inf", load=LOAD[:4])
    assert at_once["settings"][0]["requests_per_s"] > by_users["settings"][0]["requests_per_s"]


def test_defaults_that_suffice_are_the_answer(run: Run) -> None:
    """At a tenth of what they surely serve nothing is turned; what fp8 would add is named from 2% on."""
    fixed = (*SLO, *FIXED[1:], "--max-num-seqs", "32", "--max-num-batched-tokens", "2048")
    document = tuned(run, *fixed, "--rate", "0.2")
    best = document["settings"][0]
    assert (document["verdict"], best["is_default"], best["flags"]) == ("kept", True, {})
    fastest = max(document["settings"], key=lambda setting: float(setting["requests_per_s"]))
    assert fastest["flags"] == {"kv_cache_dtype": "fp8"}
    more = fastest["requests_per_s"] / best["requests_per_s"] - 1
    named = f"; --kv-cache-dtype fp8 would serve {more:.0%} more." in document["answer"]
    assert named == (more >= 0.02)


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


def test_ranks_that_share_nothing_serve_as_many_servers_do(run: Run) -> None:
    """A dense model's two data-parallel ranks are two servers of one GPU each, by any flags."""
    sizes = ("--max-num-seqs", "48", "--max-num-batched-tokens", "4096", "--num-gpus", "2")
    fixed = (*SLO, *FIXED, *sizes, *JSON)
    alone, ranks = (run("tune", *MODEL, *LOAD, *fixed, *words).json["settings"][0] for words in ((), ("--dp", "2")))
    assert (alone["servers"], ranks["servers"]) == (2, 1)
    assert ranks["requests_per_s"] == alone["requests_per_s"]
    assert "--data-parallel-size 2" in ranks["command"]
    table = run("tune", *MODEL, *LOAD, *SLO, *FIXED, *sizes, "--dp", "2").out
    assert "Run 1 server of TP 1 x DP 2 with" in table.replace("\n", " ")
    assert "running per rank" in table


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--engine", "sglang@0.4", *SLO), "SGLang's scheduler is that of 0.5.23"),
        (("--engine", "sglang", "--shared-prefix", "100", "--tier", "cpu=4GiB@9GB/s", *SLO), "--tier"),
        (("--dp", "2", "--num-gpus", "3", *SLO), "is not a multiple of the 2 GPUs of a server"),
        (("--pp", "2", *SLO), "--pp"),
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


def test_refusals_that_differ_in_numbers_are_one_line(run: Run) -> None:
    """A 70B model starts on two of these GPUs; on one, each setting lacks another amount."""
    words = ("llama-3.1-70b", "--gpu", "h100-80g", "--num-gpus", "2", "--ctx", "4k")
    ran = run("tune", *words, *LOAD[:4], "--num-requests", "10", "--slo", "tpot=200ms", "-q", "--jobs", "1")
    refusals = [line for line in ran.out.splitlines() if "does not fit" in line]
    assert len(refusals) == 1
    assert re.search(
        r"^\d+ settings: llama-3.1-70b on h100-80g does not fit, \d+\.\d\d to \d+\.\d\d GiB short", refusals[0]
    )


def test_a_model_that_does_not_fit_says_so(run: Run) -> None:
    ran = run("tune", "llama-3.1-70b", "--gpu", "l40s", "--ctx", "4k", *LOAD, *SLO, *FIXED)
    assert ran.code == 2
    assert "llama-3.1-70b on l40s does not fit, " in ran.err


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
    assert best["flags"] == {"kv_offloading_size": 64 * 2**30, "kv_offloading_backend": "native"}
    assert best["requests_per_s"] > 1.1 * usual["requests_per_s"]
    assert "--kv-offloading-size 64 --kv-offloading-backend native" in document["answer"]


def test_host_memory_needs_prompts_that_share_something(run: Run) -> None:
    ran = run("tune", *MODEL, *LOAD, *SLO, "--tier", "cpu=64GiB@25GB/s")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "--tier helps only if prompts share prefixes" in ran.err


def rows_of_vllm() -> list[dict[str, Any]]:
    """Settings drawn at random from what tune may propose, and what vLLM 0.33's own code made of them."""
    path = Path(__file__).parents[1] / "facts" / "tune_settings.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", rows_of_vllm(), ids=lambda row: f"{row['model']}-{row['gpu']}-{row['inputs']['tp']}")
def test_vllm_takes_what_may_be_proposed_and_makes_the_same_of_it(row: dict[str, Any]) -> None:
    inputs, resolved = row["inputs"], row["resolved"]
    flags = {name: inputs[name] for name in STEPS if name in inputs}
    assert all(value in STEPS[name] for name, value in flags.items())
    base = EngineArgs(
        max_model_len=inputs["max_model_len"],
        tensor_parallel_size=inputs["tp"],
        kv_cache_memory_bytes=inputs["available_memory"][0],
    )
    answer = plan(Request(catalog.load(row["model"]), gpu(row["gpu"]), replace(base, **flags)))
    assert answer.settings.max_num_seqs == resolved["max_num_seqs"]
    assert answer.settings.max_num_batched_tokens == resolved["max_num_batched_tokens"]
    assert answer.settings.prefix_caching == resolved["enable_prefix_caching"]
    assert answer.capacity.num_blocks == row["num_gpu_blocks"]


def test_no_more_is_promised_than_a_server_computes(run: Run) -> None:
    """A target of the time per token alone is kept by any burst that a short run holds; the queue is not in it."""
    document = tuned(run, "--slo", "tpot=2s", *FIXED, "--max-num-seqs", "256", "--max-num-batched-tokens", "4096")
    best = document["settings"][0]
    assert best["requests_per_s"] < 1.2 * best["closed_form_requests_per_s"]
    assert best["high"] < 2 * best["requests_per_s"]
    assert (document["too_few_requests"], document["limits"]) == (True, [])  # 80 requests break no such target


def rows_of_sglang() -> list[dict[str, Any]]:
    """Commands for settings drawn at random from what tune may propose, as SGLang 0.5.23's own parser read them."""
    path = Path(__file__).parents[1] / "facts" / "tune_settings_sglang.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", rows_of_sglang(), ids=lambda row: f"{row['model']}-{row['gpu']}-{row['tp']}")
def test_sglang_takes_what_may_be_proposed_and_makes_the_same_of_it(row: dict[str, Any]) -> None:
    args = EngineArgs(max_model_len=row["context"], tensor_parallel_size=row["tp"])
    base = Request(catalog.load(row["model"]), gpu(row["gpu"]), args, release=parse_engine("sglang"))
    where = space(base, frozenset(), row["tp"], fp8=True, has_prefixes=True)
    setting = Setting(row["tp"], 1, **row["setting"])
    assert setting in set(where.settings)
    answer, resolved = plan(setting.request(base)), row["resolved"]
    words = serve_command(answer)
    split = ["--tp-size", str(row["tp"])] if row["tp"] > 1 else []
    assert words[words.index("--context-length") :] == [*row["argv"][:2], *split, *row["argv"][2:]]
    assert answer.settings.max_num_batched_tokens == resolved["chunked_prefill_size"]
    assert answer.settings.gpu_memory_utilization == pytest.approx(resolved["mem_fraction_static"], abs=5e-4)
    assert answer.settings.prefix_caching == (not resolved["disable_radix_cache"])
    assert answer.capacity.max_model_len == resolved["context_len"]
    assert resolved["kv_cache_dtype_str"] == ("fp8_e4m3" if "kv_cache_dtype" in row["setting"] else "auto")
    assert answer.settings.max_num_seqs == row["setting"].get("max_num_seqs", answer.settings.max_num_seqs)


SGLANG = ("--engine", "sglang", *SLO, "--no-fp8", "--mem-fraction-static", "0.85", "-q", "--jobs", "1")


@pytest.mark.full
def test_sglangs_flags_are_turned_and_printed(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "answer.html"
    document = tuned(run, *SGLANG, "--chunked-prefill-size", "4096", "--report", str(report))
    best = document["settings"][0]
    assert {name for setting in document["settings"] for name in setting["flags"]} == {"max_num_seqs"}
    count = best["flags"]["max_num_seqs"]
    assert f"Run --max-running-requests {count}: " in document["answer"]
    command = shlex.split(best["command"])
    assert command[command.index("--max-running-requests") + 1] == str(count)
    assert (document["unseen"], "(dense models, SGLang, GPUs with measured kernels)" in document["coverage"]) == (
        [],
        True,
    )
    assert document["coverage"] in report.read_text()
    rate = best["requests_per_s"]
    words = ("simulate", *MODEL, *LOAD, *SLO, "-q", "--engine", "sglang", "--mem-fraction-static", "0.85", *JSON)
    flags = ("--chunked-prefill-size", "4096", "--max-running-requests", count)
    targets = run(*words, *flags, "--rate", f"{rate * 0.999999:.9f}").json["variants"][0]["slo"]
    assert all(target["value"] <= target["limit"] for target in targets)


def test_sglang_without_its_radix_tree_is_tried_where_prompts_share_something(run: Run) -> None:
    fixed = ("--chunked-prefill-size", "4096", "--max-running-requests", "8", "--shared-prefix", "600")
    document = tuned(run, *SGLANG, *fixed, load=(*LOAD[:4], "--num-requests", "40"))
    assert document["settings"][0]["is_default"]
    assert document["num_settings"] == 2
    rows = run("tune", *MODEL, *LOAD, *SGLANG, *fixed, "--format", "csv").out.splitlines()
    assert "mem_fraction_static" in rows[0]
    assert "gpu_memory_utilization" not in rows[0]


SHAREGPT = ("--profile", "sharegpt", "--ctx", "16k", "--jobs", "1", "-q")
LOOSE = ("--slo", "ttft.p90=2s,tpot=50ms")  # far from what such a small model takes


def test_too_few_requests_choose_no_flag(run: Run, tmp_path: Path) -> None:
    """100 requests end before a server of which 256 may run at once is full: `simulate` finds no largest rate either,
    and equal figures with 256, 384 and 512 sequences.
    """
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = (str(tmp_path), "--gpu", "l40s")
    words = (*SHAREGPT, *LOOSE, *FIXED, "--max-num-batched-tokens", "2048", "--num-requests", "100")
    document = run("tune", *model, *words, *JSON).json
    best = document["settings"][0]
    assert document["too_few_requests"]
    assert (best["is_default"], best["flags"], document["limits"]) == (True, {}, [])
    simulated = run("simulate", *model, "--profile", "sharegpt", "--ctx", "16k", *LOOSE, "--num-requests", "100",
                    "--rate", f"{best['requests_per_s']:.3f}", "-q")  # fmt: skip
    assert "too few requests" in simulated.out
    output = run("tune", *model, *words).out
    assert output.startswith("Run the defaults: at least ")
    assert "--max-num-seqs 384" not in output


def test_a_setting_equal_to_the_default_is_no_row(run: Run) -> None:
    """SGLang takes --chunked-prefill-size 4096 on this GPU by itself: its command line says so."""
    words = ("--engine", "sglang", "--users", "100", "--num-requests", "200", "--max-num-seqs", "64", "--no-fp8")
    document = run("tune", "llama-3.1-8b", "--gpu", "l40s", *SHAREGPT, *LOOSE, *words, *JSON).json
    default = next(setting for setting in document["settings"] if setting["is_default"])
    own = int(default["command"].partition("--chunked-prefill-size ")[2].split()[0])
    tokens = [setting["flags"].get("max_num_batched_tokens", own) for setting in document["settings"]]
    assert len(set(tokens)) == len(tokens) > 1


@pytest.mark.full
def test_a_low_end_without_a_rate_is_explained(run: Run) -> None:
    words = ("--engine", "sglang", "--users", "100", "--num-requests", "300", "--no-fp8")
    text = run("tune", "llama-3.1-8b", "--gpu", "l40s", *SHAREGPT, *LOOSE, *words).out
    assert "(none-" in text
    assert "None at the low end: if steps are as slow as their range allows, the targets are missed." in text
    assert "(0-" not in text


def test_what_comes_nearest_is_named_where_nothing_meets_the_targets(run: Run) -> None:
    """A token of llama-3.1-8b reads 16 GB of weights: 19 ms at the 864 GB/s of an L40S, whatever the flags."""
    words = (*SHAREGPT, *FIXED, "--max-num-seqs", "64", "--slo", "tpot.p50=5ms", "--num-requests", "40")
    document = run("tune", "llama-3.1-8b", "--gpu", "l40s", *words, *JSON).json
    assert document["settings"] == []
    [target] = document["nearest"]["targets"]
    assert 0.0186 < target["value"] < 0.06
    assert document["answer"].startswith("No: ")
    assert " Nearest: the defaults at " in document["answer"]
