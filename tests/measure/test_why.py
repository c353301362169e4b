"""`kvplan why`: what happened is said from the failing line, and every cure is a plan that starts."""

import json
import re
import shlex
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from kvplan.asked.form import Form
from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError
from kvplan.core.units import GIB
from kvplan.documents.diagnosis import diagnosis_document
from kvplan.hardware.gpu import gpu
from kvplan.measure import why_words
from kvplan.measure.serverlog.asked import asked_words, changed
from kvplan.measure.why import diagnose
from kvplan.measure.why_words import error_of, reason_of
from kvplan.models import catalog
from kvplan.planning.case import Case, Cure
from kvplan.planning.cures import MOVES, cures, stated_pool
from kvplan.planning.plan import Request
from kvplan.report.why_text import why_lines
from kvplan.servers.base import kind_of_cause, parse_engine
from kvplan.servers.logs.failures import MEMORY_CAUSES, Cause, Figures, Size
from kvplan.servers.logs.obstacles import OF_CAUSE
from kvplan.servers.plans.plan import BUDGET_ROWS
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Ran, Run
from tests.support.cli import run as run

LOG = Path(__file__).resolve().parents[2] / "examples" / "vllm-did-not-start.log"


def why(run: Run, tmp_path: Path, text: str, *options: str) -> Ran:
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    return run("why", path, *options)


def document(run: Run, tmp_path: Path, text: str, *options: str) -> dict[str, Any]:
    ran = why(run, tmp_path, text, "--format", "json", *options)
    assert ran.code == 0, ran
    return ran.json


def too_long(model: str, context: int, needed: str, available: str, estimate: int | None, flags: str = "") -> str:
    """A vLLM 0.23 that refuses a context, as its code words it."""
    based = "Based on the available memory, the estimated maximum model length is"
    based = "" if estimate is None else f"{based} {estimate}. "
    return (
        f"INFO 05-12 09:14:02 [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.23.0\n"
        f"INFO [utils.py:235] non-default args: {{'model_tag': '{model}', 'model': '{model}'{flags}}}\n"
        f"ERROR [core.py:1100] ValueError: To serve at least one request with the model's max seq len ({context}), "
        f"({needed} GiB KV cache is needed, which is larger than the available KV cache memory ({available} GiB). "
        f"{based}"
        "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
        "`max_model_len` when initializing the engine.\n"
    )


# --- the first line and the cures of a context that is too long -------------------------------------------------------


def test_the_error_itself_is_a_log_too(run: Run, tmp_path: Path) -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    log = tmp_path / "server.log"
    log.write_text(error)
    ran = run("why", error)
    assert (ran.code, ran.out) == (0, run("why", str(log)).out)
    assert "LOG: no file has this name: it is read as lines of a log" in ran.err


def test_the_first_line_says_what_happened(run: Run) -> None:
    ran = run("why", LOG, "--gpu", "rtx-4090")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == (
        "vLLM did not start: one request of 131,072 tokens needs 16.00 GiB of KV cache and 6.17 GiB are free."
    )


def test_the_best_cure_is_the_length_that_the_server_itself_estimates(run: Run) -> None:
    """50,544 tokens: 3,159 blocks of 16 tokens x 128 KiB in the 6.17 GiB that the log states."""
    answer = run("why", LOG, "--gpu", "rtx-4090", "--format", "json").json
    assert answer["cures"][0]["flags"] == ["--max-model-len 50544"]
    assert answer["cures"][0]["effect"] == {"users": 1.0, "tokens": 50544, "max_model_len": 50544}
    assert all(cure["starts"] for cure in answer["cures"])


def test_an_fp8_cache_holds_twice_the_tokens_of_the_logged_bytes(run: Run) -> None:
    answer = run("why", LOG, "--gpu", "rtx-4090", "--format", "json").json
    fp8 = next(cure for cure in answer["cures"] if cure["kind"] == "kv_cache_dtype")
    assert fp8["effect"]["max_model_len"] == 2 * 50544 // 256 * 256  # a round number beside another change


