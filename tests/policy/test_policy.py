"""A policy: read with the line of every fault, and judged by numbers that come from elsewhere."""

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvplan.asked.form import LENGTH_KEYS, PLAN_KEYS
from kvplan.core import strict_yaml
from kvplan.core.errors import InvalidInputError, KvplanError
from kvplan.core.units import GIB
from kvplan.documents.artifact import plan_document
from kvplan.documents.check import check_document
from kvplan.documents.plan import PlanDocument
from kvplan.documents.schema import document_schema
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Load, Plan, Request, plan
from kvplan.policy import file as policy_file
from kvplan.policy import gauges, judge, remedies
from kvplan.policy.file import ENGINE_KEYS, Policy, Workload
from kvplan.policy.gauges import Case
from kvplan.policy.judge import Against, Evidence
from kvplan.policy.result import (
    OUTCOMES,
    OWN_RULES,
    RULES,
    CheckResult,
    Figures,
    Finding,
    figures_by_target,
)
from kvplan.servers.words.arguments import EngineArgs
from kvplan.workloads.lengths import Lengths, parse_lengths

TODAY = datetime.date(2026, 11, 21)
LLAMA_WEIGHTS = 8_030_261_248 * 2  # parameters as transformers counts them, in bfloat16
LLAMA_TOKEN = 32 * 2 * 8 * 128 * 2  # layers x (K and V) x KV heads x head_dim x bytes


def read(text: str) -> Policy:
    return policy_file.policy_of(strict_yaml.parse(text, "p.yaml"), Path("p.yaml"), Path("/"))


def refusal(text: str) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read(text)
    assert str(caught.value).isprintable()
    return str(caught.value)


def doc(rules: str, more: str = "") -> str:
    """A policy of one target, whose rules stand in line 6."""
    return f"version: 1\ntargets:\n- id: chat\n  model: llama-3.1-8b\n  gpu: a100-80g\n  rules: {{{rules}}}\n{more}"


def planned(model: str = "llama-3.1-8b", card: str = "a100-80g", load: Load | None = None, **args: Any) -> Plan:
    arguments = EngineArgs(**{"max_model_len": 32768, **args})
    return plan(Request(catalog.load(model), gpu(card), arguments, load=load or Load()))


def judged(text: str, *plans: Plan, **against: Any) -> CheckResult:
    policy = read(text)
    sized_plans = plans or (planned(),)
    cases = [
        Case(target, sized, sized.request.load.lengths)
        for target, sized in zip(policy.targets, sized_plans, strict=True)
    ]
    return judge.judge(policy, cases, Against(**{"today": TODAY, **against}))


def case_of(answer: Plan) -> Case:
    return Case(read(doc("fits: true")).targets[0], answer)


def only(text: str, *plans: Plan, **against: Any) -> Finding:
    (finding,) = judged(text, *plans, **against).findings
    return finding


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_target_may_say_all_that_an_estimate_may() -> None:
    """`command` is --from-command; `offline` concerns the check."""
    assert {*ENGINE_KEYS, "offline", "from_command"} == {*PLAN_KEYS, *LENGTH_KEYS}


def test_every_rule_has_a_code_of_its_own_and_a_promise() -> None:
    codes = [code for code, _ in RULES.values()]
    assert len(set(codes)) == len(codes)
    assert all(promise.endswith(".") for _, promise in RULES.values())
    assert set(policy_file.LIMITS) == set(OWN_RULES) - {"plausible"}, "which no policy states: it has no limit"


@pytest.mark.parametrize(
    ("rules", "name", "limit", "is_share"),
    [
        ("fits: true", "fits", True, False),
        ("min_concurrency: 12", "min_concurrency", 12.0, False),
        ("min_concurrency: 12.5", "min_concurrency", 12.5, False),
        ("min_users: 200", "min_users", 200, False),
        ("min_kv_tokens: 400k", "min_kv_tokens", 400 * 1024, False),
        ("min_headroom: 5%", "min_headroom", 0.05, True),
        ("min_headroom: 0%", "min_headroom", 0.0, True),
        ("min_headroom: 4GiB", "min_headroom", 4 * GIB, False),
        ("max_weights: 16GB", "max_weights", 16 * 10**9, False),
        ("max_weights: '16 GiB'", "max_weights", 16 * GIB, False),
        ("max_kv_bytes_per_token: 128KiB", "max_kv_bytes_per_token", 131_072, False),
        ("max_kv_bytes_per_token: 131072", "max_kv_bytes_per_token", 131_072, False),
        ("max_lora_bytes: 2GiB", "max_lora_bytes", 2 * GIB, False),
        ("max_preemption_rate: 0.5%", "max_preemption_rate", 0.005, True),
        ("max_preemption_rate: 0.01", "max_preemption_rate", 0.01, True),
        ("max_prediction_error: 5%", "max_prediction_error", 0.05, True),
    ],
)
def test_a_limit_is_read_in_its_unit(rules: str, name: str, limit: float, is_share: bool) -> None:
    (rule,) = read(doc(rules)).targets[0].rules
    assert (rule.name, rule.limit, rule.is_share) == (name, limit, is_share)
    assert (rule.mark.line, rule.mark.column) == (6, 11)


