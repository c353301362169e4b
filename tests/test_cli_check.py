"""`kvplan check`: answers, exit codes, where errors point, formats, baselines, evidence, --init, damaged policies."""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan import strict_yaml
from kvplan.artifact import document_schema
from kvplan.cli.check import checked
from kvplan.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.policy import init as policy_init
from kvplan.policy.result import CheckResult, Figures
from kvplan.report.policy_text import marker
from tests.cli import Ran, Run, config_file, refused
from tests.cli import run as run  # the fixture
from tests.recorded_runs import cpu_run, failed_run, gpu_run, rewritten

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "kvplan.policy.yaml"
LLAMA_8B = "  model: llama-3.1-8b\n  gpu: a100-80g\n  max_model_len: 32k\n"


def policy(folder: Path, target: str = LLAMA_8B, rules: str = "fits: true", more: str = "") -> Path:
    path = folder / "kvplan.policy.yaml"
    path.write_text(f"version: 1\ntargets:\n- id: chat\n{target}  rules: {{{rules}}}\n{more}", encoding="utf-8")
    return path


def findings(ran: Ran) -> dict[str, dict[str, Any]]:
    return {finding["rule"]: finding for target in ran.json["targets"] for finding in target["findings"]}


# --- answers and exit codes -------------------------------------------------------------------------------------------


def test_a_policy_that_is_kept_is_0_and_one_that_is_broken_1(run: Run, tmp_path: Path) -> None:
    """Servers with this model, GPU and context log 13.5 to 14.4 full-length requests."""
    kept = run("check", policy(tmp_path, rules="fits: true, min_concurrency: 13.5"))
    assert (kept.code, kept.err) == (0, "")
    assert kept.out.endswith("2 passed\n")
    broken = run("check", policy(tmp_path, rules="fits: true, min_concurrency: 14.5"))
    assert (broken.code, broken.err) == (1, "")
    assert re.search(r"^  fail  KVP003 min_concurrency +14\.11 requests of 32,768 tokens", broken.out, re.MULTILINE)
    assert "needs --tensor-parallel-size 2 (" in broken.out
    assert broken.out.endswith(f"{tmp_path}/kvplan.policy.yaml: 1 passed, 1 failed\n")


def test_a_line_for_each_target_and_each_finding(run: Run) -> None:
    lines = run("check", EXAMPLE).out.splitlines()
    found = run("check", EXAMPLE, "--format", "json").json
    outcomes = [finding["outcome"] for target in found["targets"] for finding in target["findings"]]
    assert outcomes.count("skip") == 3  # the baseline of three targets, which one line tells
    assert len([line for line in lines if line.startswith("  ")]) == len(outcomes) - 3
    assert (
        len([line for line in lines if line.startswith("skip  KVP105 baseline.kv_tokens of chat-prod, agents, ")]) == 1
    )
    assert lines[-1].endswith(", 3 skipped")
    for target in found["targets"]:
        assert f"{target['id']}  {target['title']}" in lines


def test_what_many_rules_and_targets_lack_alike_is_one_line_and_counts_in_full(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kvplan.policy.yaml"
    targets = "".join(
        f"- id: t{i}\n  model: llama-3.1-8b\n  gpu: h200\n  max_model_len: 8k\n  rules: {{fits: true{more}}}\n"
        for i, more in enumerate((", min_users: 1", ", min_users: 1", "", ""))
    )
    limits = "max_growth: {weights: 0%}, max_drop: {kv_cache: 5%}"
    path.write_text(f"version: 1\ntargets:\n{targets}baseline: {{file: b.json, {limits}}}\n", encoding="utf-8")
    ran = run("check", path)
    assert ran.out.count("there is no baseline") == 1
    assert (
        "skip  KVP101 baseline.weights, KVP104 baseline.kv_cache of 4 targets: there is no baseline b.json" in ran.out
    )
    assert "skip  KVP004 min_users of t0, t1: the target states neither" in ran.out  # t2 and t3 have no such rule
    assert ran.out.endswith(": 4 passed, 10 skipped\n")  # 4 x 2 of the baseline and 2 x min_users


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm serve X --no-such-flag 3", "target chat: command: --no-such-flag: is no flag kvplan knows"),
        ("vllm serve X --enforce-eagr", "target chat: command: --enforce-eagr: is not a flag of vLLM; did you mean"),
        ("vllm serve X y", "target chat: command: a word without a flag ('y')"),
    ],
)
def test_a_fault_of_a_command_is_named_as_the_policy_has_it(run: Run, tmp_path: Path, command: str, said: str) -> None:
    error = refused(run("check", policy(tmp_path, f"  gpu: l4\n  command: {command}\n")))
    assert f"kvplan.policy.yaml:5:12: {said}" in error
    assert "--from-command" not in error


def test_what_is_not_known_of_a_command_is_told_as_the_policy_has_it(run: Run, tmp_path: Path) -> None:
    target = "  gpu: h200\n  command: vllm serve meta-llama/Llama-3.1-8B --max-model-len 8K --dtypo 3\n"
    ran = run("check", policy(tmp_path, target))
    assert (ran.code, ran.err) == (
        0, "kvplan: warning: target chat: command: not one kvplan knows: --dtypo; answered as without\n"
    )  # fmt: skip


def test_one_request_is_not_requests(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, f"{LLAMA_8B}  max_num_seqs: 1\n  mean_tokens: 1000\n", "min_users: 1"))
    assert " 1 request of 1,000 tokens (the mean) at once (--max-num-seqs; " in ran.out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen3-8b", "note: target chat: model: qwen3-8b counts, not meta-llama/Llama-3.1-8B of its command\n"),
        ("llama-3.1-8b", ""),  # the catalog's name of the same model
        ("meta-llama/Llama-3.1-8B", ""),
    ],
)
def test_a_model_that_wins_over_its_commands_is_said(run: Run, tmp_path: Path, model: str, said: str) -> None:
    target = f"  model: {model}\n  gpu: h200\n  max_model_len: 8k\n  command: vllm serve meta-llama/Llama-3.1-8B\n"
    ran = run("check", policy(tmp_path, target))
    assert ran.code == 0
    assert ran.err.removeprefix("kvplan: ") == said
    assert run("check", policy(tmp_path, target), "--quiet").err == ""


