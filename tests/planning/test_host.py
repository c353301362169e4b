"""Host memory of a plan: each row has its source, and says what it was compared with."""

from typing import Any

import pytest

from kvplan.documents.artifact import plan_document
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.explain import explain
from kvplan.planning.plan import Plan, Request, host_rows, kept_rows, plan
from kvplan.report.console import host_lines, host_sizes, memory_lines, memory_rows
from kvplan.report.lines import plain
from kvplan.report.page import block_text
from kvplan.report.text import plans_page, plans_table
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs

GIB = 2**30


def planned(model: str, engine: str, machine: str = "h100-80g", **args: int) -> Plan:
    return plan(Request(catalog.load(model), gpu(machine), EngineArgs(**args), parse_engine(engine)))  # type: ignore[arg-type] # all are integers


@pytest.mark.parametrize(
    ("model", "tp", "logged", "pinned"),
    [
        # "# GPU blocks: ..., # CPU blocks: N" of logs that users posted, all with the 4 GiB of the default --swap-space
        # Each layer's share is pinned in a power of two MiB.
        # vllm-project/vllm, Llama-3-8B: 32 layers x 8 heads x 128 x 2 x 2 B x 16 tokens = 2 MiB
        ("llama-3.1-8b", 1, 2048, 32 * 128),
        ("qwen2.5-7b", 1, 4681, 28 * 256),  # 28 x 4 x 128 x 2 x 2 x 16 B = 896 KiB
        ("qwen2.5-0.5b", 1, 21845, 24 * 256),  # 24 x 2 x 64 x 2 x 2 x 16 B = 192 KiB
        ("qwen2.5-1.5b", 1, 9362, 28 * 256),  # 28 x 2 x 128 x 2 x 2 x 16 B = 448 KiB
        ("llama-3.1-70b", 2, 1638, 80 * 64),  # 80 x 4 x 128 x 2 x 2 x 16 B = 2.5 MiB on each of two ranks
    ],
)
def test_the_first_engine_s_swap_space_is_the_cpu_blocks_of_its_log(
    model: str, tp: int, logged: int, pinned: int
) -> None:
    answer = planned(model, "vllm@0.6+v0", "h200", tensor_parallel_size=tp, max_model_len=4096)
    swap = next(row for row in host_rows(answer) if row.name == "swap_space")
    assert swap.size == pinned * 2**20
    assert f"{logged:,}" in swap.formula


def csv_row(answer: Plan) -> dict[str, Any]:
    table = plans_table([answer])
    return dict(zip(table.names, table.rows[0], strict=True))


def test_later_engines_swap_nothing() -> None:
    assert [row.name for row in host_rows(planned("llama-3.1-8b", "vllm@0.33", max_model_len=4096))] == ["checkpoint"]


def test_an_offloaded_cache_lies_in_one_region_of_all_ranks() -> None:
    answer = planned(
        "llama-3.1-8b", "vllm@0.33", tensor_parallel_size=2, max_model_len=4096, kv_offloading_size=8 * GIB
    )
    host = plan_document(answer)["host"]
    first = host["rows"][0]
    assert (first["name"], first["bytes"], first["per"]) == ("kv_offloading", 8 * GIB, "replica")
    assert host["per_rank"] == 0


def test_queues_between_processes_are_those_of_vllm_s_code() -> None:
    """10 chunks of 16 MiB and of 24 MiB for each of 8 ranks, 6 of 4 MiB for the group; a byte of state for the writer
    and each reader of a chunk."""
    answer = planned("llama-3.1-70b", "vllm@0.33", tensor_parallel_size=8, max_model_len=4096)
    queues = next(row for row in host_rows(answer) if row.name == "shared_memory")
    mib = 2**20
    assert queues.size == 10 * (16 * mib + 9) + 8 * 10 * (24 * mib + 2) + 6 * (4 * mib + 8)
    assert queues.compared == ""


def test_explain_says_what_was_compared_and_what_is_not_modeled() -> None:
    answer = planned("llama-3.1-8b", "vllm@0.33", tensor_parallel_size=2, max_model_len=4096)
    section = next(section for section in explain(answer) if section.title.startswith("Host memory"))
    assert "not compared with anything" in section.lines[0]
    assert section.lines[-1].startswith("not modeled: memory of the processes (Python, torch, the CUDA libraries")


# Bytes that vLLM 0.33's own factories (multimodal/cache/factories.py) give the caches that hold data, of all processes:
# one engine and one API server, the API server of each of two ranks, and a cache turned off.
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, 4 * GIB),
        ({"data_parallel_size": 2}, 8 * GIB),
        ({"mm_processor_cache_gb": 3 * GIB // 2}, 3 * GIB // 2),
        ({"mm_processor_cache_gb": 0}, 0),
        ({"language_model_only": 1}, 0),
    ],
)
def test_processed_images_lie_once_beside_each_replica(args: dict[str, int], expected: int) -> None:
    answer = planned("qwen3.5-4b", "vllm@0.33", "h100-80g", max_model_len=32768, **args)
    assert sum(size for row, size in kept_rows(answer) if row.name == "processor_cache") == expected


