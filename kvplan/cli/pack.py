"""`kvplan pack`: find the start order and memory fractions of several servers on one GPU, or over several GPUs."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.asked.form import Form, counted_gpus_of, read_form, size_notes
from kvplan.asked.pasted import is_command, served_by
from kvplan.asked.question import requests
from kvplan.cli import output
from kvplan.cli.options import refuse_given
from kvplan.cli.sweep_options import PackOptions
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_count, parse_size
from kvplan.hardware import prices as price_file
from kvplan.planning.pack import Packing, Pool, Tenant, pack
from kvplan.report.formats import CommandAnswer
from kvplan.servers.base import abilities_of, terms_of
from kvplan.servers.releases import DEFAULT

if TYPE_CHECKING:
    from kvplan.planning.assign import Assignment

NAMED = re.compile(r"\s*([A-Za-z0-9][\w.-]{0,60})=(.+)", re.DOTALL)


def pack_command(options: PackOptions) -> int:
    """Pack the servers and return the exit code: 0, or with --exit-code 1 if they do not all start."""
    in_use = 0 if options.memory_in_use is None else parse_size(options.memory_in_use, "--memory-in-use", least=0)
    with output.report_files(options.report or [], force=options.force) as reports:
        fits, answer = packed(options, in_use)
        output.answer(answer, options.format, options.color, reports)
    return int(options.exit_code and not fits)


def packed(options: PackOptions, in_use: int) -> tuple[bool, CommandAnswer]:
    """(True if all start, the answer)."""
    texts = [*(options.models or []), *(options.server or [])]
    if not texts:
        remedy = "name the models, a policy file, or each server's flags"
        raise UsageError("MODEL, POLICY or --server", "missing", remedy)
    policy = next(filter(is_policy, texts), None)
    if policy is not None:
        if len(texts) > 1:
            raise UsageError(printable(policy, 60), "a policy is packed alone", "remove the other servers")
        refuse_given(
            options, ("gpu", "gpu_memory", "engine", "prices"), "works only with models", "the policy states its GPU"
        )
        packing = pack(list(of_policy(Path(policy), options)), in_use, options.rest)
        return packing.fits, answer(packing)
    pools = list(pools_of(options))
    tenants = [stated(text, options, pools) for text in texts]
    if len(pools) == pools[0].count == 1 and options.prices is None:
        packing = pack([servers[0] for servers in tenants], in_use, options.rest)
        return packing.fits, answer(packing)
    from kvplan.planning.assign import assign  # only for several GPUs

    assignment = assign(tenants, pools, in_use, options.rest)
    return assignment.fits, assigned(assignment)


def is_policy(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) and len(text.split()) == 1


def pools_of(options: PackOptions) -> Iterator[Pool]:
    """The GPUs of --gpu, with their prices."""
    if options.gpu is None and options.gpu_memory is None:
        remedy = "name the GPUs: l40s, or 2xl40s,h100-80g (`kvplan gpus` lists them); or --gpu-memory 24GiB"
        raise UsageError("--gpu", "missing", remedy)
    prices = None if options.prices is None else price_file.read(Path(options.prices))
    form = gpus_of(options)
    for note in size_notes(form):
        output.notes_of(options)("note", note)
    for count, gpu in counted_gpus_of(form):
        dollars = 0.0 if prices is None else prices.per_hour.get(gpu.name)
        if dollars is None:
            raise UsageError("--prices", f"{gpu.name} has no price", "add one, or leave out --prices")
        yield Pool(gpu, count or 1, dollars)


def gpus_of(options: PackOptions) -> Form:
    named = {"gpu": None if options.gpu is None else [options.gpu], "gpu_memory": options.gpu_memory}
    return Form({key: value for key, value in named.items() if value is not None})


def stated(text: str, options: PackOptions, pools: Sequence[Pool]) -> list[Tenant]:
    """Parse a server in --server syntax: one for each kind of GPU."""
    flag = f"--server {printable(text, 60)!r}" if text in (options.server or ()) else printable(text, 60)
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
        named = gpus_of(options) if options.gpu_memory else Form({"gpu": [pool.gpu.name for pool in pools]})
        form = named.changed(from_command=shlex.join(words), offline=options.offline)
        query = read_form(form.changed(engine=engine))
        inputs = requests(query)
    except KvplanError as error:
        raise error.map_all(lambda wrong: wrong.renamed("--from-command", "command")).within(flag) from error
    request = inputs.requests[0]
    if abilities_of(request.release.engine).fits_context:
        title = terms_of(request.release.engine).title
        problem = f"{title} takes no fraction of a GPU that could be divided"
        raise UsageError(flag, problem, "estimate it, and give what it takes as --memory-in-use")
    name = name or request.spec.name.rpartition("/")[2]
    context = terms_of(request.release.engine).own_flags.get("max_model_len", "--max-model-len")
    inputs.notes = [f"{name}: {note.replace('--ctx 32k', f'{context} 32768')}" for note in inputs.notes]
    output.say(inputs, quiet=options.quiet)
    is_split = "tensor_parallel_size" in query.stated or request.args.num_gpus > 1
    return [Tenant(name, request, users, is_split) for request in inputs.requests]


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

    servers = [server["engine"] for server in text.pack_document(packing)["servers"]]
    return CommandAnswer.of(
        packing, text.pack_lines, text.pack_document, text.pack_table, text.pack_page, servers=servers
    )


def assigned(assignment: "Assignment") -> CommandAnswer:
    from kvplan.report import assign_text as text

    servers = [server.plan.request.release.label for packing in assignment.packings for server in packing.started]
    return CommandAnswer.of(
        assignment, text.assign_lines, text.assign_document, text.assign_table, text.assign_page, servers=servers
    )
