"""--explain: the formulas with their numbers put in come out at the plan's own numbers."""

import re

import pytest

from kvplan.core.units import GIB
from kvplan.hardware.gpu import custom_gpu, gpu
from kvplan.models import catalog
from kvplan.planning.explain import explain, rule_of_thumb
from kvplan.planning.plan import Load, Plan, Request, plan
from kvplan.servers.vllm.explain import folk_terms
from kvplan.servers.vllm.rules import version
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture


def planned(model: str, card: str, args: EngineArgs, load: Load | None = None) -> Plan:
    return plan(Request(catalog.load(model), gpu(card), args, load=load or Load()))


def text_of(answer: Plan) -> str:
    return "\n".join(line for section in explain(answer) for line in (section.title, *section.lines))


@pytest.fixture(scope="module")
def first() -> Plan:
    return planned("llama-3.1-8b", "a100-80g", EngineArgs(max_model_len=32768))


def test_the_first_case_from_bytes_per_token_to_users(first: Plan) -> None:
    text = text_of(first)
    for line in (
        # 32 layers x 8 KV heads x (128 + 128) x 2 B
        "32 x full attention: 8 KV heads x (128 K + 128 V) x 2 B = 4,096 B a layer, 131,072 B in all",
        "in all 131,072 B per token (128 KiB), KV dtype bfloat16 (auto: the model's dtype)",
        # 16 tokens x 4,096 B is a page; a block has one page of each layer
        "32 x full (16 tokens) x 65,536 B a page = 2,097,152 B per block",
        "a request takes ceil(32,768 / 16) = 2,048",
        "one request of 32,768 tokens: 2,048 blocks x 2,097,152 B = 4,294,967,296 B (4 GiB)",
        "in all 16,060,522,496 B (14.96 GiB)",
        # ceil(85,094,039,552 x 0.92) = ceil(78,286,516,387.84)
        "budget ceil(85,094,039,552 x 0.92) = 78,286,516,388 B (72.91 GiB)",
    ):
        assert line in text


def test_sections_stand_in_reading_order(first: Plan) -> None:
    titles = [section.title for section in explain(first)]
    assert titles[:6] == [
        "Bytes per token and rank",
        "Blocks",
        "Weights per rank",
        "From total to KV cache",
        "Users",
        "Why this differs from the rule of thumb (memory x 0.9 - weights - activations)",
    ]
    assert titles[-1].startswith("Compared with 'weights + 1.2 GB per user")


def test_the_rows_that_are_subtracted_leave_what_is_available(first: Plan) -> None:
    section = next(section for section in explain(first) if section.title == "From total to KV cache")
    budget = taken = left = 0
    for line in section.lines:
        if row := re.match(r"budget .* = ([\d,]+) B", line):
            budget = int(row[1].replace(",", ""))
        elif row := re.match(r"- \w+ ([\d,]+) B", line):
            taken += int(row[1].replace(",", ""))
        elif row := re.match(r"= ([\d,]+) B", line):
            left = int(row[1].replace(",", ""))
    assert budget - taken == left == first.available


def test_the_folk_answer_is_12_to_13_and_the_steps_lead_to_ours(first: Plan) -> None:
    steps = folk_terms(first)
    # 80 x 0.9 - 14.96 - 4.70 = 52.34 GiB of 4 GiB each, or with the 79.25 GiB that CUDA sees, 51.67: 13 and 12 users.
    assert steps[0][1] / (4 * GIB) == pytest.approx(13.09, abs=0.01)
    assert (steps[0][1] + steps[1][1]) / (4 * GIB) == pytest.approx(12.92, abs=0.01)
    assert sum(step for _, step in steps) == first.available
    text = text_of(first)
    assert "= 52.35 GiB, / 4.00 GiB = 13.09 users" in text
    assert "12.92 users" in text


def test_the_rule_of_thumb_stands_beside_ours(first: Plan) -> None:
    # (85.094 - 16.061 - 5) / 1.2 = 53.4 users; we say 14, so 53 / 14 = 3.8 times too many.
    thumb = rule_of_thumb(first)
    assert thumb.users == 53
    # 16.061 + 14 x 1.2 + 5 GB
    assert thumb.needed == 16_060_522_496 + 14 * 1_200_000_000 + 5_000_000_000
    assert "= 53 users, kvplan gives 14 at 32,768 tokens: 3.8x too many" in text_of(first)


