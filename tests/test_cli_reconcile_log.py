"""`kvplan reconcile --log` and `--metrics`: a server's own figures beside the plan for it."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.cli.main import main
from kvplan.gpu import gpu
from kvplan.serverlog.compare import merged
from kvplan.serverlog.log import parse_log
from kvplan.serverlog.pools import kv_pool
from kvplan.serverlog.request import model_of, same_names
from kvplan.serverlog.rows import LogRow
from kvplan.units import GIB
from tests.cli import Run, config_file, refused, run
from tests.oracle_data import DATA, needs_oracle_data
from tests.test_server_metrics import SGLANG_PAGE, server

__all__ = ["run", "server"]  # fixtures

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "vllm-0.10.log"

# vllm#10517: Llama-3.1-8B on an RTX 3090, 20,000 tokens; every figure as that log gives it.
LLAMA_3090 = """\
INFO 12-02 10:00:00 api_server.py:592] vLLM API server version 0.6.4.post1
INFO 12-02 10:00:00 api_server.py:593] args: Namespace(model='meta-llama/Llama-3.1-8B-Instruct', max_model_len=20000, \
block_size=16, gpu_memory_utilization=0.9, tensor_parallel_size=1, enable_lora=False, max_loras=1)
INFO 12-02 10:00:09 model_runner.py:1] Loading model weights took 14.9888 GB
INFO 12-02 10:00:13 worker.py:1] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB \
peak_torch_memory=17.06GiB memory_usage_post_profile=15.35GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB \
gpu_memory_utilization=0.90
INFO 12-02 10:00:14 gpu_executor.py:1] # GPU blocks: 1952, # CPU blocks: 2048
INFO 12-02 10:00:14 gpu_executor.py:1] Maximum concurrency for 20000 tokens per request: 1.56x
"""

Log = Callable[[str], str]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """`log(text)` writes a log and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "server.log"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def rows_of(document: dict[str, Any], part: str = "rows") -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document[part]}


# --- what is compared -------------------------------------------------------------------------------------------------


def test_a_log_reconciles_in_one_command(run: Run, log: Log) -> None:
    found = run("reconcile", "--log", log(LLAMA_3090), "--gpu", "rtx-3090", "--format", "json").json
    assert (found["model"], found["gpus"]) == ("meta-llama/Llama-3.1-8B-Instruct", ["rtx-3090"])
    assert (found["engine"], found["total_memory"]) == ("vllm@0.6", round(23.58 * GIB))
    assert found["max_model_len"] == 20_000
    rows = rows_of(found)
    # 8,030,261,248 parameters and a rotary table of 131,072 x 128, in 2 bytes: 14.9888 GiB.
    assert rows["weights"]["predicted"] == pytest.approx(2 * (8_030_261_248 + 131_072 * 128), abs=4 << 20)
    assert rows["weights"]["logged"] == round(14.9888 * GIB)
    assert rows["activations"]["logged"] == pytest.approx((17.06 - 14.9888) * GIB, abs=2)
    assert rows["activations"]["why"] == "logged as the peak of torch, less the weights"
    assert rows["kv_cache"]["logged"] == round(3.81 * GIB)
    assert rows["cuda_graphs"]["why"] == "not in the log"
    # A block is 16 tokens x 32 layers x 2 x 8 heads x 128 x 2 bytes = 2 MiB: 3.81 GiB hold 1950.7 of them, and the last
    # digit is worth 2.6.
    given_rows = rows_of(found, "given")
    assert (given_rows["blocks"]["low"], given_rows["blocks"]["high"]) == (1948, 1953)
    assert given_rows["blocks"]["exact"] is True
    assert given_rows["concurrency"]["exact"] is True
    assert given_rows["tokens"]["logged"] is None


def test_the_document_keeps_to_its_schema(run: Run, log: Log) -> None:
    schema = run("schema", "log-reconciliation").json
    for argv in (("--log", log(LLAMA_3090)), ("--log", str(EXAMPLE), "--gpu", "a100-80g"), ("--log", str(EXAMPLE))):
        jsonschema.validate(run("reconcile", *argv, "--format", "json").json, schema)


def test_every_format_carries_the_same_rows(run: Run, log: Log) -> None:
    path = log(LLAMA_3090)
    document = run("reconcile", "--log", path, "--format", "json").json
    names = [row["name"] for row in (*document["rows"], *document["given"])]
    table = list(csv.DictReader(io.StringIO(run("reconcile", "--log", path, "--format", "csv").out)))
    assert [row["name"] for row in table] == names
    assert [row["logged"] for row in table if row["name"] == "blocks"] == ["1952", "1952"]
    for format in ("table", "markdown"):
        text = run("reconcile", "--log", path, "--format", format).out
        assert all(name in text for name in names)
        assert "14.99 GiB" in text


def test_the_example_shows_what_its_log_leaves_open(run: Run) -> None:
    open_gpu = rows_of(run("reconcile", "--log", str(EXAMPLE), "--format", "json").json)
    assert open_gpu["weights"]["predicted"] is not None
    assert open_gpu["kv_cache"]["predicted"] is None
    assert open_gpu["kv_cache"]["why"].startswith("depends on the GPU, which is not known: ")
    named = rows_of(run("reconcile", "--log", str(EXAMPLE), "--gpu", "a100-80g", "--format", "json").json)
    assert named["kv_cache"]["predicted"] is not None


def test_a_total_that_several_gpus_report_is_said(run: Run, log: Log) -> None:
    ran = run("reconcile", "--log", log(LLAMA_3090.replace("23.58GiB", "79.19GiB")))
    assert "79.19 GiB is what a100-80g, a800-80g, h100-80g" in ran.err
    unknown = run("reconcile", "--log", log(LLAMA_3090.replace("23.58GiB", "61.00GiB")))
    assert "no GPU that kvplan knows reports 61.00 GiB" in unknown.err
    assert "custom of 61.00 GiB" in unknown.out


def test_a_named_gpu_keeps_the_logged_total(run: Run, log: Log) -> None:
    found = run("reconcile", "--log", log(LLAMA_3090), "--gpu", "rtx-4090", "--format", "json").json
    assert (found["gpus"], found["total_memory"]) == (["rtx-4090"], round(23.58 * GIB))


def test_flags_win_over_the_log(run: Run, log: Log) -> None:
    path = log(LLAMA_3090)
    said = run("reconcile", "--log", path, "--ctx", "8192", "--format", "json").json
    assert said["max_model_len"] == 8192
    assert rows_of(said)["concurrency"]["why"] == "logged for 20,000 tokens per request, predicted for 8,192"
    pair = run("reconcile", "--log", path, "--engine-arg", "max_num_seqs=8", "--format", "json").json
    assert rows_of(pair)["activations"]["predicted"] != rows_of(said)["activations"]["predicted"]
    pasted = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 4096"
    assert run("reconcile", "--log", path, "--from-command", pasted, "--format", "json").json["max_model_len"] == 4096


def test_a_context_that_the_server_fitted_is_the_one_it_logged(run: Run, log: Log) -> None:
    auto = LLAMA_3090.replace("max_model_len=20000", "max_model_len=-1")
    found = run("reconcile", "--log", log(auto), "--gpu", "rtx-3090", "--format", "json").json
    assert found["max_model_len"] == 20_000


def test_a_share_of_two_digits_is_taken_from_the_budget(run: Run, log: Log) -> None:
    # OpenPipe/ART qwen3_try.ipynb: 62.10 of 79.20 GiB is 0.7841, which the line calls 0.78: 0.32 GiB more.
    said = "vLLM API server version 0.8.5\nargs: Namespace(model='qwen2.5-0.5b')\nthe current vLLM instance can use "
    said += "total_gpu_memory (79.20GiB) x gpu_memory_utilization (0.78) = {}GiB\nmodel weights take 0.93GiB;\n"
    one, other = (
        rows_of(run("reconcile", "--log", log(said.format(budget)), "--gpu", "h100-80g", "--format", "json").json)
        for budget in ("62.10", "61.78")
    )
    apart = (one["kv_cache"]["predicted"] - other["kv_cache"]["predicted"]) / GIB
    assert apart == pytest.approx(0.32, abs=0.01)