@pytest.mark.parametrize(("ranks", "in_shm"), [(1, True), (2, False)])
def test_processed_images_lie_in_shared_memory_if_asked_for_and_one_rank_reads_them(ranks: int, in_shm: bool) -> None:
    """vLLM 0.33 multimodal/cache/factories.py: data-parallel ranks keep them in their API servers whatever the type."""
    args = EngineArgs(max_model_len=32768, mm_processor_cache_type="shm", data_parallel_size=ranks)
    answer = plan(Request(catalog.load("qwen3.5-4b"), gpu("h100-80g"), args, parse_engine("vllm@0.33")))
    (row,) = (row for row in host_rows(answer) if row.name == "processor_cache")
    assert (row.size, row.in_shm) == (4 * GIB, in_shm)


@pytest.mark.parametrize(("model", "engine"), [("whisper-large-v3", "vllm@0.33"), ("qwen2.5-vl-7b", "vllm@0.10.2")])
def test_cross_attention_and_earlier_releases_have_no_such_cache(model: str, engine: str) -> None:
    assert "processor_cache" not in [row.name for row in host_rows(planned(model, engine, max_model_len=448))]


def test_what_the_settings_put_on_the_host_is_rows_that_add_up() -> None:
    """Two ranks: 4 GiB of weights each in whole tensors, one region of 8 GiB, and two copies of four adapters."""
    answer = planned(
        "llama-3.1-8b", "vllm@0.33", tensor_parallel_size=2, max_model_len=4096, kv_offloading_size=8 * GIB,
        cpu_offload_gb=4 * GIB, max_loras=4,
    )  # fmt: skip
    document, csv = plan_document(answer), csv_row(answer)
    sizes, rows = host_sizes(document), {row["name"]: row for row in document["host"]["rows"]}
    assert sizes == {
        "weights": 2 * rows["weights"]["bytes"],
        "KV cache": 8 * GIB,
        "adapters": 2 * rows["adapters"]["bytes"],
    }
    assert sum(sizes.values()) == document["host_memory"]["total"] == csv["host_memory.total"]
    screen = "\n".join(plain(part) for part in host_lines(document))
    assert [line.split()[0] for line in screen.splitlines()] == ["Host", "weights", "KV", "adapters", "total"]
    page = "\n".join(map(block_text, plans_page([answer])))
    assert all(f"{size / GIB:,.2f}" in screen and f"{size / GIB:,.2f}" in page for size in sizes.values())


@pytest.mark.parametrize(
    ("engine", "of", "args"),
    [
        ("vllm@0.33", " of each data-parallel rank (2 GPUs)", {"data_parallel_size": 2}),
        ("sglang@0.5.23", " (2 GPUs)", {"data_parallel_size": 2, "enable_dp_attention": True}),
        ("vllm@0.33", " (2 GPUs)", {}),
    ],
)
def test_host_memory_says_whose_it_is(engine: str, of: str, args: dict[str, Any]) -> None:
    """A data-parallel rank of two GPUs has host memory of its own; ranks of DP attention are one server's."""
    answer = planned(
        "qwen3-30b-a3b", engine, tensor_parallel_size=2, max_model_len=4096, cpu_offload_gb=4 * GIB, **args
    )
    assert plain(host_lines(plan_document(answer))[0]) == f"Host memory{of}"


def test_a_plain_server_asks_for_no_host_memory() -> None:
    document = plan_document(planned("llama-3.1-8b", "vllm@0.33", max_model_len=4096))
    assert (host_lines(document), document["host_memory"]["total"]) == ([], 0)


def test_a_drafts_weights_are_a_row_of_every_format() -> None:
    """vLLM 0.33 loads a head of 2,124,387,488 B on each of 8 ranks, less two tables that it shares."""
    request = Request(
        catalog.load("deepseek-v3"), gpu("h200"),
        EngineArgs(tensor_parallel_size=8, speculative_method="mtp", max_model_len=32768),
    )  # fmt: skip
    answer = plan(request)
    document, csv, size = plan_document(answer), csv_row(answer), 2_124_387_488 - 2 * (129_280 * 7_168 * 2 // 8)
    rows = memory_rows(document["memory"])
    assert rows["draft"] == csv["memory.draft_weights"] == size
    assert rows["weights"] + rows["draft"] == document["memory"]["weights"]
    assert sum(rows.values()) == document["memory"]["total"]
    assert f"| draft | {size / GIB:,.2f} |" in "\n".join(map(block_text, plans_page([answer])))
    assert any(plain(part).startswith("  draft ") for part in memory_lines(document, blocks=True))
