"""engine/README.md leads a reader through files and calls that are there."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine"
README = (ENGINE / "README.md").read_text(encoding="utf-8")
FACTS_OF_KVPLAN = (
    "core.errors", "core.files", "models.checkpoint", "models.spec", "models.hf_config", "models.quant",
)  # fmt: skip
ORDER = re.findall(r"^\d+\. `([^`]+)`: ", README, re.MULTILINE)
FIRST = ("sequence.py", "scheduler.py", "block_manager.py", "engine.py")  # the twenty minutes
MOST_FIRST_LINES = 1_500


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_each_file_of_the_reading_order_is_listed_once() -> None:
    assert tuple(ORDER[: len(FIRST)]) == FIRST
    assert len(ORDER) == len(set(ORDER)) == len(FIRST) + 13
    assert [name for name in ORDER if not (ENGINE / name).is_file()] == []
    assert [int(number) for number in re.findall(r"^(\d+)\. `", README, re.MULTILINE)] == [*range(1, len(ORDER) + 1)]


def test_the_first_files_are_an_engine_by_themselves(tmp_path: Path) -> None:
    """The README's program runs on a package of just these files, in a pool that is too small for its requests.

    Its model's next token is the sum of all tokens so far, modulo 97, which needs no paged memory to be known.
    """
    files = [f"engine/{name}" for name in FIRST] + ["kvplan/core/errors.py"]
    for folder in ("engine", "kvplan", "kvplan/core"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    for file in files:
        shutil.copy(ROOT / file, tmp_path / file)
    program, output = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.DOTALL)[0]
    names = "import sys; print(*(name for name in sys.modules if name.split('.')[0] in ('kvplan', 'numpy', 'torch')))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{names}"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *printed, modules = done.stdout.splitlines()
    assert printed == output.splitlines()
    assert set(modules.split()) == {"kvplan", "kvplan.core", "kvplan.core.errors"}
    assert sum(num_lines(ENGINE / name) for name in FIRST) <= MOST_FIRST_LINES

    expected = []
    for name, last in zip("abc", (10, 11, 12), strict=True):
        tokens = [*range(1, 10), last]
        for _ in range(10):
            tokens.append(sum(tokens) % 97)
        expected.append(f"{name} {' '.join(map(str, tokens[10:]))} length")
    assert printed[:3] == expected
    assert int(printed[3].split()[0]) > 0  # somebody gave way


def test_the_lines_stated_are_those_of_the_files() -> None:
    """To a tenth: a file may grow by some lines before somebody rounds anew."""
    lines = {name: num_lines(ENGINE / name) for name in ORDER}
    lines |= {
        "four": sum(lines[name] for name in FIRST),
        "thirteen": sum(lines[name] for name in ORDER[len(FIRST) :]),
        "kernels/": sum(map(num_lines, (ENGINE / "kernels").glob("*.py"))),
    }
    stated = dict(re.findall(r"^\d+\. `([^`]+)`: .* \((\d+) lines\)$", README, re.MULTILINE))
    stated |= dict(re.findall(r"^## .*: (four|thirteen) files, ([\d,]+) lines", README, re.MULTILINE))
    stated |= {"kernels/": re.findall(r"`kernels/` is the appendix \(([\d,]+) lines\)", README)[0]}
    rounded = {name: int(text.replace(",", "")) for name, text in stated.items()}
    assert rounded.keys() == lines.keys()
    assert {
        name: (rounded[name], lines[name]) for name in lines if abs(rounded[name] - lines[name]) > 5 + lines[name] / 10
    } == {}


def test_the_lines_of_a_capability_are_those_of_its_files() -> None:
    """To a tenth, as above."""

    def lines_of(name: str) -> int:
        path = ROOT / name if name.startswith("kvplan/") else ENGINE / name
        return sum(map(num_lines, path.glob("*.py") if path.is_dir() else [path]))

    table = README.split("| capability | here |")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+): ([^|]+) \|", table, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| [a-zA-Z]", table, re.MULTILINE)) > 10
    counts = {name: (int(stated.replace(",", "")), names) for name, stated, names in rows}
    lines = {name: sum(map(lines_of, re.findall(r"`([^`]+)`", names))) for name, (_, names) in counts.items()}
    assert {
        name: (counts[name][0], lines[name])
        for name in lines
        if abs(counts[name][0] - lines[name]) > 5 + lines[name] / 10
    } == {}


def test_what_the_engine_imports_of_kvplan_is_named() -> None:
    """Readers of files, facts of a model and errors: a formula shared with the planner would agree with itself."""
    imported = set()
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvplan":
                is_package = (ROOT / (node.module or "").replace(".", "/")).is_dir()
                imported |= {f"{node.module}.{alias.name}" if is_package else node.module for alias in node.names}
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name.split(".")[0] == "kvplan"}
    assert imported == set(re.findall(r"`(kvplan\.[\w.]+)`", README.split("## One step")[0]))
    assert imported == {f"kvplan.{name}" for name in FACTS_OF_KVPLAN}


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
    """Two calls, launch (schedule, run) and take in (postprocess); with a model also tell, after what both share."""

    def functions_of(name: str) -> dict[str, ast.FunctionDef]:
        tree = ast.parse((ENGINE / name).read_text(encoding="utf-8"))
        return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    loop, engine = functions_of("engine.py"), functions_of("llm.py")
    assert re.findall(r"self\.(\w+)\(", ast.unparse(loop["advance"])) == ["_launch", "_take_in"]
    assert re.findall(r"self\.(\w+)\(", ast.unparse(engine["_step"])) == ["advance", "_tell"]
    parts = [ast.unparse(loop[name]) for name in ("_launch", "_take_in")]
    calls = re.findall(r"self\._(schedule|run|postprocess)\(", "\n".join(parts))
    assert list(dict.fromkeys(calls[1:])) == ["schedule", "run", "postprocess"]  # the first drops what nobody wants
    own = [loop[name] for name in ("advance", "_launch", "_take_in", "_schedule", "_run", "_postprocess")]
    assert sum((node.end_lineno or 0) - node.lineno + 1 for node in own) <= 60
