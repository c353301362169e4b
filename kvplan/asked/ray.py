"""A model as Ray Serve configures it: LLMConfig in Python, `llm_configs` in YAML.

Source: docs.ray.io, "Serving LLMs": model_loading_config names the model, engine_kwargs are the engine's arguments, and
accelerator_type the GPU.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from kvplan.core import entries
from kvplan.servers.base import SERVERS
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.command import Resources

CLASS: Final = "LLMConfig"
ACCELERATOR: Final = "accelerator_type"
KEYS: Final = ("model_loading_config", "engine_kwargs", ACCELERATOR)


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's arguments, by name, with the model that is loaded."""
    loading, arguments = config.get("model_loading_config"), config.get("engine_kwargs")
    values = dict(arguments) if isinstance(arguments, Mapping) else {}
    if isinstance(loading, Mapping):
        source = loading.get("model_source")
        address = source.get("bucket_uri") if isinstance(source, Mapping) else source
        values["model"] = address or loading.get("model_id")
    return values


def server_of(config: Mapping[str, Any]) -> str:
    """The server that a configuration's class is named after (its name and Server), else the default one."""
    name = str(config.get("server_cls", "")).lower()
    return next((server for server in SERVERS if server in name), DEFAULT)


def typed(value: Any) -> Any:
    """A value of YAML that was read as text: 8192, true, or a mapping of such."""
    if isinstance(value, Mapping):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return value


def resources_of(accelerator: object, key: str = ACCELERATOR) -> Resources | None:
    """The GPU that an accelerator's name stands for; None if the catalog has no GPU of that name.

    key  where the name stands
    """
    name = str(accelerator).removeprefix("NVIDIA-")
    known = entries.resolve(entries.locate("gpus.yaml"), name)
    return None if known is None else Resources(known, f"{key}: {name}", None, 1, 1)
