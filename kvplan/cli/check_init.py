"""`kvplan check --init`: write a policy for a model and flags, a pasted command, or a running server."""

import shlex
from pathlib import Path

from kvplan.asked.form import Form, read_form, refuse_missing
from kvplan.asked.pasted import read_command
from kvplan.asked.question import MODEL_CURE, Inputs, requests
from kvplan.asked.speculation import in_parts
from kvplan.cli import output
from kvplan.cli.check_options import DEFAULT_NAME, CheckOptions
from kvplan.cli.options import refuse_given, whole_form
from kvplan.core.errors import KvplanError, NoServerError, UsageError
from kvplan.core.files import printable
from kvplan.planning.plan import Request, plan
from kvplan.policy import init as policy_init
from kvplan.policy.file import READING_SWITCHES, root_of
from kvplan.policy.init import Stated, from_folder, quoted
from kvplan.policy.targets import refuse_files_outside
from kvplan.servers.words.command import ServeCommand

# Options that have no meaning with --init.
JUDGING = ("strict", "today", "base", "update_baseline", "report")


def init(options: CheckOptions) -> int:
    """Write the policy and return 0; an existing file is kept unless --force is given."""
    refuse_given(options, JUDGING, "checks a policy, but --init writes one", "use only one")
    form = whole_form(options)
    refuse_missing(
        ("MODEL", form.names_model or options.from_pid is not None, MODEL_CURE),
        ("--gpu", form.names_gpu, "name the GPU that the policy is for (`kvplan gpus`)"),
    )
    target = options.output or DEFAULT_NAME
    if Path(target).exists() and not options.force:
        raise UsageError(
            f"{printable(target, 400)}", "already exists", "name another file with -o, or overwrite it with --force"
        )
    form = form if options.from_pid is None else form.changed(from_command=command_of(options.from_pid, form))
    command = form.command()
    refuse_files_outside(form, command, root_of(Path(target)))  # the check would refuse them as well
    with output.report_files([target], "--output", {".yaml": "yaml", ".yml": "yaml"}, force=True) as (file,):
        inputs = requests(read_form(form, command))
        output.say(inputs, quiet=options.quiet)
        file.save(text_of(inputs, form, command, Path(target).parent))
    again = "" if target == DEFAULT_NAME else f" {shlex.quote(target)}"
    output.write(f"wrote {printable(target, 400)}; check it with `kvplan check{printable(again, 400)}`")
    return 0


def command_of(pid: str, form: Form) -> str:
    """The command line of --from-pid."""
    where = f"--from-pid {pid}"
    if "from_command" in form.values:
        raise UsageError("--from-pid and --from-command", "are alternatives", "use only one")
    words = policy_init.command_of(pid)
    try:
        read_command(shlex.join(words))
    except NoServerError:
        raise UsageError(
            where, "starts no server that kvplan plans", f"name its process; {policy_init.LISTED}"
        ) from None
    except KvplanError as error:
        raise error.map_all(lambda wrong: wrong.renamed("--from-command", where)) from None
    return shlex.join(words)


def text_of(inputs: Inputs, form: Form, command: ServeCommand | None, folder: Path) -> str:
    plans = [(plan(request), stated(request, form, command, folder)) for request in inputs.requests]
    return policy_init.policy_text(plans, "kvplan check --init")


def stated(request: Request, form: Form, command: ServeCommand | None, folder: Path) -> Stated:
    """A target's text values: model, GPU, and what is not an engine argument.

    A pasted command is resolved, not copied: it may contain keys and tokens.
    """

    def local(name: str | None) -> str | None:
        return None if name is None else from_folder(name, folder)

    typed = {
        "model": local(form.text("model") or (command.model if command else None)),
        "revision": form.text("revision") or (command.revision if command and "model" not in form.values else None),
        "gpu": request.gpu.name if "gpu" in form.values else None,
        **{key: form.text(key) for key in ("gpu_memory", "memory_in_use", "weights_bytes")},
        "calibration": local(form.text("calibration")),
        "draft_model": local(in_parts(form).text("draft_model") or (command.draft_model if command else None)),
    }
    values = {key: quoted(value) for key, value in typed.items() if value is not None}
    values |= {switch: "true" for switch in READING_SWITCHES if form.is_on(switch)}
    return Stated({**values, **policy_init.lengths_stated(form.values, folder)})
