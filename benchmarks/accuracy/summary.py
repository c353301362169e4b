"""Scores as tables: by part, by what cases have in common, the worst with reasons, and what was refused."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from benchmarks.accuracy.cases import Inputs, Malformed, known
from benchmarks.accuracy.fit import Constant, Validated, points_of
from benchmarks.accuracy.scoring import GIVEN, PARTS, UNNAMED, Refused, Score, Scored
from kvplan.core.files import printable
from kvplan.models.quant import scheme_name
from kvplan.servers.vllm import rules as vllm


@dataclass(frozen=True, slots=True)
class Line:
    """Absolute relative errors of one part: shares of 1; `exact` counts those within the log's rounding, `explained`
    those that are with one thing more known, `share_p90` is in shares of the GPU's memory. Of what has a printed range,
    `covered` is the share of the logged numbers that lie in it, and `width` the median of its widths, as shares of the
    logged numbers."""

    part: str
    n: int
    median: float
    p90: float
    max: float
    exact: int | None = None
    explained: int | None = None
    share_p90: float | None = None
    covered: float | None = None
    width: float | None = None


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def line_of(part: str, scores: Sequence[Score]) -> Line:
    errors = [score.relative for score in scores]
    shares = [score.share for score in scores if score.share is not None]
    ranges = [(score.logged, *score.ends) for score in scores if score.ends is not None]
    return Line(
        part,
        len(errors),
        statistics.median(errors),
        quantile(errors, 0.9),
        max(errors),
        exact=sum(score.exact for score in scores) if part in GIVEN else None,
        explained=sum(score.rule is not None for score in scores) if part in GIVEN else None,
        share_p90=quantile(shares, 0.9) if shares else None,
        covered=statistics.mean(is_within(*bounds) for bounds in ranges) if ranges else None,
        width=median_width(ranges) if ranges else None,
    )


def median_width(ranges: Sequence[tuple[float, float, float]]) -> float | None:
    """Of (logged, low, high), without those whose server logged no memory at all."""
    widths = [(high - low) / abs(logged) for logged, low, high in ranges if logged]
    return statistics.median(widths) if widths else None


HALF_DIGIT = 0.005  # GiB: a log prints two digits


def is_within(logged: float, low: float, high: float) -> bool:
    return low - HALF_DIGIT <= logged <= high + HALF_DIGIT


def lines_of(scores: Iterable[Score]) -> list[Line]:
    """One line per part that has scores."""
    by_part: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        by_part[score.part].append(score)
    return [line_of(part, by_part[part]) for part in (*PARTS, *GIVEN) if part in by_part]


def family(scored: Scored) -> str:
    return scored.inputs.spec.model_type


def release(scored: Scored) -> str:
    if scored.case.engine == "sglang":  # whose builds are no releases of vLLM
        numbered = re.match(r"0\.[0-9]+", scored.case.version or "")
        return f"SGLang {numbered[0] if numbered else 'of ' + (scored.case.version or 'no date')}"
    return f"0.{scored.inputs.number[1]}"


def device(scored: Scored) -> str:
    return scored.inputs.gpu.name if scored.inputs.gpu else "not named"


def storage(scored: Scored) -> str:
    quantization = scored.inputs.spec.quantization
    if scored.inputs.args.quantization:
        return f"{scored.inputs.args.quantization} while loading"
    if quantization is None:
        return "16 bit"
    return scheme_name(quantization) if quantization.known else "not stated"


def traits(scored: Scored) -> list[str]:
    spec = scored.inputs.spec
    known = ("states", spec.has_states), ("latents", spec.is_mla), ("experts", spec.experts_per_token > 0)
    return [name for name, has in known if has] or ["dense"]


def layers(scored: Scored) -> str:
    """The rarest of what a model's layers are; an encoder beside them, of those that have no rare ones."""
    name = traits(scored)[0]
    return name + (", encoder" if scored.inputs.spec.multimodal and name in ("dense", "experts") else "")


def kind(scored: Scored) -> str:
    """What a model's layers are, and on how many ranks."""
    several = scored.inputs.args.tensor_parallel_size * scored.inputs.args.pipeline_parallel_size > 1
    encoder = ", encoder" if scored.inputs.spec.multimodal else ""
    return " and ".join(traits(scored)) + encoder + (", several ranks" if several else "")


