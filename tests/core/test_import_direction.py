"""One way down: a module of kvplan imports only modules listed above it; the engine shares facts, never arithmetic."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the ground up. A package counts as one entry: its modules may import each other.
ORDER = (
    # ground: errors, text and files in, no idea of a model
    "errors",
    "records",  # dataclasses that are made quickly
    "units",
    "entries",
    "files",
    "csv_text",  # rows as CSV
    "git",  # a repository's files at a revision
    "strict_yaml",
    "limits",
    "tensors",  # what a checkpoint's headers say
    "gguf_header",
    "safetensors_header",
    "checkpoint",
    "hub",
    # facts
    "spec",
    "gpu",
    "prices",  # what a GPU costs, as the user says
    "workload",
    "traces",  # requests as they came, or as a published workload has them
    "families",  # one reader per model family
    "patterns",  # over names of modules, from strangers
    "names",  # of modules in checkpoints
    "listed",  # what a quantization_config's lists say about them
    "quant",  # a config's quantization_config
    "hf_config",
    "catalog",
    # arithmetic
    "layout",
    "weights",
    "disk",  # what they weigh as a checkpoint stores them
    "allocator",  # what torch's blocks add to them
    "stored",  # the same from a checkpoint's own headers
    "rules",
    "environment",  # variables that change a server's memory
    "overheads",
    "calibration",  # measured constants in place of modelled ones
    "step_fit",  # what a step took
    "start",  # why a server with room does not start
    "users",  # how many requests a pool holds, exactly and in distribution
    "plan",
    "held",  # users of a plan at either end of its range
    "sweep",  # many plans
    "advise",  # what would make a plan fit
    "recommend",  # the cheapest plan that holds so many users
    "attribute",  # why two plans differ
    "flags",
    "explain",
    "command",  # a pasted `vllm serve ...`
    "sglang_command",
    "container",  # a compose file's or a manifest's, as a shell's line
    "pasted",  # either of the two
    "simulate",
    "policy",  # what deployments promise, judged over plans
    # what it really takes
    "rundir",  # what a profile leaves on disk
    "nvml",
    "server_metrics",  # a server's /metrics page
    "watch",
    "doctor",
    "profile",
    "serverlog",  # a server's start-up log beside its plan
    "run_manifest",
    "run_capacity",
    "reconcile",
    "diff",  # what changed between plans
    # answers
    "schema",
    "artifact",
    "report",
    "cli",
    "__main__",
)
MAY_IMPORT_ENGINE = ("profile", "simulate", "cli")
ENGINE_MAY_IMPORT = ("spec", "errors", "quant", "hf_config", "catalog")  # what a model is, and where that is read


def violations(root: Path) -> list[str]:
    """Every import under root/kvplan and root/engine that goes the wrong way, as `file:line: what`."""
    found = [fault for path in sorted((root / "kvplan").rglob("*.py")) for fault in _kvplan_faults(path, root)]
    return found + [fault for path in sorted((root / "engine").rglob("*.py")) for fault in _engine_faults(path, root)]


def _kvplan_faults(path: Path, root: Path) -> Iterator[str]:
    here = path.relative_to(root / "kvplan").with_suffix("").parts[0]
    where = path.relative_to(root)
    if here != "__init__" and here not in ORDER:
        yield f"{where}: {here!r} has no place; add it to ORDER in tests/test_import_direction.py, before its users"
        return
    for line, package, module in imports(path):
        if package == "engine" and here not in MAY_IMPORT_ENGINE:
            yield f"{where}:{line}: imports engine; only {', '.join(MAY_IMPORT_ENGINE)} may"
        if package == "kvplan" and not _is_below(module, here):
            yield f"{where}:{line}: {here} imports {module or 'all of kvplan'}, which does not stand before it in ORDER"


def _is_below(module: str, here: str) -> bool:
    if here == "__init__":  # it is run before every module, so it loads none
        return False
    return module == here or (module in ORDER and ORDER.index(module) < ORDER.index(here))


def _engine_faults(path: Path, root: Path) -> Iterator[str]:
    for line, package, module in imports(path):
        if package == "kvplan" and module not in ENGINE_MAY_IMPORT:
            yield f"{path.relative_to(root)}:{line}: imports kvplan.{module}; the engine may import facts only"


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, package, its module or "") of each import of kvplan or engine, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        for name in _imported_names(node):
            package, _, rest = name.partition(".")
            if package in ("kvplan", "engine"):
                yield getattr(node, "lineno", 0), package, rest.partition(".")[0]


def _imported_names(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(level=0, module="kvplan", names=names):
            return [f"kvplan.{alias.name}" for alias in names if not alias.name.startswith("__")]
        case ast.ImportFrom(level=0, module=str(module)):
            return [module]
        case ast.ImportFrom():
            return ["kvplan"]  # relative: ruff refuses it too
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
            return [module]
        case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(module)), *_]):
            return [module]
    return []


def test_every_import_goes_down() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("kvplan/units.py", "from kvplan.plan import plan", "kvplan/units.py:1: units imports plan"),
        ("kvplan/spec.py", "def f():\n    import kvplan.layout", "kvplan/spec.py:2: spec imports layout"),
        ("kvplan/spec.py", "from kvplan import cli", "kvplan/spec.py:1: spec imports cli"),
        ("kvplan/rules/vllm.py", "from kvplan.plan import plan", "kvplan/rules/vllm.py:1: rules imports plan"),
        (
            "kvplan/plan.py",
            "import importlib\nimportlib.import_module('kvplan.cli')",
            "kvplan/plan.py:2: plan imports cli",
        ),
        ("kvplan/plan.py", "from . import errors", "kvplan/plan.py:1: plan imports all of kvplan"),
        ("kvplan/__init__.py", "from kvplan.plan import plan", "kvplan/__init__.py:1: __init__ imports plan"),
        ("kvplan/oracle.py", "", "kvplan/oracle.py: 'oracle' has no place; add it to ORDER"),
        ("kvplan/plan.py", "from engine.block_manager import BlockManager", "kvplan/plan.py:1: imports engine"),
        ("engine/kv_cache.py", "from kvplan.layout import seq_bytes", "engine/kv_cache.py:1: imports kvplan.layout"),
    ],
)
def test_a_planted_wrong_import_is_found(tmp_path: Path, file: str, text: str, fault: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    (found,) = violations(tmp_path)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kvplan/plan.py", "import math\nfrom kvplan.errors import UsageError\nfrom kvplan import __version__, spec"),
        ("kvplan/rules/vllm.py", "from kvplan.rules import bundled\nimport kvplan.layout"),
        ("kvplan/cli/main.py", "def f():\n    from engine.engine import Engine"),
        ("engine/models.py", "import torch\nfrom kvplan.spec import ModelSpec\nfrom engine.layers import Linear"),
    ],
)
def test_imports_that_go_down_are_fine(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert violations(tmp_path) == []
