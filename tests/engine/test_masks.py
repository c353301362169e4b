"""Outputs are what their grammars say, by another library's judgment, and masks are those of vLLM and of llguidance."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from engine import Engine, SamplingParams
from engine.config import Constraint
from engine.draft_rules import SpeculativeConfig
from engine.masks import Bits, TokenMask, bad_words, bits_of
from engine.request import RequestOutput
from engine.sequence import Sequence
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, SettingError, UsageError
from tests.support.constrained import END, constrained_engine, schema, small_tokenizer
from tests.support.small_engines import engine_for, greedy, random_tokens, run_dry
from tests.support.small_models import VOCAB

llguidance = pytest.importorskip("llguidance", reason="pip install '.[structured]'")
FACTS = json.loads((Path(__file__).parents[1] / "facts" / "vllm_token_masks_0.33.json").read_text())
# A random model likes to indent: without this, most outputs would be spaces up to their limit.
NO_SPACES = {token: -100.0 for token in range(3, VOCAB) if not small_tokenizer().decode([token]).strip()}
POINT = {"x": {"type": "integer", "minimum": -9, "maximum": 99}, "y": {"type": "number", "minimum": 0, "maximum": 1}}
BRANCH = {"v": {"enum": [1, 2]}, "k": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}
TREE = {"type": "object", "properties": BRANCH, "required": ["v"], "additionalProperties": False}
SCHEMAS: list[Any] = [
    {"type": "object", "properties": POINT, "required": ["x", "y"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["b"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}, "maxItems": 4,
     "minItems": 2},
    {"enum": ["red", 3, None, {"a": [1]}]},
    {"const": {"deep": ['a"b', "\n"]}},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 2, "maxLength": 4}]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["u", "v"]}], "minItems": 2, "items": False},
]  # fmt: skip

NUM_EACH = 2


def requests(num_each: int, **changes: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            structured_outputs=schema(document),
            seed=100 * number + seed,
            max_tokens=72,
            logit_bias=NO_SPACES,
            **changes,
        )
        for number, document in enumerate(SCHEMAS)
        for seed in range(num_each)
    ]


def check(outputs: list[RequestOutput], documents: list[Any]) -> int:
    """Validate whole outputs; returns how many there are."""
    whole = [(output, document) for output, document in zip(outputs, documents, strict=True)
             if output.finish_reason == "stop"]  # fmt: skip
    for output, document in whole:
        checker = jsonschema.FormatChecker()
        jsonschema.validate(json.loads(output.text), document, format_checker=checker)
        assert output.token_ids[-1] == END
    return len(whole)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True},
    "preempted": {"num_blocks": 60, "max_num_seqs": 8},
    "preempted, async": {"num_blocks": 60, "max_num_seqs": 8, "async_scheduling": True},
    "chunked": {"max_num_batched_tokens": 8},
    "n-gram drafts": {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
}


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Tokens of each request run by itself."""
    engine = constrained_engine()
    return {i: engine.generate([[5, 6, 7]], params)[0].token_ids for i, params in enumerate(requests(NUM_EACH))}


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_valid_and_what_they_are_alone(name: str, alone: dict[int, list[int]]) -> None:
    engine, params = constrained_engine(**CONFIGS[name]), requests(NUM_EACH)
    free = [SamplingParams(seed=n, max_tokens=40, ignore_eos=True) for n in range(6)]
    outputs = engine.generate([[5, 6, 7]] * len(params) + random_tokens(*range(9, 15)), params + free)
    documents = [document for document in SCHEMAS for _ in range(NUM_EACH)]
    assert check(outputs[: len(params)], documents) >= 0.8 * len(params)
    assert [output.token_ids for output in outputs[: len(params)]] == list(alone.values())
    unbound = constrained_engine().generate(random_tokens(*range(9, 15)), free)
    assert [output.token_ids for output in outputs[len(params) :]] == [output.token_ids for output in unbound]
    assert engine.scheduler.num_preemptions > 0 or not name.startswith("preempted")


