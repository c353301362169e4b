"""The command line: answers, exit codes one by one, streams, formats, report files, completion."""

import errno
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from kvplan.asked.form import COMMON_GPUS
from kvplan.cli import app, output
from kvplan.cli import estimate as estimating
from kvplan.report.lines import line, write
from tests.support.cli import Run, config_file, refused
from tests.support.cli import run as run  # the fixture
from tests.support.parts import paired

ROOT = Path(__file__).resolve().parents[2]
FIT = ("estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "a100-80g")
NO_FIT = ("estimate", "llama-3.1-70b", "--ctx", "32k", "--gpu", "a100-80g")


def process(*argv: str, **environment: str) -> subprocess.Popen[bytes]:
    """kvplan in a process of its own."""
    code = "import sys; sys.argv[0] = 'kvplan'; from kvplan.cli.main import run; run()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(running: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = running.communicate(timeout=900)
    return running.returncode, out, err


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "encoding"), paired(["json", "junit", "sarif", "markdown", "github"], ["latin-1", "ascii", "utf-8"])
)
def test_machine_formats_are_utf_8_whatever_the_locale(tmp_path: Path, form: str, encoding: str) -> None:
    """A model that does not fit, waived for a reason that no ASCII has and only some of which Latin-1 has."""
    reason = "Größe geprüft — 東京"
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\ntargets:\n- {id: t, model: llama-3.1-70b, gpu: l4, max_model_len: 8k, rules: {fits: true}}\n"
        f"waivers:\n- {{rule: t/fits, reason: {reason}, expires: 2027-01-01}}\n",
        encoding="utf-8",
    )
    day = ("--today", "2026-12-31")
    running = process("check", str(path), "--format", form, *day, PYTHONUTF8="0", PYTHONIOENCODING=encoding)
    code, out, err = finish(running)
    assert (code, err) == (0, b"")
    text = out.decode("utf-8")
    if form == "junit":
        root = ElementTree.fromstring(out)  # by its own header
        text = " ".join(root.itertext())
    if form in ("json", "sarif"):
        text = json.dumps(json.loads(text), ensure_ascii=False)
    assert reason in text


def test_a_stream_of_rows_is_utf_8_too(tmp_path: Path) -> None:
    config_file(tmp_path / "größe")
    words = ("sweep", str(tmp_path / "größe"), "--gpu", "l40s", "--ctx", "8k", "--format", "csv")
    code, out, err = finish(process(*words, PYTHONUTF8="0", PYTHONIOENCODING="latin-1", LC_ALL="C.UTF-8"))
    assert code == 0, err
    assert "größe" in out.decode("utf-8")


def test_a_terminal_gets_its_own_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal(raw, encoding="latin-1"))
    output.write("Größe")
    assert raw.getvalue() == "Größe\n".encode("latin-1")


def test_a_stream_without_bytes_and_what_was_printed_before_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    text, raw = io.StringIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", text)
    output.write("a")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    sys.stdout.write("before\n")
    output.write("é")
    assert (text.getvalue(), raw.getvalue()) == ("a\n", "before\né\n".encode())


def test_the_first_question_is_answered(run: Run) -> None:
    ran = run(*FIT)
    assert (ran.code, ran.err) == (0, "")
    assert "128 KiB" in ran.out  # 32 layers x 2 x 8 heads x 128 x 2 bytes
    assert "4 GiB at 32,768 tokens" in ran.out
    assert "vllm serve meta-llama/Llama-3.1-8B --max-model-len 32768" in ran.out


def test_the_first_question_as_json_has_what_the_issue_promises(run: Run) -> None:
    doc = run(*FIT, "--format", "json").json
    memory = doc["memory"]
    rows = ("weights", "buffers", "activations", "cuda_graphs", "non_torch", "lora", "kv_cache", "unused")
    assert sum(memory[row] for row in rows) == memory["total"]
    assert memory["kv_cache"] == doc["kv"]["num_blocks"] * doc["kv"]["bytes_per_block"]
    assert 54 * 2**30 <= memory["kv_cache"] <= 57.5 * 2**30  # what servers logged for this model and GPU
    assert 13.5 <= doc["concurrency"]["max"] <= 14.4
    assert doc["concurrency"]["users"] == int(doc["concurrency"]["max"])
    assert doc["parameters"]["total"] == 8_030_261_248  # as transformers counts them


def test_what_does_not_fit_is_an_answer_with_a_cure(run: Run) -> None:
    ran = run(*NO_FIT)
    assert ran.code == 0
    assert "does not fit" in ran.out
    assert "--tensor-parallel-size 2" in ran.out


