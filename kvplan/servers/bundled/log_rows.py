"""The bundled engine's start-up log compared with the planner's rules for it: the same inputs, predicted again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import printable
from kvplan.core.units import GIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.bundled.log_wordings import FORM, ROWS
from kvplan.servers.bundled.rules import (
    EngineInputs,
    Speculation,
    blocks_per_request,
    chunk_bytes,
    group_sizes,
    predict,
)
from kvplan.servers.bundled.rules import Prediction as Sized
from kvplan.servers.logs.log import ServerLog
from kvplan.servers.logs.measurement import ComponentRow, Figure, Measurement, Prediction, not_in, reconcile
from kvplan.sizing.layout import cdiv

RESTART: Final = "restart the server with this release of kvplan, and save its log or page again"
HOST: Final = "bounded by the host's free memory, which is not stated"
COUNTS: Final = (
    "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size",
    "pipeline_parallel_size", "max_loras", "max_lora_rank",
)  # fmt: skip


def check_form(log: ServerLog) -> None:
    """Refuse a log, or a page that repeats one, whose lines this kvplan cannot read."""
    if "log_form" not in log.flags:
        problem = "is of kvplan's engine and has none of its arguments"
        if log.first("before") is not None:
            problem = "was written by kvplan's engine before its lines could be read"
        raise InvalidInputError(log.called, problem, RESTART)
    if log.flags["log_form"] != str(FORM):
        written_by = printable(log.flags.get("kvplan_release", "another"), 30)
        problem = (
            f"has form {printable(log.flags['log_form'], 20)} of the engine's lines; this kvplan reads form {FORM}"
        )
        raise InvalidInputError(log.called, problem, f"read it with the release that wrote it ({written_by})")


def inputs_of(log: ServerLog, spec: ModelSpec) -> EngineInputs:
    """The engine's settings as inputs of the planner's rules; raises InvalidInputError for a log that lacks one."""
    check_form(log)
    device, total = log.text("engine_device"), log.first("total_bytes")
    if device is None or total is None:
        raise InvalidInputError(log.called, "ends before the engine measured its memory", "name the log of a start")
    inputs = settings_of(log, total.count)
    counts, stages = inputs.partition, inputs.pipeline_parallel_size
    if counts and (len(counts) != stages or sum(counts) != spec.num_layers):
        text = ",".join(map(str, counts))
        problem = f"has pp_layer_partition={text!r}, which is not of {stages} stages and {spec.num_layers} layers"
        raise InvalidInputError(log.called, problem, "name the model that was served with --model")
    return inputs


def settings_of(log: ServerLog, total: int) -> EngineInputs:
    """The logged settings as inputs, on a device of so many bytes: a start that failed may not have logged them."""
    check_form(log)
    counts: dict[str, Any] = {name: _count(log, name) for name in COUNTS}
    dtype = log.flags.get("dtype", "")
    kv_dtype = log.flags.get("kv_cache_dtype", "")
    if dtype not in ("float32", "bfloat16", "float16") or not kv_dtype:
        raise InvalidInputError(log.called, f"dtype={printable(dtype, 30)!r} is not one of the engine's", RESTART)
    in_flight = log.first("batches_in_flight")
    overriding = log.flags.get("num_gpu_blocks_override")
    return EngineInputs(
        total=total,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        gpu_memory_utilization=_share(log),
        num_blocks=None if overriding is None else _count(log, "num_gpu_blocks_override"),
        backend="triton" if log.text("backend") == "triton" else "torch",
        batches_in_flight=1 if in_flight is None else in_flight.count,
        fully_sharded_loras=log.flags.get("fully_sharded_loras") == "True",
        partition=_partition(log),
        states_in_blocks=log.flags.get("states_in_blocks") == "True",
        **counts,
    )


def _count(log: ServerLog, name: str) -> int:
    text = log.flags.get(name, "")
    if not text.isdecimal() or len(text) > 18:
        raise InvalidInputError(log.called, f"{name}={printable(text, 30)!r} is not a count", RESTART)
    return int(text)


def _partition(log: ServerLog) -> tuple[int, ...]:
    text = log.flags.get("pp_layer_partition")
    if text is None:
        return ()
    if len(text) > 1000 or not all(part.strip().isdecimal() for part in text.split(",")):
        problem = f"pp_layer_partition={printable(text, 30)!r} is not a list of counts of layers"
        raise InvalidInputError(log.called, problem, RESTART)
    return tuple(map(int, text.split(",")))


def _share(log: ServerLog) -> float:
    text = log.flags.get("gpu_memory_utilization", "")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        problem = f"gpu_memory_utilization={printable(text, 30)!r} is not a fraction"
        raise InvalidInputError(log.called, problem, RESTART)
    return share


def planned_bytes(sized: Sized, offloading_size: float | None) -> dict[str, int]:
    """The rows of a log as planned, by name."""
    rows = {name: getattr(sized, name) for name in ROWS if name != "kv_offload"}
    if offloading_size:
        chunk = chunk_bytes(sized.block_bytes)
        rows["kv_offload"] = round(offloading_size * GIB) // chunk * chunk
    return rows


def num_groups(spec: ModelSpec, inputs: EngineInputs) -> int:
    """Groups of layers that share a block table."""
    return len(group_sizes(spec, with_states=inputs.states_in_blocks))


def num_tokens(spec: ModelSpec, inputs: EngineInputs, num_blocks: int) -> int:
    """Tokens of a pool as vLLM logs them from 0.20.1 on: the context, times the requests of it that fit at once."""
    return int(num_blocks / blocks_per_request(spec, inputs) * inputs.max_model_len)


def rows_of(
    log: ServerLog, spec: ModelSpec, drafts: Speculation
) -> tuple[tuple[ComponentRow, ...], tuple[ComponentRow, ...], list[str]]:
    """(rows from the inputs alone, rows given the logged pool, notes on ranks)."""
    inputs = inputs_of(log, spec)
    outside = log.first("non_torch_bytes")
    non_torch = 0 if outside is None else outside.count

    def sized(num_blocks: int | None) -> list[Sized]:
        """Each stage's prediction, with a number of blocks that all of them have; None: what the least has room for."""
        stages = [replace(inputs, stage=stage) for stage in range(inputs.pipeline_parallel_size)]
        if num_blocks is None:
            sizes = [predict(spec, stage, non_torch=non_torch, speculation=drafts) for stage in stages]
            num_blocks = min(stage.num_blocks for stage in sizes)
            if log.text("engine_device") == "cpu":
                num_blocks = min(_most_blocks(spec, inputs), *_host_blocks(log, sizes, inputs))
        bound = [replace(stage, num_blocks=num_blocks) for stage in stages]
        return [predict(spec, stage, non_torch=non_torch, speculation=drafts) for stage in bound]

    offloading = float(log.flags.get("kv_offloading_size", "0"))
    plans = sized(inputs.num_blocks)
    planned = [planned_bytes(plan, offloading) for plan in plans]
    tokens = num_tokens(spec, inputs, plans[0].num_blocks)
    by_stage = [rows | {"blocks": plans[0].num_blocks, "tokens": tokens} for rows in planned]
    figures, values, notes = _figures(log, by_stage, inputs.tensor_parallel_size)
    predictions: dict[str, Prediction] = {name: Prediction(value, "formula") for name, value in values.items()}
    states_room = log.text("engine_device") != "cpu" or log.first("host_free_bytes") is not None
    if inputs.num_blocks is None and not states_room and not _is_plenty(spec, inputs, drafts):
        predictions |= {name: Prediction(None, why=HOST) for name in ("kv_cache", "blocks", "tokens")}
    rows = reconcile(predictions, Measurement(log.called, tuple(figures)))
    pool = log.least("num_blocks")
    if pool is None:
        return rows, (), notes
    given_tokens = num_tokens(spec, inputs, pool.count)
    given = [{"kv_cache": plan.kv_cache, "tokens": given_tokens} for plan in sized(pool.count)]
    figures, values, _ = _figures(log, given, inputs.tensor_parallel_size)
    of_pool = {name: Prediction(value, "formula") for name, value in values.items()}
    return rows, reconcile(of_pool, Measurement(log.called, tuple(figures))), notes


