"""The plan document: rows add up, the pool is whole blocks, every key is in the schema, every number has an origin."""

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator

from kvplan.core.errors import UsageError
from kvplan.core.units import GIB, MIB
from kvplan.documents import artifact
from kvplan.documents.artifact import dumps, plan_document, plans_document
from kvplan.documents.schema import document_schema
from kvplan.hardware.gpu import custom_gpu, gpu
from kvplan.models import catalog
from kvplan.planning import plan as planning
from kvplan.planning.plan import Load, MemoryBreakdown, Plan, Request, plan
from kvplan.report.page import page
from kvplan.report.text import plans_page, plans_table
from kvplan.servers.plans.plan import budget_sizes
from kvplan.servers.vllm.rules import version
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.workloads.lengths import parse_lengths

ROWS = ("weights", "buffers", "activations", "cuda_graphs", "non_torch", "lora", "kv_cache", "unused")


def planned(model: str, card: str = "a100-80g", load: Load | None = None, **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(card), EngineArgs(**args), load=load or Load()))


def first() -> Plan:
    return planned("llama-3.1-8b", max_model_len=32768)


# One of everything: dense, tensor and pipeline parallel, hybrids, MLA, what does not fit, a stated pool, old releases.
CASES: dict[str, Plan] = {}


@pytest.fixture(scope="module")
def cases() -> dict[str, Plan]:
    llama = catalog.load("llama-3.1-8b")
    lengths = parse_lengths("lognormal:median=1000,sigma=1.2", 32768)
    if not CASES:
        CASES.update(
            first=first(),
            stated_pool=planned("llama-3.1-8b", max_model_len=32768, kv_cache_memory_bytes=16 * GIB),
            blocks_override=planned("llama-3.1-8b", max_model_len=4096, num_gpu_blocks_override=1000),
            auto=planned("llama-3.1-8b", "l4", max_model_len="auto"),
            too_big=planned("llama-3.1-70b", max_model_len=32768),
            tensor=planned("llama-3.1-70b", "h100-80g", max_model_len=32768, tensor_parallel_size=4),
            replicas=planned("llama-3.1-8b", max_model_len=8192, data_parallel_size=2),
            pipeline=planned("deepseek-v3", "h200", tensor_parallel_size=8, pipeline_parallel_size=2),
            windows=planned("gpt-oss-20b", "h100-80g", max_model_len=131072),
            states=planned("qwen3-next-80b-a3b", "h100-80g", tensor_parallel_size=4, max_model_len=131072),
            online=planned("llama-3.1-8b", "h100-80g", max_model_len=32768, quantization="fp8"),
            lora=planned("llama-3.1-8b", max_model_len=32768, max_loras=4, max_lora_rank=64),
            load=planned(
                "llama-3.1-8b", load=Load(mean_tokens=2048, lengths=lengths, shared_prefix=900), max_model_len=32768
            ),
            offload=planned("llama-3.1-8b", max_model_len=32768, kv_offloading_size=64 * GIB),
            old=plan(Request(llama, gpu("a100-80g"), EngineArgs(max_model_len=32768), version((0, 11)))),
            custom=plan(Request(llama, custom_gpu(24 * GIB), EngineArgs(max_model_len=8192))),
            stated_weights=plan(
                Request(llama, gpu("a100-80g"), EngineArgs(max_model_len=32768), weights_bytes=5 * GIB)
            ),
            draft=plan(
                Request(
                    llama,
                    gpu("h100-80g"),
                    EngineArgs(max_model_len=32768, num_speculative_tokens=3),
                    draft=catalog.load("llama-3.2-1b"),
                )
            ),
        )
    return CASES


def numbers(value: Any) -> Iterator[float]:
    match value:
        case dict():
            for item in value.values():
                yield from numbers(item)
        case list():
            for item in value:
                yield from numbers(item)
        case bool() | None | str():
            return
        case _:
            yield value


