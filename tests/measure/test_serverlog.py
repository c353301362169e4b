"""A server's start-up log: every wording read back, ranks and restarts kept apart, nothing trusted."""

import csv
import gzip
import io
import json
import random
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError
from kvplan.measure.serverlog import log as server_log
from kvplan.measure.serverlog.log import parse_log, read_log, read_text
from kvplan.servers.base import logs_of_servers
from kvplan.servers.logs.log import FACTS, NUMBERS, ServerLog, Wording, compiled
from kvplan.servers.logs.text import arguments, unwrapped
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS_DIR = Path(__file__).parents[1] / "facts" / "logs"
SETS: dict[str, dict[str, Any]] = {
    wordings["name"]: wordings for wordings in yaml.safe_load((FACTS_DIR / "wordings.yaml").read_text(encoding="utf-8"))
}
with (FACTS_DIR / "cases.csv").open(encoding="utf-8", newline="") as file:
    CASES = [{name: text for name, text in row.items() if text} for row in csv.DictReader(file)]
TABLES = logs_of_servers().values()
WORDINGS = [wording for table in TABLES for wording in table.wordings]
OPENINGS = [text for table in TABLES for text in (*table.lists, *table.commands)]
TEXTS = ("source", "engine", "version", "wording", "model")
COUNTS = {"num_blocks", "kv_tokens", "pool_tokens", "concurrency_context", "context"}

# How processes sign their lines, and the rank that each means.
PREFIXES = (
    ("", ""),
    ("INFO 04-09 02:05:53 [gpu_model_runner.py:1273] ", ""),
    ("INFO 11-27 02:16:16 model_runner.py:1077] ", ""),
    ("(VllmWorkerProcess pid=110190) INFO 04-10 08:58:01 [model_runner.py:1146] ", "pid 110190"),
    ("(VllmWorker rank=1 pid=52940) INFO 04-14 14:23:05 [gpu_model_runner.py:1273] ", "rank 1"),
    ("(VllmWorker TP0 pid=1430) INFO 09-03 00:39:33 [gpu_model_runner.py:2007] ", "TP0"),
    ("(Worker_TP1_EP1 pid=2295) INFO 09-24 19:58:12 [gpu_worker.py:298] ", "TP1_EP1"),
    ("(EngineCore_DP0 pid=1133552) INFO 10-03 16:22:17 [gpu_worker.py:298] ", "DP0"),
    ("(EngineCore_0 pid=1159) (RayWorkerWrapper pid=345, ip=10.42.11.243) INFO 09-10 ", "pid 345, ip 10.42.11.243"),
    ("\x1b[36m(RayWorkerWrapper pid=319, ip=172.20.96.190)\x1b[0m INFO 04-16 10:28:33 ", "pid 319, ip 172.20.96.190"),
    ("[36m(RayWorkerWrapper pid=860)[0m INFO 04-16 10:28:44 ", "pid 860"),
    ("vllm-llm-1  | (VllmWorkerProcess pid=233) INFO 03-30 01:58:47 ", "pid 233"),
    ("2025-08-21T18:18:05.123Z stdout F (Worker_TP0 pid=770) INFO 08-21 18:18:05 ", "TP0"),
    ("> INFO 04-20 20:40:10 model_runner.py:173] ", ""),
    ("[2025-04-23 16:14:47 TP0] ", "TP0"),
    ("[2025-04-23 16:14:47 DP1 TP3] ", "DP1 TP3"),
    ("[gpu_id=3] ", "gpu 3"),
    ("61%|██████▎   | 179/292 [00:01<00:00, 130.83it/s][gpu=7] ", "gpu 7"),
)  # fmt: skip


def figures_of(case: dict[str, str]) -> dict[str, float]:
    figures = {name: float(text) for name, text in case.items() if name not in TEXTS}
    return {name: int(value) if name in COUNTS else value for name, value in figures.items()}


def rendered(wording: str, figures: dict[str, float], prefix: str = "") -> list[str]:
    """The messages of a set whose figures are all there."""
    lines = []
    for message in SETS[wording]["messages"]:
        places = {name for _, name, _, _ in string.Formatter().parse(message) if name}
        if places <= figures.keys():
            lines.append(prefix + message.format_map(figures))
    return lines


def printed(wording: str, figures: dict[str, float]) -> set[str]:
    """The facts for which a set has a message that the figures fill."""
    return {
        name
        for message in SETS[wording]["messages"]
        for places in [{name for _, name, _, _ in string.Formatter().parse(message) if name}]
        if places <= figures.keys()
        for name in places
    }


# --- wordings ---------------------------------------------------------------------------------------------------------


def test_the_fixtures_are_many_and_of_many_releases() -> None:
    releases = {(case["engine"], ".".join(case["version"].split(".")[:2])) for case in CASES}
    assert len(CASES) >= 30
    assert len(releases) >= 12
    assert {case["wording"] for case in CASES} < SETS.keys()
    for case in CASES:
        major, minor = case["version"].split(".")[:2]
        assert [int(major), int(minor)] in SETS[case["wording"]]["releases"], case


@pytest.mark.parametrize("case", CASES, ids=[f"{case['source'][:24]}-{case['version']}" for case in CASES])
def test_a_cases_figures_are_read_back_from_its_releases_wording(case: dict[str, str]) -> None:
    figures = figures_of(case)
    if case["engine"] == "sglang":
        figures["context"] = 8192  # stands on the line that gives the tokens
    lines = rendered(case["wording"], figures)
    assert lines, "no message of the set can be filled"
    log = parse_log("\n".join(lines))
    assert log.engine == case["engine"]
    read = {name: log.first(name) for name in printed(case["wording"], figures)}
    assert {name: None if reading is None else reading.value for name, reading in read.items()} == {
        name: figures[name] for name in read
    }


