"""What changed between two plans: rows that add up, effects of one input at a time, documents read with suspicion."""

import copy
import json
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.core.files import parse_json
from kvplan.core.table import as_csv
from kvplan.documents.artifact import dumps, plan_document, plans_document
from kvplan.documents.check import check_document
from kvplan.documents.diff import diff_document
from kvplan.documents.schema import document_schema
from kvplan.hardware.gpu import gpu
from kvplan.models.catalog import load
from kvplan.models.hf_config import read_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.attribute import CAPACITY, MEMORY, attribution, config_changes, figures_of, with_key
from kvplan.planning.diff import (
    Difference,
    Side,
    compare,
    difference,
    document_sides,
    explanation,
    plan_side,
    ratio_text,
)
from kvplan.planning.plan import Load, Plan, Request, plan
from kvplan.policy.result import CheckResult, Figures, TargetResult
from kvplan.report.diff_text import diff_lines, diff_page, diff_table
from kvplan.report.lines import laid_out, plain
from kvplan.report.page import page
from kvplan.servers.vllm.rules import version
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import LLAMA

A100 = gpu("a100-80g")


def spec(name: str = "./config.json", **changes: Any) -> ModelSpec:
    return read_config({**LLAMA, **changes}, name, name)


def request(model: ModelSpec | None = None, **args: Any) -> Request:
    return Request(spec=model or spec(), gpu=A100, args=EngineArgs(**{"max_model_len": 32_768, **args}))


OLD, NEW = plan(request()), plan(request(spec(num_key_value_heads=4, intermediate_size=12_288), kv_cache_dtype="fp8"))


def between(old: Plan, new: Plan) -> Difference:
    return difference("old", "new", [plan_side(old)], [plan_side(new)])


def diff_markdown(result: Difference) -> str:
    return page(diff_page(result))


def diff_csv(result: Difference) -> str:
    return as_csv(diff_table(result))


def rows(result: Difference) -> dict[str, tuple[Any, Any, Any]]:
    (only,) = result.comparisons
    return {row.name: (row.old, row.new, row.delta) for row in only.rows}


def every_format(result: Difference) -> str:
    """All texts, once the document follows its schema."""
    document = diff_document(result)
    Draft202012Validator(document_schema("diff")).validate(document)
    lines = "\n".join(plain(line) for line in laid_out(diff_lines(result)))
    return "\n".join([json.dumps(document, allow_nan=False), lines, diff_markdown(result), diff_csv(result)])


# --- figures ----------------------------------------------------------------------------------------------------------

PLANS = [
    request(),
    request(load("llama-3.1-70b")),  # does not fit
    request(load("gpt-oss-20b"), max_num_seqs=64),
    request(load("deepseek-v3"), tensor_parallel_size=8, max_model_len=8192),
    request(load("gemma-3-27b"), enforce_eager=True),
    replace(request(load("qwen3-32b"), tensor_parallel_size=2), load=Load(mean_tokens=2000)),
    replace(request(max_loras=2, data_parallel_size=2), release=version((0, 11))),
]


@pytest.mark.parametrize("plan_request", PLANS, ids=lambda plan_request: plan_request.spec.name)
def test_a_plan_and_its_document_say_the_same_figures(plan_request: Request) -> None:
    answer = plan(plan_request)
    (read,) = document_sides(json.loads(json.dumps(plan_document(answer))), "plan.json")
    assert dict(read.figures) == dict(figures_of(answer))
    assert dict(read.groups) == answer.weight_groups
    assert read.fits == answer.fits
    assert read.title == plan_side(answer).title