GROUPINGS: dict[str, Callable[[Scored], str]] = {
    "version": release, "kind": kind, "family": family, "GPU": device, "quantisation": storage,
}  # fmt: skip
GROUPED_PARTS = ("weights", "available_kv", "concurrency given KV")


def grouped(results: Iterable[tuple[Scored, Sequence[Score]]], key: Callable[[Scored], str]) -> dict[str, list[Line]]:
    groups: dict[str, list[Score]] = defaultdict(list)
    for scored, scores in results:
        groups[key(scored)] += [score for score in scores if score.part in GROUPED_PARTS]
    return {name: lines_of(groups[name]) for name in in_order(groups) if groups[name]}


def in_order(names: Iterable[str]) -> list[str]:
    """Names with their numbers counted, not spelled: 0.9 before 0.10."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


@dataclass(frozen=True, slots=True)
class Bad:
    """One prediction that is off, and why."""

    case: str
    source: str
    model: str
    version: str
    part: str
    predicted: float
    logged: float
    relative: float
    reason: str


OFF = 0.2  # GiB beyond which an error of the pool is put down to another part of the same log


def reason_of(scored: Scored, scores: Sequence[Score], score: Score) -> str:
    """Why a prediction is off: what was reviewed for its source, else what the other parts of the same log say."""
    spec, args = scored.inputs.spec, scored.inputs.args
    for entry in known()["reasons"]:
        named = (scored.case.model or "").lower()
        meant = any(model in named for model in entry.get("models", [""]))
        if scored.case.source.startswith(entry["source"]) and score.part in entry["parts"] and meant:
            return str(entry["why"])
    by_part = {score.part: score for score in scores}
    if score.rule is not None:
        return score.rule
    if score.part in GIVEN:
        if spec.has_states:
            return "whether states were checkpointed, and with how many draft tokens, is not stated"
        return "not explained"
    if score.part in ("available_kv", "blocks", "tokens", "concurrency"):
        parts = ["weights", "activation", "non_torch"]
        parts += ["graphs"] if graphs_in_budget(scored.inputs) else []
        off = {name: abs(by_part[name].error) for name in parts if name in by_part}
        if off and max(off.values()) > OFF:
            worst = max(off, key=lambda name: off[name])
            return f"follows from {worst.replace('_', '-')} ({by_part[worst].error:+.2f} GiB)"
    if score.part in ("activation", "available_kv", "blocks", "tokens", "concurrency"):
        if args.num_speculative_tokens or "MTP" in scored.case.flags:
            return "what a draft head and its graphs take is not modelled"
        if spec.multimodal:
            return "the encoder's peak is not the modeled one"
        if args.tensor_parallel_size > 1 and vllm.is_v0(scored.inputs.release, 80):
            return "the first engine samples on its first rank alone; the log quotes another"
        if (0, 8) <= scored.inputs.number < (0, 11):
            return "FlashInfer's sampler, where installed, needs a quarter of the memory"
    if score.part == "graphs":
        return "CUDA graph pools scatter; the estimate follows their number alone"
    if score.part == "non_torch":
        return "non-torch memory differs by driver, libraries and rank"
    return "not explained"


def graphs_in_budget(inputs: Inputs) -> bool:
    """Whether the server of a case took an estimate of its CUDA graphs off its budget."""
    return vllm.resolve(inputs.spec, inputs.gpu or UNNAMED, inputs.args, inputs.release).graphs_in_budget


def worst_of(results: Iterable[tuple[Scored, Sequence[Score]]], parts: Sequence[str], count: int) -> list[Bad]:
    bad_cases = [
        Bad(
            scored.case.id,
            printable(scored.case.source, 60),
            printable(scored.case.model or "", 50),
            release(scored),
            score.part,
            score.predicted,
            score.logged,
            score.relative,
            reason_of(scored, scores, score),
        )
        for scored, scores in results
        for score in scores
        if score.part in parts and not score.exact
    ]
    return sorted(bad_cases, key=lambda bad: -bad.relative)[:count]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Cases by what became of them; `own_builds` are whole cases that were not asked, `not_asked` parts of cases."""

    cases: int
    scorable: int
    predicted: int
    refused: Mapping[str, int]
    unscorable: Mapping[str, int]
    not_asked: Mapping[str, int]
    own_builds: Mapping[str, int]

    @property
    def share(self) -> float:
        return self.predicted / self.scorable if self.scorable else 0.0


