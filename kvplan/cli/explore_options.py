"""The options of `kvplan explore`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import ForceOption, QuietOption, Texts, WorkloadOptions, complete_model, option
from kvplan.cli.sweep_options import PricesOption


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions(WorkloadOptions):
    """Options of `kvplan explore`: given values become the choices on the page; the rest have default choices."""

    model: Annotated[
        Texts,
        typer.Argument(
            metavar="MODEL...",
            help="Catalog names (`kvplan models`), config.json files or their directories, or Hub ids.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None  # type: ignore[assignment] # several here, where the other commands take one
    output: Annotated[
        str, option("--output", "-o", help="The page to write. Default: explore.html.", metavar="FILE")
    ] = "explore.html"
    prices: PricesOption = None
    force: ForceOption = False
    quiet: QuietOption = False
