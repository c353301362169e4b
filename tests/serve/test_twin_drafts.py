"""A twin that drafts, and one with KV beyond its GPU: steps as vLLM's, acceptance as stated, refusals."""

import json
import re
from random import Random
from typing import Any

import pytest

from engine.config import SamplingParams
from engine.draft_rules import draft_rules
from engine.drafting import Drafting
from kvplan.serve.twin import Script, Twin
from kvplan.simulate.drafts import Acceptance, Drafts, acceptance
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.setup import timed_tiers
from kvplan.simulate.steptime import step_time
from kvplan.simulate.tiers import TierSpec
from tests.oracles import SAMPLED_TOKEN, Player, step_row, trace_drafts, trace_scheduler
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.serving import MODEL, planned, serving, tokenizer

TEXT = "/v1/completions"


class Still:
    """A clock that jumps to whatever is waited for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep_until(self, moment: float) -> None:
        self.seconds = max(self.seconds, moment)


def drafting(drafts: Drafts | None, **changes: Any) -> Twin:
    answer = planned()
    return Twin(
        answer,
        step_time(answer, Shares(), None),
        tokenizer(),
        clock=Still(),
        output_tokens=10**6,
        drafts=drafts,
        **changes,
    )


def drafts_of(method: str, rates: tuple[float, ...]) -> Drafts:
    return Drafts(method, len(rates), rates, draft_rules(method, len(rates)))


def answered(twin: Twin, num: int, num_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [twin.submit([7 + place, 3, 5], params) for place in range(num)]
    outputs: dict[str, list[int]] = {}
    while twin.has_unfinished:
        outputs |= {output.request_id: output.token_ids for output in twin.step()}
    return [outputs[request.seq.request_id] for request in requests]


# --- scheduling -------------------------------------------------------------------------------------------------------


def traces() -> list[Any]:
    path = DATA / "scheduler_traces2" / "spec.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    drafted = [trace for trace in map(json.loads, lines) if not trace["inputs"]["spec"].get("propose")]
    return [pytest.param(trace, id=trace["name"]) for trace in drafted]  # the others draft fewer than they may


@needs_oracle_data
@pytest.mark.parametrize("trace", traces())
def test_a_twins_steps_are_vllms(trace: dict[str, Any]) -> None:
    """The trace's scheduler in the twin's hands: its batches, drafts and what holds of them, step by step."""
    player, clock = Player(trace), Still()
    rules = trace_drafts(trace)
    assert rules is not None
    twin = drafting(drafts_of("ngram", (1.0,) * rules.num_drafts))
    twin._core, twin.clock = trace_scheduler(trace), clock
    twin._free_at = 0.0
    expected = {step["step"]: step for step in trace["steps"]}
    accepted: dict[int, dict[str, int]] = {}
    rows: list[dict[str, Any]] = []
    schedule = twin.scheduler.schedule

    def noted() -> Any:
        batch = schedule()
        accepted[id(batch)] = player.accepted(batch)
        rows.append(step_row(twin.scheduler, batch, accepted[id(batch)]))
        return batch

    def tokens(seq: Any, batch: Any) -> list[int]:
        return [SAMPLED_TOKEN] * (1 + accepted[id(batch)].get(seq.request_id, 0))

    twin.scheduler.schedule = noted  # type: ignore[method-assign]
    twin._tokens = tokens  # type: ignore[method-assign]
    requests = trace["inputs"]["requests"]
    for step in range(600):
        for number, request in enumerate(requests):
            if request["arrive_step"] == step:
                add(twin, trace, request, number)
        for name, when in (trace["inputs"].get("aborts") or {}).items():
            if when == step:
                twin.abort(name)
        if not twin.has_unfinished:
            rows.append({})
        else:
            twin.step()
        if all(request["arrive_step"] <= step for request in requests) and not twin.scheduler.has_unfinished:
            break
    for number, row in enumerate(rows):
        if row and (row["scheduled"] or number in expected):
            theirs = expected[number] | {"admitted": sorted(expected[number]["new"] + expected[number]["resumed"])}
            assert {key: row[key] for key in row if key in theirs} == {key: theirs[key] for key in row if key in theirs}
    extension = twin.scheduler.extension(Drafting)
    assert extension is not None
    stats = extension.stats
    assert trace["spec_stats"] == {
        "drafts": stats.num_drafts, "draft_tokens": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens,
    }  # fmt: skip


def add(twin: Twin, trace: dict[str, Any], request: dict[str, Any], number: int) -> None:
    from engine.request import Request
    from tests.oracles import trace_sequence

    seq = trace_sequence(request, number)
    twin.scheduler.add(seq)
    params = SamplingParams(max_tokens=seq.max_tokens, ignore_eos=True)
    twin._requests[seq.request_id] = Request(seq, params, None, None)
    twin._scripts[seq.request_id] = Script([0], 0, Random(0))


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_the_answers_are_those_without_drafts() -> None:
    plain = answered(drafting(None), 5, 90)
    assert answered(drafting(drafts_of("ngram", (0.8, 0.5, 0.1))), 5, 90) == plain
    assert answered(drafting(drafts_of("draft_model", (1.0, 1.0, 1.0, 1.0))), 5, 90) == plain


def test_as_many_drafts_hold_as_stated() -> None:
    """Of each place the share of all drafts, over 4,000 of them: five standard deviations of a share are 0.04."""
    rates = (0.8, 0.5, 0.1)
    twin = drafting(drafts_of("ngram", rates))
    answered(twin, 20, 500)
    extension = twin.scheduler.extension(Drafting)
    assert extension is not None
    stats = extension.stats
    assert stats.num_drafts > 4000
    for rate, count in zip(rates, stats.accepted_per_position, strict=True):
        assert count / stats.num_drafts == pytest.approx(rate, abs=0.04)


def test_a_length_says_what_vllm_makes_of_it() -> None:
    """vLLM 0.33 config/speculative.py, _acceptance_length_to_rates: whole drafts first, then what is left."""

    def rates(**stated: Any) -> Any:
        return acceptance({"rejection_sample_method": "synthetic", **stated}, Acceptance(), 4)

    assert rates(synthetic_acceptance_length=3.25) == (1.0, 1.0, 0.25, 0.0)
    assert rates(synthetic_acceptance_length=1) == (0.0, 0.0, 0.0, 0.0)
    assert rates(synthetic_acceptance_length=5) == (1.0, 1.0, 1.0, 1.0)
    assert rates(synthetic_acceptance_rates=[0.9, 0.6, 0.6, 0]) == (0.9, 0.6, 0.6, 0.0)
    assert acceptance({}, Acceptance("3.25"), 4) == (1.0, 1.0, 0.25, 0.0)
    assert acceptance({}, Acceptance(rates="0.9,0.6,0.6,0"), 4) == (0.9, 0.6, 0.6, 0.0)
    assert acceptance({}, Acceptance(), 4) is None


def test_drafts_that_always_hold_take_a_fraction_of_the_steps() -> None:
    """Three drafts a step: an answer of 400 tokens takes 100 steps and the prompt's, not 400."""
    plain, drafts = drafting(None), drafting(drafts_of("ngram", (1.0, 1.0, 1.0)))
    times = []
    for twin in (plain, drafts):
        answered(twin, 1, 400)
        times.append(twin.clock.now())
    assert times[1] == pytest.approx(times[0] / 4, rel=0.05)


