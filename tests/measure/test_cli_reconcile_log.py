"""`kvplan reconcile --log`: a server's own figures beside the plan for it."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.asked.log import model_of
from kvplan.cli.main import main
from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.measure.serverlog.log import parse_log
from kvplan.models import catalog
from tests.support.cli import Run, config_file, refused, run
from tests.support.readme_blocks import ROOT
from tests.support.server_logs import (
    EXAMPLE,
    H100,
    LLAMA_3090,
    NEXT,
    OSS,
    SGLANG,
    Log,
    log,
    pipeline,
    rows_of,
    unplanned,
    without,
)

__all__ = ["log", "run"]  # fixtures

# --- what is compared -------------------------------------------------------------------------------------------------


def test_a_log_reconciles_in_one_command(run: Run, log: Log) -> None:
    document = run("reconcile", "--log", log(LLAMA_3090), "--gpu", "rtx-3090", "--format", "json").json
    assert (document["model"], document["gpus"]) == ("meta-llama/Llama-3.1-8B-Instruct", ["rtx-3090"])
    assert (document["engine"], document["total_memory"]) == ("vllm@0.6", round(23.58 * GIB))
    assert document["max_model_len"] == 20_000
    rows = rows_of(document)
    # 8,030,261,248 parameters and a rotary table of 131,072 x 128, in 2 bytes: 14.9888 GiB.
    assert rows["weights"]["predicted"] == pytest.approx(2 * (8_030_261_248 + 131_072 * 128), abs=4 << 20)
    assert rows["weights"]["logged"] == round(14.9888 * GIB)
    assert rows["activations"]["logged"] == pytest.approx((17.06 - 14.9888) * GIB, abs=2)
    # From vLLM's code, not from this log: 20,000 tokens with three hidden states of 4,096 and 3 x 14,336 of the MLP, in
    # 2 bytes: 2.06 GiB.
    assert rows["activations"]["predicted"] == pytest.approx(20_000 * (3 * 4_096 + 3 * 14_336) * 2, abs=1 << 20)
    assert rows["activations"]["why"] == "logged as the peak of torch, less the weights"
    assert rows["kv_cache"]["logged"] == round(3.81 * GIB)
    assert rows["cuda_graphs"]["why"] == "not in the log"
    # A block is 16 tokens x 32 layers x 2 x 8 heads x 128 x 2 bytes = 2 MiB: 3.81 GiB hold 1950.7 of them, and the last
    # digit is worth 2.6.
    given_rows = rows_of(document, "given")
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
    assert open_gpu["kv_cache"]["why"].startswith("depends on the GPU: ")
    named = rows_of(run("reconcile", "--log", str(EXAMPLE), "--gpu", "a100-80g", "--format", "json").json)
    assert named["kv_cache"]["predicted"] is not None


def test_a_total_that_several_gpus_report_is_said(run: Run, log: Log) -> None:
    ran = run("reconcile", "--log", log(LLAMA_3090.replace("23.58GiB", "79.19GiB")))
    assert "79.19 GiB is what a100-80g, a800-80g, h100-80g" in ran.err
    unknown = run("reconcile", "--log", log(LLAMA_3090.replace("23.58GiB", "61.00GiB")))
    assert "no GPU that kvplan knows reports 61.00 GiB" in unknown.err
    assert "custom of 61.00 GiB" in unknown.out


def test_a_named_gpu_keeps_the_logged_total(run: Run, log: Log) -> None:
    document = run("reconcile", "--log", log(LLAMA_3090), "--gpu", "rtx-4090", "--format", "json").json
    assert (document["gpus"], document["total_memory"]) == (["rtx-4090"], round(23.58 * GIB))


def test_flags_win_over_the_log(run: Run, log: Log) -> None:
    path = log(LLAMA_3090)
    document = run("reconcile", "--log", path, "--ctx", "8192", "--format", "json").json
    assert document["max_model_len"] == 8192
    assert rows_of(document)["concurrency"]["why"] == "logged for 20,000 tokens per request, predicted for 8,192"
    pair = run("reconcile", "--log", path, "--engine-arg", "max_num_seqs=8", "--format", "json").json
    assert rows_of(pair)["activations"]["predicted"] != rows_of(document)["activations"]["predicted"]
    pasted = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 4096"
    assert run("reconcile", "--log", path, "--from-command", pasted, "--format", "json").json["max_model_len"] == 4096


def test_a_context_that_the_server_fitted_is_the_one_it_logged(run: Run, log: Log) -> None:
    auto = LLAMA_3090.replace("max_model_len=20000", "max_model_len=-1")
    document = run("reconcile", "--log", log(auto), "--gpu", "rtx-3090", "--format", "json").json
    assert document["max_model_len"] == 20_000


def test_a_share_of_two_digits_is_taken_from_the_budget(run: Run, log: Log) -> None:
    # OpenPipe/ART qwen3_try.ipynb: 62.10 of 79.20 GiB is 0.7841, which the line calls 0.78: 0.32 GiB more.
    template = (
        "vLLM API server version 0.8.5\nargs: Namespace(model='qwen2.5-0.5b')\nthe current vLLM instance can use "
    )
    template += "total_gpu_memory (79.20GiB) x gpu_memory_utilization (0.78) = {}GiB\nmodel weights take 0.93GiB;\n"
    first, other = (
        rows_of(run("reconcile", "--log", log(template.format(budget)), "--gpu", "h100-80g", "--format", "json").json)
        for budget in ("62.10", "61.78")
    )
    apart = (first["kv_cache"]["predicted"] - other["kv_cache"]["predicted"]) / GIB
    assert apart == pytest.approx(0.32, abs=0.01)


def test_a_gpu_is_known_by_the_name_that_a_kernels_file_has(run: Run, log: Log) -> None:
    named = (
        "Using configuration from /x/E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json for MoE layer.\n"
    )
    document = run("reconcile", "--log", log(named + LLAMA_3090), "--format", "json").json
    assert (document["gpus"], document["total_memory"]) == (["h100-80g"], round(23.58 * GIB))


def test_a_config_stands_for_a_model_that_is_not_known(run: Run, log: Log, tmp_path: Path) -> None:
    path = log(LLAMA_3090.replace("meta-llama/Llama-3.1-8B-Instruct", "/models/our-own-finetune"))
    assert unplanned(run("reconcile", "--log", path)) == (
        "log: its model /models/our-own-finetune is not one that `kvplan models` lists; "
        "add --model NAME or --config config.json"
    )
    config = config_file(tmp_path / "model") / "config.json"
    document = run("reconcile", "--log", path, "--config", config, "--format", "json").json
    assert rows_of(document, "given")["blocks"]["exact"] is True


def test_a_log_without_a_gpu_has_a_table_of_those_that_its_pool_allows(run: Run, log: Log) -> None:
    """The 3090 of the log is among them; no GPU of 16 GiB has room for 14.99 GiB of weights beside 3.81 GiB."""
    text = LLAMA_3090.replace("total_gpu_memory=23.58GiB ", "").replace("kv_cache_size=", "the rest of the memory is ")
    path = log(text.replace("3.81GiB", "Available KV cache memory: 3.81 GiB"))
    lines = run("reconcile", "--log", path).out.splitlines()
    assert lines[0].startswith("KV cache of 3.81 GiB is in the range of ")
    start = next(index for index, text in enumerate(lines) if text.endswith("GPUs allow the logged KV cache:"))
    assert any(text.startswith("rtx-3090 ") for text in lines[start:])
    document = run("reconcile", "--log", path, "--format", "json").json
    allowed = {row["gpu"]: rows_of(row, "rows") for row in document["allowed"]}
    assert "rtx-4080" not in allowed
    assert allowed["rtx-3090"]["kv_cache"]["logged"] == round(3.81 * GIB)
    assert run("reconcile", "--log", log(LLAMA_3090), "--format", "json").json["allowed"] == []


def test_a_path_of_the_servers_machine_is_a_name_and_is_never_opened(run: Run, log: Log, tmp_path: Path) -> None:
    model_and_note = model_of(
        parse_log("vLLM API server version 0.9\nargs: Namespace(model='/models/Meta-Llama-3-8B', n=1)")
    )
    assert model_and_note[0] == "llama-3-8b"
    assert (
        model_and_note[1]
        == "the log's model /models/Meta-Llama-3-8B is taken as meta-llama/Meta-Llama-3-8B, by its name"
    )
    assert model_of(parse_log("non-default args: {'model': '/models/Llama-3.1-8B-Instruct/'}"))[1] == (
        "the log's model /models/Llama-3.1-8B-Instruct/ is taken as meta-llama/Llama-3.1-8B, by its name"
    )
    assert model_of(parse_log(r"non-default args: {'model': 'D:\\models\\qwen3-8b'}"))[0] == "qwen3-8b"
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64d72725edaf899c6cb9c377fd0709d9c5"
    assert model_of(parse_log(f"non-default args: {{'model': '{cached}'}}"))[0] == "qwen3-8b"
    here = config_file(tmp_path / "unknown-model")
    path = log(LLAMA_3090.replace("meta-llama/Llama-3.1-8B-Instruct", str(here)))
    assert "is not one that `kvplan models` lists" in unplanned(run("reconcile", "--log", path))
    folder = "/mnt/models/qwen/Qwen2___5-7B-Instruct"  # as ModelScope writes a dot
    assert model_of(parse_log(f"non-default args: {{'model': '{folder}'}}"))[0] == "qwen2.5-7b-instruct"
    mounted = "/kaggle/input/models/qwen-lm/qwen-3/transformers/8b/1"  # family, framework, variation, version
    assert model_of(parse_log(f"non-default args: {{'model': '{mounted}'}}"))[0] == "qwen3-8b"
    assert catalog.same_names("no-such-model") == ()


# --- a log and a command line that do not agree -----------------------------------------------------------------------

NO_TOTAL = without(H100, "Free memory")


@pytest.mark.parametrize(
    ("text", "argv", "fault"),
    [
        (H100, ("--gpu", "rtx-4090"), "--gpu rtx-4090 has 24.00 GiB at most, but the log says a GPU of 79.19 GiB"),
        (H100, ("--gpu-memory", "40GiB"), "--gpu-memory 40GiB has 40.00 GiB at most, but the log says a GPU of 79.19"),
        (
            NO_TOTAL, ("--gpu", "l40s"),
            "--gpu l40s has 48.00 GiB at most, but the log says 14.99 GiB of weights and 50.00 GiB of KV cache",
        ),
        (SGLANG, ("--gpu", "h100"), "--gpu h100-80g has 80.00 GiB at most, but the log says 139.21 GiB free"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_have_been_it_is_refused(
    run: Run, log: Log, text: str, argv: tuple[str, ...], fault: str
) -> None:
    message = refused(run("reconcile", "--log", log(text), *argv))
    assert message.startswith(fault)
    assert message.endswith(f"; name the GPU that it ran on, or remove {argv[0]}")


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
        (("--tp", "4"), "--tensor-parallel-size 4 is used, although the log says tensor_parallel_size=1"),
        (("--ctx", "4k"), "--ctx 4096 is used, although the log says max_model_len=8192"),
        (("--engine-arg", "tensor_parallel_size=2"), "--tensor-parallel-size 2 is used, although the log says"),
        (
            ("--from-command", "vllm serve llama-3.1-8b -tp 2"),
            "--tensor-parallel-size 2 is used, although the log says",
        ),
        (("--gpu-memory-utilization", "0.8"), "--gpu-memory-utilization 0.8 is used, although the log says"),
        (("--engine", "vllm@0.8"), "--engine vllm@0.8 is used, although the log says version 0.10.1"),
        (("--model", "qwen2.5-7b"), "--model qwen2.5-7b is used, although the log says llama-3.1-8b"),
    ],
)
def test_what_is_said_wins_over_the_log_with_a_note(run: Run, log: Log, argv: tuple[str, ...], note: str) -> None:
    ran = run("reconcile", "--log", log(H100), "--gpu", "h100-80g", *argv)
    assert ran.code == 0
    (note_line,) = (line for line in ran.err.splitlines() if "is used, although the log says" in line)
    assert note_line.startswith(f"kvplan: note: {note}")


def test_what_is_said_as_the_log_says_it_needs_no_note(run: Run, log: Log) -> None:
    same = (
        "--tp", "1", "--ctx", "8k", "--engine", "vllm@0.10.1", "--model", "meta-llama/Llama-3.1-8B",
        "--gpu-memory-utilization", "0.9", "--no-enforce-eager",
    )  # fmt: skip
    assert "is taken" not in run("reconcile", "--log", log(H100), "--gpu", "h100-80g", *same).err
    assert "is taken" not in run("reconcile", "--log", log(H100), "--gpu", "h100-80g", "--ctx", "auto").err


def test_a_flag_of_sglangs_is_named_as_sglang_does(run: Run, log: Log) -> None:
    ran = run("reconcile", "--log", log(SGLANG), "--tp", "2")
    assert "--tensor-parallel-size 2 is used, although the log says tp_size=1" in ran.err


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("'max_num_seqs': -5", "log: max_num_seqs=-5 must be at least 1 ('-5'); set it with --max-num-seqs"),
        (
            "'kv_cache_dtype': 'fp7'",
            "log: kv_cache_dtype=fp7 is unknown to kvplan; set it with --kv-cache-dtype",
        ),
        (
            "'tensor_parallel_size': 3",
            "log: tensor_parallel_size=3 does not divide the 32 attention heads of llama-3.1-8b; "
            "set it with --tensor-parallel-size",
        ),
        ("'max_model_len': 0", "log: max_model_len=0 must be at least 1 ('0'); set it with --ctx"),
    ],
)
def test_an_error_of_the_logs_settings_names_them(run: Run, log: Log, settings: str, fault: str) -> None:
    text = f"vLLM API server version 0.10.0\nnon-default args: {{'model': 'llama-3.1-8b', {settings}}}\n"
    assert unplanned(run("reconcile", "--log", log(text))) == fault


def test_a_release_that_is_not_known_is_judged_as_the_nearest_or_named(run: Run, log: Log) -> None:
    newer = run("reconcile", "--log", log(H100.replace("0.10.1", "0.40.2")), "--format", "json")
    assert newer.json["engine"] == "vllm@0.33"
    assert "version 0.40.2 is newer than the releases that kvplan knows: judged as 0.33" in newer.err
    older = H100.replace("version 0.10.1", "version 0.4.2")
    assert unplanned(run("reconcile", "--log", log(older))) == (
        "log: version 0.4.2: kvplan supports vLLM 0.6 to 0.33; set it with --engine vllm@0.33"
    )
    assert refused(run("reconcile", "--log", log(H100), "--engine", "vllm@0.40")).startswith("--engine vllm@0.40: ")
    assert refused(run("reconcile", "--log", log(H100), "--tp", "3")).startswith("--tp 3 does")


# --- bounds and refusals ----------------------------------------------------------------------------------------------


def test_a_row_beyond_the_limit_is_exit_1(run: Run, log: Log) -> None:
    path = log(LLAMA_3090)
    ran = run("reconcile", "--log", path, "--max-error", "2%")
    assert ran.code == 1
    assert "kvplan: error: reconcile: off by more than 2%: " in ran.err
    assert "weights" not in ran.errors[0]
    assert run("reconcile", "--log", path, "--max-error", "100%").code == 0


ZERO = LLAMA_3090.replace("blocks: 1952,", "blocks: 0,").replace("1.56x", "0.00x")
WHERE = ("--gpu", "rtx-3090")


def test_a_logged_zero_is_compared_and_breaks_any_limit(run: Run, log: Log) -> None:
    ran = run("reconcile", "--log", log(ZERO), *WHERE, "--max-error", "99%")
    assert ran.code == 1
    assert re.search(r"\bblocks \d,\d{3}\w* .*, measured none", ran.err)


def test_a_limit_without_a_figure_to_compare_is_refused(run: Run, log: Log) -> None:
    only_arguments = "".join(LLAMA_3090.splitlines(keepends=True)[:2])
    assert "contains no figure to compare" in refused(
        run("reconcile", "--log", log(only_arguments), *WHERE, "--max-error", "1%")
    )
    assert run("reconcile", "--log", log(only_arguments), *WHERE).code == 0


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        ((), "RUN_DIR: missing; give one of RUN_DIR, --log FILE, --metrics URL and --bench FILE"),
        (("somewhere", "--log", "x"), "RUN_DIR and --log cannot be combined"),
        (("--log", "x", "--metrics", "y"), "--log and --metrics cannot be combined"),
        (("--log", "x", "--calibrate", "c.json"), "--calibrate needs a run"),
        (("somewhere", "--gpu", "h200"), "--gpu: a run records its own arguments"),
        (("somewhere", "--model", "llama-3.1-8b"), "--model: a run records"),
        (("--log", "/no/such.log"), "/no/such.log: no such file or directory"),
        (("--log", str(ROOT)), "is a directory"),
        (("--metrics", "/no/such.txt"), "/no/such.txt: no such file or directory"),
        (("--metrics", "file:///etc/passwd"), "not an http or https URL"),
        (("--metrics", "ftp://host/metrics"), "not an http or https URL"),
        (("--metrics", "http://user:secret@host/metrics"), "a URL must not contain a password"),
    ],
)
def test_bad_usage_is_one_line(run: Run, argv: tuple[str, ...], fault: str) -> None:
    text = refused(run("reconcile", *argv))
    assert fault in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hello\n", "holds no line that vLLM, SGLang, llama.cpp or kvplan's engine writes at start-up"),
    ],
)
def test_a_file_that_is_no_log_is_refused_in_one_line(run: Run, log: Log, text: str, fault: str) -> None:
    assert fault in refused(run("reconcile", "--log", log(text)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Model loading took 1 GiB and\n", "does not say which model it served"),
        ("vLLM API server version 0.9.0\nargs: Namespace(model='llama-3.1-8b', max_num_seqs=-5)\n", "--max-num-seqs"),
        (
            "vLLM API server version 0.9.0\nargs: Namespace(model='llama-3.1-8b', enforce_eager=2)\n",
            "neither True nor False",
        ),
        ("vLLM API server version 0.9.0\nargs: Namespace(model='\x1b[31m\u202eevil')\n", "is not one that"),
    ],
)
def test_what_a_plan_cannot_be_made_of_leaves_the_figures(run: Run, log: Log, text: str, fault: str) -> None:
    path = log(text)
    assert fault in unplanned(run("reconcile", "--log", path))
    assert fault in refused(run("reconcile", "--log", path, "--max-error", "5%"))


DATED = """\
INFO [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}
INFO non-default args: {{'model': 'llama-3.1-8b', 'max_model_len': 8192}}
INFO Model loading took 14.99 GiB memory and 3 s
INFO Estimated CUDA graph memory: 0.55 GiB total
INFO In v0.19, CUDA graph memory profiling will be enabled by default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1).
INFO Available KV cache memory: 50.00 GiB
INFO GPU KV cache size: 409,600 tokens
"""


@pytest.mark.parametrize(
    ("text", "engine", "note"),
    [
        # vLLM 0.18 and 0.19 say that the estimate "will be" the default, which it is from 0.20 on.
        (DATED, "vllm@0.19", "version 0.1.dev15917+g0a6396b45 names no release: judged as 0.19, the last one that"),
        (without(DATED, "In v0.19"), "vllm@0.33", "names no release: judged as 0.33, the last one that writes its"),
        (without(H100, "version"), "vllm@0.33", "the log does not say its release: judged as 0.33"),
    ],
)
def test_a_build_without_a_release_is_dated_by_its_messages(
    run: Run, log: Log, text: str, engine: str, note: str
) -> None:
    path = log(text.format(version="0.1.dev15917+g0a6396b45") if "{version}" in text else text)
    ran = run("reconcile", "--log", path, "--format", "json")
    assert ran.json["engine"] == engine
    assert note in ran.err
    stated = run("reconcile", "--log", path, "--engine", "vllm@0.20", "--format", "json")
    assert "judged as" not in stated.err
    assert "is used, although" not in stated.err


VLLM_FLAGS = ("--model", "llama-3-8b", "--engine", "vllm@0.9")


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_log_says_the_answer_is_rows_or_a_refusal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: st.DataObject
) -> None:
    """Figures and flags of a real log, changed: exit code 0, 1, 2 or 3, never a crash."""
    text, flags = data.draw(
        st.sampled_from(
            [
                *((text, VLLM_FLAGS) for text in (LLAMA_3090, SGLANG, EXAMPLE.read_text(encoding="utf-8"))),
                *((text, flags) for text in (SGLANG, OSS, NEXT) for flags in ((), ("--gpu", "h200"))),
                (pipeline(PP0_TP0="17.90", PP1_TP0="16.92"), ()),
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
    output = capsys.readouterr()
    assert code in (0, 2, 3), output.err
    if code == 0:
        json.loads(output.out)


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
        [sys.executable, "-c", LIGHT, str(EXAMPLE), *heavy], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; loaded:"], done.stderr


def test_the_gpus_that_stand_for_an_unknown_one_differ() -> None:
    from kvplan.asked.form import COMMON_GPUS

    assert len({gpu(name).sm for name in COMMON_GPUS}) >= 4


@pytest.mark.parametrize(("version", "tokens"), [("0.20.0", 177_440), ("0.20.1", int(35.75 * 8192))])
def test_a_log_s_patch_decides_where_a_later_one_changed_a_figure(
    run: Run, log: Log, version: str, tokens: int
) -> None:
    """gemma-4-26b-a4b on a DGX Spark, 0.20.0 (jethac/dgx-spark-hijinks): 177,440 tokens, 35.75 requests of 8,192.

    0.20.1 says requests x context of the same pool: vllm-project/vllm#40691.
    """
    arguments = "{'model': 'google/gemma-4-26B-A4B-it', 'max_model_len': 8192, 'max_num_batched_tokens': 4096}"
    text = (
        f"INFO 06-07 13:19:24 [api_server.py:1] vLLM API server version {version}\n"
        f"INFO 06-07 13:19:24 [utils.py:233] non-default args: {arguments}\n"
        "INFO 06-07 13:28:13 [gpu_worker.py:440] Available KV cache memory: 40.61 GiB\n"
        f"INFO 06-07 13:28:13 [kv_cache_utils.py:1711] GPU KV cache size: {tokens:,} tokens\n"
        "INFO 06-07 13:28:13 [kv_cache_utils.py:1716] Maximum concurrency for 8,192 tokens per request: 35.75x\n"
    )
    ran = run("reconcile", "--log", log(text), "--gpu", "gb10")
    [of_pool] = [row for row in ran.out.partition("Given the logged pool")[2].splitlines() if row.startswith("tokens")]
    assert f"{tokens:,}  as logged" in of_pool


@pytest.mark.parametrize(
    ("version", "engine", "note"),
    [
        (
            "0.19.1rc1.dev329+gc0ba4f5ba",
            "vllm@0.19",
            "after 0.19.0, judged as 0.19: it may already behave as 0.20 does",
        ),
        ("0.8.0rc3.dev5+g5eeabc2a.d20250318", "vllm@0.8", "before 0.8.0, judged as 0.8: it may still behave as 0.7"),
        ("0.9.1", "vllm@0.9.1", None),
        ("0.11.0rc1", "vllm@0.11", None),
    ],
)
def test_a_build_between_two_releases_is_judged_by_its_number_and_said(
    run: Run, log: Log, version: str, engine: str, note: str | None
) -> None:
    """329 commits after the tag before 0.19.1rc1, which stands on the way from 0.19.0 to 0.20.0."""
    lines = H100.replace(version_in(H100), version)
    ran = run("reconcile", "--log", log(lines), "--gpu", "h100-80g", "--format", "json")
    assert ran.json["engine"] == engine
    assert (note in ran.err) if note else ("development build" not in ran.err)


def version_in(text: str) -> str:
    match = re.search(r"version ([0-9][\w.+]*)|\(v([0-9][\w.+]*)\)", text)
    assert match is not None
    return match[1] or match[2]


def test_amd_gpus_logged_what_the_device_lost(run: Run, log: Log) -> None:
    """vLLM 0.9.2 and 0.20 platforms/rocm.py: total less free memory; from 0.21 what torch allocated, as elsewhere."""
    text = (
        "INFO vLLM API server version {}\nModel loading took 15.50 GiB and 5 seconds\n"
        "Available KV cache memory: 150.0 GiB\n"
    )
    words = ("--model", "llama-3.1-8b", "--gpu", "mi300x", "--format", "json")
    whys = [
        rows_of(run("reconcile", "--log", log(text.format(release)), *words).json)["weights"]["why"]
        for release in ("0.20.0", "0.21.0")
    ]
    assert "logs what the device lost" in (whys[0] or "")
    assert "logs what the device lost" not in (whys[1] or "")