def _host_blocks(log: ServerLog, sizes: list[Sized], inputs: EngineInputs) -> list[int]:
    """Most blocks of each rank on a CPU: its part of the budget, and of half the memory that was free."""
    parts = log.by_rank("host_ranks")
    blocks = [stage.num_blocks for stage in sizes]
    for rank, free in log.by_rank("host_free_bytes").items():
        sized = sizes[_stage(rank, inputs.tensor_parallel_size, len(sizes))]
        ranks = max(1, parts[rank].count)
        blocks += [sized.num_blocks // ranks, free.count // 2 // ranks // sized.block_bytes]
    return blocks


def _most_blocks(spec: ModelSpec, inputs: EngineInputs) -> int:
    return 1 + inputs.max_num_seqs * cdiv(inputs.max_model_len, inputs.block_size) * num_groups(spec, inputs)


def _is_plenty(spec: ModelSpec, inputs: EngineInputs, drafts: Speculation) -> bool:
    """True if the pool of a CPU is small beside what the budget leaves to each rank."""
    ranks = inputs.tensor_parallel_size * inputs.pipeline_parallel_size
    num_blocks = predict(spec, inputs, speculation=drafts).num_blocks // ranks
    return num_blocks > 2 * _most_blocks(spec, inputs)


def _figures(
    log: ServerLog, by_stage: Sequence[Mapping[str, int]], tp: int
) -> tuple[list[Figure], dict[str, int], list[str]]:
    """(logged figures, each of the rank that differs most from its plan; that rank's plan by name; notes on ranks)."""
    figures, planned, notes = list[Figure](), dict[str, int](), list[str]()
    for name in by_stage[0]:
        fact = {"blocks": "num_blocks", "tokens": "kv_tokens"}.get(name, f"{name}_bytes")
        readings = {
            rank: (reading, by_stage[_stage(rank, tp, len(by_stage))]) for rank, reading in log.by_rank(fact).items()
        }
        if name == "lora" and log.flags.get("max_loras") == "0" and not readings:
            continue
        unit = name if name in ("blocks", "tokens") else "bytes"
        if not readings:
            planned[name] = by_stage[0][name]
            figures.append(Figure(name, unit, None, note=not_in(log.called)))
            continue
        errors = {rank: abs(reading.count - plan[name]) for rank, (reading, plan) in readings.items()}
        worst = max(errors, key=lambda rank: errors[rank])
        reading, plan = readings[worst]
        planned[name] = plan[name]
        figures.append(Figure(name, unit, reading.count))
        if len({reading.count for reading, _ in readings.values()}) > 1:
            values = ", ".join(f"{reading.count:,} on {rank}" for rank, (reading, _) in readings.items())
            notes.append(f"the ranks differ in {name} ({values}); {worst} is compared, with its own plan")
    ranks, size = log.by_rank("weights_bytes"), tp * len(by_stage)
    if 0 < len(ranks) < size:
        notes.append(f"{len(ranks)} of {size} ranks in the log; the others are not compared")
    return figures, planned, notes


def _stage(rank: str, tp: int, num_stages: int) -> int:
    """The stage of a rank, by its name in the log."""
    number = rank.removeprefix("rank ")
    return min(num_stages - 1, int(number) // tp) if number.isdecimal() else 0
