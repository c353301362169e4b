"""Every command that Python has gives the command's own words and the command's own JSON."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvplan
from tests.support.cli import LLAMA, Run, run  # noqa: F401

ROOT = Path(__file__).parents[2]
LOG = ROOT / "examples" / "vllm-did-not-start.log"
POLICY = ROOT / "examples" / "kvplan.policy.yaml"
MANIFEST = ROOT / "examples" / "manifests"
LENGTH = {"max_model_len": "16k"}
Call = Callable[[], Any]

# name -> (call, words of the command line)
CALLS: dict[str, tuple[Call, list[str]]] = {
    "one GPU": (
        lambda: kvplan.estimate("llama-3.1-8b", gpu="a100-80g", max_model_len="32k"),
        ["estimate", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "32k"],
    ),
    "six GPUs": (lambda: kvplan.estimate("llama-3.1-70b"), ["estimate", "llama-3.1-70b"]),
    "another server": (
        lambda: kvplan.estimate("llama-3.1-8b", gpu="l40s", max_model_len=8192, engine="sglang"),
        ["estimate", "llama-3.1-8b", "--gpu", "l40s", "--ctx", "8192", "--engine", "sglang"],
    ),
    "any GPU": (
        lambda: kvplan.recommend("llama-3.1-8b", users=200, max_model_len="16k"),
        ["recommend", "llama-3.1-8b", "--users", "200", "--ctx", "16k"],
    ),
    "these GPUs": (
        lambda: kvplan.recommend("llama-3.1-8b", users="40", gpu="2xl40s", max_model_len="16k", fp8=False),
        ["recommend", "llama-3.1-8b", "--users", "40", "--gpu", "2xl40s", "--ctx", "16k", "--no-fp8"],
    ),
    "GPUs to choose from": (
        lambda: kvplan.recommend(
            "qwen3-32b", users=30, gpus=["h200", "l40s"], max_model_len="8k", mean_tokens=2000, optimistic=True
        ),
        [
            "recommend",
            "qwen3-32b",
            "--users",
            "30",
            "--gpus",
            "h200,l40s",
            "--ctx",
            "8k",
            "--mean-tokens",
            "2000",
            "--optimistic",
        ],
    ),
    "with prices": (
        lambda: kvplan.recommend("llama-3.1-8b", users=50, max_model_len="8k", prices=ROOT / "examples/prices.yaml"),
        ["recommend", "llama-3.1-8b", "--users", "50", "--ctx", "8k", "--prices", str(ROOT / "examples/prices.yaml")],
    ),
    "a log": (lambda: kvplan.why(LOG), ["why", str(LOG)]),
    "a log and its GPU": (lambda: kvplan.why(LOG, gpu="l40s"), ["why", str(LOG), "--gpu", "l40s"]),
    "two models": (
        lambda: kvplan.diff("llama-3.1-8b", "qwen3-8b", gpu="h200", max_model_len=32768),
        ["diff", "llama-3.1-8b", "qwen3-8b", "--gpu", "h200", "--ctx", "32768"],
    ),
    "a policy": (lambda: kvplan.check(POLICY), ["check", str(POLICY)]),
    "targets": (
        lambda: kvplan.recommend(
            "llama-3.1-8b",
            slo="ttft.p90=2s,tpot=50ms",
            users=20,
            prompt_tokens=1000,
            output_tokens=50,
            max_model_len="8k",
            gpus="l40s",
            num_requests=60,
            prices=ROOT / "examples/prices.yaml",
        ),
        [
            "recommend",
            "llama-3.1-8b",
            "--slo",
            "ttft.p90=2s,tpot=50ms",
            "--users",
            "20",
            "--prompt-tokens",
            "1000",
            "--output-tokens",
            "50",
            "--ctx",
            "8k",
            "--gpus",
            "l40s",
            "--num-requests",
            "60",
            "--prices",
            str(ROOT / "examples/prices.yaml"),
        ],
    ),
    "flags": (
        lambda: kvplan.tune(
            "llama-3.1-8b",
            gpu="l40s",
            max_model_len="8k",
            prompt_tokens=500,
            output_tokens=50,
            rate=2,
            num_requests=50,
            slo="ttft.p90=2s,tpot=80ms",
            fp8=False,
        ),
        [
            "tune",
            "llama-3.1-8b",
            "--gpu",
            "l40s",
            "--ctx",
            "8k",
            "--prompt-tokens",
            "500",
            "--output-tokens",
            "50",
            "--rate",
            "2",
            "--num-requests",
            "50",
            "--slo",
            "ttft.p90=2s,tpot=80ms",
            "--no-fp8",
            "--jobs",
            "1",
        ],
    ),
    "a load": (
        lambda: kvplan.simulate_load(
            "llama-3.1-8b",
            gpu="l40s",
            max_model_len="8k",
            prompt_tokens=1000,
            output_tokens=100,
            num_requests=200,
            rate=4,
            slo="ttft.p90=2s",
            baseline="contiguous",
        ),
        [
            "simulate",
            "llama-3.1-8b",
            "--gpu",
            "l40s",
            "--ctx",
            "8k",
            "--prompt-tokens",
            "1000",
            "--output-tokens",
            "100",
            "--num-requests",
            "200",
            "--rate",
            "4",
            "--slo",
            "ttft.p90=2s",
            "--baseline",
            "contiguous",
        ],
    ),
    "users of a profile": (
        lambda: kvplan.simulate_load("qwen3-8b", gpu="h200", max_model_len="16k", profile="azure-2023-conv", users=20),
        ["simulate", "qwen3-8b", "--gpu", "h200", "--ctx", "16k", "--profile", "azure-2023-conv", "--users", "20"],
    ),
    "models": (
        lambda: kvplan.list_models(family="qwen3", max_params="8B"),
        ["models", "--family", "qwen3", "--max-params", "8B"],
    ),
    "a model": (lambda: kvplan.list_models("llama-3.1-8b"), ["models", "llama-3.1-8b"]),
    "GPUs": (kvplan.list_gpus, ["gpus"]),
    "a GPU": (lambda: kvplan.list_gpus("NVIDIA H200"), ["gpus", "NVIDIA H200"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_what_its_command_prints(run: Run, name: str) -> None:  # noqa: F811
    call, words = CALLS[name]
    answer = call()
    assert f"{answer.to_json()}\n" == run(*words, "--format", "json").out
    assert json.loads(answer.to_json()) == json.loads(json.dumps(answer.to_dict()))
    printed = [line.rstrip() for line in run(*words).out.splitlines()]
    assert [line.rstrip() for line in str(answer).splitlines()] == printed
    assert answer.headline in " ".join(printed)  # a long one is wrapped
    assert answer.headline in repr(answer)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("a load", "users of a profile")])
def test_an_answer_survives_pickle_and_equals_its_copy(name: str) -> None:
    answer = CALLS[name][0]()
    copy = pickle.loads(pickle.dumps(answer))
    assert copy == answer
    assert str(copy) == str(answer)


def test_notes_and_warnings_are_the_command_s(run: Run) -> None:  # noqa: F811
    words = ["recommend", "llama-3.1-8b", "--users", "20", "--gpus", "l40s"]
    answer = kvplan.recommend("llama-3.1-8b", users=20, gpus="l40s")
    lines = [line.removeprefix("kvplan: note: ") for line in run(*words).err.splitlines() if "kvplan: note: " in line]
    assert list(answer.notes) == lines


# --- figures ----------------------------------------------------------------------------------------------------------


def test_users_have_the_range_of_the_document() -> None:
    answer = kvplan.estimate("llama-3.1-8b", gpu="2xl40s", max_model_len=8192, data_parallel_size=2)
    figures = answer.to_dict()["concurrency"]
    assert figures["users_low"] is not None
    assert figures["users_high"] is not None
    assert answer.users_low == 2 * figures["users_low"]
    assert answer.users_high == 2 * figures["users_high"]
    assert answer.users_low <= answer.users <= answer.users_high


def test_without_a_gpu_there_is_an_answer_for_each_common_one() -> None:
    answers = kvplan.estimate("llama-3.1-70b", max_model_len=8192)
    alone = kvplan.estimate("llama-3.1-70b", gpu="b200", max_model_len=8192)
    assert list(answers.by_gpu) == ["rtx-4090", "l40s", "a100-80g", "h100-80g", "h200", "b200"]
    assert answers["b200"].users == alone.users
    assert [answer.fits for answer in answers].count(True) == 1  # 131 GiB of weights: of these only b200 has room
    assert len(answers) == 6
    assert answers.failures == {}


def test_the_best_placement_is_the_first_of_the_document(run: Run) -> None:  # noqa: F811
    answer = kvplan.recommend("llama-3.1-8b", users=200, max_model_len="16k")
    document = run("recommend", "llama-3.1-8b", "--users", "200", "--ctx", "16k", "--format", "json").json
    assert answer.best == document["placements"][0]
    assert answer.serve_command == document["placements"][0]["command"]
    assert answer.holds is document["holds"]


def test_why_reads_a_path_and_a_text() -> None:
    by_path, by_text = kvplan.why(LOG), kvplan.why(LOG.read_text(encoding="utf-8"))
    assert by_path == by_text
    assert (by_path.outcome, by_path.cause) == (by_path.to_dict()["outcome"], by_path.to_dict()["cause"])
    assert [cure["flags"] for cure in by_path.cures] == [cure["flags"] for cure in by_path.to_dict()["cures"]]
    assert by_path.cures


def test_a_comparison_says_whether_it_is_worse(run: Run) -> None:  # noqa: F811
    words = ["diff", "llama-3.1-8b", "qwen3-8b", "--gpu", "h200", "--ctx", "8k"]
    answer = kvplan.diff("llama-3.1-8b", "qwen3-8b", gpu="h200", max_model_len="8k")
    assert answer.is_worse is bool(run(*words, "--exit-code").code)
    assert answer.is_equal is False
    assert kvplan.diff("qwen3-8b", "qwen3-8b", gpu="h200", max_model_len="8k").is_equal


def test_a_check_passes_where_the_command_exits_with_0(run: Run, tmp_path: Path) -> None:  # noqa: F811
    answer = kvplan.check(POLICY)
    assert answer.passes is (run("check", str(POLICY)).code == 0)
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        "version: 1\ntargets:\n  - id: chat\n    model: llama-3.1-70b\n    gpu: l40s\n    rules: {fits: true}\n",
        encoding="utf-8",
    )
    assert run("check", str(policy)).code == 1
    assert not kvplan.check(policy).passes
    assert [finding.outcome for finding in kvplan.check(policy).findings] == ["fail"]


def test_a_listing_has_rows_and_names(run: Run) -> None:  # noqa: F811
    models = kvplan.list_models(family="qwen3")
    document = run("models", "--family", "qwen3", "--format", "json").json
    assert list(models) == document["models"]
    assert models.names == [row["name"] for row in document["models"]]
    assert len(models) == len(document["models"])
    assert kvplan.list_gpus("h200").names == ["h200"]


def test_a_simulation_has_its_run_and_says_whether_it_keeps_the_targets(run: Run) -> None:  # noqa: F811
    call, words = CALLS["a load"]
    answer = call()
    assert answer.run == run(*words, "--format", "json").json["variants"][0]
    assert answer.keeps is (run(*words, "--exit-code").code == 0)
    assert CALLS["users of a profile"][0]().keeps is None
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(answer)


def test_explore_has_the_page_that_the_command_writes(run: Run, tmp_path: Path) -> None:  # noqa: F811
    words = ["explore", "llama-3.1-8b", "--gpu", "l40s,h200", "--ctx", "8k,16k", "--tp", "1,2", "--engine", "vllm"]
    assert run(*words, "--users", "40", "--output", str(tmp_path / "command.html")).code == 0
    page = kvplan.explore(
        "llama-3.1-8b", gpu=["l40s", "h200"], max_model_len=["8k", "16k"], tensor_parallel_size=[1, 2], engine="vllm",
        users=40,
    )  # fmt: skip
    page.save(tmp_path / "python.html")
    by_command, by_python = ((tmp_path / name).read_text(encoding="utf-8") for name in ("command.html", "python.html"))
    command = re.compile(r"<p>Command: <code>.*?</code></p>|<!-- the command -->")
    assert len(command.findall(by_command)) == 1
    assert command.sub("", by_command) == command.sub("", by_python)
    assert "8b" in page.headline
    assert page._repr_html_().startswith("<iframe ")


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_dict_is_a_config(tmp_path: Path) -> None:
    # The same config as a file is the oracle; only its name and where it was read from differ.
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    by_file = kvplan.estimate(tmp_path, gpu="h200", max_model_len=8192)
    by_dict = kvplan.estimate(LLAMA, gpu="h200", max_model_len=8192)
    assert by_dict.memory == by_file.memory
    assert by_dict.users == by_file.users
    assert by_dict.headline.startswith("llama on h200: ")
    named = kvplan.estimate(LLAMA | {"_name_or_path": "acme/chat"}, gpu="h200", max_model_len=8192)
    assert named.serve_command.startswith("vllm serve acme/chat ")


def test_a_dict_is_a_config_in_other_calls() -> None:
    assert kvplan.recommend(LLAMA, users=20, gpus="h200", max_model_len=8192).best is not None
    drafted = kvplan.estimate(LLAMA, gpu="h200", draft_model="llama-3.2-1b", num_speculative_tokens=4)
    assert drafted.to_dict()["memory"]["draft_weights"] > 2 * 10**9  # 1.24B parameters, in bfloat16


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "nothing-known"}])
def test_a_dict_that_is_no_config_is_refused_in_words(config: dict[str, Any]) -> None:
    with pytest.raises(kvplan.KvplanError, match="the model's config"):
        kvplan.estimate(config, gpu="h200")


def test_a_file_of_a_server_s_command_is_read_as_the_command_line_reads_it(run: Run, tmp_path: Path) -> None:  # noqa: F811
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve Qwen/Qwen3-8B --max-model-len 8192\n", encoding="utf-8")
    answer = kvplan.estimate(script, gpu="h200")
    assert answer.to_dict() == run("estimate", str(script), "--gpu", "h200", "--format", "json").json


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: kvplan.recommend("llama-3.1-8b", users=0), "--users"),
        (lambda: kvplan.recommend("llama-3.1-8b", users=9, gpu="h200", gpus="l40s"), "--gpu and --gpus"),
        (lambda: kvplan.recommend("llama-3.1-8b", users=9, data_parallel_size=2), "the number of replicas is computed"),
        (lambda: kvplan.recommend(users=9), "MODEL: missing"),
        (lambda: kvplan.simulate_load("llama-3.1-8b", gpu="l40s"), "workload: missing"),
        (
            lambda: kvplan.simulate_load("llama-3.1-8b", gpu="l40s", profile="azure-2023-conv", rate=1, think="2s"),
            "only with --users",
        ),
        (lambda: kvplan.why("\n\n"), "is empty"),
        (lambda: kvplan.why("no-such-file.log"), "no-such-file.log"),
        (lambda: kvplan.diff("llama-3.1-8b", "qwen3-8b"), "--gpu: missing"),
        (lambda: kvplan.diff("llama-3.1-8b"), "NEW: missing"),
        (lambda: kvplan.check("no-such-policy.yaml"), "no-such-policy.yaml"),
        (lambda: kvplan.list_models(family="nobody"), "no model matches"),
        (lambda: kvplan.list_gpus("h201"), "h201"),
    ],
)
def test_what_the_command_refuses_is_refused_in_its_words(call: Call, text: str) -> None:
    with pytest.raises(kvplan.KvplanError, match=text):
        call()


# --- charts -----------------------------------------------------------------------------------------------------------


def test_a_plot_shows_the_memory_of_the_answer() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    answer = kvplan.estimate("llama-3.1-8b", gpu="a100-80g", max_model_len=32768)
    ax = answer.plot()
    widths = [patch.get_width() for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_height()]
    assert sum(widths) == answer.memory.total
    assert answer.memory.kv_cache in widths
    assert len(kvplan.estimate("qwen3-8b").plot().get_yticks()) == 6
    _, own = pyplot.subplots()
    assert kvplan.recommend("llama-3.1-8b", users=20, max_model_len="8k", gpus="h200,l40s").plot(own) is own
    assert CALLS["a load"][0]().plot().lines
    pyplot.close("all")


def test_a_notebook_shows_the_bar() -> None:
    answer = kvplan.estimate("llama-3.1-8b", gpu="a100-80g", max_model_len=32768)
    page = answer._repr_html_()
    share = 100 * answer.memory.kv_cache / answer.memory.total
    assert re.search(rf"title='KV cache' style='[^']*;width:{share:.2f}%'", page)
    assert "<pre>" in kvplan.recommend("llama-3.1-8b", users=20, max_model_len="8k")._repr_html_()
