"""Multiply by quantised layers with the Triton kernels, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.support.quantized_run DIR ...
    TRITON_INTERPRET=0 python -m tests.support.quantized_run --ptx ARCH

For each directory of a quantised model one line: how far the queries, keys and values that its first layer makes of
random numbers are from what is meant, as a share of the largest. Or the minima and maxima that triton compiles for a
GPU of this architecture where it rounds rows to fp8.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.directory import read_spec
from engine.kernels import torch_backend, triton_backend
from engine.kernels.fp8 import fp8_rows_kernel
from engine.loader import Checkpoint
from engine.models import Model
from engine.quantized import Fp8Matrix, product
from engine.tp import TensorParallel
from tests.support import kernel_reference as reference
from tests.support.fast_interpreter import hurry


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


def minima_and_maxima(arch: int) -> dict[str, list[str]]:
    """By whether the scale is given or each row's own."""
    instructions = {}
    for name, scale_type in (("own", "constexpr"), ("given", "*fp32")):
        signature = {
            "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "x_ptr": "*bf16", "given_ptr": scale_type, "width": "i32",
            "stride_x": "i32", "BLOCK": "constexpr",
        }  # fmt: skip
        constants = {"BLOCK": 1024} | ({"given_ptr": None} if name == "own" else {})
        kernel = triton.compile(ASTSource(fp8_rows_kernel, signature, constants), target=GPUTarget("cuda", arch, 32))
        instructions[name] = sorted(set(re.findall(r"\b(?:max|min)\.[\w.]+", kernel.asm["ptx"])))
    return instructions


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--ptx", arch]:
            print(json.dumps(minima_and_maxima(int(arch))))
        case names:
            hurry()
            for name in names:
                print(json.dumps(difference(Path(name))))
