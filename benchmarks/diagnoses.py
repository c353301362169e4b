"""Score what kvplan says of failed servers' texts and of whole logs against the labels of files of them.

    python benchmarks/diagnoses.py FILE.jsonl ... [--json FILE] [--show] [--part first|held]

A line with `verbatim` (a text or its lines) is a failure: `cause`, `text_kind` (log, words), `decisive_in_text`,
`cure` (what was tried) and `cure_confirmed` (by whom, or none). A line with `text` and `state` is a whole log, of a
server that is up, was stopped, finished, failed or died. Four scores: causes, cures (one of the first two is of a
confirmed cure's kind; another release has no kind and is not scored), states, and healthy logs called dead.

--part held takes every third thread or repository, in the file's order, and --part first the others: rules are written
from the first, and the held ones looked at once.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvplan.asked.form import Form
from kvplan.measure.failure import HEALTHY, read_failure
from kvplan.measure.why import diagnose
from kvplan.planning.case import Cure
from kvplan.servers.logs.obstacles import OF_CAUSE

NO_CAUSE = (None, "unknown")
FIRST_CURES = 2
# The outcomes that a label of a whole log allows; a log that just ends may have failed.
OUTCOMES = {
    "ready": ("started",),
    "serving": ("started",),
    "stopped by signal": ("stopped",),
    "offline run finished": ("finished",),
    "crashed while serving": ("died",),
    "never started": ("failed", "cut"),
}
FAILED = ("failed", "died")
# Confirmed cures that are no flags -> a word of the action that says the same.
ACTIONS = {
    "driver": r"driver",
    "fabric manager": r"fabric.?manager",
    "page cache": r"drop.?caches|page.?cache",
    "build": r"newer (?:image|wheel|build|triton|pytorch)|cu1[23][0-9]|rebuil",
    "other processes": r"restart the (?:node|host|machine)|other process|kill(?:ed|ing)? (?:the )?(?:process|zombie)",
    "toolkit": r"cuda toolkit",
}


def lines_of(record: dict[str, Any]) -> list[str]:
    """The text of a record, line by line."""
    text = record.get("verbatim", record.get("text", ""))
    return [line for part in ([text] if isinstance(text, str) else text) for line in str(part).splitlines()]


def verdict(label: str | None, cause: str | None) -> str:
    """right, wrong or none: a text whose cause is unknown is right without one.

    Tensors of other shapes than the config's are not told apart from those of another quantization.
    """
    if cause is None:
        return "right" if label in NO_CAUSE else "none"
    if label == "not_memory" and cause in OF_CAUSE:
        return "right"
    if (label, cause) == ("quantization_mismatch", "checkpoint_shapes"):
        return "right"
    return "right" if cause == label else "wrong"


def group_of(record: dict[str, Any]) -> str:
    decisive = "decisive" if record.get("decisive_in_text") else "not decisive"
    return f"{record.get('text_kind', 'log')}, {decisive}"


def score(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a failure: label, cause, verdict and the lines that showed it."""
    rows = []
    for record in records:
        diagnosis = diagnose(Form(), lines_of(record))
        failure, labels = diagnosis.failure, cure_kinds(record)
        cures = diagnosis.cures[:FIRST_CURES]
        rows.append(
            {
                "id": record.get("id"),
                "group": group_of(record),
                "label": record["cause"],
                "cause": failure.cause,
                "verdict": verdict(record["cause"], failure.cause),
                "outcome": failure.outcome,
                "evidence": [line.text for line in failure.evidence],
                "needs": list(failure.needs),
                "cure_labels": labels,
                "cures": [list(cure.flags) or [cure.text] for cure in cures],
                "planned": sum(1 for cure in diagnosis.cures if cure.starts),
                "cure_verdict": cure_verdict(labels, [sorted(kinds_of(cure)) for cure in cures]) if labels else None,
            }
        )
    return rows


