"""What `kvplan why` knows of a failed server: what its log shows, the plan of what it was asked for, and the cures."""

from dataclasses import dataclass

from kvplan.measure.failure import Failure
from kvplan.planning.cures import Anchor, Case, Cure
from kvplan.planning.plan import Plan, Request
from kvplan.servers.logs import ServerLog


@dataclass(frozen=True, slots=True)
class Inference:
    """Something the log does not say, and what it was taken from."""

    what: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure, its cures, and what they rest on.

    request   what the server was asked for; None: no plan can be made of it
    plan      of that, on the log's own figures; None: none can be made
    anchor    by how much that plan was moved to the log
    missing   flags that would say what the log leaves out
    differs   why the log's figures are not those of the plan, where they are not
    commands  of each cure, to paste; None where the log does not say the command
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
