"""Work shared by a Ray cluster: the same results in the same order, also when a worker or a node is killed.

The second way to do what `kvplan.core.processes` does on one machine; Ray itself does a killed worker's task again.
Ray is imported when a cluster is asked for and never before.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any, Final, TypeVar

from kvplan.core.errors import EnvironmentProblem, KvplanError

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")
AHEAD: Final = 2  # tasks under way for each core
RESTARTS: Final = 3  # of a task whose worker or node ended before it did
OPTION: Final = "--ray"
START: Final = "start a cluster with `ray start --head`, or leave --ray out"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster: host:port of its head, ray://host:port of its client server, or auto.

    limit  most tasks at once; None: two for each core
    """

    address: str
    limit: int | None = None

    def in_order(
        self, do: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task], *, name: str
    ) -> Generator[Result, None, None]:
        """`do(shared, task)` of every task, in their order; closing the iterator cancels what is under way."""
        ray = connected(self.address)
        common = ray.put((do, shared))
        remote = ray.remote(num_cpus=1, max_retries=RESTARTS)(_work)
        queue = iter(tasks)
        waiting: deque[Any] = deque()
        ahead = self.limit or AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        try:
            waiting.extend(remote.remote([common], task) for task in islice(queue, ahead))
            while waiting:
                try:
                    result, error = ray.get(waiting[0])
                except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as ended:
                    raise EnvironmentProblem(
                        name, "a worker of the Ray cluster ended early", "free its memory, or leave --ray out"
                    ) from ended
                waiting.popleft()
                if error is not None:
                    raise error
                waiting.extend(remote.remote([common], task) for task in islice(queue, 1))
                yield result
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)


def connected(address: str) -> Any:
    """Ray, as a driver of this cluster until the process ends."""
    if find_spec("ray") is None:
        raise EnvironmentProblem(OPTION, "ray is not installed", "pip install '.[ray]' in kvplan's sources")
    reach(address)
    import logging

    import ray

    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise EnvironmentProblem(
                f"{OPTION} {address}", f"no Ray cluster answers there ({str(error).splitlines()[0]})",
                START,
            ) from None  # fmt: skip
    return ray


def reach(address: str) -> None:
    """EnvironmentProblem where nothing listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # auto, which Ray answers at once
    import socket

    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentProblem(f"{OPTION} {address}", f"nothing answers there ({error})", START) from None


# --- in a worker ------------------------------------------------------------------------------------------------------

_mine: dict[Any, tuple[Callable[[Any, Any], Any], Any]] = {}


def _work(common: list[Any], task: Any) -> tuple[Any, KvplanError | None]:
    """A result, or the error of this package that it ends with."""
    [reference] = common
    if reference not in _mine:
        import ray

        _mine.clear()
        _mine[reference] = ray.get(reference)
    do, shared = _mine[reference]
    try:
        return do(shared, task), None
    except KvplanError as error:
        return None, error