def test_the_rows_of_the_memory_add_up(run: Run) -> None:
    memory = run("why", LOG, "--gpu", "rtx-4090", "--format", "json").json["memory"]
    rows = ("weights", *BUDGET_ROWS, "unattributed", "kv_available", "unused")
    assert {*memory} == {*rows, "basis", "total", "kv_needed", "missing"}
    assert sum(memory[row] for row in rows) - memory["missing"] == memory["total"]
    assert abs(memory["kv_available"] - 6.17 * GIB) < 0.005 * GIB
    assert memory["kv_needed"] == 16 * GIB


def test_a_command_has_the_log_s_own_arguments_and_the_cure(run: Run) -> None:
    answer = run("why", LOG, "--gpu", "rtx-4090", "--format", "json").json
    words = shlex.split(answer["cures"][0]["command"])
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    assert words[3:8] == ["--port", "8081", "--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"]
    assert read_command(answer["cures"][0]["command"]).args == {"max_model_len": 50544}


def test_without_a_gpu_the_cures_that_need_none_are_planned_and_the_rest_is_asked_for(run: Run) -> None:
    ran = run("why", LOG)
    assert "--max-model-len 50544: 1 user at that length" in ran.out
    assert "--gpu-memory-utilization" not in ran.out
    assert "For exact fixes, add --gpu NAME." in ran.out


def test_a_model_that_needs_other_bytes_is_not_the_server_s(run: Run, tmp_path: Path) -> None:
    """16 GiB are Llama-3.1-8B's: the log is of another model than the one that is named."""
    answer = document(run, tmp_path, LOG.read_text(encoding="utf-8"), "--model", "llama-3.2-3b")
    assert not any(cure["starts"] for cure in answer["cures"])
    assert "needs 14.00 GiB, and the log says 16.00 GiB" in answer["notes"][0]


def test_without_a_model_the_server_s_own_figures_are_the_cure_and_nobody_checked_them(
    run: Run, tmp_path: Path
) -> None:
    """A public report: 44.25 GiB for 1,048,576 tokens, 8.42 GiB free, 199,552 estimated by vLLM."""
    text = too_long("org/private", 1048576, "44.25", "8.42", 199552)
    answer = document(run, tmp_path, text)
    assert answer["cures"][0]["flags"] == ["--max-model-len 199552"]
    assert answer["cures"][0]["starts"] is None
    assert answer["cures"][0]["effect"] is None
    assert answer["missing"] == ["--model NAME", "--gpu NAME"]


# --- the server's own figures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "context", "needed"),
    [
        # 62 layers x 8 heads x 128 x 2 x 2 B x 262,144 tokens, as a user's log states it
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 262144, "62.0"),
        ("Qwen/Qwen3-8B", 40960, "5.62"),  # 36 x 8 x 128 x 2 x 2 B x 40,960 = 5.625: formatted to even
        ("meta-llama/Llama-3.1-8B-Instruct", 131072, "16.0"),
    ],
)
def test_the_needed_bytes_of_a_log_are_the_plan_s(
    run: Run, tmp_path: Path, model: str, context: int, needed: str
) -> None:
    answer = document(run, tmp_path, too_long(model, context, needed, "1.0", None))
    assert answer["notes"] == []
    assert answer["cures"][0]["starts"]


# --- the words of a command -------------------------------------------------------------------------------------------


def test_a_list_of_arguments_becomes_a_command() -> None:
    line = (
        "INFO [utils.py:1] non-default args: {'model_tag': 'org/m', 'port': 8081, 'api_key': ['secret'], "
        "'model': 'org/m', 'max_model_len': 16384, 'enable_prefix_caching': False, 'trust_remote_code': True, "
        "'limit_mm_per_prompt': {'image': 2}, 'served_model_name': ['a', 'b']}"
    )
    words = asked_words([line], "vllm")
    assert words == [
        "vllm", "serve", "org/m", "--port", "8081", "--max-model-len", "16384", "--no-enable-prefix-caching",
        "--trust-remote-code", "--limit-mm-per-prompt", '{"image": 2}', "--served-model-name", "a", "b",
    ]  # fmt: skip


