"""`recommend --slo`: servers that keep targets of time; its figures are those of `simulate` at a server's share."""

import csv
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.report import recommend_text, timed_text
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.placing import Means, steady_rate
from kvplan.simulate.steptime import step_time
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

LOAD = ("--prompt-tokens", "800", "--output-tokens", "60", "--num-requests", "300")
MODEL = ("llama-3.1-8b", "--ctx", "4k")
SLO = ("--slo", "ttft.p90=1s,tpot.p90=60ms")
ASKED = ("recommend", *MODEL, *LOAD, *SLO, "-q", "--format", "json")


def simulated(run: Run, servers: int, rate: float, *more: str) -> dict[str, str]:
    """Verdicts of one server at its share of the rate."""
    ran = run(
        "simulate", *MODEL, "--gpu", "l40s", *LOAD, *SLO, "--rate", f"{rate / servers:.9f}", "-q",
        "--format", "json", *more,
    )  # fmt: skip
    return {target["promise"]: target["verdict"] for target in ran.json["variants"][0]["slo"]}


def test_the_fewest_servers_that_keep_the_targets(run: Run) -> None:
    """One server fewer does not keep them over the whole range, by `simulate` itself."""
    document: Any = run(*ASKED, "--gpu", "l40s", "--no-fp8", "--tp", "1", "--rate", "24").json
    [best] = document["placements"]
    assert best["servers"] == best["num_gpus"] > 1
    assert set(simulated(run, best["servers"], 24).values()) == {"kept"}
    assert set(simulated(run, best["servers"] - 1, 24).values()) != {"kept"}
    assert document["answer"].startswith(f"Take {best['num_gpus']} x l40s: ")
    assert "targets of time" not in document["answer"]
    best["changes"] = ["fp8 KV"]
    assert timed_text.headline(document).startswith(f"Take {best['num_gpus']} x l40s with fp8 KV: ")
    assert recommend_text.LESS_PRECISE in timed_text.remarks(document)


@pytest.mark.parametrize("card", ["l40s", "h100-80g"])
def test_no_server_serves_more_than_the_closed_form_bounds(run: Run, card: str) -> None:
    """A tenth more than the bound is sent, and no more than it is served: no cheaper placement is passed over."""
    answer = plan(Request(catalog.load("llama-3.1-8b"), gpu(card), EngineArgs(max_model_len=4096)))
    bound = steady_rate(answer, step_time(answer, Shares(), None), Means(800, 60), (), {}).rate
    load = ("--prompt-tokens", "800", "--output-tokens", "60", "--num-requests", "2500", "--rate", f"{1.1 * bound:.3f}")
    [variant] = run("simulate", *MODEL, "--gpu", card, *load, "-q", "--format", "json").json["variants"]
    assert variant["throughput"]["requests_per_s"] <= bound


def test_likely_times_need_no_more_servers_than_their_whole_ranges(run: Run) -> None:
    document = run(*ASKED, "--gpus", "l40s,a100-80g,h100-80g", "--no-fp8", "--rate", "40").json
    servers = {
        (placement["gpu"], placement["tensor_parallel_size"]): placement["servers"]
        for placement in document["placements"]
    }
    assert len(servers) >= 2
    for (name, split), number in servers.items():
        alone = run(*ASKED, "--gpu", name, "--tp", str(split), "--no-fp8", "--rate", "40", "--optimistic").json
        assert alone["placements"][0]["servers"] <= number


