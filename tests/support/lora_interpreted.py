"""A program: requests with adapters on the Triton kernels, in the interpreter; needs TRITON_INTERPRET=1.

`python -m tests.support.lora_interpreted FOLDER ADAPTER ADAPTER` prints the tokens of a request of each adapter and of
one without, in one batch; then the same on the tensors of CUDA graphs, which a CPU runs again instead of replaying.
"""

import json
import sys
from pathlib import Path

import torch

from engine import Engine, EngineConfig, SamplingParams, cuda_graphs
from tests.support.fast_interpreter import hurry

PROMPTS = (tuple(range(5, 25)), (7, 8, 9), (11, 12, 13, 14))
TOKENS = 3


def served(folder: str, adapters: list[str], *, graphs: bool) -> None:
    """Print the tokens of three requests in one batch: of each adapter, and of the model alone."""
    engine = Engine(
        folder,
        EngineConfig(
            device="cpu", dtype="float32", backend="triton", block_size=16, num_blocks=20, max_model_len=48,
            max_num_seqs=3, max_num_batched_tokens=32, max_loras=2, max_lora_rank=8,
        ),
    )  # fmt: skip
    if graphs:
        cuda_graphs.SIZES = (4,)  # more than there are requests
        cuda_graphs.capture = lambda run, pool: run
        engine.runner.graphs = engine.runner._capture_graphs()
    for path in adapters:
        engine.load_adapter(path, Path(path))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    ids = [
        engine.add_request(list(prompt), params, adapter=adapter)
        for prompt, adapter in zip(PROMPTS, (*adapters, None), strict=True)
    ]
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
    print(json.dumps([outputs[request_id] for request_id in ids]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    hurry()
    for with_graphs in (False, True):
        served(sys.argv[1], sys.argv[2:], graphs=with_graphs)
