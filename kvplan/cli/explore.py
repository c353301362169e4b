"""`kvplan explore`: a grid of plans as one page whose sliders select answers."""

from kvplan.cli import output
from kvplan.cli.options import form_of
from kvplan.cli.sweep_options import ExploreOptions
from kvplan.documents.explorer_grid import explorer_document

HTML = {".html": "html"}


def explore(options: ExploreOptions) -> int:
    """Write the page; print its path and a summary."""
    with output.report_files([options.output], "--output", HTML, force=options.force) as files:
        document, notices = explorer_document(options.models or [], form_of(options), options.prices, options.users)
        output.say(notices, quiet=options.quiet)
        from kvplan.report.explorer_html import explorer_html, summary

        files[0].save(explorer_html(document))
        output.write(f"{files[0].label}: {summary(document)}; open it in a browser")
    return 0
