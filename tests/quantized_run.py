"""Multiply by quantised layers with the Triton kernels, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.quantized_run DIR ...

For each directory of a quantised model one line: how far the queries, keys and values that its first layer makes of
random numbers are from what is meant, as a share of the largest.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from engine.directory import read_spec
from engine.kernels import reference, torch_backend, triton_backend
from engine.loader import Checkpoint
from engine.models import Model
from engine.quantized import Fp8Matrix, product
from engine.tp import TensorParallel


@torch.inference_mode()
def difference(folder: Path) -> float:
    source = Checkpoint(folder)
    model = Model(read_spec(folder), source, triton_backend, TensorParallel(), torch.float32, torch.device("cpu"), 64)
    layer: Any = model.layers[0]
    linear = layer.attention.qkv_proj
    x = torch.randn(5, model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    match linear.weight:
        case Fp8Matrix() as matrix:  # which the kernels multiply with activations that are fp8 too
            meant = reference.fp8_linear(x, matrix.values, matrix.row_scales, input_scale=matrix.input_scale)
        case matrix:
            meant = product(torch_backend, x, matrix, None)
    return float(((linear(x) - meant).abs().max() / meant.abs().max()).item())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(difference(Path(name))))
