"""Flags that affect a server's throughput, and their candidate values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Final

from kvplan.planning.plan import Request
from kvplan.servers.base import abilities_of, server_of
from kvplan.servers.words.arguments import flags_of


@dataclass(frozen=True, slots=True)
class Setting:
    """Flags of a server, and the number of replicas on the GPUs; None: the server's default, or the stated value."""

    tensor_parallel_size: int
    replicas: int
    kv_cache_dtype: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    kv_offloading_size: int | None = None
    mem_fraction_static: float | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """Engine arguments that the setting changes, in addition to the split."""
        turned = {name: value for name in TURNED if (value := getattr(self, name)) is not None}
        return turned if self.kv_offloading_size is None else {**turned, "kv_offloading_backend": "native"}

    def request(self, base: Request) -> Request:
        turned = {"tensor_parallel_size": self.tensor_parallel_size, **self.changes}
        return replace(base, args=replace(base.args, **turned))


TURNED: Final = tuple(field.name for field in fields(Setting))[2:]
STEPS: Final[Mapping[str, tuple[Any, ...]]] = {
    "kv_cache_dtype": ("fp8",),
    "max_num_seqs": (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024),
    "max_num_batched_tokens": (2048, 4096, 8192, 16384),
    "gpu_memory_utilization": (0.95,),
    "block_size": (32,),
    "enable_prefix_caching": (False,),
    "kv_offloading_size": (),
    "mem_fraction_static": (0.9,),
}
# Flags that are not turned on prefill-first servers: page sizes follow the attention backend.
NOT_PROMPTS_FIRST: Final = frozenset({"block_size"})


@dataclass(frozen=True, slots=True)
class Space:
    """Search space: the candidate values of each flag, including None, and the (TP size, replicas) splits."""

    splits: tuple[tuple[int, int], ...]
    values: Mapping[str, tuple[Any, ...]]

    @property
    def settings(self) -> Iterator[Setting]:
        for (tp, replicas), *picks in product(self.splits, *(self.values[name] for name in TURNED)):
            yield Setting(tp, replicas, *picks)

    def near(self, setting: Setting) -> Iterator[Setting]:
        """Yield settings that differ in one flag: adjacent values of a number, any other value of the rest; the KV
        cache dtype stays.
        """
        for name in TURNED[1:]:
            values, own = self.values[name], getattr(setting, name)
            for value in values:
                if value != own and (len(values) <= 3 or own is None or is_next(values, own, value)):
                    yield replace(setting, **{name: value})


def is_next(values: Sequence[Any], own: Any, value: Any) -> bool:
    return value is None or abs(values.index(value) - values.index(own)) == 1


def is_flag_of(argument: str, server: str) -> bool:
    """True if a server has the argument."""
    return argument in flags_of(server)


def space(
    base: Request, stated: frozenset[str], num_gpus: int, *, fp8: bool, has_prefixes: bool, host: int = 0
) -> Space:
    """Return the search space without stated flags; prefix caching is included only if prompts share prefixes.

    host  bytes of a server's host memory that may store KV
    """
    replicas = gpus_per_rank(base)
    sizes = [size for size in (1, 2, 4, 8, 16) if num_gpus % (size * replicas) == 0]
    if "tensor_parallel_size" in stated:
        sizes = [base.args.tensor_parallel_size]
    values: dict[str, tuple[Any, ...]] = {
        name: (None,) if name in stated else (None, *steps) for name, steps in STEPS.items()
    }
    server, can = server_of(base.release.engine).name, abilities_of(base.release.engine)
    for name in STEPS:
        if not is_flag_of(name, server) or (can.prompts_first is not None and name in NOT_PROMPTS_FIRST):
            values[name] = (None,)
    if not fp8:
        values["kv_cache_dtype"] = (None,)
    if not has_prefixes:
        values["enable_prefix_caching"] = (None,)
    if host:
        values["kv_offloading_size"] = (None, host)
    return Space(tuple((size, num_gpus // (size * replicas)) for size in sizes), values)


def gpus_per_rank(base: Request) -> int:
    """GPUs of a server for each tensor rank: its data-parallel ranks, if they have GPUs of their own."""
    return 1 if base.args.enable_dp_attention else base.args.data_parallel_size
