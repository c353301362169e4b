"""`kvplan reconcile --log`: why a server's figures and the plan's differ, and which of several ranks counts."""

import re
from typing import Any

from kvplan.core.units import GIB
from kvplan.measure.serverlog.compare import merged
from kvplan.servers.logs.measurement import ComponentRow
from tests.support.cli import Run, run
from tests.support.server_logs import LLAMA_3090, Log, log, rows_of, unplanned

__all__ = ["log", "run"]  # fixtures

# --- why they differ --------------------------------------------------------------------------------------------------

QWEN = """\
vLLM API server version 0.10.1
non-default args: {{'model': '{model}', 'max_model_len': {context}, 'gpu_memory_utilization': 0.9{more}}}
Available KV cache memory: {kv} GiB
{lines}GPU KV cache size: {tokens:,} tokens
"""


def why(run: Run, log: Log, **figures: Any) -> dict[str, Any]:
    text = QWEN.format(**{"more": "", "lines": "", "context": 4096, **figures})
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


MTP = ", 'kv_cache_dtype': 'fp8', 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 1}"


def test_layers_of_multi_token_prediction_are_sized_with_their_model(run: Run, log: Log) -> None:
    """A published log of Qwen3.5-122B-A10B with MTP on one GPU: 24.05 GiB held 482,080 tokens, 6.42 times 262,144.

    Without them the same pool would hold 522,000 tokens, or 7.62 times.
    """
    more = f"{MTP}, 'enable_prefix_caching': True"
    served = "Maximum concurrency for 262,144 tokens per request: 6.42x\n"
    text = QWEN.replace("0.10.1", "0.19.0").format(
        model="Qwen/Qwen3.5-122B-A10B", context=262_144, kv="24.05", tokens=482_080, more=more, lines=served
    )
    ran = run("reconcile", "--log", log(text), "--gpu", "b200", "--tp", "1", "--format", "json")
    rows = rows_of(ran.json, "given")
    assert "the server drafts tokens (mtp), which is sized as the log says it" in ran.err
    assert (rows["tokens"]["predicted"], rows["tokens"]["exact"]) == (482_080, True)
    assert rows["concurrency"]["exact"] is True


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
    assert "the server drafts tokens (eagle), which is not sized: speculative method eagle needs a draft" in ran.err
    assert "name one with --draft-model" in ran.err
    assert "drafts tokens" not in run("reconcile", "--log", log(text), "--gpu", "a100-80g", "-q").err


def test_ranks_with_unequal_room_are_said(run: Run, log: Log) -> None:
    lines = "(Worker_TP0 pid=1) Available KV cache memory: 9.50 GiB\n"
    more = ", 'tensor_parallel_size': 2"
    text = QWEN.format(model="llama-3.1-8b", context=4096, kv="10.00", tokens=155_648, more=more, lines=lines)
    ran = run("reconcile", "--log", log(text), "--gpu", "a100-80g", "--format", "json")
    assert "2 ranks have 9.50 to 10.00 GiB for KV; the smallest decides for all" in ran.err
    assert rows_of(ran.json, "given")["tokens"]["exact"] is True  # 9.5 GiB / 65,536 bytes: 155,648


def test_what_a_pasted_command_says_is_not_taken_from_the_log(run: Run, log: Log) -> None:
    pasted = "vllm serve meta-llama/Llama-3.1-8B-Instruct --kv_cache_dtype fp8 -tp 2"
    document = run("reconcile", "--log", log(LLAMA_3090), "--from-command", pasted, "--format", "json").json
    assert (document["tensor_parallel_size"], document["max_model_len"]) == (2, 20_000)


def test_what_nothing_explains_has_no_reason(run: Run, log: Log) -> None:
    row = why(run, log, model="llama-3.1-8b", kv="10.00", tokens=60_000)
    assert (row["why"], row["exact"]) == (None, False)


