"""OpenAI's own client against the server: its types, streams, errors and cancellation."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from kvplan.serve.generation import Limits  # noqa: E402
from kvplan.serve.text import end_token_of  # noqa: E402
from tests.serve.test_server import until  # noqa: E402
from tests.support.serving import MODEL, Gate, Serving, serving, tokenizer, twin  # noqa: E402

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(twin(), api_keys=("secret",)) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def strictly(answer: Any) -> Any:
    """The answer, validated by the client's own types without coercion."""
    document = answer.model_dump(exclude_unset=True)
    if document["object"] == "text_completion":  # a stream's chunks say null, as OpenAI's do, and its type has no null
        for choice in document["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    type(answer).model_validate(document, strict=True)
    return answer


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert strictly(client.models.retrieve(MODEL)).object == "model"


def test_a_completion(client: Any) -> None:
    answer = strictly(client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, logprobs=1, n=2))
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.usage.completion_tokens == 8
    assert len(answer.choices[0].logprobs.tokens) == 4


def test_a_chat(client: Any) -> None:
    answer = strictly(client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1))
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert "".join(row.token for row in choice.logprobs.content[:-1]) == choice.message.content  # the last is the end


def test_streams(client: Any) -> None:
    options: Any = {"model": MODEL, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [strictly(chunk) for chunk in client.chat.completions.create(messages=HELLO, **options)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5
    chunks = [strictly(chunk) for chunk in client.completions.create(prompt=[1, 2], **options)]
    assert len(chunks) == 6


def stop_reasons(client: Any, **stops: Any) -> list[tuple[Any, Any]]:
    """(finish_reason, stop_reason) of a text, a chat, and the last chunks of both, streamed."""
    ends = []
    for create, prompt in (
        (client.completions.create, {"prompt": [9]}),
        (client.chat.completions.create, {"messages": HELLO}),
    ):
        options: Any = {"model": MODEL, **prompt, **stops}
        (choice,) = strictly(create(**options)).choices
        ends.append((choice.finish_reason, choice.stop_reason))
        *chunks, last = [strictly(chunk).choices[0] for chunk in create(**options, stream=True)]
        assert all(getattr(chunk, "stop_reason", None) is None for chunk in chunks)
        ends.append((last.finish_reason, last.stop_reason))
    return ends


def test_the_stop_reason_is_the_string_or_the_token_that_ended_the_answer(client: Any) -> None:
    """As in vLLM 0.33 (v1/core/sched/utils.py check_stop): null at the tokenizer's end token and at the length."""
    assert stop_reasons(client, max_tokens=3) == [("length", None)] * 4
    assert stop_reasons(client, max_tokens=100) == [("stop", None)] * 4
    end = end_token_of(tokenizer())
    assert stop_reasons(client, max_tokens=100, extra_body={"stop_token_ids": [end]}) == [("stop", None)] * 4
    assert stop_reasons(client, max_tokens=100, stop=["\x00", "e"]) == [("stop", "e")] * 4
    text = client.completions.create(model=MODEL, prompt=[9], max_tokens=24).choices[0].text
    chat = client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content
    tokens = [tokenizer().encode(answer, add_special_tokens=False).ids[5] for answer in (text, chat)]
    reasons = stop_reasons(client, max_tokens=100, extra_body={"stop_token_ids": tokens})
    assert {reason for reason, _ in reasons} == {"stop"}
    assert {token for _, token in reasons} <= set(tokens)


def test_the_clients_own_helper_for_streams(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_errors_are_the_clients_own(server: Serving, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", max_tokens=100_000)
    assert (refused.value.param, refused.value.status_code) == ("max_tokens", 400)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a")
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_full_queue_is_an_error_that_is_tried_again() -> None:
    gate = Gate()
    with (
        serving(twin(clock=gate), limits=Limits(0)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError) as busy:
            client.completions.create(model=MODEL, prompt="a")
        assert busy.value.status_code == 503
        gate.open()


def test_a_stream_that_is_closed_gives_its_blocks_back() -> None:
    backend = twin(speed=50, output_tokens=8000)
    with serving(backend) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        stream = client.completions.create(model=MODEL, prompt=[1] * 100, max_tokens=8000, stream=True)
        assert next(iter(stream)).choices
        assert backend.scheduler.num_used_blocks > 0
        stream.close()
        until(lambda: not backend.scheduler.has_unfinished)
        assert backend.scheduler.num_used_blocks == 0


async def ask_many(url: str, num: int) -> list[Any]:
    """Whole answers and streams of both kinds, 64 at a time."""
    places = asyncio.Semaphore(64)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=300) as client:

        async def ask(number: int) -> Any:
            async with places:
                options: Any = {"model": MODEL, "max_tokens": 1 + number % 17, "extra_body": {"ignore_eos": True}}
                kind, is_stream = divmod(number % 4, 2)
                create = (client.completions, client.chat.completions)[kind].create
                body: Any = {"messages": HELLO} if kind else {"prompt": [1 + number % 50] * (1 + number % 300)}
                if not is_stream:
                    return strictly(await create(**body, **options)).usage.completion_tokens
                options["stream_options"] = {"include_usage": True}
                chunks = [strictly(chunk) async for chunk in await create(**body, **options, stream=True)]
                assert chunks[-2].choices[0].finish_reason == "length"
                return chunks[-1].usage.completion_tokens

        return await asyncio.gather(*(ask(number) for number in range(num)))


@pytest.mark.parametrize("num", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_many_requests_without_an_error(num: int) -> None:
    backend = twin(speed=1e5)
    with serving(backend) as server:
        tokens = asyncio.run(ask_many(server.url, num))
        assert tokens == [1 + number % 17 for number in range(num)]
        assert server.metric("vllm:request_success_total") == num
        assert server.metric("vllm:generation_tokens_total") == sum(tokens)
        backend.scheduler.check_invariants()
        assert backend.scheduler.num_used_blocks == 0


# --- responses and embeddings


CALL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}


def test_a_response(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.output_tokens, answer.output[0].type) == (4, "message")
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "5"},
    ]
    whole = client.responses.create(model=MODEL, input=items)
    assert (whole.status, whole.usage.output_tokens) == ("completed", 24)
    assert type(whole).model_validate(whole.model_dump(exclude_unset=True)).output_text == whole.output_text


def test_a_response_that_calls_a_function(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", tools=[CALL], tool_choice="required")
    assert [(item.type, item.name, item.arguments) for item in answer.output] == [("function_call", "f", "{}")]
    events = list(
        client.responses.create(model=MODEL, input="Hello", tools=[CALL], tool_choice="required", stream=True)
    )
    assert events[-2].type == "response.output_item.done"
    assert events[-2].item.arguments == "{}"


def test_a_response_in_a_stream(client: Any) -> None:
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        events = list(stream)
        whole = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"previous_response_id": "resp-1"}, 404),
        ({"background": True}, 400),
        ({"input": []}, 400),
        ({"input": [5]}, 400),
    ],
)
def test_a_response_that_needs_a_store_is_refused(client: Any, fields: Any, status: int) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        client.responses.create(**{"model": MODEL, "input": "Hello", "stream": True, **fields})
    assert refusal.value.status_code == status


