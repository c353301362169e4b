"""Speculative decoding against vLLM 0.33's own code: a draft's weights, its layers in the cache, blocks of states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.families import eagle, mtp
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans import speculation
from kvplan.servers.vllm import launch, overheads
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.refusals import reason_of

GIB = 2**30
FACTS = Path(__file__).parents[2] / "facts"
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
        settings.max_num_seqs, overheads.largest_graph(request.release, request.gpu.sm),
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
        ('{"model": "a/b", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size 2 is refused by vLLM"),
    ],
)  # fmt: skip
def test_what_is_not_sized_or_not_started_is_refused_by_name(config: str, word: str) -> None:
    with pytest.raises((UnsupportedModelError, UsageError), match=word):
        read_command(f"vllm serve m --speculative-config '{config}'")


@pytest.mark.parametrize(
    ("model", "args", "match"),
    [
        ("llama-3.1-8b", {"speculative_method": "mtp"}, "no layers of multi-token prediction"),
        ("kimi-k2", {"speculative_method": "mtp"}, "no layers of multi-token prediction"),
        ("minimax-m2.5", {"speculative_method": "mtp"}, "no layers of multi-token prediction"),
        ("llama-3.1-8b", {"speculative_method": "eagle3"}, "needs a draft"),
        ("minimax-m3", {"speculative_method": "mtp", "pipeline_parallel_size": 2}, "pipeline parallelism"),
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
    other = replace(head, config={**head.config, "architectures": ["LiLiCorrDraftModel"]})
    with pytest.raises(UnsupportedModelError, match="LiLiCorrDraftModel"):
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
    without, head = (sum(answer.weight_groups.values()) for answer in plans)
    assert round((head - without) / GIB, 2) == 4.70


def test_a_latent_head_weighs_what_a_server_logged() -> None:
    """A public note of Kimi-K2.6 on 8 GPUs with lightseekorg/kimi-k2.6-eagle3.1-mla, whose 5.62 GiB have a table and an
    output head of all tokens: "Model loading took 71.92 GiB" with it, 71.16 without."""
    head = spec_of("eagle3-mla-kimi-k2")
    whole = replace(head, config={**head.config, "draft_vocab_size": head.vocab_size})
    common: dict[str, Any] = {"gpu_name": "h200", "tensor_parallel_size": 8, "max_model_len": 8192}
    without = drafting("kimi-k2.5", **common)
    answer = drafting("kimi-k2.5", whole, num_speculative_tokens=3, **common)
    assert round(without.memory.weights / GIB, 2) == 71.16
    assert answer.memory.weights == pytest.approx(71.92 * GIB, rel=0.001)


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
    load = ("--prompt-tokens", "700", "--output-tokens", "20", "--rate", "1", "--num-requests", "20")
    assert "drafts whose acceptance is not stated" in run("simulate", *words, *method, *load).out


# --- beside pipeline stages ---------------------------------------------------------------------------------------


def staged(model: str, engine: str = "vllm", draft: str | None = None, **args: Any) -> Plan:
    flags = EngineArgs(pipeline_parallel_size=2, max_model_len=8192, **args)
    spec = None if draft is None else spec_of(draft)
    return plan(Request(catalog.load(model), gpu("h200"), flags, parse_engine(engine), draft=spec))


def test_a_draft_stands_on_the_last_stage_alone() -> None:
    """vLLM 0.33 (v1/worker/gpu/model_runner.py) makes the drafter on the last stage; its EAGLE-3 head for Llama 3.1 8B
    has 1,900,308,480 B while it loads, and then the target's embedding of 128,256 x 4,096."""
    head = "eagle3-llama-3.1-8b"
    answer = staged("llama-3.1-8b", draft=head, num_speculative_tokens=3)
    assert answer.stage == 1
    assert answer.weight_groups["draft"] == 1_900_308_480 - 128_256 * 4_096 * 2
    assert answer.memory.weights == 9_080_938_496 + answer.weight_groups["draft"]


@pytest.mark.parametrize(
    ("model", "draft", "args", "problem"),
    [
        ("llama-3.1-8b", "eagle-llama-3.1-8b", {}, "two layers have one name"),
        ("qwen3-8b", "qwen3-0.6b", {}, "cuts an independent draft"),
        ("kimi-k2", "eagle3-kimi-k2", {}, "keeps no embedding"),
    ],
)
def test_drafts_that_vllm_does_not_run_on_stages_are_refused(
    model: str, draft: str, args: dict[str, Any], problem: str
) -> None:
    with pytest.raises(KvplanError, match=problem):
        staged(model, draft=draft, num_speculative_tokens=3, **args)


