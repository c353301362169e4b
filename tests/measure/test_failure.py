"""What a failed server's log says of its end. The logs are short ones, in the words of the servers' own source."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from kvplan.measure.failure import Failure, read_failure
from kvplan.servers.logs.failures import MEMORY_CAUSES, Size
from kvplan.servers.logs.obstacles import OF_CAUSE
from tests.support.oracle_data import DATA, needs_oracle_data

GIB = 1 << 30
FACTS = Path(__file__).resolve().parents[1] / "facts"


def read(text: str) -> Failure:
    return read_failure(text.strip("\n").splitlines())


KV_TOO_SMALL = "a context above the pool"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 278.75 MiB is free. Including non-PyTorch memory, this process has 78.97 GiB memory in use. Of the "
    "allocated memory 70.38 GiB is allocated by PyTorch, and 115.78 MiB is reserved by PyTorch but unallocated."
)


def vllm_trace(*functions: str, error: str = OOM, prefix: str = "ERROR 02-11 10:00:00 [core.py:708] ") -> str:
    """A traceback through vLLM's functions that ends in an error."""
    frames = [
        f'  File "/venv/vllm/v1/worker/gpu_worker.py", line {n}, in {name}' for n, name in enumerate(functions, 9)
    ]
    return "\n".join(prefix + line for line in ["Traceback (most recent call last):", *frames, error])


def sglang_trace(*functions: str, error: str = OOM, rank: str = "TP0") -> str:
    """A traceback through SGLang's functions that ends in an error."""
    frames = [
        f'  File "/sglang/srt/model_executor/model_runner.py", line {n}, in {f}' for n, f in enumerate(functions, 9)
    ]
    head = f"[2026-02-11 10:00:00 {rank}] Scheduler hit an exception: Traceback (most recent call last):"
    return "\n".join([head, *frames, error])


WRAPPED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
# --- one log a cause

CASES = {
    case["name"]: case for case in map(json.loads, (FACTS / "failures.jsonl").read_text(encoding="utf-8").splitlines())
}


def case(name: str) -> str:
    return "\n".join(CASES[name]["text"])


@pytest.mark.parametrize("name", CASES)
def test_the_cause_and_the_part_of_start_up_are_named(name: str) -> None:
    failure, expected = read(case(name)), CASES[name]
    read_as = (failure.server, failure.outcome, failure.cause, failure.phase)
    assert read_as == (expected["server"], expected["outcome"], expected["cause"], expected["phase"])
    assert failure.memory_question is (expected["cause"] in MEMORY_CAUSES)
    assert failure.evidence
    assert not failure.needs


# --- figures


def test_a_context_above_the_pool_states_every_figure_of_its_line() -> None:
    failure = read(case(KV_TOO_SMALL))
    assert [line.line for line in failure.evidence] == [1]
    figures = failure.figures
    assert (figures.context, figures.estimated_max_len) == (131072, 81664)
    assert figures.needed_bytes is not None
    assert figures.needed_bytes.bytes == 16 * GIB
    assert figures.available_bytes is not None
    # vLLM divides and rounds to two decimals: 9.965 to 9.975 GiB.
    assert Fraction(figures.available_bytes.low, GIB) >= Fraction("9.965")
    assert Fraction(figures.available_bytes.high, GIB) <= Fraction("9.975")


def test_torch_states_what_it_tried_and_whose_the_memory_is() -> None:
    figures = read(vllm_trace("capture_model")).figures
    sizes = (
        figures.tried_bytes,
        figures.total_bytes,
        figures.free_bytes,
        figures.in_use_bytes,
        figures.allocated_bytes,
    )
    assert [size.text if size else None for size in sizes] == [
        "594.00MiB",
        "79.25GiB",
        "278.75MiB",
        "78.97GiB",
        "70.38GiB",
    ]


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("too few states", {"max_num_seqs": 1024, "blocks": 512}),
        ("a context above the pool of the first engine", {"context": 32768, "kv_tokens": 16864}),
        ("other processes on the GPU", {"utilization": 0.9}),
        ("an item above the batch", {"item_tokens": 16384, "max_num_batched_tokens": 8192}),
        ("an item above the encoder's cache", {"item_tokens": 6042, "encoder_cache_tokens": 4800}),
        ("a context above the model's", {"context": 65536, "derived_max_len": 32768}),
        ("heads", {"heads": 32, "tensor_parallel_size": 3}),
        ("fewer GPUs than ranks", {"world_size": 16, "gpus": 8}),
        ("a dtype that the GPU does not have", {"capability": "7.5", "required_capability": "8.0"}),
        ("quantization", {"quantization": "awq"}),
        ("the sampler's warm-up, in the server's words", {"dummy_requests": 1024}),
        ("SGLang's pool", {"mem_fraction": 0.2}),
        ("SGLang's pool of prompts", {"tried_tokens": 9000, "available_tokens": 4096}),
        ("SGLang takes requests back, and goes on", {"retracted": 2}),
    ],
)
def test_the_line_states_figures(name: str, stated: dict[str, object]) -> None:
    figures = read(case(name)).figures
    assert {key: getattr(figures, key) for key in stated} == stated


