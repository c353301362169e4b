"""Speculative decoding against vLLM 0.33's own code: a draft's weights, its layers in the cache, blocks of states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.families import eagle, mtp
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers import speculation
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import parse_engine
from kvplan.servers.pasted import read_command
from kvplan.servers.vllm import overheads
from kvplan.servers.vllm import rules as vllm
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data

GIB = 2**30
FACTS = Path(__file__).parents[1] / "facts"
HEADS = FACTS / "heads"
ROWS = [json.loads(line) for line in (FACTS / "speculation.jsonl").read_text().splitlines()]


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = row["inputs"]["engine_args"]["speculative_config"]
    return config


def name_of(row: dict[str, Any]) -> str:
    config, inputs = config_of(row), row["inputs"]
    parts = (inputs["model"], inputs.get("tp", 1), inputs.get("gpu", "H100"), *config.values())
    return " ".join(str(part) for part in parts)


def spec_of(name: str) -> ModelSpec:
    """A model of the catalog, a head of tests/facts, or a config of the oracles' data."""
    if (HEADS / name).is_dir():
        return hf_config.load_spec(HEADS / name)
    return catalog.load(name) if "__" not in name else hf_config.load_spec(DATA / "models" / name)


def is_ours(row: dict[str, Any]) -> bool:
    return "__" not in row["inputs"]["model"]