def coverage(scored: Sequence[Scored], refused: Sequence[Refused]) -> Coverage:
    """A case counts as predicted when at least one of its numbers is."""
    predicted = [result for result in scored if result.scores]
    silent = [result for result in scored if not result.scores]
    reasons = [why for result in scored for _, why in result.refused if not why.startswith("not asked")]
    not_asked = [
        why.removeprefix("not asked: ") for result in scored for _, why in result.refused if why.startswith("not")
    ]
    return Coverage(
        len(scored) + len(refused),
        len(predicted) + sum(bool(result.refused) for result in silent) + sum(result.scorable for result in refused),
        len(predicted),
        counts([*(result.why for result in refused if result.scorable), *reasons]),
        counts(result.why for result in refused if not result.scorable and result.in_scope),
        counts(not_asked),
        counts(result.why for result in refused if not result.in_scope),
    )


def counts(reasons: Iterable[str]) -> dict[str, int]:
    """How often each reason was given, the commonest first."""
    return dict(Counter(general(why) for why in reasons).most_common())


def general(why: str) -> str:
    """A reason without the model's name before it and the advice behind it."""
    head, _, tail = why.partition(": ")
    return printable((tail or head).partition(";")[0], 100)


# --- seen and never seen ----------------------------------------------------------------------------------------------

FITTED = "vLLM releases that the constants were fitted on"
NOT_FITTED = "vLLM releases that the constants were never fitted on"
SGLANG = "SGLang, where nothing is fitted"


def standing(scored: Scored, fitted_on: Collection[str]) -> str:
    """Whether a case's release gave any log to the constants."""
    if scored.case.engine == "sglang":
        return SGLANG
    return FITTED if release(scored) in fitted_on else NOT_FITTED


