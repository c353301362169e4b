"""Load generator for an OpenAI-compatible server; the client times each token, as `vllm bench serve` does.

Imports httpx2; only `kvplan profile --server` does.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import httpx2

from kvplan.core.errors import EnvironmentProblem
from kvplan.core.files import printable
from kvplan.measure.bench_results import OWN
from kvplan.workloads.planned import PlannedRequest

TOKEN_IDS: Final = range(1_000, 20_000)  # of prompts: above the special tokens in most vocabularies
LEAST_IDS: Final = 1_000  # below this, no range: use the ids that a sample text has
# Many scripts, so that some of a vocabulary's higher ids are among these.
TEXT: Final = (
    "The quick brown fox jumps over 13 lazy dogs; pack my box with five dozen liquor jugs! Unconstitutionality, "
    "thermodynamics, Kubernetes, heteroscedasticity. def f(x): return x**2 # noqa\n\u00dcbergr\u00f6\u00dfe, "
    "ma\u00f1ana, \u0437\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439\u0442\u0435, "
    "\u4f60\u597d\uff0c\u4e16\u754c, \u3053\u3093\u306b\u3061\u306f, \uc548\ub155\ud558\uc138\uc694"
)
MAX_LINE_CHARS: Final = 1 << 20
PERCENTILES: Final = (50, 90, 99)


@dataclass(slots=True)
class Timed:
    """Result of one request; times in seconds.

    start_s        when it was sent, since the start of the run
    ttft_s         time to the first chunk, or None if there was none
    gaps_s         times between consecutive chunks
    output_tokens  as the server counts them; the number of chunks if it does not
    """

    prompt_tokens: int
    start_s: float = 0.0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str = ""

    @property
    def latency_s(self) -> float:
        return (self.ttft_s or 0.0) + sum(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, or None if there was only one."""
        return sum(self.gaps_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(slots=True)
class Driven:
    """A run of requests: those that have finished, and `seconds` until the last did.

    early  why not all were sent or waited for; empty if all were
    """

    model: str
    num_requests: int
    requests: list[Timed] = field(default_factory=list)
    seconds: float = 0.0
    early: str = ""

    @property
    def answered(self) -> list[Timed]:
        return [request for request in self.requests if not request.error and request.ttft_s is not None]

    @property
    def failed(self) -> list[Timed]:
        return [request for request in self.requests if request.error or request.ttft_s is None]

    def times(self) -> dict[str, list[float]]:
        """Seconds of all successful requests, by metric."""
        answered = self.answered
        return {
            "ttft": [request.ttft_s for request in answered if request.ttft_s is not None],
            "tpot": [tpot for request in answered if (tpot := request.tpot_s) is not None],
            "itl": [gap for request in answered for gap in request.gaps_s],
            "e2el": [request.latency_s for request in answered],
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Percentile by linear interpolation, as in numpy; a single value is returned as is."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def model_of(base: str) -> str:
    """Return the first model that a server lists. Raise EnvironmentProblem if it does not respond."""
    try:
        answer = httpx2.get(f"{base}/v1/models", headers=headers(), timeout=10)
        answer.raise_for_status()
        name = answer.json()["data"][0]["id"]
    except httpx2.HTTPStatusError as error:
        code = error.response.status_code
        remedy = "set OPENAI_API_KEY" if code in (401, 403) else "correct --server"
        raise EnvironmentProblem(f"{base}/v1/models", f"answers with HTTP {code}", remedy) from None
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError) as error:
        why = printable(str(error) or type(error).__name__, 200)
        remedy = "start the server, or correct --server"
        raise EnvironmentProblem(f"{base}/v1/models", f"names no model ({why})", remedy) from None
    return str(name)


def token_ids_of(base: str, model: str) -> Sequence[int]:
    """Token ids for prompts: as many as the server's tokenizer is known to have."""
    body = {"model": model, "prompt": TEXT, "add_special_tokens": False}
    try:
        answer = httpx2.post(f"{base}/tokenize", json=body, headers=headers(), timeout=10)
        answer.raise_for_status()
        ids = sorted({int(token) for token in answer.json()["tokens"]})
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError):
        return TOKEN_IDS  # a server without this endpoint
    if not ids or ids[-1] < TOKEN_IDS.start + LEAST_IDS:
        return ids or TOKEN_IDS
    return range(TOKEN_IDS.start, min(TOKEN_IDS.stop, ids[-1] + 1))


def headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def drive(
    driven: Driven,
    base: str,
    requests: Sequence[PlannedRequest],
    *,
    shared_prefix: int = 0,
    max_concurrency: int | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
    token_ids: Sequence[int] = TOKEN_IDS,
) -> None:
    """Send the requests when they are due, at most `max_concurrency` at once, and wait for all.

    Prompts are random token ids, the first `shared_prefix` of them common to all; every response has the requested
    length (`ignore_eos`). Finished requests are in `driven`, whatever interrupts the run; a request that fails is kept
    with its error. The run ends early if the server stops accepting connections or after `timeout_s`.
    """
    begin = time.monotonic()
    try:
        asyncio.run(_drive(driven, base, requests, shared_prefix, max_concurrency, seed, timeout_s, token_ids))
    finally:
        driven.seconds = time.monotonic() - begin


