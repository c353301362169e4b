"""Fixes of a plan that does not start on a machine: the search of `why`, with the machine's figures for the log's."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from kvplan.core.errors import KvplanError
from kvplan.planning.case import Case, Cure
from kvplan.planning.cures import cures, flag_text
from kvplan.planning.plan import Plan, plan
from kvplan.servers.base import flag_of
from kvplan.servers.logs.failures import Figures, Size

SPLIT: Final = "tensor_parallel_size"
NAMED: Final = ("unsupported", "stated_pool", "kept_back", "whole_item")  # refusals that name what to change


def case_of(answer: Plan, visible: int | None) -> Case:
    """The failure that this plan's server would report.

    visible  GPUs that it can have; None: not known
    """
    request, cause, figures = answer.request, "kv_too_small_for_max_len", Figures()
    total, in_use = request.gpu.total_memory, request.memory_in_use or 0
    if visible is not None and visible < request.args.num_gpus:
        cause, figures = "too_few_gpus", Figures(gpus=visible)
    elif answer.refusal is not None and answer.refusal.by == "free_memory":
        free = max(0, total - in_use - answer.estimates["context"].likely)
        cause, figures = "free_memory_below_utilization", Figures(free_bytes=size(free), total_bytes=size(total))
    elif answer.refusal is not None and answer.refusal.by == "state_blocks":
        cause, figures = "mamba_blocks_below_max_num_seqs", Figures(blocks=answer.capacity.num_blocks or None)
    elif answer.fits:
        cause = "oom_cuda_graph_capture"
    elif answer.memory.weights + in_use > total:
        cause = "oom_loading_weights"
    elif answer.available <= 0:
        cause = "no_kv_memory"
    args = {name: value for name in ("kv_cache_dtype", "kv_cache_memory_bytes", "enforce_eager")
            if (value := getattr(request.args, name))}  # fmt: skip
    return Case(request.release.engine, cause, figures, request=request, args=args)


def size(value: int) -> Size:
    return Size(f"{value:,} B", value, value, value)


def fixes(answer: Plan, visible: int | None) -> tuple[Case, list[Cure]]:
    """What would let the server start here, best first: those that the machine has the GPUs for."""
    case = case_of(answer, visible)
    is_named = answer.refusal is not None and answer.refusal.by in NAMED
    results = list(of_refusal(answer)) if is_named and case.cause != "too_few_gpus" else cures(case)
    beside = answer.request.args.num_gpus // answer.request.args.tensor_parallel_size
    return case, [cure for cure in results if visible is None or int(cure.args.get(SPLIT) or 0) * beside <= visible]


def of_refusal(answer: Plan) -> Iterator[Cure]:
    """The first of the values that a refusal names with which the server starts."""
    request, refusal = answer.request, answer.refusal
    assert refusal is not None
    for value in refusal.values:
        with suppress(KvplanError):
            changes: dict[str, Any] = {refusal.argument: value}
            changed_plan = plan(replace(request, args=replace(request.args, **changes)))
            if changed_plan.fits:
                engine = request.release.engine
                flag = flag_text(engine, refusal.argument, value) or f"without {flag_of(engine, refusal.argument)}"
                yield Cure(refusal.argument, changes, (flag,), refusal.text, "change", changed_plan)
                return