@given(data=st.data())
def test_any_figures_through_any_wording_and_prefix_are_read_back(data: st.DataObject) -> None:
    wording = data.draw(st.sampled_from(sorted(SETS)))
    prefix, rank = data.draw(st.sampled_from(PREFIXES))
    message = data.draw(st.sampled_from([text for text in SETS[wording]["messages"] if "{" in text]))
    places = {name: spec for _, name, spec, _ in string.Formatter().parse(message) if name}
    figures: dict[str, float] = {}
    for name, spec in places.items():
        digits = 10 ** int(spec[1]) if spec and spec.startswith(".") else 1
        maximum = 2**40 if name in COUNTS else 10**6
        whole = data.draw(st.integers(min_value=0, max_value=maximum * (1 if name in COUNTS else digits)))
        figures[name] = whole if name in COUNTS else whole / digits
    log = parse_log(prefix + message.format_map(figures))
    for name, value in figures.items():
        reading = log.first(name)
        assert reading is not None, name
        assert reading.value == pytest.approx(value, abs=1e-9)
        assert reading.rank == rank


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: f"{wording.phrase.strip()[:30]}-{wording.versions}")
def test_a_wording_names_its_facts_its_releases_and_where_it_was_seen(wording: Wording) -> None:
    assert set(re.findall(r"<(\w+)>", wording.pattern)) <= FACTS.keys()
    assert re.findall(r"<(\w+)>", wording.pattern)
    assert wording.versions
    assert re.search(r"#\d+|\.py|/", wording.source)
    unbounded = re.sub(r"\\.|\[[^]]*\]", "", compiled(wording).pattern)
    assert not re.search(r"[*+]|,\}", unbounded), "a repetition without a bound"


def test_every_fact_of_the_table_is_in_some_fixture_or_test() -> None:
    used = {name for wording in WORDINGS for name in re.findall(r"<(\w+)>", wording.pattern)}
    assert used == FACTS.keys()


LINES = (
    (
        "kv_tokens_refused",
        "16864",
        "number of tokens that can be stored in KV cache (16864). Try increasing",
    ),  # vllm#4588
    ("padding_layers", "2", "Add 2 padding layers, may waste at most 9.09% KV cache memory"),
    ("context_parallel", "8", "Multiplying the GPU KV cache size by the dcp_world_size 8."),
    ("attention_block_size", "4160", "Setting attention block size to 4160 tokens"),
    (
        "utilization",
        "0.88",
        "The current --gpu-memory-utilization=0.88 is equivalent to --gpu-memory-utilization=0.8592",
    ),
    (
        "available_kv",
        "4.0",
        "Initial free memory 93.95 GiB, reserved 4.0 GiB memory for KV Cache as specified by kv_cache_",
    ),
    ("kv_in_use", "27.85", "Current kv cache memory in use is 27.85 GiB."),
    ("available_kv", "-2.14", "Available KV cache memory: -2.14 GiB"),
    ("utilization", "0.90", "total_gpu_memory (23.57GiB) x 0.90 = 21.21GiB"),
    ("key_size", "46.80", "KV Cache is allocated. #tokens: 13200, KV size: 46.80 GB"),
    ("value_size", "1.61", "KV Cache is allocated. K size: 1.61 GB, V size: 1.61 GB."),
    (
        "max_running",
        "2049",
        "max_total_num_tokens=5, max_prefill_tokens=16, max_running_requests=2049, context_len=32768",
    ),
    ("gpu", "NVIDIA_A800-SXM4-80GB", "from /x/E=128,N=192,device_name=NVIDIA_A800-SXM4-80GB.json for MoE layer."),
    ("gpu", "NVIDIA GeForce RTX 3090", "GPU 0: NVIDIA GeForce RTX 3090"),
    (
        "version",
        "0.19.2rc1.dev8",
        "(APIServer pid=1) INFO 04-19 [utils.py:299]  ▄▄ ▄█ █     █ ▀▄▀ █  version 0.19.2rc1.dev8",
    ),
    ("model", "org/Name-8B", "(APIServer pid=1) INFO 04-19 [utils.py:299]   █▄█▀ █     █     █  model   org/Name-8B"),
    ("context", "65536", "INFO Using max model len 65536"),
    ("max_batched_tokens", "8192", "Chunked prefill is enabled with max_num_batched_tokens=8192."),
    ("num_blocks", "12", "# hpu blocks: 12, # CPU blocks: 819"),
    ("engine_kind", "# cuda blocks", "# cuda blocks: 7054, # CPU blocks: 4681"),
    ("engine_kind", "model weights take", "model weights take 15.65GiB; non_torch_memory takes 0.08GiB"),
    ("engine_kind", "V0", "Initializing a V0 LLM engine (v0.8.5) with config: model='org/a', max_seq_len=8"),
    ("sampler", "Using FlashInfer", "[topk_topp_sampler.py:59] Using FlashInfer for top-p & top-k sampling."),
    (
        "sampler",
        "FlashInfer is not available",
        "[topk_topp_sampler.py:69] FlashInfer is not available. Falling back to the PyTorch-native implementation",
    ),
    (
        "sampler",
        "FlashInfer is available, but it is not enabled",
        "FlashInfer is available, but it is not enabled. Falling back to the PyTorch-native implementation of",
    ),
    (
        "graph_profiling",
        "will be",
        "In v0.19, CUDA graph memory profiling will be enabled by default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1)",
    ),
    (
        "graph_profiling",
        "disabled",
        "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it,",
    ),
    ("full_tokens", "1255367", "Use sliding window memory pool. full_layer_tokens=1255367, swa_layer_tokens=1004293"),
    (
        "full_tokens",
        "57",
        "Use Sliding window memory pool. full_layer_tokens=57 (0.01 GiB), swa_layer_tokens=45 (0 GiB",
    ),
    ("version", "0.4.3", "+ docker run lmsysorg/sglang:v0.4.3 python3 -m sglang.launch_server"),
    ("version", "0.4.3.post2-cu124", "docker run --gpus all lmsysorg/sglang:v0.4.3.post2-cu124 bash"),
    ("version", "0.4.7.post1", "sglang: 0.4.7.post1"),
    ("free_at_end", "52.97", "Capture cuda graph end. Time elapsed: 7.01 s. mem usage=1.34 GB. avail mem=52.97 GB."),
)


