"""Fills in what a config leaves open, for a model and this machine: device, length, weights, scheduling, adapters."""

from pathlib import Path

import torch

from engine.adapters import Adapters
from engine.config import EngineConfig
from engine.draft_rules import NO_DRAFTS, draft_rules
from engine.extensions import ExtendedConfig
from engine.kv_cache import is_state
from engine.loader import Checkpoint, RandomWeights, WeightSource
from engine.state_slots import are_in_blocks
from engine.tp import local_rank
from kvplan.core.errors import EnvironmentProblem, SettingError, UsageError
from kvplan.models.spec import ModelSpec


def device(name: str, num_ranks: int = 1) -> torch.device:
    """The configured device; with several ranks, each uses the GPU of its own local rank."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        return _gpu(device.index if num_ranks == 1 else local_rank())
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device: the engine runs on cpu and cuda ({name})")
    return device


def _gpu(index: int | None) -> torch.device:
    """A GPU with its number: "cuda" alone is the current one."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem("device: no CUDA GPU is usable here; use device cpu")
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise EnvironmentProblem(f"device: cuda:{index} is not there ({count} GPUs: cuda:0 to cuda:{count - 1})")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def max_model_len(spec: ModelSpec, stated: int | None) -> int:
    """The longest request: what a config names, or what the model has positions for."""
    if stated is not None and stated > spec.context_limit:
        problem = f"is more than the positions of {spec.name} ({stated} of {spec.context_limit})"
        raise SettingError("", ("max_model_len",), problem, "lower it")
    return stated or spec.max_model_len


def weight_source(directory: Path | None, config: EngineConfig, device: torch.device) -> WeightSource:
    """A checkpoint's weights or random ones."""
    if config.load_format == "dummy":
        return RandomWeights(config.seed, device)
    if directory is None:
        raise UsageError("load_format: a ModelSpec has no weights; give a directory, or load_format='dummy'")
    return Checkpoint(directory)


def scheduler_config(config: EngineConfig, max_model_len: int, batch_queue_depth: int) -> ExtendedConfig:
    """The scheduler's part of a config."""
    drafts = config.speculative_config
    return ExtendedConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.num_seqs,
        max_model_len=max_model_len,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        reserve_full_prompt=config.reserve_full_prompt,
        watermark=config.watermark,
        batch_queue_depth=batch_queue_depth,
        pipeline_stages=config.pipeline_parallel_size,
        allocator=config.allocator,
        max_loras=config.max_loras,
        drafts=NO_DRAFTS if drafts is None else draft_rules(drafts.method, drafts.num_speculative_tokens),
    )


def check_states(spec: ModelSpec, config: EngineConfig) -> None:
    """Refuse what recurrent states are not combined with; nothing for a model without them.

    Raises UnsupportedModelError for a model that the engine cannot run at all.
    """
    if not any(map(is_state, spec.layers)) or not spec.decoder.layers:  # others are refused where layers are grouped
        return
    for name, is_set, cure in (
        ("speculative_config", config.speculative_config is not None, "remove it"),
        ("max_loras", bool(config.max_loras), "run it without adapters"),
        ("tensor_parallel_size", config.tensor_parallel_size > 1, "use 1"),
        ("pipeline_parallel_size", config.pipeline_parallel_size > 1, "use 1"),
    ):
        if is_set:
            problem = f"is not combined with the recurrent states of {spec.name}"
            raise SettingError("", (name,), problem, cure)
    if config.kv_offloading_size and not are_in_blocks(spec, config):
        problem = f"is not combined with the recurrent states of {spec.name} unless prefixes are cached"
        raise SettingError("", ("kv_offloading_size",), problem, "enable prefix caching or remove it")


def adapters(config: EngineConfig) -> Adapters:
    """Adapter slots, if the config asks for them."""
    if not config.max_loras:
        return Adapters()
    from engine.lora import LoraSlots

    return LoraSlots(config.max_loras, config.max_lora_rank, config.fully_sharded_loras, config.max_num_batched_tokens)
