"""Start-up logs of servers, cut from what people posted or written by hand, and the rows that are made of one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Ran
from tests.support.readme_blocks import ROOT

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

# Llama-3.1-8B on one GPU of 79.19 GiB: 14.99 GiB of weights, 50 GiB of KV in 409,600 tokens of 131,072 bytes.
H100 = """\
INFO vLLM API server version 0.10.1
INFO non-default args: {'model': 'llama-3.1-8b', 'max_model_len': 8192, 'tensor_parallel_size': 1}
INFO Model loading took 14.99 GiB and 3 s
INFO Free memory on device (78.69/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB).
INFO Available KV cache memory: 50.00 GiB
INFO GPU KV cache size: 409,600 tokens
"""

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

# gpt-oss-20b on an H100 with 78.68 GiB free: two pools, of 12 layers that keep all tokens and 12 that keep a window.
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

# Qwen3-Next-80B-A3B on two GPUs: one pool of tokens, and 18.50 GB of states.
NEXT = """\
[2025-08-21 18:18:05] server_args=ServerArgs(model_path='Qwen/Qwen3-Next-80B-A3B-Instruct', tp_size=2, \
context_length=32768, mem_fraction_static=0.83, page_size=1, kv_cache_dtype='auto')
[2025-08-21 18:18:15 TP0] Load weight begin. avail mem=138.60 GB
[2025-08-21 18:18:15 TP0] Load weight end. type=Q, dtype=torch.bfloat16, avail mem=64.30 GB, mem usage=74.28 GB.
[2025-08-21 18:18:15 TP0] Mamba Cache is allocated. max_mamba_cache_size: 1000, conv_state size: 0.50GB, \
ssm_state size: 18.00GB
[2025-08-21 18:18:15 TP0] KV Cache is allocated. #tokens: 2000000, K size: 11.44 GB, V size: 11.44 GB
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


def pipeline(**usage: str) -> str:
    """Llama-3.1-70B on 4 stages of 2 ranks; usage: GiB that a rank's weights took.

    20 layers of 855,654,400 parameters are 15.94 GiB a rank, the embedding and the head, of 128,256 x 8,192 each, 0.98
    GiB more: the embedding on the first stage; the head is planned on every stage as of 0.5.23, on the last before.
    """
    lines = [
        f"[2025-08-21 18:18:15 {rank.replace('_', ' ')}] Load weight end. avail mem=100.00 GB, mem usage={gib} GB.\n"
        for rank, gib in usage.items()
    ]
    return (
        "[2025-08-21 18:18:05] server_args=ServerArgs(model_path='meta-llama/Llama-3.1-70B', tp_size=2, pp_size=4, "
        "context_length=8192, page_size=1, mem_fraction_static=0.85)\n" + "".join(lines)
    )


def without(text: str, *phrases: str) -> str:
    """A log less the lines in which one of the phrases stands."""
    return "".join(line for line in text.splitlines(keepends=True) if not any(phrase in line for phrase in phrases))


def rows_of(document: dict[str, Any], part: str = "rows") -> dict[str, dict[str, Any]]:
    """A part of a reconciliation's rows, by name."""
    return {row["name"]: row for row in document[part]}


def unplanned(ran: Ran) -> str:
    """Why nothing is compared with a log's figures, which are shown all the same."""
    assert ran.code == 0, ran
    problem = ran.out.splitlines()[0].removeprefix("Nothing is compared: ")
    assert problem != ran.out.splitlines()[0], ran.out
    rows = [line.split() for line in ran.out.splitlines()[4:]]
    assert {row[1] for row in rows} == {"-"}, "a prediction"
    return problem
