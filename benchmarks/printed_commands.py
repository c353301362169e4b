"""Put the commands that kvplan prints through the servers' own parsers and config checks.

    python -m benchmarks.printed_commands draw OUT.jsonl --models FOLDER [--logs FILE ...] [--seed 1] [--count 30]
    ORACLE/venv/bin/python benchmarks/printed_commands.py ask OUT.jsonl ANSWERS.jsonl --scripts DIR --models FOLDER

`draw` runs `estimate`, `recommend` and `tune` on random models of FOLDER (ORG__NAME/config.json), GPUs, flags and
goals, and `why` on logs of FILE (a `text` or `verbatim` per row), and keeps COUNT printed commands of each.
`ask` needs no kvplan: with the oracle's Python and its scripts (vllm/pretend.py, sglang/pretend.py) it gives every
command to vLLM's `serve` parser, `validate_parsed_serve_args` and `create_engine_config`, or to SGLang's
`prepare_server_args`, `resolve_once` and `check_server_args`, and prints each rejection and the counts.
"""

import argparse
import itertools
import json
import random
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]
COMMAND: Final = re.compile(
    r"^\s*(?:Serve\s+)?((?:[A-Z][A-Z_]*=\S+ )*(?:vllm serve|python3? -m sglang\.launch_server) .+)$"
)
PLAYED: Final = {"a10g": "A10G", "l40s": "L40S", "rtx-4090": "RTX4090", "rtx-5090": "RTX5090", "a100-80g": "A100",
                 "h100-80g": "H100", "h200": "H200", "b200": "B200"}  # fmt: skip


# --- draw ------------------------------------------------------------------------------------------------------------


def printed(argv: list[str]) -> list[str]:
    """The commands in kvplan's answer."""
    import contextlib
    import io

    from kvplan.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main(argv)
    return [match[1].rstrip() for line in out.getvalue().splitlines() if (match := COMMAND.match(line))]


def flags(draw: random.Random, server: str) -> list[str]:
    drawn: list[str] = []
    for chance, choices in (
        (0.8, [["--ctx", size] for size in ("4k", "16k", "32k", "auto")]),
        (0.5, [["--tp", size] for size in ("2", "4", "8")]),
        (0.25, [["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype", "fp8_e5m2"]]),
        (0.2, [["--max-num-seqs", "64"], ["--max-num-batched-tokens", "4096"], ["--block-size", "64"]]),
        (0.15, [["--enforce-eager"], ["--no-enable-prefix-caching"], ["--no-async-scheduling"]]),
        (0.15, [["--enable-expert-parallel"], ["--pp", "2"], ["--dp", "2"]]),
        (0.1, [["--cpu-offload-gb", "4"], ["--quantization", "fp8"], ["--dtype", "float16"]]),
        (0.1, [["--engine-arg", "max_loras=2", "--engine-arg", "enable_lora=true"], ["--text-only"],
               ["--speculative-method", "mtp", "--num-speculative-tokens", "2"],
               ["--speculative-method", "ngram", "--num-speculative-tokens", "3"]]),
    ):  # fmt: skip
        if draw.random() < chance:
            drawn += draw.choice(choices)
    return [*drawn, "--engine", server]


def goals(draw: random.Random, kind: str) -> list[str]:
    match kind:
        case "recommend":
            return ["--users", draw.choice(["1", "20", "100", "500"])]
        case "tune":
            lengths = draw.choice([["1000", "200"], ["4000", "100"], ["300", "800"]])
            return ["--prompt-tokens", lengths[0], "--output-tokens", lengths[1], "--num-requests", "60", "--jobs", "1",
                    "--slo", "ttft.p90=5s,tpot=80ms", "--num-gpus", draw.choice(["1", "2", "4"])]  # fmt: skip
    return []