def test_sizes_that_are_free_and_wanted_are_ranges_of_bytes() -> None:
    figures = read(case("other processes on the GPU")).figures
    assert figures.free_bytes is not None
    assert figures.total_bytes is not None
    assert figures.budget_bytes is not None
    assert figures.free_bytes.low < 19.77 * GIB < figures.free_bytes.high < figures.budget_bytes.low
    assert figures.total_bytes.text == "22.05GiB"


# --- the traps of real pastes

CAPTURE_ADVICE = (
    "Possible solutions:\n1. disable cuda graph by --disable-cuda-graph\n"
    "2. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\nsglang"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("TypeError: 'NoneType' object is not subscriptable", "not_memory"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "kernel_crash"),
        ("CUDA error: no kernel image is available for execution on the device", "dtype_or_capability"),
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer", "nccl_or_multiprocess"),
    ],
)
def test_trap_1_a_capture_that_failed_is_what_its_error_says_whatever_it_advises(error: str, cause: str) -> None:
    failure = read(f"Exception: Capture cuda graph failed: {error}\n{CAPTURE_ADVICE}")
    assert (failure.cause, failure.memory_question) == (cause, False)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 196608.",
    ],
)
def test_trap_2_memory_on_the_chip_and_illegal_access_are_no_lack_of_memory(error: str) -> None:
    assert read(vllm_trace("profile_run", error=error)).memory_question is False


HEALTHY = """
INFO 02-11 10:00:01 [gpu_model_runner.py:1273] Model loading took 14.43 GiB and 20.49 seconds
INFO 02-11 10:00:02 [gpu_worker.py:298] Available KV cache memory: 9.97 GiB
INFO 02-11 10:00:03 [model_runner.py:1434] Capturing cudagraphs for decoding. If out-of-memory error occurs during \
cudagraph capture, consider decreasing `gpu_memory_utilization` or switching to eager mode.
WARNING 02-11 10:00:03 [arg_utils.py:1536] The model has a long context length (131072). This may cause OOM during the \
initial memory profiling phase, or result in low performance due to small KV cache size.
INFO 02-11 10:00:04 [gpu_worker.py:391] Free memory on device (78.6/79.2 GiB) on startup. Desired GPU memory \
utilization is (0.9, 71.3 GiB). Actual usage is 14.43 GiB for weight, 1.2 GiB for peak activation.
INFO 02-11 10:00:05 [gpu_model_runner.py:1608] Graph capturing finished in 62 secs, took 2.65 GiB
"""


def test_trap_3_healthy_lines_with_the_words_are_no_failure() -> None:
    assert read(HEALTHY).cause is None
    failure = read(HEALTHY + "INFO:     Application startup complete.")
    assert (failure.outcome, failure.cause, failure.evidence) == ("started", None, ())


def test_trap_4_the_wrapper_is_never_the_cause() -> None:
    wrapper = "Exception: WorkerProc initialization failed due to an exception in a background process."
    failure = read(f"{wrapper}\n{WRAPPED}")
    assert (failure.outcome, failure.cause, failure.memory_question) == ("failed", None, None)
    assert "above" in failure.needs[0]
    long = "\n".join(f'  File "/venv/vllm/v1/engine/core.py", line {n}, in wait_for_ready' for n in range(300))
    assert read(f"{case(KV_TOO_SMALL)}\n{long}\n{wrapper}\n{WRAPPED}").cause == "kv_too_small_for_max_len"


def test_trap_5_the_share_s_direction_is_told_by_the_cause() -> None:
    up, down = read(case("no pool at all")), read(case("other processes on the GPU"))
    assert (up.cause, down.cause) == ("no_kv_memory", "free_memory_below_utilization")


