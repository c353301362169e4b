"""Ask SGLang for its arguments as it declares and as it logs them, and write both as facts.

    python -m benchmarks.log_lists_sglang ORACLE MODELS            print whether the stored files equal fresh answers
    python -m benchmarks.log_lists_sglang ORACLE MODELS --write    store them

ORACLE is a folder with SGLang 0.5.23's own code and a stand-in for each GPU (`venv`, `sglang-src`, `scripts`), MODELS
one with a folder of each model of `CASES` and its config.json.

kvplan/servers/sglang/defaults.txt: the default of every field of ServerArgs, as text. tests/facts/sglang_lists.jsonl:
the values that its parser takes of the fields that have a choice, then of each case what the server logs after
resolving its arguments, as far as that differs from the defaults.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEFAULTS = ROOT / "kvplan" / "servers" / "sglang" / "defaults.txt"
LISTS = ROOT / "tests" / "facts" / "sglang_lists.jsonl"
HEADER = "# Defaults of ServerArgs, sglang 0.5.23 srt/arg_groups/fields, as a log shows them (log_lists_sglang.py)\n"
PLAIN, NEXT, OSS, DEEPSEEK = (
    "Qwen__Qwen3-8B", "Qwen__Qwen3-Next-80B-A3B-Instruct", "openai__gpt-oss-20b", "deepseek-ai__DeepSeek-V3",
)  # fmt: skip
CASES: tuple[tuple[str, str, str], ...] = (
    ("H100", PLAIN, ""),
    ("H100", PLAIN, "--tp-size 2 --mem-fraction-static 0.8 --context-length 32768 --kv-cache-dtype fp8_e4m3"),
    ("H100", PLAIN, "--disable-radix-cache --disable-cuda-graph --chunked-prefill-size -1 --page-size 16"),
    ("H100", PLAIN, "--disaggregation-mode prefill"),
    ("H100", PLAIN, "--enable-hierarchical-cache --hicache-ratio 3"),
    ("H100", PLAIN, "--pp-size 2 --cpu-offload-gb 2"),
    ("H100", OSS, ""),
    ("H100", DEEPSEEK, "--tp-size 8 --dp-size 8 --enable-dp-attention"),
    ("H100", NEXT, "--tp-size 4"),
    ("B200", PLAIN, ""),
    ("B200", PLAIN, "--kv-cache-dtype fp4_mx_block16"),
    ("B200", OSS, ""),
    ("B200", DEEPSEEK, "--tp-size 8"),
    ("B200", NEXT, "--tp-size 2"),
    ("L40S", PLAIN, ""),
    ("RTX5090", PLAIN, "--context-length 16384 --max-running-requests 64"),
)
# Not of the server: the folder of the model, a number drawn at random, names of this machine's files.
OWN = ("model_path", "tokenizer_path", "served_model_name", "random_seed")


def child(home: Path, models: Path, gpu: str) -> Iterator[Any]:
    """Yield the defaults, the choices, then the list of each case on one GPU."""
    sys.path[:1] = [str(home / folder) for folder in ("sglang-src", "scripts/sglang", "scripts/common")]
    import oracle_cases  # type: ignore[import-not-found]

    os.environ.update(oracle_cases.ENVIRONMENT)
    import pretend  # type: ignore[import-not-found]

    pretend.load(gpu)
    from sglang.srt.entrypoints import engine  # type: ignore[import-not-found]
    from sglang.srt.server_args import ServerArgs, prepare_server_args  # type: ignore[import-not-found]

    raw = ServerArgs(model_path="MODEL")
    fields = {name: str(getattr(raw, name)) for name in raw.resolved_dict() if name != "model_path"}  # has none
    yield fields
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = {action.dest: action.choices for action in reversed(parser._actions) if action.choices}
    yield {name: sorted(str(choice) for choice in actions[name]) for name in fields if name in actions}  # some are sets
    for _, model, words in (case for case in CASES if case[0] == gpu):
        args = prepare_server_args(["--model-path", str(models / model), "--skip-tokenizer-init", *words.split()])
        args.resolve_once()
        logged = {name: str(value) for name, value in engine._server_args_for_logging(args).items()}
        yield {name: text for name, text in logged.items() if name not in OWN and text != fields[name]}


def answers_of(home: Path, models: Path, gpu: str) -> list[Any]:
    """A process of the oracle's own Python, since one process plays one GPU."""
    words = [str(home / "venv" / "bin" / "python"), __file__, str(home), str(models), "--gpu", gpu]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{gpu}: {done.stderr[-2000:]}")
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def files(home: Path, models: Path) -> dict[Path, str]:
    rows, defaults, choices = list[dict[str, Any]](), dict[str, str](), dict[str, list[str]]()
    for gpu, cases in groupby(CASES, key=lambda case: case[0]):
        defaults, choices, *lists = answers_of(home, models, gpu)
        rows += [
            {"model": model.replace("__", "/"), "gpu": gpu, "argv": words.split(), "logged": logged}
            for (_, model, words), logged in zip(cases, lists, strict=True)
        ]
    lines = [f"{name} = {text}\n" for name, text in defaults.items()]
    return {
        DEFAULTS: HEADER + "".join(lines),
        LISTS: "".join(f"{json.dumps(row)}\n" for row in ({"sglang": "0.5.23", "choices": choices}, *rows)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--gpu", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gpu:
        print("\n" + json.dumps(list(child(options.oracle, options.models, options.gpu))))
        return 0
    if not (options.oracle / "sglang-src").is_dir():
        print(f"skipped: {options.oracle} has no sglang-src")
        return 0
    from benchmarks.start_attention import settle

    return max(settle(path, text, write=options.write) for path, text in files(options.oracle, options.models).items())


if __name__ == "__main__":
    sys.exit(main())
