"""Servers over several GPUs: on a screen, as Markdown, as CSV and as kvplan/packs@1."""

from collections.abc import Iterator, Sequence

from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import plural
from kvplan.documents.pack import PackDocument, PacksDocument
from kvplan.hardware.gpu import GpuSpec
from kvplan.planning.assign import Assignment, Group
from kvplan.planning.pack import Pool
from kvplan.report.lines import COMMAND, Part, line
from kvplan.report.pack_text import TITLES, cells, pack_document
from kvplan.report.page import Block, code, heading


def listed(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def pools_text(pools: Sequence[Pool]) -> str:
    return listed([f"{pool.count} x {pool.gpu.name}" for pool in pools])


def place(assignment: Assignment, group: Group) -> str:
    """The group's GPUs: "l40s 0", "l40s 0 and 1", or "h200" for the only one."""
    pool = assignment.pools[group.pool]
    return pool.gpu.name if pool.count == 1 else f"{pool.gpu.name} {listed([*map(str, group.devices)])}"


def first_line(assignment: Assignment) -> str:
    count = sum(len(group.tenants) for group in assignment.groups)
    placed = [
        f"{listed([printable(tenant.name, 80) for tenant in group.tenants])} on {place(assignment, group)}"
        for group in assignment.groups
    ]
    if assignment.fits:
        price = f"; ${assignment.dollars:,.2f} per hour" if assignment.dollars else ""
        return f"Yes: {plural(count, 'server')} fit{'s' * (count == 1)}: {', '.join(placed)}{price}"
    names = listed([printable(name, 80) for name in assignment.unplaced])
    where = f"{plural(count + len(assignment.unplaced), 'server')} do not fit on {pools_text(assignment.pools)}"
    if not assignment.is_complete:
        where = f"no assignment of the servers to {pools_text(assignment.pools)} was found"
    return f"No: {where}; no room for {names} next to {'; '.join(placed)}"


def remarks(assignment: Assignment) -> Iterator[str]:
    """Lines after the table: unused GPUs, an incomplete search, what would hold all."""
    unused = [Pool(pool.gpu, pool.count - assignment.in_use(number)) for number, pool in enumerate(assignment.pools)]
    if assignment.fits and any(pool.count for pool in unused):
        yield f"Not needed: {pools_text([pool for pool in unused if pool.count])}."
    if not assignment.is_complete:
        last = "a cheaper one may exist" if assignment.fits else "one may exist"
        yield f"The search ended before it had tried every assignment; {last}."
    if not assignment.fits:
        more = f"use --gpu {enough(assignment)}, or " if assignment.enough else ""
        yield f"To fit all: {more}use fewer users, shorter contexts, or quantize."


def enough(assignment: Assignment) -> str:
    """GPUs as --gpu takes them."""
    return ",".join(f"{pool.count}x{pool.gpu.name}" for pool in assignment.enough)


def table(assignment: Assignment) -> Table:
    rows = [
        (place(assignment, group), *cells(server, packing.total))
        for group, packing in zip(assignment.groups, assignment.packings, strict=True)
        for server in packing.started
    ]
    return Table.of(("GPU", *TITLES), rows, left=3)


def assign_lines(assignment: Assignment) -> list[Part]:
    """The answer, the table, and each GPU's commands in order."""
    lines: list[Part] = [line(first_line(assignment), "bold" if assignment.fits else "bold red"), line()]
    lines.append(table(assignment))
    if texts := list(remarks(assignment)):
        lines += [line(), *map(line, texts)]
    if not assignment.fits:
        return lines
    for group, document in zip(assignment.groups, packs(assignment), strict=True):
        lines += [line(), line(order_text(assignment, group), "bold")]
        lines += [line(f"  {server['command']}", COMMAND) for server in document["servers"]]
    return lines


def order_text(assignment: Assignment, group: Group) -> str:
    order = ", each after the previous one is ready" if len(group.tenants) > 1 else ""
    return f"Start on {place(assignment, group)}{order}:"


def packs(assignment: Assignment) -> list[PackDocument]:
    """Documents of the groups; no two of their commands have the same port."""
    documents, first = [], 0
    for group, packing in zip(assignment.groups, assignment.packings, strict=True):
        pool = assignment.pools[group.pool]
        variable = "" if pool.count == len(group.devices) else visible(pool.gpu, group.devices)
        documents.append(pack_document(packing, first, variable))
        first += len(packing.started)
    return documents


def visible(gpu: GpuSpec, devices: Sequence[int]) -> str:
    """The variable by which a server sees only these GPUs of its machine; a MIG slice's would be an unknown UUID."""
    if " MIG " in gpu.device_name or gpu.node_gpus == 1:
        return ""
    name = "HIP_VISIBLE_DEVICES" if gpu.vendor == "amd" else "CUDA_VISIBLE_DEVICES"
    return f"{name}={','.join(str(device % gpu.node_gpus) for device in devices)} "


def assign_page(assignment: Assignment) -> Iterator[Block]:
    yield heading(3, first_line(assignment))
    yield table(assignment)
    yield from remarks(assignment)
    if assignment.fits:
        yield code("\n".join(server["command"] for document in packs(assignment) for server in document["servers"]))


def assign_table(assignment: Assignment) -> Table:
    """A row per server, every key of its pack."""
    rows = [
        {"gpu": place(assignment, group), **server, "fits": assignment.fits, "left": document["left"]}
        for group, document in zip(assignment.groups, packs(assignment), strict=True)
        for server in document["servers"]
    ]
    return Table.of(tuple(rows[0]), [tuple(row.values()) for row in rows])


def assign_document(assignment: Assignment) -> PacksDocument:
    """Build kvplan/packs@1."""
    return {
        "schema": "kvplan/packs@1",
        "fits": assignment.fits,
        "complete": assignment.is_complete,
        "dollars_per_hour": assignment.dollars or None,
        "pools": [
            {"gpu": pool.gpu.name, "count": pool.count, "used": assignment.in_use(number)}
            for number, pool in enumerate(assignment.pools)
        ],
        "unplaced": list(assignment.unplaced),
        "enough": enough(assignment) or None,
        "groups": [
            {"devices": list(group.devices), "pack": document}
            for group, document in zip(assignment.groups, packs(assignment), strict=True)
        ],
    }
