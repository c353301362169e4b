"""A recommendation as JSON, CSV, Markdown and a table, all from one document."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import islice, repeat

from kvplan.core.files import printable
from kvplan.core.records import from_fields
from kvplan.core.table import Markdown, Table
from kvplan.core.units import GIB, format_gib, plural
from kvplan.documents import recommendation as typed
from kvplan.hardware.gpu import NODE_GPUS, gpu
from kvplan.models.catalog import model_id
from kvplan.planning.choice import Chosen
from kvplan.planning.plan import Plan, Request, serve_command
from kvplan.planning.recommend import (
    SMALL_STEPS,
    STAGES,
    WIDE,
    Fit,
    Placement,
    PlacementFailure,
    Question,
    Recommendation,
    SettingAnswer,
    most_users,
    with_args,
)
from kvplan.planning.users import running_users
from kvplan.report import buying
from kvplan.report.drawing import Figure, bars
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import COMMAND, Line, Part, line
from kvplan.report.page import Block, bold, bullets, code, folded

# --- the document -----------------------------------------------------------------------------------------------------


def document(
    question: Question, request: Request, prices: str | None, search: Recommendation | None, fit: Fit | None
) -> typed.RecommendationDocument:
    """The question and its answer: `placements` and `failures` of a search, or `fit` of given GPUs."""
    load, context = request.load, request.args.max_model_len
    assert isinstance(context, int), "the command states one"
    doc: typed.RecommendationDocument = {
        "schema": "kvplan/recommendation@1",
        "answer": "",
        "holds": False,
        "question": {
            "model": request.spec.name,
            "id": model_id(request.spec),
            "engine": request.release.label,
            "users": question.users,
            "max_model_len": context,
            "mean_tokens": load.mean_tokens,
            "lengths": None if load.lengths is None else load.lengths.source,
            "shared_prefix": load.shared_prefix,
            "end": question.end,
            "prices": prices,
        },
        "placements": [placement_document(placement, question.users) for placement in search.placements]
        if search
        else [],
        "failures": [failure_document(failure) for failure in search.failures] if search else [],
        "fit": None if fit is None else fit_document(fit, question),
        "pace": None,
    }
    doc["holds"] = bool(search.placements) if search else fit is not None and fit.solution is not None
    best = next(iter(search.placements), None) if search else fit.solution if fit else None
    doc["pace"] = None if best is None else pace_document(best, question.users)
    doc["answer"] = headline(doc)
    return doc


def document_of(chosen: Chosen) -> typed.RecommendationDocument:
    return document(chosen.question, chosen.request, chosen.price_source, chosen.search, chosen.needs)


def shapes(doc: typed.RecommendationDocument, limit: int, chosen: Chosen | None = None) -> CommandAnswer:
    """The answer for each format, with so many placements; `chosen` is what it was written from."""
    return CommandAnswer(
        lambda _: table_lines(doc, limit),
        lambda: doc,
        lambda: rows_table(doc),
        lambda: page(doc, limit),
        lambda: cost_bars(doc, limit, chosen),
        [doc["question"]["engine"]],
    )


def placement_document(placement: Placement, users: int) -> typed.Placement:
    args = placement.plan.request.args
    price = placement.price_per_hour
    return {
        "gpu": placement.gpu.name,
        "num_gpus": placement.num_gpus,
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "replicas": placement.replicas,
        "changes": list(placement.changes),
        "users_low": placement.users("low"),
        "users_likely": placement.users("likely"),
        "total_memory": placement.total_memory,
        "price_per_hour": price,
        "price_per_user": None if price is None else price / users,
        **settings_of(placement.plan),
    }


def settings_of(plan: Plan) -> typed.Settings:
    words = serve_command(plan)
    context = plan.capacity.max_model_len
    return from_fields(typed.Settings, plan.settings, max_model_len=context, argv=words, command=shlex.join(words))


def pace_document(best: Placement, users: int) -> typed.Pace | None:
    from kvplan.simulate.coarse import pace  # only for an answer

    number = pace(best.plan, -(-users // best.replicas))
    if number is None:
        return None
    return {"low_ms": 1000 * number.low, "likely_ms": 1000 * number.likely, "high_ms": 1000 * number.high}


def failure_document(failure: PlacementFailure) -> typed.RecommendationFailure:
    return from_fields(typed.RecommendationFailure, failure)


def fit_document(fit: Fit, question: Question) -> typed.Fit:
    solution = fit.solution
    return {
        "gpu": fit.gpu.name,
        "num_gpus": fit.num_gpus,
        "total_memory": fit.num_gpus * fit.gpu.total_memory,
        "replicas": fit.replicas,
        "users_per_replica": -(-question.users // fit.replicas),
        "reason": fit.reason,
        "refused": fit.refused,
        "as_asked": answer_document(fit.current, fit.replicas),
        "utilization": None if fit.utilization is None else answer_document(fit.utilization, fit.replicas),
        "utilization_is_tight": fit.tight,
        "context": answer_document(fit.context, fit.replicas),
        "startable_utilization": fit.startable,
        "kv_dtypes": [answer_document(choice, fit.replicas) for choice in fit.kv_dtypes],
        "solution": None if solution is None else cure_document(solution, fit, question.users),
        "cures": [cure_document(cure, fit, question.users) for cure in fit.cures],
    }


def cure_document(placement: Placement, fit: Fit, users: int) -> typed.RecommendationCure:
    return {"needs": needs_of(placement, fit), **placement_document(placement, users)}


def needs_of(placement: Placement, fit: Fit) -> list[str]:
    """What a placement changes from the request, in words: "fp8 KV", "4 x l40s", "5,632 tokens"."""
    args = placement.plan.request.args
    needs = [change for change in placement.changes if change not in LOSSLESS]
    if placement.num_gpus != fit.num_gpus:
        needs.append(several(placement.num_gpus, fit.gpu.name))
    elif placement.replicas != fit.replicas and not {STAGES, WIDE} & set(placement.changes):
        needs.append(split_text(placement_document(placement, 1)))
    if STAGES in placement.changes:
        needs.append(f"{args.pipeline_parallel_size} {STAGES}")
    if WIDE in placement.changes:
        needs.append(f"{args.data_parallel_size} data-parallel ranks sharing the experts")
    if SMALL_STEPS in placement.changes:
        needs.append(f"steps of {placement.plan.settings.max_num_batched_tokens:,} tokens")
    if placement.context < fit.max_model_len:
        needs.append(f"{placement.context:,} tokens")
    if fit.utilization is not None and args.gpu_memory_utilization is not None:  # not fixed by the user, so chosen
        needs.append(f"utilization {args.gpu_memory_utilization}")
    return needs


def answer_document(answer: SettingAnswer, replicas: int) -> typed.RecommendationAnswer:
    server = answer.plan
    return {
        "holds": server is not None,
        "value": answer.value,
        "most_users": answer.most_users * replicas,
        "users_low": None if server is None else running_users(server, "low") * replicas,
        "users_likely": None if server is None else running_users(server, "likely") * replicas,
        "settings": None if server is None else settings_of(server),
    }


# --- words ------------------------------------------------------------------------------------------------------------


def headline(doc: typed.RecommendationDocument) -> str:
    """The answer in a sentence that begins with it: "Yes", "No", or the GPUs to use."""
    if doc["fit"] is not None:
        return fit_headline(doc, doc["fit"])
    if not doc["placements"]:
        reasons = {failure["reason"] for failure in doc["failures"]} if all_refused(doc) else set()
        why = f": {printable(reasons.pop(), 300)}" if len(reasons) == 1 else ""
        return f"No: none of these GPUs has memory for {demand(doc, of_model=True)}{why}"
    best, *others = cheapest(doc["placements"])
    text = f"{offer(best)} {hold(best['num_gpus'])} memory for {demand(doc, of_model=True)}"
    if others:
        is_one = len(others) == 1 and others[0]["num_gpus"] == 1
        text += f"; so {'does' if is_one else 'do'} {', or '.join(map(offer, others))}"
    return f"{text}; {UNCHECKED}"


def all_refused(doc: typed.RecommendationDocument) -> bool:
    return all(failure["refused"] for failure in doc["failures"])


def fit_headline(doc: typed.RecommendationDocument, fit: typed.Fit) -> str:
    name, current = printable(doc["question"]["model"]), fit["as_asked"]
    gpus = gpus_text(fit["num_gpus"], fit["gpu"], fit["total_memory"] // fit["num_gpus"])
    solution = fit["solution"]
    if fit["refused"]:
        return f"No: {name} on {gpus} does not start: {printable(fit['reason'] or '', 300)}"
    if solution is None:
        num_users = f"{current['most_users']:,}" if current["most_users"] else "none"
        return f"No: {name} on {gpus} has memory for {num_users} of {demand(doc)}"
    how = f" with {together(solution['needs'])}" if solution["needs"] else ""
    return f"Yes: {name} on {gpus}{how} has memory for {demand(doc)}; {UNCHECKED}"


def demand(doc: typed.RecommendationDocument, *, of_model: bool = False) -> str:
    """ "200 users at 8,192 tokens each (conservative estimate)"."""
    question = doc["question"]
    text = plural(question["users"], "user")
    if of_model:
        text += f" of {printable(question['model'])}"
    context = f"{question['max_model_len']:,} tokens"
    if question["lengths"] is not None:
        text += f" with lengths {printable(question['lengths'])} of at most {context}"
    elif question["mean_tokens"] is not None:
        text += f", averaging {question['mean_tokens']:,} of {context}"
    else:
        text += f" at {context}{' each' if question['users'] > 1 else ''}"
    return f"{text} ({'conservative' if question['end'] == 'low' else 'likely'} estimate)"


def offer(placement: typed.Placement) -> str:
    """ "2 x h200 with fp8 KV at $7.60/h"."""
    text = f"{placement['num_gpus']:,} x {placement['gpu']}"
    if placement["changes"]:
        text += f" with {' and '.join(placement['changes'])}"
    price = placement["price_per_hour"]
    return text if price is None else f"{text} (${price:,.2f} per hour)"


def hold(count: int) -> str:
    return "have" if count > 1 else "has"


UNCHECKED = "speed not checked"


def pace_text(doc: typed.RecommendationDocument) -> str:
    """What can be said of the speed without a simulation."""
    pace = doc["pace"]
    check = "add --slo ttft=2s,tpot=50ms to simulate the load"
    if pace is None:
        return f"The speed of this model is not modeled; {check}" if doc["holds"] else ""
    most, least, likely = (1000 / time for time in (pace["low_ms"], pace["high_ms"], pace["likely_ms"]))
    return (
        f"While all decode, a user gets about {likely:,.0f} tokens/s ({least:,.0f}-{most:,.0f}), less as prompts "
        f"arrive; {check}."
    )


def ranking(doc: typed.RecommendationDocument) -> str:
    prices = doc["question"]["prices"]
    if prices is None:
        changed = any({*placement["changes"]} - {WIDE} for placement in doc["placements"])
        first = "full precision without pipeline stages first, then fewest GPUs" if changed else "fewest GPUs first"
        return f"Without --prices: {first}, then least memory."
    return f"Prices: {printable(prices)}, in $ per GPU-hour."


HEADERS = ("GPU", "GPUs", "TP x PP x DP", "KV dtype", "utilization", "seqs", "users", "total GiB")
STEP_HEADERS = ("batched tokens",)
PRICE_HEADERS = ("$/h", "$/h per user")


def placement_cells(placement: typed.Placement, *, prices: bool, steps: bool) -> list[str]:
    formats = placement["kv_dtype"] + (", fp8 weights" if "fp8 weights" in placement["changes"] else "")
    splits = f"{placement['tensor_parallel_size']} x {placement['pipeline_parallel_size']} x {placement['replicas']:,}"
    cells = [
        placement["gpu"],
        f"{placement['num_gpus']:,}",
        splits + (" **" if STAGES in placement["changes"] else " ***" if WIDE in placement["changes"] else ""),
        formats + (" *" if is_less_precise(placement) else ""),
        f"{placement['gpu_memory_utilization']}",
        f"{placement['max_num_seqs']:,}",
        f"{placement['users_low']:,}-{placement['users_likely']:,}",
        f"{placement['total_memory'] / GIB:,.0f}",
    ]
    if steps:
        cells.append(f"{placement['max_num_batched_tokens']:,}")
    if prices:
        hour, user = placement["price_per_hour"], placement["price_per_user"]
        cells += ["-" if hour is None else f"{hour:,.2f}", "-" if user is None else f"{user:.4f}"]
    return cells


def placement_table(doc: typed.RecommendationDocument, limit: int) -> tuple[list[str], list[list[str]]]:
    prices, listed = doc["question"]["prices"] is not None, doc["placements"][:limit]
    steps = any(SMALL_STEPS in placement["changes"] for placement in listed)
    rows = [placement_cells(placement, prices=prices, steps=steps) for placement in listed]
    return [*HEADERS, *(STEP_HEADERS if steps else ()), *(PRICE_HEADERS if prices else ())], rows


STAR = "* less precise than the checkpoint's own: check quality first"
STARS = (
    "** pipeline stages: each adds latency, and all are busy only with many requests in flight; latency is not modeled"
)
OVER_NODES = "; beyond 8 GPUs a server runs over several nodes, with one command per node"
STEPS = "batched tokens below vLLM's default: smaller steps take less memory, and prompts are computed more slowly"
LOSSLESS = (STAGES, WIDE, SMALL_STEPS)  # changes that keep the precision

RANKS = (
    "*** servers of DP ranks: each rank has attention and a KV cache of its own, and all share one set of experts; "
    "their network is not modeled"
)


def ranks_text(text: str, placements: Sequence[typed.Placement]) -> list[str]:
    """The remark on data-parallel ranks, with that on nodes if one of these servers needs several; empty: no ranks."""
    return remark_on(WIDE, text, OVER_NODES, placements)


def remark_on(change: str, text: str, nodes: str, placements: Sequence[typed.Placement]) -> list[str]:
    """The remark on a change, with that on nodes if one of these servers needs several; empty: none has it."""
    changed = [placement for placement in placements if change in placement["changes"]]
    spans = any(placement["num_gpus"] > NODE_GPUS * num_servers(placement) for placement in changed)
    return [text + nodes * spans] if changed else []


def is_less_precise(placement: typed.Placement) -> bool:
    return any("fp8" in change for change in placement["changes"])


def remarks(doc: typed.RecommendationDocument, limit: int) -> list[str]:
    """Remarks below the table of placements."""
    texts = []
    listed = doc["placements"][:limit]
    if any(is_less_precise(placement) for placement in listed):
        texts.append(STAR)
    texts += remark_on(STAGES, STARS, OVER_NODES, listed)
    texts += ranks_text(RANKS, listed)
    texts += remark_on(SMALL_STEPS, STEPS, "", listed)
    if len(doc["placements"]) > limit:
        texts.append(f"… and {len(doc['placements']) - limit:,} more: --limit {len(doc['placements'])}")
    return texts


TOO_SMALL, NO_START, IMPOSSIBLE = "Too small for one user", "Would not start", "Not possible"


def reasons(doc: typed.RecommendationDocument) -> dict[str, list[str]]:
    """Heading -> why smaller or other servers hold no user: the largest of each GPU, and what is impossible on any."""
    headed: dict[str, list[str]] = {}
    served = {(placement["gpu"], placement["num_gpus"]) for placement in doc["placements"]}
    unserved = [failure for failure in doc["failures"] if (failure["gpu"], failure["num_gpus"]) not in served]
    small = [failure for failure in unserved if not failure["refused"]]
    largest = {failure["gpu"]: failure for failure in small}  # those of a GPU ascend: the last one is kept
    for name, failure in largest.items():
        fewer = any(other["gpu"] == name and other is not failure for other in small)
        where = f"{name} x{failure['num_gpus']}{' and fewer' if fewer else ''}"
        heading = NO_START if failure["has_room"] else TOO_SMALL
        headed.setdefault(heading, []).append(f"{where}: {printable(failure['reason'], 300)}")
    refused: dict[str, list[str]] = {}
    for failure in doc["failures"]:
        if failure["refused"]:
            refused.setdefault(failure["reason"], []).append(f"{failure['gpu']} x{failure['num_gpus']}")
    if refused:
        headed[IMPOSSIBLE] = [f"{', '.join(where)}: {printable(text, 300)}" for text, where in refused.items()]
    return headed


def gpus_text(count: int, gpu: str, memory: int) -> str:
    """ "2 x l40s"; a GPU of which only the memory is known has no name."""
    if gpu == "custom":
        return f"{plural(count, 'GPU')} of {format_gib(memory)}"
    return f"{count} x {gpu}" if count > 1 else gpu


def fit_title(fit: typed.Fit) -> str:
    replicas = f", {fit['replicas']} replicas" if fit["replicas"] > 1 else ""
    return f"On {gpus_text(fit['num_gpus'], fit['gpu'], fit['total_memory'] // fit['num_gpus'])}{replicas}"


def fit_rows(fit: typed.Fit) -> list[tuple[str, str, typed.RecommendationAnswer]]:
    """(setting, its required value, its answer) for each setting that was searched."""
    rows = [("as set", verdict(fit["as_asked"], "enough", "not enough"), fit["as_asked"])]
    answer = fit["utilization"]
    if answer is not None:
        text = verdict(answer, f"{answer['value']} or more", "no value up to 0.99 is enough")
        tight = "; that may leave too little for the CUDA context" if fit["utilization_is_tight"] else ""
        rows.append(("utilization", text + tight, answer))
    share = fit["startable_utilization"]
    note = "" if share is None else f"; with utilization {share}, as the default does not start"
    answer = fit["context"]
    text = verdict(answer, f"up to {answer['value'] or 0:,} tokens", "no context is short enough")
    rows.append(("context", text + note, answer))
    for answer in fit["kv_dtypes"]:
        text = f"{answer['value']} {verdict(answer, 'is enough', 'is not enough')}"
        rows.append(("KV dtype", text + note, answer))
    return rows


def fit_texts(fit: typed.Fit) -> list[tuple[str, str]]:
    return [(name, text) for name, text, _ in fit_rows(fit)]


CURES = "What would serve these users"
LESS_PRECISE = "fp8 is less precise than the checkpoint's own format: check quality first"
IN_STAGES = "pipeline stages add latency, which is not modeled"
SHARED_EXPERTS = "data-parallel ranks exchange tokens with the experts of all: their network is not modeled"
NO_CURE = "No fix found: tried an fp8 KV cache, smaller steps, shorter contexts and servers on up to two nodes."


def caveats(cures: Sequence[typed.RecommendationCure]) -> list[str]:
    less_precise = any(is_less_precise(cure) for cure in cures)
    return [
        *[LESS_PRECISE] * less_precise,
        *remark_on(STAGES, IN_STAGES, OVER_NODES, cures),
        *ranks_text(SHARED_EXPERTS, cures),
        *remark_on(SMALL_STEPS, STEPS, "", cures),
    ]


def cure_texts(fit: typed.Fit) -> list[tuple[str, str]]:
    """(what a fix needs, its result), best first."""
    return [(together(cure["needs"]), cure_text(cure, fit)) for cure in fit["cures"]]


def cure_text(cure: typed.RecommendationCure, fit: typed.Fit) -> str:
    """ "274-288 users, 2 servers of TP 2"."""
    text = f"{users_range(cure)} users"
    is_split = cure["num_gpus"] > 1 and (cure["num_gpus"], cure["replicas"]) != (fit["num_gpus"], fit["replicas"])
    return f"{text}, {split_text(cure)}" if is_split else text


def users_range(placement: typed.Placement) -> str:
    low, likely = placement["users_low"], placement["users_likely"]
    return f"{low:,}" if low == likely else f"{low:,}-{likely:,}"


def together(needs: Sequence[str]) -> str:
    """ "fp8 KV, 4 x l40s and 2 pipeline stages"."""
    return " and ".join(filter(None, (", ".join(needs[:-1]), *needs[-1:])))


def split_text(placement: typed.Placement) -> str:
    """ "2 servers of TP 2 x PP 2"."""
    split = f"TP {placement['tensor_parallel_size']}"
    if placement["pipeline_parallel_size"] > 1:
        split += f" x PP {placement['pipeline_parallel_size']}"
    if placement["data_parallel_size"] > 1:
        split = f"DP {placement['data_parallel_size']}" + (f" x {split}" if split != "TP 1" else "")
    return f"{plural(num_servers(placement), 'server')} of {split}"


def num_servers(placement: typed.Placement) -> int:
    """Commands to start: the data-parallel ranks of one server count once."""
    return placement["replicas"] // placement["data_parallel_size"]


def several(count: int, gpu: str) -> str:
    """ "4 x l40s"; a GPU of which only the memory is known has no name."""
    return f"{count:,} such GPU{'s' * (count > 1)}" if gpu == "custom" else f"{count:,} x {gpu}"


def verdict(answer: typed.RecommendationAnswer, yes: str, no: str) -> str:
    return f"{yes if answer['holds'] else no}: at most {plural(answer['most_users'], 'user')}"


def commands(doc: typed.RecommendationDocument) -> list[tuple[str, str]]:
    """(what it starts, the command) of the recommended answers."""
    if doc["fit"] is not None:
        return _fit_commands(doc["fit"])
    return [(_placement_title(placement), placement["command"]) for placement in cheapest(doc["placements"])]


def _placement_title(placement: typed.Placement) -> str:
    """ "each of 2 on 4 x l40s, fp8 KV"."""
    return ", ".join(filter(None, (servers(placement), " and ".join(placement["changes"]))))


def servers(placement: typed.Placement) -> str:
    """ "on 4 x l40s"; "each of 5 on 4 x l40s"."""
    count = num_servers(placement)
    of_each = "" if count == 1 else f"each of {count:,} "
    return f"{of_each}on {servers_gpus(placement)}"


def cheapest(placements: Sequence[typed.Placement]) -> list[typed.Placement]:
    """The first placement; then if cheaper, the first one at full precision, and the first one with any changes."""

    def cost(placement: typed.Placement) -> tuple[float, int]:
        return placement["price_per_hour"] or 0.0, placement["num_gpus"]

    chosen = list(placements[:1])
    for allowed in (set(LOSSLESS), None):
        cheaper = (
            placement
            for placement in placements
            if placement["changes"] and cost(placement) < cost(chosen[-1])
            if allowed is None or allowed.issuperset(placement["changes"])
        )
        chosen += list(islice(cheaper, 1))
    return chosen


def _fit_commands(fit: typed.Fit) -> list[tuple[str, str]]:
    """Commands of the solution as requested; else of the best fix, and of the best fix that needs no more GPUs."""
    solution = fit["solution"]
    if solution is not None:
        return [(servers(solution) if solution["num_gpus"] > 1 else "", solution["command"])]
    cures = fit["cures"]
    same = next((cure for cure in cures if cure["num_gpus"] <= fit["num_gpus"]), None)
    chosen = cures[:1] + ([same] if same is not None and same is not cures[0] else [])
    return [(_command_title(cure), cure["command"]) for cure in chosen]


def _command_title(cure: typed.RecommendationCure) -> str:
    """ "fp8 KV and 4 x l40s: each of 2 on 2 x l40s"."""
    needs = together(cure["needs"])
    return f"{needs}: {servers(cure)}" if num_servers(cure) > 1 else needs


def servers_gpus(placement: typed.Placement) -> str:
    count = placement["num_gpus"] // num_servers(placement)
    if count > 1:
        return several(count, placement["gpu"])
    return "one such GPU" if placement["gpu"] == "custom" else str(placement["gpu"])


# --- table, markdown, csv ---------------------------------------------------------------------------------------------


def table_lines(doc: typed.RecommendationDocument, limit: int) -> list[Part]:
    lines: list[Part] = [line(doc["answer"], "bold" if doc["holds"] else "bold red")]
    lines += [line(text) for text in [pace_text(doc)] if text]
    if doc["fit"] is not None:
        lines += fit_lines(doc["fit"], holds=doc["holds"])
    elif doc["placements"]:
        headers, rows = placement_table(doc, limit)
        lines += [line(), Table.of(headers, rows), *(line(text) for text in remarks(doc, limit))]
        lines += [line(), line(ranking(doc))]
    for heading, texts in reasons(doc).items():
        lines += [line(), line(heading, "bold"), *(line(f"  {text}") for text in texts)]
    for what, command in commands(doc):
        lines += [line(), line(f"Serve ({what})" if what else "Serve", "bold"), line(f"  {command}", COMMAND)]
    return lines


def fit_lines(fit: typed.Fit, *, holds: bool) -> list[Line]:
    lines = [line(f"  {printable(fit['reason'], 300)}")] if fit["reason"] and not fit["refused"] else []
    if fit["cures"]:
        texts = cure_texts(fit)
        width = max(len(name) for name, _ in texts)
        lines += [line(), line(CURES, "bold"), *(line(f"  {name:<{width}}  {text}") for name, text in texts)]
        lines += [line(f"  {text}") for text in caveats(fit["cures"])]
    elif not holds:
        lines += [line(), line(NO_CURE)]
    if fit["refused"]:
        return lines
    lines += [line(), line(fit_title(fit), "bold")]
    return lines + [line(f"  {name:<12}  {text}") for name, text in fit_texts(fit)]


def page(doc: typed.RecommendationDocument, limit: int) -> list[Block]:
    parts: list[Block] = [bold(doc["answer"]), *(text for text in [pace_text(doc)] if text)]
    if doc["fit"] is not None:
        parts += fit_parts(doc["fit"], holds=doc["holds"])
    elif doc["placements"]:
        headers, cells = placement_table(doc, limit)
        parts += [
            *buying.summary(offers(doc), doc["question"]["prices"]),
            bullets(assumptions(doc)),
            *folded("All placements", [Table.of(headers, cells), *remarks(doc, limit), ranking(doc)]),
        ]
    for title, texts in reasons(doc).items():
        parts += [Markdown(f"{title}:"), bullets(texts)]
    for what, command in commands(doc):
        parts += [Markdown(f"Serve ({what}):" if what else "Serve:"), code(command)]
    return parts


def capacity(question: Question, placement: Placement) -> int:
    """Users of one of its servers, with as many sequences as they need."""
    request = placement.plan.request
    if "max_num_seqs" not in question.stated:
        request = with_args(request, max_num_seqs=None)
    return most_users(question, request) * request.args.data_parallel_size


def offers(doc: typed.RecommendationDocument, capacities: Sequence[int] = ()) -> list[buying.Offer]:
    """The first placement, and the two cheapest others."""
    return buying.nearest(
        buying.Offer(
            name_of(place),
            split_text(place),
            buying.NOT_CHECKED,
            max(users, place["users_low"] / num_servers(place)),
            place["num_gpus"] // num_servers(place),
            None if place["price_per_hour"] is None else place["price_per_hour"] / place["num_gpus"],
            num_servers(place),
        )
        for place, users in zip(doc["placements"], capacities or repeat(0), strict=False)
    )


def name_of(placement: typed.Placement) -> str:
    """ "2 x h200, fp8 KV"."""
    return ", ".join((f"{placement['num_gpus']:,} x {placement['gpu']}", *placement["changes"]))


def assumptions(doc: typed.RecommendationDocument) -> list[str]:
    names = {offer.name for offer in offers(doc)}
    places = [place for place in doc["placements"] if name_of(place) in names]
    joined = {place["gpu"] for place in places if place["tensor_parallel_size"] * place["pipeline_parallel_size"] > 1}
    slow = sorted(name for name in joined if gpu(name).interconnect == "pcie")
    likely = "the likely number of users" if doc["question"]["end"] == "likely" else "the low end of its range"
    return [
        f"Load: {demand(doc)}.",
        f"Memory: {doc['question']['engine']}, planned with {likely}.",
        "Curve: servers of the same kind and flags, but for --max-num-seqs.",
        "Latency: not checked. Only memory decides here, so a service under load may need more GPUs.",
        *([f"{', '.join(slow)}: GPUs of one server communicate over PCIe at every layer."] if slow else []),
        *([LESS_PRECISE] if any(is_less_precise(place) for place in places) else []),
        *remark_on(STAGES, IN_STAGES, OVER_NODES, places),
    ]


def cost_bars(doc: typed.RecommendationDocument, limit: int, chosen: Chosen | None = None) -> list[Figure]:
    """Cost of each placement: dollars per hour if prices are given, else the number of GPUs; and over the users."""
    prices = doc["question"]["prices"] is not None
    rows = [placement for placement in doc["placements"][:limit] if not prices or placement["price_per_hour"]]
    rows.sort(key=lambda row: (row["price_per_hour"] or 0.0, row["num_gpus"]))
    title = "Dollars per hour" if prices else "Number of GPUs"
    sizes = [(row["price_per_hour"] or 0.0) if prices else float(row["num_gpus"]) for row in rows]
    texts = [f"${size:,.2f}" if prices else f"{size:,.0f}" for size in sizes]
    names = [name_of(row) for row in rows]
    drawn = bars(title, zip(names, sizes, texts, strict=True))
    if not doc["placements"] or chosen is None or chosen.search is None:
        return drawn
    capacities = [capacity(chosen.question, placement) for placement in chosen.search.placements]
    return [*buying.curve(offers(doc, capacities), doc["question"]["users"], "users"), *drawn]


def fit_parts(fit: typed.Fit, *, holds: bool) -> list[Block]:
    parts: list[Block] = [printable(fit["reason"], 300)] if fit["reason"] and not fit["refused"] else []
    if fit["cures"]:
        parts.append(Table.of((CURES, ""), cure_texts(fit), left=2))
        parts += caveats(fit["cures"])
    elif not holds:
        parts.append(NO_CURE)
    if fit["refused"]:
        return parts
    return [*parts, Table.of((fit_title(fit), ""), fit_texts(fit), left=2)]


PLACEMENT_COLUMNS = (
    "gpu", "num_gpus", "tensor_parallel_size", "pipeline_parallel_size", "replicas", "kv_dtype",
    "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "users_low", "users_likely",
    "total_memory", "price_per_hour", "price_per_user", "changes", "reason", "command",
)  # fmt: skip
FIT_COLUMNS = (
    "setting", "value", "holds", "num_gpus", "replicas", "most_users", "users_low", "users_likely", "kv_dtype",
    "max_model_len", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "command",
)  # fmt: skip


def rows_table(doc: typed.RecommendationDocument) -> Table:
    """Placements, then those that hold no user with the reason; or a row per setting of given GPUs."""
    fit = doc["fit"]
    if fit is None:
        return Table.of_documents(PLACEMENT_COLUMNS, [*map(placement_row, doc["placements"]), *doc["failures"]])
    settings = [{**answer, **(answer["settings"] or {}), "setting": name} for name, _, answer in fit_rows(fit)]
    cures = [
        {**placement_row(cure), "setting": "cure", "value": together(cure["needs"]), "holds": True}
        for cure in fit["cures"]
    ]
    return Table.of_documents(FIT_COLUMNS, [*settings, *cures])


def placement_row(placement: typed.Placement) -> dict[str, object]:
    return {**placement, "changes": " + ".join(placement["changes"])}