def test_embeddings_are_unit_vectors_of_the_tokens() -> None:
    with (
        serving(twin(), vector_size=64) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
    ):
        answer = client.embeddings.create(model=MODEL, input=["Hello", "Hello", "else"])  # as base64
        first, second, third = (row.embedding for row in answer.data)
        assert first == second != third
        assert len(first) == 64
        assert sum(value * value for value in first) == pytest.approx(1, rel=1e-6)
        assert answer.usage.total_tokens == sum(
            len(tokenizer().encode(text).ids) for text in ("Hello", "Hello", "else")
        )
        plain = client.embeddings.create(model=MODEL, input=[[5, 6]], encoding_format="float", dimensions=3)
        assert len(plain.data[0].embedding) == 3
        scores = running.post("/score", text_1="Hello", text_2=["else", "Hello"])["data"]
        assert scores[0]["score"] < scores[1]["score"] == pytest.approx(1)
        assert running.post("/pooling", input="Hello")["data"][0]["data"] == pytest.approx(first, abs=1e-6)
        assert running.metric("vllm:generation_tokens_total") == 0
        assert running.metric("vllm:request_success_total") == 8
        for path, body in (("/v1/embeddings", {}), ("/v1/embeddings", {"input": 5}), ("/score", {"text_1": "a"}),
                           ("/v1/embeddings", {"input": "a", "dimensions": 65}), ("/pooling", {"input": []}),
                           ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})):  # fmt: skip
            assert running.refusal(path, body)[0] == 400
        assert running.refusal("/v1/completions", {"prompt": "a"})[0] == 404  # vLLM's pooling server generates nothing