def test_several_contexts_make_a_table(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--ctx", "4k,16k,32k,64k", "--gpu", "a100-80g")
    sizes = re.findall(r"^ *([\d,]+) +(\d+ [GM]iB) ", ran.out, re.MULTILINE)
    assert sizes == [("4,096", "512 MiB"), ("16,384", "2 GiB"), ("32,768", "4 GiB"), ("65,536", "8 GiB")]


def test_several_contexts_as_json_are_several_plans(run: Run) -> None:
    doc = run("estimate", "llama-3.1-8b", "--ctx", "4k,auto", "--gpu", "l4", "--format", "json").json
    short, auto = doc["plans"]
    assert short["kv"]["bytes_per_request"] == 512 * 2**20
    assert auto["inputs"]["settings"]["auto_fit"]
    assert auto["concurrency"]["users"] == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--ctx", "4k,16k"),  # no GPU: the six
        ("--ctx", "4k,16k", "--gpu", ",".join(COMMON_GPUS)),
        ("--ctx", "4k", "--ctx", "16k", *(word for name in COMMON_GPUS for word in ("--gpu", name))),
    ],
)
def test_several_contexts_on_several_gpus_are_a_table_for_each_context(run: Run, flags: tuple[str, ...]) -> None:
    ran = run("estimate", "llama-3.1-8b", *flags)
    assert (ran.code, ran.err) == (0, "")
    short, long = ran.out.split("llama-3.1-8b at ")[1:]
    assert short.startswith("4,096 tokens")
    assert long.startswith("16,384 tokens")
    assert all(f"\n{name} " in part for name in COMMON_GPUS for part in (short, long))
    plans = run("estimate", "llama-3.1-8b", *flags, "--format", "json").json["plans"]
    answered = [(plan["kv"]["max_model_len"], plan["inputs"]["gpu"]["name"]) for plan in plans]
    assert answered == [(context, name) for context in (4096, 16384) for name in COMMON_GPUS]


