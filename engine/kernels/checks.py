"""What the launchers ask of their arguments: a wrong shape or dtype is a ValueError here, not a wrong number later.

A model launches some hundred kernels per step, whose tensors look alike from layer to layer and from step to step: a
launcher checks its arguments, and derives from them what it compiles its kernel with, once for each set of layouts.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

import torch

from kvplan.core.errors import EnvironmentProblem

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STORED = (*FLOATS, torch.float8_e4m3fn)
FIRST_FP8_ARCH = 89
MOST_LAYOUTS = 1024  # that a check remembers: steps with prompts bring new ones without end

Ts = TypeVarTuple("Ts")
R = TypeVar("R")
LaunchArgs = dict[str, Any]  # what a kernel takes beside tensors and numbers of this launch, by its parameters' names
_remembered: list[dict[object, Any]] = []  # what each check has answered


def once_per_layout(check: Callable[[*Ts], R]) -> Callable[[*Ts], R]:
    """Call a check once for each set of arguments, tensors being alike in shape, strides, dtype, and device.

    check  may ask nothing else of a tensor, neither its values nor where it lies, and of a GPU what never changes.
           What it raises is not remembered
    """
    answers: dict[object, tuple[R]] = {}
    _remembered.append(answers)

    @wraps(check)
    def checked(*args: *Ts) -> R:
        key = (*[(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in args],)
        answer = answers.get(key)
        if answer is None:
            answer = (check(*args),)
            if len(answers) >= MOST_LAYOUTS:
                answers.clear()
            answers[key] = answer
        return answer[0]

    return checked


def strides(name: str, tensor: torch.Tensor, *dims: str) -> LaunchArgs:
    """A tensor's first strides as a kernel names them: stride_NAME_DIM."""
    return {f"stride_{name}_{dim}": stride for dim, stride in zip(dims, tensor.stride(), strict=False)}


def forget() -> None:
    """Check everything again: for benchmarks, and where another GPU is pretended."""
    for answers in _remembered:
        answers.clear()


def need(argument: str, ok: bool, what: str, value: object, *words: object) -> None:
    """Raise `argument: must be WHAT (VALUE)` unless ok; `told` fills the braces in `what`."""
    if not ok:
        raise ValueError(f"{argument} must be {what.format(*words)} ({value})")


def need_rows(argument: str, tensor: torch.Tensor, dims: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """A tensor of so many dimensions and one of the dtypes, its last dimension contiguous."""
    need(argument, tensor.dim() == dims, "of {} dimensions", tensor.shape, dims)
    need(argument, tensor.dtype in dtypes, "of one of {}", tensor.dtype, dtypes)
    need(argument, tensor.stride(-1) == 1, "contiguous in its last dimension, not of these strides", tensor.stride())


def need_shape(argument: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A contiguous tensor of exactly this shape."""
    need(argument, tensor.shape == shape, "of shape {}", tensor.shape, shape)
    need(argument, tensor.is_contiguous(), "contiguous, not of these strides", tensor.stride())


def need_one_device(**tensors: torch.Tensor | None) -> None:
    """All of them on the device of the first."""
    (first, device), *others = ((name, tensor.device) for name, tensor in tensors.items() if tensor is not None)
    for name, other in others:
        need(name, other == device, "on {} like {}", other, device, first)


def need_cache(argument: str, cache: torch.Tensor, dims: int, arch: int) -> None:
    """A paged cache with a block size the kernels can tile, of a dtype that GPUs of this arch have."""
    need_rows(argument, cache, dims, STORED)
    need_supported(argument, cache.dtype, arch)
    need(argument, is_block_size(cache.shape[1]), "of block size 16, 32, 64, ...", cache.shape[1])


def is_block_size(tokens: int) -> bool:
    """A power of two, so that a token's page is a shift away, and no less than the tensor cores' 16 rows."""
    return tokens >= 16 and tokens & (tokens - 1) == 0


def need_supported(argument: str, dtype: torch.dtype, arch: int) -> None:
    """Refuse float8 on a GPU without it, by name: the compiler's own message names neither the argument nor a cure.

    arch is the compute capability in tenths: 90 for 9.0. Raises EnvironmentProblem.
    """
    if dtype == torch.float8_e4m3fn and arch < FIRST_FP8_ARCH:
        raise EnvironmentProblem(
            f"sm_{arch}: {argument} is {dtype}, which these GPUs cannot convert; "
            f"keep the KV cache in the model's dtype, or use a GPU of compute capability 8.9 or newer"
        )


def need_out(out: torch.Tensor | None, shape: tuple[int, ...], q: torch.Tensor) -> None:
    """What a kernel asks of the tensor that it is to write what it makes of q into, if it is given one."""
    if out is not None:
        need_shape("out", out, shape)
        need("out", out.dtype == q.dtype, "{} like q", out.dtype, q.dtype)
        need_one_device(q=q, out=out)


def need_unscaled(dtype: torch.dtype, k_scale: float, v_scale: float) -> None:
    """Only a float8 cache is scaled: elsewhere a scale would be stored nowhere and applied once."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        need(name, scale > 0, "above 0", scale)
        need(name, scale == 1.0 or dtype == torch.float8_e4m3fn, "1.0 for a {} cache", scale, dtype)


def need_table(block_tables: torch.Tensor, context_lens: torch.Tensor) -> None:
    """block_tables [num_seqs, max_blocks] and context_lens [num_seqs], both int32."""
    need_rows("block_tables", block_tables, 2, (torch.int32,))
    need_shape("context_lens", context_lens, (block_tables.shape[0],))
    need("context_lens", context_lens.dtype == torch.int32, "int32", context_lens.dtype)


def need_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int | None,
    k_scale: float,
    v_scale: float,
    arch: int,
) -> int:
    """What decode and prefill ask alike; returns the number of query heads per KV head."""
    need_rows("q", q, 3, FLOATS)
    need_cache("k_cache", k_cache, 4, arch)
    need_cache("v_cache", v_cache, 4, arch)
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    need("q", num_heads % num_kv_heads == 0, "of a multiple of {} heads", num_heads, num_kv_heads)
    need("k_cache", k_cache.shape[3] == head_dim, "of head_dim {} like q", k_cache.shape[3], head_dim)
    need("k_cache", k_cache.dtype in (q.dtype, torch.float8_e4m3fn), "{} or float8_e4m3fn", k_cache.dtype, q.dtype)
    need("v_cache", v_cache.shape[:3] == k_cache.shape[:3], "of k_cache's blocks and heads", v_cache.shape)
    need("v_cache", v_cache.dtype == k_cache.dtype, "{} like k_cache", v_cache.dtype, k_cache.dtype)
    need_table(block_tables, context_lens)
    if sinks is not None:
        need_shape("sinks", sinks, (num_heads,))
    need("window", window is None or window >= 1, "at least 1", window)
    need_unscaled(k_cache.dtype, k_scale, v_scale)
    need_one_device(
        q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, context_lens=context_lens, sinks=sinks
    )
    return int(num_heads // num_kv_heads)
