"""Request lengths: constants, distributions and files, as a discrete distribution of token counts.

Continuous distributions are discretized on a grid with steps of 0.5 % of the length (one token below 200); the mass
between two points goes to the upper one, so no length is underestimated.
"""

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final, cast

from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.core.files import open_regular, os_problem, printable
from kvplan.core.records import dataclass
from kvplan.core.units import MAX_TOKENS, MIB, parse_tokens, plural

OPTION = "--lengths"
FORMS = (
    "write const:4096, uniform:100-2000, lognormal:mean=2000,p95=8000, lognormal:median=1000,sigma=1.2, or name a CSV "
    "file of token counts"
)
FEW_LINES = 100_000  # lines that a compressed file may have at any compression ratio
MAX_FILE_BYTES = 256 * MIB  # uncompressed; BurstGPT, the largest public trace, has 52 MB
MAX_LINE_BYTES = 4096
GRID_STEP = 1.005

# Columns of public traces: (prompt tokens, output tokens), lower case.
PAIRS = (
    ("contexttokens", "generatedtokens"),  # Azure 2023 and 2024
    ("request tokens", "response tokens"),  # BurstGPT
    ("prompt_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("prompt_len", "output_len"),  # vLLM's benchmarks
    ("input_len", "output_len"),
    ("input_length", "output_length"),  # Mooncake
    ("num_prefill_tokens", "num_decode_tokens"),  # vidur
)
TOTALS = ("tokens", "total_tokens", "total tokens", "length")

# Standard normal quantiles of the percentiles that can specify a log-normal.
QUANTILES = {
    "p50": 0.0,
    "p75": 0.6744897501960817,
    "p90": 1.2815515655446004,
    "p95": 1.6448536269514722,
    "p99": 2.3263478740408408,
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: `points` are (tokens, probability), tokens ascending, probabilities summing to 1.

    notes  changes made while reading it, for the user
    """

    points: tuple[tuple[int, float], ...]
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.points]
        if not tokens or tokens[0] < 1 or any(a >= b for a, b in pairwise(tokens)):
            raise UsageError("lengths", f"not positive and ascending ({len(tokens)} points)", f"{FORMS}")
        total = math.fsum(probability for _, probability in self.points)
        if not all(probability >= 0 for _, probability in self.points) or abs(total - 1) > 1e-9:
            raise UsageError("lengths", f"probabilities do not sum to 1 ({total!r})", f"{FORMS}")

    @property
    def mean(self) -> float:
        return math.fsum(tokens * probability for tokens, probability in self.points)

    @property
    def longest(self) -> int:
        return self.points[-1][0]


def in_flight(prompt: int, output: int) -> int:
    """Return the mean KV tokens of a request during decode: its prompt and half of its output, rounded up."""
    return prompt + -(-output // 2)


LOGNORMAL: Final = ("mean", "median", "sigma", *QUANTILES)
NORMAL: Final = ("mean", "stddev", "min", "max")
NORMAL_FORM: Final = "normal:mean=1000,stddev=200, with min= and max= where it is cut"
DISTRIBUTIONS: Final = ("const", "uniform", "lognormal", "normal", "truncnormal")  # anything else names a file


def parse_lengths(text: str, limit: int, read: "Callable[[Path, int], Lengths] | None" = None) -> Lengths:
    """Parse a distribution from the command line, or read it from a file; lengths above `limit` count as `limit`.

    read  reader of the file (None: `read_csv`)
    """
    kind, colon, parameters = text.partition(":")
    match kind:
        case "const" if colon:
            return clipped(Counter({parse_tokens(parameters, OPTION): 1.0}), limit, text)
        case "uniform" if colon:
            return _uniform(parameters, limit, text)
        case "lognormal" if colon:
            return _lognormal(parameters, limit, text)
        case "normal" if colon:
            return _normal(parameters, limit, text)
        case "truncnormal" if colon:
            return _normal(parameters, limit, text, is_drawn_again=True)
    if not text or "\0" in text:
        raise UsageError(f"{OPTION} {text!r}", "names no file", f"{FORMS}")
    path = Path(text)
    if not _exists(path) and not text.lower().endswith((".csv", ".csv.gz", ".gz", ".txt")):
        raise UsageError(f"{OPTION} {printable(text)!r}", "neither a distribution nor a file", f"{FORMS}")
    return (read or read_csv)(path, limit)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def clipped(weights: Counter[int] | dict[int, float], limit: int, source: str, *notes: str) -> Lengths:
    """Return the normalized distribution, with lengths above `limit` counted as `limit`."""
    total = math.fsum(weights.values())
    above = math.fsum(weight for tokens, weight in weights.items() if tokens > limit) / total
    by_tokens: dict[int, float] = {}
    for tokens, weight in weights.items():
        by_tokens[min(tokens, limit)] = by_tokens.get(min(tokens, limit), 0.0) + weight / total
    clip = (f"{above:.2%} of the lengths are above {limit:,} tokens and count as {limit:,}",) if above else ()
    return Lengths(tuple(sorted(by_tokens.items())), source, (*notes, *clip))


# --- distributions ------------------------------------------------------------------------------------------------


def grid(low: int, high: int) -> Iterator[int]:
    """Yield points from `low` to `high`, each one token or at most 0.5% above the previous one."""
    point = low
    while point < high:
        yield point
        point = max(point + 1, int(point * GRID_STEP))
    yield high


def _on_grid(cdf: Callable[[float], float], low: int, high: int) -> dict[int, float]:
    """Return the probability mass up to each grid point; the last point gets all the rest."""
    weights: dict[int, float] = {}
    before = 0.0
    for point in grid(low, high):
        up_to = cdf(point) if point < high else 1.0
        if up_to > before:
            weights[point] = up_to - before
        before = max(before, up_to)
    return weights


def _uniform(parameters: str, limit: int, text: str) -> Lengths:
    low_text, dash, high_text = parameters.partition("-")
    if not dash:
        raise UsageError(f"{OPTION} {text!r}", "not a range", "write uniform:100-2000")
    low, high = parse_tokens(low_text, OPTION), parse_tokens(high_text, OPTION)
    if low > high:
        raise UsageError(f"{OPTION} {text!r}", "the range is empty", "write the smaller number first")
    count = high - low + 1
    # CDF at t: t - low + 1 of the `count` equally likely lengths are at most t.
    return clipped(_on_grid(lambda x: (x - low + 1) / count, low, high), limit, text)


def _lognormal(parameters: str, limit: int, text: str) -> Lengths:
    mu, sigma = lognormal_parameters(_settings(parameters, text), text)

    def cdf(x: float) -> float:
        return 0.5 * math.erfc((mu - math.log(x)) / (sigma * math.sqrt(2)))

    above = 1 - cdf(limit)
    notes = (f"{above:.2%} of the lengths are above {limit:,} tokens and count as {limit:,}",) if above > 5e-5 else ()
    return Lengths(tuple(clipped(_on_grid(cdf, 1, limit), limit, text).points), text, notes)


def _normal(stated: str, limit: int, text: str, *, is_drawn_again: bool = False) -> Lengths:
    """Parse a normal distribution; lengths beyond min or max are clipped (guidellm) or redrawn (aiperf)."""
    settings = _settings(stated, text, NORMAL)
    if not {"mean", "stddev"} <= settings.keys():
        raise UsageError(f"{OPTION} {text!r}", "mean or stddev is missing", f"write {NORMAL_FORM}")
    mean, deviation = settings["mean"], settings["stddev"]
    low, high = round(settings.get("min", 1)), round(settings.get("max", math.ceil(mean + 8 * deviation)))
    if low > high:
        raise UsageError(f"{OPTION} {text!r}", "the range is empty", "write the smaller number as min")

    def normal(x: float) -> float:  # guidellm rounds to the nearest token, aiperf up
        return 0.5 * math.erfc((mean - x - (0.0 if is_drawn_again else 0.5)) / (deviation * math.sqrt(2)))

    below, above = (normal(low - 1), normal(high)) if is_drawn_again else (0.0, 1.0)
    if above - below < 1e-9:
        raise UsageError(f"{OPTION} {text!r}", "nothing lies between min and max", f"write {NORMAL_FORM}")

    def cdf(x: float) -> float:
        return (normal(x) - below) / (above - below)

    return clipped(_on_grid(cdf, low, high), limit, text)


def _settings(parameters: str, text: str, keys: tuple[str, ...] = LOGNORMAL) -> dict[str, float]:
    settings: dict[str, float] = {}
    for part in parameters.split(","):
        key, _, number = part.partition("=")
        known = key in keys
        if not known or key in settings or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?[kKmM]?", number):
            raise UsageError(f"{OPTION} {text!r}", f"{printable(part)!r} is not understood", f"{FORMS}")
        unit = {"k": 1024, "m": 1024**2}.get(number[-1].lower(), 1)
        value = float(number.rstrip("kKmM")) * unit
        least, greatest = (0.0, 10.0) if key == "sigma" else (0.5, float(MAX_TOKENS))
        if not least < value <= greatest:
            raise UsageError(
                f"{OPTION} {text!r}", f"{key} must lie in ({least:g}, {greatest:g}] ({number})", f"{FORMS}"
            )
        settings[key] = value
    return settings


def lognormal_parameters(settings: dict[str, float], text: str) -> tuple[float, float]:
    """Return (mu, sigma) from two of mean, median, sigma and percentiles.

    The mean is e^(mu + sigma^2/2); the percentile with normal quantile z is e^(mu + z sigma).
    """
    named = dict(settings)
    if "median" in named and "p50" not in named:
        named["p50"] = named.pop("median")
    points = [(QUANTILES[key], value) for key, value in named.items() if key in QUANTILES]
    match sorted(key for key in named if key not in QUANTILES), points:
        case ["sigma"], [(z, value)]:
            return math.log(value) - z * named["sigma"], named["sigma"]
        case ["mean", "sigma"], []:
            return math.log(named["mean"]) - named["sigma"] ** 2 / 2, named["sigma"]
        case [], [(z1, v1), (z2, v2)] if (z1 - z2) * (v1 - v2) > 0:
            sigma = math.log(v1 / v2) / (z1 - z2)
            return math.log(v1) - z1 * sigma, sigma
        case ["mean"], [(z, value)]:
            ratio = math.log(value / named["mean"])
            root = z * z - 2 * ratio
            # The solution with the smaller sigma of two; below the mean, only a median has a solution.
            sigma = math.sqrt(root) if z == 0 and root > 0 else z - math.sqrt(root) if root >= 0 else 0.0
            if sigma <= 0:
                raise UsageError(
                    f"{OPTION} {text!r}",
                    "no log-normal has this mean and percentile",
                    f"a percentile lies above the mean, at most {math.exp(z * z / 2):.2f} times, a median below it",
                )
            return math.log(named["mean"]) - sigma**2 / 2, sigma
    raise UsageError(f"{OPTION} {text!r}", "needs two of mean, median or a percentile, sigma", f"{FORMS}")


# --- files --------------------------------------------------------------------------------------------------------


def read_csv(path: Path, limit: int) -> Lengths:
    """Read lengths from a CSV file, gzipped or not: one column of token counts, or a trace's prompt and output columns.

    A request counts at its full length, prompt + output. Raise InvalidInputError with the line number of an error.
    """
    where = printable(str(path), 400)
    counts: Counter[int] = Counter()
    pairs = False
    for number, tokens, is_pair in _rows(path, where):
        if tokens < 1:
            raise InvalidInputError(f"{where}: line {number}", "a request of 0 tokens", "remove the row")
        if tokens > MAX_TOKENS:
            raise InvalidInputError(
                f"{where}: line {number}", f"more than {MAX_TOKENS:,} tokens ({tokens})", "correct it"
            )
        counts[tokens] += 1
        pairs = is_pair
    if not counts:
        raise InvalidInputError(where, "no rows of lengths", "add at least one row below the header")
    rows = sum(counts.values())
    notes = ("a request counts at its full length, prompt + output",) if pairs else ()
    weights = {tokens: float(count) for tokens, count in counts.items()}
    return clipped(weights, limit, f"{where} ({plural(rows, 'row')})", *notes)


def _rows(path: Path, where: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (line number, tokens, whether they are prompt + output) of every row."""
    columns: tuple[int, ...] | None = None
    for number, line in read_lines(path, where):
        if not line.strip():
            continue
        try:
            fields = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise InvalidInputError(f"{where}: line {number}", f"is not CSV ({error})", "correct the line") from None
        if columns is None:
            columns = _columns(fields, where, number)
            if not (len(fields) == 1 and _is_count(fields[0])):
                continue
        if len(fields) <= max(columns):
            num_columns = max(columns) + 1
            raise InvalidInputError(
                f"{where}: line {number}",
                f"too few columns ({len(fields)})",
                f"the lengths are in column {num_columns}",
            )
        yield number, sum(_count(fields[column], where, number) for column in columns), len(columns) > 1


def _columns(header: list[str], where: str, number: int) -> tuple[int, ...]:
    """Return the column indices of the lengths from the header; a file with one column needs no header."""
    if len(header) == 1 and _is_count(header[0]):
        return (0,)
    names = [name.strip().lower() for name in header]
    for prompt, output in PAIRS:
        if prompt in names and output in names:
            return names.index(prompt), names.index(output)
    for total in TOTALS:
        if total in names:
            return (names.index(total),)
    raise InvalidInputError(
        f"{where}: line {number}",
        f"no column of lengths in the header ({printable(','.join(header), 80)!r})",
        "name one tokens, or two prompt_tokens and output_tokens",
        public="no column of lengths in the header",
    )


def _is_count(field: str) -> bool:
    return re.fullmatch(r"[0-9]{1,20}", field.strip()) is not None


def _count(field: str, where: str, number: int) -> int:
    if not _is_count(field):
        raise InvalidInputError(
            f"{where}: line {number}",
            f"not a whole number of tokens ({printable(field, 40)!r})",
            "correct the row",
            public="not a whole number of tokens",
        )
    return int(field)


def read_lines(path: Path, where: str, longest: int = MAX_LINE_BYTES) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, decompressed if the file is gzip; limits apply to each line (`longest` bytes) and in total.

    A gzip file with less than one compressed byte per line is rejected: it is repetitive and slow to read.
    """
    import gzip  # here, as it takes milliseconds to import
    import zlib

    try:
        with open_regular(path) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            most_lines = max(os.fstat(raw.fileno()).st_size, FEW_LINES) if packed else MAX_FILE_BYTES
            size = number = 0
            while line := stream.readline(longest + 1):
                number += 1
                size += len(line)
                if number > most_lines:
                    raise InvalidInputError(
                        where,
                        f"unpacks to more lines than it has bytes (over {most_lines:,}), as no recorded requests do",
                        "sample the rows",
                    )
                if len(line) > longest:
                    raise InvalidInputError(f"{where}: line {number}", f"longer than {longest:,} bytes", "is it a CSV?")
                if size > MAX_FILE_BYTES:
                    raise InvalidInputError(where, f"more than {MAX_FILE_BYTES:,} bytes", "sample the rows")
                yield number, _decoded(line, where, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInputError(where, f"broken gzip data ({error})", "fetch the file again") from None
    except OSError as error:
        raise os_problem(path, error) from None


def _decoded(line: bytes, where: str, number: int) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError(f"{where}: line {number}", "is not UTF-8 text", "save the file as UTF-8") from None
    if "\0" in text:
        raise InvalidInputError(f"{where}: line {number}", "holds a NUL byte", "name a text file")
    return text.rstrip("\r\n")