def test_kv_per_token_and_weights_change_by_what_is_worked_out_by_hand() -> None:
    changes = rows(between(OLD, plan(request(spec(num_key_value_heads=4)))))
    # 32 layers x K and V x 8 (4) heads x 128 wide x 2 bytes
    assert changes["kv.bytes_per_token"] == (131_072, 65_536, -65_536)
    # 32 layers x K and V x 4 heads fewer x 128 wide x 4,096 inputs x 2 bytes
    assert changes["memory.weights"][2] == -268_435_456
    assert changes["memory.weight_groups.attention"][2] == -268_435_456
    assert changes["memory.total"][2] == 0
    assert changes["kv.bytes_per_request"] == (4 << 30, 2 << 30, -2 << 30)


@pytest.mark.parametrize("old", PLANS, ids=lambda plan_request: plan_request.spec.name)
@pytest.mark.parametrize("new", PLANS[:4], ids=lambda plan_request: plan_request.spec.name)
def test_rows_and_groups_add_up_whatever_is_compared(old: Request, new: Request) -> None:
    (comparison,) = between(plan(old), plan(new)).comparisons
    for side in ("old", "new", "delta"):
        *parts, missing, total = (getattr(row, side) for row in comparison.memory)
        assert sum(parts) - missing == total
        weights = next(getattr(row, side) for row in comparison.memory if row.name == "memory.weights")
        assert sum(getattr(row, side) for row in comparison.groups) == weights


def test_the_reverse_comparison_has_every_change_the_other_way_round() -> None:
    there, back = between(OLD, NEW), between(NEW, OLD)
    for name, (old, new, delta) in rows(there).items():
        assert rows(back)[name] == (new, old, -delta if delta is not None else None)
    turned = {(change.name, change.new, change.old) for change in back.comparisons[0].changes}
    assert turned == {(change.name, change.old, change.new) for change in there.comparisons[0].changes}


def test_a_plan_compared_with_itself_has_no_difference() -> None:
    for answer in (OLD, plan(PLANS[1])):
        result = between(answer, plan(answer.request))
        assert result.is_equal
        assert not result.is_worse
        assert [plain(line) for line in laid_out(diff_lines(result))] == [f"No difference: {plan_side(answer).title}"]
        every_format(result)


def test_another_name_with_the_same_facts_changes_no_figure() -> None:
    result = between(OLD, plan(request(spec("./copy/config.json", bos_token_id=7))))
    (comparison,) = result.comparisons
    assert comparison.is_equal
    assert [(change.name, change.old, change.new) for change in comparison.changes] == [("bos_token_id", None, "7")]
    assert "no difference in memory or users" in every_format(result)


# --- one input after the other ----------------------------------------------------------------------------------------


def assert_chain(old: Request, new: Request) -> list[tuple[str, ...]]:
    """The steps lead from one to the other without a gap; returns what each changes."""
    steps = attribution(plan(old), plan(new))
    assert steps[0].before == figures_of(plan(old))
    assert steps[-1].after == figures_of(plan(new))
    for before, after in pairwise(steps):
        assert before.after == after.before
    for path in (*MEMORY, "kv.bytes_per_token", "kv.tokens"):
        total = (steps[-1].after[path] or 0) - (steps[0].before[path] or 0)
        assert sum(step.deltas.get(path, 0) for step in steps) == total
    return [tuple(change.name for change in step.changes) for step in steps]


def test_steps_come_in_the_stated_order_and_add_up() -> None:
    new = replace(
        request(spec(num_key_value_heads=4, hidden_size=5120), kv_cache_dtype="fp8", tensor_parallel_size=2),
        gpu=gpu("h100-80g"), release=version((0, 11)), load=Load(mean_tokens=3000),
    )  # fmt: skip
    assert assert_chain(request(), new) == [
        ("hidden_size",),
        ("num_key_value_heads",),
        ("GPU",),
        ("--engine",),
        ("--tensor-parallel-size",),
        ("--kv-cache-dtype",),
        ("--mean-tokens",),
    ]


