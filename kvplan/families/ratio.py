"""Ratios in configs: factors that widths are multiplied by."""

from kvplan.families.config import Config


def ratio(config: Config, key: str, default: float, high: float = 1024) -> float:
    """A factor in (0, high]."""
    value = config.number(key, default)
    if not 0 < value <= high:
        raise config.fail(key, f"must be above 0 and at most {high:g} ({value}); correct the config")
    return value
