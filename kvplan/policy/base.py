"""A policy and its baseline at a revision, and what has been weakened since."""

import filecmp
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvplan.core import git, strict_yaml
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.files import printable, read_text
from kvplan.planning.attribute import InputChange, moves
from kvplan.policy import changes as policy_changes
from kvplan.policy import file as policy_file
from kvplan.policy import judge
from kvplan.policy.changes import State, changes_result, finding
from kvplan.policy.compared import PATH_KEYS, words
from kvplan.policy.file import Policy, Target, exists
from kvplan.policy.gauges import Case
from kvplan.policy.result import Figures, Finding, TargetResult
from kvplan.policy.targets import baseline_figures, planned

CURE: Final = (
    "fetch it: `git fetch --unshallow` in a shallow clone, in GitHub Actions `fetch-depth: 0` under actions/checkout"
)
MOST_CHANGES: Final = 6  # of one server, on one line


@dataclass(frozen=True, slots=True)
class Base:
    """Files of the base revision below `top`, a copy of the top of the repository.

    place   of the policy, from the top
    folder  copy of the user's working directory; `path` names the policy from there
    """

    revision: git.Revision
    top: Path
    place: str
    folder: Path
    path: Path

    @property
    def name(self) -> str:
        """ "main (1a2b3c4d5e)"."""
        return f"{printable(self.revision.text, 80)} ({self.revision.oid[:10]})"


def since_base(
    text: str,
    policy: Policy,
    path: Path,
    cases: Sequence[Case],
    figures: Mapping[str, Figures] | None,
    *,
    offline: bool,
) -> TargetResult:
    """What is weaker in the policy than at the revision, as findings. Raise UsageError if the revision does not exist.

    figures  of the current baseline file
    """
    folder = repository_of(path)
    try:
        revision = git.revision(text, folder, CURE)
    except UsageError:
        if text != "HEAD" or git.has_commits(folder):
            raise
        return noted(policy, "HEAD", "there is no commit yet, so there is nothing to compare with")
    with opened(revision, path) as base:
        if not git.copy(revision, base.place, base.top):
            what = f"{base.name} has no policy {printable(base.place, 200)}, so there is nothing to compare with"
            return noted(policy, base.name, what)
        with chdir(base.folder):
            try:
                before = policy_of(base)
            except KvplanError as error:
                what = f"the policy in {base.name} cannot be read: {error}"
                return policy_changes.result(policy.path, base.name, [finding("base", "skip", what)])
            old_figures, problems = figures_of(base, before)
            names = known(base, before)
            servers = [note for case in cases for note in server_notes(base, before, case, policy, names, offline)]
        gpu_bytes = {case.target.id: case.plan.memory.total for case in cases}
        now = State(policy, figures, policy.measured is not None and exists(policy.measured.path))
        weaker = policy_changes.changes(State(before, old_figures, has_evidence(base, before)), now, gpu_bytes)
        notes = [*problems, *servers, *policy_changes.notes(before, policy)]
        return changes_result(policy, before, base.name, weaker, notes)


def noted(policy: Policy, name: str, what: str) -> TargetResult:
    return policy_changes.result(policy.path, name, [finding("base", "note", what)])


def repository_of(path: Path) -> Path:
    """A folder of the repository that a policy belongs to: the working directory, or else the policy's own.

    A folder that became a submodule, or a link to another repository, does not supply its own base revision.
    """
    with suppress(UsageError):
        if Path(os.path.abspath(path)).is_relative_to(git.top_of(Path())):  # noqa: PTH100 -- no link followed
            return Path()
    return path.parent


@contextmanager
def opened(revision: git.Revision, path: Path) -> Iterator[Base]:
    """Yield a revision with a temporary folder for its files."""
    here, top = Path.cwd().resolve(), revision.top.resolve()
    place = git.place(revision, path)
    with tempfile.TemporaryDirectory(prefix="kvplan-base-") as name:
        copy = Path(name).resolve()
        if path.is_absolute() or not here.is_relative_to(top):
            yield Base(revision, copy, place, here, copy / place)
            return
        folder = copy / here.relative_to(top)  # every path resolves from there as it does here
        folder.mkdir(parents=True, exist_ok=True)
        yield Base(revision, copy, place, folder, path)


def policy_of(base: Base) -> Policy:
    """Parse the policy at the revision."""
    place = f"{printable(base.revision.text, 80)}:{printable(base.place, 200)}"
    text = read_text(base.top / base.place, strict_yaml.MAX_BYTES)
    return policy_file.policy_of(strict_yaml.parse(text, place), base.path, Path("/"))


def has_evidence(base: Base, policy: Policy) -> bool:
    """True if the run that the policy names under `measured` exists at the revision."""
    if policy.measured is None:
        return False
    name = os.path.normpath(Path(base.place).parent / policy.measured.text)
    return git.is_inside(name) and bool(git.entries(base.revision, [name]))


