"""The bundled engine's start-up log compared with the planner's rules for it: the same inputs, predicted again."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
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
from kvplan.servers.logs.log import COUNT, FACTS, ServerLog
from kvplan.servers.logs.measurement import ComponentRow, Figure, Measurement, Prediction, not_in, reconcile
from kvplan.sizing.layout import cdiv

RESTART: Final = "restart the server with this release of kvplan, and save its log or page again"
HOST: Final = "bounded by the host's free memory, which is not stated"
COUNTS: Final = (
    "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size",
    "pipeline_parallel_size", "max_loras", "max_lora_rank",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Start:
    """What the engine logged when it started.

    called   the log in messages
    flags    its arguments, as text
    counts   sizes in bytes and other numbers, by name and rank; facts: what else it says, as text
    """

    called: Literal["log", "page"]
    flags: Mapping[str, str]
    counts: Mapping[str, Mapping[str, int]]
    facts: Mapping[str, str]

    def settings(self, total: int) -> EngineInputs:
        """The settings as inputs, on a device of so many bytes: a start that failed may not have logged them."""
        counts: dict[str, Any] = {name: self._count(name) for name in COUNTS}
        dtype, kv_dtype = self.flags.get("dtype", ""), self.flags.get("kv_cache_dtype", "")
        if dtype not in ("float32", "bfloat16", "float16") or not kv_dtype:
            raise self._wrong("dtype", dtype, "one of the engine's")
        return EngineInputs(
            total=total,
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            gpu_memory_utilization=self._share("gpu_memory_utilization"),
            num_blocks=self._count("num_gpu_blocks_override") if "num_gpu_blocks_override" in self.flags else None,
            backend="triton" if self.facts.get("backend") == "triton" else "torch",
            batches_in_flight=self.first("batches_in_flight", 1),
            fully_sharded_loras=self.flags.get("fully_sharded_loras") == "True",
            partition=self._partition("pp_layer_partition"),
            states_in_blocks=self.flags.get("states_in_blocks") == "True",
            **counts,
        )

    def inputs(self, spec: ModelSpec) -> EngineInputs:
        """The settings of a start that measured its memory, for the model that it served."""
        if "engine_device" not in self.facts or "total_bytes" not in self.counts:
            raise InvalidInputError(
                self.called, "ends before the engine measured its memory", "name the log of a start"
            )
        inputs = self.settings(self.first("total_bytes"))
        counts, stages = inputs.partition, inputs.pipeline_parallel_size
        if counts and (len(counts) != stages or sum(counts) != spec.num_layers):
            text = ",".join(map(str, counts))
            problem = f"has pp_layer_partition={text!r}, which is not of {stages} stages and {spec.num_layers} layers"
            raise InvalidInputError(self.called, problem, "name the model that was served with --model")
        return inputs

    def first(self, name: str, missing: int = 0) -> int:
        return next(iter(self.counts.get(name, {}).values()), missing)

    def _wrong(self, name: str, text: str, kind: str) -> InvalidInputError:
        return InvalidInputError(self.called, f"{name}={printable(text, 30)!r} is not {kind}", RESTART)

    def _count(self, name: str) -> int:
        text = self.flags.get(name, "")
        if not text.isdecimal() or len(text) > 18:
            raise self._wrong(name, text, "a count")
        return int(text)

    def _partition(self, name: str) -> tuple[int, ...]:
        text = self.flags.get(name)
        if text is None:
            return ()
        if len(text) > 1000 or not all(part.strip().isdecimal() for part in text.split(",")):
            raise self._wrong(name, text, "a list of counts of layers")
        return tuple(map(int, text.split(",")))

    def _share(self, name: str) -> float:
        text = self.flags.get(name, "")
        with suppress(ValueError):
            if 0 < float(text) <= 1:
                return float(text)
        raise self._wrong(name, text, "a fraction")


def start_of(log: ServerLog) -> Start:
    """Read a log once; refuse one, or a page that repeats one, whose lines this kvplan cannot read."""
    counts, facts = dict[str, dict[str, int]](), dict[str, str]()
    for reading in log.readings:
        facts.setdefault(reading.fact, reading.text)
        if FACTS[reading.fact] == COUNT:
            counts.setdefault(reading.fact, {}).setdefault(reading.rank, reading.count)
    form = log.flags.get("log_form")
    if form is None:
        problem = "is of kvplan's engine and has none of its arguments"
        if "before" in facts:
            problem = "was written by kvplan's engine before its lines could be read"
        raise InvalidInputError(log.called, problem, RESTART)
    if form != str(FORM):
        written_by = printable(log.flags.get("kvplan_release", "another"), 30)
        problem = f"has form {printable(form, 20)} of the engine's lines; this kvplan reads form {FORM}"
        raise InvalidInputError(log.called, problem, f"read it with the release that wrote it ({written_by})")
    return Start(log.called, log.flags, counts, facts)


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


Rows = tuple[ComponentRow, ...]


def rows_of(start: Start, inputs: EngineInputs, spec: ModelSpec, drafts: Speculation) -> tuple[Rows, Rows, list[str]]:
    """(rows from the inputs alone, rows given the logged pool, notes on ranks)."""

    def sized(num_blocks: int | None) -> list[Sized]:
        """Each stage's prediction with so many blocks; None: as each has room for."""
        stages = [replace(inputs, stage=stage, num_blocks=num_blocks) for stage in range(inputs.pipeline_parallel_size)]
        outside = start.first("non_torch_bytes")
        return [predict(spec, stage, non_torch=outside, speculation=drafts) for stage in stages]

    is_cpu, plans = start.facts["engine_device"] == "cpu", sized(inputs.num_blocks)
    if inputs.num_blocks is None:
        blocks = min(plan.num_blocks for plan in plans)
        if is_cpu:
            blocks = min(_most_blocks(spec, inputs), *_host_blocks(start, plans, inputs))
        plans = sized(blocks)
    offloading, num_blocks = float(start.flags.get("kv_offloading_size", "0")), plans[0].num_blocks
    counted = {"blocks": num_blocks, "tokens": num_tokens(spec, inputs, num_blocks)}
    figures, predictions, notes = _figures(start, [planned_bytes(plan, offloading) | counted for plan in plans], inputs)
    is_bounded = inputs.num_blocks is not None or not is_cpu or "host_free_bytes" in start.counts
    if not is_bounded and not _is_plenty(spec, inputs, drafts):
        predictions |= {name: Prediction(None, why=HOST) for name in ("kv_cache", "blocks", "tokens")}
    rows, pool = reconcile(predictions, figures), min(start.counts.get("num_blocks", {}).values(), default=None)
    if pool is None:
        return rows, (), notes
    tokens = num_tokens(spec, inputs, pool)
    given = [{"kv_cache": plan.kv_cache, "tokens": tokens} for plan in sized(pool)]
    figures, predictions, _ = _figures(start, given, inputs)
    return rows, reconcile(predictions, figures), notes