def test_strict_refuses_warnings_and_what_is_skipped(run: Run, tmp_path: Path) -> None:
    warned = policy(tmp_path, rules="min_concurrency: 999", more="severity: {min_concurrency: warn}")
    assert [run("check", warned, *flags).code for flags in ((), ("--strict",))] == [0, 1]
    skipped = policy(tmp_path, rules="fits: true, min_users: 1")
    assert [run("check", skipped, *flags).code for flags in ((), ("--strict",))] == [0, 1]


def test_a_policy_of_which_all_is_skipped_warns(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, rules="min_users: 1"))
    assert ran.code == 0
    assert "kvplan: warning: " in ran.err
    assert "nothing was judged" in ran.err
    assert run("check", policy(tmp_path, rules="min_users: 1"), "--quiet").err == ""


def test_the_policy_beside_the_user_is_the_default(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(run("check"))
    assert message.startswith("./kvplan.policy.yaml: no such file")
    assert "kvplan check --init" in message
    policy(tmp_path)
    assert run("check").code == 0


def test_the_day_may_be_said(run: Run, tmp_path: Path) -> None:
    waived = "waivers: [{rule: chat/min_concurrency, reason: later, expires: 2030-01-01}]"
    path = policy(tmp_path, rules="min_concurrency: 999", more=waived)
    assert run("check", path, "--today", "2030-01-01").code == 0
    expired = run("check", path, "--today", "2030-01-02")
    assert expired.code == 1
    assert "kvplan: warning: " in expired.err
    assert "expired on 2030-01-01" in expired.err
    for wrong in ("2030-02-30", "tomorrow", "20300101", "2030-W01-1"):
        assert refused(run("check", path, "--today", wrong)).startswith("--today: is no day")


def test_what_a_plan_is_made_from_goes_with_init_only(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path)
    for flags in (
        ("--tp", "2"),
        ("--gpu", "l4"),
        ("--mean-tokens", "2k"),
        ("--from-pid", "1"),
        ("-o", "x.yaml"),
        ("--no-ep",),
    ):
        assert "goes with --init only" in refused(run("check", path, *flags))
    assert refused(run("check", path, "--ctx", "2k")).startswith("--ctx: ")


# --- errors point at their place --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "at", "what"),
    [
        ("  model: lama-3.1-8b\n  gpu: l4\n", "4:10", "target chat: model 'lama-3.1-8b': not in the catalog; did you"),
        ("  model: llama-3.1-8b\n  gpu: a1000\n", "5:8", "target chat: gpu 'a1000': not in the catalog"),
        (
            "  model: llama-3.1-8b\n  gpu: l4\n  tensor_parallel_size: 3\n",
            "6:25",
            "does not divide the 32 attention heads",
        ),
        ("  model: llama-3.1-8b\n  gpu: l4\n  max_model_len: 200k\n", "6:18", "was made for 131,072 tokens"),
        ("  model: llama-3.1-8b\n", "3:3", "target chat: gpu: is missing"),
        ("  gpu: l4\n", "3:3", "target chat: model: is missing"),
        ("  gpu: l4\n  command: vllm server x\n", "5:12", "target chat: command: has no server in it"),
        ("  gpu: l4\n  command: vllm serve x --max-modle-len 3\n", "5:12", "did you mean --max-model-len"),
        ("  model: ./nosuch\n  gpu: l4\n", "4:10", "nosuch: no such file or directory"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  engine: vllm@9.9\n", "6:11", "kvplan knows vLLM"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  engine_arg: [block_sise=3]\n", "6:15", "did you mean block_size"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  lengths: nosuch.csv\n", "6:12", "no such file"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  mean_tokens: 2m\n", "6:16", "mean length"),
        ("  model: qwen3-8b\n  gpu: l4\n  workload: {profile: azur}\n", "6:13", "profile 'azur': there is none"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  draft_model: lama\n", "6:16", "model 'lama': not in the catalog"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  shared_prefix: 200k\n", "6:18", "leaves no room in the context"),
    ],
)
def test_an_error_in_a_target_is_2_with_its_file_line_and_target(
    run: Run, tmp_path: Path, target: str, at: str, what: str
) -> None:
    message = refused(run("check", policy(tmp_path, target, "fits: true, min_users: 1")))
    assert message.startswith(f"{tmp_path}/kvplan.policy.yaml:{at}: target chat: "), message
    assert what in message


def test_a_hub_that_is_out_of_reach_is_the_environments_fault(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, "  model: nobody/nothing-of-that-name\n  gpu: l4\n"), "--offline")
    assert refused(ran, 3).startswith(f"{tmp_path}/kvplan.policy.yaml:4:10: target chat: ")


@pytest.mark.parametrize("content", ["", "# nothing\n", "version: 1\n", "version: 1\ntargets: []\n", "[1]", "a: *b"])
def test_a_policy_without_targets_is_2(run: Run, tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(content)
    assert refused(run("check", path)).startswith(f"{path}:")


def test_a_name_that_would_colour_the_terminal_is_refused(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path, '  model: "\\e[31mred[bold]"\n  gpu: l4\n')
    assert refused(run("check", path)).startswith(f"{path}:4:10: an escape stands for")
    marked = policy(tmp_path, "  model: '[bold]x[/bold]'\n  gpu: l4\n")
    assert "model '[bold]x[/bold]'" in refused(run("check", marked))


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "/dev/null", "/dev/zero", "."])
def test_a_file_that_cannot_be_one_is_refused_or_skipped(run: Run, tmp_path: Path, name: str) -> None:
    """As a baseline, as a measurement, as a trace: in one line, or as a skip; never waited for."""
    for more, target in (
        (f"baseline: {{file: {name}, max_growth: {{weights: 1%}}}}", LLAMA_8B),
        (f"measured: {{file: {name}, max_error: 1%}}", LLAMA_8B),
        ("", f"{LLAMA_8B}  workload: {{trace: {name}}}\n"),
    ):
        path = policy(tmp_path, target, "fits: true, min_users: 1", more)
        ran = run("check", path)
        assert ran.code == 0 or refused(ran, ran.code).startswith(f"{path}:"), ran
        assert ran.code in (0, 2, 3)


# --- a target is planned as an estimate is ----------------------------------------------------------------------------

TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": (LLAMA_8B, ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "32k")),
    "many": (
        "  model: qwen3-30b-a3b\n  gpu: h100-80g\n  tensor_parallel_size: 2\n  max_model_len: 16384\n"
        "  kv_cache_dtype: fp8\n  gpu_memory_utilization: 90%\n  enforce_eager: true\n  max_num_seqs: 64\n",
        ("qwen3-30b-a3b", "--gpu", "h100-80g", "--tp", "2", "--ctx", "16k", "--kv-cache-dtype", "fp8",
         "--gpu-memory-utilization", "0.9", "--enforce-eager", "--max-num-seqs", "64"),
    ),
    "lora": (
        "  model: llama-3.1-8b\n  gpu: l40s\n  gpu_memory: 40GiB\n  max_model_len: auto\n  enable_lora: true\n",
        ("llama-3.1-8b", "--gpu", "l40s", "--gpu-memory", "40GiB", "--ctx", "auto", "--enable-lora"),
    ),
    "old": (
        "  model: llama-3.1-70b\n  gpu: h100-80g\n  engine: vllm@0.11\n  tensor_parallel_size: 4\n"
        "  engine_arg: [block_size=32, max_num_batched_tokens=4096]\n",
        ("llama-3.1-70b", "--gpu", "h100-80g", "--engine", "vllm@0.11", "--tp", "4", "--engine-arg", "block_size=32",
         "--engine-arg", "max_num_batched_tokens=4096"),
    ),
    "command": (
        "  gpu: h200\n  command: vllm serve Qwen/Qwen3-32B --max-model-len 32k -tp 2\n  max_num_seqs: 16\n",
        ("--from-command", "vllm serve Qwen/Qwen3-32B --max-model-len 32000 -tp 2 --max-num-seqs 16", "--gpu", "h200"),
    ),
    "draft": (
        "  model: qwen3-32b\n  gpu: h200\n  draft_model: qwen3-0.6b\n  num_speculative_tokens: 3\n",
        ("qwen3-32b", "--gpu", "h200", "--draft-model", "qwen3-0.6b", "--num-speculative-tokens", "3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_the_figures_of_the_same_estimate(run: Run, tmp_path: Path, name: str) -> None:
    target, words = TARGETS[name]
    (answer,) = run("check", policy(tmp_path, target), "--format", "json").json["targets"]
    plan = run("estimate", *words, "--format", "json").json
    memory, kv = plan["memory"], plan["kv"]
    assert answer["figures"] == {
        "fits": plan["fits"], "weights": memory["weights"], "kv_cache": memory["kv_cache"],
        "kv_bytes_per_token": kv["bytes_per_token"], "kv_tokens": kv["tokens"],
        "concurrency": plan["concurrency"]["max"], "headroom": memory["unused"], "lora": memory["lora"],
    }  # fmt: skip
    assert f"{kv['max_model_len']:,} tokens" in answer["title"]


def test_a_command_wins_over_the_defaults_and_a_target_over_its_command(run: Run, tmp_path: Path) -> None:
    command = "command: vllm serve llama-3.1-8b --max-model-len 4096 -tp 2"
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\ndefaults: {gpu: h200, max_model_len: 8192, tensor_parallel_size: 4, rules: {fits: true}}\n"
        f"targets:\n- {{id: a, {command}}}\n- {{id: b, {command}, tensor_parallel_size: 1}}\n"
        "- {id: c, model: qwen3-8b}\n"
    )
    titles = [target["title"] for target in run("check", path, "--format", "json").json["targets"]]
    assert titles == [
        "llama-3.1-8b on h200, tp 2, 4,096 tokens",
        "llama-3.1-8b on h200, tp 1, 4,096 tokens",
        "qwen3-8b on h200, tp 4, 8,192 tokens",
    ]


def test_a_command_says_where_vllm_reads_a_number_otherwise(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, "  gpu: h200\n  command: vllm serve llama-3.1-8b --max-model-len 32k\n"))
    assert "32,000 tokens" in ran.out
    assert "kvplan: note: target chat: command --max-model-len 32k: is 32,000 as vLLM reads it" in ran.err


def test_paths_are_relative_to_the_policy(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deploy").mkdir()
    config_file(tmp_path / "deploy" / "model", {"num_hidden_layers": 16})
    (tmp_path / "deploy" / "lengths.csv").write_text("tokens\n1000\n3000\n")
    (tmp_path / "deploy" / "trace.csv").write_text("prompt_tokens,output_tokens\n700,100\n")
    target = "  model: {}\n  gpu: l40s\n  max_model_len: 4k\n"
    (tmp_path / "elsewhere").mkdir()
    for where in (tmp_path, tmp_path / "deploy", tmp_path / "elsewhere"):
        monkeypatch.chdir(where)
        for model in ("./model", "./model/config.json", "model"):
            path = policy(tmp_path / "deploy", target.format(model), "max_kv_bytes_per_token: 64KiB, min_users: 1")
            path.write_text(path.read_text().replace("  rules", "  lengths: lengths.csv\n  rules"))
            ran = run("check", os.path.relpath(path), "--format", "json")
            assert ran.code == 0, ran.err
            assert findings(ran)["max_kv_bytes_per_token"]["actual"] == 16 * 2 * 8 * 128 * 2
            assert "2,000 tokens (the mean)" in findings(ran)["min_users"]["message"]
        command = "  gpu: l40s\n  command: vllm serve ./model --max-model-len 4096\n  workload: {trace: trace.csv}\n"
        ran = run("check", os.path.relpath(policy(tmp_path / "deploy", command, "min_users: 1")), "--format", "json")
        assert "800 tokens (the mean)" in findings(ran)["min_users"]["message"]


@pytest.mark.parametrize(("prompt", "code"), [(990, 0), (1024, 1)])
def test_preemption_is_simulated_on_the_targets_own_pool(run: Run, tmp_path: Path, prompt: int, code: int) -> None:
    """127 blocks of 16 tokens beside the null block. Two requests that end with 1,005 tokens stored hold 63 each. One
    of 1,024 holds 64 while it is read, beside 62 of 990; writing 16 tokens they need 65 and 63, one too many."""
    (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n0,{prompt},16\n0.001,990,16\n")
    target = (
        f"{LLAMA_8B}  num_gpu_blocks_override: 128\n  max_num_seqs: 2\n  workload: {{trace: trace.csv, rate: 2000/s}}\n"
    )
    target = target.replace("32k", "1536")
    ran = run("check", policy(tmp_path, target, "max_preemption_rate: 0%"), "--format", "json")
    found = findings(ran)["max_preemption_rate"]
    assert (ran.code, found["outcome"]) == (code, "fail" if code else "pass"), found


# --- formats ----------------------------------------------------------------------------------------------------------


def test_json_follows_its_schema(run: Run) -> None:
    ran = run("check", EXAMPLE, "--format", "json")
    jsonschema.Draft202012Validator(document_schema("check")).validate(ran.json)
    assert (ran.code, ran.json["counts"]["fail"] > 0) == (1, True)


@pytest.mark.parametrize(
    ("format", "begins"),
    [("markdown", "<!-- kvplan"), ("github", "::error file="), ("junit", "<?xml"), ("sarif", "{"), ("json", "{")],
)
def test_every_format_holds_the_failure(run: Run, format: str, begins: str) -> None:
    ran = run("check", EXAMPLE, "--format", format)
    assert ran.code == 1
    assert ran.out.startswith(begins)
    assert "--tensor-parallel-size 2" in ran.out
    assert "KVP003" in ran.out


def test_reports_are_written_beside_the_answer(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "a.md", "a.xml", "a.sarif")]
    ran = run("check", EXAMPLE, *(word for path in paths for word in ("--report", path)))
    assert ran.code == 1
    for path, format in zip(paths, ("json", "markdown", "junit", "sarif"), strict=True):
        assert path.read_text(encoding="utf-8") == run("check", EXAMPLE, "--format", format).out
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_a_report_that_cannot_be_written_costs_no_time(run: Run, tmp_path: Path) -> None:
    for name, what in (("a.txt", "suffix"), ("no/a.json", "no such directory")):
        assert what in refused(run("check", EXAMPLE, "--report", tmp_path / name))


def test_the_summary_of_a_step_gets_the_table(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert run("check", EXAMPLE).code == 1
    assert summary.read_text() == "before\n"  # only --format github writes it
    run("check", EXAMPLE, "--format", "github")
    assert summary.read_text().startswith("before\n")
    assert "| agents |" in summary.read_text()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "such"))
    ran = run("check", EXAMPLE, "--format", "github")
    assert ran.code == 1
    assert "kvplan: warning: $GITHUB_STEP_SUMMARY" in ran.err


