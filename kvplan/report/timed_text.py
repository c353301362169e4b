"""Placements that meet latency targets, as JSON, CSV, Markdown and a table, all from one document."""

import shlex
from typing import Final, Literal, get_args

from kvplan.core.files import printable
from kvplan.core.records import from_fields
from kvplan.core.table import Table, percent
from kvplan.core.units import plural
from kvplan.documents import timed as typed
from kvplan.planning.plan import Request, serve_command
from kvplan.planning.users import num_gpus
from kvplan.report import buying
from kvplan.report.drawing import Figure, bars
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import COMMAND, Part, line
from kvplan.report.page import Block, bold, bullets, code, folded
from kvplan.report.recommend_text import LESS_PRECISE
from kvplan.report.simulate_text import duration, rate_text, span
from kvplan.simulate.placing import Candidate, Demand, Placed, Timed
from kvplan.simulate.ranges import coverage_remark, unseen_remark
from kvplan.simulate.slo import Kept

METHOD = (
    "Each server is simulated at an even share of the load. Placements that are not simulated show "
    "the analytical minimum."
)

UNTIMED_RANKS = (
    "Not tried: data-parallel ranks that share experts (--data-parallel-size with --enable-expert-parallel); "
    "`kvplan simulate` times them, and `kvplan recommend --users` sizes them by memory"
)


def document(
    request: Request, load: str, demand: Demand, placed: Placed, prices: str | None, shares_experts: bool
) -> typed.TimedRecommendationDocument:
    context = request.args.max_model_len
    assert isinstance(context, int), "the command states one"
    doc: typed.TimedRecommendationDocument = {
        "schema": "kvplan/timed-recommendation@1",
        "answer": "",
        "holds": bool(placed.timed),
        "question": {
            "model": request.spec.name,
            "engine": request.release.label,
            "load": load,
            "targets": [f"{goal.name} at most {limit_text(goal.metric, goal.limit)}" for goal in demand.promises],
            "users": demand.users,
            "rate": demand.rate,
            "prices": prices,
            "max_model_len": context,
            "spare": demand.spare,
            "strict": demand.strict,
        },
        "placements": [placement_document(placement, demand) for placement in placed.timed],
        "bounded": [bounded_document(candidate, demand.spare) for candidate in placed.bounded],
        "failures": [from_fields(typed.TimedFailure, failure) for failure in placed.missed],
        "shares_experts": shares_experts,
        "unseen": sorted({what for placement in placed.timed for what in placement.ranges.unseen}),
        "coverage": sorted({placement.ranges.coverage for placement in placed.timed}),
    }  # fmt: skip
    doc["answer"] = headline(doc)
    return doc


def placement_document(placement: Timed, demand: Demand) -> typed.TimedPlacement:
    kind, servers = placement.candidate, placement.servers + demand.spare
    price = None if kind.price_per_hour is None else kind.price_per_hour * kind.gpus(servers)
    per_s = placement.result.output_tokens_per_s
    if demand.rate is not None and placement.result.finished:
        per_s = demand.rate / placement.servers * sum_of(placement) / placement.result.finished
    total_per_s = placement.servers * per_s
    tokens = total_per_s * 3600
    return {
        "gpu": kind.gpu,
        "servers": servers,
        "spare": demand.spare,
        "num_gpus": kind.gpus(servers),
        "tensor_parallel_size": kind.plan.request.args.tensor_parallel_size,
        "changes": list(kind.changes),
        "price_per_hour": price,
        "price_per_million_output_tokens": None if price is None or not tokens else price / tokens * 1e6,
        "output_tokens_per_s": total_per_s,
        "server_output_tokens_per_s": per_s,
        "kv_usage_peak": placement.result.kv_usage_peak,
        "targets": [target_document(outcome) for outcome in placement.outcomes],
        "warnings": list(warnings(kind)),
        "command": shlex.join(serve_command(kind.plan)),
    }


def sum_of(placement: Timed) -> float:
    """Number of output tokens of the run."""
    return placement.result.output_tokens_per_s * placement.result.seconds


def target_document(outcome: Kept) -> typed.Target:
    return from_fields(typed.Target, outcome, promise=outcome.promise.name, limit=outcome.promise.limit)


def bounded_document(candidate: Candidate, spare: int) -> typed.Bounded:
    gpus = candidate.gpus(candidate.servers + spare)
    return {
        "gpu": candidate.gpu,
        "servers": candidate.servers + spare,
        "num_gpus": gpus,
        "tensor_parallel_size": candidate.plan.request.args.tensor_parallel_size,
        "changes": list(candidate.changes),
        "price_per_hour": None if candidate.price_per_hour is None else candidate.price_per_hour * gpus,
    }


