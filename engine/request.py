"""A request from prompt to output: parameters, generated text, stop strings, and the result."""

from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from engine.config import SamplingParams
from engine.detokenizer import Detokenizer
from engine.sequence import FinishReason, Sequence
from kvplan.core.errors import InvalidInputError, UsageError

if TYPE_CHECKING:  # a server's twin has requests too, and no torch
    from engine.masks import TokenMask
    from engine.sampler import TokenLogprobs


class IntArray(Protocol):
    """A numpy array or a torch tensor of integers."""

    def tolist(self) -> Any: ...


Prompt = str | abc.Sequence[SupportsIndex] | IntArray


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a request.

    token_ids          generated tokens; the stop token is kept, the text of a stop string is cut from `text`
    text               "" where the model has no tokenizer, or detokenize is False
    finish_reason      "length", "stop", "abort", "out_of_blocks" (`error` says how many were missing) or "error"
    num_cached_tokens  prompt tokens found in the prefix cache when the request was first admitted
    logprobs           one entry per token where they were asked for; prompt_logprobs alike
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    logprobs: "list[TokenLogprobs] | None" = None
    prompt_logprobs: "list[TokenLogprobs | None] | None" = None  # of the first token None: nothing comes before it
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """One new token of a request, for a streaming callback; `text` is the new printable text."""

    request_id: str
    token_id: int
    text: str


