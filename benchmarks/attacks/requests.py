"""Random requests to a running server: valid ones, mutated ones, broken bytes and clients that leave.

    kvplan serve smollm2-135m --simulate l40s --ctx 2k --speed 100 --port 8001
    python -m benchmarks.attacks.requests 8001 [--count 2000] [--seed 5] [--vocab 40000]

Prints tried, refused (a status of 4xx with an error in OpenAI's form) and broke: a status of 5xx, a body that is not
JSON, or a connection that fails. Exit codes: 0 nothing broke, 1 something did.
"""

import argparse
import http.client
import json
import random
import socket
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.attacks.outcomes import Tally

TEXTS = (
    "", " ", "Hello world", "\n", "日本", "\U0001f600", "\x00", "<|im_start|>", "x" * 300, "{{ 7*7 }}",
    "\u202e", "\ufeff",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 1e300, 10**30, "", "a", [], [1], {}, {"a": 1}, [[1]], [None], 2**31,
    2**63, 1e-300,
)  # fmt: skip
SETTINGS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.5, 2), "top_p": (0.1, 1), "top_k": (-1, 5), "min_p": (0, 1), "seed": (0, 2**62), "n": (1, 3),
    "stop": (None, "a", ["a", "\n"]), "presence_penalty": (-2, 2), "repetition_penalty": (0.5, 2), "min_tokens": (0, 1),
    "ignore_eos": (True, False), "logit_bias": ({}, {"5": 100}), "stop_token_ids": ([], [1, 2]),
}  # fmt: skip
OTHER_KEYS = (
    "unknown", "suffix", "best_of", "user", "cache_salt", "priority", "tools", "response_format", "messages", "prompt",
    "model", "stream", "stream_options", "max_tokens",
)  # fmt: skip
VOCAB = 40_000
PATHS = ("/tokenize", "/detokenize", "/v1/models", "/nowhere")


def valid(rng: random.Random, vocab: int) -> tuple[str, dict[str, Any]]:
    """A path, and a body that the API documents."""
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 16))}
    body |= {name: rng.choice(values) for name, values in SETTINGS.items() if rng.random() < 0.2}
    if rng.random() < 0.4:
        roles = ("user", "system", "assistant")
        messages = [{"role": rng.choice(roles), "content": rng.choice(TEXTS)} for _ in range(rng.randint(1, 4))]
        return "/v1/chat/completions", body | {"messages": messages}
    prompt: Any = rng.choice((rng.choice(TEXTS), [rng.randrange(vocab) for _ in range(50)], [[1, 2], [3]]))
    return "/v1/completions", body | {"prompt": prompt}


def drawn(rng: random.Random, vocab: int) -> tuple[str, str, bytes]:
    """(kind, path, body) of one request."""
    kind, (path, body) = "valid", valid(rng, vocab)
    if rng.random() < 0.4:
        kind = "mutated"
        for _ in range(rng.randint(1, 3)):
            body[rng.choice((*body, *OTHER_KEYS))] = rng.choice(VALUES)
    data = json.dumps(body).encode()
    if rng.random() < 0.05:
        place = rng.randrange(len(data))
        kind, data = "bytes", data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    if rng.random() < 0.05:
        path = rng.choice(PATHS)
    return ("left" if rng.random() < 0.05 else kind), path, data


def fault(port: int, path: str, data: bytes) -> tuple[bool, str | None]:
    """(whether it was refused, what broke) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    try:
        connection.request("POST", path, data)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return False, repr(error)
    finally:
        connection.close()
    if answer.status >= 500:
        return False, f"status {answer.status}: {content[:200]!r}"
    if "event-stream" in (answer.getheader("content-type") or ""):
        events = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: ") and b"[DONE]" not in line]
    else:
        events = [content]
    try:
        documents = [json.loads(event) for event in events]
    except ValueError:
        return False, f"status {answer.status}, not JSON: {content[:200]!r}"
    is_refused = answer.status >= 400
    if is_refused and path not in PATHS and "error" not in documents[0]:
        return False, f"status {answer.status} without an error: {content[:200]!r}"
    return is_refused, None


def leave(port: int, path: str, data: bytes) -> str | None:
    """Send a request, and close the connection before the answer; what broke."""
    head = b"POST %s HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data))
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head + data)
    except OSError as error:
        return repr(error)
    return None


def attack(port: int, count: int, seed: int, vocab: int = VOCAB) -> Tally:
    """The same requests for the same seed; vocab: how many tokens the model knows."""
    rng, tally = random.Random(seed), Tally()
    for number in range(count):
        kind, path, data = drawn(rng, vocab)
        tally.counts[kind] += 1
        is_refused, problem = (False, leave(port, path, data)) if kind == "left" else fault(port, path, data)
        tally.counts["refused"] += is_refused
        if problem is not None:
            tally.broken.append(f"request {number}, {kind}, {path}: {problem}; {data[:300]!r}")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    options = parser.parse_args(argv)
    return attack(options.port, options.count, options.seed, options.vocab).closing()


if __name__ == "__main__":
    sys.exit(main())
