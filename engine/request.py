"""A request from its prompt to its output: parameters, text as it grows, stop strings, what the user gets back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.config import SamplingParams
from engine.sampler import TokenLogprobs
from engine.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of a request.

    token_ids          generated tokens; the stop token is kept, the text of a stop string is cut from `text`
    text               "" where the model has no tokenizer
    finish_reason      "length", "stop", "abort", "out_of_blocks" (`error` says how many were missing) or "error"
    num_cached_tokens  prompt tokens found in the prefix cache when the request was first admitted
    logprobs           one entry per token where they were asked for
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """One new token of a request, as a streaming callback sees it; `text` is what can be shown since the last one."""

    request_id: str
    token_id: int
    text: str


@dataclass(eq=False, slots=True)
class Request:
    """A sequence and what its user wants of it."""

    seq: Sequence
    params: SamplingParams
    on_token: Callable[[TokenUpdate], None] | None = None
    tokenizer: Any = None  # tokenizers.Tokenizer
    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    _num_shown: int = 0
    _stream: Any = None

    def receive(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take in a sampled token; True when a stop string has ended the request."""
        if logprobs is not None:
            self.logprobs.append(logprobs)
        is_stopped = self._extend_text(token_id)
        if self.on_token is not None:
            # What may yet become a stop string is held back.
            held = 0 if is_stopped or self.seq.is_finished else self._num_possible_stop_chars()
            end = max(self._num_shown, len(self.text) - held)
            self.on_token(TokenUpdate(self.seq.request_id, token_id, self.text[self._num_shown : end]))
            self._num_shown = end
        return is_stopped

    def _extend_text(self, token_id: int) -> bool:
        if self.tokenizer is None:
            return False
        if self._stream is None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)
        before = len(self.text)
        self.text += self._stream.step(self.tokenizer, token_id) or ""
        if not self.params.stop:
            return False
        since = max(0, before - max(map(len, self.params.stop)))
        found = [at for at in (self.text.find(stop, since) for stop in self.params.stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _num_possible_stop_chars(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        starts = (stop[:n] for stop in self.params.stop for n in range(1, len(stop)))
        return max((len(start) for start in starts if self.text.endswith(start)), default=0)

    def output(self) -> RequestOutput:
        seq = self.seq
        assert seq.finish_reason is not None, "asked for the output of a request that runs"
        return RequestOutput(
            request_id=seq.request_id,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=seq.token_ids[seq.num_prompt_tokens :],
            text=self.text,
            finish_reason=seq.finish_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            error=seq.error,
        )
