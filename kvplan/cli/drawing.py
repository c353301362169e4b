"""Requirements of commands that draw, checked before their work starts."""

from importlib.util import find_spec

from kvplan.core.errors import EnvironmentProblem

FIGURES = {".png": "png", ".svg": "svg"}  # supported suffixes, and the format of each


def require_libraries(flag: str, *names: str) -> None:
    """Raise EnvironmentProblem if a library of the report extra is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            f"{flag}", f"{' and '.join(missing)} is not installed", "pip install '.[report]' in kvplan's sources"
        )
