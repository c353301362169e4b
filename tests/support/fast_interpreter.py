"""Triton's interpreter at twice the speed: `hurry()`, once, in a process that interprets.

At every call of a kernel's function the interpreter lays its own functions over triton's language, some 2,000 names
each time, which takes as long as the kernel. Here it does so once for each module of kernels, for good: what it lays is
the same at each call, and nothing in these processes wants the language as it was. numpy's name of a dtype is looked up
once as well: the interpreter makes the table of all of them anew for every value.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any


class NothingToRestore:
    def restore(self) -> None:
        pass


def hurry() -> None:
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    lay_over = interpreter._patch_lang
    laid: set[int] = set()  # modules, by their names' addresses

    def once(function: Any) -> NothingToRestore:
        names = id(function.__globals__)
        if names not in laid:
            laid.add(names)
            lay_over(function)
        return NothingToRestore()

    look_up = interpreter._get_np_dtype
    of_scalars: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if type(scalar) is not tl.dtype:  # a pointer
            return look_up(dtype)
        if scalar.name not in of_scalars:
            of_scalars[scalar.name] = look_up(scalar)
        return of_scalars[scalar.name]

    interpreter._patch_lang = once
    interpreter._get_np_dtype = numpy_dtype
    with suppress(AttributeError):  # triton 3.6: overflow checks cost a third of the time
        interpreter.interpreter_builder.options = replace(
            interpreter.interpreter_builder.options, sanitize_overflow=False
        )
