"""A recommendation as JSON, CSV, Markdown and a table; all from one document."""

import csv
import io
import shlex
from collections.abc import Sequence
from typing import Any

from kvplan.artifact import Document
from kvplan.files import printable
from kvplan.flags import model_id, serve_command
from kvplan.held import running_users
from kvplan.plan import Plan, Request
from kvplan.recommend import STAGES, Answer, Failure, Fit, Placement, Question, Recommendation
from kvplan.report.lines import Line, columns, line
from kvplan.report.text import code, csv_cell, escaped, rows_of
from kvplan.units import GIB, format_gib, plural

RECOMMENDATION = "kvplan/recommendation@1"


# --- the document -----------------------------------------------------------------------------------------------------


def document(
    question: Question, request: Request, prices: str | None, found: Recommendation | None, fit: Fit | None
) -> Document:
    """The question and its answer: `placements` and `failures` of a search, or `fit` of given GPUs."""
    load = request.load
    return {
        "schema": RECOMMENDATION,
        "question": {
            "model": request.spec.name,
            "id": model_id(request.spec),
            "engine": request.release.label,
            "users": question.users,
            "max_model_len": request.args.max_model_len,
            "mean_tokens": load.mean_tokens,
            "lengths": None if load.lengths is None else load.lengths.source,
            "shared_prefix": load.shared_prefix,
            "end": question.end,
            "prices": prices,
        },
        "placements": [placement_document(one, question.users) for one in found.placements] if found else [],
        "failures": [failure_document(one) for one in found.failures] if found else [],
        "fit": None if fit is None else fit_document(fit, question),
    }


def placement_document(one: Placement, users: int) -> Document:
    args = one.plan.request.args
    price = one.price_per_hour
    return {
        "gpu": one.gpu.name,
        "num_gpus": one.num_gpus,
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "replicas": one.replicas,
        "changes": list(one.changes),
        "users_low": one.users("low"),
        "users_likely": one.users("likely"),
        "total_memory": one.total_memory,
        "price_per_hour": price,
        "price_per_user": None if price is None else price / users,
        **settings_of(one.plan),
    }


def settings_of(plan: Plan) -> Document:
    words = serve_command(plan)
    return {
        "kv_dtype": plan.settings.kv_dtype,
        "max_model_len": plan.capacity.max_model_len,
        "gpu_memory_utilization": plan.settings.gpu_memory_utilization,
        "max_num_seqs": plan.settings.max_num_seqs,
        "argv": words,
        "command": shlex.join(words),
    }


def failure_document(one: Failure) -> Document:
    return {"gpu": one.gpu, "num_gpus": one.num_gpus, "reason": one.reason, "refused": one.refused}