@dataclass(eq=False, slots=True)
class Request:
    """A sequence with its sampling parameters and output text."""

    seq: Sequence
    params: SamplingParams
    on_token: Callable[[TokenUpdate], None] | None = None
    tokenizer: Any = None  # tokenizers.Tokenizer
    num_cached_tokens: int = 0
    logprobs: "list[TokenLogprobs]" = field(default_factory=list)
    prompt_logprobs: "list[TokenLogprobs | None]" = field(default_factory=lambda: [None])
    text: str = ""
    stop_string: str | None = None  # the one that ended it
    num_received: int = 0  # of the sequence's output tokens
    mask: "TokenMask | None" = None
    _num_shown: int = 0
    _detokenizer: Detokenizer | None = None

    def receive(self, token_id: int, logprobs: "TokenLogprobs | None") -> bool:
        """Receive a sampled token; True if a stop string now occurs in the text."""
        self.num_received += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.tokenizer is None or not self.params.detokenize:
            return False
        before = len(self.text)
        self.text += self._decode(token_id)
        if self.has_ended:
            self._flush()
        if not self.params.stop or self.num_received <= self.params.min_tokens:
            return False
        match = first_stop(self.text, before, self.params.stop)
        if match is not None:
            self.stop_string, start = match
            self.text = self.text[: start + len(self.stop_string) * self.params.include_stop_str_in_output]
        return match is not None

    def receive_prompt(self, place: int, logprobs: "TokenLogprobs") -> None:
        """Receive what is known of a prompt token; a prompt that is computed again says nothing new."""
        if place == len(self.prompt_logprobs):
            self.prompt_logprobs.append(logprobs)

    @property
    def num_unreceived(self) -> int:
        """Tokens of the sequence that the request has not received yet."""
        return self.seq.num_output_tokens - self.num_received

    @property
    def has_ended(self) -> bool:
        """True if the last received token ends the request."""
        return self.seq.is_finished and self.num_unreceived <= 0

    def forget_unreceived(self) -> None:
        """Drop tokens that came after a stop string in the same step."""
        del self.seq.token_ids[self.seq.num_prompt_tokens + self.num_received :]

    def update(self, token_id: int) -> TokenUpdate:
        """The token just received with the new text, except for a possible beginning of a stop string."""
        keeps_all = not self.params.stop or self.params.include_stop_str_in_output or self.has_ended
        num_hidden = 0 if keeps_all else self._num_possible_stop_chars()
        start, self._num_shown = self._num_shown, max(self._num_shown, len(self.text) - num_hidden)
        return TokenUpdate(self.seq.request_id, token_id, self.text[start : self._num_shown])

    def _decode(self, token_id: int) -> str:
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(
                self.tokenizer,
                self.seq.token_ids[: self.seq.num_prompt_tokens],
                skip_special_tokens=self.params.skip_special_tokens,
            )
        return self._detokenizer.step(token_id)

    def _flush(self) -> None:
        """Add the text of tokens held back as an incomplete character."""
        if self._detokenizer is not None:
            self.text += self._detokenizer.flush()

    def _num_possible_stop_chars(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        starts = (stop[:n] for stop in self.params.stop for n in range(1, len(stop)))
        return max((len(start) for start in starts if self.text.endswith(start)), default=0)

    def output(self) -> RequestOutput:
        """The output of a finished request."""
        seq = self.seq
        assert seq.finish_reason is not None, "asked for the output of a request that runs"
        return RequestOutput(
            request_id=seq.request_id,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=seq.token_ids[seq.num_prompt_tokens :],
            text=self.text,
            finish_reason=seq.finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
            error=seq.error,
        )


def first_stop(text: str, num_old: int, stops: abc.Sequence[str]) -> tuple[str, int] | None:
    """The stop string that a text completes first after its num_old characters, and where that begins; of those that
    end together, the first in `stops`. As in vLLM 0.33 (v1/engine/detokenizer.py).
    """
    starts = [(text.find(stop, max(0, num_old + 1 - len(stop))), stop) for stop in stops]
    matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    if not matches:
        return None
    _, start, stop = min(matches, key=lambda match: match[0])
    return stop, start


# --- what a user asks for ---------------------------------------------------------------------------------------


def as_prompts(prompts: Prompt | abc.Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    plain = _plain(prompts)
    if not isinstance(plain, Iterable):
        raise UsageError(
            f"prompts: {type(plain).__name__} is neither a text nor a list; give texts or lists of token ids"
        )
    several = [_plain(prompt) for prompt in plain]
    is_one = bool(several) and not any(isinstance(prompt, str | abc.Sequence) for prompt in several)
    return [several] if is_one else several


def prompt_token_ids(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """A prompt's tokens; text goes through the model's tokenizer, with the special tokens it adds."""
    if not isinstance(prompt, str):
        tokens, cure = _plain(prompt), "tokenize with the model's own tokenizer"
    elif tokenizer is not None:
        tokens, cure = tokenizer.encode(prompt).ids, "its tokenizer.json belongs to another model: replace it"
    else:
        raise UsageError("prompt: a text prompt needs a tokenizer.json next to the model; give token ids")
    if not isinstance(tokens, abc.Sequence):
        raise InvalidInputError(f"prompt: {tokens!r:.60} is neither a text nor a list of tokens; give one of them")
    ids = [_plain(token) for token in tokens]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InvalidInputError(
                f"prompt: {token!r:.60} is not a token of the model (0 to {vocab_size - 1}); {cure}"
            )
    return ids


def _plain(value: Any) -> Any:
    """Arrays and their elements as Python's own lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def stop_token_ids(params: SamplingParams, eos_token_ids: frozenset[int], tokenizer: Any) -> frozenset[int]:
    """The tokens that end a request; among them special tokens named as stop strings, which no text ever shows."""
    ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    if not params.stop:
        return ids
    if tokenizer is None:
        raise UsageError("SamplingParams: stop strings need a tokenizer.json next to the model; use stop_token_ids")
    added = tokenizer.get_added_tokens_decoder().items()
    return ids | {token_id for token_id, token in added if token.special and token.content in params.stop}


def check_biases(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a bias of a token that the model does not have."""
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidInputError(
                f"logit_bias: {token} is not a token of the model (0 to {vocab_size - 1}); remove it"
            )


def check_options(request_id: str | None, priority: int, cache_salt: str | None, adapter: str | None) -> None:
    """Refuse values that would fail later, in a step shared with other requests."""
    for name, ok, value, need in (
        ("request_id", request_id is None or isinstance(request_id, str), request_id,
         "a text ({}); remove it for one made up"),
        ("priority", isinstance(priority, int) and not isinstance(priority, bool), priority,
         "a whole number ({}); smaller runs first"),
        ("cache_salt", cache_salt is None or isinstance(cache_salt, str), cache_salt,
         "a text ({}); remove it to share prefixes with all"),
        ("adapter", adapter is None or isinstance(adapter, str), adapter, "a name ({}); remove it for none"),
    ):  # fmt: skip
        if not ok:
            raise UsageError(f"add_request: {name} must be " + need.format(f"{value!r:.60}"))
