"""`kvplan reconcile --metrics`: the figures of a running server's page beside the plan for it."""

from pathlib import Path

import pytest

from tests.measure.test_server_metrics import SGLANG_PAGE, server
from tests.support.cli import Run, refused, run
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.server_logs import rows_of, unplanned

__all__ = ["run", "server"]  # fixtures

PAGE = """\
vllm:num_requests_running{model_name="meta-llama/Llama-3.1-8B"} 7
vllm:cache_config_info{block_size="16",cache_dtype="auto",gpu_memory_utilization="0.92",num_gpu_blocks="27306",\
kv_cache_size_tokens="436896",kv_cache_max_concurrency="53.33",user_specified_block_size="False"} 1.0
"""


def test_a_pages_pool_is_reconciled(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE)
    answer = run(
        "reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--ctx", "8192", "--format", "json"
    )
    rows = rows_of(answer.json, "given")
    assert (rows["tokens"]["predicted"], rows["tokens"]["exact"]) == (436_896, True)  # 27,306 x 16
    assert rows["concurrency"]["exact"] is True  # 436,896 / 8,192 = 53.33
    assert rows_of(answer.json)["weights"]["why"] == "not on the page"
    open_context = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--format", "json").json
    assert rows_of(open_context)["concurrency"]["why"] == "the context is derived from it; add --ctx"


@pytest.mark.parametrize(
    ("tokens", "concurrency", "context", "why"),
    [
        # Between 436,896 / 53.335 = 8,191.5 and 436,896 / 53.325 = 8,193.07.
        (436_896, "53.33", 8192, "8,192 (8,192 to 8,193 also match)"),
        # Between 1,000,000 / 30.525 = 32,760.03 and 1,000,000 / 30.515 = 32,770.8: the one that is a power of two.
        (1_000_000, "30.52", 32_768, "32,768 (32,761 to 32,770 also match)"),
        # Between 100,000 / 5.005 = 19,980.02 and 100,000 / 4.995 = 20,020.02.
        (100_000, "5.00", 20_000, "20,000 (19,981 to 20,020 also match)"),
        # Between 131,072 x 3 / 3.005 = 130,853.9 and / 2.995 = 131,290.8: the model's own.
        (393_216, "3.00", 131_072, "131,072 (130,854 to 131,290 also match)"),
        # Between 180,000 / 1.5 and 180,000 / 0.5: the model's own, though 196,608 would be nearer to 180,000.
        (180_000, "1", 131_072, "131,072 (120,000 to 360,000 also match)"),
    ],
)
def test_a_pages_context_is_its_tokens_over_its_concurrency(
    run: Run, tmp_path: Path, tokens: int, concurrency: str, context: int, why: str
) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE.replace("436896", str(tokens)).replace("53.33", concurrency))
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--format", "json")
    assert ran.json["max_model_len"] == context
    assert f"the context is assumed to be {why}" in ran.err
    assert rows_of(ran.json, "given")["concurrency"]["predicted"] is None  # it would be compared with itself


@pytest.mark.parametrize(
    ("tokens", "concurrency"),
    [
        ("436896", "0.00"),
        ("436896", "0"),
        ("436896", "99999999.00"),
        ("436896", "nan"),
        ("436896", "-1"),
        ("0", "1.00"),
    ],
)
def test_a_page_that_says_no_context_has_none(run: Run, tmp_path: Path, tokens: str, concurrency: str) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE.replace("53.33", concurrency).replace("436896", tokens))
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--format", "json")
    assert ran.json["max_model_len"] == 131_072
    assert "the context is assumed to be" not in ran.err


def test_a_pages_replicas_have_a_pool_each(run: Run, tmp_path: Path) -> None:
    lines = PAGE.splitlines()
    first, second = (lines[1].replace("block_size=", f'engine="{name}",block_size=', 1) for name in "01")
    path = tmp_path / "page.txt"
    path.write_text("\n".join([lines[0], first, second.replace("27306", "27000"), ""]))
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu", "h100-80g", "--ctx", "8k")
    assert ran.out.splitlines()[1].startswith("llama-3.1-8b on 2 replicas of h100-80g of ")
    assert "Given the logged pool of 27,000 blocks:" in ran.out
    assert "2 replicas on the page have a pool of their own each; the smallest is compared" in ran.err