def test_trap_6_out_of_memory_with_room_states_both_figures() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.19 GiB. GPU 0 has a total capacity of \
23.99 GiB of which 14.71 GiB is free."
    figures = read(vllm_trace("capture_model", error=text)).figures
    assert figures.tried_bytes is not None
    assert figures.free_bytes is not None
    assert figures.tried_bytes.high < figures.free_bytes.low


def test_trap_7_another_process_on_the_gpu_is_counted() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacity \
of 79.19 GiB of which 77.44 MiB is free. Process 3321 has 7.29 GiB memory in use. Including non-PyTorch memory, \
this process has 71.8 GiB memory in use."
    figures = read(vllm_trace("capture_model", error=text)).figures
    assert figures.other_process_bytes is not None
    assert figures.other_process_bytes.text == "7.29GiB"


def test_trap_8_of_two_attempts_the_last_one_counts() -> None:
    start = "INFO 02-11 10:00:00 [api_server.py:1043] vLLM API server version 0.11.0\n"
    failure = read(start + case("no pool at all") + "\n" + start + case("the sampler's warm-up, in the profile"))
    assert failure.cause == "oom_sampler_warmup"
    assert failure.version == "0.11.0"


# --- forms of a paste


def test_a_line_that_a_terminal_wrapped_inside_a_word_is_read() -> None:
    text = case(KV_TOO_SMALL)
    wrapped = text.replace("cache is needed", "cac\nhe is needed").replace("available KV", "availab\nle KV")
    assert wrapped.count("\n") == text.count("\n") + 2
    assert read(wrapped).figures == read(text).figures


def test_a_paste_that_lost_its_newlines_is_read() -> None:
    text = vllm_trace("determine_available_memory", "profile_run")
    assert read(text.replace("\n", " ")).cause == "oom_profile_run"


def test_a_traceback_of_python_3_13_has_the_message_in_its_source_lines_only() -> None:
    text = """
(Worker pid=2) ERROR 10-25 13:12:42 [multiproc_executor.py:671]     raise ValueError(
(Worker pid=2) ERROR 10-25 13:12:42 [multiproc_executor.py:671]         "No available memory for the cache blocks. "
(Worker pid=2) ERROR 10-25 13:12:42 [multiproc_executor.py:671]         "Try increasing `gpu_memory_utilization` when "
"""
    assert read(text).cause == "no_kv_memory"


@pytest.mark.parametrize(
    "prefix",
    [
        "vllm-1  | ",
        "> ",
        "2026-02-11T10:00:00.123456789Z stderr F ",
        "[pod/llm-0/server] ",
        "\x1b[0;36m(EngineCore_DP0 pid=71)\x1b[0;0m ",
        "^[[0;36m(Worker_PP2_TP1_EP1 pid=7)^[[0;0m ",
        "(RayWorkerWrapper pid=9, ip=10.0.0.1) ",
        "2026-02-11 10:00:00.123456+08:00 - gpustack.worker - INFO - ",
    ],
)
def test_what_a_collector_puts_before_a_line_changes_nothing(prefix: str) -> None:
    text = "\n".join(prefix + line for line in vllm_trace("determine_available_memory", "profile_run").splitlines())
    failure = read(f"```text\n{text}\n```")
    assert (failure.cause, failure.figures) == ("oom_profile_run", read(vllm_trace("profile_run")).figures)


def test_docker_s_records_are_unwrapped() -> None:
    lines = [json.dumps({"log": line + "\n", "stream": "stderr"}) for line in case(KV_TOO_SMALL).splitlines()]
    assert read_failure(lines).figures == read(case(KV_TOO_SMALL)).figures


def test_ranks_are_told_and_the_first_line_is_the_evidence() -> None:
    lines = [f"(Worker_TP{rank} pid={rank}) ERROR 02-11 10:00:00 [m.py:9] {OOM}" for rank in (1, 0)]
    text = '(Worker_TP1 pid=1) ERROR 02-11 10:00:00 [m.py:9]   File "w.py", line 9, in capture_model\n' + "\n".join(
        lines
    )
    failure = read(text)
    assert (failure.cause, failure.ranks) == ("oom_cuda_graph_capture", ("TP1", "TP0"))
    assert [line.line for line in failure.evidence] == [1, 2]


