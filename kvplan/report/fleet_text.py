"""A fleet as a table, Markdown, CSV and JSON: the verdict, a row per server, and fleet-wide figures."""

from collections import Counter

from kvplan.core.records import from_fields
from kvplan.core.table import Markdown, Table, flattened, markdown_text, percent
from kvplan.documents import fleet as typed
from kvplan.report import formats
from kvplan.report import simulate_text as one_server
from kvplan.report.lines import Part, line
from kvplan.report.page import Block, heading
from kvplan.report.simulate_text import duration
from kvplan.simulate.fleet_result import ReplicaResult
from kvplan.simulate.outcome import FleetAnswer

MOST_ROWS = 64  # servers on a screen


def title(answer: FleetAnswer) -> str:
    plan = answer.total.plan
    return f"{plan.request.spec.name} on {answer.servers}, {answer.router} routing: {answer.total.load}"


def server_name(replica: ReplicaResult) -> str:
    role = "" if replica.role == "server" else f" {replica.role}"
    state = "" if replica.state == "serving" and not replica.failures else f" ({state_text(replica)})"
    return f"{replica.index} {replica.kind}{role}{state}"


def state_text(replica: ReplicaResult) -> str:
    failed = f"failed {replica.failures}x" if replica.failures else ""
    return ", ".join(part for part in (failed, "" if replica.state == "serving" else replica.state) if part)


def first_token(replica: ReplicaResult) -> str:
    times = replica.times["ttft"]
    return f"{duration(times.p50)} / {duration(times.p99)}" if replica.requests else "-"


def figures_table(answer: FleetAnswer) -> Table:
    """Fleet-wide figures; the fleet-wide peak of a level at one moment is not known."""
    rows = (
        (name.replace("mean / max", "fleet mean / server max"), *texts) for name, texts in one_server.rows(answer.total)
    )
    return Table.of(["", "fleet"], rows)


def servers_table(answer: FleetAnswer) -> Table:
    names = (
        "server", "uptime", "requests", "TTFT p50 / p99", "TPOT p50", "busy", "running, mean / max",
        "waiting, mean / max", "KV, mean / max", "hits", "preemptions",
    )  # fmt: skip
    return Table.of(
        names,
        (
            [
                server_name(replica),
                duration(replica.seconds),
                f"{replica.requests:,}",
                first_token(replica),
                duration(replica.times["tpot"].p50) if replica.requests and replica.role != "prefill" else "-",
                percent(replica.busy),
                f"{replica.running_mean:,.1f} / {replica.running_peak:,}",
                f"{replica.waiting_mean:,.1f} / {replica.waiting_peak:,}",
                f"{percent(replica.kv_usage_mean)} / {percent(replica.kv_usage_peak)}",
                percent(replica.hit_rate),
                f"{replica.preemptions:,}",
            ]
            for replica in answer.result.replicas[:MOST_ROWS]
        ),
    )


def facts(answer: FleetAnswer) -> list[tuple[str, str]]:
    result = answer.result
    size = f"{result.size_mean:,.2f} on average, {result.size_peak:,} at most, {result.gpu_hours:,.2f} GPU hours"
    left = len(result.replicas) - MOST_ROWS
    if left > 0:
        states = Counter(replica.state for replica in result.replicas[MOST_ROWS:])
        size += f"; {left:,} more rows in --format json ({', '.join(f'{n:,} {state}' for state, n in states.items())})"
    rows = [("Size", size)]
    if result.resent or result.unserved:
        rows.append(("Lost", f"{result.resent:,} requests retried, {result.unserved:,} rejected by every server"))
    return [*rows, *one_server.facts(answer.total)[1:]]


def lines(answer: FleetAnswer) -> list[Part]:
    return [
        line(one_server.verdict_line(answer.total), "bold"),
        line(one_server.range_text(answer.total)),
        line(title(answer)),
        line(),
        servers_table(answer),
        line(),
        figures_table(answer),
        line(),
        *(line(f"{name:<6}{text}") for name, text in facts(answer)),
    ]


def shapes(answer: FleetAnswer) -> formats.CommandAnswer:
    servers = [answer.total.plan.request.release.label]
    return formats.CommandAnswer.of(answer, lines, document, metrics_table, page, servers=servers)


def page(answer: FleetAnswer) -> list[Block]:
    below = "\n".join(f"{name}: {markdown_text(text)}  " for name, text in facts(answer))
    return [
        heading(2, title(answer)),
        Markdown(markdown_text(f"{one_server.verdict_line(answer.total)} {one_server.range_text(answer.total)}")),
        servers_table(answer),
        figures_table(answer),
        Markdown(below),
    ]


def metrics_table(answer: FleetAnswer) -> Table:
    """A row per figure of the fleet and of each server."""
    whole = document(answer)
    rows = [("fleet", name, value) for name, value in flattened(whole["fleet"], lists=False) if name != "name"]
    for replica in whole["replicas"]:
        rows += [(str(replica["index"]), name, value) for name, value in flattened(replica, lists=False)]
    return Table.of(("server", "metric", "value"), rows)


def document(answer: FleetAnswer) -> typed.FleetDocument:
    """Build kvplan/fleet@1."""
    result, total = answer.result, one_server.document(answer.total)
    return {
        "schema": "kvplan/fleet@1",
        "inputs": total["inputs"],
        "servers": answer.servers,
        "router": answer.router,
        "verdict": total["verdict"],
        "fleet": total["variants"][0],
        "resent": result.resent,
        "unserved": result.unserved,
        "servers_mean": result.size_mean,
        "servers_peak": result.size_peak,
        "gpu_hours": result.gpu_hours,
        "replicas": [replica_document(replica) for replica in result.replicas],
        "sizes": [{"seconds": seconds, "servers": count} for seconds, count in result.sizes],
    }


def replica_document(replica: ReplicaResult) -> typed.Replica:
    times = replica.times
    return from_fields(
        typed.Replica,
        replica,
        gpu=replica.kind,
        times={
            "ttft_p50": times["ttft"].p50,
            "ttft_p99": times["ttft"].p99,
            "tpot_p50": times["tpot"].p50,
            "tpot_p99": times["tpot"].p99,
        },
        running={"mean": replica.running_mean, "peak": replica.running_peak},
        waiting={"mean": replica.waiting_mean, "peak": replica.waiting_peak},
        kv_usage={"mean": replica.kv_usage_mean, "peak": replica.kv_usage_peak},
        prefix_hit_rate=replica.hit_rate,
    )
