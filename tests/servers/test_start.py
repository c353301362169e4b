"""A plan that would not start does not fit: `fits`, the exit code, JSON, check, sweep and recommend agree.

The rules are vLLM's own: v1/worker/utils.py (request_memory: ceil(total x utilization) against the free memory) and
config/compilation.py (with recurrent states and full CUDA graphs no more sequences than blocks), read in the wheels of
0.8.5 to 0.33.0.
"""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.units import GIB
from kvplan.documents.artifact import plan_document
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning import plan as planning
from kvplan.planning.advise import fixes
from kvplan.planning.plan import Plan, Request, plan
from kvplan.planning.sweep import row_of
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

HYBRIDS = (("qwen3.5-27b", "h100-80g"), ("nemotron-3-nano-30b-a3b", "h100-80g"))


def of(model: str, card: str, engine: str = "vllm", memory_in_use: int | None = None, **args: Any) -> Plan:
    return plan(
        Request(catalog.load(model), gpu(card), EngineArgs(**args), parse_engine(engine), memory_in_use=memory_in_use)
    )


# --- more sequences than state blocks ---------------------------------------------------------------------------------


def test_more_sequences_than_blocks_do_not_start() -> None:
    least = of("qwen3.5-27b", "h100-80g", max_model_len=32768, max_num_seqs=8)
    many = of("qwen3.5-27b", "h100-80g", max_model_len=32768, max_num_seqs=400)
    assert many.capacity.fits  # one request of the full context has room
    assert many.capacity.num_blocks < 400
    assert not many.fits
    assert many.refusal is not None
    assert many.refusal.by == "state_blocks"
    assert many.concurrency.users == many.concurrency.users_high == many.memory.kv_cache == 0
    assert many.deficit == (400 - many.capacity.num_blocks) * many.capacity.bytes_per_block
    # Without graphs, in releases that captured fewer of them, and with fewer sequences it starts.
    assert of("qwen3.5-27b", "h100-80g", max_model_len=32768, max_num_seqs=400, enforce_eager=True).fits
    assert least.fits
    assert any(cure.flag.startswith("--max-num-seqs") and cure.plan.fits for cure in fixes(many))


@pytest.mark.parametrize(("engine", "refused"), [("vllm@0.19", False), ("vllm@0.20", True), ("vllm@0.33", True)])
def test_releases_before_0_20_start_with_fewer_blocks(engine: str, refused: bool) -> None:
    # The pool is stated: one request of the full context and the null block, far fewer blocks than sequences.
    words: dict[str, Any] = {"tensor_parallel_size": 4, "max_model_len": 4096, "max_num_seqs": 500}
    charged = of("qwen3-next-80b-a3b", "h100-80g", engine, **words).capacity.blocks_per_request
    many = of("qwen3-next-80b-a3b", "h100-80g", engine, num_gpu_blocks_override=charged + 100, **words)
    assert many.capacity.fits
    assert (many.refusal is not None) == refused
    assert many.fits != refused


@pytest.mark.parametrize(("model", "card"), HYBRIDS)
def test_the_default_is_planned_at_the_largest_batch_that_starts(model: str, card: str) -> None:
    default = of(model, card, max_model_len=32768)
    seqs = default.settings.max_num_seqs
    assert default.fits
    assert seqs <= default.blocks_low  # also where the estimates are at their worst
    words = planning.serve_command(default)
    assert words[words.index("--max-num-seqs") + 1] == str(seqs)
    stated = of(model, card, max_model_len=32768, max_num_seqs=seqs)
    assert stated.memory == default.memory
    assert stated.concurrency == default.concurrency
    if seqs < 1024:  # the server's own default on this GPU
        more = of(model, card, max_model_len=32768, max_num_seqs=seqs + 1)
        assert more.blocks_low == 0  # does not surely start
        assert more.concurrency.users_low == 0
        assert any(
            f"no --max-num-seqs: using {seqs:,}, the most with which it starts" in note for note in default.notes
        )


# --- less free than it may use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("utilization", "in_use", "starts"),
    [
        (0.92, None, True),
        (0.99, None, True),  # 78.39 of 79.18 GiB, 0.50 of them the context's
        (1.0, None, False),
        (0.92, 5 * GIB, True),  # 72.84 of 73.68
        (0.92, 6 * GIB, False),
        (0.5, 38 * GIB, True),
        (0.5, 40 * GIB, False),
    ],
)
def test_a_server_starts_where_as_much_is_free_as_it_may_use(
    utilization: float, in_use: int | None, starts: bool
) -> None:
    answer = of(
        "llama-3.1-8b", "h100-80g", memory_in_use=in_use, gpu_memory_utilization=utilization, max_model_len=8192
    )
    total = answer.memory.total
    free = total - answer.memory.context - (in_use or 0)
    assert starts == (ceil(total * utilization) <= free)  # request_memory's own comparison
    assert answer.fits == starts
    assert (answer.refusal is None) == starts
    if not starts:
        assert answer.deficit == ceil(total * utilization) - free
        cures = [cure for cure in fixes(answer) if cure.flag.startswith("--gpu-memory-utilization")]
        assert cures
        assert cures[0].plan.fits


