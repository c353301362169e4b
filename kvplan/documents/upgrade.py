"""What `kvplan upgrade --format json` prints: kvplan/upgrade@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.documents.diff import Figure


class UpgradeChange(TypedDict):
    """A change between the two releases that moved a figure; null: what differs beside the named changes."""

    since: str | None
    what: str
    source: str | None
    deltas: Annotated[
        dict[str, float], "Path of a figure of kvplan/plan@1 -> by how much it changed; they add up over the changes."
    ]


class UpgradeSide(TypedDict):
    """The server with one release; null users: it cannot be planned."""

    release: str
    starts: bool
    users: Annotated[int | None, "All replicas together."]
    compared: Annotated[bool, "Whether the rules were compared with that release's own code."]


class UpgradedServer(TypedDict):
    """One server with both releases."""

    key: str
    title: str
    outcome: Literal[
        "as before", "more users", "fewer users", "starts", "does not start", "starts with neither", "refused"
    ]
    answer: str
    old: UpgradeSide
    new: UpgradeSide
    rows: Annotated[list[Figure], "Every figure with both releases; empty where it cannot be planned."]
    changes: Annotated[list[UpgradeChange], "In the order they were switched on."]


class UpgradeDocument(TypedDict):
    """What another release does to servers."""

    schema: Literal["kvplan/upgrade@1"]
    old: Annotated[str | None, "The release that all run; null: each says its own."]
    new: str
    worse: bool
    servers: Annotated[list[UpgradedServer], "As the policy lists them."]
    left_out: list[str]
