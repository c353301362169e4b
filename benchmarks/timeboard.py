"""How far kvplan's times are from those of real servers: every published result predicted from its inputs alone.

    python benchmarks/timeboard.py FACTS... [--json FILE] [--jobs N] [--every N] [--fitted] [--unseen] [--others]
        [--peer FILE] [--report] [--ranges]

FACTS are JSON Lines or CSV, as tests/facts/time_cases.csv; a result that several files have counts once. It is
predicted with hosts that were fitted without its kind (model family, weight format, GPU generation, release:
benchmarks/timing/folds.json), with --fitted as shipped. Left out are results that contradict themselves and servers
that kvplan does not plan, unless --others asks for them alone (predicted as vLLM, whose host no result of them has
changed); first tokens that come sooner under a heavier load; families that no constant has seen, unless --unseen asks
for them alone. --every 10 takes each tenth row.
--peer FILE sets aiconfigurator's times (benchmarks/timing/peer.py) beside kvplan's on the same results. Ranges are
those that `simulate` states. --report takes them from the other kinds among FACTS, and rewrites
reports/accuracy/time.md and the table in docs/accuracy.md; --ranges rewrites what answers say of their ranges
(kvplan/simulate/held_out.csv).

Exit codes: 0 scored, 2 the file cannot be read or nothing in it can be scored.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

NEAR = 0.001  # relative difference of the same time, rounded
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path or ".").resolve() != ROOT / "benchmarks")]

from benchmarks.timing import bounds, report, scores  # noqa: E402 -- after the path
from benchmarks.timing.facts import MAX_BYTES, Fact, Malformed, name_of, read_facts  # noqa: E402 -- after the path
from benchmarks.timing.kinds import is_faulty, is_held, warming  # noqa: E402 -- after the path
from benchmarks.timing.predict import OWN, Predicted, predicted_by_kvplan  # noqa: E402 -- after the path
from kvplan.core.errors import KvplanError  # noqa: E402 -- after the path
from kvplan.core.files import read_text  # noqa: E402 -- after the path


@dataclass(frozen=True, slots=True)
class Refused:
    fact: Fact
    why: str

    @property
    def text(self) -> str:
        return f"{name_of(self.fact)} on {self.fact.tp} x {self.fact.gpu}: {self.why}"


def answered(fact: Fact, *, as_shipped: bool) -> Predicted | Refused:
    try:
        return predicted_by_kvplan(fact, as_shipped=as_shipped)
    except KvplanError as error:
        return Refused(fact, str(error))


def predictions(facts: Sequence[Fact], jobs: int, *, as_shipped: bool) -> list[Predicted | Refused]:
    answer = partial(answered, as_shipped=as_shipped)
    if jobs == 1:
        return list(map(answer, facts))
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(answer, facts, chunksize=8))


def is_judged(fact: Fact, *, is_unseen: bool, of_others: bool = False) -> bool:
    """Whether a result is of a server that kvplan plans, contradicts nothing, and is of a family to be looked at."""
    return (fact.engine in OWN) != of_others and not is_faulty(fact) and is_held(fact) == is_unseen


def results(paths: Sequence[Path]) -> tuple[list[Fact], int]:
    """(results of files, each once as the last file has it, and how many rows cannot be read)."""
    rows = [row for path in paths for row in read_facts(path)]
    servers: dict[tuple[Any, ...], list[Fact]] = defaultdict(list)
    for row in rows:
        if isinstance(row, Fact):
            own = servers[row.engine, row.version, row.gpu, row.users, row.rate, row.input_len, row.output_len]
            own[:] = [*(other for other in own if not is_same(row, other)), row]
    return [fact for own in servers.values() for fact in own], sum(isinstance(row, Malformed) for row in rows)


def is_same(fact: Fact, other: Fact) -> bool:
    """Whether two results of a load have the same times, however their files name the model and its ranks."""
    times = [(fact.measured.get(name), other.measured.get(name)) for name in ("tpot_mean", "ttft_mean")]
    return fact.src != other.src and all(mine and theirs and abs(mine / theirs - 1) < NEAR for mine, theirs in times)


def board(
    paths: Sequence[Path], every: int, jobs: int, *, as_shipped: bool = False, is_unseen: bool = False,
    of_others: bool = False,
) -> report.Board:  # fmt: skip
    rows, num_malformed = results(paths)
    facts = [row for row in rows if is_judged(row, is_unseen=is_unseen, of_others=of_others)][::every]
    answers, cold = predictions(facts, jobs, as_shipped=as_shipped), warming(facts)
    points = tuple(
        point
        for fact, answer in zip(facts, answers, strict=True)
        if isinstance(answer, Predicted)
        for point in scores.points(fact, answer)
        if point.metric != "ttft" or (fact.src, fact.id) not in cold
    )
    return report.Board(
        ", ".join(path.name for path in paths),
        "fitted, as shipped" if as_shipped else "without its kind",
        every,
        len(facts),
        points,
        Counter(answer.text for answer in answers if isinstance(answer, Refused)),
        num_malformed,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the scoreboard as JSON here")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--every", type=int, default=1, help="take each N-th row only")
    parser.add_argument("--fitted", action="store_true", help="the shipped constants also for sources they saw")
    parser.add_argument("--unseen", action="store_true", help="the model families that no constant has seen")
    parser.add_argument("--others", action="store_true", help="servers that kvplan does not plan, as if they were vLLM")
    parser.add_argument("--peer", type=Path, help="aiconfigurator's times, from benchmarks/timing/peer.py")
    parser.add_argument("--report", action="store_true", help="rewrite reports/accuracy/time.md and docs/accuracy.md")
    parser.add_argument("--ranges", action="store_true", help="rewrite kvplan/simulate/held_out.csv")
    options = parser.parse_args(argv)
    try:
        every, jobs = max(1, options.every), max(1, options.jobs)
        points = board(
            options.facts, every, jobs, as_shipped=options.fitted, is_unseen=options.unseen, of_others=options.others
        )
        if options.peer:
            rows = map(json.loads, read_text(options.peer, MAX_BYTES).splitlines())
            points = replace(points, peer={row["id"]: row for row in rows})
    except KvplanError as error:
        print(f"timeboard: error: {error}", file=sys.stderr)
        return error.exit_code
    if not points.points:
        print(f"timeboard: error: {points.name}: nothing in it can be scored", file=sys.stderr)
        return 2
    if options.report:
        points = replace(points, points=tuple(bounds.by_others(points.points)))
    if options.json:
        content: dict[str, Any] = report.document(points)
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.report:
        report.write(points, ROOT)
    if options.ranges:
        bounds.write(points.own)
    sys.stdout.write(report.text(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
