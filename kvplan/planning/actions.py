"""Fixes that no plan has to confirm: actions outside the server, and what removes an obstacle."""

import re
from collections.abc import Iterator
from typing import Final

from kvplan.core.units import GIB, format_gib
from kvplan.planning.case import Case, Cure
from kvplan.servers.base import flag_of, kind_of_cause, terms_of
from kvplan.servers.logs.failures import Figures, dotted
from kvplan.servers.logs.obstacles import OF_CAUSE, Obstacle

EXPANDABLE: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


LITTLE_FREE: Final = "free_memory_below_utilization"


def reasons(case: Case) -> Iterator[Cure]:
    """What the log itself names as the reason: it is removed before any flag is changed."""
    figures = case.figures
    other = figures.other_process_bytes
    if case.cause == LITTLE_FREE:
        if figures.initial_free_bytes is not None:
            yield _action(
                "start it again with the GPU to itself: another process changed its memory use during start-up"
            )
        elif figures.free_bytes is not None and figures.total_bytes is not None:
            others = format_gib(max(0, figures.total_bytes.bytes - figures.free_bytes.bytes))
            yield _action(
                f"stop the other processes on the GPU, {others} (see nvidia-smi; it may be an earlier server)"
            )
        else:
            yield _action("stop the other processes on the GPU (see nvidia-smi; it may be an earlier server)")
    elif kind_of_cause(case.cause, case.server).startswith("oom") and other is not None and figures.in_use_bytes:
        yield _action(f"stop the other process on the GPU, which uses {format_gib(other.bytes)}")
    if case.cause == "host_memory_or_shm" and is_of_one_memory(case):
        yield _action(
            "free the host's page cache (`sync; echo 3 > /proc/sys/vm/drop_caches`) and lower "
            f"{flag_of(case.server, terms_of(case.server).share_argument)}: the GPU and the host share one memory"
        )


def actions(case: Case) -> Iterator[Cure]:
    """Actions other than flag changes, if the failing lines call for them."""
    figures = case.figures
    if (obstacle := OF_CAUSE.get(case.cause)) is not None:
        yield from _removals(obstacle, case)
    if case.cause == "dtype_or_capability" and not is_bfloat16(case):
        yield _action(_newer_build(case) if is_of_the_build(case.evidence) else _other_gpu(figures))
    if case.cause == "too_few_gpus" and "nsufficient" in case.evidence:
        yield _action(
            "free GPUs on a node (`kubectl describe nodes` lists what is allocated), or request fewer and lower "
            f"{flag_of(case.server, 'tensor_parallel_size')} with them"
        )
    spare = figures.reserved_bytes
    if spare is not None and case.lacking and spare.bytes > max(GIB // 2, case.lacking):
        text = f"{format_gib(spare.bytes)} of PyTorch memory is fragmented; this setting reduces it"
        yield Cure("environment", {}, (EXPANDABLE,), text, "add", None)
    if case.cause == "quantization_mismatch" and re.search("uantization (?:method|argument)", case.evidence):
        yield Cure("quantization", {"quantization": None}, ("--quantization",), QUANTIZED_OWN, "leave out", None)
    if case.cause == "nccl_or_multiprocess" and "broadcast block" in case.evidence:
        yield _action(
            "see what the other ranks do (`py-spy dump --pid PID` of each, the last line of each node's log): one "
            "hangs in a collective, or compiles or loads; /dev/shm is not the reason"
        )
    if case.cause == "nccl_or_multiprocess":
        yield _action("set NCCL_DEBUG=INFO and start again: its lines name the link or the library that fails")
    if case.cause == "host_memory_or_shm" and re.search("shm|shared memory", case.evidence):
        text = "of `docker run`, or --ipc=host: the processes of the server share memory of the host"
        yield Cure("shm_size", {}, ("--shm-size 16g",), text, "add", None)
    elif case.cause == "host_memory_or_shm" and not is_of_one_memory(case):
        yield _action(_more_host_memory(case))


def is_of_one_memory(case: Case) -> bool:
    """True if the GPU has no memory of its own: it is such a GPU, or its driver ran out of the host's."""
    return case.is_unified or "NV_ERR_NO_MEMORY" in case.evidence


def _more_host_memory(case: Case) -> str:
    text = "give the host, or its container, more memory: host memory ran out, not GPU memory"
    if case.figures.limit_bytes is None:
        return text
    limit = f"its limit is {format_gib(case.figures.limit_bytes.bytes)}"
    if not case.weights:
        return f"{text}; {limit}"
    return f"{text}; {limit}, and weights of {format_gib(case.weights)} are read through it on their way to each GPU"


def is_of_the_build(evidence: str) -> bool:
    """True if the build lacks kernels for the GPU, which it may be too old for."""
    return re.search(r"no kernel image|image is invalid|gpu-name|PyTorch installation", evidence) is not None


def _newer_build(case: Case) -> str:
    """Which side is too old: the build where the GPU is one of the newest kinds, the GPU if it is not."""
    match = re.search(r"(?:sm_?|gpu-name=sm_|compute_)([0-9]{2,3})", case.evidence)
    number = int(match[1]) if match is not None else case.capability
    if number >= NEWEST:
        return (
            "use a newer image or wheel, for CUDA 12.8 or newer: PyTorch, Triton or FlashInfer of this one are older "
            "than the GPU"
        )
    if 0 < number < OLDEST:
        return "use a GPU of compute capability 8.0 or higher, or an older release: this build has dropped the GPU"
    return (
        "use an image or wheel that was built for this GPU: for a GPU newer than the build a newer one, for an old GPU "
        "an older one"
    )


# Compute capabilities x 10: those from 10.0 (Blackwell) came after most builds in use, those below 8.0 are dropped.
NEWEST: Final = 100
OLDEST: Final = 80

QUANTIZED_OWN: Final = "the checkpoint states its quantization"


def _action(text: str) -> Cure:
    return Cure("action", {}, (), text, "do", None)


def is_bfloat16(case: Case) -> bool:
    """True if the GPU lacks bfloat16, for which float16 can stand in."""
    return re.search("bfloat16|bf16", case.evidence, re.IGNORECASE) is not None


def _removals(obstacle: Obstacle, case: Case) -> Iterator[Cure]:
    """The fixes of an obstacle, with the values that its line states."""
    details = obstacle.details_in(case.evidence)
    for fix in obstacle.fixes:
        value = None if fix.value is None else fix.value(details)
        if fix.value is not None and value is None:
            continue
        if not fix.flag:
            yield _action(fix.text)
            continue
        name = terms_of(case.server).own_flags.get(fix.argument or "", "") or fix.flag.format(value=value)
        args = {} if fix.argument is None else {fix.argument: True if value is None else value}
        yield Cure(fix.argument or "argument", args, (name,), fix.text, "add" if value is None else "change", None)


def _other_gpu(figures: Figures) -> str:
    needed = figures.required_capability
    what = "another quantization or data type" if figures.quantization is None else "another quantization"
    gpu = "a newer GPU" if needed is None else f"a GPU of compute capability {dotted(needed)} or higher"
    return f"use {gpu}, or a checkpoint in {what} that this GPU supports"
