"""What a server is to load."""

from pathlib import PurePath

from kvplan.models import catalog
from kvplan.models.spec import ModelSpec


def model_id(spec: ModelSpec) -> str:
    """The Hub id or directory as the user named it; a bare catalog name stands for its Hub id."""
    name = spec.served_name
    path = PurePath(name)
    if path.name == "config.json":
        return str(path.parent)
    if "/" in name or catalog.find(name) is None:
        return name
    return str(catalog.facts(name)["id"])
