"""Work of several processes: its results in order, whatever becomes of a worker."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvplan.core.errors import EnvironmentProblem
from kvplan.core.processes import in_order


def square(base: int, number: int) -> int:
    return base + number * number


def killed_once(folder: str, number: int) -> int:
    """The third kills its worker the first time it is asked."""
    mark = Path(folder) / "killed"
    if number == 3 and not mark.exists():
        mark.touch()
        os._exit(1)
    return number


def always_killed(_: int, number: int) -> int:
    if number == 1:
        os._exit(1)
    return number


def test_the_same_results_in_the_same_order_with_any_number_of_processes() -> None:
    expected = [100, 101, 104, 109, 116, 125, 136]
    assert list(in_order(square, 100, range(7), 1, name="x")) == expected
    assert list(in_order(square, 100, range(7), 2, name="x")) == expected


def test_a_worker_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    assert list(in_order(killed_once, str(tmp_path), range(9), 2, name="x")) == list(range(9))
    assert (tmp_path / "killed").exists()


@pytest.mark.full
def test_a_task_that_kills_every_worker_is_one_line() -> None:
    with pytest.raises(EnvironmentProblem, match="a worker process ended early"):
        list(in_order(always_killed, 0, range(4), 2, name="x"))


def called(base: int, task: Callable[[], int]) -> int:
    return base + task()


def test_a_task_that_cannot_be_pickled_is_its_error() -> None:
    """A pool that pickles tasks itself may wait forever for a thread that failed (Python 3.11)."""
    every: list[Callable[[], int]] = [lambda: 1] * 20
    last: list[Callable[[], int]] = [int, int, int, int, lambda: 1]
    for tasks in (every, last):
        with pytest.raises(AttributeError, match="Can't pickle local object"):
            list(in_order(called, 0, tasks, 2, name="x"))


def test_tasks_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = in_order(square, 0, tasks(), 2, name="x")
    assert next(results) == 0
    assert len(taken) <= 6  # two for each process, and one for what was given back
    results.close()
