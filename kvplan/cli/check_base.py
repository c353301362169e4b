"""`kvplan check --base REV`: the policy and its baseline as they are at a revision, and what is weaker since."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvplan import git, strict_yaml
from kvplan.cli.check import baseline_figures
from kvplan.errors import KvplanError, UsageError
from kvplan.files import printable, read_text
from kvplan.policy import changes as policy_changes
from kvplan.policy import file as policy_file
from kvplan.policy.changes import State, changes_result
from kvplan.policy.file import Policy
from kvplan.policy.gauges import Case
from kvplan.policy.result import Figures, TargetResult

CURE = "fetch it: `git fetch --unshallow` in a shallow clone, in GitHub Actions `fetch-depth: 0` under actions/checkout"


@dataclass(frozen=True, slots=True)
class Base:
    """Files of the base revision in a folder of their own: `top` stands for the repository's."""

    revision: git.Revision
    top: Path

    @property
    def name(self) -> str:
        """ "main (1a2b3c4d5e)"."""
        return f"{printable(self.revision.text, 80)} ({self.revision.oid[:10]})"


def repository_of(path: Path) -> Path:
    """A folder of the repository that a policy belongs to: this one, or else its own.

    A folder that became a submodule, or a link to another repository, brings no base revision of its own along.
    """
    with suppress(UsageError):
        if Path(os.path.abspath(path)).is_relative_to(git.top_of(Path())):  # noqa: PTH100 -- no link followed
            return Path()
    return path.parent


@contextmanager
def opened(revision: git.Revision) -> Iterator[Base]:
    """A revision with a folder for its files, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="kvplan-base-") as folder:
        yield Base(revision, Path(folder).resolve())


def since_base(
    text: str, policy: Policy, path: Path, cases: Sequence[Case], figures: Mapping[str, Figures] | None
) -> TargetResult:
    """What is weaker in the policy than at the revision, as findings. Raises UsageError for a revision there is not.

    figures  those of the baseline file as it is now
    """
    folder = repository_of(path)
    try:
        revision = git.revision(text, folder, CURE)
    except UsageError:
        if text != "HEAD" or git.has_commits(folder):
            raise
        return noted(policy, "HEAD", "there is no commit yet: nothing to compare with")
    with opened(revision) as base:
        place = git.place(base.revision, path)
        if not git.copy(base.revision, place, base.top):
            what = f"there is no policy {printable(place, 200)} at {base.name}: nothing to compare with"
            return noted(policy, base.name, what)
        try:
            before = state(base, place)
        except KvplanError as error:
            message = f"the policy of {base.name} cannot be read: {error}"
            return policy_changes.result(policy.path, base.name, [policy_changes.finding("base", "skip", message)])
        gpu_bytes = {case.target.id: case.plan.memory.total for case in cases}
        weaker = policy_changes.changes(before, State(policy, figures), gpu_bytes)
        return changes_result(policy, before.policy, base.name, weaker)


def noted(policy: Policy, name: str, what: str) -> TargetResult:
    return policy_changes.result(policy.path, name, [policy_changes.finding("base", "note", what)])


def state(base: Base, place: str) -> State:
    """The policy at the revision, with the figures of the baseline that it names there."""
    file = base.top / place
    shown = f"{printable(base.revision.text, 80)}:{printable(place, 200)}"
    policy = policy_file.policy_of(strict_yaml.parse(read_text(file, strict_yaml.MAX_BYTES), shown), file, Path("/"))
    if policy.baseline is None:
        return State(policy, None)
    baseline = os.path.relpath(os.path.normpath(policy.baseline.path), base.top)
    if git.is_inside(baseline):
        git.copy(base.revision, baseline, base.top)
    return State(policy, baseline_figures(policy))
