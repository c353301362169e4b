"""Two documents, policies or models, here or at a revision of a repository, read and compared."""

import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvplan.asked.form import Form, read_form
from kvplan.asked.question import WEIGHT_SUFFIXES, Inputs, requests
from kvplan.core import git, strict_yaml
from kvplan.core.errors import KvplanError, UnknownNameError, UsageError
from kvplan.core.files import exists, load_json, printable
from kvplan.core.strict_yaml import Items, Node, Scalar, Table
from kvplan.planning.diff import Difference, Side, difference, document_sides, plan_side
from kvplan.planning.plan import Plan, plan
from kvplan.policy import file as policy_file
from kvplan.policy.targets import planned
from kvplan.servers.base import SERVERS

Kind = Literal["plan", "check", "policy", "model", "other"]
WHAT = {
    "plan": "a plan (JSON of `kvplan estimate`)",
    "check": "a check (JSON of `kvplan check`)",
    "policy": "a policy",
    "model": "a model",
    "other": "another document",
}
BY_TARGET = ("check", "policy")  # may be compared with each other: both have figures by target
DOCUMENTS: dict[object, Kind] = {"kvplan/plan@1": "plan", "kvplan/plans@1": "plan", "kvplan/check@1": "check"}
POLICY_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Operand:
    """OLD or NEW: a current file or model, or one at a revision; `name` is its label."""

    name: str
    text: str
    revision: str | None = None
    is_policy: bool = False


def operands(old: str | None, new: str | None, policy: str | None) -> tuple[Operand, Operand]:
    """OLD and NEW as typed; NEW may be omitted if OLD names a file at a revision.

    policy  file to compare between the revisions OLD and NEW
    """
    if old is None:
        raise UsageError("OLD", "missing", "name two JSON answers, policies or models, or `REV --policy PATH`")
    if policy is not None:
        now = policy if new is None else f"{new}:{policy}"
        return Operand(f"{old}:{policy}", policy, old, is_policy=True), Operand(now, policy, new, is_policy=True)
    before = operand(old)
    if new is not None:
        return before, operand(new)
    if before.revision is None:
        remedy = "name what to compare with, or a revision of OLD: main:kvplan.policy.yaml"
        if not Path(old).exists():
            engines = ",".join([*SERVERS][:2])
            remedy += f"; servers of one model: `kvplan sweep {printable(old, 60)} --engine {engines}`"
        raise UsageError("NEW", "missing", remedy)
    return before, replace(before, name=before.text, revision=None)


def operand(text: str) -> Operand:
    """Parse a file or model, or with `REV:PATH` a file at a revision; as in git, PATH is from the top, or with ./ from
    the working directory.
    """
    if not text:
        raise UsageError("OLD, NEW", "one of them is empty ('')", "name a file, a model or REV:PATH")
    parts = git.split(text)
    if parts is None:
        return Operand(text, text, is_policy=text.endswith(POLICY_SUFFIXES))
    revision, path = parts
    if not path.startswith(("./", "../")):
        path = os.path.relpath(git.top_of(Path()) / path)
    return Operand(text, path, revision, is_policy=path.endswith(POLICY_SUFFIXES))


def compared(old: Operand, new: Operand, form: Form) -> tuple[Difference, Inputs]:
    """The difference, and the notes from reading both.

    form  plan options, which apply to models only
    """
    with located(old) as before, located(new) as after:
        kinds = [before.kind(), after.kind()]
        if kinds[0] != kinds[1] and not all(kind in BY_TARGET for kind in kinds):
            raise UsageError(
                "OLD and NEW",
                f"{printable(old.name, 400)} is {WHAT[kinds[0]]} and {printable(new.name, 400)} is {WHAT[kinds[1]]}",
                "compare two of the same kind",
            )
        if old.revision is not None or new.revision is not None:
            form = from_anywhere(form)
        operands = [sides(place, kind, form) for place, kind in zip((before, after), kinds, strict=True)]
    notices = Inputs([], 0)
    for inputs, _ in operands:
        notices.notes += inputs.notes
        notices.hints += inputs.hints
        notices.warnings += inputs.warnings
    return difference(old.name, new.name, operands[0][1], operands[1][1]), notices


