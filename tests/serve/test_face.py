"""SGLang's face on a simulated server: its own paths, fields, responses, metrics, scheduler and radix tree.

tests/facts/sglang_face_0.5.23.json: what SGLang 0.5.23's own classes say: fields of requests, responses of its protocol
classes for one made-up answer, finish reasons, the metrics' families in its code, its errors for sampling parameters
(SamplingParams.verify), and the ids of a batch (GenerateReqInput.normalize_batch_and_arguments).
"""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.config import SamplingParams
from engine.request import TokenUpdate
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.serve.face_metrics import FaceMetrics
from kvplan.serve.prompts_first import ServedPromptsFirst
from kvplan.serve.twin import Twin, VirtualClock
from kvplan.serve.worker import Hooks
from kvplan.servers.base import face_of, parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.setup import Setup
from kvplan.simulate.steptime import step_time
from kvplan.workloads.trace import TraceRequest
from tests.serve.test_twin import AllAtOnce, OwnClock
from tests.support.serving import MODEL, Serving, serving, tokenizer

FACTS = json.loads((Path(__file__).parents[1] / "facts" / "sglang_face_0.5.23.json").read_text())
FACE = face_of("sglang")
INFO = {"release": "0.5.23", "tokenizer": None, "architecture": "LlamaForCausalLM", "model_type": "llama"}


@cache
def sglang_plan(**changes: Any) -> Plan:
    args = EngineArgs(**{"max_model_len": 8192, **changes})
    return plan(Request(catalog.load(MODEL), gpu("h100-80g"), args, parse_engine("sglang@0.5")))


def a_twin(clock: Any = None, *, output_tokens: int = 24, **changes: Any) -> Twin:
    the_plan = sglang_plan(**changes)
    times = step_time(the_plan, Shares(), None)
    return Twin(the_plan, times, tokenizer(), clock=clock or VirtualClock(), output_tokens=output_tokens)


def scheduler_of(backend: Twin) -> ServedPromptsFirst:
    scheduler: Any = backend.scheduler
    assert isinstance(scheduler, ServedPromptsFirst)
    return scheduler


@pytest.fixture
def server() -> Iterator[Serving]:
    backend = a_twin()
    assert FACE is not None
    page = FaceMetrics(FACE, MODEL, backend.scheduler, backend.clock.now)
    hooks = Hooks(backend.delay, now=backend.clock.now, is_virtual=True)
    with serving(backend, hooks=hooks, page=page, face=FACE, info=INFO) as running:
        yield running


def native_error(running: Serving, path: str, body: Any) -> tuple[int, str]:
    status, data = running.ask("POST", path, body)
    error = json.loads(data)
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message"}
    return status, error["error"]["message"]


# --- responses --------------------------------------------------------------------------------------------------------


def test_openais_responses_have_the_keys_of_the_servers_own_classes(server: Serving) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    completion = server.post("/v1/completions", prompt="Hi", max_tokens=2)
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=2)
    chunk = server.stream("/v1/completions", prompt="Hi", max_tokens=2)[-1]
    delta = server.stream("/v1/chat/completions", messages=messages, max_tokens=2)[1]
    for ours, name in ((completion, "completion"), (chat, "chat"), (chunk, "completion_chunk"), (delta, "chat_chunk")):
        theirs = FACTS[name]
        assert set(ours) == set(theirs), name
        assert set(ours["choices"][0]) == set(theirs["choices"][0]), name
        for part in ("message", "delta"):
            assert set(ours["choices"][0].get(part, ())) == set(theirs["choices"][0].get(part, ())), name
    assert set(completion["usage"]) == set(FACTS["completion"]["usage"])
    assert completion["metadata"] == FACTS["completion"]["metadata"]
    assert set(server.get("/v1/models")["data"][0]) == set(FACTS["model_card"])
    assert server.get("/v1/models")["data"][0]["owned_by"] == FACTS["model_card"]["owned_by"]


