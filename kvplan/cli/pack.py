"""`kvplan pack`: find the start order and memory fractions of several servers on one GPU, and set the exit code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from kvplan.asked.form import Form, read_form
from kvplan.asked.pasted import is_command, served_by
from kvplan.asked.question import requests
from kvplan.cli import output
from kvplan.cli.options import refuse_given
from kvplan.cli.sweep_options import PackOptions
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_count, parse_size
from kvplan.planning.pack import Packing, Tenant, pack
from kvplan.report.formats import CommandAnswer
from kvplan.servers.base import abilities_of, terms_of
from kvplan.servers.releases import DEFAULT

NAMED = re.compile(r"\s*([A-Za-z0-9][\w.-]{0,60})=(.+)", re.DOTALL)


def pack_command(options: PackOptions) -> int:
    """Pack the servers and return the exit code: 0, or with --exit-code 1 if they do not all start."""
    tenants = list(tenants_of(options))
    in_use = 0 if options.memory_in_use is None else parse_size(options.memory_in_use, "--memory-in-use", least=0)
    with output.report_files(options.report or [], force=options.force) as reports:
        packing = pack(tenants, in_use, options.rest)
        given = answer(packing)
        output.answer(given, options.format, options.color, reports)
    return int(options.exit_code and not packing.fits)


def tenants_of(options: PackOptions) -> Iterator[Tenant]:
    if (options.policy is None) == (not options.server):
        raise UsageError(
            "POLICY or --server", "one of the two is required", "name a policy file, or each server's flags"
        )
    if options.server:
        if options.gpu is None:
            raise UsageError("--gpu", "missing", "name the GPU that they share: l40s (`kvplan gpus` lists them)")
        for text in options.server:
            yield stated(text, options)
        return
    refuse_given(options, ("gpu", "engine"), "works only with --server", "the policy states it")
    yield from of_policy(Path(options.policy or ""), options)


def stated(text: str, options: PackOptions) -> Tenant:
    """Parse a server in --server syntax."""
    flag = f"--server {printable(text, 60)!r}"
    match = NAMED.fullmatch(text)
    name, line = (match[1], match[2]) if match else (None, text)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(flag, f"cannot be split into words ({error})", "close its quotes") from error
    words, users = without_users(words, flag)
    if not words:
        raise UsageError(flag, "is empty", "write a model and its flags: 'qwen3-8b --max-model-len 16384 --users 4'")
    engine = None
    if not is_command(words):
        words, engine = served_by(options.engine or DEFAULT, words), options.engine
    try:
        form = Form({"from_command": shlex.join(words), "gpu": [options.gpu or ""], "offline": options.offline})
        inputs = requests(read_form(form.changed(engine=engine)))
    except KvplanError as error:
        raise error.map_all(lambda wrong: wrong.renamed("--from-command", "command")).within(flag) from error
    request = inputs.requests[0]
    if abilities_of(request.release.engine).fits_context:
        title = terms_of(request.release.engine).title
        problem = f"{title} takes no fraction of a GPU that could be divided"
        raise UsageError(flag, problem, "estimate it, and give what it takes as --memory-in-use")
    name = name or request.spec.name.rpartition("/")[2]
    inputs.notes = [f"{name}: {note}" for note in inputs.notes]
    output.say(inputs, quiet=options.quiet)
    return Tenant(name, request, users)


def without_users(words: list[str], flag: str) -> tuple[list[str], int]:
    """(words without `--users N`, N)."""
    others, users = [], 1
    rest = iter(words)
    for word in rest:
        if word == "--users" or word.startswith("--users="):
            value = word.partition("=")[2] if "=" in word else next(rest, "")
            users = parse_count(value, f"{flag}: --users")
        else:
            others.append(word)
    return others, users


def of_policy(file: Path, options: PackOptions) -> Iterator[Tenant]:
    """Yield a policy's targets, each with the most users that one of its rules requires."""
    from kvplan.policy import file as policy_file
    from kvplan.policy.targets import inputs_of, located

    policy = policy_file.read(file)
    for target in policy.targets:
        try:
            inputs = inputs_of(target, policy, offline=options.offline)
        except KvplanError as error:
            raise located(error, target) from error
        users = [int(rule.limit) for rule in target.rules if rule.name in ("min_users", "min_concurrency")]
        yield Tenant(target.id, inputs.requests[0], max(users, default=1))


# --- showing ----------------------------------------------------------------------------------------------------------


def answer(packing: Packing) -> CommandAnswer:
    from kvplan.report import pack_text as text

    return CommandAnswer(
        screen=lambda blocks: text.pack_lines(packing),
        document=lambda: text.pack_document(packing),
        rows=lambda: text.pack_table(packing),
        page=lambda: list(text.pack_page(packing)),
        servers=[server["engine"] for server in text.pack_document(packing)["servers"]],
    )
