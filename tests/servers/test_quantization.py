"""Quantized checkpoints against the servers' own answers: bytes of weights per rank, KV blocks, refusals.

tests/facts/quantization.jsonl: vLLM 0.33.0's own parameters and KV plans for catalog models with a quantization in
config.json or in ModelOpt's file beside it; quantization_sglang.jsonl: SGLang 0.5.23's pools.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests.oracles import EQUAL, compare_case, compare_sglang_in, read_lines
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.refusals import reason_of

FACTS = Path(__file__).parents[1] / "facts"
ROWS = read_lines(FACTS / "quantization.jsonl")
NVFP4 = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


def checkpoint(directory: Path, model: str, stated: Any = None, beside: Any = None) -> Path:
    """A folder with the config of a catalog model, a quantization in it, and one in ModelOpt's file beside it."""
    directory.mkdir()
    config = {key: value for key, value in catalog.load(model).config.items() if key != "quantization_config"}
    (directory / "config.json").write_text(
        json.dumps(config if stated is None else {**config, "quantization_config": stated})
    )
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    return directory


def row_name(row: dict[str, Any]) -> str:
    return f"{row['inputs']['model']} {row['scheme']} tp{row['inputs'].get('tp', 1)}"


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_weights_and_blocks_are_those_of_vllm(row: dict[str, Any], tmp_path: Path) -> None:
    model = row["inputs"]["model"]
    checkpoint(tmp_path / model, model, row.get("quantization"), row.get("beside"))
    assert compare_case(row, tmp_path) == (EQUAL, [])


@pytest.mark.parametrize("row", read_lines(FACTS / "quantization_sglang.jsonl"), ids=row_name)
def test_pools_of_quantized_checkpoints_are_those_of_sglang(row: dict[str, Any], tmp_path: Path) -> None:
    model = row["inputs"]["model"]
    checkpoint(tmp_path / model, model, row.get("quantization"), row.get("beside"))
    assert compare_sglang_in(row, tmp_path) == (EQUAL, [])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_file_beside_the_config_states_weights_and_cache(engine: str, tmp_path: Path) -> None:
    """Qwen3-32B in NVFP4: both servers' KV cache is fp8; vLLM creates 20,666,169,344 bytes of parameters, and 10,240
    blocks of 16 tokens in 20 GiB.
    """
    spec = load_spec(checkpoint(tmp_path / "Qwen3-32B-NVFP4", "qwen3-32b", beside=NVFP4))
    args = EngineArgs(max_model_len=4096, kv_cache_memory_bytes=20 * 2**30 if engine == "vllm" else None)
    answer = plan(Request(spec, gpu("h100-80g"), args, release=parse_engine(engine)))
    assert answer.settings.kv_dtype == "fp8"
    if engine == "vllm":
        assert (answer.memory.weights, answer.capacity.num_blocks) == (20_666_169_344, 10_240)


