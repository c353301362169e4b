"""Plans as CSV, one row each, and as Markdown for a pull request; the same numbers as the JSON."""

from collections.abc import Sequence
from typing import Final

from kvplan.core.table import Markdown, Table, markdown_text
from kvplan.core.units import GIB, format_gib, format_size, plural
from kvplan.documents.artifact import plan_document
from kvplan.documents.plan import PlanDocument
from kvplan.planning.explain import explain as explained
from kvplan.planning.plan import Plan
from kvplan.report import console
from kvplan.report.drawing import Bar, Bars, Figure, Piece
from kvplan.report.page import Block, block_text, bold, bullets, code, folded
from kvplan.servers.plans.plan import BUDGET_ROWS

# Columns of a plan's row of CSV: paths of the JSON document; new ones are only added at the end.
COLUMNS: Final = (
    "inputs.model.name", "inputs.model.id", "inputs.engine", "inputs.gpu.name", "inputs.num_gpus",
    "inputs.args.tensor_parallel_size", "inputs.args.pipeline_parallel_size", "inputs.args.data_parallel_size",
    "inputs.settings.max_model_len", "inputs.settings.dtype", "inputs.settings.gpu_memory_utilization",
    "inputs.settings.max_num_seqs", "inputs.settings.max_num_batched_tokens", "fits", "deficit", "memory.total",
    "memory.budget", "memory.weights", *(f"memory.{name}" for name in BUDGET_ROWS), "memory.kv_cache", "memory.unused",
    "memory.unused_detail.context", "memory.unused_detail.outside_budget", "memory.unused_detail.slack",
    "memory.load_peak", "kv.dtype", "kv.bytes_per_token", "kv.bytes_per_request", "kv.state_bytes_per_request",
    "kv.block_size", "kv.bytes_per_block", "kv.blocks_per_request", "kv.num_blocks", "kv.tokens", "concurrency.max",
    "concurrency.low", "concurrency.high", "concurrency.replicas", "parameters.total", "parameters.active",
    "flags.command", "concurrency.users", "concurrency.users_low", "concurrency.users_high", "concurrency.pool_users",
    "memory.missing", "memory.unused_detail.over_budget", "memory.unused_detail.over_gpu", "host_memory.kv_offloading",
    "host_memory.users", "memory.draft_weights", "host_memory.weights", "host_memory.kv_transfer",
    "host_memory.adapters", "host_memory.total", "kv.request.fixed", "kv.request.windows", "kv.request.decoding",
    "kv.request.growth_blocks", "kv.request.growth_tokens", "kv.request.slots", "kv.request.num_slots",
    "kv.request.most_requests",
)  # fmt: skip


def plans_table(plans: Sequence[Plan]) -> Table:
    """One row per plan."""
    return Table.of_documents(COLUMNS, map(plan_document, plans))


# --- figures ----------------------------------------------------------------------------------------------------------


def memory_bars(plans: Sequence[Plan]) -> list[Figure]:
    """Memory breakdown of each GPU, one bar per plan."""
    documents = [plan_document(plan) for plan in plans]
    bars = tuple(memory_bar(doc, label) for doc, label in zip(documents, labels(documents), strict=True))
    note = "Dashed line: the server's memory budget. Hatched in red: more than the GPU has."
    return [Bars("Where the memory of each GPU goes", bars, note)] if bars else []


def memory_bar(doc: PlanDocument, label: str) -> Bar:
    memory, users = doc["memory"], doc["concurrency"]["users"]
    sizes = {name: size for name, size in console.memory_rows(memory).items() if size and name != "missing"}
    parts = tuple(Piece(console.LABELS.get(name, name), size, format_gib(size), name) for name, size in sizes.items())
    return Bar(
        label, parts, plural(users, "user") if doc["fits"] else "does not fit", memory["budget"], memory["total"]
    )


def labels(documents: Sequence[PlanDocument]) -> list[str]:
    """Labels that distinguish the plans: model, GPU and context, as far as they differ."""
    names = [console.name_of(doc) for doc in documents]
    gpus = [console.where(doc) for doc in documents]
    contexts = [f"{doc['kv']['max_model_len']:,} tokens" for doc in documents]
    differing = [column for column in (names, gpus, contexts) if len(set(column)) > 1] or [gpus]
    return [", ".join(cells) for cells in zip(*differing, strict=True)]


# --- markdown ---------------------------------------------------------------------------------------------------------


def plans_page(plans: Sequence[Plan], *, explain: bool = False) -> list[Block]:
    """One plan in full, or several as a table; with `explain`, followed by each one's formulas, collapsed."""
    documents = [plan_document(plan) for plan in plans]
    parts: list[Block] = _one(documents[0]) if len(documents) == 1 else [bold(fitting(documents)), _several(documents)]
    if explain:
        parts += [_formulas(plan, document) for plan, document in zip(plans, documents, strict=True)]
    return parts


def fitting(documents: Sequence[PlanDocument]) -> str:
    """Which of several plans fit: "2 of 3 fit: 13 users (h100-80g), 6 users (l40s)"."""
    fits = [(doc, label) for doc, label in zip(documents, labels(documents), strict=True) if doc["fits"]]
    counts = [f"{plural(doc['concurrency']['users'], 'user')} ({label})" for doc, label in fits[:3]]
    more = f", and {len(fits) - 3} more" if len(fits) > 3 else ""
    listed = f": {', '.join(counts)}{more}" if counts else ""
    models = ", ".join(dict.fromkeys(console.name_of(doc) for doc in documents))
    return f"{models}: {len(fits)} of {len(documents)} fit{listed}"


