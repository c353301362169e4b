"""The options of `kvplan atlas`."""

from kvplan.cli.fields import QUIET, Text, complete_gpu, complete_model, option
from kvplan.cli.sweep_options import PRICES
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasOptions:
    """Options of `kvplan atlas`: which models and GPUs, and where the pages go."""

    output: str = option("--output, -o FOLDER", "Folder of the pages. Default: site.", "site")
    models: Text = option(
        "--models NAMES", "Models, separated by commas. Default: every model of the catalog.", complete=complete_model
    )
    gpus: Text = option(
        "--gpus NAMES",
        "GPUs, separated by commas. Default: those on sale whose memory a driver reported.",
        complete=complete_gpu,
    )
    prices: Text = option(*PRICES)
    url: Text = option("--url ADDRESS", "Address that the site will have: writes sitemap.xml.")
    jobs: Text = option("--jobs N", "Maximum number of processes. Default: all cores.")
    quiet: bool = option(*QUIET, False)
