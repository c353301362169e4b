"""Requests that name adapters: their least time by hand, their slots and prefixes, refusals."""

from typing import Any

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.simulate.adapters import Adapters
from kvplan.simulate.kernels.layers import Adapted
from kvplan.simulate.kernels.roof import LAUNCH
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

ASKED = ("simulate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "-q", "--format", "json")
LOAD = ("--users", "8", "--ramp", "0s", "--prompt-tokens", "200", "--output-tokens", "50", "--num-requests", "40")
SERVER = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "16")


def figures(run: Run, *words: str) -> dict[str, Any]:
    variant: dict[str, Any] = run(*ASKED, *LOAD, *words).json["variants"][0]
    return variant


def test_a_layers_least_time_by_hand() -> None:
    """Queries, keys and values of Llama 3.1 8B (4,096 to 6,144 in three slices), rank 16, two adapters, 10 tokens.

    To the rank: matrices 2 x 3 x 16 x 4,096 x 2 = 786,432 B, inputs 10 x 4,096 x 2 = 81,920 B, sums 10 x 3 x 16 x 4 =
    1,920 B. Back: matrices 2 x 16 x 6,144 x 2 = 393,216 B, outputs read and written 10 x 6,144 x 2 x 2 = 245,760 B, and
    the sums again. Both move bytes for longer than they multiply.
    """
    h100 = gpu("h100-80g")
    adapters = Adapters(2, 1.0, 16, h100, ((Adapted(4096, 6144, 3), 1),))
    moved = (786_432 + 81_920 + 1_920) + (393_216 + 245_760 + 1_920)
    assert adapters.seconds(10, 2) == pytest.approx(2 * LAUNCH + moved / (h100.memory_bandwidth or 1))
    assert adapters.seconds(0, 0) == 0.0


def test_more_requests_with_adapters_take_longer(run: Run) -> None:
    named: tuple[tuple[str, ...], ...] = ((), ("--adapters", "4@0.5"), ("--adapters", "4"))
    times = [figures(run, *SERVER, *words)["times"]["tpot"]["mean"] for words in named]
    assert times[0] < times[1] < times[2]


def test_no_more_adapters_run_at_once_than_there_are_slots(run: Run) -> None:
    """One slot and 40 adapters for 8 users: nearly every request waits for the one before."""
    crowded = figures(run, "--enable-lora", "--max-loras", "1", "--adapters", "40")
    assert crowded["running"]["mean"] < 3
    assert figures(run, *SERVER, "--adapters", "1")["running"]["mean"] > 6


def test_a_prefix_belongs_to_one_adapter(run: Run) -> None:
    """All prompts share 160 of 200 tokens: found by nearly all of one adapter's, by fewer of 40 adapters'."""
    shared = ("--shared-prefix", "160")
    same = figures(run, *SERVER, "--adapters", "1", *shared)["prefix_cache"]["hit_rate"]
    others = figures(run, "--enable-lora", "--max-loras", "8", "--adapters", "40", *shared)["prefix_cache"]["hit_rate"]
    assert others < same / 1.5


REFUSED = (
    (("--adapters", "4"), "the server has no slot for adapters"),
    ((*SERVER, "--adapters", "0"), "--adapters"),
    ((*SERVER, "--adapters", "4@2"), "--adapters"),
    ((*SERVER, "--adapters", "4", "--baseline", "contiguous"), "is not simulated with --adapters"),
    ((*SERVER, "--adapters", "4", "--replicas", "2"), "supports only one server"),
    (("--engine", "sglang", "--adapters", "4"), "needs vLLM's scheduler"),
)


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_simulated_with_adapters_is_refused(run: Run, words: tuple[str, ...], message: str) -> None:
    assert message in refused(run(*ASKED, *LOAD, *words))
