"""Will a server start on this machine, as it is now? The plan, the memory that is free, and the flag that helps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from kvplan.core.records import dataclass
from kvplan.core.units import format_apart, format_gib, plural
from kvplan.hardware.gpu import GpuSpec, with_memory
from kvplan.measure.machine import LiveGpu, Machine
from kvplan.planning.plan import Plan, Request, plan
from kvplan.policy.pods import lacking
from kvplan.servers.base import server_of
from kvplan.servers.plans.plan import SlotCache
from kvplan.servers.releases import Version, number_text, releases_of

Status = Literal["ok", "risk", "fail", "unknown"]
Outcome = Literal["starts", "may not start", "does not start"]
MEMORY: Final = "GPU memory"
# The oldest driver for each major version of CUDA: CUDA's release notes, "CUDA Toolkit and minimum required driver".
LEAST_DRIVERS: Final = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
BLACKWELL: Final = (10, 0)  # needs CUDA 12.8, whose release notes name it first
TURING: Final = (7, 5)  # the oldest that CUDA 13 compiles for
MOST_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `cure`: what to do if it fails, unless a fix of the plan does."""

    name: str
    status: Status
    text: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a server starts.

    checks  in the order in which a server would fail them
    """

    plan: Plan
    machine: Machine
    checks: tuple[Check, ...]

    @property
    def outcome(self) -> Outcome:
        """It may not start if a check is close: the estimates' range has both answers."""
        status = None if self.decisive is None else self.decisive.status
        return "starts" if status is None else "does not start" if status == "fail" else "may not start"

    @property
    def decisive(self) -> Check | None:
        """The first check that fails, else the first at risk."""
        return next((check for status in ("fail", "risk") for check in self.checks if check.status == status), None)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the command or the manifest states instead of this machine; None: it does not.

    memory, shm  bytes of the pod's memory and of its /dev/shm
    cuda         CUDA of the image
    """

    memory: int | None = None
    shm: int | None = None
    num_nodes: int = 1
    cuda: tuple[int, int] | None = None


def on_machine(request: Request, gpus: tuple[LiveGpu, ...]) -> Request:
    """The request on the GPUs that it would use: the smallest of them, with the most that others use on any."""
    if not gpus:
        return request
    spec = min((card.spec() for card in gpus), key=lambda spec: spec.total_memory)
    if request.gpu.total_memory_kind != "given" and request.gpu.device_name != spec.device_name:
        spec = replace(with_memory(request.gpu, spec.total_memory), total_memory_source=spec.total_memory_source)
    in_use = max(max(0, (card.total or spec.total_memory) - card.memory.free) for card in gpus)
    return replace(request, gpu=spec, memory_in_use=min(in_use, spec.total_memory - 1))


def as_started(request: Request) -> Request:
    """The request with the server's own default batch, where a plan would choose a smaller one that starts."""
    if request.args.max_num_seqs is not None:
        return request
    drafted, _ = server_of(request.release.engine).drafter(request)
    default = server_of(request.release.engine).settings(drafted).max_num_seqs
    if plan(request).settings.max_num_seqs >= default:
        return request
    return replace(request, args=replace(request.args, max_num_seqs=default))


