"""The grid of a form whose values may be lists: what is asked of a sweep."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvplan.asked.form import Form, engine_pairs, flag_of, gpus_of, read_form, refuse_two, with_file
from kvplan.asked.question import Inputs, refuse_undrafted, requests
from kvplan.asked.speculation import FLAG, config_of, in_parts
from kvplan.core.errors import Faults, UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_tokens, split_list
from kvplan.hardware import prices as price_file
from kvplan.hardware.prices import Prices
from kvplan.planning.plan import Request
from kvplan.planning.sweep import Grid, check_size, unusable
from kvplan.servers.base import parse_engine
from kvplan.servers.words.argument_values import read_argument

# Engine arguments that may be lists; the GPU, context, server, mean length and model may be, too.
LISTS: Final = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
    "decode_context_parallel_size", "quantization", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "num_speculative_tokens",
)  # fmt: skip
SHORT_FLAGS: Final = {
    "tensor_parallel_size": "--tp", "pipeline_parallel_size": "--pp", "data_parallel_size": "--dp",
    "prefill_context_parallel_size": "--pcp", "decode_context_parallel_size": "--dcp",
}  # fmt: skip


def grid_of(form: Form, models: Sequence[str], prices_path: str | None) -> tuple[Inputs, Grid, Prices | None]:
    """The combinations, with the notes from reading the form."""
    arguments = {name: values for name, values in arguments_of(form).items() if len(values) > 1}
    if arguments.keys() & SHORT_FLAGS.keys():
        gpus_of(form)  # refuses a number of GPUs: use --tp
    for size in arguments.get("tensor_parallel_size", ()) if "speculative_config" in form.values else ():
        config_of(form).check_ranks(size, FLAG)
    releases = tuple(dict.fromkeys(parse_engine(text) for text in parts(form.text("engine"), "--engine")))
    means = means_of(form)
    cleared: dict[str, Any] = dict.fromkeys(arguments)
    cleared |= {"engine": None} if len(releases) > 1 else {}
    cleared |= {"mean_tokens": None} if len(means) > 1 else {}
    if form.text("quantization") == "none":
        cleared |= {"quantization": None}
    rows, copies = list[Request](), dict[str | None, tuple[Request, ...]]()
    inputs = Inputs([], 0)
    shape = (0, 0, 0)
    for model in dict.fromkeys(models) or [None]:
        of_one = with_file(form.changed(model=model, **cleared))
        of_model = requests(read_form(of_one))
        by_gpu, contexts = of_model.by_gpu()
        rows += by_gpu
        of_methods, notes = copies_of(of_one, arguments.get("quantization", ()))
        copies |= {method: (*copies.get(method, ()), *others) for method, others in of_methods.items()}
        shape = (shape[0] + 1, of_model.num_gpus, contexts)
        inputs.notes += [*of_model.notes, *(note for note in notes if note not in of_model.notes)]
        inputs.hints += of_model.hints
        inputs.warnings += of_model.warnings
    inputs.requests = rows
    prices = prices_of(prices_path, {request.gpu.name for request in rows}, inputs)
    grid = Grid(
        tuple(rows),
        shape,
        releases if len(releases) > 1 else (),
        means if len(means) > 1 else (),
        arguments,
        prices.per_hour if prices else {},
        copies,
    )
    refuse_undrafted_lists(rows, arguments)
    check_size(grid.count)
    return inputs, grid, prices


def copies_of(form: Form, methods: Iterable[str | None]) -> tuple[dict[str | None, tuple[Request, ...]], list[str]]:
    """(requests of each quantization, the GPUs outermost; notes on the checkpoints that stand for the model)."""
    of_methods = {method: requests(read_form(form.changed(quantization=method))) for method in methods}
    notes = dict.fromkeys(note for inputs in of_methods.values() for note in inputs.notes)
    return {method: tuple(inputs.by_gpu()[0]) for method, inputs in of_methods.items()}, list(notes)


def means_of(form: Form) -> tuple[int, ...]:
    """The mean lengths, each once."""
    means = [parse_tokens(text, "--mean-tokens") for text in parts(form.text("mean_tokens"), "--mean-tokens")]
    if len(means) > 1 and form.values.keys() & {"prompt_tokens", "output_tokens"}:
        raise UsageError("--mean-tokens", "conflicts with --prompt-tokens and --output-tokens", "use only one")
    return tuple(dict.fromkeys(means))


def arguments_of(form: Form) -> dict[str, tuple[Any, ...]]:
    """Given engine arguments, each with its values; --engine-arg must agree with them."""
    form = in_parts(form)
    axes, faults = dict[str, tuple[Any, ...]](), Faults()
    pairs = engine_pairs(form)
    for name in LISTS:
        text = form.text(name)
        if text is None:
            continue
        flag, values = SHORT_FLAGS.get(name, flag_of(name)), list[Any]()
        for part in parts(text, flag):
            with faults.part():
                is_none = name == "quantization" and part == "none"
                values.append(None if is_none else read_argument(name, part, flag))
        axes[name] = tuple(dict.fromkeys(values))
        if name in pairs and axes[name] != (pairs[name],):
            refuse_two(name, pairs[name], text)
    faults.refuse()
    return axes


def refuse_undrafted_lists(rows: Iterable[Request], arguments: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse numbers of draft tokens that nothing drafts."""
    for request in rows:
        for tokens in arguments.get("num_speculative_tokens", ()):
            refuse_undrafted(replace(request, args=replace(request.args, num_speculative_tokens=tokens)))


def parts(text: str | None, flag: str) -> list[str]:
    """Values of a list, each once."""
    entries = [] if text is None else split_list(text, flag)
    if "" in entries:
        raise UsageError(
            flag, f"contains an empty value ({printable(str(text), 60)!r})", "write one, or several separated by commas"
        )
    return list(dict.fromkeys(entries))


def prices_of(path: str | None, gpus: set[str], inputs: Inputs) -> Prices | None:
    """The prices file, if it has at least one of these GPUs; notes GPUs without a price."""
    if path is None:
        return None
    prices = price_file.read(Path(path))
    without = sorted(gpus - prices.per_hour.keys())
    if len(without) == len(gpus):
        raise UsageError(f"--prices {prices.source}", f"has no price for {', '.join(without)}", "add a line for each")
    if without:
        inputs.notes.append(f"--prices {prices.source} has no price for {', '.join(without)}")
    return prices


def refuse_unusable(grid: Grid) -> None:
    """Refuse a value that no combination can use: it is a mistake, not a row."""
    reasons = unusable(grid)
    if reasons:
        raise UsageError(reasons[0].subject, reasons[0].problem, reasons[0].remedy)
