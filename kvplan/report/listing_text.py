"""Lists of models and GPUs for quick reference, and all data of one entry."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, assert_never

from kvplan.asked.form import FLAGS, Form, flag_of
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import GB, format_count, format_gib, format_size, parse_tokens, plural
from kvplan.documents import listing as typed
from kvplan.hardware.gpu import GpuSpec, gpu, gpu_names
from kvplan.hardware.names import read
from kvplan.models import catalog
from kvplan.models import spec as kinds
from kvplan.models.catalog import Facts
from kvplan.models.spec import ModelSpec
from kvplan.report import console as tables
from kvplan.report.drawing import Figure, bars
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import Line, Part, line
from kvplan.report.page import Block, bold
from kvplan.servers.plans.plan import Plan
from kvplan.sizing.weights import num_params, stored_dtype

ListedRow = Mapping[str, object]
_PARAMS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([KMBT]?)", re.IGNORECASE)
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


# --- models -----------------------------------------------------------------------------------------------------------


def models(
    name: str | None = None, family: str | None = None, max_params: str | None = None, *, form: Form | None = None,
    ctx: str | None = None,
) -> CommandAnswer:  # fmt: skip
    """The catalog's models, or all data of the one that is named; with a form's GPU those that fit on it."""
    if ctx is not None and form is None:
        raise UsageError("--ctx", "is for --gpu", "name a GPU")
    largest = None if max_params is None else parse_params(max_params)
    names = catalog.model_names()
    if name is not None:
        names = [other for other in names if is_of(other, name)]  # a part of several names
        if form is None and (len(names) < 2 or catalog.find(name) is not None):
            is_part = catalog.find(name) is None and names
            return one_model(names[0] if is_part else name)
    names = [other for other in names if family is None or is_of(other, family)]
    if form is not None:
        return fitting_models(names, form, ctx, largest)
    rows = [tables.model_row(other, catalog.load(other)) for other in names]
    if largest is not None:
        rows = [row for row in rows if row["parameters"] <= largest]
    if not rows:
        raise UsageError("models", "no model matches", "relax --family or --max-params")
    return listed(
        rows,
        "models",
        lambda: tables.model_parts(rows),
        lambda: [tables.model_list(rows), *tables.model_notes(rows)],
        lambda: stored_bars(rows),
    )


def fitting_models(names: Sequence[str], form: Form, ctx: str | None, largest: int | None) -> CommandAnswer:
    """How many of the models fit on the GPU, the largest, and a table of them."""
    from kvplan.planning.fitting import CONTEXT, fitting, machine_of
    from kvplan.servers.base import abilities_of, parse_engine, terms_of
    from kvplan.servers.releases import DEFAULT

    if not names:
        raise UsageError("models", "no model matches", "relax NAME or --family")
    context = CONTEXT if ctx is None else parse_tokens(ctx, "--ctx")
    count, machine = machine_of(form)
    what = machine.name if count == 1 else f"{count} x {machine.name}"
    release = parse_engine(form.text("engine") or DEFAULT)
    plans = dict(fitting(names, count, machine, context, release))
    shares = {plan.request.args.gpu_memory_utilization for plan in plans.values()} - {None}
    rows = [fitting_row(name, plan) for name, plan in plans.items()]
    rows = [row for row in rows if largest is None or row["parameters"] <= largest]
    rows.sort(key=parameters_of, reverse=True)
    used = "".join(f", --gpu-memory-utilization {share}" for share in shares)
    files = abilities_of(release.engine).file_types
    stored = "whole on the GPU, as files of the usual type" if files else "as they are stored"
    how = f"at {context:,} tokens or their own shorter context, {stored} ({terms_of(release.engine).title}{used})"
    headline = f"{len(rows)} of {len(names)} models fit on {what} {how}"
    if rows:
        headline += f"; the largest is {rows[0]['name']} ({tables.format_params(rows[0]['parameters'])} parameters)"
    cells = [
        [row["name"], row["scheme"] or "", tables.format_params(row["parameters"]), stored_gb(row), f"{row['users']:,}"]
        for row in rows
    ]
    table = Table.of(("model", "stored as", "parameters", "stored GB", "requests at once"), cells, left=2)
    words = {key: value if isinstance(value, str) else ",".join(value) for key, value in form.values.items()}
    options = "".join(f" {FLAGS.get(key, flag_of(key))} {text}" for key, text in words.items())
    more = f"For one of them: kvplan estimate {rows[0]['name'] if rows else 'MODEL'}{options} --ctx {context}"
    more += "".join(f" --gpu-memory-utilization {share}" for share in shares)
    document: typed.FittingDocument = {
        "schema": "kvplan/fitting@1", "gpu": what, "context": context, "of": len(names), "fitting": rows,
    }  # fmt: skip
    return CommandAnswer(
        lambda _: [line(headline), line(), table, line(), line(more)] if rows else [line(headline)],
        lambda: document,
        lambda: table,
        lambda: [bold(headline), table],
        tuple,
    )


def fitting_row(name: str, plan: Plan) -> typed.FittingRow:
    users = min(int(plan.concurrency.max), plan.concurrency.max_num_seqs)
    row = tables.model_row(name, plan.request.spec)
    if (cache := plan.slots) is not None:
        row = {**row, "scheme": cache.file_type, "stored_bytes": sum(place.weights for place in cache.places)}
    return {**row, "users": users}


def parameters_of(row: typed.FittingRow) -> int:
    return row["parameters"]


def stored_gb(row: typed.ModelRow) -> str:
    return "?" if row["stored_bytes"] is None else f"{row['stored_bytes'] / GB:,.2f}"


def stored_bars(rows: Sequence[typed.ModelRow]) -> list[Figure]:
    return size_bars("Weights as stored", ((row["name"], row["stored_bytes"]) for row in rows))


def is_of(name: str, family: str) -> bool:
    """True if a model's name, Hub id or model_type contains the text, ignoring case."""
    return any(family.lower() in label.lower() for label in catalog.labels(name))


