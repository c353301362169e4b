"""`kvplan diff`: compare two documents, policies or models, and set the exit code."""

from kvplan.cli import output
from kvplan.cli.options import form_of
from kvplan.cli.sweep_options import DiffOptions
from kvplan.policy.compared import compared, operands
from kvplan.report import diff_text


def diff(options: DiffOptions) -> int:
    """Compare and return the exit code: 0, or with --exit-code 1 if NEW is worse."""
    old, new = operands(options.model, options.new, options.policy)
    with output.report_files(options.report or [], force=options.force) as reports:
        result, notices = compared(old, new, form_of(options))
        output.say(notices, quiet=options.quiet)
        output.answer(diff_text.shapes(result), options.format, options.color, reports)
    return int(options.exit_code and result.is_worse)
