"""How far kvplan is from what servers printed: every case predicted from its inputs alone, beside its log.

    python benchmarks/scoreboard.py DATA [--models DIR] [--json FILE] [--facts FILE] [--report]

DATA is JSON Lines or CSV, as tests/facts/server_cases.csv. DIR holds checkpoints' own configs, in folders `org__name`,
which go before the catalog's. Constants that are not derivable come from the threads of the facts file other than a
case's own, of the logs that it marks as fitted; releases without such a log are scored apart.
--report rewrites reports/accuracy and the README's section from the scores.

Exit codes: 0 scored, 2 the file cannot be read or no case in it can be scored.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python benchmarks/scoreboard.py` works from anywhere

from benchmarks.accuracy import fit, report, summary  # noqa: E402 -- after the path
from benchmarks.accuracy.cases import Case, Malformed, Models, read_cases  # noqa: E402 -- after the path
from benchmarks.accuracy.scoring import Refused, Scored, score_case  # noqa: E402 -- after the path
from benchmarks.accuracy.summary import Board  # noqa: E402 -- after the path
from kvplan.core.errors import KvplanError, UsageError  # noqa: E402 -- after the path
from kvplan.core.files import os_problem, path_text  # noqa: E402 -- after the path

FACTS = ROOT / "tests" / "facts" / "server_cases.csv"
UNSEEN = FACTS.with_name("server_cases_unseen.csv")


def scoreboard(data: Path, models: Models, facts: Path = FACTS) -> Board:
    """Read, predict, compare."""
    rows = list(read_cases(data))
    results = [score_case(row, models) for row in rows if isinstance(row, Case)]
    scored = [result for result in results if isinstance(result, Scored)]
    known = scored if data.resolve() == facts.resolve() else fit.scored_only(known_cases(facts), models)
    training = [result for result in known if result.case.fitted]
    others = fit.scored_only(known_cases(UNSEEN), models) if data.resolve() == FACTS else []
    points = [point for result in training for point in fit.points_of(result)]
    return summary.board(
        path_text(data),
        scored,
        [result for result in results if isinstance(result, Refused)],
        [row for row in rows if isinstance(row, Malformed)],
        fit.cross_validated(scored, training),
        fit.fitted(points),
        training,
        fit.cross_validated([*scored, *others], training, summary.family),
    )


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise os_problem(path, error) from None


def known_cases(facts: Path) -> list[Case]:
    return [row for row in read_cases(facts) if isinstance(row, Case)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", type=Path, help="folder of configs, org__name/config.json")
    parser.add_argument("--json", type=Path, help="write the scoreboard as JSON here")
    parser.add_argument("--facts", type=Path, default=FACTS, help="cases the constants are fitted on")
    parser.add_argument("--report", action="store_true", help="rewrite reports/accuracy and the README's section")
    options = parser.parse_args(argv)
    try:
        if options.models is not None and not options.models.is_dir():
            raise UsageError(
                f"--models {path_text(options.models)}: is not a directory; name the folder of org__name folders"
            )
        board = scoreboard(options.data, Models(options.models), options.facts)
        if options.report:
            report.write_report(board, ROOT / "reports" / "accuracy", ROOT / "README.md")
        if options.json:
            write(options.json, json.dumps(summary.as_json(board), indent=1) + "\n")
    except KvplanError as error:
        print(f"scoreboard: error: {error}", file=sys.stderr)
        return error.exit_code
    for row in board.malformed:
        print(f"scoreboard: {path_text(options.data)}, line {row.line}: {row.why}; skipped", file=sys.stderr)
    if not board.lines:
        print(f"scoreboard: error: {path_text(options.data)}: no case in it can be scored", file=sys.stderr)
        return 2
    sys.stdout.write(summary.as_text(board))
    return 0


if __name__ == "__main__":
    sys.exit(main())