def test_what_others_hold_is_not_taken_from_vllms_pool_but_from_sglangs() -> None:
    """vLLM measures its own growth; SGLang divides what is free before it loads."""
    alone = of("llama-3.1-8b", "h100-80g", max_model_len=8192)
    beside = of("llama-3.1-8b", "h100-80g", memory_in_use=4 * GIB, max_model_len=8192)
    assert beside.available == alone.available
    free_gpu, other = (
        of("llama-3.1-8b", "h100-80g", "sglang", memory_in_use=size, max_model_len=8192, mem_fraction_static=0.8)
        for size in (None, 4 * GIB)
    )
    assert free_gpu.available - other.available == pytest.approx(0.8 * 4 * GIB, abs=1)


def test_the_pool_that_is_stated_does_not_pass_the_gate_either() -> None:
    assert not of("llama-3.1-8b", "h100-80g", memory_in_use=6 * GIB, kv_cache_memory_bytes=GIB, max_model_len=4096).fits


@pytest.mark.parametrize(("engine", "refused"), [("vllm@0.8", False), ("vllm@0.9", True)])
def test_releases_before_0_9_do_not_look(engine: str, refused: bool) -> None:
    assert (of("llama-3.1-8b", "h100-80g", engine, gpu_memory_utilization=1.0).refusal is not None) == refused


def test_unified_memory_is_shared_with_the_host() -> None:
    """GB10s were seen with 102 to 110.4 GiB free of 121.69: vLLM's default wants 111.95, and one did start with it."""
    default = of("qwen3-32b", "gb10", max_model_len=32768)
    assert not default.fits
    assert default.estimates["in_use"].low < 121.69 * GIB - 111.95 * GIB < default.estimates["in_use"].likely
    lower = of("qwen3-32b", "gb10", max_model_len=32768, gpu_memory_utilization=0.83)
    assert lower.fits
    assert of("qwen3-32b", "gb10", memory_in_use=4 * GIB, max_model_len=32768).fits
    # What the host takes while weights load is in the row that vLLM measures it in.
    host = lower.estimates["non_torch"]
    assert "not computable" in host.formula
    assert host.high - host.low > 13 * GIB
    assert "memory-in-use" in lower.estimates["in_use"].formula


# --- one answer everywhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "by"),
    [
        ({"gpu_memory_utilization": 1.0, "max_model_len": 8192}, "free_memory"),
        ({"num_gpu_blocks_override": 100, "max_model_len": 8192}, "num_gpu_blocks_override"),
        ({"max_model_len": 131072, "gpu_memory_utilization": 0.3}, "kv_cache"),
    ],
)
def test_fits_the_document_and_the_row_agree(args: dict[str, Any], by: str) -> None:
    answer = of("llama-3.1-8b", "h100-80g", **args)
    document, row = plan_document(answer), row_of(answer.request)
    assert not answer.fits
    assert not document["fits"]
    assert not row.fits
    assert document["refusal"] is not None
    assert document["refusal"]["by"] == by
    assert document["concurrency"]["users"] == row.users == 0
    assert row.reason is not None
    assert plan_document(of("llama-3.1-8b", "h100-80g", max_model_len=8192))["refusal"] is None


REFUSED = (
    ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--gpu-memory-utilization", "1.0"),
    ("qwen3.5-27b", "--gpu", "h100-80g", "--ctx", "32k", "--max-num-seqs", "400"),
    ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--num-gpu-blocks-override", "100"),
    ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--memory-in-use", "10GiB"),
)


@pytest.mark.parametrize("words", REFUSED)
def test_the_exit_code_and_the_headline_say_so(words: tuple[str, ...], run: Run) -> None:
    answer = run("estimate", *words, "--exit-code")
    assert answer.code == 1
    assert "does not " in answer.out.splitlines()[0]


def test_a_plan_is_the_same_whichever_way_memory_in_use_is_none() -> None:
    request = Request(catalog.load("llama-3.1-8b"), gpu("h100-80g"), EngineArgs(max_model_len=8192))
    assert plan(request).memory == plan(replace(request, memory_in_use=0)).memory


# --- what may not start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (("qwen3.5-27b", "--gpu", "h100-80g", "--ctx", "16k", "--max-num-seqs", "340"), "lower --max-num-seqs"),
        (
            ("llama-3.1-8b", "--gpu", "gb10", "--ctx", "16k", "--gpu-memory-utilization", "0.85"),
            "lower --gpu-memory-utilization",
        ),
        (("gemma-3-27b", "--gpu", "h100-80g", "--ctx", "76k"), "shorter --max-model-len"),
    ],
)
def test_what_may_not_start_says_what_is_safer(words: tuple[str, ...], cure: str, run: Run) -> None:
    second = run("estimate", *words).out.splitlines()[1]
    assert second.startswith("May not start")
    assert cure in second