def fit_document(fit: Fit, question: Question) -> Document:
    return {
        "gpu": fit.gpu.name,
        "num_gpus": fit.num_gpus,
        "total_memory": fit.num_gpus * fit.gpu.total_memory,
        "replicas": fit.replicas,
        "users_per_replica": -(-question.users // fit.replicas),
        "as_asked": answer_document(fit.asked, fit.replicas),
        "utilization": None if fit.utilization is None else answer_document(fit.utilization, fit.replicas),
        "utilization_is_tight": fit.tight,
        "context": answer_document(fit.context, fit.replicas),
        "kv_dtypes": [answer_document(one, fit.replicas) for one in fit.kv_dtypes],
        "enough": None if fit.enough is None else placement_document(fit.enough, question.users),
    }


def answer_document(one: Answer, replicas: int) -> Document:
    found = one.plan
    return {
        "holds": found is not None,
        "value": one.value,
        "most_users": one.most_users * replicas,
        "users_low": None if found is None else running_users(found, "low") * replicas,
        "users_likely": None if found is None else running_users(found, "likely") * replicas,
        "settings": None if found is None else settings_of(found),
    }


def holds(doc: Document) -> bool:
    """Whether anything holds the users."""
    fit = doc["fit"]
    if fit is None:
        return bool(doc["placements"])
    answers = [
        fit["as_asked"],
        fit["context"],
        *fit["kv_dtypes"],
        *([fit["utilization"]] if fit["utilization"] else []),
    ]
    return any(one["holds"] for one in answers)


# --- words ------------------------------------------------------------------------------------------------------------


def headline(doc: Document) -> str:
    asked = doc["question"]
    text = f"{printable(asked['model'])}: {plural(asked['users'], 'user')} at {asked['max_model_len']:,} tokens"
    if asked["lengths"] is not None:
        text += f", lengths {printable(asked['lengths'])}"
    elif asked["mean_tokens"] is not None:
        text += f", {asked['mean_tokens']:,} on average"
    end = "low end of the range" if asked["end"] == "low" else "likely figure"
    return f"{text}, held at the {end}"


def ranking(doc: Document) -> str:
    prices = doc["question"]["prices"]
    if prices is None:
        return "Without --prices: fewest GPUs first, then least memory."
    return f"Prices: {printable(prices)}, dollars per GPU and hour."


HEADERS = ("GPU", "GPUs", "TP x PP x DP", "KV dtype", "utilisation", "seqs", "users", "GiB in all")
PRICE_HEADERS = ("$/h", "$/h per user")


def placement_cells(one: Document, *, prices: bool) -> list[str]:
    formats = one["kv_dtype"] + (", fp8 weights" if "fp8 weights" in one["changes"] else "")
    splits = f"{one['tensor_parallel_size']} x {one['pipeline_parallel_size']} x {one['replicas']:,}"
    cells = [
        one["gpu"],
        f"{one['num_gpus']:,}",
        splits + (" **" if STAGES in one["changes"] else ""),
        formats + (" *" if is_less_precise(one) else ""),
        f"{one['gpu_memory_utilization']}",
        f"{one['max_num_seqs']:,}",
        f"{one['users_low']:,}-{one['users_likely']:,}",
        f"{one['total_memory'] / GIB:,.0f}",
    ]
    if prices:
        cells += [f"{one['price_per_hour']:,.2f}", f"{one['price_per_user']:.4f}"]
    return cells


def placement_table(doc: Document, limit: int) -> tuple[list[str], list[list[str]]]:
    prices = doc["question"]["prices"] is not None
    rows = [placement_cells(one, prices=prices) for one in doc["placements"][:limit]]
    return [*HEADERS, *(PRICE_HEADERS if prices else ())], rows


STAR = "* less precise than the checkpoint's own: check the quality first"
STARS = (
    "** pipeline stages: each adds latency, and all work only with many requests in flight; their time is not modelled"
)


def is_less_precise(one: Document) -> bool:
    return any(change != STAGES for change in one["changes"])


def remarks(doc: Document, limit: int) -> list[str]:
    """What stands under the table of placements."""
    found = []
    shown = doc["placements"][:limit]
    if any(is_less_precise(one) for one in shown):
        found.append(STAR)
    if any(STAGES in one["changes"] for one in shown):
        found.append(STARS)
    if len(doc["placements"]) > limit:
        found.append(f"… and {len(doc['placements']) - limit:,} more: --limit {len(doc['placements'])}")
    return found


def reasons(doc: Document) -> list[str]:
    """Why smaller or other servers hold nobody: the largest of each GPU, and what cannot be on any."""
    largest = {one["gpu"]: one for one in doc["failures"] if not one["refused"]}  # in ascending order: the last stays
    lines = []
    for name, one in largest.items():
        fewer = any(not each["refused"] and each["gpu"] == name and each is not one for each in doc["failures"])
        lines.append(f"{name} x{one['num_gpus']}{' and fewer' if fewer else ''}: {printable(one['reason'], 300)}")
    refused: dict[str, list[str]] = {}
    for one in doc["failures"]:
        if one["refused"]:
            refused.setdefault(one["reason"], []).append(f"{one['gpu']} x{one['num_gpus']}")
    return lines + [f"{', '.join(where)}: {printable(text, 300)}" for text, where in refused.items()]


def fit_title(fit: Document) -> str:
    count = f"{fit['num_gpus']} x " if fit["num_gpus"] > 1 else ""
    replicas = f", {fit['replicas']} replicas" if fit["replicas"] > 1 else ""
    each = f" of {format_gib(fit['total_memory'] // fit['num_gpus'])}" if fit["gpu"] == "custom" else ""
    name = "GPU" if fit["gpu"] == "custom" else fit["gpu"]
    return f"On {count}{'a ' if each and not count else ''}{name}{each}{replicas}"


def fit_rows(doc: Document) -> list[tuple[str, str, Document]]:
    """(setting, what it must be, its answer) for each setting that was sought."""
    fit = doc["fit"]
    rows = [("as asked", verdict(fit["as_asked"], "holds them", "does not hold them"), fit["as_asked"])]
    one = fit["utilization"]
    if one is not None:
        text = verdict(one, f"{one['value']} or more", "none up to 0.99")
        tight = "; that may leave too little for the CUDA context" if fit["utilization_is_tight"] else ""
        rows.append(("utilisation", text + tight, one))
    one = fit["context"]
    rows.append(("context", verdict(one, f"up to {one['value'] or 0:,} tokens", "none is short enough"), one))
    for one in fit["kv_dtypes"]:
        rows.append(("KV dtype", f"{one['value']} {verdict(one, 'holds them', 'does not hold them')}", one))
    return rows


def fit_texts(doc: Document) -> list[tuple[str, str]]:
    more = more_gpus(doc)
    return [*((name, text) for name, text, _ in fit_rows(doc)), *([("more GPUs", more)] if more else [])]


def more_gpus(doc: Document) -> str | None:
    """How many of the given GPUs hold the users as asked; None where they need no more."""
    fit = doc["fit"]
    one = fit["enough"]
    if one is None:
        return None if unshortened(fit) else "no server tried, of two nodes at most, holds a user as asked"
    split = f"TP {one['tensor_parallel_size']}"
    if one["pipeline_parallel_size"] > 1:
        split += f" x PP {one['pipeline_parallel_size']}"
    return f"{several(one['num_gpus'], fit['gpu'])} hold them as asked: {plural(one['replicas'], 'server')} of {split}"


def several(count: int, gpu: str) -> str:
    """ "4 x l40s"; a GPU of which only the memory is stated has no name."""
    return f"{count:,} such GPUs" if gpu == "custom" else f"{count:,} x {gpu}"


def unshortened(fit: Document) -> Document | None:
    """The change that costs least and leaves the context: none, a higher utilisation, another KV dtype."""
    raised = None if fit["utilization_is_tight"] else fit["utilization"]
    return next((one for one in (fit["as_asked"], raised, *fit["kv_dtypes"]) if one is not None and one["holds"]), None)


def verdict(one: Document, yes: str, no: str) -> str:
    return f"{yes if one['holds'] else no}: at most {plural(one['most_users'], 'user')}"


def commands(doc: Document) -> list[tuple[str, str]]:
    """(what it starts, the command) of the answers to follow."""
    if doc["fit"] is not None:
        return _fit_commands(doc)
    found = []
    for one in cheapest(doc["placements"]):
        found.append((f"{servers(one)}{', ' if one['changes'] else ''}{' and '.join(one['changes'])}", one["command"]))
    return found


def servers(one: Document) -> str:
    """ "on 4 x l40s"; "each of 5 on 4 x l40s"."""
    each = "" if one["replicas"] == 1 else f"each of {one['replicas']:,} "
    return f"{each}on {servers_gpus(one)}"


def cheapest(placements: Sequence[Document]) -> list[Document]:
    """The first placement, and the first changed one where that costs less."""

    def cost(one: Document) -> tuple[float, int]:
        return one["price_per_hour"] or 0.0, one["num_gpus"]

    other = next((one for one in placements if one["changes"] and cost(one) < cost(placements[0])), None)
    return [*placements[:1], *([other] if other else [])]


def _fit_commands(doc: Document) -> list[tuple[str, str]]:
    """The change that costs least: none, a higher utilisation, another KV dtype, a shorter context; with a shorter one
    also what holds the users as asked."""
    fit = doc["fit"]
    each = f"each of {fit['replicas']}" if fit["replicas"] > 1 else ""
    if (one := unshortened(fit)) is not None:
        return [(each, one["settings"]["command"])]
    found = []
    if fit["context"]["holds"]:
        asked, short = doc["question"]["max_model_len"], fit["context"]["settings"]
        what = f"at {short['max_model_len']:,} tokens, not the {asked:,} asked"
        found.append((f"{each}, {what}" if each else what, short["command"]))
    if (enough := fit["enough"]) is not None:
        found.append((", ".join(["as asked", servers(enough), *enough["changes"]]), enough["command"]))
    return found


def servers_gpus(one: Document) -> str:
    ranks = one["tensor_parallel_size"] * one["pipeline_parallel_size"]
    if ranks > 1:
        return several(ranks, one["gpu"])
    return "one such GPU" if one["gpu"] == "custom" else str(one["gpu"])


# --- table, markdown, csv ---------------------------------------------------------------------------------------------


def table_lines(doc: Document, limit: int) -> list[Line]:
    lines = [line(headline(doc), "bold"), line()]
    if doc["fit"] is not None:
        lines.append(line(fit_title(doc["fit"]), "bold"))
        lines += [line(f"  {name:<12}  {text}") for name, text in fit_texts(doc)]
    elif doc["placements"]:
        headers, rows = placement_table(doc, limit)
        lines += [*columns(headers, rows), *(line(text) for text in remarks(doc, limit)), line(), line(ranking(doc))]
    else:
        lines.append(line("None of these GPUs holds them.", "bold red"))
    why = reasons(doc)
    if why:
        lines += [line(), line("What does not hold one user", "bold"), *(line(f"  {text}") for text in why)]
    for what, command in commands(doc):
        lines += [line(), line(f"Serve ({what})" if what else "Serve", "bold"), line(f"  {command}", "cyan")]
    return lines


def markdown(doc: Document, limit: int) -> str:
    parts = [f"**{escaped(headline(doc))}**"]
    if doc["fit"] is not None:
        rows = [[escaped(name), escaped(text)] for name, text in fit_texts(doc)]
        parts.append(rows_of((fit_title(doc["fit"]), ""), rows, left=2))
    elif doc["placements"]:
        headers, cells = placement_table(doc, limit)
        parts.append(rows_of(headers, [[escaped(text) for text in row] for row in cells]))
        parts += [escaped(text) for text in (*remarks(doc, limit), ranking(doc))]
    else:
        parts.append("None of these GPUs holds them.")
    why = [f"- {escaped(text)}" for text in reasons(doc)]
    if why:
        parts.append("What does not hold one user:\n\n" + "\n".join(why))
    for what, command in commands(doc):
        parts += [f"Serve ({what}):" if what else "Serve:", code(command)]
    return "\n\n".join(parts) + "\n"


PLACEMENT_COLUMNS = (
    "gpu", "num_gpus", "tensor_parallel_size", "pipeline_parallel_size", "replicas", "kv_dtype",
    "gpu_memory_utilization", "max_num_seqs", "max_model_len", "users_low", "users_likely", "total_memory",
    "price_per_hour", "price_per_user", "changes", "reason", "command",
)  # fmt: skip
FIT_COLUMNS = (
    "setting", "value", "holds", "most_users", "users_low", "users_likely", "kv_dtype", "max_model_len",
    "gpu_memory_utilization", "max_num_seqs", "command",
)  # fmt: skip


def rows_csv(doc: Document) -> str:
    """Placements, then what holds nobody with its reason; or a row for each setting of given GPUs."""
    if doc["fit"] is None:
        rows: list[Document] = [{**one, "changes": " + ".join(one["changes"])} for one in doc["placements"]]
        return _csv(PLACEMENT_COLUMNS, [*rows, *doc["failures"]])
    found = [{**one, **(one["settings"] or {}), "setting": name} for name, _, one in fit_rows(doc)]
    if (enough := doc["fit"]["enough"]) is not None:
        found.append({**enough, "setting": "more GPUs", "value": enough["num_gpus"], "holds": True})
    return _csv(FIT_COLUMNS, found)


def _csv(headers: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows([csv_cell(row.get(name)) for name in headers] for row in rows)
    return out.getvalue()