def test_a_step_is_what_planning_with_that_change_alone_says() -> None:
    first, second, third = attribution(OLD, NEW)
    # The second step by hand: the config with both changed keys, the KV dtype still the old one.
    by_hand = plan(request(spec(num_key_value_heads=4, intermediate_size=12_288)))
    assert second.after == third.before == figures_of(by_hand)
    assert [change.name for step in (first, second, third) for change in step.changes] == [
        "intermediate_size", "num_key_value_heads", "--kv-cache-dtype",
    ]  # fmt: skip
    # 32 layers x 3 matrices x 4,096 x 2,048 narrower x 2 bytes; KV per token does not depend on it
    assert first.deltas["memory.weights"] == -32 * 3 * 4096 * 2048 * 2
    assert "kv.bytes_per_token" not in first.deltas
    assert third.deltas["kv.bytes_per_token"] == -32_768  # half of the 65,536 that 4 heads leave


def test_changes_without_a_plan_between_them_are_one_step() -> None:
    layers: dict[str, Any] = {"num_hidden_layers": 36, "layer_types": ["full_attention"] * 36}
    old = request(spec(layer_types=["full_attention"] * 32))
    assert assert_chain(old, request(spec(**layers))) == [("num_hidden_layers", "layer_types")]
    # A context beyond the new model's limit: the limit waits until --max-model-len has changed.
    short = request(spec(max_position_embeddings=8192, num_key_value_heads=4), max_model_len=4096)
    assert assert_chain(request(), short) == [
        ("num_key_value_heads",),
        ("--max-model-len",),
        ("max_position_embeddings",),
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [("opt-13b", "opt-1.3b"), ("falcon-7b", "falcon-40b"), ("gemma-3-4b", "gemma-3-27b"), ("gpt2-large", "gpt2-medium"),
     ("lfm2-350m", "lfm2-2.6b"), ("nemotron-h-8b", "nemotron-h-56b")],
)  # fmt: skip
def test_two_models_of_a_family_are_led_into_each_other_in_small_steps(old: str, new: str) -> None:
    both = [Request(spec=load(name), gpu=gpu("h200"), args=EngineArgs(max_model_len=1024)) for name in (old, new)]
    assert max(len(changes) for changes in assert_chain(*both)) <= 3


def test_models_that_an_older_release_ran_last_are_led_into_each_other_there() -> None:
    old, new = (
        Request(load(name), gpu("h200"), EngineArgs(max_model_len=1024), release=version((0, 10)))
        for name in ("llama-3.2-90b-vision", "llama-3.2-11b-vision")
    )
    assert max(len(changes) for changes in assert_chain(old, new)) <= 3


def test_models_of_two_types_are_changed_whole() -> None:
    steps = assert_chain(request(), request(load("qwen3-32b")))
    assert steps == [("model",)]


def test_stated_weights_a_draft_and_a_gpu_of_given_size_are_steps() -> None:
    new = replace(
        request(num_speculative_tokens=3),
        weights_bytes=20 << 30,
        draft=load("llama-3.2-1b"),
        gpu=replace(A100, total_memory=70 << 30, total_memory_low=70 << 30, total_memory_kind="given"),
    )
    assert assert_chain(request(), new) == [
        ("--weights-bytes",),
        ("draft model",),
        ("GPU",),
        ("--num-speculative-tokens",),
    ]


configs = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from("abcd"), configs), st.dictionaries(st.sampled_from("abcd"), configs))
def test_changing_every_key_that_differs_makes_one_config_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    config = old
    for path in config_changes(old, new):
        config = with_key(config, path, new)
    assert json.dumps(config, sort_keys=True) == json.dumps(new, sort_keys=True)
    assert config_changes(new, copy.deepcopy(new)) == []


# --- in words ---------------------------------------------------------------------------------------------------------


