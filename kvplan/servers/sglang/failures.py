"""SGLang's messages when it did not start, ran out of memory or stopped, by release, and the start-up phase of its
functions.

Compared with the source of 9 releases, 0.3.6 to 0.5.23 (tests/measure/test_failure_wordings.py).
"""

from typing import Final

from kvplan.servers.logs.failures import TOLD_BY_FRAMES, Cause, Failures, Order, Phase, Wording

_RUNNER: Final = "srt/model_executor/model_runner.py"
_BATCH: Final = "srt/managers/schedule_batch.py"
_ALLOCATED: Final = (
    r"Try to allocate <tried_tokens> tokens",
    r"Available tokens: <available_tokens>",
    r"available_tokens=<available_tokens>",
    r"Available full tokens: <available_tokens>",
)


def _row(
    cause: Cause, phrase: str, releases: str, source: str, phase: Phase | None = None, *figures: str, needs: str = "",
    unless: str = "", fatal: bool = True,
) -> Wording:  # fmt: skip
    return Wording(
        cause, phrase, releases, f"SGLang {source}", figures, needs=needs, unless=unless, phase=phase, fatal=fatal
    )


WORDINGS: Final[tuple[Wording, ...]] = (
    # the pool
    _row(
        "sglang_not_enough_memory", "Not enough memory. Please try to increase --mem-fraction-static", "0.2-0.5.23",
        _RUNNER, "pool", r"mem_fraction_static=<mem_fraction>",
    ),
    Wording(  # a pool of negative size: the error follows
        "sglang_not_enough_memory", "is larger than the profiled value", "0.2-0.5.23", f"SGLang {_RUNNER}",
        needs="profiled value -[0-9]", phase="pool", strength="hint",
    ),
    _row(
        "sglang_not_enough_memory", "Loaded weights leave no GPU memory for the KV cache", "0.5.23",
        "srt/mem_cache/kv_cache_configurator.py", "pool", r"--mem-fraction-static=<mem_fraction>\.?",
        r"mem-fraction-static to at least <least_share>(?:\.|$|[^0-9])",
    ),
    _row("sglang_not_enough_memory", "Not enough GPU memory for hybrid", "0.5.13-0.5.23", "srt/mem_cache", "pool"),
    _row(
        "sglang_not_enough_memory", "state cache is too small to serve any requests", "0.5.13-0.5.23",
        "srt/mem_cache", "pool",
    ),
    _row(
        "sglang_not_enough_memory", "Memory pool size is too small", "0.3-0.5.23", "srt/managers/tp_worker.py", "pool",
    ),
    _row(
        "sglang_not_enough_memory", "Not enough space for mamba", "0.5.2-0.5.23",
        "srt/mem_cache/memory_pool.py", "serving",
    ),
    # requests
    _row(
        "sglang_oom_prefill", "Prefill out of memory", "0.4.6-0.5.23", _BATCH, "serving",
        *_ALLOCATED,
    ),
    _row(
        "sglang_oom_prefill", "Out of memory. Try to lower your batch size", "0.5.5-0.5.23", _BATCH, "serving",
        *_ALLOCATED,
    ),
    _row("request_slots", "alloc_req_slots runs out of memory", "0.4.6-0.5.23", _BATCH, "serving"),
    _row(
        "sglang_oom_decode_retract", "Decode out of memory. Try", "0.4.6-0.5.23", _BATCH,
        "serving", *_ALLOCATED,
    ),
    # functions with a single reason to raise, for pastes that end before the message
    Wording(
        "sglang_oom_prefill", "in alloc_paged_token_slots_extend", "0.4.9-0.5.23", "SGLang's code of these releases",
        needs="in alloc_paged_token_slots_extend raise RuntimeError", phase="serving",
    ),
    Wording(
        "sglang_oom_decode_retract", "in alloc_paged_token_slots_decode", "0.4.9-0.5.23",
        "SGLang's code of these releases", needs="in alloc_paged_token_slots_decode raise RuntimeError",
        phase="serving",
    ),
    _row(
        "sglang_oom_decode_retract", "Decode out of memory happened", "0.2-0.4.6", "srt/managers/scheduler.py",
        "serving", r"#retracted_reqs: <retracted>", fatal=False,
    ),
    _row(
        "sglang_oom_decode_retract", "KV cache pool is full. Retract requests", "0.4.9-0.5.23",
        "srt/managers/scheduler.py", "serving", r"#retracted_reqs: <retracted>", fatal=False,
    ),
    _row("sglang_oom_decode_retract", "No space left for only one request", "0.2-0.5.5", _BATCH, "serving"),
    _row("sglang_oom_decode_retract", "retract_decode: aborted last request", "0.5.13-0.5.23", _BATCH, "serving"),
    # other processes on the GPU: an error or, since 0.5.9, a warning
    _row(
        "free_memory_below_utilization", "The memory capacity is unbalanced", "0.2-0.5.23", _RUNNER, "load",
        needs=r"(?:ValueError|RuntimeError): The memory capacity",
    ),
    # arguments
    _row(
        "max_len_above_model", "is greater than the derived context_length", "0.2-0.5.23",
        "srt/configs/model_config.py",
        "arguments", r"context_length \(<context>\) is greater", r"derived context_length \(<derived_max_len>\)",
        needs=r"To allow overriding|ValueError",
    ),
    Wording(
        "sglang_not_enough_memory", "Not enough memory", "0.2-0.5.23", f"SGLang {_RUNNER}, cut", phase="pool",
        strength="hint",
    ),
    _row("dtype_or_capability", "SGLang only supports sm75 and above", "0.3.6-0.5.23", _RUNNER, "arguments"),
    _row(
        "heads_not_divisible_by_tp", "tp_size must be divisible by number of nodes", "0.3.6-0.5.23",
        "srt/server_args.py",
    ),
)  # fmt: skip