def test_lines_of_other_ranks_do_not_tell_a_rank_s_part_of_start_up() -> None:
    other = '(Worker_TP0 pid=1)   File "w.py", line 9, in profile_run'
    own = '(Worker_TP1 pid=2)   File "w.py", line 9, in load_model'
    assert read(f"vllm\n{own}\n{other}\n(Worker_TP1 pid=2) {OOM}").cause == "oom_loading_weights"


# --- the part of start-up without a trace

MARKS = [
    ("INFO 02-11 10:00:00 [gpu_model_runner.py:1] Starting to load model m...", "oom_loading_weights"),
    ("INFO 02-11 10:00:00 [gpu_model_runner.py:1] Model loading took 14.43 GiB and 9.1 seconds", "oom_profile_run"),
    ("INFO 02-11 10:00:00 [kv_cache_utils.py:1] GPU KV cache size: 9,168 tokens", None),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  88%", "oom_cuda_graph_capture"),
    (
        "INFO 02-11 10:00:00 [gpu_model_runner.py:1] Graph capturing finished in 9 secs, took 2.65 GiB",
        "oom_sampler_warmup",
    ),
]


@pytest.mark.parametrize(("mark", "cause"), MARKS)
def test_the_healthy_line_before_it_tells_the_part_of_start_up(mark: str, cause: str | None) -> None:
    failure = read(f"vllm serve m\n{mark}\n{OOM}")
    assert failure.cause == cause
    assert failure.memory_question is True


def test_out_of_memory_alone_asks_for_the_lines_above() -> None:
    failure = read(f"vllm serve m\n{OOM}")
    assert (failure.outcome, failure.cause, failure.memory_question) == ("failed", None, True)
    assert "traceback" in failure.needs[0]
    assert failure.figures.tried_bytes is not None


def test_the_sort_of_the_sampler_s_warm_up_is_known_by_its_size() -> None:
    # 1,024 requests x 152,064 tokens x (4 + 8) bytes = 1,868,562,432 bytes = 1.74 GiB.
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity of \
23.57 GiB of which 605.88 MiB is free. Of the allocated memory 20.21 GiB is allocated by PyTorch, with 128.00 \
MiB allocated in private pools (e.g., CUDA Graphs)"
    assert read(f"(VllmWorker rank=1 pid=2) {text}").cause == "oom_sampler_warmup"
    assert read(f"(VllmWorker rank=1 pid=2) {text.replace('1.74', '1.54')}").cause is None


def test_a_title_with_the_error_goes_with_the_log_below_that_ends_in_an_error() -> None:
    title = "[Bug]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB."
    capturing = "INFO 02-11 10:00:00 [model_runner.py:1434] Capturing cudagraphs for decoding."
    assert read(f"{title}\n{capturing}\nERROR 02-11 10:00:09 [worker_base.py:620] Error exec").cause == (
        "oom_cuda_graph_capture"
    )
    assert read(f"{title}\nvllm\n{capturing}").cause is None  # a start that goes well, of another release perhaps


def test_a_sort_of_the_warm_up_s_size_in_a_trace_through_the_sampler_is_the_warm_up() -> None:
    # 256 requests x 152,064 tokens x 8 bytes of places = 297 MiB, which torch rounds up to 298.
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 298.00 MiB. GPU 0 has 98.25 MiB free, with \
66.00 MiB allocated in private pools (e.g., CUDA Graphs)"
    assert read(vllm_trace("forward_native", "apply_top_k_top_p", error=error)).cause == "oom_sampler_warmup"
    assert read(vllm_trace("forward_native", error=error)).cause is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (vllm_trace("init_device", "request_memory", error="    raise ValueError("), "free_memory_below_utilization"),
        (vllm_trace("init_device", "request_memory", error="    return memory"), None),
        ("ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on", "free_memory_below_utilization"),
        ("vllm\nValueError: User-specified max_model_len (204800) is", "max_len_above_model"),
        ("OOM\n" + vllm_trace("execute_model", error="    return func("), "oom_runtime"),
        ('OOM, vllm\n  File "/vllm/worker/model_runner.py", line 9, in execute_model', None),  # the profile, perhaps
        (vllm_trace("_dummy_sampler_run", error="    raise RuntimeError("), "oom_sampler_warmup"),
        (vllm_trace("_dummy_sampler_run", error="    raise e"), None),
        (sglang_trace("alloc_paged_token_slots_extend", error="    raise RuntimeError(error_m"), "sglang_oom_prefill"),
        (sglang_trace("alloc_paged_token_slots_decode", error="    raise RuntimeError("), "sglang_oom_decode_retract"),
    ],
)
def test_a_function_that_raises_for_one_reason_tells_it_where_the_message_is_cut(text: str, cause: str | None) -> None:
    assert read(text).cause == cause