def leaves(value: Any, path: str) -> Iterator[str]:
    """Paths of the numbers below a value, list elements as [*]."""
    match value:
        case dict():
            for key, item in value.items():
                yield from leaves(item, f"{path}.{key}")
        case list():
            for item in value:
                yield from leaves(item, f"{path}[*]")
        case bool() | None | str():
            return
        case _:
            yield path


def test_every_document_is_what_the_schema_says(cases: dict[str, Plan]) -> None:
    Draft202012Validator.check_schema(document_schema("plan"))
    validator = Draft202012Validator(document_schema("plan"))
    for name, answer in cases.items():
        faults = [
            f"{name}: {fault.json_path}: {fault.message}" for fault in validator.iter_errors(plan_document(answer))
        ]
        assert faults == []


def test_several_plans_have_a_schema_too(cases: dict[str, Plan]) -> None:
    document = plans_document([cases["first"], cases["too_big"]])
    assert document["schema"] == "kvplan/plans@1"
    Draft202012Validator(document_schema("plans")).validate(document)


def test_a_key_the_schema_does_not_name_is_refused(cases: dict[str, Plan]) -> None:
    document = json.loads(dumps(plan_document(cases["first"])))
    document["memory"]["guess"] = 1
    assert not Draft202012Validator(document_schema("plan")).is_valid(document)
    del document["memory"]["guess"], document["memory"]["lora"]
    assert not Draft202012Validator(document_schema("plan")).is_valid(document)


def test_the_schema_names_every_flag_and_setting() -> None:
    inputs = document_schema("plan")["properties"]["inputs"]["properties"]
    assert list(inputs["args"]["properties"]) == [field.name for field in fields(EngineArgs)]
    derived = ("version", "backend", "batches", "first_engine", "runner_v2", "graphs_in_budget", "prefix_caching")
    assert list(inputs["settings"]["properties"]) == [
        field.name for field in fields(Settings) if field.name not in derived
    ]


def test_an_unknown_schema_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"schema 'ledger': no such schema; use one of error, plan, plans"):
        document_schema("ledger")


def test_the_rows_add_up_to_the_total(cases: dict[str, Plan]) -> None:
    for name, answer in cases.items():
        memory = plan_document(answer)["memory"]
        assert MemoryBreakdown.ROWS == ROWS
        assert (
            sum(cast(dict[str, int], memory)[row] for row in MemoryBreakdown.ROWS) - memory["missing"]
            == memory["total"]
        ), name
        detail = memory["unused_detail"]
        assert detail["context"] + detail["outside_budget"] + detail["slack"] == (
            memory["unused"] - memory["missing"] + detail["over_budget"] + detail["over_gpu"]
        ), name
        assert min(memory["unused"], memory["missing"], *numbers(detail)) == 0, name
        assert sum(memory["weight_groups"].values()) == memory["weights"], name


def test_the_kv_cache_is_whole_blocks(cases: dict[str, Plan]) -> None:
    for name, answer in cases.items():
        document = plan_document(answer)
        kv = document["kv"]
        assert document["memory"]["kv_cache"] == kv["num_blocks"] * kv["bytes_per_block"], name
        assert kv["bytes_per_request"] == kv["blocks_per_request"] * kv["bytes_per_block"], name
        assert kv["blocks_per_request"] == sum(group["blocks_per_request"] for group in kv["groups"]), name


def test_a_block_costs_the_widest_group(cases: dict[str, Plan]) -> None:
    for name, answer in cases.items():
        kv = plan_document(answer)["kv"]
        assert kv["bytes_per_block"] == max(group["bytes_per_block"] for group in kv["groups"]), name


def test_users_and_the_servers_figure_have_their_ranges(cases: dict[str, Plan]) -> None:
    for name, answer in cases.items():
        users = plan_document(answer)["concurrency"]
        assert users["users"] == min(users["pool_users"], users["max_num_seqs"]), name
        assert (users["users"] > 0) == answer.fits, name
        if answer.request.load.lengths is None:
            assert users["users_low"] is not None, name
            assert users["users_high"] is not None, name
            assert users["users_low"] <= users["users"] <= users["users_high"], name
        assert users["low"] <= users["max"] <= users["high"] or not answer.fits, name


