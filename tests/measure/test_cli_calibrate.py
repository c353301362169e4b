"""`calibrate --bench` and `reconcile --bench`: a user's own benchmark runs beside, and on top of, what is predicted."""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvplan.documents.schema import document_schema
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.calibration import FACTORS
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.bench_fit import Measurement, fitted, predicted, solved, without_each
from kvplan.simulate.bench_load import BenchLoad, steady
from kvplan.simulate.host import Host
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.kernels.step import KernelStep, kernel_step
from kvplan.simulate.steptime import attention_kinds
from kvplan.simulate.work import StepWork
from tests.measure.test_bench_results import INFERENCEX, SGLANG, VLLM, aiperf, guidellm
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

NONE = dict.fromkeys(FACTORS, 1.0)
SERVER = ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k")
RESULTS: dict[str, dict[str, Any]] = {
    "vllm": VLLM, "sglang": SGLANG, "inferencex": INFERENCEX, "guidellm": guidellm({"type_": "constant", "rate": 3.0}),
    "guidellm 0.3": guidellm({"type_": "concurrent", "streams": 16}, "args"),
    "aiperf": aiperf({"request_rate": 5.0, "request_rate_mode": "constant"}),
}  # fmt: skip


def planned(ranks: int = 1) -> Plan:
    """A server whose scheduler works in turn with the GPU: its host is in every time."""
    args = EngineArgs(max_model_len=8192, tensor_parallel_size=ranks)
    return plan(Request(catalog.load("llama-3.1-8b"), gpu("h100-80g"), args, parse_engine("vllm@0.12")))


def run_of(factors: dict[str, float], users: int, prompt: int, ranks: int = 1) -> Measurement:
    """A run of a server whose times are the modeled ones by these factors."""
    load = BenchLoad(users, None, 4 * users, steady(prompt, 24, None, is_constant=False))
    bare = Measurement(planned(ranks), load, ())
    prediction = predicted(bare, factors)
    times = tuple((metric, "p50", prediction.times[f"{metric}_p50"]) for metric in ("tpot", "ttft"))
    return Measurement(bare.plan, load, (*times, ("output_tokens_per_s", "mean", prediction.output_tokens_per_s)))


RUNS = ((1, 64), (4, 512), (8, 1024))


def test_runs_of_a_slower_server_are_fitted_and_their_own_error_falls() -> None:
    """A host that takes 1.8 times as long: three runs say so, and the device stays as it is."""
    fit = fitted([run_of({**NONE, "host": 1.8}, users, prompt) for users, prompt in RUNS])
    assert fit.factors["host"] == pytest.approx(1.8, rel=0.2)
    assert fit.factors["device"] == pytest.approx(1.0, rel=0.12)
    assert fit.factors["link"] == 1.0  # one rank speaks to nobody
    assert fit.error_after < 0.05 < fit.error_before


def test_runs_that_agree_leave_the_constants_alone() -> None:
    fit = fitted([run_of(NONE, users, prompt) for users, prompt in RUNS])
    assert fit.factors == pytest.approx(NONE, rel=0.02)
    assert fit.error_after == pytest.approx(0.0, abs=0.01)


def test_a_run_is_foretold_by_the_others() -> None:
    runs = [run_of({**NONE, "device": 1.4, "host": 1.4}, users, prompt) for users, prompt in RUNS]
    left_out = without_each(runs)
    assert left_out is not None
    assert left_out < 0.08 < fitted(runs).error_before
    assert without_each(runs[:1]) is None


def test_factors_are_of_what_they_name() -> None:
    plan = planned(2)
    reaches = tuple(kind.reach for kind in attention_kinds(plan))
    host = Host(gap=1e-3, delay=0.01)

    def step(**factors: float) -> KernelStep:
        return kernel_step(plan, reaches, Shares(), {**NONE, **factors}, host)

    bare, work = step(), StepWork(8, 8, 8, (800,), (800,))
    links = bare.parts(8)["all-reduces"]
    kernels = bare.seconds(work) - links - 1e-3
    assert step(device=2.0).seconds(work) == pytest.approx(2 * kernels + links + 1e-3)
    assert step(link=4.0).seconds(work) == pytest.approx(kernels + 4 * links + 1e-3)
    assert step(host=3.0).seconds(work) == pytest.approx(kernels + links + 3e-3)
    assert step(host=3.0).host.delay == pytest.approx(0.03)