@pytest.mark.parametrize(("fact", "text", "line"), LINES, ids=[fact for fact, _, _ in LINES])
def test_a_line_gives_its_figure(fact: str, text: str, line: str) -> None:
    assert parse_log(line).text(fact) == text


@pytest.mark.parametrize(
    "line",
    [
        "# CPU blocks: 819",
        "Graph capturing finished in 4 secs.",
        "INFO Engine 000: Running: 3 reqs, GPU KV cache usage: 61.0%",
        "Available KV cache memory: GiB",
        "Maximum concurrency for many tokens per request: 1.00x",
        "| openai/gpt-oss-20b | 13.47 | 7.38 | 0.13 |",
    ],
)
def test_what_says_nothing_is_no_log(line: str) -> None:
    with pytest.raises(
        InvalidInputError, match=r"holds no line that vLLM, SGLang, llama\.cpp or kvplan's engine writes at start-up"
    ):
        parse_log(line)


# Figures of server_logs.jsonl that its quoted lines do not hold, case by case.
NO_LINE = {
    "in a table of a document": {*range(142, 152), *range(227, 233), *range(237, 243), *range(296, 299), 300, 301},
    "in prose": {181, 187, 207, 208, 289, 292, 302},
    "on lines that are not quoted": {38, 54, 85, 106, 248},
}
# Where both are there, with the digits of another line of the same log.
FINER_ELSEWHERE = {153, 268, 273, 279, 281, 282}
MEASURED = {
    "weights_gib": "weights", "activation_peak_gib": "activations", "non_torch_gib": "non_torch",
    "cuda_graph_gib": "cuda_graphs", "cuda_graph_estimate_gib": "cuda_graphs_estimated", "peak_torch_gib": "peak_torch",
    "available_kv_gib": "available_kv", "consumed_weights_plus_nontorch_gib": "consumed",
    "num_gpu_blocks": "num_blocks", "kv_cache_tokens": "kv_tokens", "kv_tokens_err": "kv_tokens_refused",
    "max_concurrency": "max_concurrency", "max_concurrency_tokens": "concurrency_context",
    "total_gpu_mem_gib": "total_memory", "sgl_avail_after_load_gb": "free_after_load",
    "sgl_avail_after_pool_gb": "free_after_pool", "sgl_avail_final_gb": "free_at_end", "sgl_k_gb": "key_size",
    "sgl_v_gb": "value_size", "sgl_weight_mem_gb": "weights", "sgl_graph_gb": "cuda_graphs",
    "sgl_mamba_conv_gb": "conv_state", "sgl_mamba_ssm_gb": "ssm_state", "sgl_swa_tokens": "pool_tokens",
    "sgl_swa_k_gb": "key_size", "oom_torch_allocated_gib": "weights",
}  # fmt: skip


def read_as(log: ServerLog, name: str) -> list[float]:
    """What a log says of a measured figure: the pool's bytes may be K and V, its tokens those of the allocation."""
    fact = MEASURED[name]
    values = [reading.value for reading in log.all(fact)]
    if fact == "available_kv" and log.engine == "sglang":
        pairs = zip(log.all("key_size"), log.all("value_size"), strict=True)
        return [round(key.value + value.value, 2) for key, value in pairs]
    if fact == "available_kv" and not values:
        return [reading.value for reading in log.all("kv_in_use")]
    if fact == "kv_tokens" and not values:
        return [reading.value for reading in log.all("pool_tokens")]
    return values