def invocations(kind: str, models: Path, seed: int) -> Iterator[tuple[list[str], str]]:
    """kvplan's arguments without end, and the GPU that a command is for."""
    draw = random.Random(f"{seed} {kind}")
    folders = sorted(path.parent for path in models.glob("*/config.json"))
    while True:
        card = draw.choice(sorted(PLAYED))
        server = draw.choice(["vllm", "vllm", "sglang"])
        argv = [kind, str(draw.choice(folders)), "--gpu", card, *flags(draw, server), *goals(draw, kind)]
        if kind == "tune" and "auto" in argv:
            argv[argv.index("auto")] = "16k"
        yield argv, PLAYED[card]


def logs_of(files: list[Path]) -> Iterator[str]:
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            text = row.get("text") or row.get("verbatim")
            if text:
                yield text if isinstance(text, str) else "\n".join(text)


def of_logs(options: argparse.Namespace) -> Iterator[Row]:
    """The commands that `why` prints for logs in a random order."""
    draw = random.Random(options.seed)
    folders = sorted(path.parent for path in options.models.glob("*/config.json"))
    texts = list(logs_of(options.logs))
    draw.shuffle(texts)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "server.log")
        for text in texts:
            log.write_text(text)
            card = draw.choice(sorted(PLAYED))
            argv = ["why", str(log), "--model", str(draw.choice(folders)), "--gpu", card]
            for words in (argv[:2], argv):  # as it is, else with the model and GPU that it does not name
                if commands := printed(words):
                    yield from ({"kind": "why", "argv": words, "gpu": PLAYED[card], "command": item}
                                for item in commands)  # fmt: skip
                    break


def drawn(kind: str, options: argparse.Namespace) -> Iterator[Row]:
    """The commands that `kind` prints, until most invocations would have."""
    for argv, card in itertools.islice(invocations(kind, options.models, options.seed), options.count * 8):
        yield from ({"kind": kind, "argv": argv, "gpu": card, "command": command} for command in printed(argv))


def draw_commands(options: argparse.Namespace) -> int:
    kinds = {kind: drawn(kind, options) for kind in ("estimate", "recommend", "tune")} | {"why": of_logs(options)}
    counts: Counter[str] = Counter()
    with options.out.open("w") as file:
        for kind, rows in kinds.items():
            for row in itertools.islice(rows, options.count):
                file.write(json.dumps(row) + "\n")
                file.flush()
                counts[kind] += 1
    print(dict(counts))
    return 0


# --- ask: with the oracle's Python, without kvplan --------------------------------------------------------------------


def server_of(command: str) -> str:
    return "vllm" if "vllm serve" in command else "sglang"


def split(command: str) -> tuple[dict[str, str], str, list[str]]:
    """Environment variables, the model, and the flags of a printed command."""
    words = shlex.split(command)
    variables = {}
    while "=" in words[0] and not words[0].startswith("-"):
        name, _, variables[name] = words.pop(0).partition("=")
    if words[:2] == ["vllm", "serve"]:
        return variables, words[2], words[3:]
    words = words[3:]
    place = next(index for index, word in enumerate(words) if word in ("--model-path", "--model"))
    return variables, words[place + 1], words[:place] + words[place + 2 :]