def test_heads_that_are_repeated_over_ranks_are_named() -> None:
    spread = planned("llama-3.1-70b", "h100-80g", EngineArgs(max_model_len=8192, tensor_parallel_size=8))
    assert "8 KV heads / 8 ranks = 1 x (128 K + 128 V) x 2 B = 512 B a layer, 40,960 B in all" in text_of(spread)
    shared = planned("qwen3-next-80b-a3b", "h100-80g", EngineArgs(max_model_len=8192, tensor_parallel_size=4))
    assert "1 KV head (2 repeated over 4 ranks) x (256 K + 256 V) x 2 B = 1,024 B a layer" in text_of(shared)


def test_a_hybrid_is_explained_group_by_group() -> None:
    # vLLM 0.33's own answer for gpt-oss-20b on H100: 1,033 blocks for the windows, 8,192 for full attention.
    text = text_of(planned("gpt-oss-20b", "h100-80g", EngineArgs(max_model_len=131072)))
    assert "ceil(min(128 - 1 + 16,384 in flight, 131,072) / 16) + 1 = 1,033" in text
    assert "a request takes ceil(131,072 / 16) = 8,192" in text
    assert "a request takes the sum, 9,225 blocks" in text
    assert "weights in mxfp4 (experts) do not change it" in text


def test_equal_groups_are_told_once_and_states_cost_nothing_per_token() -> None:
    # Qwen3-Next on 4 ranks: three groups of 12 states and one of 12 attention layers, in blocks of 320 tokens.
    text = text_of(planned("qwen3-next-80b-a3b", "h100-80g", EngineArgs(max_model_len=262144, tensor_parallel_size=4)))
    assert "block size 320: raised until a page of attention covers the page of a state" in text
    assert "groups 1 to 3, each: 12 x state (320 tokens) x 327,680 B a page = 3,932,160 B per block" in text
    assert "36 x gated delta net state: 274,432 B a layer and request" in text


def test_latents_are_whole_on_every_rank() -> None:
    args = EngineArgs(max_model_len=8192, tensor_parallel_size=8, pipeline_parallel_size=2)
    answer = planned("deepseek-v3", "h200", args)
    text = text_of(answer)
    assert "512 latent + 64 rope in bfloat16 = 1,152 B a layer, 70,272 B in all" in text  # 61 x 576 x 2 B
    # 61 layers over two stages: 31 and 30
    assert f"of these layers, the rank that decides holds {(31, 30)[answer.stage]}" in text


def test_what_does_not_fit_is_refused_with_the_bytes_missing() -> None:
    answer = planned("llama-3.1-70b", "a100-80g", EngineArgs(max_model_len=32768))
    text = text_of(answer)
    assert f"refused, {answer.deficit:,} B short" in text
    assert "Why this differs from the rule of thumb (memory x 0.9 - weights - activations)" not in text
    assert "one of the two fits no user" not in text  # the rule of thumb agrees: nobody
    assert "= 0 users, kvplan gives 0 at 32,768 tokens: equal" in text


def test_the_lengths_that_were_asked_for_are_explained() -> None:
    answer = planned(
        "llama-3.1-8b", "a100-80g", EngineArgs(max_model_len=32768), Load(mean_tokens=2048, shared_prefix=900)
    )
    phrase = (
        "/ 128 blocks that a decoding request of 2,048 tokens holds, 900 tokens of prefix stored once"  # 2,048 / 16
    )
    assert phrase in text_of(answer)


def test_a_stated_pool_subtracts_nothing() -> None:
    answer = planned("llama-3.1-8b", "a100-80g", EngineArgs(max_model_len=32768, kv_cache_memory_bytes=16 * GIB))
    text = text_of(answer)
    assert "--kv-cache-memory-bytes 17,179,869,184 is the pool" in text
    assert "(not subtracted) activations" in text
    assert "blocks: floor(17,179,869,184 / 2,097,152) = 8,192" in text


