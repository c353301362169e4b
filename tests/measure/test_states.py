"""What a log shows of a server's starts: how far each came, what it served, and how it ended."""

import json
from pathlib import Path

import pytest

from benchmarks.diagnoses import lines_of, score_states
from kvplan.measure.failure import Failure, read_failure
from kvplan.measure.why_words import duration, summary
from tests.support.cli import Run
from tests.support.cli import run as run
from tests.support.oracle_data import DATA, needs_oracle_data

ENGINE_LINE = "INFO 11-20 10:00:05 [core.py:93] Initializing a V1 LLM engine (v0.12.0) with config: model='m'"
BANNER = "INFO 11-20 10:00:00 [api_server.py:1755] vLLM API server version 0.12.0"
LOADING = "INFO 11-20 10:00:20 [gpu_model_runner.py:2900] Starting to load model Qwen/Qwen3-8B..."
CAPTURING = "INFO 11-20 10:01:30 [gpu_model_runner.py:3400] Capturing CUDA graph shapes"
READY = "INFO:     Application startup complete."
FIRST = "INFO 11-20 10:02:00 [loggers.py:236] Engine 000: Avg prompt throughput: 9.0 tokens/s"
ANSWER = 'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
TOO_LONG = (
    "ERROR 11-20 10:05:00 [serving_chat.py:251] ValueError: This model's maximum context length is 6144 tokens. "
    "However, your request has 6231 input tokens."
)
REFUSED = 'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request'
DEAD = "ERROR 11-20 16:03:00 [async_llm.py:704] EngineDeadError: EngineCore encountered an issue."
OOM = "(EngineCore pid=7) ERROR 11-20 16:02:59 [core.py:868] torch.OutOfMemoryError: CUDA out of memory."
SIGTERM = "INFO 11-20 16:02:58 [core.py:1313] [shutdown] EngineCore: trigger received signal=SIGTERM"
SHUTDOWN = "INFO 11-20 16:02:58 [launcher.py:110] Shutting down FastAPI HTTP server."
NO_MEMORY = "ERROR 11-20 10:01:00 [core.py:843] ValueError: No available memory for the cache blocks."


def failure(*lines: str) -> Failure:
    return read_failure(lines)


def test_a_client_s_error_is_a_refused_request() -> None:
    answer = failure(BANNER, READY, ANSWER, TOO_LONG, REFUSED, ANSWER)
    assert (answer.outcome, answer.cause) == ("started", None)
    assert summary(answer) == "vLLM is ready: 2 requests answered, 1 request refused as too long."


def test_a_refused_request_at_the_end_of_a_log_is_no_death() -> None:
    assert failure(BANNER, READY, ANSWER, TOO_LONG, REFUSED).outcome == "started"


@pytest.mark.parametrize(
    ("order", "by"), [(SIGTERM, "stopped by SIGTERM"), (SHUTDOWN, "told to stop"), ("KeyboardInterrupt", "Ctrl-C")]
)
def test_requests_aborted_by_an_order_to_stop_are_no_death(order: str, by: str) -> None:
    answer = failure(BANNER, READY, FIRST, ANSWER, order, DEAD, "INFO:     Application shutdown complete.")
    assert (answer.outcome, answer.cause, answer.evidence) == ("stopped", None, ())
    assert by in summary(answer)


def test_a_server_that_closes_itself_after_an_error_died_of_the_error() -> None:
    answer = failure(BANNER, READY, FIRST, ANSWER, OOM, DEAD, SHUTDOWN, "INFO:     Shutting down")
    assert (answer.outcome, answer.cause) == ("died", "oom_runtime")
    # From 10:02:00, the first line after it was ready that has a time, to 16:03:00.
    assert summary(answer).startswith("vLLM stopped after 6 h of serving: the GPU ran out of memory")


def test_an_engine_that_died_without_a_reason_is_said_to_have_served() -> None:
    assert summary(failure(BANNER, READY, FIRST, ANSWER, DEAD)) == (
        "vLLM stopped after 6 h of serving, but this log does not show the cause."
    )


def test_the_last_start_is_judged_and_every_start_is_listed() -> None:
    answer = failure(BANNER, LOADING, NO_MEMORY, BANNER, LOADING, READY, ANSWER)
    assert (answer.outcome, answer.cause) == ("started", None)
    assert [(start.end, start.first, start.last, start.answered) for start in answer.starts] == [
        ("failed", 1, 3, 0),
        ("running", 4, 7, 1),
    ]


def test_an_earlier_start_that_served_does_not_hide_the_last_one() -> None:
    answer = failure(BANNER, READY, ANSWER, SIGTERM, BANNER, LOADING, NO_MEMORY)
    assert (answer.outcome, answer.cause) == ("failed", "no_kv_memory")
    assert [start.end for start in answer.starts] == ["stopped", "failed"]


