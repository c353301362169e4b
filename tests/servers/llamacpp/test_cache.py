"""Context and caches: worked by hand, or as llama.cpp's public logs state them."""

from functools import cache

import pytest

from kvplan.core.errors import UsageError
from kvplan.models import catalog
from kvplan.models.gguf_model import gguf_of
from kvplan.servers.llamacpp.measure import Measured, Server
from kvplan.servers.llamacpp.settings import MIB, Device, Settings, context_of

GRANITE = "ibm-granite/granite-3b-code-instruct-128k"
GPU = Device(200_000 * MIB, 200_000 * MIB)


@cache
def server(name: str) -> Server:
    return Server(gguf_of(catalog.load(name)), [GPU])


def measured(name: str, settings: Settings) -> Measured:
    return server(name).measure(settings)


@pytest.mark.parametrize(
    ("settings", "total", "cells", "streams"),
    [
        (Settings(ctx=5000), 5120, 5120, 1),
        (Settings(ctx=5000, slots=1), 5120, 5120, 1),
        (Settings(ctx=5000, slots=4), 5120, 1280, 4),
        (Settings(ctx=5000, slots=3), 5376, 1792, 3),  # 5120 / 3 = 1706, up to 1,792
        (Settings(ctx=5000, slots=4, unified=True), 5120, 5120, 1),
        (Settings(ctx=5000, unified=False), 5120, 5120, 1),  # slots that are not counted share a cache
        (Settings(), 131_072, 131_072, 1),
    ],
)
def test_the_context_is_whole_runs_of_cells(settings: Settings, total: int, cells: int, streams: int) -> None:
    context = context_of(server("llama-3.1-8b").shape, settings)
    assert (context.total, context.cells, context.streams) == (total, cells, streams)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("llama-3.1-8b", Settings(ctx=8192), 32 * 8192 * 4096),  # 8 heads of 128, K and V, f16
        ("llama-3.1-8b", Settings(ctx=8192, cache_k="Q8_0", cache_v="Q8_0"), 32 * 8192 * 2 * 1024 * 34 // 32),
        ("deepseek-v2-lite", Settings(ctx=8192), 27 * 8192 * 576 * 2),  # one latent of 512 + 64
        ("gpt-oss-20b", Settings(slots=1), 3090 * MIB),  # as an Apple M5's log says of 131,072 cells
        ("qwen3.6-27b", Settings(ctx=73_728), int(5206.5 * MIB)),  # as an RTX 3090's log says, four slots
    ],
)
def test_caches_and_states_are_what_was_logged(name: str, settings: Settings, expected: int) -> None:
    assert measured(name, settings).places[0].context == expected


def test_a_cache_on_the_host_is_on_the_host() -> None:
    places = measured("llama-3.1-8b", Settings(ctx=8192, offload_cache=False)).places
    assert (places[0].context, places[None].context) == (0, 32 * 8192 * 4096)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama-3.1-8b", Settings(flash="off", cache_v="Q8_0"), "-ctv q8_0: a quantized V cache needs flash attention"),
        ("deepseek-v2-lite", Settings(cache_k="Q8_0"), "-ctk q8_0 -ctv f16: this model keeps one cache for both"),
        ("llama-3.1-8b", Settings(cache_k="Q6_K"), "-ctk q6_k: llama.cpp has no such cache type"),
        ("llama-3.1-8b", Settings(slots=300), "-np 300: llama.cpp takes 1 to 256 slots"),
        (
            "ibm-granite/granite-3b-code-instruct-128k",
            Settings(cache_k="Q5_0"),
            "-ctk q5_0: blocks of 32 elements do not divide heads of 80",
        ),
    ],
)
def test_what_the_server_refuses_is_refused_by_name(name: str, settings: Settings, words: str) -> None:
    with pytest.raises(UsageError) as error:
        server(name).measure(settings)
    assert str(error.value).startswith(words)