def figures_of(base: Base, policy: Policy) -> tuple[Mapping[str, Figures] | None, list[Finding]]:
    """Figures of the policy's baseline at the revision; if they cannot be read, a skip says why."""
    if policy.baseline is None:
        return None, []
    try:
        baseline = os.path.normpath(Path(base.place).parent / policy.baseline.text)
        if git.is_inside(baseline):
            git.copy(base.revision, baseline, base.top)
        return baseline_figures(policy), []
    except git.MissingObject:
        raise
    except KvplanError as error:
        return None, [finding("baseline", "skip", f"the baseline in {base.name} cannot be read: {error.unquoted}")]


# --- servers behind an id ---------------------------------------------------------------------------------------------


def server_notes(
    base: Base, before: Policy, case: Case, now: Policy, names: set[str], offline: bool
) -> Iterator[Finding]:
    """Yield a note if a target's id now stands for another server or other requests than at the revision."""
    target = case.target
    old = next((earlier for earlier in before.targets if earlier.id == target.id), None)
    if old is None:
        return
    try:
        files = git.lay_out(base.revision, names.intersection(names_of(base, old)), base.top)
        workload = workload_changes(base, old, target, now)
        if (
            not workload
            and is_same(base, files)
            and policy_changes.stated_values(old) == policy_changes.stated_values(target)
        ):
            return
        was = planned(old, before, offline=offline)
        changes = server_changes(was, case) + workload
        if not changes and judge.figures(was) != judge.figures(case):
            changes = text_changes(old, target)
    except git.MissingObject:
        raise
    except KvplanError as error:
        text = f"target {target.id}: its previous server cannot be determined: {error.unquoted}"
        yield finding("server", "note", text, target.mark)
        return
    if changes:
        more = f" and {len(changes) - MOST_CHANGES:,} more" if len(changes) > MOST_CHANGES else ""
        text = f"target {target.id} now means another server: {', '.join(changes[:MOST_CHANGES])}{more}"
        yield finding("server", "note", text, target.mark)


def known(base: Base, policy: Policy) -> set[str]:
    """Files and folders of the revision that the policy's targets name, from the top."""
    names = {name for target in policy.targets for name in names_of(base, target)}
    return {entry.path for entry in git.entries(base.revision, sorted(names))}


def names_of(base: Base, target: Target) -> Iterator[str]:
    """Yield words of a target that may be files of the repository, as paths from the top."""
    nodes = [node for key, node in {**target.defaults, **target.own}.items() if key in PATH_KEYS]
    texts = [*words([*nodes, *(node for node in (target.command, target.manifest) if node)])]
    if target.workload is not None and target.workload.trace is not None:
        texts.append(os.path.relpath(target.workload.trace, base.path.parent))
    return git.names_of(texts, str(Path(base.place).parent))


def is_same(base: Base, files: set[str]) -> bool:
    """True if these files and folders have the same content at the revision and now."""
    for name in files:
        place = base.top / name
        for file in (place, *place.rglob("*")):
            now = base.revision.top / file.relative_to(base.top)
            if file.is_file() and not (now.is_file() and filecmp.cmp(file, now, shallow=False)):
                return False
    return True


def server_changes(before: Case, now: Case) -> list[str]:
    """Differences in a target's server and request lengths: "num_hidden_layers 32 -> 64"."""
    steps = [change for move in moves(before.plan.request, now.plan.request) for change in move.changes]
    changes = [text for text in map(change_text, steps) if text is not None]
    points = [None if case.lengths is None else case.lengths.points for case in (before, now)]
    return changes + (["lengths"] if points[0] != points[1] else [])


def text_changes(old: Target, now: Target) -> list[str]:
    """Keys with a different value that does not show in the plans' inputs, such as text_only."""
    before, after = policy_changes.stated_values(old), policy_changes.stated_values(now)
    return [
        f"{key} {printable(before.get(key, 'not given'), 80)} -> {printable(after.get(key, 'not given'), 80)}"
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]


def workload_changes(base: Base, before: Target, now: Target, policy: Policy) -> list[str]:
    """Differences in a target's workload."""
    old, new = ({} if side.workload is None else side.workload.facts() for side in (before, now))
    traces = [None if side.workload is None else side.workload.trace for side in (before, now)]
    folders = (base.path.parent, policy.folder)
    names = [trace and os.path.relpath(trace, folder) for trace, folder in zip(traces, folders, strict=True)]
    changes = [
        f"workload: {key} {old.get(key, 'not given')} -> {new.get(key, 'not given')}"
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]
    if names[0] != names[1]:
        changes.append(f"workload: trace {names[0] or 'not given'} -> {names[1] or 'not given'}")
    elif names[0] is not None and not is_same(base, {os.path.normpath(Path(base.place).parent / names[0])}):
        changes.append("workload: the contents of its trace")
    return [printable(change, 200) for change in changes]


def change_text(change: InputChange) -> str | None:
    old, new = change.old or "not given", change.new or "not given"
    return None if old == new else f"{change.name} {old} -> {new}"
