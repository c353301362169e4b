"""What kvplan answers to some 200 commands, as JSON; two such files compared, before and after a change.

    python benchmarks/answers.py write FILE        asks plans, sweeps, checks, diffs and reconciliations
    python benchmarks/answers.py compare OLD NEW   figure by figure (--texts: every text); exit 1 where one differs

A change that moves code moves no answer: the file written before it equals the one written after it. The commands are
drawn from a fixed seed over models.yaml, gpus.yaml and the servers' releases; none needs a network or a GPU.
"""

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if sys.path[0] == str(Path(__file__).resolve().parent):  # run by path: engine.py beside this would hide the engine
    sys.path[0] = str(ROOT)

from kvplan.cli.main import main as kvplan  # noqa: E402
from kvplan.hardware.gpu import offered_names  # noqa: E402

ENGINES = (
    "vllm", "vllm", "vllm@0.32", "vllm@0.28", "vllm@0.26", "vllm@0.23", "vllm@0.21", "vllm@0.19", "vllm@0.16",
    "vllm@0.12", "vllm@0.10", "vllm@0.8", "vllm@0.6", "sglang", "sglang", "sglang@0.5", "sglang@0.4",
)  # fmt: skip
FLAGS = (
    ("--tp", "2"), ("--tp", "4"), ("--tp", "8"), ("--pp", "2"), ("--dp", "2"), ("--kv-cache-dtype", "fp8"),
    ("--batch", "64"), ("--batch", "512"), ("--max-num-batched-tokens", "4096"), ("--quantization", "fp8"),
    ("--lengths", "lognormal:mean=1k,p99=3k"), ("--max-loras", "4"), ("--enforce-eager",), ("--text-only",),
    ("--block-size", "32"),
)  # fmt: skip
CONTEXTS = ("4k", "8k", "16k", "32k")
MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.3-70b-fp8", "llama-4-scout", "qwen2.5-7b",
    "qwen2.5-32b-awq", "qwen2.5-vl-7b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b",
    "qwen3-235b-a22b-fp8", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b", "gemma-3-4b",
    "gemma-3-27b", "gemma-4-26b-a4b", "mistral-7b", "mistral-small-24b", "mixtral-8x7b", "ministral-3-3b-bf16",
    "phi-3.5-mini", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2",
    "deepseek-v4-flash", "kimi-k2", "glm-4.5-air", "glm-4.6", "nemotron-3-nano-30b-a3b",
    "granite-4.0-h-small", "falcon-h1-7b", "lfm2-1.2b", "olmo-3-7b", "smollm3-3b",
)  # fmt: skip


def names(file: str) -> list[str]:
    path = next(ROOT.rglob(file)) if not (ROOT / file).exists() else ROOT / file
    return [line.split(":")[0] for line in path.read_text(encoding="utf-8").splitlines() if line[:1].isalnum()]


def commands(folder: Path) -> Iterator[list[str]]:
    """The commands, the same in every run; files they read are written into `folder`."""
    draw = random.Random(20261122)
    models, gpus = (
        [name for name in MODELS if name in names("models.yaml")],
        [name for name in offered_names() if not name.startswith(("v100", "t4"))],
    )

    def server() -> list[str]:
        flags = [word for flag in draw.sample(FLAGS, draw.choice((0, 0, 1, 2))) for word in flag]
        return ["--engine", draw.choice(ENGINES), "--gpu", draw.choice(gpus), "--ctx", draw.choice(CONTEXTS), *flags]

    for _ in range(140):
        yield ["estimate", draw.choice(models), *server()]
    for _ in range(12):
        pair = ["--gpu", ",".join(draw.sample(gpus, 2)), "--ctx", ",".join(draw.sample(CONTEXTS, 2))]
        yield ["sweep", *draw.sample(models, 2), *pair, "--tp", "1,4", "--engine", draw.choice(ENGINES)]
    for _ in range(8):
        asks = ["--users", str(draw.choice((10, 100, 400))), "--ctx", draw.choice(CONTEXTS)]
        yield ["recommend", draw.choice(models), *asks, *draw.choice(((), ("--gpu", "h100-80g"), ("--gpus", "l40s")))]
    for number in range(16):
        policy = folder / f"policy-{number}.yaml"
        targets = [
            {"id": f"t{index}", "model": draw.choice(models), "gpu": draw.choice(gpus),
             "engine": draw.choice(ENGINES[:13]), "max_model_len": draw.choice(CONTEXTS),
             "rules": {"fits": True, "min_concurrency": draw.choice((1, 4, 40)), "min_headroom": "5%"}}
            for index in range(4)
        ]  # fmt: skip
        policy.write_text(json.dumps({"version": 1, "targets": targets}), encoding="utf-8")
        yield ["check", str(policy)]
    for number in range(12):
        sides = []
        for side in ("old", "new"):
            path = folder / f"{side}-{number}.json"
            with contextlib.suppress(SystemExit):
                text = ask(["estimate", models[number * 7 % len(models)], *server(), "--format", "json"])["out"]
            path.write_text(text, encoding="utf-8")
            sides.append(str(path))
        yield ["diff", *sides]
    for number, (engine, log) in enumerate(logs()):
        path = folder / f"server-{number}.log"
        path.write_text(log, encoding="utf-8")
        yield ["reconcile", "--log", str(path), "--model", "llama-3.1-8b", "--gpu", "a100-80g", "--engine", engine]
    yield ["reconcile", str(ROOT / "reports/cpu-2core")]


