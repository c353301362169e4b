"""The explorer's grid: what the page looks up is what `kvplan estimate` answers."""

import base64
import gzip
import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvplan.asked.form import Form
from kvplan.cli.main import main
from kvplan.documents.explorer import MISSING, packed, without
from kvplan.documents.explorer_grid import explorer_document
from kvplan.documents.schema import document_schema
from kvplan.report.explorer_html import MOST_BYTES
from tests.support.browser import SCHEMES, SIZES, Open, colors, complaints, contrast, is_dark, measured, needs_browser
from tests.support.browser import open_page as open_page
from tests.support.cli import Ran, Run, refused
from tests.support.cli import run as run
from tests.support.parts import first_pair

SMALL = ("--tp", "1,2", "--gpu-memory-utilization", "0.85,0.92", "--ctx", "4k,16k,128k", "--mean-tokens", "1000,8k")
SHARED = ("--shared-prefix", "600")
FLAGS = {
    "gpu": "--gpu", "engine": "--engine", "tensor_parallel_size": "--tp", "kv_cache_dtype": "--kv-cache-dtype",
    "gpu_memory_utilization": "--gpu-memory-utilization", "mem_fraction_static": "--mem-fraction-static",
    "max_model_len": "--ctx", "mean_tokens": "--mean-tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of which one does not fit everywhere, two servers."""
    path = tmp_path_factory.mktemp("explorer") / "explore.html"
    words = ["explore", "llama-3.1-8b", "qwen3-32b", "--gpu", "h100-80g,rtx-4090", *SMALL, "-q", "-o", str(path)]
    assert main(words) == 0
    return path


@pytest.fixture(scope="module")
def shared_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests that share their first tokens, on both servers."""
    path = tmp_path_factory.mktemp("explorer") / "shared.html"
    words = ["explore", "qwen3-8b", "--gpu", "l40s,rtx-4090", *SMALL, *SHARED, "-q", "-o", str(path)]
    assert main(words) == 0
    return path


def embedded(page: Path) -> dict[str, Any]:
    """The document in a page."""
    match = re.search(r'id="plans">([^<]*)<', page.read_text(encoding="utf-8"))
    assert match
    document: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    del document["full"]
    return document


def positions(document: dict[str, Any], count: int, seed: int) -> list[tuple[dict[str, Any], list[int]]]:
    """Charts and digits, drawn at random."""
    draw = random.Random(seed)
    charts = [draw.choice(document["charts"]) for _ in range(count)]
    return [(chart, [draw.randrange(len(axis["values"])) for axis in chart["axes"]]) for chart in charts]


def looked_up(chart: dict[str, Any], digits: list[int], path: str) -> Any:
    column, index = chart["columns"][path], 0
    for axis in column["axes"]:
        index = index * len(chart["axes"][axis]["values"]) + digits[axis]
    return column["values"][index]


def estimated(run: Run, chart: dict[str, Any], digits: list[int], more: tuple[str, ...] = ()) -> Ran:
    """The same position, asked of the command line."""
    words = ["estimate", chart["model"], "--format", "json", *more]
    for axis, digit in zip(chart["axes"], digits, strict=True):
        value = axis["values"][digit].replace(",", "")
        if axis["name"] in FLAGS and value != "full context":
            words += [FLAGS[axis["name"]], value]
    return run(*words)


def value_at(document: Any, path: str) -> Any:
    """The value at a dotted path."""
    for key in path.split("."):
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def test_the_page_has_every_combination(page: Path) -> None:
    document = embedded(page)
    assert document["plans"] == 4 * 2 * 2 * 2 * 2 * 3 * 3  # charts, GPUs, TP, KV dtypes, shares, contexts, means
    assert [(chart["model"], chart["server"].partition("@")[0]) for chart in document["charts"]] == [
        ("llama-3.1-8b", "vllm"), ("llama-3.1-8b", "sglang"), ("qwen3-32b", "vllm"), ("qwen3-32b", "sglang"),
    ]  # fmt: skip


def test_every_figure_is_the_one_that_estimate_prints(page: Path, run: Run) -> None:
    assert compared_figures(page, run, 40) == {True, False}


def test_so_it_is_where_requests_share_a_prefix(shared_page: Path, run: Run) -> None:
    assert compared_figures(shared_page, run, 24, SHARED) == {True, False}
    words = ("estimate", "qwen3-8b", "--gpu", "l40s", "--ctx", "16k", "--mean-tokens", "1000", "--format", "json")
    plain, shared = (run(*words, *more).json["concurrency"]["users"] for more in ((), SHARED))
    assert shared > plain  # the prefix is kept once


def compared_figures(page: Path, run: Run, count: int, more: tuple[str, ...] = ()) -> set[bool]:
    """Whether there was a plan, of all positions; each figure there equals that of `estimate`."""
    document = embedded(page)
    Draft202012Validator(document_schema("explorer")).validate(document)
    seen = set()
    for chart, digits in positions(document, count, seed=21):
        ran, error = estimated(run, chart, digits, more), looked_up(chart, digits, "error")
        seen.add(error is None)
        if error is not None:
            assert chart["texts"][error] in refused(ran)
            continue
        for path in set(chart["columns"]) - {"error"}:
            value = looked_up(chart, digits, path)
            expected = value_at(ran.json, path)
            if path == "flags.command" and not ran.json["fits"]:
                continue  # estimate prints the command that was asked for; the page has none to run
            assert (chart["texts"][value] if isinstance(expected, str) else value) == expected, (path, digits)
    return seen


def test_an_axis_that_changes_nothing_is_left_out() -> None:
    """Figures of a 2 x 3 x 2 grid, worked by hand: each depends on some axes only."""
    numbers = list(product(range(2), range(3), range(2)))
    assert packed([7 for _ in numbers], [2, 3, 2]) == {"axes": [], "values": [7]}
    assert packed([10 * b for _, b, _ in numbers], [2, 3, 2]) == {"axes": [1], "values": [0, 10, 20]}
    assert packed([a + c for a, _, c in numbers], [2, 3, 2]) == {"axes": [0, 2], "values": [0, 1, 1, 2]}


def test_a_missing_figure_equals_any_other() -> None:
    assert without([MISSING, 1, 2, MISSING], [2, 2], 0) == [2, 1]
    assert without([MISSING, 1, 2, 3], [2, 2], 0) is None
    assert without([1, True], [2], 0) is None  # JSON tells them apart


# --- in a browser -----------------------------------------------------------------------------------------------------

# Moves the controls as a hand does, and reads what is shown at each position.
DRIVE = """(positions) => positions.map(([chart, digits]) => {
  const turn = (name, index) => {
    const input = document.querySelector(`[name="${name}"]`);
    if (!input) return;
    input.value = index;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  };
  turn("chart", chart);
  for (const [name, digit] of digits) turn(name, digit);
  return [...document.querySelectorAll("[data-path]")].map((e) => [e.dataset.path, e.value ?? e.textContent]);
})"""
READY = "html[data-ready]"


@needs_browser
@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.full)])
def test_what_the_sliders_show_is_what_estimate_prints(count: int, page: Path, run: Run, open_page: Open) -> None:
    compare_sliders(page, count, run, open_page)


@needs_browser
@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.full)])
def test_so_do_sliders_over_a_shared_prefix(count: int, shared_page: Path, run: Run, open_page: Open) -> None:
    compare_sliders(shared_page, count, run, open_page, SHARED)


def compare_sliders(page: Path, count: int, run: Run, open_page: Open, more: tuple[str, ...] = ()) -> None:
    document = embedded(page)
    drawn = positions(document, 4 * count, seed=count)
    possible = [(chart, digits) for chart, digits in drawn if looked_up(chart, digits, "error") is None][:count]
    assert len(possible) == count
    moves = [
        [
            document["charts"].index(chart),
            [[axis["name"], digit] for axis, digit in zip(chart["axes"], digits, strict=True)],
        ]
        for chart, digits in possible
    ]
    opened = open_page(page)
    opened.wait_for_selector(READY)
    for (chart, digits), texts in zip(possible, opened.evaluate(DRIVE, moves), strict=True):
        answer = estimated(run, chart, digits, more).json
        assert len(texts) >= 15
        for path, text in texts:
            if path == "flags.command" and not answer["fits"]:
                assert text == "(nothing to run: it does not fit)"
                continue
            expected = value_at(answer, path)
            assert (text if isinstance(expected, str) else json.loads(text)) == expected, path


@needs_browser
def test_it_works_by_keyboard_and_keeps_its_position_in_the_address(page: Path, run: Run, open_page: Open) -> None:
    opened = open_page(page)
    opened.wait_for_selector(READY)
    opened.focus('[name="max_model_len"]')
    opened.keyboard.press("Home")  # 4k
    opened.keyboard.press("ArrowRight")  # 16k
    opened.focus('[name="mean_tokens"]')
    opened.keyboard.press("End")  # the full context
    opened.focus('[name="users"]')
    opened.keyboard.press("Home")
    users = run("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "16k", "--format", "json").json["concurrency"]
    sentence = opened.inner_text("#answer")
    assert sentence.startswith("Yes, 1 user fits: llama-3.1-8b on h100-80g (vllm@0.33) serves")
    assert f"serves {users['users']} ({users['users_low']}–{users['users_high']}) at 16,384 tokens each" in sentence
    assert "max_model_len=16%2C384" in opened.url
    again = open_page(page, address=opened.url.partition(".html")[2])
    again.wait_for_selector(READY)
    assert again.inner_text("#answer") == sentence
    opened.keyboard.press("End")  # far more users than one server holds
    assert opened.inner_text("#answer").startswith("No, 2,048 users do not fit on one server")


@needs_browser
def test_it_opens_at_the_users_asked_for_where_they_fit(run: Run, tmp_path: Path, open_page: Open) -> None:
    """500 is a stop of its own; an L40S, the first setting, has room for fewer of 500 tokens."""
    path = tmp_path / "x.html"
    words = ("explore", "qwen3-8b", "--gpu", "l40s,b200", "--users", "500", "--ctx", "4k,32k", "--mean-tokens", "500")
    assert run(*words, "-o", path, "-q").code == 0
    opened = open_page(path)
    opened.wait_for_selector(READY)
    assert opened.inner_text("#answer").startswith("Yes, 500 users fit: qwen3-8b on b200")
    assert "users=500" in opened.url


@needs_browser
def test_it_compares_gpus_at_the_fewest_that_serve(run: Run, tmp_path: Path, open_page: Open) -> None:
    """GPUs of each kind for 200 users, by `estimate` at every split: servers of the low end of the range."""
    path, words = tmp_path / "x.html", ("--ctx", "8k", "--engine", "vllm", "--gpu-memory-utilization", "0.92")
    prices = "l40s=1.10,h100-80g=3"
    more = ("--gpu", "l40s,h100-80g", "--tp", "1,2", "--kv-cache-dtype", "auto", "--users", "200")
    assert run("explore", "qwen3-8b", *words, *more, "--prices", prices, "-q", "-o", path).code == 0
    opened = open_page(path, address="#mean_tokens=full+context&users=200")
    opened.wait_for_selector(READY)
    read = (
        "() => [...document.querySelectorAll('#gpus tbody tr')].map((r) => [...r.children].map((e) => e.textContent))"
    )
    rows = {name: cells for name, *cells in opened.evaluate(read)}
    assert set(rows) == {"l40s", "h100-80g"}
    for gpu, price in (("l40s", 1.1), ("h100-80g", 3.0)):
        counts = []
        for tp in (1, 2):
            answer = run("estimate", "qwen3-8b", "--gpu", gpu, "--tp", tp, *words, "--format", "json").json
            counts.append(-(-200 // answer["concurrency"]["users_low"]) * tp)
        assert rows[gpu][:3] == [f"{min(counts)}", f"${min(counts) * price:,.2f}", f"${min(counts) * price * 730:,.0f}"]
    assert opened.locator("#curve").is_hidden()  # one context has no curve
    opened.click("#gpus tbody tr:last-child a")
    assert opened.inner_text("#answer").startswith(("Yes", "No", "Too close"))


@needs_browser
def test_it_draws_users_over_the_context(page: Path, run: Run, open_page: Open) -> None:
    opened = open_page(page, address="#model=llama-3.1-8b&gpu=h100-80g&mean_tokens=full+context")
    opened.wait_for_selector(READY)
    label = opened.get_attribute("#curve svg", "aria-label")
    shares = {axis["name"]: axis["values"] for axis in embedded(page)["charts"][0]["axes"]}
    for text in shares["max_model_len"]:
        ran = run(
            "estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", text.replace(",", ""), "--tp", "1",
            "--gpu-memory-utilization", "0.92", "--format", "json",
        )  # fmt: skip
        assert f"{ran.json['concurrency']['users']} at {text}" in (label or "")


@needs_browser
def test_replicas_and_stages_count_as_servers_and_gpus(run: Run, tmp_path: Path, open_page: Open) -> None:
    """TP 1 x PP 2 on each of two replicas: four GPUs, and twice the users of one replica."""
    path, flags = tmp_path / "x.html", ("--tp", "1", "--pp", "2", "--dp", "2", "--ctx", "8k", "--engine", "vllm")
    prices = tmp_path / "prices.yaml"
    prices.write_text("l40s: 1.00\n")
    assert run("explore", "qwen3-8b", "--gpu", "l40s", *flags, "--prices", prices, "-o", path).code == 0
    answer = run("estimate", "qwen3-8b", "--gpu", "l40s", *flags, "--format", "json").json
    low = answer["concurrency"]["users_low"]
    assert answer["inputs"]["num_gpus"] == 4
    opened = open_page(path, address="#users=64")
    opened.wait_for_selector(READY)
    assert low < 64 <= 2 * low
    sentence = opened.inner_text("#answer")
    assert sentence.startswith("Yes, 64 users fit: qwen3-8b on 4 x l40s")
    assert "on each of 2 data-parallel ranks" in sentence
    assert sentence.endswith("$4.00 an hour for 4 GPUs.")


@needs_browser
def test_a_plan_that_does_not_fit_keeps_to_the_page(page: Path, open_page: Open) -> None:
    opened = open_page(page, "phone", address="#model=qwen3-32b&engine=vllm@0.33&gpu=rtx-4090")
    opened.wait_for_selector(READY)
    assert opened.inner_text("#answer").startswith("No: qwen3-32b on rtx-4090")
    seen = measured(opened)
    assert seen["width"] == seen["window"] == 390


@needs_browser
@pytest.mark.parametrize(("size", "scheme"), first_pair(SIZES, SCHEMES))
def test_the_page_fits_a_phone_and_a_desktop(size: str, scheme: str, page: Path, open_page: Open) -> None:
    opened = open_page(page, size, scheme)
    opened.wait_for_selector(READY)
    seen = measured(opened)
    assert complaints(opened) == []
    assert seen["loads"] == []
    assert seen["width"] == seen["window"] == SIZES[size][0]
    assert min(seen["texts"]) >= 12  # pixels
    assert set(seen["labels"]) == {1}  # every control has its name
    pairs = colors(opened, "body", "h1", "#command", "caption", "thead th")
    assert min(contrast(*pair) for pair in pairs) >= 4.5  # WCAG AA for text
    assert is_dark(pairs[0]) == (scheme == "dark")


@needs_browser
def test_the_page_runs_its_own_script_only(page: Path, tmp_path: Path, open_page: Open) -> None:
    planted = tmp_path / "planted.html"
    planted.write_text(page.read_text().replace("</body>", "<script>document.title = 'planted'</script></body>"))
    opened = open_page(planted)
    opened.wait_for_selector(READY)
    assert opened.title() != "planted"
    assert any("Content Security Policy" in line for line in complaints(opened))


@needs_browser
def test_a_page_whose_plans_are_torn_says_so(page: Path, tmp_path: Path, open_page: Open) -> None:
    torn = tmp_path / "torn.html"
    torn.write_text(re.sub(r'(id="plans">.{400})[^<]*', r"\1", page.read_text()))
    opened = open_page(torn)
    opened.wait_for_selector("#problem:not([hidden])")
    assert "make it again with kvplan explore" in opened.inner_text("#problem")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_page_of_six_gpus_is_small(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    gpus = "rtx-4090,l40s,a100-80g,h100-80g,h200,b200"
    assert run("explore", "qwen3-8b", "--gpu", gpus, "--tp", "1,2", "--kv-cache-dtype", "auto", "-o", path).code == 0
    assert path.stat().st_size < MOST_BYTES / 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "MODEL: missing"),
        (("nothing-1b",), "nothing-1b"),
        (("qwen3-8b", "--gpu", "2xh100-80g"), "takes a name without a number here"),
        (("qwen3-8b", "-o", "x.txt"), "unknown file type"),
        (("qwen3-8b", "--engine", "vllm,tgi"), "--engine 'tgi' is not a supported server"),
        (("qwen3-8b", "--ctx", "4k", "--mean-tokens", "4k,x"), "--mean-tokens"),
        (("qwen3-8b", "--ctx", "8k,auto"), "--ctx auto cannot be a choice of the page"),
        (("qwen3-8b", "--lengths", "lognormal:mean=2k,sigma=1"), "--lengths describes one plan, but"),
        (
            ("qwen3-8b", "--prompt-tokens", "1k", "--output-tokens", "500"),
            "--prompt-tokens describes one plan, but",
        ),
        (("qwen3-8b", "--from-command", "vllm serve Qwen/Qwen3-8B"), "--from-command describes one plan, but"),
    ],
)
def test_bad_input_gets_one_line(
    words: tuple[str, ...], message: str, run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(run("explore", *words))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_places_layers_has_sliders_for_them(run: Run) -> None:
    form = Form(
        {"engine": "llama.cpp", "gpu": ["rtx-3060-12g"], "max_model_len": ["4k"], "quantization": "Q4_K_M,Q8_0"}, True
    )
    document, _ = explorer_document(["qwen3-8b"], form)
    (chart,) = document["charts"]
    values = {axis["name"]: axis["values"] for axis in chart["axes"]}
    assert values["quantization"] == ["Q4_K_M", "Q8_0"]
    assert values["gpu_layers"] == ["as many as fit", "0", "9", "18", "27"]  # quarters of 36 layers and the output
    assert values["cache_type_k,cache_type_v"] == ["f16", "q8_0"]
    assert document["users"] == 1

    def value(path: str, **chosen: str) -> object:
        column, index = chart["columns"][path], 0
        for axis in (chart["axes"][number] for number in column["axes"]):
            digit = axis["values"].index(chosen[axis["name"]]) if axis["name"] in chosen else 0
            index = index * len(axis["values"]) + digit
        return column["values"][index]

    words = (
        "qwen3-8b",
        "--engine",
        "llama.cpp",
        "--gpu",
        "rtx-3060-12g",
        "--ctx",
        "4k",
        "--quant",
        "Q8_0",
        "-ngl",
        "18",
    )
    plan = run("estimate", *words, "-ctk", "q8_0", "-ctv", "q8_0", "--format", "json", "-q").json
    choice = {"quantization": "Q8_0", "gpu_layers": "18", "cache_type_k,cache_type_v": "q8_0"}
    assert value("memory.weights", **choice) == plan["memory"]["weights"]
    assert value("memory.kv_cache", **choice) == plan["memory"]["kv_cache"]
    assert value("slots.gpu_layers", **choice) == 18
