"""Kernels compared with plain torch before a server relies on them.

What a new GPU, driver or release of Triton breaks is seldom all kernels: one does not compile, or one computes
something else. Each function of a backend is called with the tensors of small steps, and so is plain torch's function
of that name, on copies; one that raises or differs is replaced by it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch

# Norm of the difference over the norm of plain torch's result. Assumed, measured on no GPU: a value in bfloat16 is
# rounded by up to 2^-9 of itself, one in fp8 by up to 2^-4; a context of 40 tokens that is one short is found.
LIMIT: Final = 0.05
DIFFERENT: Final = 0.05  # share of whole numbers (tokens, experts) that may differ: two may be equally good
SAMPLING: Final = ("best_tokens", "draw", "nucleus_floors")  # their logits are in the dtype of a backend's for_sampling
READ_ONLY_BYTES: Final = 32 << 20  # larger tensors are weights, which no function writes


class Verified(ModuleType):
    """A backend's module in which plain torch stands for the functions that `compared` finds wrong.

    fallbacks  function -> why it is not used
    """

    def __init__(self, run: ModuleType, plain: ModuleType) -> None:
        super().__init__(run.__name__)
        self.__dict__.update({name: getattr(run, name) for name in run.__all__})
        self.fallbacks: dict[str, str] = {}
        self._run, self._plain = run, plain

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare whatever is called inside `with`, and keep plain torch's function for what is wrong."""
        names = [name for name in self._run.__all__ if callable(getattr(self._plain, name, None))]
        self.__dict__.update({name: partial(self._compare, name) for name in names if name not in self.fallbacks})
        try:
            yield
        finally:
            for name in names:
                self.__dict__[name] = getattr(self._plain if name in self.fallbacks else self._run, name)
            if not self.fallbacks.keys().isdisjoint(SAMPLING):  # in plain torch's dtype, which every kernel reads
                self.__dict__["for_sampling"] = self._plain.for_sampling

    def _compare(self, name: str, *args: Any, **options: Any) -> Any:
        run, plain = getattr(self._run, name), getattr(self._plain, name)
        arguments = [*args, *options.values()]
        before, own = [_copy(value) for value in arguments], [_copy(value) for value in arguments]
        if name in SAMPLING:
            own[0] = self._plain.for_sampling(own[0])
        try:
            expected = plain(*own[: len(args)], **dict(zip(options, own[len(args) :], strict=True)))
        except Exception:  # plain torch has no answer: there is nothing to compare with, nor to stand in
            return run(*args, **options)
        if name in self.fallbacks:
            return self._instead(arguments, own, expected)
        try:
            result = run(*args, **options)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # what fails on the device is raised here
            why = _difference(_tensors(result), _tensors(expected)) or _wrong_writes(arguments, own, before)
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"
        if why is None:
            return result
        self.fallbacks[name] = why
        return self._instead(arguments, own, expected)

    def _instead(self, arguments: list[Any], own: list[Any], expected: Any) -> Any:
        """Plain torch's result, and what it wrote."""
        for value, copied in zip(arguments, own, strict=True):
            if isinstance(value, torch.Tensor) and value is not copied:
                value.copy_(copied)
        return expected


def _copy(value: Any) -> Any:
    is_written = isinstance(value, torch.Tensor) and value.nbytes <= READ_ONLY_BYTES
    return value.clone() if is_written else value


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _tensors(part)] if isinstance(result, tuple) else []


def _wrong_writes(arguments: list[Any], own: list[Any], before: list[Any]) -> str | None:
    """Compare the arguments that plain torch writes, where either function has changed them; others may be used up."""
    for mine, plain, old in zip(arguments, own, before, strict=True):
        if isinstance(mine, torch.Tensor) and mine is not plain:
            mine, plain, old = _numbers(mine), _numbers(plain), _numbers(old)
            is_written = ~_same(plain, old)
            if not is_written.any():
                continue
            is_changed = is_written | ~_same(mine, old)
            if why := _difference([mine[is_changed]], [plain[is_changed]]):
                return why
    return None


def _difference(results: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    """How far results are from plain torch's, where it is too far."""
    if len(results) != len(expected):
        return f"it returns {len(results)} tensors, plain torch {len(expected)}"
    for result, plain in zip(results, expected, strict=True):
        if result.shape != plain.shape:
            return f"its result is {tuple(result.shape)}, plain torch's {tuple(plain.shape)}"
        if not plain.numel():
            continue
        if not plain.dtype.is_floating_point:
            share = (result != plain).float().mean().item()
            if share > DIFFERENT:
                return f"{share:.0%} of its whole numbers differ from plain torch's"
            continue
        result, plain = _numbers(result), _numbers(plain)
        is_same = _same(result, plain)
        error = torch.where(is_same, 0, result - plain).norm() / plain[plain.isfinite()].norm().clamp_(min=1e-6)
        if not error.item() <= LIMIT:  # a NaN is no small number
            return f"it differs from plain torch by {error.item():.2g} of its norm"
    return None


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.is_floating_point else tensor


def _same(mine: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    return (mine == plain) | (mine.isnan() & plain.isnan())


def fallbacks_of(module: ModuleType) -> Mapping[str, str]:
    """Functions of a backend that plain torch stands for, and why."""
    return module.fallbacks if isinstance(module, Verified) else {}