def test_an_override_below_one_request_is_what_is_named(run: Run) -> None:
    """vLLM wants the request's 512 blocks of 16 tokens and the null block; the memory has nothing to do with it."""
    words = ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--exit-code")
    short = run("estimate", *words, "--num-gpu-blocks-override", "512")
    assert short.code == 1
    assert "--num-gpu-blocks-override 512 is less than the 513 blocks that one request of 8,192 tokens" in short.out
    assert "  --num-gpu-blocks-override 513  " in short.out
    assert run("estimate", *words, "--num-gpu-blocks-override", "513").code == 0


@pytest.mark.parametrize("stated", ["0", "0GiB"])
def test_that_nothing_is_in_use_may_be_stated(run: Run, stated: str) -> None:
    """GB10 at 0.92 wants 111.95 of 121.69 GiB: a host that takes nothing leaves that, a typical host does not."""
    command = ("estimate", "qwen3-32b", "--gpu", "gb10", "--ctx", "8k", "--format", "json")
    empty, typical = run(*command, "--memory-in-use", stated).json, run(*command).json
    assert (empty["inputs"]["memory_in_use"], typical["inputs"]["memory_in_use"]) == (0, None)
    assert (empty["fits"], typical["fits"]) == (True, False)


def test_more_in_use_than_there_is_is_refused(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--gpu", "l4", "--ctx", "8k", "--memory-in-use", "30GiB")
    assert ran.code == 2
    assert ran.errors == [
        "kvplan: error: --memory-in-use is more than l4 has (30.00 GiB of 22.03 GiB); "
        "use the memory that other processes hold on one GPU"
    ]


# --- what the server refuses whatever the memory ----------------------------------------------------------------------

# gpt-oss has attention sinks, which FlashInfer supports on 9.x, 10.x and 12.x; SGLang runs Gemma 4 in three backends.
SINKS = ("gpt-oss-120b", "--gpu", "2xa100-80g", "--ctx", "16k", "--attention-backend", "FLASHINFER")
PHASES = "--engine-arg prefill_attention_backend=flashinfer --engine-arg decode_attention_backend=trtllm_mha"
UNSUPPORTED = [
    (SINKS, "attention sinks not supported", "--attention-backend auto", "FLASHINFER"),
    (
        ("gemma-4-31b", "--engine", "sglang", "--gpu", "2xa100-80g", "--ctx", "16k", *PHASES.split()),
        "--prefill-attention-backend flashinfer does not run with Gemma4ForConditionalGeneration",
        "--prefill-attention-backend triton --decode-attention-backend triton",
        "backend flashinfer",
    ),
]


@pytest.mark.parametrize(("words", "reason", "cure", "refused"), UNSUPPORTED, ids=["vllm", "sglang"])
def test_what_the_server_refuses_does_not_fit(
    words: tuple[str, ...], reason: str, cure: str, refused: str, run: Run
) -> None:
    answer = run("estimate", *words)
    first, *others = answer.out.splitlines()
    assert answer.code == 0
    assert " does not start: " in first
    assert reason in first
    assert [text for text in others if text.strip().startswith(cure)]
    assert refused not in next(text for text in others if text.startswith("Serve"))
    assert run("estimate", *words, "--exit-code").code == 1
    doc = run("estimate", *words, "--format", "json").json
    assert (doc["fits"], doc["refusal"]["by"], doc["concurrency"]["users"]) == (False, "unsupported", 0)


def test_a_combination_that_is_refused_needs_no_memory_to_be_so() -> None:
    """One a100-40g holds neither the weights of gpt-oss-120b nor a cache; still the backend is what is said."""
    short = of("gpt-oss-120b", "a100-40g", max_model_len=16384, attention_backend="FLASHINFER")
    assert not short.capacity.fits
    assert short.refusal is not None
    assert (short.refusal.by, short.deficit) == ("unsupported", 0)
    for cure in fixes(short):  # its own change is combined with more ranks or a larger GPU
        assert cure.plan.fits
        assert cure.flag.startswith("--attention-backend auto ") or cure.plan.request.gpu.sm >= 90


def test_a_policy_says_what_the_server_refuses(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "kvplan.yaml"
    target = "{id: chat, model: gpt-oss-120b, gpu: 2xa100-80g, max_model_len: 16384, attention_backend: FLASHINFER"
    policy.write_text(f"version: 1\ntargets:\n- {target}, rules: {{fits: true}}}}\n")
    checked = run("check", str(policy))
    assert checked.code == 1
    assert "KVP001" in checked.out
    assert "does not start: attention_backend FLASHINFER is not valid" in checked.out
    assert "fix: use --attention-backend auto (gives 127 users)" in checked.out
