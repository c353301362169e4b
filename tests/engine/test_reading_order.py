"""engine/README.md leads a reader through files and calls that are there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine"
README = (ENGINE / "README.md").read_text(encoding="utf-8")
ORDER = re.findall(r"^\d+\. `([^`]+)`: ", README, re.MULTILINE)


def test_the_hour_is_fifteen_files_each_listed_once() -> None:
    assert len(ORDER) == 15
    assert len(set(ORDER)) == 15
    assert [name for name in ORDER if not (ENGINE / name).is_file()] == []


def test_the_lines_told_are_those_of_the_files() -> None:
    """To a tenth: a file may grow by some lines before somebody rounds anew."""

    def num_lines(path: Path) -> int:
        return len(path.read_text(encoding="utf-8").splitlines())

    lines = {name: num_lines(ENGINE / name) for name in ORDER}
    lines |= {"all": sum(lines.values()), "kernels/": sum(map(num_lines, (ENGINE / "kernels").glob("*.py")))}
    stated = dict(re.findall(r"^\d+\. `([^`]+)`: .* \((\d+) lines\)$", README, re.MULTILINE))
    stated |= {"all": re.findall(r"fifteen files, ([\d,]+) lines", README)[0]}
    stated |= {"kernels/": re.findall(r"`kernels/` is the appendix \(([\d,]+) lines\)", README)[0]}
    rounded = {name: int(text.replace(",", "")) for name, text in stated.items()}
    assert rounded.keys() == lines.keys()
    assert {
        name: (rounded[name], lines[name]) for name in lines if abs(rounded[name] - lines[name]) > 5 + lines[name] / 10
    } == {}


def test_the_lines_of_a_capability_are_those_of_its_files() -> None:
    """To a tenth, as above."""

    def num_lines(name: str) -> int:
        path = ROOT / name if name.startswith("kvplan/") else ENGINE / name
        files = path.glob("*.py") if path.is_dir() else [path]
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)

    table = README.split("| capability | here |")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+): ([^|]+) \|", table, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| [a-zA-Z]", table, re.MULTILINE)) > 10
    counts = {name: (int(told.replace(",", "")), names) for name, told, names in rows}
    lines = {name: sum(map(num_lines, re.findall(r"`([^`]+)`", names))) for name, (_, names) in counts.items()}
    assert {
        name: (counts[name][0], lines[name])
        for name in lines
        if abs(counts[name][0] - lines[name]) > 5 + lines[name] / 10
    } == {}


def test_what_the_engine_imports_of_kvplan_is_named() -> None:
    """Facts of a model and errors: a formula shared with the planner would agree with itself."""
    imported = set()
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvplan":
                is_package = (ROOT / (node.module or "").replace(".", "/")).is_dir()
                imported |= {f"{node.module}.{alias.name}" if is_package else node.module for alias in node.names}
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name.split(".")[0] == "kvplan"}
    assert imported == set(re.findall(r"`(kvplan\.[\w.]+)`", README.split("## One step")[0]))
    assert imported == {f"kvplan.{name}" for name in ("core.errors", "models.spec", "models.hf_config", "models.quant")}


def test_every_file_named_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", README)
    assert len(named) > len(ORDER)
    assert [name for name in named if not (ENGINE / name).is_file() and not (ROOT / name).is_file()] == []


def test_every_file_beside_the_kernels_is_named() -> None:
    files = {path.name for path in ENGINE.glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(files) if f"`{name}`" not in README] == []


def test_the_classes_and_calls_drawn_are_those_of_the_code() -> None:
    drawn = README.split("```")[1]
    known: dict[str, set[str]] = {}
    for path in ENGINE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = re.findall(r"\b(?:def |self\.)(\w+)", ast.unparse(node))
                known[node.name] = set(names)
    calls = re.findall(r"\b([A-Z]\w+)\.(\w+)", drawn)
    assert len(calls) > 8
    assert [f"{owner}.{name}" for owner, name in calls if name not in known.get(owner, set())] == []


def test_a_step_fits_one_screen() -> None:
    """Three calls, which `step` and `generate` share: launch (schedule, run), take in (postprocess) and tell."""
    source = (ENGINE / "engine.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert re.findall(r"self\.(_\w+)\(", ast.unparse(functions["_step"])) == ["_launch", "_take_in", "_tell"]
    parts = [ast.unparse(functions[name]) for name in ("_launch", "_take_in")]
    calls = re.findall(r"self\._(schedule|run|postprocess)\(", "\n".join(parts))
    assert list(dict.fromkeys(calls[1:])) == ["schedule", "run", "postprocess"]  # the first drops what nobody wants
    own = [functions[name] for name in ("_step", "_launch", "_take_in", "_schedule", "_run", "_postprocess")]
    assert sum((node.end_lineno or 0) - node.lineno + 1 for node in own) <= 60
