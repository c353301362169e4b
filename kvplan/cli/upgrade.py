"""`kvplan upgrade`: compare servers with their current release and another one, and set the exit code."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvplan.cli import output
from kvplan.cli.options import form_of, inputs_of
from kvplan.cli.sweep_options import UpgradeOptions, release_of
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.planning.plan import Request
from kvplan.planning.upgrade import WORSE, Upgrade, Upgraded, upgraded
from kvplan.report.formats import CommandAnswer
from kvplan.servers.releases import DEFAULT

POLICY_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Subject:
    """A server to compare.

    request   builds its request for a release, or for the one that it names itself
    is_fixed  True if it names its server program itself: a target of a policy
    """

    key: str
    request: Callable[[str | None], Request]
    is_fixed: bool = False


def upgrade(options: UpgradeOptions) -> int:
    """Compare and return the exit code: 0, or with --exit-code 1 if a server would be worse."""
    if options.engine is not None:
        raise UsageError("--engine", "is one release, but an upgrade needs two", "write --from and --to")
    subjects = list(subjects_of(options))
    with output.report_files(options.report or [], force=options.force) as reports:
        result = answered(subjects, options)
        response = answer(result)
        output.answer(response, options.format, options.color, reports)
    return int(options.exit_code and any(server.outcome in WORSE for server in result.servers))


def subjects_of(options: UpgradeOptions) -> Iterator[Subject]:
    text = options.model
    if text is None and options.from_command is None:
        raise UsageError("SERVER", "missing", "name a policy file, a model, or a command in quotes: 'vllm serve ...'")
    if text is not None and text.endswith(POLICY_SUFFIXES):
        yield from policy_subjects(Path(text), options)
        return
    if text is not None and " " in text.strip():
        if options.from_command is not None:
            raise UsageError("SERVER", "is a command, and so is --from-command", "write one of the two")
        options = replace(options, model=None, from_command=text)
    yield Subject("", lambda engine: request_of(options, engine))


def request_of(options: UpgradeOptions, engine: str | None) -> Request:
    if options.gpu is None and options.gpu_memory is None:
        raise UsageError("--gpu", "missing", "name one (`kvplan gpus` lists them)")
    inputs = inputs_of(replace(options, engine=engine))
    if len(inputs.requests) > 1:
        raise UsageError(
            "--gpu, --ctx",
            f"give {len(inputs.requests)} combinations",
            "name one GPU and one context, or use a policy for several",
        )
    if not options.quiet and engine == options.old:
        output.say(inputs, quiet=False)
    return inputs.requests[0]


def policy_subjects(file: Path, options: UpgradeOptions) -> Iterator[Subject]:
    from kvplan.policy import file as policy_file
    from kvplan.policy import targets

    problem = "works only with a command or a model"
    form_of(options).refuse_except(("model", "offline"), problem, "a policy states it")
    policy = policy_file.read(file)
    for target in policy.targets:

        def request(engine: str | None, target: policy_file.Target = target) -> Request:
            try:
                inputs = targets.inputs_of(target, policy, offline=options.offline, engine=engine)
            except KvplanError as error:
                raise targets.located(error, target) from error
            return inputs.requests[0]

        yield Subject(target.id, request, is_fixed=True)


def answered(subjects: list[Subject], options: UpgradeOptions) -> Upgrade:
    """Plan each server with both releases; those of another server program are skipped and listed."""
    old = None if options.old is None else release_of(options.old, "--from", options.engine)
    server = old.engine if old else options.engine or DEFAULT
    new = release_of(options.new or server.partition("@")[0], "--to", server)
    if old is not None and old.engine != new.engine:
        raise UsageError(
            "--from, --to", f"name two servers ({old.engine}, {new.engine})", "`kvplan diff` compares those"
        )
    if old is not None and old == new and options.new is not None and options.old != options.new:
        problem = f"{printable(options.old or '', 40)} and {printable(options.new, 40)} are planned alike"
        raise UsageError("--from, --to", problem, f"no change within {old.label} is modeled; name other releases")
    servers: list[Upgraded] = []
    others: list[str] = []
    for subject in subjects:
        label = None if old is None else old.label
        before = subject.request(None if subject.is_fixed else label)
        if before.release.engine != new.engine:
            others.append(subject.key or before.spec.name)
            continue
        if subject.is_fixed and label is not None:
            before = subject.request(label)
        after: Request | KvplanError
        try:
            after = subject.request(new.label)
        except KvplanError as error:
            after = error
        servers.append(upgraded(subject.key, before, after, new))
    if not servers:
        raise UsageError(
            "SERVER",
            f"is not a {new.engine} server",
            f"name releases of its own: --from and --to ({printable(others[0], 80)})",
        )
    if old is None and all(server.old.request.release == new for server in servers):
        raise UsageError(
            "--from",
            f"is missing: SERVER does not name its current release (the target is {new.label})",
            "add --from vllm@0.24",
        )
    return Upgrade(None if old is None else old.label, new.label, tuple(servers), tuple(others))


# --- showing ----------------------------------------------------------------------------------------------------------


def answer(result: Upgrade) -> CommandAnswer:
    from kvplan.report import upgrade_text as text

    servers = [label for server in result.servers for label in (server.old.request.release.label, result.new)]
    return CommandAnswer.of(
        result, text.upgrade_lines, text.upgrade_document, text.upgrade_table, text.upgrade_page, servers=servers
    )
