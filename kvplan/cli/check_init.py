"""`kvplan check --init`: write a policy for a model and flags, a pasted command, or a running server."""

import shlex
from dataclasses import replace
from pathlib import Path

from kvplan.asked.pasted import read_command
from kvplan.cli import output
from kvplan.cli.check_options import DEFAULT_NAME, CheckOptions
from kvplan.cli.inputs import MODEL_CURE, Inputs, load_of, read, refuse_missing, say, says_gpu, says_model
from kvplan.cli.speculation import in_parts
from kvplan.cli.targets import refuse_files_outside
from kvplan.core.errors import KvplanError, NoServerError, UsageError
from kvplan.core.files import printable
from kvplan.planning.plan import Request, plan
from kvplan.policy import init as policy_init
from kvplan.policy.file import READING_SWITCHES, root_of
from kvplan.policy.init import Stated, from_folder, quoted
from kvplan.servers.words.command import ServeCommand

# Options that have no meaning with --init.
JUDGING = ("strict", "today", "base", "update_baseline", "report")


def init(options: CheckOptions) -> int:
    """Write the policy and return 0; an existing file is kept unless --force is given."""
    for name in JUDGING:
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')}", "checks a policy, but --init writes one", "use only one")
    refuse_missing(
        ("MODEL", says_model(options) or options.from_pid is not None, MODEL_CURE),
        ("--gpu", says_gpu(options), "name the GPU that the policy is for (`kvplan gpus`)"),
    )
    target = options.output or DEFAULT_NAME
    if Path(target).exists() and not options.force:
        raise UsageError(
            f"{printable(target, 400)}", "already exists", "name another file with -o, or overwrite it with --force"
        )
    options = with_command(options)
    command = None if options.from_command is None else read_command(options.from_command)
    refuse_files_outside(options, command, root_of(Path(target)))  # the check would refuse them as well
    with output.report_files([target], "--output", {".yaml": "yaml", ".yml": "yaml"}, force=True) as (file,):
        inputs = read(options, lambda context, spec: load_of(options, context, spec))
        say(inputs, quiet=options.quiet)
        file.save(text_of(inputs, options, Path(target).parent))
    again = "" if target == DEFAULT_NAME else f" {shlex.quote(target)}"
    output.write(f"wrote {printable(target, 400)}; check it with `kvplan check{printable(again, 400)}`")
    return 0


def with_command(options: CheckOptions) -> CheckOptions:
    """Convert --from-pid to --from-command."""
    if options.from_pid is None:
        return options
    if options.from_command is not None:
        raise UsageError("--from-pid and --from-command", "are alternatives", "use only one")
    words = policy_init.command_of(options.from_pid)
    try:
        read_command(shlex.join(words))
    except NoServerError:
        where = f"--from-pid {options.from_pid}"
        raise UsageError(
            where, "starts no server that kvplan plans", f"name its process; {policy_init.LISTED}"
        ) from None
    except KvplanError as error:
        name = f"--from-pid {options.from_pid}"
        raise error.map_all(lambda wrong: wrong.renamed("--from-command", name)) from None
    return replace(options, from_command=shlex.join(words), from_pid=None)


def text_of(inputs: Inputs, options: CheckOptions, folder: Path) -> str:
    command = None if options.from_command is None else read_command(options.from_command)
    plans = [(plan(request), stated(request, options, command, folder)) for request in inputs.requests]
    return policy_init.policy_text(plans, "kvplan check --init")


def stated(request: Request, options: CheckOptions, command: ServeCommand | None, folder: Path) -> Stated:
    """A target's text values: model, GPU, and options other than engine arguments.

    A pasted command is resolved, not copied: it may contain keys and tokens.
    """
    model = options.model or (command.model if command else None)
    revision = options.revision or (command.revision if command and options.model is None else None)
    draft = in_parts(options).draft_model or (command.draft_model if command else None)
    typed = {
        "model": None if model is None else from_folder(model, folder),
        "revision": revision,
        "gpu": None if options.gpu is None else request.gpu.name,
        "gpu_memory": options.gpu_memory,
        "memory_in_use": options.memory_in_use,
        "weights_bytes": options.weights_bytes,
        "calibration": None if options.calibration is None else from_folder(options.calibration, folder),
        "draft_model": None if draft is None else from_folder(draft, folder),
    }
    values = {key: quoted(value) for key, value in typed.items() if value is not None}
    for switch in READING_SWITCHES:
        if getattr(options, switch):
            values[switch] = "true"
    return Stated({**values, **policy_init.lengths_stated(options, folder)})
