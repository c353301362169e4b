"""What the launchers of engine/kernels cost the host, in calls and in microseconds; no GPU is needed.

    python -m benchmarks.launches [--rounds 30]

A row per launcher, with the tensors of a decode step of Llama-3.1-8B, of a DeepSeek-like one, and of sampling. Without
Triton's own launch, what remains is checking the arguments, choosing the tile, and allocating the output. `first` is a
launch with layouts that no launch had before, `again` one with layouts that were checked before. Calls are exact;
microseconds depend on the machine, their ratio hardly.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from engine.kernels import checks, configs, fp8, triton_backend
from engine.kernels.query_tiles import all_tiles
from engine.kernels.work_list import Sizes, WorkList

Launch = Callable[[], object]
REPEATS = 50


def nothing(*_args: object, **_options: object) -> None:
    """In place of Triton's launch."""


def num_processors(_device: torch.device) -> int:
    """An H100's."""
    return 132


@contextmanager
def without_gpu() -> Iterator[None]:
    """Within it launchers launch for an H100, and nothing runs."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", nothing))
        stack.enter_context(mock.patch.object(configs, "arch", partial(int, 90)))
        stack.enter_context(mock.patch.object(configs, "num_processors", num_processors))
        stack.callback(checks.forget)
        checks.forget()
        yield


def launches(num_tokens: int = 64) -> dict[str, Launch]:
    """Each launcher with the tensors of a decode step of so many sequences, and one prefill of 512 tokens."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    q, kv = empty(num_tokens, 32, 128), empty(num_tokens, 8, 128)
    cache, weight = empty(64, 16, 8, 128), empty(4096)
    hidden, gate_up = empty(num_tokens, 4096), empty(num_tokens, 2 * 14_336)
    tables, lens = empty(num_tokens, 64, dtype=torch.int32), empty(num_tokens, dtype=torch.int32)
    positions, cos_sin = empty(num_tokens, dtype=torch.int64), empty(1024, 128, dtype=torch.float32)
    sizes = Sizes(num_items=num_tokens + 20, num_merges=10, num_slots=30)
    work = WorkList(empty(sizes.num_rows, 4, dtype=torch.int32), sizes, num_tokens, None)
    chunk, starts = empty(512, 32, 128), empty(2, dtype=torch.int32)
    tiles = all_tiles(1, 512, 32, chunk.device)
    latent_q, latents = empty(num_tokens, 16, 576), empty(16, 64, 576)
    x, w13, w2 = empty(num_tokens, 256), empty(8, 2 * 32, 256), empty(8, 256, 32)
    ids, expert_weights = empty(num_tokens, 2, dtype=torch.int64), empty(num_tokens, 2, dtype=torch.float32)
    words, zeros = empty(32, 64, dtype=torch.int32), empty(2, 8, dtype=torch.int32)
    fp8_values, fp8_scales = empty(64, 256, dtype=torch.float8_e4m3fn), empty(1, 2, dtype=torch.float32)
    logits, best = empty(num_tokens, 8192), empty(num_tokens, dtype=torch.float32)
    temperature, uniforms = (empty(num_tokens, 1, dtype=dtype) for dtype in (torch.float32, torch.float64))
    top_k, top_p = (empty(num_tokens, 1, dtype=dtype) for dtype in (torch.int64, torch.float64))
    run: Any = triton_backend
    return {
        "rms_norm": partial(run.rms_norm, hidden, weight, 1e-5, residual=hidden),
        "rotate_and_store": partial(run.rotate_and_store, q, kv, kv, cos_sin, positions, cache, cache, positions),
        "paged_decode": partial(run.paged_decode, q, cache, cache, tables, lens, 0.1, work=work),
        "paged_prefill": partial(
            run.paged_prefill, chunk, cache, cache, tables[:1], starts, lens[:1], 0.1, max_query_len=512, tiles=tiles
        ),
        "latent_decode": partial(run.latent_decode, latent_q, latents, tables, lens, 0.1, latent_dim=512, work=work),
        "store_latent": partial(run.store_latent, latent_q[:, 0], latents, positions),
        "gated_activation": partial(run.gated_activation, gate_up, "silu"),
        "route": partial(run.route, x, top_k=2, scoring="softmax"),
        "moe_mlp": partial(run.moe_mlp, x, w13, w2, ids, expert_weights, "silu"),
        "int4_linear": partial(run.int4_linear, x, words, empty(2, 64, dtype=torch.float16), zeros),
        "fp8_block_linear": partial(run.fp8_block_linear, x, fp8_values, fp8_scales, (128, 128)),
        "fp8_rows": partial(fp8.fp8_rows, hidden),
        "best_tokens": partial(run.best_tokens, logits),
        "nucleus_floors": partial(run.nucleus_floors, logits, best, temperature, top_k, top_p, num_sorted=8192),
        "draw": partial(run.draw, logits, best, temperature, uniforms),
    }


def calls_of(launch: Launch) -> int:
    """Functions that a launch calls, Python's and C's, itself not counted."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        launch()
    finally:
        sys.setprofile(None)
    return calls - 2  # the launch, and the end of counting


def microseconds(launch: Launch) -> float:
    """Mean of REPEATS launches."""
    start = time.perf_counter_ns()
    for _ in range(REPEATS):
        launch()
    return (time.perf_counter_ns() - start) / REPEATS / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each launcher (%(default)s)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'':18}{'calls':>14}{'microseconds':>20}")
    print(f"{'launcher':18}{'first':>8}{'again':>6}{'first':>12}{'again':>8}{'ratio':>8}")
    with without_gpu():
        for name, launch in launches().items():
            launch()  # what is made once, as of a decode's plan, is made
            checks.forget()
            first_calls, again_calls = calls_of(launch), calls_of(launch)
            first, again = zip(*(pair(launch) for _ in range(rounds)), strict=True)
            first_us, again_us = min(first), min(again)  # a machine's other load only adds
            ratio = first_us / again_us
            print(f"{name:18}{first_calls:>8}{again_calls:>6}{first_us:>12.1f}{again_us:>8.1f}{ratio:>8.2f}")


def pair(launch: Launch) -> tuple[float, float]:
    """Microseconds of a first launch and of another, side by side: the machine's load falls on both."""
    return microseconds(partial(anew, launch)), microseconds(launch)


def anew(launch: Launch) -> None:
    """Launch as if no layout had been checked."""
    checks.forget()
    launch()


if __name__ == "__main__":
    main()