def test_a_check_loads_no_heavy_library() -> None:
    heavy = ("torch", "triton", "transformers", "pandas", "matplotlib", "pynvml", "numpy", "rich", "jinja2")
    code = (
        "import sys\nfrom kvplan.cli.main import main\n"
        f"code = main(['check', {str(EXAMPLE)!r}])\n"
        "print(f'exit code {code}; loaded:', *sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 1; loaded:"], done.stderr


# --- baseline ---------------------------------------------------------------------------------------------------------

BASELINE = "baseline: {file: .kvplan/base.json, max_growth: {weights: 0%}, max_drop: {kv_tokens: 1%}}"


def test_a_baseline_is_written_held_and_accepted_anew(run: Run, tmp_path: Path) -> None:
    config_file(tmp_path / "model")
    target = "  model: ./model\n  gpu: a100-80g\n  max_model_len: 8k\n"
    path = policy(tmp_path, target, more=BASELINE)
    first = findings(run("check", path, "--format", "json"))
    assert {first[rule]["outcome"] for rule in ("baseline.weights", "baseline.kv_tokens")} == {"skip"}
    assert run("check", path, "--update-baseline").code == 0
    written = json.loads((tmp_path / ".kvplan" / "base.json").read_text())
    jsonschema.Draft202012Validator(document_schema("check")).validate(written)
    assert run("check", path, "--strict").code == 0
    config_file(tmp_path / "model", {"num_hidden_layers": 33})
    grown = run("check", path, "--format", "json")
    assert grown.code == 1
    # 4,096 x (4,096 + 2 x 1,024 + 4,096) in attention, 3 x 4,096 x 14,336 in the MLP, two norms of 4,096; 2 bytes each.
    layer = 2 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096)
    weights = findings(grown)["baseline.weights"]
    assert weights["actual"] - weights["limit"] == layer
    assert findings(grown)["baseline.kv_tokens"]["outcome"] == "fail"  # one layer in 33 is 3 % of the KV
    assert run("check", path, "--update-baseline").code == 0
    assert run("check", path).code == 0


def test_a_json_report_serves_as_a_baseline(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path, more="baseline: {file: base.json, max_growth: {weights: 0%}}")
    run("check", path, "--report", tmp_path / "base.json")
    assert findings(run("check", path, "--format", "json"))["baseline.weights"]["outcome"] == "pass"


def test_an_update_wants_a_baseline_to_write(run: Run, tmp_path: Path) -> None:
    assert "names no baseline" in refused(run("check", policy(tmp_path), "--update-baseline"))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"schema": "kvplan/plan@1"}', "{'a'", '{"a": NaN}'])
def test_a_damaged_baseline_is_2_with_its_place(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "b.json").write_text(content)
    path = policy(tmp_path, more="baseline: {file: b.json, max_growth: {weights: 0%}}")
    assert refused(run("check", path)).startswith(f"{path}:8:12: baseline: ")


# --- evidence ---------------------------------------------------------------------------------------------------------

H100 = "  model: llama-3.1-8b\n  gpu: h100-80g\n  max_model_len: 8k\n"
MEASURED = "measured: {file: run, max_error: 5%, max_age: 30d}"


def test_a_run_of_a_target_is_judged_by_the_error_that_reconcile_shows(run: Run, tmp_path: Path) -> None:
    """The run's activations are 1,280 MB, far from the formula's: reconcile --max-error says the same."""
    gpu_run(tmp_path / "run")
    path = policy(tmp_path, H100, more=MEASURED)
    found = findings(run("check", path, "--format", "json"))["max_prediction_error"]
    rows = run("reconcile", tmp_path / "run", "--format", "json").json
    compared = [*rows["rows"], rows["total"]]
    worst = max(abs(row["relative"]) for row in compared if row["relative"] is not None)
    assert found["actual"] == pytest.approx(worst)
    assert found["outcome"] == "fail"
    assert run("reconcile", tmp_path / "run", "--max-error", "5%").code == 1
    wide = policy(tmp_path, H100, more=f"measured: {{file: run/run.json, max_error: {100 * worst + 0.01:.2f}%}}")
    assert findings(run("check", wide, "--format", "json"))["max_prediction_error"]["outcome"] == "pass"