def test_an_error_has_the_keys_of_the_servers_own_class(server: Serving) -> None:
    status, data = server.ask("POST", "/v1/completions", {"prompt": [1], "max_tokens": 9000})
    error = json.loads(data)
    assert (status, set(error)) == (400, set(FACTS["error"]))
    assert "maximum context length of 8192 tokens" in error["message"]
    assert native_error(server, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 9000}})[0] == 400


def test_finish_reasons_are_the_servers_own() -> None:
    assert FACE is not None
    ours = [
        FACE.finish_reason("stop", 7, 3), FACE.finish_reason("stop", "x", 3), FACE.finish_reason("length", None, 3),
        FACE.finish_reason("abort", None, 3),
    ]  # fmt: skip
    assert ours[:3] == FACTS["finish"][:3]
    assert set(ours[3]) == set(FACTS["finish"][3])


def test_its_own_fields_of_openais_requests_have_their_effect(server: Serving) -> None:
    body = {"prompt": "Hi", "max_tokens": 9, "rid": "mine"}
    assert server.post("/v1/completions", **body, regex="[0-9]{2}")["choices"][0]["text"] == "00"
    boolean = server.post("/v1/completions", **body, json_schema='{"type": "boolean"}')["choices"][0]["text"]
    assert boolean in ("true", "false")
    whole = server.post("/v1/completions", prompt="Hi", max_tokens=9)["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    cut = server.post("/v1/completions", prompt="Hi", max_tokens=9, stop=stop)["choices"][0]
    whole_stop = server.post("/v1/completions", prompt="Hi", max_tokens=9, stop=stop, no_stop_trim=True)["choices"][0]
    assert (cut["matched_stop"], whole_stop["text"]) == (stop, cut["text"] + stop)


OPENAIS = [("/v1/completions", "completion_fields"), ("/v1/chat/completions", "chat_fields")]


@pytest.mark.parametrize(("path", "fields"), OPENAIS)
def test_every_field_of_openais_requests_is_taken(server: Serving, path: str, fields: str) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for name in FACTS[fields]:
        status, data = server.ask("POST", path, {name: None, **body})
        assert status == 200, (name, data)


def test_any_models_name_is_the_model(server: Serving) -> None:
    assert server.post("/v1/completions", model="whatever", prompt="Hi", max_tokens=1)["model"] == "whatever"


# --- /generate --------------------------------------------------------------------------------------------------------


def test_generate_takes_a_text_or_ids_and_many(server: Serving) -> None:
    row = server.post("/generate", text="Hello", sampling_params={"max_new_tokens": 3})
    assert set(row) == {"text", "output_ids", "meta_info"}
    assert len(row["output_ids"]) == row["meta_info"]["completion_tokens"] == 3
    assert row["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    many = server.post("/generate", input_ids=[[1, 2], [3]], sampling_params={"max_new_tokens": 2, "n": 2})
    assert [row["meta_info"]["prompt_tokens"] for row in many] == [2, 2, 1, 1]
    several = [{"max_new_tokens": 1}, {"max_new_tokens": 4}]
    lengths = [len(row["output_ids"]) for row in server.post("/generate", text=["a", "b"], sampling_params=several)]
    assert lengths == [1, 4]


def test_a_response_ends_after_the_servers_default(server: Serving) -> None:
    default = FACTS["sampling_defaults"]["max_new_tokens"]
    row = server.post("/generate", text="Hello", sampling_params={"ignore_eos": True})
    assert len(row["output_ids"]) == default


def test_a_stream_repeats_the_text_so_far(server: Serving) -> None:
    whole = server.post("/generate", input_ids=[1, 2], sampling_params={"max_new_tokens": 4})
    rows = server.stream("/generate", input_ids=[1, 2], sampling_params={"max_new_tokens": 4})
    assert [len(row["output_ids"]) for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["text"] == whole["text"]
    assert [row["meta_info"]["finish_reason"] for row in rows[:-1]] == [None] * 3
    many = server.stream("/generate", input_ids=[[1], [2]], sampling_params={"max_new_tokens": 2})
    assert sorted(row["index"] for row in many) == [0, 0, 1, 1]


def test_logprobs_are_of_the_output_and_of_the_prompt_from_a_place_on(server: Serving) -> None:
    body: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    plain = server.post("/generate", **body)["meta_info"]
    assert plain["input_token_logprobs"] == []
    assert [row[1] for row in plain["output_token_logprobs"]] == server.post("/generate", **body)["output_ids"]
    assert plain["output_token_logprobs_length"] == 2
    prompt = server.post("/generate", **body, logprob_start_len=0, top_logprobs_num=1, return_text_in_logprobs=True)
    rows = prompt["meta_info"]["input_token_logprobs"]
    assert [(row[0] is None, row[1]) for row in rows] == [(True, 5), (False, 6), (False, 7)]
    assert all(isinstance(row[2], str) for row in rows)
    assert len(prompt["meta_info"]["output_top_logprobs"]) == 2


@pytest.mark.parametrize("name", FACTS["generate_fields"])
def test_every_field_of_the_servers_class_is_taken(server: Serving, name: str) -> None:
    values: dict[str, Any] = {
        "rid": "mine", "text": "a", "input_ids": [1], "sampling_params": {}, "return_logprob": True,
        "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True, "stream": False,
    }  # fmt: skip
    body = {} if name in ("text", "input_ids") else {"input_ids": [1]}
    row = server.post("/generate", **body, **{name: values.get(name)})
    assert row["meta_info"]["id"] == "mine" if name == "rid" else row["meta_info"]["id"]


@pytest.mark.parametrize(("params", "message"), FACTS["sampling_errors"], ids=str)
def test_sampling_parameters_are_refused_in_the_servers_words(
    server: Serving, params: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert server.post("/generate", text="a", sampling_params=params)["text"] is not None
    else:
        assert native_error(server, "/generate", {"text": "a", "sampling_params": params}) == (400, message)


def test_errors_of_types_name_its_own_fields(server: Serving) -> None:
    status, message = native_error(server, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": "x"}})
    assert (status, message.partition(" ")[0]) == (400, "max_new_tokens")
    status, data = server.ask("POST", "/v1/completions", {"prompt": "a", "regex": "(?=a)b"})
    assert (status, json.loads(data)["message"].partition(":")[0]) == (400, "regex")
    bad = {"text": "a", "sampling_params": {"regex": "("}}
    assert native_error(server, "/generate", bad)[1].startswith("Failed to compile regex grammar: ")


@pytest.mark.parametrize(("text", "rid", "ids", "message"), FACTS["rids"], ids=str)
def test_the_ids_of_a_batch_are_the_servers(
    server: Serving, text: Any, rid: Any, ids: Any, message: str | None
) -> None:
    body = {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": 2}}
    if message is not None:
        assert native_error(server, "/generate", body) == (400, message)
        return
    rows = server.post("/generate", **body)
    named = [row["meta_info"]["id"] for row in rows] if isinstance(rows, list) else rows["meta_info"]["id"]
    assert named == ids


def test_no_new_tokens_are_only_a_prefill(server: Serving) -> None:
    """Source: SGLang 0.5.23 managers/schedule_batch.py (is_prefill_only; FINISH_LENGTH of max_new_tokens)."""
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 2}]
    none, two = server.post("/generate", text=["a", "b"], sampling_params=params)
    assert (none["text"], none["output_ids"], len(two["output_ids"])) == ("", [], 2)
    assert none["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert none["meta_info"]["completion_tokens"] == 0
    rows = server.stream("/generate", text="a", sampling_params={"max_new_tokens": 0})
    assert [row["output_ids"] for row in rows] == [[]]


def test_another_models_name_is_unknown(server: Serving) -> None:
    """Source: SGLang 0.5.23 entrypoints/http_server.py (retrieve_model)."""
    assert server.get(f"/v1/models/{MODEL}")["id"] == MODEL
    status, data = server.ask("GET", "/v1/models/other", None)
    own = {"message": "The model 'other' does not exist", "type": "invalid_request_error", "param": "model"}
    assert (status, json.loads(data)) == (404, {"error": {**own, "code": "model_not_found"}})


@pytest.mark.parametrize("name", FACTS["sampling_fields"])
def test_every_sampling_parameter_is_taken(server: Serving, name: str) -> None:
    values: dict[str, Any] = {
        "max_new_tokens": 2, "stop": ["zzz"], "stop_token_ids": [1], "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "min_new_tokens": 1,
        "n": 1, "json_schema": '{"type": "integer"}', "regex": "[0-9]", "ignore_eos": False, "logit_bias": {"1": 1},
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False, "sampling_seed": 7,
    }  # fmt: skip
    params = {"max_new_tokens": 8, name: values.get(name)}
    assert server.post("/generate", input_ids=[1], sampling_params=params)["output_ids"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "text, input_ids or input_embeds"),
        ({"text": "a", "input_ids": [1]}, "text, input_ids or input_embeds"),
        ({"text": "a", "sampling_params": 7}, "sampling_params"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": ["a", "b", "c"], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n must be the same"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 9000}}, "maximum context length"),
        ({"input_ids": list(range(8192))}, "longer than the model's context length"),
        ({"input_ids": [1], "sampling_params": {"ebnf": "root ::= x"}}, "ebnf"),
        ({"input_ids": [1], "top_logprobs_num": "x", "return_logprob": True}, "top_logprobs_num"),
        ({"input_ids": [10**9]}, "token"),
    ],
)
def test_what_cannot_be_generated_is_a_native_error(server: Serving, body: dict[str, Any], words: str) -> None:
    status, message = native_error(server, "/generate", body)
    assert (status, words in message) == (400, True), message


# --- information, cache, metrics --------------------------------------------------------------------------------------


def test_information_is_where_clients_look_for_it(server: Serving) -> None:
    assert server.get("/get_model_info") == server.get("/model_info")
    assert server.get("/model_info")["architectures"] == ["LlamaForCausalLM"]
    info = server.get("/get_server_info")
    assert info["max_total_num_tokens"] == info["internal_states"][0]["memory_usage"]["token_capacity"]
    assert [server.ask("GET", path)[0] for path in ("/health", "/health_generate", "/ready", "/ping")] == [200] * 4


def test_the_radix_tree_finds_a_conversation_again_until_it_is_flushed(server: Serving) -> None:
    prompt = list(range(100, 200))
    first = server.post("/generate", input_ids=prompt, sampling_params={"max_new_tokens": 10, "ignore_eos": True})
    again = [*prompt, *first["output_ids"], 7]
    body = {"input_ids": again, "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", **body)["meta_info"]["cached_tokens"] == 109  # the last token's KV was not stored
    assert server.ask("POST", "/flush_cache")[0] == 200
    assert server.post("/generate", **body)["meta_info"]["cached_tokens"] == 0
    assert server.metric("sglang:cached_tokens_total") == 109


def test_families_and_their_types_are_the_servers_own(server: Serving) -> None:
    server.post("/generate", text="a", sampling_params={"max_new_tokens": 3})
    lines = [line.split() for line in server.metrics().splitlines() if line.startswith("# TYPE sglang:")]
    ours = {name.removeprefix("sglang:"): kind for _, _, name, kind in lines if not name.endswith("_created")}
    theirs = FACTS["families"]
    for name, kind in ours.items():
        assert theirs[name] == kind, name
    assert len(ours) == 28  # of 164 that its code can show: the others are of disaggregation, drafts, tiers, adapters
    assert server.metric("sglang:generation_tokens_total") == 3


def test_usage_counts_what_requests_hold_and_not_what_the_tree_keeps(server: Serving) -> None:
    server.post("/generate", input_ids=list(range(64)), sampling_params={"max_new_tokens": 1})
    capacity = server.metric("sglang:max_total_num_tokens")
    assert server.metric("sglang:token_usage") == server.metric("sglang:num_used_tokens") == 0
    evictable = server.metric("sglang:kv_evictable_tokens")
    assert evictable >= 64
    assert server.metric("sglang:kv_available_tokens") + evictable == capacity


def test_a_request_that_runs_at_once_has_not_queued(server: Serving) -> None:
    """One after the other on an idle server: a wait is a scheduler's step at most, not the answer's time."""
    for number in range(3):
        server.ask("POST", "/generate", {"input_ids": [number, 1, 2], "sampling_params": {"max_new_tokens": 24}})
    queued, whole = (server.metric(f"sglang:{name}_seconds_sum") for name in ("queue_time", "e2e_request_latency"))
    assert 0 <= queued <= whole / 10
    assert whole > 0


def test_openais_client_reads_it(server: Serving) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    assert answer.usage.completion_tokens == 3
    stream = client.completions.create(model="m", prompt="Hi", max_tokens=3, stream=True)
    assert (
        "".join(chunk.choices[0].text for chunk in stream)
        == client.completions.create(model="m", prompt="Hi", max_tokens=3).choices[0].text
    )


# --- scheduler --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 40_000])
def test_times_are_the_simulators(tokens: int | None) -> None:
    """Two loops over one scheduler, with and without retraction: each request's times are the same."""
    source = random.Random(1)
    requests = [TraceRequest(0.0, source.randint(1, 1500), source.randint(900, 1500)) for _ in range(60)]
    changes = {} if tokens is None else {"max_total_tokens": tokens}
    the_plan = sglang_plan(**changes)
    setup = Setup(the_plan, step_time(the_plan, Shares(), None))
    simulation = setup.simulation(AllAtOnce(requests))
    simulation.arrivals = AllAtOnce(requests)
    simulation.run()
    clock, firsts, ends = OwnClock(), dict[str, float](), dict[str, float]()
    backend = a_twin(clock, **changes)

    def note(update: TokenUpdate) -> None:
        firsts.setdefault(update.request_id, clock.now())

    for number, request in enumerate(requests, 1):
        prompt = [(number * 7919 + place) % 100_000 for place in range(request.prompt_tokens)]
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        backend.submit(prompt, params, request_id=str(number), on_token=note)
    while backend.has_unfinished:
        ends |= {output.request_id: clock.now() for output in backend.step()}
        scheduler_of(backend).check_invariants()
    rows = simulation.records
    assert set(ends) == set(map(str, rows.number))
    for i, number in enumerate(rows.number):
        pair = (firsts[str(number)], ends[str(number)])
        assert pair == pytest.approx((rows.first_token[i], rows.ended[i]), rel=1e-9)
    assert backend.scheduler.num_preemptions == simulation.scheduler.num_preemptions
    assert (backend.scheduler.num_preemptions > 0) == (tokens is not None)


def test_aborts_at_any_time_leave_nothing_behind() -> None:
    source = random.Random(3)
    backend = a_twin(max_total_tokens=9000, max_num_batched_tokens=512)
    alive: list[str] = []
    for number in range(300):
        if source.random() < 0.5:
            prompt = [source.randint(0, 3)] * source.randint(1, 1500)
            params = SamplingParams(max_tokens=source.randint(1, 60), ignore_eos=source.random() < 0.5)
            backend.submit(prompt, params, request_id=str(number), cache_salt=source.choice((None, "a")))
            alive.append(str(number))
        if alive and source.random() < 0.3:
            backend.abort(alive.pop(source.randrange(len(alive))))
        backend.step()
        scheduler_of(backend).check_invariants()
    while backend.has_unfinished:
        backend.step()
    scheduler_of(backend).check_invariants()
    assert backend.scheduler.blocks.usage == 0
    assert scheduler_of(backend).flush()
    assert backend.scheduler.blocks.num_free_blocks == scheduler_of(backend).limits.num_tokens


def test_a_salt_keeps_prefixes_apart() -> None:
    backend = a_twin()
    hits = []
    for salt in (None, "a", None, "a"):
        request = backend.submit(list(range(50)), SamplingParams(max_tokens=1), cache_salt=salt)
        while backend.has_unfinished:
            backend.step()
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 49, 49]
