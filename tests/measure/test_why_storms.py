"""A server that runs but sends requests back, and one of which nobody knows where it ran out of memory."""

from pathlib import Path
from typing import Any

from kvplan.measure.failure import read_failure
from tests.support.cli import Run
from tests.support.cli import run as run

PREEMPTED = """\
INFO 11-02 09:14:02 [utils.py:235] non-default args: {'model_tag': 'Qwen/Qwen3-8B', 'max_model_len': 32768}
(EngineCore pid=5) INFO 11-02 09:15:02 [gpu_worker.py:298] Available KV cache memory: 23.90 GiB
(APIServer pid=1) INFO:     Application startup complete.
(APIServer pid=1) INFO 11-02 10:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 2130.4 tokens/s, Avg \
generation throughput: 410.0 tokens/s, Running: 61 reqs, Waiting: 44 reqs, Preemptions: 312, GPU KV cache usage: 99.3%
"""
RETRACTED = """\
[2026-11-02 09:14:02] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', context_length=16384, mem_fraction_static=0.85)
[2026-11-02 09:20:02] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 90
"""


def answer(run: Run, tmp_path: Path, text: str, *options: str) -> dict[str, Any]:
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    ran = run("why", path, "--format", "json", *options)
    assert ran.code == 0
    return ran.json


def by_kind(document: dict[str, Any]) -> dict[str, Any]:
    return {cure["kind"]: cure for cure in document["cures"]}


def test_preemptions_are_cured_by_plans_on_the_logged_pool(run: Run, tmp_path: Path) -> None:
    """23.90 GiB hold 5.31 requests of 32,768 tokens x 144 KiB = 4.5 GiB, less a block of rounding; fp8 twice that."""
    document = answer(run, tmp_path, PREEMPTED, "--gpu", "l40s", "--engine", "vllm@0.29")
    assert (document["outcome"], document["cause"]) == ("started", None)
    assert document["summary"].endswith("312 times so far.")
    assert document["figures"] == {"preemptions": 312, "running": 61}
    cures = by_kind(document)
    assert all(cure["starts"] for cure in document["cures"])
    assert cures["gpu_memory_utilization"]["flags"] == ["--gpu-memory-utilization 0.95"]
    assert cures["max_num_seqs"]["flags"] == ["--max-num-seqs 5"]
    assert 10.5 < cures["kv_cache_dtype"]["effect"]["users"] < 10.7
    assert cures["tensor_parallel_size"]["effect"]["users"] > 2 * 5.3
    # 61 requests at once: 23.90 GiB / 61 / 144 KiB = 2,852 tokens, whole blocks of 16
    assert cures["max_model_len"]["flags"] == ["--max-model-len 2848"]


