"""Ranges of simulated times: what they are, three-valued verdicts, and what no published result is like."""

import pytest

from benchmarks.timing.facts import Fact, read_facts
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import parse_engine
from kvplan.simulate.ranges import GROUPS, TIMES, Ranges, measured, modeled, unlike, verdict
from kvplan.simulate.slo import Kept, Promise, kept_promise
from tests.support.time_facts import FACTS

RANGES = Ranges({"ttft": (0.5, 2.0), "tpot": (0.5, 2.0)}, (0.5, 2.0))


def planned(model: str, gpu_name: str) -> Request:
    return Request(catalog.load(model), gpu(gpu_name), EngineArgs(max_model_len=4096))


@pytest.mark.parametrize(
    ("limit", "expected"), [(2.0, "kept"), (1.99, "too close to call"), (0.5, "too close to call"), (0.49, "broken")]
)
def test_a_verdict_holds_over_the_whole_range_or_nowhere(limit: float, expected: str) -> None:
    assert verdict(0.5, 2.0, limit) == expected
    kept = kept_promise(Promise("ttft", 0.99, limit), 1.0, RANGES)
    assert (kept.low, kept.high, kept.verdict) == (0.5, 2.0, expected)
    assert kept.is_kept == (limit >= 1.0)


def test_a_request_that_is_not_served_breaks_its_promise() -> None:
    assert kept_promise(Promise("ttft", 0.99, 10.0), None, RANGES).verdict == "broken"


def test_a_share_of_requests_has_no_range() -> None:
    kept = kept_promise(Promise(None, 1.0, 0.01), 0.01, RANGES)
    assert (kept.low, kept.high, kept.verdict) == (0.01, 0.01, "kept")


def test_a_figure_without_ranges_is_taken_as_it_is() -> None:
    assert Kept(Promise("tpot", 0.99, 1.0), 1.0).verdict == "kept"


def test_a_server_that_keeps_up_gives_what_comes() -> None:
    assert RANGES.rate(9.6, arrivals=10.0) == (9.6, 9.6)
    assert RANGES.rate(9.0, arrivals=10.0) == (4.5, 18.0)
    assert RANGES.rate(9.0, arrivals=None) == (4.5, 18.0)


@pytest.mark.parametrize(
    ("model", "gpu_name", "expected"),
    [
        ("llama-3.1-8b", "h100-80g", []), ("gpt-oss-120b", "b200", []), ("llama-3.1-8b-fp8", "l40s", []),
        ("llama-3.1-8b", "mi300x", ["AMD GPUs"]),
        ("llama-3.1-8b", "gb10", ["GPUs that share their memory with the CPU"]),
        ("deepseek-v2-lite", "h100-80g", ["latent attention (MLA)"]),
    ],
)  # fmt: skip
def test_what_no_published_result_is_like_is_named_and_has_wider_ranges(
    model: str, gpu_name: str, expected: list[str]
) -> None:
    the_plan = plan(planned(model, gpu_name))
    assert list(unlike(the_plan)) == expected
    low, high = modeled(the_plan).time("tpot", 1.0)
    assert (low < TIMES["tpot"][0], high > TIMES["tpot"][1]) == (bool(expected), bool(expected))


@pytest.mark.parametrize(
    ("model", "gpu_name", "engine", "ranks"),
    [
        ("llama-3.1-8b", "a100-80g", "vllm@0.7", 1), ("qwen2.5-0.5b", "a100-80g", "vllm@0.7", 1),
        ("qwen2.5-0.5b", "a100-80g", "vllm", 1), ("llama-3.1-8b", "h100-80g", "sglang", 1),
        ("llama-3.1-8b", "rtx-4090", "vllm", 2),
    ],
)  # fmt: skip
def test_groups_whose_results_lie_further_off_have_ranges_of_their_own(
    model: str, gpu_name: str, engine: str, ranks: int
) -> None:
    """Of 749 published times per output token 86 to 94 % of each such group lie within (reports/accuracy/time.md)."""
    args = EngineArgs(max_model_len=4096, tensor_parallel_size=ranks)
    own = modeled(plan(Request(catalog.load(model), gpu(gpu_name), args, parse_engine(engine)))).times["tpot"]
    assert own != TIMES["tpot"]
    assert own in [group.times["tpot"] for group in GROUPS]


def test_measured_steps_have_ranges_too() -> None:
    low, high = measured().time("ttft", 1.0)
    assert low < 1.0 < high


def test_the_facts_have_what_is_said_to_be_known() -> None:
    """Vendors of the facts' GPUs, and no model with latent attention (MLA) or states among those of the servers "
    "planned."""
    facts = [row for row in read_facts(FACTS) if isinstance(row, Fact)]
    assert {gpu(fact.gpu).vendor for fact in facts} == {"nvidia"}
    assert not [fact.model for fact in facts if catalog.load(fact.model).has_states or catalog.load(fact.model).is_mla]


@pytest.mark.parametrize(
    ("model", "gpu_name", "engine", "expected"),
    [  # counts of tests/facts/time_cases_unseen.csv, scored by benchmarks/timeboard.py --unseen
        ("qwen3-235b-a22b", "h200", "vllm", "held 5 of 24 per output token, 15 of 24 to the first token"),
        ("llama-3.1-8b", "h100-80g", "vllm", "held 5 of 7 per output token"),
        ("llama-3.1-8b", "h100-80g", "sglang", "no unseen result of this kind was scored (dense models, SGLang"),
        ("gpt-oss-20b", "mi300x", "vllm", "measure yours with kvplan calibrate"),
    ],
)
def test_a_range_says_how_often_it_held_for_its_kind(model: str, gpu_name: str, engine: str, expected: str) -> None:
    asked = Request(catalog.load(model), gpu(gpu_name), EngineArgs(max_model_len=4096, tensor_parallel_size=8),
                    parse_engine(engine))  # fmt: skip
    assert expected in modeled(plan(asked)).coverage


def test_a_range_of_measured_steps_is_called_an_assumption() -> None:
    assert measured().coverage.endswith("an assumption")