def parse_params(text: str) -> int:
    match = _PARAMS.fullmatch(text)
    if not match:
        raise UsageError("--max-params", f"not a number of parameters ({text[:40]!r})", "write 8B, 70B or 8030261248")
    return int(float(match.group(1)) * _SCALES[match.group(2).upper()])


def one_model(name: str) -> CommandAnswer:
    spec, facts = catalog.load(name), catalog.facts(name)
    row = tables.model_row(spec.name, spec)
    document: typed.ModelDocument = {"schema": "kvplan/model@1", **row, **json_details(spec, facts)}
    details = model_details(spec, facts, row)
    return listed(
        [row],
        "models",
        lambda: fact_lines(details),
        lambda: [facts_table(details)],
        lambda: stored_bars([row]),
        document,
    )


def model_details(spec: ModelSpec, facts: Facts, row: typed.ModelRow) -> list[tuple[str, str]]:
    groups = ", ".join(f"{group} {count:,}" for group, count in sorted(num_params(spec).items()) if count)
    rows = [
        ("name", spec.name),
        ("Hub id", str(facts["id"])),
        ("aliases", ", ".join(facts.get("aliases", ())) or "none"),
        ("architecture", f"{spec.architecture} ({spec.model_type})"),
        ("parameters", f"{row['parameters']:,} ({groups})"),
        ("weights", weights_text(row, spec)),
        ("context", f"{spec.max_model_len:,} tokens"),
        ("KV cache", f"{tables.format_kib(row['kv_bytes_per_token'])} per token in bf16"),
    ]
    if row["window_bytes_per_token"]:
        rows.append(("of windows", f"{tables.format_kib(row['window_bytes_per_token'])} of it, which stop growing"))
    if row["state_bytes"]:
        rows.append(("states", f"{format_size(row['state_bytes'])} per sequence, whatever its length"))
    rows += [("layers" if i == 0 else "", text) for i, text in enumerate(layer_groups(spec))]
    rows += [("note", note) for note in spec.notes]
    rows.append(("source", spec.source))
    return rows


