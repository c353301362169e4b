"""What several servers, or one with files of many types, would serve: one table."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import plural
from kvplan.planning.plan import serve_command
from kvplan.planning.users import num_gpus
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import COMMAND, Part, line
from kvplan.report.page import Block, bold, code
from kvplan.report.slots_text import rate_text

if TYPE_CHECKING:
    from kvplan.documents import offers as typed
    from kvplan.planning.offers import Offer, Offers

HEADERS = ("server", "serves", "holds", "tokens/s of one user", "remark")
TOGETHER = "each of all"
SPEED = "Speeds are modeled: from bytes and bandwidth, or step times; `kvplan estimate` says how each is known."


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
    return {
        "server": offer.server,
        "engine": request.release.label,
        "gpu": request.gpu.name,
        "num_gpus": request.args.num_gpus if offer.plan is None else num_gpus(offer.plan),
        "serves": offer.serves,
        "holds": offer.holds,
        "users": offer.users,
        "context": offer.context,
        "alone": None if offer.alone is None else {**offer.alone._asdict()},
        "together": None if offer.together is None else {**offer.together._asdict()},
        "remark": offer.remark,
        "command": None if offer.plan is None else shlex.join(serve_command(offer.plan)),
    }  # type: ignore[typeddict-item]  # the keys of a rate


def _headline(answer: Offers) -> str:
    best, request = answer.best, answer.offers[0].request
    each = " each" if answer.users > 1 else ""
    demand = f"{plural(answer.users, 'user')} of {request.spec.name} at {answer.context:,} tokens{each}"
    if best is None:
        return f"No: nothing here has memory for {demand} on the GPUs alone"
    speed = "" if best.alone is None else f", {rate_text({**best.alone._asdict()})} for one user"  # type: ignore[typeddict-item]
    where = (
        f"{best.request.gpu.name}"
        if best.request.args.num_gpus == 1
        else f"{best.request.args.num_gpus} x {best.request.gpu.name}"
    )
    return f"Yes: {best.server} with {best.serves} on {where} has memory for {demand}{speed}"


def shapes(doc: typed.OffersDocument) -> CommandAnswer:
    return CommandAnswer(
        lambda _: lines(doc),
        lambda: doc,
        lambda: rows(doc),
        lambda: page(doc),
        servers=[offer["engine"] for offer in doc["offers"]],
    )


def _table(doc: typed.OffersDocument) -> Table:
    several, machines = doc["users"] > 1, len({(offer["gpu"], offer["num_gpus"]) for offer in doc["offers"]}) > 1
    cells = []
    for offer in doc["offers"]:
        remark = printable(offer["remark"], 90) or (
            f"up to {offer['context']:,} tokens{' each' * several}" if offer["context"] else ""
        )
        alone = "not known" if offer["alone"] is None else rate_text(offer["alone"], "")
        row = [offer["server"], offer["serves"], "yes" if offer["holds"] else "no", alone, remark]
        if several:
            row.insert(4, "not known" if offer["together"] is None else rate_text(offer["together"], ""))
        cells.append([offer["gpu"], *row] if machines else row)
    headers = [*(["GPU"] if machines else []), *HEADERS]
    if several:
        headers.insert(-1, TOGETHER)
    return Table.of(headers, cells, left=tuple(range(len(headers))))


def lines(doc: typed.OffersDocument) -> list[Part]:
    parts: list[Part] = [
        line(doc["answer"], "bold" if doc["holds"] else "bold red"),
        line(),
        _table(doc),
        line(),
        line(SPEED),
    ]
    commands = dict.fromkeys(offer["command"] for offer in doc["offers"] if offer["holds"] and offer["command"])
    if commands:
        parts += [line(), line("Serve", "bold"), *(line(f"  {command}", COMMAND) for command in commands)]
    return parts


def rows(doc: typed.OffersDocument) -> Table:
    names = ("server", "engine", "gpu", "num_gpus", "serves", "holds", "users", "context", "remark", "command")
    rates = [[*(offer[end] or {}).values()] or [None] * 3 for offer in doc["offers"] for end in ("alone",)]  # type: ignore[literal-required]
    table = [[*(offer[name] for name in names), *rate] for offer, rate in zip(doc["offers"], rates, strict=True)]  # type: ignore[literal-required]
    return Table.of((*names, "alone_low", "alone_likely", "alone_high"), table)


def page(doc: typed.OffersDocument) -> list[Block]:
    commands = dict.fromkeys(offer["command"] for offer in doc["offers"] if offer["holds"] and offer["command"])
    return [bold(doc["answer"]), _table(doc), SPEED, *(code(command) for command in commands)]
