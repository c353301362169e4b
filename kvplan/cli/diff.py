"""`kvplan diff`: two documents, policies or models -> their sides -> what changed, and the exit code it means."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvplan.cli import output
from kvplan.cli.diff_options import DiffOptions
from kvplan.cli.inputs import Inputs, load_of, read, say
from kvplan.cli.options import WorkloadOptions
from kvplan.cli.resolve import WEIGHT_SUFFIXES
from kvplan.core import git
from kvplan.core.errors import KvplanError, UnknownNameError, UsageError
from kvplan.core.files import load_json, printable
from kvplan.documents.diff import diff_document
from kvplan.planning.diff import Difference, Side, difference, document_sides, plan_side
from kvplan.planning.plan import Plan, plan
from kvplan.report.formats import Answer

if TYPE_CHECKING:
    from kvplan.core.strict_yaml import Node

Kind = Literal["plan", "check", "policy", "model", "other"]
WHAT = {
    "plan": "a plan (JSON of `kvplan estimate`)",
    "check": "a check (JSON of `kvplan check`)",
    "policy": "a policy",
    "model": "a model",
    "other": "another document",
}
BY_TARGET = ("check", "policy")  # these must be used together: both say figures by target
DOCUMENTS: dict[object, Kind] = {"kvplan/plan@1": "plan", "kvplan/plans@1": "plan", "kvplan/check@1": "check"}
POLICY_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Operand:
    """OLD or NEW: a file or model as it is now, or as it was at a revision; `name` is what it is shown as."""

    name: str
    text: str
    revision: str | None = None
    is_policy: bool = False


def diff(options: DiffOptions) -> int:
    """Answer, and return the exit code: 0, or with --exit-code 1 where NEW is worse."""
    old, new = operands(options)
    with output.report_files(options.report or [], force=options.force) as reports:
        result = compared(old, new, options)
        given = answer(result)
        output.answer(given, options.format, options.color, reports)
    return int(options.exit_code and result.is_worse)


# --- what is compared -------------------------------------------------------------------------------------------------


def operands(options: DiffOptions) -> tuple[Operand, Operand]:
    """OLD and NEW as typed; NEW may be left out where OLD names a file at a revision."""
    old, new, policy = options.model, options.new, options.policy
    if old is None:
        raise UsageError("OLD", "missing", "name two JSON answers, policies or models, or `REV --policy PATH`")
    if policy is not None:
        now = policy if new is None else f"{new}:{policy}"
        return Operand(f"{old}:{policy}", policy, old, is_policy=True), Operand(now, policy, new, is_policy=True)
    before = operand(old)
    if new is not None:
        return before, operand(new)
    if before.revision is None:
        raise UsageError("NEW", "missing", "name what to compare with, or a revision of OLD: main:kvplan.policy.yaml")
    return before, replace(before, name=before.text, revision=None)


def operand(text: str) -> Operand:
    """A file or model, or with `REV:PATH` a file at a revision; a PATH is from the top, or with ./ from here, as git
    has it."""
    if not text:
        raise UsageError("OLD, NEW", "one of them is empty ('')", "name a file, a model or REV:PATH")
    parts = git.split(text)
    if parts is None:
        return Operand(text, text, is_policy=text.endswith(POLICY_SUFFIXES))
    revision, path = parts
    if not path.startswith(("./", "../")):
        path = os.path.relpath(git.top_of(Path()) / path)
    return Operand(text, path, revision, is_policy=path.endswith(POLICY_SUFFIXES))


def compared(old: Operand, new: Operand, options: DiffOptions) -> Difference:
    with located(old) as before, located(new) as after:
        kinds = [before.kind(), after.kind()]
        if kinds[0] != kinds[1] and not all(kind in BY_TARGET for kind in kinds):
            raise UsageError(
                "OLD and NEW",
                f"{printable(old.name, 400)} is {WHAT[kinds[0]]} and {printable(new.name, 400)} is {WHAT[kinds[1]]}",
                "compare two of the same kind",
            )
        if old.revision is not None or new.revision is not None:
            options = from_anywhere(options)
        operands = [sides(place, kind, options) for place, kind in zip((before, after), kinds, strict=True)]
    notices = Inputs([], 0)
    for inputs, _ in operands:
        notices.notes += inputs.notes
        notices.hints += inputs.hints
        notices.warnings += inputs.warnings
    say(notices, quiet=options.quiet)
    return difference(old.name, new.name, operands[0][1], operands[1][1])


def from_anywhere(options: DiffOptions) -> DiffOptions:
    """The same with the files that flags name named in full, as a model at a revision is read in another folder."""
    named_files = {name: getattr(options, name) for name in ("lengths", "calibration", "draft_model")}
    full = {name: os.path.realpath(text) for name, text in named_files.items() if text and exists(text)}
    return replace(options, **full)


def exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operand is read: `text` as seen from `folder`, which is this one, or that of a copy.

    top  of a copy: what stands for the repository's top
    """

    operand: Operand
    folder: Path
    text: str
    top: Path | None = None

    def kind(self) -> Kind:
        """What it is by its ending, or by what stands in it; anything that is no file of kvplan's is a model."""
        if self.operand.is_policy:
            return "policy"
        with chdir(self.folder), named(self.operand):
            document: Mapping[str, object] | None = load_json(Path(self.text)) if is_document(self.text) else None
        if document is None or "schema" not in document:
            return "model"
        return DOCUMENTS.get(document["schema"] if isinstance(document["schema"], str) else None, "other")


def is_document(text: str) -> bool:
    """Whether it is a file to be read as JSON: kvplan's own or a config.json; a model's name or folder is not."""
    return exists(text) and Path(text).is_file() and not text.endswith(WEIGHT_SUFFIXES)


