"""`kvplan check`: answers, exit codes, where errors point, the plan of a target, formats."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from kvplan.documents.schema import document_schema
from tests.support.cli import Run, config_file, refused
from tests.support.cli import run as run  # the fixture
from tests.support.policies import EXAMPLE, EXAMPLE_DAY, LLAMA_8B, findings, policy

# --- answers and exit codes -------------------------------------------------------------------------------------------


def test_a_policy_that_is_kept_is_0_and_one_that_is_broken_1(run: Run, tmp_path: Path) -> None:
    """The pool holds 14 requests of 2,048 blocks."""
    passing = run("check", policy(tmp_path, rules="fits: true, min_concurrency: 13.5"))
    assert (passing.code, passing.err) == (0, "")
    assert passing.out.endswith("2 passed\n")
    broken = run("check", policy(tmp_path, rules="fits: true, min_concurrency: 14.5"))
    assert (broken.code, broken.err) == (1, "")
    assert re.search(
        r"^  fail  KVP012 min_concurrency +14 concurrent requests of 32,768 tokens", broken.out, re.MULTILINE
    )
    assert "use --kv-cache-dtype fp8 (gives " in broken.out
    assert broken.out.endswith(f"{tmp_path}/kvplan.policy.yaml: 1 passed, 1 failed\n")


def test_a_line_for_each_target_and_each_finding(run: Run) -> None:
    lines = run("check", EXAMPLE, "--today", EXAMPLE_DAY).out.splitlines()
    document = run("check", EXAMPLE, "--today", EXAMPLE_DAY, "--format", "json").json
    outcomes = [finding["outcome"] for target in document["targets"] for finding in target["findings"]]
    assert outcomes.count("skip") == 3  # the baseline of three targets, which one line tells
    assert len([line for line in lines if re.match("  [a-z]", line)]) == len(outcomes) - 3
    assert (
        len([line for line in lines if line.startswith("skip  KVP105 baseline.kv_tokens of chat-prod, agents, ")]) == 1
    )
    assert lines[-1].endswith(", 3 skipped")
    for target in document["targets"]:
        assert f"{target['id']}  {target['title']}" in lines


def test_what_many_rules_and_targets_lack_alike_is_one_line_and_counts_in_full(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kvplan.policy.yaml"
    targets = "".join(
        f"- id: t{i}\n  model: llama-3.1-8b\n  gpu: h200\n  max_model_len: 8k\n  rules: {{fits: true{more}}}\n"
        for i, more in enumerate((", max_preemption_rate: 1%", ", max_preemption_rate: 1%", "", ""))
    )
    limits = "max_growth: {weights: 0%}, max_drop: {kv_cache: 5%}"
    path.write_text(f"version: 1\ntargets:\n{targets}baseline: {{file: b.json, {limits}}}\n", encoding="utf-8")
    ran = run("check", path)
    assert ran.out.count("the baseline b.json does not exist yet") == 1
    assert "skip  KVP101 baseline.weights, KVP104 baseline.kv_cache of 4 targets: the baseline b.json does" in ran.out
    assert (
        "skip  KVP009 max_preemption_rate of t0, t1: the target has no workload" in ran.out
    )  # t2 and t3 have no such rule
    assert ran.out.endswith(": 4 passed, 10 skipped\n")  # 4 x 2 of the baseline and 2 x max_preemption_rate


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("vllm serve X --no-such-flag 3", "target chat: command: --no-such-flag is not a flag that kvplan knows"),
        ("vllm serve X --enforce-eagr", "target chat: command: --enforce-eagr is not a flag of vLLM; did you mean"),
        ("vllm serve X y", "target chat: command has an argument without a flag ('y')"),
    ],
)
def test_a_fault_of_a_command_is_named_as_the_policy_has_it(
    run: Run, tmp_path: Path, command: str, problem: str
) -> None:
    error = refused(run("check", policy(tmp_path, f"  gpu: l4\n  command: {command}\n")))
    assert f"kvplan.policy.yaml:5:12: {problem}" in error
    assert "--from-command" not in error


def test_what_is_not_known_of_a_command_is_told_as_the_policy_has_it(run: Run, tmp_path: Path) -> None:
    target = "  gpu: h200\n  command: vllm serve meta-llama/Llama-3.1-8B --max-model-len 8K --dtypo 3\n"
    ran = run("check", policy(tmp_path, target))
    assert (ran.code, ran.err) == (
        0, "kvplan: warning: target chat: command: unknown to kvplan and ignored: --dtypo\n"
    )  # fmt: skip


def test_one_request_is_not_requests(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, f"{LLAMA_8B}  max_num_seqs: 1\n  mean_tokens: 1000\n", "min_users: 1"))
    assert " 1 concurrent request of 1,000 tokens (mean), limited by --max-num-seqs (the " in ran.out


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("qwen3-8b", "note: target chat: uses model: qwen3-8b, not meta-llama/Llama-3.1-8B from its command\n"),
        ("llama-3.1-8b", ""),  # the catalog's name of the same model
        ("meta-llama/Llama-3.1-8B", ""),
    ],
)
def test_a_model_that_wins_over_its_commands_is_said(run: Run, tmp_path: Path, model: str, note: str) -> None:
    target = f"  model: {model}\n  gpu: h200\n  max_model_len: 8k\n  command: vllm serve meta-llama/Llama-3.1-8B\n"
    ran = run("check", policy(tmp_path, target))
    assert ran.code == 0
    assert ran.err.removeprefix("kvplan: ") == note
    assert run("check", policy(tmp_path, target), "--quiet").err == ""


def test_strict_refuses_warnings_and_what_is_skipped(run: Run, tmp_path: Path) -> None:
    warned = policy(tmp_path, rules="min_concurrency: 999", more="severity: {min_concurrency: warn}")
    assert [run("check", warned, *flags).code for flags in ((), ("--strict",))] == [0, 1]
    skipped = policy(tmp_path, rules="fits: true, max_preemption_rate: 1%")
    assert [run("check", skipped, *flags).code for flags in ((), ("--strict",))] == [0, 1]


def test_a_policy_of_which_all_is_skipped_warns(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, rules="max_preemption_rate: 1%"))
    assert ran.code == 0
    assert "kvplan: warning: " in ran.err
    assert "nothing was checked" in ran.err
    assert run("check", policy(tmp_path, rules="max_preemption_rate: 1%"), "--quiet").err == ""


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
        assert refused(run("check", path, "--today", wrong)).startswith("--today: not a date")


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
        assert "works only with --init" in refused(run("check", path, *flags))
    assert refused(run("check", path, "--ctx", "2k")).startswith("--ctx works only with --init")


# --- errors point at their place --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "position", "what"),
    [
        ("  model: lama-3.1-8b\n  gpu: l4\n", "4:10", "target chat: model 'lama-3.1-8b': not in the catalog; did you"),
        ("  model: llama-3.1-8b\n  gpu: a1000\n", "5:8", "target chat: gpu 'a1000': not in the catalog"),
        (
            "  model: llama-3.1-8b\n  gpu: l4\n  tensor_parallel_size: 3\n",
            "6:25",
            "does not divide the 32 attention heads",
        ),
        ("  model: llama-3.1-8b\n  gpu: l4\n  max_model_len: 200k\n", "6:18", "supports up to 131,072 tokens"),
        ("  model: llama-3.1-8b\n", "3:3", "target chat: gpu: missing"),
        ("  gpu: l4\n", "3:3", "target chat: model: missing"),
        ("  gpu: l4\n  command: vllm server x\n", "5:12", "target chat: command contains no server command"),
        ("  gpu: l4\n  command: vllm serve x --max-modle-len 3\n", "5:12", "did you mean --max-model-len"),
        ("  model: ./nosuch\n  gpu: l4\n", "4:10", "nosuch: no such file or directory"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  engine: vllm@9.9\n", "6:11", "kvplan supports vLLM"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  engine_arg: [block_sise=3]\n", "6:15", "did you mean block_size"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  lengths: nosuch.csv\n", "6:12", "no such file"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  mean_tokens: 2m\n", "6:16", "mean length"),
        ("  model: qwen3-8b\n  gpu: l4\n  workload: {profile: azur}\n", "6:13", "profile 'azur': no such profile"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  draft_model: lama\n", "6:16", "model 'lama': not in the catalog"),
        ("  model: llama-3.1-8b\n  gpu: l4\n  shared_prefix: 200k\n", "6:18", "leaves no room in the context"),
    ],
)
def test_an_error_in_a_target_is_2_with_its_file_line_and_target(
    run: Run, tmp_path: Path, target: str, position: str, what: str
) -> None:
    message = refused(run("check", policy(tmp_path, target, "fits: true, min_users: 1")))
    assert message.startswith(f"{tmp_path}/kvplan.policy.yaml:{position}: target chat: "), message
    assert what in message


def test_a_hub_that_is_out_of_reach_is_the_environments_fault(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, "  model: nobody/nothing-of-that-name\n  gpu: l4\n"), "--offline")
    assert refused(ran, 3).startswith(f"{tmp_path}/kvplan.policy.yaml:4:10: target chat: ")


@pytest.mark.parametrize("content", ["", "# nothing\n", "version: 1\n", "version: 1\ntargets: []\n", "[1]", "a: *b"])
def test_a_policy_without_targets_is_2(run: Run, tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(content)
    assert refused(run("check", path)).startswith(f"{path}:")


def test_a_name_that_would_color_the_terminal_is_refused(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path, '  model: "\\e[31mred[bold]"\n  gpu: l4\n')
    assert refused(run("check", path)).startswith(f"{path}:4:10: an escape sequence ")
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
        "users": None if "lengths" in target else plan["concurrency"]["users"],
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
    assert "kvplan: note: target chat: command --max-model-len 32k is 32,000 as in vLLM" in ran.err


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
            assert "2,000 tokens (mean)" in findings(ran)["min_users"]["message"]
        command = "  gpu: l40s\n  command: vllm serve ./model --max-model-len 4096\n  workload: {trace: trace.csv}\n"
        ran = run("check", os.path.relpath(policy(tmp_path / "deploy", command, "min_users: 1")), "--format", "json")
        assert "800 tokens (mean)" in findings(ran)["min_users"]["message"]


def test_a_relative_trace_is_read_where_the_check_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative path in two directories, and a file that changes, in one process: each check reads its own."""
    command = "  model: llama-3.1-8b\n  gpu: l40s\n  max_model_len: 4k\n  workload: {trace: trace.csv}\n"
    for folder, prompt in (("a", 700), ("b", 100), ("b", 1100)):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        Path("trace.csv").write_text(f"prompt_tokens,output_tokens\n{prompt},100\n")
        path = policy(tmp_path / folder, command, "min_users: 1")
        ran = run("check", path.name, "--format", "json")
        assert f"{prompt + 100:,} tokens (mean)" in findings(ran)["min_users"]["message"]


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
    finding = findings(ran)["max_preemption_rate"]
    assert (ran.code, finding["outcome"]) == (code, "fail" if code else "pass"), finding