def weights_text(row: typed.ModelRow, spec: ModelSpec) -> str:
    """Size and format of the checkpoint, and the size of the same parameters unquantized."""
    stored, kind = row["stored_bytes"], row["scheme"] or stored_dtype(spec)
    if stored is None:
        return f"{row['bf16_gb']:,.2f} GB in bf16; stored as {row['quantization']}, which kvplan cannot size"
    plain = "" if row["scheme"] is None else f"; {row['bf16_gb']:,.2f} GB in bf16"
    return f"{stored / GB:,.2f} GB as stored, in {kind}{plain}"


def layer_groups(spec: ModelSpec) -> list[str]:
    """A line per kind of layer: "32 x 8 KV heads of 128"."""
    counts: dict[tuple[kinds.LayerCache, ...], int] = {}
    for caches in spec.layers:
        counts[caches] = counts.get(caches, 0) + 1
    return [f"{n} x {' + '.join(cache_text(c) for c in caches) or 'no cache'}" for caches, n in counts.items()]


def heads_text(heads: int, head_dim: int, head_dim_v: int) -> str:
    width = str(head_dim) if head_dim == head_dim_v else f"{head_dim} (K) and {head_dim_v} (V)"
    return f"{heads} KV heads of {width}"


def cache_text(cache: kinds.LayerCache) -> str:
    match cache:
        case kinds.FullAttention(heads, k, v):
            return heads_text(heads, k, v)
        case kinds.SlidingWindow(heads, k, v, window):
            return f"{heads_text(heads, k, v)}, window of {window:,} tokens"
        case kinds.ChunkedAttention(heads, k, v, chunk):
            return f"{heads_text(heads, k, v)}, chunks of {chunk:,} tokens"
        case kinds.LatentAttention(rank, rope, sparse):
            return f"latent of {rank} + {rope} (MLA{', sparse' if sparse else ''})"
        case kinds.WindowLatent(width, rope, window):
            return f"latent of {width} + {rope}, window of {window:,} tokens"
        case kinds.CompressedLatent(width, rope, ratio, _):
            return f"latent of {width} + {rope} for every {plural(ratio, 'token')}"
        case kinds.SparseIndexer(width, pool) if pool > 1:
            return f"index keys of {width} for every {pool} tokens"
        case kinds.SparseIndexer(width) | kinds.KeyIndex(width):
            return f"index keys of {width}"
        case kinds.RecurrentState(kind="short_conv", conv_kernel=kernel, convolution=parts):
            return f"short_conv state of {kernel - 1} x {sum(part.size for part in parts):,}"
        case kinds.RecurrentState(kind=kind, heads=heads, head_shape=shape):
            return f"{kind} state" + (f" of {heads} x {shape[0]} x {shape[1]}" if heads else "")
        case kinds.CrossAttention(heads, k, v):
            return f"{heads_text(heads, k, v)} over the encoder's tokens"
        case _:
            assert_never(cache)


def json_details(spec: ModelSpec, facts: Facts) -> typed.ModelFacts:
    return {
        "id": facts["id"],
        "aliases": list(facts.get("aliases", ())),
        "architecture": spec.architecture,
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "parameter_groups": dict(sorted(num_params(spec).items())),
        "layers": layer_groups(spec),
        "notes": list(spec.notes),
    }