def test_a_context_that_no_gpu_can_serve_is_one_line_among_the_tables(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--ctx", "4k,200k")
    assert ran.out.count("supports up to 131,072 tokens") == 1
    assert "llama-3.1-8b at 4,096 tokens" in ran.out


def test_no_gpu_gives_a_table_over_six(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--ctx", "32k")
    assert len(COMMON_GPUS) == 6
    assert all(f"\n{name} " in ran.out for name in COMMON_GPUS)


def test_a_gpu_that_refuses_a_setting_stays_in_the_table(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--ctx", "32k", "--tp", "3")  # 32 heads over 3
    assert "does not divide the 32 attention heads" in refused(ran)


def test_no_context_is_the_models_maximum_and_says_so(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--gpu", "h200")
    assert "kvplan: note: no --ctx: using the model's maximum of 131,072 tokens; add --ctx 32k for less" in ran.err
    assert "131,072 tokens" in ran.out
    short = run("estimate", "gemma-2-9b", "--gpu", "h200")
    assert "using the model's maximum of 8,192 tokens\n" in short.err  # 32k would be more


@pytest.mark.parametrize("context", ["auto", "-1"])
def test_the_context_is_fitted(run: Run, context: str) -> None:
    doc = run("estimate", "llama-3.1-8b", "--ctx", context, "--gpu", "l4", "--format", "json").json
    assert 2048 < doc["kv"]["max_model_len"] < 131_072
    assert doc["fits"]


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (("--tp", "2"), "tensor_parallel_size", 2),
        (("--tensor-parallel-size", "2"), "tensor_parallel_size", 2),
        (("--pp", "2"), "pipeline_parallel_size", 2),
        (("--dp", "2"), "data_parallel_size", 2),
        (("--enforce-eager", "--performance-mode", "throughput"), "performance_mode", "throughput"),
        (("-tp", "2"), "tensor_parallel_size", 2),
        (("-pp", "2", "-q"), "pipeline_parallel_size", 2),
        (("--tp", "16", "--dcp", "2"), "decode_context_parallel_size", 2),
        (("--dtype", "float16"), "dtype", "float16"),
        (("--quantization", "fp8"), "quantization", "fp8"),
        (("--kv-cache-dtype", "fp8"), "kv_cache_dtype", "fp8"),
        (("--block-size", "32"), "block_size", 32),
        (("--gpu-memory-utilization", "85%"), "gpu_memory_utilization", 0.85),
        (("--kv-cache-memory-bytes", "20GiB"), "kv_cache_memory_bytes", 20 * 2**30),
        (("--kv-cache-memory-bytes", "20G"), "kv_cache_memory_bytes", 20 * 2**30),  # as in vLLM
        (("--kv-cache-memory-bytes", "20g"), "kv_cache_memory_bytes", 20 * 10**9),
        (("--num-gpu-blocks-override", "5000"), "num_gpu_blocks_override", 5000),
        (("--max-num-seqs", "64"), "max_num_seqs", 64),
        (("--batch", "64"), "max_num_seqs", 64),
        (("--max-num-batched-tokens", "4k"), "max_num_batched_tokens", 4096),
        (("--no-enable-prefix-caching",), "enable_prefix_caching", False),
        (("--no-enable-chunked-prefill",), "enable_chunked_prefill", False),
        (("--disable-hybrid-kv-cache-manager",), "disable_hybrid_kv_cache_manager", True),
        (("--no-async-scheduling",), "async_scheduling", False),
        (("--enforce-eager",), "enforce_eager", True),
        (("--mamba-ssm-cache-dtype", "float32"), "mamba_ssm_cache_dtype", "float32"),
        (("--enable-lora",), "max_loras", 1),
        (("--max-loras", "4", "--max-lora-rank", "64"), "max_lora_rank", 64),
        (("--max-loras", "2", "--fully-sharded-loras"), "fully_sharded_loras", True),
        (("--kv-offloading-size", "32"), "kv_offloading_size", 32 * 2**30),
        (("--usage", "offline"), "usage", "offline"),
        (("--engine-arg", "block_size=32"), "block_size", 32),
        (("--engine-arg", "enable-lora=true"), "max_loras", 1),
        (("--engine-arg", "block_size=32", "--block-size", "32"), "block_size", 32),
        (("--engine-arg", "max_model_len=8k"), "max_model_len", 8192),
    ],
)
def test_every_engine_argument_reaches_the_plan(run: Run, flags: tuple[str, ...], field: str, value: Any) -> None:
    ran = run("estimate", "llama-3.1-8b", "--ctx", "8k", "--gpu", "h100-80g", "--format", "json", *flags)
    assert ran.json["inputs"]["args"][field] == value


def test_experts_are_spread_on_request(run: Run) -> None:
    for flag in ("--ep", "-ep", "--enable-expert-parallel"):
        ran = run("estimate", "mixtral-8x7b", "--ctx", "8k", "--gpu", "h200", "--tp", "2", flag, "--format", "json")
        assert ran.json["inputs"]["args"]["enable_expert_parallel"]


def test_a_size_in_vllms_own_writing_says_how_it_was_read(run: Run) -> None:
    ran = run(*FIT, "--kv-cache-memory-bytes", "10G")
    assert "--kv-cache-memory-bytes 10G is 10,737,418,240 bytes (binary)" in ran.err
    assert run(*FIT, "--kv-cache-memory-bytes", "10GiB").err == ""


def test_a_release_is_asked_for(run: Run) -> None:
    old = run(*FIT, "--engine", "vllm@0.11", "--format", "json").json
    assert (old["inputs"]["engine"], old["inputs"]["settings"]["gpu_memory_utilization"]) == ("vllm@0.11", 0.9)


def test_any_memory_size_is_a_gpu(run: Run) -> None:
    doc = run("estimate", "llama-3.1-8b", "--ctx", "8k", "--gpu-memory", "24GiB", "--format", "json").json
    assert doc["memory"]["total"] == 24 * 2**30
    doc = run(
        "estimate", "llama-3.1-8b", "--ctx", "8k", "--gpu", "h200", "--gpu-memory", "100GB", "--format", "json"
    ).json
    assert (doc["inputs"]["gpu"]["name"], doc["memory"]["total"]) == ("h200", 100 * 10**9)


def test_a_draft_model_weighs(run: Run) -> None:
    alone = run(*FIT, "--format", "json").json["memory"]["weights"]
    ran = run(*FIT, "--draft-model", "llama-3.2-1b", "--num-speculative-tokens", "5", "--format", "json")
    assert ran.json["memory"]["weights"] - alone >= 1_235_814_400 * 2  # Llama-3.2-1B's parameters in bf16


def test_a_workload_gives_more_users_than_the_full_context(run: Run) -> None:
    doc = run(*FIT, "--mean-tokens", "2k", "--format", "json").json
    assert doc["concurrency"]["users"] > 10 * int(doc["concurrency"]["max"])
    split = run(*FIT, "--prompt-tokens", "1536", "--output-tokens", "1k", "--format", "json").json
    assert split["concurrency"]["users"] == doc["concurrency"]["users"]  # 1536 + 1024 / 2
    lengths = run(*FIT, "--lengths", "const:2048", "--overflow", "1%", "--format", "json").json
    assert lengths["concurrency"]["users"] == doc["concurrency"]["users"]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--mean-tokens", "2k", "--prompt-tokens", "1k", "--output-tokens", "1k"), "conflicts with"),
        (("--prompt-tokens", "1k"), "must be used together"),
        (("--overflow", "1%"), "applies only to --lengths"),
        (("--lengths", "normal:1"), "--lengths"),
        (("--mean-tokens", "64k"), "beyond the context"),
        (("--no-enable-lora", "--max-loras", "2"), "contradicts"),
        (("--max-lora-rank", "7"), "not one of 1, 8, 16"),
        (("--tp", "0"), "--tp must be at least 1"),
        (("--tp", "8192"), "must be at most 1,024"),
        (("--engine", "tgi"), "is not a supported server"),
        (("--engine", "vllm@0.99"), "kvplan supports vLLM"),
        (("--engine-arg", "blok_size=1"), "did you mean block_size"),
        (("--kv-cache-dtype", "fp7"), "--kv-cache-dtype"),
        (("--weights-bytes", "many"), "--weights-bytes: not a size"),
        (("--gpu-memory", "80"), "--gpu-memory"),
        (("--weights-bytes", "16"), "--weights-bytes is implausibly small (16 bytes)"),
        (("--weights-bytes", "1"), "--weights-bytes is implausibly small (1 byte)"),
        (("--kv-cache-memory-bytes", "16"), "--kv-cache-memory-bytes is implausibly small (16 bytes)"),
        (("--gpu", ""), "--gpu contains an empty name"),
        (("--gpu", "h100,,a100"), "--gpu contains an empty name"),
        (("--engine-arg", "max_model_len=4096"), "--ctx 32k and --engine-arg max_model_len=4096: contradict"),
        (("--engine-arg", "block_size=32", "--block-size", "64"), "contradict each other"),
        (("--engine-arg", "block_size=32", "--engine-arg", "block_size=64"), "is given twice, 32 and 64"),
        (("--max-num-seqs", "9000", "--max-num-batched-tokens", "8192"), "9,000"),  # vLLM refuses it, too
    ],
)
def test_flags_that_make_no_sense_are_refused(run: Run, flags: tuple[str, ...], fault: str) -> None:
    assert fault in refused(run(*FIT, *flags))