@needs_oracle_data
def test_every_quoted_log_gives_its_measured_figures() -> None:
    lines_of = [json.loads(line) for line in (DATA / "log_lines.jsonl").read_text(encoding="utf-8").splitlines()]
    cases = [json.loads(line) for line in (DATA / "server_logs.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = {
        case["id"]: {name: value for name, value in case["measured"].items() if value is not None} for case in cases
    }
    num_read, absent, wrong = 0, [], []
    for quoted in lines_of:
        try:
            log = parse_log("\n".join(quoted["lines"]))
        except InvalidInputError:
            absent += [(quoted["id"], name) for name in measured[quoted["id"]]]
            continue
        for name, value in measured[quoted["id"]].items():
            values = read_as(log, name)
            is_rounded = quoted["id"] in FINER_ELSEWHERE and round(value, 2) in values
            if value in values or is_rounded:
                num_read += 1
            elif values:
                wrong.append((quoted["id"], name, value, values))
            else:
                absent.append((quoted["id"], name))
    assert wrong == []
    assert {case for case, _ in absent} == set().union(*NO_LINE.values())
    assert num_read + len(absent) == sum(map(len, measured.values()))
    assert num_read >= 640  # of 772


# --- ranks and starts -------------------------------------------------------------------------------------------------


def test_ranks_are_kept_apart_and_the_smallest_pool_counts() -> None:
    template = (
        "non_torch_memory takes {}GiB; the rest of the memory reserved for KV Cache is {}GiB."  # those of vllm#10702
    )
    log = parse_log(
        f"(VllmWorkerProcess pid=350) INFO worker.py:232] {template.format('5.68', '110.52')}\n"
        f"INFO worker.py:232] {template.format('7.71', '107.35')}\n"
    )
    assert {rank: reading.text for rank, reading in log.by_rank("non_torch").items()} == {"pid 350": "5.68", "": "7.71"}
    smallest = log.least("available_kv")
    assert smallest is not None
    assert (smallest.text, smallest.rank) == ("107.35", "")
    assert log.ranks == ("pid 350", "")


START = """\
INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.9.2
INFO 06-01 10:00:01 [cli_args.py:325] non-default args: {{'model': 'org/first', 'max_model_len': 4096}}
INFO 06-01 10:00:02 [core.py:69] Initializing a V1 LLM engine (v0.9.2) with config: model='org/{name}', max_seq_len=4096
INFO 06-01 10:00:03 [gpu_model_runner.py:1] Model loading took {weights} GiB and 3.447517 seconds
INFO 06-01 10:00:04 [gpu_worker.py:1] Available KV cache memory: 3.41 GiB
INFO 06-01 10:00:05 [kv_cache_utils.py:1] GPU KV cache size: 63,776 tokens
INFO 06-01 10:00:06 [gpu_model_runner.py:1] Graph capturing finished in 4 secs, took 0.39 GiB
"""


def test_of_several_starts_the_last_one_is_taken() -> None:
    text = (
        START.format(name="first", weights="14.2488")
        + "INFO 1.2.3.4 POST\n" * 5
        + START.format(name="b", weights="15.5")
    )
    log = parse_log(text)
    assert (log.starts, log.first_line, log.text("weights")) == (2, 13, "15.5")
    assert log.notes == ("2 starts in the log; the last one, from line 13 on, is taken",)
    assert len(log.all("kv_tokens")) == 1


@pytest.mark.parametrize("lines", [3, 4, 5])  # loading, sizing the pool, or for lack of KV: the server is started again
def test_nothing_of_a_start_that_failed_is_mixed_into_the_next(lines: int) -> None:
    died = "\n".join(START.format(name="a", weights="1.0").replace("3.41", "0.11").splitlines()[:lines])
    log = parse_log(died + "\n" + START.format(name="b", weights="15.5"))
    assert (log.starts, log.first_line) == (2, lines + 1)
    assert [reading.text for reading in log.all("weights")] == ["15.5"]
    assert [reading.text for reading in log.all("available_kv")] == ["3.41"]
    assert log.text("kv_tokens") == "63,776"


def test_an_sglang_start_that_failed_is_left_behind() -> None:
    start = "server_args=ServerArgs(model_path='org/{}', tp_size=1)\nLoad weight begin. avail mem={} GB\n"
    log = parse_log(start.format("a", "24.10") + start.format("b", "78.50"))
    assert log.starts == 2
    assert [reading.text for reading in log.all("free_before_load")] == ["78.50"]


def test_ranks_that_load_side_by_side_are_one_start() -> None:
    lines = [
        "(EngineCore_DP0 pid=1) INFO Model loading took 1.5 GiB and 1.0 seconds",
        "(EngineCore_DP0 pid=1) INFO GPU KV cache size: 100 tokens",
        "(EngineCore_DP1 pid=2) INFO Initializing a V1 LLM engine (v0.11.0) with config: model='org/a'",
        "(EngineCore_DP1 pid=2) INFO Model loading took 1.5 GiB and 1.0 seconds",
        "(EngineCore_DP1 pid=2) INFO GPU KV cache size: 90 tokens",
    ]
    log = parse_log("\n".join(lines))
    assert log.starts == 1
    smallest = log.least("kv_tokens")
    assert smallest is not None
    assert smallest.count == 90


def test_the_summary_after_start_up_begins_no_start() -> None:
    log = parse_log(
        START.format(name="a", weights="14.0786")
        + "Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB). "
        "Actual usage is 14.08 GiB for weight, 1.97 GiB for peak activation, 0.07 GiB for non-torch memory, and 0.67 "
        "GiB for CUDAGraph memory.\n"
    )
    assert log.starts == 1
    assert [reading.text for reading in log.all("weights")] == ["14.0786", "14.08"]
    assert log.text("total_memory") == "79.19"


def test_a_figure_knows_its_size_and_how_far_it_is_rounded() -> None:
    weights = parse_log("Model loading took 14.25 GiB and 1.0 seconds").first("weights")
    assert weights is not None
    assert weights.size == 15_300_820_992  # 14.25 * 2^30
    assert weights.rounding == 5_368_709 + 1  # 0.005 * 2^30, up


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'model': 'org/a', 'max_model_len': 8192, 'seed': None}", {"model": "org/a", "max_model_len": "8192"}),
        (
            "model='a, b', dtype=torch.bfloat16, x=[1, 2], tp=2) and more",
            {"model": "a, b", "dtype": "torch.bfloat16", "x": "[1, 2]", "tp": "2"},
        ),
        (
            "a={'b': 'c, d', 'e': (1, 2)}, f=<Mode.FULL: (2, 1)>, g=True",
            {"a": "{'b': 'c, d', 'e': (1, 2)}", "f": "<Mode.FULL: (2, 1)>", "g": "True"},
        ),
        (r"model='D:\\models\\a', n=1", {"model": r"D:\models\a", "n": "1"}),
        ("enable=False INFO 11-03 05:51:44 next line, x=1", {"enable": "False", "x": "1"}),
        ("a='open, b=2", {}),
        ("", {}),
        ("))))", {}),
        ("__import__('os').system('x'), a=1", {"a": "1"}),
    ],
)
def test_a_list_of_arguments_is_read_and_never_run(text: str, expected: dict[str, str]) -> None:
    assert arguments(text) == expected


