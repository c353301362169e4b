"""Plans as CSV, one row each, and as Markdown for a pull request; the same numbers as the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplan.core.csv_text import csv_text
from kvplan.core.files import printable
from kvplan.core.units import GIB, format_gib, format_size
from kvplan.documents.artifact import plan_document
from kvplan.planning.explain import explain as explained
from kvplan.planning.plan import MemoryBreakdown, Plan
from kvplan.report.console import (
    LABELS,
    caveats,
    context_text,
    figures,
    fits_text,
    fix_text,
    format_kib,
    headline,
    length_text,
    memory_rows,
    name_of,
    short_text,
    unused_text,
    where,
)

if TYPE_CHECKING:
    from kvplan.documents.plan import PlanDocument

# Columns are paths of the JSON document; they only ever grow at the end.
COLUMNS = (
    "inputs.model.name",
    "inputs.model.id",
    "inputs.engine",
    "inputs.gpu.name",
    "inputs.num_gpus",
    "inputs.args.tensor_parallel_size",
    "inputs.args.pipeline_parallel_size",
    "inputs.args.data_parallel_size",
    "inputs.settings.max_model_len",
    "inputs.settings.dtype",
    "inputs.settings.gpu_memory_utilization",
    "inputs.settings.max_num_seqs",
    "inputs.settings.max_num_batched_tokens",
    "fits",
    "deficit",
    "memory.total",
    "memory.budget",
    *(f"memory.{row}" for row in MemoryBreakdown.ROWS),
    "memory.unused_detail.context",
    "memory.unused_detail.outside_budget",
    "memory.unused_detail.slack",
    "memory.load_peak",
    "kv.dtype",
    "kv.bytes_per_token",
    "kv.bytes_per_request",
    "kv.state_bytes_per_request",
    "kv.block_size",
    "kv.bytes_per_block",
    "kv.blocks_per_request",
    "kv.num_blocks",
    "kv.tokens",
    "concurrency.max",
    "concurrency.low",
    "concurrency.high",
    "concurrency.replicas",
    "parameters.total",
    "parameters.active",
    "flags.command",
    "concurrency.users",
    "concurrency.users_low",
    "concurrency.users_high",
    "concurrency.pool_users",
    "memory.missing",
    "memory.unused_detail.over_budget",
    "memory.unused_detail.over_gpu",
)


def value_at(document: PlanDocument, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = document
    for key in path.split("."):
        value = value[key]
    return value


def plans_csv(plans: Sequence[Plan]) -> str:
    """A header and one row per plan; null is an empty cell, booleans are true and false."""
    documents = map(plan_document, plans)
    return csv_text([COLUMNS, *([value_at(document, path) for path in COLUMNS] for document in documents)])


# --- markdown ---------------------------------------------------------------------------------------------------------


def plans_markdown(plans: Sequence[Plan], *, explain: bool = False) -> str:
    """One plan in full, several as a table; with `explain` each one's formulas below, folded."""
    documents = [plan_document(plan) for plan in plans]
    parts = [_one(documents[0])] if len(documents) == 1 else [_several(documents)]
    if explain:
        parts += [_formulas(plan, document) for plan, document in zip(plans, documents, strict=True)]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text of unknown origin as Markdown that shows it as it is."""
    shown = printable(text, 1000)
    for sign in "\\`*_[]<>|#":
        shown = shown.replace(sign, f"\\{sign}")
    return shown


def code(text: str) -> str:
    """A fenced block that its content cannot close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"


def rows_of(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    marks = ["---" if i < left else "---:" for i in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, marks, *rows))


def _one(doc: PlanDocument) -> str:
    parts = [f"**{escaped(headline(doc))}**", *map(escaped, caveats(doc)), _memory(doc), _figures(doc)]
    parts += [f"Limit: {escaped(limit['text'])}" for limit in doc["limits"]]
    if not doc["fits"] and doc["fixes"]:
        cures = [f"- `{fix['flag']}`: {escaped(fix_text(fix))}" for fix in doc["fixes"]]
        parts += ["What would make it fit, and for how many full-context users:\n\n" + "\n".join(cures)]
    command = doc["flags"]["command"] if doc["fits"] else next((fix["command"] for fix in doc["fixes"]), None)
    if command is not None:
        parts.append(code(command))
    return "\n\n".join([*parts, _assumed(doc)])


def _memory(doc: PlanDocument) -> str:
    memory = doc["memory"]
    rows = []
    for name, size in memory_rows(memory).items():
        if size or name != "lora":
            note = unused_text(doc) if name in ("unused", "missing") else ""
            share = f"{100 * size / memory['total']:.1f} %"
            rows.append([LABELS.get(name, name), f"{size / GIB:,.2f}", share, note])
    rows.append(["**total**", f"**{memory['total'] / GIB:,.2f}**", "100.0 %", f"budget {format_gib(memory['budget'])}"])
    return "\n".join(
        f"| {' | '.join(cells)} |"
        for cells in (["each GPU", "GiB", "share", ""], ["---", "---:", "---:", "---"], *rows)
    )


def _figures(doc: PlanDocument) -> str:
    kv, users = doc["kv"], doc["concurrency"]
    rows = [
        ["KV per token", f"{format_kib(kv['bytes_per_token'])} ({kv['dtype']})"],
        ["KV per user", f"{format_size(kv['bytes_per_request'])} at {kv['max_model_len']:,} tokens"],
        ["blocks", f"{kv['num_blocks']:,} of {kv['block_size']:,} tokens, {format_size(kv['bytes_per_block'])} each"],
        ["tokens", f"{kv['tokens']:,}"],
        [f"users {escaped(length_text(doc, context_text(doc)))}", f"{users['users']:,}"],
        ["in the server's log", f"{users['max']:.2f}"],
    ]
    if users["log_differs"] is not None:
        rows.append(["", escaped(users["log_differs"])])
    return rows_of(("KV cache and users", ""), rows)


def _assumed(doc: PlanDocument) -> str:
    rows = [
        [
            LABELS.get(each["name"], each["name"]),
            figures(each)[0],
            figures(each)[1].replace("-", " to "),
            escaped(each["formula"]),
        ]
        for each in doc["assumptions"]
    ]
    table = "\n".join(
        f"| {' | '.join(cells)} |"
        for cells in (["modeled, not derived", "GiB", "range", "formula"], ["---", "---:", "---:", "---"], *rows)
    )
    return table if rows else "Nothing is modeled: every number is derived."


def _several(documents: Sequence[PlanDocument]) -> str:
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
            escaped(name_of(doc)),
            escaped(where(doc)),
            f"{doc['kv']['max_model_len']:,}",
            format_kib(doc["kv"]["bytes_per_token"]),
            format_size(doc["kv"]["bytes_per_request"]),
            f"{doc['memory']['kv_cache'] / GIB:,.2f}",
            f"{doc['concurrency']['max']:.2f}",
            f"{doc['concurrency']['users']:,}",
            fits_text(doc) if doc["fits"] else _short(doc),
        ]
        for doc in documents
    ]
    return rows_of(headers, rows, left=2)


def _short(doc: PlanDocument) -> str:
    fix = next((f"; `{fix['flag']}`" for fix in doc["fixes"]), "")
    return f"{short_text(doc)}{fix}"


def _formulas(plan: Plan, doc: PlanDocument) -> str:
    lines = [f"<details><summary>{_html(headline(doc))}: every formula</summary>", ""]
    for section in explained(plan):
        lines += [f"**{escaped(section.title)}**", "", *(f"- {escaped(text)}" for text in section.lines), ""]
    return "\n".join([*lines, "</details>"])


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
