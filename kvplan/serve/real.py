"""The bundled engine as a backend: measured and planned memory, for the start-up log and /metrics."""

import os
from itertools import chain
from typing import Any, Final

import torch

from engine import Engine, EngineConfig
from engine.block_manager import Group
from engine.state_slots import are_in_blocks, with_room_for_states
from engine.states import MambaGroup
from kvplan.hardware.nvml import DeviceError, open_nvml
from kvplan.models.spec import ModelSpec
from kvplan.serve.ranks import Leader
from kvplan.serve.start import Start, labels
from kvplan.serve.worker import Hooks
from kvplan.servers.bundled import log_wordings
from kvplan.servers.bundled.log_rows import planned_bytes
from kvplan.servers.bundled.rules import EngineInputs, Speculation, predict
from kvplan.servers.logs.metrics import SERVED_BY


def start_of(engine: Engine, *opening: str) -> Start:
    """Return a running engine as a ready backend, with its start-up facts; `opening`: log lines before those."""
    logs = start_logs(engine)
    facts = (cache_config(engine), logs[0], engine.spec.name, engine.spec.vocab_size)
    whole = (*opening, *chain.from_iterable(logs))
    fallbacks = engine.memory_report().fallbacks
    if engine.tp.num_ranks == 1:
        hooks = Hooks(close=engine.close)
        return Start(engine, *facts, hooks, tiers=engine.tiers, whole_log=whole, fallbacks=fallbacks)
    leader = Leader(engine)
    hooks = Hooks(idle=leader.idle, close=leader.close)
    return Start(leader, *facts, hooks, whole_log=whole, fallbacks=fallbacks)


SHARED: Final = """
    block_size max_num_batched_tokens gpu_memory_utilization tensor_parallel_size pipeline_parallel_size max_loras
    max_lora_rank fully_sharded_loras
"""  # by the same name in both


def inputs_of(engine: Engine) -> EngineInputs:
    """Return the engine's settings as inputs of the planner's rules."""
    shared: dict[str, Any] = {name: getattr(engine.config, name) for name in SHARED.split()}
    config, memory, device = engine.config, engine.memory_report(), engine.device.type
    dtype = engine.spec.dtype if config.dtype == "auto" else config.dtype
    return EngineInputs(
        total=memory.total,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.num_seqs,
        num_blocks=memory.num_blocks,  # the number is measured, their bytes are predicted
        backend="torch" if device == "cpu" or config.backend == "torch" else "triton",
        batches_in_flight=config.batches_in_flight(device),
        stage=engine.tp.stage,
        partition=tuple(map(int, (config.pp_layer_partition or "").split(","))) if config.pp_layer_partition else (),
        states_in_blocks=are_in_blocks(engine.spec, config),
        **shared,
    )


def draft_of(engine: Engine) -> ModelSpec | None:
    """Return the spec of the engine's draft model, or None."""
    return next((companion.spec for companion in engine.runner.companions), None)


def num_tokens(engine: Engine) -> int:
    """Return the pool's capacity in tokens as vLLM 0.33 logs it: the context, times the requests of it that fit."""
    return int(engine.memory_report().num_blocks / blocks_per_request(engine) * engine.max_model_len)


def blocks_per_request(engine: Engine) -> int:
    """Return the blocks that a request of the full context is charged."""
    rules, limits = [group.rule for group in engine.runner.groups], engine.scheduler.config
    in_flight = limits.max_num_batched_tokens * limits.batch_queue_depth
    return sum(charged(rule, engine.max_model_len, in_flight) for rule in rules)


def charged(rule: Group, max_model_len: int, max_in_flight_tokens: int) -> int:
    """Return a group's part; a state in a block leaves the one before it, which is found in the cache, in another."""
    return rule.max_blocks_held(max_model_len, max_in_flight_tokens) + isinstance(rule, MambaGroup)


