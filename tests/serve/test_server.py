"""The server's face over the twin: OpenAI's shapes, its errors, its limits, and what a client that leaves gives."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
from starlette.datastructures import URL
from starlette.requests import Request as HttpRequest

from engine.config import SamplingParams
from engine.request import Request
from engine.sequence import Sequence
from kvplan.serve.app import Api
from kvplan.serve.backend import BackendLostError
from kvplan.serve.bodies import SMALL, parsed
from kvplan.serve.chat import ChatTemplate
from kvplan.serve.fields import ApiError
from kvplan.serve.generation import Limits
from kvplan.serve.intake import MOST_LARGE
from kvplan.serve.run import listen, serve
from kvplan.serve.worker import Hooks, Worker, stop_reason
from tests.support.serving import MODEL, WAIT_S, Gate, Serving, api_of, serving, tokenizer, twin

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(twin()) as running:
        yield running


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_a_completion(server: Serving) -> None:
    answer = server.post(TEXT, prompt="Hello world", max_tokens=5)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert choice["finish_reason"] == "length"
    assert len(tokenizer().encode(choice["text"]).ids) == 5
    num_prompt = len(tokenizer().encode("Hello world").ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_ends_where_the_answer_does(server: Serving) -> None:
    answer = server.post(CHAT, messages=HELLO)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_says_what_the_whole_answer_says(server: Serving, path: str) -> None:
    body: dict[str, Any] = {"prompt": [3, 4, 5]} if path == TEXT else {"messages": HELLO}
    body |= {"max_tokens": 9, "n": 2, "seed": 3}
    whole = server.post(path, **body)
    events = server.stream(path, **body, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert len({event["id"] for event in events}) == 1
    assert all(event["usage"] is None for event in events[:-1])
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        if path == CHAT:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(part["delta"]["content"] for part in parts)
            assert text == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


# What vLLM 0.33's own CompletionStreamResponse writes of a choice (model_dump_json(exclude_unset=True), as its server
# calls it); beside these only prompt_token_ids, token_ids and weight_versions, which nobody can ask of this server.
VLLMS_CHUNK = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None}


def test_chunks_of_a_text_say_null_until_the_end_as_vllms_do(server: Serving) -> None:
    parts = [event["choices"][0] for event in server.stream(TEXT, prompt=[9], max_tokens=3)]
    assert [{**part, "text": "a"} for part in parts[:-1]] == [VLLMS_CHUNK] * 2
    assert {**parts[-1], "text": "a"} == {**VLLMS_CHUNK, "finish_reason": "length"}


def test_several_prompts_have_their_answers_in_order(server: Serving) -> None:
    prompts = ["one", [7, 8], "three"]
    answer = server.post(TEXT, prompt=prompts, max_tokens=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = server.post(TEXT, prompt=prompt, max_tokens=4)
        assert answer["choices"][2 * number]["text"] == alone["choices"][0]["text"]


def test_stop_strings_are_cut_off(server: Serving) -> None:
    text = server.post(TEXT, prompt=[9], max_tokens=20)["choices"][0]["text"]
    stop = text[6:9]
    choice = server.post(TEXT, prompt=[9], max_tokens=20, stop=stop)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


END, SECOND, WORD = 2, 3, 7


@pytest.mark.parametrize(
    ("token", "stated", "stop_token_ids", "ignore_eos", "reason"),
    [  # vLLM 0.33: check_stop and update_from_generation_config; END is its tokenizer's eos_token_id
        (END, END, (), False, None),
        (END, END, (END,), False, None),
        (END, END, (END,), True, END),
        (SECOND, END, (), False, SECOND),  # of generation_config.json's eos_token_id: [2, 3]
        (WORD, END, (WORD,), False, WORD),
        (WORD, None, (WORD,), False, WORD),
        (END, None, (), False, None),  # no tokenizer states an end token
    ],
)
def test_an_end_token_is_no_stop_reason(
    token: int, stated: int | None, stop_token_ids: tuple[int, ...], ignore_eos: bool, reason: int | None
) -> None:
    params = SamplingParams(stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    request = Request(Sequence("a", [1, token], 9), params)
    assert stop_reason(request, stated) == reason


def test_log_probabilities(server: Serving) -> None:
    rows = server.post(TEXT, prompt=[9], max_tokens=3, logprobs=1)["choices"][0]
    assert "".join(rows["logprobs"]["tokens"]) == rows["text"]
    assert rows["logprobs"]["token_logprobs"] == [0.0] * 3
    offsets = [sum(map(len, rows["logprobs"]["tokens"][:i])) for i in range(3)]
    assert rows["logprobs"]["text_offset"] == offsets
    chat = server.post(CHAT, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=1)["choices"][0]
    content = chat["logprobs"]["content"]
    assert "".join(row["token"] for row in content) == chat["message"]["content"]
    assert [bytes(row["bytes"]).decode() for row in content] == [row["token"] for row in content]


def test_the_same_prefix_is_found_again(server: Serving) -> None:
    prompt = list(range(2000, 2100))
    server.post(TEXT, prompt=prompt, max_tokens=1)
    usage = server.post(TEXT, prompt=prompt, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 96}  # whole blocks of 16 before the last token
    salted = server.post(TEXT, prompt=prompt, max_tokens=1, cache_salt="mine")["usage"]
    assert salted["prompt_tokens_details"] == {"cached_tokens": 0}


def test_text_and_tokens(server: Serving) -> None:
    text = "Hello, wörld 日本 \n 123"
    tokens = server.post("/tokenize", prompt=text, return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 8192
    assert server.post("/detokenize", tokens=tokens["tokens"]) == {"prompt": text}
    chat = server.post("/tokenize", messages=HELLO)
    assert server.post("/detokenize", tokens=chat["tokens"])["prompt"].endswith("<|im_start|>assistant\n")


def test_what_the_server_says_of_itself(server: Serving) -> None:
    (model,) = server.get("/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 8192)
    assert server.get(f"/v1/models/{MODEL}") == model
    assert server.ask("GET", "/health") == (200, b"")
    assert server.get("/version") == {"version": "0"}
    assert set(server.get("/openapi.json")["paths"]) >= {TEXT, CHAT}


BAD: list[tuple[str, Any, int, str | None]] = [
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, 400, "prompt"),
    (TEXT, {"prompt": [True]}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, None),
    (TEXT, {"prompt": [10**9]}, 400, None),
    (TEXT, {"prompt": "\ud800"}, 400, "prompt"),
    (TEXT, {"prompt": [1] * 8192}, 400, "prompt"),
    (TEXT, {"prompt": [1] * 8190, "max_tokens": 3}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"prompt": "a", "n": 129}, 400, "n"),
    (TEXT, {"prompt": ["a"] * 100, "n": 100}, 400, "n"),
    (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop"),
    (TEXT, {"prompt": "a", "seed": 2**63}, 400, "seed"),
    (TEXT, {"prompt": "a", "stop_token_ids": ["x"]}, 400, "stop_token_ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 100.5}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"-5": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"05": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": None}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": [5]}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {str(token): 1 for token in range(1025)}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": -101}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options"),
    (TEXT, {"prompt": "a", "model": "another"}, 404, "model"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": ["a"]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 9000}]}, 400, "messages"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),  # vLLM 0.33: max_logprobs is 20
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, 400, "messages"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format"),
    (TEXT, {"prompt": "a" * 57_345}, 400, "prompt"),  # above 8,192 tokens of <|end|>, the longest
    (TEXT, {"prompt": ["a", "a" * 57_345]}, 400, "prompt"),
    (TEXT, {"prompt": ["a"] * 1025}, 400, "prompt"),
    (TEXT, {"prompt": "a", "stop_token_ids": [1] * 1025}, 400, "stop_token_ids"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 57_345}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * (2**20 + 1)}]}, 400, "messages"),
    ("/tokenize", {"prompt": "a" * (2**20 + 1)}, 400, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a" * (2**20 + 1)}]}, 400, "messages"),
    ("/detokenize", {"tokens": [1] * (2**20 + 1)}, 400, "tokens"),
    (TEXT, {"prompt": "a", "model": "\ud800"}, 400, "model"),
    (TEXT, {"prompt": "a", "user": "\udc00"}, 400, "user"),
    (TEXT, {"prompt": "a", "\ud800": 1}, 400, None),
    (TEXT, {"prompt": "a", "stop": ["\ud83d\ud83d"]}, 400, "stop"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"\ud800": 1}}, 400, "chat_template_kwargs"),
    ("/tokenize", {"prompt": "a", "model": "\udfff"}, 400, "model"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/nowhere", {}, 404, None),
    ("/health", {}, 405, None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_errors_are_openais(server: Serving, path: str, body: Any, status: int, param: str | None) -> None:
    code, error = server.refusal(path, body)
    assert (code, error["param"]) == (status, param)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"echo": True}),
        (TEXT, {"guided_regex": "x"}),
        (TEXT, {"logit_bias": {"5": 1}}),
        (TEXT, {"bad_words": ["x"]}),
        (TEXT, {"stream": True, "stream_options": {"x": 1}}),
    ],
)
def test_a_strict_server_names_fields_without_effect(path: str, field: dict[str, Any]) -> None:
    with serving(twin(), strict=True) as running:
        status, error = running.refusal(
            path, {"prompt": "a", **field} if path == TEXT else {"messages": HELLO, **field}
        )
    assert (status, error["param"]) == (400, list(field)[-1])


def test_messages_that_a_template_makes_nothing_of_are_named() -> None:
    with serving(twin(), template=ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")) as running:
        status, error = running.refusal(CHAT, {"messages": [{"role": "user", "content": ""}]})
        assert (status, error["param"]) == (400, "messages")
        assert error["message"] == "messages: the text has no tokens; send at least one"
        assert (
            running.refusal(TEXT, {"prompt": ""})[1]["message"] == "prompt: the text has no tokens; send at least one"
        )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"a":' + b"1" * 5000 + b"}",
        b'{"model": "\xed\xa0\x80"}',
        '{"model": "\ud800"}'.encode("utf-16", "surrogatepass"),
    ],
)
def test_a_body_that_is_no_object(server: Serving, data: bytes) -> None:
    status, error = server.refusal(TEXT, data)
    assert (status, error["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"prompt": [' + b"[]," * (5 << 20) + b"1]}", "65,536 lists, objects and texts"),
        (b'{"prompt": [' + b"{}," * (5 << 20) + b"1]}", "65,536 lists, objects and texts"),
        (b'{"prompt": [' + b'"",' * (5 << 20) + b"1]}", "65,536 lists, objects and texts"),
        (b'{"prompt": [' + b'{"a":[1]},' * 30_000 + b"1]}", "65,536 lists, objects and texts"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}", "65,536 lists, objects and texts"),
        (b'{"prompt": "\\\\\\"", "stop": [' + b'"\\\\\\\\",' * 70_000 + b"1]}", "65,536 lists, objects and texts"),
        (('{"prompt": [' + "[]," * 100_000 + "1]}").encode("utf-16"), "65,536 lists, objects and texts"),
        (b'{"prompt": [' + b"1," * (7 << 20) + b"1]}", "2,097,152 values"),
        (b'{"prompt": [' + (b"1" * 4000 + b",") * 4000 + b"1]}", "a number of 40 digits or more"),
    ],
)
def test_a_body_with_too_many_values_is_not_parsed(data: bytes, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser would keep every other client waiting: 4.7 s for the first of them."""
    parsed_texts: list[str] = []
    monkeypatch.setattr(json, "loads", parsed_texts.append)
    with pytest.raises(ApiError, match=problem):
        parsed(data)
    assert parsed_texts == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": 'a, [b], {c}: \\" \\\\' * 500_000},
        {"prompt": [[12345] * 32_768] * 60},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 5000},
    ],
)
def test_a_large_body_of_few_parts_is_parsed(body: dict[str, Any]) -> None:
    assert parsed(json.dumps(body).encode()) == body


