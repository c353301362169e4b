"""What failing rules need, fed back into the policy: the change that is said to cure them all does."""

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvplan.documents.schema import document_schema
from kvplan.policy.gauges import Case
from kvplan.policy.judge import Evidence, figures
from kvplan.policy.remedies import ACCEPT, NOTHING
from kvplan.policy.result import TargetResult
from tests.policy.test_policy import judged, planned, read, with_flags
from tests.support.cli import Ran, Run
from tests.support.cli import run as run  # the fixture
from tests.support.parts import some

MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-3-27b")
GPUS = ("l4", "a10g", "l40s", "a100-80g", "h100-80g", "2 x l40s")
ENGINES = ("vllm@0.33", "vllm@0.10", "sglang")
LIMITS: Mapping[str, tuple[Any, ...]] = {
    "fits": (True,),
    "min_headroom": ("5%", "9%", "12%", "3GiB"),
    "min_concurrency": (2, 8, 20, 60),
    "min_users": ({"mean": 300}, {"mean": 60, "p99": 8}, 20),
    "min_kv_tokens": ("100k", "400k", "2m"),
    "max_weights": ("6GiB", "14GiB", "40GiB"),
    "max_kv_bytes_per_token": ("40KiB", "70KiB", "130KiB"),
    "max_lora_bytes": ("300MiB", "1GiB"),
}


def drawn(seed: int) -> dict[str, Any]:
    """A policy of one target with two to five rules, most of which fail; plain YAML values."""
    draw = random.Random(seed)
    engine = draw.choice(ENGINES)
    names = draw.sample([name for name in LIMITS if name != "min_headroom" or engine != "sglang"], draw.randint(2, 5))
    target: dict[str, Any] = {
        "id": "chat", "model": draw.choice(MODELS), "gpu": draw.choice(GPUS), "engine": engine,
        "max_model_len": draw.choice(("4k", "8k", "16k", "32k")), "max_num_seqs": draw.choice((64, 256)),
        "rules": {name: draw.choice(LIMITS[name]) for name in names},
    }  # fmt: skip
    if "min_users" in target["rules"]:
        target["lengths"] = draw.choice(("uniform:200-3000", "lognormal:mean=1k,p99=3k"))
    if "max_lora_bytes" in target["rules"] and engine != "sglang":
        target |= {"max_loras": draw.choice((4, 8)), "max_lora_rank": draw.choice((16, 64))}
    if draw.random() < 0.2 and " x " not in target["gpu"]:
        target["gpu_memory"] = draw.choice(("20GiB", "38GiB"))
    return {"version": 1, "targets": [target]}


def checked(run: Run, folder: Path, values: Mapping[str, Any]) -> Ran:
    path = folder / "kvplan.policy.yaml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    return run("check", path, "--format", "json")