def test_sizes_are_integers_and_nothing_is_nan(cases: dict[str, Plan]) -> None:
    for name, answer in cases.items():
        document = plan_document(answer)
        assert all(math.isfinite(number) for number in numbers(document)), name
        sizes = {**document["memory"], **document["kv"], **document["parameters"]}
        assert all(isinstance(number, int) for number in numbers(sizes)), name


def test_every_number_has_an_origin(cases: dict[str, Plan]) -> None:
    for name, answer in cases.items():
        document = plan_document(answer)
        expected = {path for part in ("memory", "kv", "concurrency") for path in leaves(document[part], part)}
        assert set(document["provenance"]) == expected, name
        assert all(entry["source"] for entry in document["provenance"].values()), name


def test_text_and_back_is_the_same_document(cases: dict[str, Plan]) -> None:
    for answer in cases.values():
        document = plan_document(answer)
        assert json.loads(dumps(document)) == document
    assert dumps({"a": 1}) == '{\n  "a": 1\n}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"a": math.nan})


def test_the_first_case_by_hand(cases: dict[str, Plan]) -> None:
    document = plan_document(cases["first"])
    memory, kv = document["memory"], document["kv"]
    assert document["schema"] == "kvplan/plan@1"
    assert kv["bytes_per_token"] == 131_072  # 32 layers x 8 KV heads x (128 + 128) x 2 B
    assert kv["bytes_per_block"] == 2_097_152  # x 16 tokens
    assert kv["blocks_per_request"] == 2_048  # 32,768 / 16
    assert kv["bytes_per_request"] == 4 * GIB
    assert kv["state_bytes_per_request"] == 0
    assert document["parameters"]["total"] == 8_030_261_248  # the published count
    assert document["parameters"]["active"] == 8_030_261_248
    assert memory["weights"] == 16_060_522_496  # two bytes each; vLLM's own total in its capacity code
    assert memory["budget"] == math.ceil(memory["total"] * 0.92)
    assert document["fits"]
    assert document["deficit"] == 0
    assert document["fixes"] == []
    # The server's figure: 54 to 57.5 GiB are left on this card, at 4 GiB a user.
    assert 54 <= memory["kv_cache"] / GIB <= 57.5
    assert 13.5 <= document["concurrency"]["max"] <= 14.4


def test_a_stated_pool_is_exact(cases: dict[str, Plan]) -> None:
    document = plan_document(cases["stated_pool"])
    assert document["kv"]["num_blocks"] == 8192  # 16 GiB / 2 MiB
    assert document["concurrency"]["max"] == 4.0  # 16 GiB / 4 GiB
    assert document["concurrency"]["low"] == document["concurrency"]["high"] == 4.0
    assert document["provenance"]["kv.num_blocks"]["kind"] == "exact"


def test_what_rests_on_calibrated_rows_is_not_called_exact(cases: dict[str, Plan]) -> None:
    first, stated = (plan_document(cases[name])["provenance"] for name in ("first", "stated_pool"))
    dependent = ("memory.kv_cache", "kv.num_blocks", "kv.tokens", "concurrency.max")
    for path in dependent:
        assert first[path]["kind"] == "calibrated"
        assert "equal to the server's own code" not in first[path]["source"]
        assert stated[path]["kind"] == "exact"
        assert stated[path]["source"].endswith("equal to the server's own code in every case compared")
    assert first["memory.unused"]["kind"] == first["memory.available"]["kind"] == "calibrated"
    assert stated["memory.unused"]["kind"] == "calibrated"
    assert first["kv.bytes_per_token"]["kind"] == first["kv.blocks_per_request"]["kind"] == "exact"
    assert stated["concurrency.users"]["kind"] == "formula"  # no server prints it