@contextmanager
def located(operand: Operand) -> Iterator[Place]:
    """Where an operand can be read: here, or in a copy of the files that it needs of its revision."""
    if operand.revision is None:
        yield Place(operand, Path.cwd(), operand.text)
        return
    revision = git.revision(operand.revision, Path())
    path = git.from_top(revision, operand.text)
    if path is None:
        raise UsageError(f"{printable(operand.text, 200)}", "lies outside the repository", "name a file inside it")
    with tempfile.TemporaryDirectory(prefix="kvplan-diff-") as folder:
        top = Path(folder).resolve()
        if path not in git.lay_out(revision, [path], top):
            raise UsageError(
                f"{printable(operand.name, 200)}",
                "there is no such file at that revision",
                f"`git ls-tree -r {printable(operand.revision, 80)}` lists them",
            )
        # From the folder that stands for this one, every path reads and is shown as it would be in a checkout.
        here = top / os.path.relpath(Path.cwd().resolve(), revision.top.resolve())
        here.mkdir(parents=True, exist_ok=True)
        text = f"./{os.path.relpath(top / path, here)}"  # ./: never a name of the catalog
        if operand.is_policy:
            with chdir(here), named(operand):
                git.lay_out(revision, named_in(Path(text), str(Path(path).parent)), top)
        yield Place(operand, here, text, top)


PATH_KEYS = ("model", "draft_model", "command", "lengths", "calibration")  # of a target: what may name a file


def named_in(policy: Path, folder: str) -> list[str]:
    """Every word of a policy's targets that may be a file of the repository, as a path from the top."""
    from kvplan.core import strict_yaml
    from kvplan.core.strict_yaml import Items, Table

    top = strict_yaml.read(policy)
    targets = top.values.get("targets")
    tables = [top.values.get("defaults"), *(targets.values if isinstance(targets, Items) else ())]
    names: list[str] = []
    for table in tables:
        if isinstance(table, Table):
            workload = table.values.get("workload")
            inner = workload.values if isinstance(workload, Table) else {}
            names += words([value for key, value in (*table.values.items(), *inner.items()) if key in PATH_KEYS])
    return list(git.names_of(names, folder))


def words(nodes: "Iterable[Node]") -> Iterator[str]:
    """Texts, and of a command each word."""
    import shlex

    from kvplan.core.strict_yaml import Scalar

    for node in nodes:
        if isinstance(node, Scalar):
            yield node.text
            with suppress(ValueError):  # quotes that do not close: the command's own reader says so
                yield from shlex.split(node.text)


def sides(place: Place, kind: Kind, options: DiffOptions) -> tuple[Inputs, list[Side]]:
    """An operand's sides, with the notes of reading it; errors name it."""
    if kind != "model":
        refuse_plan_options(options)
    with chdir(place.folder), named(place.operand):
        match kind:
            case "policy":
                return Inputs([], 0), policy_sides(Path(place.text), options, place.top)
            case "model":
                return model_sides(place.text, options)
            case _:
                document = load_json(Path(place.text))
                return Inputs([], 0), document_sides(document, printable(place.operand.text, 400))


@contextmanager
def named(operand: Operand) -> Iterator[None]:
    """Errors about a file at a revision say which."""
    try:
        yield
    except KvplanError as error:
        if operand.revision is None:
            raise
        revision, mark = printable(operand.revision, 80), error.mark
        if mark is not None:
            raise error.changed(mark=mark._replace(where=f"{revision}: {mark.where}")) from error
        raise error.changed(subject=f"{revision}: {error.subject}") from error


def refuse_plan_options(options: DiffOptions) -> None:
    """What a plan is made from is said in the document or policy; given beside it, it would be ignored."""
    for field in fields(WorkloadOptions):
        if field.name not in ("model", "offline") and getattr(options, field.name) != field.default:
            flag = {"max_model_len": "--ctx"}.get(field.name, "--" + field.name.replace("_", "-"))
            raise UsageError(flag, "only works with two models", "documents and policies state it")


def policy_sides(file: Path, options: DiffOptions, top: Path | None) -> list[Side]:
    from kvplan.cli.targets import planned
    from kvplan.policy import file as policy_file

    policy = policy_file.read(file, top)
    cases = [planned(target, policy, offline=options.offline, quiet=True) for target in policy.targets]
    sides = [plan_side(case.plan, case.target.id) for case in cases]
    return [replace(side, title=f"{side.key}: {side.title}") for side in sides]


def model_sides(text: str, options: DiffOptions) -> tuple[Inputs, list[Side]]:
    """A model's plans with the flags given, each under its GPU and context, so that OLD and NEW pair up."""
    try:
        inputs = read(replace(options, model=text), lambda context, spec: load_of(options, context, spec))
    except UnknownNameError as error:
        raise error.changed(remedy=f"{error.remedy} (revisions of a policy need --policy PATH)") from error
    if options.gpu is None and options.gpu_memory is None:
        raise UsageError("--gpu", "missing", "name the GPU to compare on: a100-80g (`kvplan gpus` lists them)")
    return inputs, [plan_side(made, key_of(made)) for made in map(plan, inputs.requests)]


def key_of(made: Plan) -> str:
    context = made.request.args.max_model_len
    return f"{made.request.gpu.name}, {'its own maximum of' if context is None else context} tokens"


# --- showing ----------------------------------------------------------------------------------------------------------


def answer(result: Difference) -> Answer:
    from kvplan.report import diff_text

    return Answer(
        lambda _: diff_text.diff_lines(result),
        lambda: diff_document(result),
        lambda: diff_text.diff_table(result),
        lambda: diff_text.diff_page(result),
        lambda: diff_text.memory_bars(result),
        [side.server for pair in result.comparisons for side in (pair.old, pair.new) if side.server],
    )