@pytest.mark.parametrize(
    ("line", "where"), [(LOADING, "while vLLM loaded the weights"), (CAPTURING, "while vLLM captured CUDA graphs")]
)
def test_a_log_that_just_ends_says_in_which_phase_and_where_to_look(line: str, where: str) -> None:
    answer = failure(BANNER, line)
    assert answer.outcome == "cut"
    assert summary(answer) == f"The log ends {where}, without an error."
    assert "dmesg" in answer.needs[0]


def test_a_start_that_was_interrupted_did_not_fail() -> None:
    answer = failure(BANNER, LOADING, "Traceback (most recent call last):", "KeyboardInterrupt")
    assert summary(answer) == "vLLM was stopped by Ctrl-C while it loaded the weights."


def test_another_program_s_port_and_assertion_are_not_the_server_s() -> None:
    port = "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8080): address already in use"
    test = [
        "Traceback (most recent call last):",
        '  File "/src/tests/test_speed.py", line 9, in test',
        "AssertionError",
    ]
    assert failure(BANNER, READY, ANSWER, port).outcome == "started"
    assert failure(BANNER, READY, ANSWER, *test).outcome == "started"


def test_an_offline_run_that_finished_is_no_cut_log() -> None:
    engine = (
        "INFO 11-20 10:00:00 [core.py:93] Initializing a V1 LLM engine (v0.12.0) with config: model='Qwen/Qwen3-8B'"
    )
    assert failure(engine, LOADING, "Processed prompts: 100%|##########| 50/50 [00:29<00:00]").outcome == "finished"


def test_a_process_that_waits_for_another_hangs_or_compiles_and_shared_memory_is_not_named() -> None:
    waits = "INFO 08-13 11:27:02 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 seconds."
    answer = failure(BANNER, LOADING, waits)
    assert (answer.outcome, answer.cause) == ("cut", "nccl_or_multiprocess")
    assert summary(answer) == "vLLM waits: one of its processes hangs, compiles or loads, and the others wait for it."
    assert failure(BANNER, LOADING, waits, READY, ANSWER).cause is None


def test_a_kernel_s_build_lock_is_what_it_waits_for() -> None:
    answer = failure(BANNER, LOADING, "[aiter] waiting for baton release at /jit/build/lock_module_moe_sorting")
    assert (answer.outcome, answer.evidence[0].line) == ("cut", 3)
    assert "lock" in answer.needs[0]


def test_a_healthy_log_is_one_line_and_exit_code_0(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join([BANNER, READY, ANSWER, TOO_LONG, REFUSED, ANSWER]), encoding="utf-8")
    ran = run("why", path, "--exit-code")
    assert ran.code == 0
    assert ran.out.strip() == "vLLM is ready: 2 requests answered, 1 request refused as too long."
    start = run("why", path, "--format", "json").json["starts"][0]
    assert (start["end"], start["answered"], start["refused"], start["too_long"]) == ("running", 2, 1, 1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "59 s"), (60, "1 min"), (7_199, "1 h"), (21_660, "6 h"), (172_800, "2 days")]
)
def test_a_time_has_its_largest_unit(seconds: int, text: str) -> None:
    assert duration(seconds) == text


@needs_oracle_data
def test_whole_logs_of_public_servers_are_in_their_state_and_no_healthy_one_is_called_dead() -> None:
    records = [json.loads(line) for line in (DATA / "corpus_logs.jsonl").read_text("utf-8").splitlines()]
    rows = score_states(records)
    assert [row["id"] for row in rows if row["false_alarm"]] == []
    assert sum(row["verdict"] == "right" for row in rows) >= 0.97 * len(rows)
    assert all(lines_of(record) for record in records)


def test_another_container_of_the_same_compose_log_is_not_the_server() -> None:
    lines = [f"vllm-1  | {line}" for line in (BANNER, LOADING, NO_MEMORY)]
    others = [f"web-1   | {line}" for line in (READY, ANSWER)]
    assert failure(*lines, *others).outcome == "failed"


def test_an_engine_s_failure_is_not_followed_by_its_own_answers() -> None:
    """A proxy in the same file goes on answering."""
    assert failure(BANNER, READY, ANSWER, DEAD, READY, ANSWER).outcome == "died"


def test_an_import_s_error_before_an_offline_run_s_prompts_did_not_end_it() -> None:
    """TensorFlow's imports print it in notebooks; the engine loads and the run goes on."""
    stray = "AttributeError: 'MessageFactory' object has no attribute 'GetPrototype'"
    assert (
        failure(ENGINE_LINE, stray, "Processed prompts: 100%|##########| 2005/2005 [20:01<00:00]").outcome == "finished"
    )


def test_a_field_that_pydantic_refuses_is_quoted_with_its_name() -> None:
    fields = ("max_lora_rank", "  Input should be 1, 8 or 16 [type=literal_error, input_value=48, input_type=int]")
    read = failure("pydantic_core._pydantic_core.ValidationError: 1 validation error for LoRAConfig", *fields)
    assert [line.text for line in read.evidence] == [line.strip() for line in fields]