def test_the_reasons_are_those_that_planning_shows() -> None:
    (comparison,) = between(OLD, NEW).comparisons
    words = explanation(comparison)
    assert words[0] == "KV per token: num_key_value_heads 8 -> 4 halves it (131,072 to 65,536 bytes)"
    assert words[1] == "KV per token: --kv-cache-dtype auto -> fp8 halves it (65,536 to 32,768 bytes)"
    assert "intermediate_size" not in " ".join(words[:2])
    assert words[2].startswith("KV cache +1.")
    assert "weights are 1.75 GiB less" in words[2]  # 32 x 3 x 4,096 x 2,048 x 2 B and the 256 MiB of K and V
    assert words[3].startswith("14 to ")
    assert "1 GiB of KV cache each, instead of 4 GiB" in words[3]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (8, 4, "halves it"),
        (4, 8, "doubles it"),
        (8, 2, "reduces it to 1/4"),
        (4, 12, "makes it 3 times as large"),
        (8, 6, "multiplies it by 0.75"),
        (3, 7, "multiplies it by 2.333"),
    ],
)
def test_a_ratio_is_a_word_only_where_it_is_exact(old: int, new: int, text: str) -> None:
    assert ratio_text(old, new) == text


def test_documents_give_no_reason_that_nobody_planned() -> None:
    old, new = (document_sides(plan_document(side), "x.json") for side in (OLD, NEW))
    (comparison,) = difference("a", "b", old, new).comparisons
    assert comparison.steps is None
    assert not any("KV per token" in text for text in explanation(comparison))
    assert {(change.name, change.old, change.new) for change in comparison.changes} == {
        ("parameters", "8,030,261,248", "7,090,737,152"),  # 32 x (3 x 4,096 x 2,048 + 2 x 512 x 4,096) fewer
        ("--kv-cache-dtype", "auto", "fp8"),
    }


# --- better or worse --------------------------------------------------------------------------------------------------


def side(fits: bool = True, per_token: int = 100, **figures: Any) -> Side:
    defaults = {
        "concurrency.max": 10.0,
        "concurrency.users": 10,
        "concurrency.replicas": 1,
        "kv.bytes_per_token": per_token,
    }
    return Side(
        "k", "title", fits, {}, {**defaults, **{f"concurrency.{name}": value for name, value in figures.items()}}
    )


@pytest.mark.parametrize(
    ("new", "worse"),
    [
        (side(), ()),
        (side(users=9), ("users",)),
        (side(users=10, per_token=99), ()),
        (side(users=11), ()),
        (side(max=5.0), ()),  # what the server's log prints is nobody's number of users
        (side(per_token=101), ("bytes_per_token",)),
        (side(fits=False, users=0), ("fits", "users")),
        (side(users=5, replicas=2), ()),  # as many on two replicas as on one before
        (side(users=5, replicas=1), ("users",)),
    ],
)
def test_worse_is_fewer_users_more_bytes_per_token_or_not_fitting(new: Side, worse: tuple[str, ...]) -> None:
    assert compare(side(), new).worse == worse


def test_an_older_document_without_users_is_not_compared_by_them() -> None:
    assert compare(side(users=200), side(users=None)).worse == ()
    assert compare(side(users=200), side(users=None, max=9.9)).worse == ("users",)  # by the server's figure, as before
    assert compare(side(fits=False), side(fits=False)).worse == ()


# --- documents --------------------------------------------------------------------------------------------------------

DOCUMENT = json.loads(json.dumps(plan_document(OLD)))


def changed(path: str, value: Any = None, *, drop: bool = False) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(DOCUMENT)
    *upper, last = path.split(".")
    inner = document
    for key in upper:
        inner = inner[key]
    if drop:
        del inner[last]
    else:
        inner[last] = value
    return document


