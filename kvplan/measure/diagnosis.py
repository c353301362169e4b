"""Data behind `kvplan why`: what a failed server's log shows, the plan of the requested server, and the fixes."""

from dataclasses import dataclass

from kvplan.measure.failure import Failure
from kvplan.planning.case import Case, Cure
from kvplan.planning.cures import Anchor
from kvplan.planning.plan import Plan, Request
from kvplan.servers.logs.log import ServerLog


@dataclass(frozen=True, slots=True)
class Inference:
    """A value that the log does not state, and what it was inferred from."""

    what: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure, its fixes, and what they are based on.

    request   the server that was requested, or None if no plan can be made of it
    plan      its plan with the log's own numbers, or None if none can be made
    anchor    difference between the log's numbers and the modeled plan
    missing   flags that would supply what the log leaves out
    differs   why the log's numbers do not match the plan, if they do not
    commands  command with each fix applied, to paste, or None if the log does not show the command
    """

    failure: Failure
    log: ServerLog
    case: Case
    request: Request | None
    plan: Plan | None
    anchor: Anchor
    cures: tuple[Cure, ...]
    commands: tuple[str | None, ...]
    inferred: tuple[Inference, ...]
    missing: tuple[str, ...]
    differs: str | None