def test_a_value_that_no_command_can_have_is_left_out() -> None:
    line = "non-default args: {'model_tag': 'org/m', 'limit_mm_per_prompt': {1, 2}, 'port': 1}"
    assert asked_words([line], "vllm") == ["vllm", "serve", "org/m", "--port", "1"]


def test_a_quoted_command_keeps_its_other_words() -> None:
    lines = [
        "$ VLLM_USE_V1=0 vllm serve org/m \\",
        "    --max-model-len=131072 -tp 2 --trust-remote-code \\",
        "    --gpu-memory-utilization 0.9",
    ]
    words = asked_words(lines, "vllm")
    assert words is not None
    assert changed(words, "vllm", {"max_model_len": ["--max-model-len", "4096"]}) == [
        "VLLM_USE_V1=0", "vllm", "serve", "org/m", "-tp", "2", "--trust-remote-code", "--gpu-memory-utilization",
        "0.9", "--max-model-len", "4096",
    ]  # fmt: skip
    assert "2" not in changed(words, "vllm", {"tensor_parallel_size": ["--tensor-parallel-size", "4"]})


def test_a_quoted_command_loses_its_secrets() -> None:
    words = asked_words(["vllm serve org/m --api-key sk-secret --port 8000 --max-model-len 8192"], "vllm")
    assert words == ["vllm", "serve", "org/m", "--port", "8000", "--max-model-len", "8192"]


def test_prose_is_no_command() -> None:
    for line in (
        "vllm serve crashes at engine init for several --kv-cache-dtype values",
        "vllm serve org/m --gpu-memory-utilization 0.3，80G的显卡",
    ):
        assert asked_words([line], "vllm") is None


PASTED = [
    json.loads(line)
    for line in (LOG.parents[1] / "tests" / "facts" / "pasted.jsonl").read_text(encoding="utf-8").splitlines()
]


def test_the_commands_are_those_that_vllm_s_own_parser_was_given(run: Run) -> None:
    answer = run("why", LOG, "--gpu", "rtx-4090", "--format", "json").json
    assert {cure["command"] for cure in answer["cures"]} == {row["command"] for row in PASTED}


@pytest.mark.parametrize("row", PASTED, ids=lambda row: f"{row['parsed']['max_model_len']}")
def test_vllm_s_own_parser_reads_a_pasted_command_as_kvplan_does(row: dict[str, Any]) -> None:
    """vLLM 0.33's entrypoints/common/cli_args.py was given the words; what it left at its defaults is not said."""
    read = read_command(row["command"]).args
    defaults = {"gpu_memory_utilization": 0.92, "kv_cache_dtype": "auto", "tensor_parallel_size": 1,
                "max_num_seqs": None, "enforce_eager": False}  # fmt: skip
    assert {name: value for name, value in row["parsed"].items() if name != "port"} == {**defaults, **read}
    assert row["parsed"]["port"] == 8081


def test_a_command_of_sglang_is_changed_by_its_own_flags() -> None:
    words = asked_words(["python3 -m sglang.launch_server --model-path org/m --tp 2 --port 30000"], "sglang")
    assert words is not None
    assert changed(words, "sglang", {"tensor_parallel_size": ["--tp-size", "4"]}) == [
        "python", "-m", "sglang.launch_server", "--model-path", "org/m", "--port", "30000", "--tp-size", "4",
    ]  # fmt: skip


# --- every cause ------------------------------------------------------------------------------------------------------


def test_every_cause_has_its_sentence_and_every_cause_of_memory_its_cures() -> None:
    for cause in set(get_args(Cause)) - set(OF_CAUSE):
        assert reason_of(cause)(Figures())
    assert set(OF_CAUSE) <= set(get_args(Cause)) - MEMORY_CAUSES
    with_own_flags = {"oom_kv_cache", "oom_compute_buffers"}  # of one server (tests/servers/llamacpp/test_logs.py)
    without_moves = {cause for cause in MEMORY_CAUSES if kind_of_cause(cause) not in MOVES}
    assert without_moves <= {"host_memory_or_shm", *with_own_flags}


