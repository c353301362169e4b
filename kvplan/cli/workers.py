"""Workers of a command: processes on this machine, or a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvplan.cli import output
from kvplan.core.cluster import OPTION, Cluster, check_address, connection
from kvplan.core.processes import MOST_JOBS, Jobs, cores
from kvplan.core.units import parse_count


def workers_of(jobs: str | None, ray: str | None) -> Jobs:
    """Number of workers: --jobs, else all cores of this machine or of the cluster."""
    limit = None if jobs is None else parse_count(jobs, "--jobs", MOST_JOBS)
    if ray is None:
        return cores() if limit is None else limit
    check_address(ray)
    return Cluster(ray, limit)


@contextmanager
def at_work(jobs: Jobs, *, quiet: bool) -> Iterator[None]:
    """Connect to a cluster, if it is one, say which, and keep its messages from standard output. A cluster that cannot
    be reached is an error before the answer begins.
    """
    if not isinstance(jobs, Cluster):
        yield
        return
    with output.answers_only(), connection(jobs) as description:
        if not quiet:
            output.tell("note", f"{OPTION} {jobs.address}: {description}")
        yield