def test_ranks_without_a_split_are_not_compared(run: Run, log: Log) -> None:
    lines = "(Worker_TP0 pid=1) Available KV cache memory: 9 GiB\n(Worker_TP1 pid=2) Available KV cache memory: 9 GiB\n"
    text = QWEN.format(model="llama-3.1-8b", context=4096, kv="9", tokens=5000, more="", lines=lines)
    assert unplanned(run("reconcile", "--log", log(text))) == (
        "log: figures of several ranks (TP0, TP1), but not how the model is split; add --tp"
    )


def test_a_quantised_log_of_another_checkpoint_is_not_compared(run: Run, log: Log) -> None:
    text = QWEN.format(
        model="llama-3.1-8b", context=4096, kv="9", tokens=5000, more=", 'quantization': 'awq'", lines=""
    )
    assert "log: quantization=awq, but llama-3.1-8b is not quantized" in unplanned(run("reconcile", "--log", log(text)))


def test_what_depends_on_the_gpu_is_left_open() -> None:
    same = ComponentRow("weights", "bytes", 5.0, 5.0, kind="exact")
    first, other = (ComponentRow("blocks", "blocks", count, 7.0, kind="exact") for count in (6.0, 8.0))
    assert merged([(same, first), (same, other)], ["a", "b"]) == (
        same,
        ComponentRow("blocks", "blocks", None, 7.0, why="depends on the GPU: 6 on a, 8 on b; add --gpu"),
    )


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
    assert ran.out.splitlines()[1].startswith("llama-3.1-8b on 2 replicas of h100-80g of ")
    document = run("reconcile", "--log", log(REPLICAS), "--gpu", "h100-80g", "--format", "json").json
    assert document["data_parallel_size"] == 2
    assert rows_of(document, "given")["tokens"]["exact"] is True  # 50 GiB / 131,072 bytes: 409,600


def test_within_a_replica_the_smallest_rank_decides(run: Run, log: Log) -> None:
    text = REPLICAS.replace("'data_parallel_size': 2", "'data_parallel_size': 2, 'tensor_parallel_size': 2")
    text = re.sub(r"EngineCore_(DP\d) pid=\d\) INFO Avail", r"Worker_\1_TP0 pid=7) INFO Avail", text)
    ran = run("reconcile", "--log", log(text + "(Worker_DP0_TP1 pid=8) Available KV cache memory: 52.00 GiB\n"))
    assert "2 ranks of replica DP0 have 52.00 to 54.00 GiB for KV; the smallest decides for all" in ran.err
    assert "2 replicas have a pool of their own each, of 50.00 to 52.00 GiB" in ran.err
    assert "llama-3.1-8b on 2 replicas of 2 x " in ran.out


def test_replicas_without_a_split_ask_for_dp(run: Run, log: Log) -> None:
    text = REPLICAS.replace("'data_parallel_size': 2, ", "")
    assert unplanned(run("reconcile", "--log", log(text))).endswith("but not how the model is split; add --dp")


def test_weights_on_the_host_are_not_in_what_loading_took(run: Run, log: Log) -> None:
    """vLLM 0.32 v1/worker/gpu_model_runner.py logs torch's memory after loading, and offloader/uva.py moves layers to
    the host as they are built. Qwen3-8B: 15.27 GiB, less the parameters that first reach 4 GiB.
    """
    text = (
        "vLLM API server version 0.32.0\n"
        "non-default args: {'model': 'qwen3-8b', 'max_model_len': 32768, 'cpu_offload_gb': 4.0}\n"
        "Model loading took 11.26 GiB memory and 40.0 seconds\nAvailable KV cache memory: 58.00 GiB\n"
    )
    compared = run("reconcile", "--log", log(text), "--gpu", "h100-80g", "--format", "json").json
    row = rows_of(compared)["weights"]
    assert abs(row["predicted"] - 11.26 * GIB) < 0.02 * GIB
