"""The commands, and the handling of every failure: one line on standard error and an exit code."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, Final

import typer
import typer.core

from kvplan.cli import output
from kvplan.core import files
from kvplan.core.errors import BUG, INTERRUPTED, KvplanError, SettingError, UsageError, together
from kvplan.core.records import dataclass

# Typer's exception for a bad command line. Depending on its version, the class is in click or in typer's copy of it.
ParserError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
MOST_READINGS: Final = 3  # of one line, each of which mends another part of it


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: its summary, the module of its options (`EstimateOptions` of `estimate`), and module.function."""

    help: str
    options: str
    do: str


COMMANDS: Final[Mapping[str, Entry]] = {
    "estimate": Entry("Show where GPU memory goes and how many users fit.", "options", "estimate.estimate"),
    "models": Entry("List the known models, or describe one.", "options", "listing.models"),
    "gpus": Entry("List the known GPUs, or describe one.", "options", "listing.gpus"),
    "check": Entry("Check deployments against a policy file, in CI.", "check_options", "check.check"),
    "diff": Entry("Compare two plans, policies or models.", "sweep_options", "diff.diff"),
    "upgrade": Entry(
        "Show what upgrading the server changes for a policy, a command or a model.", "sweep_options", "upgrade.upgrade"
    ),
    "pack": Entry(
        "Fit several servers on one GPU, or over several: start order and --gpu-memory-utilization of each.",
        "sweep_options",
        "pack.pack_command",
    ),
    "sweep": Entry(
        "Tabulate every combination of models, GPUs and flags.\n\nSeparate several values with commas: --gpu, --tp, "
        "--pp, --ctx, --kv-cache-dtype, --gpu-memory-utilization, --max-num-seqs, --block-size, "
        "--quantization (including none), --dtype, --mean-tokens, --engine.",
        "sweep_options",
        "sweep.sweep",
    ),
    "explore": Entry(
        "Write one page to explore: sliders for users, context, GPUs and flags.", "sweep_options", "explore.explore"
    ),
    "atlas": Entry(
        "Write a static site: a page for every model on every GPU, with proof.", "sweep_options", "atlas.atlas"
    ),
    "recommend": Entry(
        "Find the cheapest GPUs and flags for a number of users.", "sweep_options", "recommend.recommend_command"
    ),
    "tune": Entry(
        "Find the server flags with the highest throughput that meet the latency targets (--slo).",
        "simulate_options",
        "tune.tune_command",
    ),
    "simulate": Entry("Simulate a workload on a planned server.", "simulate_options", "simulate.simulate"),
    "serve": Entry(
        "Run an OpenAI-compatible server: the bundled engine, or with --simulate a simulated one that needs no GPU.",
        "serve_options",
        "serve.serve",
    ),
    "mcp": Entry("Serve estimate, recommend, why and check as tools for agents (MCP).", "serve_options", "mcp.mcp"),
    "calibrate": Entry(
        "Fit step times to your own benchmark results, for --calibration.", "simulate_options", "calibrate.calibrate"
    ),
    "profile": Entry("Run the bundled engine, measure it and save the run.", "run_options", "profile.profile"),
    "reconcile": Entry(
        "Compare predicted with measured memory: a run, a server's log or its /metrics page.",
        "run_options",
        "reconcile.reconcile_command",
    ),
    "report": Entry("Render one or more runs as HTML, Markdown, JSON or CSV.", "run_options", "report.report_command"),
    "why": Entry(
        "Explain from a log why a server failed to start or ran out of memory, and how to fix it.",
        "run_options",
        "why.why",
    ),
    "preflight": Entry(
        "Check before the start whether a server starts on this machine: GPUs, free memory, driver, limits.\n\nExit "
        "code 1 if it does not, with the flag that helps.",
        "run_options",
        "preflight.preflight",
    ),
    "rightsize": Entry(
        "Show how much of a live server is used, and how many servers the load needs.",
        "run_options",
        "rightsize.rightsize",
    ),
    "watch": Entry("Watch a GPU, a process or a server live.", "run_options", "watch.watch"),
    "schema": Entry("Print the JSON Schema of a command's --format json output.", "options", "listing.schema"),
    "doctor": Entry("Check the installation: versions, GPU, settings.", "run_options", "doctor.doctor"),
}
TRACE: Final[Mapping[str, Entry]] = {
    "stats": Entry("Summarize rates, lengths and prefix reuse of a trace or profile.", "trace_options", "trace.stats"),
    "profiles": Entry("List the named workloads.", "trace_options", "trace.profiles"),
    "convert": Entry(
        "Convert a trace to another format, or generate one from a profile.", "trace_options", "trace.convert"
    ),
    "sample": Entry("Cut a time span out of a trace, or thin it.", "trace_options", "trace.sample"),
}
TRACE_HELP = "Inspect and convert request traces and named workloads."


