"""Tables of n-grams that vLLM keeps in pinned host memory, and reads in place: --engram-config.

Source: vLLM 0.33 config/engram.py, models/qwen4_exp/common/ngram_embedding.py (allocate_embedding_weight) and
nvidia/ngram_embedding.py.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.units import format_gib, plural
from kvplan.servers.plans.plan import Estimate, HostRow, Plan, Request
from kvplan.servers.plans.weights import own_layout
from kvplan.servers.vllm.features import Feature
from kvplan.servers.vllm.rules import TABLES, has_tables, tables_on_host
from kvplan.servers.words.arguments import Settings
from kvplan.sizing.allocator import pinned
from kvplan.sizing.weights import Layout, layers_on, weight_tensors

FLAG: Final = "--engram-config"
SWITCHES: Final = ("cpu_offload", "embedding_across_dp", "dp_shared_memory", "use_thp")


def settings_of(request: Request) -> dict[str, Any]:
    stated: dict[str, Any] = json.loads(request.args.engram_config or "{}")
    for name, value in stated.items():
        if name not in SWITCHES or not (isinstance(value, bool) or (name == "dp_shared_memory" and value is None)):
            text = printable(f"{name}: {value!r}", 60)
            raise UsageError(FLAG, f"has no such setting ({text})", f"use {', '.join(SWITCHES)} with true or false")
    return stated


def check(request: Request) -> None:
    """Reject what vLLM rejects."""
    name, stated = request.spec.name, settings_of(request)
    offloads, shares = stated.get("cpu_offload", True), stated.get("dp_shared_memory")
    if not has_tables(request.spec):
        raise UsageError(FLAG, f"{name} has no tables of n-grams", f"remove it; types with some: {', '.join(TABLES)}")
    if request.args.pipeline_parallel_size > 1:
        problem = f"{name} has tables of n-grams, which need the tokens that later stages do not get"
        raise UsageError("--pipeline-parallel-size", problem, "use --tp instead")
    for is_wrong, problem in (
        (shares and not offloads, "dp_shared_memory requires cpu_offload"),
        (stated.get("use_thp") and (not offloads or shares), "use_thp requires cpu_offload without dp_shared_memory"),
        (shares and request.args.data_parallel_size == 1, "dp_shared_memory requires several data-parallel ranks"),
    ):
        if is_wrong:
            raise UsageError(FLAG, problem, "remove one of them")


def tables(request: Request, stage: int) -> list[int]:
    """Bytes of a rank's rows of each table."""
    args, spec, layout = request.args, request.spec, own_layout(request, stage)
    across = args.data_parallel_size if settings_of(request).get("embedding_across_dp") else 1
    own = Layout(tp=args.tensor_parallel_size * across, dtype=None if layout is None else layout.dtype)
    return [
        sum(weight_tensors(spec, weight, index, own))
        for index in (layers_on(spec, layout) if layout is not None else ())
        for weight in spec.layer_weights[index]
        if weight.serves == ("tables",)
    ]


def on_host(request: Request, stage: int) -> list[int]:
    return tables(request, stage) if tables_on_host(request.spec, request.args) else []


def buffers(own: Estimate, request: Request, settings: Settings, stage: int) -> Estimate:
    """Rows that are fetched ahead of their layer, and their ids."""
    config = request.spec.config.get("text_config", request.spec.config)
    heads = (int(config.get("ngram_size", 3)) - 1) * int(config.get("heads_per_ngram", 8))
    width = int(config.get("ple_embed_dim") or request.spec.hidden_size)
    size = len(on_host(request, stage)) * settings.max_num_batched_tokens * (heads * 8 + width * 2)
    formula = f"{own.formula}; {size:,} B of rows fetched ahead from tables of n-grams"
    return Estimate(own.low + size, own.likely + size, own.high + size, formula, own.source, own.kind)


def notes(request: Request, stage: int) -> Iterator[str]:
    if sizes := on_host(request, stage):
        where = "lie in each rank's host memory and are read over the bus"
        keeps = f"""{FLAG} '{{"cpu_offload": false}}' keeps them on the GPU"""
        yield f"{format_gib(sum(sizes))} of tables of n-grams {where}; {keeps}"


def host(plan: Plan) -> Iterator[HostRow]:
    if sizes := on_host(plan.request, plan.stage):
        own = "each pinned in a power of two bytes; every data-parallel replica has its own"
        text = f"{plural(len(sizes), 'table')} of n-grams, {sum(sizes):,} B, {own}"
        yield HostRow("weights", sum(map(pinned, sizes)), "rank", text, "vLLM 0.33 models/qwen4_exp/common", "")


FEATURE: Final = Feature(check=check, buffers=buffers, notes=notes, host=host)