# Names of which the table has no rows.
OTHER_NAMES: Final = (
    "Slices, Macs and cloud instances are named, too: h100-1g.10gb, m4-max-64g, p5.48xlarge.",
    "So are product names and node labels: NVIDIA-H100-80GB-HBM3, nvidia-l4.",
)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpus(name: str | None = None) -> tuple[CommandAnswer, str | None]:
    """(the GPUs, or all data of the one that is named; a note on its name)."""
    named = None if name is None else read(name)
    rows = [tables.gpu_row(spec) for spec in (map(gpu, gpu_names()) if named is None else [named.spec])]

    def sizes() -> list[Figure]:
        return size_bars("Memory", ((row["name"], row["total_memory"]) for row in rows))

    if named is None:
        return listed(rows, "gpus", lambda: gpu_parts(rows), lambda: [tables.gpu_list(rows)], sizes), None
    document: typed.GpuDocument = {"schema": "kvplan/gpu@1", **rows[0]}
    details = gpu_details(rows[0], named.spec)
    note = None if named.instance is None else named.instance.text
    return listed(rows, "gpus", lambda: fact_lines(details), lambda: [facts_table(details)], sizes, document), note


def gpu_parts(rows: Sequence[typed.GpuRow]) -> list[Part]:
    return [tables.gpu_list(rows), line(), *(line(text) for text in OTHER_NAMES)]


def gpu_details(row: typed.GpuRow, spec: GpuSpec) -> list[tuple[str, str]]:
    spread = "" if spec.total_memory_low == spec.total_memory_high else (
        f", range {format_gib(spec.total_memory_low)} to {format_gib(spec.total_memory_high)}"
    )  # fmt: skip
    rates = {"bf16": spec.bf16_flops, "fp16": spec.fp16_flops, "fp8": spec.fp8_flops}
    return [
        ("name", spec.name),
        ("device", spec.device_name),
        ("total memory", f"{format_gib(spec.total_memory)} ({format_count(spec.total_memory)} bytes{spread})"),
        ("", f"{spec.total_memory_kind}: {spec.total_memory_source}"),
        ("bandwidth", f"{spec.memory_bandwidth / 1e9:,.0f} GB/s" if spec.memory_bandwidth else "not stated"),
        *(
            (f"dense {kind}", f"{rate / 1e12:,.1f} TFLOP/s" if rate else "none or not stated")
            for kind, rate in rates.items()
        ),
        ("capability", row["compute_capability"] or "not stated"),
        ("unified", "yes: the CPU uses the same memory" if spec.unified else "no"),
        ("source", spec.source),
    ]


# --- both -------------------------------------------------------------------------------------------------------------


def fact_lines(facts: Sequence[tuple[str, str]]) -> list[Line]:
    width = max(len(name) for name, _ in facts)
    return [((f"{name:<{width}}  ", "bold"), (printable(text, 2000), "")) for name, text in facts]


def listed(
    rows: Sequence[ListedRow],
    what: str,
    screen: Callable[[], Sequence[Part]],
    page: Callable[[], Sequence[Block]],
    sizes: Callable[[], Sequence[Figure]] = tuple,
    document: ListedRow | None = None,
) -> CommandAnswer:
    """Answer of a list, whose CSV has the fields by name; document: for a single entry."""
    table = Table.of(list(rows[0]), ([*row.values()] for row in rows), left=len(rows[0]))
    return CommandAnswer(
        lambda _: screen(),
        lambda: {"schema": f"kvplan/{what}@1", what: list(rows)} if document is None else document,
        lambda: table,
        lambda: [bold(f"{len(rows):,} {what}" if document is None else str(next(iter(rows[0].values())))), *page()],
        sizes,
    )


def facts_table(facts: Sequence[tuple[str, str]]) -> Table:
    """Facts of a single entry, for a page."""
    return Table.of(("fact", "value"), facts, left=2)


def size_bars(title: str, sizes: Iterable[tuple[str, int | None]]) -> list[Figure]:
    """Bytes by name, without unknown ones."""
    known = [(name, size, format_size(size)) for name, size in sizes if size is not None]
    return bars(title, known, len(known))
