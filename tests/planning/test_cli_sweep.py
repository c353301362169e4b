"""`kvplan sweep`: the numbers of `kvplan estimate`, every combination, in every format; what it refuses."""

import csv
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvplan.asked.form import flag_of
from kvplan.planning.grid import LISTS, SHORT_FLAGS
from kvplan.planning.sweep import SweepRow
from tests.support.cli import Run, config_file, refused
from tests.support.cli import run as run  # the fixture

LLAMA = ("sweep", "llama-3.1-8b", "--gpu", "a100-80g,l40s", "--ctx", "8k,32k", "--tp", "1,2")
PRICES = "a100-80g: 2.00\nl40s: 1.20\n"


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES, encoding="utf-8")
    return path


def flags_of(row: dict[str, Any]) -> list[str]:
    """What `kvplan estimate` is asked for one row of a sweep."""
    named = {
        "--gpu": row["gpu"],
        "--engine": row["engine"],
        "--ctx": row["max_model_len"],
        "--mean-tokens": row["mean_tokens"],
        "--tp": row["tensor_parallel_size"],
        "--pp": row["pipeline_parallel_size"],
        "--dp": row["data_parallel_size"],
        "--pcp": row["prefill_context_parallel_size"],
        "--dcp": row["decode_context_parallel_size"],
        "--max-num-batched-tokens": row["max_num_batched_tokens"],
        "--quantization": row["quantization"],
        "--kv-cache-dtype": row["kv_cache_dtype"],
        "--gpu-memory-utilization": row["gpu_memory_utilization"],
        "--max-num-seqs": row["max_num_seqs"],
        "--dtype": row["dtype"],
    }
    return [str(word) for flag, value in named.items() if value is not None for word in (flag, value)]


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_a_sample_of_rows_has_the_numbers_of_estimate(run: Run) -> None:
    swept = run(
        "sweep", "llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v2-lite",
        "--gpu", "l40s,a100-80g,h200", "--engine", "vllm@0.33,vllm@0.11", "--tp", "1,2", "--pp", "1,2",
        "--kv-cache-dtype", "auto,fp8", "--gpu-memory-utilization", "0.95", "--max-num-seqs", "200,16",
        "--ctx", "4k,30000", "--mean-tokens", "3000", "--quantization", "none,fp8", "--format", "json",
    )  # fmt: skip
    rows = swept.json["rows"]
    assert len(rows) == swept.json["combinations"] == 4 * 3 * 2**7
    for row in random.Random(7).sample(rows, 40):
        answer = run("estimate", row["model"], *flags_of(row), "--format", "json", "-q")
        if row["deficit"] is None:
            assert refused(answer) == row["reason"]
            continue
        doc = answer.json
        users, kv = doc["concurrency"], doc["kv"]
        expected = {
            "fits": doc["fits"], "deficit": doc["deficit"], "weights": doc["memory"]["weights"],
            "kv_cache": doc["memory"]["kv_cache"], "num_blocks": kv["num_blocks"], "tokens": kv["tokens"],
            "block_size": kv["block_size"], "kv_dtype": kv["dtype"], "kv_bytes_per_token": kv["bytes_per_token"],
            "bytes_per_request": kv["bytes_per_request"], "concurrency": users["max"],
            "concurrency_low": users["low"], "concurrency_high": users["high"],
            "pool_users": users["pool_users"], "num_gpus": doc["inputs"]["num_gpus"], "users": users["users"],
        }  # fmt: skip
        assert {name: row[name] for name in expected} == expected, flags_of(row)


def test_lengths_are_answered_as_estimate_does(run: Run) -> None:
    dist = ("--lengths", "lognormal:median=600,p95=2000", "--shared-prefix", "256")
    rows = run(*LLAMA, *dist, "--format", "json").json["rows"]
    for row in (rows[0], rows[5]):
        doc = run("estimate", row["model"], *flags_of(row), *dist, "--format", "json").json
        assert row["pool_users"] == doc["concurrency"]["pool_users"]
        assert row["users"] == min(row["pool_users"], row["max_num_seqs"])


