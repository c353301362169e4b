"""Why a server failed, on one screen: what happened, the memory breakdown, and the fixes."""

from collections.abc import Sequence
from itertools import takewhile

from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import GIB, format_gib
from kvplan.documents.cure import CureDocument
from kvplan.documents.diagnosis import DiagnosisDocument, Memory, diagnosis_document
from kvplan.measure.diagnosis import Diagnosis
from kvplan.measure.why_words import error_of
from kvplan.report.console import LABELS, STYLES, bar
from kvplan.report.cure_text import cure_text
from kvplan.report.drawing import Bar, Bars, Figure, Piece
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import COMMAND, Line, line
from kvplan.report.page import Block, bold, code
from kvplan.servers.plans.plan import budget_sizes

WITHOUT_FIGURES = ("host_memory_or_shm", "encoder_cache_too_small")  # causes to which a plan adds nothing


def shapes(diagnosis: Diagnosis) -> CommandAnswer:
    """The answer for each format."""
    document = diagnosis_document(diagnosis)
    return CommandAnswer(
        lambda blocks: why_lines(document, blocks=blocks),
        lambda: document,
        lambda: cure_table(document),
        lambda: why_page(document),
        lambda: why_bars(document),
        [] if diagnosis.plan is None else [diagnosis.plan.request.release.label],
    )


def why_lines(doc: DiagnosisDocument, *, blocks: bool = True) -> list[Line]:
    """Lines of the document; `blocks`: draw bars with block characters, else with #."""
    style = "bold" if doc["outcome"] in ("started", "stopped", "finished") else "bold red"
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
    """A row per fix."""
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
    """The document as a page: the cause, its evidence, and the fixes."""
    parts: list[Block] = [bold(doc["summary"])]
    if doc["evidence"]:
        parts.append(
            code(
                "\n".join(
                    f"line {evidence['line']:,}: {printable(evidence['text'], 1000)}" for evidence in doc["evidence"]
                )
            )
        )
    for styled in (*cure_lines(doc), *rest_lines(doc)):
        text = "".join(span for span, _ in styled).strip()
        style = styled[0][1]
        if text:
            parts.append(code(text) if style == COMMAND else bold(text) if style == "bold" else text)
    return parts


def why_bars(doc: DiagnosisDocument) -> list[Figure]:
    """Memory breakdown of a rank; empty if the log does not say."""
    memory = doc["memory"]
    if memory is None:
        return []
    sizes = taken(memory)
    sizes |= {"kv_cache": max(0, memory["kv_available"]), "unused": memory["unused"]}
    parts = tuple(Piece(LABELS.get(name, name), size, format_gib(size), name) for name, size in sizes.items() if size)
    needed = Piece("KV cache", memory["kv_needed"], format_gib(memory["kv_needed"]), "kv_cache")
    rows = [Bar("the GPU", parts, format_gib(memory["total"]))]
    rows += [Bar("one request needs", (needed,), needed.text)] if memory["kv_needed"] else []
    return [Bars("Where the memory of each GPU goes", tuple(rows))]


def taken(memory: Memory) -> dict[str, int]:
    """Bytes by component, in display order."""
    return {"weights": memory["weights"], **budget_sizes(memory), "unattributed": memory["unattributed"]}


def evidence_lines(doc: DiagnosisDocument) -> list[Line]:
    return [
        line(f"  line {evidence['line']:,}: {printable(error_of(evidence['text']))}", "dim")
        for evidence in doc["evidence"][:3]
    ]