def test_whole_surrogate_pairs_are_text(server: Serving) -> None:
    body = {"prompt": "\U0001f600 \\ud800", "model": MODEL}  # sent as two escapes, and as a backslash before ud800
    assert b'\\ud83d\\ude00 \\\\ud800"' in json.dumps(body).encode()
    tokens = server.post("/tokenize", **body)["tokens"]
    assert server.post("/detokenize", tokens=tokens) == {"prompt": body["prompt"]}


class Slow:
    """A tokenizer that tokenizes once it is let."""

    def __init__(self) -> None:
        self.may, self.begun = threading.Event(), threading.Event()

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.begun.set()
        assert self.may.wait(WAIT_S)
        return tokenizer().encode_batch(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)


def test_tokenization_holds_up_no_other_path() -> None:
    backend = twin()
    slow = backend.tokenizer = Slow()
    with serving(backend) as server:
        backend.tokenizer = tokenizer()  # which makes text of tokens
        counted: list[Any] = []
        thread = threading.Thread(target=lambda: counted.append(server.post("/tokenize", prompt="Hello")))
        thread.start()
        assert slow.begun.wait(WAIT_S)
        assert server.ask("GET", "/health")[0] == 200
        assert server.post(TEXT, prompt=[1], max_tokens=1)["choices"]  # another thread: /v1 can have a key
        slow.may.set()
        thread.join()
        assert counted[0]["count"] == len(tokenizer().encode("Hello").ids)


