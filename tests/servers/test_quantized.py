"""Which quantized checkpoints a server starts with: whole models as vLLM 0.33.0 answers, and both servers' tables.

tests/facts/quantized_starts.jsonl: a catalog model with a quantization_config, a GPU, ranks and flags; `refused` is
what vLLM's own code answered when it built the whole model, empty if it did.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.start_table import alternatives, table
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec
from kvplan.planning.plan import Plan, Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.quantized import LISTS, Divisors, divisors_of, entries, listed
from kvplan.servers.sglang.supported import TABLE as SGLANG
from kvplan.servers.vllm.formats import TABLE as VLLM
from kvplan.servers.words.arguments import EngineArgs, left_out
from tests.oracles import GPUS, read_lines
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.refusals import reason_of

FACTS = Path(__file__).parents[1] / "facts"
ROWS = read_lines(FACTS / "quantized_starts.jsonl")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
W4AFP8 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}


def written(folder: Path, model: str, quantization: Any) -> Path:
    """A folder with the config of a catalog model and a quantization."""
    folder.mkdir(exist_ok=True)
    config = {**catalog.load(model).config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(folder: Path, card: str, engine: str = "vllm", **args: Any) -> Plan:
    release = parse_engine(engine)
    return plan(Request(load_spec(folder), gpu(card), EngineArgs(**left_out(release.engine) | args), release=release))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['key'].replace(' ', '_')}-{row['gpu']}")
def test_a_plan_starts_where_the_whole_model_does(row: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path / "model", row["model"], row["quantization_config"])
    args = {"max_model_len": 2048, "tensor_parallel_size": row["tp"]} | row["args"]
    try:
        refusal = planned(folder, GPUS.get(row["gpu"], row["gpu"].lower()), **args).refusal
        why = refusal.text if refusal is not None and refusal.by == "unsupported" else ""
    except KvplanError as error:  # heads that the ranks do not divide, formats that an earlier release loaded last
        why = str(error)
    assert bool(why) == bool(row["refused"]), (why, row["refused"])


def test_asymmetric_gptq_is_refused_in_the_servers_words(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "model", "qwen3-8b", GPTQ | {"sym": False})
    result = run("estimate", str(folder), "--gpu", "l40s", "--ctx", "16k", "--exit-code")
    assert result.code == 1
    assert "Unsupported quantization config: bits=4, sym=False" in result.out.splitlines()[0]
    assert not planned(folder, "l40s", max_model_len=16_384).fits


def test_int4_with_fp8_inputs_runs_on_hopper_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "qwen3-8b", W4AFP8)
    assert planned(folder, "h100-80g", max_model_len=4096).fits
    for card in ("a100-80g", "l40s", "b200", "rtx-5090"):
        refusal = planned(folder, card, max_model_len=4096).refusal
        assert refusal is not None
        assert "No compressed-tensors compatible scheme" in refusal.text


def test_a_shard_that_cuts_fp8_blocks_names_the_layer_and_fewer_ranks(tmp_path: Path, run: Run) -> None:
    # 25,600 / 16 = 1,600 inputs of down_proj on a rank: 12.5 blocks of 128
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    folder = written(tmp_path / "model", "qwen3-32b", blocks)
    refusal = planned(folder, "h100-80g", tensor_parallel_size=16, max_model_len=4096).refusal
    assert refusal is not None
    assert "on each of 16 ranks" in refusal.text
    result = run("estimate", str(folder), "--gpu", "16xh100-80g", "--ctx", "4k")
    assert "--tensor-parallel-size 8" in result.out
    assert planned(folder, "h100-80g", tensor_parallel_size=8, max_model_len=4096).fits


def test_a_deprecated_method_is_allowed_in_printed_commands(run: Run) -> None:
    result = run("estimate", "llama-3.1-405b-fp8", "--gpu", "h200", "--tp", "8", "--ctx", "8k")
    assert "--allow-deprecated-quantization" in result.out
    request = Request(catalog.load("llama-3.1-405b-fp8"), gpu("h200"), EngineArgs(tensor_parallel_size=8))
    for minor, needed in ((13, False), (14, True), (32, True)):  # the wheels' DEPRECATED_QUANTIZATION_METHODS
        older = plan(replace(request, release=parse_engine(f"vllm@0.{minor}")))
        assert ("--allow-deprecated-quantization" in serve_command(older)) == needed


def test_a_pasted_command_without_the_flag_is_refused_with_it(run: Run) -> None:
    command = "vllm serve meta-llama/Llama-3.1-405B-Instruct-FP8 --tensor-parallel-size 8 --max-model-len 8192"
    result = run("estimate", "--from-command", command, "--gpu", "h200", "--exit-code")
    assert result.code == 1
    assert "deprecated" in result.out.splitlines()[0]
    assert "--allow-deprecated-quantization" in result.out
    cured = run("estimate", "--from-command", f"{command} --allow-deprecated-quantization", "--gpu", "h200")
    assert "does not start" not in cured.out.splitlines()[0]


def test_a_server_without_the_flag_does_not_take_it(run: Run) -> None:
    result = run("estimate", "qwen3-8b", "--gpu", "h200", "--engine", "sglang", "--allow-deprecated-quantization")
    assert result.code == 2
    assert "SGLang has no such flag" in result.err


@pytest.mark.parametrize(
    ("engine", "quantization", "card"),
    [
        ("sglang", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "h200"),  # none of SGLang
        ("sglang", GPTQ | {"sym": False}, "h200"),  # its Marlin takes symmetric weights alone
        ("sglang", W4AFP8, "h200"),
    ],
)
def test_methods_that_a_server_lacks_are_refused(engine: str, quantization: Any, card: str, tmp_path: Path) -> None:
    refusal = planned(written(tmp_path / "model", "qwen3-8b", quantization), card, engine, max_model_len=4096).refusal
    assert refusal is not None
    assert refusal.by == "unsupported"


HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}
EETQ = {"quant_method": "eetq"}
UNKNOWN = "Unknown quantization method: "
# The first line of what vLLM 0.33's and SGLang 0.5.23's own ModelConfig and quantization classes raise.
NOT_LOADED = [
    ("vllm", HQQ, f"{UNKNOWN}hqq"),
    ("vllm", EETQ, f"{UNKNOWN}eetq"),
    ("vllm", GPTQ | {"bits": 3}, "Unsupported quantization config: bits=3, sym=True"),
    ("vllm", GPTQ | {"bits": 2}, "Unsupported quantization config: bits=2, sym=True"),
    ("vllm", {"quant_method": "modelopt", "quant_algo": "INT8_SQ"}, "ModelOpt currently only supports: ['FP8',"),
    ("sglang", HQQ, f"{UNKNOWN}hqq"),
    ("sglang", {"quant_method": "torchao"}, f"{UNKNOWN}torchao"),
    ("sglang", GPTQ | {"bits": 3}, f"{UNKNOWN}gptq"),
    (
        "sglang",
        {"quant_method": "auto-round", "bits": 2, "sym": True},
        "The non-Marlin GPTQ CUDA kernel has been removed",
    ),
]


@pytest.mark.parametrize(("engine", "quantization", "reason"), NOT_LOADED)
def test_a_stated_size_does_not_make_an_unknown_format_start(
    engine: str, quantization: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder, release = written(tmp_path / "model", "llama-3.1-8b", quantization), parse_engine(engine)
    request = Request(load_spec(folder), gpu("h100-80g"), EngineArgs(max_model_len=4096), release)
    assert reason_of(plan(replace(request, weights_bytes=5 * 2**30))).startswith(reason)
    with pytest.raises(KvplanError, match=re.escape(reason)) as refused:
        plan(request)
    assert refused.value.remedy == "name another checkpoint"  # not a size, which would not help


def test_a_format_that_the_server_has_is_sized_by_a_stated_size(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "llama-3.1-8b", {"quant_method": "torchao"})
    request = Request(load_spec(folder), gpu("h100-80g"), EngineArgs(max_model_len=4096))
    with pytest.raises(KvplanError, match="pass --weights-bytes"):
        plan(request)
    assert plan(replace(request, weights_bytes=5 * 2**30)).fits


QUARK = {
    "quant_method": "quark", "exclude": ["lm_head"], "export": {"kv_cache_group": []}, "layer_quant_config": {},
    "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
    },
}  # fmt: skip
FP8_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
             "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}  # fmt: skip
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": FP8_GROUP}}
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("quantization", "is_refused"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        (QUARK, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        (COMPRESSED | {"kv_cache_scheme": KV_SCHEME}, True),
        (COMPRESSED, False),
        (GPTQ, False),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, False),
    ],
    ids=["fp8", "quark", "modelopt", "compressed-tensors with scales", "compressed-tensors", "gptq", "fbgemm_fp8"],
)
def test_e5m2_caches_do_not_go_with_scales_in_the_checkpoint(
    quantization: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    """vLLM 0.33's attention layer: "fp8_e5m2 kv-cache is not supported with fp8 checkpoints."."""
    folder = written(tmp_path / "model", "llama-3.1-8b", quantization)
    answer = planned(folder, "h100-80g", max_model_len=4096, kv_cache_dtype="fp8_e5m2")
    assert (answer.refusal is not None and "fp8_e5m2 KV cache" in answer.refusal.text) == is_refused


