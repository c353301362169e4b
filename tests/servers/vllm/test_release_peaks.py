"""What vLLM's releases have live while their profile runs sample, against their own functions.

Rows of tests/facts/release_peaks.jsonl are what `profile_run`, `_dummy_sampler_run`, the logits processor and the
sampler of a release's wheel have live at once on tensors without data, with what torch's sort takes meanwhile
(`python -m benchmarks.release_peaks`): 132 multiprocessors, logits in 16 bits, one GPU. Rows with `family` are three
eager layers.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.vllm import activations, overheads, rules
from kvplan.servers.vllm.log_rows import activation_peak
from kvplan.servers.words.arguments import EngineArgs, Settings

FILE = Path(__file__).parents[2] / "facts" / "release_peaks.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
SAMPLED = [row for row in ROWS if "seqs" in row]
ROUNDS = 32 * 4  # bytes a sequence of the random numbers that FlashInfer 0.2 takes
VECTORS = 64  # bytes a sequence of temperatures, indices, chosen tokens: 15 vectors, each rounded up to 512 bytes
H100 = gpu("h100-80g")


def label(row: dict[str, Any]) -> str:
    return f"{row['vllm']}-{row['engine']}-{'flashinfer' if row['flashinfer'] else 'plain'}-{row['seqs']}"


def settings_of(row: dict[str, Any]) -> Settings:
    release, word = row["vllm"].split("."), "+flashinfer" if row["flashinfer"] else "+no-flashinfer"
    match row["engine"], int(release[1]):
        case "first", minor:
            words = "+v0" if minor > 7 else ""
        case "second", minor:
            words = word if minor < 17 else "+runner-v1" if minor > 21 else ""
        case _:
            words = "+runner-v2"
    args = EngineArgs(max_model_len=2048, max_num_batched_tokens=row["tokens"], max_num_seqs=row["seqs"])
    return rules.resolve(catalog.load("qwen3-8b"), H100, args, parse_engine(f"vllm@{row['vllm']}{words}"))


def beside_entries(row: dict[str, Any], settings: Settings) -> int:
    """Hidden states in 16 bits, and the rows that Triton's top-k keeps."""
    sampler = overheads.sampler_of(settings, H100)
    rows = 4 * overheads.sampler_rows(sampler, settings, H100) * int(row["vocab"])
    return 2 * int(row["hidden"]) * overheads.kept_states(settings, row["seqs"]) + rows


@pytest.mark.parametrize("row", [row for row in SAMPLED if row["engine"] != "second, runner V2"], ids=label)
def test_sampling_takes_what_the_releases_own_functions_take(row: dict[str, Any]) -> None:
    settings = settings_of(row)
    own = overheads.sampler_of(settings, H100).likely * row["seqs"] * row["vocab"] + beside_entries(row, settings)
    own = max(own, 2 * row["hidden"] * (row["tokens"] + row["seqs"]))  # as the forward pass leaves them
    rounds = ROUNDS if row["flashinfer"] and row["vllm"] == "0.8.5" else 0
    assert 0 <= row["peak"] - own <= (VECTORS + rounds) * row["seqs"] + 15 * 512


@pytest.mark.parametrize("row", [row for row in SAMPLED if row["engine"] == "second, runner V2"], ids=label)
def test_runner_v2_samples_within_its_range(row: dict[str, Any]) -> None:
    settings = settings_of(row)
    sampler, entries = overheads.sampler_of(settings, H100), row["seqs"] * row["vocab"]
    per_entry = (row["peak"] - beside_entries(row, settings)) / entries
    assert sampler.low <= per_entry <= sampler.high


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "family" in row], ids=lambda row: f"{row['family']}-{row['vllm']}"
)
def test_eager_layers_of_plain_models_take_what_the_releases_own_classes_take(row: dict[str, Any]) -> None:
    spec = catalog.load({"Llama": "llama-3.1-8b", "Qwen2": "qwen2.5-7b"}[row["family"]])
    words = "+runner-v1" if row["vllm"] == "0.25.0" else ""
    args = EngineArgs(max_model_len=2048, max_num_batched_tokens=row["tokens"], max_num_seqs=1, enforce_eager=True)
    settings = rules.resolve(spec, H100, args, parse_engine(f"vllm@{row['vllm']}{words}"))
    assert activations.forward(spec, settings, args, settings.version, H100, 1).likely == row["peak"]


@pytest.mark.parametrize(
    ("model", "card", "engine", "args", "logged"),
    [
        # llm-d-benchmark's document of vLLM 0.11 on H100, and Unsloth's and vLLM's logs of 0.6 and 0.7: GiB
        ("llama-3.1-8b", "h100-80g", "vllm@0.11", EngineArgs(max_model_len=8192), 4.76),
        ("qwen3-0.6b", "h100-80g", "vllm@0.11", EngineArgs(max_model_len=8192), 5.56),
        ("qwen3-32b", "h100-80g", "vllm@0.11", EngineArgs(max_model_len=8192), 5.64),
        ("gpt-oss-20b", "h100-80g", "vllm@0.11", EngineArgs(max_model_len=8192), 7.38),
        ("qwen2.5-14b", "h100-80g", "vllm@0.7", EngineArgs(max_model_len=8192), 1.49),
        ("qwen2.5-0.5b", "t4", "vllm@0.6", EngineArgs(max_model_len=32_768), 1.44),
        ("qwen2.5-1.5b", "l40s", "vllm@0.6", EngineArgs(max_model_len=4096), 1.40),
    ],
)
def test_logged_peaks_of_sorting_samplers(model: str, card: str, engine: str, args: EngineArgs, logged: float) -> None:
    answer = plan(Request(catalog.load(model), gpu(card), args, parse_engine(engine)))
    assert activation_peak(answer) / GIB == pytest.approx(logged, abs=0.0101)  # of two decimals, each rounded


def test_few_rows_are_sorted_as_one() -> None:
    # torch's sort: 127 rows take pairs of row and column twice, 128 rows indices alone
    row = {"vllm": "0.16.0", "engine": "second", "flashinfer": False, "tokens": 2048, "seqs": 127}
    few, many = (overheads.sampler_of(settings_of({**row, "seqs": seqs}), H100) for seqs in (127, 128))
    assert (few.likely, many.likely) == (50, 38)


def test_a_range_covers_an_installation_that_nobody_stated() -> None:
    args = EngineArgs(max_model_len=8192)
    settings = rules.resolve(catalog.load("qwen3-8b"), H100, args, parse_engine("vllm@0.10"))
    stated = replace(settings.version, flashinfer=True)
    sampler = overheads.sampler_of(settings, H100)
    assert sampler.low == overheads.sampler_of(replace(settings, version=stated), H100).likely == 14
    assert sampler.likely == sampler.high == 38
