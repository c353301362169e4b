"""Paths of a simulated pooling model: vectors that depend on a prompt's tokens alone, and their cosines.

A prompt takes the time of its prefill, and no token is generated. Formats as in vLLM 0.33.
"""

import base64
import hashlib
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from kvplan.serve.answers import Choice
from kvplan.serve.fields import COMMON, ApiError, Field

SHARED: Final = {
    name: COMMON[name] for name in ("model", "priority", "cache_salt", "truncate_prompt_tokens", "truncation_side")
} | {name: Field("any", ignored=True) for name in ("user", "request_id", "use_activation", "add_special_tokens")}
EMBEDDING: Final = {
    "input": Field("any"),
    "messages": Field("any"),
    "encoding_format": Field("string", "float"),
    "dimensions": Field("integer", minimum=1),
    "task": Field("string"),
    "add_generation_prompt": Field("boolean", False),
    "chat_template_kwargs": Field("object"),
    **SHARED,
}
PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
SCORE: Final = {name: Field("any") for pair in PAIRS for name in pair} | SHARED


def vector(prompt: Sequence[int], size: int) -> list[float]:
    """Return a unit vector that depends on the token ids alone."""
    source = Random(hashlib.sha256(repr(list(prompt)).encode()).digest())
    values = [source.gauss(0, 1) for _ in range(size)]
    norm = math.sqrt(math.fsum(value * value for value in values))
    return [value / norm for value in values]


def paired(values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the texts of /score, the first of each pair and the second: one against all, or two by two."""
    left, right = next((pair for pair in PAIRS if all(values[name] is not None for name in pair)), PAIRS[0])
    first, second = ([text] if isinstance(text, str) else text for text in (values[left], values[right]))
    for texts in (first, second):
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ApiError(f"{left} and {right} must be a text or a list of texts", param=left)
    if len(first) not in (1, len(second)):
        raise ApiError("Input lengths must be either 1:1, 1:N or N:N", param=left)
    return first, second


@dataclass(slots=True)
class VectorShape:
    """Responses of /v1/embeddings and /pooling, or of /score for pairs of prompts.

    key        "embedding", "data" or "score"
    num_first  of scores: how many prompts are the first ones of pairs; 1: it is compared with all others
    """

    prompts: list[list[int]]
    size: int
    key: str
    encoding: str = "float"
    num_first: int = 0
    prefix: str = "embd"

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        return {"object": "list", "created": int(time.time()), "model": model}

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        vectors = [vector(prompt, self.size) for prompt in self.prompts]
        values = self._scores(vectors) if self.num_first else [self._encoded(own) for own in vectors]
        kind = "pooling" if self.key == "data" else self.key
        rows = [{"index": index, "object": kind, self.key: value} for index, value in enumerate(values)]
        count = sum(map(len, self.prompts))
        return {**head, "data": rows, "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}}

    def _scores(self, vectors: list[list[float]]) -> list[Any]:
        first, second = vectors[: self.num_first], vectors[self.num_first :]
        pairs = zip(first * (len(second) // len(first)), second, strict=True)
        return [math.fsum(a * b for a, b in zip(left, right, strict=True)) for left, right in pairs]

    def _encoded(self, values: list[float]) -> list[float] | str:
        if self.encoding == "float":
            return values
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