def test_a_model_keeps_the_id_it_was_asked_for_by(run: Run) -> None:
    doc = run("estimate", "meta-llama/llama-3.1-8b-instruct", "--ctx", "4k", "--gpu", "h200", "--format", "json").json
    assert doc["inputs"]["model"]["name"] == "meta-llama/Llama-3.1-8B-Instruct"


# --- a pasted command -------------------------------------------------------------------------------------------------


def test_a_pasted_command_is_read_as_vllm_reads_it(run: Run) -> None:
    command = "CUDA_VISIBLE_DEVICES=0,1 vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 32k -tp 2 --port 80"
    ran = run("estimate", "--from-command", command, "--gpu", "a100-80g", "--format", "json")
    assert ran.json["kv"]["max_model_len"] == 32_000
    assert ran.json["inputs"]["args"]["tensor_parallel_size"] == 2
    assert "kvplan: note: --from-command --max-model-len 32k is 32,000" in ran.err
    assert "kvplan: hint: " in ran.err
    assert "--port" in ran.err


def test_flags_beside_a_pasted_command_win(run: Run) -> None:
    command = "docker run --gpus all vllm/vllm-openai:v0.11.0 --model some/where --max-model-len 32k -tp 2"
    ran = run("estimate", "llama-3.1-8b", "--from-command", command, "--gpu", "h200", "--ctx", "16k", "--tp", "1",
              "--format", "json")  # fmt: skip
    inputs = ran.json["inputs"]
    assert inputs["model"]["name"] == "llama-3.1-8b"
    assert inputs["engine"] == "vllm@0.11"
    assert inputs["args"]["tensor_parallel_size"] == 1
    assert ran.json["kv"]["max_model_len"] == 16_384


def test_a_flag_that_stands_in_no_list_is_not_called_harmless(run: Run) -> None:
    ran = run("estimate", "--from-command", "vllm serve llama-3.1-8b --made-up 3 --port 80", "--gpu", "h200")
    assert "kvplan: warning: --from-command: unknown to kvplan and ignored: --made-up" in ran.err
    assert "kvplan: hint: --from-command: no known effect on GPU memory: --port\n" in ran.err


def test_a_pasted_command_without_cuda_graphs_keeps_no_memory_for_them(run: Run) -> None:
    for flags in ("-O0", "--enforce-eager"):
        command = f"vllm serve llama-3.1-8b --max-model-len 8192 {flags}"
        ran = run("estimate", "--from-command", command, "--gpu", "h200", "--format", "json")
        assert ran.json["memory"]["cuda_graphs"] == 0


def test_a_pasted_secret_is_not_printed(run: Run) -> None:
    command = (
        "docker run -e HF_TOKEN=hf_secret vllm/vllm-openai --model llama-3.1-8b --api-key sk-secret --ssl-foo sk-secret"
    )
    ran = run("estimate", "--from-command", command, "--gpu", "h200", "--ctx", "8k")
    assert ran.code == 0
    assert "secret" not in ran.out + ran.err


# --- exit codes, one by one -------------------------------------------------------------------------------------------


def test_code_0_when_done_even_if_it_does_not_fit(run: Run) -> None:
    assert run(*NO_FIT).code == 0


def test_code_1_only_on_request_and_only_when_it_does_not_fit(run: Run) -> None:
    assert run(*NO_FIT, "--exit-code").code == 1
    assert run(*FIT, "--exit-code").code == 0
    assert run("estimate", "llama-3.1-405b", "--ctx", "32k", "--exit-code").code == 1  # on none of the six GPUs


def test_code_1_where_any_estimate_shown_does_not_fit(run: Run) -> None:
    assert run("estimate", "llama-3.1-8b", "--ctx", "4k,16k", "--exit-code").code == 0  # 16 GB of weights on six GPUs
    assert run("estimate", "llama-3.1-70b", "--ctx", "32k", "--exit-code").code == 1  # 141 GB: on some only
    assert (
        run("estimate", "llama-3.1-8b", "--gpu", "rtx-4090", "--ctx", "4k,128k", "--exit-code").code == 1
    )  # 16 GiB of KV
    assert run("estimate", "llama-3.1-8b", "--ctx", "4k,200k", "--exit-code").code == 1  # refused is no fit


def test_code_1_begins_one_block_below_what_is_needed(run: Run) -> None:
    # 4k of Llama-3.1-8B is 256 blocks of 2 MiB; vLLM keeps one more back.
    needed = 257 * 2 * 2**20
    words = ("estimate", "llama-3.1-8b", "--ctx", "4k", "--gpu", "h100-80g", "--exit-code", "--kv-cache-memory-bytes")
    assert run(*words, str(needed)).code == 0
    assert run(*words, str(needed - 1)).code == 1


def test_code_2_for_bad_usage(run: Run) -> None:
    assert refused(run("estimate", "llama-3.1-8b", "--ctx", "32kb")).startswith("--ctx: not a token count ('32kb')")


def test_code_3_for_trouble_outside(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refused(run("estimate", "nobody/no-such-model", "--offline"), 3)


def test_code_70_for_a_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: object) -> None:
        raise ZeroDivisionError("planted\nin two lines")

    monkeypatch.setattr(estimating, "plan_tables", planted)
    line = refused(run(*FIT), 70)
    assert line.startswith("internal error: ZeroDivisionError: planted")
    log = Path(line.rpartition(" ")[2])
    assert "ZeroDivisionError: planted" in log.read_text(encoding="utf-8")
    assert "Traceback" in log.read_text(encoding="utf-8")
    log.unlink()


