"""The commands, and what every failure becomes: one line on standard error and an exit code."""

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import typer

from kvplan.cli import output
from kvplan.cli.check_options import CheckOptions
from kvplan.cli.diff_options import DiffOptions
from kvplan.cli.main import INTERRUPTED
from kvplan.cli.options import EstimateOptions, GpusOptions, ModelsOptions, SchemaOptions
from kvplan.cli.run_options import DoctorOptions, ProfileOptions, ReconcileOptions, ReportOptions, WatchOptions
from kvplan.cli.simulate_options import SimulateOptions
from kvplan.cli.sweep_options import RecommendOptions, SweepOptions
from kvplan.cli.trace_options import (
    TraceConvertOptions,
    TraceProfilesOptions,
    TraceSampleOptions,
    TraceStatsOptions,
)
from kvplan.errors import KvplanError, UsageError

BUG = 70

# What typer raises for a bad command line. The class lies in click or in typer's copy of it, by typer's version.
ParserError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

T = TypeVar("T")


def command(options: type[T], do: Callable[[T], int], name: str) -> Callable[..., int]:
    """A function whose options are the fields of a dataclass, as typer wants to see it."""

    def run_command(**given: Any) -> int:
        return do(options(**given))

    run_command.__name__ = name
    run_command.__annotations__ = {field.name: field.type for field in fields(options)}  # type: ignore[arg-type] # typer reads them
    run_command.__signature__ = inspect.signature(options)  # type: ignore[attr-defined] # typer reads it
    return run_command


def estimate(options: EstimateOptions) -> int:
    from kvplan.cli.estimate import estimate

    return estimate(options)


def models(options: ModelsOptions) -> int:
    from kvplan.cli.listing import models

    return models(options)


def gpus(options: GpusOptions) -> int:
    from kvplan.cli.listing import gpus

    return gpus(options)


def profile(options: ProfileOptions) -> int:
    from kvplan.cli.profile import profile

    return profile(options)


def reconcile(options: ReconcileOptions) -> int:
    from kvplan.cli.reconcile import reconcile_command

    return reconcile_command(options)


def report(options: ReportOptions) -> int:
    from kvplan.cli.report import report_command

    return report_command(options)


def schema(options: SchemaOptions) -> int:
    from kvplan import artifact

    output.write(artifact.dumps(artifact.document_schema(options.name)))
    return 0


def doctor(options: DoctorOptions) -> int:
    from kvplan.cli.doctor import doctor

    return doctor(options)


def check(options: CheckOptions) -> int:
    from kvplan.cli.check import check

    return check(options)


def diff(options: DiffOptions) -> int:
    from kvplan.cli.diff import diff

    return diff(options)


def watch(options: WatchOptions) -> int:
    from kvplan.cli.watch import watch

    return watch(options)


def trace_stats(options: TraceStatsOptions) -> int:
    from kvplan.cli.trace import stats

    return stats(options)


def trace_profiles(options: TraceProfilesOptions) -> int:
    from kvplan.cli.trace import profiles

    return profiles(options)


def trace_convert(options: TraceConvertOptions) -> int:
    from kvplan.cli.trace import convert

    return convert(options)


def trace_sample(options: TraceSampleOptions) -> int:
    from kvplan.cli.trace import sample

    return sample(options)


def trace_commands() -> typer.Typer:
    group = typer.Typer(rich_markup_mode=None, no_args_is_help=False)
    group.command("stats", help="Rates, lengths and prefix reuse of a trace, or what is published of a profile.")(
        command(TraceStatsOptions, trace_stats, "stats")
    )
    group.command("profiles", help="The workloads kvplan knows by name.")(
        command(TraceProfilesOptions, trace_profiles, "profiles")
    )
    group.command("convert", help="Write a trace in another form, or draw one from a profile.")(
        command(TraceConvertOptions, trace_convert, "convert")
    )
    group.command("sample", help="Write a part of a trace: a span of it, or fewer requests.")(
        command(TraceSampleOptions, trace_sample, "sample")
    )
    return group


def sweep(options: SweepOptions) -> int:
    from kvplan.cli.sweep import sweep

    return sweep(options)


def recommend(options: RecommendOptions) -> int:
    from kvplan.cli.recommend import recommend_command

    return recommend_command(options)


def simulate(options: SimulateOptions) -> int:
    from kvplan.cli.simulate import simulate

    return simulate(options)


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("kvplan")
        except PackageNotFoundError:
            number = "(not installed)"
        output.write(f"kvplan {number}")
        raise typer.Exit


def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    """How many users an LLM server's GPU memory holds, and why."""