def test_spare_servers_and_prices(run: Run, tmp_path: Path) -> None:
    """Dollars: GPUs x price; per million tokens: dollars an hour over the output tokens that the load asks for."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("l40s: 1.5\n")
    document = run(*ASKED, "--gpus", "l40s,a100-80g", "--rate", "24", "--prices", prices, "--spare", "1").json
    with_price = [placement for placement in document["placements"] if placement["gpu"] == "l40s"]
    without = [placement for placement in document["placements"] if placement["gpu"] == "a100-80g"]
    assert with_price
    for placement in with_price:
        assert placement["price_per_hour"] == pytest.approx(placement["num_gpus"] * 1.5)
        millions_per_hour = 24 * 60 * 3600 / 1e6
        assert placement["price_per_million_output_tokens"] == pytest.approx(
            placement["price_per_hour"] / millions_per_hour, rel=1e-6
        )
        assert placement["spare"] == 1
        assert placement["output_tokens_per_s"] == pytest.approx(
            24 * 60
        )  # of all servers, as in the text; the spare idles
        assert placement["server_output_tokens_per_s"] == pytest.approx(24 * 60 / (placement["servers"] - 1))
    assert all(placement["price_per_hour"] is None for placement in without)  # a row without a price


def test_users_who_wait_for_answers(run: Run) -> None:
    document = run(*ASKED, "--gpu", "l40s", "--tp", "1", "--no-fp8", "--users", "60").json
    [best] = document["placements"]
    share = -(-60 // best["servers"])
    ran = run("simulate", *MODEL, "--gpu", "l40s", *LOAD, *SLO, "--users", share, "-q", "--format", "json")
    assert {target["verdict"] for target in ran.json["variants"][0]["slo"]} == {"kept"}


def test_a_target_that_no_number_of_servers_keeps(run: Run) -> None:
    ran = run("recommend", *MODEL, *LOAD, "--gpu", "l40s", "--slo", "tpot=5ms", "--rate", "1", "--exit-code")
    assert ran.code == 1
    assert ran.out.startswith("No: no placement tried serves ")
    assert "with a single request a token takes longer than the target" in ran.out


def test_the_json_follows_its_schema_and_every_format_says_it(run: Run, tmp_path: Path) -> None:
    schema = run("schema", "timed-recommendation").json
    report = tmp_path / "answer.md"
    document = run(*ASKED, "--gpus", "l40s,h100-80g", "--rate", "8", "--report", report).json
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(document)) == []
    assert document["answer"] in report.read_text().replace("*", "")
    table = run("recommend", *MODEL, *LOAD, *SLO, "--gpus", "l40s,h100-80g", "--rate", "8", "-q")
    assert table.out.startswith(document["answer"])
    assert document["placements"][0]["command"] in table.out
    rate_texts = [line.split()[-1] for line in table.out.splitlines() if " x TP " in line]
    rates = [placement["output_tokens_per_s"] for placement in document["placements"]]
    assert [float(text.replace(",", "")) for text in rate_texts] == pytest.approx(rates, rel=0.005)
    (head, *rows) = csv.reader(run(*ASKED[:-1], "csv", "--gpus", "l40s,h100-80g", "--rate", "8").out.splitlines())
    assert [float(row[head.index("output_tokens_per_s")]) for row in rows] == pytest.approx(rates)
    assert [float(row[head.index("ttft p90 high")]) for row in rows] == pytest.approx(
        [placement["targets"][0]["high"] for placement in document["placements"]]
    )


def test_pcie_is_said(run: Run) -> None:
    """Two L40S speak over PCIe (NVIDIA's data sheet: no NVLink)."""
    document = run(*ASKED, "--gpu", "l40s", "--tp", "2", "--rate", "2").json
    assert document["placements"][0]["warnings"] == ["its GPUs communicate over PCIe at every layer"]


def test_without_targets_it_says_that_the_speed_was_not_checked(run: Run) -> None:
    """The pace beside it is that of `simulate` while the same users decode."""
    ran = run("recommend", *MODEL, "--users", "20", "--gpus", "l40s")
    lines = ran.out.splitlines()
    assert lines[0].endswith("; speed not checked")
    assert lines[1].startswith("While all decode, a user gets about ")
    assert "--slo ttft=2s,tpot=50ms" in lines[1]


def test_the_page_has_dollars_a_month_and_a_curve(run: Run, tmp_path: Path) -> None:
    """A month has 730 hours; the curve's stairs rise where a server is full."""
    page, text = tmp_path / "buy.html", tmp_path / "buy.md"
    words = (*ASKED[:-2], "--gpus", "l40s,h100-80g", "--rate", "24", "--prices", "l40s=1.5,h100=3", "--report", page)
    document: Any = run(*words, "--report", text, "--format", "json").json
    assert document["question"]["prices"] == "as stated by --prices"
    for place in document["placements"][:3]:
        assert f"\\${place['price_per_hour'] * 730:,.0f} | \\${place['price_per_hour']:,.2f}" in text.read_text()
    assert "Dollars per month by requests per second" in page.read_text()
    [best, *_] = timed_text.offers(document)
    share = 24 / document["placements"][0]["servers"]
    server_cost = document["placements"][0]["price_per_hour"] / document["placements"][0]["servers"] * 730
    assert [best.cost(amount) for amount in (share * 0.5, share, share * 1.01, 24)] == pytest.approx(
        [server_cost, server_cost, 2 * server_cost, 24 / share * server_cost]
    )


def test_the_page_without_targets_says_that_latency_was_not_checked(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "buy.md"
    assert run("recommend", *MODEL, "--users", "50", "--gpus", "l40s,h100-80g", "--report", text, "-q").code == 0
    assert "| choice | " in text.read_text()
    assert "| not checked |" in text.read_text()
    assert "--prices h200=3.80,b200=6" in text.read_text()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--users", "5", "--rate", "2"), "--rate"),
        (("--users", "5", "--spare", "1"), "--spare"),
        ((*SLO, *LOAD), "--rate"),
        ((*SLO, *LOAD, "--rate", "inf"), "--rate"),
        ((*SLO, "--rate", "2"), "give one of --trace, --profile, --prompt-tokens"),
        ((*SLO, *LOAD, "--rate", "2", "--mean-tokens", "2k"), "--mean-tokens"),
    ],
)
def test_options_of_the_other_question_are_refused(run: Run, options: tuple[str, ...], part: str) -> None:
    ran = run("recommend", *MODEL, "--gpus", "l40s", *options)
    assert ran.code == 2
    assert part in ran.err


