"""Summarize what happened to a server in a sentence, with the figures from its log lines."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from kvplan.core.files import printable
from kvplan.core.units import plural
from kvplan.measure.failure import Failure
from kvplan.measure.states import Start
from kvplan.planning.actions import is_of_the_build
from kvplan.servers.base import OWN, kind_of_cause, terms_of
from kvplan.servers.logs.failures import Figures, Size, dotted
from kvplan.servers.logs.obstacles import OF_CAUSE

PHASES: Final[Mapping[str, str]] = {
    "arguments": "while it read its arguments",
    "load": "while it loaded the weights",
    "profile": "in the profiling run",
    "pool": "while it allocated the KV cache",
    "capture": "while it captured CUDA graphs",
    "warmup": "while it warmed up",
    "serving": "while it served requests",
}


def summary(failure: Failure) -> str:
    """First line of the answer."""
    name = "The server" if failure.server is None else terms_of(failure.server).title
    if failure.cause is None:
        return unknown(name, failure)
    verb = verb_of(failure)
    evidence = " ".join(line.text for line in failure.evidence)
    if (obstacle := OF_CAUSE.get(failure.cause)) is not None:
        return f"{name} {verb}: {printable(obstacle.sentence(evidence), 300).rstrip('.')}."
    if failure.outcome == "cut" or (failure.outcome == "started" and failure.cause == "nccl_or_multiprocess"):
        return f"{name} waits: one of its processes hangs, compiles or loads, and the others wait for it."
    reason = reason_of(failure.cause)(failure.figures)
    if failure.cause == "dtype_or_capability" and is_of_the_build(evidence):
        reason = "this build has no kernels for this GPU"
    if failure.cause == "not_memory" and failure.evidence and failure.server not in OWN:
        reason = quoted(failure) or reason
    if failure.server in OWN:  # it may run on a CPU
        reason = reason.replace("the GPU", "its device")
    text = f"{name} {verb}: {reason}."
    return text if failure.memory_question is not False else f"{text} Memory flags do not fix it."


def error_of(text: str, limit: int = 180) -> str:
    """A log line without what precedes its error (a prefix, a progress bar), shortened to two lines of a screen."""
    worker = re.search(r"Worker failed with error ['\"](.{3,400}?)['\"], please check", text)
    if worker is not None:
        return worker[1][:limit]
    error = re.search(
        r"\b(?:[\w.]+Error|[\w.]*Exception)\b(?::? |$)|Value error, |(?:CUDA|HIP|NCCL) (?:error|out of memory)|"
        r"\bassert (?=.*[=<>(])",
        text,
    )
    text = text if error is None else text[error.start() :]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(failure: Failure) -> str:
    """The server's own words: an exception, or a field that pydantic refuses and why."""
    first, *others = failure.evidence
    text = error_of(first.text)
    if others and (match := re.search(r"^\s{0,40}(.{3,600}?) \[type=", others[0].text)) is not None:
        text = f"{error_of(first.text.strip())}: {match[1]}"
    return printable(text, 300).rstrip(". ")


def unknown(name: str, failure: Failure) -> str:
    if failure.figures.preemptions:
        times = "once" if failure.figures.preemptions == 1 else f"{failure.figures.preemptions:,} times"
        return f"{name} runs: the KV cache is full; requests were preempted {times} so far."
    if failure.outcome in ("started", "stopped", "finished", "cut"):
        return state(name, failure)
    stopped = None if failure.outcome == "unknown" else f"{name} {verb_of(failure)}"
    if stopped is None and failure.memory_question:
        return "Memory ran out, but the log does not show in which phase of start-up or serving."
    if stopped is None:
        return "No known error found."
    if failure.memory_question:
        figures = failure.figures
        stated = figures.tried_bytes is not None and figures.free_bytes is not None
        tried, free = sizes(figures.tried_bytes, figures.free_bytes)
        lacking = f" ({tried} requested, {free} free)" if stated else ""
        where = "the log does not show in which phase"
        return f"{stopped}: the GPU ran out of memory{lacking}, but {where}."
    if failure.outcome == "failed" and failure.phase is not None:
        stopped = f"{stopped}: it failed {PHASES[failure.phase]}"
    if failure.evidence and not failure.needs:
        return f"{stopped or 'It failed'}: {quoted(failure)}."
    return f"{stopped}, but this log does not show the cause."


# --- states without an error ------------------------------------------------------------------------------------------


def verb_of(failure: Failure) -> str:
    """What happened to a server, "stopped after 6 h of serving"."""
    start = failure.start
    after = f" after {duration(start.seconds)} of serving" if start is not None and start.seconds else ""
    verbs = {"failed": "did not start", "died": f"stopped{after}", "started": "runs"}
    return verbs.get(failure.outcome, "failed")


