"""Distribute work over processes: the same results in the same order as in one process, even if a worker is killed."""

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
Jobs = int | Cluster  # number of processes on this machine, or a cluster
MOST_JOBS: Final = 256
AHEAD: Final = 2  # tasks in progress per process: limits the number of pending results
RESTARTS: Final = 3  # of a task whose worker ended before it did


def cores() -> int:
    """Number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def at_most(jobs: Jobs, count: int) -> Jobs:
    """Limit the number of processes to the number of tasks."""
    return jobs if isinstance(jobs, Cluster) else min(jobs, count)


def is_shared(jobs: Jobs) -> bool:
    """True if work runs in other processes."""
    return isinstance(jobs, Cluster) or jobs > 1


def in_order(
    do: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task], jobs: Jobs, *, name: str
) -> Generator[Result, None, None]:
    """Run `do(shared, task)` for every task and yield the results in order; with fewer than two jobs, in this process.

    do and its arguments must be picklable, else their error is raised. Unfinished tasks of a killed worker are repeated
    in new ones. Closing the iterator, or an interrupt, ends the processes; `name` identifies their owner in errors.
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
    waiting: deque[tuple[bytes, Future[Result]]] = deque()
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
    pool: "ProcessPoolExecutor", waiting: "deque[tuple[bytes, Future[Any]]]", queue: Iterator[Task], count: int
) -> None:
    """Submit this many more tasks to the workers, pickled here: a pool that cannot pickle one may never end."""
    from multiprocessing.reduction import ForkingPickler

    for _, task in zip(range(count), queue, strict=False):  # in this order none is lost
        pickled = bytes(ForkingPickler.dumps(task))
        waiting.append((pickled, _submitted(pool, pickled)))


def _redo(pool: "ProcessPoolExecutor", waiting: "deque[tuple[bytes, Future[Any]]]") -> None:
    """Submit tasks without a result to new workers, keeping their positions."""
    from concurrent.futures.process import BrokenProcessPool

    for place, (pickled, future) in enumerate(waiting):
        if isinstance(future.exception(), BrokenProcessPool):
            waiting[place] = pickled, _submitted(pool, pickled)


def _submitted(pool: "ProcessPoolExecutor", pickled: bytes) -> "Future[Any]":
    """Future of a task; if the pool has just broken, it holds that error."""
    from concurrent.futures import Future
    from concurrent.futures.process import BrokenProcessPool

    try:
        with _interrupts_held():  # only this process handles the terminal's interrupt, and ends the others
            return pool.submit(_work, pickled)
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
    """Block interrupts inside, if the system can; processes started inside never receive one."""
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
    """Initialize a worker: its function, no interrupts, and exit when the parent is gone."""
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


def _work(pickled: bytes) -> Any:
    import pickle

    assert _mine is not None
    do, shared = _mine
    return do(shared, pickle.loads(pickled))