def compared(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    monkeypatch.setattr(oracles, "spec_in", lambda folder: spec_of(folder.name))
    return oracles.compare_case(row, Path())


@pytest.mark.parametrize("row", [row for row in ROWS if is_ours(row)], ids=name_of)
def test_answers_what_vllm_answers(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, tokens and concurrency of each stated pool; the model's weights and the draft's while they load."""
    assert compared(row, monkeypatch) == (oracles.EQUAL, [])


@needs_oracle_data
@pytest.mark.parametrize("row", [row for row in ROWS if not is_ours(row)], ids=name_of)
def test_answers_what_vllm_answers_for_other_configs(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(row, monkeypatch) == (oracles.EQUAL, [])


@needs_oracle_data
def test_no_speculating_row_of_the_oracles_data_differs() -> None:
    rows = [json.loads(line) for line in (DATA / "capacity_cases_flags.jsonl").read_text().splitlines()]
    drafting = [row for row in rows if (row["inputs"].get("engine_args") or {}).get("speculative_config")]
    outcomes = [oracles.compare_case(row, DATA / "models") for row in drafting]
    assert len(drafting) >= 11
    assert [why for outcome, why in outcomes if outcome == oracles.DIFFERENT] == []
    assert [why for outcome, why in outcomes if outcome == oracles.REFUSED] == []


def test_many_cases_of_every_method_are_compared() -> None:
    answered = [config_of(row).get("method", "draft_model") for row in ROWS if "failed" not in row]
    assert len(answered) >= 60
    assert {method: answered.count(method) >= 2 for method in set(answered) - {"ngram_gpu"}} == dict.fromkeys(
        ("mtp", "eagle", "eagle3", "dflash", "dspark", "draft_model", "ngram"), True
    )


def raises_its_graphs(row: dict[str, Any]) -> bool:
    return str(row["inputs"]["model"]).startswith("gpt-oss")  # vLLM raises its largest graph to 1,024 tokens


@pytest.mark.parametrize(
    "row", [r for r in ROWS if is_ours(r) and "graph_sizes" in r and not raises_its_graphs(r)], ids=name_of
)
def test_as_many_sizes_of_graphs_are_captured_as_vllm_captures(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracles, "spec_in", lambda folder: spec_of(folder.name))
    request = oracles.case_request(row, Path())
    settings = vllm.resolve(request.spec, request.gpu, request.args, request.release)
    sizes = overheads.captured_sizes(
        settings.max_num_seqs, overheads.largest_graph(request.release.number, request.gpu.sm),
        1 + request.args.num_speculative_tokens, settings.max_num_batched_tokens, uniform=True,
    )  # fmt: skip
    assert len(sizes) == row["graph_sizes"]


# --- what is shared -----------------------------------------------------------------------------------------------


def drafting(model: str, draft: ModelSpec | None = None, gpu_name: str = "h200", **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(**args), draft=draft))


def test_an_mtp_head_shares_embedding_and_output_head_with_its_model() -> None:
    # vLLM 0.33: 2,124,387,488 B while it loads, of which two tables of 129,280 x 7,168 in bfloat16 over 8 ranks go.
    got = drafting("deepseek-v3", tensor_parallel_size=8, speculative_method="mtp", max_model_len=32768)
    assert got.weight_groups["draft"] == 2_124_387_488 - 2 * (129_280 * 7_168 * 2 // 8)


def test_an_eagle3_head_keeps_its_own_output_head() -> None:
    # vLLM 0.33: 1,900,308,480 B while it loads; the embedding of 128,256 x 4,096 in bfloat16 is the target's.
    head = spec_of("eagle3-llama-3.1-8b")
    got = drafting("llama-3.1-8b", head, speculative_method="eagle3", num_speculative_tokens=3, max_model_len=32768)
    assert got.weight_groups["draft"] == 1_900_308_480 - 128_256 * 4_096 * 2


def test_a_head_of_another_width_keeps_its_embedding() -> None:
    # The head of Llama-3.3-70B is 6,144 wide, its target 8,192 (vLLM 0.33: 1,014,802,432 B on 4 ranks).
    head = spec_of("eagle3-llama-3.3-70b")
    got = drafting(
        "llama-3.3-70b", head, max_model_len=32768, tensor_parallel_size=4, speculative_method="eagle3",
        num_speculative_tokens=3,
    )  # fmt: skip
    assert got.weight_groups["draft"] == 1_014_802_432


def test_a_hidden_state_of_every_batched_token_is_kept_for_a_head() -> None:
    # vLLM 0.33 target_dependent_ar/speculator.py: [max_num_batched_tokens, hidden] in the model's dtype.
    common: dict[str, Any] = {"tensor_parallel_size": 8, "max_model_len": 32768}
    plain, with_head = drafting("glm-4.6", **common), drafting("glm-4.6", speculative_method="mtp", **common)
    more = with_head.memory.buffers - plain.memory.buffers
    assert more == with_head.settings.max_num_batched_tokens * 5_120 * 2
    assert "for the draft" in with_head.estimates["buffers"].formula


def test_ngram_takes_state_blocks_and_no_weights() -> None:
    got = drafting("qwen3.5-27b", speculative_method="ngram", num_speculative_tokens=3, max_model_len=32768)
    assert "draft" not in got.weight_groups
    states = [group.first.blocks for group in got.pool.groups if group.first.kind == "state"]
    assert states == [3 + 3] * 3  # three of caching, one per drafted token


# --- what is asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "args", "draft"),
    [
        (
            '{"method": "mtp", "num_speculative_tokens": 1}',
            {"speculative_method": "mtp", "num_speculative_tokens": 1}, None,
        ),
        (
            '{"method": "deepseek_mtp", "num_speculative_tokens": 2}',
            {"speculative_method": "mtp", "num_speculative_tokens": 2}, None,
        ),
        ('{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}',
         {"speculative_method": "eagle3", "num_speculative_tokens": 3}, "a/b"),
        ('{"model": "a/b", "num_speculative_tokens": 5}', {"num_speculative_tokens": 5}, "a/b"),
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}',
         {"speculative_method": "ngram", "num_speculative_tokens": 4}, None),
    ],
)  # fmt: skip
def test_a_speculative_config_is_read(config: str, args: dict[str, Any], draft: str | None) -> None:
    command = read_command(f"vllm serve m --speculative-config '{config}'")
    assert (command.args, command.draft_model, command.unknown) == (args, draft, [])


@pytest.mark.parametrize(
    "flags",
    [
        "--speculative-model '[ngram]' --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
        "--spec-method ngram --spec-tokens 5",
        "--speculative_config.method ngram --speculative_config.num_speculative_tokens 5",
    ],
)
def test_flags_of_other_releases_say_the_same(flags: str) -> None:
    command = read_command(f"vllm serve m {flags}")
    assert command.args == {"speculative_method": "ngram", "num_speculative_tokens": 5}
    assert (command.draft_model, command.unknown) == (None, [])


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ('{"method": "medusa", "model": "a/b", "num_speculative_tokens": 1}', "medusa"),
        ('{"method": "mtp", "draft_sample_method": "probabilistic"}', "draft_sample_method"),
        ('{"method": "mtp", "num_speculative_tokens": 1, "draft_lm_head_quantization": "fp8"}', "draft_lm_head"),
        ('{"model": "a/b", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size"),
    ],
)  # fmt: skip
def test_what_is_not_sized_is_refused_by_name(config: str, word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        read_command(f"vllm serve m --speculative-config '{config}'")


@pytest.mark.parametrize(
    ("model", "args", "match"),
    [
        ("llama-3.1-8b", {"speculative_method": "mtp"}, "no layers of multi-token prediction"),
        ("kimi-k2", {"speculative_method": "mtp"}, "no layers of multi-token prediction"),
        ("minimax-m2.5", {"speculative_method": "mtp"}, "no layers of multi-token prediction"),
        ("llama-3.1-8b", {"speculative_method": "eagle3"}, "needs a draft"),
        ("deepseek-v3", {"speculative_method": "mtp", "pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
def test_what_cannot_draft_is_refused(model: str, args: dict[str, Any], match: str) -> None:
    with pytest.raises(KvplanError, match=match):
        drafting(model, **args)


def test_a_draft_of_another_vocabulary_is_refused_as_vllm_does() -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        drafting("llama-3.1-8b", catalog.load("qwen3-0.6b"), num_speculative_tokens=3, max_model_len=8192)


@pytest.mark.parametrize(
    ("head", "method"),
    [("eagle3-llama-3.1-8b", "eagle3"), ("eagle-llama-3.1-8b", "eagle"), ("dflash-qwen3-8b", "dflash"),
     ("dspark-qwen3-8b", "dspark"), ("speculators-eagle3-qwen3-8b", "eagle3")],
)  # fmt: skip
def test_a_head_without_a_method_is_known_by_its_config(head: str, method: str) -> None:
    assert eagle.method_of(spec_of(head)) == method
    assert eagle.method_of(catalog.load("llama-3.2-1b")) == "draft_model"


def test_an_architecture_that_is_not_read_is_refused_by_name() -> None:
    head = spec_of("eagle3-llama-3.1-8b")
    other = replace(head, config={**head.config, "architectures": ["Eagle3DeepseekV2ForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="Eagle3DeepseekV2ForCausalLM"):
        drafting("llama-3.1-8b", other, speculative_method="eagle3", num_speculative_tokens=3)


def test_a_plan_can_be_planned_again() -> None:
    first = drafting("deepseek-v3", tensor_parallel_size=8, speculative_method="mtp", max_model_len=32768)
    again = plan(first.request)
    assert (again.capacity, again.memory) == (first.capacity, first.memory)


def test_tokens_that_are_not_stated_are_those_of_the_head() -> None:
    spec = catalog.load("deepseek-v3")
    request = Request(spec, gpu("h200"), EngineArgs(speculative_method="mtp", tensor_parallel_size=8))
    joined, notes = speculation.drafter(request, "vLLM")
    assert (joined.args.num_speculative_tokens, notes) == (mtp.num_layers(spec), []) == (1, [])


def test_the_serve_line_asks_for_the_same(run: Run) -> None:
    ran = run("estimate", "glm-4.6", "--gpu", "h200", "--tp", "8", "--ctx", "32k", "--speculative-method", "mtp")
    assert ran.code == 0
    assert '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\'' in ran.out


def test_an_independent_draft_bounds_the_context() -> None:
    # vLLM 0.33 lowers max_model_len to the draft's 40,960 where runner V2 runs.
    got = drafting("qwen3-30b-a3b", catalog.load("qwen3-0.6b"), num_speculative_tokens=3)
    assert got.settings.max_model_len == 40_960


def test_a_head_weighs_what_a_server_logged() -> None:
    """Two published logs of Qwen3.5-122B-A10B on one GPU: "Model loading took 75.17 GiB (includes MTP drafter, shared
    embed+lm_head)" and "70.47 GiB (no MTP drafter)"."""
    plans = [
        plan(Request(catalog.load("qwen3.5-122b-a10b"), gpu("b300"), arguments, parse_engine("vllm@0.19")))
        for arguments in (EngineArgs(max_model_len=8192), EngineArgs(max_model_len=8192, speculative_method="mtp"))
    ]
    without, head = (sum(each.weight_groups.values()) for each in plans)
    assert round((head - without) / GIB, 2) == 4.70


PASTED = """vllm serve zai-org/GLM-4.6 -tp 8 --max-model-len 32768 --speculative-config '{"method": "mtp"}'"""


def test_a_policy_takes_a_method(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    target = "gpu: h200, rules: {max_kv_bytes_per_token: 46KiB}"  # 92 layers have 46 KiB of a token, the head 0.5
    own = "model: glm-4.6, tensor_parallel_size: 8, max_model_len: 32k"
    policy.write_text(
        "version: 1\ntargets:\n"
        f"  - {{id: plain, {own}, {target}}}\n"
        f"  - {{id: drafting, {own}, speculative_method: mtp, {target}}}\n"
        f"  - id: pasted\n    gpu: h200\n    command: >-\n      {PASTED}\n"
        "    rules: {max_kv_bytes_per_token: 46KiB}\n"
    )
    ran = run("check", str(policy))
    assert ran.code == 1
    assert ran.out.count("46.50 KiB of KV cache per token on each GPU; maximum 46 KiB, 512 B over") == 2
    assert "1 passed, 2 failed" in ran.out


def test_a_method_is_an_engine_argument_of_every_command(run: Run, tmp_path: Path) -> None:
    words = ["glm-4.6", "--gpu", "h200", "--tp", "8", "--ctx", "32k"]
    method = ["--speculative-method", "mtp", "--num-speculative-tokens", "1"]
    for name, more in (("plain", []), ("mtp", method)):
        (tmp_path / name).write_text(run("estimate", *words, *more, "--format", "json").out)
    changed = run("diff", str(tmp_path / "plain"), str(tmp_path / "mtp")).out
    assert "draft model: (none) -> glm-4.6 (MTP head)" in changed
    assert "46.50 KiB" in run("sweep", *words, *method).out
    assert "h200" in run("recommend", "glm-4.6", "--ctx", "32k", "--users", "8", "--gpu", "h200", *method).out
    refused = run("simulate", *words, *method, "--prompt-tokens", "700", "--output-tokens", "20", "--rate", "1")
    assert refused.code == 2
    assert "how many drafted tokens are accepted is not modeled" in refused.err
