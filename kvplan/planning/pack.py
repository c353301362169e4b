"""Several servers on one GPU: the order in which they start, and the memory fraction of each.

Each start is planned as it would happen: servers started before hold their memory, and the server's own check of free
memory decides. A fraction is of the whole GPU, all of which must be free, or of the free memory; what a server of the
second kind keeps back for activations and graphs must remain free after the others have started.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from math import floor
from typing import Any, Final, NoReturn

from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.units import plural
from kvplan.hardware.gpu import GpuSpec
from kvplan.planning.advise import is_supported, supported_changes
from kvplan.planning.plan import Plan, Request, lack_text, plan
from kvplan.servers.base import server_of, terms_of

STEPS: Final = 100  # fractions are tried in hundredths
MOST_ORDERS: Final = 120  # all orders of five servers
MOST_SERVERS: Final = 16


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs of one kind, and dollars per hour of one (0: prices are not given)."""

    gpu: GpuSpec
    count: int
    dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A server on the shared GPU, and its minimum number of users; is_split: its flags state its ranks."""

    name: str
    request: Request
    users: int = 1
    is_split: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """A server in its place.

    share     value of its own flag: of the whole GPU, or of the free memory
    before    bytes in use by others when it starts
    resident  bytes that it uses after its start, including its CUDA context and its peak
    """

    tenant: Tenant
    share: float
    plan: Plan
    before: int
    resident: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Servers in start order, and the bytes of each GPU that are left; if `fits` is False: the smallest fraction each
    needs on its own, and by how much they exceed the GPU.
    """

    started: tuple[Started, ...]
    total: int
    in_use: int
    fits: bool

    @property
    def left(self) -> int:
        """Bytes left; negative if bytes are missing."""
        return self.total - self.in_use - sum(server.resident for server in self.started)


def pack(tenants: Sequence[Tenant], in_use: int, rest: str | None = None) -> Packing:
    """Find the smallest fractions that hold the users, in the first order in which all servers start, preferring the
    given order; the rest of the memory goes to the server `rest` (None: the first).

    Raises UsageError if the servers are not on the same GPU or ranks, or if one is too large for it.
    """
    check(tenants, rest)
    packing = least(tenants, in_use)
    return grown(packing, rest or tenants[0].name) if packing.fits else packing


def least(tenants: Sequence[Tenant], in_use: int) -> Packing:
    """The packing before the rest of the memory is given away."""
    total = tenants[0].request.gpu.total_memory
    alone = [smallest(tenant, 0) or too_large(tenant) for tenant in tenants]
    missing = Packing(tuple(alone), total, in_use, fits=False)  # next to others, no server needs less
    if missing.left < 0:
        return missing
    for order in islice(permutations(tenants), MOST_ORDERS):
        started = start_all(order, in_use)
        if started is not None:
            return Packing(tuple(started), total, in_use, fits=True)
    return missing


def too_large(tenant: Tenant) -> NoReturn:
    """Raise an error with the reason why a server does not start even alone, or does not hold its users."""
    the_plan, gpu = plan(at_share(tenant, STEPS - 1, 0)), tenant.request.gpu.name
    if not is_supported(the_plan):
        changes = " ".join(change.flag_of(engine_of(tenant)) for change in supported_changes(the_plan))
        remedy = f"use {changes}" if changes else "change it, or use another GPU or model"
        raise UsageError(f"{tenant.name} on {gpu}", lack_text(the_plan), remedy)
    remedy = "use fewer users, a shorter context or a larger GPU"
    raise UsageError(tenant.name, f"cannot serve {plural(tenant.users, 'user')} on {gpu} even alone", remedy)


