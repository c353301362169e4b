"""One way down: a module of kvplan imports only modules listed above it; the engine shares facts, never arithmetic."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the ground up; the modules of a room may import each other.
ORDER = (
    "core",  # errors, units, files: no idea of a model
    "models",  # config file -> ModelSpec
    "hardware",  # what a GPU is, and is doing
    "sizing",  # bytes of weights and caches
    "workloads",  # lengths, traces, profiles
    "servers",  # the rules of vLLM, SGLang and the bundled engine
    "asked",  # what is asked, from any source: a pasted command, a manifest, a piece of Python
    "planning",  # questions asked of plans
    "simulate",  # a workload over plans in time
    "policy",  # what deployments promise, judged over plans
    "measure",  # what it really takes
    "serve",  # a server over the engine or its twin: plans and step times come from below, requests from its own face
    "documents",  # every kvplan/*@1, and its JSON Schema
    "report",
    "cli",
    "__init__",  # the same from Python, loaded when it is asked for
    "__main__",
)
MAY_IMPORT_ENGINE = ("measure", "simulate", "serve", "cli")
ENGINE_MAY_IMPORT = ("core", "models")  # what a model is, and where that is read


def violations(root: Path) -> list[str]:
    """Every import under root/kvplan and root/engine that goes the wrong way, as `file:line: what`."""
    planner_faults = [fault for path in sorted((root / "kvplan").rglob("*.py")) for fault in _kvplan_faults(path, root)]
    return planner_faults + [
        fault for path in sorted((root / "engine").rglob("*.py")) for fault in _engine_faults(path, root)
    ]


def _kvplan_faults(path: Path, root: Path) -> Iterator[str]:
    here = path.relative_to(root / "kvplan").with_suffix("").parts[0]
    where = path.relative_to(root)
    if here not in ORDER:
        yield f"{where}: {here!r} has no place; add it to ORDER in tests/core/test_import_direction.py"
        return
    for line, package, module in imports(path):
        if package == "engine" and here not in MAY_IMPORT_ENGINE:
            yield f"{where}:{line}: imports engine; only {', '.join(MAY_IMPORT_ENGINE)} may"
        if package == "kvplan" and not _is_below(module, here):
            yield f"{where}:{line}: {here} imports {module or 'all of kvplan'}, which does not stand before it in ORDER"


def _is_below(module: str, here: str) -> bool:
    return module == here or (module in ORDER and ORDER.index(module) < ORDER.index(here))


def _engine_faults(path: Path, root: Path) -> Iterator[str]:
    for line, package, module in imports(path):
        if package == "kvplan" and module not in ENGINE_MAY_IMPORT:
            yield f"{path.relative_to(root)}:{line}: imports kvplan.{module}; the engine may import facts only"


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, package, its module or "") of each import of kvplan or engine, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        for name in _imported_names(node):
            package, _, submodules = name.partition(".")
            if package in ("kvplan", "engine"):
                yield getattr(node, "lineno", 0), package, submodules.partition(".")[0]


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


def test_no_two_modules_of_the_engine_import_each_other() -> None:
    """Nor in a circle; imports for types count."""
    paths = {"engine." + path.stem: path for path in (ROOT / "engine").glob("*.py")}
    needs = {name: set[str]() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            needs[name].update(module for module in _imported_names(node) if module in paths)
    assert needs["engine.llm"] >= {"engine.engine", "engine.sampler"}
    graphlib.TopologicalSorter(needs).prepare()  # CycleError names the circle


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        (
            "kvplan/core/units.py",
            "from kvplan.planning.plan import plan",
            "kvplan/core/units.py:1: core imports planning",
        ),
        (
            "kvplan/models/spec.py",
            "def f():\n    import kvplan.sizing",
            "kvplan/models/spec.py:2: models imports sizing",
        ),
        ("kvplan/models/spec.py", "from kvplan import cli", "kvplan/models/spec.py:1: models imports cli"),
        (
            "kvplan/servers/vllm/a.py",
            "from kvplan.planning import b",
            "kvplan/servers/vllm/a.py:1: servers imports planning",
        ),
        (
            "kvplan/planning/plan.py",
            "import importlib\nimportlib.import_module('kvplan.cli')",
            "kvplan/planning/plan.py:2: planning imports cli",
        ),
        ("kvplan/planning/plan.py", "from . import a", "kvplan/planning/plan.py:1: planning imports all of kvplan"),
        ("kvplan/oracle.py", "", "kvplan/oracle.py: 'oracle' has no place; add it to ORDER"),
        ("kvplan/planning/plan.py", "from engine import sampler", "kvplan/planning/plan.py:1: imports engine"),
        ("engine/kv_cache.py", "from kvplan.sizing import layout", "engine/kv_cache.py:1: imports kvplan.sizing"),
    ],
)
def test_a_planted_wrong_import_is_found(tmp_path: Path, file: str, text: str, fault: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    (violation,) = violations(tmp_path)
    assert violation.startswith(fault)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "kvplan/planning/plan.py",
            "import math\nfrom kvplan.core import errors\nfrom kvplan import __version__, sizing",
        ),
        ("kvplan/servers/vllm/rules.py", "from kvplan.servers import bundled\nimport kvplan.sizing.layout"),
        ("kvplan/cli/main.py", "def f():\n    from engine.llm import Engine"),
        (
            "engine/models.py",
            "import torch\nfrom kvplan.models.spec import ModelSpec\nfrom engine.layers import Linear",
        ),
    ],
)
def test_imports_that_go_down_are_fine(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert violations(tmp_path) == []
