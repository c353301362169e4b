"""An estimate on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.core.records import from_fields
from kvplan.core.table import Table, wrapped
from kvplan.core.units import GB, GIB, KIB, TB, format_bytes, format_gib, format_size, plural
from kvplan.documents import artifact
from kvplan.documents.artifact import plan_document
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.quant import scheme_name
from kvplan.models.spec import ChunkedAttention, ModelSpec, SlidingWindow
from kvplan.planning.plan import Plan, PlanTable, context_word, is_published, plans_of
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import COMMAND, SCREEN, Line, Paragraph, Part, laid_out, line
from kvplan.servers.base import Abilities, Terms, abilities_of, flag_of, terms_of
from kvplan.servers.plans.plan import budget_sizes
from kvplan.sizing.layout import bytes_per_token, constant_bytes, token_bytes
from kvplan.sizing.weights import num_params, stored_bytes

if TYPE_CHECKING:
    from kvplan.documents.listing import GpuRow, ModelRow
    from kvplan.documents.plan import Assumption, Fix, KvCache, Memory, PlanDocument, Refusal
    from kvplan.report.drawing import Figure
    from kvplan.report.page import Block
    from kvplan.servers.base import Section

BAR = 26
POOL = "data-parallel rank"  # owner of a pool, if there are several
SCREEN_LINES = 38
NO_BREAK = "\N{NO-BREAK SPACE}"
EIGHTHS = " ▏▎▍▌▋▊▉"
LABELS = {
    "activations": "activations",
    "cuda_graphs": "CUDA graphs",
    "non_torch": "non-torch",
    "kv_cache": "KV cache",
    "lora": "LoRA",
    "draft": "draft",
}
ASSUMED = {**LABELS, "total": "GPU total", "context": "CUDA context", "in_use": "in use"}
UNPLANNED = ("lora", "activations", "cuda_graphs", "non_torch")  # if a server reserves memory for them
STYLES = {"weights": "cyan", "draft": "cyan", "kv_cache": "green", "unused": "dim"}


def shapes(tables: Sequence[PlanTable], *, explain: bool = False) -> CommandAnswer:
    """The answer for each format; machine formats leave out the GPUs that have no plan."""
    plans = plans_of(tables)

    def document() -> Any:
        single = len(tables) == len(tables[0]) == 1
        return plan_document(plans[0]) if single else artifact.plans_document(plans)

    def rows() -> Table:
        from kvplan.report import text

        return text.plans_table(plans)

    def page() -> list[Block]:
        from kvplan.report import text

        return text.plans_page(plans, explain=explain)

    def figures() -> list[Figure]:
        from kvplan.report import text

        return text.memory_bars(plans)

    def screen(blocks: bool) -> list[Part]:
        return table_parts(tables, blocks=blocks, explain=explain)

    servers = [plan.request.release.label for plan in plans]
    return CommandAnswer(screen, document, rows, page, figures, servers)


def plan_parts(plan: Plan, *, blocks: bool = True, explain: bool = False) -> list[Part]:
    """The answer on one screen; with `explain`, followed by every formula."""
    lines = plan_lines(plan_document(plan), blocks=blocks)
    if not explain:
        return lines
    from kvplan.planning.explain import explain as explained  # only on request

    return [*lines, *explain_lines(explained(plan))]


def table_parts(tables: Sequence[PlanTable], *, blocks: bool = True, explain: bool = False) -> list[Part]:
    """For one GPU: the whole answer, or a row per context. For several: a row per GPU, in a table per context."""
    plans, parts = plans_of(tables), list[Part]()
    if len(tables[0]) > 1:
        for number, table in enumerate(tables):
            parts += [line()] if number else []
            reasons = {str(reply) for _, reply in table}
            if plans_of([table]) or len(reasons) > 1:
                parts += gpu_parts(table)
            else:
                parts.append(line(f"on none of these GPUs: {reasons.pop()}", "red"))
    elif len(plans) > 1:
        parts += context_parts(plans)
    else:
        parts += plan_parts(plans[0], blocks=blocks, explain=explain)
    if explain and (len(tables) > 1 or len(tables[0]) > 1):
        for each_plan in plans:
            parts += [line(), *plan_parts(each_plan, blocks=blocks, explain=True)]
    return parts


def plan_lines(doc: PlanDocument, *, blocks: bool = True) -> list[Part]:
    """Lines of one plan's document; `blocks`: draw bars with block characters, else with #."""
    parts: list[Sequence[Part]] = [
        [line(headline(doc), "bold" if doc["fits"] else "bold red"), *(line(text, "bold") for text in caveats(doc))],
        *body(doc, blocks=blocks),
        verdict_lines(doc),
    ]
    answer = [styled for part in parts if part for styled in (*part, line())]
    for max_lines in (3, 2, 1):  # lines per formula: as many as fit on the screen
        assumed = assumption_lines(doc, max_lines)
        if len([*laid_out([*answer, *assumed])]) <= SCREEN_LINES:
            break
    return answer + assumed if assumed else answer[:-1]


def body(doc: PlanDocument, *, blocks: bool) -> list[Sequence[Part]]:
    """Memory, cache and users, between the first line and the verdict."""
    cache = doc.get("slots")
    if cache is not None:
        from kvplan.report import slots_text  # only for servers that place layers

        return [
            slots_text.place_lines(doc, cache, doc["inputs"]["engine"]),
            slots_text.cache_lines(doc, cache),
            slots_text.speed_lines(cache) if doc["fits"] else [],
        ]
    return [
        memory_lines(doc, blocks=blocks),
        phase_lines(doc),
        kv_lines(doc),
        host_lines(doc),
        encoder_lines(doc),
        user_lines(doc),
    ]


