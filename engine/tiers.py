"""KV beyond the device, put together: the connector that decides, and the memory and files that it is copied to."""

import hashlib
from dataclasses import replace
from pathlib import Path

from engine.chunk_pool import chunk_pool
from engine.config import EngineConfig
from engine.connector import Transfers
from engine.disk_tier import DiskTier
from engine.host_tier import HostTier, chunk_bytes
from engine.loading import LoadingScheduler
from engine.memory import host_memory
from engine.model_runner import ModelRunner
from engine.offload import OffloadConnector
from engine.scheduler import PrefixCacheStats, SchedulerConfig
from kvplan.core.errors import EnvironmentProblem, UsageError

GIB = 2**30
REST_S = 0.005  # how long a step with nothing to run waits for a copy


class Tiers:
    """Host memory, and perhaps files, that prompts' blocks are kept in."""

    @classmethod
    def of(cls, config: EngineConfig, runner: ModelRunner, directory: Path | None) -> "Tiers | None":
        """What a config asks for; None: no KV beyond the device."""
        return None if config.kv_offloading_size is None else cls(config, runner, identity(directory, config))

    def __init__(self, config: EngineConfig, runner: ModelRunner, model: str) -> None:
        """model  what the KV belongs to: files of another model are not read

        Raises UsageError for sizes that hold nothing, EnvironmentProblem where the host or the disk does not do.
        """
        assert config.kv_offloading_size is not None
        self.groups = groups = tuple(group.rule for group in runner.groups)
        size = chunk_bytes(runner.memory.block_bytes)
        capacity = round(config.kv_offloading_size * GIB)
        num_chunks = capacity // size
        if not num_chunks:
            raise UsageError(f"kv_offloading_size: {capacity:,} bytes hold no chunk of {size:,}; raise it")
        available = host_memory()[0]
        if num_chunks * size > available:
            raise EnvironmentProblem(
                f"kv_offloading_size: {num_chunks * size:,} bytes are more than the host's {available:,} free ones; "
                "lower it"
            )
        self.disk = None
        if config.kv_offloading_dir is not None:
            disk_size = round((config.kv_offloading_disk_size or 0) * GIB)
            folder = Path(config.kv_offloading_dir) / fingerprint(model, runner, config)
            self.disk = DiskTier(folder, disk_size, size)
        self.host = HostTier(runner.kv.tensors, num_chunks, disk=self.disk)
        self.connector = OffloadConnector(
            groups, chunk_pool(num_chunks), enable_prefix_caching=config.enable_prefix_caching, files=self.disk
        )
        self.size = num_chunks * size

    def scheduler(self, config: SchedulerConfig, num_blocks: int) -> LoadingScheduler:
        """The scheduler that asks the connector; it is told of copies by take_in()."""
        self._scheduler = LoadingScheduler(config, num_blocks, self.groups, self.connector)
        return self._scheduler

    @property
    def is_busy(self) -> bool:
        """Whether a copy is under way, or ordered."""
        return self.connector.is_busy

    def begin(self, transfers: Transfers) -> None:
        """Copy what a step orders, beside it."""
        self.host.begin(transfers)

    def take_in(self, *, is_idle: bool) -> None:
        """Tell the scheduler which copies are done; with nothing to run, wait a little for one."""
        if is_idle:
            self.host.rest(REST_S)
        self._scheduler.complete(*self.host.finished())

    @property
    def scheduler_stats(self) -> PrefixCacheStats:
        """Tokens looked up beyond the device, and those that were there."""
        return self._scheduler.external_cache_stats

    @property
    def usage(self) -> float:
        """Share of the host's chunks that are being copied, 0 to 1, as vLLM counts it."""
        pool = self.connector.pool
        return (pool.num_resident - pool.num_evictable) / pool.num_chunks

    def close(self) -> None:
        """Finish all copies, also to files."""
        while self.connector.has_jobs:
            self.host.begin(self.connector.take_orders())
            self.take_in(is_idle=True)
        self.host.close()


def fingerprint(model: str, runner: ModelRunner, config: EngineConfig) -> str:
    """What KV can be shared by: the model, and how its blocks are laid out."""
    shapes = [tuple(tensor.shape[1:]) for tensor in runner.kv.tensors]
    rules = [group.rule for group in runner.groups]
    text = repr(
        (
            model,
            replace(runner.spec, name="", source=""),
            shapes,
            rules,
            str(runner.dtype),
            str(runner.kv_dtype),
            config.kv_scale,
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
