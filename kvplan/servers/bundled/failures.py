"""Errors of `kvplan serve` when it does not start, with the cause of each: engine/ and kvplan/cli/serve.py write them.

`kvplan serve` names options where the engine names settings: both are matched.
"""

from typing import Final

from kvplan.servers.logs.failures import Cause, Failures, Phase, Wording

# The device's bytes in the line of a pool without room.
TOTAL: Final = r"may be used \((?:--)?gpu[-_]memory[-_]utilization [0-9.e+-]{1,20} of ([0-9,]{1,26})\)"


def _error(
    cause: Cause,
    phrase: str,
    source: str,
    phase: Phase,
    *figures: str,
    needs: str = "kvplan: error: ",
    general: bool = False,
) -> Wording:
    strength = "general" if general else "decisive"
    return Wording(cause, phrase, "1", source, figures, needs=needs, phase=phase, strength=strength)  # type: ignore[arg-type]


WORDINGS: Final = (
    _error(
        "oom_loading_weights", "its weights need", "engine/model_runner.py", "load",
        r"its weights need <tried_bytes> on", r", <free_bytes> are free",
    ),
    _error(
        "no_kv_memory", "no memory is left for KV", "engine/model_runner.py", "pool",
    ),
    _error("oom_loading_weights", "the weights did not fit", "engine/model_runner.py", "load"),
    _error(
        "oom_profile_run", "max_num_batched_tokens did not fit", "engine/model_runner.py", "profile",
        r"a step of <max_num_batched_tokens> max_num",
    ),
    _error(
        "oom_profile_run", "--max-num-batched-tokens did not fit", "engine/model_runner.py", "profile",
        r"a step of <max_num_batched_tokens> --max",
    ),
    _error("no_kv_memory", "blocks did not fit", "engine/model_runner.py", "pool", r"a KV pool of <blocks> blocks"),
    _error(
        "kv_too_small_for_max_len", " does not fit, ", "kvplan/planning/plan.py", "arguments",
        needs="kvplan: error: simulate: ",
    ),
    _error("oom_cuda_graph_capture", "capturing CUDA graphs did not fit", "engine/model_runner.py", "capture"),
    _error(
        "max_len_above_model", "is more than the positions of", "engine/resolve.py", "arguments",
        r"\(<context> of <derived_max_len>\)",
    ),
    _error("host_memory_or_shm", "are more than the host's", "engine/tier_setup.py", "pool"),
    _error("heads_not_divisible_by_tp", "cannot be shared by", "engine/tp.py", "load"),
    _error("not_memory", "which the engine cannot run", "engine/kv_cache.py", "load"),
    _error("not_memory", "is in use by another process", "engine/disk_tier.py", "arguments"),
    _error("not_memory", "cannot be used (Address already in use)", "kvplan/serve/run.py", "arguments"),
    _error("not_memory", "kvplan: error: ", "kvplan/cli/app.py", "arguments", needs="", general=True),
)  # fmt: skip

FAILURES: Final = Failures(
    WORDINGS,
    frames=(),
    marks=(("kvplan engine: arguments (", "load"), ("kvplan engine: device ", "pool")),
    ready=(" on http://",),
    starts=("kvplan engine: arguments (",),
    parts={"load": ("oom_loading_weights", "load"), "pool": ("no_kv_memory", "pool")},
    own_marks=True,
    processes=(r"^(?:\[rank [0-9]{1,4}\] )?kvplan engine: ", r"^kvplan: error: "),
)