def test_a_small_system_of_equations_is_solved() -> None:
    assert solved([[0.0, 2.0], [3.0, 1.0]], [4.0, 5.0]) == pytest.approx([1.0, 2.0])


def written(folder: Path, **changes: Any) -> Path:
    path = folder / f"{changes.get('max_concurrency', 4)}.json"
    own = {
        "max_concurrency": 4,
        "num_prompts": 8,
        "completed": 8,
        "total_input_tokens": 4096,
        "total_output_tokens": 192,
    }
    path.write_text(json.dumps({**VLLM, **own, **changes}))
    return path


def test_a_calibration_is_written_and_taken(tmp_path: Path, run: Run) -> None:
    written(tmp_path), written(tmp_path, max_concurrency=2)
    target = tmp_path / "calibration.out.json"
    ran = run("calibrate", *SERVER, "--bench", tmp_path / "[24].json", "-o", target)
    assert ran.code == 0, ran
    assert ran.out.startswith("llama-3.1-8b on h100-80g: 2 runs fitted, off by ")
    assert "use 3 to 5 for a better fit" in ran.err
    steps = json.loads(target.read_text())["step_time"]
    assert (steps["model"], steps["runs"], set(steps["factors"])) == ("llama-3.1-8b", 2, set(FACTORS))
    load = (
        "--prompt-tokens",
        "512",
        "--output-tokens",
        "24",
        "--users",
        "2",
        "--num-requests",
        "6",
        "--format",
        "json",
    )
    taken = run("simulate", *SERVER, *load, "--calibration", target)
    assert "fitted to 2 runs in" in taken.json["inputs"]["step_time"]
    times = taken.json["variants"][0]["times"]["tpot"]
    assert times["p50_range"] == pytest.approx([0.8 * times["p50"], 1.55 * times["p50"]])
    other = run("simulate", "llama-3.1-8b", "--gpu", "l40s", "--ctx", "8k", *load, "--calibration", target)
    assert (other.code, "was measured on NVIDIA H100" in other.err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("-o", "x.json"), "--bench: missing"),
        (("--bench", "none.json"), "--output: missing"),
        (("--bench", "none*.json", "-o", "x.json"), "no file is like none*.json"),
    ],
)
def test_a_calibration_that_lacks_something_is_refused(argv: tuple[str, ...], says: str, run: Run) -> None:
    ran = run("calibrate", *SERVER, *argv)
    assert ran.code == 2
    assert says in ran.err