def test_a_gpu_is_known_by_the_name_that_a_kernels_file_has(run: Run, log: Log) -> None:
    named = (
        "Using configuration from /x/E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json for MoE layer.\n"
    )
    found = run("reconcile", "--log", log(named + LLAMA_3090), "--format", "json").json
    assert (found["gpus"], found["total_memory"]) == (["h100-80g"], round(23.58 * GIB))


def test_a_config_stands_for_a_model_that_is_not_known(run: Run, log: Log, tmp_path: Path) -> None:
    path = log(LLAMA_3090.replace("meta-llama/Llama-3.1-8B-Instruct", "/models/our-own-finetune"))
    text = refused(run("reconcile", "--log", path))
    assert text == (
        "log: its model /models/our-own-finetune is not one that `kvplan models` lists; "
        "add --model NAME or --config config.json"
    )
    config = config_file(tmp_path / "model") / "config.json"
    found = run("reconcile", "--log", path, "--config", config, "--format", "json").json
    assert rows_of(found, "given")["blocks"]["exact"] is True


def test_a_path_of_the_servers_machine_is_a_name_and_is_never_opened(run: Run, log: Log, tmp_path: Path) -> None:
    found = model_of(parse_log("vLLM API server version 0.9\nargs: Namespace(model='/models/Meta-Llama-3-8B', n=1)"))
    assert found[0] == "llama-3-8b"
    assert found[1] == "the log's model /models/Meta-Llama-3-8B is taken as meta-llama/Meta-Llama-3-8B, by its name"
    assert model_of(parse_log("non-default args: {'model': '/models/Llama-3.1-8B-Instruct/'}"))[1] == (
        "the log's model /models/Llama-3.1-8B-Instruct/ is taken as meta-llama/Llama-3.1-8B, by its name"
    )
    assert model_of(parse_log(r"non-default args: {'model': 'D:\\models\\qwen3-8b'}"))[0] == "qwen3-8b"
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64d72725edaf899c6cb9c377fd0709d9c5"
    assert model_of(parse_log(f"non-default args: {{'model': '{cached}'}}"))[0] == "qwen3-8b"
    here = config_file(tmp_path / "unknown-model")
    path = log(LLAMA_3090.replace("meta-llama/Llama-3.1-8B-Instruct", str(here)))
    assert "is not one that `kvplan models` lists" in refused(run("reconcile", "--log", path))
    assert same_names("no-such-model") == []


# --- why they differ --------------------------------------------------------------------------------------------------

QWEN = """\
vLLM API server version 0.10.1
non-default args: {{'model': '{model}', 'max_model_len': {context}, 'gpu_memory_utilization': 0.9{more}}}
Available KV cache memory: {kv} GiB
{lines}GPU KV cache size: {tokens:,} tokens
"""


def why(run: Run, log: Log, **given: Any) -> dict[str, Any]:
    text = QWEN.format(**{"more": "", "lines": "", "context": 4096, **given})
    return rows_of(run("reconcile", "--log", log(text), "--gpu", "a100-80g", "--format", "json").json, "given")[
        "tokens"
    ]


def test_padding_layers_explain_a_pool(run: Run, log: Log) -> None:
    # Llama-3.1-8B has 131,072 bytes per token: 10 GiB hold 81,920 tokens; with 2 layers more, 32/34 of them: 77,102.
    row = why(run, log, model="llama-3.1-8b", kv="10.00", tokens=77_088, lines="Add 2 padding layers, may waste\n")
    assert row["why"] == "the server adds 2 padding layers to 32"
    assert row["predicted"] == 81_920


def test_a_draft_layer_explains_a_pool(run: Run, log: Log) -> None:
    more = ", 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 1}"
    row = why(run, log, model="llama-3.1-8b", kv="10.00", tokens=79_424, more=more)  # 32/33 of 81,920: 79,437
    assert row["why"] == "the draft (MTP) layer keeps KV too: 33 layers, not 32"


def test_the_smallest_rank_explains_a_pool(run: Run, log: Log) -> None:
    more = ", 'tensor_parallel_size': 2"
    row = why(run, log, model="llama-3.1-8b", kv="10.00", tokens=161_600, more=more)  # 10 GiB / 65,536: 163,840
    assert row["why"] == "the smallest rank decides; the log quotes the bytes of one rank"


def test_another_attention_block_explains_a_hybrid_pool(run: Run, log: Log) -> None:
    row = why(
        run, log, model="nemotron-3-super-120b-a12b", kv="7.94", tokens=690_560, context=262_144,
        more=", 'tensor_parallel_size': 4", lines="Setting attention block size to 4160 tokens\n",
    )  # fmt: skip
    assert row["why"].startswith(
        "the server's attention block is 4,160 tokens, here 2,080: keys and values, or states,"
    )


def test_the_part_that_is_off_most_is_named(run: Run, log: Log) -> None:
    # 3 GiB more outside torch than that log has, and so 3 GiB less for the pool.
    text = LLAMA_3090.replace(
        "non_torch_memory=0.35GiB kv_cache_size=3.81GiB", "non_torch_memory=3.35GiB kv_cache_size=0.81GiB"
    )
    rows = rows_of(run("reconcile", "--log", log(text), "--gpu", "rtx-3090", "--format", "json").json)
    off = -rows["non_torch"]["error"] / GIB
    assert rows["kv_cache"]["why"] == f"mostly non_torch ({off:+.2f} GiB here)"
    assert rows["blocks"]["why"] == "follows kv_cache"


def test_a_server_that_drafts_is_said_to(run: Run, log: Log) -> None:
    more = ", 'speculative_config': {'method': 'eagle', 'num_speculative_tokens': 3}"
    text = QWEN.format(model="llama-3.1-8b", context=4096, kv="10.00", tokens=81_920, more=more, lines="")
    ran = run("reconcile", "--log", log(text), "--gpu", "a100-80g")
    assert "the server drafts tokens (eagle); add --draft-model" in ran.err
    assert "drafts tokens" not in run("reconcile", "--log", log(text), "--gpu", "a100-80g", "-q").err


def test_ranks_with_unequal_room_are_said(run: Run, log: Log) -> None:
    lines = "(Worker_TP0 pid=1) Available KV cache memory: 9.50 GiB\n"
    more = ", 'tensor_parallel_size': 2"
    text = QWEN.format(model="llama-3.1-8b", context=4096, kv="10.00", tokens=155_648, more=more, lines=lines)
    ran = run("reconcile", "--log", log(text), "--gpu", "a100-80g", "--format", "json")
    assert "2 ranks have room for 9.50 to 10.00 GiB of KV; the smallest decides for all" in ran.err
    assert rows_of(ran.json, "given")["tokens"]["exact"] is True  # 9.5 GiB / 65,536 bytes: 155,648


def test_what_a_pasted_command_says_is_not_taken_from_the_log(run: Run, log: Log) -> None:
    pasted = "vllm serve meta-llama/Llama-3.1-8B-Instruct --kv_cache_dtype fp8 -tp 2"
    found = run("reconcile", "--log", log(LLAMA_3090), "--from-command", pasted, "--format", "json").json
    assert (found["tensor_parallel_size"], found["max_model_len"]) == (2, 20_000)


