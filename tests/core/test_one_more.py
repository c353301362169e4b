"""One more argument or format is planted in its one file, and is then known in every place: nobody had to be told."""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvplan.cli import app
from kvplan.cli.fields import REPORT
from kvplan.report.formats import Format
from tests.support.cli import config_file
from tests.support.planted import ROOT, answer_of
from tests.support.recorded_runs import cpu_run

# --- a format ---------------------------------------------------------------------------------------------------------

TSV = [
    ('Format = Literal["table", ', 'Format = Literal["table", "tsv", '),
    ("FORMS: Final", "def tsv_lines(rows):\n    return csv_lines(rows).replace(',', '\\t')\n\n\nFORMS: Final"),
    (
        '    "markdown": Form(',
        '    "tsv": Form(".tsv", lambda answer: as_csv(answer).replace(",", "\\t"), lines=tsv_lines),\n'
        '    "markdown": Form(',
    ),
]
GPU = ("--gpu", "h200", "--ctx", "4k")
LOG = """\
INFO vLLM API server version 0.10.2
INFO non-default args: {'model': 'Qwen/Qwen3-8B', 'max_model_len': 8192}
INFO Available KV cache memory: 50.00 GiB
INFO GPU KV cache size: 364,080 tokens
"""
EXAMPLES = ROOT / "examples"
ANSWERING = {
    "estimate": ("estimate", "m", *GPU),
    "sweep": ("sweep", "m", *GPU),
    "recommend": ("recommend", "m", "--gpus", "h200", "--ctx", "4k", "--users", "3"),
    "fit": ("recommend", "m", "--gpu", "h200", "--ctx", "4k", "--users", "3"),
    "diff": ("diff", "m", "llama-3.1-8b", *GPU),
    "upgrade": ("upgrade", "m", *GPU, "--from", "vllm@0.30", "--to", "vllm@0.33"),
    "pack": ("pack", "--gpu", "h200", "--server", "m", "--server", "qwen3-0.6b"),
    "simulate": ("simulate", "m", *GPU, "--trace", "trace.csv"),
    "models": ("models",),
    "gpus": ("gpus",),
    "stats": ("trace", "stats", "trace.csv"),
    "profiles": ("trace", "profiles"),
    "reconcile": ("reconcile", "run"),
    "log": ("reconcile", "--log", "server.log", "--gpu", "h200"),
    "bench": ("reconcile", "--bench", f"{EXAMPLES}/inferencex.json", "--gpu", "h200"),
    "why": ("why", f"{EXAMPLES}/vllm-did-not-start.log", "--gpu", "l40s"),
    "rightsize": ("rightsize", f"{EXAMPLES}/metrics.1.txt", f"{EXAMPLES}/metrics.2.txt"),
}  # fmt: skip
if find_spec("prometheus_client") is None:
    del ANSWERING["rightsize"]
# Long (tune), runs the engine (profile), needs another package (rightsize).
ELSEWHERE = {"tune", "profile", "rightsize"}
WITHOUT_REPORTS = ("stats", "profiles")
REPORTING = {name: "--report" for name in ANSWERING if name not in WITHOUT_REPORTS}
SHORT = ("estimate", "sweep", "diff", "models")
ANSWER = """
import contextlib, io
from kvplan.cli.main import main
answering, reporting = given
answers = {}
def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    assert code == 0, (argv, err.getvalue())
    return out.getvalue()
for name, argv in answering.items():
    answers[name] = [run(*argv, "--format", format) for format in ("csv", "tsv")]
for name, flag in reporting.items():
    for _ in range(2):  # the second time over what the first one wrote
        run(*answering[name], *(word for suffix in ("csv", "tsv") for word in (flag, f"{name}.{suffix}")))
    answers[f"{name}.tsv"] = [answers[name][0], open(f"{name}.tsv").read()]
run("report", "run", "-o", "run.csv", "-o", "run.tsv")
answers["report"] = [open("run.csv").read(), open("run.tsv").read()]
print(json.dumps(answers))
"""


@pytest.mark.parametrize("names", [SHORT, pytest.param(tuple(ANSWERING), marks=pytest.mark.full)], ids=["few", "all"])
def test_one_more_format_is_written_by_every_command(names: tuple[str, ...], tmp_path: Path) -> None:
    answering = {name: ANSWERING[name] for name in names}
    reporting = {name: flag for name, flag in REPORTING.items() if name in names}
    config_file(tmp_path / "m")
    cpu_run(tmp_path / "run")
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n", encoding="utf-8")
    (tmp_path / "server.log").write_text(LOG, encoding="utf-8")
    answers = answer_of(ANSWER, "kvplan.report.formats", TSV, (answering, reporting), tmp_path)
    assert answers.keys() == {*answering, *(f"{name}.tsv" for name in reporting), "report"}
    for name, (in_csv, in_tsv) in answers.items():
        assert "\t" in in_tsv.partition("\n")[0], name
        assert in_tsv == in_csv.replace(",", "\t"), name