def state(name: str, failure: Failure) -> str:
    """A server without a failure: it runs, it was told to stop, an offline run finished, or the log just ends."""
    start = failure.start
    is_simulated = failure.log is not None and failure.log.first("simulated") is not None
    name = "The simulated server" if is_simulated else name
    results = "" if start is None else served(start)
    if failure.outcome == "started":
        return f"{name} is ready: {results}." if results else f"{name} started: the log shows no failure."
    if failure.outcome == "finished":
        return f"{name}'s offline run finished: the log shows no failure."
    if start is None or failure.outcome == "cut":
        return f"The log ends {PHASES[failure.phase or 'arguments'].replace(' it ', f' {name} ', 1)}, without an error."
    by = f"was stopped by {start.order.by}" if start.order is not None and start.order.by else "was told to stop"
    if start.phase != "serving":
        return f"{name} {by} {PHASES[start.phase or 'arguments']}."
    after = f" after {duration(start.seconds)} of serving" if start.seconds else " while it served"
    return f"{name} {by}{after}: {results or 'the log shows no failure'}."


def served(start: Start) -> str:
    """The requests of a start, "121 requests answered, 1 refused as too long"; empty if the log has none."""
    others = start.refused - start.too_long
    parts = [
        f"{plural(start.answered, 'request')} answered" if start.answered else "",
        f"{plural(start.too_long, 'request')} refused as too long" if start.too_long else "",
        f"{plural(others, 'request')} refused" if others else "",
    ]
    return ", ".join(filter(None, parts))