def test_what_nothing_explains_has_no_reason(run: Run, log: Log) -> None:
    row = why(run, log, model="llama-3.1-8b", kv="10.00", tokens=60_000)
    assert (row["why"], row["exact"]) == (None, False)


def test_ranks_without_a_split_are_refused(run: Run, log: Log) -> None:
    lines = "(Worker_TP0 pid=1) Available KV cache memory: 9 GiB\n(Worker_TP1 pid=2) Available KV cache memory: 9 GiB\n"
    text = QWEN.format(model="llama-3.1-8b", context=4096, kv="9", tokens=5000, more="", lines=lines)
    assert refused(run("reconcile", "--log", log(text))) == (
        "log: figures of several ranks (TP0, TP1), but not how the model is split; add --tp"
    )


def test_a_quantised_log_of_another_checkpoint_is_refused(run: Run, log: Log) -> None:
    text = QWEN.format(
        model="llama-3.1-8b", context=4096, kv="9", tokens=5000, more=", 'quantization': 'awq'", lines=""
    )
    assert "log: quantization=awq, but llama-3.1-8b is not quantised" in refused(run("reconcile", "--log", log(text)))


def test_what_depends_on_the_gpu_is_left_open() -> None:
    same = LogRow("weights", "bytes", 5.0, 5.0, kind="exact")
    one, other = (LogRow("blocks", "blocks", count, 7.0, kind="exact") for count in (6.0, 8.0))
    assert merged([(same, one), (same, other)], ["a", "b"]) == (
        same,
        LogRow("blocks", "blocks", None, 7.0, why="depends on the GPU, which is not known: 6 on a, 8 on b; add --gpu"),
    )


# sglang#6753 (Llama-3-8B on one H200): 124.23 GB free after loading 14.98, mem_fraction_static 0.8718, 871,371 tokens.
SGLANG = """\
[2025-05-29 23:22:50] server_args=ServerArgs(model_path='meta-llama/Meta-Llama-3-8B-Instruct', tp_size=1, \
mem_fraction_static=0.8717961202189594, page_size=1, context_length=None, kv_cache_dtype='auto')
[2025-05-29 23:22:51] Load weight begin. avail mem=139.21 GB
[2025-05-29 23:22:58] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=124.23 GB, \
mem usage=14.98 GB.
[2025-05-29 23:22:58] KV Cache is allocated. #tokens: 871371, K size: 53.18 GB, V size: 53.18 GB
[2025-05-29 23:22:58] Memory pool end. avail mem=17.66 GB
[2025-05-29 23:23:03] max_total_num_tokens=871371, chunked_prefill_size=16384, max_prefill_tokens=16384, \
max_running_requests=4097, context_len=8192
"""


# --- a log and a command line that do not agree -----------------------------------------------------------------------

# Llama-3.1-8B on one GPU of 79.19 GiB: 14.99 GiB of weights, 50 GiB of KV in 409,600 tokens of 131,072 bytes.
H100 = """\
INFO vLLM API server version 0.10.1
INFO non-default args: {'model': 'llama-3.1-8b', 'max_model_len': 8192, 'tensor_parallel_size': 1}
INFO Model loading took 14.99 GiB and 3 s
INFO Free memory on device (78.69/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB).
INFO Available KV cache memory: 50.00 GiB
INFO GPU KV cache size: 409,600 tokens
"""
NO_TOTAL = "".join(line for line in H100.splitlines(keepends=True) if "Free memory" not in line)


@pytest.mark.parametrize(
    ("text", "argv", "fault"),
    [
        (H100, ("--gpu", "rtx-4090"), "--gpu rtx-4090: has 24.00 GiB at most, but the log says a GPU of 79.19 GiB"),
        (H100, ("--gpu-memory", "40GiB"), "--gpu-memory 40GiB: has 40.00 GiB at most, but the log says a GPU of 79.19"),
        (
            NO_TOTAL, ("--gpu", "l40s"),
            "--gpu l40s: has 48.00 GiB at most, but the log says 14.99 GiB of weights and 50.00 GiB of KV cache",
        ),
        (SGLANG, ("--gpu", "h100"), "--gpu h100-80g: has 80.00 GiB at most, but the log says 139.21 GiB free"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_have_been_it_is_refused(
    run: Run, log: Log, text: str, argv: tuple[str, ...], fault: str
) -> None:
    said = refused(run("reconcile", "--log", log(text), *argv))
    assert said.startswith(fault)
    assert said.endswith(f"; name the GPU that it ran on, or leave {argv[0]} out")


def test_all_that_a_gpu_has_may_be_used(run: Run, log: Log) -> None:
    full = NO_TOTAL.replace("50.00", "9.01")  # 14.99 + 9.01 = 24: what an RTX 4090 has by its vendor
    assert run("reconcile", "--log", log(full), "--gpu", "rtx-4090").code == 0
    over = NO_TOTAL.replace("50.00", "9.03")
    assert "9.03 GiB of KV cache" in refused(run("reconcile", "--log", log(over), "--gpu", "rtx-4090"))


def test_a_gpu_that_the_log_says_otherwise_is_warned_of(run: Run, log: Log) -> None:
    named = "INFO Using configuration from device_name=NVIDIA_A100-SXM4-80GB,x\n" + H100
    ran = run("reconcile", "--log", log(named), "--gpu", "h200")
    assert ran.code == 0
    warnings = [line for line in ran.err.splitlines() if "warning" in line]
    assert warnings[0].endswith("--gpu h200 is taken, but the log names an NVIDIA A100-SXM4-80GB (a100-80g)")
    assert re.search(r"--gpu h200: a GPU of 139\.\d\d( to 139\.\d\d)? GiB, but the log says 79\.19 GiB", warnings[1])
    assert "warning" in run("reconcile", "--log", log(named), "--gpu", "h200", "-q").err
    for gpu_name in ("a100-80g", "h100-80g"):
        assert "warning" not in run("reconcile", "--log", log(H100), "--gpu", gpu_name).err
    assert "warning" not in run("reconcile", "--log", log(named), "--gpu", "a100-80g").err


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (("--tp", "4"), "--tensor-parallel-size 4 is taken; the log says tensor_parallel_size=1"),
        (("--ctx", "4k"), "--ctx 4096 is taken; the log says max_model_len=8192"),
        (("--engine-arg", "tensor_parallel_size=2"), "--tensor-parallel-size 2 is taken; the log says"),
        (("--from-command", "vllm serve llama-3.1-8b -tp 2"), "--tensor-parallel-size 2 is taken; the log says"),
        (("--gpu-memory-utilization", "0.8"), "--gpu-memory-utilization 0.8 is taken; the log says"),
        (("--engine", "vllm@0.8"), "--engine vllm@0.8 is taken; the log says version 0.10.1"),
        (("--model", "qwen2.5-7b"), "--model qwen2.5-7b is taken; the log says llama-3.1-8b"),
    ],
)
def test_what_is_said_wins_over_the_log_with_a_note(run: Run, log: Log, argv: tuple[str, ...], note: str) -> None:
    ran = run("reconcile", "--log", log(H100), "--gpu", "h100-80g", *argv)
    assert ran.code == 0
    (said,) = (line for line in ran.err.splitlines() if "is taken; the log says" in line)
    assert said.startswith(f"kvplan: note: {note}")


def test_what_is_said_as_the_log_says_it_needs_no_note(run: Run, log: Log) -> None:
    same = (
        "--tp", "1", "--ctx", "8k", "--engine", "vllm@0.10.1", "--model", "meta-llama/Llama-3.1-8B",
        "--gpu-memory-utilization", "0.9", "--no-enforce-eager",
    )  # fmt: skip
    assert "is taken" not in run("reconcile", "--log", log(H100), "--gpu", "h100-80g", *same).err
    assert "is taken" not in run("reconcile", "--log", log(H100), "--gpu", "h100-80g", "--ctx", "auto").err


def test_a_flag_of_sglangs_is_named_as_sglang_does(run: Run, log: Log) -> None:
    ran = run("reconcile", "--log", log(SGLANG), "--tp", "2")
    assert "--tensor-parallel-size 2 is taken; the log says tp_size=1" in ran.err


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("'max_num_seqs': -5", "log: max_num_seqs=-5: not a whole number ('-5'); say what it was with --max-num-seqs"),
        (
            "'kv_cache_dtype': 'fp7'",
            "log: kv_cache_dtype=fp7: is not one kvplan knows; say what it was with --kv-cache-dtype",
        ),
        (
            "'tensor_parallel_size': 3",
            "log: tensor_parallel_size=3: does not divide the 32 attention heads of llama-3.1-8b; "
            "say what it was with --tensor-parallel-size",
        ),
        ("'max_model_len': 0", "log: max_model_len=0: must be at least 1 ('0'); say what it was with --ctx"),
    ],
)
def test_an_error_of_the_logs_settings_names_them(run: Run, log: Log, said: str, fault: str) -> None:
    text = f"vLLM API server version 0.10.0\nnon-default args: {{'model': 'llama-3.1-8b', {said}}}\n"
    assert refused(run("reconcile", "--log", log(text))) == fault