def test_a_followed_log_passes_through_and_is_explained_on_standard_error(tmp_path: Path) -> None:
    import subprocess
    import sys

    text = LOG.read_text(encoding="utf-8")
    for log, is_explained in ((text, True), (text.partition("ERROR")[0], False)):
        result = subprocess.run(
            [sys.executable, "-m", "kvplan", "why", "--follow", "-"],
            input=log.encode(), capture_output=True, check=True, timeout=120,
        )  # fmt: skip
        assert result.stdout.decode() == log
        assert ("vLLM did not start" in result.stderr.decode()) is is_explained


def test_a_failure_is_exit_code_1_where_that_is_asked_for(run: Run) -> None:
    assert run("why", LOG, "--exit-code").code == 1
    assert run("why", LOG).code == 0


def test_what_a_command_prints_is_read(run: Run) -> None:
    ran = run("why", "--command", f"cat {shlex.quote(str(LOG))}", "--format", "json")
    assert json.loads(ran.out)["cause"] == "kv_too_small_for_max_len"


def test_one_log_is_named(run: Run) -> None:
    assert run("why").code == 2
    assert run("why", LOG, "--command", "true").code == 2


# --- the log of a failed server beside its plan -----------------------------------------------------------------------


def test_reconcile_says_first_that_the_server_failed(run: Run) -> None:
    ran = run("reconcile", "--log", LOG, "--gpu", "rtx-4090")
    assert ran.code == 0
    assert ran.err.splitlines()[0] == (
        "kvplan: warning: vLLM did not start: one request of 131,072 tokens needs 16.00 GiB of KV cache and 6.17 GiB "
        f"are free. `kvplan why {LOG}` explains how to fix it."
    )


def test_reconcile_says_nothing_of_a_server_that_started(run: Run) -> None:
    ran = run("reconcile", "--log", LOG.parent / "vllm-0.10.log", "--gpu", "a100-80g")
    assert "kvplan why" not in ran.err


# --- cures that a plan was made of, by cause --------------------------------------------------------------------------


def size(gib: float) -> Size:
    return Size(f"{gib}", int(gib * GIB), int((gib - 0.005) * GIB), int((gib + 0.005) * GIB))


def planned(cause: str, model: str, machine: str, engine: str, figures: Figures, **args: Any) -> list[Cure]:
    request = Request(catalog.load(model), gpu(machine), EngineArgs(**args), parse_engine(engine))
    pool = stated_pool(figures, request, cause)
    return cures(Case(engine.partition("@")[0], cause, figures, request, pool))


def flags(results: list[Cure]) -> list[tuple[str, ...]]:
    return [cure.flags for cure in results if cure.plan is not None]


def test_a_share_that_is_not_free_is_lowered_to_what_is() -> None:
    """60.1 of 79.25 GiB are 0.758: 0.75 passes, as ceil(0.75 x total) <= free."""
    figures = Figures(free_bytes=size(60.1), total_bytes=size(79.25), utilization=0.9)
    results = planned(
        "free_memory_below_utilization", "qwen3-8b", "a100-80g", "vllm@0.23", figures, max_model_len=32768
    )
    assert flags(results) == [("--gpu-memory-utilization 0.75",)]
    assert "19.15 GiB" in results[0].text  # 79.25 - 60.1, held by others


def test_the_sampler_s_batch_is_lowered_to_what_the_free_memory_holds() -> None:
    """1.74 GiB for 1,024 sequences (1,024 x 152,064 x 12 B): 0.6 GiB hold 353 of them."""
    figures = Figures(tried_bytes=size(1.74), free_bytes=size(0.6), total_bytes=size(22.06), dummy_requests=1024)
    results = planned(
        "oom_sampler_warmup", "qwen2.5-7b", "a10g", "vllm@0.23", figures, max_model_len=8192, max_num_seqs=1024
    )
    assert flags(results)[0] == ("--max-num-seqs 256",)


def test_a_share_is_lowered_by_what_was_lacking_while_serving_and_while_capturing_graphs() -> None:
    """1.14 GiB and 256 MiB of 22.06 GiB are 0.063 of it: 0.92, the default from 0.21 on, becomes 0.85."""
    figures = Figures(tried_bytes=size(1.74), free_bytes=size(0.6), total_bytes=size(22.06))
    for cause in ("oom_runtime", "oom_cuda_graph_capture"):
        results = planned(cause, "qwen2.5-7b", "a10g", "vllm@0.23", figures, max_model_len=8192)
        assert flags(results)[0] == ("--gpu-memory-utilization 0.85",)


