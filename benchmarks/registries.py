"""Read the model classes that each server registers, and what of them was compared; write the tables of names.

    python -m benchmarks.registries ORACLE DATA            print how the stored tables differ from the sources
    python -m benchmarks.registries ORACLE DATA --write    store them in kvplan/servers

ORACLE is a folder with the servers' own code (`venv`, `vllm-src`, `sglang-src`), DATA one with rows of their answers
and the configs that they were asked about (`models`, `capacity_configs`). Read, never run: vLLM 0.33.0's registry.py,
and the EntryClass of each module of SGLang 0.5.23's srt/models. Asked: which classes Transformers lets a server run in
place of one of its own (is_backend_compatible; vLLM also takes _can_set_attn_implementation).

With --releases, a folder of the registry.py of each release as RELEASE.py (0.29.0.py), vllm/since.txt is one of the
tables: for each name the last release without it and the first with it.

A class is `compared` if a row of tests/facts or DATA has the server's own figures for a model of that class.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvplan.core.errors import KvplanError
from kvplan.models import catalog

ROOT = Path(__file__).parents[1]
SERVERS, FACTS = ROOT / "kvplan" / "servers", ROOT / "tests" / "facts"
ROWS = {
    "vllm": ("capacity_cases.jsonl", "capacity_cases_real.jsonl", "capacity_cases_flags.jsonl", "oracle2_vllm.jsonl"),
    "sglang": ("sglang_cases.jsonl", "oracle2_sglang.jsonl"),
}
OF_SGLANG = re.compile(r"sglang|halves|hicache")  # in the names of the files of tests/facts; other files are of vLLM
FIGURES = {"results", "resolved", "ranks", "weights", "params", "param_bytes_per_rank", "slots", "layers"}
FAILED = {"failed", "error", "quant_error", "refused", "different"}  # the last two by kvplan
ASK = """
import transformers
for name in dir(transformers):
    value = getattr(transformers, name) if name[0].isupper() and not name.endswith("Processor") else None
    if isinstance(value, type) and issubclass(value, transformers.PreTrainedModel):
        if value.is_backend_compatible() or value._can_set_attn_implementation():
            print(name if value.is_backend_compatible() else f"{name} settable")
"""


def vllm_names(home: Path) -> dict[str, str]:
    """Architecture -> "", or the last release that had its class."""
    source = (home / "vllm-src/vllm/model_executor/models/registry.py").read_text(encoding="utf-8")
    tables = {
        node.targets[0].id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    former: dict[str, str] = ast.literal_eval(tables["_PREVIOUSLY_SUPPORTED_MODELS"])
    registered = (key for name, table in tables.items() if name.endswith("_MODELS") for key in table.keys)
    names = {key.value: "" for key in registered if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names | {name: f"until {release.rpartition('.')[0]}" for name, release in former.items()}


def registered(source: str) -> set[str]:
    """Names that a release's registry.py has a class for."""
    names = set[str]()
    for node in ast.parse(source).body:
        targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
        is_table = any(isinstance(target, ast.Name) and target.id.endswith("_MODELS") for target in targets)
        is_former = any(isinstance(target, ast.Name) and "PREVIOUSLY" in target.id for target in targets)
        if is_table and not is_former and isinstance(table := getattr(node, "value", None), ast.Dict):
            names |= {key.value for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


def first_releases(releases: Path) -> str:
    """For each name of the newest release that the oldest lacks: the last without it, the first with it."""
    files = {tuple(map(int, file.stem.split("."))): file for file in releases.glob("*.py")}
    tables = {number: registered(files[number].read_text(encoding="utf-8")) for number in sorted(files)}
    numbers = [*tables]
    text = {number: ".".join(map(str, number if number[2] else number[:2])) for number in numbers}
    rows = []
    for name in sorted(tables[numbers[-1]]):
        first = next(index for index, number in enumerate(numbers) if name in tables[number])
        rows += [f"{name} {text[numbers[first - 1]]} {text[numbers[first]]}\n"] if first else []
    return "".join(rows)


def sglang_names(home: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    for file in (home / "sglang-src/sglang/srt/models").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            if [target.id for target in targets if isinstance(target, ast.Name)] == ["EntryClass"]:
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                names |= {item.id: "" for item in ast.walk(node) if isinstance(item, ast.Name)}
    del names["EntryClass"]
    return names


def transformers_names(home: Path) -> list[str]:
    python = home / "venv" / "bin" / "python"
    done = subprocess.run([python, "-W", "ignore", "-c", ASK], capture_output=True, text=True, check=True)
    return sorted(done.stdout.splitlines())


def rows(engine: str, data: Path) -> Iterator[dict[str, Any]]:
    own = (file for file in FACTS.glob("*.jsonl") if bool(OF_SGLANG.search(file.name)) is (engine == "sglang"))
    for file in (*own, *(data / name for name in ROWS[engine])):
        yield from (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def architectures(row: dict[str, Any], data: Path) -> list[str]:
    """The classes that the config of a row's model names; none if neither the row, the catalog nor `data` has it."""
    if "ranks" in row:  # of a class of SGLang's; none if the server refuses its config
        return [] if any("failed" in answer for answer in row["ranks"]) else [row["architecture"]]
    if isinstance(row.get("config"), dict) and (stated := row["config"].get("architectures")):
        return list(stated)
    model = row.get("inputs", row).get("model")
    for folder in ("models", "capacity_configs"):
        if (file := data / folder / str(model) / "config.json").is_file():
            return json.loads(file.read_text(encoding="utf-8")).get("architectures") or []
    try:
        return [catalog.load(str(model)).architecture]
    except KvplanError:
        return []


def compared(engine: str, data: Path) -> set[str]:
    answered = (row for row in rows(engine, data) if FIGURES & {*row} and not FAILED & {*row})
    others = {"vllm": "sglang", "sglang": "vllm"}[engine]
    return {name for row in answered if row.get("server") != others for name in architectures(row, data)}


def lines(names: dict[str, str], known: set[str], lent: Iterable[str]) -> str:
    """The table of a server; `lent`: classes of Transformers that it runs in place of one of its own."""
    stated = names | {name: "compared" for name in known if names.get(name) == ""}
    stated |= dict.fromkeys({*lent} & known - {*names}, "compared unregistered")
    return "".join(f"{name} {words}".rstrip() + "\n" for name, words in sorted(stated.items()))


def tables(home: Path, data: Path, releases: Path | None = None) -> dict[Path, str]:
    """The stored files and what the sources say now."""
    lent = transformers_names(home)
    any_lent = [name.removesuffix(" settable") for name in lent]
    of_releases = {} if releases is None else {SERVERS / "vllm" / "since.txt": first_releases(releases)}
    return of_releases | {
        SERVERS / "vllm" / "registry.txt": lines(vllm_names(home), compared("vllm", data), any_lent),
        SERVERS / "sglang" / "registry.txt": lines(sglang_names(home), compared("sglang", data), lent),
        SERVERS / "plans" / "transformers.txt": "\n".join(lent) + "\n",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--releases", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    wrong = 0
    for file, text in tables(args.oracle, args.data, args.releases).items():
        stored = file.read_text(encoding="utf-8") if file.is_file() else ""
        if args.write:
            file.write_text(text, encoding="utf-8")
        changed = sorted({*text.splitlines()} ^ {*stored.splitlines()})
        wrong += len(changed)
        print(f"{file.relative_to(ROOT)}: {len(text.splitlines())} names, {len(changed)} lines differ", *changed[:9])
    return 1 if wrong and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