def test_flags_that_are_no_lists_hold_for_every_row(run: Run) -> None:
    rows = run(*LLAMA, "--dp", "2", "--enforce-eager", "--format", "json").json["rows"]
    assert {row["data_parallel_size"] for row in rows} == {2}
    doc = run("estimate", "llama-3.1-8b", *flags_of(rows[3]), "--enforce-eager", "--format", "json").json
    assert rows[3]["concurrency"] == doc["concurrency"]["max"]
    assert rows[3]["users"] == 2 * doc["concurrency"]["users"]


def test_every_count_that_moves_memory_may_be_a_list(run: Run) -> None:
    lists = {"--dp": "1,2", "--pcp": "1,2", "--dcp": "1,4", "--max-num-batched-tokens": "2048,8192"}
    command = ("sweep", "deepseek-v3", "--gpu", "h200", "--tp", "8", "--ctx", "16k", "--enable-expert-parallel")
    swept = run(*command, *(word for pair in lists.items() for word in pair), "--format", "json").json
    rows = swept["rows"]
    assert len({tuple(flags_of(row)) for row in rows}) == swept["combinations"] == 16
    for row in random.Random(3).sample(rows, 6):
        asked_one = run("estimate", row["model"], *flags_of(row), "--enable-expert-parallel", "--format", "json")
        if row["deficit"] is None:
            assert refused(asked_one) == row["reason"]
            continue
        doc = asked_one.json
        assert (row["weights"], row["kv_cache"]) == (doc["memory"]["weights"], doc["memory"]["kv_cache"])
        assert row["num_gpus"] == doc["inputs"]["num_gpus"]


def test_draft_tokens_may_be_a_list(run: Run) -> None:
    model = ("qwen3.5-27b", "--gpu", "h200", "--ctx", "16k", "--speculative-method", "ngram", "--format", "json")
    rows = run("sweep", *model, "--num-speculative-tokens", "1,2,5").json["rows"]
    for row, tokens in zip(rows, (1, 2, 5), strict=True):
        doc = run("estimate", *model, "--num-speculative-tokens", str(tokens)).json
        assert (row["num_speculative_tokens"], row["bytes_per_request"]) == (tokens, doc["kv"]["bytes_per_request"])
    assert len({row["bytes_per_request"] for row in rows}) == 3  # a block of states for each draft token
    table = run("sweep", *model[:-2], "--num-speculative-tokens", "1,2,5").out
    assert table.splitlines()[2].startswith("draft tokens")
    undrafted = run("sweep", "qwen3.5-27b", "--gpu", "h200", "--num-speculative-tokens", "1,2")
    assert "needs a draft model or a method" in refused(undrafted)


def test_a_number_of_gpus_is_split_over_the_stages_given(run: Run) -> None:
    command = ("sweep", "llama-3.1-8b", "--gpu", "8xh100-80g", "--pp", "2", "--ctx", "8k", "--format", "json")
    (row,) = run(*command).json["rows"]
    assert (row["tensor_parallel_size"], row["pipeline_parallel_size"], row["num_gpus"]) == (4, 2, 8)
    several = run("sweep", "llama-3.1-8b", "--gpu", "8xh100-80g", "--dp", "1,2", "--ctx", "8k")
    assert "takes a name without a number here" in refused(several)


def test_a_pasted_command_is_the_base_and_lists_win_over_it(run: Run) -> None:
    command = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 4096 --tensor-parallel-size 4 --max-num-seqs 32"
    rows = run("sweep", "--from-command", command, "--gpu", "h200", "--tp", "1,2", "--format", "json").json["rows"]
    assert [(r["tensor_parallel_size"], r["max_num_seqs"], r["max_model_len"]) for r in rows] == [
        (1, 32, 4096),
        (2, 32, 4096),
    ]