def test_flags_of_every_generation_are_read() -> None:
    old = parse_log(
        "INFO 11-27 02:15:40 api_server.py:592] vLLM API server version 0.6.4.post1\n"
        "INFO 11-27 02:15:40 api_server.py:593] args: Namespace(subparser='serve', model_tag='/models/a', "
        "max_model_len=None, tensor_parallel_size=8, block_size=16, gpu_memory_utilization=0.95, "
        "enable_lora=False, api_key=['secret'])\n"
        "INFO 11-27 02:15:50 llm_engine.py:249] Initializing an LLM engine (v0.6.4.post1) with config: "
        "model='/models/a', speculative_config=None, dtype=torch.bfloat16, max_seq_len=131072, kv_cache_dtype=auto, \n"
    )
    assert old.release == (0, 6)
    assert old.flags["gpu_memory_utilization"] == "0.95"
    assert (old.flags["max_seq_len"], old.flags["tensor_parallel_size"], old.model) == ("131072", "8", "/models/a")
    assert "api_key" not in old.flags
    new = parse_log(
        "non-default args: {'model_tag': 'org/a', 'kv_cache_dtype': 'fp8', 'speculative_config': {'method': 'mtp'}}"
    )
    assert new.flags == {"model_tag": "org/a", "kv_cache_dtype": "fp8", "speculative_config": "{'method': 'mtp'}"}
    other = parse_log(
        "[2025-05-29 23:22:50] server_args=ServerArgs(model_path='org/a', tp_size=2, mem_fraction_static=0.87)"
    )
    assert (other.engine, other.flags["mem_fraction_static"]) == ("sglang", "0.87")


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.11.0", (0, 11)),
        ("0.6.4.post1", (0, 6)),
        ("0.20.2rc1.dev249+abc", (0, 20)),
        ("v0.9.1", (0, 9)),
        ("0.1.dev3896+ga491d6f", None),
    ],
)
def test_a_build_that_names_no_release_has_none(version: str, release: tuple[int, int] | None) -> None:
    assert parse_log(f"vLLM API server version {version}").release == release


# --- files ------------------------------------------------------------------------------------------------------------

TEXT = START.format(name="a", weights="14.2488")


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        TEXT.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        gzip.compress(TEXT.encode(), mtime=0),
        b"caf\xe9 \xff\xfe\n" + TEXT.encode(),
        TEXT.rstrip().encode(),
    ],
    ids=["plain", "crlf", "bom", "gzip", "latin", "no last newline"],
)
def test_a_log_file_is_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(data)
    assert read_log(str(path)).text("weights") == "14.2488"


def test_standard_input_is_a_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert read_log("-").text("kv_tokens") == "63,776"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (TEXT.encode("utf-16"), "UTF-16 text"),
        (TEXT.encode("utf-16-le"), "not text, contains a NUL"),
        (b"\x7fELF\0\0\0\0", "not text, contains a NUL"),
        (b"", "holds no line"),
        (gzip.compress(TEXT.encode(), mtime=0)[:40], "damaged gzip"),
        (b"\x1f\x8bnot gzip", "damaged gzip"),
        (b"\x1f\x8b", "damaged gzip"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, data: bytes, fault: str) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match=fault):
        read_log(str(path))


def test_a_hole_of_a_log_that_was_truncated_under_its_writer_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(bytes(5000) + TEXT.encode())
    assert read_text(str(path)) == TEXT
    assert read_log(str(path)).text("kv_tokens") == "63,776"


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no such file"):
        read_log(str(tmp_path / "none.log"))
    with pytest.raises(InvalidInputError, match="is a directory"):
        read_log(str(tmp_path))
    (tmp_path / "shut.log").write_text(TEXT)
    (tmp_path / "shut.log").chmod(0)
    if not (tmp_path / "shut.log").stat().st_mode & 0o444 and __import__("os").geteuid():
        with pytest.raises(EnvironmentProblem):
            read_log(str(tmp_path / "shut.log"))


def test_of_a_long_file_both_ends_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "MAX_BYTES", 4000)
    path = tmp_path / "server.log"
    path.write_text(TEXT + "INFO 1.2.3.4 POST\n" * 1000)
    log = read_log(str(path))
    assert log.text("weights") == "14.2488"
    assert "only the first and the last" in log.notes[0]
    path.write_text("INFO 1.2.3.4 POST\n" * 1000 + TEXT)
    assert read_log(str(path)).text("weights") == "14.2488"