def test_an_error_of_the_logs_release_names_it(run: Run, log: Log) -> None:
    text = H100.replace("0.10.1", "0.40.2")
    assert refused(run("reconcile", "--log", log(text))) == (
        "log: version 0.40.2: kvplan knows vLLM 0.6 to 0.33; say what it was with --engine vllm@0.33"
    )
    assert refused(run("reconcile", "--log", log(H100), "--engine", "vllm@0.40")).startswith("--engine vllm@0.40: ")
    assert refused(run("reconcile", "--log", log(H100), "--tp", "3")).startswith("tensor_parallel_size 3: ")


# --- replicas ---------------------------------------------------------------------------------------------------------

REPLICAS = """\
(APIServer pid=1) INFO vLLM API server version 0.11.0
(APIServer pid=1) INFO non-default args: {'model': 'llama-3.1-8b', 'data_parallel_size': 2, 'max_model_len': 8192}
(EngineCore_DP0 pid=2) INFO Model loading took 14.99 GiB and 3 s
(EngineCore_DP1 pid=3) INFO Model loading took 14.99 GiB and 3 s
(EngineCore_DP0 pid=2) INFO Available KV cache memory: 54.00 GiB
(EngineCore_DP1 pid=3) INFO Available KV cache memory: 50.00 GiB
(EngineCore_DP0 pid=2) INFO GPU KV cache size: 442,368 tokens
(EngineCore_DP1 pid=3) INFO GPU KV cache size: 409,600 tokens
"""


def test_replicas_have_a_pool_each(run: Run, log: Log) -> None:
    ran = run("reconcile", "--log", log(REPLICAS), "--gpu", "h100-80g")
    assert "2 replicas have a pool of their own each, of 50.00 to 54.00 GiB; the smallest is compared" in ran.err
    assert "decides for all" not in ran.err
    assert ran.out.startswith("llama-3.1-8b on 2 replicas of h100-80g of ")
    document = run("reconcile", "--log", log(REPLICAS), "--gpu", "h100-80g", "--format", "json").json
    assert document["data_parallel_size"] == 2
    assert rows_of(document, "given")["tokens"]["exact"] is True  # 50 GiB / 131,072 bytes: 409,600


def test_within_a_replica_the_smallest_rank_decides(run: Run, log: Log) -> None:
    text = REPLICAS.replace("'data_parallel_size': 2", "'data_parallel_size': 2, 'tensor_parallel_size': 2")
    text = re.sub(r"EngineCore_(DP\d) pid=\d\) INFO Avail", r"Worker_\1_TP0 pid=7) INFO Avail", text)
    ran = run("reconcile", "--log", log(text + "(Worker_DP0_TP1 pid=8) Available KV cache memory: 52.00 GiB\n"))
    assert "2 ranks of replica DP0 have room for 52.00 to 54.00 GiB of KV; the smallest decides for all" in ran.err
    assert "2 replicas have a pool of their own each, of 50.00 to 52.00 GiB" in ran.err
    assert "llama-3.1-8b on 2 replicas of 2 x " in ran.out


def test_replicas_without_a_split_ask_for_dp(run: Run, log: Log) -> None:
    text = REPLICAS.replace("'data_parallel_size': 2, ", "")
    assert refused(run("reconcile", "--log", log(text))).endswith("but not how the model is split; add --dp")


# --- SGLang -----------------------------------------------------------------------------------------------------------


def test_sglang_is_predicted_from_the_memory_it_found(run: Run, log: Log) -> None:
    found = run("reconcile", "--log", log(SGLANG), "--model", "meta-llama/Meta-Llama-3-8B", "--format", "json").json
    rows = rows_of(found)
    assert found["engine"] == "sglang"
    assert rows["weights"]["relative"] == pytest.approx(-0.001, abs=0.001)
    # 124.23 - 139.21 x (1 - 0.8717961) = 106.38 GiB; the log has 53.18 + 53.18.
    assert rows["kv_cache"]["predicted"] / GIB == pytest.approx(106.38, abs=0.01)
    assert rows["kv_cache"]["logged"] == round(106.36 * GIB)
    assert rows["tokens"]["relative"] == pytest.approx(0, abs=0.0005)
    assert rows_of(found, "given")["tokens"]["exact"] is True
    assert "keeps back" in rows["activations"]["why"]