def test_what_the_pool_lacks_wants_a_larger_share() -> None:
    for cause, engine, share in (
        ("no_kv_memory", "vllm@0.23", {"gpu_memory_utilization": 0.6}),
        ("sglang_not_enough_memory", "sglang@0.5.5", {"mem_fraction_static": 0.6}),
    ):
        results = planned(cause, "llama-3.1-8b", "rtx-4090", engine, Figures(), max_model_len=8192, **share)
        name, _, value = flags(results)[0][0].partition(" ")
        assert name == f"--{next(iter(share)).replace('_', '-')}"
        assert float(value) > 0.6


def test_a_share_does_not_help_weights_that_do_not_fit() -> None:
    results = planned("oom_loading_weights", "qwen3-32b", "l40s", "vllm@0.23", Figures(), max_model_len=32768)
    assert flags(results) == [("--tensor-parallel-size 2",)]
    assert not any("utilization" in flag for cure in results for flag in cure.flags)


def test_heads_are_divided() -> None:
    figures = Figures(heads=32, tensor_parallel_size=3)
    results = planned(
        "heads_not_divisible_by_tp", "gemma-3-27b", "a100-80g", "vllm@0.23", figures, max_model_len=8192,
        tensor_parallel_size=3,
    )  # fmt: skip
    assert flags(results) == [("--tensor-parallel-size 2",), ("--tensor-parallel-size 4",)]


def test_a_prefill_that_the_pool_cannot_hold_wants_a_larger_pool_and_one_that_torch_cannot_a_smaller_step() -> None:
    kind = {
        "pool": Figures(tried_tokens=4096, available_tokens=2000),
        "torch": Figures(tried_bytes=size(1.74), free_bytes=size(0.6), total_bytes=size(23.64)),
    }
    first = {
        name: planned("sglang_oom_prefill", "llama-3.1-8b", "rtx-4090", "sglang@0.5.5", figures, max_model_len=8192,
                      mem_fraction_static=0.85, max_num_batched_tokens=8192)[0]
        for name, figures in kind.items()
    }  # fmt: skip
    assert first["pool"].flags[0].startswith("--mem-fraction-static 0.8")
    assert first["pool"].way == "raise"
    assert first["torch"].flags == ("--chunked-prefill-size 4096",)


def test_every_cure_with_a_plan_starts() -> None:
    figures = Figures(tried_bytes=size(0.5), free_bytes=size(0.1), total_bytes=size(23.64))
    for cause in (cause for cause in get_args(Cause) if kind_of_cause(cause) in MOVES):
        engine = "sglang@0.5.5" if cause.startswith("sglang") else "vllm@0.23"
        for cure in planned(cause, "qwen3-8b", "rtx-4090", engine, figures, max_model_len=16384):
            assert cure.plan is None or (cure.plan.fits and cure.starts)
            assert cure.plan is None or cure.flags


def test_without_a_model_the_memory_is_the_log_s_own(run: Run, tmp_path: Path) -> None:
    """20.64 GiB of weights and 21.20 GiB of KV cache of 44.53 GiB, as a user's log states them."""
    text = (
        "INFO 03-27 10:28:03 [model_runner.py:1115] Loading model weights took 20.6400 GB\n"
        "INFO 03-27 10:28:43 [worker.py:267] the current vLLM instance can use total_gpu_memory (44.53GiB) x "
        "gpu_memory_utilization (0.98) = 43.64GiB\n"
        "INFO 03-27 10:29:03 [model_runner.py:1442] Capturing cudagraphs for decoding.\n"
        '  File "vllm/worker/model_runner.py", line 1500, in capture_model\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 6 has a total capacity of 44.53 "
        "GiB of which 448.00 KiB is free.\n"
    )
    memory = document(run, tmp_path, text)["memory"]
    assert memory["basis"] == "log"
    assert (memory["weights"], memory["total"]) == (round(20.64 * GIB), round(44.53 * GIB))
    assert memory["weights"] + memory["kv_available"] + memory["unused"] == memory["total"]