def check_names(names: Sequence[str], rest: str | None) -> None:
    if not 1 <= len(names) <= MOST_SERVERS:
        raise UsageError("servers", f"there are {len(names)}", f"name 1 to {MOST_SERVERS}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"server {twice}", "is named twice", "give each a unique name")
    if rest is not None and rest not in names:
        raise UsageError(f"--rest {rest}", "no such server", f"use one of {', '.join(names)}")


def check(tenants: Sequence[Tenant], rest: str | None) -> None:
    check_names([tenant.name for tenant in tenants], rest)
    first = tenants[0].request
    for tenant in tenants:
        if tenant.request.gpu != first.gpu:
            raise UsageError(
                f"server {tenant.name}",
                f"is on {tenant.request.gpu.name}, not on {first.gpu.name}",
                "pack the servers of one GPU at a time",
            )
        if ranks(tenant.request) != ranks(first):
            raise UsageError(
                f"server {tenant.name}",
                f"runs on {ranks(tenant.request)} GPUs, not on {ranks(first)}",
                "pack only servers with the same number of GPUs",
            )


def ranks(request: Request) -> int:
    return request.args.num_gpus


# --- one start after another ------------------------------------------------------------------------------------------


def start_all(order: Sequence[Tenant], in_use: int) -> list[Started] | None:
    """Every server with its smallest fraction, or None if one does not start or all together exceed the GPU."""
    started: list[Started] = []
    before = in_use
    for tenant in order:
        server = smallest(tenant, before)
        if server is None:
            return None
        started.append(server)
        before += server.resident
    return started if before <= order[0].request.gpu.total_memory else None


def smallest(tenant: Tenant, before: int) -> Started | None:
    """The server with the smallest fraction that holds its users next to `before` bytes, or None if there is none."""
    high = STEPS - 1
    candidate = tried(tenant, high, before)
    if candidate is not None and candidate.refusal is not None and candidate.refusal.argument == share_of(tenant):
        shares = candidate.refusal.numbers  # fractions within the limit
        high = floor(shares[-1] * STEPS + 1e-6) if shares else 0
        candidate = tried(tenant, high, before) if high else None
    if not holds(candidate, tenant):
        return None
    low = 0  # `low` does not hold them, `high` does
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = holds(tried(tenant, middle, before), tenant)
        low, high = (low, middle) if is_enough else (middle, high)
    return started_with(tenant, high, before)


def engine_of(tenant: Tenant) -> str:
    return tenant.request.release.engine


def share_of(tenant: Tenant) -> str:
    return terms_of(engine_of(tenant)).share_argument


def at_share(tenant: Tenant, step: int, before: int) -> Request:
    stated: dict[str, Any] = {share_of(tenant): step / STEPS}
    return replace(tenant.request, args=replace(tenant.request.args, **stated), memory_in_use=before)


def tried(tenant: Tenant, step: int, before: int) -> Plan | None:
    try:
        return plan(at_share(tenant, step, before))
    except KvplanError:
        return None


def holds(the_plan: Plan | None, tenant: Tenant) -> bool:
    """True if it starts and holds its users with all estimates at their worst."""
    if the_plan is None or not the_plan.fits:
        return False
    low = the_plan.concurrency.users_low
    users = the_plan.concurrency.users if low is None else low
    return users * the_plan.concurrency.replicas >= tenant.users


def started_with(tenant: Tenant, step: int, before: int) -> Started:
    the_plan = tried(tenant, step, before)
    assert the_plan is not None
    return Started(tenant, step / STEPS, the_plan, before, held_by(the_plan))


def held_by(the_plan: Plan) -> int:
    """Bytes of a GPU that a running server uses: its rows, its CUDA context, and what it keeps back for peaks that are
    not planned row by row.
    """
    memory = the_plan.memory
    rows = memory.total + memory.missing - memory.unused
    return rows + memory.context + server_of(the_plan.request.release.engine).kept_back(the_plan)


# --- what is left -----------------------------------------------------------------------------------------------------


def grown(packed: Packing, name: str) -> Packing:
    """The same servers, with the largest fraction for one of them that lets all start."""
    server = next(server for server in packed.started if server.tenant.name == name)
    low, high, best = round(server.share * STEPS), STEPS, packed
    while high - low > 1:
        middle = (low + high) // 2
        larger = with_share(packed, name, middle)
        if larger is None:
            high = middle
        else:
            low, best = middle, larger
    return best


def with_share(packed: Packing, name: str, step: int) -> Packing | None:
    """The servers in order, one with this fraction, the others with the smallest, or None if one does not start."""
    started: list[Started] = []
    before = packed.in_use
    for server in packed.started:
        tenant = server.tenant
        if tenant.name != name:
            following = smallest(tenant, before)
        else:
            following = started_with(tenant, step, before) if holds(tried(tenant, step, before), tenant) else None
        if following is None:
            return None
        started.append(following)
        before += following.resident
    return replace(packed, started=tuple(started)) if before <= packed.total else None
