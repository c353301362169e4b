"""Published times of real servers: what ran, under which load, and what was measured.

A file is JSON Lines with the fields of one result a line, or CSV with the same names (`load.users`,
`measured.tpot_p50`). A row that cannot be read is a `Malformed`, never an exception: the rows are other people's.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvplan.core.files import printable, read_text
from kvplan.core.units import MIB
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec

MEASURED = (
    "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "tpot_p50", "tpot_p90", "tpot_p99", "itl_p50",
    "itl_p99", "e2e_mean", "e2e_p50", "out_tps", "req_s", "duration",
)  # fmt: skip
LOAD = (
    "users", "rate", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "unique_prompts", "recv_interval",
    "stream_interval", "memory_percent", "async_scheduling", "narrow_inputs",
)  # fmt: skip
LARGEST = 1e12
MAX_BYTES = 64 * MIB
MOST_GPUS = 4096


@dataclass(frozen=True, slots=True)
class Malformed:
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One published result.

    tp, ep, dp   ranks of tensors, of experts (1: none), and replicas of attention
    users, rate  how the load came: one of them; a rate of infinity is all requests at once
    lengths      "fixed", "random" (uniform from `least` of the length up to it) or "chat" (as in ShareGPT; answers end
                 at `least` tokens, where that is not 0)
    measured     milliseconds by name; `out_tps` output tokens per second of the whole server
    """

    line: int
    id: str
    src: str
    source: str
    url: str
    engine: str
    version: str
    model: str
    gpu: str
    tp: int
    ep: int
    dp: int
    dtype: str
    kv_dtype: str
    users: int | None
    rate: float | None
    arrivals: str
    num_prompts: int
    input_len: float
    output_len: float
    lengths: str
    least: float
    limits: Mapping[str, int]
    measured: Mapping[str, float]
    notes: str

    @property
    def is_open(self) -> bool:
        return self.users is None

    def stated(self, metric: str) -> tuple[str, float] | None:
        """(statistic, value) of a time: its median where stated, else its mean."""
        for statistic in ("p50", "mean"):
            value = self.measured.get(f"{metric}_{statistic}")
            if value is not None:
                return statistic, value
        return None


class Unreadable(Exception):
    """A row that lacks something without which nothing can be predicted."""


def number(value: Any, name: str) -> float | None:
    """A count, length, rate or time of a sensible size, or None where it is not stated."""
    if value in (None, ""):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise Unreadable(f"{name} is not a number ({printable(value, 30)})") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise Unreadable(f"{name} is not a number ({printable(repr(value), 30)})")
    return float(value)


def needed(value: Any, name: str, most: float = LARGEST) -> float:
    stated = number(value, name)
    if stated is None or not 0 < stated <= most:
        raise Unreadable(f"{name} is missing or not between 0 and {most:g} ({printable(repr(value), 30)})")
    return stated


def text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


def fact(line: int, row: Mapping[str, Any]) -> Fact:
    """One row; raises Unreadable."""
    load, measured = row.get("load"), row.get("measured")
    if not isinstance(load, dict) or not isinstance(measured, dict):
        raise Unreadable("load and measured must be objects")
    for name in ("model", "gpu", "engine"):
        if not text(row, name):
            raise Unreadable(f"{name} is missing")
    users = number(load.get("users"), "load.users")
    stated_rate = load.get("rate")
    rate = math.inf if stated_rate in ("inf", math.inf) else number(stated_rate, "load.rate")
    if (users is None) == (rate is None):
        raise Unreadable("load must hold users or rate")
    values = {name: number(measured.get(name), name) for name in MEASURED}
    positive = {name: value for name, value in values.items() if value is not None and value > 0}
    if not positive:
        raise Unreadable("nothing is measured")
    limits = {name: int(needed(load[name], f"load.{name}")) for name in LOAD[2:] if load.get(name) not in (None, "")}
    lengths, least = lengths_of(row.get("range"))
    return Fact(
        line, text(row, "id") or f"line {line}", text(row, "src"), text(row, "source"), text(row, "url"),
        text(row, "engine"), text(row, "version"), text(row, "model"), text(row, "gpu"),
        *(int(needed(row.get(name) or 1, name, MOST_GPUS)) for name in ("tp", "ep", "dp")),
        text(row, "dtype"), text(row, "kv_dtype"),
        None if users is None else int(needed(users, "load.users", 1e6)),
        None if rate is None else (rate if math.isinf(rate) else needed(rate, "load.rate")),
        text(load, "arrivals"), int(needed(row.get("num_prompts") or 10 * (users or 20), "num_prompts")),
        needed(row.get("input_len"), "input_len", 1e7), needed(row.get("output_len"), "output_len", 1e7),
        lengths, least, limits, positive, text(row, "notes"),
    )  # fmt: skip


def lengths_of(stated: Any) -> tuple[str, float]:
    """How lengths are drawn: ("random", share) for `--random-range-ratio` and "uniform" (SGLang's `random`, from one
    token up to the length), "chat" for ShareGPT (and where answers are cut: "eos512"), else "fixed"."""
    try:
        share = float(stated)
    except (TypeError, ValueError):
        words = str(stated or "").lower()
        if match := re.fullmatch(r"eos(\d{1,6})", words):
            return "chat", float(match[1])
        if words == "uniform":
            return "random", 0.0
        return ("chat", 0.0) if "sharegpt" in words else ("fixed", 1.0)
    return ("random", share) if 0.3 <= share < 1 else ("fixed", 1.0)


def read_facts(path: Path) -> Iterator[Fact | Malformed]:
    """Every row of a file."""
    content = read_text(path, MAX_BYTES)
    rows = csv_rows(content) if path.suffix.lower() == ".csv" else json_rows(content)
    for line, row in rows:
        try:
            yield (
                with_config(fact(line, row), path) if isinstance(row, dict) else Malformed(line, "is not a JSON object")
            )
        except Unreadable as error:
            yield Malformed(line, str(error))


def with_config(made: Fact, path: Path) -> Fact:
    """A model that is a folder beside the file, by its place."""
    folder = path.parent / made.model
    return replace(made, model=str(folder)) if "/" in made.model and folder.is_dir() else made


def name_of(fact: Fact) -> str:
    return fact.model.rpartition("/")[2].lower()


@cache
def spec_of(model: str) -> ModelSpec:
    """A model of the catalog, or of a folder with its config."""
    return hf_config.load_spec(Path(model)) if "/" in model else catalog.load(model)


def json_rows(content: str) -> Iterator[tuple[int, Any]]:
    for line, text_line in enumerate(content.splitlines(), 1):
        if text_line.strip():
            try:
                yield line, json.loads(text_line)
            except ValueError:
                yield line, None


def csv_rows(content: str) -> Iterator[tuple[int, Any]]:
    for line, row in enumerate(csv.DictReader(io.StringIO(content)), 2):
        nested: dict[str, Any] = {"load": {}, "measured": {}}
        for name, value in row.items():
            if not name or value in (None, ""):
                continue
            group, dot, inner = name.partition(".")
            if dot and group in nested:
                nested[group][inner] = value
            else:
                nested[name] = value
        yield line, nested