def test_auto_contexts_are_rows_with_the_context_that_fits(run: Run) -> None:
    rows = run("sweep", "llama-3.1-8b", "--gpu", "rtx-4090,h200", "--ctx", "auto", "--format", "json").json["rows"]
    for row in rows:
        fitted = run("estimate", "llama-3.1-8b", "--gpu", row["gpu"], "--ctx", "auto", "--format", "json").json
        assert row["max_model_len"] == fitted["kv"]["max_model_len"]


# --- formats ----------------------------------------------------------------------------------------------------------


def test_the_json_follows_its_schema(run: Run, prices: Path) -> None:
    schema = run("schema", "sweep").json
    validator = jsonschema.Draft202012Validator(schema)
    for more in (
        (),
        ("--prices", str(prices)),
        ("--pareto",),
        ("--quantization", "none,fp8", "--mean-tokens", "1k,2k"),
    ):
        validator.validate(run(*LLAMA, *more, "--format", "json").json)
    impossible = run("sweep", "llama-3.1-8b", "qwen3-32b", "--gpu", "l40s", "--ctx", "4k,64k", "--format", "json").json
    validator.validate(impossible)
    assert impossible["impossible"] == 1  # Qwen3-32B supports up to 40,960 tokens
    assert sum(row["reason"] is not None and "40,960" in row["reason"] for row in impossible["rows"]) == 1


def test_csv_and_json_hold_the_same(run: Run) -> None:
    rows = run(*LLAMA, "--format", "json").json["rows"]
    read = list(csv.DictReader(io.StringIO(run(*LLAMA, "--format", "csv").out)))
    assert tuple(read[0]) == SweepRow._fields
    texts = {None: "", True: "true", False: "false"}
    for row, line in zip(rows, read, strict=True):
        assert line == {
            name: texts[value] if value is None or isinstance(value, bool) else str(value)
            for name, value in row.items()
        }


