"""The grid of plans behind `kvplan explore`: its choices, its axes, and a chart for each model and server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplan.asked.form import COMMON_GPUS, Form, flag_of, gpus_of, read_form, with_file, with_only_engine
from kvplan.asked.question import Inputs, default_context, requests
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.units import parse_count, parse_tokens
from kvplan.documents.explorer import EXPLORER, FULL, Axis, ExplorerDocument, chart
from kvplan.planning.grid import arguments_of, copies_of, parts, prices_of, refuse_undrafted_lists
from kvplan.planning.recommend import MOST_USERS
from kvplan.planning.sweep import Grid
from kvplan.servers.base import SERVERS, abilities_of, parse_engine, server_of, terms_of

if TYPE_CHECKING:
    from kvplan.servers.releases import Version

USERS = 16  # at once, at which the page opens
MOST_PLANS = 150_000  # about a minute
# Choices on the page by default.
SPLITS = "1,2,4,8"
KV_DTYPES = "auto,fp8"
SHARES = tuple(round(0.80 + 0.02 * step, 2) for step in range(10))
SHORTEST_CONTEXT, SHORTEST_MEAN = 2_048, 512
LABELS = {
    "gpu": "GPU",
    "engine": "Server",
    "max_model_len": "Context length",
    "mean_tokens": "Mean tokens of a request",
    "tensor_parallel_size": "Tensor parallel size",
    "kv_cache_dtype": "KV cache dtype",
    "gpu_memory_utilization": "GPU memory utilization",
    "mem_fraction_static": "Static memory fraction",
    "quantization": "File type",
    "gpu_layers": "Layers on the GPUs",
    "cache_type_k,cache_type_v": "Cache type",
}
AS_MANY = "as many as fit"  # layers on GPUs


def by_share() -> list[str]:
    """Servers with a fraction of the memory to choose: those of a page that names none."""
    return [name for name in SERVERS if not abilities_of(name).fits_context]


SHARE_NAMES = {terms_of(name).share_argument for name in by_share()}


def refuse_single(form: Form) -> None:
    """Refuse options that fix a value for which the page offers choices."""
    for name in ("from_command", "lengths", "prompt_tokens", "engine_arg"):
        if name in form.values:
            remedy = "name choices by flags: --tp 1,2 --mean-tokens 1k,4k"
            raise UsageError(flag_of(name), "describes one plan, but the page offers choices", remedy)
    if {"auto", "-1"} & set(",".join(form.texts("max_model_len") or []).split(",")):
        raise UsageError(
            "--ctx auto", "cannot be a choice of the page: each is a number of tokens", "remove it, or write 8k,32k"
        )


def explorer_document(
    models: Sequence[str], form: Form, prices: str | None = None, users: str | None = None
) -> tuple[ExplorerDocument, Inputs]:
    """A chart for each model and server that can be planned, and the notes. Raise the first error if there is none.

    form    of the values to choose among
    prices  file of dollars per GPU hour; users: at once, at which the page opens
    """
    if not models:
        raise UsageError("MODEL", "missing", "name one or more, such as llama-3.1-8b (`kvplan models` lists them)")
    refuse_single(form)
    form = with_only_engine(form.changed(model=models[0]))
    releases = dict.fromkeys(parse_engine(text) for text in parts(form.text("engine"), "--engine") or by_share())
    reading, errors = Inputs([], 0), list[KvplanError]()
    grids: list[tuple[Grid, list[Axis], str]] = []
    for model in dict.fromkeys(models):
        for release in releases:
            try:
                grids.append((*grid_of(form, model, release, reading), release.label))
            except KvplanError as error:
                errors.append(error)
    plans = sum(grid.count for grid, _, _ in grids)
    if plans > MOST_PLANS:
        raise UsageError(
            "explore", f"{plans:,} plans are more than {MOST_PLANS:,}", "name fewer models, GPUs or values"
        )
    charts = [chart(grid.requests[0].spec.name, label, grid, axes) for grid, axes, label in grids]
    names = {request.gpu.name for grid, _, _ in grids for request in grid.requests}
    if not charts:
        raise errors[0]
    reading.warnings += [f"skipped: {error}" for error in errors]
    known = prices_of(prices, names, reading)
    document: ExplorerDocument = {
        "schema": EXPLORER,
        "plans": plans,
        "users": (USERS if any(not abilities_of(release.engine).file_types for release in releases) else 1)
        if users is None
        else parse_count(users, "--users", MOST_USERS),
        "charts": charts,
        "prices": known.per_hour if known else None,
    }
    return document, reading


# --- a grid -----------------------------------------------------------------------------------------------------------


def grid_of(form: Form, model: str, release: "Version", reading: Inputs) -> tuple[Grid, list[Axis]]:
    """Combinations of one model on one server, and their axes as labeled on the page."""
    types = abilities_of(release.engine).file_types
    if types and "gpu" not in form.values:
        form = form.changed(gpu=[COMMON_GPUS[0]])  # each plan lays out a graph: six GPUs would take minutes
    gpus_of(form)  # refuses a number of GPUs: use --tp
    given_lists = arguments_of(form).items()
    stated = {name: values for name, values in given_lists if len(values) > 1 or name in (*LABELS, "quantization")}
    plain = with_file(form.changed(model=model, engine=release.label, mean_tokens=None, **dict.fromkeys(stated)))
    inputs = requests(read_form(with_contexts(plain)))
    rows, contexts = inputs.by_gpu()
    refuse_undrafted_lists(rows, stated)
    if types:
        layers = rows[0].spec.num_layers + 1
        usual: dict[str, tuple[Any, ...]] = {
            "quantization": types[::4], "gpu_layers": (None, *(layers * part // 4 for part in range(4))),
            "cache_type_k,cache_type_v": ("f16", "q8_0"),
        }  # fmt: skip
        arguments = usual | stated
    else:
        arguments = choices(stated, terms_of(release.engine).share_argument)
    copies, notes = copies_of(with_contexts(plain), stated.get("quantization", ()))
    lengths = (request.args.max_model_len for request in rows)
    longest = max(length for length in lengths if isinstance(length, int))
    grid = Grid(
        requests=tuple(replace(request, load=replace(request.load, mean_tokens=None)) for request in rows),
        shape=(1, inputs.num_gpus, contexts),
        means=(None,) if types and "mean_tokens" not in form.values else means_of(form.text("mean_tokens"), longest),
        arguments=arguments,
        copies=copies,
    )
    reading.notes += [*inputs.notes, *(note for note in notes if note not in inputs.notes)]
    reading.warnings += inputs.warnings
    return grid, axes_of(grid, release, is_stated="mean_tokens" in form.values)


def with_contexts(form: Form) -> Form:
    """The form with its contexts, or with powers of two up to the model's own."""
    if "max_model_len" in form.values:
        return form
    first = requests(read_form(form)).requests[0]
    contexts = doubled(SHORTEST_CONTEXT, default_context(first))
    if abilities_of(first.release.engine).file_types:
        contexts = contexts[1::2]
    return form.changed(max_model_len=[str(tokens) for tokens in contexts])


