"""The options of `kvplan explore`."""

from kvplan.cli.fields import FORCE, QUIET, Text, Texts, argument, complete_model, option
from kvplan.cli.options import WorkloadOptions
from kvplan.cli.sweep_options import MODELS, PRICES
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions(WorkloadOptions):
    """Options of `kvplan explore`: given values become the choices on the page; the rest have default choices."""

    models: Texts = argument(*MODELS, complete=complete_model)
    model: None = None  # several here: `models`
    users: Text = option("--users N", "Users at once at which the page opens. Default: 16.")
    output: str = option("--output, -o FILE", "The page to write. Default: explore.html.", "explore.html")
    prices: Text = option(*PRICES)
    force: bool = option(*FORCE, False)
    quiet: bool = option(*QUIET, False)