def _one(doc: PlanDocument) -> list[Block]:
    parts: list[Block] = [bold(console.headline(doc)), *console.caveats(doc)]
    if (cache := doc.get("slots")) is not None:
        from kvplan.report import slots_text  # only for servers that place layers

        parts.append(slots_text.place_table(cache))
    else:
        parts += [_memory(doc), _figures(doc), *_host(doc)]
    parts += [f"Limit: {limit['text']}" for limit in doc["limits"]]
    if not doc["fits"] and doc["fixes"]:
        cures = [f"- `{fix['flag']}`: {markdown_text(console.fix_text(doc, fix))}" for fix in doc["fixes"]]
        parts += ["What would make it fit, and for how many full-context users:", Markdown("\n".join(cures))]
    if doc["fits"]:
        parts.append(code(doc["flags"]["command"]))
    elif doc["fixes"]:
        parts += [f"Serve{console.fix_place(doc)}:", code(doc["fixes"][0]["command"])]
    return [*parts, _assumed(doc)]


def _memory(doc: PlanDocument) -> Table:
    memory = doc["memory"]
    rows: list[list[str]] = []
    for name, size in console.memory_rows(memory).items():
        if size or name != "lora":
            notes = {"unused": console.unused_text, "missing": console.unused_text, "draft": console.draft_text}
            note = notes[name](doc) if name in notes else ""
            share = f"{100 * size / memory['total']:.1f}%"
            rows.append([console.LABELS.get(name, name), f"{size / GIB:,.2f}", share, note])
    total = [bold("total"), bold(f"{memory['total'] / GIB:,.2f}")]
    rows.append([*total, "100.0%", f"budget {format_gib(memory['budget'])}"])
    return Table.of(("each GPU", "GiB", "share", ""), rows, left=(0, 3))


def _figures(doc: PlanDocument) -> Table:
    kv, users = doc["kv"], doc["concurrency"]
    rows = [
        ["KV per token", f"{console.format_kib(kv['bytes_per_token'])} ({kv['dtype']})"],
        ["KV per user", f"{format_size(kv['bytes_per_request'])} at {kv['max_model_len']:,} tokens"],
        ["blocks", f"{kv['num_blocks']:,} of {kv['block_size']:,} tokens, {format_size(kv['bytes_per_block'])} each"],
        ["tokens", f"{kv['tokens']:,}"],
        *(["a request takes", text] for text in console.request_texts(doc)[:1]),
        *(["requests", text] for text in console.request_texts(doc)[1:]),
        [f"users {console.length_text(doc, console.context_text(doc))}", f"{users['users']:,}"],
        ["in the server's log", f"{users['max']:.2f}"],
    ]
    if users["log_differs"] is not None:
        rows.append(["", users["log_differs"]])
    return Table.of(("KV cache and users", ""), rows)


def _host(doc: PlanDocument) -> list[Table]:
    """Host memory that the settings ask for; empty if they ask for none."""
    rows = [
        [label, f"{size / GIB:,.2f}", console.host_note(doc, label)] for label, size in console.host_sizes(doc).items()
    ]
    total = [bold("total"), bold(f"{doc['host_memory']['total'] / GIB:,.2f}"), ""]
    return [Table.of((f"host memory{console.host_owner(doc)}", "GiB", ""), [*rows, total], left=(0, 2))] if rows else []


def _assumed(doc: PlanDocument) -> Block:
    rows = [
        [
            console.LABELS.get(assumption["name"], assumption["name"]),
            console.figures(assumption)[0],
            console.figures(assumption)[1].replace("-", " to "),
            assumption["formula"],
        ]
        for assumption in doc["assumptions"]
    ]
    if not rows:
        return "No estimates: every number is computed."
    return Table.of(("estimated component", "GiB", "range", "formula"), rows, left=(0, 3))


def _several(documents: Sequence[PlanDocument]) -> Table:
    headers = (
        "model",
        "GPUs",
        "context",
        "KV per token",
        "KV per user",
        "KV cache GiB",
        "concurrency",
        "users",
        "fits",
    )
    rows = [
        [
            console.name_of(doc),
            console.where(doc),
            f"{doc['kv']['max_model_len']:,}",
            console.format_kib(doc["kv"]["bytes_per_token"]),
            format_size(doc["kv"]["bytes_per_request"]),
            f"{doc['memory']['kv_cache'] / GIB:,.2f}",
            f"{doc['concurrency']['max']:.2f}",
            f"{doc['concurrency']['users']:,}",
            console.fits_text(doc) if doc["fits"] else _short(doc),
        ]
        for doc in documents
    ]
    return Table.of(headers, rows, left=2)


def _short(doc: PlanDocument) -> Markdown:
    fix = next((f"; `{fix['flag']}`" for fix in doc["fixes"]), "")
    return Markdown(f"{markdown_text(console.short_text(doc))}{fix}")


def _formulas(plan: Plan, doc: PlanDocument) -> Markdown:
    parts = [part for section in explained(plan) for part in (bold(section.title), bullets(section.lines))]
    return Markdown("\n\n".join(map(block_text, folded(f"{console.headline(doc)}: every formula", parts))))