def by_standing(
    results: Iterable[tuple[Scored, Sequence[Score]]], fitted_on: Collection[str]
) -> dict[str, list[Line]]:  # fmt: skip
    """One table for each standing that has scores."""
    groups: dict[str, list[Score]] = {FITTED: [], NOT_FITTED: [], SGLANG: []}
    for scored, scores in results:
        groups[standing(scored, fitted_on)] += scores
    return {name: lines_of(scores) for name, scores in groups.items() if scores}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One number of one case: validated, as shipped, and logged."""

    case: str
    thread: str
    source: str
    model: str
    version: str
    gpu: str
    tp: int
    max_model_len: int | None
    part: str
    predicted: float
    shipped: float
    logged: float
    exact: bool
    rule: str | None
    standing: str = ""

    @property
    def error(self) -> float:
        """Signed, as a share of what was logged."""
        return (self.predicted - self.logged) / abs(self.logged) if self.logged else 0.0


def predictions(validated: Validated, fitted_on: Collection[str]) -> list[Prediction]:
    case, inputs = validated.scored.case, validated.scored.inputs
    context = inputs.args.max_model_len
    return [
        Prediction(
            case.id,
            case.thread,
            printable(case.source, 100),
            printable(case.model or "", 80),
            release(validated.scored),
            device(validated.scored),
            inputs.args.tensor_parallel_size,
            context if isinstance(context, int) else None,
            score.part,
            score.predicted,
            shipped.predicted,
            score.logged,
            score.exact,
            score.rule,
            standing(validated.scored, fitted_on),
        )
        for score, shipped in zip(validated.scores, validated.scored.scores, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Board:
    """Everything there is to print, write and draw."""

    source: str
    lines: list[Line]
    validated: list[Line]
    standings: dict[str, list[Line]]
    held_out: dict[str, list[Line]]
    fitted_on: list[str]
    groups: dict[str, dict[str, list[Line]]]
    worst: list[Bad]
    worst_pool: list[Bad]
    coverage: Coverage
    constants: list[Constant]
    borrowed: int
    malformed: list[Malformed]
    predictions: list[Prediction]


def board(
    source: str, scored: Sequence[Scored], refused: Sequence[Refused], malformed: list[Malformed],
    validated: Sequence[Validated], constants: Mapping[str, Constant], training: Iterable[Scored],
    kinds: Iterable[Validated],
) -> Board:  # fmt: skip
    fitted_on = in_order({release(result) for result in training if points_of(result)})
    results = [(result.scored, result.scores) for result in validated]
    budget = [part for part in PARTS if part not in ("graphs", "non_torch")]
    return Board(
        source,
        lines_of(score for result in scored for score in result.scores),
        lines_of(score for _, scores in results for score in scores),
        by_standing(results, fitted_on),
        grouped(((result.scored, result.scores) for result in kinds), layers),
        fitted_on,
        {name: grouped(results, key) for name, key in GROUPINGS.items()},
        worst_of(results, budget, 10),
        worst_of(results, GIVEN, 10),
        coverage(scored, refused),
        list(constants.values()),
        sum(bool(result.borrowed) for result in validated),
        malformed,
        [prediction for result in validated for prediction in predictions(result, fitted_on)],
    )


def as_json(the_board: Board) -> dict[str, Any]:
    return {"schema": "kvplan/scoreboard@1", **asdict(the_board)}


# --- text ------------------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.2f}%" if value < 0.1 else f"{100 * value:.0f}%"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


HEADER = ("part", "n", "median", "p90", "max", "p90 of GPU", "in range", "width", "exact")


def line_cells(line: Line) -> list[str]:
    exact = "" if line.exact is None else f"{line.exact}" + (f" + {line.explained}" if line.explained else "")
    errors = [percent(value) for value in (line.median, line.p90, line.max, line.share_p90, line.covered, line.width)]
    return [line.part.replace("_", "-"), str(line.n), *errors, exact]


def as_text(the_board: Board) -> str:
    cover = the_board.coverage
    out = [
        f"{the_board.source}: {cover.cases} cases, {cover.scorable} scorable, "
        f"{cover.predicted} predicted ({cover.share:.0%})",
        "",
        "Absolute relative error, constants from other threads (cross-validated)",
        *table(HEADER, [line_cells(line) for line in the_board.validated]),
        *(
            line
            for name, lines in the_board.standings.items()
            for line in ("", name, *table(HEADER, [line_cells(row) for row in lines]))
        ),
        "",
        "All of them with the constants kvplan ships",
        *table(HEADER, [line_cells(line) for line in the_board.lines]),
    ]
    for name, groups in the_board.groups.items():
        rows = [[group, *line_cells(line)] for group, lines in groups.items() for line in lines]
        out += ["", f"By {name}", *table((name, *HEADER), rows)]
    out += ["", "Worst ten", *map(bad_text, the_board.worst)]
    out += [
        "",
        "What does not follow from the logged pool, or only with one thing more",
        *map(bad_text, the_board.worst_pool),
    ]
    for title, counted in (
        ("Refused by kvplan", cover.refused),
        ("Not asked at all", cover.own_builds),
        ("Not asked, part of a case", cover.not_asked),
        ("Not scorable", cover.unscorable),
    ):
        if counted:
            out += ["", title, *(f"  {count:3}  {why}" for why, count in counted.items())]
    rows = []
    for constant in the_board.constants:
        sizes = [f"{value:.2f}" for value in (constant.value, constant.low, constant.high)]
        rows.append([constant.kind, *sizes, str(constant.logs), str(constant.threads)])
    out += ["", "Constants as these cases give them (median over threads)"]
    out += table(("constant", "value", "low", "high", "logs", "threads"), rows)
    return "\n".join(out) + "\n"


def bad_text(bad: Bad) -> str:
    return (
        f"  {percent(bad.relative):>7}  {bad.part.replace('_', '-')} {bad.predicted:,.2f} for {bad.logged:,.2f}: "
        f"{bad.model}, {bad.version} (case {bad.case}, {bad.source}): {bad.reason}"
    )