def changed(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    (target,) = values["targets"]
    return {**values, "targets": [{**target, **keys}]}


@pytest.mark.parametrize("first", some(range(0, 60, 10), range(0, 60, 20)))
def test_the_change_that_cures_all_does_when_it_is_fed_back(run: Run, tmp_path: Path, first: int) -> None:
    schema = jsonschema.Draft202012Validator(document_schema("check"))
    cured = 0
    for seed in range(first, first + 10):
        values = drawn(seed)
        ran = checked(run, tmp_path, values)
        assert ran.code in (0, 1), (seed, ran.err)
        schema.validate(ran.json)
        (target,) = ran.json["targets"]
        failing = [finding for finding in target["findings"] if finding["outcome"] == "fail"]
        assert bool(failing) == (ran.code == 1)
        cure = target["cure"]
        if cure is None:
            assert not any("which fixes" in (finding["fix"] or "") for finding in failing)
            continue
        cured += 1
        incurable = [finding for finding in failing if finding["rule"] == "plausible"]  # 38 GiB of an L4's 24
        assert len(cure["rules"]) == len(failing) - len(incurable)
        if len(failing) > 1 and not incurable:
            for finding in failing:
                assert finding["fix"].startswith(f"use {' '.join(cure['flags'])} (gives ")
                assert finding["fix"].endswith(
                    f"), which fixes {'both' if len(failing) == 2 else f'all {len(failing)}'}"
                )
        again = checked(run, tmp_path, changed(values, cure["keys"]))
        assert again.code == bool(incurable), (seed, values, cure, again.out, again.err)
    assert cured >= 5  # the draw has something to cure


# --- what is said -----------------------------------------------------------------------------------------------------

ONE = "version: 1\ntargets:\n- id: chat\n  model: llama-3.1-8b\n  gpu: a100-80g\n  rules: {{{}}}\n{}"


def fixes(rules: str, more: str = "", **options: Any) -> tuple[dict[str, str | None], TargetResult]:
    """What each rule of llama-3.1-8b on an A100 at 32k needs, and its target's result."""
    target, *_ = judged(ONE.format(rules, more), planned(), **options).targets
    return {finding.name: finding.fix for finding in target.findings}, target


def test_no_part_of_the_change_that_cures_all_is_idle() -> None:
    """14 requests fit, and 6.34 GiB (8%) are left: more of both takes two changes."""
    text = ONE.format("min_concurrency: 20, min_headroom: 12%, max_weights: 10GiB", "")
    (target,) = judged(text, planned()).targets
    assert target.cure is not None
    assert len(target.cure.flags) > 1
    assert target.cure.rules == ("min_concurrency", "min_headroom", "max_weights")
    for left_out in range(len(target.cure.flags)):
        fewer = " ".join(flag for number, flag in enumerate(target.cure.flags) if number != left_out)
        again = judged(text, with_flags(planned(), fewer))
        assert again.exit_code(strict=False) == 1, fewer
    assert judged(text, with_flags(planned(), " ".join(target.cure.flags))).exit_code(strict=False) == 0


def test_a_cure_of_one_rule_keeps_the_others() -> None:
    """Less of the GPU for the server alone would cure the headroom, and leave fewer than 14 requests."""
    alone, _ = fixes("min_headroom: 12%")
    assert str(alone["min_headroom"]).startswith("use --gpu-memory-utilization 0.88 (gives ")
    text = ONE.format("min_headroom: 12%, min_concurrency: 14", "")
    (target,) = judged(text, planned()).targets
    assert target.cure is not None
    assert target.cure.rules == ("min_headroom",)
    assert judged(text, with_flags(planned(), " ".join(target.cure.flags))).exit_code(strict=False) == 0
    assert judged(text, with_flags(planned(), "--gpu-memory-utilization 0.88")).exit_code(strict=False) == 1


def test_rules_that_only_warn_are_cured_too_or_left_as_they_are() -> None:
    """Nothing gives a million requests, which only warns; the two that fail are cured without it."""
    rules = "min_concurrency: 20, max_weights: 10GiB, min_kv_tokens: {}"
    more = "severity: {min_kv_tokens: warn}\n"
    remedies, _ = fixes(rules.format("500k"), more)
    assert {str(fix).rpartition(", ")[2] for fix in remedies.values()} == {"which fixes all 3"}
    remedies, target = fixes(rules.format("2000m"), more)
    assert target.cure is not None
    assert target.cure.rules == ("min_concurrency", "max_weights")
    assert str(remedies["min_concurrency"]).endswith(", which fixes 2 of 3")
    assert remedies["min_kv_tokens"] == NOTHING


def test_where_nothing_cures_all_each_rule_says_what_it_needs_and_that() -> None:
    remedies, target = fixes("min_concurrency: 20, max_weights: 1MiB")
    assert target.cure is None
    assert str(remedies["min_concurrency"]).startswith("use --kv-cache-dtype fp8 (gives ")
    assert str(remedies["min_concurrency"]).endswith("; no change tried fixes both")
    assert remedies["max_weights"] == NOTHING


def test_what_was_measured_no_change_cures() -> None:
    """A prediction that is off by 9% fails whatever the flags are; two of three are cured."""
    more = "measured: {file: run, max_error: 5%}\n"
    rules = "min_concurrency: 20, max_weights: 10GiB, max_prediction_error: 5%"
    evidence = Evidence(subject="a run", error=0.09, worst="weights", matches=frozenset({"chat"}))
    remedies, target = fixes(rules, more, evidence=evidence)
    assert target.cure is not None
    assert target.cure.rules == ("min_concurrency", "max_weights")
    assert str(remedies["max_weights"]).endswith(", which fixes 2 of 3")


def test_figures_below_the_baseline_are_cured_by_the_same_change_or_accepted() -> None:
    """The baseline's server held a tenth more of everything than today's."""
    now = figures(Case(read(ONE.format("fits: true", "")).targets[0], planned()))
    before = dataclasses.replace(now, kv_tokens=now.kv_tokens * 11 // 10, concurrency=now.concurrency * 1.1)
    more = "baseline: {file: b.json, max_drop: {kv_tokens: 5%, concurrency: 5%}}\n"
    remedies, target = fixes("min_concurrency: 15", more, baseline={"chat": before})
    assert target.cure is not None
    assert target.cure.rules == ("min_concurrency", "baseline.kv_tokens", "baseline.concurrency")
    for name in target.cure.rules[1:]:
        assert f", which fixes all 3; {ACCEPT}" in str(remedies[name])
    alone, target = fixes("fits: true", more.replace(", concurrency: 5%", ""), baseline={"chat": before})
    assert (alone["baseline.kv_tokens"], target.cure) == (ACCEPT, None)


def test_a_number_of_gpus_in_the_policy_gives_way_to_the_change(run: Run, tmp_path: Path) -> None:
    target = {"id": "chat", "model": "qwen3-8b", "gpu": "2xl4", "rules": {"fits": True, "max_weights": "5GiB"}}
    values = {"version": 1, "targets": [{**target, "max_model_len": "4k"}]}
    cure = checked(run, tmp_path, values).json["targets"][0]["cure"]
    assert cure["keys"] == {"gpu": "l4", "tensor_parallel_size": 4}
    assert checked(run, tmp_path, changed(values, cure["keys"])).code == 0


def test_a_fix_of_an_sglang_server_has_its_flags_and_says_that_the_context_is_shorter(run: Run, tmp_path: Path) -> None:
    """The flags are those of SGLang 0.5.23's own parser, as `why` prints them."""
    target = {
        "id": "a", "engine": "sglang", "model": "llama-3.1-8b", "gpu": "l40s", "max_model_len": 16384,
        "rules": {"min_concurrency": 400, "max_weights": "1GiB"},
    }  # fmt: skip
    document = checked(run, tmp_path, {"version": 1, "targets": [target]}).json
    [cure] = [target["cure"] for target in document["targets"]]
    assert [flag.split()[0] for flag in cure["flags"]] == ["--tp-size", "--context-length"]
    context = cure["keys"]["max_model_len"]
    assert context < 16384
    fixes = [finding["fix"] for finding in document["targets"][0]["findings"]]
    assert all(f"with a context of {context:,} tokens instead of 16,384" in fix for fix in fixes)