# --- the parts of the screen ------------------------------------------------------------------------------------------


def name_of(doc: PlanDocument) -> str:
    return printable(doc["inputs"]["model"]["name"])


def where(doc: PlanDocument) -> str:
    """GPUs of a plan: "a100-80g", "2 x h100-80g", "a GPU of 24.00 GiB"."""
    gpu, count = doc["inputs"]["gpu"], doc["inputs"]["num_gpus"]
    size = f" of {format_gib(gpu['total_memory'])}" if gpu["total_memory_kind"] == "given" else ""
    name = "GPU" if gpu["name"] == "custom" else gpu["name"]
    if count > 1:
        return f"{count} x {name}{size}"
    return f"a GPU{size}" if name == "GPU" else f"{name}{size}"


def context_text(doc: PlanDocument) -> str:
    return f"{doc['kv']['max_model_len']:,} tokens"


def headline(doc: PlanDocument) -> str:
    context = context_text(doc)
    subject, auto = f"{name_of(doc)} on {where(doc)}", doc["inputs"]["settings"]["auto_fit"]
    if not doc["fits"]:
        if (refusal := start_refusal(doc)) is not None:
            when = "" if refusal["by"] == "unsupported" else f" at {context}"
            if refusal["by"] == "phase":
                return f"{subject} does not fit{when} {refusal['text']}"
            return f"{subject} does not start{when}: {refusal['text']}"
        short = f"{format_bytes(doc['deficit'])} short{short_where(doc)}"
        if auto:
            return f"{subject} does not fit at any context ({short} at {context})"
        return f"{subject} does not fit at {context}, {short}"
    if auto:
        context += ", the most that fits"
    count, of_replicas = doc["concurrency"]["users"], f", on each of {plural(doc['concurrency']['replicas'], POOL)}"
    replicas = of_replicas if doc["concurrency"]["replicas"] > 1 else ""
    if (cache := doc.get("slots")) is not None:
        from kvplan.report import slots_text  # only for servers that place layers

        load = doc["inputs"]["workload"]
        stated = load["lengths"] is not None or load["mean_tokens"] is not None
        several = f"{plural(count, 'user')} {length_text(doc, context)}" if stated else ""
        return f"{subject}: {slots_text.answer_text(doc, cache, several)}"
    if not doc["kv"]["groups"]:  # an encoder
        return (
            f"{subject}: {plural(count, 'request')} in a step {length_text(doc, context)}{spread_text(doc)}{replicas}"
        )
    return f"{subject}: {plural(count, 'user')} {length_text(doc, context)}{spread_text(doc)}{replicas}"


def short_where(doc: PlanDocument) -> str:
    """On which of several GPUs bytes are missing: of stages and placed layers, one decides."""
    places = [place for place in doc.get("places", ()) if place["kind"] == "gpu"]
    decides = next((place["name"] for place in places if place["decides"]), "")
    if len(places) > 1 and decides:
        return f" on {decides}" if doc.get("slots") else f" on each GPU of {decides}"
    return " on each GPU" if doc["inputs"]["num_gpus"] > 1 else ""


def length_text(doc: PlanDocument, context: str) -> str:
    """Length of each user's request: "at 32,768 tokens each", "at 2,000 tokens each (context 32,768 tokens)"."""
    load = doc["inputs"]["workload"]
    if load["lengths"] is not None:
        return f"of lengths {printable(load['lengths'])} (context {context})"
    if load["mean_tokens"] is not None and load["mean_tokens"] != doc["kv"]["max_model_len"]:
        return f"at {load['mean_tokens']:,} tokens each (context {context})"
    return f"at {context} each" if not doc["inputs"]["settings"]["auto_fit"] else f"each at {context}"


def spread_text(doc: PlanDocument) -> str:
    """Range of the users, " (13-14)"; empty if both ends are equal."""
    spread = users_range(doc)
    return f" ({spread})" if spread and "-" in spread else ""


def users_range(doc: PlanDocument) -> str:
    """ "13-14", or "14" if both ends are equal; empty for a length distribution, whose range is not computed."""
    low, high = doc["concurrency"]["users_low"], doc["concurrency"]["users_high"]
    if low is None or high is None:
        return ""
    return f"{low:,}-{high:,}" if low != high else f"{low:,}"


# values of plan.refusal
STARTS = ("free_memory", "state_blocks", "stated_pool", "kept_back", "whole_item", "unsupported", "phase")


def start_refusal(doc: PlanDocument) -> Refusal | None:
    """Why the server refuses to start, unless its KV cache does not fit; None if it does not refuse."""
    refusal = doc["refusal"]
    return refusal if refusal is not None and refusal["by"] in STARTS else None


def short_text(doc: PlanDocument) -> str:
    """What a plan lacks, as a table cell."""
    refusal = start_refusal(doc)
    starts = refusal is None or refusal["by"] == "phase"
    return f"{format_bytes(doc['deficit'])} short" if starts else "does not start"


def is_capped(doc: PlanDocument) -> bool:
    """True if the scheduler runs fewer requests than the pool holds."""
    return bool(doc["concurrency"]["pool_users"] > doc["concurrency"]["max_num_seqs"])