@pytest.mark.parametrize(
    ("rules", "position", "what"),
    [
        ("fits: false", "6:17", "write true, or remove the rule"),
        ("fits: 1", "6:17", "write true"),
        ("min_concurrency: 5 potatoes", "6:28", "not a number above 0 ('5 potatoes')"),
        ("min_concurrency: 0", "6:28", "not a number above 0"),
        ("min_concurrency: -3", "6:28", "not a number above 0"),
        ("min_concurrency: 12%", "6:28", "not a number above 0"),
        ("min_concurrency: [1]", "6:28", "is a list; write one value"),
        ("min_concurrency: ", "6:28", "has no value"),
        ("min_concurency: 12", "6:11", "did you mean min_concurrency"),
        ("zzz: 12", "6:11", "known keys: fits, min_headroom"),
        ("min_users: 2.5", "6:22", "not a whole number"),
        ("min_users: {p95: 3}", "6:23", "has no key 'p95'; known keys: mean, p99"),
        ("min_users: {}", "6:22", "is empty"),
        ("min_kv_tokens: 400kb", "6:26", "not a token count"),
        ("min_kv_tokens: 4GiB", "6:26", "not a token count"),
        ("max_weights: 16", "6:24", "implausibly small"),
        ("max_weights: 16Gb", "6:24", "unknown unit 'Gb'"),
        ("max_weights: 5%", "6:24", "not a size"),
        ("min_headroom: 120%", "6:25", "100% or less"),
        ("min_headroom: 5", "6:25", "implausibly small"),
        ("max_preemption_rate: 5", "6:32", "not a share ('5')"),
        ("max_preemption_rate: 101%", "6:32", "over 100%"),
        ("max_weights: 010", "6:24", "octal"),
        ("max_weights: 1e9", "6:24", "write its digits"),
        ("max_weights: 2026-01-01", "6:24", "is a date"),
        ("fits: true, fits: true", "6:23", "duplicate key 'fits'"),
        ("baseline.weights: 5%", "6:11", "has no key"),
        ("max_age: 30d", "6:11", "has no key"),
    ],
)
def test_a_wrong_rule_is_refused_at_its_place(rules: str, position: str, what: str) -> None:
    message = refusal(doc(rules))
    assert message.startswith(f"p.yaml:{position}: "), message
    assert what in message


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("targets: []\n", "p.yaml:1:1: policy has no version"),
        ("version: 2\ntargets: []\n", "p.yaml:1:10: version is '2'"),
        ("version: 1\n", "p.yaml:1:1: policy has no targets"),
        ("version: 1\ntargets: []\n", "p.yaml:2:10: targets is empty"),
        ("version: 1\ntargets: {a: 1}\n", "p.yaml:2:10: targets is a mapping"),
        ("version: 1\ntarget: []\n", "p.yaml:2:1: policy has no key 'target'; did you mean targets"),
        ("version: 1\ntargets:\n- model: x\n", "p.yaml:3:3: target has no id"),
        ("version: 1\ntargets:\n- id: a b\n", "p.yaml:3:7: id is not a name"),
        ("version: 1\ntargets:\n- id: measured\n", "p.yaml:3:7: id: 'measured' is reserved"),
        ("version: 1\ntargets:\n- id: a\n- id: a\n", "p.yaml:4:3: target a is already defined in line 3"),
        ("version: 1\ntargets:\n- id: a\n  tp: 2\n", "p.yaml:4:3: target has no key 'tp'; did you mean tensor_p"),
        ("version: 1\ntargets:\n- id: a\n  max-num-seqs: 2\n", "p.yaml:4:3: target has no key 'max-num-seqs'; did"),
        ("version: 1\ntargets:\n- id: a\n  max_num_seqs: 2.5\n", "p.yaml:4:17: target a: max_num_seqs: not a whole"),
        ("version: 1\ntargets:\n- id: a\n  max_model_len: 32kb\n", "p.yaml:4:18: target a: max_model_len: not a token"),
        ("version: 1\ntargets:\n- id: a\n  max_model_len: 4k,8k\n", "p.yaml:4:18: target a: max_model_len has"),
        ("version: 1\ntargets:\n- id: a\n  gpu: [l4, h200]\n", "p.yaml:4:8: target a: gpu is a list"),
        ("version: 1\ntargets:\n- id: a\n  enforce_eager: 1\n", "p.yaml:4:18: target a: enforce_eager is neither"),
        ("version: 1\ndefaults: {rule: {}}\ntargets: []\n", "p.yaml:2:12: defaults has no key 'rule'; did you mean"),
        (doc("fits: true", "severity: {fits: error}"), "p.yaml:7:18: severity: fits is 'error'; write warn or fail"),
        (doc("fits: true", "severity: {fit: warn}"), "p.yaml:7:12: severity has no key 'fit'; did you mean fits"),
        (doc("fits: true", "waivers: [{rule: chat, reason: x, expires: 2027-01-01}]"), "p.yaml:7:18: waiver: rule is"),
        (doc("fits: true", "waivers: [{rule: a/fit, reason: x, expires: 2027-01-01}]"), "p.yaml:7:18: waiver: there"),
        (doc("fits: true", "waivers: [{rule: a/fits, expires: 2027-01-01}]"), "p.yaml:7:11: waiver has no reason"),
        (doc("fits: true", "waivers: [{rule: a/fits, reason: x}]"), "p.yaml:7:11: waiver has no expires"),
        (doc("fits: true", "waivers: [{rule: a/fits, reason: x, expires: soon}]"), "p.yaml:7:46: waiver: expires: not"),
        (doc("fits: true", "baseline: {max_growth: {weights: 1%}}"), "p.yaml:7:11: baseline has no file"),
        (doc("fits: true", "baseline: {file: b, max_growth: {weight: 1%}}"), "p.yaml:7:34: baseline: max_growth has"),
        (doc("fits: true", "baseline: {file: b, max_drop: {weights: 1%}}"), "p.yaml:7:32: baseline: max_drop has no"),
        (doc("fits: true", "baseline: {file: b, max_drop: {kv_tokens: 101%}}"), "p.yaml:7:43: baseline: max_drop: kv"),
        (doc("fits: true", "measured: {file: r, max_age: 30}"), "p.yaml:7:30: measured: max_age is not an age ('30')"),
        (doc("fits: true", "measured: {file: ''}"), "p.yaml:7:18: file is empty"),
    ],
)  # fmt: skip
def test_a_fault_is_refused_at_its_place(text: str, start: str) -> None:
    assert refusal(text).startswith(start)


@pytest.mark.parametrize(
    ("workload", "what"),
    [
        ("{profile: a, trace: b}", "names both a profile and a trace"),
        ("{rate: 5 per second}", "is not a request rate"),
        ("{rate: 0}", "is not a request rate"),
        ("{tpot: 30 seconds}", "not a duration"),
        ("{profil: a}", "did you mean profile"),
    ],
)
def test_a_wrong_workload_is_refused(workload: str, what: str) -> None:
    message = refusal(doc("fits: true").replace("  rules:", f"  workload: {workload}\n  rules:"))
    assert message.startswith("p.yaml:6:")
    assert what in message


