"""The activation peak of the GPU's path without a GPU: `python -m tests.support.launchless MODEL[@CONTEXT,TOKENS] ...`.

A line of JSON for each: what the engine reports, and what the planner says of the same.

The engine runs its profile run on a CPU with the Triton backend, whose launchers allocate and check what they would on
a GPU of sm_90, and whose kernels are never launched; products of matrices are allocated and not computed. So the sizes
are those of the real model (two layers of each kind it has), in a second and a few GB that nobody touches, and the
numbers in the tensors mean nothing.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch

ARCH, NUM_PROCESSORS = 90, 132  # an H100


def main() -> None:
    stub()
    for job in sys.argv[1:]:
        name, _, sizes = job.partition("@")
        context, tokens = map(int, (sizes or "8192,8192").split(","))
        print(json.dumps(measured(name, context, tokens)), flush=True)


def stub() -> None:
    """Triton believes in a GPU, launches nothing, and torch multiplies nothing."""
    import triton
    from triton.runtime.jit import JITFunction

    from engine import kernels
    from engine.kernels import configs
    from engine.model_runner import ModelRunner
    from tests.support.compile_kernels import AbsentGpu

    torch.set_num_threads(1)
    absent = AbsentGpu()
    absent.arch = ARCH
    triton.runtime.driver.set_active(absent)
    JITFunction.run = lambda *_args, **_options: None
    configs.num_processors = lambda device: NUM_PROCESSORS
    kernels.load = lambda backend, device_type: import_module(kernels.BACKENDS["triton"])
    setattr(ModelRunner, "_compare_kernels", lambda _self: None)  # noqa: B010  # nothing is computed here
    torch.empty = zeroed(torch.empty)
    functional: Any = torch.nn.functional
    functional.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0])
    functional.scaled_dot_product_attention = lambda q, _k, v, **_options: q.new_empty(*q.shape[:-1], v.shape[-1])


def zeroed(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.empty whose small tensors are 0: indices that no kernel has written must still be indices."""

    def zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        return tensor if tensor.device.type == "meta" or tensor.numel() >= 1 << 22 else tensor.zero_()

    return zeros


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """A config with two layers of each kind: the widest moment of the model is among them."""
    for part in (config, config.get("text_config", {})):
        if "num_hidden_layers" not in part:
            continue
        dense = part.get("first_k_dense_replace", 0)
        kinds = part.get("layer_types")
        pattern = part.get("sliding_window_pattern", 0)  # every so many layers one without a window
        num_layers = max(2 + dense, pattern, 0 if kinds is None else 1 + max(kinds.index(kind) for kind in set(kinds)))
        part["num_hidden_layers"] = num_layers
        if kinds is not None:
            part["layer_types"] = kinds[:num_layers]
    return config


def measured(name: str, context: int, tokens: int) -> dict[str, Any]:
    """A catalog's model of two layers of each kind, in steps of so many tokens of at most 256 sequences."""
    from engine.config import EngineConfig
    from engine.loader import NoWeights
    from engine.model_runner import ModelRunner
    from engine.tp import TensorParallel
    from kvplan.models import catalog, hf_config
    from kvplan.servers.bundled.rules import EngineInputs, predict

    config = shortened(catalog.expand(catalog.facts(name)["config"]))
    config.pop("quantization_config", None)
    spec = hf_config.read_config(config, name, name)
    options: Any = {
        "max_model_len": context, "max_num_seqs": 256, "max_num_batched_tokens": tokens, "block_size": 16,
        "gpu_memory_utilization": 0.9,
    }  # fmt: skip
    engine = EngineConfig(device="cpu", backend="triton", load_format="dummy", num_blocks=64, **options)
    setattr(ModelRunner, "_launch_every_variant", lambda _self: None)  # noqa: B010  # nothing is compiled here
    runner = ModelRunner(spec, engine, NoWeights(), TensorParallel(), torch.device("cpu"), context, lambda _stage: None)
    inputs = EngineInputs(total=80 << 30, dtype="bfloat16", kv_cache_dtype="bfloat16", num_blocks=64, **options)
    step = runner._largest_step()
    arrays: tuple[Any, ...] = (
        step.token_ids, step.positions, step.context_lens, step.last_tokens, *step.block_tables, *step.slot_mapping,
    )  # fmt: skip
    return {
        "model": name,
        "reported": asdict(runner.memory),
        "inputs": sum(array.nbytes for array in arrays),
        "predicted": asdict(predict(spec, inputs)),
    }


if __name__ == "__main__":
    main()
