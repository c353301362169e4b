"""Why a server failed, on one screen: what happened, where the memory went, and what cures it."""

import re

from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import GIB, format_gib
from kvplan.documents.diagnosis import TAKEN, CureDocument, DiagnosisDocument
from kvplan.report.console import LABELS, STYLES, bar
from kvplan.report.drawing import Bar, Bars, Figure, Piece
from kvplan.report.lines import COMMAND, Line, line
from kvplan.report.page import Block, bold, code

ROWS = (*TAKEN, "unattributed")


RANKS = "tensor_parallel_size"
NOTICED = ("max_num_seqs", "max_model_len")  # kinds of which the figures alone do not say what changes for users
WITHOUT_FIGURES = ("host_memory_or_shm", "encoder_cache_too_small")  # causes of which no plan says more


def why_lines(doc: DiagnosisDocument, *, blocks: bool = True) -> list[Line]:
    """The document as lines; `blocks`: bars of block characters, else of #."""
    style = "bold" if doc["outcome"] == "started" else "bold red"
    parts = [
        [line(doc["summary"], style)],
        evidence_lines(doc),
        memory_lines(doc, blocks=blocks),
        cure_lines(doc),
        rest_lines(doc),
    ]
    lines = [styled for part in parts if part for styled in (*part, line())]
    return lines[:-1]


def cure_table(doc: DiagnosisDocument) -> Table:
    """A row for each cure."""
    names = ("cause", "kind", "flags", "text", "starts", "users", "max_model_len", "proof", "command")
    rows = []
    for cure in doc["cures"]:
        users, length = (cure["effect"]["users"], cure["effect"]["max_model_len"]) if cure["effect"] else (None, None)
        flags = " ".join(cure["flags"])
        rows.append(
            (
                doc["cause"],
                cure["kind"],
                flags,
                cure["text"],
                cure["starts"],
                users,
                length,
                cure["proof"],
                cure["command"],
            )
        )
    return Table.of(names, rows)


def why_page(doc: DiagnosisDocument) -> list[Block]:
    """The document for a page: the cause, its evidence, and what cures it."""
    parts: list[Block] = [bold(doc["summary"])]
    if doc["evidence"]:
        parts.append(
            code("\n".join(f"line {each['line']:,}: {printable(each['text'], 1000)}" for each in doc["evidence"]))
        )
    for styled in (*cure_lines(doc), *rest_lines(doc)):
        text = "".join(span for span, _ in styled).strip()
        style = styled[0][1]
        if text:
            parts.append(code(text) if style == COMMAND else bold(text) if style == "bold" else text)
    return parts


def why_bars(doc: DiagnosisDocument) -> list[Figure]:
    """Where the memory of a rank went; nothing where the log does not say."""
    memory = doc["memory"]
    if memory is None:
        return []
    sizes = {name: int(memory[name]) for name in ROWS}  # type: ignore[literal-required] # rows are keys of it
    sizes |= {"kv_cache": max(0, memory["kv_available"]), "unused": memory["unused"]}
    parts = tuple(Piece(LABELS.get(name, name), size, format_gib(size), name) for name, size in sizes.items() if size)
    needed = Piece("KV cache", memory["kv_needed"], format_gib(memory["kv_needed"]), "kv_cache")
    rows = [Bar("the GPU", parts, format_gib(memory["total"]))]
    rows += [Bar("one request needs", (needed,), needed.text)] if memory["kv_needed"] else []
    return [Bars("Where the memory of each GPU goes", tuple(rows))]


def evidence_lines(doc: DiagnosisDocument) -> list[Line]:
    return [
        line(f"  line {each['line']:,}: {printable(shortened(each['text']))}", "dim") for each in doc["evidence"][:3]
    ]


def shortened(text: str, most: int = 180) -> str:
    """A line of a log without what stands before its error, cut to two lines of a screen."""
    error = re.search(r"\b(?:[\w.]+Error|[\w.]*Exception)\b:? ", text)
    text = text if error is None else text[error.start() :]
    return text if len(text) <= most else text[: most - 3] + "..."