def test_older_releases_were_not_compared_with_their_code(cases: dict[str, Plan]) -> None:
    document = plan_document(cases["old"])
    assert not [path for path, entry in document["provenance"].items() if "own code" in entry["source"]]
    assert document["provenance"]["kv.blocks_per_request"]["kind"] == "formula"
    assert "posted start-up logs" in document["provenance"]["kv.blocks_per_request"]["source"]
    rules = next(assumption for assumption in document["assumptions"] if assumption["name"] == "rules")
    assert rules["likely"] is None
    assert "not compared with that release's own code" in rules["source"]
    assert "rules" not in [assumption["name"] for assumption in plan_document(cases["first"])["assumptions"]]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("llama-3.1-8b", False),  # a copy of its config.json
        ("llama-3.1-8b-awq", True),  # sibling, not checked
        ("gemma-3n-e2b", True),  # class default
        ("granite-4.0-micro", True),  # reconstructed
    ],
)
def test_facts_that_are_not_the_published_config_are_an_assumption(model: str, named: bool) -> None:
    document = plan_document(planned(model, max_model_len=4096))
    sources = [assumption["source"] for assumption in document["assumptions"] if assumption["name"] == "model facts"]
    assert sources == ([catalog.facts(model)["source"]] if named else [])
    Draft202012Validator(document_schema("plan")).validate(document)


def test_the_scheme_says_how_the_weights_are_stored() -> None:
    model = plan_document(planned("llama-3.1-8b-fp8", "h100-80g", max_model_len=4096))["inputs"]["model"]
    assert (model["quantization"], model["scheme"]) == ("compressed-tensors", "fp8")
    assert plan_document(first())["inputs"]["model"]["scheme"] is None


# What the printed rows of the first case leave, by hand. A100 80 GB: 85,094,039,552 bytes as device queries print them.
# Weights of Llama-3.1-8B: 8,030,261,248 parameters x 2 B. A block: 16 tokens x 32 layers x 8 heads x 256 x 2 B.
A100_TOTAL, LLAMA_WEIGHTS, LLAMA_BLOCK = 85_094_039_552, 16_060_522_496, 2_097_152


def test_the_golden_numbers_by_hand(cases: dict[str, Plan]) -> None:
    document = plan_document(cases["first"])
    memory, kv = document["memory"], document["kv"]
    assert (memory["total"], memory["weights"], kv["bytes_per_block"]) == (A100_TOTAL, LLAMA_WEIGHTS, LLAMA_BLOCK)
    # Buffers: cos and sin tables of 131,072 positions x 128 x 2 B; 13 B for each of 2,048 batched tokens; and 256
    # sequences x 128,256 vocabulary entries x 4.25 B for penalties and bit masks; cuBLAS's workspace as torch gives it
    # to Ampere, 2 x 4 MiB and 8 x 16 KiB.
    buffers = 131_072 * 128 * 2 + 2_048 * 13 + 256 * 128_256 * 17 // 4 + 8_519_680
    assert memory["buffers"] == pytest.approx(buffers, rel=0.01)
    # Activations: 256 sequences x 128,256 x 14 B (2 B of logits, three copies in float32), beside a hidden state of
    # 4,096 x 2 B for each of 2,048 tokens and of the 256 that are sampled. CUDA graphs: 0.25 GiB and 86 of 6 MiB.
    # Outside torch: 0.20 GiB at TP 1.
    assert memory["activations"] == 256 * 128_256 * 14 + (2_048 + 256) * 4_096 * 2
    assert memory["cuda_graphs"] == GIB // 4 + 86 * 6 * MIB
    assert memory["non_torch"] == pytest.approx(GIB / 5, abs=1)
    rows = buffers + 256 * 128_256 * 14 + 2_304 * 4_096 * 2 + GIB // 4 + 86 * 6 * MIB + GIB // 5
    blocks = (math.ceil(A100_TOTAL * 92 / 100) - LLAMA_WEIGHTS - rows) // LLAMA_BLOCK
    assert blocks == 28_868
    assert kv["num_blocks"] == blocks
    assert kv["tokens"] == 461_888  # 28,868 x 16
    assert f"{memory['kv_cache'] / GIB:.2f}" == "56.38"  # 28,868 x 2 MiB


