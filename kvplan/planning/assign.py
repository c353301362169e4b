"""Several servers over several GPUs: which goes where, so that all start, at the lowest price or on the fewest GPUs.

A depth-first search places the largest server first: next to others where all of them start, as `pack` finds, or on
GPUs of its own. Ranks of one server are GPUs of one kind, and only servers with as many ranks share them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.units import plural
from kvplan.planning.advise import TP_SIZES
from kvplan.planning.pack import Packing, Pool, Tenant, check_names, least, pack, ranks, smallest, too_large

MOST_NODES: Final = 4000  # places tried for a server, of one search
MOST_MORE: Final = 4  # GPUs of one kind that a remedy adds

Cost = tuple[float, int, int]  # dollars per hour, GPUs, bytes of their memory


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs of a pool with the servers that share them, a rank of each on every GPU."""

    pool: int
    devices: tuple[int, ...]
    tenants: tuple[Tenant, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Servers over GPUs: the packing of each group.

    unplaced     servers for which no place was found
    is_complete  False if the search ended before it had tried every place
    enough       GPUs that would hold all, if `unplaced` and if it takes a few more of one kind
    """

    pools: tuple[Pool, ...]
    groups: tuple[Group, ...]
    packings: tuple[Packing, ...]
    unplaced: tuple[str, ...] = ()
    is_complete: bool = True
    enough: tuple[Pool, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.unplaced

    @property
    def dollars(self) -> float:
        """Dollars per hour of the GPUs in use."""
        return cost(self.pools, self.groups)[0]

    def in_use(self, pool: int) -> int:
        return sum(len(group.devices) for group in self.groups if group.pool == pool)


def cost(pools: Sequence[Pool], groups: Sequence[Group]) -> Cost:
    used = [pools[group.pool] for group in groups for _ in group.devices]
    return round(sum(pool.dollars for pool in used), 6), len(used), sum(pool.gpu.total_memory for pool in used)


@dataclass(slots=True)
class Packer:
    """Packings computed before, by kind of GPU and servers, for several searches."""

    tenants: Sequence[Sequence[Tenant]]  # of each server, one per pool
    pools: Sequence[Pool]
    in_use: int
    widths: dict[tuple[int, int], tuple[Tenant, ...]] = field(default_factory=dict)
    alone: dict[tuple[str, int, str], int] = field(default_factory=dict)
    starts: dict[tuple[int, int, frozenset[str]], bool] = field(default_factory=dict)

    def of_pool(self, number: int, pool: int) -> tuple[Tenant, ...]:
        """A server on this kind of GPU, with every number of ranks with which it holds its users alone."""
        key = (number, pool)
        if key not in self.widths:
            tenant = self.tenants[number][pool]
            limit = min(self.pools[pool].count + MOST_MORE, tenant.request.gpu.node_gpus)
            sizes = [ranks(tenant.request)] if tenant.is_split else [size for size in TP_SIZES if size <= limit]
            spread = [with_ranks(tenant, size) for size in sizes]
            servers = [(wide, smallest(wide, self.in_use)) for wide in spread]
            self.widths[key] = tuple(wide for wide, server in servers if server is not None)
            for wide, server in servers:
                if server is not None:
                    self.alone[wide.name, ranks(wide.request), wide.request.gpu.name] = server.resident
        return self.widths[key]

    def size(self, tenant: Tenant) -> int:
        """Bytes of each GPU that it needs at least."""
        return self.alone[tenant.name, ranks(tenant.request), tenant.request.gpu.name]

    def start(self, pool: int, tenants: Sequence[Tenant]) -> bool:
        """True if they start next to each other."""
        first = tenants[0].request
        if self.in_use + sum(map(self.size, tenants)) > first.gpu.total_memory:
            return False
        key = (pool, ranks(first), frozenset(tenant.name for tenant in tenants))
        if key not in self.starts:
            self.starts[key] = least(tenants, self.in_use).fits
        return self.starts[key]


def with_ranks(tenant: Tenant, size: int) -> Tenant:
    request = tenant.request
    if ranks(request) == size:
        return tenant
    return replace(tenant, request=replace(request, args=replace(request.args, tensor_parallel_size=size)))


@dataclass(slots=True)
class Search:
    """A depth-first search over some GPUs.

    is_wide  servers may take more ranks than they need alone
    best     the cheapest assignment of all servers
    deepest  the one of the most servers
    """

    packer: Packer
    pools: tuple[Pool, ...]
    order: Sequence[int]
    is_wide: bool
    nodes: int = MOST_NODES
    best: tuple[Group, ...] | None = None
    deepest: tuple[Group, ...] = ()
    depth: int = -1

    def run(self, groups: tuple[Group, ...] = (), depth: int = 0) -> None:
        if self.best is not None and cost(self.pools, groups) >= cost(self.pools, self.best):
            return
        if depth > self.depth:
            self.deepest, self.depth = groups, depth
        if depth == len(self.order):
            self.best = groups
            return
        for following in self.places(groups, self.order[depth]):
            if self.nodes <= 0:
                return
            self.nodes -= 1
            self.run(following, depth + 1)

    def places(self, groups: tuple[Group, ...], number: int) -> list[tuple[Group, ...]]:
        """The groups with one more server: next to others, then on GPUs of its own, the cheapest first."""
        own = []
        shared = []
        for index, pool in enumerate(self.pools):
            for tenant in self.packer.of_pool(number, index)[: None if self.is_wide else 1]:
                width = ranks(tenant.request)
                used = sum(len(group.devices) for group in groups if group.pool == index)
                if used + width <= pool.count:  # which of the free ones makes no difference
                    own.append((*groups, Group(index, tuple(range(used, used + width)), (tenant,))))
                for place, group in enumerate(groups):
                    tenants = (*group.tenants, tenant)
                    if (group.pool, len(group.devices)) == (index, width) and self.packer.start(index, tenants):
                        shared.append((*groups[:place], replace(group, tenants=tenants), *groups[place + 1 :]))
        return shared + sorted(own, key=lambda following: cost(self.pools, following))


def assign(
    tenants: Sequence[Sequence[Tenant]], pools: Sequence[Pool], in_use: int, favored: str | None = None
) -> Assignment:
    """Place every server: at the lowest price if there are prices, then on the fewest GPUs, then on the smallest.

    tenants  of each server, one for each pool
    favored  of the server with this name, and of the first of all other groups, is the memory that remains

    Raises UsageError if a server fits on none of the GPUs even alone.
    """
    check_names([servers[0].name for servers in tenants], favored)
    packer, pools = Packer(tenants, pools, in_use), tuple(pools)
    order = sorted(range(len(tenants)), key=lambda number: largest(packer, pools, number), reverse=True)
    search = searched(packer, pools, order)
    groups, unplaced = search.deepest, []
    for number in order[search.depth :]:  # all are placed if there is a best one
        following = search.places(groups, number)
        groups = following[0] if following else groups
        unplaced += [] if following else [tenants[number][0].name]
    groups = search.best or groups
    groups = numbered(groups)
    packings = tuple(packed(group, in_use, favored) for group in groups)
    enough = () if search.best else enough_for(packer, pools, order)
    return Assignment(pools, groups, packings, tuple(unplaced), search.nodes > 0, enough)


def numbered(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups in order of their GPUs, those of most ranks first, so that powers of two stay within a machine."""
    used: dict[int, int] = {}
    ordered = []
    for group in sorted(groups, key=lambda group: (group.pool, -len(group.devices))):
        first = used.get(group.pool, 0)
        used[group.pool] = first + len(group.devices)
        ordered.append(replace(group, devices=tuple(range(first, used[group.pool]))))
    return tuple(ordered)


def packed(group: Group, in_use: int, favored: str | None) -> Packing:
    names = {tenant.name for tenant in group.tenants}
    return pack(group.tenants, in_use, favored if favored in names else None)


def searched(packer: Packer, pools: tuple[Pool, ...], order: Sequence[int]) -> Search:
    """The search with the fewest ranks of each server; if that finds none, with more ranks, too."""
    search = Search(packer, pools, order, is_wide=False)
    search.run()
    if search.best is None and search.nodes > 0:
        wider = Search(packer, pools, order, is_wide=True)
        wider.run()
        if wider.depth > search.depth:
            return wider
        search.nodes = wider.nodes  # the answer is as complete as both
    return search


def largest(packer: Packer, pools: Sequence[Pool], number: int) -> int:
    """Bytes that a server needs on all its GPUs, of the kind where it needs least; UsageError if it fits on none."""
    servers = [
        tenant
        for index, pool in enumerate(pools)
        for tenant in packer.of_pool(number, index)[:1]
        if ranks(tenant.request) <= pool.count
    ]
    if servers:
        return min(packer.size(tenant) * ranks(tenant.request) for tenant in servers)
    if len(pools) == 1 and pools[0].count == 1:
        too_large(packer.tenants[number][0])
    tenant, names = packer.tenants[number][0], " or ".join(f"{pool.count} x {pool.gpu.name}" for pool in pools)
    remedy = "use fewer users, a shorter context or larger GPUs"
    raise UsageError(tenant.name, f"cannot serve {plural(tenant.users, 'user')} on {names} even alone", remedy)


def enough_for(packer: Packer, pools: tuple[Pool, ...], order: Sequence[int]) -> tuple[Pool, ...]:
    """The fewest more GPUs of one kind that hold all servers; empty if a few are not enough."""
    for more in range(1, MOST_MORE + 1):
        for index, pool in enumerate(pools):
            larger = (*pools[:index], replace(pool, count=pool.count + more), *pools[index + 1 :])
            if searched(packer, larger, order).best is not None:
                return larger
    return ()