def test_sglang_is_predicted_from_its_inputs_where_the_gpu_is_known(run: Run, log: Log) -> None:
    """The log has 106.36 GiB and 871,371 tokens; nothing of its free memory is needed."""
    text = "".join(line for line in SGLANG.splitlines(keepends=True) if "Load weight" not in line)
    rows = rows_of(run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json").json)
    assert rows["kv_cache"]["relative"] == pytest.approx(0, abs=0.002)
    assert rows["tokens"]["relative"] == pytest.approx(0, abs=0.002)
    assert rows["kv_cache"]["kind"] == "calibrated"


def test_memory_that_somebody_else_held_is_the_reason_of_a_difference(run: Run, log: Log) -> None:
    """sglang#7495: 75.02 GB were free on an H100 that has 78.7; here 20 are missing on the H200."""
    text = SGLANG.replace("139.21 GB", "119.21 GB")
    rows = rows_of(run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json").json)
    assert rows["kv_cache"]["why"] == "119.21 GiB were free before loading, where 139.31 were expected"


def test_a_log_of_sglang_is_no_log_of_vllm(run: Run, log: Log) -> None:
    said = refused(run("reconcile", "--log", log(SGLANG), "--engine", "vllm@0.11"))
    assert said == "--engine vllm@0.11: the log is one of sglang; leave it out"


def test_dp_attention_is_not_taken_for_replicas(run: Run, log: Log) -> None:
    text = SGLANG.replace("page_size=1,", "page_size=1, dp_size=4, enable_dp_attention=True,")
    found = run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json").json
    assert found["data_parallel_size"] == 1
    assert rows_of(found)["kv_cache"]["why"] == "DP attention is not modelled"


def test_a_trimmed_sglang_log_says_what_it_lacks(run: Run, log: Log) -> None:
    text = "\n".join(SGLANG.splitlines()[2:])
    rows = rows_of(run("reconcile", "--log", log(text), "--model", "llama-3-8b", "--format", "json").json)
    assert rows["kv_cache"]["why"] == 'needs "Load weight begin", mem_fraction_static of the log'


# The figures of a gpt-oss-20b whose pool is worked out below, on an H100 with 78.68 GiB free.
OSS = """\
[2025-08-21 18:18:05] server_args=ServerArgs(model_path='openai/gpt-oss-20b', tp_size=1, context_length=32768, \
mem_fraction_static=0.83, page_size=1, kv_cache_dtype='auto')
[2025-08-21 18:18:15] Load weight begin. avail mem=78.68 GB
[2025-08-21 18:18:25] Load weight end. type=GptOss, dtype=torch.bfloat16, avail mem=65.10 GB, mem usage=13.58 GB.
[2025-08-21 18:18:26] Use sliding window memory pool. full_layer_tokens=1255367, swa_layer_tokens=1004293
[2025-08-21 18:18:26] KV Cache is allocated. #tokens: 1004293, K size: 11.49 GB, V size: 11.49 GB
[2025-08-21 18:18:26] KV Cache is allocated. #tokens: 1255367, K size: 14.37 GB, V size: 14.37 GB
[2025-08-21 18:18:37] max_total_num_tokens=1255367, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=32768, available_gpu_mem=11.80 GB
"""


def without(text: str, *phrases: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not any(phrase in line for phrase in phrases))


@pytest.mark.parametrize("gone", [(), ("max_total_num_tokens",), ("max_total_num_tokens", "full_layer_tokens")])
@pytest.mark.parametrize("flags", [(), ("--gpu", "h100")])
def test_the_pools_of_a_hybrid_model_are_compared_together(
    run: Run, log: Log, gone: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    """12 layers of 8 heads x 64 keep all tokens, 12 a window: 24,576 bytes a token each, for 1,255,367 and 1,004,293
    tokens 28.73 + 22.99 GiB; logged in four figures of two digits."""
    found = run("reconcile", "--log", log(without(OSS, *gone)), *flags, "--format", "json").json
    rows = rows_of(found)
    assert rows["kv_cache"]["logged"] == round(51.72 * GIB)
    assert rows["tokens"]["logged"] == 1_255_367
    assert rows["kv_cache"]["exact"]
    assert rows["tokens"]["exact"]
    assert found["given_from"] == "51.72 GiB"
    # 0.02 GiB, half a digit of four figures, over 24,576 x 1.8 bytes are 485 tokens.
    given = rows_of(found, "given")["tokens"]
    assert given["exact"]
    assert abs(given["error"]) < 486 < given["high"] - given["low"] + 2


def test_a_page_gives_both_pools_in_one_figure(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(
        'sglang:max_total_num_tokens{model_name="openai/gpt-oss-20b"} 1255367.0\n'
        "sglang:kv_cache_memory_usage_gb 51.72\nsglang:context_len 32768.0\n"
    )
    found = run("reconcile", "--metrics", page, "--gpu", "h100", "--mem-fraction-static", "0.83", "--format", "json")
    rows = rows_of(found.json)
    assert (rows["tokens"]["logged"], rows["tokens"]["exact"], rows["kv_cache"]["exact"]) == (1_255_367, True, True)
    assert rows_of(found.json, "given")["tokens"]["exact"]


def test_one_of_two_pools_is_not_compared_with_both(run: Run, log: Log) -> None:
    text = without(OSS, "#tokens: 1004293")
    found = run("reconcile", "--log", log(text), "--gpu", "h100", "--format", "json").json
    rows = rows_of(found)
    assert (rows["kv_cache"]["logged"], rows["kv_cache"]["why"]) == (None, "the log gives one of the two pools")
    assert rows_of(found, "given")["tokens"]["why"] == "the log gives one of the two pools"
    assert rows["tokens"]["exact"]


def test_the_pools_of_a_real_hybrid_log_are_added() -> None:
    """Gemma 4 E4B on SGLang 0.5.13: 644,444 tokens of windows in 43.02 GiB, 805,556 of all in 21.52 GiB."""
    lines = (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 644444, K size: 21.51 GB, V size: 21.51 GB\n"
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 805556, K size: 10.76 GB, V size: 10.76 GB\n"
    )
    pool = kv_pool(parse_log(lines), "", windows=None)
    assert pool is not None
    assert (pool.size, pool.tokens) == (round(64.54 * GIB), 805_556)


def test_a_drafts_pool_is_not_the_models() -> None:
    """sglang#4351: K and V of 1.61 GiB, then of 0.02 GiB for the EAGLE draft."""
    lines = (
        "[2025-03-12 15:31:01 TP0] KV Cache is allocated. K size: 1.61 GB, V size: 1.61 GB.\n"
        "[2025-03-12 15:31:29 TP0] Load weight end. type=LlamaForCausalLMEagle, avail mem=18.64 GB\n"
        "[2025-03-12 15:31:29 TP0] KV Cache is allocated. K size: 0.02 GB, V size: 0.02 GB.\n"
    )
    for windows in (False, None):
        pool = kv_pool(parse_log(lines), "TP0", windows=windows)
        assert pool is not None
        assert pool.size == round(3.22 * GIB)
    hybrid = kv_pool(parse_log(lines), "TP0", windows=True)
    assert hybrid is not None
    assert hybrid.missing


NEXT = """\
[2025-08-21 18:18:05] server_args=ServerArgs(model_path='Qwen/Qwen3-Next-80B-A3B-Instruct', tp_size=2, \
context_length=32768, mem_fraction_static=0.83, page_size=1, kv_cache_dtype='auto')
[2025-08-21 18:18:15 TP0] Load weight begin. avail mem=138.60 GB
[2025-08-21 18:18:15 TP0] Load weight end. type=Q, dtype=torch.bfloat16, avail mem=64.30 GB, mem usage=74.28 GB.
[2025-08-21 18:18:15 TP0] Mamba Cache is allocated. max_mamba_cache_size: 1000, conv_state size: 0.50GB, \
ssm_state size: 18.00GB
[2025-08-21 18:18:15 TP0] KV Cache is allocated. #tokens: 2000000, K size: 11.44 GB, V size: 11.44 GB
"""


def test_states_are_taken_off_the_free_memory_as_they_were_logged(run: Run, log: Log) -> None:
    """64.30 - 138.60 x 0.17 = 40.738 GiB, of which 18.50 are states; 12 layers keep 1 head x 256: 12,288 bytes."""
    rows = rows_of(run("reconcile", "--log", log(NEXT), "--format", "json").json)
    assert rows["kv_cache"]["predicted"] / GIB == pytest.approx(40.738 - 18.5, abs=0.0005)
    assert rows["tokens"]["predicted"] == pytest.approx((40.738 - 18.5) * GIB / 12_288, abs=1)
    # Half a digit of free memory after loading, 0.17 of one before it, and two of the states: 0.01585 GiB either way.
    assert rows["tokens"]["high"] - rows["tokens"]["predicted"] == pytest.approx(0.01585 * GIB / 12_288, rel=0.01)


def test_states_that_were_not_logged_take_their_share(run: Run, log: Log) -> None:
    """mamba_full_memory_ratio is 0.9: of 40.738 GiB 0.9 / 1.9 are states, to whole slots of some 20 MiB."""
    text = without(NEXT, "Mamba Cache")
    rows = rows_of(run("reconcile", "--log", log(text), "--format", "json").json)
    assert rows["kv_cache"]["predicted"] / GIB == pytest.approx(40.738 / 1.9, abs=0.04)


def test_tokens_are_as_exact_as_the_free_memory_was_logged(run: Run, log: Log) -> None:
    """sglang#6753: half a digit of 124.23 and 0.128 of 139.21 are 0.00564 GiB, 46 tokens of 131,072 bytes."""
    found = run("reconcile", "--log", log(SGLANG), "--model", "meta-llama/Meta-Llama-3-8B", "--format", "json").json
    row = rows_of(found)["tokens"]
    assert row["high"] - row["predicted"] == pytest.approx(46, abs=1)
    assert row["predicted"] - row["low"] == pytest.approx(46, abs=1)


def test_a_cap_on_tokens_holds_for_the_memory_that_was_found(run: Run, log: Log) -> None:
    text = SGLANG.replace("page_size=1,", "page_size=1, max_total_tokens=500000,")
    assert rows_of(run("reconcile", "--log", log(text), "--format", "json").json)["tokens"]["predicted"] == 500_000


@pytest.mark.parametrize(
    ("change", "flags", "fault"),
    [
        (
            ("139.21 GB", "0.10 GB"),
            ("--gpu", "rtx-4090", "--mem-fraction-static", "0.5"),
            "by the plan nothing is left",
        ),
        (("avail mem=124.23", "avail mem=1.23"), (), "by the free memory in the log nothing is left"),
    ],
)
def test_tokens_without_a_prediction_say_why(
    run: Run, log: Log, change: tuple[str, str], flags: tuple[str, ...], fault: str
) -> None:
    text = without(SGLANG.replace(*change), *(("Load weight", "KV Cache") if flags else ()))
    rows = rows_of(run("reconcile", "--log", log(text), *flags, "--format", "json").json)
    for name in ("kv_cache", "tokens", "max_running_requests"):
        assert (rows[name]["predicted"], rows[name]["why"]) == (None, fault)


def test_a_page_is_not_asked_for_lines_of_a_log(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(
        'sglang:max_total_num_tokens{model_name="llama-3-8b"} 871371.0\nsglang:kv_cache_memory_usage_gb 106.36\n'
    )
    found = run("reconcile", "--metrics", page, "--format", "json").json
    said = [row["why"] for row in (*found["rows"], *found["given"]) if row["why"]]
    assert "the free memory it comes from is not on the page; --gpu predicts it from the inputs" in said
    assert not [why for why in said if "Load weight" in why or (" log" in why and "SGLang" not in why)]


# --- SGLang: requests, releases, reasons ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logged", "asked", "predicted", "exact"),
    [
        ("4097", "", 4096, True),  # sglang#6753 itself: 0.4 counts the slot that is never given out
        ("4096", "", 4096, True),
        ("48", "max_running_requests=48, ", 48, True),
        ("300", "", 4096, False),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--gpu", "h200")])
def test_the_requests_that_may_run_are_compared(
    run: Run, log: Log, logged: str, asked: str, predicted: int, exact: bool, flags: tuple[str, ...]
) -> None:
    """512 for each context of 8,192 that 871,371 tokens hold would be 54,460; 4,096 is the most."""
    text = SGLANG.replace("4097", logged).replace("page_size=1, ", f"page_size=1, {asked}")
    row = rows_of(run("reconcile", "--log", log(text), *flags, "--format", "json").json)["max_running_requests"]
    assert (row["predicted"], row["logged"], row["exact"]) == (predicted, int(logged), exact)


def test_requests_are_whole_numbers(run: Run, log: Log) -> None:
    assert re.search(
        r"^max_running_requests +4,096 +4,097 +as logged", run("reconcile", "--log", log(SGLANG)).out, re.M
    )


COMMAND = "+ docker run lmsysorg/sglang:{tag} python3 -m sglang.launch_server --model-path llama-3-8b --tp 1{more}\n"
DEFAULT = "the log says neither mem_fraction_static nor "


@pytest.mark.parametrize(
    ("tag", "more", "flags", "note"),
    [
        ("latest", "", (), f"{DEFAULT}its release: the fraction is that of sglang@0.5's rule"),
        ("v0.3.6", "", (), f"{DEFAULT}a release that kvplan knows (0.3.6): the fraction is that of sglang@0.5's rule"),
        ("v0.4.3", "", (), None),
        ("v0.5.9-cu129", "", (), None),
        ("latest", " --mem-fraction-static 0.8", (), None),
        ("latest", "", ("--mem-fraction-static", "0.8"), None),
        ("latest", "", ("--engine", "sglang@0.4.6"), None),
    ],
)
def test_a_default_fraction_says_whose_rule_it_is(
    run: Run, log: Log, tag: str, more: str, flags: tuple[str, ...], note: str | None
) -> None:
    text = COMMAND.format(tag=tag, more=more) + without(SGLANG, "server_args")
    ran = run("reconcile", "--log", log(text), "--gpu", "h200", *flags)
    assert ran.code == 0
    assert (DEFAULT in ran.err) == (note is not None)
    assert (note or "") in ran.err


def test_an_image_says_the_release_whose_rules_are_taken(run: Run, log: Log) -> None:
    """0.4.3 takes 0.88 for one GPU (a table by tensor parallel size): 0.88 x 139.3 - 14.98 = 107.6 GiB."""
    text = COMMAND.format(tag="v0.4.3.post2-cu124", more="") + without(SGLANG, "server_args")
    found = run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json")
    assert found.json["engine"] == "sglang 0.4.3.post2-cu124"
    assert rows_of(found.json)["kv_cache"]["predicted"] / GIB == pytest.approx(0.88 * 139.3 - 14.98, abs=0.1)
    other = run("reconcile", "--log", log(text), "--gpu", "h200", "--engine", "sglang@0.5")
    assert "--engine sglang@0.5 is taken; the log says version 0.4.3.post2-cu124" in other.err
    same = run("reconcile", "--log", log(text), "--gpu", "h200", "--engine", "sglang@0.4")
    assert "is taken; the log says version" not in same.err


@pytest.mark.parametrize(
    ("usage", "more", "said"),
    [
        ("14.98", "", None),
        ("15.18", "", "SGLang logs what free memory lost, whatever took it"),  # 0.2 GiB beside the weights
        ("15.40", "", None),  # 0.4 GiB are no kernel's
        ("29.96", "", None),
        ("4.98", "cpu_offload_gb=10, ", "--cpu-offload-gb 10 keeps a part on the host, not modelled"),
    ],
)
def test_only_a_small_difference_of_weights_is_put_down_to_free_memory(
    run: Run, log: Log, usage: str, more: str, said: str | None
) -> None:
    text = SGLANG.replace("mem usage=14.98", f"mem usage={usage}").replace("page_size=1, ", f"page_size=1, {more}")
    assert rows_of(run("reconcile", "--log", log(text), "--format", "json").json)["weights"]["why"] == said


# Llama-3.1-70B on 4 stages of 2 ranks: 20 layers of 855,654,400 parameters are 15.94 GiB a rank, the embedding and the
# head, of 128,256 x 8,192 each, 0.98 GiB more on the first stage and on the last.
def pipeline(**usage: str) -> str:
    lines = [
        f"[2025-08-21 18:18:15 {rank.replace('_', ' ')}] Load weight end. avail mem=100.00 GB, mem usage={gib} GB.\n"
        for rank, gib in usage.items()
    ]
    return (
        "[2025-08-21 18:18:05] server_args=ServerArgs(model_path='meta-llama/Llama-3.1-70B', tp_size=2, pp_size=4, "
        "context_length=8192, mem_fraction_static=0.85)\n" + "".join(lines)
    )


@pytest.mark.parametrize(
    ("usage", "stage", "predicted"),
    [
        ({"PP1_TP0": "15.94", "PP1_TP1": "15.94"}, "pipeline stage 1", 15.94),
        ({"PP3_TP0": "16.92"}, "pipeline stage 3", 16.92),
        ({"TP0": "16.92", "TP1": "16.92"}, "pipeline stage 0", 16.92),  # whose stage no name gives
        (
            {"PP0_TP0": "16.92", "PP1_TP0": "20.00", "PP2_TP0": "15.94"},
            "pipeline stage 1, of 3 the furthest off",
            15.94,
        ),
    ],
)
def test_each_pipeline_stage_is_compared_with_its_own_rank(
    run: Run, log: Log, usage: dict[str, str], stage: str, predicted: float
) -> None:
    row = rows_of(run("reconcile", "--log", log(pipeline(**usage)), "--gpu", "h200", "--format", "json").json)[
        "weights"
    ]
    assert row["why"].partition(";")[0] == stage
    # Whole segments of 2 MiB: at most 20 layers x 5 tensors of them more.
    assert predicted - 0.01 <= row["predicted"] / GIB <= predicted + 0.2


def test_the_pool_of_a_pipeline_stage_is_its_own(run: Run, log: Log) -> None:
    """20 layers x 4 heads x 128 x 2 of 2 bytes: 40,960 bytes a token on every stage; 50.00 GiB are 1,310,720 tokens."""
    lines = (
        "[2025-08-21 18:18:15 PP1 TP0] KV Cache is allocated. #tokens: 1310719, K size: 25.00 GB, V size: 25.00 GB\n"
    )
    found = run("reconcile", "--log", log(pipeline(PP1_TP0="15.94") + lines), "--format", "json").json
    assert found["given_from"] == "50.00 GiB"
    assert rows_of(found, "given")["tokens"]["exact"]


def test_a_draft_of_sglangs_cannot_be_sized(run: Run, log: Log) -> None:
    text = SGLANG.replace("page_size=1, ", "page_size=1, speculative_algorithm='EAGLE', ")
    ran = run("reconcile", "--log", log(text))
    assert "the server drafts tokens (EAGLE); what drafts is not sized" in ran.err
    assert "--draft-model" not in ran.err


# --- bounds and refusals ----------------------------------------------------------------------------------------------


def test_a_row_beyond_the_limit_is_exit_1(run: Run, log: Log) -> None:
    path = log(LLAMA_3090)
    ran = run("reconcile", "--log", path, "--max-error", "2%")
    assert ran.code == 1
    assert "kvplan: error: reconcile: off by more than 2%: " in ran.err
    assert "weights" not in ran.errors[0]
    assert run("reconcile", "--log", path, "--max-error", "100%").code == 0


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        ((), "RUN_DIR: is missing; give one of RUN_DIR, --log FILE and --metrics URL"),
        (("somewhere", "--log", "x"), "RUN_DIR and --log: are given together"),
        (("--log", "x", "--metrics", "y"), "--log and --metrics: are given together"),
        (("--log", "x", "--calibrate", "c.json"), "--calibrate: needs a run"),
        (("somewhere", "--gpu", "h200"), "--gpu: a run says itself what it ran with"),
        (("somewhere", "--model", "llama-3.1-8b"), "--model: a run says itself"),
        (("--log", "/no/such.log"), "/no/such.log: no such file or directory"),
        (("--log", str(ROOT)), "is a directory"),
        (("--metrics", "/no/such.txt"), "/no/such.txt: no such file or directory"),
        (("--metrics", "file:///etc/passwd"), "not an http or https URL"),
        (("--metrics", "ftp://host/metrics"), "not an http or https URL"),
        (("--metrics", "http://user:secret@host/metrics"), "a URL with a password is not used"),
    ],
)
def test_bad_usage_is_one_line(run: Run, argv: tuple[str, ...], fault: str) -> None:
    text = refused(run("reconcile", *argv))
    assert fault in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hello\n", "holds no line of a vLLM or SGLang server's start-up"),
        ("Model loading took 1 GiB and\n", "does not say which model it served"),
        ("non-default args: {'model': 'llama-3.1-8b'}\n", "does not say its release; add --engine vllm@0.11"),
        (
            "vLLM API server version 0.1.dev3+gabc\nargs: Namespace(model='llama-3.1-8b')\n",
            "0.1.dev3+gabc is no release",
        ),
        ("vLLM API server version 0.99.0\nargs: Namespace(model='llama-3.1-8b')\n", "kvplan knows vLLM 0.6 to 0.33"),
        ("vLLM API server version 0.9.0\nargs: Namespace(model='llama-3.1-8b', max_num_seqs=-5)\n", "--max-num-seqs"),
        (
            "vLLM API server version 0.9.0\nargs: Namespace(model='llama-3.1-8b', enforce_eager=2)\n",
            "neither True nor False",
        ),
        ("vLLM API server version 0.9.0\nargs: Namespace(model='\x1b[31m\u202eevil')\n", "is not one that"),
    ],
)
def test_a_log_that_does_not_do_is_refused_in_one_line(run: Run, log: Log, text: str, fault: str) -> None:
    assert fault in refused(run("reconcile", "--log", log(text)))


VLLM_FLAGS = ("--model", "llama-3-8b", "--engine", "vllm@0.9")


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_log_says_the_answer_is_rows_or_a_refusal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: st.DataObject
) -> None:
    """Figures and flags of a real log, changed: exit code 0, 1, 2 or 3, never a crash."""
    text, flags = data.draw(
        st.sampled_from(
            [
                *((text, VLLM_FLAGS) for text in (LLAMA_3090, SGLANG, EXAMPLE.read_text(encoding="utf-8"))),
                *((text, flags) for text in (SGLANG, OSS, NEXT) for flags in ((), ("--gpu", "h200"))),
                (pipeline(PP0_TP0="16.92", PP1_TP0="15.94"), ()),
            ]
        )
    )
    figure = st.sampled_from(
        ["0", "-1", "1e9", "99999999999999999", "0.0", "None", "True", "auto", "[]", "7", "1" * 30]
    )
    for _ in range(data.draw(st.integers(min_value=1, max_value=4))):
        numbers = re.findall(r"[0-9][0-9.,]*", text)
        text = text.replace(data.draw(st.sampled_from(numbers)), data.draw(figure), 1)
    path = tmp_path / "fuzz.log"
    path.write_text(text, encoding="utf-8")
    code = main(["reconcile", "--log", str(path), "--format", "json", *flags])
    said = capsys.readouterr()
    assert code in (0, 2, 3), said.err
    if code == 0:
        json.loads(said.out)


# --- a page -----------------------------------------------------------------------------------------------------------

PAGE = """\
vllm:num_requests_running{model_name="meta-llama/Llama-3.1-8B"} 7
vllm:cache_config_info{block_size="16",cache_dtype="auto",gpu_memory_utilization="0.92",num_gpu_blocks="27306",\
kv_cache_size_tokens="436896",kv_cache_max_concurrency="53.33",user_specified_block_size="False"} 1.0
"""


def test_a_pages_pool_is_reconciled(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE)
    found = run(
        "reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--ctx", "8192", "--format", "json"
    )
    rows = rows_of(found.json, "given")
    assert (rows["tokens"]["predicted"], rows["tokens"]["exact"]) == (436_896, True)  # 27,306 x 16
    assert rows["concurrency"]["exact"] is True  # 436,896 / 8,192 = 53.33
    assert rows_of(found.json)["weights"]["why"] == "not on the page"
    open_context = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--format", "json").json
    assert rows_of(open_context)["concurrency"]["why"] == "the context is derived from it; add --ctx"


@pytest.mark.parametrize(
    ("tokens", "concurrency", "context", "why"),
    [
        # Between 436,896 / 53.335 = 8,191.5 and 436,896 / 53.325 = 8,193.07.
        (436_896, "53.33", 8192, "8,192 (8,192 to 8,193 would do)"),
        # Between 1,000,000 / 30.525 = 32,760.03 and 1,000,000 / 30.515 = 32,770.8: the one that is a power of two.
        (1_000_000, "30.52", 32_768, "32,768 (32,761 to 32,770 would do)"),
        # Between 100,000 / 5.005 = 19,980.02 and 100,000 / 4.995 = 20,020.02.
        (100_000, "5.00", 20_000, "20,000 (19,981 to 20,020 would do)"),
        # Between 131,072 x 3 / 3.005 = 130,853.9 and / 2.995 = 131,290.8: the model's own.
        (393_216, "3.00", 131_072, "131,072 (130,854 to 131,290 would do)"),
        # Between 180,000 / 1.5 and 180,000 / 0.5: the model's own, though 196,608 would be nearer to 180,000.
        (180_000, "1", 131_072, "131,072 (120,000 to 360,000 would do)"),
    ],
)
def test_a_pages_context_is_its_tokens_over_its_concurrency(
    run: Run, tmp_path: Path, tokens: int, concurrency: str, context: int, why: str
) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE.replace("436896", str(tokens)).replace("53.33", concurrency))
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--format", "json")
    assert ran.json["max_model_len"] == context
    assert f"the context is taken as {why}" in ran.err
    assert rows_of(ran.json, "given")["concurrency"]["predicted"] is None  # it would be compared with itself


