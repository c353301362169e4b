"""Who does the work of a command: processes of this machine, or a Ray cluster."""

from kvplan.core.cluster import OPTION, Cluster
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.processes import MOST_JOBS, Jobs, cores
from kvplan.core.units import parse_count


def workers_of(jobs: str | None, ray: str | None) -> Jobs:
    """As stated; all cores of this machine, or of the cluster."""
    limit = None if jobs is None else parse_count(jobs, "--jobs", MOST_JOBS)
    if ray is None:
        return cores() if limit is None else limit
    if not ray.strip() or ray.startswith("-"):
        raise UsageError(OPTION, f"names no cluster ({printable(repr(ray), 40)})", "write host:port or auto")
    return Cluster(ray, limit)