def test_what_does_not_fit_says_by_how_much_and_what_would(cases: dict[str, Plan]) -> None:
    document = plan_document(cases["too_big"])
    assert not document["fits"]
    assert document["memory"]["kv_cache"] == document["kv"]["num_blocks"] == document["kv"]["tokens"] == 0
    assert document["concurrency"]["users"] == 0
    # One request and the null block, 2,049 blocks of 80 x 8 x 256 x 2 x 16 B, less what is (negatively) left.
    assert document["deficit"] == 2_049 * 5_242_880 - document["memory"]["available"]
    assert document["limits"][0]["by"] == "weights"
    fix = next(fix for fix in document["fixes"] if fix["flag"] == "--tensor-parallel-size 4")
    assert fix["num_gpus"] == 4
    assert "--tensor-parallel-size 4" in fix["command"]


def test_active_parameters_count_the_experts_a_token_uses(cases: dict[str, Plan]) -> None:
    # gpt-oss-20b: 24 layers x 3 x 2880 x 2880 weights and biases of 32 experts, 4 used; 3.6B active are published.
    parameters = plan_document(cases["windows"])["parameters"]
    assert parameters["total"] == 20_914_757_184
    assert parameters["total"] - parameters["active"] == parameters["groups"]["experts"] * 28 // 32
    assert 3.5e9 < parameters["active"] < 4.2e9


def test_online_quantisation_reports_both_sizes(cases: dict[str, Plan]) -> None:
    memory = plan_document(cases["online"])["memory"]
    assert memory["load_peak"] == 16_060_522_496
    assert memory["weights"] < memory["load_peak"]


def test_inputs_are_resolved(cases: dict[str, Plan]) -> None:
    inputs = plan_document(cases["auto"])["inputs"]
    assert dict[str, Any](inputs["args"])["max_model_len"] == "auto"
    assert inputs["settings"]["max_model_len"] == cases["auto"].capacity.max_model_len
    assert inputs["engine"] == "vllm@0.33"
    assert inputs["settings"]["max_num_seqs"] == 256  # vLLM's default on a GPU below 70 GiB
    assert plan_document(cases["load"])["inputs"]["workload"]["mean_tokens"] == 2048


def test_offloading_names_the_host_memory(cases: dict[str, Plan]) -> None:
    document = plan_document(cases["offload"])
    host = document["host_memory"]
    none = {"ranks": 1, "weights": 0, "kv_transfer": 0, "adapters": 0}
    host_memory = {
        "kv_offloading": 64 * GIB,
        "total": 64 * GIB,
        "blocks": 32_768,
        "users": 16,
    }  # 64 GiB / 2 MiB; / 4 GiB
    assert host == none | host_memory
    table = plans_table([cases["offload"]])
    row = dict(zip(table.names, table.rows[0], strict=True))
    assert (row["host_memory.kv_offloading"], row["host_memory.users"]) == (64 * GIB, 16)
    memory = document["memory"]
    assert (
        sum(budget_sizes(memory).values()) + memory["weights"] + memory["kv_cache"] + memory["unused"]
        == memory["total"]
    )
    assert "| KV cache | 64.00 | holds 16 more full contexts |" in page(plans_page([cases["offload"]]))


def test_a_stated_weight_total_is_an_assumption(cases: dict[str, Plan]) -> None:
    document = plan_document(cases["stated_weights"])
    assert document["memory"]["weights"] == 5 * GIB
    assert "weights" in [assumption["name"] for assumption in document["assumptions"]]


def test_a_nominal_gpu_total_is_an_assumption() -> None:
    nominal = planned("llama-3.1-8b", "a10", max_model_len=32768)
    document = plan_document(nominal)
    assert document["inputs"]["gpu"]["total_memory_kind"] == "nominal"
    assert document["assumptions"][0]["name"] == "total"
    assert document["provenance"]["memory.total"]["kind"] == "calibrated"


# --- the serve command ------------------------------------------------------------------------------------------------