async def _drive(
    driven: Driven,
    base: str,
    requests: Sequence[PlannedRequest],
    shared_prefix: int,
    max_concurrency: int | None,
    seed: int,
    timeout_s: float | None,
    token_ids: Sequence[int],
) -> None:
    source = random.Random(seed)
    prefix = source.choices(token_ids, k=shared_prefix)
    slots = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    is_gone = asyncio.Event()
    async with httpx2.AsyncClient(headers=headers(), timeout=None, limits=limits) as client:
        begin = time.monotonic()

        async def ask(request: PlannedRequest, prompt: list[int]) -> None:
            await asyncio.sleep(max(0.0, begin + request.arrival_s - time.monotonic()))
            async with slots:
                timed = Timed(request.prompt_tokens, time.monotonic() - begin)
                body = {
                    "model": driven.model, "prompt": prompt, "max_tokens": request.output_tokens, "temperature": 0,
                    "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
                }  # fmt: skip
                try:
                    await _time(client, f"{base}/v1/completions", body, timed)
                except (httpx2.HTTPError, ValueError) as error:
                    timed.error = printable(str(error) or type(error).__name__, 300)
                    if isinstance(error, httpx2.ConnectError):
                        is_gone.set()
                driven.requests.append(timed)

        async def until_gone() -> None:
            while True:
                await is_gone.wait()
                is_gone.clear()
                try:
                    await client.get(f"{base}/health", timeout=5)  # a live server may refuse a burst
                except httpx2.TransportError:
                    break
            driven.early = "the server stopped answering"
            raise _Ended

        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                watch = group.create_task(until_gone())
                tasks = []
                for request in requests:
                    fresh = source.choices(token_ids, k=max(1, request.prompt_tokens - shared_prefix))
                    tasks.append(group.create_task(ask(request, (prefix + fresh)[-request.prompt_tokens :])))
                await asyncio.gather(*tasks)
                watch.cancel()
        except* _Ended:
            pass
        except* TimeoutError:
            driven.early = f"not done after {timeout_s:g} s (--timeout)"


class _Ended(Exception):
    """Cancels the requests that have not finished."""


async def _time(client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], timed: Timed) -> None:
    """Send one request and time each chunk of its response. Raise ValueError if the response is malformed."""
    sent = latest = time.monotonic()
    chunks = 0
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code != httpx2.codes.OK:
            raise ValueError(f"HTTP {answer.status_code}: {(await answer.aread())[:300].decode(errors='replace')}")
        async for data in _events(answer):
            if "error" in data:
                raise ValueError(f"{data['error']}")
            now = time.monotonic()
            if data.get("choices"):
                if timed.ttft_s is None:
                    timed.ttft_s = now - sent
                else:
                    timed.gaps_s.append(now - latest)
                latest, chunks = now, chunks + 1
            usage = data.get("usage")
            if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
                timed.output_tokens = usage["completion_tokens"]
    timed.output_tokens = timed.output_tokens or chunks
    if not chunks:
        raise ValueError("the response has no token")


async def _events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, until its [DONE]."""
    async for line in answer.aiter_lines():
        if len(line) > MAX_LINE_CHARS:
            raise ValueError("a line of the response is too long")
        text = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if text == "[DONE]":
            return
        if text:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("a part of the response is not an object")
            yield data


def bench_result(driven: Driven, *, rate: float | None, max_concurrency: int | None) -> dict[str, Any]:
    """Format the run as `vllm bench serve --save-result --save-detailed` does, for `reconcile --bench` and `calibrate`.

    Source: vLLM 0.33 benchmarks/serve.py. Milliseconds in the keys that end in _ms, else seconds.
    """
    answered = driven.answered
    prompts = sum(request.prompt_tokens for request in answered)
    outputs = sum(request.output_tokens for request in answered)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": OWN,
        "model_id": driven.model,
        "tokenizer_id": driven.model,
        "num_prompts": len(driven.requests),
        "request_rate": "inf" if rate is None else rate,
        "burstiness": 1.0,
        "max_concurrency": max_concurrency,
        "duration": driven.seconds,
        "completed": len(answered),
        "failed": len(driven.failed),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(answered) / driven.seconds,
        "output_throughput": outputs / driven.seconds,
        "total_token_throughput": (prompts + outputs) / driven.seconds,
        "input_lens": [request.prompt_tokens for request in driven.requests],
        "output_lens": [request.output_tokens for request in driven.requests],
        "ttfts": [request.ttft_s or 0.0 for request in driven.requests],
        "itls": [request.gaps_s for request in driven.requests],
        "start_times": [request.start_s for request in driven.requests],
        "errors": [request.error for request in driven.requests],
    }
    for metric, values in driven.times().items():
        if values:
            result |= {
                f"mean_{metric}_ms": 1000 * statistics.fmean(values),
                f"median_{metric}_ms": 1000 * statistics.median(values),
                f"std_{metric}_ms": 1000 * statistics.pstdev(values),
                **{f"p{percent}_{metric}_ms": 1000 * percentile(values, percent) for percent in PERCENTILES[1:]},
            }
    return result
