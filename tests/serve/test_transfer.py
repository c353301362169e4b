"""A prefill server and a decode server, with the test as the proxy between them.

What vLLM 0.33's own connector puts in a response: tests/facts/handover.jsonl. Times are computed by hand: Llama 3.1 8B
has 32 layers of 8 KV heads of 128 numbers of 2 bytes, twice: 131,072 bytes a token, 2 MiB a block of 16 tokens.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import SamplingParams
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.serve.jobs import Simulated
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.transfer import SideChannel, Transfer, TransferConfig, transfer_config
from kvplan.serve.twin import Twin, VirtualClock, WallClock
from kvplan.serve.worker import Hooks
from kvplan.simulate.handover import Link
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.setup import groups
from kvplan.simulate.steptime import step_time
from tests.support.serving import Serving, planned, serving, tokenizer

TEXT = "/v1/completions"
BLOCK = 32 * 8 * 128 * 2 * 2 * 16
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
RUNS = [json.loads(line) for line in (Path(__file__).parents[1] / "facts" / "handover.jsonl").read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def a_twin(role: str, *, virtual: bool = True, speed: float = 1.0, lease: int = 30, recomputes: bool = False) -> Twin:
    plan = planned()
    link = None if role == "kv_producer" else Link(10e9, 0.002)
    config = TransferConfig(f"engine of {role}", role, "localhost", free_port(), link, lease, recomputes)
    clock = VirtualClock() if virtual else WallClock()
    handover = Transfer(plan, groups(plan), config)
    return Twin(plan, step_time(plan, Shares(), None), tokenizer(), tiers=handover, clock=clock, speed=speed)


def transfer_of(backend: Twin) -> Transfer:
    assert isinstance(backend.tiers, Transfer)
    return backend.tiers


@contextmanager
def served(backend: Twin) -> Iterator[Serving]:
    handover = transfer_of(backend)
    hooks = Hooks(
        backend.delay, close=backend.close, now=backend.clock.now, is_virtual=handover.is_virtual,
        attach=handover.attach_to, transfer=handover.take_answer,
    )  # fmt: skip
    with serving(backend, hooks=hooks, tiers=handover, hands_over=True) as running:
        yield running


@contextmanager
def pair(**settings: Any) -> Iterator[tuple[Serving, Serving]]:
    with ExitStack() as stack:
        roles = ("kv_producer", "kv_consumer")
        first, second = (stack.enter_context(served(a_twin(role, **settings))) for role in roles)
        yield first, second


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def num_kept(running: Serving) -> int:
    assert isinstance(running.backend, Twin)
    return len(transfer_of(running.backend).pinned)


def test_a_proxy_hands_the_response_of_one_to_the_other() -> None:
    prompt = list(range(1, 1001))
    with pair() as (producer, consumer):
        first = producer.post(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=PREFILL)
        params = first["kv_transfer_params"]
        assert num_kept(producer) == 1
        assert len(params["remote_block_ids"][0]) == 63  # 1,000 tokens in blocks of 16
        second = consumer.post(TEXT, prompt=prompt, max_tokens=5, kv_transfer_params=params)
        assert "kv_transfer_params" not in second
        assert second["usage"]["completion_tokens"] == 5
        assert consumer.metric("vllm:request_prefill_kv_computed_tokens_sum") == 1  # the last token is computed again
        assert wait_for(lambda: num_kept(producer) == 0)
        for running in (producer, consumer):
            running.backend.scheduler.check_invariants()
            assert running.metric("vllm:kv_cache_usage_perc") == 0


def test_the_fields_are_those_of_the_servers_own_code() -> None:
    theirs = next(run for run in RUNS if run["case"] == "producer-True")["answers"]["r0"]
    with served(a_twin("kv_producer")) as producer:
        prompt = list(range(theirs["remote_num_tokens"]))
        ours = producer.post(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=PREFILL)["kv_transfer_params"]
        again = producer.post(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=PREFILL)["kv_transfer_params"]
        several = producer.post(TEXT, prompt=prompt, max_tokens=4, kv_transfer_params=PREFILL)["kv_transfer_params"]
        chunks = producer.stream(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=PREFILL)
        messages = [{"role": "user", "content": "a"}]
        chat = producer.post("/v1/chat/completions", messages=messages, max_tokens=1, kv_transfer_params=PREFILL)
    own = {"remote_engine_id", "remote_request_id", "remote_port", "remote_block_ids", "remote_registration_generation"}
    assert list(ours) == list(theirs)
    assert {key: ours[key] for key in theirs.keys() - own} == {key: theirs[key] for key in theirs.keys() - own}
    assert list(map(len, ours["remote_block_ids"])) == list(map(len, theirs["remote_block_ids"]))
    assert again["remote_prefill_cached_tokens"] == 192  # the prompt's 12 whole blocks are in the cache
    lacking = next(run for run in RUNS if run["case"] == "producer-True")["answers"]["r2"]  # four tokens
    assert set(several) == set(lacking)
    assert [chunk.get("kv_transfer_params") is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chat["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize("num_tokens", [993, 4097])  # a token more than whole blocks
def test_a_transfer_takes_bytes_over_bandwidth_and_the_latency(num_tokens: int) -> None:
    """By the virtual clock: time to first token with a transfer, less that of a step of one token after a cache hit."""
    prompt = list(range(num_tokens))
    num_blocks = -(-num_tokens // 16)
    with pair() as (producer, consumer):
        params = producer.post(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=PREFILL)["kv_transfer_params"]
        consumer.post(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=params)
        with_transfer = consumer.metric("vllm:time_to_first_token_seconds_sum")
        assert consumer.metric("vllm:nixl_bytes_transferred_sum") == num_blocks * BLOCK
        assert consumer.metric("vllm:nixl_xfer_time_seconds_sum") == pytest.approx(num_blocks * BLOCK / 10e9 + 0.002)
        consumer.post(TEXT, prompt=prompt, max_tokens=1)  # its whole blocks are in the cache: the same one token
        without = consumer.metric("vllm:time_to_first_token_seconds_sum") - with_transfer
    waited = with_transfer - without
    assert waited == pytest.approx(num_blocks * BLOCK / 10e9 + 0.002, rel=1e-6)


def test_a_cached_beginning_is_not_transferred() -> None:
    prompt = list(range(1000))
    with pair() as (producer, consumer):
        consumer.post(TEXT, prompt=prompt[:512], max_tokens=1)
        params = producer.post(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=PREFILL)["kv_transfer_params"]
        consumer.post(TEXT, prompt=prompt, max_tokens=1, kv_transfer_params=params)
        assert consumer.metric("vllm:nixl_bytes_transferred_sum") == (63 - 32) * BLOCK
        assert wait_for(lambda: num_kept(producer) == 0)


def test_blocks_that_nobody_reads_are_freed_when_the_lease_ends() -> None:
    with served(a_twin("kv_producer", virtual=False, speed=100.0)) as producer:  # 30 s are 0.3 s
        producer.post(TEXT, prompt=list(range(100)), max_tokens=1, kv_transfer_params=PREFILL)
        assert num_kept(producer) == 1
        assert producer.metric("vllm:kv_cache_usage_perc") > 0
        assert wait_for(lambda: num_kept(producer) == 0)
        assert wait_for(lambda: producer.metric("vllm:nixl_num_kv_expired_reqs_total") == 1)
        assert producer.metric("vllm:kv_cache_usage_perc") == 0
        producer.backend.scheduler.check_invariants()


def test_a_reader_that_waits_renews_the_lease() -> None:
    backend = a_twin("kv_producer", virtual=False)
    handover = transfer_of(backend)
    moment = 0.0
    handover.now = lambda: moment
    backend.submit([1] * 40, SamplingParams(max_tokens=1), request_id="r", simulated=Simulated(transfer=PREFILL))
    while backend.has_unfinished:
        backend.step()
    moment = 29.0
    handover._tell("alive", ["r", "another"])
    handover.look()
    moment = 48.0  # two thirds of 30 s from then on
    handover.look()
    assert set(handover.pinned) == {"r"}
    moment = 49.0
    handover.look()
    assert not handover.pinned
    handover._tell("done", "r")
    handover.look()
    assert (handover.counts.expired, handover.counts.late) == (1, 1)
    backend.close()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_prompt_that_cannot_be_had_fails_or_is_computed(recomputes: bool) -> None:
    gone = {
        **PREFILL, "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "gone",
        "remote_request_id": "r", "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]], "remote_host": "localhost",
        "remote_port": free_port(),
    }  # fmt: skip
    with served(a_twin("kv_consumer", recomputes=recomputes)) as consumer:
        body = {"prompt": list(range(100)), "max_tokens": 3, "kv_transfer_params": gone}
        if recomputes:
            assert consumer.post(TEXT, **body)["usage"]["completion_tokens"] == 3
        else:
            status, error = consumer.refusal(TEXT, body)
            assert (status, "could not be pulled" in error["message"]) == (500, True)
        assert consumer.metric("vllm:nixl_num_failed_transfers_total") == 1
        consumer.backend.scheduler.check_invariants()
        assert consumer.metric("vllm:kv_cache_usage_perc") == 0


def test_an_aborted_reader_lets_the_blocks_go() -> None:
    """Aborted before it was scheduled: nothing is read, and the producer is told so at once."""
    producer, consumer = a_twin("kv_producer"), a_twin("kv_consumer")
    producer.submit([1] * 40, SamplingParams(max_tokens=1), request_id="r", simulated=Simulated(transfer=PREFILL))
    while producer.has_unfinished:
        producer.step()
    params = transfer_of(producer).take_answer("r")
    assert params is not None
    consumer.submit([1] * 40, SamplingParams(max_tokens=1), request_id="d", simulated=Simulated(transfer=params))
    consumer.abort("d")
    while consumer.has_unfinished:
        consumer.step()

    def is_free() -> bool:
        transfer_of(producer).look()
        return not transfer_of(producer).pinned

    assert wait_for(is_free)
    assert transfer_of(consumer).counts.moved == type(transfer_of(consumer).counts.moved)()
    producer.close()
    consumer.close()


def test_an_aborted_prefill_keeps_nothing() -> None:
    backend = a_twin("kv_producer")
    backend.submit([1] * 4000, SamplingParams(max_tokens=9), request_id="r", simulated=Simulated(transfer=PREFILL))
    backend.step()
    backend.abort("r")
    backend.scheduler.check_invariants()
    assert not transfer_of(backend).pinned
    assert transfer_of(backend).take_answer("r") is None
    backend.close()


def test_params_that_name_no_server_are_refused() -> None:
    backend = a_twin("kv_consumer")
    whole = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r"}
    for params, word in (
        (whole, "remote_host"),
        ({**whole, "remote_host": "h", "remote_port": "x"}, "remote_port"),
        ({**whole, "remote_host": "h", "remote_port": True}, "remote_port"),
        ({**whole, "remote_host": "h", "remote_port": 1, "remote_num_tokens": 30}, "of 30 tokens, and this one has 40"),
    ):
        with pytest.raises(InvalidInputError, match=word):
            backend.submit([1] * 40, simulated=Simulated(transfer=params))
    assert not backend.scheduler.has_unfinished
    backend.close()


NONSENSE = (b"", b"[]\n", b"7\n", b"{}\n", b"{\n", b"[" * 100_000, b'{"done": 7}\n', b'{"alive": 1}\n')


@pytest.mark.parametrize("line", NONSENSE)
def test_nonsense_on_the_side_channel_changes_nothing(line: bytes) -> None:
    backend = a_twin("kv_producer")
    with socket.create_connection(("localhost", transfer_of(backend).config.port), 5) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)
    transfer_of(backend).look()
    assert transfer_of(backend).counts == type(transfer_of(backend).counts)()
    backend.close()


NIXL = '{"kv_connector": "NixlConnector", "kv_role": "%s"%s}'


@pytest.mark.parametrize(
    ("config", "link", "words"),
    [
        (NIXL % ("kv_consumer", ""), None, "--link"),
        (
            NIXL % ("kv_producer", ', "kv_connector_extra_config": {"bidirectional_kv_xfer": true}'),
            None,
            "bidirectional",
        ),
        (
            NIXL % ("kv_producer", ', "kv_connector_extra_config": {"kv_lease_duration": "1"}'),
            None,
            "kv_lease_duration",
        ),
        ('{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}', Link(1e9), "NixlConnector"),
        (None, Link(1e9), "--kv-transfer-config"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(config: str | None, link: Link | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        transfer_config(planned(kv_transfer_config=config), link, 0, is_rank=False)


def test_servers_of_one_process_have_ports_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "7000")
    plan = planned(kv_transfer_config=NIXL % ("kv_both", ', "engine_id": "e"'))
    configs = [transfer_config(plan, Link(1e9), number, is_rank=True) for number in range(2)]
    assert [(config.port, config.engine_id) for config in configs if config] == [(7000, "e_dp0"), (7001, "e_dp1")]


def test_a_port_in_use_is_said_before_the_start() -> None:
    backend = a_twin("kv_producer")
    with pytest.raises(EnvironmentProblem, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        SideChannel(transfer_of(backend).config, lambda verb, value: None, lambda: None)
    backend.close()


def test_a_server_without_a_connector_has_no_such_metrics() -> None:
    assert b"nixl" not in ServerMetrics("m", 1024, {}).page()
