"""Triton's interpreter at twice the speed: `hurry()`, once, in a process that interprets.

At every call of a kernel's function the interpreter lays its own functions over triton's language, some 2,000 names
each time, which takes as long as the kernel. Here it does so once for each module of kernels, for good: what it lays is
the same at each call, and nothing in these processes wants the language as it was.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any


class NothingToRestore:
    def restore(self) -> None:
        pass


def hurry() -> None:
    import triton.runtime.interpreter as interpreter

    lay_over = interpreter._patch_lang
    laid: set[int] = set()  # modules, by their names' addresses

    def once(function: Any) -> NothingToRestore:
        names = id(function.__globals__)
        if names not in laid:
            laid.add(names)
            lay_over(function)
        return NothingToRestore()

    interpreter._patch_lang = once
    with suppress(AttributeError):  # triton 3.6: overflow checks cost a third of the time
        interpreter.interpreter_builder.options = replace(
            interpreter.interpreter_builder.options, sanitize_overflow=False
        )