def parse_vllm(folder: str, words: list[str], drafts: Callable[[str], str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([folder, *words, "--skip-tokenizer-init", "--load-format", "dummy"])
    args.model = folder  # as `vllm serve` takes it from model_tag
    validate_parsed_serve_args(args)
    engine = AsyncEngineArgs.from_cli_args(args)
    if engine.speculative_config and engine.speculative_config.get("model"):
        engine.speculative_config["model"] = drafts(engine.speculative_config["model"])
    engine.create_engine_config(UsageContext.OPENAI_API_SERVER)


def parse_sglang(folder: str, words: list[str], drafts: Callable[[str], str]) -> None:
    from sglang.srt.server_args import prepare_server_args

    flag = "--speculative-draft-model-path"
    words = [drafts(word) if last == flag else word for last, word in zip(["", *words], words, strict=False)]
    args = prepare_server_args(["--model-path", folder, "--skip-tokenizer-init", *words])
    args.resolve_once()
    args.check_server_args()


def ask(options: argparse.Namespace) -> int:
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    for server in ("vllm", "sglang"):
        mine = [row for row in rows if server_of(row["command"]) == server]
        if mine and in_fork(lambda server=server, mine=mine: ask_server(server, mine, options)) != 0:  # type: ignore[misc]
            print(f"{server}: its code could not be asked", file=sys.stderr)
            return 2
    answers = [json.loads(line) for line in options.answers.read_text().splitlines()]
    counts = Counter((row["kind"], server_of(row["command"]), row["outcome"]) for row in answers)
    for row in answers:
        if row["outcome"] != "accepted":
            print(f"{row['outcome']}: {row['kind']}: {row['command']}\n    {row['why']}")
    for (kind, server, outcome), count in sorted(counts.items()):
        print(f"{kind:10} {server:7} {outcome:10} {count}")
    return 1 if any(row["outcome"] == "rejected" for row in answers) else 0


def in_fork(function: Callable[[], None]) -> int:
    import os
    import traceback

    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:  # the child ends here, whatever it was
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ask_server(server: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Answer the rows of a server, in a process per GPU that it is played on, and in one per command."""
    for card in sorted({row["gpu"] for row in rows}):
        mine = [row for row in rows if row["gpu"] == card]
        if in_fork(lambda card=card, mine=mine: play(server, card, mine, options)):  # type: ignore[misc]
            raise RuntimeError(f"{server} on {card}")


def play(server: str, card: str, rows: list[Row], options: argparse.Namespace) -> None:
    import os

    # In place of this file's own folder, whose names would shadow modules.
    sys.path[:1] = [str(options.scripts / server), str(options.scripts / "common")]
    import oracle_cases
    import pretend

    home = Path(sys.prefix).parent
    sys.path.insert(0, str(home / pretend.SOURCE))
    for name, value in oracle_cases.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    pretend.load(*((card, home) if server == "vllm" else (card,)))
    scratch = tempfile.mkdtemp(prefix="printed-")
    configs = oracle_cases.Configs([options.models], scratch, pretend.NOTES)
    for row in rows:
        in_fork(lambda row=row: answer(server, row, configs, options))  # type: ignore[misc]


def answer(server: str, row: Row, configs: Any, options: argparse.Namespace) -> None:
    import os
    import traceback

    variables, model, words = split(row["command"])
    os.environ |= variables
    outcome, why, named = "accepted", "", row["argv"]
    if configs.find(model) is None and "--model" in named:
        model = named[named.index("--model") + 1]  # its log named a place that is not here
    if configs.find(model) is None:
        outcome, why = "no config", model
    else:
        try:
            parse = parse_vllm if server == "vllm" else parse_sglang
            parse(configs.prepare(model)[0], words, lambda name: configs.prepare(name)[0])
        except BaseException as error:  # argparse exits
            trace = traceback.format_exc()
            unreachable = any(
                word in trace
                for word in (
                    "stubbed",
                    "compiled op",
                    "cumem allocator",
                    "ImportError",
                    "ModuleNotFoundError",
                    "does not recognize this architecture",
                )
            )
            outcome, why = "unreached" if unreachable else "rejected", f"{type(error).__name__}: {str(error)[:500]}"
    with options.answers.open("a") as file:
        file.write(json.dumps(row | {"outcome": outcome, "why": why}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    drawer = commands.add_parser("draw")
    asker = commands.add_parser("ask")
    for item in (drawer, asker):
        item.add_argument("out", type=Path)
        item.add_argument("--models", type=Path, required=True)
    drawer.add_argument("--logs", type=Path, nargs="*", default=[])
    drawer.add_argument("--seed", type=int, default=1)
    drawer.add_argument("--count", type=int, default=30)
    asker.add_argument("answers", type=Path)
    asker.add_argument("--scripts", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "draw":
        return draw_commands(options)
    options.answers.write_text("")
    return ask(options)


if __name__ == "__main__":
    sys.exit(main())