# --- formats ----------------------------------------------------------------------------------------------------------


def test_json_follows_its_schema(run: Run) -> None:
    ran = run("check", EXAMPLE, "--today", EXAMPLE_DAY, "--format", "json")
    jsonschema.Draft202012Validator(document_schema("check")).validate(ran.json)
    assert (ran.code, ran.json["counts"]["fail"] > 0) == (1, True)


@pytest.mark.parametrize(
    ("format", "begins"),
    [("markdown", "<!-- kvplan"), ("github", "::error file="), ("junit", "<?xml"), ("sarif", "{"), ("json", "{")],
)
def test_every_format_holds_the_failure(run: Run, format: str, begins: str) -> None:
    ran = run("check", EXAMPLE, "--today", EXAMPLE_DAY, "--format", format)
    assert ran.code == 1
    assert ran.out.startswith(begins)
    assert "--tensor-parallel-size 2" in ran.out
    assert "KVP012" in ran.out


def test_reports_are_written_beside_the_answer(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "a.md", "a.xml", "a.sarif")]
    ran = run("check", EXAMPLE, "--today", EXAMPLE_DAY, *(word for path in paths for word in ("--report", path)))
    assert ran.code == 1
    for path, format in zip(paths, ("json", "markdown", "junit", "sarif"), strict=True):
        assert path.read_text(encoding="utf-8") == run("check", EXAMPLE, "--today", EXAMPLE_DAY, "--format", format).out
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_a_report_that_cannot_be_written_costs_no_time(run: Run, tmp_path: Path) -> None:
    for name, what in (("a.txt", "unknown file type"), ("no/a.json", "no such directory")):
        assert what in refused(run("check", EXAMPLE, "--today", EXAMPLE_DAY, "--report", tmp_path / name))