@pytest.mark.parametrize(
    "path",
    [
        "inputs", "inputs.model.name", "inputs.gpu.name", "inputs.args", "inputs.args.max_model_len", "inputs.settings",
        "inputs.num_gpus", "inputs.workload", "inputs.weights_bytes", "inputs.draft", "inputs.engine", "fits",
        "deficit", "memory", "memory.kv_cache", "memory.total", "memory.weight_groups", "kv.tokens", "kv.groups",
        "kv.state_bytes_per_request", "concurrency.max", "parameters.total",
    ],
)  # fmt: skip
def test_a_document_without_a_key_names_it(path: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        document_sides(changed(path, drop=True), "old.json")
    text = str(caught.value)
    assert text.startswith(f"old.json: {path}")
    assert text.endswith("is missing; it may come from another release of kvplan; write it again")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("memory.weights", "12", "memory.weights is not a whole number of that kind ('12')"),
        ("memory.weights", 1.5, "memory.weights is not a whole number of that kind (1.5)"),
        ("memory.weights", -1, "memory.weights is not a whole number of that kind (-1)"),
        ("memory.weights", True, "memory.weights is not a whole number of that kind (True)"),
        ("kv.tokens", 10**25, "kv.tokens is not a whole number"),
        ("concurrency.max", -1.0, "concurrency.max is not a number from 0 on"),
        ("concurrency.max", None, "concurrency.max is not a number from 0 on"),
        ("fits", 1, "fits is not true or false (1)"),
        ("inputs.gpu.name", 7, "inputs.gpu.name is not text (7)"),
        ("kv.groups", {}, "kv.groups is not a list of objects"),
        ("inputs.args", [], "inputs.args"),
        ("memory.weight_groups", {"a.b": "x"}, "memory.weight_groups.a.b is not a whole number"),
        ("memory.unused", 0, "memory adds up to 78,"),
        ("memory.weight_groups", {"all": 5}, "memory.weight_groups adds up to 5 bytes, not to the weights of"),
    ],
)
def test_a_document_with_a_wrong_value_is_refused(path: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        document_sides(changed(path, value), "old.json")
    assert str(caught.value).startswith(f"old.json: {text}"), caught.value


def test_a_plan_saved_before_missing_was_a_field_is_read() -> None:
    """It had `unused` negative by what is missing: the same plan saved today and then does not differ."""
    document = json.loads(json.dumps(plan_document(plan(replace(request(), gpu=gpu("t4"))))))
    memory = document["memory"]
    assert memory["missing"] > memory["unused"] == 0  # 15 GiB of weights, 15 GiB of GPU
    earlier = copy.deepcopy(document)
    earlier["memory"]["unused"] = -earlier["memory"].pop("missing")
    (now,), (then,) = document_sides(document, "new.json"), document_sides(earlier, "old.json")
    assert then.figures == now.figures
    assert compare(then, now).is_equal


@pytest.mark.parametrize("schema", ["kvplan/plan@2", "kvplan/run@1", "other", 7, None, ["kvplan/plan@1"]])
def test_another_document_is_refused_by_its_name(schema: Any) -> None:
    with pytest.raises(InvalidInputError, match="is not a document that can be compared"):
        document_sides(changed("schema", schema), "old.json")


def test_plans_are_matched_by_model_gpu_and_context() -> None:
    small, large = plan(request(max_model_len=8192)), plan(request(max_model_len=65_536))
    old = document_sides(plans_document([OLD, small]), "old.json")
    new = document_sides(plans_document([large, plan(request(kv_cache_dtype="fp8"))]), "new.json")
    result = difference("old.json", "new.json", old, new)
    assert [comparison.new.title for comparison in result.comparisons] == ["./config.json on a100-80g, 32,768 tokens"]
    assert result.only_old == ("./config.json on a100-80g, 8,192 tokens",)
    assert result.only_new == ("./config.json on a100-80g, 65,536 tokens",)
    assert "Only in OLD" in every_format(result)


def test_one_plan_of_each_is_compared_whatever_they_are_of() -> None:
    old, new = document_sides(plan_document(OLD), "a"), document_sides(plan_document(plan(PLANS[1])), "b")
    (comparison,) = difference("a", "b", old, new).comparisons
    assert comparison.worse == ("fits", "bytes_per_token", "users")
    assert explanation(comparison)[0].startswith("OLD fits, NEW does not: ")


def test_documents_that_share_nothing_or_hold_something_twice_are_refused() -> None:
    small, large = plan(request(max_model_len=8192)), plan(request(max_model_len=65_536))
    old, new = document_sides(plans_document([OLD, small]), "a"), document_sides(plans_document([large, large]), "b")
    with pytest.raises(UsageError, match=r"^b contains two plans for \./config\.json on a100-80g, 65,536 tokens"):
        difference("a", "b", old, new)
    with pytest.raises(UsageError, match="have no plan in common"):
        difference("a", "b", old, new[:1])
    with pytest.raises(InvalidInputError, match="contains no plan"):
        document_sides({"schema": "kvplan/plans@1", "plans": []}, "a")


def checked(**targets: Figures | None) -> list[Side]:
    results = tuple(TargetResult(name, 1, f"{name} on a100", (), figures, None) for name, figures in targets.items())
    return document_sides(json.loads(json.dumps(check_document(CheckResult("p.yaml", results, ())))), "check.json")


def test_checks_are_matched_by_target() -> None:
    figures = Figures(True, 16, 40, 100, 5000, 10.5, -6, 0)
    old = checked(chat=figures, gone=figures, runs=None)
    new = checked(chat=replace(figures, concurrency=9.5, headroom=-7), fresh=figures, runs=None)
    result = difference("old.json", "new.json", old, new)
    (comparison,) = result.comparisons
    assert comparison.memory == ()  # a check has no rows that add up
    # headroom -6 -> -7 of a check: nothing unused, 6 bytes missing, then 7
    assert {row.name: row.delta for row in comparison.figures if row.delta} == {
        "concurrency.max": -1.0,
        "memory.missing": 1,
    }
    assert comparison.worse == ("users",)
    assert (result.only_old, result.only_new) == (("gone",), ("fresh",))
    assert "fewer users with NEW" in every_format(result)
    # The users are what is judged where both say them: here the server's own figure falls, and they do not.
    both = [checked(chat=replace(figures, concurrency=concurrency, users=9)) for concurrency in (10.5, 9.5)]
    (comparison,) = difference("old.json", "new.json", *both).comparisons
    assert comparison.worse == ()
    fewer = checked(chat=replace(figures, users=8))
    (comparison,) = difference("old.json", "new.json", both[0], fewer).comparisons
    assert comparison.worse == ("users",)
    assert [(row.old, row.new) for row in comparison.figures if row.name == "concurrency.users"] == [(9, 8)]


def test_documents_say_what_others_held() -> None:
    free, occupied = (
        document_sides(plan_document(plan(replace(request(), memory_in_use=size))), "x.json")
        for size in (None, 1 << 30)
    )
    (comparison,) = difference("old", "new", free, occupied).comparisons
    assert [(change.name, change.old, change.new) for change in comparison.changes] == [
        ("--memory-in-use", None, "1073741824")
    ]
    old = json.loads(dumps(plan_document(plan(request()))))
    del old["inputs"]["memory_in_use"]  # as an earlier release wrote it
    assert document_sides(old, "old.json")


def test_a_comment_of_many_targets_stays_below_githubs_limit() -> None:
    sides = [[replace(plan_side(answer), key=f"target-{i}") for i in range(120)] for answer in (OLD, NEW)]
    text = diff_markdown(difference("a", "b", *sides))
    assert len(text.encode()) < 65_536
    num_shown = text.count("| KV cache and users |")
    assert text.splitlines()[-1].startswith(f"*Shortened to GitHub's limit: {120 - num_shown} more with a difference; ")
    assert num_shown > 10


NASTY = "[bold]x[/bold] | `c` <b> \x1b[31m =cmd \n@x"


def test_names_from_a_document_stay_text() -> None:
    document = changed("inputs.model.name", NASTY)
    other = changed("inputs.model.name", f"={NASTY}")
    result = difference(NASTY, "b", document_sides(document, "a"), document_sides(other, "b"))
    text = every_format(result)
    assert "\x1b" not in text
    rendered = "\n".join(plain(line) for line in laid_out(diff_lines(result)))
    assert "[bold]x[/bold] | `c` <b>" in rendered
    assert "\\[bold\\]x" in diff_markdown(result)
    assert ",'=" in diff_csv(result)  # no spreadsheet runs it


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10), st.just([]), st.just({}), st.just([{}]), st.just({"a": 1}),
)  # fmt: skip


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [inner_path for key, child in inner for inner_path in ((*path, key), *paths(child, (*path, key)))]


