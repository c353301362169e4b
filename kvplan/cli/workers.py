"""Workers of a command: processes on this machine, or a Ray cluster."""

from kvplan.core.cluster import Cluster, check_address
from kvplan.core.processes import MOST_JOBS, Jobs, cores
from kvplan.core.units import parse_count


def workers_of(jobs: str | None, ray: str | None) -> Jobs:
    """Number of workers: --jobs, else all cores of this machine or of the cluster."""
    limit = None if jobs is None else parse_count(jobs, "--jobs", MOST_JOBS)
    if ray is None:
        return cores() if limit is None else limit
    check_address(ray)
    return Cluster(ray, limit)
