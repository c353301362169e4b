"""Keywords of Python's calls have types from the argument table: kvplan/asked/keywords.py is written from it.

`pytest --update tests/cli/test_keywords.py` writes it anew.
"""

from dataclasses import fields
from pathlib import Path

from kvplan.asked.call import KEYWORDS, PLAN_KEYWORDS, TIMED
from kvplan.asked.form import LENGTH_KEYS, PLAN_KEYS, SWITCHES
from kvplan.servers.words.arguments import ARGUMENTS
from kvplan.simulate.load import LoadWords
from tests.conftest import check_golden

FILE = Path(__file__).parents[2] / "kvplan" / "asked" / "keywords.py"
OWN = ("model", "from_command", "gpu", "gpu_memory")  # parameters of the calls themselves
TYPES = {
    "flag": "bool", "text": "str", "json": "str | dict[str, Any]", "ratio": "str | float", "fraction": "str | float",
    "gib": "str | float", "context": "str | int | Iterable[str | int]", "names": "str | Iterable[str]",
}  # fmt: skip
OTHERS = {
    "calibration": "str | PathLike[str]", "draft_model": "str | PathLike[str]", "lengths": "str | PathLike[str]",
    "engine": "str", "revision": "str", "engine_arg": "str | Iterable[str]", "overflow": "str | float",
    "speculative_config": "str | dict[str, Any]",
}  # fmt: skip

LOAD = {"trace": "str | PathLike[str]", "profile": "str", "arrivals": "str"}


def type_of(key: str) -> str:
    """The type of one value of a keyword, as source text."""
    row = ARGUMENTS.get(key)
    if row is None:
        return "bool" if key in SWITCHES else OTHERS.get(key, "str | int")
    if row.kind == "choice" and row.metavar is None:
        return f"Literal[{', '.join(f'{choice!r}' for choice in row.choices)}]".replace("'", '"')
    return "str" if row.kind == "choice" else TYPES.get(row.kind, "str | int")


def field(key: str, kind: str) -> list[str]:
    text = f"    {key}: {kind} | Several | None"
    if len(text) <= 120:
        return [text]
    return [f"    {key}: (", f"        {kind}", "        | Several", "        | None", "    )"]


def module() -> str:
    plan, lengths = ([key for key in keys if key not in OWN] for keys in (PLAN_KEYS, LENGTH_KEYS))
    lines = [
        '"""Keywords of Python\'s calls by type; `Several`: what a sweep takes in addition.',
        "",
        "Written from the argument table by `pytest --update tests/cli/test_keywords.py`.",
        '"""',
        "",
        "from collections.abc import Iterable",
        "from os import PathLike",
        "from typing import Any, Generic, Literal, Never, TypedDict, TypeVar",
        "",
        "Value = str | int | float | bool | dict[str, Any] | None",
        'Several = TypeVar("Several")',
        "",
        "",
        "class PlanKeywords(TypedDict, Generic[Several], total=False):",
        '    """Of the server, in every call."""',
        "",
        *(line for key in plan for line in field(key, type_of(key))),
        "",
        "",
        "class EstimateKeywords(PlanKeywords[Several], Generic[Several], total=False):",
        '    """Also of the requests\' lengths."""',
        "",
        *(line for key in lengths for line in field(key, type_of(key))),
        "",
        "",
        "class RecommendKeywords(EstimateKeywords[Never], total=False):",
        '    """Also, with latency targets, of which requests arrive, and how often."""',
        "",
        *(f"    {name}: {LOAD.get(name, 'str | int | float')} | None" for name in TIMED),
        "",
        "",
        "class LoadKeywords(PlanKeywords[Never], total=False):",
        '    """Also of a load, in place of lengths: which requests, and how they arrive."""',
        "",
        *(f"    {row.name}: {LOAD.get(row.name, 'str | int | float')} | None" for row in fields(LoadWords)),
        "",
        "",
        "class SweepKeywords(EstimateKeywords[Iterable[Value]], total=False):",
        '    """Of a sweep: a list where several values are tried."""',
        "",
        "    prices: str | PathLike[str] | None",
        *(f"    {key}: Value | Iterable[Value]" for key in ("gpu", "gpu_memory")),
    ]
    return "\n".join(lines) + "\n"


def test_keywords_are_those_of_the_argument_table(update: bool) -> None:
    check_golden(FILE, module(), update=update)


def test_every_keyword_of_a_call_has_a_type() -> None:
    from kvplan.asked.keywords import EstimateKeywords, PlanKeywords

    # What a call takes at run time is the oracle: the types are a promise about it.
    assert set(PlanKeywords.__annotations__) == PLAN_KEYWORDS - set(OWN)
    assert set(EstimateKeywords.__annotations__) == KEYWORDS - set(OWN)