@pytest.mark.parametrize("path", [VLLM, SGLANG], ids=lambda path: path.parent.name)
def test_every_line_of_a_table_is_read(path: Path) -> None:
    known = entries(path)
    assert len(known) > 60
    lines = path.read_text().splitlines()
    lists = [line for line in lines if line.partition(" ")[0] in LISTS]
    assert len(lines) == len(lists) + len(known) + sum(len(entry.rules) for entry in known.values())
    assert {"fp8", "compressed-tensors", "gptq"} <= listed(path, "methods")
    assert all(rule.conditions or rule.reason for entry in known.values() for rule in entry.rules)


def test_conditions_are_read_as_they_are_written() -> None:
    divisors = Divisors(parts=64, inputs=128)
    assert divisors_of(str(divisors)) == divisors
    assert divisors.suit((64, 128), 256)
    assert not divisors.suit((64, 96), 256)
    assert Divisors(front=128).suit((128, 8), 1)
    assert Divisors(most=64).suit((8,), 48, 64)
    assert not Divisors(most=64).suit((8,), 48, 96)


def test_a_grid_is_explained_by_the_fewest_conditions() -> None:
    shapes = [((n,), k) for n in (8, 64, 96, 192) for k in (64, 96, 128, 192)]
    answers = tuple((shape, shape[0][0] % 64 == 0 and shape[1] % 64 == 0) for shape in shapes)
    assert alternatives("column", answers) == [Divisors(sum=64, inputs=64)] or alternatives("column", answers) == [
        Divisors(parts=64, inputs=64)
    ]
    with pytest.raises(ValueError, match="no condition explains"):
        alternatives("column", tuple((shape, shape == ((96,), 128)) for shape in shapes))


HOME = os.environ.get("ORACLE_HOME")


@pytest.mark.skipif(HOME is None, reason="ORACLE_HOME names no folder with the servers' own code")
@pytest.mark.parametrize(("server", "path"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_the_table_is_what_the_servers_code_answers(server: str, path: Path, tmp_path: Path) -> None:
    out, lines = tmp_path / "cells.jsonl", path.read_text().splitlines()
    words = [sys.executable, "-m", "benchmarks.start_quantization", "ask", server, str(HOME), "--gpu", "H100"]
    subprocess.run([*words, "--only", "fp8_block", "-o", str(out)], check=True, capture_output=True)
    for line in table(read_lines(out)):
        if line.startswith(" "):
            layers, _, _, rule = (field.strip() for field in line.split(" | "))
            assert any(rule in known and set(layers.split()) & set(shlex.split(known)) for known in lines)