def test_the_figures_are_those_of_the_message_below_the_function() -> None:
    message = case("other processes on the GPU")
    text = vllm_trace("request_memory", error="    raise ValueError(")
    assert read(f"{text}\n{message}").figures == read(message).figures


def test_an_error_of_another_kind_below_out_of_memory_is_not_its_cause() -> None:
    failure = read(f"vllm serve m\n{OOM}\nRuntimeError: CUDA error: an illegal memory access was encountered")
    assert (failure.cause, failure.memory_question) == (None, True)


# --- words


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("vllm crashes during CUDA graph capture, OOM", "oom_cuda_graph_capture"),
        ("vllm: OOM while loading the model weights", "oom_loading_weights"),
        ("Fix CUDA graph capture OOM in vllm", "oom_cuda_graph_capture"),
        ("vllm: CUDA OOM during sampler warmup", "oom_sampler_warmup"),
        ("vllm: OOM during memory profiling", "oom_profile_run"),
        ("the vllm container is killed by Kubernetes when memory crosses the limit", "host_memory_or_shm"),
        ("vllm does not support FA3 with kv cache dtype fp8", "kv_dtype_unsupported"),
        ("sglang: prefill OOM with long prompts", "sglang_oom_prefill"),
        ("vllm serve fails: fp8 kv cache not supported", "kv_dtype_unsupported"),
        ("I get out of memory with vllm, please help", None),
        ("it does not work, please help", None),
        ("vllm serve m --kv-cache-dtype fp8 --enforce-eager fails", None),
    ],
)
def test_words_name_a_cause_only_where_they_leave_no_doubt(text: str, cause: str | None) -> None:
    failure = read(text)
    assert failure.cause == cause
    assert bool(failure.needs) is (cause is None)


def test_a_sentence_tells_the_part_of_start_up_and_the_error_s_line_the_figures() -> None:
    failure = read(f"[Bug]: OOM during weight loading\n(EngineCore_DP0 pid=5) {OOM}")
    assert failure.cause == "oom_loading_weights"
    assert [line.line for line in failure.evidence] == [1, 2]
    assert failure.figures == read(f"(EngineCore_DP0 pid=5) {OOM}").figures


def test_a_title_that_says_oom_and_a_trace_whose_last_line_is_cut_go_together() -> None:
    text = vllm_trace("determine_available_memory", "profile_run", error="    return func(*args)")
    assert read(f"[Bug]: OOM on three cards\n{text}").cause == "oom_profile_run"
    assert read(text).cause is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("vllm serve m\nLoading checkpoint shards:  75% 3/4 [00:08<00:02,  2.83s/it]Killed", "host_memory_or_shm"),
        ("vllm serve m\nTraceback (most recent call last):\nKilled", None),
        (
            "vllm\nThe process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop is called.",
            None,
        ),
        ("sglang: max_total_tokens=131072 is larger than the profiled value -561981.", "sglang_not_enough_memory"),
        ("sglang: max_total_tokens=131072 is larger than the profiled value 61981.", None),
        ("vllm\nRuntimeError: No available KV cache blocks", None),  # no server's words
        (
            "('Quantization scheme is not supported for ', 'the current GPU. vllm Min capability: 80')",
            "dtype_or_capability",
        ),
        ("vllm: INFO # cuda blocks: 0, # CPU blocks: 4681", "no_kv_memory"),
        ("vllm: INFO # cuda blocks: 10, # CPU blocks: 4681", None),
        ("INFO 02-11 10:00:00 [gpu_worker.py:298] Available KV cache memory: -0.33 GiB", "no_kv_memory"),
        ("[Bug]: RAM OOM error loading a model of 480 GB with vllm", "host_memory_or_shm"),
        ("vllm\nFatal error: exitcode: -9 (pid 5)", "host_memory_or_shm"),
        ("sglang\nKeyError: 'x'\nScheduler or DataParallelController 7 terminated with -9", "not_memory"),
    ],
)
def test_signs_count_where_no_error_is(text: str, cause: str | None) -> None:
    assert read(text).cause == cause


# --- running