def test_a_reconciliation_says_the_error_and_the_run_beside_it_the_rest(run: Run, tmp_path: Path) -> None:
    gpu_run(tmp_path / "run")
    document = run("reconcile", tmp_path / "run", "--format", "json").out
    (tmp_path / "run" / "reconciliation.json").write_text(document)
    beside = policy(tmp_path, H100, more="measured: {file: run/reconciliation.json, max_error: 1%, max_age: 9999w}")
    found = findings(run("check", beside, "--format", "json"))
    assert (found["max_prediction_error"]["outcome"], found["max_age"]["outcome"]) == ("fail", "pass")
    (tmp_path / "alone.json").write_text(document)
    alone = policy(tmp_path, H100, more="measured: {file: alone.json, max_error: 1%}")
    ran = run("check", alone, "--format", "json")
    assert findings(ran)["max_prediction_error"]["outcome"] == "skip"
    assert "no run.json lies beside" in findings(ran)["max_prediction_error"]["message"]


def test_evidence_ages_from_the_day_the_run_began(run: Run, tmp_path: Path) -> None:
    rewritten(gpu_run(tmp_path / "run"), started_utc="2026-10-01T23:59:59+00:00")
    path = policy(tmp_path, H100, more="measured: {file: run, max_age: 30d}")
    assert run("check", path, "--today", "2026-10-31").code == 0
    late = run("check", path, "--today", "2026-11-01")
    assert late.code == 1
    assert "measured on 2026-10-01, 31 days ago, at most 30 allowed" in late.out


def test_what_is_no_evidence_for_any_target_is_skipped(run: Run, tmp_path: Path) -> None:
    def told(more: str = MEASURED) -> str:
        found = findings(run("check", policy(tmp_path, H100, more=more), "--format", "json"))
        assert found["max_prediction_error"]["outcome"] == "skip"
        return str(found["max_prediction_error"]["message"])

    assert "run does not exist" in told()
    cpu_run(tmp_path / "run")
    assert told() == "the run is of tiny on cpu, which no target is"
    failed_run(tmp_path / "failed")
    assert "CUDA out of memory" in told("measured: {file: failed, max_error: 5%}")
    gpu_run(tmp_path / "wsl")
    environment = json.loads((tmp_path / "wsl" / "run.json").read_text())["environment"]
    rewritten(tmp_path / "wsl", environment={**environment, "is_wsl": True})
    assert "under WSL" in told("measured: {file: wsl, max_error: 5%}")


def test_a_damaged_run_is_2_with_its_place(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path, H100, more=MEASURED)
    (tmp_path / "run").mkdir()
    for content in ("", "{}", '{"schema": "kvplan/run@1", "status": "done"}'):
        (tmp_path / "run" / "run.json").write_text(content)
        assert refused(run("check", path)).startswith(f"{path}:8:12: measured: "), content


# --- --init -----------------------------------------------------------------------------------------------------------

POLICY_SCHEMA = jsonschema.Draft202012Validator(document_schema("policy"))