@pytest.mark.parametrize(
    ("tokens", "concurrency"),
    [
        ("436896", "0.00"),
        ("436896", "0"),
        ("436896", "99999999.00"),
        ("436896", "nan"),
        ("436896", "-1"),
        ("0", "1.00"),
    ],
)
def test_a_page_that_says_no_context_has_none(run: Run, tmp_path: Path, tokens: str, concurrency: str) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE.replace("53.33", concurrency).replace("436896", tokens))
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--format", "json")
    assert ran.json["max_model_len"] == 131_072
    assert "the context is taken as" not in ran.err


def test_a_pages_replicas_have_a_pool_each(run: Run, tmp_path: Path) -> None:
    lines = PAGE.splitlines()
    first, second = (lines[1].replace("block_size=", f'engine="{name}",block_size=', 1) for name in "01")
    path = tmp_path / "page.txt"
    path.write_text("\n".join([lines[0], first, second.replace("27306", "27000"), ""]))
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--ctx", "8k")
    assert ran.out.startswith("llama-3.1-8b on 2 replicas of h100-80g of ")
    assert "Given the logged pool of 27,000 blocks:" in ran.out
    assert "2 replicas on the page have a pool of their own each; the smallest is compared" in ran.err


def test_a_page_is_called_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE)
    known = ("--engine", "vllm", "--gpu", "h100-80g")
    assert refused(run("reconcile", "--metrics", path)).startswith("page: does not say its release; add --engine")
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu-memory-utilization", "0.5", "--format", "json")
    assert "--gpu-memory-utilization 0.5 is taken; the page says gpu_memory_utilization=0.92" in ran.err
    assert "the page does not say on which GPU it ran" in ran.err
    reasons = [row["why"] or "" for row in (*ran.json["rows"], *ran.json["given"])]
    assert "not on the page" in reasons
    assert "log" not in " ".join([*reasons, ran.err])
    path.write_text(PAGE.replace("meta-llama/Llama-3.1-8B", "chat"))
    assert refused(run("reconcile", "--metrics", path, *known)) == (
        "page: its model chat is not one that `kvplan models` lists; add --model NAME or --config config.json"
    )
    path.write_text(PAGE.replace("0.92", "1.5"))
    assert refused(run("reconcile", "--metrics", path, *known)).startswith("page: gpu_memory_utilization=1.5: outside")
    path.write_text('vllm:cache_config_info{block_size="16"} 1.0\n')
    text = refused(run("reconcile", "--metrics", path, *known, "--model", "llama-3.1-8b", "--max-error", "1%", "-q"))
    assert text.startswith("--max-error: the page holds no figure to compare")


