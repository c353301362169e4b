"""Every argument of a server stands in kvplan's table: modeled, without effect on memory, or refused with its reason.

tests/facts/server_arguments.jsonl: the fields of vLLM 0.33.0's AsyncEngineArgs and SGLang 0.5.23's ServerArgs, and the
flags that their parsers take (frontend_flags: those of `vllm serve` alone). Where the servers' sources lie at hand
(ORACLE_HOME), the fields are read again there.
"""

import ast
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import parse
from kvplan.servers.base import SERVERS, abilities_of, server_of, terms_of
from kvplan.servers.llamacpp import command as llamacpp_command
from kvplan.servers.ollama import command as ollama_command
from kvplan.servers.sglang import command as sglang_command
from kvplan.servers.vllm import command as vllm_command
from kvplan.servers.vllm.arguments import OTHERS as VLLM_OTHERS
from kvplan.servers.words.arguments import spellings
from tests.conftest import check_golden
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.standings import orders, standings

ROOT = Path(__file__).resolve().parents[2]
FACTS = [json.loads(line) for line in (ROOT / "tests/facts/server_arguments.jsonl").read_text("utf-8").splitlines()]
HOME = Path(os.environ.get("ORACLE_HOME") or "/nowhere")
SOURCES = {
    "vllm": "vllm-src/vllm/engine/arg_utils.py",
    "sglang": "sglang-src/sglang/srt/arg_groups/fields/*.py",
}
CLASSES = {"vllm": ("EngineArgs", "AsyncEngineArgs")}


ORDER_WORDS = (
    "What the server's scheduler reads. Windows, states, drafts, weights in host memory have refusals of their own."
)


def page() -> str:
    """docs/arguments.md."""
    lines = [
        "# Arguments of servers",
        "",
        "What kvplan makes of every argument of a server: *modeled*, *no effect on memory*, or *refused* and why.",
        "A pasted command with a refused flag is an error that names it; a flag in no list is warned of.",
    ]
    for server in SERVERS:
        rows = sorted(standings(server))
        counts = Counter(standing for _, standing, _ in rows)
        count = ", ".join(f"{counts[key]} {key}" for key in sorted(counts))
        lines += ["", f"## {terms_of(server).title}", "", f"{count}.", ""]
        lines += ["| argument | standing | what it is about |", "|---|---|---|"]
        for name, standing, what in rows:
            lines.append(f"| `{name}` | {standing} | {what.replace('|', '/')} |")
        if not abilities_of(server).simulated:
            continue
        lines += ["", f"### Which request runs next: {terms_of(server).title}", "", ORDER_WORDS, ""]
        lines += ["| argument | `simulate`, `recommend --slo`, `tune` | why |", "|---|---|---|"]
        lines += [f"| `{name}` | {standing} | {what.replace('|', '/')} |" for name, standing, what in orders(server)]
    return "\n".join(lines) + "\n"


def test_the_page_is_made_from_the_table(update: bool) -> None:
    check_golden(ROOT / "docs/arguments.md", page(), update=update)


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: str(facts["server"]))
def test_no_argument_of_a_server_is_missing(facts: dict[str, Any]) -> None:
    known = {name for name, _, _ in standings(facts["server"])}
    assert len(facts["fields"]) > 250
    assert [name for name in facts["fields"] if name not in known] == []


# What the servers' own schedulers read: tests/facts/scheduling_arguments.jsonl, from vLLM 0.33.0's SchedulerConfig and
# v1/core/sched, and SGLang 0.5.23's fields/schedule.py and managers/ (declared: in the config; read: by the scheduler).
SCHEDULERS = (ROOT / "tests/facts/scheduling_arguments.jsonl").read_text("utf-8").splitlines()
ORDERS = [json.loads(line) for line in SCHEDULERS]


@pytest.mark.parametrize("facts", ORDERS, ids=lambda facts: str(facts["server"]))
def test_no_argument_that_a_scheduler_reads_is_missing(facts: dict[str, Any]) -> None:
    """Each is simulated, without effect on who runs next, or refused; by name, or with the plan."""
    server = facts["server"]
    known = {name for name, _, _ in orders(server)}
    never = {name for name, standing, _ in standings(server) if standing == "refused"}
    assert len(facts["declared"]) + len(facts["read"]) > 40
    assert [name for name in (*facts["declared"], *facts["read"]) if name not in known | never] == []
    listed = {name for name, _, what in standings(server) if what.startswith("which request runs next")}
    assert listed <= known
    assert Counter(name for name, _, _ in orders(server)).most_common(1)[0][1] == 1
    assert known <= {name for name, _, _ in standings(server)}


MODELS = {
    "vllm": "vllm serve", "sglang": "python -m sglang.launch_server --model-path", "llamacpp": "llama-server --hf-repo",
    "ollama": "ollama run --model",
}  # fmt: skip
READERS = {"vllm": vllm_command, "sglang": sglang_command, "llamacpp": llamacpp_command, "ollama": ollama_command}
SIMULATED = [server for server in SERVERS if abilities_of(server).simulated]
VALUES = {"retraction_policy": "priority", "schedule_policy": "lpm", "scheduling_policy": "priority"}