def test_no_body_is_read_in_the_event_loop(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def parsed_here(data: bytes, context: int) -> dict[str, Any]:
        names.append(threading.current_thread().name)
        return parsed(data, context)

    monkeypatch.setattr("kvplan.serve.intake.parsed", parsed_here)
    server.post(TEXT, prompt="a", max_tokens=1)
    server.post(CHAT, messages=HELLO, max_tokens=1)
    server.post("/tokenize", prompt="a")
    server.post("/detokenize", tokens=[1])
    assert [name.startswith("kvplan-intake") for name in names] == [True] * 4


async def posted(api: Api, path: str, parts: list[bytes]) -> int:
    """Send a body in parts to the application, without a server: the status. Parts that it has read are gone."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: MutableMapping[str, Any]) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await api.app()(scope, receive, send)
    return statuses[0]


async def steps(num: int = 1000) -> None:
    """Let every task of the loop go on as far as it can without a thread."""
    for _ in range(num):
        await asyncio.sleep(0)


def test_of_large_bodies_only_a_few_are_in_memory_at_once() -> None:
    text = b'"' + b"a " * SMALL + b'"'  # 128 KiB
    bodies = [[b'{"prompt": ', text[:1000], text[1000:], b"}"] for _ in range(MOST_LARGE + 2)]
    small = [b'{"prompt": ', b'"a"}']

    async def ask() -> list[int]:
        backend = twin()
        slow = backend.tokenizer = Slow()
        api = api_of(backend)
        answers = [asyncio.create_task(posted(api, "/tokenize", body)) for body in bodies]
        await steps()
        assert [len(body) for body in bodies] == [0] * MOST_LARGE + [1, 1]  # the last part has not been asked for
        answers.append(asyncio.create_task(posted(api, "/tokenize", small)))
        await steps()
        assert small == []
        slow.may.set()
        return list(await asyncio.gather(*answers))

    assert asyncio.run(ask()) == [200] * (MOST_LARGE + 3)


def test_too_many_characters_are_refused_in_vllms_words(server: Serving) -> None:
    _, error = server.refusal(TEXT, {"prompt": "ab " * 20_000})
    assert error["message"] == (  # vllm/renderers/params.py, _text_len_check, of 0.33.0
        "This model's maximum context length is 8192 tokens. However, your prompt contains 60000 characters (more than "
        "57344 characters, which is the upper bound for 8192 input tokens). Please reduce the length of the input "
        "prompt."
    )


def test_a_stream_that_is_refused_has_its_status(server: Serving) -> None:
    status, _ = server.refusal(TEXT, {"prompt": [10**9], "stream": True})
    assert status == 400


def test_a_body_has_a_limit() -> None:
    with serving(twin(), max_body_bytes=1000) as server:
        status, _ = server.refusal(TEXT, {"prompt": "a" * 1000})
        assert status == 413
        connection = server.connect()
        chunks = iter([b"a" * 600, b"a" * 600])
        connection.request("POST", TEXT, chunks, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()


def test_headers_have_a_limit(server: Serving) -> None:
    with socket.create_connection((server.host, server.port), timeout=WAIT_S) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000)
        assert raw.recv(100).startswith(b"HTTP/1.1 400") or raw.recv(100) == b""


def test_a_key_is_asked_for() -> None:
    with serving(twin(), api_keys=("first", "second")) as server:
        assert server.ask("GET", "/v1/models")[0] == 401
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("", 401)):
            assert server.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == status
        assert server.ask("GET", "/health")[0] == 200
        assert server.ask("GET", "/metrics")[0] == 200


@pytest.mark.parametrize("host", ["x/health?", "x/y#", "x?", "127.0.0.1", "[::1", "", "x/v1/../health"])
def test_no_host_header_talks_round_the_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """starlette before 1.1 makes a URL of the path and the client's Host header, whose path can be another."""
    monkeypatch.setattr(HttpRequest, "url", URL(f"http://{host.replace('[', '')}/v1/models"))
    with serving(twin(), api_keys=("key",)) as server:
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            assert server.ask("GET", path, headers={"Host": host})[0] == 401
            assert server.ask("GET", path, headers={"Host": host, "Authorization": "Bearer key"})[0] == 200
        assert server.ask("POST", TEXT, {"prompt": [1], "max_tokens": 1}, {"Host": host})[0] == 401


def test_a_full_queue_refuses() -> None:
    gate = Gate()
    with serving(twin(clock=gate), limits=Limits(2)) as server:
        left = [leave_open(server, {"prompt": [1] * 50, "max_tokens": 50}) for _ in range(2)]
        until(lambda: len(server.api.worker.jobs) == 2)
        status, error = server.refusal(TEXT, {"prompt": [1]})
        assert (status, error["type"]) == (503, "ServiceUnavailableError")
        assert server.metric("vllm:admission_rejections_total") == 1
        for raw in left:
            raw.close()
        until(lambda: not server.api.worker.jobs)
        gate.open()


def leave_open(server: Serving, body: dict[str, Any], path: str = TEXT, *, is_whole: bool = True) -> socket.socket:
    """A request that is sent, all or without its last byte, and whose answer is not read."""
    data = json.dumps(body).encode()
    raw = socket.create_connection((server.host, server.port), timeout=WAIT_S)
    raw.sendall(
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + (data if is_whole else data[:-1])
    )
    return raw


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_blocks_back(stream: bool) -> None:
    backend = twin(speed=50, output_tokens=8000)
    with serving(backend) as server:
        raw = leave_open(server, {"prompt": [1] * 100, "max_tokens": 8000, "stream": stream, "n": 3})
        until(lambda: len(backend.scheduler.running) == 3)
        raw.close()
        until(lambda: not server.api.worker.jobs and not backend.scheduler.has_unfinished)
        assert backend.scheduler.num_used_blocks == 0
        until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
        assert server.metric("vllm:request_success_total") == 3


def test_what_runs_is_finished_before_the_end() -> None:
    with serving(twin(speed=100, output_tokens=500)) as server:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(server.post(TEXT, prompt=[1], max_tokens=500)))
        thread.start()
        until(lambda: bool(server.api.worker.jobs))
    thread.join()
    assert answers[0]["usage"]["completion_tokens"] == 500
    assert not server.api.worker.is_running


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlasts_the_drain_time_ends_with_openais_error(stream: bool, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": [1], "max_tokens": 8000, "stream": stream}
    with ExitStack() as sockets:
        with serving(twin(speed=50, output_tokens=8000), drain_s=0) as server:
            running = sockets.enter_context(leave_open(server, body))
            sending = sockets.enter_context(leave_open(server, body, is_whole=False))
            until(lambda: server.metric("vllm:generation_tokens_total") > 1)
        status, data = read_answer(running)
        if stream:
            *_, data, done, end = data.split("\n\n")
            assert (status, done, end) == (200, "data: [DONE]", "")
        else:
            assert status == 503
        error = json.loads(data.removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        assert read_answer(sending)[0] == 503
    messages = capsys.readouterr().err
    assert "timeout graceful shutdown exceeded" in messages
    assert "Traceback" not in messages
    assert "ASGI" not in messages


def read_answer(raw: socket.socket) -> tuple[int, str]:
    """(status, text) of the answer to a request that was left open."""
    with http.client.HTTPResponse(raw) as answer:
        answer.begin()
        return answer.status, answer.read().decode()


def test_a_request_has_its_time() -> None:
    gate = Gate()
    with serving(twin(clock=gate), request_timeout_s=0.05) as server:
        status, error = server.refusal(TEXT, {"prompt": [1], "max_tokens": 50})
        gate.open()
        assert (status, error["type"]) == (504, "GatewayTimeoutError")


def fail_once(update: Callable[..., Any]) -> Callable[..., Any]:
    calls = count()

    def failing(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("planted")
        return update(*arguments)

    return failing


def test_a_step_that_fails_ends_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = twin()
    with serving(backend) as server:
        monkeypatch.setattr(backend.scheduler, "update", fail_once(backend.scheduler.update))
        status, error = server.refusal(TEXT, {"prompt": [1]})
        assert (status, error["type"]) == (500, "InternalServerError")
        assert server.post(TEXT, prompt=[1])["choices"]
        assert server.ask("GET", "/health")[0] == 200


def lose(*arguments: Any) -> Any:
    raise BackendLostError("serve", "planted", "start again")


@pytest.mark.parametrize("when", ["submit", "step", "idle"])
def test_a_backend_that_is_lost_fails_every_request_and_health(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = twin()
    monkeypatch.setattr("kvplan.serve.worker.IDLE_S", 0.01)
    with serving(backend) as server:
        worker = server.api.worker
        if when == "idle":
            monkeypatch.setattr(worker, "_hooks", Hooks(idle=lose))
            until(lambda: worker.lost is not None)
        else:
            monkeypatch.setattr(backend, when, lose if when == "step" else lambda *_, **__: lose())
        for _ in range(2):
            status, error = server.refusal(TEXT, {"prompt": [1]})
            assert (status, error["message"]) == (500, "serve: planted; start again")
        assert server.ask("GET", "/health")[0] == 503
        assert not worker.jobs


def test_a_server_whose_backend_is_lost_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.serve.worker.IDLE_S", 0.01)
    with serving(twin()) as other:
        worker = Worker(twin(), other.api.worker.metrics, Hooks(idle=lose))
    with listen("127.0.0.1", 0) as listener, pytest.raises(BackendLostError, match=r"^serve: planted; start again$"):
        serve([Api(worker, other.api.served)], [listener], 1, lambda: None)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.serve.run.HEADER_S", 0.05)
    with serving(twin()) as server, socket.create_connection((server.host, server.port), timeout=WAIT_S) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        assert raw.recv(100) == b""
        assert server.ask("GET", "/health")[0] == 200
