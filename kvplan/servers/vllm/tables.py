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
from kvplan.models.spec import Weight
from kvplan.servers.plans.plan import Estimate, HostRow, Plan, Request
from kvplan.servers.vllm.features import Feature
from kvplan.servers.vllm.rules import TABLES, has_tables, tables_on_host
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.allocator import pinned
from kvplan.sizing.weights import Layout, weight_tensors

FLAG: Final = "--engram-config"
SWITCHES: Final = ("cpu_offload", "embedding_across_dp", "dp_shared_memory", "use_thp")
SOURCE: Final = "vLLM 0.33 models/qwen4_exp/common/ngram_embedding.py and config/engram.py"


def settings_of(args: EngineArgs) -> dict[str, Any]:
    stated = json.loads(args.engram_config or "{}")
    for name, value in stated.items():
        if name not in SWITCHES or not (isinstance(value, bool) or (name == "dp_shared_memory" and value is None)):
            text = printable(f"{name}: {value!r}", 60)
            raise UsageError(FLAG, f"has no such setting ({text})", f"use {', '.join(SWITCHES)} with true or false")
    return dict(stated)


def check(request: Request) -> None:
    """Reject what vLLM rejects, and what is not sized."""
    args, stated = request.args, settings_of(request.args)
    if not has_tables(request.spec):
        remedy = f"remove it; models of type {' or '.join(TABLES)} have some"
        raise UsageError(FLAG, f"{request.spec.name} has no tables of n-grams", remedy)
    if args.pipeline_parallel_size > 1:
        problem = f"{request.spec.name} has tables of n-grams, which need the tokens that later stages do not get"
        raise UsageError("--pipeline-parallel-size", problem, "use --tp instead")
    offloads, shares = stated.get("cpu_offload", True), stated.get("dp_shared_memory")
    if shares and not offloads:
        raise UsageError(FLAG, "dp_shared_memory requires cpu_offload", "remove one of them")
    if stated.get("use_thp") and (not offloads or shares):
        raise UsageError(FLAG, "use_thp requires cpu_offload without dp_shared_memory", "remove one of them")
    if shares and args.data_parallel_size == 1:
        raise UsageError(FLAG, "dp_shared_memory requires several data-parallel ranks", "remove it")


def tables(request: Request, stage: int) -> Iterator[tuple[int, Weight]]:
    """(bytes on a rank, table) of each layer of a stage that has one."""
    from kvplan.servers.plans.weights import own_layout
    from kvplan.sizing.weights import layers_on

    args, spec = request.args, request.spec
    across = settings_of(args).get("embedding_across_dp", False)
    ranks = args.tensor_parallel_size * (args.data_parallel_size if across else 1)
    layout = own_layout(request, stage)
    own = Layout(tp=ranks, dtype=None if layout is None else layout.dtype)
    if layout is None:
        return
    for index in layers_on(spec, layout):
        for weight in spec.layer_weights[index]:
            if weight.serves == ("tables",):
                yield sum(weight_tensors(spec, weight, index, own)), weight


def buffers(own: Estimate, request: Request, settings: Settings, stage: int) -> Estimate:
    """Rows that are fetched ahead of their layer, and their ids."""
    if not tables_on_host(request.spec, request.args):
        return own
    across = settings_of(request.args).get("embedding_across_dp", False)
    gathered = settings.max_num_batched_tokens * (request.args.data_parallel_size if across else 1)
    config = request.spec.config.get("text_config", request.spec.config)
    heads = (int(config.get("ngram_size", 3)) - 1) * int(config.get("heads_per_ngram", 8))
    size = sum(
        settings.max_num_batched_tokens * heads * 8 + gathered * heads * weight.inputs * 2
        for _, weight in tables(request, stage)
    )
    formula = f"{own.formula}; {size:,} B of rows fetched ahead from tables of n-grams"
    return Estimate(own.low + size, own.likely + size, own.high + size, formula, own.source, own.kind)


def notes(request: Request, stage: int) -> Iterator[str]:
    sizes = [size for size, _ in tables(request, stage)]
    if sizes and tables_on_host(request.spec, request.args):
        yield (
            f"{format_gib(sum(sizes))} of tables of n-grams lie in each rank's host memory and are read over the bus; "
            f"""{FLAG} '{{"cpu_offload": false}}' keeps them on the GPU"""
        )


def host(plan: Plan) -> Iterator[HostRow]:
    request = plan.request
    sizes = [size for size, _ in tables(request, plan.stage)]
    if sizes and tables_on_host(request.spec, request.args):
        own = "each pinned in a power of two bytes; every data-parallel replica has its own"
        text = f"{plural(len(sizes), 'table')} of n-grams, {sum(sizes):,} B, {own}"
        yield HostRow("weights", sum(map(pinned, sizes)), "rank", text, SOURCE, "")


FEATURE: Final = Feature(check=check, buffers=buffers, notes=notes, host=host)