def test_a_bomb_is_unpacked_no_further_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.log.gz"
    path.write_bytes(gzip.compress(TEXT.encode() + b"a" * (8 << 20)))
    log = read_log(str(path))
    assert log.text("weights") == "14.2488"
    assert "the rest is not read" in log.notes[0]


def test_pieces_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in (7, 64, 333):
        monkeypatch.setattr(server_log, "PIECE", piece)
        log = parse_log(TEXT * 2)
        assert (log.starts, log.text("weights"), log.first_line) == (2, "14.2488", 8)


def test_standard_input_may_be_gzip_and_comes_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.BytesIO):
        """A pipe that gives less than it is asked for."""

        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size, 700) if size and size > 0 else size)

    for data in (gzip.compress(TEXT.encode()), TEXT.encode()):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=Slow(data)))
        assert read_log("-").text("kv_tokens") == "63,776"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(TEXT.encode())[:40])))
    with pytest.raises(InvalidInputError, match="standard input: damaged gzip"):
        read_log("-")
    for data in (b"", b"\x1f"):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        with pytest.raises(InvalidInputError, match="holds no line"):
            read_log("-")


# --- what collectors put around a line --------------------------------------------------------------------------------

# The banner, a list of arguments with quotes, colors and figures: what a collector's format escapes.
COLLECTED = """\
\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 09-03 00:36:10 [utils.py:1] \u2588  version 0.19.0
INFO 09-03 [utils.py:1] non-default args: {'model': "org/it's", 'max_model_len': 4096, 'dtype': 'bfloat16'}
(Worker_TP0 pid=5) INFO 09-03 [gpu_model_runner.py:1] Model loading took 7.12 GiB and 3 seconds
(Worker_TP1 pid=6) INFO 09-03 [gpu_model_runner.py:1] Model loading took 7.25 GiB and 3 seconds
INFO 09-03 [kv_cache_utils.py:1] GPU KV cache size: 63,776 tokens
"""


def docker(line: str, ensure_ascii: bool = True) -> str:
    """Docker's json-file driver, as its documentation shows a record."""
    record = {"log": line + "\n", "stream": "stderr", "time": "2025-09-03T00:36:10.123456789Z"}
    return json.dumps(record, ensure_ascii=ensure_ascii)


def kubernetes(line: str) -> str:
    return f"2025-09-03T00:36:10.123456789Z stderr F {line}"


COLLECTORS = {
    "docker": lambda line: docker(line, ensure_ascii=False),
    "docker, ASCII": docker,
    "kubernetes": kubernetes,
    "docker in kubernetes": lambda line: kubernetes(docker(line)),
    "journal": lambda line: f"Sep 03 00:36:10 host vllm[812]: {line}",
    "structured": lambda line: json.dumps({"severity": "INFO", "message": line}),
    "spaced": lambda line: json.dumps({"stream": "stderr", "log": line}, indent=None, separators=(" , ", " : ")),
}


@pytest.mark.parametrize("collector", COLLECTORS.values(), ids=COLLECTORS)
def test_a_collectors_records_are_the_lines_they_hold(collector: Callable[[str], str]) -> None:
    plain = parse_log(COLLECTED)
    assert (plain.release, plain.model, plain.flags["max_model_len"]) == ((0, 19), "org/it's", "4096")
    assert [reading.text for reading in plain.by_rank("weights").values()] == ["7.12", "7.25"]
    parsed_log = parse_log("".join(collector(line) + "\n" for line in COLLECTED.splitlines()))
    assert (parsed_log.flags, parsed_log.readings) == (plain.flags, plain.readings)


def test_a_record_that_was_cut_is_read_as_far_as_it_goes() -> None:
    whole = docker("Model loading took 7.12 GiB and \u2588 more")
    for end in range(whole.index("and"), len(whole)):
        assert parse_log(whole[:end]).text("weights") == "7.12", whole[:end]
        assert '"' not in unwrapped(whole[:end])[0]
    assert unwrapped('{"log":"half a letter \\ud83d"}') == ["half a letter ?"]


def test_a_record_of_several_lines_is_several_lines() -> None:
    record = json.dumps({"message": COLLECTED})
    assert [reading.rank for reading in parse_log(record).all("weights")] == ["TP0", "TP1"]


# --- commands ---------------------------------------------------------------------------------------------------------

