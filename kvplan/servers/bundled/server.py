"""The bundled engine as a server whose logs are read; its rules are in rules.py, and --engine does not name it."""

from typing import TYPE_CHECKING, Final

from kvplan.servers.base import Abilities, Sources, Terms

if TYPE_CHECKING:
    from kvplan.servers.base import Outputs

__all__ = ["abilities", "name", "outputs", "terms"]
name: Final = "kvplan"
RULES: Final = "kvplan/servers/bundled/rules.py"
terms: Final = Terms(
    title="kvplan's engine", engines=(), example="",
    budget="the engine may use {budget} ({share} of the device)", log="{tokens} tokens in its pool",
    share_argument="gpu_memory_utilization", slots_flag=None, risk="may not hold it", risk_row="may not hold one",
    shorter="A shorter context is safer.",
    outside="not used", uncompared=("{label} by its own code", RULES), known_by="its own code",
    sources=Sources(RULES, RULES, RULES, RULES, RULES, None),
)  # fmt: skip
abilities: Final = Abilities(checks_start=True, keeps_share=True)


def outputs() -> "Outputs":
    from kvplan.servers.bundled import outputs

    return outputs
