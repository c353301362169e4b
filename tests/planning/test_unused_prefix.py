"""A prefix that all requests begin with and that no request ever finds in the cache is said to be of no use."""

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.setup import groups
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

HYBRID = (
    "qwen3-next-80b-a3b",
    "--gpu",
    "h200",
    "--tp",
    "4",
    "--ctx",
    "8k",
)  # blocks of 320 tokens, as large as its states
NEVER = "the prefix of 240 tokens is shorter than the 320-token block, so it is never found in the cache"


def test_an_estimate_says_it(run: Run) -> None:
    words = [*HYBRID, "--mean-tokens", "600", "--shared-prefix"]
    assert NEVER in run("estimate", *words, "240").err
    assert "prefix of" not in run("estimate", *words, "320").err
    assert "prefix of" not in run("estimate", "qwen3-8b", "--gpu", "h200", "--shared-prefix", "16").err
    assert (
        "the prefix of 15 tokens is shorter"
        in run("estimate", "qwen3-8b", "--gpu", "h200", "--shared-prefix", "15").err
    )


def test_before_hybrid_models_cached_prefixes_the_reason_is_another(run: Run) -> None:
    words = [*HYBRID, "--mean-tokens", "700", "--shared-prefix", "640", "--engine", "vllm@0.19"]
    note = "the prefix of 640 tokens is computed again for every request: prefix caching is off"
    assert note in run("estimate", *words).err


def test_a_simulation_finds_none_and_says_why(run: Run) -> None:
    load = "--prompt-tokens 700 --output-tokens 20 --rate 5 --num-requests 40 --format json"
    never, always = (run("simulate", *HYBRID, *load.split(), "--shared-prefix", tokens) for tokens in ("240", "640"))
    assert NEVER in never.err
    assert "prefix of" not in always.err
    rates = [ran.json["variants"][0]["prefix_cache"]["hit_rate"] for ran in (never, always)]
    assert rates[0] == 0 < rates[1]


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma-3-27b", "qwen3-next-80b-a3b", "gpt-oss-20b", "deepseek-v3"])
def test_the_scheduler_finds_prefixes_in_the_same_steps(model: str) -> None:
    """The engine's own block sizes, with which the simulator repeats vLLM's scheduler."""
    answer = plan(Request(catalog.load(model), gpu("h200"), EngineArgs(tensor_parallel_size=8), parse_engine("vllm")))
    assert {group.block_size for group in groups(answer)} == {answer.pool.hit_tokens}
