"""What the atlas shows beside its numbers: every logged server's figures and ours, and figures that others published.

    python benchmarks/proof.py [--write]

Rows of tests/facts/server_cases.csv and server_cases_unseen.csv are predicted from their inputs alone, with constants
fitted without the thread they come from; those of published_figures.csv are planned as they stand. --write rewrites
kvplan/report/proof.csv, without it the table is printed. tests/benchmarks/test_proof.py checks that it is current.
"""

import csv
import io
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python benchmarks/proof.py` works from anywhere

from benchmarks.accuracy.cases import Models, called  # noqa: E402 -- after the path
from benchmarks.accuracy.summary import Prediction  # noqa: E402 -- after the path
from benchmarks.scoreboard import FACTS, scoreboard  # noqa: E402 -- after the path
from kvplan.asked.call import KEYWORDS, form_of  # noqa: E402 -- after the path
from kvplan.asked.form import read_form  # noqa: E402 -- after the path
from kvplan.asked.question import requests  # noqa: E402 -- after the path
from kvplan.core.units import GIB  # noqa: E402 -- after the path
from kvplan.documents.artifact import plan_document  # noqa: E402 -- after the path
from kvplan.planning.plan import Plan, plan  # noqa: E402 -- after the path
from kvplan.report.proof import PROOF, Proof  # noqa: E402 -- after the path

UNSEEN = FACTS.with_name("server_cases_unseen.csv")
PUBLISHED = FACTS.with_name("published_figures.csv")
# What a log's pool is compared by, the first that it has; weights beside it.
POOLS = ("available_kv", "tokens", "blocks", "concurrency", "free_after_pool")


def rows() -> list[Proof]:
    """Logged servers in the order of their files, then published figures."""
    return [*logged(), *published()]


def logged() -> Iterator[Proof]:
    for path in (FACTS, UNSEEN):
        with path.open(encoding="utf-8", newline="") as file:
            urls = {row["id"]: row["url"] for row in csv.DictReader(file)}
        by_case: dict[str, dict[str, Prediction]] = {}
        for prediction in scoreboard(path, Models()).predictions:
            by_case.setdefault(prediction.case, {})[prediction.part] = prediction
        for case, parts in by_case.items():
            pool = next((parts[name] for name in POOLS if name in parts), None)
            for row in (pool, parts.get("weights")):
                if row is not None:
                    yield proof_of(row, urls[case])


def proof_of(row: Prediction, url: str) -> Proof:
    name = called(row.model) or called(row.model.rpartition("/")[2]) or ""
    gpu = "" if row.gpu in ("custom", "not named") else row.gpu
    release = row.version if row.version.startswith("SGLang") else f"vLLM {row.version}"
    return Proof(
        "log", row.case, row.source, url, row.model, name, gpu, release, row.tp, row.part,
        f"{row.logged:.9g}", f"{row.predicted:.9g}", "", "", "",
    )  # fmt: skip


def published() -> Iterator[Proof]:
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            the_plan = planned(row)
            own = {
                "tokens": the_plan.capacity.tokens,
                "context": the_plan.capacity.max_model_len,
                "available_kv": plan_document(the_plan)["memory"]["available"] / GIB,
            }[row["what"]]
            name = the_plan.request.spec.name
            yield Proof(
                "published", "", row["source"], row["url"], name, name, row["gpu"], the_plan.request.release.label,
                int(row["gpus"]), row["what"], row["logged"], f"{own:.9g}", row["theirs"], row["their_planner"],
                row["remark"],
            )  # fmt: skip


def planned(row: dict[str, str]) -> Plan:
    """The plan of a published figure, from its inputs alone."""
    words = shlex.split(row["arguments"])
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    values = [True if word == "true" else word for word in words[1::2]]
    options = dict(zip(names, values, strict=True))
    form = form_of(options, KEYWORDS, model=row["model"], gpu=[row["gpu"]], engine=row["release"], offline=True)
    (request,) = requests(read_form(form)).requests
    return plan(request)


def text() -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(Proof._fields)
    writer.writerows(rows())
    return out.getvalue()


def main(argv: list[str]) -> int:
    if argv == ["--write"]:
        PROOF.write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