def test_a_length_that_is_stated_twice_is_refused() -> None:
    text = doc("fits: true").replace("  rules:", "  mean_tokens: 2k\n  workload: {mean_tokens: 3k}\n  rules:")
    assert "p.yaml:7:14: target chat: mean_tokens is stated twice" in refusal(text)


def test_a_workload_is_read_in_its_units() -> None:
    text = doc("fits: true").replace("  rules:", "  workload: {trace: t.csv, rate: 90/min, tpot: 30ms}\n  rules:")
    workload = read(text).targets[0].workload
    assert workload is not None
    assert (workload.trace, workload.rate_per_s, workload.tpot_s) == (Path("t.csv"), 1.5, 0.03)


def test_rules_of_the_defaults_count_unless_the_target_has_its_own() -> None:
    text = (
        "version: 1\ndefaults:\n  rules: {fits: true, min_kv_tokens: 1k}\n"
        "targets:\n- {id: a, rules: {min_kv_tokens: 2k}}\n- {id: b}\n"
    )
    first, second = read(text).targets
    assert [(rule.name, rule.limit, rule.mark.line) for rule in first.rules] == [
        ("min_kv_tokens", 2048, 5),
        ("fits", True, 3),
    ]
    assert [(rule.name, rule.limit) for rule in second.rules] == [("fits", True), ("min_kv_tokens", 1024)]


def test_more_targets_than_can_be_meant_are_refused() -> None:
    text = "version: 1\ntargets:\n" + "".join(f"- {{id: t{i}}}\n" for i in range(501))
    assert refusal(text).startswith("p.yaml:503:3: targets has more than 500")


# --- rules, at their edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passing", "failing", "unit"),
    [
        (f"max_weights: {LLAMA_WEIGHTS}", f"max_weights: {LLAMA_WEIGHTS - 1}", "bytes"),
        (f"max_kv_bytes_per_token: {LLAMA_TOKEN}", f"max_kv_bytes_per_token: {LLAMA_TOKEN - 1}", "bytes/token"),
    ],
)
def test_a_ceiling_is_met_to_the_byte(passing: str, failing: str, unit: str) -> None:
    for rules, outcome in ((passing, "pass"), (failing, "fail")):
        finding = only(doc(rules))
        assert (finding.outcome, finding.unit) == (outcome, unit)
        assert finding.actual == (LLAMA_WEIGHTS if unit == "bytes" else LLAMA_TOKEN)


FLOORS: dict[str, Callable[[PlanDocument], int]] = {
    "min_kv_tokens": lambda document: int(document["kv"]["tokens"]),
    "min_headroom": lambda document: int(document["memory"]["unused"] - document["memory"]["missing"]),
}


@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_is_met_to_the_unit_of_what_estimate_says(name: str) -> None:
    actual = FLOORS[name](plan_document(planned()))
    assert only(doc(f"{name}: {actual}")).outcome == "pass"
    failed = only(doc(f"{name}: {actual + 1}"))
    assert (failed.outcome, failed.limit, failed.actual) == ("fail", actual + 1, actual)


def test_concurrency_is_counted_as_every_command_counts_users() -> None:
    """28,904 blocks less the null block hold 14 requests of 2,048; 256 run at once, and a batch of 8 is a bound."""
    assert only(doc("min_concurrency: 14")).outcome == "pass"
    failed = only(doc("min_concurrency: 14.1"))
    assert (failed.outcome, failed.actual) == ("fail", 14)
    assert "14 concurrent requests of 32,768 tokens (13-14; " in failed.message
    capped = only(doc("min_concurrency: 9"), planned(max_num_seqs=8))
    assert (capped.outcome, capped.actual) == ("fail", 8)
    assert "8; limited by --max-num-seqs, the pool holds 14;" in capped.message
    assert flags_of(capped)[0][0] == "--max-num-seqs 9"


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ("gemma-3-27b", {}), ("deepseek-v4-flash", {"tensor_parallel_size": 2}), ("qwen3.5-27b", {}),
        ("gpt-oss-20b", {}), ("llama-3.1-8b", {"max_num_seqs": 3}),
        ("gpt-oss-20b", {"enable_prefix_caching": False, "max_num_seqs": 4}),
    ],
)  # fmt: skip
def test_concurrency_is_the_headlines_number(model: str, args: dict[str, Any]) -> None:
    answer = planned(model, "h200", **{"max_model_len": 16384, **args})
    users = answer.concurrency.users
    assert answer.fits
    assert users > 0
    passed, failed = only(doc(f"min_concurrency: {users}"), answer), only(doc(f"min_concurrency: {users + 1}"), answer)
    assert (passed.outcome, failed.outcome) == ("pass", "fail")
    assert (passed.actual, failed.actual) == (users, users)


def test_the_logs_figure_has_a_rule_of_its_own() -> None:
    """14.10, as servers with this model, GPU and context log it within 2%; its code is the one it had."""
    assert only(doc("min_logged_concurrency: 14.0")).outcome == "pass"
    failed = only(doc("min_logged_concurrency: 14.2"))
    assert (failed.outcome, failed.code) == ("fail", "KVP003")
    assert failed.actual == pytest.approx(14.10, abs=0.005)
    assert 'the log will say "Maximum concurrency" 14.10x for 32,768 tokens' in failed.message
    assert "0.1 short" in failed.message


@pytest.mark.parametrize("over", [1, 700, 5 * 2**20])
def test_a_difference_too_small_for_gib_is_told_in_its_own_unit(over: int) -> None:
    weights = only(doc(f"max_weights: {LLAMA_WEIGHTS - over}"))
    assert weights.outcome == "fail"
    assert weights.message.endswith({1: "1 B over", 700: "700 B over", 5 * 2**20: "5 MiB over"}[over])
    left = planned().memory.unused
    assert only(doc(f"min_headroom: {left + over}")).message.endswith(
        {1: "1 B short", 700: "700 B short", 5 * 2**20: "5 MiB short"}[over]
    )
    adapters = planned(max_loras=1, max_lora_rank=16)
    lora = only(doc(f"max_lora_bytes: {adapters.memory.lora - over}"), adapters)
    assert "0.00 GiB" not in lora.message