FIGURES = """\
INFO LLM engine (v0.10.1) with config: model='org/resolved', max_seq_len=8192, dtype=torch.bfloat16
Model loading took 7.51 GiB and 3 s
GPU KV cache size: 819,200 tokens
"""


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("+ vllm serve org/a -tp 2 --max-model-len 8k", {"tensor_parallel_size": "2", "max_model_len": "8000"}),
        ("root@host:/# vllm serve org/a \\\n   --block-size 32 \\\n --enforce-eager", {"block_size": "32"}),
        ("exec /usr/bin/vllm serve org/a --gpu_memory_utilization=0.8 &", {"gpu_memory_utilization": "0.8"}),
        ("CMD: 'vllm serve org/a --enable-lora --max-lora-rank 64'", {"enable_lora": "True", "max_lora_rank": "64"}),
        (
            "/usr/bin/python3 -m vllm.entrypoints.openai.api_server --model org/a --api-key x --kv-cache-dtype fp8",
            {"kv_cache_dtype": "fp8"},
        ),
        (
            'vllm serve org/a --speculative-config \'{"method": "eagle", "num_speculative_tokens": 3}\' -pp 2',
            {"speculative_config": '{"method": "eagle", "num_speculative_tokens": 3}', "pipeline_parallel_size": "2"},
        ),
        ("vllm serve org/a --cpu-offload-gb 4", {"cpu_offload_gb": "4"}),
    ],
)
def test_a_command_stands_for_a_list_of_arguments(command: str, flags: dict[str, str]) -> None:
    log = parse_log(f"{command}\n{FIGURES}")
    assert log.flags == log.flags | flags | {"model": "org/a"}
    assert "api_key" not in log.flags
    assert log.notes[0] == "no list of arguments in the log: they are taken from the command on line 1 of the log"
    listed = parse_log(f"{command}\nnon-default args: {{'model': 'org/b', 'block_size': 64}}\n{FIGURES}")
    assert (listed.model, listed.flags["block_size"], listed.notes) == ("org/b", "64", ())


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m sglang.launch_server --model-path org/a --tp 4 --mem-fraction-static=0.85 --disable-cuda-graph",
        "sglang serve --model org/a --tp-size 4 --mem-fraction-static 0.85 --disable-cuda-graph --port 1",
    ],
)
def test_sglangs_command_has_the_names_of_its_list(command: str) -> None:
    log = parse_log(f"$ {command}\nLoad weight begin. avail mem=78.0 GB\nmax_total_num_tokens=5, context_len=8\n")
    assert log.flags == {
        "model_path": "org/a", "tp_size": "4", "mem_fraction_static": "0.85", "disable_cuda_graph": "True"
    }  # fmt: skip


def test_flags_of_sglangs_command_that_are_not_sized_are_said() -> None:
    """--port and --trust-remote-code do not change memory; a flag in no list may; DP attention is a row's reason."""
    command = (
        "sglang serve --model org/a --tp 2 --port 1 --trust-remote-code --cpu-offload-gb 10 --attention-backend fa3 "
        "--new-flag=3 --enable-torch-compile --enable-dp-attention --speculative-num-steps 3 "
        "--dllm-algorithm x"
    )
    log = parse_log(f"$ {command}\nLoad weight begin. avail mem=78.0 GB\n")
    unsized = "--attention-backend, --new-flag, --dllm-algorithm"
    assert log.notes[1] == f"the command on line 1 of the log: what {unsized} does to memory is not modeled"


def test_a_command_of_sglangs_without_such_flags_says_nothing_of_them() -> None:
    log = parse_log("$ sglang serve --model org/a --tp 2 --port 1\nLoad weight begin. avail mem=78.0 GB\n")
    assert log.notes == ("no list of arguments in the log: they are taken from the command on line 1 of the log",)


def test_the_command_of_the_last_start_is_taken() -> None:
    log = parse_log(f"vllm serve org/a -tp 4\n{FIGURES}vllm serve org/b -tp 2\n{FIGURES}")
    assert (log.starts, log.model, log.flags["tensor_parallel_size"]) == (2, "org/b", "2")


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("vllm serve org/a 'x", "the quotes do not match"),
        ("vllm serve $MODEL -tp 2", "has no value in the text"),
        ("vllm serve org/a -tp two", "not a whole number"),
        ("vllm serve org/a --tensor-paralel-size 2", "is not a flag of vLLM"),
        ("vllm serve MODEL ...", "is not a whole command"),
    ],
)
def test_a_command_that_cannot_be_read_is_left_out_and_said(command: str, fault: str) -> None:
    log = parse_log(f"\n{command}\n{FIGURES}")
    assert log.model == "org/resolved"
    (note,) = log.notes
    assert note.startswith("the command on line 2 of the log is not read: ")
    assert fault in note
    assert "--from-command" not in note


def test_a_command_with_a_flag_that_estimate_refuses_is_read_and_the_flag_is_named() -> None:
    log = parse_log(f"\nvllm serve org/a -tp 2 --model-class-overrides '{{}}' --cpu-offload-gb 4\n{FIGURES}")
    assert (log.model, log.flags["tensor_parallel_size"]) == ("org/a", "2")
    assert any("what --model-class-overrides does to memory is not modeled" in note for note in log.notes)


@pytest.mark.parametrize("end", ["\\", "\\\n", "\\\n\\\n", "\\\n" * 9_000])
def test_a_command_may_end_in_the_middle(end: str) -> None:
    assert parse_log(f"{FIGURES}vllm serve org/a -tp 2 {end}").flags["tensor_parallel_size"] == "2"


def test_a_mention_of_the_command_says_nothing() -> None:
    assert parse_log(f"use `vllm serve <model>` instead\n{FIGURES}").notes == ()
    with pytest.raises(InvalidInputError, match="holds no line"):
        parse_log("vllm serve org/a\n")


EXAMPLE_LOG = (Path(__file__).resolve().parents[2] / "examples" / "vllm-0.10.log").read_bytes()


# --- hostile logs -----------------------------------------------------------------------------------------------------


