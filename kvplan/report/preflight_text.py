"""Whether a server starts here, on one screen: yes or no, the command that helps, and what was looked at."""

from kvplan.core.files import printable
from kvplan.documents.preflight import PreflightDocument
from kvplan.measure.preflight import Verdict
from kvplan.report.cure_text import cure_text
from kvplan.report.lines import COMMAND, Paragraph, Part, line

MOST_FIXES = 4
STYLES = {"starts": "bold", "may not start": "bold yellow", "does not start": "bold red"}
WORDS = {"ok": "ok", "fail": "FAILS", "risk": "risk", "unknown": "not checked"}


def preflight_lines(doc: PreflightDocument, result: Verdict) -> list[Part]:
    parts: list[Part] = [Paragraph("", printable(doc["answer"], 1000), STYLES[doc["outcome"]], indent=4)]
    parts += fix_lines(doc, [check.cure for check in result.checks if check.status == "fail" and check.cure])
    parts.append(line())
    for check in result.checks:
        text = f"{check.text}; {check.cure}" if check.status == "risk" and check.cure else check.text
        parts.append(Paragraph(f"  {check.name:<12} {WORDS[check.status]:<12} ", printable(text, 600)))
    return [*parts, *(Paragraph("", f"Note: {printable(text, 300)}") for text in result.machine.warnings)]


def fix_lines(doc: PreflightDocument, actions: list[str]) -> list[Part]:
    """Fixes, those with a command first, and the command of the best one."""
    ready = [cure for cure in doc["cures"] if cure["command"] is not None]
    cures = [*ready, *(cure for cure in doc["cures"] if cure["command"] is None)][:MOST_FIXES]
    command = next((cure["command"] for cure in cures if cure["command"] is not None), None)
    texts = [*map(cure_text, cures), *(actions if not cures else [])]
    parts: list[Part] = []
    if command is not None:
        parts += [line(), line(f"  {printable(command, 4000)}", COMMAND)]
    if texts:
        parts += [line(), line("Fixes, best first" if cures else "To do", "bold")]
        parts += [Paragraph(f"  {number}. ", printable(text, 400)) for number, text in enumerate(texts, 1)]
    return parts
