"""Score the causes and cures that kvplan gives of failed servers' texts against the labels of a file of them.

    python benchmarks/diagnoses.py FAILURES.jsonl [--json FILE] [--show]

Each line of the file: `verbatim` (a text or its lines), `cause`, `text_kind` (log, words), `decisive_in_text`; `cure`
(what was tried) and `cure_confirmed` (by whom, or none). A cure is right where one of the first three is of its kind;
an action that is no flag (another release, a driver) has no kind and is not scored.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvplan.cli.why import diagnose
from kvplan.cli.why_options import WhyOptions
from kvplan.planning.case import Cure
from kvplan.servers.logs.obstacles import OF_CAUSE

NO_CAUSE = (None, "unknown")
FIRST_CURES = 3


def lines_of(record: dict[str, Any]) -> list[str]:
    """The text of a record, line by line."""
    text = record["verbatim"]
    return [line for part in ([text] if isinstance(text, str) else text) for line in str(part).splitlines()]


def verdict(label: str | None, cause: str | None) -> str:
    """right, wrong or none: a text whose cause is unknown is right without one."""
    if cause is None:
        return "right" if label in NO_CAUSE else "none"
    if label == "not_memory" and cause in OF_CAUSE:
        return "right"
    return "right" if cause == label else "wrong"


def group_of(record: dict[str, Any]) -> str:
    decisive = "decisive" if record.get("decisive_in_text") else "not decisive"
    return f"{record.get('text_kind', 'log')}, {decisive}"


def score(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a record: label, cause, verdict and the lines that showed it."""
    rows = []
    for record in records:
        diagnosis = diagnose(WhyOptions(), lines_of(record))
        failure, labels = diagnosis.failure, cure_kinds(record)
        kinds = [sorted(kinds_of(cure)) for cure in diagnosis.cures[:FIRST_CURES]]
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
                "cures": [list(cure.flags) or [cure.text] for cure in diagnosis.cures[:FIRST_CURES]],
                "planned": sum(1 for cure in diagnosis.cures if cure.starts),
                "cure_verdict": cure_verdict(labels, kinds) if labels else None,
            }
        )
    return rows


def cure_kinds(record: dict[str, Any]) -> list[str]:
    """Flags of a confirmed cure, without their values; empty where none was confirmed or it is no flag of a server."""
    if record.get("cure_confirmed") in (None, "none"):
        return []
    flags = [re.match(r"--([a-z][a-z0-9-]*)|([a-z][a-z0-9_]*)=", text) for text in record.get("cure") or ()]
    return sorted({(match[1] or match[2]).replace("_", "-") for match in flags if match})


def kinds_of(cure: Cure) -> set[str]:
    return {flag.lstrip("-").partition(" ")[0] for flag in cure.flags if flag.startswith("--")}


def cure_verdict(labels: list[str], kinds: list[list[str]]) -> str:
    return "right" if any(set(labels) & set(flags) for flags in kinds) else "wrong"


def cure_summary(rows: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Verdicts on cures: of all that were confirmed, and of those whose cause the text shows and kvplan names."""
    groups = {"cures, cause named": Counter[str](), "cures, all": Counter[str]()}
    for row in rows:
        if row["cure_verdict"] is not None:
            groups["cures, all"][row["cure_verdict"]] += 1
            if row["cause"] is not None:
                groups["cures, cause named"][row["cure_verdict"]] += 1
    return groups


def summary(rows: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Verdicts by group, and of all."""
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        for group in (row["group"], "all"):
            groups.setdefault(group, Counter())[row["verdict"]] += 1
    return dict(sorted(groups.items(), key=lambda item: (item[0] == "all", item[0])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--show", action="store_true", help="list what is not right")
    args = parser.parse_args()
    records = [json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = score(records)
    groups = summary(rows)
    print(f"{'':24}{'records':>8}{'right':>7}{'wrong':>7}{'none':>6}")
    for group, counts in (groups | cure_summary(rows)).items():
        print(f"{group:24}{counts.total():8}{counts['right']:7}{counts['wrong']:7}{counts['none']:6}")
    if args.show:
        for row in rows:
            if row["cure_verdict"] == "wrong":
                print(f"{row['id']}: {row['label']}: {row['cure_labels']} -> {row['cures']}")
            if row["verdict"] != "right":
                evidence = " / ".join(row["evidence"])[:200]
                print(f"{row['id']}: {row['group']}: {row['label']} -> {row['cause']}: {evidence}")
    if args.json:
        document = {
            "groups": {group: dict(counts) for group, counts in (groups | cure_summary(rows)).items()},
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