def memory_lines(doc: DiagnosisDocument, *, blocks: bool) -> list[Line]:
    memory = doc["memory"]
    if memory is None:
        return []
    sizes = {name: int(memory[name]) for name in ROWS}  # type: ignore[literal-required] # rows are keys of it
    total = memory["total"]
    several = (doc["num_gpus"] or 1) > 1
    title = "Where each GPU's memory goes" if several else "Where the memory goes"
    by_log = memory["basis"] == "log"
    where = f"{doc['num_gpus']} x {doc['gpu']}" if several else str(doc["gpu"])
    about = "by the log alone" if by_log else f"{printable(doc['model'] or '')} on {where}"
    lines = [line(f"{title} ({about})", "bold")]
    for name, size in sizes.items():
        if size:
            lines.append(_row(LABELS.get(name, name), size, total, STYLES.get(name, "yellow"), "", blocks=blocks))
    needed = f"  one request needs {memory['kv_needed'] / GIB:,.2f}" if memory["kv_needed"] else ""
    free = memory["kv_available"]
    lines.append(_row(LABELS["kv_cache"], free, total, STYLES["kv_cache"], needed, blocks=blocks))
    last = "missing" if memory["missing"] else "the rest" if by_log else "unused"
    size = int(memory["missing"] or memory["unused"])
    note = "  more than the GPU has" if memory["missing"] else "" if by_log else "  outside the server's share"
    lines.append(_row(last, size, total, "dim", note, blocks=blocks, drawn=not memory["missing"]))
    lines.append(_row("total", total, total, "", "", blocks=blocks, drawn=False))
    return lines


def _row(label: str, size: int, total: int, style: str, note: str, *, blocks: bool, drawn: bool = True) -> Line:
    text = f"  {label:<12}{size / GIB:>9,.2f} GiB{100 * size / total:>7.1f} %  "
    return ((text, ""), (bar(size, total, blocks=blocks) if drawn else "", style), (note, "dim"))


def cure_lines(doc: DiagnosisDocument) -> list[Line]:
    """Each cure with what it costs, and the commands of the best ones."""
    if not doc["cures"]:
        return []
    planned = [cure for cure in doc["cures"] if cure["starts"]]
    proved = [cure for cure in doc["cures"] if not cure["starts"] and cure["proof"]]
    others = [cure for cure in doc["cures"] if not cure["starts"] and not cure["proof"]]
    lines: list[Line] = []
    if planned:
        lines.append(line("Fixes that start according to a plan, best first", "bold"))
        runs = doc["outcome"] == "started"
        lines += [line(f"  {number}. {cure_text(cure, runs=runs)}") for number, cure in enumerate(planned, 1)]
    if proved:
        lines += [line()] if lines else []
        lines.append(line("Fixes that follow from the log's own figures (no plan was made)", "bold"))
        lines += [line(f"  {'-'} {' and '.join(map(printable, cure['flags']))}: {cure['proof']}") for cure in proved]
    if others:
        title = "Other fixes (not checked with a plan)" if lines else "Fixes (not checked with a plan)"
        lines += [line()] if lines else []
        lines.append(line(title, "bold"))
        lines += [line(f"  {'-'} {cure_text(cure)}") for cure in others]
    command = doc["cures"][0]["command"]
    if command is not None:
        lines += [line(), line("Paste", "bold"), line(f"  {printable(command, 4000)}", COMMAND)]
    return lines


def cure_text(cure: CureDocument, *, runs: bool = False) -> str:
    """ "--max-model-len 34720: 1.01 users of 34,720 tokens"; of a server that runs, what users notice as well."""
    text = effect_text(cure)
    return f"{text}; {cure['text']}" if runs and cure["effect"] and cure["kind"] in NOTICED else text


def effect_text(cure: CureDocument) -> str:
    if not cure["flags"]:
        return cure["text"]
    flags = " and ".join(printable(flag) for flag in cure["flags"])
    effect = cure["effect"]
    if effect is None:
        way = "" if any(" " in flag for flag in cure["flags"]) or cure["way"] == "add" else f"{cure['way']} "
        return f"{way}{flags}: {cure['text']}"
    ranks = next((flag.split()[-1] for flag in cure["flags"] if cure["kind"] == RANKS and " " in flag), None)
    on = "" if ranks in (None, "1") else f" on {ranks} GPUs"
    users = f"{effect['users']:,.1f}" if effect["users"] < 100 else f"{effect['users']:,.0f}"
    if 0.95 <= effect["users"] < 1.05:
        length = "that length" if len(cure["flags"]) == 1 and cure["kind"] == "max_model_len" else ""
        return f"{flags}: 1 user at {length or format(effect['max_model_len'], ',') + ' tokens'}{on}"
    return f"{flags}: {users} users at {effect['max_model_len']:,} tokens{on}"


def rest_lines(doc: DiagnosisDocument) -> list[Line]:
    """What was inferred, what is missing, and what else there is to say."""
    lines = [
        line(f"Inferred: {each['what']} {printable(each['value'])} ({each['source']})", "dim")
        for each in doc["inferred"]
    ]
    lines += [line(f"Note: {printable(note, 400)}") for note in doc["notes"]]
    if doc["needs"]:
        lines.append(line(f"To find the cause, add {'; '.join(printable(need, 300) for need in doc['needs'])}."))
    has_flags = any(cure["flags"] for cure in doc["cures"])
    if doc["missing"] and doc["memory_question"] and doc["cause"] not in WITHOUT_FIGURES and has_flags:
        lines.append(line(f"For fixes with figures, add {' '.join(doc['missing'])}."))
    return lines