def is_marginal(doc: PlanDocument) -> bool:
    """True if it fits, but not at the low end of the range."""
    return bool(doc["fits"] and doc["concurrency"]["low"] < 1)


def caveats(doc: PlanDocument) -> list[str]:
    """Warnings that qualify the headline's number."""
    texts, users = list[str](), doc["concurrency"]
    if (cache := doc.get("slots")) is not None and doc["fits"]:
        from kvplan.report import slots_text  # only for servers that place layers

        texts += filter(None, [slots_text.shared_text(cache)])
    if is_capped(doc):
        limit_text = f"{users['max_num_seqs']:,} run at once ({seqs_bound(doc)})"
        texts.append(f"The KV cache holds {users['pool_users']:,}; at most {limit_text}.")
    for phase in doc["colocation"]["phases"] if doc["colocation"] is not None and doc["fits"] else ():
        short = phase["server_high"] + (phase["others"] or 0) - doc["memory"]["total"]
        if short > 0:
            texts.append(f"May not fit while {phase['name']}: {format_gib(short)} short at the high end of the range.")
    if may_lack_blocks(doc):
        seqs = f"{users['max_num_seqs']:,} sequences"
        texts.append(
            f"May not start: at the low end of the range the pool lacks state blocks for {seqs}. "
            f"A lower {own_flag(doc, 'max_num_seqs')} is safer."
        )
    elif may_lack_memory(doc):
        texts.append(
            "May not start: at the high end of what other processes may use, too little memory is free. "
            f"A lower {own_flag(doc, terms(doc).share_argument)} is safer; --memory-in-use states what they use."
        )
    elif is_marginal(doc):
        low = f"{int(users['low'] * 100) / 100:.2f}"  # never rounded up to a whole request
        risk = terms(doc).risk[0].upper() + terms(doc).risk[1:]
        texts.append(f"{risk}: the low end of the range holds {low} requests of the full context. {safer(doc)}")
    return texts


def has_room(doc: PlanDocument) -> bool:
    """True if one full-context request fits at the low end of the range, regardless of other start-up requirements."""
    kv, args = doc["kv"], doc["inputs"]["args"]
    room = args["num_gpu_blocks_override"] or doc["memory"]["available_low"] // kv["bytes_per_block"]
    return bool(room > kv["blocks_per_request"])


def is_idle(doc: PlanDocument) -> bool:
    """True if the server starts, but at the low end of the range its start-up check may leave no KV cache."""
    return is_marginal(doc) and abilities(doc).checks_start and not doc["concurrency"]["low"]


def may_lack_memory(doc: PlanDocument) -> bool:
    """True if it starts, but not if other processes use the most that they may."""
    memory = doc["memory"]
    ends = [assumption["high"] for assumption in doc["assumptions"] if assumption["name"] == "in_use"]
    highest = max([end for end in ends if end is not None], default=memory["in_use"])
    free = memory["total"] - memory["unused_detail"]["context"] - highest
    return is_idle(doc) and memory["budget"] > free


def may_lack_blocks(doc: PlanDocument) -> bool:
    """True if it starts, but at the low end of the range has fewer state blocks than sequences."""
    return is_idle(doc) and has_room(doc) and not may_lack_memory(doc)


def safer(doc: PlanDocument) -> str:
    """Advice for a plan that may not start."""
    if context_word(doc["flags"]["argv"], own_flag(doc, "max_model_len")) == "auto":
        return f"With {own_flag(doc, 'max_model_len')} auto it uses the longest context that fits."
    return terms(doc).shorter


def seqs_bound(doc: PlanDocument) -> str:
    """What limits the number of sequences: the flag, or the state slots if the server counts those."""
    slots = terms(doc).slots_flag
    is_slots = slots is not None and any(slots in limit["text"] for limit in doc["limits"])
    return slots if slots is not None and is_slots else own_flag(doc, "max_num_seqs")


def terms(doc: PlanDocument) -> Terms:
    """Terminology of the document's server."""
    return terms_of(doc["inputs"]["engine"])


def own_flag(doc: PlanDocument, argument: str) -> str:
    return flag_of(doc["inputs"]["engine"], argument)


def abilities(doc: PlanDocument) -> Abilities:
    return abilities_of(doc["inputs"]["engine"])


def mark(doc: PlanDocument) -> str:
    """The same for a table cell; empty if there is nothing to say."""
    if is_marginal(doc):
        return terms(doc).risk
    if (cache := doc.get("slots")) is not None and (cache["gpu_layers"] < cache["num_layers"] or cache["host_experts"]):
        from kvplan.report import slots_text  # only for servers that place layers

        return slots_text.layers_text(doc, cache)
    return f"{doc['concurrency']['max_num_seqs']:,} at once" if is_capped(doc) else ""


