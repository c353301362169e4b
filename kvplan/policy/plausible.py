"""Overrides that contradict the card or the checkpoint: rule KVP013 of every target that states one."""

from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.units import format_apart, format_bytes
from kvplan.hardware.gpu import gpu
from kvplan.planning.plan import Plan
from kvplan.policy.file import Rule, Target
from kvplan.sizing.weights import stored_bytes

RULE: Final = "plausible"
OVERRIDES: Final = ("gpu_memory", "weights_bytes")
# Half the computed size is another format (fp8 of bfloat16 keeps its embeddings in 16 bits, so stays above half).
LEAST_SHARE: Final = 0.5


def rules_of(target: Target) -> tuple[Rule, ...]:
    """The rule of a target that overrides a size, at the key's place; none otherwise."""
    stated = [key for key in OVERRIDES if key in target.own or key in target.defaults]
    return (Rule(RULE, True, "", target.place(stated[0])),) if stated else ()


def problems(plan: Plan) -> list[str]:
    """Contradictions of the stated memory with the card's, and of the stated weights with the computed ones."""
    request, stated = plan.request, plan.request.gpu.total_memory
    texts = []
    try:
        card = gpu(request.gpu.name)
    except UsageError:  # memory alone was given
        limit = stated
    else:
        limit = max(card.nominal_memory or 0, card.total_memory_high)
    if stated > limit:
        memory, card_memory = format_apart(stated, limit)
        texts.append(f"gpu_memory is {memory}, but {request.gpu.name} has {card_memory}")
    computed = stored_bytes(request.spec)
    if request.weights_bytes is not None and computed is not None and request.weights_bytes < LEAST_SHARE * computed:
        texts.append(
            f"weights_bytes is {format_bytes(request.weights_bytes)}, but {request.spec.name} has "
            f"{format_bytes(computed)} by its config"
        )
    return texts
