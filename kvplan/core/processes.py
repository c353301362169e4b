"""Work shared by processes: the same results in the same order as one process gives, also when a worker is killed."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvplan.core.cluster import Cluster
from kvplan.core.errors import EnvironmentProblem

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")
Jobs = int | Cluster  # processes of this machine, or those of a cluster
MOST_JOBS: Final = 256
AHEAD: Final = 2  # tasks under way for each process: results do not pile up
RESTARTS: Final = 3  # of a task whose worker ended before it did


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def at_most(jobs: Jobs, count: int) -> Jobs:
    """No more processes than there are tasks."""
    return jobs if isinstance(jobs, Cluster) else min(jobs, count)


def is_shared(jobs: Jobs) -> bool:
    """Whether work leaves this process."""
    return isinstance(jobs, Cluster) or jobs > 1


def in_order(
    do: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task], jobs: Jobs, *, name: str
) -> Generator[Result, None, None]:
    """`do(shared, task)` of every task, in their order; with fewer than two jobs in this process.

    do and what it takes must be able to travel to another process. What a killed worker had under way is done again in
    new ones. Closing the iterator, or an interrupt, ends the processes; `name` is whose they are, for an error.
    """
    if isinstance(jobs, Cluster):
        yield from jobs.in_order(do, shared, tasks, name=name)
        return
    if jobs < 2:
        for task in tasks:
            yield do(shared, task)
        return
    yield from _by_workers(do, shared, tasks, jobs, name)


def _by_workers(
    do: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task], jobs: int, name: str
) -> Generator[Result, None, None]:
    from concurrent.futures.process import BrokenProcessPool

    queue = iter(tasks)
    pool = _pool(do, shared, jobs)
    waiting: deque[tuple[Task, Future[Result]]] = deque()
    restarts = 0
    try:
        _fill(pool, waiting, queue, AHEAD * jobs)
        while waiting:
            try:
                result = waiting[0][1].result()
            except BrokenProcessPool as error:
                if restarts == RESTARTS:
                    raise EnvironmentProblem(
                        name, "a worker process ended early (out of memory?)", "free memory or use --jobs 1"
                    ) from error
                restarts += 1
                pool.shutdown(wait=True)
                pool = _pool(do, shared, jobs)
                _redo(pool, waiting)
                continue
            waiting.popleft()
            restarts = 0
            _fill(pool, waiting, queue, 1)
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _fill(
    pool: "ProcessPoolExecutor", waiting: "deque[tuple[Task, Future[Any]]]", queue: Iterator[Task], count: int
) -> None:
    """Hand so many more tasks to the workers."""
    for _, task in zip(range(count), queue, strict=False):  # in this order none is lost
        waiting.append((task, _submitted(pool, task)))


def _redo(pool: "ProcessPoolExecutor", waiting: "deque[tuple[Task, Future[Any]]]") -> None:
    """Hand those tasks that have no result to new workers, each at its place."""
    from concurrent.futures.process import BrokenProcessPool

    for place, (task, future) in enumerate(waiting):
        if isinstance(future.exception(), BrokenProcessPool):
            waiting[place] = task, _submitted(pool, task)


def _submitted(pool: "ProcessPoolExecutor", task: Task) -> "Future[Any]":
    """A task's result to come; that of a pool that has just broken is the error."""
    from concurrent.futures import Future
    from concurrent.futures.process import BrokenProcessPool

    try:
        with _interrupts_held():  # the terminal's interrupt is this process's to handle: it ends the others
            return pool.submit(_work, task)
    except BrokenProcessPool as error:
        future = Future[Any]()
        future.set_exception(error)
        return future


def _pool(do: Callable[[Any, Any], Any], shared: Any, jobs: int) -> "ProcessPoolExecutor":
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (do, shared))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Interrupts wait inside, where the system can hold them; processes started inside never get one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in a worker ------------------------------------------------------------------------------------------------------

_mine: tuple[Callable[[Any, Any], Any], Any] | None = None


def _begin(do: Callable[[Any, Any], Any], shared: Any) -> None:
    """A worker's first step: what it does, no interrupts, and an end when the parent is gone."""
    global _mine
    import multiprocessing

    _mine = do, shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def _work(task: Any) -> Any:
    assert _mine is not None
    do, shared = _mine
    return do(shared, task)
