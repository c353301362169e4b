"""kvplan from Python answers what the command line answers: the command's own JSON and CSV are the oracle."""

import csv
import io
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import kvplan
from tests.support.cli import Run, run  # noqa: F401

ROOT = Path(__file__).parents[2]
QUESTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"gpu": "a100-80g", "max_model_len": 32768}, ["--gpu", "a100-80g", "--ctx", "32k"]),
    (
        {"gpu": "2xl40s", "max_model_len": "16k", "kv_cache_dtype": "fp8", "mean_tokens": 2000},
        ["--gpu", "2xl40s", "--ctx", "16k", "--kv-cache-dtype", "fp8", "--mean-tokens", "2000"],
    ),
    (
        {"gpu": "h100-80g", "engine": "sglang", "max_model_len": 8192, "data_parallel_size": 2},
        ["--gpu", "h100-80g", "--engine", "sglang", "--ctx", "8k", "--dp", "2"],
    ),
    (
        {"gpu_memory": "24GiB", "max_model_len": "auto", "enforce_eager": True, "engine_arg": ["block_size=32"]},
        ["--gpu-memory", "24GiB", "--ctx", "auto", "--enforce-eager", "--engine-arg", "block_size=32"],
    ),
]


@pytest.mark.parametrize(("keywords", "flags"), QUESTIONS)
def test_an_estimate_is_the_command_s(run: Run, keywords: dict[str, Any], flags: list[str]) -> None:  # noqa: F811
    answer = kvplan.estimate("llama-3.1-8b", **keywords)
    document = run("estimate", "llama-3.1-8b", *flags, "--format", "json").json
    assert answer.to_dict() == document
    assert answer.users == document["concurrency"]["users"] * document["concurrency"]["replicas"]
    assert answer.memory.kv_cache == document["memory"]["kv_cache"]
    assert answer.serve_command == document["flags"]["command"]
    assert answer.fits is document["fits"]
    assert str(answer).splitlines() == run("estimate", "llama-3.1-8b", *flags).out.splitlines()
    assert answer.explain() in run("estimate", "llama-3.1-8b", *flags, "--explain").out


def test_a_pasted_command_is_read() -> None:
    answer = kvplan.estimate(gpu="h200", command="vllm serve Qwen/Qwen3-8B --max-model-len 8192")
    assert (answer.plan.request.spec.name, answer.plan.settings.max_model_len) == ("qwen3-8b", 8192)


def test_rows_of_a_sweep_are_the_command_s(run: Run) -> None:  # noqa: F811
    rows = kvplan.sweep(["llama-3.1-8b", "qwen3-8b"], gpu=["l40s", "h100-80g"], max_model_len=[8192, 32768])
    flags = ["--gpu", "l40s,h100-80g", "--ctx", "8192,32768", "--format", "csv"]
    table = list(csv.DictReader(io.StringIO(run("sweep", "llama-3.1-8b", "qwen3-8b", *flags).out)))
    assert len(rows) == 8
    assert [list(row) for row in rows] == [list(row) for row in table]
    assert [str(row["kv_cache"]) for row in rows] == [row["kv_cache"] for row in table]