def test_the_command_of_the_first_case(cases: dict[str, Plan]) -> None:
    words = planning.serve_command(cases["first"])
    assert words[:5] == ["vllm", "serve", catalog.facts("llama-3.1-8b")["id"], "--max-model-len", "32768"]
    assert words[5:] == [
        *("--gpu-memory-utilization", "0.92"),
        *("--max-num-seqs", "256"),
        *("--max-num-batched-tokens", "2048"),
    ]
    assert shlex.split(plan_document(cases["first"])["flags"]["command"]) == words


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"tensor_parallel_size": 2}, ["--tensor-parallel-size", "2"]),
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size", "2"]),
        ({"data_parallel_size": 2}, ["--data-parallel-size", "2"]),
        ({"dtype": "float16"}, ["--dtype", "float16"]),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
        ({"block_size": 32}, ["--block-size", "32"]),
        ({"kv_cache_memory_bytes": 16 * GIB}, ["--kv-cache-memory-bytes", "17179869184"]),
        ({"num_gpu_blocks_override": 5000}, ["--num-gpu-blocks-override", "5000"]),
        ({"quantization": "fp8"}, ["--quantization", "fp8"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"enable_chunked_prefill": False}, ["--no-enable-chunked-prefill"]),
        ({"disable_hybrid_kv_cache_manager": True}, ["--disable-hybrid-kv-cache-manager"]),
        ({"async_scheduling": False}, ["--no-async-scheduling"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"max_loras": 2, "max_lora_rank": 32}, ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "32"]),
        ({"kv_offloading_size": 3 * GIB // 2}, ["--kv-offloading-size", "1.5"]),
        ({"performance_mode": "throughput"}, ["--performance-mode", "throughput"]),
        ({"gpu_memory_utilization": 0.8765432}, ["--gpu-memory-utilization", "0.8765432"]),
    ],
)
def test_every_flag_is_said(args: dict[str, Any], expected: list[str]) -> None:
    words = planning.serve_command(planned("llama-3.1-8b", max_model_len=8192, **args))
    index = words.index(expected[0])
    assert words[index : index + len(expected)] == expected


def test_a_draft_model_is_said_as_json(cases: dict[str, Plan]) -> None:
    words = planning.serve_command(cases["draft"])
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"model": catalog.facts("llama-3.2-1b")["id"], "num_speculative_tokens": 3}


def test_an_auto_fitted_context_is_a_number_where_the_whole_range_holds_it(cases: dict[str, Plan]) -> None:
    roomy = planned("llama-3.1-8b", max_model_len="auto")  # the model's maximum, several times
    words = planning.serve_command(roomy)
    assert words[words.index("--max-model-len") + 1] == "131072"
    assert cases["auto"].concurrency.low < 1
    words = planning.serve_command(cases["auto"])
    assert words[words.index("--max-model-len") + 1] == "auto"
    older = planning.serve_command(
        replace(cases["auto"], request=replace(cases["auto"].request, release=version((0, 11))))
    )
    assert older[older.index("--max-model-len") + 1] == str(cases["auto"].capacity.max_model_len)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),  # the catalog's own name
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),  # an alias of the same facts
        ("./llama-3.1-8b", "./llama-3.1-8b"),
        ("/models/llama", "/models/llama"),
        ("models/llama/config.json", "models/llama"),  # vLLM takes the directory
        ("config.json", "."),
        ("somebody/else", "somebody/else"),
    ],
)
def test_the_server_is_given_the_model_that_was_named(name: str, served: str) -> None:
    answer = first()
    named = replace(answer, request=replace(answer.request, spec=replace(answer.request.spec, name=name)))
    assert planning.serve_command(named)[2] == served
    assert plan_document(named)["inputs"]["model"]["id"] == served


def test_total_kinds_are_all_known() -> None:
    assert artifact.TOTAL_KINDS.keys() == artifact.TOTAL_FORMULAS.keys()


def test_the_command_starts_where_states_are_fewer_than_sequences() -> None:
    plan_ = planned("qwen3.5-35b-a3b", "h100-80g", max_model_len=32768)
    words = planning.serve_command(plan_)
    max_num_seqs = int(words[words.index("--max-num-seqs") + 1])
    assert max_num_seqs == plan_.settings.max_num_seqs <= plan_.capacity.num_blocks