def test_older_releases_refuse_drafts_on_stages_as_before() -> None:
    with pytest.raises(UsageError, match="are not modeled in"):
        staged("deepseek-v3", "vllm@0.29", speculative_method="mtp", tensor_parallel_size=8)


# --- Gemma 4's assistants -----------------------------------------------------------------------------------------

ASSISTANT = HEADS / "gemma-4-26b-a4b-assistant"


def test_an_assistant_reads_its_targets_caches_and_keeps_its_own_table() -> None:
    """839,422,464 B are the parameters of vLLM 0.33's own class; nothing of its target's is put in their place."""
    own = drafting("gemma-4-26b-a4b", max_model_len=8192)
    answer = drafting("gemma-4-26b-a4b", spec_of(ASSISTANT.name), max_model_len=8192, num_speculative_tokens=3)
    assert answer.weight_groups["draft"] == 839_422_464
    assert answer.capacity.bytes_per_block == own.capacity.bytes_per_block
    assert answer.capacity.blocks_per_request == own.capacity.blocks_per_request


def test_an_assistant_is_named_in_the_command_and_plans_nothing_alone(run: Run) -> None:
    answer = run("estimate", "gemma-4-26b-a4b", "--gpu", "h200", "--ctx", "8k", "--draft-model", str(ASSISTANT),
                 "--num-speculative-tokens", "3")  # fmt: skip
    assert f'{{"method": "mtp", "model": "{ASSISTANT}", "num_speculative_tokens": 3}}' in answer.out
    alone = run("estimate", str(ASSISTANT), "--gpu", "h200")
    assert (alone.code, "drafts for another model" in alone.err) == (2, True)


@pytest.mark.parametrize(
    ("model", "engine", "problem"),
    [
        ("gemma-4-31b", "vllm", "was made for a Gemma 4 of width 2816"),
        ("qwen3-8b", "vllm", "was made for a Gemma 4 of width 2816"),
        ("gemma-4-26b-a4b", "vllm@0.20", "is not modeled in"),
        ("gemma-4-26b-a4b", "sglang@0.5.15", "are not modeled"),
    ],
)
def test_an_assistant_beside_another_model_or_server_is_refused(
    run: Run, model: str, engine: str, problem: str
) -> None:
    answer = run("estimate", model, "--gpu", "h200", "--ctx", "8k", "--engine", engine, "--draft-model", str(ASSISTANT),
                 "--num-speculative-tokens", "3")  # fmt: skip
    assert (answer.code, problem in answer.err) == (2, True), answer.err


def test_a_posted_pool_of_a_gemma_that_an_assistant_drafts_for_has_no_more_layers() -> None:
    """A public log of Gemma 4 31B with its assistant, 16 GiB of fp8 KV on each of two H200: 132,784 tokens, 4.05x. With
    caches of the assistant's own it would hold 18,443 (vLLM 0.33's planner)."""
    answer = drafting("gemma-4-31b", tensor_parallel_size=2, max_model_len=32768, kv_cache_dtype="fp8",
                      kv_cache_memory_bytes=16 * GIB)  # fmt: skip
    assert answer.capacity.tokens == pytest.approx(132_784, rel=0.0025)


# --- what logs say ------------------------------------------------------------------------------------------------


def test_a_posted_pool_beside_an_mtp_head_has_the_tokens_and_requests_that_were_logged() -> None:
    """A public log of Qwen3.5-122B-A10B-NVFP4 with MTP 1 (a container of April 2026): 24.05 GiB of fp8 KV, 482,080
    tokens, 6.42x; loading took 75.17 GiB."""
    args = EngineArgs(
        max_model_len=262_144, kv_cache_dtype="fp8", kv_cache_memory_bytes=round(24.05 * GIB),
        speculative_method="mtp", num_speculative_tokens=1, enable_prefix_caching=True,
    )  # fmt: skip
    answer = plan(Request(catalog.load("qwen3.5-122b-a10b-nvfp4"), gpu("h200"), args, parse_engine("vllm@0.19")))
    assert answer.capacity.tokens == 482_080
    assert round(answer.capacity.max_concurrency, 2) == 6.42
    assert answer.memory.weights == pytest.approx(75.17 * GIB, rel=0.01)


