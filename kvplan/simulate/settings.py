"""The flags that a server's throughput depends on, and the values that they may take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Final

from kvplan.planning.plan import Request


@dataclass(frozen=True, slots=True)
class Setting:
    """Flags of a server and how many such servers the GPUs make; None: as the server takes it, or as stated."""

    tensor_parallel_size: int
    replicas: int
    kv_cache_dtype: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    kv_offloading_size: int | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """Engine arguments that are turned, beside the split."""
        turned = {name: value for name in TURNED if (value := getattr(self, name)) is not None}
        return turned if self.kv_offloading_size is None else {**turned, "kv_offloading_backend": "lmcache"}

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
}


@dataclass(frozen=True, slots=True)
class Space:
    """All settings that may be chosen: the values of each flag, None among them, and the splits."""

    splits: tuple[tuple[int, int], ...]
    values: Mapping[str, tuple[Any, ...]]

    @property
    def settings(self) -> Iterator[Setting]:
        for (tp, replicas), *picks in product(self.splits, *(self.values[name] for name in TURNED)):
            yield Setting(tp, replicas, *picks)

    def near(self, setting: Setting) -> Iterator[Setting]:
        """Settings one flag away: the next value of a number, any other of what is no number; the precision stays."""
        for name in TURNED[1:]:
            values, own = self.values[name], getattr(setting, name)
            for value in values:
                if value != own and (len(values) <= 3 or own is None or is_next(values, own, value)):
                    yield replace(setting, **{name: value})


def is_next(values: Sequence[Any], own: Any, value: Any) -> bool:
    return value is None or abs(values.index(value) - values.index(own)) == 1


def space(
    base: Request, stated: frozenset[str], num_gpus: int, *, fp8: bool, has_prefixes: bool, host: int = 0
) -> Space:
    """What may be turned: nothing that is stated, and prefix caching only where prompts share something.

    host  bytes beside the GPUs of a server that may hold prompts
    """
    sizes = [size for size in (1, 2, 4, 8, 16) if num_gpus % size == 0]
    if "tensor_parallel_size" in stated:
        sizes = [base.args.tensor_parallel_size]
    values: dict[str, tuple[Any, ...]] = {
        name: (None,) if name in stated else (None, *steps) for name, steps in STEPS.items()
    }
    if not fp8:
        values["kv_cache_dtype"] = (None,)
    if not has_prefixes:
        values["enable_prefix_caching"] = (None,)
    if host:
        values["kv_offloading_size"] = (None, host)
    return Space(tuple((size, num_gpus // size) for size in sizes), values)
