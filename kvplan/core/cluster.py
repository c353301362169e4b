"""Distribute work over a Ray cluster: the same results in the same order, even if a worker or a node is killed.

The counterpart of `kvplan.core.processes` for several machines; Ray itself restarts the task of a killed worker.
Ray is imported only if a cluster is requested.
"""

import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from typing import Any, Final, TypeVar

from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import plural

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")
AHEAD: Final = 2  # tasks in progress per core
RESTARTS: Final = 3  # of a task whose worker or node ended before it did
OPTION: Final = "--ray"
START: Final = "start a cluster with `ray start --head`, or remove --ray"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster: host:port of its head, ray://host:port of its client server, auto or local.

    limit  maximum concurrent tasks; None: two per core
    """

    address: str
    limit: int | None = None

    def in_order(
        self, do: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task], *, name: str
    ) -> Generator[Result, None, None]:
        """Run `do(shared, task)` for every task, yielding results in order; closing the iterator cancels the rest."""
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
                        name, "a worker of the Ray cluster ended early", "free its memory, or remove --ray"
                    ) from ended
                waiting.popleft()
                if error is not None:
                    raise error
                waiting.extend(remote.remote([common], task) for task in islice(queue, 1))
                yield result
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)


@contextmanager
def connection(cluster: Cluster) -> Iterator[str]:
    """Connect to a cluster and leave it at the end; yield what it is: "Ray started on this machine, 2 CPUs"."""
    was_connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    ray = connected(cluster.address)
    try:
        cpus = plural(int(ray.cluster_resources().get("CPU", 0)), "CPU")
        if cluster.address == LOCAL:
            yield f"Ray started on this machine, {cpus}"
        else:
            where = ray.get_runtime_context().gcs_address if cluster.address == "auto" else cluster.address
            num_nodes = sum(node["Alive"] for node in ray.nodes())
            yield f"Ray cluster found at {where}, {plural(num_nodes, 'node')}, {cpus}"
    finally:
        if not was_connected:
            ray.shutdown()


def connected(address: str) -> Any:
    """Connect Ray as a driver of this cluster until the process ends, and return the module."""
    if find_spec("ray") is None:
        raise EnvironmentProblem(OPTION, "ray is not installed", "pip install '.[ray]' in kvplan's sources")
    reach(address)
    import logging

    try:
        import ray

        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise _unreachable(address, error) from None
        problem = f"Ray cannot write {printable(str(error.filename or 'its files'))} ({error.strerror})"
        raise EnvironmentProblem(f"{OPTION} {address}", problem, "set HOME and TMPDIR to writable folders") from None
    except Exception as error:  # Ray raises bare ones, too: that a node did not start in time
        raise _unreachable(address, error) from None
    return ray


def _unreachable(address: str, error: Exception) -> EnvironmentProblem:
    """What is wrong with a cluster that Ray can neither reach nor start, in the first line of its own words."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    problem = "Ray did not start here" if address == LOCAL else "no Ray cluster answers there"
    return EnvironmentProblem(f"{OPTION} {address}", f"{problem} ({reason})", START)


LOCAL: Final = "local"
AUTO: Final = ("auto", LOCAL)  # Ray itself looks for a cluster, or starts one
FORM: Final = re.compile(r"(?:ray://)?(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def check_address(address: str) -> None:
    """Raise UsageError if it is not a cluster address."""
    match = FORM.fullmatch(address)
    if address not in AUTO and (match is None or not 0 < int(match["port"]) < 1 << 16):
        raise UsageError(OPTION, f"names no cluster ({printable(repr(address), 60)})", "write host:port, auto or local")


def reach(address: str) -> None:
    """Raise EnvironmentProblem if nothing listens: Ray itself would retry for minutes."""
    match = FORM.fullmatch(address)
    if match is None:
        return  # auto, for which Ray responds at once
    import socket

    try:
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=10).close()
    except (OSError, UnicodeError) as error:
        raise EnvironmentProblem(f"{OPTION} {address}", f"nothing answers there ({error})", START) from None


# --- in a worker ------------------------------------------------------------------------------------------------------

_mine: dict[Any, tuple[Callable[[Any, Any], Any], Any]] = {}


def _work(common: list[Any], task: Any) -> tuple[Any, KvplanError | None]:
    """Return a result and an error of this package, one of which is None."""
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
