"""What several servers, or one with files of many types, would serve: one table."""

import shlex

from kvplan.core.files import printable
from kvplan.core.records import from_fields
from kvplan.core.table import Table
from kvplan.core.units import plural
from kvplan.documents import offers as typed
from kvplan.documents import plan as documents
from kvplan.planning.offers import Offer, Offers
from kvplan.planning.plan import Plan, serve_command
from kvplan.planning.users import num_gpus
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import COMMAND, Part, line
from kvplan.report.page import Block, bold, code
from kvplan.report.slots_text import ENDS, rate_text
from kvplan.servers.plans.plan import Rate

HEADERS = ("server", "serves", "holds", "tokens/s of one user", "remark")
TOGETHER = "each of all"
SPEED = "Speeds are modeled: from bytes and bandwidth, or step times; `kvplan estimate` says how each is known."


def pace_of(plan: Plan, users: int) -> Rate | None:
    """Tokens per second of each user while so many decode; None: their steps are not modeled."""
    from kvplan.simulate.coarse import pace  # only for an answer

    seconds = pace(plan, users)
    return None if seconds is None else Rate(1 / seconds.high, 1 / seconds.likely, 1 / seconds.low)


def document(answer: Offers) -> typed.OffersDocument:
    best = answer.best
    return {
        "schema": "kvplan/offers@1",
        "answer": _headline(answer),
        "holds": best is not None,
        "model": answer.offers[0].request.spec.name,
        "users": answer.users,
        "max_model_len": answer.context,
        "offers": [_offer(offer) for offer in answer.offers],
    }


def _offer(offer: Offer) -> typed.Offer:
    request = offer.request
    return from_fields(
        typed.Offer,
        offer,
        engine=request.release.label,
        gpu=request.gpu.name,
        num_gpus=request.args.num_gpus if offer.plan is None else num_gpus(offer.plan),
        alone=rate_document(offer.alone),
        together=rate_document(offer.together),
        command=None if offer.plan is None else shlex.join(serve_command(offer.plan)),
    )


def rate_document(rate: Rate | None) -> documents.Rate | None:
    return None if rate is None else from_fields(documents.Rate, rate)


def _headline(answer: Offers) -> str:
    best, request = answer.best, answer.offers[0].request
    demand = f"{plural(answer.users, 'user')} of {request.spec.name} at {answer.context:,} tokens"
    demand += " each" if answer.users > 1 else ""
    if best is None:
        return f"No: nothing here has memory for {demand} on the GPUs alone"
    alone, args = rate_document(best.alone), best.request.args
    speed = "" if alone is None else f", {rate_text(alone)} for one user"
    where = f"{args.num_gpus} x {best.request.gpu.name}" if args.num_gpus > 1 else best.request.gpu.name
    return f"Yes: {best.server} with {best.serves} on {where} has memory for {demand}{speed}"


def shapes(doc: typed.OffersDocument) -> CommandAnswer:
    servers = [offer["engine"] for offer in doc["offers"]]
    return CommandAnswer.of(doc, lines, lambda _: doc, rows, page, servers=servers)


def _table(doc: typed.OffersDocument) -> Table:
    several, machines = doc["users"] > 1, len({(offer["gpu"], offer["num_gpus"]) for offer in doc["offers"]}) > 1
    cells = []
    for offer in doc["offers"]:
        longest = f"{offer['context']:,} tokens{' each' * several} if none are stated" if offer["context"] else ""
        remark = printable(offer["remark"], 90) or longest
        alone = "not known" if offer["alone"] is None else rate_text(offer["alone"], "")
        row = [offer["server"], offer["serves"], "yes" if offer["holds"] else "no", alone, remark]
        if several:
            row.insert(4, "not known" if offer["together"] is None else rate_text(offer["together"], ""))
        cells.append([offer["gpu"], *row] if machines else row)
    headers = [*(["GPU"] if machines else []), *HEADERS]
    if several:
        headers.insert(-1, TOGETHER)
    return Table.of(headers, cells, left=tuple(range(len(headers))))


def commands(doc: typed.OffersDocument) -> list[str]:
    """Each once, of the offers that hold the users."""
    texts = (offer["command"] for offer in doc["offers"] if offer["holds"])
    return [*dict.fromkeys(text for text in texts if text is not None)]


def lines(doc: typed.OffersDocument) -> list[Part]:
    answer = line(doc["answer"], "bold" if doc["holds"] else "bold red")
    words = [line(f"  {command}", COMMAND) for command in commands(doc)]
    return [
        answer,
        line(),
        _table(doc),
        line(),
        line(SPEED),
        *([line(), line("Serve", "bold"), *words] if words else []),
    ]


def rows(doc: typed.OffersDocument) -> Table:
    names = ("server", "engine", "gpu", "num_gpus", "serves", "holds", "users", "context", "remark", "command")
    ends = [f"alone.{end}" for end in ENDS]
    table = Table.of_documents((*names, *ends), doc["offers"])
    return Table.of((*names, *(end.replace(".", "_") for end in ends)), table.rows)


def page(doc: typed.OffersDocument) -> list[Block]:
    return [bold(doc["answer"]), _table(doc), SPEED, *map(code, commands(doc))]