@pytest.mark.parametrize(
    ("context", "prompts", "message"),
    [
        # 8,192 + 60 tokens
        ("4k", "8k", "no prompt fits in the context of 4,096 tokens; raise it: 8,252 is enough for every request"),
        ("4k", "uniform:3000-9000", "so no server can meet ttft p90; raise it"),
        ("131072", "140k", "remove requests longer than the 131,072 of llama-3.1-8b"),
    ],
)
def test_prompts_beyond_the_context_are_no_matter_of_time(run: Run, context: str, prompts: str, message: str) -> None:
    words = ("llama-3.1-8b", "--ctx", context, "--prompt-tokens", prompts, "--output-tokens", "60", "--num-requests")
    ran = run("recommend", *words, "50", "--rate", "1", *SLO, "--gpu", "h100-80g", "--tp", "1", "-q")
    assert message in refused(ran)


def test_a_few_prompts_beyond_the_context_are_a_note(run: Run) -> None:
    """Of 50 requests a p50 may miss 25; a server without them would serve the others."""
    load = ("--prompt-tokens", "uniform:3000-4400", "--output-tokens", "60", "--num-requests", "50", "--rate", "1")
    ran = run("recommend", *MODEL, *load, "--slo", "ttft.p50=3s", "--gpu", "h100-80g", "--tp", "1", "--no-fp8")
    assert ran.out.startswith("Take 1 x h100-80g.")
    assert "of 50 prompts exceed the context of 4,096 tokens and miss every target" in ran.err


def test_every_format_says_what_no_published_result_has(run: Run, tmp_path: Path) -> None:
    """No published result is of weights in AWQ, and no linear layer of 4 bits was measured."""
    report = tmp_path / "answer.html"
    command = ["llama-3.1-8b-awq" if word == "llama-3.1-8b" else word for word in ASKED]
    words = ("--gpu", "h100-80g", "--no-fp8", "--tp", "1", "--rate", "2", "--report", report)
    unseen = run(*command, *words).json["unseen"]
    assert unseen == ["borrowed kernels (int4 linear layers as in bfloat16)", "weights in awq"]
    assert f"no published benchmarks with {unseen[0]} or {unseen[1]}" in report.read_text()


def test_the_closed_form_is_said_before_anything_is_simulated(run: Run) -> None:
    """Then a line for each placement that was, which is in the answer; -q has none of them."""
    words = ("recommend", *MODEL, *LOAD, *SLO, "--rate", "2", "--gpus", "l40s,h100-80g")
    ran = run(*words)
    lines = [line.removeprefix("kvplan: progress: ") for line in ran.err.splitlines() if ": progress: " in line]
    assert lines[0].startswith("by the closed form at least ")
    assert len(lines) >= 2
    for line in lines[1:]:
        gpus, _, split = line.partition(" meet the targets as ")
        assert any(gpus in row and all(part in row for part in split.split(", ")) for row in ran.out.splitlines())
    assert ": progress: " not in run(*words, "-q").err


def test_fewer_requests_than_users_are_refused(run: Run) -> None:
    words = ("recommend", *MODEL, *SLO, "--users", "50", "--prompt-tokens", "500", "--output-tokens", "100")
    line = refused(run(*words, "--gpus", "l40s", "--num-requests", "20"))
    assert line == (
        "--num-requests 20 is fewer than the 50 users, so they would never all run at once; write 100 or more"
    )