def test_nothing_is_no_log(run: Run, tmp_path: Path) -> None:
    assert why(run, tmp_path, " \n").code == 2
    assert why(run, tmp_path, "hello").code == 0


def test_a_damaged_log_is_answered_or_refused() -> None:
    """Numbers replaced, lines lost and characters put in: never a crash, and never a cure that does not start."""
    text = LOG.read_text(encoding="utf-8")
    form = Form({"gpu": ["rtx-4090"]})
    random = Random(17)
    for _ in range(40):
        lines = text.splitlines()
        for _ in range(random.randint(1, 4)):
            index = random.randrange(len(lines))
            numbers = list(re.finditer(r"\d+(?:\.\d+)?", lines[index]))
            match random.randrange(3):
                case 0 if numbers:
                    number = random.choice(numbers)
                    other = random.choice(["0", "-1", "1e9", "999999999999", "0.0", "7.5", "131072"])
                    lines[index] = lines[index][: number.start()] + other + lines[index][number.end() :]
                case 1 if len(lines) > 1:
                    del lines[index]
                case _:
                    place = random.randrange(len(lines[index]) + 1)
                    lines[index] = lines[index][:place] + random.choice("{}'\"\x1b\u00e9,") + lines[index][place:]
        try:
            answer = diagnosis_document(diagnose(form, lines))
        except KvplanError:
            continue
        assert all(cure["effect"] is not None for cure in answer["cures"] if cure["starts"])
        assert why_lines(answer)


def test_memory_that_ran_out_in_an_unknown_part_is_said_with_its_figures(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "INFO 05-01 10:00:00 [core.py:58] Initializing a V1 LLM engine (v0.9.1) with config: model='Qwen/Qwen3-32B'\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.25 GiB of which 1.10 GiB is free.\n"
    )
    first = run("why", str(log)).out.splitlines()[0]
    assert first.startswith("vLLM did not start: the GPU ran out of memory (2.00 GiB requested, 1.10 GiB free), but")
    assert run("why", str(log), "--format", "json").json["cause"] is None


def test_sizes_that_a_log_rounds_to_the_same_do_not_contradict_the_reason() -> None:
    free = Size("30.3 GiB", 32_534_528_000, 32_529_000_000, 32_540_000_000)
    text = why_words.free_memory(Figures(initial_free_bytes=free, current_free_bytes=free))
    assert text.endswith("while the server measured its own")


def test_what_a_gpu_does_not_support_is_a_sentence() -> None:
    problem = "this GPU does not support"
    assert why_words.capability(Figures()) == f"{problem} the requested data type, kernel or quantization"
    assert why_words.capability(Figures(quantization="fp8")) == f"{problem} fp8 quantization"
    mxfp4 = Figures(quantization="mxfp4", capability="86", required_capability="100")  # vLLM writes 8.6 as 86
    assert why_words.capability(mxfp4) == f"{problem} mxfp4 quantization (compute capability 8.6, needed 10.0)"


def test_amounts_of_a_sentence_have_one_unit(run: Run, tmp_path: Path) -> None:
    """torch: "Tried to allocate 298.00 MiB. GPU 0 has a total capacity of 39.38 GiB of which 65.38 MiB is free"; 39.38
    GiB are 40,325.12 MiB.
    """
    log = tmp_path / "server.log"
    log.write_text(
        "vLLM API server version 0.10.0\nnon-default args: {'model': 'llama-3.1-8b'}\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 298.00 MiB. GPU 0 has a total capacity of "
        "39.38 GiB of which 65.38 MiB is free.\n",
        encoding="utf-8",
    )
    out = run("why", log, "-q").out
    assert "298.00 MiB" in out
    assert "65.38 MiB" in out
    assert "0.29 GiB" not in out


def test_a_line_is_cut_behind_its_error_not_before_it() -> None:
    bar = "Capturing CUDA graphs (decode, FULL):  " + "█" * 150 + "| 35/67 [00:03<00:03,  9.30it/s]"
    assert error_of(f"{bar}CUDA error: device-side assert") == "CUDA error: device-side assert"


