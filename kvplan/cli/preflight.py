"""`kvplan preflight`: say whether a server will start on this machine, as it is now, and set the exit code."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.asked.form import Form, gpus_of, read_form
from kvplan.asked.pasted import MAX_COMMAND_CHARS, is_command, is_line, parse_container, read_command
from kvplan.asked.question import Asked, Inputs, requests
from kvplan.cli import output
from kvplan.cli.run_options import PreflightOptions
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import exists, path_text, printable, read_text
from kvplan.core.records import dataclass
from kvplan.hardware.gpu import GpuSpec
from kvplan.measure.machine import Machine, live_machine
from kvplan.measure.preflight import Limits, Verdict, verdict
from kvplan.servers.words.command import ServeCommand, refuse

if TYPE_CHECKING:
    from kvplan.asked.manifest import ServedContainer

SUBJECT = "COMMAND"
MOST_CHARS = 512 * 1024  # of a file
MANIFESTS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to start.

    text    its command line
    served  its container, if a manifest names it
    """

    text: str
    command: ServeCommand
    served: "ServedContainer | None" = None

    @property
    def visible(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of the command."""
        match = re.search(r"(?:^|[\s;])CUDA_VISIBLE_DEVICES=([\w,-]*)", self.text)
        return None if match is None else match[1]

    @property
    def cuda(self) -> tuple[int, int] | None:
        """CUDA of the image by its tag: v0.19.0-cu130."""
        match = re.search(r":[\w.-]*-cu(\d\d)(\d)\b", self.served.image if self.served else self.text)
        return None if match is None else (int(match[1]), int(match[2]))

    @property
    def words(self) -> list[str] | None:
        """The words of a plain command, in which a flag can be changed; None for a script."""
        if self.served is not None or re.search(r"[\n;|&<>$`]", self.text):
            return None
        words = shlex.split(self.text)
        return words if is_command(words) else None

    @property
    def limits(self) -> Limits:
        match = re.search(r"--nnodes[= ](\d{1,4})", self.text)
        num_nodes = max(1, int(match[1])) if match else 1
        if self.served is None:
            return Limits(num_nodes=num_nodes, cuda=self.cuda)
        return Limits(self.served.memory, self.served.shm, max(num_nodes, self.served.num_pods), self.cuda)


def preflight(options: PreflightOptions) -> int:
    """Answer and return the exit code: 0 if the server starts or may start, 1 if it does not."""
    subject = subject_of(options)
    machine = live_machine(subject.visible)
    try:
        inputs = inputs_of(options, subject, machine)
    except KvplanError as error:
        raise error.map_all(lambda wrong: wrong.renamed("--from-command", SUBJECT)) from error
    if not options.quiet:
        output.say(inputs, quiet=False)
    request = inputs.only(SUBJECT, "name one GPU and one context")
    result = verdict(request, machine, subject.limits)
    show(result, subject, options)
    return int(result.outcome == "does not start" or (options.strict and result.outcome == "may not start"))


# --- reading ----------------------------------------------------------------------------------------------------------


def subject_of(options: PreflightOptions) -> Subject:
    text = options.command
    if text is None or not text.strip():
        raise UsageError(SUBJECT, "missing", "write the server's command: kvplan preflight vllm serve MODEL ...")
    if text == "-":
        text = sys.stdin.read(MAX_COMMAND_CHARS + 1)
    elif len(text) < 4096 and "\n" not in text and exists(text) and Path(text).is_file():
        path = Path(text)
        text = read_text(path, MOST_CHARS)
        if path.suffix.lower() in MANIFESTS:
            return of_manifest(text, path_text(path), options)
    if not is_line(text):
        from kvplan.asked import manifest

        if manifest.is_manifest_file(text):
            return of_manifest(text, SUBJECT, options)
    if options.container is not None:
        raise UsageError("--container", "belongs to a manifest", "remove it")
    try:
        return Subject(text, read_command(text))
    except KvplanError as error:
        raise error.map_all(lambda wrong: wrong.renamed("--from-command", SUBJECT)) from error


def of_manifest(text: str, where: str, options: PreflightOptions) -> Subject:
    from kvplan.asked import manifest  # only for a manifest

    every = manifest.served(text, where)
    named = [served for served in every if options.container in (None, served.id, served.container)]
    if len(named) != 1:
        names = ", ".join(served.id for served in every[:5])
        problem = (
            f"{len(named)} of its containers match" if options.container else f"{len(every)} containers run servers"
        )
        raise UsageError(where, f"{problem} ({names})", "name one with --container")
    command = parse_container(named[0])
    refuse(command)
    return Subject(named[0].command, command, named[0])


def inputs_of(options: PreflightOptions, subject: Subject, machine: Machine) -> Inputs:
    model = subject.command.model
    if options.model is None and (model is None or (model.startswith(("/", "./", "../")) and not exists(model))):
        problem = (
            "is not named in the command" if model is None else f"is not on this machine ({printable(model, 100)})"
        )
        raise UsageError("MODEL", problem, "say which it is with --model NAME")
    names = ("model", "engine", "weights_bytes")
    stated = {name: value for name in names if (value := getattr(options, name)) is not None}
    gpu = options.gpu or (subject.served.gpu if subject.served is not None and not machine.gpus else None)
    form = Form({**stated, **({"gpu": [gpu]} if gpu else {}), "offline": options.offline}, several=False)
    query = read_form(form, subject.command, SUBJECT)
    return requests(with_gpu(query, form, machine))


def with_gpu(query: Asked, form: Form, machine: Machine) -> Asked:
    """The question on the GPU that is named, else on the first that the driver has."""
    if form.names_gpu:
        named: GpuSpec = gpus_of(form)[0]
    elif machine.gpus:
        named = machine.gpus[0].spec()
    else:
        problem = machine.problem or "the driver shows no GPU: CUDA_VISIBLE_DEVICES or the container hides them"
        raise EnvironmentProblem("GPU", f"none found ({problem})", "name it with --gpu to check the rest")
    return replace(query, gpus=((None, named),))


# --- showing ----------------------------------------------------------------------------------------------------------


def show(result: Verdict, subject: Subject, options: PreflightOptions) -> None:
    from kvplan.documents.preflight import preflight_document
    from kvplan.report.preflight_text import preflight_lines

    document = preflight_document(result, subject.words)
    if options.format == "json":
        import json

        output.write(json.dumps(document, indent=2, allow_nan=False))
        return
    output.show(preflight_lines(document, result), options.color)