def test_preemptions_are_told_with_their_number_and_are_no_failure() -> None:
    text = "WARNING 02-11 10:00:00 [scheduler.py:1768] Sequence group 7 is preempted by PreemptionMode.RECOMPUTE \
mode because there is not enough KV cache space. total_num_cumulative_preemption=51"
    failure = read(text)
    assert (failure.outcome, failure.cause, failure.memory_question) == ("started", None, True)
    assert failure.figures.preemptions == 51


def test_a_server_that_takes_requests_back_and_then_dies_died_of_what_killed_it() -> None:
    text = case("SGLang takes requests back, and goes on") + "\n" + sglang_trace("run_batch", "forward_decode")
    assert read(text).cause == "oom_runtime"


def test_what_the_start_up_lines_say_comes_with_the_failure() -> None:
    log = read(HEALTHY + vllm_trace("capture_model")).log
    assert log is not None
    assert log.text("weights") == "14.43"


# --- public threads


@needs_oracle_data
def test_public_threads_get_their_cause_and_seldom_a_wrong_one() -> None:
    records = [json.loads(line) for line in (DATA / "server_failures.jsonl").read_text().splitlines()]
    logs = [record for record in records if record["text_kind"] == "log" and record["decisive_in_text"]]
    causes = [(record["cause"], read_failure(record["verbatim"]).cause) for record in logs]
    causes = [(label, "not_memory" if cause in OF_CAUSE else cause) for label, cause in causes]  # as the labels say
    wrong = [pair for pair in causes if pair[1] not in (pair[0], None)]
    right = [pair for pair in causes if pair[0] in (pair[1], "unknown" if pair[1] is None else pair[1])]
    assert len(right) >= 0.9 * len(logs), set(causes) - set(right)
    assert len(wrong) <= 0.04 * len(logs), wrong


# A figure's name in the labels -> here. Labels have two decimals at least.
LABELED = {
    "needed_kv_gib": "needed_bytes", "available_kv_gib": "available_bytes", "tried_to_allocate_gib": "tried_bytes",
    "free_gib": "free_bytes", "total_gib": "total_bytes", "in_use_gib": "in_use_bytes",
    "max_seq_len": "context", "estimated_max_len": "estimated_max_len", "dummy_requests": "dummy_requests",
    "mamba_blocks": "blocks", "max_num_seqs": "max_num_seqs", "world_size": "world_size",
    "local_world_size": "world_size", "visible_devices": "gpus", "mem_fraction_static": "mem_fraction",
    "item_tokens": "item_tokens", "encoder_cache_tokens": "encoder_cache_tokens", "initial_free_gib":
    "initial_free_bytes", "current_free_gib": "current_free_bytes",
}  # fmt: skip


@needs_oracle_data
def test_figures_that_people_read_in_public_threads_are_the_figures_read() -> None:
    equal, different = 0, []
    for line in (DATA / "server_failures.jsonl").read_text().splitlines():
        record = json.loads(line)
        figures = read_failure(record["verbatim"]).figures
        for name, labeled in (record["figures"] or {}).items():
            stated = getattr(figures, LABELED[name]) if name in LABELED else None
            if stated is None:  # of another line, or of words
                continue
            number = stated.bytes / GIB if isinstance(stated, Size) else stated
            if abs(number - labeled) <= (0.0055 if isinstance(stated, Size) else 0):
                equal += 1
            else:
                different.append((record["id"], name, labeled, number))
    assert not different
    assert equal >= 70


@needs_oracle_data
def test_lines_of_servers_that_started_are_no_failure() -> None:
    refusals = ("can be stored in KV cache", "exceeds available Mamba cache blocks", "KV cache memory: -")
    for line in (DATA / "log_lines.jsonl").read_text().splitlines():
        record = json.loads(line)
        refused = any(words in text for words in refusals for text in record["lines"])
        failure = read_failure(record["lines"])
        assert refused is (failure.outcome == "failed"), (record["id"], failure.evidence)


def test_a_log_that_ends_inside_a_traceback_asks_for_the_lines_below() -> None:
    start = "ERROR 05-07 02:14:18 [core.py:396] EngineCore failed to start."
    whole = vllm_trace("load_model", "initialize", error="")
    for lines in (whole.splitlines()[:-1], whole.splitlines()[:1]):
        needs = read("\n".join([start, *lines])).needs
        assert [need.startswith("the lines below it") for need in needs] == [True]
    repeated = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    assert [need.startswith("the lines above it") for need in read(repeated).needs] == [True]
