"""Tables of n-grams that vLLM keeps in pinned host memory, and reads in place: --engram-config.

Source: vLLM 0.33 config/engram.py, models/qwen4_exp/common/ngram_embedding.py (allocate_embedding_weight) and
nvidia/ngram_embedding.py; models/deepseek_v41/common/engram.py (ParallelEngramEmbedding), whose replicas divide the
tables or share them.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.units import format_gib
from kvplan.servers.plans.plan import Estimate, HostRow, Plan, Request
from kvplan.servers.plans.weights import own_layout
from kvplan.servers.vllm.features import Feature
from kvplan.servers.vllm.rules import TABLES, has_tables, tables_on_host
from kvplan.servers.words.arguments import Settings
from kvplan.sizing.allocator import pinned
from kvplan.sizing.weights import FIXED, Layout, cdiv, layers_on, scheme_for, weight_tensors

FLAG: Final = "--engram-config"
SCALE: Final = 4  # bytes of a whole table's scale, which lies on the GPU
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
    if request.args.pipeline_parallel_size > 1 and not request.spec.is_later_v4:
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
    """Bytes of a rank's rows of each table, and of their scales; a table's single scale is not among them."""
    args, spec, layout = request.args, request.spec, own_layout(request, stage)
    across = args.data_parallel_size if settings_of(request).get("embedding_across_dp") or spec.is_later_v4 else 1
    own = Layout(tp=args.tensor_parallel_size * across, dtype=None if layout is None else layout.dtype)
    return [
        size
        for index in (layers_on(spec, layout) if layout is not None else ())
        for weight in spec.layer_weights[index]
        if weight.serves == ("tables",)
        for size in weight_tensors(spec, weight, index, own)
        if size > SCALE
    ]


def on_host(request: Request, stage: int) -> list[int]:
    return tables(request, stage) if tables_on_host(request.spec, request.args) else []


def width_of(request: Request, stage: int) -> int:
    """Bytes per token of the rows that a rank fetches ahead of their layers, and of what indexes share."""
    text = request.spec.config.get("text_config", request.spec.config)
    if request.spec.is_later_v4:
        heads = (int(text["engram_max_ngram_size"]) - 1) * int(text["engram_n_heads"])
        own = cdiv(heads, request.args.tensor_parallel_size * request.args.data_parallel_size)
        staged = len(tables(request, stage)) // 2 * own * request.args.data_parallel_size * int(text["engram_head_dim"])
        return staged * 2 + 4 * sum(int(text.get(key) or 0) for key in ("index_topk", "candidate_topk_blocks"))
    heads = (int(text.get("ngram_size", 3)) - 1) * int(text.get("heads_per_ngram", 8))
    layout, layers = own_layout(request, stage), request.spec.layer_weights
    indexes = () if layout is None else layers_on(request.spec, layout)
    kinds = [
        scheme_for(request.spec, weight, index, None)
        for index in indexes
        for weight in layers[index]
        if weight.serves == ("tables",)
    ]  # fmt: skip
    if not tables_on_host(request.spec, request.args):
        return 0
    dim = int(text.get("ple_embed_dim") or request.spec.hidden_size)  # rows in 8 bits are fetched so, others in 16
    return sum(heads * 8 + dim * (1 if kind == FIXED["fp8"] else 2) for kind in kinds)


def buffers(own: Estimate, request: Request, settings: Settings, stage: int) -> Estimate:
    """Rows that are fetched ahead of their layer, and their ids."""
    size = width_of(request, stage) * settings.max_num_batched_tokens
    formula = f"{own.formula}; {size:,} B of rows fetched ahead from tables of n-grams"
    return Estimate(own.low + size, own.likely + size, own.high + size, formula, own.source, own.kind)


def notes(request: Request, stage: int) -> Iterator[str]:
    if sizes := on_host(request, stage):
        where = "lie in each rank's host memory and are read over the bus"
        keeps = f"""{FLAG} '{{"cpu_offload": false}}' keeps them on the GPU"""
        yield f"{format_gib(sum(sizes))} of tables of n-grams {where}; {keeps}"


def host(plan: Plan) -> Iterator[HostRow]:
    request = plan.request
    sizes, replicas, stated = on_host(request, plan.stage), request.args.data_parallel_size, settings_of(request)
    if not sizes:
        return
    text, source = f"tables of n-grams, {sum(sizes):,} B", "vLLM 0.33 models/qwen4_exp/common"
    if not request.spec.is_later_v4:
        own = "each pinned in a power of two bytes; every data-parallel replica has its own"
        yield HostRow("weights", sum(map(pinned, sizes)), "rank", f"{text}, {own}", source, "")
        return
    source = "vLLM 0.33 models/deepseek_v41/common/engram.py"
    if stated.get("use_thp"):
        yield HostRow("weights", sum(sizes), "rank", f"{text}, in huge pages", source, "")
    elif replicas > 1 and stated.get("dp_shared_memory") is not False:
        how = f"a {replicas}th of a rank's, which replicas share in /dev/shm"
        yield HostRow("weights", sum(sizes), "rank", f"{text}, {how}", source, "", in_shm=True)
    else:
        own = "rows and scales each pinned in a power of two bytes"
        yield HostRow("weights", sum(map(pinned, sizes)), "rank", f"{text}, {own}", source, "")


FEATURE: Final = Feature(check=check, buffers=buffers, notes=notes, host=host)