def from_anywhere(form: Form) -> Form:
    """Make the file names in a form absolute, because a model at a revision is read in another folder."""
    if "speculative_config" in form.values:
        from kvplan.asked.speculation import PARTS, in_parts  # only needed for this option

        stated = {key: in_parts(form).text(key) for key in PARTS}
        form = form.changed(speculative_config=None, **stated)
    named_files = {name: form.text(name) for name in ("lengths", "calibration", "draft_model")}
    full = {name: os.path.realpath(text) for name, text in named_files.items() if text and exists(text)}
    return form.changed(**full)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of an operand: `text` relative to `folder`, the working directory or that of a copy.

    top  of a copy: the copied top of the repository
    """

    operand: Operand
    folder: Path
    text: str
    top: Path | None = None

    def kind(self) -> Kind:
        """Kind of operand by its suffix or content; anything that is not a kvplan file is a model."""
        if self.operand.is_policy:
            return "policy"
        with chdir(self.folder), named(self.operand):
            document: Mapping[str, object] | None = load_json(Path(self.text)) if is_document(self.text) else None
        if document is None or "schema" not in document:
            return "model"
        return DOCUMENTS.get(document["schema"] if isinstance(document["schema"], str) else None, "other")


def is_document(text: str) -> bool:
    """True if it is a file to parse as JSON: kvplan's own or a config.json, not a model's name or folder."""
    return exists(text) and Path(text).is_file() and not text.endswith(WEIGHT_SUFFIXES)


@contextmanager
def located(operand: Operand) -> Iterator[Place]:
    """Yield the location of an operand: here, or in a copy of the files that it needs of its revision."""
    if operand.revision is None:
        yield Place(operand, Path.cwd(), operand.text)
        return
    revision = git.revision(operand.revision, Path())
    path = git.from_top(revision, operand.text)
    if path is None:
        raise UsageError(f"{printable(operand.text, 200)}", "lies outside the repository", "name a file inside it")
    with tempfile.TemporaryDirectory(prefix="kvplan-diff-") as folder:
        top = Path(folder).resolve()
        if path not in git.lay_out(revision, git.with_folder(path), top):
            raise UsageError(
                f"{printable(operand.name, 200)}",
                "there is no such file at that revision",
                f"`git ls-tree -r {printable(operand.revision, 80)}` lists them",
            )
        # Relative to this folder, every path resolves and is shown as in a checkout.
        here = top / os.path.relpath(Path.cwd().resolve(), revision.top.resolve())
        here.mkdir(parents=True, exist_ok=True)
        text = f"./{os.path.relpath(top / path, here)}"  # ./: never a catalog name
        if operand.is_policy:
            with chdir(here), named(operand):
                git.lay_out(revision, named_in(Path(text), str(Path(path).parent)), top)
        yield Place(operand, here, text, top)


# Keys of a target that may name a file.
PATH_KEYS = ("model", "draft_model", "speculative_config", "command", "lengths", "calibration")


def named_in(policy: Path, folder: str) -> list[str]:
    """Words of a policy's targets that may be files of the repository, as paths from the top."""
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


def words(nodes: Iterable[Node]) -> Iterator[str]:
    """Texts of the nodes; a command is split into words, and JSON into its strings."""
    for node in nodes:
        if isinstance(node, Scalar):
            yield node.text
            yield from re.findall(r'"([^"]+)"', node.text)
            with suppress(ValueError):  # unclosed quotes are reported by the command's own parser
                yield from shlex.split(node.text)


def sides(place: Place, kind: Kind, form: Form) -> tuple[Inputs, list[Side]]:
    """An operand's sides, with the notes from reading it; errors name the operand."""
    if kind != "model":
        form.refuse_except(("model", "offline"), "works only with two models", "documents and policies contain it")
    with chdir(place.folder), named(place.operand):
        match kind:
            case "policy":
                return Inputs([], 0), policy_sides(Path(place.text), form, place.top)
            case "model":
                return model_sides(place.text, form)
            case _:
                document = load_json(Path(place.text))
                return Inputs([], 0), document_sides(document, printable(place.operand.text, 400))


@contextmanager
def named(operand: Operand) -> Iterator[None]:
    """Add the revision to errors about a file."""
    try:
        yield
    except KvplanError as error:
        if operand.revision is None:
            raise
        revision, mark = printable(operand.revision, 80), error.mark
        if mark is not None:
            raise error.changed(mark=mark._replace(where=f"{revision}: {mark.where}")) from error
        raise error.changed(subject=f"{revision}: {error.subject}") from error


def policy_sides(file: Path, form: Form, top: Path | None) -> list[Side]:
    policy = policy_file.read(file, top)
    cases = [planned(target, policy, offline=form.is_on("offline")) for target in policy.targets]
    sides = [plan_side(case.plan, case.target.id) for case in cases]
    return [replace(side, title=f"{side.key}: {side.title}") for side in sides]


def model_sides(text: str, form: Form) -> tuple[Inputs, list[Side]]:
    """A model's plans with the given flags, keyed by GPU and context so that OLD and NEW match."""
    try:
        inputs = requests(read_form(form.changed(model=text)))
    except UnknownNameError as error:
        raise error.changed(remedy=f"{error.remedy} (revisions of a policy need --policy PATH)") from error
    if not form.names_gpu:
        raise UsageError("--gpu", "missing", "name the GPU to compare on: a100-80g (`kvplan gpus` lists them)")
    return inputs, [plan_side(the_plan, key_of(the_plan)) for the_plan in map(plan, inputs.requests)]


def key_of(the_plan: Plan) -> str:
    context = the_plan.request.args.max_model_len
    length = f"{context:,}" if isinstance(context, int) else context or "its own maximum of"
    return f"{the_plan.request.gpu.name}, {length} tokens"
