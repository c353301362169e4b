"""Servers that share a GPU: on a screen, as Markdown, as CSV and as kvplan/pack@1."""

import shlex
from collections.abc import Iterator

from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import format_gib, plural
from kvplan.documents.pack import PackDocument, PackedServer
from kvplan.planning.pack import Packing, Started, ranks
from kvplan.planning.plan import serve_command
from kvplan.report.lines import COMMAND, Part, line
from kvplan.report.page import Block, code, heading
from kvplan.servers.base import terms_of

TITLES = ("server", "model", "utilization", "free before", "weights", "KV cache", "memory", "users", "low")
FIRST_PORT = 8000


def where(packing: Packing) -> str:
    request = packing.started[0].plan.request
    count = ranks(request)
    return request.gpu.name if count == 1 else f"{count} x {request.gpu.name}"


def first_line(packing: Packing) -> str:
    servers = plural(len(packing.started), "server")
    if not packing.fits:
        needed = packing.total - packing.left - packing.in_use
        missing = f"{format_gib(-packing.left)} too much" if packing.left < 0 else "and no start order works"
        return f"{servers} do not fit on {where(packing)}: they need at least {format_gib(needed)}, {missing}"
    parts = (
        f"{printable(server.tenant.name, 80)} {server.plan.concurrency.all_users.likely:,}"
        for server in packing.started
    )
    return f"{servers} fit on {where(packing)}, started in this order; users: {', '.join(parts)}"


def cells(server: Started, total: int) -> tuple[str, ...]:
    low, likely, _ = server.plan.concurrency.all_users
    return (
        printable(server.tenant.name, 60),
        printable(server.plan.request.spec.name, 60),
        f"{server.share:.2f}",
        format_gib(total - server.before),
        format_gib(server.plan.memory.weights),
        format_gib(server.plan.memory.kv_cache),
        format_gib(server.resident),
        f"{likely:,}",
        "" if low is None else f"{low:,}",
    )


def pack_lines(packing: Packing) -> list[Part]:
    """The answer, the table, and the commands in order."""
    lines: list[Part] = [line(first_line(packing), "bold" if packing.fits else "bold red"), line(), table(packing)]
    used = format_gib(packing.total - packing.in_use - packing.left)
    others = f", {format_gib(packing.in_use)} is used by other processes" if packing.in_use else ""
    balance = f"{format_gib(packing.left)} is free" if packing.fits else f"{format_gib(-packing.left)} is missing"
    verb = "use" if packing.fits else "need"
    lines += [line(), line(f"The servers {verb} {used} of {format_gib(packing.total)}{others}; {balance}.")]
    if not packing.fits:
        lines.append(line("Use fewer users or shorter contexts, quantize, or move a server to another GPU."))
        return lines
    lines += [line(), line("Start them in this order, each after the previous one is ready:", "bold")]
    lines += [line(f"  {command(server, number)}", COMMAND) for number, server in enumerate(packing.started)]
    return lines


def command(server: Started, number: int) -> str:
    """Command that starts it, on its own port: the pasted one, or the next."""
    words = serve_command(server.plan)
    return shlex.join(words if "--port" in words else [*words, "--port", str(FIRST_PORT + number)])


def table(packing: Packing) -> Table:
    return Table.of(TITLES, [cells(server, packing.total) for server in packing.started], left=2)


def pack_page(packing: Packing) -> Iterator[Block]:
    yield heading(3, first_line(packing))
    yield table(packing)
    if packing.fits:
        yield code("\n".join(command(server, number) for number, server in enumerate(packing.started)))


def pack_table(packing: Packing) -> Table:
    """A row per server, every key of the document."""
    document = pack_document(packing)
    rows = [(*server.values(), document["fits"], document["left"]) for server in document["servers"]]
    return Table.of((*document["servers"][0], "fits", "left"), rows)


def pack_document(packing: Packing, first: int = 0, variable: str = "") -> PackDocument:
    """Build kvplan/pack@1; ports count from `first`, and a variable precedes each command."""
    return {
        "schema": "kvplan/pack@1",
        "fits": packing.fits,
        "gpu": packing.started[0].plan.request.gpu.name,
        "num_gpus": ranks(packing.started[0].plan.request),
        "total": packing.total,
        "in_use": packing.in_use,
        "left": packing.left,
        "servers": [
            _server(server, packing, variable + command(server, number))
            for number, server in enumerate(packing.started, first)
        ],
    }


def _server(server: Started, packing: Packing, text: str) -> PackedServer:
    the_plan = server.plan
    low, likely, _ = the_plan.concurrency.all_users
    return {
        "name": server.tenant.name,
        "model": the_plan.request.spec.name,
        "engine": the_plan.request.release.label,
        "argument": terms_of(the_plan.request.release.engine).share_argument,
        "share": server.share,
        "free_before": packing.total - server.before,
        "context": the_plan.memory.context,
        "weights": the_plan.memory.weights,
        "kv_cache": the_plan.memory.kv_cache,
        "held": server.resident,
        "users_needed": server.tenant.users,
        "users": likely,
        "users_low": low,
        "command": text,
    }