def logs() -> Iterator[tuple[str, str]]:
    """(release, log): the example's log, and one log for each wording that a test keeps, with figures put in."""
    import yaml

    yield "vllm@0.10", (ROOT / "examples/vllm-0.10.log").read_text(encoding="utf-8")
    wordings = yaml.safe_load((ROOT / "tests/facts/logs/wordings.yaml").read_text(encoding="utf-8"))
    for wording in wordings:
        figures = Figures(wording)
        text = "\n".join(message.format_map(figures) for message in wording["messages"])
        yield f"{wording['engine']}@{'.'.join(map(str, wording['releases'][-1]))}", text + "\n"


class Figures(dict[str, float]):
    """A figure for any name: integers for counts, GiB for the rest."""

    def __init__(self, wording: dict[str, Any]) -> None:
        self.seed = len(str(wording))

    def __missing__(self, name: str) -> float:
        match name:
            case "num_blocks" | "kv_tokens" | "concurrency_context":
                return 8192 + self.seed
            case "utilization" | "total_memory":
                return 0.9 if name == "utilization" else 79.15
            case _:
                return 15.0 + self.seed % 7 / 8


def ask(argv: list[str]) -> dict[str, Any]:
    """{code, out, err} of one command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = kvplan(argv)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def write(file: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name, file.open("w", encoding="utf-8") as lines:
        folder = Path(name)
        for argv in commands(folder):
            answer = ask([*argv, "--format", "json"])
            text = json.dumps({"command": argv} | answer, ensure_ascii=False)
            lines.write(text.replace(name, "FOLDER").replace(str(ROOT), "ROOT") + "\n")


def figures(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a document by its path."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from figures(inner, f"{path}.{key}")
        case list():
            for index, inner in enumerate(value):
                yield from figures(inner, f"{path}[{index}]")
        case _:
            yield path, value


def differences(old: dict[str, Any], new: dict[str, Any], texts: bool) -> list[str]:
    """What differs between two answers to one command."""
    if old["code"] != new["code"]:
        return [f"exit {old['code']} -> {new['code']}: {(new['err'] or old['err']).strip()[:160]}"]
    if texts and (old["out"], old["err"]) != (new["out"], new["err"]):
        return ["the text differs"]
    sides = [dict(figures(json.loads(side["out"]))) if side["out"].startswith("{") else {} for side in (old, new)]
    for side in sides:
        for path in [path for path, value in side.items() if isinstance(value, str) or path == ".kvplan"]:
            del side[path]
    before, after = sides
    return [
        f"{path}: {before.get(path)} -> {after.get(path)}"
        for path in before | after
        if before.get(path) != after.get(path)
    ]


def compare(old: Path, new: Path, texts: bool) -> int:
    sides = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in (old, new)]
    before, after = ({json.dumps(line["command"]): line for line in side} for side in sides)
    if list(before) != list(after):
        print("the two files answer different commands")
        return 1
    wrong = {key: changes for key in before if (changes := differences(before[key], after[key], texts))}
    for key, changes in wrong.items():
        print(key, *changes[:5], sep="\n  ")
    codes = [line["code"] for line in before.values()]
    print(f"{len(before)} commands ({codes.count(0)} answered), {len(wrong)} differ")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("write").add_argument("file", type=Path)
    both = verbs.add_parser("compare")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    both.add_argument("--texts", action="store_true", help="texts must be equal too")
    args = parser.parse_args()
    if args.verb == "write":
        write(args.file)
        return 0
    return compare(args.old, args.new, args.texts)


if __name__ == "__main__":
    sys.exit(main())
