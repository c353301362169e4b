"""LoRA under vLLM against its own code: slots on the GPU, stage by stage, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import weight_layout
from kvplan.servers.vllm import adapters, host
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import total_weights
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import needs_oracle_data, spec_named

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "adapters.jsonl").read_text().splitlines()]
GPUS = {"A100": "a100-80g", "H100": "h100", "H200": "h200", "B200": "b200"}


def is_ours(row: dict[str, Any]) -> bool:
    return "__" not in row["inputs"]["model"]


def name_of(row: dict[str, Any]) -> str:
    inputs = row["inputs"]
    flags = {key: value for key, value in inputs["engine_args"].items() if key != "enable_lora"}
    return " ".join(map(str, (inputs["model"], inputs.get("tp", 1), inputs.get("pp", 1), *flags.values())))


def request_of(row: dict[str, Any]) -> Request:
    inputs, flags = row["inputs"], dict(row["inputs"]["engine_args"])
    flags.pop("enable_lora")
    if "lora_target_modules" in flags:
        flags["lora_target_modules"] = ",".join(sorted(flags["lora_target_modules"]))
    args = EngineArgs(
        tensor_parallel_size=inputs.get("tp", 1),
        pipeline_parallel_size=inputs.get("pp", 1),
        max_model_len=inputs["max_model_len"],
        **flags,
    )
    return Request(spec_named(inputs["model"]), gpu(GPUS[inputs.get("gpu", "H100")]), args, parse_engine("vllm@0.33"))


def slots_of(request: Request, stage: int) -> int:
    settings = vllm.resolve(request.spec, request.gpu, request.args, request.release)
    return adapters.lora(request.spec, settings, request.args, stage).likely


def compare(row: dict[str, Any]) -> None:
    request = request_of(row)
    for stage, (weights, slots, mappings) in enumerate(zip(row["weights"], row["slots"], row["mappings"], strict=True)):
        assert total_weights(request.spec, weight_layout(request, stage)) == weights
        assert slots_of(request, stage) == slots + mappings


@pytest.mark.parametrize("row", [row for row in ROWS if is_ours(row)], ids=name_of)
def test_slots_are_as_large_as_vllm_makes_them(row: dict[str, Any]) -> None:
    compare(row)


@needs_oracle_data
@pytest.mark.parametrize("row", [row for row in ROWS if not is_ours(row)], ids=name_of)
def test_slots_of_other_configs_are_as_large_as_vllm_makes_them(row: dict[str, Any]) -> None:
    compare(row)


@pytest.mark.parametrize(
    ("model", "args", "fault"),
    [
        # What vLLM 0.33 says: "1 is not divisible by 8"; "LoRA is not supported for ..."; "Fused MoE LoRA does not
        # support enable_expert_parallel=True together with fully_sharded_loras=True".
        ("llama-3.1-8b", {"max_lora_rank": 1, "tensor_parallel_size": 8, "fully_sharded_loras": True}, "8 ranks"),
        ("mimo-v2-flash", {}, "vLLM has no adapters for"),
        (
            "qwen3-30b-a3b",
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "fully_sharded_loras": True},
            "with expert parallelism",
        ),
        (
            "qwen3-30b-a3b",
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "over data-parallel ranks only with --tp 1",
        ),
        ("llama-3.1-8b", {"lora_target_modules": "nonsense"}, "is no module of"),
        ("llama-3.1-8b", {"max_loras": 4, "max_cpu_loras": 2}, "is less than --max-loras 4"),
        ("llama-3.1-8b", {"lora_dtype": "float64"}, "is not supported by vLLM"),
        ("qwen3-vl-8b", {"enable_tower_connector_lora": True}, "encoder are not sized"),
    ],
)
def test_refuses_what_vllm_refuses_and_what_is_not_sized(model: str, args: dict[str, Any], fault: str) -> None:
    request = Request(catalog.load(model), gpu("h100"), EngineArgs(**{"max_loras": 1} | args))
    with pytest.raises(KvplanError, match=fault):
        slots_of(request, 0)


def test_a_release_that_was_not_compared_is_not_called_exact() -> None:
    spec, device, args = catalog.load("llama-3.1-8b"), gpu("h100"), EngineArgs(max_loras=1)
    kinds = []
    for name in ("vllm@0.33", "vllm@0.14"):
        settings = vllm.resolve(spec, device, args, parse_engine(name))
        kinds.append(adapters.lora(spec, settings, args).kind)
    assert kinds == ["exact", "formula"]


def test_a_command_with_adapters_is_planned_and_printed(run: Run) -> None:
    flags = "--enable-lora --max-loras 2 --max-lora-rank 32 --lora-target-modules q_proj v_proj --max-cpu-loras 8"
    command = f"vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192 {flags}"
    out = run("estimate", "--from-command", command, "--gpu", "h100-80g", "--explain").out
    # 32 layers of qkv_proj: three A of 32 x 4,096 and B of 6,144 x 32 rows, twice, in two bytes
    assert f"2 slots x {32 * 32 * (3 * 4096 + 6144):,} elements at rank 32 x 2 B" in out.replace("\n", " ")
    assert "--lora-target-modules q_proj v_proj" in out.replace("\n", " ")


def test_a_wrong_list_of_modules_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a list of names"):
        read_argument("lora_target_modules", "q_proj;rm", "--lora-target-modules")


def test_adapters_in_host_memory_are_whole_in_every_process() -> None:
    """8 adapters of rank 32 for q_proj and v_proj's fused layer: three A of 4,096 and B of 6,144 rows, 32 layers."""
    args = EngineArgs(
        max_model_len=8192, tensor_parallel_size=2, max_loras=2, max_cpu_loras=8, max_lora_rank=32,
        lora_target_modules="q_proj,v_proj",
    )  # fmt: skip
    answer = plan(Request(catalog.load("llama-3.1-8b"), gpu("h100"), args))
    (row,) = (row for row in host.rows(answer) if row.name == "adapters")
    assert (row.size, row.per) == (8 * 2 * 32 * 32 * (3 * 4096 + 6144), "rank")


@pytest.mark.parametrize(
    ("engine", "slots", "graphs"),
    [
        ("vllm@0.33", 0, 102),
        ("vllm@0.33", 4, 204),  # get_lora_capture_cases: [0, max_loras + 1], each with every size
        ("vllm@0.14", 1, 204),
        ("vllm@0.11", 1, 102),  # its dispatcher knows no adapters
    ],
)
def test_graphs_are_captured_with_adapters_and_without(engine: str, slots: int, graphs: int) -> None:
    args = EngineArgs(max_model_len=8192, max_loras=slots, max_num_seqs=1024)
    answer = plan(Request(catalog.load("llama-3.1-8b"), gpu("h100-80g"), args, parse_engine(engine)))
    assert f"{graphs} graphs" in answer.estimates["cuda_graphs"].formula
    assert answer.estimates["cuda_graphs"].likely == 2**28 + graphs * 6 * 2**20