def test_greedy_and_sampled_and_penalized_outputs_are_valid() -> None:
    for changes in ({"temperature": 0}, {"temperature": 3, "top_p": 0.9}, {"repetition_penalty": 1.3, "top_k": 9},
                    {"min_p": 0.1, "presence_penalty": 1}):  # fmt: skip
        outputs = constrained_engine().generate([[5, 6, 7]] * len(SCHEMAS), requests(1, **changes))
        assert check(outputs, SCHEMAS) >= 0.7 * len(SCHEMAS)


@pytest.mark.parametrize("is_async", [False, True])
def test_every_mask_is_the_librarys_own(monkeypatch: pytest.MonkeyPatch, *, is_async: bool) -> None:
    """A matcher that the test makes, by the library's own functions, says the same after each token of the output."""
    seen: list[tuple[str, tuple[int, ...], Bits]] = []
    write = TokenMask.write

    def noted(mask: TokenMask, seq: Sequence, row: Bits, grammar_row: Bits) -> None:
        write(mask, seq, row, grammar_row)
        seen.append((seq.request_id, tuple(seq.token_ids[seq.num_prompt_tokens :]), row.copy()))

    monkeypatch.setattr(TokenMask, "write", noted)
    engine = constrained_engine(async_scheduling=is_async)
    for number, params in enumerate(requests(1)):
        engine.add_request([5, 6, 7], params, request_id=str(number))
    outputs = run_dry(engine)
    own = llguidance.LLTokenizer(small_tokenizer().to_str(), n_vocab=VOCAB, eos_token=END)
    count = 0
    for number, document in enumerate(SCHEMAS):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(document, defaults={"whitespace_flexible": True})
        masks = {length: row for name, tokens, row in seen if name == str(number) for length in [len(tokens)]}
        matcher = llguidance.LLMatcher(own, grammar)
        for place, token in enumerate(outputs[str(number)].token_ids):
            expected = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: VOCAB // 32]
            np.testing.assert_array_equal(masks[place], expected)
            assert expected[token // 32] >> token % 32 & 1
            assert matcher.consume_token(token)
            count += 1
    assert count > 100


@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        (Constraint("regex", "[A-Z]{2,3}-[0-9]+z"), lambda text: re.fullmatch("[A-Z]{2,3}-[0-9]+z", text)),
        (Constraint("choice", json.dumps(["yes", 'no "x"', "a\nb|c"])), ["yes", 'no "x"', "a\nb|c"].__contains__),
        (Constraint("grammar", 'start: "a" ("b" | "c")+ "d"'), lambda text: re.fullmatch("a[bc]+d", text)),
        (Constraint("grammar", 'root ::= "x" ("1" | "2")* "y"'), lambda text: re.fullmatch("x[12]*y", text)),
    ],
)
def test_a_text_is_of_its_pattern_choice_or_grammar(constraint: Constraint, is_right: Any) -> None:
    params = [SamplingParams(structured_outputs=constraint, seed=n, max_tokens=90) for n in range(12)]
    outputs = constrained_engine().generate([[5, 6, 7]] * 12, params)
    whole = [output.text for output in outputs if output.finish_reason == "stop"]
    assert len(whole) >= 6
    assert [text for text in whole if not is_right(text)] == []


def test_a_prefix_found_in_the_cache_and_a_stop_change_nothing() -> None:
    engine, prompt = constrained_engine(), random_tokens(40)[0]
    params = requests(1)[0]
    first, again = (engine.generate([prompt], params)[0] for _ in range(2))
    assert (again.token_ids, again.num_cached_tokens) == (first.token_ids, 36)
    cut = engine.generate([prompt], requests(1, stop=('"x',))[0])[0]
    assert (cut.text, cut.finish_reason) == (first.text.partition('"x')[0], "stop")