def loaded(name: str) -> Any:
    """Import the object that a table entry names."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"kvplan.cli.{module}"), attribute)


def options_of(name: str, entry: Entry) -> Any:
    """Import the class of a command's options."""
    return loaded(f"{entry.options}.{name.title()}Options")


def command(name: str, entry: Entry) -> Callable[..., int]:
    """Build a function whose parameters are the fields of a dataclass, for typer."""
    options = options_of(name, entry)

    def run_command(**values: Any) -> int:
        output.say_reading()
        stated = options(**values)
        try:
            code: int = loaded(entry.do)(stated)
        except SettingError as error:
            raise error.in_words(loaded("typed.option_words")(options, output.command_line())) from error
        except KvplanError as error:
            raise loaded("wrong.whole_error")(error, stated, output.command_line()) from error
        return code

    run_command.__name__ = name
    parameters = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.metadata["typer"], annotation=field.type)
        for field in fields(options)
        if "typer" in field.metadata
    ]
    run_command.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # typer reads it
    return run_command


class PanelCommand(typer.core.TyperCommand):
    """A command whose help lists its own options first, then those of every plan, by topic."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_command = any(param.name == "command" and param.param_type_name == "argument" for param in self.params)
        return super().parse_args(ctx, self.joined(ctx, args) if takes_command else spread(args))

    def joined(self, ctx: Any, args: list[str]) -> list[str]:
        """Make one word of a server's command that stands at the end: `preflight --gpu l40s vllm serve MODEL ...`."""
        ctx.allow_interspersed_args = False
        _, others, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = True
        words = args[len(args) - len(others) - 1 :] if others else []
        if not words or " " in words[0].strip():
            return args
        from kvplan.asked.pasted import is_command

        if not is_command(words):
            return args
        import shlex

        before = args[: len(args) - len(words)]
        return [*(before[:-1] if before[-1:] == ["--"] else before), "--", shlex.join(words)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from kvplan.cli.help import write_options  # only for help

        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(ctx, formatter)


class ExampleGroup(typer.core.TyperGroup):
    """A group of commands whose help has whole sentences and ends with examples."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, str(command.help).partition("\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(ctx, formatter)


def write_examples(ctx: Any, formatter: Any) -> None:
    from kvplan.cli.help import write_examples as write

    write(ctx, formatter)


PAIRS: Final = frozenset(("--lora-modules",))  # NAME=VALUE options, of which vLLM accepts several after one flag


def spread(words: list[str]) -> list[str]:
    """Rewrite `--lora-modules a=1 b=2` as `--lora-modules a=1 --lora-modules b=2`."""
    spread: list[str] = []
    flag, is_first = "", False
    for word in words:
        is_pair = not word.startswith("-") and ("=" in word or word.startswith("{"))
        if flag and is_pair and not is_first:
            spread.append(flag)
        elif not is_first:
            flag = word.partition("=")[0] if word.partition("=")[0] in PAIRS else ""
        is_first = word in PAIRS
        spread.append(word)
    return spread


def listed() -> None:
    """Stands for a command that is not asked for: its name and its line, without its options."""


def add(app: typer.Typer, entries: Mapping[str, Entry], name_wanted: str | None) -> None:
    for name, entry in entries.items():
        is_wanted = name_wanted in (None, name)
        app.command(name, help=entry.help, cls=PanelCommand)(command(name, entry) if is_wanted else listed)


def show_version(is_on: bool) -> None:
    if is_on:
        from kvplan.core.git import release

        output.write(f"kvplan {release() or '(not installed)'}")
        raise typer.Exit


def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    """Plan GPU memory for LLM serving: how many users fit, and why."""


@cache  # built once by a process that handles several command lines
def application(command: str | None = None) -> Any:
    """Build the command tree; help is plain text, so that rich is imported only to print tables.

    command  the only command whose options are needed, because parsing all takes longer than most answers; None: all
    """
    app = typer.Typer(
        name="kvplan",
        cls=ExampleGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help=top.__doc__,
        no_args_is_help=False,
    )
    app.callback()(top)
    add(app, COMMANDS, command)
    trace = typer.Typer(rich_markup_mode=None, no_args_is_help=False, cls=ExampleGroup)
    add(trace, TRACE, None if command in (None, "trace") else command)
    app.add_typer(trace, name="trace", help=TRACE_HELP)
    return typer.main.get_command(app)


def wanted_command(argv: Sequence[str]) -> str | None:
    """Name of the command on a line, "" if there is none, or None during shell completion."""
    if is_completing():
        return None
    return next((word for word in argv if not word.startswith("-")), "")


def is_completing() -> bool:
    """True during shell completion, which is signaled in the environment, not on the command line."""
    return any(name.startswith("_KVPLAN_COMPLETE") for name in os.environ)


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code; raises only SystemExit, during shell completion."""
    output.prepare_streams()
    line = sys.argv[1:] if argv is None else argv
    if "-h" in line[:2]:
        line = ["--help" if word == "-h" else word for word in line]
    files.start_command()
    try:
        return answered(line)
    except KvplanError as error:
        return refuse(error, error.exit_code, line)
    except ParserError as error:
        return refuse(usage_error(error), UsageError.exit_code, line)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:  # any crash must not look like "does not fit"
        return crash(error, line)


def answered(line: Sequence[str], readings: int = 0) -> int:
    """Run a line; one that cannot be parsed as the line that it stands for."""
    try:
        return run(line, is_reading=readings > 0)
    except (ParserError, UsageError) as error:
        from kvplan.cli.instinct import meant, with_operand

        if isinstance(error, UsageError):
            better = with_operand(line, error.subject) if error.problem == "missing" else None
        else:
            better = meant(line, {*COMMANDS, "trace"}, getattr(error, "ctx", None))
        if better is None or better == line or readings == MOST_READINGS:
            raise
    return answered(better, readings + 1)


def run(line: Sequence[str], *, is_reading: bool) -> int:
    output.start_command(line, is_reading)
    if not line and not is_completing():
        from kvplan.cli.help import overview

        with output.standard_output():
            output.write(
                "\n".join(overview({name: entry.help for name, entry in COMMANDS.items()} | {"trace": TRACE_HELP}))
            )
        return 0
    words = ["--help" if word == "--help-all" else word for word in line]
    with output.standard_output() if "--help" in words else nullcontext():
        code = application(wanted_command(line)).main(args=words, prog_name="kvplan", standalone_mode=False)
    return code if isinstance(code, int) else 0


# --- failures ---------------------------------------------------------------------------------------------------------


def debug() -> bool:
    return os.environ.get("KVPLAN_DEBUG", "") not in ("", "0")


def print_traceback() -> None:
    import traceback

    traceback.print_exc(file=sys.stderr)


def refuse(error: KvplanError, code: int, line: Sequence[str]) -> int:
    if debug():
        print_traceback()
    for wrong in (error, *error.others):
        output.tell("error", str(wrong))
    if wants_json(line):
        output.answer_error(error, code)
    return code


def wants_json(line: Sequence[str]) -> bool:
    """True if the last --format of a line says json; the line itself may be invalid."""
    words = [word.partition("=") for word in line]
    formats = [
        value if equals else next(iter(line[number + 1 :]), "")
        for number, (word, equals, value) in enumerate(words)
        if word == "--format"
    ]
    return formats[-1:] == ["json"]


def usage_error(error: Any) -> KvplanError:
    """Convert a parser error to kvplan's form: `<flag>: <what is wrong>; <next step>`."""
    from kvplan.cli.instinct import hint
    from kvplan.core.near import meant, near_names

    context = getattr(error, "ctx", None)
    path = context.command_path if context else "kvplan"
    help_line = f"see `{path} --help`"
    match type(error).__name__:
        case "NoSuchOption":
            known = option_names(context)

            def unknown(name: str) -> KvplanError:
                remedy = hint(name, known) or meant(near_names(name, known), help_line)
                return UsageError(name, "no such option", remedy)

            names = dict.fromkeys([error.option_name, *unknown_options(context, output.command_line())])
            return together([unknown(name) for name in names])
        case "MissingParameter":
            return UsageError(f"{name_of(error)}", "missing", help_line)
        case "BadParameter":
            return UsageError(f"{name_of(error)}", f"{error.message.rstrip('.')}", help_line)
        case "BadOptionUsage":
            return UsageError(f"{error.option_name}", "needs a value", help_line)
    message = error.format_message().rstrip(".")
    if message.startswith("No such command"):
        return wrong_command(message, context)
    if message == "Missing command":
        return UsageError("COMMAND", "missing", help_line)
    return UsageError(f"{path}", f"{message[:1].lower()}{message[1:]}", help_line)


def name_of(error: Any) -> str:
    """The option or argument that an error concerns, as typed on the command line."""
    param = error.param
    if param is None:
        return str(error.param_hint or "argument").strip("'")
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper()).strip("[]")
    return str(max(param.opts, key=len))


