"""What the bundled engine prints: its log and its failures."""

from kvplan.servers.bundled.failures import FAILURES as failures
from kvplan.servers.bundled.log_wordings import OPENING, WORDINGS
from kvplan.servers.logs.log import Logs
from kvplan.servers.logs.rows import plain, plain_figures

__all__ = ["bench", "failures", "logs", "metrics"]
metrics = None  # its page has vLLM's names
bench = None
logs = Logs(
    WORDINGS,
    plain_figures,
    plain,
    lists=(OPENING,),
    list_names=(
        "log_form", "kvplan_release", "draft_model", "num_speculative_tokens", "fully_sharded_loras",
        "kv_offloading_size", "device", "pp_layer_partition", "states_in_blocks",
    ),
    commands=("kvplan engine: command ",),
    once=(OPENING,),
)  # fmt: skip
