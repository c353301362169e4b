"""Which fixes of a failure may be printed, and in which order.

A fix passes if the kind of cause allows it, the log's own numbers allow it, and no setting of the server makes it void.
"""

from collections.abc import Iterable
from typing import Final

from kvplan.planning.case import Case, Cure
from kvplan.servers.base import kind_of_cause, terms_of
from kvplan.servers.logs.failures import MEMORY_CAUSES

FIXED_POOL: Final = "kv_cache_memory_bytes"  # a pool of so many bytes, whatever the utilization
SHAPES: Final = ("heads_not_divisible_by_tp", "too_few_gpus", "quantization_mismatch", "max_len_above_model",
                 "dtype_or_capability", "kv_dtype_unsupported")  # fmt: skip
# First what the log names as the reason, then flags, another checkpoint, and more GPUs.
LAST: Final = ("quantization", "tensor_parallel_size", "cpu_offload_gb")


def is_of_memory(case: Case) -> bool:
    """True if plans of other sizes can fix the case."""
    return case.cause in MEMORY_CAUSES or case.cause in ("out_of_memory", "preemption")


def passed(case: Case, reasons: Iterable[Cure], results: Iterable[Cure], others: Iterable[Cure]) -> list[Cure]:
    """Reasons first, then the fixes that help, best first, and what else can be done."""
    helpful = [cure for cure in results if not is_void(case, cure)]
    gpus_only = all(cure.kind == "tensor_parallel_size" for cure in helpful)
    helpful.sort(key=lambda cure: 0 if gpus_only or cure.kind not in LAST else 1 + LAST.index(cure.kind))
    return [*reasons, *helpful, *others]


def is_void(case: Case, cure: Cure) -> bool:
    """True if a fix cannot help this server."""
    if cure.plan is not None and not is_of_memory(case) and kind_of_cause(case.cause, case.server) not in SHAPES:
        return True
    args = case.args or {}
    share = terms_of(case.server).share_argument
    match cure.kind:
        case "enforce_eager":
            return str(args.get("enforce_eager", "")).lower() == "true"
        case "kv_cache_dtype" if case.cause != "kv_dtype_unsupported":
            return str(args.get("kv_cache_dtype", "auto")).startswith(("fp8", "nvfp4"))
        case "limit_mm_per_prompt":
            return case.request is not None and not case.request.spec.multimodal
        case kind if kind == share and args.get(FIXED_POOL):
            return True
        case kind if kind == share and cure.way == "raise":
            least = case.least_share
            value = cure.args.get(share)
            return least is not None and (least >= 1 or (value is not None and value <= least))
        case _:
            return False
