"""Which models of the catalog a machine holds, each as it is stored: `kvplan models --gpu NAME`."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvplan.asked.form import Form, counted_gpus_of
from kvplan.core.errors import KvplanError, UsageError
from kvplan.hardware.gpu import GpuSpec
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import abilities_of
from kvplan.servers.plans.plan import Plan
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs

LEAST_BITS = 4  # of a parameter, in any format of the catalog: what would not fit even so is not read
CONTEXT = 8192
SHARE = "gpu_memory_utilization"
ALL_LAYERS = 999  # as people write it: -ngl 999


def machine_of(form: Form) -> tuple[int, GpuSpec]:
    """(number, kind) of the GPUs."""
    machines = counted_gpus_of(form)
    if len(machines) != 1:
        raise UsageError("--gpu", f"names {len(machines)} kinds", "name one, such as rtx-4090 or 2xl40s")
    count, gpu = machines[0]
    return count or 1, gpu


def fitting(
    names: Iterable[str], count: int, gpu: GpuSpec, context: int, release: Version
) -> Iterator[tuple[str, Plan]]:
    """Plans of the models that start and hold a request of `context` tokens, or of their own context if shorter, in a
    server that can place layers on the host: without any there.
    """
    share: float | None = None  # of its memory, where the usual one is not free
    layers = ALL_LAYERS if abilities_of(release.engine).file_types else None
    for name in names:
        stated = catalog.facts(name).get("parameters")
        if isinstance(stated, int) and stated * LEAST_BITS // 8 > count * gpu.total_memory:
            continue
        spec = catalog.load(name)
        length = min(context, spec.context_limit)
        args = EngineArgs(
            max_model_len=length, tensor_parallel_size=count, gpu_memory_utilization=share, gpu_layers=layers
        )
        try:
            answer = plan(Request(spec=spec, gpu=gpu, args=args, release=release))
            if answer.refusal is not None and answer.refusal.argument == SHARE and answer.refusal.numbers:
                share = float(answer.refusal.numbers[-1])
                answer = plan(replace(answer.request, args=replace(args, gpu_memory_utilization=share)))
        except KvplanError:  # not sized, or not by so many GPUs
            continue
        places = answer.slots.places if answer.slots else ()
        whole = all(place.total <= answer.memory.budget for place in places if place.free)
        if answer.fits and answer.refusal is None and whole:
            yield name, answer
