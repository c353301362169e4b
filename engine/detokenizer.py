"""Text from tokens, one at a time, through the model's own tokenizer."""

from collections import abc
from typing import Any

FEWEST_CONTEXT_TOKENS, MOST_CONTEXT_TOKENS = 4, 24
REPLACEMENT = "\ufffd"  # stands for bytes that are not, or not yet, a letter


class Detokenizer:
    """The text of a request's output, token by token.

    Tokenizers with a mark for spaces (Metaspace: Llama 2, Mistral) drop the space of the first word they decode, and
    that must be a word of the prompt: the stream begins with the prompt's last tokens, as vLLM's does.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: abc.Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        """tokenizer: a tokenizers.Tokenizer."""
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._token_ids = list(prompt_token_ids[-MOST_CONTEXT_TOKENS:])
        self._num_read = len(self._token_ids)  # tokens whose text is out; the rest may begin a letter
        self._stream = self._new_stream()

    def step(self, token_id: int) -> str:
        """The text that a token completes; "" while a character is incomplete."""
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # the library's own: with byte fallback, a stray byte changes how letters before it read
            del self._token_ids[self._num_read :]
            self._stream = self._new_stream()
            text = self._stream.step(self._tokenizer, token_id) or ""
        self._token_ids.append(token_id)
        if text:
            self._num_read = len(self._token_ids)
        return text

    def flush(self) -> str:
        """An incomplete last character, as replacement characters; "" if there is none."""
        new_ids = self._token_ids[self._num_read :]
        if not new_ids:
            return ""
        context = self._context()
        self._num_read = len(self._token_ids)
        return self._decode([*context, *new_ids])[len(self._decode(context)) :]

    def _new_stream(self) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=self._context(), skip_special_tokens=self._skips)

    def _context(self) -> list[int]:
        """The last few tokens read that together are whole letters; none where there are no such."""
        read = self._token_ids[: self._num_read]
        for length in range(FEWEST_CONTEXT_TOKENS, MOST_CONTEXT_TOKENS + 1):
            context = read[-length:]
            if REPLACEMENT not in self._decode(context):
                return context
        return []

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)
        return text
