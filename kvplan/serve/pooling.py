"""Paths of a simulated pooling model: embeddings, scores and ranks of vectors that only depend on a prompt's tokens.

A prompt takes the time of its prefill, and no token is generated. Formats as in vLLM 0.33.
"""

import base64
import hashlib
import math
import struct
import time
import uuid
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
RERANK: Final = {
    "query": Field("string", required=True),
    "documents": Field("any", required=True),
    "top_n": Field("integer", 0, minimum=0),
    **SHARED,
}


def vector(prompt: Sequence[int], size: int) -> list[float]:
    """Return a unit vector that depends on the token ids alone."""
    source = Random(hashlib.sha256(repr(list(prompt)).encode()).digest())
    values = [source.gauss(0, 1) for _ in range(size)]
    norm = math.sqrt(math.fsum(value * value for value in values))
    return [value / norm for value in values]


def texts(value: Any, param: str) -> list[str]:
    """Return one text or several as a list; raise ApiError for anything else."""
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list) or not several or not all(isinstance(text, str) for text in several):
        raise ApiError(f"{param} must be a text or a list of texts", param=param)
    return several


def paired(values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the texts of /score, the first of each pair and the second: one against all, or two by two."""
    for left, right in PAIRS:
        if values[left] is not None and values[right] is not None:
            first, second = texts(values[left], left), texts(values[right], right)
            if len(first) not in (1, len(second)):
                raise ApiError("Input lengths must be either 1:1, 1:N or N:N", param=left)
            return first, second
    raise ApiError("score needs text_1 and text_2, or queries and documents", param="text_1")


@dataclass(slots=True)
class VectorShape:
    """Responses of /v1/embeddings and /pooling."""

    prompts: list[list[int]]
    size: int
    encoding: str
    kind: str  # "embedding" or "pooling"
    prefix: str = "embd"

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        return {"object": "list", "created": int(time.time()), "model": model}

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        key = "embedding" if self.kind == "embedding" else "data"
        rows = [
            {"index": index, "object": self.kind, key: self._encoded(vector(prompt, self.size))}
            for index, prompt in enumerate(self.prompts)
        ]
        return {**head, "data": rows, "usage": pooling_usage(self.prompts)}

    def _encoded(self, values: list[float]) -> list[float] | str:
        if self.encoding == "float":
            return values
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


@dataclass(slots=True)
class ScoreShape:
    """Responses of /score and /rerank: cosines of the vectors of texts, two by two.

    documents  None: scores; else the texts to rank, of which the first top_n are returned
    """

    prompts: list[list[int]]  # the first texts, then the second ones
    num_first: int  # 1: it is compared with all others
    size: int
    documents: list[str] | None = None
    top_n: int = 0
    prefix: str = "score"

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        return {"object": "list", "created": int(time.time()), "model": model}

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        vectors = [vector(prompt, self.size) for prompt in self.prompts]
        first, second = vectors[: self.num_first], vectors[self.num_first :]
        scores = [
            math.fsum(a * b for a, b in zip(left, right, strict=True))
            for left, right in zip(first * (len(second) // len(first)), second, strict=True)
        ]
        used = pooling_usage(self.prompts)
        if self.documents is None:
            rows = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            return {**head, "data": rows, "usage": used}
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n or None]
        results = [
            {"index": index, "document": {"text": self.documents[index]}, "relevance_score": scores[index]}
            for index in order
        ]
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": head["model"], "usage": used, "results": results}


def pooling_usage(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    count = sum(map(len, prompts))
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