def memory_lines(doc: PlanDocument, *, blocks: bool) -> list[Line]:
    memory, inputs = doc["memory"], doc["inputs"]
    total = memory["total"]
    stored = inputs["model"]["scheme"] or inputs["args"]["quantization"] or inputs["settings"]["dtype"]
    notes = {
        "weights": f"{format_params(doc['parameters']['total'])} params in {stored}",
        "draft": draft_text(doc),
        **dict.fromkeys(("unused", "missing"), unused_text(doc)),
    }
    title = "Where the memory goes" if inputs["num_gpus"] == 1 else "Where each GPU's memory goes"
    lines = [line(f"{title} ({inputs['engine']})", "bold")]
    optional = UNPLANNED if abilities(doc).keeps_share else ("lora",)
    rows = {name: size for name, size in memory_rows(memory).items() if size or name not in optional}
    wide = max(9, *(len(f"{size / GIB:,.2f}") + 1 for size in rows.values()))
    far = max(7, *(len(f"{100 * size / total:.1f}") + 2 for size in rows.values()))

    def start(label: str, size: int) -> str:
        return f"  {label:<12}{size / GIB:>{wide},.2f} GiB{100 * size / total:>{far}.1f}%  "

    for name, size in rows.items():
        text = start(LABELS.get(name, name), size)
        share, note = bar(0 if name == "missing" else size, total, blocks=blocks), notes.get(name, "")
        first, *others = note_lines(f"  {note}" if share else note, len(text) + len(share))
        lines.append(((text, ""), (share, STYLES.get(name, "yellow")), (first, "dim")))
        lines += [line(other, "dim") for other in others]
    utilization = f"{inputs['settings']['gpu_memory_utilization']:.6g}"
    limit = terms(doc).budget.format(budget=format_gib(memory["budget"]), share=utilization)
    if inputs["args"]["kv_cache_memory_bytes"] is not None:
        limit = f"the KV cache size is set by {own_flag(doc, 'kv_cache_memory_bytes')}"
    lines.append(line(f"{start('total', total)}{limit}"))
    return lines


def note_lines(note: str, place: int) -> list[str]:
    """A row's note, which begins in column `place`, broken at commas if it is wider than the screen; later lines are
    indented as far.
    """
    if place + len(note) <= SCREEN:
        return [note]
    text = note.lstrip()
    indent = " " * (place + len(note) - len(text))
    room = SCREEN - len(indent)
    whole = (part.replace(" ", NO_BREAK) if len(part) < room else part for part in text.split(", "))
    first, *others = [part.replace(NO_BREAK, " ") for part in wrapped(", ".join(whole), SCREEN, indent, indent)]
    return [first[place:], *others]


def memory_rows(memory: Memory) -> dict[str, int]:
    """Memory rows by name, in bytes, with a draft's weights apart; the last one is `missing` if memory is short, else
    `unused`.
    """
    last = {"missing": memory["missing"]} if memory["missing"] else {"unused": memory["unused"]}
    draft = memory["draft_weights"]
    weights = {"weights": memory["weights"] - draft, **({"draft": draft} if draft else {})}
    return {**weights, **budget_sizes(memory), "kv_cache": memory["kv_cache"], **last}


def draft_text(doc: PlanDocument) -> str:
    """Name of the draft whose weights are a row of their own."""
    draft = doc["inputs"]["draft"]
    return "" if draft is None else f"weights of {printable(draft['name'], 60)}"


def unused_text(doc: PlanDocument) -> str:
    """Breakdown of the unused memory, or how far the other rows exceed the GPU and the budget."""
    memory = doc["memory"]
    detail = memory["unused_detail"]
    over = f"over the budget: {detail['over_budget'] / GIB:,.2f} GiB" if round(detail["over_budget"] / GIB, 2) else ""
    if over and start_refusal(doc) is None and format_gib(doc["deficit"]) != format_gib(detail["over_budget"]):
        over += f" ({format_gib(doc['deficit'])} with one request)"
    if memory["missing"]:
        return ", ".join(text for text in ("more than the GPU has", over) if text)
    outside = detail["outside_budget"] - detail["over_gpu"] - memory["in_use"]
    parts = {
        "CUDA context": detail["context"],
        "other processes": memory["in_use"],  # the host, if it shares the memory
        terms(doc).outside: max(0, outside) if memory["in_use"] else outside,
    }
    if not over:  # what other processes use beyond the memory outside the budget, they take from within it
        parts["slack"] = detail["slack"] + (min(0, outside) if memory["in_use"] else 0)
    texts = [f"{name}: {size / GIB:,.2f} GiB" for name, size in parts.items() if round(size / GIB, 2)]
    return ", ".join([*texts, over] if over else texts)


def format_params(count: int) -> str:
    """Format a number of parameters: "8.03B", "124.44M", "12,345"."""
    if count >= 10**9:
        return f"{count / 1e9:,.2f}B"
    return f"{count / 1e6:,.2f}M" if count >= 10**6 else f"{count:,}"


def bar(size: int, total: int, *, blocks: bool) -> str:
    """A bar of BAR characters for `total`; empty for a negative size."""
    eighths = round(max(0, min(size, total)) / total * BAR * 8)
    if not blocks:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def kv_lines(doc: PlanDocument) -> list[Part]:
    kv = doc["kv"]
    if not kv["groups"]:
        step = doc["inputs"]["settings"]["max_num_batched_tokens"]
        return [
            line("No KV cache", "bold"),
            line("  an encoder keeps nothing of a request after its step"),
            line(f"  step        {step:,} tokens of whole prompts (max_num_batched_tokens)"),
        ]
    rank = "" if doc["inputs"]["num_gpus"] == 1 else ", on each GPU"
    lines: list[Part] = [
        line(f"KV cache ({kv['dtype']}{rank})", "bold"),
        line(f"  per token   {format_kib(kv['bytes_per_token'])}{_layers_text(kv)}"),
        line(
            f"  per user    {format_size(kv['bytes_per_request'])} at {kv['max_model_len']:,} tokens: "
            f"{kv['blocks_per_request']:,} blocks of {plural(kv['block_size'], 'token')}, "
            f"{format_size(kv['bytes_per_block'])} each"
        ),
    ]
    if kv["state_bytes_per_request"]:
        lines.append(line(f"  state       {_state_text(kv)}"))
    if doc["fits"]:
        lines.append(line(f"  pool        {kv['num_blocks']:,} blocks, {kv['tokens']:,} tokens"))
    cost, *more_texts = request_texts(doc) or [""]
    labeled = [("request", cost), *(("", text) for text in more_texts)] if cost else []
    return [*lines, *(Paragraph(f"  {label:<12}", text) for label, text in labeled)]


