"""What would make a plan fit: the nearest tensor parallel size, KV dtype, context, or GPU that does."""

from dataclasses import dataclass, replace

from kvplan.errors import KvplanError
from kvplan.gpu import GpuSpec, gpu, gpu_names
from kvplan.plan import Plan, Request, plan
from kvplan.rules.vllm import EngineArgs

TP_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Fix:
    """One change that would do: the flag that makes it, and what it gives."""

    flag: str
    plan: Plan

    @property
    def text(self) -> str:
        return f"{self.flag}: {self.plan.concurrency.max:.2f} full-context users"


def tried(request: Request) -> Plan | None:
    """The plan when it can be made and fits."""
    try:
        answer = plan(request)
    except KvplanError:
        return None
    return answer if answer.fits else None


def smaller_needs(args: EngineArgs) -> list[tuple[str, EngineArgs]]:
    """Changes that cost no hardware and no precision: fewer sequences at once, no CUDA graphs, more of the GPU."""
    changes = []
    if args.max_num_seqs is None or args.max_num_seqs > 64:
        changes.append(("--max-num-seqs 64", replace(args, max_num_seqs=64)))
    if not args.enforce_eager:
        changes.append(("--enforce-eager", replace(args, enforce_eager=True)))
    if args.gpu_memory_utilization is None or args.gpu_memory_utilization < 0.95:
        changes.append(("--gpu-memory-utilization 0.95", replace(args, gpu_memory_utilization=0.95)))
    return changes


def shorter_on_more(request: Request) -> list[Fix]:
    """The fewest ranks that hold any context at all, with the largest one they hold."""
    args = request.args
    for tp in TP_SIZES:
        if tp > args.tensor_parallel_size:
            answer = tried(replace(request, args=replace(args, tensor_parallel_size=tp, max_model_len="auto")))
            if answer is not None:
                context = answer.capacity.max_model_len
                if isinstance(args.max_model_len, int) and context >= args.max_model_len:
                    return []  # as many ranks hold what was asked for
                return [Fix(f"--tensor-parallel-size {tp} --max-model-len {context}", answer)]
    return []


def fixes(plan_: Plan) -> list[Fix]:
    """The nearest change of each kind that fits; the cheapest first."""
    request = plan_.request
    args = request.args
    found: list[Fix] = []

    def offer(flag: str, changed: Request) -> bool:
        answer = tried(changed)
        if answer is not None:
            found.append(Fix(flag, answer))
        return answer is not None

    if args.max_total_tokens is not None:
        context = plan_.settings.max_model_len
        offer(f"--max-total-tokens {context}", replace(request, args=replace(args, max_total_tokens=context)))
    for flag, changed in smaller_needs(args) if request.release.engine == "vllm" else ():
        if offer(flag, replace(request, args=changed)):
            break
    if args.kv_cache_dtype == "auto":
        offer("--kv-cache-dtype fp8", replace(request, args=replace(args, kv_cache_dtype="fp8")))
    for tp in TP_SIZES:
        if tp > args.tensor_parallel_size and offer(
            f"--tensor-parallel-size {tp}", replace(request, args=replace(args, tensor_parallel_size=tp))
        ):
            break
    if not any(fix.flag.startswith("--tensor-parallel-size 2") for fix in found):
        found += shorter_on_more(request)
    shorter = tried(replace(request, args=replace(args, max_model_len="auto")))
    if shorter is not None and shorter.capacity.max_model_len < plan_.settings.max_model_len:
        found.append(Fix(f"--max-model-len {shorter.capacity.max_model_len}", shorter))
    for bigger in larger_gpus(request):
        if offer(f"--gpu {bigger.name}", replace(request, gpu=bigger)):
            break
    return found


def larger_gpus(request: Request) -> list[GpuSpec]:
    """GPUs of the same make with more memory, the nearest first; those that share memory with the CPU left out."""
    makes = [gpu(name) for name in gpu_names()]
    larger = [one for one in makes if one.total_memory > request.gpu.total_memory and not one.unified]
    make = request.gpu.vendor if request.gpu.vendor != "unknown" else "nvidia"
    return sorted(
        (one for one in larger if one.vendor == make and one.sm >= min(80, request.gpu.sm)),
        key=lambda one: one.total_memory,
    )