def test_pandas_takes_the_rows() -> None:
    pytest.importorskip("pandas")
    frame = kvplan.sweep_frame("qwen3-8b", gpu="l40s", max_model_len=[8192, 16384, 32768])
    assert list(frame["max_model_len"]) == [8192, 16384, 32768]
    assert frame["users"].dtype == "Int64"
    assert list(frame["users"]) == [
        row["users"] for row in kvplan.sweep("qwen3-8b", gpu="l40s", max_model_len=["8k", "16k", "32k"])
    ]
    assert frame["tokens"].nunique() == 1  # the pool does not depend on the context here


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: kvplan.estimate(gpu="l40s"), kvplan.UsageError, "MODEL: missing"),
        (
            lambda: kvplan.estimate("qwen3-8b", gpu="l40s", tp=2),  # type: ignore[call-overload]
            kvplan.UsageError,
            "did you mean tensor_parallel_size",
        ),
        (lambda: kvplan.estimate("llama-3.1-8b", gpu="l40s,h200"), kvplan.UsageError, "kvplan.sweep takes several"),
        (
            lambda: kvplan.estimate("llama-3.1-8b", gpu="l40s", max_model_length=1),  # type: ignore[call-overload]
            kvplan.UsageError,
            "max_model_len",
        ),
        (
            lambda: kvplan.estimate("llama-3.1-8b", gpu="l40s", format="csv"),  # type: ignore[call-overload]
            kvplan.UsageError,
            "no such keyword",
        ),
        (lambda: kvplan.sweep("llama-3.1-8c", gpu="l40s"), kvplan.UsageError, "did you mean llama-3.1-8b"),
        (lambda: kvplan.estimate("./nowhere", gpu="l40s"), kvplan.InvalidInputError, "nowhere"),
    ],
)
def test_what_the_command_refuses_is_an_exception(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"max_model_len": object()}, "max_model_len must be text or a number, not object"),
        ({"max_model_len": [object()]}, "max_model_len must be text or a number, not list"),
        ({"max_num_seqs": True}, "max_num_seqs must be text or a number, not True"),
        ({"kv_cache_dtype": b"fp8"}, "kv_cache_dtype must be text or a number, not bytes"),
        ({"tensor_parallel_size": 2.5}, "--tensor-parallel-size: not a whole number"),
        ({"max_model_len": 10**5000}, "max_model_len cannot be written as text (Exceeds the limit"),
        ({"max_model_len": [10**5000]}, "max_model_len cannot be written as text (Exceeds the limit"),
        ({"hf_overrides": {"a": object()}}, "hf_overrides cannot be written as text (Object of type object"),
        ({"hf_overrides": {"a": CIRCLE}}, "hf_overrides cannot be written as text (Circular reference"),
    ],
)
def test_a_value_of_another_type_is_an_error_with_its_keyword(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(kvplan.UsageError, match=re.escape(text)):
        kvplan.estimate("llama-3.1-8b", gpu="l40s", **keywords)


@pytest.mark.parametrize(
    ("models", "keywords", "text"),
    [
        (5, {}, "model '5': not in the catalog"),
        (None, {}, "MODEL: missing"),
        ([object()], {}, "models must be text or a number, not list"),
        (object(), {}, "models must be text or a number, not object"),
        (b"llama-3.1-8b", {}, "models must be text or a number, not bytes"),
        ({"llama-3.1-8b": 1}, {}, "models must be text or a number, not dict"),
        ("llama-3.1-8b", {"gpu": object()}, "gpu must be text or a number, not object"),
        ("llama-3.1-8b", {"jobs": "x"}, "jobs: no such keyword"),
    ],
)
def test_a_sweep_of_another_type_is_an_error_with_its_keyword(models: Any, keywords: dict[str, Any], text: str) -> None:
    for call in (kvplan.sweep, kvplan.sweep_frame):
        with pytest.raises(kvplan.UsageError, match=re.escape(text)):
            call(models, **{"gpu": "l40s", "max_model_len": 8192, **keywords})


@pytest.mark.parametrize(
    "keywords",
    [
        {"model": "llama-3.1-8b", "gpu": "a100-80g"},
        {"model": "qwen3-next-80b-a3b", "gpu": "h200", "tensor_parallel_size": 4},
        {"model": "gemma-3-27b", "gpu": "h100-80g", "kv_cache_dtype": "fp8"},
        {"model": "deepseek-v3", "gpu": "8xh200", "engine": "sglang"},
    ],
)
def test_an_answer_survives_pickle_and_is_compared_by_what_it_says(keywords: dict[str, Any]) -> None:
    answer = kvplan.estimate(**keywords, max_model_len=8192)
    copy = pickle.loads(pickle.dumps(answer))
    assert copy == answer
    assert {copy, answer} == {answer}
    assert copy.to_dict() == answer.to_dict()
    assert answer == kvplan.estimate(**keywords, max_model_len=8192)
    assert answer != kvplan.estimate(**keywords, max_model_len=4096)
    assert answer != answer.users


def test_an_answer_is_read_only() -> None:
    answer = kvplan.estimate("llama-3.1-8b", gpu="l40s", max_model_len=8192)
    with pytest.raises(AttributeError, match="plan cannot be set"):
        answer.plan = None  # type: ignore[misc, assignment]


def test_no_hint_names_the_package_of_the_index() -> None:
    """The kvplan on PyPI is another project: extras are installed from the source tree."""
    sources = [path for folder in ("kvplan", "engine") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 500
    assert [path for path in sources if re.search(r"pip install '?\"?kvplan", path.read_text(encoding="utf-8"))] == []


class Cells(HTMLParser):
    """The texts of a table's cells; fails on a tag that is never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("th", "td"):
            self.cells.append(data)


def test_a_notebook_shows_a_table() -> None:
    # What a notebook does with the last line of a cell: it asks the value for its HTML.
    names: dict[str, Any] = {}
    exec("import kvplan\nanswer = kvplan.estimate('llama-3.1-8b', gpu='a100-80g', max_model_len=32768)", names)
    page = Cells()
    page.feed(names["answer"]._repr_html_())
    assert page.open == []
    table = dict(zip(page.cells[::2], page.cells[1::2], strict=True))
    assert (table["weights"], table["total"]) == ("14.96 GiB", "79.25 GiB")  # as README's first answer has them


def test_importing_kvplan_loads_nothing_and_an_estimate_no_heavy_library() -> None:
    code = (
        "import sys, kvplan\n"
        "assert {name for name in sys.modules if name.startswith('kvplan.')} == {'kvplan.core', 'kvplan.core.errors'}\n"
        "assert 'estimate' in dir(kvplan)\n"
        "kvplan.estimate('llama-3.1-8b', gpu='l40s', max_model_len=8192)\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'transformers', 'numpy', 'ray'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
