"""Single changes with which a server that does not load does, and leaves as much of each GPU as --fit would."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from kvplan.models.gguf_model import gguf_of
from kvplan.servers.llamacpp import asked
from kvplan.servers.llamacpp.inversions import fewest_host_experts, longest_context, most_layers, room
from kvplan.servers.llamacpp.measure import Server
from kvplan.servers.llamacpp.size import TYPES, Started, in_use, started
from kvplan.servers.plans.plan import Plan
from kvplan.servers.words.arguments import EngineArgs, flags_of

SMALL_CACHE: Final = "q8_0"
WRITTEN_SHORT: Final = 3  # letters of a one-dash form that is written more often than the long one: -ngl, -ctk


def remedies(plan: Plan, server: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(flags of the server, the arguments that they set), those first that cost the least."""
    request, own = plan.request, flags_of(server)
    run = started(request, asked.context(request.gpu).likely + in_use(request).likely)
    for stated in _changes(run, request.args):
        if change := {name: value for name, value in stated.items() if name in own}:
            if "max_model_len" in change and "kv_unified" not in own:  # a server that states the context of one slot
                change["max_model_len"] //= run.measured.context.slots
            yield flags_text(server, change), change


def flags_text(server: str, change: dict[str, Any]) -> str:
    """Flags as people write them: "-ctk q8_0 -ctv q8_0", "--n-cpu-moe 12"; one that stands for several, once."""
    texts = list[str]()
    for name, value in change.items():
        flag = flags_of(server)[name]
        short = next((f"-{short}" for short in flag.short if len(short) <= WRITTEN_SHORT), None)
        texts.append(f"{short or '--' + (flag.names or (name,))[0].replace('_', '-')} {value}")
    return " ".join(dict.fromkeys(texts))


def _changes(run: Started, args: EngineArgs) -> Iterator[dict[str, Any]]:
    server, margin, context = run.server, run.own.fit_target[0], run.measured.context
    if not server.devices:
        return
    stated = replace(run.stated, ctx=context.total, fit=False)
    if server.shape.num_experts and not args.override_tensor and not args.cpu_moe:
        count = fewest_host_experts(server, replace(stated, overrides=()), margin)
        if count is not None and count > (args.n_cpu_moe or 0):
            yield {"n_cpu_moe": count}
    small = replace(stated, cache_k=SMALL_CACHE.upper(), cache_v=SMALL_CACHE.upper())
    if "F" in stated.cache_k and stated.flash != "off" and room(server, small, margin) >= 0:
        yield {"cache_type_k": SMALL_CACHE, "cache_type_v": SMALL_CACHE}
    if kind := _smaller_type(run, margin):
        yield {"quantization": kind}
    longest = longest_context(server, stated, margin)
    if longest is not None and longest < context.total:
        yield {"max_model_len": longest}
    layers = most_layers(server, stated, margin)
    if layers is not None and layers <= server.shape.num_blocks:
        yield {"gpu_layers": layers}


def _smaller_type(run: Started, margin: int) -> str | None:
    """The largest smaller type of a file with which everything that is on the GPUs stays there."""
    model, devices = run.model, run.server.devices
    if model.mixed_by == "file" or model.label not in TYPES:
        return None
    stated = replace(run.stated, ctx=run.measured.context.total, fit=False)
    smaller = TYPES[TYPES.index(model.label) + 1 :]
    return next(
        (kind for kind in smaller if room(Server(gguf_of(model.spec, kind), devices), stated, margin) >= 0), None
    )