def cache_config(engine: Engine) -> dict[str, str]:
    config = engine.config
    return labels(
        {
            SERVED_BY: "kvplan",
            "block_size": config.block_size,
            "user_specified_block_size": True,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_offloading_size": config.kv_offloading_size and round(config.kv_offloading_size, 6),
            "num_gpu_blocks": engine.memory_report().num_blocks,
            "num_gpu_blocks_override": config.num_blocks,
            "kv_cache_size_tokens": num_tokens(engine),
        }
    )


def arguments_of(spec: ModelSpec, config: EngineConfig, called: str, release: str) -> dict[str, Any]:
    """The arguments that determine the memory, resolved, before a model is loaded."""
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    speculative = config.speculative_config
    draft = None if speculative is None else speculative.model
    resolved = {
        "kvplan_release": release,
        "model": called,
        "dtype": dtype,
        "kv_cache_dtype": dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "block_size": with_room_for_states(spec, config).block_size,
        "states_in_blocks": are_in_blocks(spec, config) or None,
        "max_model_len": config.max_model_len or spec.max_model_len,
        "max_num_seqs": config.num_seqs,
        "num_gpu_blocks_override": config.num_blocks,
        "num_speculative_tokens": None if speculative is None else speculative.num_speculative_tokens,
        "draft_model": draft.name if isinstance(draft, ModelSpec) else draft and str(draft),
    }
    return {name: resolved[name] if name in resolved else getattr(config, name) for name in LOGGED.split()}


LOGGED: Final = """
    kvplan_release model device dtype kv_cache_dtype block_size states_in_blocks max_model_len max_num_seqs
    max_num_batched_tokens gpu_memory_utilization num_gpu_blocks_override tensor_parallel_size pipeline_parallel_size
    pp_layer_partition enable_prefix_caching max_loras max_lora_rank fully_sharded_loras num_speculative_tokens
    draft_model kv_offloading_size
"""


def start_logs(engine: Engine) -> list[list[str]]:
    """Return the lines of every rank; all ranks call it."""
    return engine.tp.gather(start_log(engine))


def start_log(engine: Engine) -> list[str]:
    """Return this rank's lines: the device, planned and measured bytes, and the pool."""
    memory, inputs = engine.memory_report(), inputs_of(engine)
    drafts = Speculation(engine.config.rows_per_seq - 1, draft_of(engine))
    sized = predict(engine.spec, inputs, non_torch=memory.non_torch, speculation=drafts)
    planned = planned_bytes(sized, engine.config.kv_offloading_size)
    measured = {name: getattr(memory, name) for name in planned if name != "kv_offload"}
    if engine.tiers is not None:
        measured["kv_offload"] = engine.tiers.host.memory.nbytes
    if not engine.config.max_loras:
        del measured["lora"]
    device, host = str(engine.device), engine.runner.host
    gpu = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None
    lines = [
        log_wordings.device_line(device, gpu, inputs.backend, inputs.batches_in_flight, memory.total, memory.non_torch),
        *([] if host is None else [log_wordings.host_line(host.free, host.ranks)]),
        *([log_wordings.others_line(size)] if (size := held_by_others(engine.device)) else []),
        *(log_wordings.fallback_line(name, why) for name, why in memory.fallbacks.items()),
        *(log_wordings.row_line(name, planned[name], size) for name, size in measured.items()),
        log_wordings.pool_line(memory.num_blocks, num_tokens(engine)),
    ]
    ranks = engine.tp
    return [log_wordings.prefix(ranks.stage * ranks.size + ranks.rank, ranks.num_ranks) + text for text in lines]


def held_by_others(device: torch.device) -> int:
    """Bytes that other processes hold on a GPU, where its driver lists them and this process; else 0."""
    if device.type != "cuda":
        return 0
    try:
        with open_nvml() as nvml:
            sample = nvml.visible_device(device.index or 0).sample(os.getpid())
    except DeviceError:
        return 0
    return 0 if sample.process_used is None else sample.others_used or 0
