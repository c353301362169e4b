"""reports/accuracy and the README's section, written from a scoreboard."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill

from benchmarks.accuracy.summary import Bad, Board, Line, Prediction, as_json, percent
from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text
from kvplan.report.proof import WHAT, error_text, figure, proofs, theirs_of

COMMAND = "python benchmarks/scoreboard.py tests/facts/server_cases.csv --report"
BEGIN, END = "<!-- accuracy: written by `{}` -->", "<!-- accuracy: end -->"
NAMES = {
    "weights": "weights",
    "activation": "activation peak",
    "non_torch": "non-torch memory",
    "graphs": "CUDA graphs",
    "available_kv": "KV memory, from the inputs alone",
    "blocks": "blocks, from the inputs alone",
    "tokens": "tokens, from the inputs alone",
    "concurrency": "concurrency, from the inputs alone",
    "blocks given KV": "blocks, given the logged KV memory",
    "tokens given KV": "tokens, given the logged KV memory",
    "concurrency given KV": "concurrency, given the logged KV memory",
    "given blocks or tokens": "concurrency, given the logged blocks or tokens",
    "free_after_load": "memory free after loading (SGLang)",
    "free_after_pool": "memory free after the pool (SGLang)",
    "pool given free memory": "pool, given the memory free after loading (SGLang)",
    "tokens given free memory": "tokens, given the memory free after loading (SGLang)",
}


def replaced(text: str, content: str, where: Path) -> str:
    """The text with what stands between the marks rewritten."""
    begin = BEGIN.format(COMMAND)
    if text.count(begin) != 1 or text.count(END) != 1 or text.index(begin) > text.index(END):
        raise InvalidInputError(f"{path_text(where)}: has no marks to write between; put {begin!r} and {END!r} into it")
    head, _, tail = text.partition(begin)
    return f"{head}{begin}\n\n{content}\n{END}{tail.partition(END)[2]}"


WORDS = ("predicted", "what", "why", "exact", "source")  # columns that are read, not compared


def prose(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    rule = "".join("---|" if name in WORDS or i == 0 else "---:|" for i, name in enumerate(header))
    return "\n".join([cells[0], "|" + rule, *cells[1:]]) + "\n"


def part_rows(lines: Iterable[Line]) -> list[list[str]]:
    rows = []
    for line in lines:
        exact = ""
        if line.exact is not None:
            exact = f"{line.exact} of {line.n}" + (f", {line.explained} more explained" if line.explained else "")
        rows.append(
            [NAMES[line.part], str(line.n), percent(line.median), percent(line.p90), percent(line.max),
             percent(line.share_p90), percent(line.covered), percent(line.width), exact]
        )  # fmt: skip
    return rows


PARTS_HEADER = (
    "predicted", "n", "median error", "p90", "worst", "p90, % of the GPU", "in printed range", "its width", "exact"
)  # fmt: skip


def bad_row(bad: Bad) -> list[str]:
    model = bad.model.rpartition("/")[2]
    return [f"{model}, {bad.version}", NAMES[bad.part], f"{bad.predicted:,.2f}", f"{bad.logged:,.2f}",
            percent(bad.relative), bad.reason]  # fmt: skip


BAD_HEADER = ("case", "what", "kvplan", "logged", "error", "why")


# --- the same cases by others -----------------------------------------------------------------------------------------

# GiB per GPU that llm-d planner (told 79.18 GiB) and aiconfigurator 0.12 (H100 80 GB) answered in November 2026 for the
# runs of llm-d-planner's docs/empirical-vllm-memory-results.md.
PEERS = Path(__file__).resolve().parents[2] / "tests" / "facts" / "peers_kv.csv"
PEER_NAMES = {"llm_d_planner_gib": "llm-d planner", "aiconfigurator_gib": "aiconfigurator 0.12"}


def peer_rows(board: Board) -> list[list[str]]:
    """KV GiB per GPU of each case that others were asked too; the last row has the mean errors."""
    own = {
        (prediction.model, prediction.tp, prediction.max_model_len): prediction
        for prediction in board.predictions
        if prediction.part == "available_kv"
    }
    rows: list[list[str]] = []
    errors: dict[str, list[float]] = {name: [] for name in ("kvplan", *PEER_NAMES)}
    for row in csv.DictReader(io.StringIO(PEERS.read_text(encoding="utf-8"))):
        logged = float(row["measured_gib"])
        mine = own.get((row["model"], int(row["tp"]), int(row["max_model_len"])))
        if mine is None:
            continue
        cells = [f"{row['model'].rpartition('/')[2]}, TP {row['tp']}", f"{logged:.2f}"]
        for name, value in (("kvplan", mine.predicted), *((peer, row[peer]) for peer in PEER_NAMES)):
            if value == "":
                cells.append("refused")
                continue
            error = (float(value) - logged) / logged
            errors[name].append(abs(error))
            cells.append(f"{float(value):.2f} ({100 * error:+.1f}%)")
        rows.append(cells)
    if rows:
        rows.append(["mean error", "", *(percent(mean(value)) for value in errors.values())])
    return rows


PEER_HEADER = ("GiB for KV per GPU", "logged", "kvplan", *PEER_NAMES.values())


# --- pages ------------------------------------------------------------------------------------------------------------


def given_share(board: Board) -> tuple[int, int, int]:
    """(exact, explained, all) numbers that follow from a logged pool."""
    lines = [line for line in board.validated if line.exact is not None]
    return sum(line.exact or 0 for line in lines), sum(line.explained or 0 for line in lines), sum(n.n for n in lines)


PUBLISHED_HEADER = ("model, GPUs, release", "logged", "kvplan, from the inputs alone", "another planner", "source")


def published_rows() -> list[list[str]]:
    """Figures of other people's threads: logged, ours, and theirs where one was published."""
    rows = []
    for row in proofs():
        if row.kind != "published":
            continue
        ours = f"{figure(row.predicted)} ({error_text(row.error)})" + (" *" if row.remark.startswith("assumed") else "")
        ours += " **" if row.remark and not row.remark.startswith("assumed") else ""
        server = f"{row.name}, {row.num_gpus} x {row.gpu}, {row.server.partition('@')[2]}"
        link = f"[{row.source.rpartition('/')[2]}]({row.url})"
        rows.append([server, f"{figure(row.logged)} {WHAT[row.what]}", ours, theirs_of(row) or "-", link])
    return rows