def test_what_users_notice_of_fewer_requests_at_once_is_said(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(PREEMPTED, encoding="utf-8")
    out = run("why", path, "--gpu", "l40s").out
    assert "--max-num-seqs 5: 5.0 users at 32,768 tokens; no request is preempted; the others wait" in out


def test_retractions_have_a_larger_pool_and_no_more_requests_than_it_holds(run: Run, tmp_path: Path) -> None:
    cures = by_kind(answer(run, tmp_path, RETRACTED, "--gpu", "rtx-4090", "--engine", "sglang@0.5.23"))
    assert cures["mem_fraction_static"]["flags"] == ["--mem-fraction-static 0.95"]
    assert cures["max_num_seqs"]["flags"] == ["--max-running-requests 1"]  # 4.40 GiB hold 1.95 of 2.25 GiB
    assert cures["tensor_parallel_size"]["effect"]["users"] > 4


def test_no_preemption_is_no_storm(run: Run, tmp_path: Path) -> None:
    document = answer(run, tmp_path, PREEMPTED.replace("Preemptions: 312", "Preemptions: 0"), "--gpu", "l40s")
    assert document["cures"] == []
    assert document["summary"] == "vLLM started: the log shows no failure."


def test_of_memory_that_ran_out_nobody_knows_where_only_what_helps_anywhere_is_advised(
    run: Run, tmp_path: Path
) -> None:
    document = answer(run, tmp_path, "[Bug]: OOM with Qwen3-32B on vLLM 0.8, works on 0.7\n")
    assert (document["cause"], document["memory_question"]) == (None, True)
    assert document["needs"]
    kinds = [cure["kind"] for cure in document["cures"]]
    assert kinds[:2] == ["max_num_seqs", "enforce_eager"]
    assert not any("utilization" in flag for cure in document["cures"] for flag in cure["flags"])
    assert not any(cure["starts"] for cure in document["cures"])


def test_sglang_raises_again_what_it_caught_while_it_captured_graphs() -> None:
    """In SGLang 0.5.2 and 0.5.23 no other part of a worker's start raises another error for one of torch."""
    text = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 95.07 GiB of \
which 298.69 MiB is free.

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 673, in init_tp_model_worker
    self.tp_worker = TpModelWorker(**worker_kwargs)"""
    failure = read_failure(text.splitlines())
    assert (failure.cause, failure.phase) == ("sglang_cuda_graph_failed", "capture")
    alone = read_failure(text.replace("During handling", "After").splitlines())
    assert alone.cause is None


def test_a_sentence_tells_the_check_of_the_kv_cache() -> None:
    failure = read_failure(["`qwen-a3b` (TP=1) OOMs at the KV-cache check on vLLM v0.22.0"])
    assert failure.cause == "kv_too_small_for_max_len"


SERVE = "To serve at least one request with the {} max seq len (131072), (16.0 GiB KV cache is needed, which is larger"


def test_a_log_that_names_no_release_is_of_those_whose_words_it_has() -> None:
    """vLLM's wheels, 0.8.5 to 0.33: "models's" up to 0.21; the page on memory is named from 0.14 on."""
    page = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
    for text, releases in (
        ("ValueError: " + SERVE.format("model's"), ("0.22", "0.33")),
        ("ValueError: " + SERVE.format("models's"), ("0.8", "0.21")),
        (f"ValueError: {SERVE} {page}".format("models's"), ("0.14", "0.21")),
        (
            "ValueError: Free memory on device (60.1/79.25 GiB) on startup is less than desired GPU memory",
            ("0.9", "0.11"),
        ),
        ("please ensure that world_size (2) is less than than max local gpu count (1)", ("0.6", "0.10")),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", ("0.2", "0.5.23")),
        ("torch.OutOfMemoryError: CUDA out of memory.", None),
    ):
        assert read_failure([text]).releases == releases, text


def test_the_release_that_words_tell_is_planned_and_said_to_be_inferred(run: Run, tmp_path: Path) -> None:
    text = f"ValueError: {SERVE} than the available KV cache memory (6.17 GiB).\n".format("models's")
    document = answer(run, tmp_path, text, "--model", "llama-3.1-8b", "--gpu", "rtx-4090")
    engine = next(inference for inference in document["inferred"] if inference["what"] == "engine")
    assert engine["value"] == "vllm@0.21"
    assert "0.8 to 0.21" in engine["source"]
    plain = answer(run, tmp_path, "vllm: torch.OutOfMemoryError: CUDA out of memory in load_model\n")
    assert not any(inference["what"] == "engine" and "words" in inference["source"] for inference in plain["inferred"])


def test_of_an_unknown_model_the_log_s_own_figures_prove_cures(run: Run, tmp_path: Path) -> None:
    """0.6 + (16.005 - 6.165) / 79.25 = 0.7242: 0.73 adds what one request lacks, by the worst of the rounding."""
    serve = SERVE.format("model's")
    text = (
        "non-default args: {'model_tag': 'org/private', 'max_model_len': 131072, 'gpu_memory_utilization': 0.6}\n"
        "the current instance can use total_gpu_memory (79.25GiB) x gpu_memory_utilization (0.60) = 47.55GiB\n"
        f"ValueError: {serve} than the available KV cache memory (6.17 GiB). Based on the available memory, the "
        "estimated maximum model length is 50544.\n"
    )
    document = answer(run, tmp_path, text)
    proved = {cure["kind"]: cure for cure in document["cures"] if cure["proof"]}
    assert proved["max_model_len"]["flags"] == ["--max-model-len 50544"]
    assert proved["gpu_memory_utilization"]["flags"] == ["--gpu-memory-utilization 0.73"]
    assert not any(cure["starts"] for cure in document["cures"])
    guesses = {cure["kind"] for cure in document["cures"] if not cure["proof"]}
    assert {"kv_cache_dtype", "tensor_parallel_size"} <= guesses


def test_a_share_that_no_gpu_can_give_is_not_proved(run: Run, tmp_path: Path) -> None:
    """0.9 + 9.84 / 23.64 is more than a GPU."""
    text = (
        "the current instance can use total_gpu_memory (23.64GiB) x gpu_memory_utilization (0.90) = 21.28GiB\n"
        f"ValueError: {SERVE} than the available KV cache memory (6.17 GiB).\n"
    ).format("model's")
    document = answer(run, tmp_path, text)
    assert not any(cure["proof"] for cure in document["cures"] if cure["kind"] == "gpu_memory_utilization")