def test_a_quantization_in_the_config_comes_before_the_file_beside_it(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    spec = load_spec(checkpoint(tmp_path / "model", "qwen3-8b", stated=fp8, beside=NVFP4))
    assert spec.quantization is not None
    assert spec.quantization.method == "fp8"


@pytest.mark.parametrize("algorithm", ["MXFP8", "W4A16_AWQ"])
def test_algorithms_that_vllm_refuses_in_the_nested_form_are_refused(algorithm: str, tmp_path: Path) -> None:
    nested = {**NVFP4, "quantization": {"quant_algo": algorithm}}
    spec = load_spec(checkpoint(tmp_path / "model", "qwen3-8b", beside=nested))
    reason = reason_of(plan(Request(spec, gpu("h100-80g"), EngineArgs(max_model_len=4096))))
    assert f"{algorithm} in ModelOpt's nested form" in reason


def test_a_name_with_a_quantization_that_was_not_found_shows_both_sizes(tmp_path: Path, run: Run) -> None:
    """Qwen3-32B: 65,524,246,528 bytes in bfloat16 (61.02 GiB), 20,666,169,344 in NVFP4 (19.25 GiB)."""
    folder = checkpoint(tmp_path / "Qwen3-32B-NVFP4", "qwen3-32b")
    notes = run("estimate", str(folder), "--gpu", "h100-80g", "--ctx", "16k").err
    assert (
        "Qwen3-32B-NVFP4: the name says NVFP4, but no quantization was found in config.json or next to it: weights are "
        "61.02 GiB as read, about 19.25 GiB as NVFP4" in " ".join(notes.split())
    )


def test_the_path_of_a_config_is_read_with_the_file_beside_it(tmp_path: Path, run: Run) -> None:
    """Both servers get the folder: 20,666,169,344 bytes (19.25 GiB) as vLLM creates them, not 61.02 GiB."""
    folder = checkpoint(tmp_path / "Qwen3-32B-NVFP4", "qwen3-32b", beside=NVFP4)
    named = run("estimate", str(folder / "config.json"), "--gpu", "h100-80g", "--ctx", "16k")
    assert "19.25 GiB" in named.out
    assert "the name says" not in named.err
    whole = run("estimate", str(folder), "--gpu", "h100-80g", "--ctx", "16k")
    assert named.out.splitlines()[1:] == whole.out.splitlines()[1:]


@pytest.mark.parametrize(
    ("name", "by_modelopt"),
    [("x-NVFP4", True), ("x-FP8", True), ("x-AWQ", False), ("x-GPTQ", False), ("x-MXFP4", False)],
)
def test_the_remedy_names_the_file_that_states_such_a_quantization(
    name: str, by_modelopt: bool, tmp_path: Path, run: Run
) -> None:
    """Only ModelOpt writes hf_quant_config.json, and it has no GPTQ, AWQ or MXFP4 that those names mean."""
    folder = checkpoint(tmp_path / name, "qwen3-8b")
    notes = " ".join(run("estimate", str(folder), "--gpu", "h100-80g", "--ctx", "4k").err.split())
    assert "take the published config.json with its quantization_config" in notes
    assert ("hf_quant_config.json" in notes) == by_modelopt


@pytest.mark.parametrize(("name", "beside"), [("Qwen3-32B-NVFP4", NVFP4), ("Qwen3-32B", None), ("awqward", None)])
def test_other_names_are_passed_over(name: str, beside: Any, tmp_path: Path, run: Run) -> None:
    folder = checkpoint(tmp_path / name, "qwen3-32b", beside=beside)
    assert "the name says" not in run("estimate", str(folder), "--gpu", "h100-80g", "--ctx", "16k").err


@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        ("fp8_per_channel", "ct_fp8_dyn"),
        ("fp8_per_block", "ct_fp8_block"),
        ("fp8_per_tensor", "ct_fp8_static"),
        ("mxfp4", "ct_mxfp4"),
    ],
)
def test_weights_quantized_while_loading_are_as_large_as_a_checkpoint_in_that_scheme(method: str, scheme: str) -> None:
    """But for the checkpoint's KV scales, 18 bytes in each of 36 layers, and its static input scales of 7 matrices."""
    row = next(row for row in ROWS if (row["inputs"]["model"], row["scheme"]) == ("qwen3-8b", scheme))
    extra = 36 * 18 + (36 * 7 * 4 if scheme == "ct_fp8_static" else 0)
    args = EngineArgs(max_model_len=4096, quantization=method)
    loaded = plan(Request(catalog.load("qwen3-8b"), gpu("h100-80g"), args))
    assert loaded.memory.weights == row["weights"]["param_bytes_per_rank"] - extra
    with pytest.raises(KvplanError, match=r"is known of vLLM 0\.33"):
        plan(Request(catalog.load("qwen3-8b"), gpu("h100-80g"), args, release=parse_engine("vllm@0.20")))


def test_the_page_counts_the_rows_of_the_facts() -> None:
    page = (FACTS.parents[1] / "docs" / "models.md").read_text()
    table = page.split("| scheme | models compared |")[1].split("\n\n")[0]
    counts = [[int(cell) for cell in line.split("|")[3:5]] for line in table.splitlines()[2:]]
    assert [sum(column) for column in zip(*counts, strict=True)] == [
        sum("failed" not in row for row in ROWS),
        sum("failed" in row for row in ROWS),
    ]
