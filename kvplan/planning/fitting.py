"""Which models of the catalog a machine holds, each as it is stored: `kvplan models --gpu NAME`."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvplan.asked.form import Form, counted_gpus_of
from kvplan.core.errors import KvplanError, UsageError
from kvplan.hardware.gpu import GpuSpec
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.plans.plan import Plan
from kvplan.servers.words.arguments import EngineArgs

LEAST_BITS = 4  # of a parameter, in any format of the catalog: what would not fit even so is not read
CONTEXT = 8192
SHARE = "gpu_memory_utilization"


def machine_of(form: Form) -> tuple[int, GpuSpec]:
    """(number, kind) of the GPUs."""
    machines = counted_gpus_of(form)
    if len(machines) != 1:
        raise UsageError("--gpu", f"names {len(machines)} kinds", "name one, such as rtx-4090 or 2xl40s")
    count, gpu = machines[0]
    return count or 1, gpu


def fitting(names: Iterable[str], count: int, gpu: GpuSpec, context: int) -> Iterator[tuple[str, Plan]]:
    """Plans of the models that start and hold a request of `context` tokens, or of their own context if shorter."""
    share: float | None = None  # of its memory, where the usual one is not free
    for name in names:
        stated = catalog.facts(name).get("parameters")
        if isinstance(stated, int) and stated * LEAST_BITS // 8 > count * gpu.total_memory:
            continue
        spec = catalog.load(name)
        length = min(context, spec.context_limit)
        args = EngineArgs(max_model_len=length, tensor_parallel_size=count, gpu_memory_utilization=share)
        try:
            answer = plan(Request(spec=spec, gpu=gpu, args=args))
            if answer.refusal is not None and answer.refusal.argument == SHARE and answer.refusal.numbers:
                share = float(answer.refusal.numbers[-1])
                answer = plan(Request(spec=spec, gpu=gpu, args=replace(args, gpu_memory_utilization=share)))
        except KvplanError:  # not sized, or not by so many GPUs
            continue
        if answer.fits and answer.refusal is None:
            yield name, answer