def test_reports_are_what_standard_output_would_be(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.csv", "c.md")]
    ran = run(*LLAMA, *(word for path in paths for word in ("--report", str(path))))
    assert ran.code == 0
    for path, format in zip(paths, ("json", "csv", "markdown"), strict=True):
        text = path.read_text(encoding="utf-8").removesuffix("<!-- kvplan -->\n")
        assert text == run(*LLAMA, "--format", format).out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.csv", "c.md"]


def test_the_table_has_the_columns_that_vary(run: Run) -> None:
    head = run(*LLAMA).out.splitlines()[2].split()
    assert head[:3] == ["GPU", "context", "TP"]
    assert "KV dtype" not in run(*LLAMA).out
    assert "KV dtype" in run(*LLAMA, "--kv-cache-dtype", "auto,fp8").out
    answer = run("sweep", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "32k")
    assert answer.out.splitlines()[0] == "1 of 1 combination fits: llama-3.1-8b on a100-80g at 32,768 tokens"


def test_a_long_table_is_cut_and_says_so(run: Run) -> None:
    out = run(*LLAMA, "--limit", "3").out.splitlines()
    assert len(out) == 2 + 1 + 3 + 1
    assert out[-1] == "… and 5 more: --format csv"
    assert "more: --format csv" not in run(*LLAMA, "--limit", "8").out


def test_the_table_says_where_the_scheduler_is_the_limit(run: Run) -> None:
    out = run("sweep", "llama-3.1-8b", "--gpu", "h200", "--ctx", "4k", "--max-num-seqs", "16, 512").out
    assert [line.endswith("yes, 16 at once") for line in out.splitlines()[3:]] == [False, True]


def test_the_table_begins_with_what_was_asked_for(run: Run, prices: Path) -> None:
    rows = run(*LLAMA, "--prices", str(prices), "--format", "json").json["rows"]
    for sort, field in (
        ("users", "users"),
        ("users-per-gpu", "users_per_gpu"),
        ("users-per-dollar", "users_per_dollar"),
    ):
        best = max(rows, key=lambda row: row[field] or 0)
        first = run(*LLAMA, "--prices", str(prices), "--sort", sort, "--limit", "1").out.splitlines()[3].split()
        assert first[:3] == [best["gpu"], f"{best['max_model_len']:,}", str(best["tensor_parallel_size"])]


def test_what_cannot_be_is_counted_below_the_table(run: Run) -> None:
    out = run("sweep", "llama-3.1-8b", "qwen2.5-7b", "--gpu", "l40s,h200", "--ctx", "8k", "--tp", "1,8").out
    assert "2 combinations are not possible:" in out
    table = out.splitlines()[2:]
    assert table[7:8] == [""]  # the header, six rows, then what cannot be
    assert "2 x --tp 8 does not divide the 28 attention heads of qwen2.5-7b" in out


def test_pareto_keeps_what_nothing_beats_in_every_format(run: Run, prices: Path) -> None:
    every = run(*LLAMA, "--prices", str(prices), "--format", "json").json["rows"]

    def values(row: dict[str, Any]) -> tuple[float, ...]:
        return row["max_model_len"], row["users_per_gpu"], row["users_per_dollar"]

    def beats(row: dict[str, Any], other: dict[str, Any]) -> bool:
        pairs = list(zip(values(row), values(other), strict=True))
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    front = [row for row in every if row["users"] and not any(beats(other, row) for other in every)]
    document = run(*LLAMA, "--prices", str(prices), "--pareto", "--format", "json").json
    assert document["rows"] == front
    assert (document["pareto"], document["combinations"]) == (True, len(every))
    assert len(front) < len(every)


def test_of_combinations_that_are_alike_the_plainest_is_kept(run: Run) -> None:
    """200 tokens a user: the pool holds more than max_num_seqs at each utilization, KV dtype and block size."""
    words = ("--gpu-memory-utilization", "0.8,0.92,0.95", "--kv-cache-dtype", "fp8,auto", "--block-size", "32,16")
    command = ("sweep", "llama-3.1-8b", "--gpu", "h200", "--ctx", "8k", "--mean-tokens", "200", *words)
    every = run(*command, "--format", "json").json
    assert len({(row["max_model_len"], row["users_per_gpu"]) for row in every["rows"]}) == 1
    assert every["alike"] == 0  # without --pareto nothing is left out
    document = run(*command, "--pareto", "--format", "json").json
    (row,) = document["rows"]
    flags = ("gpu_memory_utilization", "kv_cache_dtype", "block_size")
    assert [row[name] for name in flags] == [0.92, "auto", 16]  # what vLLM 0.33 takes where it is told nothing
    assert document["alike"] == 3 * 2 * 2 - 1
    for form in ("table", "markdown"):
        assert (
            "11 other combinations hold the same users on the same GPUs"
            in run(*command, "--pareto", "--format", form).out
        )


def test_other_gpus_and_more_of_them_are_not_alike(run: Run) -> None:
    """Both hold 256 users a GPU of 100 tokens, as max_num_seqs bounds them: each is an offer of its own."""
    words = (
        "--gpu",
        "h200,b200",
        "--ctx",
        "8k",
        "--mean-tokens",
        "100",
        "--max-num-seqs",
        "256",
        "--block-size",
        "16,32",
    )
    document = run("sweep", "llama-3.1-8b", *words, "--pareto", "--format", "json").json
    assert [(row["gpu"], row["users"], row["block_size"]) for row in document["rows"]] == [
        ("h200", 256, 16),
        ("b200", 256, 16),
    ]
    assert document["alike"] == 2


def test_the_figure_is_written_whole(run: Run, tmp_path: Path, prices: Path) -> None:
    for name, start in (("a.png", b"\x89PNG"), ("b.svg", b"<?xml")):
        assert run(*LLAMA, "--figure", tmp_path / name, "--prices", prices).code == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.svg", "prices.yaml"]


def test_the_exit_code_says_whether_anything_fits(run: Run) -> None:
    small = ("sweep", "llama-3.1-70b", "--gpu", "l40s", "--ctx", "4k,8k")
    assert run(*small).code == 0
    assert run(*small, "--exit-code").code == 1
    assert run(*small, "--tp", "1,4", "--exit-code").code == 0


def test_names_are_shown_as_they_are(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "=[bold]|x")
    words = ("sweep", str(folder), "--gpu", "h200", "--ctx", "4k,8k")
    assert "=[bold]|x" in run(*words, "--color", "always").out
    assert "=\\[bold\\]\\|x" in run(*words, "--format", "markdown").out


# --- what is refused --------------------------------------------------------------------------------------------------


COUNTED = [SHORT_FLAGS.get(name, flag_of(name)) for name in LISTS if "dtype" not in name]


@pytest.mark.parametrize("flag", ["--ctx", "--mean-tokens", *COUNTED])
def test_a_number_with_thousands_separators_is_no_list(run: Run, flag: str) -> None:
    line = refused(
        run("sweep", "llama-3.1-8b", "--gpu", "h200", *([] if flag == "--ctx" else ["--ctx", "8k"]), flag, "8,192")
    )
    assert line == f"{flag}: 8,192 may be one number; write 8192; for several, put a space after each comma: '8, 192'"


@pytest.mark.parametrize("words", [("--ctx", "8192"), ("--ctx", "8, 192"), ("--ctx", "8", "--ctx", "192")])
def test_the_remedies_for_thousands_separators_are_read(run: Run, words: tuple[str, ...]) -> None:
    rows = run("sweep", "llama-3.1-8b", "--gpu", "h200", *words, "--format", "json").json["rows"]
    assert [row["max_model_len"] for row in rows] == ([8192] if "8192" in words else [8, 192])


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--tp", "1,,2"), "--tp contains an empty value ('1,,2')"),
        (("--tp", "1,two"), "--tp: not a whole number ('two')"),
        (("--tp", "1,3"), "--tp 3 does not divide the 32 attention heads"),
        (("--tp", "1,2", "--engine-arg", "tensor_parallel_size=4"), "and --engine-arg tensor_parallel_size=4"),
        (("--gpu", "a100-80g,nosuch"), "gpu 'nosuch'"),
        (("--ctx", "8k,1M"), "--ctx 1,048,576: llama-3.1-8b supports up to 131,072 tokens"),
        (("--kv-cache-dtype", "auto,fp9"), "--kv-cache-dtype 'fp9' is unknown to kvplan; use one of auto, "),
        (("--quantization", "none,abc"), "--quantization abc: llama-3.1-8b is not quantized"),
        (("--dtype", "bfloat16,int8"), "--dtype 'int8' is not one that servers compute in"),
        (("--engine", "vllm,vllm@9.9"), "--engine vllm@9.9: kvplan supports vLLM"),
        (("--mean-tokens", "1k,200k"), "mean length 204,800 is beyond the context"),
        (("--mean-tokens", "1k,2k", "--prompt-tokens", "1k", "--output-tokens", "9"), "--mean-tokens conflicts with"),
        (("--block-size", "16,24"), "--block-size 24 must be a multiple of 16"),
        (("--gpu-memory-utilization", "0.9,1.9"), "--gpu-memory-utilization must be greater than 0 and at most 1"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--jobs", "many"), "--jobs: not a whole number"),
        (("--sort", "users-per-dollar"), "--sort users-per-dollar needs GPU prices"),
        (("--prices", "nosuch.yaml"), "nosuch.yaml: no such file"),
        (("--figure", "out.gif"), "--figure out.gif: unknown file type"),
        (("--report", "out.txt"), "--report out.txt: unknown file type"),
        (("--ctx", ",".join(str(4096 + i) for i in range(2000)), "--max-num-seqs", ",".join(map(str, range(8, 1018)))),
         "sweep: 2,020,000 combinations are more than 2,000,000"),
    ],
)  # fmt: skip
def test_what_no_combination_can_use_is_refused(run: Run, words: tuple[str, ...], fault: str) -> None:
    base = ["sweep", "llama-3.1-8b", "--gpu", "h200"]
    if "--gpu" in words:
        base = base[:2]
    line = refused(run(*base, *([] if "--ctx" in words else ["--ctx", "8k"]), *words))
    assert fault in line