def test_log_probabilities_are_of_what_the_grammar_allows() -> None:
    """As in vLLM, where the grammar's mask comes before them and the other masks after."""
    engine = constrained_engine()
    choice = Constraint("choice", '["yes", "no"]')
    row = engine.generate([[5, 6]], greedy(1, structured_outputs=choice, ignore_eos=False, logprobs=VOCAB))[0].logprobs
    free = engine.generate([[5, 6]], greedy(1, logprobs=VOCAB, allowed_token_ids=[3]))[0].logprobs
    assert row is not None
    assert free is not None
    values = dict(free[0].top)
    first = [number for number in range(VOCAB) if small_tokenizer().decode([number]) in ("y", "n", "no")]
    total = torch.tensor([values[token] for token in first]).logsumexp(0).item()
    assert {token: value for token, value in row[0].top if value > -1e9} == pytest.approx(
        {token: values[token] - total for token in first}, abs=1e-4
    )
    assert free[0].chosen == pytest.approx(values[3], abs=1e-4)  # of all tokens


# --- refusals


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("json", "{"), "json: Expecting property name"),
        (schema({"type": "foo"}), "json: Invalid type: foo"),
        (schema({"type": "array", "uniqueItems": True}), 'json: Unimplemented keys: ["uniqueItems"]'),
        (schema(False), "json: "),
        (schema({"$ref": "#/nowhere"}), "json: "),
        (Constraint("json", "[" * 100_000), "json: "),
        (Constraint("json", json.dumps({"enum": [1]}).replace("1", "[" * 90 + "]" * 90)), "at most 64 levels"),
        (Constraint("regex", "("), "regex: "),
        (Constraint("grammar", "start: ("), "grammar: "),
        (Constraint("choice", "[]"), "choice: must be a list of at least one text"),
        (Constraint("choice", "[1]"), "choice: must be a list of at least one text"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(constraint: Constraint, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        constrained_engine().add_request([5], SamplingParams(structured_outputs=constraint))
    text = str(caught.value)
    assert text.startswith("structured_outputs: ")
    assert words in text
    assert "\n" not in text
    assert len(text) < 300


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EnvironmentProblem, match=r"structured_outputs needs llguidance.*'\.\[structured\]'"):
        constrained_engine().add_request([5], requests(1)[0])


def test_what_a_grammar_needs_is_named() -> None:
    engine = engine_for("llama")
    with pytest.raises(UsageError, match=r"needs a tokenizer\.json"):
        engine.add_request([5], requests(1)[0])
    other = constrained_engine()
    other.eos_token_ids = frozenset()
    with pytest.raises(UsageError, match="eos_token_id"):
        other.add_request([5], requests(1)[0])


def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, match = constrained_engine(), TokenMask._match

    def failing(mask: TokenMask, matcher: Any, output: list[int], row: Bits) -> None:
        match(mask, matcher, output, row)
        mask.error = "too complex" if len(output) == 2 else None

    monkeypatch.setattr(TokenMask, "_match", failing)
    bad, good = engine.generate([[5, 6, 7]] * 2, [requests(1)[0], greedy(6)])
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "cannot be constrained any further: too complex" in str(bad.error)


# --- tokens and words


def test_masks_are_vllms() -> None:
    for row in FACTS["masks"]:
        seq = Sequence("r", [9, *row["output"]], 20)
        seq.num_prompt_tokens, seq.num_placeholders = 1, 1
        stops = bits_of(row["stops"], 16) if row["min_tokens"] else None
        allowed = None if row["allowed"] is None else bits_of(row["allowed"], 16)
        bits, others = bits_of(range(16), 16), bits_of(range(16), 16)
        TokenMask(row["min_tokens"], allowed, stops, tuple(map(tuple, row["bad"]))).write(seq, bits, others)
        np.testing.assert_array_equal(bits, bits_of(row["left"], 16), err_msg=str(row))


def test_bad_words_have_vllms_tokens() -> None:
    for row in FACTS["words"]:
        assert bad_words(row["bad_words"], small_tokenizer(), VOCAB) == [tuple(ids) for ids in row["token_ids"]]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return constrained_engine(async_scheduling=request.param)


def test_nothing_ends_an_output_before_min_tokens(engine: Engine) -> None:
    free = engine.generate([[5, 6, 7]], greedy(12))[0]
    stop = free.token_ids[3]
    output = engine.generate([[5, 6, 7]], greedy(12, min_tokens=9, stop_token_ids=(stop,)))[0]
    assert len(output.token_ids) > 9
    assert stop not in output.token_ids[:9]
    output = engine.generate([[5, 6, 7]], greedy(12, min_tokens=9, stop=free.text[1:3]))[0]
    assert output.token_ids[:9] == free.token_ids[:9]
    forced = {END: 100.0}
    late = engine.generate([[5, 6, 7]], SamplingParams(min_tokens=7, max_tokens=20, logit_bias=forced))[0]
    assert (len(late.token_ids), late.finish_reason) == (8, "stop")  # it ends at once, once it may


def test_min_tokens_yield_to_a_grammar_that_has_ended(engine: Engine) -> None:
    choice = Constraint("choice", '["no"]')
    output = engine.generate([[5]], SamplingParams(min_tokens=9, max_tokens=20, structured_outputs=choice))[0]
    assert (output.text, output.finish_reason) == ("no", "stop")  # as vLLM restores its end token


def test_bad_words_never_come_whole(engine: Engine) -> None:
    free = engine.generate([[5, 6, 7]], greedy(16))[0].token_ids
    word = small_tokenizer().decode(free[4:6])
    ids = bad_words((word,), small_tokenizer(), VOCAB)[0]
    bound = engine.generate([[5, 6, 7]], greedy(16, bad_words=(word,)))[0].token_ids
    assert bound != free
    assert ids not in [tuple(bound[i : i + len(ids)]) for i in range(16)]
    single = small_tokenizer().decode(free[:1])
    assert free[0] not in engine.generate([[5, 6, 7]], greedy(16, bad_words=(single,)))[0].token_ids


def test_only_allowed_tokens_come_beside_others_that_are_free(engine: Engine) -> None:
    few = SamplingParams(allowed_token_ids=(70, 90, 91), seed=1, temperature=3, max_tokens=40, ignore_eos=True)
    params = [few, greedy(16)]
    bound, free = engine.generate([[5, 6, 7]] * 2, params)
    assert {90, 91} <= set(bound.token_ids) <= {70, 90, 91}
    assert free.token_ids == engine.generate([[5, 6, 7]], greedy(16))[0].token_ids


def test_special_tokens_show_if_that_is_asked(engine: Engine) -> None:
    params = {"allowed_token_ids": (0, 70), "logit_bias": {0: 2.0}}
    plain, whole = (
        engine.generate([[5]], greedy(6, skip_special_tokens=skips, **params))[0] for skips in (True, False)
    )
    assert whole.text == small_tokenizer().decode(whole.token_ids, skip_special_tokens=False)
    assert plain.text == whole.text.replace("<unk>", "")
    assert "<unk>" in whole.text


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens, 16"),
        ({"min_tokens": -1}, "min_tokens must be a whole number"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must be None, or at least one"),
        ({"allowed_token_ids": (999,)}, "allowed_token_ids: 999 is not a token"),
        ({"bad_words": ("",)}, "bad_words must be texts that are not empty"),
        ({"bad_words": (" ",)}, "bad_words: ' ' has no tokens"),
        ({"bad_words": tuple(f"{n}" for n in range(200))}, "at most 128"),
        ({"bad_words": ("a",), "allowed_token_ids": (71,)}, "leave no token"),
        ({"structured_outputs": "json"}, "structured_outputs must be a Constraint"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False"),
    ],
)
def test_parameters_that_cannot_be_are_refused(engine: Engine, params: dict[str, Any], words: str) -> None:
    with pytest.raises((SettingError, KvplanError), match=re.escape(words)):
        engine.add_request([5], SamplingParams(**params))