def test_headroom_as_a_share_is_of_the_gpus_memory() -> None:
    """The a100-80g's 79.25 GiB, of which a utilization of 0.92 leaves 8%, less what the pool rounds off."""
    passed, failed = only(doc("min_headroom: 8%")), only(doc("min_headroom: 8.01%"))
    assert (passed.outcome, failed.outcome) == ("pass", "fail")
    total = planned().memory.total
    assert failed.limit == -(-801 * total // 10_000)
    assert isinstance(failed.actual, int)
    assert 0 <= failed.actual - total * 8 // 100 < planned().capacity.bytes_per_block


def test_what_does_not_fit_fails_every_floor_and_says_what_is_short() -> None:
    big = planned("llama-3.1-70b", max_model_len=8192)
    rules = "fits: true, min_concurrency: 1, min_users: 1, min_kv_tokens: 1, min_headroom: 0%, max_weights: 200GiB"
    result = judged(doc(rules), dataclasses.replace(big, request=dataclasses.replace(big.request, load=Load(2048))))
    assert [finding.outcome for finding in result.findings] == ["fail"] * 5 + ["pass"]
    fits, concurrency, users, tokens, headroom, _ = result.findings
    assert fits.message.startswith("does not fit, 62.60 GiB short")
    assert (concurrency.actual, users.actual, tokens.actual) == (0.0, 0, 0)
    assert isinstance(headroom.actual, int)
    assert headroom.actual < 0


# Mean 0.5 x 1,000 + 0.48 x 2,000 + 0.02 x 30,000 = 2,060; 98% are at most 2,000, so the 99th percentile is 30,000.
TWO_LENGTHS = Lengths(((1000, 0.5), (2000, 0.48), (30000, 0.02)), "by hand")


def test_users_are_counted_at_the_mean_and_the_99th_percentile_of_the_lengths() -> None:
    answer = planned(load=Load(lengths=TWO_LENGTHS))
    usable = answer.capacity.num_blocks - 1
    # Blocks of 16 tokens: 129 for 2,060 tokens, 1,875 for 30,000.
    mean, p99 = usable // 129, usable // 1875
    for point, number in (("mean", mean), ("p99", p99)):
        passed, failed = (only(doc(f"min_users: {{{point}: {n}}}"), answer) for n in (number, number + 1))
        assert (passed.outcome, failed.outcome) == ("pass", "fail")
        assert (passed.actual, failed.actual) == (number, number)


@pytest.mark.parametrize(("share", "tokens"), [(0.5, 1000), (0.98, 2000), (0.99, 30000), (1.0, 30000)])
def test_a_quantile_is_the_smallest_length_that_so_many_do_not_exceed(share: float, tokens: int) -> None:
    assert gauges.quantile(TWO_LENGTHS.points, share) == tokens


def test_no_more_users_run_than_the_scheduler_takes() -> None:
    answer = planned(load=Load(mean_tokens=100), max_num_seqs=64)
    passed, failed = only(doc("min_users: 64"), answer), only(doc("min_users: 65"), answer)
    assert (passed.outcome, failed.outcome) == ("pass", "fail")
    assert "limited by --max-num-seqs (the pool holds" in failed.message
    assert failed.fix is not None
    assert failed.fix.startswith("use --max-num-seqs 65 (gives 65)")


def test_lengths_that_nobody_states_are_skipped_not_guessed() -> None:
    finding = only(doc("min_users: {p99: 3}"), planned(load=Load(mean_tokens=2048)))
    assert (finding.outcome, finding.actual, finding.fix) == ("skip", None, None)
    assert "neither lengths nor a workload" in finding.message


def test_users_of_a_length_that_nobody_states_are_of_the_full_context() -> None:
    """As `estimate`, `recommend` and `sweep` count them: the pool but for the null block, 2,048 blocks each."""
    answer = planned(max_model_len=32768)
    users = (answer.capacity.num_blocks - 1) // (32768 // 16)
    assert users == answer.concurrency.users > 1
    for key in ("mean", "p99"):
        passed, failed = (only(doc(f"min_users: {{{key}: {n}}}"), answer) for n in (users, users + 1))
        assert (passed.outcome, failed.outcome, passed.actual) == ("pass", "fail", users)
        assert f"{users} concurrent requests of 32,768 tokens (full context)" in passed.message


def test_a_rule_of_a_server_that_does_not_start_is_cured_by_what_starts_it() -> None:
    answer = planned("llama-3.1-8b", "gb10", max_model_len=16384)
    assert answer.refusal is not None
    fits, users, requests = judged(doc("fits: true, min_users: 10, min_concurrency: 10"), answer).findings
    lower = planned("llama-3.1-8b", "gb10", max_model_len=16384, gpu_memory_utilization=0.83)
    pool = lower.concurrency
    for finding, value in ((fits, f"{pool.users} users"), (users, f"{pool.users}"), (requests, f"{pool.users}")):
        assert finding.outcome == "fail"
        assert f"--gpu-memory-utilization 0.83 (gives {value})" in str(finding.fix)


def with_workload(rules: str, workload: str) -> str:
    return doc(rules).replace("  rules:", f"  workload: {workload}\n  rules:")


def test_lengths_come_from_a_trace_where_the_target_has_none(tmp_path: Path) -> None:
    """1,000 to 100,000 tokens in a hundred steps: the mean is 50,500, the 99th percentile 99,000."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{1000 * i - 10},10\n" for i in range(1, 101))
    trace.write_text(f"prompt_tokens,output_tokens\n{rows}")
    answer = planned(max_model_len=131072)
    text = with_workload("min_users: {mean: 1, p99: 1}", f"{{trace: {trace}}}")
    mean, p99 = judged(text, answer).findings
    assert "50,500 tokens (mean)" in mean.message
    assert "99,000 tokens (p99)" in p99.message
    gone = only(with_workload("min_users: 1", f"{{trace: {tmp_path / 'gone.csv'}}}"), answer)
    assert (gone.outcome, "does not exist" in gone.message) == ("skip", True)


def users_told(text: str, **args: Any) -> tuple[int, str]:
    finding = only(text, planned(**args))
    assert isinstance(finding.actual, int)
    return finding.actual, finding.message


NOTES = "workload: {profile: clinical-notes}\n  rules:"


def test_a_prefix_of_the_workloads_profile_is_stored_once() -> None:
    """Notes take about 9,000 tokens each, of which all share 900: 51 fit apart, and 56 with one copy of the prefix."""
    own = doc("min_users: 1").replace("rules:", NOTES)
    apart, apart_told = users_told(own.replace("rules:", "shared_prefix: 0\n  rules:"))
    once, message = users_told(own)
    tokens = int(message.split(" tokens")[0].split(" of ")[1].replace(",", ""))
    usable = planned().capacity.num_blocks - 1
    # Blocks of 16 tokens; 900 tokens are 56 whole blocks.
    user_blocks = -(-tokens // 16)
    assert (apart, once) == (usable // user_blocks, (usable - 56) // (user_blocks - 56)) == (51, 56)
    assert ", their shared prefix of 900 tokens stored once; minimum 1" in message
    assert "stored once" not in apart_told


def test_a_prefix_counts_once_only_where_the_server_keeps_it_and_all_requests_have_the_same() -> None:
    own = doc("min_users: 1").replace("rules:", NOTES)
    assert users_told(own, enable_prefix_caching=False)[0] == 51
    # Its requests begin with one of three prompts.
    mixed = own.replace("clinical-notes", "rag")
    stated = mixed.replace("rules:", "shared_prefix: 0\n  rules:")
    assert users_told(mixed) == users_told(stated)


def test_a_stated_prefix_wins_over_the_profiles() -> None:
    text = doc("min_users: 1").replace("rules:", NOTES.replace("rules:", "shared_prefix: 1600\n  rules:"))
    finding = only(text, planned(load=Load(shared_prefix=1600)))
    assert "their shared prefix of 1,600 tokens stored once" in finding.message


def test_a_failing_rate_is_told_what_would_help_and_each_plan_is_simulated_once() -> None:
    """A rate that halves where the pool has twice the blocks."""
    pool_sizes: list[int] = []

    def rate(answer: Plan, workload: Workload) -> float:
        pool_sizes.append(answer.capacity.num_blocks)
        return 0.04 * planned().capacity.num_blocks / answer.capacity.num_blocks

    failed = only(with_workload("max_preemption_rate: 2%", "{profile: azure-2023-conv}"), preemption_rate=rate)
    assert [flag for flag, _ in flags_of(failed)] == ["--kv-cache-dtype fp8", "--tensor-parallel-size 2"]
    assert len(pool_sizes) == 3  # as it is, on two ranks, with entries of half the size


def test_preemption_is_what_the_simulation_says() -> None:
    text = with_workload("max_preemption_rate: 1%", "{profile: azure-2023-conv}")

    def rate(share: float) -> Callable[[Plan, Workload], float]:
        return lambda plan, workload: share

    assert only(text, preemption_rate=rate(0.01)).outcome == "pass"
    failed = only(text, preemption_rate=rate(0.02))
    assert (failed.outcome, failed.actual, failed.fix) == ("fail", 0.02, remedies.NOTHING)
    assert only(text, preemption_rate=lambda plan, workload: "no clock").message == "no clock"
    assert only(text).outcome == "skip"
    unserved = only(text, planned("llama-3.1-70b", max_model_len=8192), preemption_rate=rate(0.0))
    assert (unserved.outcome, unserved.limit, unserved.actual) == ("fail", 0.01, None)
    assert "no workload" in only(doc("max_preemption_rate: 1%")).message


def test_a_rule_without_what_it_needs_is_skipped_beside_one_that_fails() -> None:
    too_large = planned("llama-3.1-70b", max_model_len=8192)  # 131.4 GiB of weights on 79.1 GiB
    (result,) = judged(doc("fits: true, max_preemption_rate: 1%"), too_large).targets
    assert [finding.outcome for finding in result.findings] == ["fail", "skip"]
    assert result.findings[0].fix is not None


# --- cures ------------------------------------------------------------------------------------------------------------


def with_flags(answer: Plan, flags: str) -> Plan:
    """The plan with flags as a cure names them, read here by hand."""
    words = flags.replace("--enforce-eager", "--enforce-eager 1").split()
    request = answer.request
    for name, value in zip(words[::2], words[1::2], strict=True):
        changed: Any = value
        match name:
            case "--gpu":
                request = dataclasses.replace(request, gpu=gpu(value))
                continue
            case "--kv-cache-dtype" | "--quantization":
                pass
            case "--gpu-memory-utilization":
                changed = float(value)
            case _:
                changed = int(value)
        args = dataclasses.replace(request.args, **{name.removeprefix("--").replace("-", "_"): changed})
        request = dataclasses.replace(request, args=args)
    return plan(request)


def flags_of(finding: Finding) -> list[tuple[str, str]]:
    assert finding.fix is not None
    assert finding.fix.startswith("use ")
    pairs = [part.rsplit(" (gives ", 1) for part in finding.fix.removeprefix("use ").split(" or ")]
    return [(flag, value.rstrip(")")) for flag, value in pairs]


@pytest.mark.parametrize(
    ("rules", "args", "flags"),
    [
        ("min_concurrency: 20", {}, ["--kv-cache-dtype fp8", "--tensor-parallel-size 2"]),
        # Neither fp8 (28.2) nor two ranks (30.3) hold 40, together they do.
        ("min_concurrency: 40", {}, ["--kv-cache-dtype fp8 --tensor-parallel-size 2", "--tensor-parallel-size 4"]),
        ("min_kv_tokens: 900k", {}, ["--kv-cache-dtype fp8", "--tensor-parallel-size 2"]),
        ("max_weights: 10GiB", {}, ["--tensor-parallel-size 2", "--quantization fp8"]),
        ("max_kv_bytes_per_token: 100KiB", {}, ["--kv-cache-dtype fp8", "--tensor-parallel-size 2"]),
        ("max_lora_bytes: 1GiB", {"max_loras": 8, "max_lora_rank": 64}, ["--max-loras 2", "--max-lora-rank 16"]),
        ("min_headroom: 10%", {}, ["--gpu-memory-utilization 0.9"]),
        ("min_headroom: 10%", {"gpu_memory_utilization": 0.95}, ["--gpu-memory-utilization 0.9"]),
    ],
)
def test_every_cure_cures_and_has_the_value_it_says(rules: str, args: dict[str, Any], flags: list[str]) -> None:
    answer = planned(**args)
    failed = only(doc(rules), answer)
    assert failed.outcome == "fail"
    assert [flag for flag, _ in flags_of(failed)] == flags
    for flag, value in flags_of(failed):
        cured = only(doc(rules), with_flags(answer, flag))
        assert cured.outcome == "pass"
        assert value in cured.message


RULES_TO_CURE = ("fits: true", "min_concurrency: 3", "min_concurrency: 25", "min_kv_tokens: 300k", "min_headroom: 12%")


@pytest.mark.parametrize("rule", RULES_TO_CURE)
@pytest.mark.parametrize("card", ["a10g", "l40s", "h100-80g"])
@pytest.mark.parametrize(
    "model", ["qwen3-32b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v2-lite", "llama-3.1-8b"]
)
def test_whatever_a_rule_needs_keeps_it(model: str, card: str, rule: str) -> None:
    answer = planned(model, max_model_len=32768, card=card)
    finding = only(doc(rule), answer)
    if finding.outcome == "pass" or finding.fix == remedies.NOTHING:
        return
    for flags, value in flags_of(finding):
        cured = only(doc(rule), with_flags(answer, flags))
        assert cured.outcome == "pass", flags
        figure, _, context = value.partition(", with a context of ")
        remedy = (
            f"{figure} concurrent requests of {context.partition(' tokens instead of 32,768')[0]}"
            if context
            else figure
        )
        assert rule == "fits: true" or remedy in cured.message


def test_no_change_that_is_needed_is_idle() -> None:
    """Of changes that must be used together none can be left out."""
    together = 0
    for number in (3, 12, 25, 50, 100):
        answer = planned("qwen3-32b", max_model_len=32768, card="h100-80g")
        text = doc(f"min_concurrency: {number}")
        for flags, _ in flags_of(only(text, answer)):
            words = flags.split()
            together += len(words) > 2
            for left_out in range(0, len(words), 2):
                fewer = " ".join(words[:left_out] + words[left_out + 2 :])
                assert only(text, with_flags(answer, fewer)).outcome == "fail", (flags, fewer)
    assert together >= 3


def test_the_context_that_cures_is_the_longest_in_steps_of_1024() -> None:
    answer = planned(tensor_parallel_size=16, kv_cache_dtype="fp8", card="l4")
    text = doc("min_concurrency: 250")  # of 256 sequences at most
    (context,) = [flag for flag, _ in flags_of(only(text, answer)) if flag.startswith("--max-model-len")]
    longer = f"--max-model-len {int(context.split()[1]) + 1024}"
    assert only(text, with_flags(answer, context)).outcome == "pass"
    assert only(text, with_flags(answer, longer)).outcome == "fail"


def test_what_nothing_cures_says_so() -> None:
    assert only(doc("min_concurrency: 999999")).fix == "no change tried is enough"


def test_a_target_that_does_not_fit_is_told_what_would() -> None:
    failed = only(doc("fits: true"), planned("llama-3.1-70b", max_model_len=8192))
    flags = [flag for flag, _ in flags_of(failed)]
    assert flags == ["--tensor-parallel-size 2", "--gpu b200"]  # as the README's estimate has it


# --- severities and waivers -------------------------------------------------------------------------------------------

FAILING = "min_concurrency: 999"


def waiver(expires: str, rule: str = "chat/min_concurrency") -> str:
    return f"waivers:\n- {{rule: '{rule}', reason: INFRA-12, expires: {expires}}}\n"


def test_a_severity_makes_a_failure_a_warning_and_the_targets_own_wins() -> None:
    assert only(doc(FAILING, "severity: {min_concurrency: warn}")).outcome == "warn"
    own = doc(FAILING, "  severity: {min_concurrency: fail}\nseverity: {min_concurrency: warn}")
    assert only(own).outcome == "fail"
    assert only(doc("min_concurrency: 1", "severity: {min_concurrency: warn}")).outcome == "pass"


@pytest.mark.parametrize(
    ("expires", "outcome", "warned"),
    [("2026-11-22", "warn", False), ("2026-11-21", "warn", False), ("2026-11-20", "fail", True)],
)
def test_a_waiver_holds_through_the_day_it_expires(expires: str, outcome: str, warned: bool) -> None:
    result = judged(doc(FAILING, waiver(expires)))
    (finding,) = result.findings
    assert finding.outcome == outcome
    assert finding.waiver == (None if warned else f"INFRA-12 (until {expires})")
    assert bool(result.warnings) == warned
    if warned:
        warning = "p.yaml:8:10: the waiver of chat/min_concurrency expired on 2026-11-20 and no longer applies"
        assert result.warnings == (warning,)


@pytest.mark.parametrize("rule", ["*/min_concurrency", "chat/*", "c*t/min_*"])
def test_a_waiver_may_cover_several(rule: str) -> None:
    assert only(doc(FAILING, waiver("2027-01-01", rule))).outcome == "warn"


@pytest.mark.parametrize("rule", ["chat/fits", "char/min_concurrency", "*/baseline.*"])
def test_a_waiver_that_matches_nothing_is_refused(rule: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^p\.yaml:8:10: waiver .* matches no rule of any target"):
        judged(doc(FAILING, waiver("2027-01-01", rule)))


def test_a_waiver_leaves_what_passes_and_what_is_skipped() -> None:
    result = judged(doc("min_concurrency: 1, max_preemption_rate: 1%", waiver("2027-01-01", "chat/*")))
    assert [finding.outcome for finding in result.findings] == ["pass", "skip"]
    assert {finding.waiver for finding in result.findings} == {None}


def test_a_target_without_rules_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^p\.yaml:3:3: target chat has no rules"):
        judged(doc(""))


@pytest.mark.parametrize(
    ("rules", "more", "plain", "strict"),
    [
        ("fits: true", "", 0, 0),
        (FAILING, "", 1, 1),
        (FAILING, "severity: {min_concurrency: warn}", 0, 1),
        (FAILING, waiver("2027-01-01"), 0, 1),
        ("fits: true, max_preemption_rate: 1%", "", 0, 1),
        ("max_preemption_rate: 1%", "", 0, 1),
    ],
)
def test_the_exit_code(rules: str, more: str, plain: int, strict: int) -> None:
    result = judged(doc(rules, more))
    assert (result.exit_code(False), result.exit_code(True)) == (plain, strict)


def test_a_policy_of_which_nothing_was_judged_warns() -> None:
    assert any("nothing was checked" in warning for warning in judged(doc("max_preemption_rate: 1%")).warnings)
    assert judged(doc("fits: true, max_preemption_rate: 1%")).warnings == ()


# --- baseline ---------------------------------------------------------------------------------------------------------

FIGURES = Figures(
    fits=True, weights=1000, kv_cache=4000, kv_bytes_per_token=100, kv_tokens=2000, concurrency=14.0, headroom=300,
    lora=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "share", "before", "now", "ok"),
    [
        ("weights", "1%", 1000, 1010, True),
        ("weights", "1%", 1000, 1011, False),
        ("weights", "1%", 1000, 900, True),
        ("kv_bytes_per_token", "0%", 100, 100, True),
        ("kv_bytes_per_token", "0%", 100, 101, False),
        ("lora", "50%", 0, 0, True),
        ("lora", "50%", 0, 1, False),  # of nothing no share is allowed
        ("kv_tokens", "5%", 2000, 1900, True),
        ("kv_tokens", "5%", 2000, 1899, False),
        ("kv_tokens", "100%", 2000, 0, True),
        ("concurrency", "5%", 14.0, 13.3, True),  # 0.7 / 14.0 is a little more than 0.05 in floats
        ("concurrency", "5%", 14.0, 13.29, False),
        ("headroom", "10%", 300, 270, True),
        ("headroom", "10%", 300, 269, False),
        ("headroom", "10%", -300, -300, True),
        ("headroom", "10%", -300, -301, False),
        ("kv_cache", "0%", 4000, 3999, False),
    ],
)
def test_a_change_is_held_against_the_share_that_is_allowed(
    figure: str, share: str, before: float, now: float, ok: bool
) -> None:
    key = "max_growth" if figure in ("weights", "kv_bytes_per_token", "lora") else "max_drop"
    policy = read(doc("fits: true", f"baseline: {{file: b.json, {key}: {{{figure}: {share}}}}}"))
    assert policy.baseline is not None
    verdict = judge.compared(policy.baseline.rules[0], before, now)
    assert verdict.ok is ok
    assert (verdict.fix is None) is ok


BASELINE = "baseline: {file: b.json, max_growth: {weights: 1%}, max_drop: {kv_tokens: 5%}}"


def test_a_plan_equals_its_own_baseline_through_a_file() -> None:
    first = judged(doc("fits: true"))
    document = json.loads(json.dumps(check_document(first)))
    baseline = figures_by_target(document, "b.json")
    assert baseline == {"chat": judge.figures(case_of(planned()))}
    result = judged(doc("fits: true", BASELINE), baseline=baseline)
    assert [finding.outcome for finding in result.findings] == ["pass"] * 3
    assert result.targets[0].baseline == baseline["chat"]


def test_the_figures_are_those_of_estimate() -> None:
    answer = planned(max_loras=2)
    document, figures = plan_document(answer), judge.figures(case_of(answer))
    memory, kv = document["memory"], document["kv"]
    assert (figures.weights, figures.kv_cache, figures.headroom, figures.lora) == (
        memory["weights"], memory["kv_cache"], memory["unused"] - memory["missing"], memory["lora"]
    )  # fmt: skip
    assert (figures.kv_tokens, figures.kv_bytes_per_token) == (kv["tokens"], kv["bytes_per_token"])
    assert (figures.concurrency, figures.fits) == (document["concurrency"]["max"], document["fits"])
    assert figures.users == document["concurrency"]["users"]


def test_a_baseline_of_an_earlier_release_says_no_users() -> None:
    document = json.loads(json.dumps(check_document(judged(doc("fits: true")))))
    del document["targets"][0]["figures"]["users"]
    assert figures_by_target(document, "b.json")["chat"].users is None


@pytest.mark.parametrize(("before", "outcome"), [(14, "pass"), (15, "fail"), (None, "skip")])
def test_users_may_not_drop_from_the_baselines(before: int | None, outcome: str) -> None:
    """14 users of 15 are 6.67% less; a baseline of an earlier release says none."""
    rules = doc("fits: true", "baseline: {file: b.json, max_drop: {users: 6.6%}}")
    result = judged(rules, baseline={"chat": dataclasses.replace(FIGURES, users=before)})
    assert [finding.outcome for finding in result.findings] == ["pass", outcome]


@pytest.mark.parametrize(
    ("baseline", "what"), [(None, "the baseline b.json does not exist"), ({}, "not in the baseline")]
)
def test_a_missing_baseline_is_skipped(baseline: dict[str, Figures] | None, what: str) -> None:
    result = judged(doc("fits: true", BASELINE), baseline=baseline)
    assert [finding.outcome for finding in result.findings] == ["pass", "skip", "skip"]
    assert what in result.findings[1].message


def test_a_larger_model_fails_where_the_baseline_rule_stands() -> None:
    result = judged(doc("fits: true", BASELINE), baseline={"chat": FIGURES})
    weights = next(finding for finding in result.findings if finding.rule == "baseline.weights")
    assert (weights.outcome, weights.line, weights.column) == ("fail", 7, 39)
    assert (weights.limit, weights.actual) == (1010, LLAMA_WEIGHTS)
    assert weights.fix is not None
    assert "--update-baseline" in weights.fix


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "kvplan/plan@1"},
        {"targets": None},
        {"targets": [1]},
        {"targets": [{"id": 1}]},
        {"targets": [{"id": "a", "figures": []}]},
        {"targets": [{"id": "a", "figures": {}}]},
        {"targets": [{"id": "a", "figures": None}, {"id": "a", "figures": None}]},
    ],
)
def test_a_damaged_baseline_is_refused(change: dict[str, Any]) -> None:
    document = {**check_document(judged(doc("fits: true"))), **change}
    with pytest.raises(InvalidInputError, match=r"^b\.json(:| is not) "):
        figures_by_target(document, "b.json")


@pytest.mark.parametrize("value", [True, "1", None, 1.5])
def test_a_baseline_with_a_figure_that_is_no_number_is_refused(value: object) -> None:
    document = json.loads(json.dumps(check_document(judged(doc("fits: true")))))
    document["targets"][0]["figures"]["weights"] = value
    with pytest.raises(InvalidInputError, match="weights is missing or not a number"):
        figures_by_target(document, "b.json")


# --- evidence ---------------------------------------------------------------------------------------------------------

MEASURED = "measured: {file: run, max_error: 5%, max_age: 30d}"
EVIDENCE = Evidence("llama on H100", error=0.05, worst="weights", started=TODAY, matches=frozenset({"chat"}))


def outcomes(**changes: Any) -> list[str]:
    evidence = dataclasses.replace(EVIDENCE, **changes)
    return [finding.outcome for finding in judged(doc("fits: true", MEASURED), evidence=evidence).findings[1:]]


def test_evidence_is_judged_by_its_error_and_its_age() -> None:
    assert outcomes() == ["pass", "pass"]
    assert outcomes(error=0.0501) == ["fail", "pass"]
    assert outcomes(started=TODAY - datetime.timedelta(30)) == ["pass", "pass"]
    assert outcomes(started=TODAY - datetime.timedelta(31)) == ["pass", "fail"]
    assert outcomes(started=TODAY + datetime.timedelta(1)) == ["pass", "skip"]
    assert outcomes(started=None) == ["pass", "skip"]
    assert outcomes(matches=frozenset()) == ["skip", "pass"]
    assert outcomes(error=None, no_error="under WSL") == ["skip", "pass"]
    assert outcomes(problem="the run does not exist") == ["skip", "skip"]


def test_evidence_has_a_place_of_its_own_in_the_result() -> None:
    result = judged(doc("fits: true", MEASURED), evidence=EVIDENCE)
    last = result.targets[-1]
    assert (last.target, last.line, last.figures) == ("measured", 7, None)
    assert [finding.target for finding in last.findings] == ["measured", "measured"]
    waived = judged(doc("fits: true", MEASURED + "\n" + waiver("2027-01-01", "measured/max_age")), evidence=EVIDENCE)
    assert waived.count("pass") == 3


def test_a_measurement_without_limits_is_there_for_the_targets_rules_only() -> None:
    result = judged(doc("max_prediction_error: 5%", "measured: {file: run}"), evidence=EVIDENCE)
    assert [(finding.target, finding.outcome) for finding in result.findings] == [("chat", "pass")]
    assert [target.target for target in result.targets] == ["chat"]


def test_a_target_may_ask_for_less_error_than_the_rest() -> None:
    text = doc("max_prediction_error: 1%", MEASURED)
    own, general, _ = judged(text, evidence=EVIDENCE).findings
    assert (own.target, own.outcome, general.outcome) == ("chat", "fail", "pass")
    other = judged(text, evidence=dataclasses.replace(EVIDENCE, matches=frozenset({"other"}))).findings[0]
    assert (other.outcome, "not for this target" in other.message) == ("skip", True)
    assert only(doc("max_prediction_error: 1%")).message == "there is no `measured:` run to compare with"


# --- the whole --------------------------------------------------------------------------------------------------------


def test_the_document_follows_its_schema_in_every_outcome() -> None:
    schema = document_schema("check")
    Draft202012Validator.check_schema(schema)
    rules = f"fits: true, {FAILING}, min_users: 1, min_headroom: 50%"
    more = f"{BASELINE}\n{MEASURED}\nseverity: {{min_headroom: warn}}\n{waiver('2026-01-01')}"
    for answer in (planned(), planned("llama-3.1-70b", max_model_len=8192)):
        result = judged(doc(rules, more), answer, evidence=EVIDENCE, baseline={"chat": FIGURES})
        document = json.loads(json.dumps(check_document(result), allow_nan=False))
        Draft202012Validator(schema).validate(document)
        outcomes = [finding["outcome"] for target in document["targets"] for finding in target["findings"]]
        assert document["counts"] == {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
        assert sum(document["counts"].values()) == len(result.findings)
    assert result.warnings


def test_a_document_of_another_shape_does_not_follow_the_schema() -> None:
    document = json.loads(json.dumps(check_document(judged(doc("fits: true")))))
    validator = Draft202012Validator(document_schema("check"))
    changes: list[dict[str, Any]] = [{"extra": 1}, {"schema": "kvplan/check@2"}, {"targets": [{}]}]
    for change in changes:
        assert not validator.is_valid({**document, **change})


def test_the_title_says_model_gpu_ranks_and_context() -> None:
    assert judge.title(planned()) == "llama-3.1-8b on a100-80g, tp 1, 32,768 tokens"
    wide = planned(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=3)
    assert judge.title(wide) == "llama-3.1-8b on a100-80g, tp 2, pp 2, dp 3, 32,768 tokens"


def test_lengths_from_a_distribution_end_at_the_context() -> None:
    """A median of 100k at a context of 32k: every percentile above the median is the context."""
    lengths = parse_lengths("lognormal:median=100k,sigma=1", 32768)
    finding = only(doc("min_users: {p99: 1}"), planned(load=Load(lengths=lengths)))
    assert "32,768 tokens (p99)" in finding.message


def test_the_first_hundred_failing_targets_get_a_cure() -> None:
    targets = "".join(f"- {{id: t{i}, rules: {{{FAILING}}}}}\n" for i in range(101))
    result = judged(f"version: 1\ntargets:\n{targets}", *[planned()] * 101)
    fixes = [finding.fix for finding in result.findings]
    assert all(fix is not None for fix in fixes[:100])
    assert fixes[100] is None
    assert any("the first 100 failing targets" in warning for warning in result.warnings)


def test_errors_of_a_policy_are_errors_of_kvplan() -> None:
    assert issubclass(InvalidInputError, KvplanError)
    assert InvalidInputError.exit_code == 2