def hostile(size: int) -> Iterator[tuple[str, bytes]]:
    """Texts of about `size` bytes that make a careless reader slow, by what they aim at."""

    def fill(line: str) -> bytes:
        data = (line + "\n").encode()
        return data * (size // len(data))

    phrases = [wording.phrase for wording in WORDINGS] + OPENINGS
    yield "near misses", fill("INFO Model loading took 1.5.5.5 XiB and " + "9" * 30)
    yield "matches", fill("INFO Model loading took 1.5 GiB and 3 seconds")
    yield "every phrase on each line", fill(" ".join(phrases))
    yield "every phrase, no line ends", " ".join(phrases).encode() * (size // len(" ".join(phrases)))
    yield "long digits", fill("GPU KV cache size: " + "9" * 15_000)
    yield "commas", fill("GPU KV cache size: " + "9," * 7_500)
    yield "nested brackets", fill("args: Namespace(" + "(" * 15_000)
    yield "open quotes", fill("args: Namespace(" + "'\\" * 7_500)
    yield "escapes", fill("\x1b[" * 5_000 + "1" * 5_000 + "Model loading took 1")
    yield "colors without escapes", fill("[3" * 5_000 + ";" * 300 + "Model loading took " + "1" * 4_000)
    yield "ranks", fill("(Worker_TP1 " * 1_000 + "Model loading took 1 GiB")
    yield "no line ends", b"Load weight end. avail mem=" * (size // 27)
    yield "empty lines", b"\n" * size
    yield "records of many lines", fill('{"log":"Model loading took 1 XiB' + "\\n# GPU blocks: x" * 900 + '"}')
    yield "open records", fill('{"log":"' * 1_000 + "Model loading took 1" + "\\" * 4_000)
    yield "commands", fill("vllm serve " + "'a' -" * 1_500)
    yield "commands without an end", fill("vllm serve \\")
    draw = random.Random(1)
    words = [*phrases, "1.5 GiB", "\x1b[0m", "(Worker_TP0 pid=1)", "{'a': [", "é", "9" * 40]
    noise = "".join(draw.choice(words) + draw.choice((" ", "\n", "\r", "")) for _ in range(4_000)).encode()
    yield "noise", noise * (size // len(noise) + 1)


# Those that hold a whole message, or a list of arguments, though an empty one.
READABLE = {
    "matches",
    "every phrase on each line",
    "every phrase, no line ends",
    "nested brackets",
    "open quotes",
    "noise",
}


def outcome(data: bytes, path: Path) -> str:
    """What it was refused for; "" where it was read."""
    path.write_bytes(data)
    try:
        read_log(str(path))
    except KvplanError as error:
        return str(error)
    return ""


def test_hostile_lines_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    refusals = {name: outcome(data, tmp_path / "hostile.log") for name, data in hostile(100_000)}
    assert {name for name, refusal in refusals.items() if not refusal} - {"ranks"} == READABLE
    assert all(refusal.isprintable() and "holds no line" in refusal for refusal in refusals.values() if refusal)


@pytest.mark.parametrize("digits", ["9" * 20, "9" * 25, "1" * 400])
def test_a_count_of_more_digits_than_any_servers_is_not_read(digits: str) -> None:
    """Not by its first digits either."""

    def counts(number: str) -> list[str]:
        log = parse_log(f"INFO 11-01 10:00:00 [kv_cache_utils.py:1] # GPU blocks: {number}, # CPU blocks: 2048\n")
        return [reading.text for reading in log.readings if reading.fact == "num_blocks"]

    assert counts("27851") == ["27851"]
    assert counts(digits) == []


def test_more_lines_than_any_servers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "MAX_LINES", 50)
    assert "more than 50 lines" in outcome(dict(hostile(10_000))["matches"], tmp_path / "hostile.log")
    monkeypatch.setattr(server_log, "MAX_LOOKED_AT", 400)
    assert "lines that could be a server's" in outcome(dict(hostile(10_000))["matches"], tmp_path / "hostile.log")


def test_lines_of_many_phrases_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's line holds one phrase or two: the work is bounded by phrases, not by lines of a hundred each."""
    looked_at: list[str] = []
    monkeypatch.setattr(server_log._Reader, "_look_at", lambda self, text: looked_at.append(text))
    data = dict(hostile(5 * 10**6))["every phrase on each line"]
    assert "phrases of servers on " in outcome(data, tmp_path / "hostile.log")
    assert len(looked_at) * len(WORDINGS) < server_log.MAX_PHRASES
    # A real start-up's lines hold one each, so that the bound on lines comes first.
    lines, num_phrases = server_log._lines_of_worth(EXAMPLE_LOG)
    assert num_phrases == len(lines) > 5


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, _ in hostile(1 << 10)])
def test_50_mb_of_hostile_lines_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """As in 100 kB, if they take not forever; benchmarks/hostile.py says how the time grows."""
    path = tmp_path / "hostile.log"
    refusal = outcome(dict(hostile(50 * 10**6))[name], path)
    assert refusal.isprintable()
    assert len(refusal) < 1000


@given(st.data())
def test_whatever_a_log_holds_it_is_read_or_refused(data: st.DataObject) -> None:
    phrases = [wording.phrase for wording in WORDINGS] + OPENINGS
    part = st.one_of(
        st.sampled_from(phrases),
        st.sampled_from(TEXT.splitlines()),
        st.text(max_size=20),
        st.sampled_from(
            [
                "\n",
                "\r",
                "1.5",
                " GiB",
                "-",
                "9" * 25,
                "(Worker_TP1 pid=3)",
                "'",
                "{",
                "=",
                "\x1b[3m",
                "٣",
                "\\",
                "\\\n",
                '{"log":"',
                '"}',
                "-tp",
            ]
        ),
    )
    text = "".join(data.draw(st.lists(part, max_size=30)))
    try:
        log = parse_log(text)
    except InvalidInputError:
        return
    for reading in log.readings:
        assert reading.text
        if FACTS[reading.fact] in NUMBERS:
            assert abs(reading.value) < 1e20