def test_a_traceback_is_printed_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLAN_DEBUG", "1")
    ran = run("estimate", "no-such-model")
    assert ran.code == 2
    assert "Traceback (most recent call last)" in ran.err


def test_code_130_for_an_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(estimating, "plan_tables", interrupt)
    ran = run(*FIT, "--report", tmp_path / "a.json")
    assert (ran.code, ran.out, ran.err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a FIFO to wait on")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_code_143_for_a_termination_and_no_temporary_file_is_left(tmp_path: Path, sent: int, code: int) -> None:
    # A long distribution of lengths, so that there is time to stop it.
    running = process(*FIT, "--lengths", "uniform:1-32k", "--overflow", "0.0001%", "--report", str(tmp_path / "a.json"))
    deadline = time.monotonic() + 900
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.002)
    running.send_signal(sent)
    returncode, _, _ = finish(running)
    left = [path.name for path in tmp_path.iterdir()]
    assert (returncode, left) in ((code, []), (0, ["a.json"]))  # or it was done before the signal came


def test_an_interrupt_while_the_commands_are_loaded_is_code_130_and_no_word() -> None:
    # As if Ctrl-C came in the middle of `import typer`.
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == "typer":
            raise KeyboardInterrupt
from kvplan.cli.main import run
assert "typer" not in sys.modules, "the entry point must stay light"
sys.meta_path.insert(0, Interrupt())
run()
"""
    done = subprocess.run([sys.executable, "-c", code, "gpus"], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["json", "csv", "markdown"])
def test_standard_output_is_the_result_alone(run: Run, format: str) -> None:
    loud = run("estimate", "llama-3.1-8b", "--gpu", "a100-80g", "--format", format)
    assert "kvplan: note:" in loud.err
    assert "kvplan:" not in loud.out
    quiet = run("estimate", "llama-3.1-8b", "--gpu", "a100-80g", "--format", format, "-q")
    assert (quiet.err, quiet.out) == ("", loud.out)


def test_a_closed_pipe_is_no_error() -> None:
    running = process("models")
    assert running.stdout is not None
    running.stdout.close()
    assert running.stderr is not None
    err = running.stderr.read()
    running.stderr.close()
    assert (running.wait(60), err) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [["gpus"], ["--help"], ["estimate", "--help"], ["--version"]], ids=" ".join)
def test_a_full_disk_behind_standard_output_is_code_3(argv: list[str]) -> None:
    code = "from kvplan.cli.main import run; run()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 3
    assert done.stderr.startswith(b"kvplan: error: standard output cannot be written")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("columns", "argv"), paired(["0", "00", ""], [("gpus", "h200"), ("models", "llama-3.1-8b")]))
def test_a_terminal_of_no_columns_gets_the_answer(argv: tuple[str, ...], columns: str) -> None:
    code, out, _ = finish(process(*argv, "--color", "always", COLUMNS=columns, TERM="xterm-256color"))
    assert code == 0
    assert argv[1].encode() in out


def test_a_setting_of_the_hub_that_is_no_number_is_the_environments_fault() -> None:
    code, out, err = finish(process("estimate", "a/b", "--gpu", "h200", "--offline", HF_HUB_ETAG_TIMEOUT="abc"))
    assert (code, out) == (3, b"")
    assert err.startswith(b"kvplan: error: huggingface_hub cannot be loaded (")


def test_an_ascii_locale_takes_every_answer() -> None:
    for argv in (FIT, (*FIT, "--explain"), ("gpus", "h200"), ("models", "llama-3.1-8b"), ("estimate", "naïve-✓")):
        code, out, err = finish(process(*argv, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0"))
        assert code == (2 if "naïve-✓" in argv else 0), err
        assert (out + err).isascii()


def test_a_pipe_gets_whole_rows_without_colors() -> None:
    code, out, _ = finish(process("models", "--family", "llama", COLUMNS="40", TERM="xterm-256color"))
    assert code == 0
    assert b"\x1b" not in out
    assert "…".encode() not in out
    assert b"codellama-13b" in out


def test_colors_are_a_choice(run: Run) -> None:
    assert "\x1b[" in run(*FIT, "--color", "always").out
    assert "\x1b[" not in run(*FIT, "--color", "never").out
    assert "\x1b[" not in run(*FIT).out


@pytest.mark.parametrize(("environment", "colors"), [("", True), ("1", False)])
def test_no_color_means_no_escapes_at_all_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, environment: str, colors: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", environment)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    write([line("bold", "bold"), line("dim", "dim")], output.console("auto"))
    assert ("\x1b" in terminal.getvalue()) == colors


def test_a_path_of_any_bytes_is_printed_escaped(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "mod\udcc3\udca9l")  # what Python makes of UTF-8 bytes in an ASCII locale
    ran = run("estimate", folder, "--ctx", "4k", "--gpu", "h200")
    assert ran.code == 0
    assert "mod\\xc3\\xa9l" in ran.out
    assert "udcc3" not in ran.out


def test_a_local_model_is_called_by_the_path_that_was_typed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    for typed in ("./m", "m", "./m/config.json", str(tmp_path / "m")):
        doc = run("estimate", typed, "--ctx", "4k", "--gpu", "h200", "--format", "json").json
        assert doc["inputs"]["model"]["name"] == typed


def test_markup_in_names_is_printed_as_it_is(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "[bold]x[")
    ran = run("estimate", folder, "--ctx", "4k", "--gpu", "h200", "--color", "always")
    assert ran.code == 0
    assert "[bold]x[" in ran.out


# --- report files -----------------------------------------------------------------------------------------------------


def test_reports_are_written_beside_the_answer(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.csv", "c.md")]
    flags = [word for path in paths for word in ("--report", str(path))]
    ran = run(*FIT, *flags)
    assert ran.code == 0
    assert paths[0].read_text(encoding="utf-8") == run(*FIT, "--format", "json").out
    assert paths[1].read_text(encoding="utf-8") == run(*FIT, "--format", "csv").out
    assert paths[2].read_text(encoding="utf-8") == run(*FIT, "--format", "markdown").out + "<!-- kvplan -->\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.csv", "c.md"]


def test_a_report_replaces_the_old_one_and_keeps_its_mode(run: Run, tmp_path: Path) -> None:
    path, old = tmp_path / "a.json", '{"schema": "kvplan/plan@1"}'
    path.write_text(old, encoding="utf-8")
    path.chmod(0o640)
    run(*FIT, "--report", path)
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "kvplan/plan@1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_disk_that_fills_leaves_the_old_report_whole(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, old = tmp_path / "a.json", '{"schema": "kvplan/plan@1"}'
    path.write_text(old, encoding="utf-8")
    monkeypatch.setattr(os, "fsync", full)
    line = refused(run(*FIT, "--report", path), 3)
    assert "No space left on device" in line
    assert [(p.name, p.read_text(encoding="utf-8")) for p in tmp_path.iterdir()] == [("a.json", old)]


# --- the other commands -----------------------------------------------------------------------------------------------


def test_the_schema_describes_the_plan(run: Run) -> None:
    jsonschema.Draft202012Validator(run("schema", "plan").json).validate(run(*FIT, "--format", "json").json)


def test_an_unknown_schema_is_refused_with_those_it_is_near_to(run: Run) -> None:
    assert "did you mean plan" in refused(run("schema", "plam"))
    assert "did you mean log-reconciliation or " in refused(run("schema", "log-reconcilation"))
    assert "use one of error, plan, plans" in refused(run("schema", "xyz"))


@pytest.mark.parametrize(
    ("command", "kind"), [("estimate", "plan"), ("recommend", "recommendation"), ("simulate", "simulation")]
)
def test_a_commands_name_stands_for_what_it_prints(run: Run, command: str, kind: str) -> None:
    schema = run("schema", command)
    assert schema.json["title"] == f"kvplan/{kind}@1"
    assert schema.out == run("schema", kind).out


def test_the_models_are_listed(run: Run) -> None:
    rows = {row["name"]: row for row in run("models", "--format", "json").json["models"]}
    assert len(rows) >= 120
    assert rows["llama-3.1-8b"]["parameters"] == 8_030_261_248
    assert rows["llama-3.1-8b"]["kv_bytes_per_token"] == 131_072
    table = run("models", "--family", "llama-3.1", "--max-params", "10B").out
    assert "llama-3.1-8b" in table
    assert "llama-3.1-70b" not in table
    assert run("models", "--family", "gpt-oss", "--format", "csv").out.count("\n") >= 3
    assert run("models", "--family", "gpt-oss", "--format", "markdown").out.startswith("**2 models**\n\n| model |")


def test_the_models_that_fit_a_gpu_are_those_whose_estimate_starts(run: Run) -> None:
    """The largest first; each fits as `estimate` says, and one that does not is left out."""
    family = ("--family", "phi-4")
    document = run("models", "--gpu", "rtx-4090", *family, "--ctx", "16k", "--format", "json").json
    fitting = {row["name"] for row in document["fitting"]}
    names = [row["name"] for row in run("models", *family, "--format", "json").json["models"]]
    assert document["of"] == len(names) > len(fitting) > 0
    for name in names:
        plan = run("estimate", name, "--gpu", "rtx-4090", "--ctx", "16k", "--format", "json").json
        assert (name in fitting) == plan["fits"]
    sizes = [row["parameters"] for row in document["fitting"]]
    assert sizes == sorted(sizes, reverse=True)


def test_models_of_a_machine_that_shares_its_memory_start_with_a_smaller_share(run: Run) -> None:
    """NVIDIA's DGX Spark pages serve gpt-oss-120b on one; vLLM's usual 0.9 of its memory is not free."""
    ran = run("models", "--gpu", "gb10", "--family", "gpt-oss")
    assert "gpt-oss-120b" in ran.out
    command = ran.out.splitlines()[-1].partition("kvplan ")[2]
    assert run(*command.split(), "--exit-code").code == 0


def test_the_answer_of_what_fits_is_its_first_line(run: Run) -> None:
    out = run("models", "--gpu", "2xl40s", "--family", "gpt-oss").out
    assert out.startswith("2 of 2 models fit on 2 x l40s at 8,192 tokens")
    assert "the largest is gpt-oss-120b" in out.splitlines()[0]
    (command,) = re.findall(r"kvplan (estimate .*)", out)
    assert run(*command.split()).code == 0


def test_models_fit_on_a_gpu_of_any_size(run: Run) -> None:
    ran = run("models", "--gpu", "a100", "--gpu-memory", "40GiB", "--family", "gpt-oss")
    assert ran.out.startswith("1 of 2 models fit")
    (command,) = re.findall(r"kvplan (estimate .*)", ran.out)
    assert "--gpu a100 --gpu-memory 40GiB" in command
    assert run(*command.split(), "--exit-code").code == 0
    assert run("models", "--gpu-memory", "40GiB", "--family", "gpt-oss").out.startswith("1 of 2 models fit")
    assert "taken as a100-80g" in run("models", "--gpu", "a100", "--family", "gpt-oss").err


def test_an_error_in_a_file_names_the_file(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve Qwen/Qwen3-8B --tensor-paralel-size 2\n")
    ran = run("estimate", str(script), "--gpu", "l40s")
    assert (ran.code, "--from-command" in ran.err) == (2, False)
    assert f"{script} --tensor-paralel-size is not a flag of vLLM" in " ".join(ran.errors)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("models --ctx 4k", "name a GPU"),
        ("models --gpu rtx-4090 --family zzz", "no model matches"),
        ("models --gpu rtx-4090,l40s", "names 2 kinds"),
        ("recommend --gpu rtx-4090", "`kvplan models --gpu rtx-4090` lists those that fit"),
        ("serve --simulate qwen3-8b --gpu h100-80g", "run `kvplan serve qwen3-8b --simulate h100-80g`"),
        ("diff llama-3.1-8b", "`kvplan sweep llama-3.1-8b --engine vllm,sglang`"),
        ("simulate qwen3-8b --gpu h100-80g", "--prompt-tokens 1k --output-tokens 256"),
    ],
)
def test_a_question_without_its_subject_names_a_command_that_works(line: str, remedy: str, run: Run) -> None:
    result = run(*line.split())
    assert result.code == 2
    assert remedy in " ".join(result.errors)


def test_one_model_shows_its_facts_and_source(run: Run) -> None:
    ran = run("models", "meta-llama/llama-3.1-8b-instruct")  # an alias, in another case
    assert "8,030,261,248" in ran.out
    assert "32 x 8 KV heads of 128" in ran.out
    assert "source" in ran.out
    assert run("models", "llama-3.1-8b", "--format", "json").json["id"].startswith("meta-llama/")


def test_one_gpu_shows_its_facts_and_source(run: Run) -> None:
    assert "79.2" in run("gpus", "a100-80g").out
    row = run("gpus", "a100-80g", "--format", "json").json
    assert 79 * 2**30 < row["total_memory"] < 80 * 2**30
    assert len(run("gpus", "--format", "json").json["gpus"]) >= 35


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (("models", "lamma-3.1-8b"), "llama-3.1-8b"),
        (("gpus", "a100-80"), "a100-80g"),
        (("estimate", "qwen3-next-80"), "qwen3-next-80b-a3b"),  # what begins with it before what looks like it
        (("estimate", "llama-3.1-8bb", "--gpu", "h200"), "llama-3.1-8b"),
        (("estimate", "llama-3.1-8b", "--gpu", "h2000"), "h200"),
        (("estimate", "llama-3.1-8b", "--kv-cache-dtyp", "fp8"), "--kv-cache-dtype"),
        (("estimat", "llama-3.1-8b"), "estimate"),
    ],
)
def test_a_near_miss_is_named(run: Run, argv: tuple[str, ...], near: str) -> None:
    line = refused(run(*argv))
    assert "did you mean" in line
    assert near in line.partition("did you mean")[2]


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (("estimate",), "MODEL: missing"),
        (("estimate", "-"), "model '-' is not a model"),
        (("estimate", "llama-3.1-8b", "--ctx", "9" * 26), "--ctx is too large"),
        (("estimate", "a", "b"), "unexpected extra argument"),
        (("estimate", "llama-3.1-8b", "--ctx"), "--ctx needs a value"),
        (("estimate", "llama-3.1-8b", "--format", "xml"), "--format: 'xml' is not one of"),
        (("estimate", "llama-3.1-8b", "--usage", "batch"), "--usage: 'batch' is not one of"),
        (("schema",), "NAME: missing"),
        (("models", "--max-params", "many"), "--max-params: not a number of parameters"),
        (("models", "--family", "no-such-family"), "no model matches"),
    ],
)
def test_bad_usage_is_one_line(run: Run, argv: tuple[str, ...], fault: str) -> None:
    assert fault in refused(run(*argv))


def test_the_version_is_printed(run: Run) -> None:
    assert re.fullmatch(r"kvplan (\d+\.\d+\.\d+|\(not installed\))\n", run("--version").out)


def test_every_command_and_option_has_a_help_text(run: Run) -> None:
    assert run("--help").code == 0
    tree = app.application()
    for name, command in tree.commands.items():
        assert run(name, "--help").out.startswith("Usage: kvplan")
        assert command.help
        assert all(param.help for param in command.params), name


@pytest.mark.parametrize(
    ("words", "completion"),
    [
        ("kvplan est", "estimate"),
        ("kvplan estimate llama-3.1-8", "llama-3.1-8b"),
        ("kvplan estimate llama-3.1-8b --gpu a100-8", "a100-80g"),
        ("kvplan models mixtr", "mixtral-8x7b"),
        ("kvplan estimate x --kv-cache-d", "--kv-cache-dtype"),
        ("kvplan estimate x --kv-cache-dtype fp8_e", "fp8_e5m2"),
        ("kvplan estimate x --engine vllm@0.1", "vllm@0.11"),
    ],
)
def test_the_shell_completes(words: str, completion: str) -> None:
    count = len(words.split()) - 1
    code, out, err = finish(process(_KVPLAN_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count)))
    assert (code, err) == (0, b"")
    assert completion in out.decode().split()


def test_completion_is_installed_and_shown(tmp_path: Path) -> None:
    code, out, err = finish(
        process("--show-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    )
    assert (code, err) == (0, b"")
    assert b"_KVPLAN_COMPLETE=complete_bash" in out
    code, _, err = finish(
        process("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    )
    assert (code, err) == (0, b"")
    assert list(tmp_path.rglob("kvplan*"))


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_crash(closed: str) -> None:
    code = "from kvplan.cli.main import run; run()"
    line = f'exec "$0" -c "{code}" models --family gpt-oss {closed}'
    done = subprocess.run(["/bin/sh", "-c", line, sys.executable], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


# --- how many GPUs, beside their name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2xl40s", "2 x l40s", "l40s:2"])
def test_a_number_of_gpus_is_the_tensor_parallel_size(run: Run, text: str) -> None:
    words = ("llama-3.1-8b", "--ctx", "8k", "--format", "json", "-q")
    assert run("estimate", *words, "--gpu", text).json == run("estimate", *words, "--gpu", "l40s", "--tp", "2").json
    staged = run("estimate", *words, "--gpu", "4xl40s", "--pp", "2").json
    assert staged == run("estimate", *words, "--gpu", "l40s", "--tp", "2", "--pp", "2").json
    several = run("estimate", *words, "--gpu", f"h200,{text}").json["plans"]
    assert [plan["inputs"]["num_gpus"] for plan in several] == [1, 2]
    assert "2 x l40s" in run("estimate", *words[:3], "--gpu", f"h200,{text}").out


def test_a_number_of_gpus_is_how_many_recommend_may_use(run: Run) -> None:
    words = ("recommend", "llama-3.1-8b", "--ctx", "8k", "--users", "60", "--format", "json", "-q")
    assert run(*words, "--gpu", "2xl40s").json == run(*words, "--gpu", "l40s", "--num-gpus", "2").json
    assert run(*words, "--gpu", "2xl40s", "--tp", "1").json == run(*words, "--gpu", "l40s:2", "--tp", "1").json


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("estimate", "--gpu", "8xh100", "--tp", "4"), "--gpu says 8 GPUs, and --tp x --pp x --dp make 4; change one"),
        (("estimate", "--gpu", "8xh100", "--pp", "3"), "--gpu says 8 GPUs, no multiple of the 3 of --pp x --dp"),
        (("estimate", "--gpu", "8xh100,h100"), "--gpu names h100-80g twice with different numbers; use only one"),
        (("estimate", "--gpu", "8xnosuch"), "gpu '8xnosuch': not in the catalog"),
        (("estimate", "--gpu", "2xl40s", "--engine-arg", "tensor_parallel_size=1"), "--gpu says 2 GPUs, and --tp x"),
        (("sweep", "--gpu", "2xl40s", "--tp", "1,2"), "--gpu takes a name without a number here (2 x l40s)"),
        (("recommend", "--users", "9", "--gpu", "2xl40s", "--num-gpus", "4"), "--gpu says 2 GPUs, and --num-gpus 4"),
        (
            ("recommend", "--users", "9", "--gpus", "2xl40s"),
            "--gpus: recommend finds the number of GPUs itself ('2xl40s')",
        ),
    ],
)
def test_a_number_of_gpus_that_contradicts_is_refused(run: Run, words: tuple[str, ...], fault: str) -> None:
    command, *flags = words
    assert fault in refused(run(command, "llama-3.1-8b", "--ctx", "8k", *flags))


def test_what_other_processes_use_within_the_budget_is_taken_from_the_slack(run: Run) -> None:
    """3.04 GiB lie above the budget, so that 1.96 of 5 GiB lie within it."""
    ran = run("estimate", "llama-3.1-8b", "--gpu", "l40s", "--ctx", "8k", "--memory-in-use", "5GiB")
    [row] = re.findall(r"^  unused.*?(?=^  total)", ran.out, re.MULTILINE | re.DOTALL)
    sizes = [float(number) for number in re.findall(r"(?:context|processes|slack|utilization): (-?[\d.]+) GiB", row)]
    assert len(sizes) == 3
    assert min(sizes) > 0
    assert sum(sizes) == pytest.approx(float(row.split()[1]), abs=0.02)


def test_a_fraction_of_sglangs_own_is_not_remarked_upon_when_pasted_back(run: Run) -> None:
    """Its towers' factor gives 0.8488724999999999, whose bytes are rounded another way."""
    printed = run("estimate", "gemma-4-e4b", "--gpu", "l40s", "--ctx", "8k", "--engine", "sglang").out
    [command] = re.findall(r"^Serve  (.+)$", printed, re.MULTILINE)
    assert "rule of thumb" not in run("estimate", "--gpu", "l40s", "--from-command", command).err
    more = re.sub(r"(--mem-fraction-static) \S+", r"\1 0.9", command)
    assert "rule of thumb keeps" in run("estimate", "--gpu", "l40s", "--from-command", more).err
