"""Fixes of the bundled engine's failed start, each checked by the engine's own rules with the log's settings."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from kvplan.core.errors import KvplanError
from kvplan.models.spec import ModelSpec
from kvplan.planning.case import Cure
from kvplan.servers.bundled.failures import TOTAL
from kvplan.servers.bundled.log_rows import num_groups, start_of
from kvplan.servers.bundled.rules import EngineInputs, predict
from kvplan.servers.logs.failures import Figures
from kvplan.servers.logs.log import ServerLog
from kvplan.sizing.layout import cdiv

PROOF: Final = "the engine's own rules, with the log's settings and figures"
RANKS: Final = (2, 4, 8)


def own_cures(cause: str, figures: Figures, evidence: str, log: ServerLog, spec: ModelSpec | None) -> list[Cure]:
    """Flags of `kvplan serve` that help, and what its own error line says to do."""
    results = list[Cure]()
    if cause == "max_len_above_model" and figures.derived_max_len is not None:
        value = figures.derived_max_len
        results.append(_flag("max_model_len", value, "lower", "the model's own maximum", "the log's own figure"))
    elif spec is not None:
        with suppress(KvplanError):  # a log without its settings: the line's own remedy is left
            results += _checked(cause, figures, evidence, log, spec)
    remedy = re.search(r"kvplan: error: .*; ([^;]{3,300})$", evidence)
    return [*results, *([] if remedy is None else [Cure("action", {}, (), remedy[1], "do", None)])]


def _checked(cause: str, figures: Figures, evidence: str, log: ServerLog, spec: ModelSpec) -> Iterator[Cure]:
    total = re.search(TOTAL, evidence)
    match cause:
        case "oom_loading_weights" if figures.free_bytes is not None:
            inputs, free = start_of(log).settings(figures.free_bytes.bytes), figures.free_bytes.low
            for ranks in RANKS:
                if _loaded(spec, replace(inputs, tensor_parallel_size=ranks)) <= free:
                    yield _flag("tensor_parallel_size", ranks, "raise", "splits the weights over several devices")
                    break
            if inputs.dtype == "float32" and _loaded(spec, replace(inputs, dtype="bfloat16")) <= free:
                yield _flag("dtype", "bfloat16", "change", "halves the weights")
        case "no_kv_memory" if total is not None:
            inputs = start_of(log).settings(int(total[1].replace(",", "")))
            shares = (share / 100 for share in range(int(inputs.gpu_memory_utilization * 100) + 1, 96))
            for share in shares:
                if _holds_a_request(spec, replace(inputs, gpu_memory_utilization=share)):
                    yield _flag("gpu_memory_utilization", share, "raise", "raises the memory budget")
                    break
            for tokens in _halves(inputs.max_num_batched_tokens):
                seqs = min(tokens, inputs.max_num_seqs)
                if _holds_a_request(spec, replace(inputs, max_num_batched_tokens=tokens, max_num_seqs=seqs)):
                    args = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
                    flags = tuple(f"--{name.replace('_', '-')} {value}" for name, value in args.items())
                    text = "smaller steps take less memory"
                    yield Cure("max_num_batched_tokens", args, flags, text, "lower", None, PROOF)
                    break
        case _:
            return


def _flag(name: str, value: object, way: str, text: str, proof: str = PROOF) -> Cure:
    written = f"{value:.6g}" if isinstance(value, float) else value
    return Cure(name, {name: value}, (f"--{name.replace('_', '-')} {written}",), text, way, None, proof)


def _loaded(spec: ModelSpec, inputs: EngineInputs) -> int:
    sized = predict(spec, replace(inputs, num_blocks=2))
    return sized.weights + sized.buffers + sized.lora


def _holds_a_request(spec: ModelSpec, inputs: EngineInputs) -> bool:
    """True if the pool holds a request of the longest context, and the null block."""
    needed = 1 + cdiv(inputs.max_model_len, inputs.block_size) * num_groups(spec, inputs)
    return predict(spec, replace(inputs, num_blocks=None)).num_blocks >= needed


def _halves(value: int) -> Iterator[int]:
    while value > 16:
        value //= 2
        yield value