def follows_schema(path: Path) -> bool:
    """As another YAML reader reads it, whose dates become text again."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return bool(POLICY_SCHEMA.is_valid(json.loads(json.dumps(values, default=str))))


INITS: dict[str, tuple[str, ...]] = {
    "plain": ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "32k"),
    "own maximum": ("llama-3.1-8b", "--gpu", "h200"),
    "auto": ("llama-3.1-8b", "--gpu", "l4", "--ctx", "auto"),
    "many": ("qwen3-30b-a3b", "--gpu", "h100-80g", "--tp", "2", "--ctx", "16k", "--kv-cache-dtype", "fp8",
             "--gpu-memory-utilization", "0.85", "--enforce-eager", "--no-enable-prefix-caching", "--engine",
             "vllm@0.21", "--kv-offloading-size", "64", "--max-loras", "2", "--max-lora-rank", "32"),
    "lengths": ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--lengths", "lognormal:mean=2000,p95=6000",
                "--overflow", "2%", "--shared-prefix", "500"),
    "mean": ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--prompt-tokens", "2k", "--output-tokens", "500"),
    "memory": ("llama-3.1-8b", "--gpu-memory", "24GiB", "--ctx", "4k"),
    "stated pool": ("llama-3.1-8b", "--gpu", "h200", "--ctx", "4k", "--kv-cache-memory-bytes", "10G"),
    "blocks": ("llama-3.1-8b", "--gpu", "h200", "--ctx", "4k", "--num-gpu-blocks-override", "1000"),
    "states": ("qwen3-next-80b-a3b", "--gpu", "h200", "--tp", "4", "--ctx", "64k"),
    "draft": ("qwen3-32b", "--gpu", "h200", "--ctx", "8k", "--draft-model", "qwen3-0.6b"),
    "several": ("llama-3.1-8b", "--gpu", "l4,h200", "--ctx", "4k,8k"),
    "command": ("--gpu", "h200", "--from-command", "vllm serve Qwen/Qwen3-32B --max-model-len 32k -tp 2 --port 8000"),
    "offline": ("llama-3.1-8b", "--gpu", "h200", "--ctx", "4k", "--usage", "offline"),
}  # fmt: skip


@pytest.mark.parametrize("name", INITS)
def test_a_policy_that_init_writes_is_kept_at_once(run: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / "new.yaml"
    written = run("check", "--init", *INITS[name], "-o", path, "--quiet")
    assert (written.code, written.err) == (0, "")
    assert follows_schema(path)
    ran = run("check", path, "--format", "json", "--strict")
    assert ran.code == 0, ran.out
    expected = run("estimate", *INITS[name], "--format", "json").json
    plans = expected.get("plans", [expected])
    assert len(ran.json["targets"]) == len(plans)
    by_title = sorted((target["figures"]["kv_tokens"], target["figures"]["weights"]) for target in ran.json["targets"])
    assert by_title == sorted((plan["kv"]["tokens"], plan["memory"]["weights"]) for plan in plans)


def test_the_slack_is_what_the_file_says(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    run("check", "--init", *INITS["plain"], "-o", path)
    assert "90 % of today's figure" in path.read_text()
    found = findings(run("check", path, "--format", "json"))
    for rule in ("min_concurrency", "min_kv_tokens"):
        assert 0.89 < found[rule]["limit"] / found[rule]["actual"] <= 0.9
    assert 1.02 <= found["max_weights"]["limit"] / found["max_weights"]["actual"] < 1.0201
    assert found["max_kv_bytes_per_token"]["limit"] == found["max_kv_bytes_per_token"]["actual"] == 131_072


def test_the_policy_of_a_local_model_names_it_from_its_own_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path / "model")
    (tmp_path / "deploy").mkdir()
    for model in ("./model", "model", "model/config.json"):
        assert run("check", "--init", model, "--gpu", "h200", "-o", "deploy/p.yaml", "--force").code == 0
        assert "model: ../model" in Path("deploy/p.yaml").read_text()
        assert run("check", "deploy/p.yaml").code == 0


def test_a_file_that_exists_is_kept_unless_forced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("mine\n")
    assert "exists" in refused(run("check", "--init", *INITS["plain"], "-o", path))
    assert path.read_text() == "mine\n"
    assert run("check", "--init", *INITS["plain"], "-o", path, "--force").code == 0
    assert path.read_text() != "mine\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("llama-3.1-8b",), "--gpu: is missing"),
        (("--gpu", "h200"), "MODEL: is missing"),
        (("llama-3.1-70b", "--gpu", "l4", "--ctx", "8k"), "does not fit"),
        ((*INITS["plain"], "--strict"), "--strict: judges a policy"),
        ((*INITS["plain"], "--today", "2030-01-01"), "--today: judges a policy"),
        (("--gpu", "h200", "--from-pid", "1", "--from-command", "vllm serve x"), "say the same"),
        (("--gpu", "h200", "--from-pid", "one"), "is no process id"),
    ],
)
def test_an_init_that_cannot_be_is_refused_and_writes_nothing(
    run: Run, tmp_path: Path, words: tuple[str, ...], what: str
) -> None:
    assert what in refused(run("check", "--init", *words, "-o", tmp_path / "p.yaml"))
    assert list(tmp_path.iterdir()) == []


def test_secrets_of_a_command_are_not_written(run: Run, tmp_path: Path) -> None:
    command = "HF_TOKEN=hf_secret vllm serve llama-3.1-8b --max-model-len 8192 --api-key sk-secret"
    path = tmp_path / "p.yaml"
    assert run("check", "--init", "--gpu", "h200", "--from-command", command, "-o", path).code == 0
    assert "secret" not in path.read_text()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_the_policy_of_a_running_server_is_read_from_its_process(run: Run, tmp_path: Path) -> None:
    """A child whose command line is a server's: `python .../vllm serve ...`, as its start script has it."""
    script = tmp_path / "vllm"
    script.write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(60)\n")
    words = [
        sys.executable,
        str(script),
        "serve",
        "Qwen/Qwen3-32B",
        "--max-model-len",
        "16384",
        "-tp",
        "2",
        "--api-key",
        "x y",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            path = tmp_path / "p.yaml"
            ran = run("check", "--init", "--gpu", "h100-80g", "--from-pid", str(server.pid), "-o", path)
        finally:
            server.kill()
    assert ran.code == 0, ran.err
    (target,) = run("check", path, "--format", "json").json["targets"]
    assert target["title"] == "qwen3-32b on h100-80g, tp 2, 16,384 tokens"


def test_a_process_that_is_no_server_is_refused_without_its_words(run: Run, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    (proc / "8").mkdir()
    (proc / "7" / "cmdline").write_bytes(b"python\0-m\0vllm.entrypoints.openai.api_server\0--model\0a b\0")
    (proc / "8" / "cmdline").write_bytes(b"")
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "a b"]
    assert policy_init.command_of("7", proc) == words
    with pytest.raises(EnvironmentProblem, match="no command line"):
        policy_init.command_of("8", proc)
    with pytest.raises(EnvironmentProblem, match="there is no such process"):
        policy_init.command_of("9", proc)
    with pytest.raises(EnvironmentProblem, match="no /proc"):
        policy_init.command_of("9", tmp_path / "none")
    with pytest.raises(UsageError, match="no process id"):
        policy_init.command_of("../7", proc)
    message = refused(
        run("check", "--init", "--gpu", "h200", "--from-pid", str(os.getpid()), "-o", tmp_path / "p.yaml")
    )
    assert message == f"--from-pid {os.getpid()}: is no vLLM server; name the process of `vllm serve`"


@pytest.mark.parametrize(
    "text", ["010", "1e9", "yes", "null", "2026-01-01", "a: b", "#x", "é", "-x", "a #b", "", "0x1", "'", "x/y@z", "1:2"]
)
def test_a_value_that_is_written_is_read_back(text: str) -> None:
    read = strict_yaml.parse(f"k: {policy_init.quoted(text)}\n", "p").values["k"]
    assert strict_yaml.text(read, "k") == text
    assert yaml.safe_load(f"k: {policy_init.quoted(text)}\n") == {"k": text}


# --- what is documented -----------------------------------------------------------------------------------------------


def test_the_example_follows_the_schema_of_a_policy() -> None:
    jsonschema.Draft202012Validator.check_schema(document_schema("policy"))
    assert follows_schema(EXAMPLE)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("version: 1", "version: 2"),
        ("id: chat-prod", "id: chat prod"),
        ("fits: true", "fits: no"),
        ("min_concurrency: 12", "min_concurency: 12"),
        ("max_num_seqs: 128", "max_num_seqs: many"),
        ("max_weights: 16GiB", "max_weights: 5 potatoes"),
        ("min_headroom: warn", "min_headroom: error"),
        ("expires: 2099-03-31", "until: 2099-03-31"),
        ("kv_tokens: 5%", "tokens: 5%"),
    ],
)
def test_what_the_reader_refuses_does_not_follow_the_schema(run: Run, tmp_path: Path, right: str, wrong: str) -> None:
    path = tmp_path / "p.yaml"
    text = EXAMPLE.read_text(encoding="utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    refused(run("check", path))
    assert not follows_schema(path)


def kvplan_words(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:2] == ["kvplan", "check"]
    return words[1:]


def test_the_workflow_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one kvplan command, in a repository that has a policy; every file that later steps name is written."""
    workflow = yaml.safe_load((ROOT / "examples" / "kvplan-check.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["check"]["steps"]
    assert set(workflow["on"]) == {"pull_request", "push"}
    (command,) = [step["run"] for step in steps if step.get("run", "").startswith("kvplan")]
    later = steps[1 + next(i for i, step in enumerate(steps) if step.get("run") == command) :]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "kvplan.policy.yaml").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    ran = run(*kvplan_words(command))
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("::error file=kvplan.policy.yaml,line=")
    named = {step["with"]["sarif_file"] for step in steps if "sarif_file" in step.get("with", {})}
    named |= {name for step in steps for name in re.findall(r"[\w.]+\.(?:md|sarif|xml)", step.get("run", ""))}
    assert named == {"kvplan.md", "kvplan.sarif", "kvplan.xml"}
    assert all((tmp_path / name).stat().st_size for name in named)
    assert (tmp_path / "summary.md").stat().st_size
    assert all(runs_after(step["if"], tmp_path) for step in later)


def runs_after(condition: str, folder: Path) -> bool:
    """Whether a step of a pull request runs: always(), the event, and hashFiles of what lies in the folder."""
    expression = condition.removeprefix("${{").removesuffix("}}").strip()

    def holds(part: str) -> bool:
        file = re.fullmatch(r"hashFiles\('([\w.]+)'\) != ''", part)
        if file:
            return (folder / file.group(1)).exists()
        return {"always()": True, "github.event_name == 'pull_request'": True}[part]

    return all(holds(part) for part in expression.split(" && "))


def test_a_broken_policy_is_the_only_error_of_the_workflow(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = yaml.safe_load((ROOT / "examples" / "kvplan-check.yml").read_text(encoding="utf-8"))["jobs"]["check"][
        "steps"
    ]
    at = next(i for i, step in enumerate(steps) if step.get("run", "").startswith("kvplan"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvplan.policy.yaml").write_text("version: 1\ntargets: [{id: a, modle: x}]\n", encoding="utf-8")
    ran = run(*kvplan_words(steps[at]["run"]))
    assert (ran.code, ran.out) == (2, "")
    assert [path.name for path in tmp_path.iterdir()] == ["kvplan.policy.yaml"]
    assert len(steps[at + 1 :]) == 2
    assert not any(runs_after(step["if"], tmp_path) for step in steps[at + 1 :])


FAKE_GH = """#!/usr/bin/env bash
if [ "$3" = --paginate ]; then cat "$PAGES"; else echo "$@" >> "$CALLS"; fi
"""


@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("bash") is None, reason="needs jq, as GitHub's runners")
@pytest.mark.parametrize(
    ("comments", "call"),
    [
        ([], "api repos/o/r/issues/7/comments --method POST --field body=@kvplan.md"),
        # A person who quotes the mark, another bot's comment, that of another policy, then ours twice on two pages.
        (
            [
                [("someone", "MARK\nmine", "u1"), ("github-actions[bot]", "deployed", "u2")],
                [("github-actions[bot]", "<!-- kvplan-check: other.yaml -->\nx", "u3")],
                [("github-actions[bot]", "MARK\r\nold", "u4"), ("github-actions[bot]", "MARK\nolder", "u5")],
            ],
            "api u4 --method PATCH --field body=@kvplan.md",
        ),
    ],
)
def test_the_workflow_finds_its_earlier_comment_by_its_mark(
    tmp_path: Path, comments: list[list[tuple[str, str, str]]], call: str
) -> None:
    steps = yaml.safe_load((ROOT / "examples" / "kvplan-check.yml").read_text(encoding="utf-8"))["jobs"]["check"][
        "steps"
    ]
    (step,) = [step for step in steps if step.get("name") == "Tell the pull request"]
    mark = marker("kvplan.policy.yaml")
    (tmp_path / "kvplan.md").write_text(f"{mark}\n### new\n", encoding="utf-8")
    pages = [
        [{"user": {"login": who}, "body": body.replace("MARK", mark), "url": url} for who, body, url in page]
        for page in comments
    ]
    (tmp_path / "pages").write_text("".join(json.dumps(page) for page in pages or [[]]), encoding="utf-8")
    (tmp_path / "gh").write_text(FAKE_GH, encoding="utf-8")
    (tmp_path / "gh").chmod(0o755)
    places = {"PAGES": str(tmp_path / "pages"), "CALLS": str(tmp_path / "calls")}
    environment = {**os.environ, **places, "COMMENTS": "repos/o/r/issues/7/comments"}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "calls").read_text(encoding="utf-8").splitlines() == [call]


def test_the_hook_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("kvplan-check", "python", False)
    for name, wanted in (("kvplan.policy.yaml", True), ("deploy/my.kvplan.policy.yml", True), ("a/config.json", True),
                         ("README.md", False), ("tsconfig.json", False)):  # fmt: skip
        assert bool(re.search(hook["files"], name)) is wanted
    monkeypatch.chdir(tmp_path)
    policy(tmp_path)
    assert run(*kvplan_words(hook["entry"])).code == 0


# --- damaged policies -------------------------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {
    "version": 1,
    "defaults": {"engine": "vllm@0.33", "gpu": "a100-80g", "rules": {"fits": True}},
    "targets": [
        {
            "id": "a", "model": "llama-3.1-8b", "max_model_len": "32k", "max_num_seqs": 128, "lengths": "const:2000",
            "rules": {"min_concurrency": 12, "min_users": {"mean": 9, "p99": 3}, "max_weights": "16GiB"},
        },
        {
            "id": "b", "command": "vllm serve qwen3-8b -tp 2 --max-model-len 8192", "gpu": "l40s",
            "workload": {"profile": "azure-2023-conv", "rate": "5.5/s", "tpot": "30ms"},
            "rules": {"min_users": 3, "min_headroom": "5%"}, "severity": {"min_headroom": "warn"},
        },
    ],
    "baseline": {"file": "b.json", "max_growth": {"weights": "1%"}, "max_drop": {"kv_tokens": "5%"}},
    "measured": {"file": "run", "max_error": "5%", "max_age": "30d"},
    "severity": {"min_concurrency": "warn"},
    "waivers": [{"rule": "a/min_users", "reason": "x", "expires": "2099-01-01"}],
}  # fmt: skip
DROP, DOUBLE = object(), object()
BAD: tuple[Any, ...] = (
    DROP, DOUBLE, None, 0, -1, 1, 2**70, 1.5, float("nan"), "", "a", "32k", "5%", "16GiB", "./nosuch", "../x.json",
    "auto", "010", "1e9", "2026-01-01", "vllm@0.1", "nobody/none", "\x1b[31m", "é" * 50, True, False, [], ["a"], {},
    {"a": 1}, [[]], {"fits": True}, "const:1", "lognormal:mean=1,p95=2", "\0", "/dev/null", "vllm serve", "*",
)  # fmt: skip
LIMIT_S = 2.0  # of processor time


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, child in inner for found in ((*here, key), *paths(child, (*here, key)))]


def damage(top: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value at a path, drop or double what is there; a path that an earlier damage removed is left alone."""
    inner = top
    for key in path[:-1]:
        try:
            inner = inner[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(inner, list):
        if not isinstance(path[-1], int) or path[-1] >= len(inner):
            return
    elif not isinstance(inner, dict):
        return
    if value is DROP:
        inner.pop(path[-1], None) if isinstance(inner, dict) else inner.pop(path[-1])
    elif value is DOUBLE:
        if isinstance(inner, list):
            inner.append(inner[path[-1]])
    else:
        inner[path[-1]] = value


def answer(path: Path) -> CheckResult | KvplanError:
    """The result or the error, checked for what both promise."""
    before = time.process_time()
    try:
        result: CheckResult | KvplanError = checked(path, offline=True, quiet=True)
    except KvplanError as error:
        result = error
    assert time.process_time() - before < LIMIT_S
    if isinstance(result, KvplanError):
        assert str(result).isprintable()
        assert len(str(result)) < 1500
    else:
        lines = path.read_text(encoding="utf-8").count("\n") + 1
        assert all(1 <= finding.line <= lines for finding in result.findings)
        assert all(isinstance(target.figures, Figures) or target.target == "measured" for target in result.targets)
    return result


def written(folder: Path, text: str) -> Path:
    path = folder / "p.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_whole_policy_is_judged(tmp_path: Path) -> None:
    result = answer(written(tmp_path, yaml.safe_dump(WHOLE)))
    assert isinstance(result, CheckResult)
    assert len(result.findings) == 2 * (1 + 2) + 4 + 2 + 2  # fits and two of the baseline each; own rules; the run


@FUZZ
@given(data=st.data())
def test_a_damaged_policy_is_judged_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    top = copy.deepcopy(WHOLE)
    places = paths(top)
    for _ in range(data.draw(st.integers(1, 3))):
        damage(top, data.draw(st.sampled_from(places)), data.draw(st.sampled_from(BAD)))
    answer(written(tmp_path, yaml.safe_dump(top, default_flow_style=data.draw(st.sampled_from([None, True, False])))))


@FUZZ
@given(data=st.data())
def test_a_policy_with_lines_changed_is_judged_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["drop", "double", "indent", "swap", "cut", "insert"])):
            case "drop" if len(lines) > 1:
                lines.pop(at)
            case "double":
                lines.insert(at, lines[at])
            case "indent":
                lines[at] = " " * data.draw(st.integers(0, 8)) + lines[at].lstrip()
            case "swap":
                other = data.draw(st.integers(0, len(lines) - 1))
                lines[at], lines[other] = lines[other], lines[at]
            case "cut":
                lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
            case _:
                lines[at] += data.draw(
                    st.sampled_from([" &a", " *a", " !!str", ": x", " {", "]", "'", "\t", " # x", "%"])
                )
    answer(written(tmp_path, "\n".join(lines)))


