"""Patterns of quantization configs: what `re.match` and `fnmatch` match is matched, in linear time."""

import fnmatch
import json
import random
import re
import resource
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.names import LAYER_PREFIXES, OUTER_PREFIXES
from kvplan.models.patterns import MAX_STATES, Patterns
from tests.support.cli import Run, config_file, refused, run
from tests.support.oracle_data import DATA, needs_oracle_data

__all__ = ["run"]

ROLES = (
    "self_attn.q_proj", "self_attn.qkv_proj", "self_attn.o_proj", "self_attn", "mlp", "mlp.gate", "mlp.gate_proj",
    "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts", "mlp.experts.0.up_proj", "mlp.experts.0.w1",
    "block_sparse_moe.experts.0.w2", "mlp.shared_experts.down_proj", "mlp.shared_expert_gate", "linear_attn.in_proj",
)  # fmt: skip
NAMES = [
    *(f"{prefix}{layer}.{role}" for prefix in LAYER_PREFIXES for layer in (0, 1, 2, 10, 12, 60) for role in ROLES),
    *(prefix + leaf for prefix in OUTER_PREFIXES for leaf in ("lm_head", "embed_tokens", "norm")),
]


def expected(pattern: str, name: str) -> bool:
    """What vLLM's `re.match` and ModelOpt's `fnmatch` say."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def differences(patterns: list[str], names: list[str]) -> list[tuple[str, str]]:
    matcher = Patterns(patterns)
    return [
        (pattern, name)
        for name in names
        for places in (matcher.matching(name),)
        for place, pattern in enumerate(patterns)
        if (place in places) != expected(pattern, name)
    ]


# Every form of the 298 published configs, numbers put in, and forms of their makers' documents.
PUBLISHED = [
    "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*\.self_attn\.q_proj$", r"re:.*\.mlp\.gate$", r"re:.*\.mlp\.shared_expert\.gate_proj$",
    "re:.*embed_tokens$", "re:.*o_proj$", "re:.*mlp.gate$", "re:.*lm_head$", r"re:.*\.experts(\..*)?$",
    r"re:.*layers\.[0-1]\.mlp\.down_proj$", r"re:model\.layers\.(1|12)\.mlp", r"re:.*\.1\d\..*(?:gate|up|down).*",
    "model.layers.1.self_attn*", "model.layers.1*", "*.mlp.shared_expert.*", "model.layers.*.self_attn", "*.attn.*",
    "mtp*", "*[!q]_proj", "*layers.[0-2].*", "*[]a]*", "*gate?proj", "model[",
]  # fmt: skip
LOOKAHEADS = [
    r"re:^(?!.*self_attn).*", r"re:(?!.*(?:lm_head|gate)).*", r"re:^(?=.*experts)(?!.*w1$).*\d", r"re:(?!model)",
    r"re:.*mlp(?=\.|$)", r"re:.*\.experts(?=\.\d)", r"re:(?!a)b|(?!.*o_proj)model|.*lm_head",
    r"re:(?i)(?!.*MLP).*SELF", r"re:(?!(?:model|layers)\.)", r"re:^(?=.*[(|)]|.*q_proj).*",
]  # fmt: skip
SPELLED = [  # alike to the eye, read otherwise by RE2: kvplan spells them
    r"re:.*lm_head\Z", r"re:model.{,3}layers", r"re:[[:alpha:]]m", "re:[[l]", r"re:model\.layer.{2,}mlp\.gate\_proj",
    r"re:.*[\[m]lp", r"re:.*gat[\we]_", r"re:(?s:.*)lm_head", "re:x{", "re:.{,}mlp", r"re:\x6dodel", r"re:\A.*mlp",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Possible")  # Python's own of `[[`
@pytest.mark.parametrize("patterns", [PUBLISHED, LOOKAHEADS, SPELLED])
def test_patterns_match_what_python_matches(patterns: list[str]) -> None:
    assert differences(patterns, NAMES) == []
    assert all(differences([pattern], NAMES) == [] for pattern in patterns)


@needs_oracle_data
def test_patterns_of_published_configs_match_what_python_matches() -> None:
    entries = {
        entry
        for path in sorted((DATA / "models").glob("*/config.json"))
        for config in quantizations(json.loads(path.read_text(encoding="utf-8")))
        for entry in strings(config)
    }
    patterns = sorted(entry for entry in entries if entry.startswith("re:") or set(entry) & set("*?["))
    assert len(patterns) > 500
    for start in range(0, len(patterns), 100):
        assert differences(patterns[start : start + 100], NAMES) == []


def quantizations(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if "quantization_config" in value:
            yield value["quantization_config"]
        for child in value.values():
            yield from quantizations(child)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for child in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(child)


# --- made at random ---------------------------------------------------------------------------------------------------

PIECES = [
    "model", "layers", "mlp", "gate", "_proj", r"\.", ".", ".*", ".+", ".?", r"\d", r"\d+", r"\w*", r"\W", r"\b",
    "(a|e)*", "(?:up|gate)", "(gate|up|)", "[a-m]", "[^.]+", "[0-9]", "[]x]", "[^]x]", "{2}", "{,2}", "{1,}", "{",
    "|", "^", "$", "12", "(?=.*mlp)", "(?!.*mlp)", "(?!", "(?=", "(?:", "(", ")", "*", "+", "?", "experts", "_",
    r"\_", r"\Z", r"\A", "[[a]", "-", "(?P<n>m)", "(?i:M)", r"\1", "(?<!x)", "(?>a)", "a++", "(?i)", r"[\w.]",
    r"[\]-]", r"\x6d", r"\Q", r"\pL", r"\u006d", "é",
]  # fmt: skip


def test_expressions_made_at_random_are_matched_as_python_does_or_refused() -> None:
    """4,000 expressions on 60 names: 0 matched otherwise than by Python; what Python refuses may be matched."""
    chosen = random.Random(7)
    names = chosen.sample(NAMES, 60)
    matched = refusals = faults = 0
    for _ in range(4000):
        pattern = "re:" + "".join(chosen.choices(PIECES, k=chosen.randint(1, 7)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(pattern[3:])
        except re.error:
            faults += 1
            with suppress(UnsupportedModelError):
                Patterns([pattern])
            continue
        try:
            assert differences([pattern], names) == [], pattern
            matched += 1
        except UnsupportedModelError:
            refusals += 1
    print(f"{matched} matched alike, {refusals} refused, {faults} that Python refuses")
    assert matched > 1000


# --- hostile ----------------------------------------------------------------------------------------------------------


def hostile() -> dict[str, list[str]]:
    return {
        "goes back for ever": ["re:([a-z0-9._]+)+!$"],
        "goes back for ever too": [r"re:(.*)*(.*)*(.*)*x$", r"re:(a|a|\w|.)*!$"],
        "deep": ["re:" + "(" * 3000 + ")" * 3000],
        "deeper": ["re:" + "(?:" * 300_000],
        "lookaheads in lookaheads": ["re:" + "(?!" * 30_000 + ")" * 30_000],
        "many lookaheads": ["re:" + "(?!a)" * 100_000],
        "sets without an end": ["re:" + "[" * 300_000],
        "sets of a glob": ["[" * 300_000 + "*", "[]" * 100_000],
        "repeats": ["re:a{99999999999999999999}"],
        "repeats of repeats": ["re:" + "(" * 20 + "a" + "{50})" * 20],
        "large repeats": ["re:(?:abc.*){1000}"] * 2000,
        "distinct large repeats": [f"re:.*(?:{i}.?){{999}}" for i in range(2000)],
        "as many as 20,000": [rf"re:.*layers\.{i % 100}\.mlp\.foo{i}" for i in range(20_000)],
        "globs": [f"*a{i}*b{i}*" for i in range(20_000)],
        "trees": [f"model.layers.3.foo{i}*" for i in range(20_000)],
        "a set that grows": [f"re:.*[aeo].{{{i}}}[mlx]" for i in range(100, 150)],
        "many stars": ["re:" + ".*" * 1000 + "!", "*" * 5000 + "!"],
    }


@pytest.mark.parametrize("kind", hostile())
def test_a_hostile_list_is_answered_or_refused_at_once(kind: str, tmp_path: Path, run: Run) -> None:
    """Seconds of the processor bound what would never end; on a quiet machine each takes a few tenths of one."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    quantization = {"quant_method": "compressed-tensors", "ignore": hostile()[kind], "config_groups": groups}
    folder = config_file(tmp_path / "m", {"quantization_config": quantization})
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    ran = run("estimate", folder, "--gpu", "h200", "--ctx", "4k")
    spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime - began
    print(f"{kind}: exit {ran.code} after {spent:.2f} s; {ran.err[:200]}")
    if ran.code != 0:
        assert "quantization_config" in refused(ran)
    assert spent < 60


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"re:.*(?<!shared_)experts", "a lookbehind"),
        (r"re:(a)\1", "a backreference"),
        (r"re:(?P<n>a)(?P=n)", "a backreference"),
        (r"re:.*(?!shared)experts", "a lookahead that does not stand at the beginning"),
        (r"re:(?>a)", "an atomic group"),
        ("re:a{1001}", "more than 1,000 repetitions"),
        (r"re:\Qa\E", r"the escape \Q"),
        ("re:(", "is not a regular expression (missing ): ()"),
        ("[z-a]", "is not a regular expression (invalid character class range: z-a)"),
    ],
)
def test_what_cannot_be_matched_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match="quantization_config: ") as refusal:
        Patterns([pattern])
    assert reason in str(refusal.value)


def test_the_longest_published_list_is_far_below_the_limit() -> None:
    matcher = Patterns(PUBLISHED)
    assert matcher.states * 20 < MAX_STATES