def request_texts(doc: PlanDocument) -> list[str]:
    """What a request takes before its first token and per token, and how many the pool holds however short they are;
    empty if all of a request's blocks grow with its tokens.
    """
    kv, users = doc["kv"], doc["concurrency"]
    request = kv["request"]
    if request is None:
        return []
    taken = request["fixed"] + request["windows"]
    up_to = "up to " if request["windows"] else ""
    cost = f"{up_to}{plural(taken, 'block')} before its first token ({share_text(taken, kv['num_blocks'])} of the pool"
    if request["slots"]:
        share = share_text(request["slots"], request["num_slots"])
        cost = f"{request['slots']:,} of {request['num_slots']:,} state slots before its first token ({share}"
    elif request["decoding"] != taken:
        cost += f"; {up_to}{request['decoding']:,} while decoding"
    per = plural(request["growth_tokens"], "token") if request["growth_tokens"] > 1 else "token"
    growth = plural(request["growth_blocks"], "block")
    texts = [f"{cost}), then {growth} per {per}"] if request["growth_blocks"] else [f"{cost}), whatever its length"]
    most_text = f"at most {plural(request['most_requests'], 'request')} at once, however short"
    if request["most_requests"] > users["max_num_seqs"]:
        most_text += f" ({own_flag(doc, 'max_num_seqs')} allows {users['max_num_seqs']:,})"
    return [*texts, most_text]


def share_text(part: int, whole: int) -> str:
    """A share in percent with two significant digits: "25%", "0.11%"."""
    percent = 100 * part / whole
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


HOST_LABELS: Final = {
    "weights": "weights", "kv_offloading": "KV cache", "kv_transfer": "KV transfer", "adapters": "adapters",
}  # fmt: skip


def host_sizes(doc: PlanDocument) -> dict[str, int]:
    """Rows of host memory by label, without those that the settings do not ask for; they add up to its total."""
    host = doc["host_memory"]
    sizes = (host["weights"], host["kv_offloading"], host["kv_transfer"], host["adapters"])
    return {label: size for label, size in zip(HOST_LABELS.values(), sizes, strict=True) if size}


def host_note(doc: PlanDocument, label: str) -> str:
    users = doc["host_memory"]["users"]
    return f"holds {users:,} more full contexts" if label == HOST_LABELS["kv_offloading"] else ""


def host_owner(doc: PlanDocument) -> str:
    """Of what the host rows are, if a server has several: ranks of DP attention share their server's."""
    args = doc["inputs"]["args"]
    return f" of each {POOL}" if args["data_parallel_size"] > 1 and not args["enable_dp_attention"] else ""


def host_lines(doc: PlanDocument) -> list[Line]:
    """Lines on host memory that the settings ask for; empty if they ask for none."""
    sizes, ranks = host_sizes(doc), doc["host_memory"]["ranks"]
    if not sizes:
        return []
    of_ranks = f" ({plural(ranks, 'GPU')})" if ranks > 1 else ""
    rows = sizes | ({"total": doc["host_memory"]["total"]} if len(sizes) > 1 else {})
    texts = (f"  {label:<12}{size / GIB:>9,.2f} GiB  {host_note(doc, label)}".rstrip() for label, size in rows.items())
    return [line(f"Host memory{host_owner(doc)}{of_ranks}", "bold"), *map(line, texts)]


def phase_lines(doc: PlanDocument) -> list[Line]:
    """Lines on a server that shares its GPUs in turn: what it holds then, and what is left for others."""
    shared = doc["colocation"]
    if shared is None or not shared["phases"]:
        return []
    level = f"sleep level {shared['sleep_level']}" if shared["sleep_level"] else "it never sleeps"
    turn = f"in turn with {shared['owner']}'s trainer" if shared["owner"] else "in turn with others"
    lines = [line(f"Each GPU {turn} ({level})", "bold")]
    for phase in shared["phases"]:
        others, free = phase["others"], phase["free"]
        low, high = (f"{phase[end] / GIB:,.2f}" for end in ("server_low", "server_high"))
        spread = f" ({low}-{high})" if low != high else ""
        beside = f"{format_gib(free)} left for others" if others is None else (
            f"{format_gib(others)} of others, {format_gib(abs(free))} {'free' if free >= 0 else 'short'}"
        )  # fmt: skip
        text = f"  {phase['name']:<12}{phase['server'] / GIB:>9,.2f} GiB{spread:<15}  {beside}"
        lines.append(line(text, "" if free >= 0 else "red"))
    return lines