def warnings(kind: Candidate) -> list[str]:
    if num_gpus(kind.plan) > 1 and kind.plan.request.gpu.interconnect == "pcie":
        return ["its GPUs communicate over PCIe at every layer"]
    return []


# --- words ------------------------------------------------------------------------------------------------------------


def limit_text(metric: str | None, limit: float) -> str:
    return percent(limit) if metric is None else duration(limit)


def headline(doc: typed.TimedRecommendationDocument) -> str:
    question = doc["question"]
    targets, load = " and ".join(question["targets"]), question["load"]
    if not doc["placements"]:
        reasons = {failure["reason"] for failure in doc["failures"]}
        why = f": {printable(reasons.pop(), 300)}" if len(reasons) == 1 else "."
        return f"No: no placement tried serves {load} with {targets}{why}"
    best = doc["placements"][0]
    spare = f", {best['spare']} of them spare" if best["spare"] else ""
    price = "" if best["price_per_hour"] is None else f", {dollars(best['price_per_hour'])}/hour"
    servers = best["servers"]
    split = (
        ""
        if servers == best["num_gpus"] == 1
        else f": {plural(servers, 'server')} of TP {best['tensor_parallel_size']}"
    )
    changes = f" with {' and '.join(best['changes'])}" if best["changes"] else ""
    return f"Take {best['num_gpus']} x {best['gpu']}{changes}{split}{spare}{price}. Serves {load}, with {targets}."


def dollars(amount: float) -> str:
    return f"${amount:,.2f}"


def target_text(target: typed.Target) -> str:
    value, low, high = target["value"], target["low"], target["high"]
    if target["promise"] == "preempted":
        return "-" if value is None else percent(value)
    if value is None:
        return "-"
    return span(low, high) if low is not None and high is not None else duration(value)


def placements_table(doc: typed.TimedRecommendationDocument, limit: int) -> Table:
    has_price = any(placement["price_per_hour"] is not None for placement in doc["placements"])
    names = [target["promise"] for target in doc["placements"][0]["targets"]] if doc["placements"] else []
    header = [
        "GPUs",
        "servers",
        "changes",
        *(["$/hour", "$/M output"] if has_price else []),
        *names,
        "KV peak",
        "tokens/s",
    ]
    rows = [
        [
            f"{placement['num_gpus']} x {placement['gpu']}",
            f"{placement['servers']} x TP {placement['tensor_parallel_size']}",
            ", ".join(placement["changes"]) or "-",
            *(price_cells(placement) if has_price else []),
            *(target_text(target) for target in placement["targets"]),
            percent(placement["kv_usage_peak"]),
            rate_text(float(f"{placement['output_tokens_per_s']:.3g}")),
        ]
        for placement in doc["placements"][:limit]
    ]
    return Table.of(header, rows)


def price_cells(placement: typed.TimedPlacement) -> list[str]:
    return [
        "-" if amount is None else dollars(amount)
        for amount in (placement["price_per_hour"], placement["price_per_million_output_tokens"])
    ]


def remarks(doc: typed.TimedRecommendationDocument) -> list[str]:
    texts = [
        f"{placement['num_gpus']} x {placement['gpu']}: {text}"
        for placement in doc["placements"]
        for text in placement["warnings"]
    ]
    if any(change.startswith("fp8") for placement in doc["placements"] for change in placement["changes"]):
        texts.append(LESS_PRECISE)
    if doc["shares_experts"]:
        texts.append(UNTIMED_RANKS)
    if doc["unseen"]:
        texts.append(unseen_remark(doc["unseen"]))
    if doc["bounded"]:
        others = ", ".join(
            f"{bounded['num_gpus']} x {bounded['gpu']} (TP {bounded['tensor_parallel_size']}"
            f"{''.join(f', {change}' for change in bounded['changes'])})"
            for bounded in doc["bounded"][:6]
        )
        texts.append(f"Not simulated (minimum): {others}{', ...' if len(doc['bounded']) > 6 else ''}")
    texts += [
        f"{failure['gpu']} x{failure['num_gpus']}: {printable(failure['reason'], 200)}" for failure in doc["failures"]
    ]
    return texts


def lines(doc: typed.TimedRecommendationDocument, limit: int) -> list[Part]:
    parts: list[Part] = [line(doc["answer"], "bold" if doc["holds"] else "bold red")]
    parts += [line(coverage_remark(text)) for text in doc["coverage"]]
    if doc["placements"]:
        parts += [line(), placements_table(doc, limit), line(), line(METHOD)]
    parts += [line(text) for text in remarks(doc)]
    if doc["placements"]:
        parts += [line(), line("Serve (each server)", "bold"), line(f"  {doc['placements'][0]['command']}", COMMAND)]
    return parts