def test_metrics_count_drafts_by_vllms_names() -> None:
    twin = drafting(drafts_of("ngram", (1.0, 0.0)))
    with serving(twin) as server:
        server.post(TEXT, prompt=[5, 6, 7], max_tokens=40, ignore_eos=True)
        page = server.metrics()
    values = dict(re.findall(r"^vllm:(spec_decode_num_\w+)_total\{[^}]*\} (\S+)$", page, re.MULTILINE))
    assert float(values["spec_decode_num_draft_tokens"]) == 2 * float(values["spec_decode_num_drafts"])
    assert float(values["spec_decode_num_accepted_tokens"]) == float(values["spec_decode_num_drafts"])


REFUSED = [
    ('{"method": "ngram", "num_speculative_tokens": 3}', "nobody stated how many draft tokens are accepted"),
    ('{"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}', "needs either"),
    ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens"),
    ("[1]", "is not a JSON object"),
    ('{"method": "dflash", "num_speculative_tokens": 3}', "needs a draft"),
]
SYNTHETIC = (
    '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic", '
    '"synthetic_acceptance_rates": %s}'
)
REFUSED += [(SYNTHETIC % rates, "synthetic_acceptance_rates") for rates in ("[0.5]", "[0.5, 0.6]", "[2, 1]", "3")]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_cannot_be_drafted_is_refused(run: Run, config: str, message: str) -> None:
    words = ("--simulate", "h100-80g", "--ctx", "8k", "--speculative-config", config)
    assert message in refused(run("serve", MODEL, *words))


# --- KV beyond the GPU ------------------------------------------------------------------------------------------------


def test_a_twin_loads_what_its_pool_has_lost() -> None:
    """A pool of 20 blocks of 16 tokens, and host memory of 100: the first prompt is there again after two others."""
    answer = planned(num_gpu_blocks_override=520, max_model_len=8192)
    tiers = timed_tiers(answer, (TierSpec("cpu", 4 << 30, 25 * 10**9),))
    assert tiers is not None
    source = Random(0)
    prompts = [[source.randrange(100_000) for _ in range(6000)] for _ in range(3)]
    twin = Twin(answer, step_time(answer, Shares(), None), tokenizer(), clock=Still(), tiers=tiers)
    outputs = []
    for prompt in (*prompts, prompts[0]):
        twin.submit(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        while twin.has_unfinished:
            outputs += twin.step()
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 5999]  # the last token is computed
    assert outputs[3].token_ids == outputs[0].token_ids
    assert not tiers.is_busy
    twin.scheduler.check_invariants()
    assert tiers.hit_tokens == [5999]


def test_size_without_speed_is_refused(run: Run) -> None:
    words = ("serve", MODEL, "--simulate", "h100-80g", "--ctx", "8k", "--kv-offloading-size", "16")
    assert "write --tier cpu=16GiB@25GB/s with its speed" in refused(run(*words))
    config = SYNTHETIC % "[0.5, 0.5]"
    both = ("--tier", "cpu=16GiB@25GB/s", "--speculative-config", config)
    assert "a draft's KV is not kept" in refused(run("serve", MODEL, "--simulate", "h100-80g", "--ctx", "8k", *both))
    assert "needs --simulate" in refused(run("serve", MODEL, "--tier", "cpu=16GiB@25GB/s"))