ROOM = 250 * 1024  # what a file may have beside WHOLE
FILLS = {
    "letters": "a" * ROOM, "words": "a " * (ROOM // 2), "digits": "9" * ROOM, "percent": "9" * ROOM + "%",
    "flags": "".join(f" --x{i}" for i in range(ROOM // 9)), "command": "vllm serve x --y" + " a" * (ROOM // 2 - 8),
    "path": "./" + "a" * ROOM, "folders": "../" * (ROOM // 3), "list": "a=1," * (ROOM // 4),
    "pattern": "a/" + "*?[a]" * (ROOM // 5), "lognormal": "lognormal:" + "mean=1," * (ROOM // 7 - 2),
}  # fmt: skip


@pytest.mark.parametrize("fill", FILLS)
def test_every_field_may_be_as_long_as_a_file_and_is_refused_in_a_short_line(tmp_path: Path, fill: str) -> None:
    """`answer` checks the time and the length of the message."""
    loose = [place for place in paths(WHOLE) if not isinstance(value_at(place), dict | list)]
    for place in loose:
        top = copy.deepcopy(WHOLE)
        damage(top, place, FILLS[fill])
        text = yaml.dump(top, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), width=10**7)
        assert 230 * 1024 < len(text) <= 256 * 1024
        assert isinstance(answer(written(tmp_path, text)), KvplanError)


def value_at(place: tuple[Any, ...]) -> Any:
    value: Any = WHOLE
    for key in place:
        value = value[key]
    return value


@pytest.mark.parametrize("fill", FILLS)
def test_every_field_of_a_thousand_characters_is_judged_or_refused(tmp_path: Path, fill: str) -> None:
    for place in paths(WHOLE):
        top = copy.deepcopy(WHOLE)
        damage(top, place, FILLS[fill][: 16_000 if place[-1] == "command" else 1000])
        answer(written(tmp_path, yaml.safe_dump(top)))


def test_a_file_full_of_targets_waivers_or_arguments_is_judged_or_refused(tmp_path: Path) -> None:
    many = {"version": 1, "defaults": {"model": "llama-3.1-8b", "gpu": "l4", "rules": {"min_concurrency": 999}}}
    ids = [{"id": f"t{i}"} for i in range(250)]
    waivers = [{"rule": f"t{i}*x/fits", "reason": "x", "expires": "2099-01-01"} for i in range(3700)]
    arguments = {"id": "a", "engine_arg": ["max_num_seqs=8"] * 13_000}
    for more in ({"targets": ids}, {"targets": ids, "waivers": waivers}, {"targets": [arguments]}):
        text = yaml.dump({**many, **more}, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
        assert len(text) <= 256 * 1024
        answer(written(tmp_path, text))


@pytest.mark.full
def test_every_key_with_every_bad_value_is_judged_or_refused(tmp_path: Path) -> None:
    for place in paths(WHOLE):
        for value in BAD:
            top = copy.deepcopy(WHOLE)
            damage(top, place, value)
            answer(written(tmp_path, yaml.safe_dump(top)))