def _host_blocks(start: Start, sizes: list[Sized], inputs: EngineInputs) -> list[int]:
    """Most blocks of each rank on a CPU: its part of the budget, and of half the memory that was free."""
    blocks = [stage.num_blocks for stage in sizes]
    for rank, free in start.counts.get("host_free_bytes", {}).items():
        sized = sizes[_stage(rank, inputs)]
        ranks = max(1, start.counts["host_ranks"][rank])
        blocks += [sized.num_blocks // ranks, free // 2 // ranks // sized.block_bytes]
    return blocks


def _most_blocks(spec: ModelSpec, inputs: EngineInputs) -> int:
    return 1 + inputs.max_num_seqs * cdiv(inputs.max_model_len, inputs.block_size) * num_groups(spec, inputs)


def _is_plenty(spec: ModelSpec, inputs: EngineInputs, drafts: Speculation) -> bool:
    """True if the pool of a CPU is small beside what the budget leaves to each rank."""
    ranks = inputs.tensor_parallel_size * inputs.pipeline_parallel_size
    num_blocks = predict(spec, inputs, speculation=drafts).num_blocks // ranks
    return num_blocks > 2 * _most_blocks(spec, inputs)


def _figures(
    start: Start, by_stage: Sequence[Mapping[str, int]], inputs: EngineInputs
) -> tuple[Measurement, dict[str, Prediction], list[str]]:
    """(logged figures, each of the rank that differs most from its plan; that rank's plan by name; notes on ranks)."""
    figures, planned, notes = list[Figure](), dict[str, Prediction](), list[str]()
    for name in by_stage[0]:
        logged = start.counts.get({"blocks": "num_blocks", "tokens": "kv_tokens"}.get(name, f"{name}_bytes"), {})
        if name == "lora" and start.flags.get("max_loras") == "0" and not logged:
            continue
        plans = {rank: by_stage[_stage(rank, inputs)][name] for rank in logged}
        worst = max(logged, key=lambda rank: abs(logged[rank] - plans[rank]), default=None)
        planned[name] = Prediction(by_stage[0][name] if worst is None else plans[worst], "formula")
        unit, missing = name if name in ("blocks", "tokens") else "bytes", "" if logged else not_in(start.called)
        figures.append(Figure(name, unit, None if worst is None else logged[worst], note=missing))
        if len(set(logged.values())) > 1:
            values = ", ".join(f"{count:,} on {rank}" for rank, count in logged.items())
            notes.append(f"the ranks differ in {name} ({values}); {worst} is compared, with its own plan")
    ranks, size = len(start.counts.get("weights_bytes", {})), inputs.tensor_parallel_size * len(by_stage)
    if 0 < ranks < size:
        notes.append(f"{ranks} of {size} ranks in the log; the others are not compared")
    return Measurement(start.called, tuple(figures)), planned, notes


def _stage(rank: str, inputs: EngineInputs) -> int:
    """The stage of a rank, by its name in the log."""
    number = rank.removeprefix("rank ")
    stages = inputs.pipeline_parallel_size
    return min(stages - 1, int(number) // inputs.tensor_parallel_size) if number.isdecimal() else 0