def score_states(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a whole log: its labeled state, what was read, and whether a healthy one is called dead."""
    rows = []
    for record in records:
        outcome = read_failure(lines_of(record)).outcome
        allowed = OUTCOMES.get(record["state"], FAILED)
        rows.append(
            {
                "id": record.get("id"),
                "state": record["state"],
                "outcome": outcome,
                "verdict": "right" if outcome in allowed else "wrong",
                "false_alarm": outcome in FAILED and allowed[0] in HEALTHY,
            }
        )
    return rows


def cure_kinds(record: dict[str, Any]) -> list[str]:
    """Kinds of a confirmed cure, flags without their values; empty where none was confirmed or it has no kind."""
    if record.get("cure_confirmed") in (None, "none", False):
        return []
    kinds = set[str]()
    for text in record.get("cure") or ():
        flag = re.match(r"--([a-z][a-z0-9-]*)|([a-z][a-z0-9_]*)=", text)
        kinds |= {(flag[1] or flag[2]).replace("_", "-")} if flag else actions_in(text)
    return sorted(kinds)


def actions_in(text: str) -> set[str]:
    return {kind for kind, pattern in ACTIONS.items() if re.search(pattern, text, re.IGNORECASE)}


def kinds_of(cure: Cure) -> set[str]:
    flags = {flag.lstrip("-").partition(" ")[0] for flag in cure.flags if flag.startswith("--")}
    return flags or actions_in(cure.text)


def cure_verdict(labels: list[str], kinds: list[list[str]]) -> str:
    return "right" if any(set(labels) & set(flags) for flags in kinds) else "wrong"


def summary(rows: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Verdicts on causes by group and of all, and on confirmed cures."""
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        for group in (row["group"], "all"):
            groups.setdefault(group, Counter())[row["verdict"]] += 1
    ordered = dict(sorted(groups.items(), key=lambda item: (item[0] == "all", item[0])))
    cures = Counter(row["cure_verdict"] for row in rows if row["cure_verdict"] is not None)
    return {**ordered, "confirmed cures": cures} if cures else ordered


def part_of(records: list[dict[str, Any]], part: str | None) -> list[dict[str, Any]]:
    """Every third thread or repository, or the others."""
    keys = [
        str(record["source"]).partition(":")[0] if "state" in record else str(record.get("thread"))
        for record in records
    ]
    third = set(list(dict.fromkeys(keys))[2::3])
    return [
        record for record, key in zip(records, keys, strict=True) if part is None or (key in third) == (part == "held")
    ]


def show_causes(rows: list[dict[str, Any]], *, every: bool) -> None:
    print(f"{'':24}{'records':>8}{'right':>7}{'wrong':>7}{'none':>6}")
    for group, counts in summary(rows).items():
        print(f"{group:24}{counts.total():8}{counts['right']:7}{counts['wrong']:7}{counts['none']:6}")
    for row in rows if every else ():
        if row["cure_verdict"] == "wrong":
            print(f"{row['id']}: {row['label']}: {row['cure_labels']} -> {row['cures']}")
        if row["verdict"] != "right":
            evidence = " / ".join(row["evidence"])[:200]
            print(f"{row['id']}: {row['group']}: {row['label']} -> {row['cause']}: {evidence}")


def show_states(rows: list[dict[str, Any]], *, every: bool) -> None:
    right, alarms = sum(row["verdict"] == "right" for row in rows), sum(row["false_alarm"] for row in rows)
    healthy = sum(OUTCOMES.get(row["state"], FAILED)[0] in HEALTHY for row in rows)
    print(f"{'states of whole logs':24}{len(rows):8}{right:7}{len(rows) - right:7}")
    print(f"{'healthy called dead':24}{healthy:8}{healthy - alarms:7}{alarms:7}")
    for row in rows if every else ():
        if row["verdict"] != "right":
            print(f"{row['id']}: {row['state']} -> {row['outcome']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--show", action="store_true", help="list what is not right")
    parser.add_argument("--part", choices=("first", "held"), help="every third thread or repository, or the others")
    args = parser.parse_args()
    document: dict[str, Any] = {}
    for file in args.file:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        records = part_of(records, args.part)
        failures = score(record for record in records if "state" not in record)
        logs = score_states(record for record in records if "state" in record)
        print(file.name)
        if failures:
            show_causes(failures, every=args.show)
        if logs:
            show_states(logs, every=args.show)
        groups = {group: dict(counts) for group, counts in summary(failures).items()}
        document[file.name] = {"groups": groups, "rows": failures, "states": logs}
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
