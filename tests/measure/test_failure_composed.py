"""Logs that were composed of the servers' own words and form (runtimes' stamps, journals, JSON lines, actors, long
traces, cut ends) before anybody looked at what kvplan says of them; `first_look` keeps what it said then: of the first
set 45 of 54 right and 4 wrong, of the second, written after its rules were added, 27 of 27 right."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.measure.failure import read_failure
from kvplan.measure.failure_messages import cause_of
from kvplan.servers.base import failures_of_servers

LINES = (Path(__file__).resolve().parents[1] / "facts" / "failures_composed.jsonl").read_text(encoding="utf-8")
CASES: list[dict[str, Any]] = [json.loads(line) for line in LINES.splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_composed_log_is_of_its_server_and_tells_its_cause(case: dict[str, Any]) -> None:
    failure = read_failure(case["text"])
    assert (failure.server, failure.outcome, failure.cause) == (case["server"], case["outcome"], case["cause"])


@pytest.mark.parametrize("ending", ["\r", "\x1b[0m", "  "])
def test_what_a_terminal_puts_at_the_end_of_lines_changes_nothing(ending: str) -> None:
    for case in CASES:
        assert read_failure([line + ending for line in case["text"]]).cause == case["cause"], case["name"]


@pytest.mark.parametrize(
    ("message", "cause"),
    [  # of vLLM 0.33 and SGLang 0.5.23, none of them in a table
        ("NVFP4 KV cache requires FP8 quantized queries for trtllm-gen prefill.", "kv_dtype_unsupported"),
        ("MXFP8 KV cache does not support SGLANG_USE_HND_KVCACHE.", "kv_dtype_unsupported"),
        ("FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.", "dtype_or_capability"),
        ("Attention sink heads (64) must be divisible by tp_size (3)", "heads_not_divisible_by_tp"),
        ("W4AFP8 shape_k = 704 must be divisible by group_size = 128.", "quantization_mismatch"),
        ("Not enough resources to allocate 4 placement groups, only created 2", "too_few_gpus"),
        ("memfabric host memory exhausted: need 64GB, only 12GB left", "host_memory_or_shm"),
        ("a pool of one request; Raise --mem-fraction-static, lower the batch", "sglang_not_enough_memory"),
        ("--hicache-host-memory-mode buffer_only requires a storage backend", None),
        ("Token id 151999 is out of vocabulary", None),
        ("The layout of q is not supported", None),
    ],
)
def test_a_message_of_no_table_is_read_by_what_it_speaks_of(message: str, cause: str | None) -> None:
    own = {name: pattern for failures in failures_of_servers().values() for name, pattern in failures.kinds.items()}
    assert cause_of(message, own) == cause
