"""Operating limits against sampled pools; the files made of them against promtool and their formats' readers."""

import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvplan.measure.check import checked, policy_at
from kvplan.policy.limits import Limits, level
from kvplan.policy.result import CheckResult
from kvplan.report.operations import RULES_FILE, WRITERS, whole_numbers
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

POLICY = """version: 1
targets:
  - id: chat
    model: llama-3.1-8b
    gpu: l40s
    max_model_len: 16k
    workload: {profile: azure-2023-conv, rate: 3/s, slo: "ttft=2s,tpot=60ms"}
    rules: {fits: true, max_preemption_rate: 2%}
  - id: agents
    gpu: h100-80g
    command: vllm serve Qwen/Qwen3-32B-FP8 --max-model-len 32768 --served-model-name "agents-1"
    rules: {fits: true}
  - id: short
    gpu: h200
    command: vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 64 --max-model-len 4096
    mean_tokens: 500
    rules: {fits: true}
  - id: equal
    engine: sglang
    model: llama-3.1-8b
    gpu: h100-80g
    max_model_len: 32k
    lengths: const:4096
    rules: {fits: true}
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "kvplan.policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture(scope="module")
def result(policy: Path) -> CheckResult:
    return checked(policy_at(policy), policy, offline=True, limits=True)


def limits_of(result: CheckResult, target: str) -> Limits:
    limits = result.limits[target]
    assert not isinstance(limits, str)
    return limits


@pytest.mark.parametrize("mean", [30, 400])
def test_the_level_leaves_three_deviations_of_a_sampled_pool(mean: int) -> None:
    """Pools with a Poisson number of requests of exponential sizes: the margin as sampled, not as derived."""
    room, rng = 10_000.0, random.Random(3)
    typical = 2 * mean  # the mean square of an exponential size over its mean
    expected = level(typical / room) * room / mean  # requests
    sums = []
    for _ in range(4000):
        number = sum(1 for _ in arrivals(rng, expected))
        sums.append(sum(rng.expovariate(1 / mean) for _ in range(number)))
    middle = sum(sums) / len(sums)
    deviation = math.sqrt(sum((value - middle) ** 2 for value in sums) / len(sums))
    assert (room - middle) / deviation == pytest.approx(3, abs=0.12)  # 4,000 samples know it to 1.1%


def arrivals(rng: random.Random, expected: float) -> list[float]:
    """The points of a Poisson process of rate 1 before `expected`."""
    times, now = [], rng.expovariate(1)
    while now < expected:
        times.append(now)
        now += rng.expovariate(1)
    return times


def test_a_pool_of_equal_requests(result: CheckResult) -> None:
    """4,096 tokens each: a level that the equation holds for, and as many requests as make it up."""
    limits = limits_of(result, "equal")
    assert limits.usage is not None
    whole = limits.tokens[1]
    assert limits.usage + 3 * math.sqrt(limits.usage * 4096 / whole) == pytest.approx(1, rel=1e-3)
    assert limits.running == pytest.approx(limits.usage * whole / 4096, abs=1.01)


def test_a_server_whose_sequences_run_out_first(result: CheckResult) -> None:
    limits = limits_of(result, "short")
    assert limits.usage is None
    assert limits.running + 3 * math.sqrt(limits.running) <= 64 < limits.running + 1 + 3 * math.sqrt(limits.running + 1)


def test_without_lengths_room_is_left_for_one_more_request(result: CheckResult) -> None:
    limits = limits_of(result, "agents")
    assert limits.usage == pytest.approx(1 - 32_768 / limits.tokens[1], rel=2e-3)


@pytest.mark.parametrize(("low", "high"), [(1, 9), (7, 7), (95, 1203), (9067, 12830), (28_868, 28_868), (1, 20_000)])
def test_whole_numbers(low: int, high: int) -> None:
    pattern = re.compile(whole_numbers(low, high))
    assert [n for n in range(30_000) if pattern.fullmatch(str(n))] == list(range(low, high + 1))


def test_promtool_accepts_the_rules_and_their_tests(result: CheckResult, tmp_path: Path) -> None:
    (tmp_path / RULES_FILE).write_text(WRITERS["prometheus-rule"](result))
    tests = tmp_path / "tests.yaml"
    tests.write_text(WRITERS["prometheus-test"](result))
    assert promtool("check", "rules", str(tmp_path / RULES_FILE)).returncode == 0
    ran = promtool("test", "rules", str(tests))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_tests_fail_for_another_limit(result: CheckResult, tmp_path: Path) -> None:
    rules = WRITERS["prometheus-rule"](result)
    usage = limits_of(result, "chat").usage
    assert usage is not None
    changed = rules.replace(f"> {usage:.3f}", "> 0.950")
    assert changed != rules
    (tmp_path / RULES_FILE).write_text(changed)
    tests = tmp_path / "tests.yaml"
    tests.write_text(WRITERS["prometheus-test"](result))
    assert promtool("test", "rules", str(tests)).returncode == 1


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def test_names_and_limits_are_those_of_the_policy(result: CheckResult) -> None:
    groups = yaml.safe_load(WRITERS["prometheus-rule"](result))["groups"]
    rules = {(rule["labels"]["target"], rule["alert"]): rule for group in groups for rule in group["rules"]}
    assert [group["name"] for group in groups] == ["kvplan: chat", "kvplan: agents", "kvplan: short", "kvplan: equal"]
    assert "> 0.02 * increase(" in rules["chat", "RequestsPreempted"]["expr"]  # max_preemption_rate: 2%
    assert 'model_name="agents-1"' in rules["agents", "KVCacheNearlyFull"]["expr"]
    assert 'model_name="meta-llama/Llama-3.1-8B-Instruct"' in rules["short", "QueueLongerThanService"]["expr"]
    assert ("short", "KVCacheNearlyFull") not in rules
    assert rules["equal", "KVCacheNearlyFull"]["expr"].startswith("avg_over_time(sglang:token_usage{")
    assert ("equal", "RequestsPreempted") not in rules  # its page has no counter of them


def test_the_operator_gets_the_same_rules(result: CheckResult) -> None:
    document = yaml.safe_load(WRITERS["prometheus-operator"](result))
    assert (document["apiVersion"], document["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert document["spec"] == yaml.safe_load(WRITERS["prometheus-rule"](result))


def test_replicas_follow_the_requests_in_flight(result: CheckResult) -> None:
    objects = list(yaml.safe_load_all(WRITERS["keda"](result)))
    thresholds = {item["metadata"]["name"]: item["spec"]["triggers"][0]["metadata"]["threshold"] for item in objects}
    assert thresholds == {target: str(limits_of(result, target).in_flight) for target in result.limits}
    assert {item["kind"] for item in objects} == {"ScaledObject"}


def test_latency_targets_bound_the_requests_in_flight(result: CheckResult, run: Run) -> None:
    """As `simulate --slo` has them: the same rate, and what runs and waits at it."""
    limits = limits_of(result, "chat")
    assert limits.targets is not None
    targets, largest = limits.targets
    assert not isinstance(largest, str)
    command = ["simulate", "llama-3.1-8b", "--gpu", "l40s", "--ctx", "16k", "--profile", "azure-2023-conv"]
    options = ["--num-requests", "2000", "--slo", targets, "--format", "json"]
    (answer,) = run(*command, "--rate", "3", *options).json["variants"]
    assert answer["largest"]["keeps"] == largest.rate
    (at_most,) = run(*command, "--rate", str(largest.rate), *options).json["variants"]
    assert limits.in_flight == int(at_most["running"]["mean"] + at_most["waiting"]["mean"]) < limits.running


def test_the_dashboard_draws_each_limit(result: CheckResult) -> None:
    document = json.loads(WRITERS["grafana"](result))
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == 4 * 5
    boxes = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(boxes)) == len(boxes)
    chart = next(panel for panel in panels if panel["title"] == "KV cache in use")
    assert chart["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == pytest.approx(
        limits_of(result, "chat").usage, abs=1e-3
    )


def test_two_targets_under_one_name_are_refused(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kvplan.policy.yaml"
    path.write_text(
        POLICY.replace(' --served-model-name "agents-1"', "").replace("Llama-3.1-8B-Instruct", "Llama-3.1-8B")
    )
    problem = "both are served as meta-llama/Llama-3.1-8B, so their metrics cannot be told apart"
    cure = "give one a served_model_name"
    assert refused(run("check", path, "--format", "keda")) == f"targets chat and short: {problem}; {cure}"


def test_a_stated_name_tells_them_apart(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kvplan.policy.yaml"
    target = "  - {id: %s, model: llama-3.1-8b, gpu: l40s, max_model_len: 8k, rules: {fits: true}%s}\n"
    path.write_text("version: 1\ntargets:\n" + target % ("a", "") + target % ("b", ", served_model_name: base"))
    objects = [*yaml.safe_load_all(run("check", path, "--format", "keda").out)]
    names = [re.findall('model_name="([^"]+)"', item["spec"]["triggers"][0]["metadata"]["query"]) for item in objects]
    assert names == [["meta-llama/Llama-3.1-8B"] * 2, ["base"] * 2]


def test_a_target_without_a_pool_is_named(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kvplan.policy.yaml"
    path.write_text("version: 1\ntargets:\n  - {id: big, model: llama-3.1-70b, gpu: l40s, rules: {fits: true}}\n")
    line = refused(run("check", path, "--format", "prometheus-rule"))
    assert "no target has operating limits (big: it does not fit)" in line
