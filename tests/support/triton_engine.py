"""A program: serve two prompts with the Triton kernels in the interpreter; a line of JSON, their tokens, per model.

`python -m tests.support.triton_engine KV_DTYPE FOLDER[,graphs|,compared] ...`, with TRITON_INTERPRET=1, which must be
set before triton is imported. With `graphs` decode steps run on the tensors of CUDA graphs, which a CPU runs again
instead of replaying; with `compared` the engine compares its kernels with plain torch, as on a GPU.
"""

import json
import sys
from dataclasses import replace

import torch

from engine import Engine, EngineConfig, SamplingParams, attention, cuda_graphs, model_runner
from tests.support.fast_interpreter import hurry

# A prompt prefilled in two chunks beside another's decode, across a block boundary.
PROMPTS = (tuple(range(5, 25)), (7, 8, 9))
TOKENS = 3

GRAPH_ROWS = 4  # more than there are requests


def served(folder: str, kv_dtype: str, way: str) -> list[list[int]]:
    load = attention.load
    attention.load = lambda backend, device_type: replace(load(backend, device_type), compiles=way == "compared")
    model_runner.ModelRunner._launch_every_variant = lambda self: None  # type: ignore[method-assign]
    engine = Engine(
        folder,
        EngineConfig(
            device="cpu", dtype="float32", backend="triton", kv_cache_dtype=kv_dtype, block_size=16, num_blocks=20,
            max_model_len=48, max_num_seqs=2, max_num_batched_tokens=16,
        ),
    )  # fmt: skip
    if way == "graphs":
        cuda_graphs.SIZES = (GRAPH_ROWS,)
        cuda_graphs.capture = lambda run, pool: run
        engine.runner.graphs = engine.runner._capture_graphs()
        assert engine.runner.graphs.planners
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    assert not engine.memory_report().fallbacks, engine.memory_report().fallbacks
    return [output.token_ids for output in engine.generate([list(p) for p in PROMPTS], params)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    hurry()
    kv_dtype, *models = sys.argv[1:]
    for folder, _, way in (model.partition(",") for model in models):
        print(json.dumps(served(folder, kv_dtype, way)), flush=True)