def encoder_lines(doc: PlanDocument) -> list[Line]:
    """Lines on the encoder's budget; empty for a text-only model."""
    budget = doc["encoder"]
    if budget is None:
        return []
    name, batch = budget["profiled"], budget["items_per_batch"]
    sizes = [f"{kind} {tokens:,}" for kind, tokens in budget["tokens_per_item"].items()]
    return [
        line("Encoder", "bold"),
        line(f"  budget      {budget['compute_tokens']:,} tokens a step, {budget['cache_tokens']:,} in its cache"),
        line(
            f"  profiled    {plural(batch, f'largest {name}')} at once"
            if batch
            else "  profiled    nothing is reserved"
        ),
        line(f"  largest     {', '.join(sizes)} tokens"),
    ]


def _state_text(kv: KvCache) -> str:
    """One copy of a user's states, and the blocks of all copies if drafts or caching keep more than one."""
    size = format_size(kv["state_bytes_per_request"])
    states = [group["blocks_per_request"] for group in kv["groups"] if group["kind"] == "state"]
    copies = sum(states)
    in_all = sum(group["blocks_per_request"] for group in kv["groups"])
    if copies <= len(states) or in_all != kv["blocks_per_request"]:
        return f"{size} of each user, whatever the length"
    taken = format_size(copies * kv["bytes_per_block"])
    return f"{taken} of it, {copies:,} blocks of copies; one copy is {size}, whatever the length"


def _layers_text(kv: KvCache) -> str:
    counts: dict[str, int] = {}
    for group in kv["groups"]:
        window = f" {group['window']:,}" if group["window"] else ""
        counts[group["kind"] + window] = counts.get(group["kind"] + window, 0) + group["num_layers"]
    if len(counts) == 1 and "full" in counts:
        return ""
    return f", every layer counted ({', '.join(f'{count} {kind}' for kind, count in counts.items())})"


def format_kib(num_bytes: int) -> str:
    """Format KV bytes per token in KiB: "128 KiB", "68.62 KiB"."""
    return f"{num_bytes // KIB:,} KiB" if num_bytes % KIB == 0 else f"{num_bytes / KIB:,.2f} KiB"


def user_lines(doc: PlanDocument) -> list[Part]:
    if not doc["fits"]:
        return []
    users, load, context = doc["concurrency"], doc["inputs"]["workload"], doc["kv"]["max_model_len"]
    load_text = f"requests at {load['mean_tokens'] or context:,} tokens each"
    if load["lengths"] is not None:
        least = "or more; " if users["lower_bound"] else ""
        load_text = f"{least}lengths {printable(load['lengths'])}, overflow at most {100 * load['overflow']:g}%"
    rows = [
        ("concurrent", f"{users['users']:,}", f"{load_text}, with one prefill in flight"),
        ("in the log", *logged(doc)),
    ]
    if not doc["kv"]["groups"]:
        rows = [("in a step", f"{users['users']:,}", f"{load_text}; others wait for the next")]
    replicas = users["replicas"]
    total = f"; {replicas} {POOL}s hold {replicas} times as many" if replicas > 1 else ""
    title = f"Users of one {POOL}{total}" if replicas > 1 else "Users"
    width = max(6, *(len(count) + 2 for _, count, _ in rows))
    lines: list[Part] = [
        line(title, "bold"),
        *(line(f"  {name:<12}{count:>{width}}  {text}") for name, count, text in rows),
    ]
    if users["log_differs"] is not None:
        lines.append(Paragraph(" " * (width + 16), users["log_differs"]))
    return lines


def logged(doc: PlanDocument) -> tuple[str, str]:
    """(the server's own figure, the log line that will contain it)."""
    figure, words = doc["concurrency"]["max"], terms(doc)
    text = words.log.format(concurrency=figure, tokens=doc["kv"]["tokens"])
    return f"{figure:,.2f}" if abilities(doc).logs_concurrency else "", f"the server will log {text}"


def verdict_lines(doc: PlanDocument) -> list[Part]:
    """Lines on the limit, the fixes, and the command."""
    lines: list[Part] = [(("Limit", "bold"), (f"  {limit['text']}", "")) for limit in doc["limits"][:1]]
    lines += [line(f"       {limit['text']}") for limit in doc["limits"][1:]]
    if doc["fits"]:
        return [*lines, (("Serve", "bold"), (f"  {doc['flags']['command']}", COMMAND))]
    if not doc["fixes"]:
        lines.append(
            line("No fix found: tried KV dtype, tensor parallel size, context and GPU, alone and together.", "bold")
        )
        return lines
    lines.append(line("What would make it fit, and for how many users", "bold"))
    width = max(len(fix["flag"]) for fix in doc["fixes"])
    for fix in doc["fixes"]:
        lines.append(Paragraph(f"  {fix['flag']:<{width}}  ", fix_text(doc, fix)))
    return [*lines, ((f"Serve{fix_place(doc)}", "bold"), (f"  {doc['fixes'][0]['command']}", COMMAND))]


def fix_place(doc: PlanDocument) -> str:
    """Where the best fix's command belongs, if it is another GPU than was asked for: " (on a100-40g)"."""
    gpu = doc["fixes"][0]["gpu"]
    return "" if gpu == doc["inputs"]["gpu"]["name"] else f" (on {gpu})"


def fix_text(doc: PlanDocument, fix: Fix) -> str:
    """Users with which a fix fits; the low end is shown if not even one user is certain."""
    count, gpu = fix["num_gpus"], fix["gpu"]
    gpus = gpu if count == 1 else f"{count} x {gpu}"
    if gpu == "custom":
        gpus = "such a GPU" if count == 1 else f"{count} such GPUs"
    users = plural(fix["users"], "user")
    if fix["users_low"] == 0 and fix["users"]:
        users = f"0 to {users}"
    checkpoint = "" if fix["model"] == doc["inputs"]["model"]["name"] else f" with {fix['model']}"
    return f"{users} at {fix['max_model_len']:,} tokens on {gpus}{without_text(doc, fix)}{checkpoint}"