def test_a_fixed_pool_beside_mtp_holds_what_was_logged() -> None:
    """A public log of GLM-5.3-Flash with MTP 3 on four H200, 6 GiB of KV on each (a build before 0.32, in which its
    states keep no checkpoint): 443,628 tokens, 3.38x. All of it follows from the inputs."""
    answer = plan(Request(catalog.load("glm-5.3-flash"), gpu("h200"), EngineArgs(
        tensor_parallel_size=4, max_model_len=131_072, kv_cache_memory_bytes=6 * GIB, speculative_method="mtp",
        num_speculative_tokens=3,
    ), parse_engine("vllm@0.31")))  # fmt: skip
    assert answer.capacity.tokens == 443_628
    assert round(answer.capacity.max_concurrency, 2) == 3.38


@pytest.mark.parametrize(
    ("engine", "gib", "batched", "seqs", "tokens", "concurrency"),
    [("vllm@0.22", 74.76, 8192, 5, 6_455_296, 24.62), ("vllm@0.20.2", 66.58, 65_536, 8, 5_747_892, 21.93)],
)
def test_posted_pools_that_no_rule_was_made_from_hold_what_was_logged(
    engine: str, gib: float, batched: int, seqs: int, tokens: int, concurrency: float
) -> None:
    """Two public logs of Qwen3.6-35B-A3B in NVFP4 with MTP 2 on a GB10, states cached, seen after the rules were made:
    a build of 0.22.1, and 0.20.2; 2,128 tokens a block. Half a digit of the pool is a quarter of a block."""
    args = EngineArgs(
        max_model_len=262_144, kv_cache_dtype="fp8", max_num_seqs=seqs, max_num_batched_tokens=batched,
        enable_prefix_caching=True, speculative_method="mtp", num_speculative_tokens=2,
        kv_cache_memory_bytes=int((gib + 0.004) * GIB),
    )  # fmt: skip
    answer = plan(Request(catalog.load("qwen3.6-35b-a3b-nvfp4"), gpu("gb10"), args, parse_engine(engine)))
    assert (answer.pool.block_size, answer.capacity.tokens) == (2128, tokens)
    assert round(answer.capacity.max_concurrency, 2) == concurrency


def test_a_pool_beside_mtp_follows_from_the_inputs_of_a_log_that_no_rule_was_made_from() -> None:
    """The build of 0.22.1 above: weights 21.93 GiB with the head, 74.76 GiB of KV on a GPU that shares its memory."""
    args = EngineArgs(
        max_model_len=262_144, kv_cache_dtype="fp8", max_num_seqs=5, max_num_batched_tokens=8192,
        enable_prefix_caching=True, speculative_method="mtp", num_speculative_tokens=2, gpu_memory_utilization=0.85,
    )  # fmt: skip
    answer = plan(Request(catalog.load("qwen3.6-35b-a3b-nvfp4"), gpu("gb10"), args, parse_engine("vllm@0.22")))
    assert answer.memory.weights == pytest.approx(21.93 * GIB, rel=0.01)
    assert answer.available == pytest.approx(74.76 * GIB, rel=0.03)  # 2.4% when this was written


# --- a DSpark head within the checkpoint --------------------------------------------------------------------------