# Functions of SGLang in a traceback -> their start-up phase; the first row found in a trace decides.
FRAMES: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("host_memory_or_shm", frozenset({"alloc_with_host_register", "alloc_with_pin_memory", "pin_memory"})),
    ("lora_memory", frozenset({"init_lora_manager", "load_lora_adapter", "load_lora_weights", "init_memory_pools"})),
    (
        "capture",
        frozenset(
            {
                "capture", "capture_one_batch_size", "capture_one_shape", "capture_one", "capture_prepare",
                "init_cuda_graphs", "init_device_graphs", "init_piecewise_cuda_graphs", "init_decode_cuda_graph",
                "init_prefill_cuda_graph", "_capture_graph", "_capture_cuda_graphs", "_capture_one_stream", "_capture",
                "_init_and_capture", "warmup_torch_compile", "capture_end", "capture_begin",
            }
        ),
    ),
    (
        "load",
        frozenset(
            {
                "load_model", "create_weights", "process_weights_after_loading", "_initialize_model", "get_model",
                "make_layers", "load_weights",
            }
        ),
    ),
    ("pool", frozenset({"init_memory_pool", "alloc_memory_pool", "_init_pools", "_create_buffers",
                        "_build_token_to_kv_pool"})),
    (
        "prefill",
        frozenset(
            {
                "forward_extend", "forward_split_prefill", "prepare_for_extend", "get_new_batch_prefill",
                "_execute_extend", "_execute_extend_cp", "_execute_tc_piecewise",
            }
        ),
    ),
    (
        "serving",
        frozenset(
            {
                "forward_decode", "_execute_decode", "run_batch", "event_loop_overlap", "event_loop_normal",
                "forward_thread_func_", "forward_batch_generation", "replay", "dispatch_event_loop",
            }
        ),
    ),
)  # fmt: skip

# Healthy lines -> the start-up phase that follows them.
MARKS: Final[tuple[tuple[str, Phase], ...]] = (
    ("Load weight begin", "load"),
    ("Load weight end", "pool"),
    ("Memory pool end", "capture"),
    ("graph begin.", "capture"),
    ("graph end.", "warmup"),
)
READY: Final = ("The server is fired up and ready to roll", "Uvicorn running on", "Application startup complete",
                "Prefill batch", "Decode batch")  # fmt: skip
PROCESSES: Final = (  # prefixes of their lines, and how they refer to each other
    r"^\[[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}(?: (?:DP|TP|PP|EP|CP|ATTN_\w{2})[0-9]{1,3}){1,5}\]",
    r"Scheduler hit an exception|Received sigquit from a child process",
)
STARTS: Final = ("server_args=ServerArgs(",)

FAILURES: Final = Failures(
    WORDINGS,
    FRAMES,
    MARKS,
    READY,
    STARTS,
    # Running out of memory while the pool is allocated or kernels are warmed up has no cause in the list.
    parts={
        "load": ("oom_loading_weights", "load"),
        "pool": (None, "pool"),
        "capture": ("sglang_cuda_graph_failed", "capture"),
        "warmup": (None, "warmup"),
        "prefill": ("sglang_oom_prefill", "serving"),
        "serving": ("oom_runtime", "serving"),
        **TOLD_BY_FRAMES,
    },
    files=("sglang/srt", "sglang.launch_server"),
    own_marks=True,
    sent_back="sglang_oom_decode_retract",
    causes={
        "sglang_not_enough_memory": "pool_after_weights",
        "sglang_oom_prefill": "oom_prefill",
        "sglang_oom_decode_retract": "oom_decode",
        "sglang_cuda_graph_failed": "oom_graphs",
    },
    processes=PROCESSES,
    of_releases=(
        ("Current value: self.server_args.mem_fraction_static=", "0.5.5-0.5.9"),
        ("Current value: mem_fraction_static=", "0.5.13-0.5.23"),
        ("#new_tokens_gained", "0.5.9-0.5.23"),
    ),
    raised_again={"capture": frozenset({"init_model_worker", "init_tp_model_worker", "TpModelWorker"})},
    alive=READY,
    deaths=("Received sigquit from a child process",),
    orders=(Order("Gracefully exiting"),),  # srt/managers/tokenizer_manager.py
    frontend=("serving_", "http_server.py"),
    modules=("/sglang/srt/", "/sglang/launch_server"),
    kinds={"sglang_not_enough_memory": r"(?:increase|raise|larger).{0,20}--mem-fraction-static"},
)