def test_the_help_says_what_fills_in_what_is_missing(run: Run) -> None:
    text = " ".join(run("reconcile", "--help").out.split())
    for option in ("--log FILE", "--metrics URL|FILE"):
        said = text.partition(f" {option} ")[2].partition(" FILE ")[0][:330]
        assert all(flag in said for flag in ("--engine", "--model", "--config", "does not say")), said
    assert "log-reconciliation" in " ".join(run("schema", "--help").out.split())


def test_a_page_is_had_from_its_server(run: Run, server: str) -> None:
    assert "its model m is not one that `kvplan models` lists" in refused(
        run("reconcile", "--metrics", f"{server}/metrics")
    )
    assert "HTTP 404" in refused(run("reconcile", "--metrics", f"{server}/missing"), 3)
    assert "redirected to another host" in refused(run("reconcile", "--metrics", f"{server}/elsewhere"), 3)
    assert "secret" not in refused(run("reconcile", "--metrics", "http://127.0.0.1:1/metrics?token=secret"), 3)


def test_a_page_without_metrics_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_text("<html></html>")
    assert "no vllm: or sglang: metrics on it; name a server's /metrics page" in refused(
        run("reconcile", "--metrics", path)
    )
    path.write_text(SGLANG_PAGE)
    assert "its model m is not one" in refused(run("reconcile", "--metrics", path))


