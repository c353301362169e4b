"""Make tests/facts/architectures_sglang.jsonl of the answers of SGLang's own planning code.

    python -m benchmarks.architectures_sglang ORACLE SCRIPTS [CLASS...]

ORACLE is the folder that the oracle's setup.sh made, SCRIPTS the folder of its scripts. Asked is about a config of
every class of SGLang's registry that has one (its row there, or vLLM's row of the class), or of the CLASSes, on one
H100 and on two; other rows stay. To change a config, change its row. Prints what is not equal, and how many are.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kvplan.servers.releases import names_in
from kvplan.servers.sglang.classes import REGISTRY
from tests import oracles
from tests.support.architectures_sglang import BUDGET, FACTS, config_of, others, outcome, rows, stored

ASK = Path(__file__).with_name("ask_sglang.py")
MARKS = ("refused", "different")
ANSWERED = ("ranks", "why", "kind", *MARKS)


def cases() -> dict[str, dict[str, Any]]:
    """A row without its answers for each class that has a config."""
    own = {row["architecture"]: row for row in (rows() if FACTS.is_file() else ())}
    new = {name: {"architecture": name} for name in names_in(REGISTRY) if "results" in others().get(name, {})}
    return {name: {k: v for k, v in row.items() if k not in ANSWERED} for name, row in sorted((new | own).items())}


def ask(home: Path, scripts: Path, asked_of: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The oracle's rows of each class, on one GPU and on two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = []
        for architecture, row in asked_of.items():
            (folder / architecture).mkdir()
            (folder / architecture / "config.json").write_text(json.dumps(config_of(row)), encoding="utf-8")
            case = {"model": architecture, "available_memory": [BUDGET]}
            lines += [json.dumps({**case, "tp": ranks}) + "\n" for ranks in (1, 2)]
        (folder / "cases.jsonl").write_text("".join(lines), encoding="utf-8")
        command = [home / "venv/bin/python", ASK, scripts, folder / "cases.jsonl", "--models", folder, "--home", home]
        subprocess.run([*command, "-o", folder / "rows.jsonl"], check=True)
        answers: dict[str, list[dict[str, Any]]] = {}
        for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            answers.setdefault(row["inputs"]["model"], []).append(row)
    return answers


def whole(row: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with its answers."""
    unread = answers[0].get("quant_error", "")
    if why := oracles.unanswered(answers[0]) or (unread if "has no SGlang implementation" in unread else ""):
        return {**row, "why": why[:120]}
    kind = "own" if "config" in row else others()[row.get("of", row["architecture"])]["config_kind"]
    return {**row, "kind": kind, "ranks": stored(answers)}


def marked(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with how kvplan's answers compare if they are not equal."""
    row = {name: value for name, value in row.items() if name not in MARKS}
    state, why = outcome(row) if "ranks" in row else ("", "")
    return row | {oracles.REFUSED: {"refused": True}, oracles.DIFFERENT: {"different": why[:200]}}.get(state, {})


def main(home: Path, scripts: Path, names: list[str]) -> int:
    every = cases()
    answers = ask(home, scripts, {name: row for name, row in every.items() if not names or name in names})
    own = {row["architecture"]: row for row in rows()} if FACTS.is_file() else {}
    own |= {name: whole(every[name], both) for name, both in answers.items()}
    own = {name: marked(own[name]) for name in sorted(own)}
    lines = [json.dumps(row) + "\n" for row in own.values()]
    FACTS.write_text("".join(lines), encoding="utf-8")
    counts: Counter[str] = Counter()
    for name, row in own.items():
        state, why = outcome(row) if "ranks" in row else (oracles.NOT_ASKED, row.get("why", "not asked"))
        counts[state] += 1
        if state != oracles.EQUAL:
            print(f"{name}: {state}: {why[:160]}")
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
