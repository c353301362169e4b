"""`kvplan models` and `kvplan gpus`: lists for quick reference, and all data of one entry; and `kvplan schema`."""

from kvplan.cli import output
from kvplan.cli.options import GpusOptions, ModelsOptions, SchemaOptions
from kvplan.report import listing_text
from kvplan.report.formats import CommandAnswer


def models(options: ModelsOptions) -> int:
    form = None
    if options.gpu is not None or options.gpu_memory is not None:
        from kvplan.asked.form import Form, size_notes, with_only_engine  # only for a GPU

        values = {"gpu": options.gpu and [options.gpu], "gpu_memory": options.gpu_memory}
        form = with_only_engine(Form({key: value for key, value in values.items() if value is not None}))
        if "engine" in form.values:
            output.tell("note", f"each model is laid out as {form.values['engine']} does, which may take a minute")
        for note in size_notes(form):
            output.tell("note", note)
    named = (options.name, options.family, options.max_params)
    answer(listing_text.models(*named, form=form, ctx=options.ctx), options)
    return 0


def gpus(options: GpusOptions) -> int:
    response, note = listing_text.gpus(options.name)
    if note is not None:
        output.tell("note", note)
    answer(response, options)
    return 0


def answer(response: CommandAnswer, options: ModelsOptions | GpusOptions) -> None:
    with output.report_files(options.report or [], force=options.force) as reports:
        output.answer(response, options.format, options.color, reports)


def schema(options: SchemaOptions) -> int:
    """Print the JSON Schema of a kind of document."""
    from kvplan.documents.artifact import dumps
    from kvplan.documents.schema import document_schema

    output.write(dumps(document_schema(options.name)))
    return 0