def duration(seconds: int) -> str:
    """A time in its largest unit: "6 h"."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size or (unit != "days" and seconds >= size):
            return f"{seconds // size:,} {unit}"
    return f"{seconds} s"


# --- reasons --------------------------------------------------------------------------------------------------------


def size(value: Size | None) -> str:
    """Format a size, "3.18 GiB"; in MiB if small."""
    if value is None:
        return "?"
    if abs(value.bytes) < 2**30 // 10:
        return f"{value.bytes / 2**20:,.2f} MiB"
    return f"{value.bytes / 2**30:,.2f} GiB"


def sizes(*values: Size | None) -> list[str]:
    """Format sizes of one sentence in one unit: MiB if any of them is small."""
    if not any(value is not None and 0 < abs(value.bytes) < 2**30 // 10 for value in values):
        return [size(value) for value in values]
    return ["?" if value is None else f"{value.bytes / 2**20:,.2f} MiB" for value in values]


def kv_too_small(figures: Figures) -> str:
    context = "the longest request" if figures.context is None else f"one request of {figures.context:,} tokens"
    if figures.needed_bytes is not None and figures.available_bytes is not None:
        needed, available = sizes(figures.needed_bytes, figures.available_bytes)
        return f"{context} needs {needed} of KV cache and {available} are free"
    if figures.kv_tokens is not None:
        return f"{context} needs more KV cache than there is, which holds {figures.kv_tokens:,} tokens"
    if figures.available_bytes is not None:
        return f"{context} needs more KV cache than the {size(figures.available_bytes)} that are free"
    return f"{context} needs more KV cache than is free"


def no_kv_memory(figures: Figures) -> str:
    share = "" if figures.utilization is None else f" (utilization {figures.utilization:g})"
    return f"weights and activations use up its memory budget{share}; nothing is left for the KV cache"


def free_memory(figures: Figures) -> str:
    if figures.initial_free_bytes is not None and figures.current_free_bytes is not None:
        before, after = size(figures.initial_free_bytes), size(figures.current_free_bytes)
        amounts = f": {before} were free before and {after} after" if before != after else ""  # a log rounds them
        return f"another process released or took GPU memory while the server measured its own{amounts}"
    if figures.free_bytes is None or figures.total_bytes is None:
        return "less GPU memory is free than its budget; another process uses it"
    wants = "" if figures.budget_bytes is None else f"; the server needs {size(figures.budget_bytes)}"
    share = "" if figures.utilization is None else f" (utilization {figures.utilization:g})"
    return f"{size(figures.free_bytes)} of the GPU's {size(figures.total_bytes)} are free{wants}{share}"


def out_of_memory(phase: str) -> Callable[[Figures], str]:
    def reason(figures: Figures) -> str:
        text = f"the GPU ran out of memory {phase}"
        if figures.tried_bytes is None:
            return text
        if figures.free_bytes is None:
            return f"{text}: it requested {size(figures.tried_bytes)}"
        tried, free, total = sizes(figures.tried_bytes, figures.free_bytes, figures.total_bytes)
        of = "" if figures.total_bytes is None else f" of {total}"
        text += f": it requested {tried} and {free}{of} were free"
        if figures.tried_bytes.bytes <= figures.free_bytes.bytes:
            text += ", so a limit of the driver or of WSL may be the cause"
        return text

    return reason


def mamba_blocks(figures: Figures) -> str:
    if figures.max_num_seqs is None or figures.blocks is None:
        return "there are fewer blocks for recurrent states than sequences it may run"
    return f"each of {figures.max_num_seqs:,} sequences needs a block for its state and there are {figures.blocks:,}"


def encoder_cache(figures: Figures) -> str:
    item = (
        "an image or video" if figures.item_tokens is None else f"an image or video of {figures.item_tokens:,} tokens"
    )
    if figures.max_num_batched_tokens is not None:
        return f"{item} is larger than a step of {figures.max_num_batched_tokens:,} tokens"
    if figures.encoder_cache_tokens is not None:
        return f"{item} is larger than the encoder cache of {figures.encoder_cache_tokens:,}"
    return f"{item} is larger than the encoder cache"


def max_len(figures: Figures) -> str:
    context = "" if figures.context is None else f" of {figures.context:,} tokens"
    model_max = "" if figures.derived_max_len is None else f", {figures.derived_max_len:,}"
    return f"the context{context} is longer than the model's own maximum{model_max}"


def heads(figures: Figures) -> str:
    if figures.heads is None or figures.tensor_parallel_size is None:
        return "the attention heads cannot be divided by the tensor-parallel size"
    return f"{figures.heads} attention heads cannot be divided over {figures.tensor_parallel_size} ranks"


def too_few_gpus(figures: Figures) -> str:
    if figures.gpus is None:
        return "it needs more GPUs than there are"
    count = figures.world_size or figures.tensor_parallel_size
    count_text = "more" if count is None else f"{count:,}"
    return f"it needs {count_text} GPUs and sees {figures.gpus:,}"


def capability(figures: Figures) -> str:
    what = "the requested data type, kernel or quantization"
    if figures.quantization is not None:
        what = f"{figures.quantization} quantization"
    elif figures.dtype is not None:
        what = figures.dtype.lower()
    has = "" if figures.capability is None else f" (compute capability {dotted(figures.capability)}"
    needs = "" if figures.required_capability is None else f", needed {dotted(figures.required_capability)}"
    gpu = "this GPU" if figures.gpu is None else figures.gpu
    return f"{gpu} does not support {what}" + (f"{has}{needs})" if has else "")


def kv_dtype(figures: Figures) -> str:
    name = "this type" if figures.kv_dtype is None else figures.kv_dtype
    return f"no attention backend for this model on this GPU reads a KV cache of {name}"


def pool_after_weights(figures: Figures) -> str:
    share = "" if figures.mem_fraction is None else f" (mem_fraction_static {figures.mem_fraction:g})"
    return f"after the weights nothing is left for the KV cache{share}"


def prefill(figures: Figures) -> str:
    if figures.tried_tokens is not None and figures.available_tokens is not None:
        has_room = figures.tried_tokens <= figures.available_tokens
        but = " by its own count, of which it could not free enough" if has_room else ""
        return (
            f"a prefill needed room for {figures.tried_tokens:,} tokens in the KV cache, which had "
            f"{figures.available_tokens:,}{but}"
        )
    return out_of_memory("in a prefill")(figures)


def retract(figures: Figures) -> str:
    count = "requests" if figures.retracted is None else plural(figures.retracted, "request")
    went = "was" if figures.retracted == 1 else "were"
    return f"the KV cache is full, and {count} {went} preempted"


def host_memory(figures: Figures) -> str:
    if figures.tried_bytes is not None and figures.free_bytes is not None:
        needed, free = sizes(figures.tried_bytes, figures.free_bytes)
        return f"it needs {needed} of the host's memory and {free} are free"
    return "the host ran out of memory, or of shared memory"


def says(text: str) -> Callable[[Figures], str]:
    return lambda figures: text


REASONS: Final[Mapping[str, Callable[[Figures], str]]] = {
    "kv_too_small_for_max_len": kv_too_small,
    "no_kv_memory": no_kv_memory,
    "free_memory_below_utilization": free_memory,
    "oom_loading_weights": out_of_memory("loading the weights"),
    "oom_kv_cache": out_of_memory("allocating the KV cache"),
    "oom_compute_buffers": out_of_memory("reserving the compute buffers of a batch"),
    "oom_profile_run": out_of_memory("in the profiling run"),
    "oom_cuda_graph_capture": out_of_memory("capturing CUDA graphs"),
    "oom_sampler_warmup": out_of_memory("warming up the sampler"),
    "oom_runtime": out_of_memory("while serving"),
    "encoder_cache_too_small": encoder_cache,
    "mamba_blocks_below_max_num_seqs": mamba_blocks,
    "max_len_above_model": max_len,
    "heads_not_divisible_by_tp": heads,
    "dtype_or_capability": capability,
    "kv_dtype_unsupported": kv_dtype,
    "too_few_gpus": too_few_gpus,
    "host_memory_or_shm": host_memory,
    "nccl_or_multiprocess": says("its processes could not communicate (NCCL or the process group)"),
    "pool_after_weights": pool_after_weights,
    "oom_prefill": prefill,
    "oom_decode": retract,
    "oom_graphs": out_of_memory("capturing CUDA graphs"),
    "lora_memory": out_of_memory("making room for LoRA adapters"),
    "quantization_mismatch": says("the quantization does not fit the checkpoint, or how it is split"),
    "not_memory": says("an error that is not about memory"),
}


def reason_of(cause: str) -> Callable[[Figures], str]:
    return REASONS[kind_of_cause(cause)]