def test_a_page_is_called_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGE)
    known = ("--engine", "vllm", "--gpu", "h100-80g")
    assert refused(run("reconcile", "--metrics", path)).startswith("page does not say its release; add --engine")
    ran = run("reconcile", "--metrics", path, "--engine", "vllm", "--gpu-memory-utilization", "0.5", "--format", "json")
    assert "--gpu-memory-utilization 0.5 is used, although the page says gpu_memory_utilization=0.92" in ran.err
    assert "the page does not name the GPU" in ran.err
    reasons = [row["why"] or "" for row in (*ran.json["rows"], *ran.json["given"])]
    assert "not on the page" in reasons
    assert "log" not in " ".join([*reasons, ran.err])
    path.write_text(PAGE.replace("meta-llama/Llama-3.1-8B", "chat"))
    assert unplanned(run("reconcile", "--metrics", path, *known)) == (
        "page: its model chat is not one that `kvplan models` lists; add --model NAME or --config config.json"
    )
    path.write_text(PAGE.replace("0.92", "1.5"))
    assert unplanned(run("reconcile", "--metrics", path, *known)).startswith(
        "page: gpu_memory_utilization=1.5 must be greater"
    )
    path.write_text('vllm:cache_config_info{block_size="16"} 1.0\n')
    text = refused(run("reconcile", "--metrics", path, *known, "--model", "llama-3.1-8b", "--max-error", "1%", "-q"))
    assert text.startswith("--max-error: the page contains no figure to compare")


def test_the_help_says_what_fills_in_what_is_missing(run: Run) -> None:
    text = " ".join(run("reconcile", "--help").out.split())
    for option in ("--log FILE", "--metrics URL|FILE"):
        help_text = text.partition(f" {option} ")[2].partition(" FILE ")[0][:330]
        assert all(flag in help_text for flag in ("--engine", "--model", "--config", "lacks")), help_text
    assert "log-reconciliation" in "".join(run("schema", "--help").out.split())


def test_a_page_is_had_from_its_server(run: Run, server: str) -> None:
    assert "its model m is not one that `kvplan models` lists" in unplanned(
        run("reconcile", "--metrics", f"{server}/metrics")
    )
    assert "HTTP 404" in refused(run("reconcile", "--metrics", f"{server}/missing"), 3)
    assert "redirected to another host" in refused(run("reconcile", "--metrics", f"{server}/elsewhere"), 3)
    assert "secret" not in refused(run("reconcile", "--metrics", "http://127.0.0.1:1/metrics?token=secret"), 3)


def test_a_page_without_metrics_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_text("<html></html>")
    assert "no vllm:, sglang: or llamacpp: metrics on it; name a server's /metrics page" in refused(
        run("reconcile", "--metrics", path)
    )
    path.write_text(SGLANG_PAGE)
    assert "its model m is not one" in unplanned(run("reconcile", "--metrics", path))


@needs_oracle_data
def test_a_real_page_reconciles(run: Run) -> None:
    page = DATA / "metrics_vllm_0.33.0.txt"
    if not page.exists():
        pytest.skip(f"no {page.name} in the oracle data")
    answer = run(
        "reconcile", "--metrics", page, "--engine", "vllm@0.33", "--gpu", "h100-80g", "--ctx", "8k", "--format", "json"
    )
    assert all(row["exact"] for row in answer.json["given"])


def test_a_page_whose_blocks_are_no_whole_number_states_none(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="0.5",gpu_memory_utilization="0.9"} 1.0\n'
    )
    words = ("--model", "llama-3.1-8b", "--gpu", "rtx-3090", "--ctx", "16k", "--engine", "vllm@0.33")
    ran = run("reconcile", "--metrics", str(page), *words, "--format", "json")
    assert ran.code == 0
    assert rows_of(ran.json)["blocks"]["logged"] is None


def test_a_page_gives_both_pools_in_one_figure(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(
        'sglang:max_total_num_tokens{model_name="openai/gpt-oss-20b"} 1255367.0\n'
        "sglang:kv_cache_memory_usage_gb 51.72\nsglang:context_len 32768.0\n"
    )
    answer = run("reconcile", "--metrics", page, "--gpu", "h100", "--mem-fraction-static", "0.83", "--format", "json")
    rows = rows_of(answer.json)
    assert (rows["tokens"]["logged"], rows["tokens"]["exact"], rows["kv_cache"]["exact"]) == (1_255_367, True, True)
    assert rows_of(answer.json, "given")["tokens"]["exact"]


def test_a_page_is_not_asked_for_lines_of_a_log(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(
        'sglang:max_total_num_tokens{model_name="llama-3-8b"} 871371.0\nsglang:kv_cache_memory_usage_gb 106.36\n'
    )
    document = run("reconcile", "--metrics", page, "--format", "json").json
    reasons = [row["why"] for row in (*document["rows"], *document["given"]) if row["why"]]
    assert "the free memory it comes from is not on the page; --gpu predicts it from the inputs" in reasons
    assert not [why for why in reasons if "Load weight" in why or (" log" in why and "SGLang" not in why)]