# --- a server that drafts tokens --------------------------------------------------------------------------------------

SGLANG_DRAFTS = (
    "[2026-11-01 10:00:00] server_args=ServerArgs(model_path='deepseek-ai/DeepSeek-V3', tp_size=8, {more}"
    "speculative_algorithm='{algorithm}', speculative_num_steps=3, speculative_eagle_topk=1, "
    "speculative_num_draft_tokens=4, context_length=32768, mem_fraction_static=0.6)\n"
    "[2026-11-01 10:00:50 TP0] RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n"
)
DRAFT_FLAGS = (
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
    "--speculative-algorithm EAGLE"
)


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_sglangs_head_is_planned_and_stays_in_the_command(run: Run, tmp_path: Path, algorithm: str) -> None:
    """DeepSeek-V3's config: 61 layers and a head, each of 576 elements of 2 bytes per token: 62 x 1,152 B, that is
    2.18 GiB of 32,768 tokens; without the head 61 x 1,152 B.
    """
    text = SGLANG_DRAFTS.format(more="", algorithm=algorithm)
    ran = why(run, tmp_path, text, "--gpu", "h200")
    assert "one request needs 2.18" in ran.out
    assert ran.out.split("Command with fix 1\n")[1].splitlines()[0].endswith(DRAFT_FLAGS)
    bare = text.replace(f"speculative_algorithm='{algorithm}'", "speculative_algorithm=None")
    assert "one request needs 2.14" in why(run, tmp_path, bare, "--gpu", "h200").out


def test_a_draft_that_cannot_be_sized_is_said_and_nothing_is_verified(run: Run, tmp_path: Path) -> None:
    text = SGLANG_DRAFTS.format(more="", algorithm="EAGLE3")
    cases = (
        (text, "(EAGLE3), which is not sized: speculative method eagle3 needs a draft; name one with --draft-model"),
        (
            SGLANG_DRAFTS.format(more="dp_size=8, enable_dp_attention=True, ", algorithm="NGRAM"),
            ", which is not sized: --enable-dp-attention is not modeled with NGRAM drafts; use only one",
        ),
    )
    for log, problem in cases:
        ran = why(run, tmp_path, log, "--gpu", "h200")
        assert ran.code == 0
        assert "verified" not in ran.out
        assert ran.out.count(f"the server drafts tokens{'' if problem[0] == ',' else ' '}{problem}\n") == 1


RESOLVED = "{'mode': <CompilationMode.VLLM_COMPILE: 3>, 'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}"


@pytest.mark.parametrize(
    ("logged", "stated"),
    [
        (RESOLVED, None),  # vLLM's line on its resolved config: no command says this
        ("{'cudagraph_mode': 'FULL', 'cudagraph_capture_sizes': None}", '{"cudagraph_mode": "FULL"}'),
    ],
)
def test_a_logged_compilation_config_is_read_as_its_user_wrote_it(logged: str, stated: str | None) -> None:
    lines = [
        "INFO 05-02 13:35:01 [utils.py:253] non-default args: {'model': 'Qwen/Qwen3-8B', 'max_model_len': 8192}",
        "INFO 05-02 13:35:09 [core.py:101] Initializing a V1 LLM engine (v0.17.0) with config: model='Qwen/Qwen3-8B', "
        f"compilation_config={logged}",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.25 GiB of which 0.10 GiB is free.",
        '  File "/usr/lib/vllm/v1/worker/gpu_model_runner.py", line 912, in capture_model',
    ]
    diagnosis = diagnose(Form({"gpu": ["a100-80g"]}), lines)
    assert diagnosis.plan is not None
    assert diagnosis.plan.request.args.compilation_config == stated


def test_a_tensor_that_a_gguf_file_lacks_is_no_matter_of_config_json(run: Run, tmp_path: Path) -> None:
    """llama.cpp's src/llama-model-loader.cpp names the tensor; a GGUF file has no config.json."""
    ran = why(run, tmp_path, "llama_model_load: error loading model: missing tensor 'blk.0.attn_q.weight'\n")
    assert "newer build of the server" in ran.out
    assert "config.json" not in ran.out