def test_a_sweep_needs_a_model(run: Run) -> None:
    assert refused(run("sweep", "--gpu", "h200")).startswith("MODEL: missing")


def test_a_gpu_without_a_price_is_named_and_kept(run: Run, prices: Path) -> None:
    ran = run("sweep", "llama-3.1-8b", "--gpu", "a100-80g,h200", "--ctx", "8k", "--prices", prices, "--format", "json")
    assert "has no price for h200" in ran.err
    assert [row["price_per_hour"] for row in ran.json["rows"]] == [2.0, None]
    assert "has no price for h200" in refused(
        run("sweep", "llama-3.1-8b", "--gpu", "h200", "--ctx", "8k", "--prices", prices)
    )


def test_a_closed_pipe_ends_a_long_sweep_quietly() -> None:
    contexts = ",".join(str(1024 + i) for i in range(5_000))
    seqs = ",".join(str(8 + i) for i in range(20))
    words = [
        "sweep",
        "llama-3.1-8b",
        "--gpu",
        "h200",
        "--ctx",
        contexts,
        "--max-num-seqs",
        seqs,
        "--jobs",
        "1",
        "--format",
        "csv",
    ]
    line = "import sys; from kvplan.cli.main import run; run()"
    running = subprocess.Popen([sys.executable, "-c", line, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline().startswith(b"model,gpu,engine")
    running.stdout.close()
    err = running.stderr.read()
    running.stderr.close()
    assert (running.wait(60), err) == (0, b"")


def test_a_sweep_and_a_recommendation_load_no_heavy_library() -> None:
    code = """
import sys
from kvplan.cli.main import main
codes = [main(["sweep", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "32k,64k"]),
         main(["recommend", "llama-3.1-8b", "--users", "20", "--ctx", "8k"])]
print(codes, *sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)
"""
    heavy = ("torch", "triton", "transformers", "pandas", "matplotlib", "pynvml", "numpy", "jinja2", "multiprocessing")
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stderr.strip().splitlines()[-1:] == ["[0, 0]"], done.stderr


def test_json_is_one_document_however_few_rows_there_are(run: Run) -> None:
    none = run("sweep", "llama-3.1-70b", "--gpu", "l40s", "--ctx", "4k", "--pareto", "--format", "json")
    assert json.loads(none.out)["rows"] == []
    assert json.loads(none.out)["short"] == 1


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_a_quantization_is_sized_as_estimate_sizes_it(run: Run, method: str) -> None:
    words = ("llama-3.1-8b", "--gpu", "l4", "--ctx", "8k", "--format", "json")
    rows = run("sweep", *words, "--quant", "none,awq,gptq,fp8").json["rows"]
    row = next(row for row in rows if row["quantization"] == method)
    alone = run("estimate", *words, "--quant", method).json
    assert (row["weights"], row["users"]) == (alone["memory"]["weights"], alone["concurrency"]["users"])


def test_a_repository_with_a_file_type_is_swept(run: Run) -> None:
    """A name that is no repository's, of files that llama-quantize makes of a model of the catalog."""
    (row,) = run("sweep", "acme/Qwen3-8B-GGUF:Q8_0", "--gpu", "l4", "--ctx", "8k", "--format", "json").json["rows"]
    assert (row["model"], row["file_type"], row["engine"].partition("@")[0]) == ("qwen3-8b", "Q8_0", "llama.cpp")


@pytest.mark.parametrize("command", [("estimate",), ("recommend", "--users", "4")])
def test_several_quantizations_are_for_a_sweep(run: Run, command: tuple[str, ...]) -> None:
    ran = run(command[0], "llama-3.1-8b", *command[1:], "--gpu", "l4", "--ctx", "8k", "--quant", "awq,gptq")
    assert refused(ran) == "--quant takes one method here ('awq,gptq'); `kvplan sweep` takes several"
