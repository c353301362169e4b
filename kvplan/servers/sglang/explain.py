"""SGLang's part of --explain: its pages, its separate pools, its fraction of the memory, its batch."""

from collections.abc import Iterator

from kvplan.core.units import GIB, format_gib, plural
from kvplan.servers.base import Explanation
from kvplan.servers.plans.plan import Plan
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.sglang.pool import SglangPool


def explain(plan: Plan) -> Explanation:
    assert isinstance(plan.pool, SglangPool)
    pools = tuple(_pools(plan, plan.pool))
    return Explanation(_block_size(plan), pools, tuple(_budget(plan)), tuple(_users(plan)))


def _block_size(plan: Plan) -> str:
    request = plan.request
    backend = sglang_models.backends(request.spec, request.gpu.sm, request.args, request.release)[1]
    page, stated = plan.pool.block_size, request.args.block_size
    why = "as set" if stated == page else "the default" if page == 1 else f"what the backend {backend} requires"
    return f"page size {page}: {why}"


def _pools(plan: Plan, pool: SglangPool) -> Iterator[str]:
    """Say how windows and recurrent states are stored next to the token pool."""
    if len(pool.groups) > 1:
        if pool.window_tokens is not None:
            yield (
                f"window layers have a pool of {pool.window_tokens:,} tokens, reserved before the tokens: "
                "--max-running-requests sizes it where the prefix cache is off"
            )
            return
        share = float(pool.swa_ratio)
        yield (
            f"window layers have a pool of {share:g} x as many tokens, which every page of the full pool pays for: "
            f"{pool.full[plan.stage]:,} B + {share:g} x {pool.windows[plan.stage]:,} B a token; a request takes "
            f"the larger of its pages and its window pages / {share:g}"
        )
    if state := pool.state[plan.stage]:
        yield f"states have slots of {state:,} B, reserved before the tokens; a request may take {pool.slots_each}"


def _budget(plan: Plan) -> Iterator[str]:
    memory, context, fraction = plan.memory, plan.estimates["context"], plan.settings.gpu_memory_utilization
    yield f"total {memory.total:,} B ({format_gib(memory.total)}): {plan.request.gpu.total_memory_source}"
    yield (
        f"- context {context.likely:,} B ({context.low / GIB:.2f}-{context.high / GIB:.2f} GiB) = {context.formula} "
        f"[{context.kind}: {context.source}]"
    )
    yield (
        f"free before loading x mem_fraction_static: ({memory.total:,} - {context.likely:,}) x {fraction} = "
        f"{memory.budget:,} B ({format_gib(memory.budget)})"
    )
    yield f"- weights {memory.weights:,} B"
    yield f"- buffers {memory.buffers:,} B = {plan.estimates['buffers'].formula}"
    if memory.lora:
        yield f"- adapters {memory.lora:,} B = {plan.estimates['lora'].formula}"
    if images := memory.budget - memory.weights - memory.buffers - memory.lora - plan.available:
        yield f"- reserved for images {images:,} B"
    yield f"= {plan.available:,} B for the KV cache ({format_gib(plan.available)})"
    reserved = memory.total - context.likely - memory.budget
    size = f"{reserved:,} B ({format_gib(reserved)})"
    yield f"reserved for activations and CUDA graphs, which SGLang does not measure: {size}"


def _users(plan: Plan) -> Iterator[str]:
    capacity, answer, args = plan.capacity, plan.concurrency, plan.request.args
    pages = capacity.num_blocks - 1
    given = " (or --engine-arg max_total_tokens, if less)" if args.max_total_tokens else ""
    yield f"tokens: {capacity.tokens:,} in {pages:,} pages of {plural(plan.pool.block_size, 'token')}{given}"
    yield f"full-context users: {pages:,} / {capacity.blocks_per_request:,} = {answer.max:.4f}"
    if args.max_num_seqs is not None:
        most = f"max_running_requests {plan.settings.max_num_seqs:,}"
        yield f"{most}: as set, at most half the tokens and what states allow"
        return
    yield (
        f"max_running_requests {plan.settings.max_num_seqs:,}: {sglang.REQUESTS_PER_CONTEXT} per context held, from "
        f"{sglang.LEAST_REQUESTS:,} to {sglang.MOST_REQUESTS:,}, at most half the tokens and what states allow"
    )
