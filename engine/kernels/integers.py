"""Whole numbers of a launch; Triton's own functions for them run an import at every call."""


def cdiv(amount: int, size: int) -> int:
    """How many pieces of `size` hold this amount."""
    return -(-amount // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is no less than a number from 1 on."""
    return 1 << (number - 1).bit_length()
