"""What `kvplan sweep --format json` prints: kvplan/sweep@1. Its rows are those of kvplan.planning.sweep."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count
from kvplan.planning.sweep import SweepRow


class SweepDocument(TypedDict):
    """Every combination of a sweep, or with `pareto` the Pareto-optimal ones. Bytes are of one rank, users of all
    replicas; null where a combination is impossible (`reason` says why; `deficit` is null too) or was not asked for.
    With `pareto`, `alike` counts those left out because they hold as many users as a listed one, with other flags.
    """

    schema: Literal["kvplan/sweep@1"]
    prices: str | None
    pareto: bool
    rows: Annotated[list[SweepRow], "One for each combination."]
    combinations: Count
    fitting: Count
    short: Count
    impossible: Count
    alike: Count