def test_the_summary_of_a_step_gets_the_table(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert run("check", EXAMPLE, "--today", EXAMPLE_DAY).code == 1
    assert summary.read_text() == "before\n"  # only --format github writes it
    run("check", EXAMPLE, "--today", EXAMPLE_DAY, "--format", "github")
    assert summary.read_text().startswith("before\n")
    assert "| agents |" in summary.read_text()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "such"))
    ran = run("check", EXAMPLE, "--today", EXAMPLE_DAY, "--format", "github")
    assert ran.code == 1
    assert "kvplan: warning: $GITHUB_STEP_SUMMARY" in ran.err


def test_a_check_loads_no_heavy_library() -> None:
    heavy = ("torch", "triton", "transformers", "pandas", "matplotlib", "pynvml", "numpy", "rich", "jinja2")
    code = (
        "import sys\nfrom kvplan.cli.main import main\n"
        f"code = main(['check', {str(EXAMPLE)!r}, '--today', {EXAMPLE_DAY!r}])\n"
        "print(f'exit code {code}; loaded:', *sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 1; loaded:"], done.stderr


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (["0,1,1"] * 100_001, "line 100002: more than 100,000 requests"),
        (["0,8000,1"] * 25_000, "its requests have 200,025,000 tokens; a check simulates at most 200,000,000"),
    ],
)
def test_a_trace_has_a_budget(run: Run, tmp_path: Path, rows: list[str], problem: str) -> None:
    """A pull request may name a trace that CI would simulate for hours."""
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    path = policy(tmp_path, f"{LLAMA_8B}  workload: {{trace: {trace}, rate: 1/s}}\n", "max_preemption_rate: 1%")
    assert problem in refused(run("check", path))