def without_text(doc: PlanDocument, fix: Fix) -> str:
    """What a fix with another GPU replaces, besides the GPU: " without --gpu-memory"."""
    gpu = doc["inputs"]["gpu"]
    return " without --gpu-memory" if gpu["total_memory_kind"] == "given" and fix["gpu"] != gpu["name"] else ""


def assumption_lines(doc: PlanDocument, max_lines: int) -> list[Part]:
    """Estimated components, each in at most `max_lines` lines."""
    if not doc["assumptions"]:
        return []
    lines: list[Part] = [line("Estimated components (GiB; see --explain for formulas and sources)", "bold")]
    cells = [
        (ASSUMED.get(assumption["name"], assumption["name"]), *figures(assumption), assumption["formula"])
        for assumption in doc["assumptions"]
    ]
    wide = max(6, *(len(likely) + 1 for _, likely, _, _ in cells))
    far = max(11, *(len(spread) for _, _, spread, _ in cells))
    for label, likely, spread, text in cells:
        start = f"  {label:<12}{likely:>{wide}}  {spread:<{far}} "
        if not likely:  # a statement has no numbers: its text replaces them
            start = f"  {label:<13} "
        lines.append(Paragraph(start, printable(text, 1000), "dim", most=max_lines))
    return lines


def figures(assumption: Assumption) -> tuple[str, str]:
    """(likely, range) of an assumption in GiB; empty strings if it has none."""
    low, likely, high = assumption["low"], assumption["likely"], assumption["high"]
    if low is None or likely is None or high is None:
        return "", ""
    return f"{likely / GIB:.2f}", f"{low / GIB:.2f}-{high / GIB:.2f}" if low < high else ""


def explain_lines(sections: Iterable[Section]) -> list[Line]:
    lines = []
    for section in sections:
        lines += [line(), line(section.title, "bold")]
        lines += [line(f"  {printable(text, 500)}") for text in section.lines]
    return lines


# --- tables -----------------------------------------------------------------------------------------------------------