def option_names(context: Any) -> list[str]:
    """The long names of a command's options."""
    params = context.command.params if context else []
    names = [
        name for param in params if param.param_type_name == "option" for name in param.opts + param.secondary_opts
    ]
    return [name for name in names if name.startswith("--")]


def unknown_options(context: Any, line: Sequence[str]) -> Iterator[str]:
    """Long options on the line that the command does not have."""
    names = set(option_names(context))
    flags = {name for param in context.command.params if getattr(param, "is_flag", False) for name in param.opts}
    words = iter(line)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in names and name not in flags and not equals:
            next(words, None)  # its value
        elif name.startswith("--") and len(name) > 2 and name not in names and not any(map(str.isspace, name)):
            yield name


def wrong_command(message: str, context: Any) -> UsageError:
    from kvplan.core.near import meant, near_names

    wrong = message.partition("'")[2].partition("'")[0]
    known = sorted(context.command.commands)
    hint = meant(near_names(wrong, known, 2), f"use one of {', '.join(known)}", " or ")
    return UsageError(wrong, "no such command", hint)


def crash(error: Exception, line: Sequence[str]) -> int:
    """Report a bug in one line that names the log, which gets the traceback; KVPLAN_DEBUG=1 also prints it."""
    kind = f"{type(error).__name__}: {error}"[:200]
    bug = KvplanError("internal error", kind, f"a bug in kvplan, please report it with {crash_log()}")
    return refuse(bug, BUG, line)


def crash_log() -> str:
    """Write the details for a bug report to a new file and return its path."""
    import platform
    import tempfile
    import traceback

    text = f"kvplan {sys.argv!r}\nPython {sys.version}\n{platform.platform()}\n\n{traceback.format_exc()}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="backslashreplace", prefix="kvplan-crash-", suffix=".log", delete=False
        ) as file:
            file.write(text)
            return file.name
    except OSError:
        return "what KVPLAN_DEBUG=1 prints"