@pytest.mark.parametrize("server", SIMULATED)
def test_an_argument_that_changes_the_order_is_refused_by_every_simulation(server: str) -> None:
    """By its name, but for the value that the server takes by itself."""
    _, flags = server_of(server).pasted().flags
    table = set(spellings(server))
    names = [name for name, standing, _ in orders(server) if standing == "refused" and name not in table]
    assert len(names) > 5
    for name in names:
        other = flags[name]
        flag = f"--{name.replace('_', '-')}"
        words = [flag] if other.is_switch else [flag, VALUES.get(name, "7")]
        if other.in_order == ("true",):
            words = [f"--no-{flag[2:]}"]
        command = parse(f"{MODELS[server]} a/b {' '.join(words)}")
        assert command.reordering == {words[0]: other.order}, name
        for value in other.in_order:
            usual = [flag] if other.is_switch else [flag, value]
            assert parse(f"{MODELS[server]} a/b {' '.join(usual)}").reordering == {}, name


@pytest.mark.parametrize("server", SIMULATED)
@pytest.mark.parametrize("command", ["simulate", "recommend", "tune"])
def test_a_pasted_order_is_refused_by_name(run: Run, command: str, server: str) -> None:
    flag = {"vllm": "--scheduling-policy priority", "sglang": "--schedule-policy lof"}[server]
    pasted = f"{MODELS[server]} meta-llama/Llama-3.1-8B {flag}"
    load = ("--prompt-tokens", "1k", "--output-tokens", "9", "--rate", "1", "--num-requests", "9", "--slo", "ttft=9s")
    ran = run(command, "--from-command", pasted, "--gpu", "h100-80g", "--ctx", "8k", "-q", *load)
    assert f"simulate {flag.split()[0]} changes the scheduling order" in refused(ran)


def test_every_flag_of_vllms_parser_is_known_to_the_reader() -> None:
    flags = next(facts["flags"] for facts in FACTS if facts["server"] == "vllm")
    names = {flag: vllm_command.plain_name(vllm_command.name_of(flag)[0])[0] for flag in flags}
    known = {*vllm_command.ARGUMENT_NAMES, *VLLM_OTHERS}
    assert [flag for flag, name in names.items() if name not in known] == []


def test_every_flag_of_sglangs_parser_is_known_to_the_reader() -> None:
    flags = next(facts["flags"] for facts in FACTS if facts["server"] == "sglang")
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}
    known = sglang_command.KNOWN
    assert [flag for flag, name in names.items() if name not in known and name.removeprefix("no_") not in known] == []


@pytest.mark.parametrize("server", list(SERVERS))
def test_a_refused_flag_is_refused_and_no_other_is(run: Run, server: str) -> None:
    reader, start = READERS[server], f"{MODELS[server]} a/b"
    read = {name for names in server_of(server).pasted().flags[0].values() for name in names.split()}
    for name, standing, _ in standings(server):
        if standing == "modeled" or name.startswith("_"):  # no flag of the command line
            continue
        flag = "--" + name.replace("_", "-")
        if name in read:  # refused by the plan, not by the reader
            pasted = f"{start.replace('a/b', 'Qwen/Qwen3-8B')} {flag}{'' if reader.is_switch(name) else ' a=b'}"
            ran = run("estimate", "--gpu", "h100-80g", "--ctx", "8k", "--from-command", pasted)
            assert (ran.code, "not modeled" in ran.err) == (2, True), flag
            continue
        between = " " if server in ("llamacpp", "ollama") else "="
        command = parse(f"{start} {flag if reader.is_switch(name) else f'{flag}{between}zz'}")
        assert (list(command.refused) == [flag]) == (standing == "refused"), flag
        assert command.unknown == [], flag


def test_every_flag_of_llamacpps_parser_is_known_to_the_reader() -> None:
    flags = next(facts["flags"] for facts in FACTS if facts["server"] == "llamacpp")
    reader = llamacpp_command
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}
    read, others = reader.flags
    known = {*reader.NAMES, *others, *(name for text in read.values() for name in text.split())}
    unknown = [flag for flag, name in names.items() if name not in known and name.removeprefix("no_") not in known]
    assert (len(flags) > 300, unknown) == (True, [])


@pytest.mark.skipif(not (HOME / "vllm-src").is_dir(), reason="the servers' own sources are not at hand (ORACLE_HOME)")
@pytest.mark.parametrize(
    "facts", [facts for facts in FACTS if facts["server"] in SOURCES], ids=lambda facts: str(facts["server"])
)
def test_the_facts_are_the_servers_own_fields(facts: dict[str, Any]) -> None:
    names: list[str] = []
    for path in sorted(HOME.glob(SOURCES[facts["server"]])):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES.get(facts["server"], (node.name,)):
                fields = (statement.target for statement in node.body if isinstance(statement, ast.AnnAssign))
                names += [target.id for target in fields if isinstance(target, ast.Name)]
    assert sorted(names) == sorted(facts["fields"])