def context_parts(plans: Sequence[Plan]) -> list[Part]:
    """One row per context: KV per user, blocks, concurrency, users."""
    docs = [plan_document(plan) for plan in plans]
    first = docs[0]
    rows = []
    for doc in docs:
        kv, users = doc["kv"], doc["concurrency"]
        short = "" if doc["fits"] else short_text(doc)
        rows.append(
            [
                f"{kv['max_model_len']:,}",
                format_size(kv["bytes_per_request"]),
                f"{kv['blocks_per_request']:,}",
                f"{users['max']:.2f}",
                f"{users['users']:,}",
                users_range(doc) if doc["fits"] else short,
                mark(doc),
            ]
        )
    headers = ["context", "KV per user", "blocks", "in the log", "users", "range", "note"]
    if not any(row[-1] for row in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    table = Table.of(headers, rows, left=0)
    rate = f"{format_kib(first['kv']['bytes_per_token'])} of KV per token"
    title = unsupported_title(docs) or f"{name_of(first)} on {where(first)}: {rate}"
    return [line(title, "bold"), line(), table, line(), *_table_footer(docs)]


def unsupported_title(docs: Sequence[PlanDocument]) -> str:
    """The headline of plans that the server refuses for one reason, whatever the memory; empty if there is no such."""
    reasons = {doc["refusal"]["text"] for doc in docs if is_unsupported(doc) and doc["refusal"] is not None}
    return headline(docs[0]) if len(reasons) == 1 and all(map(is_unsupported, docs)) else ""


def is_unsupported(doc: PlanDocument) -> bool:
    """True if the server refuses the combination whatever the memory."""
    return doc["refusal"] is not None and doc["refusal"]["by"] == "unsupported"


def _table_footer(docs: Sequence[PlanDocument]) -> list[Line]:
    short, largest = next((doc for doc in docs if doc["fixes"]), None), docs[-1]
    if short is None:
        return [(("Serve", "bold"), (f"  {largest['flags']['command']}", COMMAND))] if largest["fits"] else []
    fixes = "; ".join(f"{fix['flag']}{without_text(short, fix)}" for fix in short["fixes"])
    return [line(f"At {short['kv']['max_model_len']:,} tokens it would fit with one of: {fixes}")]


def gpu_parts(plans: Sequence[tuple[GpuSpec, Plan | KvplanError]]) -> list[Part]:
    """One row per GPU: whether the model fits, for how many users, and what would help."""
    documents = [(gpu, plan_document(answer) if isinstance(answer, Plan) else str(answer)) for gpu, answer in plans]
    first = next((doc for _, doc in documents if not isinstance(doc, str)), None)
    lines: list[Part] = []
    is_mixed = len({doc["inputs"]["num_gpus"] for _, doc in documents if not isinstance(doc, str)}) > 1
    if first is not None:
        contexts = {doc["kv"]["max_model_len"] for _, doc in documents if not isinstance(doc, str)}
        subject = name_of(first) if len(contexts) > 1 else f"{name_of(first)} at {contexts.pop():,} tokens"
        per_token = "" if is_mixed else f", {format_kib(first['kv']['bytes_per_token'])} of KV per token"
        lines = [line(f"{subject}{per_token}", "bold"), line()]
    headers = ("GPU", "memory", "weights", "KV cache", "tokens", "users", "range", "fits")
    rows, refused = list[list[str]](), list[Line]()
    for gpu, doc in documents:
        if isinstance(doc, str):
            refused.append(line(f"{gpu.name}: {printable(doc, 300)}", "red"))
        else:
            name, *cells = _gpu_cells(gpu, doc)
            rows.append([where(doc) if is_mixed else name, *cells])
            if is_unsupported(doc) and doc["refusal"] is not None:
                refused.append(line(f"{gpu.name} does not start: {printable(doc['refusal']['text'], 300)}", "red"))
    return [*lines, *([Table.of(headers, rows)] if rows else []), *refused]


def _gpu_cells(gpu: GpuSpec, doc: PlanDocument) -> list[str]:
    users, memory = doc["concurrency"], doc["memory"]
    size = [gpu.name, format_gib(gpu.total_memory), format_gib(memory["weights"])]
    if doc["fits"]:
        pool = [format_gib(memory["kv_cache"]), f"{doc['kv']['tokens']:,}", f"{users['users']:,}"]
        return [*size, *pool, users_range(doc) or "-", fits_text(doc)]
    cure = next((f"; {fix['flag']}{without_text(doc, fix)}" for fix in doc["fixes"]), "")
    return [*size, "-", "-", "0", "-", f"{short_text(doc)}{cure}"]


def fits_text(doc: PlanDocument) -> str:
    """Verdict on a plan that fits, as a table cell: "yes", "yes, 256 at once", "may not start"."""
    if is_marginal(doc):
        return mark(doc)
    return f"yes, {mark(doc)}" if mark(doc) else "yes"


# --- listings ---------------------------------------------------------------------------------------------------------


def model_row(name: str, spec: ModelSpec) -> ModelRow:
    """Quick reference of a model: KV in bf16 on one rank, with windows counted at full length."""
    windows = sum(
        token_bytes(cache, "bfloat16", 1)
        for caches in spec.layers
        for cache in caches
        if isinstance(cache, SlidingWindow | ChunkedAttention)
    )
    parameters = sum(num_params(spec).values())
    return {
        "name": name,
        "parameters": parameters,
        "bf16_gb": round(2 * parameters / GB, 2),
        "stored_bytes": stored_bytes(spec),
        "kv_bytes_per_token": bytes_per_token(spec, "bfloat16"),
        "window_bytes_per_token": windows,
        "state_bytes": constant_bytes(spec, "bfloat16"),
        "max_model_len": spec.max_model_len,
        "quantization": spec.quantization.method if spec.quantization else None,
        "scheme": scheme_name(spec.quantization) if spec.quantization else None,
        "published": is_published(spec.source),
        "source": spec.source,
    }


def model_list(rows: Sequence[ModelRow]) -> Table:
    """Table of the rows of `model_row`."""
    headers = ("model", "stored as", "parameters", "stored GB", "KiB/token", "of windows", "state MiB", "context")
    cells = [
        [
            printable(row["name"]) + ("" if row["published"] else " *"),
            row["scheme"] or "",
            format_params(row["parameters"]),
            "?" if row["stored_bytes"] is None else f"{row['stored_bytes'] / GB:,.2f}",
            f"{row['kv_bytes_per_token'] / KIB:,.2f}".removesuffix(".00"),
            f"{row['window_bytes_per_token'] / KIB:,.2f}".removesuffix(".00") if row["window_bytes_per_token"] else "",
            f"{row['state_bytes'] / (KIB * KIB):,.1f}" if row["state_bytes"] else "",
            f"{row['max_model_len']:,}",
        ]
        for row in rows
    ]
    return Table.of(headers, cells, left=2)


def model_parts(rows: Sequence[ModelRow]) -> list[Part]:
    """The rows of `model_row` as a quick reference."""
    notes = [line(note) for note in model_notes(rows)]
    return [model_list(rows), *([line(), *notes] if notes else [])]


def model_notes(rows: Sequence[ModelRow]) -> list[str]:
    """Explain the marks of `model_list`."""
    if all(row["published"] for row in rows):
        return []
    return ["* not a copy of the published config.json: see kvplan models NAME for the source"]


def gpu_row(gpu: GpuSpec) -> GpuRow:
    """Specifications of a GPU: bytes, bytes/s, dense FLOP/s."""
    from kvplan.documents.listing import GpuRow

    return from_fields(GpuRow, gpu, compute_capability=gpu.compute_capability or gpu.architecture)


def gpu_list(rows: Sequence[GpuRow]) -> Table:
    """Table of the rows of `gpu_row`."""
    headers = ("GPU", "total", "GiB", "range", "GB/s", "bf16 TFLOP/s", "fp8 TFLOP/s", "capability")
    cells = [
        [
            row["name"],
            row["total_memory_kind"],
            f"{row['total_memory'] / GIB:.2f}",
            f"{row['total_memory_low'] / GIB:.2f}-{row['total_memory_high'] / GIB:.2f}",
            f"{row['memory_bandwidth'] / GB:,.0f}" if row["memory_bandwidth"] else "-",
            f"{row['bf16_flops'] / TB:,.0f}" if row["bf16_flops"] else "-",
            f"{row['fp8_flops'] / TB:,.0f}" if row["fp8_flops"] else "-",
            row["compute_capability"] or "-",
        ]
        for row in rows
    ]
    return Table.of(headers, cells, left=2)