def verdict(request: Request, machine: Machine, limits: Limits) -> Verdict:
    """Plan the request on this machine and look at what else a start needs."""
    needed = -(-request.args.num_gpus // limits.num_nodes)
    used = machine.gpus[:needed]
    answer = plan(as_started(on_machine(request, used)))
    checks = [
        *count_checks(machine, needed),
        *build_checks(request.release, machine, request.gpu, limits.cuda),
        memory_check(answer, machine, used),
        *host_checks(answer, machine, limits),
    ]
    return Verdict(answer, machine, tuple(checks))


# --- checks -----------------------------------------------------------------------------------------------------------


def count_checks(machine: Machine, needed: int) -> Iterator[Check]:
    visible = len(machine.gpus)
    if machine.problem is not None:
        yield Check("GPUs", "unknown", machine.problem)
    elif visible < needed:
        text = f"the server takes {plural(needed, 'GPU')}, {visible} {'is' if visible == 1 else 'are'} visible here"
        yield Check("GPUs", "fail", text, "make more visible (CUDA_VISIBLE_DEVICES, --gpus, nvidia.com/gpu)")
    else:
        yield Check("GPUs", "ok", f"{visible} visible, {needed} used")


def build_checks(release: Version, machine: Machine, gpu: GpuSpec, stated: tuple[int, int] | None) -> Iterator[Check]:
    """Whether the server's build runs with this driver and on this GPU."""
    builds = releases_of(release.engine).builds
    cuda = stated or next((cuda for since, cuda in reversed(builds) if since <= release.fields), None)
    if cuda is None or gpu.capability is None:
        return
    built = f"{'the image' if stated else release.label} is built for CUDA {number_text(cuda)}"
    least = LEAST_DRIVERS.get(cuda[0])
    if machine.driver is not None and least is not None:
        driver = tuple(int(part) for part in machine.driver.split(".")[:2] if part.isdecimal())
        is_old = driver < least
        text = f"driver {machine.driver}; {built}, which takes {number_text(least)} or newer"
        cure = f"update the driver to {least[0]} or newer, or use an older release or image" if is_old else ""
        yield Check("driver", "fail" if is_old else "ok", text, cure)
    text = f"compute capability {number_text(gpu.capability)}; {built}"
    if gpu.capability >= BLACKWELL and cuda < (12, 8):
        newer = next((number_text(since) for since, build in builds if build >= (12, 8)), None)
        named = f"use {release.engine}@{newer} or newer" if newer else "use a newer image"
        cure = f"{named}: kernels for this GPU need CUDA 12.8"
        yield Check("build", "fail", text, cure)
    elif gpu.capability < TURING and cuda[0] >= 13:
        yield Check("build", "fail", text, f"use an older release: CUDA 13 has no kernels below {number_text(TURING)}")
    else:
        yield Check("build", "ok", text)


def memory_check(answer: Plan, machine: Machine, gpus: tuple[LiveGpu, ...]) -> Check:
    """Whether the plan fits in what is free now."""
    total, in_use = answer.request.gpu.total_memory, answer.request.memory_in_use or 0
    if answer.slots is not None:
        return layers_check(answer, answer.slots, machine, gpus)
    if answer.refusal is not None or not answer.fits:
        text = answer.refusal.text if answer.refusal is not None else lack_of(answer)
        return Check(MEMORY, "risk" if is_close(answer) else "fail", text + used_by(gpus))
    if answer.memory.missing:
        text = (
            f"its parts take {format_gib(answer.memory.missing)} more than the GPU has, once CUDA graphs are captured"
        )
        return Check(MEMORY, "fail", text + used_by(gpus))
    share = answer.settings.gpu_memory_utilization
    own = f"the server takes {format_gib(answer.memory.budget)} ({share:.4g}) of {format_gib(total)}"
    if not machine.gpus:
        return Check(MEMORY, "unknown", f"{own}; what other processes use was not checked")
    text = f"{own}, {format_gib(total - in_use)} free now"
    if answer.concurrency.low < 1:
        return Check(MEMORY, "risk", f"{text}; at the low end of the estimates that is not enough")
    return Check(MEMORY, "ok", text)


def layers_check(answer: Plan, cache: SlotCache, machine: Machine, gpus: tuple[LiveGpu, ...]) -> Check:
    """Whether the places of a server that places layers fit in what is free now, as it would place them now."""
    fullest = max((place for place in cache.places if place.free), key=lambda place: place.total, default=None)
    if fullest is None:
        return Check(MEMORY, "ok", "everything is on the host")
    if not answer.fits:
        text = f"{fullest.name} lacks {format_gib(answer.deficit)} of {format_gib(fullest.total)}{used_by(gpus)}"
        return Check(MEMORY, "fail", text, "fewer layers on the GPU, a shorter context, or a smaller type of file")
    layers = f"{cache.gpu_layers} of {cache.num_layers} layers on GPUs"
    layers += f", the experts of {cache.host_experts} on the host" if cache.host_experts else ""
    text = f"{layers}; {fullest.name} takes {format_gib(fullest.total)} of {format_gib(fullest.free)} free now"
    if not machine.gpus:
        return Check(MEMORY, "unknown", f"{text}; what other processes use was not checked")
    grows = answer.estimates["non_torch"].likely
    return Check(MEMORY, "ok" if fullest.free - fullest.total >= grows else "risk", text)


def is_close(answer: Plan) -> bool:
    """True if a server that does not start starts at the favorable end of the estimates."""
    refusal, capacity = answer.refusal, answer.capacity
    if refusal is None:
        return answer.blocks_high > capacity.blocks_per_request
    if refusal.by == "state_blocks":
        return answer.blocks_high >= answer.settings.max_num_seqs
    context = answer.estimates["context"]
    return refusal.by == "free_memory" and refusal.deficit <= context.likely - context.low


def lack_of(answer: Plan) -> str:
    """What is missing, with the two figures that are compared."""
    memory, where = answer.memory, " on each GPU" if answer.request.args.world_size > 1 else ""
    if answer.available <= 0:
        overhead = sum(getattr(memory, name) for name in ("buffers", "activations", "non_torch", "lora"))
        text = f"weights of {format_gib(memory.weights)} and {format_gib(overhead)} in addition leave no KV cache"
        return f"{text} in a budget of {format_gib(memory.budget)}{where}"
    needs, has = format_apart(answer.deficit + answer.available, answer.available)
    tokens = answer.settings.max_model_len
    return f"a request of {tokens:,} tokens needs {needs} of KV cache{where}, {has} are left"


def used_by(gpus: tuple[LiveGpu, ...]) -> str:
    """The other processes on the GPUs, the largest first."""
    others = [(process, gpu) for gpu in gpus for process in gpu.processes]
    others.sort(key=lambda pair: -(pair[0].used or 0))
    names = [
        f"{process.name or 'process'} {process.pid}"
        + ("" if process.used is None else f" {format_gib(process.used)}")
        + (f" on GPU {gpu.index}" if len(gpus) > 1 else "")
        for process, gpu in others[:MOST_NAMED]
    ]
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    return f" ({', '.join(names)}{more})" if names else ""


def host_checks(answer: Plan, machine: Machine, limits: Limits) -> Iterator[Check]:
    """Host memory and /dev/shm, by the pod's limits where a manifest states them."""
    if limits.num_nodes > 1:
        return
    memory = machine.available if limits.memory is None else limits.memory
    of_limit = machine.limit is not None and machine.available != (machine.host and machine.host.available)
    name = "the memory limit" if limits.memory is not None or of_limit else "the host memory that is available"
    if memory is not None:
        short = lacking(answer, memory=memory, name=name)
        yield (
            Check("host memory", "ok", f"{name} is {format_gib(memory)}")
            if short is None
            else Check("host memory", "fail", *short)
        )
    shm = machine.shm if limits.shm is None else limits.shm
    if shm is None or answer.request.args.num_gpus == 1:
        return
    short = lacking(answer, shm=shm)
    if short is None:
        yield Check("/dev/shm", "ok", f"{format_gib(shm)} for the queues of its processes and NCCL")
    else:  # queues are mapped, not written, at the start; NCCL's buffers are written where GPUs lack peer access
        is_sure = answer.request.gpu.lacks_peer_access
        yield Check("/dev/shm", "fail" if is_sure else "risk", short[0], f"{short[1]}: --shm-size 16g, or --ipc=host")