def page(doc: typed.TimedRecommendationDocument, limit: int) -> list[Block]:
    parts: list[Block] = [bold(doc["answer"])]
    more: list[Block] = [bullets(texts)] if (texts := remarks(doc)) else []
    if not doc["placements"]:
        return [*parts, *more]
    return [
        *parts,
        *buying.summary(offers(doc), doc["question"]["prices"]),
        bullets(assumptions(doc)),
        *folded("All placements", [placements_table(doc, limit), METHOD, *more]),
        "Serve (each server):",
        code(doc["placements"][0]["command"]),
    ]


def offers(doc: typed.TimedRecommendationDocument) -> list[buying.Offer]:
    """The cheapest placement, and the two next; a server takes its share of the load as simulated."""
    load = float(doc["question"]["users"] or doc["question"]["rate"] or 1.0)
    offered = []
    for place in doc["placements"]:
        serving, hour = place["servers"] - place["spare"], place["price_per_hour"]
        split = buying.servers_text(place["servers"], place["spare"], f"TP {place['tensor_parallel_size']}")
        offered.append(
            buying.Offer(
                ", ".join((f"{place['num_gpus']:,} x {place['gpu']}", *place["changes"])),
                split,
                ", ".join(f"{target['promise']} {target_text(target)}" for target in place["targets"]),
                load / serving,
                place["num_gpus"] // place["servers"],
                None if hour is None else hour / place["num_gpus"],
                place["servers"],
                place["spare"],
            )
        )
    return buying.nearest(offered)


def assumptions(doc: typed.TimedRecommendationDocument) -> list[str]:
    question = doc["question"]
    whole = "it is called kept at the high end of every time" if question["strict"] else "the likely time meets it"
    targets = " and ".join(question["targets"])
    return [
        f"Load: {question['load']}, shared evenly by the servers.",
        f"Targets: {targets}; {whole}.",
        f"Latency: simulated for {question['engine']} at one server's share of the load, not measured on these GPUs.",
        "Curve: a server is added for every further share of that size; one may take more, so a step may come later.",
        *(coverage_remark(text) for text in doc["coverage"]),
    ]


def cost_bars(doc: typed.TimedRecommendationDocument, limit: int) -> list[Figure]:
    """Cost of each placement, or without prices its number of GPUs, and of the first ones over the load."""
    placements = doc["placements"][:limit]
    if not placements:
        return []
    users, rate = doc["question"]["users"], doc["question"]["rate"]
    figures: list[Figure] = [
        *buying.curve(offers(doc), float(users or rate or 1.0), "users" if users else "requests per second")
    ]
    names = [", ".join((f"{place['num_gpus']} x {place['gpu']}", *place["changes"])) for place in placements]
    prices = [place["price_per_hour"] for place in placements]
    if any(price is not None for price in prices):
        rows = zip(names, prices, strict=True)
        drawn = bars("Dollars per hour", ((name, price, dollars(price)) for name, price in rows if price is not None))
        return figures + drawn
    counts = [place["num_gpus"] for place in placements]
    named = zip(names, counts, strict=True)
    return figures + bars("GPUs", ((name, count, plural(count, "GPU")) for name, count in named))


Column = Literal[
    "gpu", "servers", "spare", "num_gpus", "tensor_parallel_size", "price_per_hour", "price_per_million_output_tokens",
    "output_tokens_per_s", "server_output_tokens_per_s", "kv_usage_peak", "command",
]  # fmt: skip
COLUMNS: Final[tuple[Column, ...]] = get_args(Column)
ENDS: Final[tuple[Literal["low", "high"], ...]] = ("low", "high")


def rows_table(doc: typed.TimedRecommendationDocument) -> Table:
    """A row per simulated placement, with three columns per target: its value and the ends of the range."""
    names = [target["promise"] for target in doc["placements"][0]["targets"]] if doc["placements"] else []
    rows = (
        [
            *(placement[name] for name in COLUMNS),
            *(target["value"] for target in placement["targets"]),
            *(target[end] for target in placement["targets"] for end in ENDS),
            " and ".join(placement["changes"]),
        ]
        for placement in doc["placements"]
    )
    ends = [f"{name} {end}" for name in names for end in ENDS]
    return Table.of((*COLUMNS, *names, *ends, "changes"), rows)


def shapes(doc: typed.TimedRecommendationDocument, limit: int) -> CommandAnswer:
    return CommandAnswer(
        lambda _: lines(doc, limit),
        lambda: doc,
        lambda: rows_table(doc),
        lambda: page(doc, limit),
        lambda: cost_bars(doc, limit),
        [doc["question"]["engine"]],
    )