def test_a_result_stands_beside_its_prediction(tmp_path: Path, run: Run) -> None:
    """The model by the result's own name; every figure that both have, with the range and whether it holds."""
    ran = run("reconcile", "--bench", written(tmp_path), "--gpu", "h100-80g", "--ctx", "8k", "--format", "json")
    assert ran.code == 0, ran
    jsonschema.validate(ran.json, document_schema("bench-reconciliation"))
    rows = {row["figure"]: row for row in ran.json["rows"]}
    assert (ran.json["model"], ran.json["load"], ran.json["tool"]) == ("llama-3.1-8b", "4 users", "vllm bench serve")
    assert {"time to first token, p50", "time per output token, mean", "output tokens per second"} <= set(rows)
    for row in rows.values():
        assert row["low"] <= row["predicted"] <= row["high"]
        assert row["in_range"] == (row["low"] <= row["measured"] <= row["high"])
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert rows["time to first token, p50"]["measured"] == pytest.approx(0.061)
    answer = run("reconcile", "--bench", written(tmp_path), "--gpu", "h100-80g", "--ctx", "8k")
    assert answer.out.splitlines()[0] == "llama-3.1-8b on h100-80g, 4 users: vllm bench serve vs kvplan"


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_a_result_of_each_tool_stands_beside_its_prediction(name: str, tmp_path: Path, run: Run) -> None:
    """Results as each tool writes them, SGLang's beside SGLang's own order of work."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(RESULTS[name]))
    server = ("--engine", "sglang", "--model", "llama-3.1-8b") if name == "sglang" else ()
    ran = run("reconcile", "--bench", str(path), "--gpu", "h100-80g", "--ctx", "4k", *server, "--format", "json")
    assert ran.code == 0, ran
    assert {row["figure"] for row in ran.json["rows"]} > {"time to first token, p50", "time per output token, p50"}
    (rate,) = [row for row in ran.json["rows"] if row["figure"] == "output tokens per second"]
    assert rate["low"] < rate["predicted"] < rate["high"]  # a run ends with its longest answer: less than what came


def test_one_length_stated_for_each_request_is_one_length(tmp_path: Path, run: Run) -> None:
    """--save-detailed lists lengths; users of one length drift apart all the same."""
    listed = written(tmp_path, input_lens=[1024] * 8, output_lens=[128] * 8)
    first = run("reconcile", "--bench", listed, "--gpu", "h100-80g", "--ctx", "4k", "--format", "json").json
    means = written(tmp_path, total_input_tokens=8 * 1024, total_output_tokens=8 * 128)
    second = run("reconcile", "--bench", means, "--gpu", "h100-80g", "--ctx", "4k", "--format", "json").json
    assert first["rows"] == second["rows"]


def test_a_run_of_requests_sent_at_once_is_simulated_to_its_end(tmp_path: Path, run: Run) -> None:
    """4,000 requests of 2,048 tokens on a server that runs 1,024: the mean wait is that of `simulate`, over all."""
    load = {"max_concurrency": None, "request_rate": "inf", "completed": 4000, "num_prompts": 4000}
    lengths = {"total_input_tokens": 4000 * 2048, "total_output_tokens": 4000 * 16}
    words = ("--gpu", "h100-80g", "--ctx", "4k", "--format", "json")
    rows = run("reconcile", "--bench", written(tmp_path, **load, **lengths), *words).json["rows"]
    (mean,) = [row["predicted"] for row in rows if row["figure"] == "time to first token, mean"]
    load_words = ("--prompt-tokens", "2048", "--output-tokens", "16", "--rate", "inf", "--num-requests", "4000")
    whole = run("simulate", "llama-3.1-8b", *load_words, *words).json["variants"][0]
    assert mean == pytest.approx(whole["times"]["ttft"]["mean"], rel=0.01)


@pytest.mark.parametrize("command", ["reconcile", "calibrate"])
def test_prompts_beyond_the_context_are_told_with_the_cure(command: str, tmp_path: Path, run: Run) -> None:
    """The first request of each of 4 users fits in 4,096 tokens; no later one does."""
    lengths = {"input_lens": [1024] * 4 + [8192] * 8, "output_lens": [16] * 12, "completed": 12, "num_prompts": 12}
    words = ("-o", str(tmp_path / "calibration.json"), "llama-3.1-8b") if command == "calibrate" else ()
    ran = run(command, "--bench", written(tmp_path, **lengths), *words, "--gpu", "h100-80g", "--ctx", "4k")
    assert ran.code == 2
    assert "no request after the first of each user is served; raise --ctx" in ran.err


def test_a_load_without_lengths_is_refused(tmp_path: Path, run: Run) -> None:
    path = written(tmp_path, total_output_tokens=None)
    ran = run("reconcile", "--bench", path, "--gpu", "h100-80g", "--ctx", "8k")
    assert (ran.code, "--output-tokens is missing" in ran.err) == (2, True)


def test_users_of_one_length_keep_step_where_prompts_go_first() -> None:
    """aic-silicon's SGLang 0.5.1: 64 users of 1,024 and 128 tokens wait 2.5 s for a first token, half of what all their
    prompts take one after another; 1.0 s where they drift apart (benchmarks/timeboard.py)."""
    answers = steady(100, 1000, None, is_constant=False, keeps_step=True)(200)
    assert {request.output_tokens for request in answers} == {1000}


def test_users_of_one_length_drift_apart() -> None:
    answers = {request.output_tokens for request in steady(100, 1000, None, is_constant=False)(200)}
    assert 900 <= min(answers) < 920 < 1080 < max(answers) <= 1100
    assert {request.output_tokens for request in steady(100, 1000, 2.0, is_constant=True)(20)} == {1000}
    at_once = list(steady(100, 1000, math.inf, is_constant=False)(5))
    assert {request.arrival_s for request in at_once} == {0.0}
