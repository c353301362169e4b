"""Which tokens a request may get next: its grammar, and the tokens and words that it allows, forbids or puts off.

Rules as in vLLM 0.33 (`sampling_params.py`, `v1/sample/ops/bad_words.py`, `v1/sample/logits_processor/builtin.py`,
`v1/structured_output/`). A mask is made from what its sequence's output is now, so that neither preemption nor a
token that is taken back has to be undone.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.config import Constraint, SamplingParams
from engine.sequence import Sequence
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = NDArray[np.uint32]  # [num_words(vocab_size)]: token t is bit t % 32 of word t // 32
MOST_KEPT = 64  # compiled grammars
MOST_BAD_WORDS = 128  # vLLM's, each with and without a space before it
MOST_NESTED = 64  # levels of a JSON Schema


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    """The tokens' bits."""
    flags = np.zeros(num_words(vocab_size) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


class Grammars:
    """Compiles constraints for one tokenizer, by llguidance, which is loaded with the first; for several threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """tokenizer: a tokenizers.Tokenizer, or None."""
        self._tokenizer, self.vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._own: LLTokenizer | None = None
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # the least recently used first
        self._lock = Lock()

    def matcher(self, constraint: Constraint) -> "LLMatcher":
        """A matcher at the beginning of an output; raises InvalidInputError for what cannot be compiled."""
        with self._lock:
            if self._own is None:
                self._own = self._make()
            matcher = self._kept.pop(constraint, None) or self._compiled(constraint, self._own)
            self._kept[constraint] = matcher
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            copy: LLMatcher = matcher.deep_copy()
            return copy

    def _make(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            problem = "needs llguidance, which is not installed"
            remedy = "run `pip install '.[structured]'` in kvplan's sources"
            raise EnvironmentProblem("structured_outputs", problem, remedy) from error
        if self._tokenizer is None:
            raise UsageError("structured_outputs: needs a tokenizer.json next to the model; add it")
        if not self._eos_token_ids:
            raise UsageError(
                "structured_outputs: the model's config has no eos_token_id, without which no output ends; "
                "add it to config.json"
            )
        size = max(self.vocab_size, self._tokenizer.get_vocab_size())
        return LLTokenizer(self._tokenizer.to_str(), n_vocab=size, eos_token=sorted(self._eos_token_ids))

    def _compiled(self, constraint: Constraint, tokenizer: "LLTokenizer") -> "LLMatcher":
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, grammar_of(constraint), log_level=0)
            problem = matcher.get_error()
        except (ValueError, TypeError, RecursionError) as error:
            problem = str(error)
        if problem:
            line = " ".join(problem.split())[:200]
            raise InvalidInputError("structured_outputs", f"{constraint.kind}: {line}", "fix or simplify it")
        return matcher


def grammar_of(constraint: Constraint) -> str:
    """A constraint in llguidance's form; raises ValueError for what has none."""
    from llguidance import LLMatcher, grammar_from

    match constraint.kind:
        case "json":
            schema = json.loads(constraint.text)
            if _is_deep(schema):
                raise ValueError(f"objects and arrays may nest at most {MOST_NESTED} levels")
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
        case "regex":
            grammar = LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            texts = json.loads(constraint.text)
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError("must be a list of at least one text")
            quoted = [json.dumps(text, ensure_ascii=False) for text in texts]
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
        case "grammar":
            grammar = grammar_from("grammar", constraint.text)
    return grammar


def _is_deep(schema: Any) -> bool:
    level = [schema]
    for _ in range(MOST_NESTED + 1):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [child for part in parts for child in part]
    return bool(level)


@dataclass(eq=False, slots=True)
class TokenMask:
    """A request's: which tokens may follow its output.

    allowed   what may ever come; None: all tokens
    stops     what ends it, and may not come before min_tokens
    words     bad words of several tokens
    matcher   of its grammar
    error     why the grammar can go no further, once it cannot
    """

    min_tokens: int = 0
    allowed: Bits | None = None
    stops: Bits | None = None
    words: tuple[tuple[int, ...], ...] = ()
    matcher: "LLMatcher | None" = None
    error: str | None = None
    _num_matched: int = field(default=0, init=False)  # output tokens that the matcher has consumed

    @classmethod
    def of(
        cls, params: SamplingParams, stops: frozenset[int], grammars: Grammars, tokenizer: Any
    ) -> "TokenMask | None":
        """The mask that a request's parameters ask for; raises where it cannot be made."""
        if not params.has_mask:
            return None
        size = grammars.vocab_size
        words, allowed = bad_words(params.bad_words, tokenizer, size), None
        if params.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", params.allowed_token_ids, size)
            allowed = bits_of(params.allowed_token_ids, size)
        singles = [word[0] for word in words if len(word) == 1]
        if singles:
            allowed = (bits_of(range(size), size) if allowed is None else allowed) & ~bits_of(singles, size)
        if allowed is not None and not allowed.any():
            raise UsageError("bad_words: leave no token of allowed_token_ids; allow more")
        return cls(
            params.min_tokens,
            allowed,
            bits_of((token for token in stops if 0 <= token < size), size) if params.min_tokens else None,
            tuple(word for word in words if len(word) > 1),
            None if params.structured_outputs is None else grammars.matcher(params.structured_outputs),
        )

    @property
    def needs_tokens(self) -> bool:
        """Whether it depends on what the output is, not on its length alone."""
        return self.matcher is not None or bool(self.words)

    def write(self, seq: Sequence, row: Bits, grammar_row: Bits) -> None:
        """Take from two rows, of all tokens, those that may not follow the output: from the second one only those that
        the grammar forbids."""
        output = seq.token_ids[seq.num_prompt_tokens :] if self.needs_tokens else ()
        if self.matcher is not None:
            self._match(self.matcher, output, grammar_row)
            row &= grammar_row
        if self.allowed is not None:
            row &= self.allowed
        for *start, last in self.words:
            if tuple(output[len(output) - len(start) :]) == tuple(start) and len(output) >= len(start):
                row[last // 32] &= ~np.uint32(1 << last % 32)
        if self.stops is not None and num_output_tokens(seq) < self.min_tokens:
            without = row & ~self.stops
            if without.any() or self.matcher is None:  # a grammar that has ended allows nothing else
                row[:] = without

    def _match(self, matcher: "LLMatcher", output: Several[int], row: Bits) -> None:
        """Bring the grammar up to the output, and write what it allows."""
        if len(output) > self._num_matched and not matcher.is_stopped():
            matcher.consume_tokens(list(output[self._num_matched :]))
        self._num_matched = len(output)
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        row &= mask[: len(row)]
        if matcher.is_error():
            self.error = " ".join(matcher.get_error().split())[:200]


def num_output_tokens(seq: Sequence) -> int:
    """Tokens of its output, one in flight included, when the next is sampled."""
    return seq.num_output_tokens + max(0, seq.num_placeholders - 1)


def bad_words(words: Several[str], tokenizer: Any, vocab_size: int) -> list[tuple[int, ...]]:
    """The words' tokens, at the beginning of a text and after a space, by vLLM's rule."""
    if not words:
        return []
    if tokenizer is None:
        raise UsageError("bad_words: needs a tokenizer.json next to the model; use logit_bias")
    sequences: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        plain, spaced = (tuple(tokenizer.encode(s + word.lstrip(), add_special_tokens=False).ids) for s in ("", " "))
        if not plain:
            raise InvalidInputError("bad_words", f"{word!r:.60} has no tokens", "remove it")
        sequences.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    if len(sequences) > MOST_BAD_WORDS:
        raise UsageError(f"bad_words: {len(sequences)} with and without a space before; at most {MOST_BAD_WORDS}")
    _check_ids("bad_words", (token for word in sequences for token in word), vocab_size)
    return sequences


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidInputError(f"{name}: {token} is not a token of the model (0 to {vocab_size - 1}); remove it")