READ = ("schema", "inputs", "fits", "deficit", "memory", "kv", "concurrency", "parameters")  # what diff looks at
PATHS = [path for path in paths(DOCUMENT) if path[0] in READ]


@given(st.lists(st.tuples(st.sampled_from(PATHS), values, st.booleans()), min_size=1, max_size=3))
def test_a_mangled_document_is_refused_or_compared_never_a_crash(
    changes: list[tuple[tuple[Any, ...], Any, bool]],
) -> None:
    document = copy.deepcopy(DOCUMENT)
    for path, value, drop in changes:
        inner: Any = document
        try:
            for key in path[:-1]:
                inner = inner[key]
            if drop and isinstance(inner, dict):
                inner.pop(path[-1], None)
            else:
                inner[path[-1]] = value
        except (KeyError, TypeError, IndexError):
            continue  # an earlier change took it away
    mangled = None
    with suppress(KvplanError):
        (mangled,) = document_sides(parse_json(json.dumps(document), "new.json"), "new.json")
    if mangled is not None:
        (whole,) = document_sides(DOCUMENT, "old.json")
        assert "kvplan/diff@1" in every_format(Difference("old.json", "new.json", (compare(whole, mangled),)))


def test_a_document_and_a_plan_are_compared_by_what_both_say() -> None:
    result = difference("a", "b", document_sides(DOCUMENT, "a"), [plan_side(plan(request(kv_cache_dtype="fp8")))])
    (comparison,) = result.comparisons
    assert comparison.steps is None
    assert [(change.kind, change.name) for change in comparison.changes] == [("setting", "kv_dtype")]
    assert set(CAPACITY) <= {row.name for row in comparison.rows}


