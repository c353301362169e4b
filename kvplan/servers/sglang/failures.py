"""SGLang's words for why it did not start, ran out of memory or stopped, by release."""

from typing import Final

from kvplan.servers.failures import Wording

WORDINGS: Final[tuple[Wording, ...]] = (
    Wording(
        "sglang_not_enough_memory", "Not enough memory. Please try to increase --mem-fraction-static.", "0.3-0.5",
        "SGLang srt/model_executor/model_runner.py", (r"mem_fraction_static=<mem_fraction>",), phase="pool",
    ),
)  # fmt: skip