def memory_lines(doc: DiagnosisDocument, *, blocks: bool) -> list[Line]:
    memory = doc["memory"]
    if memory is None:
        return []
    sizes = taken(memory)
    total = memory["total"]
    several = (doc["num_gpus"] or 1) > 1
    title = "Where each GPU's memory goes" if several else "Where the memory goes"
    by_log = memory["basis"] == "log"
    where = f"{doc['num_gpus']} x {doc['gpu']}" if several else str(doc["gpu"])
    about = "from the log" if by_log else f"{printable(doc['model'] or '')} on {where}"
    lines = [line(f"{title} ({about})", "bold")]
    for name, size in sizes.items():
        if size:
            lines.append(_row(LABELS.get(name, name), size, total, STYLES.get(name, "yellow"), "", blocks=blocks))
    needed = f"  one request needs {memory['kv_needed'] / GIB:,.2f}" if memory["kv_needed"] else ""
    free = memory["kv_available"]
    lines.append(_row(LABELS["kv_cache"], free, total, STYLES["kv_cache"], needed, blocks=blocks))
    last = "missing" if memory["missing"] else "the rest" if by_log else "unused"
    size = int(memory["missing"] or memory["unused"])
    note = "  more than the GPU has" if memory["missing"] else "" if by_log else "  above the server's budget"
    lines.append(_row(last, size, total, "dim", note, blocks=blocks, drawn=not memory["missing"]))
    lines.append(_row("total", total, total, "", "", blocks=blocks, drawn=False))
    return lines


def _row(label: str, size: int, total: int, style: str, note: str, *, blocks: bool, drawn: bool = True) -> Line:
    text = f"  {label:<12}{size / GIB:>9,.2f} GiB{100 * size / total:>7.1f}%  "
    return ((text, ""), (bar(size, total, blocks=blocks) if drawn else "", style), (note, "dim"))


def cure_lines(doc: DiagnosisDocument) -> list[Line]:
    """Each fix with its cost, and the command of the best one that has a command."""
    cures = doc["cures"]
    first = list(takewhile(lambda cure: not cure["starts"] and not cure["proof"], cures))
    later = cures[len(first) :]
    planned = [cure for cure in later if cure["starts"]]
    proved = [cure for cure in later if not cure["starts"] and cure["proof"]]
    others = [cure for cure in later if not cure["starts"] and not cure["proof"]]
    parts = [
        other_lines(first, "First" if later else "Fixes"),
        planned_lines(planned, runs=doc["outcome"] == "started"),
        proved_lines(proved),
        other_lines(others, "Other fixes"),
    ]
    parts.append(command_lines(planned or cures[:1]))
    return [styled for part in parts if part for styled in (*part, line())][:-1]


def planned_lines(cures: Sequence[CureDocument], *, runs: bool) -> list[Line]:
    texts = [f"  {number}. {cure_text(cure, runs=runs)}" for number, cure in enumerate(cures, 1)]
    return [line("Fixes verified by a plan, best first", "bold"), *map(line, texts)] if texts else []


def command_lines(cures: Sequence[CureDocument]) -> list[Line]:
    """The server's own command with the first of these fixes, to paste."""
    command = cures[0]["command"] if cures else None
    if command is None:
        return []
    return [line("Command with fix 1", "bold"), line(f"  {printable(command, 4000)}", COMMAND)]


def proved_lines(cures: Sequence[CureDocument]) -> list[Line]:
    texts = [f"  - {' and '.join(map(printable, cure['flags']))}: {cure['proof']}" for cure in cures]
    return [line("Fixes computed from the log (no plan was made)", "bold"), *map(line, texts)] if texts else []


def other_lines(cures: Sequence[CureDocument], title: str) -> list[Line]:
    if not cures:
        return []
    return [line(f"{title} (not checked with a plan)", "bold"), *(line(f"  - {cure_text(cure)}") for cure in cures)]


def rest_lines(doc: DiagnosisDocument) -> list[Line]:
    """What was inferred, what is missing, and further notes."""
    lines = [
        line(f"Inferred: {inference['what']} {printable(inference['value'])} ({inference['source']})", "dim")
        for inference in doc["inferred"]
    ]
    lines += [line(f"Note: {printable(note, 400)}") for note in doc["notes"]]
    if doc["needs"]:
        lines.append(line(f"To find the cause, add {'; '.join(printable(need, 300) for need in doc['needs'])}."))
    has_flags = any(cure["flags"] for cure in doc["cures"])
    if doc["missing"] and doc["memory_question"] and doc["cause"] not in WITHOUT_FIGURES and has_flags:
        lines.append(line(f"For exact fixes, add {' '.join(doc['missing'])}."))
    return lines