def doubled(first: int, last: int) -> list[int]:
    """List first, twice that, and so on below last, then last."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def choices(stated: dict[str, tuple[Any, ...]], share: str) -> dict[str, tuple[Any, ...]]:
    """Engine arguments and their values: the given ones, and default choices for three others."""
    shares = stated.pop("gpu_memory_utilization", None) or SHARES
    usual = {
        "tensor_parallel_size": tuple(map(int, SPLITS.split(","))),
        "kv_cache_dtype": tuple(KV_DTYPES.split(",")),
        share: shares,
    }
    return usual | stated


def means_of(text: str | None, longest: int) -> tuple[int | None, ...]:
    """Mean lengths: the given ones, or powers of two; and requests as long as the context."""
    stated = parts(text, "--mean-tokens")
    if stated:
        return (*dict.fromkeys(parse_tokens(part, "--mean-tokens") for part in stated), None)
    return (*doubled(SHORTEST_MEAN, max(SHORTEST_MEAN, longest))[:-1], None)


# --- axes -------------------------------------------------------------------------------------------------------------


def axes_of(grid: Grid, release: "Version", *, is_stated: bool) -> list[Axis]:
    """An axis for each of grid.sizes, in that order; the page opens at the server's default utilization.

    is_stated  a mean length was given: the page opens at it
    """
    contexts = grid.shape[2]
    gpus = [request.gpu.name for request in grid.requests[::contexts]]
    lengths = [length_text(request.args.max_model_len) for request in grid.requests[:contexts]]
    means = [FULL if mean is None else length_text(mean) for mean in grid.means]
    share = server_of(release.engine).settings(grid.requests[0]).gpu_memory_utilization
    return [
        axis("model", [grid.requests[0].spec.name]),
        axis("gpu", gpus),
        axis("engine", [release.label]),
        *(
            axis(
                name,
                [AS_MANY if value is None else str(value) for value in values],
                nearest(values, share) if name in SHARE_NAMES else 0,
            )
            for name, values in grid.arguments.items()
        ),
        axis("max_model_len", lengths, len(lengths) // 2),
        axis("mean_tokens", means, 0 if is_stated else len(means) - 1),
    ]


def axis(name: str, values: list[str], start: int = 0) -> Axis:
    label = LABELS.get(name, name.replace("_", " ").capitalize())
    return {"name": name, "label": label, "values": values, "start": start}


def nearest(values: Sequence[float], value: float) -> int:
    """Index of the nearest value."""
    return min(range(len(values)), key=lambda index: abs(values[index] - value))


def length_text(tokens: object) -> str:
    return f"{tokens:,}" if isinstance(tokens, int) else str(tokens)
