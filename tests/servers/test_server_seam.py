"""A server is a folder and one line of servers/base.py: the rooms above ask it, and say no server's name."""

import ast
import re
from pathlib import Path

import pytest

from kvplan.servers import base
from kvplan.servers.base import parse_engine

KVPLAN = Path(__file__).resolve().parents[2] / "kvplan"
# Files that may say `sglang`, and how many of their lines do: only ever fewer.
NAMED = {
    "asked/rollout.py": 7,  # the flags and arrays of slime, which only it serves, and their source
    "asked/snippet.py": 1,  # its source
    "cli/run_options.py": 1,  # sglang.bench_serving, which writes results that reconcile reads
    "cli/simulate_options.py": 2,  # likewise, which calibrate reads; its command, which is read as a load
    "models/families/rope.py": 1,  # the source of its keys' order
    "models/quant.py": 1,  # a source
    "planning/phases.py": 1,  # a source
    "report/templates.py": 1,  # an example
    "simulate/host.py": 1,  # the host fitted to its results
    "simulate/kernels/choice.py": 4,  # names in the measured tables, and kernels taken from another's
    "simulate/kernels/layers.py": 1,  # how wide it makes the inputs of experts
    "simulate/kernels/library.py": 1,  # whose tables stand for those that a server lacks
    "simulate/prompts_first.py": 6,  # the scheduler's source, and the variables its constants are
    "simulate/radix.py": 2,  # its source
    "sizing/weights.py": 2,  # sources
}
FOLDERS = tuple(f"kvplan.servers.{name}" for name in ("vllm", "sglang", "llamacpp", "ollama", "bundled"))
# Files that import the bundled engine's rules, which are the arithmetic of our own runs.
OWN_ENGINE = {
    "cli/reconcile_own.py": "a log of the bundled engine beside its prediction",
    "cli/serve.py": "the lines of its log",
    "measure/techniques.py": "what its techniques saved",
    "planning/own_cures.py": "fixes of its failed start",
    "measure/reconcile.py": "predicts the run of the bundled engine that it compares",
    "measure/run_capacity.py": "what a run of the bundled engine held",
    "measure/run_manifest.py": "the inputs of such a run",
    "report/run_contexts.py": "its block tables",
    "serve/real.py": "the bundled engine as a backend, its plan beside its memory",
}


def named_lines() -> dict[str, int]:
    """Lines that say `sglang`, by file, outside the room that owns the name."""
    lines = {}
    for path in sorted(KVPLAN.rglob("*.py")):
        name = path.relative_to(KVPLAN).as_posix()
        if name.startswith("servers/"):
            continue
        if count := sum("sglang" in line.lower() for line in path.read_text(encoding="utf-8").splitlines()):
            lines[name] = count
    return lines


def test_no_other_room_says_the_name_of_a_server() -> None:
    assert named_lines() == NAMED


def own_modules(path: Path) -> set[str]:
    """Servers whose own modules a file imports, wherever in the file that stands."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Import(names=names):
                modules += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules += [f"{module}.{alias.name}" for alias in names]
            case ast.Call(args=[ast.Constant(value=str(text)), *_]):  # import_module
                modules.append(text)
    return {module.split(".")[2] for module in modules if module.startswith(FOLDERS)}


def shared_files() -> list[Path]:
    """The files that are no server's own."""
    folders = {KVPLAN.parent / folder.replace(".", "/") for folder in FOLDERS}
    return [path for path in sorted(KVPLAN.rglob("*.py")) if not folders & set(path.parents)]


def imports_of_servers() -> dict[str, set[str]]:
    """By file: the servers whose own modules are imported by what is not theirs."""
    named = {path.relative_to(KVPLAN).as_posix(): own_modules(path) for path in shared_files()}
    return {name: servers for name, servers in named.items() if servers}


def test_no_other_room_imports_a_module_of_a_server() -> None:
    """Of vLLM, of SGLang: none. Of the bundled engine: what is about our own engine, and nothing else."""
    assert imports_of_servers() == {name: {"bundled"} for name in OWN_ENGINE}


@pytest.mark.parametrize(
    "text",
    [
        "from kvplan.servers import vllm",
        "from kvplan.servers.vllm.pages import pool",
        "import kvplan.servers.vllm.rules as rules",
        "def f():\n    import_module('kvplan.servers.vllm.size')",
    ],
)
def test_a_planted_import_is_seen(tmp_path: Path, text: str) -> None:
    path = tmp_path / "planted.py"
    path.write_text(text, encoding="utf-8")
    assert own_modules(path) == {"vllm"}


def test_what_is_no_servers_own_compares_no_name() -> None:
    pattern = re.compile(r"""(==|!=|startswith\() *["'](sglang|vllm)""")
    file_names = [path.name for path in shared_files() if pattern.search(path.read_text(encoding="utf-8"))]
    assert file_names == []


@pytest.mark.parametrize("name", list(base.SERVERS))
def test_what_completion_offers_is_an_engine(name: str) -> None:
    server = base.server_of(name)
    assert server.name == name
    assert [parse_engine(label).engine for label in server.labels()] == [name] * len(server.labels())