def application() -> Any:
    """The command tree; help as plain text, so that rich is loaded only where a table is printed."""
    app = typer.Typer(
        name="kvplan", rich_markup_mode=None, pretty_exceptions_enable=False, help=top.__doc__, no_args_is_help=False
    )
    app.callback()(top)
    app.command("estimate", help="Where the GPU's memory goes, and how many requests fit.")(
        command(EstimateOptions, estimate, "estimate")
    )
    app.command("models", help="The models kvplan knows by name, or the facts of one.")(
        command(ModelsOptions, models, "models")
    )
    app.command("gpus", help="The GPUs kvplan knows by name, or the facts of one.")(command(GpusOptions, gpus, "gpus"))
    app.command("simulate", help="A workload over a plan, in time: waiting, preemption, latency, the largest load.")(
        command(SimulateOptions, simulate, "simulate")
    )
    app.command("profile", help="Run the bundled engine, measure, and keep the run.")(
        command(ProfileOptions, profile, "profile")
    )
    app.command("reconcile", help="Predicted beside measured memory of a run, component by component.")(
        command(ReconcileOptions, reconcile, "reconcile")
    )
    app.command("report", help="A run, or several side by side, as a page, Markdown, JSON or CSV.")(
        command(ReportOptions, report, "report")
    )
    app.command("schema", help="The JSON Schema of what --format json prints.")(
        command(SchemaOptions, schema, "schema")
    )
    app.command("doctor", help="What is installed, found and missing, and which settings are in effect.")(
        command(DoctorOptions, doctor, "doctor")
    )
    app.add_typer(trace_commands(), name="trace", help="Request traces and named workloads: look, convert, sample.")
    app.command("check", help="Hold deployments to the rules of a policy file, in CI.")(
        command(CheckOptions, check, "check")
    )
    app.command("sweep", help="Every combination of models, GPUs and flags, as rows or a figure.")(
        command(SweepOptions, sweep, "sweep")
    )
    app.command("recommend", help="The cheapest GPUs and flags that hold so many users; or what one GPU needs to.")(
        command(RecommendOptions, recommend, "recommend")
    )
    app.command("diff", help="What changed in memory and concurrency between two plans, policies or models, and why.")(
        command(DiffOptions, diff, "diff")
    )
    app.command("watch", help="A GPU, a process or a server, live.")(command(WatchOptions, watch, "watch"))
    return typer.main.get_command(app)


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code; never raises but for a SystemExit of the shell's completion."""
    output.prepare_streams()
    try:
        code = application().main(args=argv, prog_name="kvplan", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KvplanError as error:
        return refuse(str(error), error.exit_code)
    except ParserError as error:
        return refuse(str(usage_error(error)), UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:  # whatever it is, it must not read as "does not fit"
        return crash(error)


# --- failures ---------------------------------------------------------------------------------------------------------


def debug() -> bool:
    return os.environ.get("KVPLAN_DEBUG", "") not in ("", "0")


def print_traceback() -> None:
    import traceback

    traceback.print_exc(file=sys.stderr)


def refuse(text: str, code: int) -> int:
    if debug():
        print_traceback()
    output.tell("error", text)
    return code


def usage_error(error: Any) -> UsageError:
    """The parser's complaint in kvplan's form: `<flag>: <what is wrong>; <next step>`."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "kvplan"
    help_line = f"`{path} --help` lists what there is"
    match type(error).__name__:
        case "NoSuchOption":
            near = near_options(error.option_name, context)
            hint = f"did you mean {', '.join(near)}?" if near else help_line
            return UsageError(f"{error.option_name}: no such option; {hint}")
        case "MissingParameter":
            return UsageError(f"{name_of(error)}: is missing; {help_line}")
        case "BadParameter":
            return UsageError(f"{name_of(error)}: {error.message.rstrip('.')}; {help_line}")
        case "BadOptionUsage":
            return UsageError(f"{error.option_name}: needs a value; {help_line}")
    message = error.format_message().rstrip(".")
    if message.startswith("No such command"):
        return UsageError(f"{wrong_command(message, context)}")
    if message == "Missing command":
        return UsageError(f"COMMAND: is missing; {help_line}")
    return UsageError(f"{path}: {message[:1].lower()}{message[1:]}; {help_line}")


def name_of(error: Any) -> str:
    """The option or argument that an error is about, as one types it."""
    param = error.param
    if param is None:
        return str(error.param_hint or "argument").strip("'")
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper()).strip("[]")
    return str(max(param.opts, key=len))


def near_options(wrong: str, context: Any) -> list[str]:
    import difflib

    params = context.command.params if context else []
    known = [
        name for param in params if param.param_type_name == "option" for name in (*param.opts, *param.secondary_opts)
    ]
    return difflib.get_close_matches(wrong.replace("_", "-"), known, n=3, cutoff=0.6)


def wrong_command(message: str, context: Any) -> str:
    import difflib

    wrong = message.partition("'")[2].partition("'")[0]
    known = sorted(context.command.commands)
    near = difflib.get_close_matches(wrong, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"{wrong}: no such command; {hint}"


def crash(error: Exception) -> int:
    """A bug: one line that names the log; the traceback goes there, and with KVPLAN_DEBUG=1 also to standard error."""
    if debug():
        print_traceback()
    kind = f"{type(error).__name__}: {error}"[:200]
    output.tell("error", f"internal error: {kind}; a bug in kvplan, please report it with {crash_log()}")
    return BUG


def crash_log() -> str:
    """Write what a report needs to a file of its own and return its path."""
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
