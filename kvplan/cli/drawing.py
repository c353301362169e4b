"""What a command that draws needs, checked before its work starts."""

from importlib.util import find_spec

from kvplan.core.errors import EnvironmentProblem

FIGURES = {".png": "png", ".svg": "svg"}  # suffixes that there may be, and the format each means


def require_libraries(flag: str, *names: str) -> None:
    """Refuse what was asked for where a library of the report extra is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            f"{flag}", f"{' and '.join(missing)} is not installed", "pip install '.[report]' in kvplan's sources"
        )
