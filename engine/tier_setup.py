"""KV beyond the device of a running engine: what its config asks for, and what the files of its KV belong to."""

import hashlib
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.disk_tier import DiskTier
from engine.host_tier import HostTier, chunk_bytes
from engine.kv_cache import KVCache, group_layers
from engine.memory import host_memory
from engine.model_runner import DTYPES, ModelRunner
from engine.state_slots import are_in_blocks
from engine.tiers import Tiers
from engine.tp import TensorParallel
from kvplan.core.errors import EnvironmentProblem, SettingError
from kvplan.models.spec import ModelSpec

GIB = 2**30


def disk_of(spec: ModelSpec, config: EngineConfig, tp: TensorParallel, directory: Path | None) -> DiskTier | None:
    """The files of KV that a config asks for, locked; None: no files. Before the model is loaded, which takes long.

    Raises SettingError for a size that holds nothing, EnvironmentProblem for a directory that cannot be had.
    """
    if config.kv_offloading_dir is None:
        return None
    groups = group_layers(spec, config.block_size, with_states=are_in_blocks(spec, config))
    dtype = DTYPES[spec.dtype if config.dtype == "auto" else config.dtype]
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
    block = KVCache(spec, groups, 1, config.block_size, kv_dtype, "meta", tp, config.kv_scale)
    layout = (
        replace(spec, name="", source=""),
        [tuple(tensor.shape[1:]) for tensor in block.tensors],
        [group.rule for group in groups],
        str(dtype),
        str(kv_dtype),
        config.kv_scale,
    )
    text = repr((identity(directory, config), *layout))
    folder = Path(config.kv_offloading_dir) / hashlib.sha256(text.encode()).hexdigest()[:32]
    return DiskTier(folder, round((config.kv_offloading_disk_size or 0) * GIB), chunk_bytes(block.num_bytes))


def tiers_of(config: EngineConfig, runner: ModelRunner, disk: DiskTier | None) -> Tiers[HostTier] | None:
    """What a config asks for, with the files; None: no KV beyond the device.

    Raises SettingError for a size that holds nothing, EnvironmentProblem where the host does not do.
    """
    if config.kv_offloading_size is None:
        return None
    size = chunk_bytes(runner.memory.block_bytes)
    capacity = round(config.kv_offloading_size * GIB)
    num_chunks = capacity // size
    if not num_chunks:
        raise SettingError("", ("kv_offloading_size",), f"of {capacity:,} bytes holds no chunk of {size:,}", "raise it")
    available = host_memory()[0]
    if num_chunks * size > available:
        raise EnvironmentProblem(
            f"kv_offloading_size: {num_chunks * size:,} bytes are more than the host's {available:,} free ones; "
            "lower it"
        )
    host = HostTier(runner.kv.tensors, num_chunks, disk=disk)
    groups = tuple(group.rule for group in runner.groups)
    return Tiers(groups, host, num_chunks, size, enable_prefix_caching=config.enable_prefix_caching, files=disk)


def identity(directory: Path | None, config: EngineConfig) -> str:
    """Names, sizes and both ends of the weight files, which a model fine-tuned from it has of its own; or the seed."""
    if directory is None or config.load_format == "dummy":
        return f"seed {config.seed}"
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()


ENDS = 65_536  # bytes of each end of a weight file
