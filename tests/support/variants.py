"""Which variants of its kernels an engine launches at start-up, and which only while it serves; without a GPU.

`python -m tests.support.variants FAMILY ...` prints a line of JSON for each small model: variants at the start, and the
names of those first launched while serving. Each of them would be compiled, for a second or more, with all requests
waiting. Kernels are not launched here, so what the tokens are means nothing.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from tests.support.launchless import ARCH, stub


def main() -> None:
    stub()
    seen = recorded()
    for family in sys.argv[1:]:
        print(json.dumps(variants(family, seen)), flush=True)


def recorded() -> dict[tuple[str, str, str], None]:
    """(kernel, what its arguments are specialized to, options) of every launch, in order."""
    from triton.runtime.jit import JITFunction

    seen: dict[tuple[str, str, str], None] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = kernel.device_caches[ARCH][4]
        _, specialization, chosen = binder(*args, **{"debug": False, **options})
        seen[kernel.__name__, str(specialization), str(chosen)] = None

    JITFunction.run = run
    return seen


def variants(family: str, seen: dict[tuple[str, str, str], None]) -> dict[str, Any]:
    from engine import Engine, EngineConfig
    from tests.support.small_engines import saved_model

    seen.clear()
    config = EngineConfig(
        device="cpu", dtype="bfloat16", backend="triton", block_size=16, num_blocks=1200, max_num_seqs=64,
        max_num_batched_tokens=1024, async_scheduling=True,
    )  # fmt: skip
    engine = Engine(saved_model(family), config)
    at_start = dict(seen)
    for prompts, params in loads(engine):
        outputs = engine.generate(prompts, params)
        assert all(output.finish_reason == "length" for output in outputs), outputs[0].error
    return {
        "family": family,
        "at_start": len(at_start),
        "while_serving": sorted(
            f"{name}: {key}" for name, key, options in seen if (name, key, options) not in at_start
        ),
    }


def loads(engine: Any) -> Iterator[tuple[list[list[int]], Any]]:
    """Batches of one row and of several, of short and long prompts, sampled in every way and in several at once."""
    from engine import SamplingParams

    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0}, "drawn": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.1}, "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
        "logprobs": {"temperature": 0, "logprobs": 3},
        "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5, "logprobs": 2, "seed": 1},
    }  # fmt: skip
    params_by_way = {name: SamplingParams(max_tokens=3, ignore_eos=True, **options) for name, options in ways.items()}
    longest = engine.max_model_len - 4
    for num_seqs, length in product((1, 2, 3, 16, 17, 40), (1, 2, 9, 30, 100, 300, longest)):
        yield (
            [[3 + (i + j) % 200 for i in range(min(length, longest))] for j in range(num_seqs)],
            params_by_way["greedy"],
        )
    for params in params_by_way.values():
        for num_seqs in (1, 2, 16, 33):
            yield [[5, 6, 7 + j] for j in range(num_seqs)], params
    for first, second in product(params_by_way.values(), repeat=2):
        yield [[5, 6, 7], [8, 9], [4] * 40, [3]], [first, second, first, second]


if __name__ == "__main__":
    main()