def test_a_backends_workspace_is_named_by_plans_and_documents() -> None:
    # vLLM 0.33: b12x keeps a wrapper in each of 48 layers; FlashInfer's attention 394 MiB after the pool is sized
    args = EngineArgs(max_model_len=8192, max_num_batched_tokens=8192, enable_expert_parallel=True)
    spec, card, release = load("qwen3-30b-a3b"), gpu("rtx-pro-6000"), version((0, 33))
    triton, b12x = (
        plan(Request(spec, card, replace(args, moe_backend=name), release)) for name in ("triton", "flashinfer_b12x")
    )
    old, new = (document_sides(plan_document(side), "x.json")[0] for side in (triton, b12x))
    for pair in ((plan_side(triton), plan_side(b12x)), (old, new)):
        sentences = explanation(compare(*pair))
        assert any(text.startswith("buffers of NEW (") and "48 layers x" in text for text in sentences)
        assert any(text.startswith("buffers of OLD (") and "experts x" in text for text in sentences)


def test_a_workspace_outside_the_budget_is_named_though_no_figure_differs() -> None:
    args = EngineArgs(max_model_len=8192)
    request = Request(load("qwen3-8b"), gpu("h100-80g"), args, version((0, 33)))
    flash, flashinfer = (
        plan(replace(request, args=replace(args, attention_backend=name))) for name in ("FLASH_ATTN", "FLASHINFER")
    )
    result = difference("a", "b", [plan_side(flash)], [plan_side(flashinfer)])
    assert result.comparisons[0].is_equal
    assert "394 MiB" in " ".join(plain(line).strip() for line in laid_out(diff_lines(result)))