def test_a_spark_head_of_the_checkpoint_is_planned_without_a_draft_and_named_nowhere(run: Run) -> None:
    sized = run("estimate", "deepseek-v4-flash-0731", "--gpu", "b200", "--tp", "8", "--ctx", "65536",
                "--speculative-method", "dspark", "--format", "json")  # fmt: skip
    # vLLM 0.33: 1,819,383,516 B while it loads, of which two tables of 129,280 x 4,096 in bfloat16 over 8 ranks go.
    assert sized.json["memory"]["weight_groups"]["draft"] == 1_819_383_516 - 2 * (129_280 * 4_096 * 2 // 8)
    text = run("estimate", "deepseek-v4-flash-0731", "--gpu", "b200", "--tp", "8", "--ctx", "65536",
               "--speculative-method", "dspark").out  # fmt: skip
    assert '{"method": "dspark", "num_speculative_tokens": 5}' in text  # as many as its config says


def test_a_checkpoint_without_one_needs_a_draft(run: Run) -> None:
    refused = run("estimate", "deepseek-v4-flash", "--gpu", "b200", "--tp", "8", "--speculative-method", "dspark")
    assert (refused.code, "needs a draft" in refused.err) == (2, True)


def test_a_posted_pool_beside_a_spark_head_has_the_tokens_that_were_logged() -> None:
    """A public log of V4-Flash with DSpark on two GPUs (a build of 0.26.1): 8.28 GiB, 1,249,001 tokens, 1.19x."""
    answer = drafting(
        "deepseek-v4-flash-0731", gpu_name="rtx-pro-6000", tensor_parallel_size=2, max_model_len=1_048_576,
        max_num_batched_tokens=4096, max_num_seqs=8, speculative_method="dspark", num_speculative_tokens=5,
        kv_cache_memory_bytes=round(8.28 * GIB),
    )  # fmt: skip
    assert answer.capacity.tokens == pytest.approx(1_249_001, rel=0.005 / 8.28)
    assert round(answer.capacity.max_concurrency, 2) == 1.19


def test_the_suffix_of_a_head_is_the_one_that_commands_leave_out() -> None:
    assert launch.MTP_SUFFIX == mtp.SUFFIX


@pytest.mark.parametrize(
    "more", [("--num-speculative-tokens", "4"), ("--from-command", "vllm serve m --num-speculative-tokens 4")]
)
def test_tokens_that_nothing_drafts_are_refused_as_vllm_does(run: Run, more: tuple[str, ...]) -> None:
    """vLLM 0.27 config/speculative.py: "num_speculative_tokens was provided but without speculative model."."""
    refused = run("estimate", "llama-3.1-8b", "--gpu", "l40s", "--ctx", "16k", *more)
    assert (refused.code, "--num-speculative-tokens 4 needs a draft model" in refused.err) == (2, True)


# --- beside other ways to split -----------------------------------------------------------------------------------


def test_chunked_layers_beside_a_head_keep_the_whole_context() -> None:
    """vLLM 0.33 config/vllm.py turns the hybrid KV cache manager off: one group of 49 layers of 16,384 B a block."""
    answer = drafting(
        "llama-4-scout",
        spec_of("eagle3-llama-4-scout"),
        tensor_parallel_size=4,
        num_speculative_tokens=3,
        max_model_len=32768,
    )
    assert [len(group.layers) for group in answer.pool.groups] == [49]
    assert answer.capacity.bytes_per_block == 49 * 16_384


@pytest.mark.parametrize(
    ("model", "draft", "args"),
    [
        ("qwen3.5-27b", "dflash-qwen3.5-27b", {}),
        ("deepseek-v4-flash", None, {"speculative_method": "mtp"}),
        ("deepseek-v4-flash", None, {}),
    ],
)
def test_windows_are_not_shared_by_ranks_of_decode(model: str, draft: str | None, args: dict[str, Any]) -> None:
    """vLLM 0.33 v1/kv_cache_interface.py: "DCP not support sliding window."."""
    spec = None if draft is None else spec_of(draft)
    tokens: dict[str, Any] = {} if not draft else {"num_speculative_tokens": 7}
    got = drafting(model, spec, tensor_parallel_size=8, decode_context_parallel_size=2, max_model_len=8192, **args,
                   **tokens)  # fmt: skip
    assert "--decode-context-parallel-size 2 does not go with the windows of" in reason_of(got)


def test_a_head_of_minimax_m3_shares_both_tables_and_has_seven_modules() -> None:
    """vLLM 0.33: 14,696,888,832 B while it loads over 8 ranks, of which two tables of 200,064 x 6,144 go."""
    got = drafting("minimax-m3", tensor_parallel_size=8, speculative_method="mtp", max_model_len=32768)
    assert got.weight_groups["draft"] == 14_696_888_832 - 2 * (200_064 * 6_144 * 2 // 8)


def test_a_p_eagle_head_is_read_in_one_format_alone() -> None:
    with pytest.raises(UnsupportedModelError, match="only in the format of the speculators library"):
        drafting("llama-3.1-8b", spec_of("peagle-llama-8b"), speculative_method="eagle3", num_speculative_tokens=3)


def test_the_state_row_has_the_blocks_that_drafts_take(run: Run) -> None:
    """vLLM keeps 1 + k states of a request without caching: 3 groups of 16 layers x (1 + 3) blocks of 17 layers x
    3,276,800 B, that is 12 x 53.125 MiB.
    """
    words = "estimate qwen3.5-27b --gpu h200 --ctx 32k --speculative-method mtp --num-speculative-tokens 3"
    ran = run(*words.split(), "--no-enable-prefix-caching")
    assert "state       637.50 MiB of it, 12 blocks of copies; one copy is 149.62 MiB" in ran.out
