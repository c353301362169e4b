"""A server that shares its GPUs in turn: its memory awake, asleep and waking up, beside what a trainer holds then.

Asleep, what was allocated for weights and KV cache is unmapped, and torch's cache emptied; what stays is each server's
own: the context and libraries, CUDA graphs, and buffers that no pool has. Waking up, the weights come first, so that a
trainer can send new ones before the KV cache is mapped again. Source: vLLM 0.33 device_allocator/cumem.py,
v1/worker/gpu_worker.py (sleep, wake_up, load_model, initialize_from_config); SGLang 0.5.23
managers/scheduler_components (release_memory_occupation), by tags.
"""

from dataclasses import replace
from typing import Final, Literal

from kvplan.core.units import format_gib
from kvplan.servers.base import server_of
from kvplan.servers.plans.plan import BUDGET_ROWS, Colocated, Phase, Plan, Refusal

WEIGHTS: Final = ("weights", "lora")


def phases(plan: Plan, colocated: Colocated) -> tuple[Phase, ...]:
    """Every phase of a plan that fits."""
    memory, estimates = plan.memory, plan.estimates
    rows = {"weights": memory.weights, **{name: getattr(memory, name) for name in BUDGET_ROWS}}
    rows |= {"context": estimates["context"].likely, "kv_cache": memory.kv_cache}
    rows["reserved"] = (server := server_of(plan.request.release.engine)).kept_back(plan)
    whole = {name: (size, size, size) for name, size in rows.items()}  # awake, the KV cache is what estimates leave

    def phase(name: Literal["awake", "asleep", "waking"], sizes: dict[str, tuple[int, int, int]]) -> Phase:
        low, total, high = (sum(size[end] for size in sizes.values()) for end in range(3))
        own, others = {row: size[1] for row, size in sizes.items() if size[1]}, colocated.in_use.get(name)
        return Phase(name, own, low, high, others, memory.total - total - (others or 0))

    awake = phase("awake", whole)
    if not colocated.level:
        return awake, phase("asleep", whole)
    ends = {name: (row.low, row.likely, row.high) for name, row in server.asleep(plan).items()}
    asleep = ends | {name: whole[name] for name in colocated.keeps}
    buffers = {"buffers": (row.low, row.likely, row.high)} if (row := estimates.get("buffers")) else {}
    waking = asleep | {name: whole[name] for name in WEIGHTS} | buffers
    return awake, phase("asleep", asleep), phase("waking", waking)


WHEN: Final = {"awake": ("awake", "rollout"), "asleep": ("asleep", "training"), "waking": ("waking up", "weight sync")}


def refused(plan: Plan) -> Refusal | None:
    """Why a plan that starts fails later: the first phase that does not fit beside what is stated for it."""
    colocated = plan.request.colocated
    lacking = next((phase for phase in plan.phases if phase.others and phase.free < 0), None)
    if colocated is None or lacking is None or lacking.others is None:
        return None
    never = lacking.name == "asleep" and not colocated.level
    beside = lacking.free + lacking.others
    text = (
        f"{when(lacking.name, colocated)}: {'as it never sleeps, ' if never else ''}the server holds "
        f"{format_gib(lacking.server)}, so {format_gib(max(0, beside))} are left for the {format_gib(lacking.others)} "
        f"of others, {format_gib(-lacking.free)} too few"
    )
    argument, values = "", tuple[bool, ...]()
    if never:
        argument, values = "enable_sleep_mode", (True,)
    elif "cuda_graphs" in lacking.rows and not plan.request.args.enforce_eager:
        argument, values = "enforce_eager", (True,)
    return Refusal("phase", text, argument, values, -lacking.free)


def when(phase: str, colocated: Colocated) -> str:
    """ "while asleep (training)"; without a framework, "while asleep"."""
    state, task = WHEN[phase]
    never = phase == "asleep" and not colocated.level
    return "in training" if never else f"while {state} ({task})" if colocated.owner else f"while {state}"


def named(refusal: Refusal, colocated: Colocated) -> Refusal:
    """A refusal to start beside what is held awake, in the words of the phase."""
    is_memory = refusal.by == "free_memory" and colocated.in_use.get("awake")
    return replace(refusal, text=f"{when('awake', colocated)}, {refusal.text}") if is_memory else refusal
