"""--fit, the load and the other way round: laws, and what llama.cpp's public logs and answers say."""

from dataclasses import replace
from functools import cache

import pytest

from kvplan.models import catalog
from kvplan.models.gguf_model import gguf_of
from kvplan.servers.llamacpp.fit import fit
from kvplan.servers.llamacpp.inversions import fewest_host_experts, largest, longest_context, most_layers, room
from kvplan.servers.llamacpp.loading import Obstacle, loaded
from kvplan.servers.llamacpp.measure import Server
from kvplan.servers.llamacpp.settings import MIB, Device, Settings
from tests.support.llamacpp_rows import device

MARGIN = 1024 * MIB


@cache
def server(name: str, *gpus: str) -> Server:
    return Server(gguf_of(catalog.load(name)), [device(gpu) for gpu in gpus])


def test_the_context_shrinks_to_what_the_device_has() -> None:
    """llama.cpp's own choice for this model on this card, with all its layers."""
    choice = fit(server("qwen3-32b", "rtx-4090"), Settings())
    assert (choice.settings.ctx, choice.settings.gpu_layers, choice.problem) == (15_616, None, None)


@pytest.mark.parametrize("name", ["qwen3-32b", "llama-3.3-70b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("gpus", [("rtx-4090",), ("rtx-3090", "rtx-3060")])
def test_what_fit_chooses_leaves_the_margin_free(name: str, gpus: tuple[str, ...]) -> None:
    machine = server(name, *gpus)
    choice = fit(machine, Settings())
    assert choice.problem is None
    assert room(machine, choice.settings, MARGIN) >= 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(ctx=8192, gpu_layers=99), "-ngl 99 is given"),
        (Settings(ctx=8192, split=(1, 1)), "-ts is given"),
    ],
)
def test_fit_gives_up_where_a_value_is_given(settings: Settings, words: str) -> None:
    choice = fit(server("llama-3.3-70b", "rtx-3090", "rtx-3060"), settings)
    assert choice.settings == settings
    assert choice.problem is not None
    assert choice.problem.startswith(words)


def test_weights_are_what_stops_a_load_first() -> None:
    machine = server("llama-3.3-70b", "rtx-4090")
    _, problem = loaded(machine, Settings(ctx=8192))
    assert problem is not None
    assert (problem.place, problem.buffer, problem.left) == (0, "weights", 23_600 * MIB)


def test_a_cache_that_is_too_long_stops_a_load_after_the_weights() -> None:
    machine = server("qwen3-32b", "rtx-4090")
    measured, problem = loaded(machine, Settings(ctx=131_072))
    assert problem == Obstacle(0, "context", measured.places[0].context, 23_600 * MIB - measured.places[0].weights)


def test_copies_for_several_devices_are_given_up_before_the_load_is() -> None:
    """Two cards with so little left that the buffers fit only without three more copies of a batch's inputs."""
    shared = server("llama-3.1-8b", "rtx-3090", "rtx-3090")
    settings = Settings(ctx=16_384)
    lean = shared.allocate(settings, pipeline=False)
    tight = [replace(d, free=lean.places[i].total) for i, d in enumerate(shared.devices)]
    split = tuple(float(lean.placement.layers.count(i) + (i == 1)) for i in (0, 1))
    machine = Server(shared.model, tight)
    measured, problem = loaded(machine, replace(settings, split=split))
    assert (measured.copies, problem) == (1, None)


def test_a_device_with_the_hosts_memory_holds_both() -> None:
    """Half of the weights on the host are still in the one memory: 2 GiB too little for all of them."""
    model = gguf_of(catalog.load("llama-3.1-8b"))
    machine = Server(model, [Device(4096 * MIB, 3072 * MIB, integrated=True)])
    _, problem = loaded(machine, Settings(ctx=4096, gpu_layers=16))
    assert problem is not None
    assert problem.place == 0


def test_the_longest_context_is_the_last_that_fits() -> None:
    machine = server("llama-3.3-70b", "rtx-3090", "rtx-3090")
    longest = longest_context(machine, Settings(), MARGIN)
    assert longest is not None
    assert room(machine, Settings(ctx=longest), MARGIN) >= 0 > room(machine, Settings(ctx=longest + 256), MARGIN)


def test_the_most_layers_are_the_last_that_fit() -> None:
    machine, settings = server("llama-3.3-70b", "rtx-4090"), Settings(ctx=4096)
    layers = most_layers(machine, settings, MARGIN)
    assert layers == 43  # llama.cpp's own choice with 4,096 tokens
    assert room(machine, replace(settings, gpu_layers=44), MARGIN) < 0


def test_the_fewest_experts_on_the_host_are_the_last_that_fit() -> None:
    machine, settings = server("qwen3-30b-a3b", "rtx-4070-super"), Settings(ctx=8192)
    layers = fewest_host_experts(machine, settings, MARGIN)
    assert layers is not None
    assert 0 < layers < 48


@pytest.mark.parametrize(("budget", "expected"), [(0, 0), (99, 9), (100, 10), (101, 10), (10_000, 40), (-1, None)])
def test_the_largest_number_that_leaves_something_is_found(budget: int, expected: int | None) -> None:
    assert largest(0, 40, lambda number: budget - 10 * number) == expected
