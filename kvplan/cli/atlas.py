"""`kvplan atlas`: a static site of every model on every GPU."""

import time
from pathlib import Path

from kvplan.cli import output
from kvplan.cli.atlas_options import AtlasOptions
from kvplan.cli.drawing import require_libraries
from kvplan.core.errors import UsageError
from kvplan.core.files import path_text
from kvplan.core.processes import MOST_JOBS, cores
from kvplan.core.units import parse_count, plural, split_list
from kvplan.hardware import prices as price_file
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog

PROGRESS_S = 10.0


def atlas(options: AtlasOptions) -> int:
    """Write the pages that changed; print how many there are."""
    require_libraries("atlas", "jinja2")
    from kvplan.report import atlas as pages
    from kvplan.report import atlas_site

    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise UsageError(f"--url {options.url}", "is no address", "write it with https://")
    models = [own(name) for name in names_of(options.models, "--models")] or catalog.model_names()
    gpus = [gpu(name).name for name in names_of(options.gpus, "--gpus")] or pages.usual_gpus()
    prices = {} if options.prices is None else price_file.read(Path(options.prices)).per_hour
    jobs = cores() if options.jobs is None else parse_count(options.jobs, "--jobs", MOST_JOBS)
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {path_text(folder)}", "is not a folder", "name another path")
    site = atlas_site.Site(folder, tuple(dict.fromkeys(models)), tuple(dict.fromkeys(gpus)), prices, options.url)
    if options.url is None and not options.quiet:
        output.tell("note", "no --url: without the address that the site will have there is no sitemap.xml")
    count, changed, done, last = 0, 0, 0, time.monotonic()
    for result in atlas_site.write(site, jobs):
        count, changed, done = count + len(result.files), changed + result.changed, done + bool(result.name)
        if not options.quiet and result.name and time.monotonic() - last > PROGRESS_S:
            output.tell("note", f"{done:,} of {plural(len(site.models), 'model')}")
            last = time.monotonic()
    pairs = plural(len(site.models) * len(site.gpus), "pair")
    first = path_text(folder / "index.html")
    output.write(f"{first}: {pairs} of model and GPU in {count:,} files, {changed:,} of them written")
    return 0


def names_of(text: str | None, flag: str) -> list[str]:
    names = [] if text is None else split_list(text, flag)
    if "" in names:
        raise UsageError(flag, "contains an empty name", "write one, or several separated by commas")
    return names


def own(name: str) -> str:
    """Catalog name of a model by any of its names."""
    known = catalog.find(name)
    if known is None:
        raise catalog.unknown(name)
    return known