@needs_oracle_data
def test_a_real_page_reconciles(run: Run) -> None:
    page = DATA / "metrics_vllm_0.33.0.txt"
    if not page.exists():
        pytest.skip(f"no {page.name} in the oracle data")
    found = run(
        "reconcile", "--metrics", page, "--engine", "vllm@0.33", "--gpu", "h100-80g", "--ctx", "8k", "--format", "json"
    )
    assert all(row["exact"] for row in found.json["given"])


# --- its weight -------------------------------------------------------------------------------------------------------

LIGHT = """
import sys
from kvplan.cli.main import main
code = main(["reconcile", "--log", sys.argv[1], "--gpu", "a100-80g"])
print(f"exit code {code}; loaded:", *sorted(set(sys.argv[2:]) & set(sys.modules)), file=sys.stderr)
"""


def test_reading_a_log_loads_no_heavy_library() -> None:
    heavy = (
        "torch",
        "triton",
        "transformers",
        "pandas",
        "matplotlib",
        "pynvml",
        "numpy",
        "jinja2",
        "prometheus_client",
    )
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(EXAMPLE), *heavy], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; loaded:"], done.stderr


def test_the_gpus_that_stand_for_an_unknown_one_differ() -> None:
    from kvplan.serverlog.request import SAMPLE_GPUS

    assert len({gpu(name).sm for name in SAMPLE_GPUS}) >= 4


# --- logged figures of nothing --------------------------------------------------------------------------------------

ZERO = LLAMA_3090.replace("blocks: 1952,", "blocks: 0,").replace("1.56x", "0.00x")
WHERE = ("--gpu", "rtx-3090")


def test_a_logged_zero_is_compared_and_breaks_any_limit(run: Run, log: Log) -> None:
    ran = run("reconcile", "--log", log(ZERO), *WHERE, "--max-error", "99%")
    assert ran.code == 1
    assert "blocks 1,9" in ran.err  # some 1,95x predicted, as for the 1,952 that the real log has
    assert " against 0" in ran.err


def test_a_limit_without_a_figure_to_compare_is_refused(run: Run, log: Log) -> None:
    only_arguments = "".join(LLAMA_3090.splitlines(keepends=True)[:2])
    assert "holds no figure to compare" in refused(
        run("reconcile", "--log", log(only_arguments), *WHERE, "--max-error", "1%")
    )
    assert run("reconcile", "--log", log(only_arguments), *WHERE).code == 0


def test_a_page_whose_blocks_are_no_whole_number_states_none(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="0.5",gpu_memory_utilization="0.9"} 1.0\n'
    )
    asked = ("--model", "llama-3.1-8b", "--gpu", "rtx-3090", "--ctx", "16k", "--engine", "vllm@0.33")
    ran = run("reconcile", "--metrics", str(page), *asked, "--format", "json")
    assert ran.code == 0
    assert rows_of(ran.json)["blocks"]["logged"] is None
