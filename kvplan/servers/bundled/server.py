"""The bundled engine as a server whose logs are read; its rules are in rules.py, and --engine does not name it."""

from typing import Final

from kvplan.servers.base import Sources, Terms
from kvplan.servers.logs.failures import Failures
from kvplan.servers.logs.log import Logs
from kvplan.servers.logs.rows import plain, plain_figures

__all__ = ["failures", "logs", "name", "terms"]
name: Final = "kvplan"
RULES: Final = "kvplan/servers/bundled/rules.py"
terms: Final = Terms(
    title="kvplan's engine", engines=(), example="", label_words=False,
    budget="the engine may use {budget} ({share} of the device)", log="{tokens} tokens in its pool",
    logs_concurrency=False, seqs_flag="--max-num-seqs", context_flag="--max-model-len",
    share_argument="gpu_memory_utilization", slots_flag=None, risk="may not hold it", risk_row="may not hold one",
    shorter="A shorter context is safer.", checks_start=True, keeps_share=True, simulated=False, recommended=False,
    outside="not used", uncompared=("{label} by its own code", RULES), known_by="its own code",
    sources=Sources(RULES, RULES, RULES, RULES, RULES, None), program=("kvplan", "serve"), image="",
)  # fmt: skip


def logs() -> Logs:
    from kvplan.servers.bundled.log_wordings import OPENING, WORDINGS

    return Logs(
        WORDINGS,
        plain_figures,
        plain,
        lists=(OPENING,),
        list_names=(
            "log_form", "kvplan_release", "draft_model", "num_speculative_tokens", "fully_sharded_loras",
            "kv_offloading_size", "device", "pp_layer_partition",
            "states_in_blocks",
        ),
        commands=("kvplan engine: command ",),
        once=(OPENING,),
    )  # fmt: skip


def failures() -> Failures:
    from kvplan.servers.bundled.failures import FAILURES

    return FAILURES
