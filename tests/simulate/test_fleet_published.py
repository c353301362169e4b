"""Fleets that others measured: the order of their outcomes. The servers' GPU or answers' lengths are not all stated."""

import random
from math import cos, pi

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.fleet import Fleet, Kind
from kvplan.simulate.handover import Link
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.routers import LeastLoaded
from kvplan.simulate.setup import Setup, token_bytes
from kvplan.simulate.steptime import step_time
from kvplan.workloads.trace import TraceRequest


def split(gpu_name: str, tp: int, prefill: int, decode: int, arrivals: Arrivals) -> Fleet:
    args = EngineArgs(max_model_len=16_384, tensor_parallel_size=tp)
    the_plan = plan(Request(catalog.load("qwen3-30b-a3b"), gpu(gpu_name), args))
    setup = Setup(the_plan, step_time(the_plan, Shares()))
    size = token_bytes(the_plan)
    kinds = (Kind("", setup.run, "prefill", size),) * prefill + (Kind("", setup.run, "decode", size),) * decode
    fleet = Fleet(kinds, arrivals, LeastLoaded(), link=Link(50e9), decode_router=LeastLoaded())
    fleet.run()
    return fleet


@pytest.mark.parametrize(
    ("users", "published", "simulated"), [(8, (0.46, -0.003), (0.26, 0.07)), (16, (0.66, -0.003), (0.24, 0.02))]
)
def test_a_second_decode_server_pays_at_short_prompts_alone(
    users: int, published: tuple[float, float], simulated: tuple[float, float]
) -> None:
    """sglang-omni#1760, Qwen3-Omni's thinker on H200s, at 1,024 and at 8,128 tokens: the order is right, the gains at
    short prompts are 57 and 36 % of the published ones with 8 and 16 users (docs/fleets.md).

    Answers of 128 tokens are a guess; see the next test.
    """

    def gain(prompt: int) -> float:
        requests = [TraceRequest(0.0, prompt, 128)] * 100
        single, two = (split("h200", 1, 1, count, Closed(iter(requests), users)).clock for count in (1, 2))
        return single / two - 1

    short, long = gain(1024), gain(8128)
    assert (short, long) == pytest.approx(simulated, abs=0.01)
    assert (short > long) == (published[0] > published[1])


@pytest.mark.parametrize(("answer", "pays"), [(64, False), (128, False), (256, True), (512, True)])
def test_that_order_rests_on_the_guessed_length_of_answers(answer: int, pays: bool) -> None:
    """The thread does not state it: from 256 tokens on a second server pays at 8,128 too, as docs/fleets.md says."""
    requests = [TraceRequest(0.0, 8128, answer)] * 100
    single, two = (split("h200", 1, 1, count, Closed(iter(requests), 8)).clock for count in (1, 2))
    assert (single / two - 1 > 0.25) == pays


@pytest.mark.full
def test_one_prefill_server_collapses_under_a_burst() -> None:
    """dynamo#10528: 1 to 24 requests/s every 900 s, 8,000 tokens in, 1,000 out: first tokens after 160 s on average
    and 403 s at most, 9 % within 3 s and 35 ms a token. Here: one of its two waves and a bit; the GPU is a guess.
    """
    rng, time, requests = random.Random(1), 0.0, []
    while time < 900:
        time += rng.expovariate(24)
        if rng.random() < (12.5 - 11.5 * cos(2 * pi * time / 900)) / 24:
            requests.append(TraceRequest(time, 8000, 1000))
    shares = []
    for prefill in (1, 3):
        records = split("h100-80g", 2, prefill, 8, Open(iter(requests))).records
        times = [first - arrival for arrival, first in zip(records.arrival, records.first_token, strict=True)]
        shares.append((sum(times) / len(times), sum(value <= 3 for value in times) / len(times)))
    (collapsed, few), (served, many) = shares
    assert collapsed > 80
    assert few < 0.25
    assert served < 3
    assert many > 0.8