def test_every_command_that_has_these_formats_is_asked() -> None:
    named = {**app.COMMANDS, **{f"trace {name}": entry for name, entry in app.TRACE.items()}}
    own = {name: fields(app.options_of(name.removeprefix("trace "), entry)) for name, entry in named.items()}
    answering = {" ".join(argv[: 2 if argv[0] == "trace" else 1]) for argv in ANSWERING.values()}
    formatting = {name for name, options in own.items() if Format in {option.type for option in options}}
    assert formatting - ELSEWHERE == answering - ELSEWHERE
    reporting = {ANSWERING[name][0] for name in REPORTING}
    helps = {
        name: {option.metadata["typer"].help for option in options if option.metadata} for name, options in own.items()
    }
    assert {name for name, texts in helps.items() if REPORT[1] in texts} - ELSEWHERE == reporting - ELSEWHERE


# --- an argument ------------------------------------------------------------------------------------------------------

ROW = """\
    vault_size: int | None = argument(None, "tokens", "Tokens that the vault keeps.", "TOKENS")
    lora_dtype: str = argument("""
PLACES = """
import contextlib, io
from kvplan.servers.sglang import flags as sglang
from kvplan.servers.vllm import flags as vllm
vllm.FLAGS["vault_size"] = vllm.Flag()
sglang.FLAGS["vault_size"] = sglang.Flag(("vault_tokens",))
from kvplan.cli.main import main
from kvplan.measure.serverlog.log import parse_log
from kvplan.asked.log import flags_of
from kvplan.policy.file import ENGINE_KEYS
from kvplan.documents.schema import document_schema
def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    assert code == 0, (argv, err.getvalue())
    return out.getvalue()
def asked(*argv):
    plan = json.loads(run("estimate", *argv, "--gpu", "h200", "--ctx", "4k", "--format", "json"))
    return plan["inputs"]["args"]["vault_size"], " ".join(plan["flags"]["argv"])
def logged(text):
    return flags_of(parse_log(text, "x")).get("vault_size")
open("policy.yaml", "w").write(given)
answers = {
    "option": asked("m", "--vault-size", "4k"),
    "pair": asked("m", "--engine-arg", "vault_size=4096"),
    "pair of SGLang": asked("m", "--engine", "sglang", "--engine-arg", "vault_tokens=4096"),
    "command": asked("--from-command", "vllm serve ./m --vault-size 4096"),
    "command of SGLang": asked("--from-command", "python -m sglang.launch_server --model-path ./m --vault-tokens 4096"),
    "log": logged("non-default args: {'model': 'm', 'vault_size': 4096}\\n"),
    "log of SGLang": logged("server_args=ServerArgs(model_path='m', vault_tokens=4096)\\n"),
    "help": run("estimate", "--help-all"),
    "schema": [name for name in ("plan", "policy") if "vault_size" in json.dumps(document_schema(name))],
    "policy": json.loads(run("check", "policy.yaml", "--format", "json"))["targets"][0],
}
print(json.dumps(answers))
"""
POLICY = """\
version: 1
targets:
  - {id: a, model: ./m, gpu: h200, max_model_len: 4k, vault_size: 4096, rules: {fits: true}}
"""


def test_one_more_argument_is_known_in_every_place(tmp_path: Path) -> None:
    config_file(tmp_path / "m")
    change = ("    lora_dtype: str = argument(", ROW)
    answers = answer_of(PLACES, "kvplan.servers.words.arguments", [change], POLICY, tmp_path)
    for name in ("option", "pair", "command"):
        size, printed = answers[name]
        assert (size, "--vault-size 4096" in printed) == (4096, True), name
    for name in ("pair of SGLang", "command of SGLang"):
        size, printed = answers[name]
        assert (size, "--vault-tokens 4096" in printed) == (4096, True), name
    assert (answers["log"], answers["log of SGLang"]) == ("4096", "4096")
    assert "--vault-size" in answers["help"]
    assert answers["schema"] == ["plan", "policy"]
    assert answers["policy"]["figures"]["fits"] is True