KINDS_HEADER = ("layers", "weights: logs", "median", "worst", "KV memory: logs", "median", "9 in 10 within", "worst")


def held_out_rows(board: Board) -> list[list[str]]:
    """Each kind of model, predicted with constants that were fitted on other families."""
    rows = []
    for name, lines in board.held_out.items():
        parts = {line.part: line for line in lines}
        weights, pool = parts.get("weights"), parts.get("available_kv")
        cells = [str(weights.n), percent(weights.median), percent(weights.max)] if weights else ["0", "", ""]
        cells += (
            [str(pool.n), percent(pool.median), percent(pool.p90), percent(pool.max)] if pool else ["0", "", "", ""]
        )
        rows.append([name, *cells])
    return rows


def readme_section(board: Board) -> str:
    """What the README says: figures of others, each kind of model held out, the peers."""
    cover = board.coverage
    exact, explained, total = given_share(board)
    published = [row for row in proofs() if row.kind == "published"]
    near = sum(abs(row.error) < 0.05 for row in published)
    opening = (
        f"Figures nobody here fitted: all {len(published)} that we found in threads of other projects with enough "
        f"inputs to plan from, {near} of them within 5%. `*`: the thread does not state the utilization or release; "
        "`**`: the rule was written with this log at hand."
    )
    kinds = (
        f"{cover.cases} start-up logs that people posted, and 40 that nothing was fitted on: each predicted with "
        "constants that were fitted without its model family."
    )
    refusals = "; ".join(f"{count}: {why}" for why, count in list(cover.refused.items())[:3])
    refused = (
        f"{cover.scorable} of the {cover.cases} state a release and a model of the catalog; kvplan predicts "
        f"{cover.predicted} ({cover.share:.0%}) and refuses the others, mostly for ({refusals}). Given the logged KV "
        f"cache size it reproduces {exact} of {total} other logged numbers to the log's rounding; {explained} more "
        f"need a fact that the log lacks, {total - exact - explained} do not match."
    )
    pointer = (
        "[reports/accuracy](reports/accuracy/README.md) has every part by version, family, GPU and quantization, and "
        "the largest errors with their causes. `python benchmarks/scoreboard.py FILE` scores a file of your own."
    )
    return "\n".join(
        [
            prose(opening),
            "",
            markdown(PUBLISHED_HEADER, published_rows()),
            prose(kinds),
            "",
            markdown(KINDS_HEADER, held_out_rows(board)),
            prose(refused),
            "",
            "Other planners on the same start-ups, vLLM 0.11 on H100 (llm-d planner's constants were fitted on them):",
            "",
            markdown(PEER_HEADER, peer_rows(board)),
            prose(pointer),
            "",
        ]
    )