@pytest.mark.parametrize(
    "args",
    [
        EngineArgs(max_model_len=4096, kv_cache_dtype="fp8"),
        EngineArgs(max_model_len=4096, kv_cache_dtype="int8_per_token_head"),
        EngineArgs(max_model_len=4096, num_gpu_blocks_override=100_000, block_size=32),
        EngineArgs(max_model_len="auto", enable_prefix_caching=False, max_loras=2),
    ],
)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "mistral-7b-v0.1"])
def test_every_kind_of_request_is_explained(model: str, args: EngineArgs) -> None:
    assert all(section.lines for section in explain(planned(model, "h100-80g", args)))


def test_a_card_of_which_only_the_bytes_are_known() -> None:
    answer = plan(Request(catalog.load("llama-3.1-8b"), custom_gpu(24 * GIB), EngineArgs(max_model_len=8192)))
    assert "total 25,769,803,776 B (24.00 GiB, given): --gpu-memory" in text_of(answer)


def test_the_folk_answer_of_its_own_release_is_not_set_apart_from_itself() -> None:
    # vLLM 0.11's defaults on an H100 are the folk answer's own: 1,024 sequences, utilization 0.90.
    llama, card = catalog.load("llama-3.1-8b"), gpu("h100-80g")
    answer = plan(Request(llama, card, EngineArgs(max_model_len=8192), version((0, 11))))
    text = text_of(answer)
    assert "in place of" not in text
    assert "not of 1,024 sequences" not in text
    assert "activation peak as estimated here: 1,024 seqs x 128,256 vocab x " in text
    assert "+0.00 GiB" not in text
    assert "-0.00 GiB" not in text
    assert sum(step for _, step in folk_terms(answer)) == answer.available


def test_facts_and_rules_that_were_not_compared_are_said(first: Plan) -> None:
    assert "Sources of the data and rules" not in text_of(first)
    awq = planned("llama-3.1-8b-awq", "a100-80g", EngineArgs(max_model_len=8192))
    assert "model facts: sibling of meta-llama/Llama-3.1-8B; AWQ with 4 bits" in text_of(awq)
    older = plan(Request(catalog.load("llama-3.1-8b"), gpu("a100-80g"), EngineArgs(), version((0, 11))))
    assert "not compared with that release's own code" in text_of(older)


def test_weights_are_named_by_their_scheme() -> None:
    fp8 = planned("llama-3.1-8b-fp8", "h100-80g", EngineArgs(max_model_len=8192))
    assert "linear layers in fp8, the rest in bfloat16" in text_of(fp8)  # the config says compressed-tensors
    online = planned("llama-3.1-8b", "h100-80g", EngineArgs(max_model_len=8192, quantization="fp8"))
    assert "linear layers in fp8, the rest in bfloat16" in text_of(online)


@pytest.mark.parametrize(
    ("engine", "lines"),
    [
        ("vllm@0.19", ["CUDA graphs: the server does not reserve memory for graphs"]),
        (
            "vllm@0.9",
            ["sampling sorts, as after `pip install vllm`", "--engine vllm@0.9+flashinfer"],
        ),
        ("vllm@0.9+flashinfer", ["sampling with FlashInfer, as set; without: --engine vllm@0.9+no-flashinfer"]),
        ("vllm@0.25", ["model runner V2, as this release chooses", "CUDA graphs: the server does not reserve memory"]),
        (
            "vllm@0.25+runner-v1",
            ["model runner V1, as set", "--engine vllm@0.25+runner-v2", "model runner V1 captures the two largest"],
        ),
        ("vllm@0.33", ["model runner V2 captures all piecewise graphs and the two largest full ones"]),
    ],
)
def test_the_rules_that_hang_on_the_installation_are_named(run: Run, engine: str, lines: list[str]) -> None:
    done = run("estimate", "qwen2.5-7b", "--gpu", "l40s", "--ctx", "4k", "--engine", engine, "--explain")
    text = " ".join(done.out.split())
    for line in lines:
        assert line in text
    assert "set --kv-cache-memory-bytes" in text


def test_a_wide_range_names_the_graphs(run: Run) -> None:
    words = ("estimate", "deepseek-v3", "--gpu", "h200", "--tp", "8", "--ctx", "8k", "--gpu-memory-utilization", "0.7")
    assert "most of the uncertainty is CUDA graphs (0.25-5.51 GiB)" in run(*words).err
    assert "the range is mostly" not in run(*words, "--enforce-eager").err
    assert "the range is mostly" not in run(*words, "--kv-cache-memory-bytes", "11GiB").err
