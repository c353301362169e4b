"""The bundled engine as a backend: its memory beside the plan's, as its start logs them and /metrics has them."""

from typing import Final

from engine import Engine
from kvplan.core.units import GIB
from kvplan.models.spec import ModelSpec
from kvplan.serve.ranks import Leader
from kvplan.serve.start import Start, labels
from kvplan.serve.worker import Hooks
from kvplan.servers.bundled.rules import EngineInputs, Speculation, predict
from kvplan.servers.vllm.tiers import PAGE
from kvplan.sizing.layout import cdiv

ROWS: Final = ("weights", "buffers", "activations", "kv_cache")


def start_of(engine: Engine) -> Start:
    """What is known of a running engine, and the backend that it is."""
    facts = (cache_config(engine), [*measured_log(engine), *rows(engine)], engine.spec.name, engine.spec.vocab_size)
    if engine.config.tensor_parallel_size == 1:
        return Start(engine, *facts, Hooks(close=engine.close), tiers=engine.tiers)
    leader = Leader(engine)
    return Start(leader, *facts, Hooks(idle=leader.idle, close=leader.close))


def inputs_of(engine: Engine) -> EngineInputs:
    """What the engine was given, as the planner's rules for it want it."""
    config, memory, device = engine.config, engine.memory_report(), engine.device.type
    dtype = engine.spec.dtype if config.dtype == "auto" else config.dtype
    return EngineInputs(
        total=memory.total,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        block_size=config.block_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        num_blocks=memory.num_blocks,  # how many there are is what was measured: their bytes are predicted
        backend="torch" if device == "cpu" or config.backend == "torch" else "triton",
        batches_in_flight=config.batches_in_flight(device),
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        fully_sharded_loras=config.fully_sharded_loras,
    )


def draft_of(engine: Engine) -> ModelSpec | None:
    """The model that guesses beside the engine's."""
    return next((companion.spec for companion in engine.runner.companions), None)


def num_tokens(engine: Engine) -> int:
    """Tokens that the pool holds, counted as vLLM logs them."""
    return engine.memory_report().num_blocks // len(engine.runner.groups) * engine.config.block_size


def cache_config(engine: Engine) -> dict[str, str]:
    config = engine.config
    return labels(
        {
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


def measured_log(engine: Engine) -> list[str]:
    """What start-up took, measured, in the words of a server's log."""
    memory = engine.memory_report()
    return [
        f"Starting to load model {engine.spec.name}...",
        f"Using max model len {engine.max_model_len}",
        f"Chunked prefill is enabled with max_num_batched_tokens={engine.config.max_num_batched_tokens}.",
        f"Model loading took {(memory.weights + memory.buffers + memory.lora) / GIB:.6f} GiB memory and 0.00 seconds",
        f"Available KV cache memory: {memory.kv_cache / GIB:.6f} GiB",
        f"GPU KV cache size: {num_tokens(engine):,} tokens",
    ]


def rows(engine: Engine) -> list[str]:
    """The plan beside it, in bytes."""
    memory = engine.memory_report()
    drafts = Speculation(engine.config.rows_per_seq - 1, draft_of(engine))
    predicted = predict(engine.spec, inputs_of(engine), non_torch=memory.non_torch, speculation=drafts)
    lines = [f"{'bytes':<12} {'planned':>16} {'measured':>16}"]
    for name in (*ROWS, *["lora"] * (engine.config.max_loras > 0)):
        lines.append(f"{name:<12} {getattr(predicted, name):>16,} {getattr(memory, name):>16,}")
    if engine.tiers is not None:
        chunk = cdiv(predicted.kv_cache // memory.num_blocks, PAGE) * PAGE  # a block of all layers, in whole pages
        planned = round((engine.config.kv_offloading_size or 0) * GIB) // chunk * chunk
        lines.append(f"{'kv_offload':<12} {planned:>16,} {engine.tiers.host.memory.nbytes:>16,}")
    return lines