def page_section(board: Board) -> str:
    """The tables of the page."""
    cover = board.coverage
    out = [
        f"{cover.cases} cases, {cover.scorable} scorable, {cover.predicted} predicted ({cover.share:.0%}).",
        "",
        "## By part",
        "",
        markdown(PARTS_HEADER, part_rows(board.validated)),
        "With the constants kvplan ships, which were fitted on more logs than these, some of these among them:",
        "",
        markdown(PARTS_HEADER, part_rows(board.lines)),
        "## Releases the constants were fitted on, and others",
        "",
        f"Logs of {', '.join(board.fitted_on)} gave the constants of the sampler and of non-torch memory.",
        "",
        *(
            line
            for name, lines in board.standings.items()
            for line in (f"{name}:", "", markdown(PARTS_HEADER, part_rows(lines)))
        ),
        "## The worst ten",
        "",
        markdown(BAD_HEADER, map(bad_row, board.worst)),
        "## What does not follow from the logged pool, or only with one thing more",
        "",
        markdown(BAD_HEADER, map(bad_row, board.worst_pool)),
        "## The same cases by others",
        "",
        markdown(PEER_HEADER, peer_rows(board)),
    ]
    for name, groups in board.groups.items():
        rows = [[group, *row] for group, lines in groups.items() for row in part_rows(lines)]
        out += [f"## By {name}", "", markdown((name, *PARTS_HEADER), rows)]
    out += ["## What was not predicted", ""]
    for title, counted in (
        ("kvplan refuses", cover.refused), ("not asked", cover.own_builds),
        ("part of a case was not asked", cover.not_asked), ("not scorable", cover.unscorable),
    ):  # fmt: skip
        if counted:
            out += [markdown((title, "cases"), [[why, str(count)] for why, count in counted.items()])]
    rows = [
        [
            constant.kind,
            f"{constant.value:.2f}",
            f"{constant.low:.2f}-{constant.high:.2f}",
            str(constant.logs),
            str(constant.threads),
        ]
        for constant in board.constants
    ]
    out += [
        "## Constants as these cases give them",
        "",
        "The median over threads of each thread's median; bytes per sequence and vocabulary entry, or GiB.",
        "",
        markdown(("constant", "value", "spread", "logs", "threads"), rows),
    ]
    return "\n".join(out)


def predictions_csv(rows: Iterable[Prediction]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["case", "thread", "source", "model", "version", "gpu", "tp", "part", "predicted", "shipped",
                     "logged", "error", "exact", "rule", "logs"])  # fmt: skip
    for row in rows:
        writer.writerow(
            [row.case, row.thread, row.source, row.model, row.version, row.gpu, row.tp, row.part,
             f"{row.predicted:.6g}", f"{row.shipped:.6g}", f"{row.logged:.9g}", f"{row.error:.6f}", row.exact,
             row.rule or "", row.standing]
        )  # fmt: skip
    return out.getvalue()


def write_report(board: Board, folder: Path, readme: Path) -> None:
    """The JSON, the CSV, the figure, the page's tables and the README's section."""
    folder.mkdir(parents=True, exist_ok=True)
    document = as_json(board)
    del document["predictions"]  # predictions.csv has them
    (folder / "scoreboard.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "predictions.csv").write_text(predictions_csv(board.predictions), encoding="utf-8")
    draw(board.predictions, folder / "accuracy.png")
    page = folder / "README.md"
    page.write_text(replaced(page.read_text(encoding="utf-8"), page_section(board), page), encoding="utf-8")
    readme.write_text(replaced(readme.read_text(encoding="utf-8"), readme_section(board), readme), encoding="utf-8")


ERAS = (("0.4 to 0.7", 8), ("0.8 to 0.10", 11), ("0.11 to 0.16", 17), ("0.17 to 0.33", 99))
COLORS = ("#1f6f8b", "#d1781f", "#4d8b3f", "#7a4fa3")
CLIP = 20  # per cent; what lies beyond is drawn in the outermost bars


def era(version: str) -> str:
    if version.startswith("SGLang"):
        return "SGLang"
    return next(name for name, below in ERAS if int(version.removeprefix("0.")) < below)


def draw(rows: Sequence[Prediction], path: Path) -> None:
    """Predicted against logged sizes, and how the errors of the pool spread, by release."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    groups = [[row for row in rows if era(row.version) == name] for name, _ in ERAS]
    for (name, _), color, group in zip(ERAS, COLORS, groups, strict=True):
        for part, mark in (("weights", "o"), ("available_kv", "^")):
            points = [point for point in group if point.part == part and point.logged > 0 and point.predicted > 0]
            left.plot([point.logged for point in points], [point.predicted for point in points], mark, color=color,
                      markersize=5, alpha=0.75, label=name if part == "weights" else None)  # fmt: skip
    left.plot([0.1, 150], [0.1, 150], color="0.6", linewidth=0.8, zorder=0)
    left.set(xscale="log", yscale="log", xlabel="logged, GiB per GPU", ylabel="predicted, GiB per GPU",
             title="Weights (circles) and KV memory (triangles)")  # fmt: skip
    left.legend(title="vLLM", frameon=False)
    errors = [
        [min(CLIP, max(-CLIP, 100 * point.error)) for point in group if point.part == "available_kv"]
        for group in groups
    ]
    right.hist(errors, bins=[bound - 0.5 for bound in range(-CLIP, CLIP + 2)], stacked=True, color=list(COLORS))
    right.set(xlabel=f"error of the KV memory, % (beyond {CLIP} in the outermost bars)", ylabel="cases",
              title="From the inputs alone, by release")  # fmt: skip
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
